"""float32 functions for kernels: branch-free, so that LLVM vectorizes loops that call them; the same bits in any lane.

Errors against float64 over the stated ranges are measured by tests/test_mathf.py: exp, expm1, log, log1p, sigmoid and
tanh stay within 2 ulp. exp overflows to inf above 88.7228 and passes through the subnormals to 0 below -103.97. NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyggml.cpu.simd import F0, F1, fabs, fma, from_bits, helper, itof, rint, to_bits, to_i32

LOG2E = np.float32(1.44269504088896341)
LN2_HI = np.float32(0.693145751953125)  # the product with |n| <= 150 is exact
LN2_LO = np.float32(1.42860682030941723e-6)
EXP_MIN, EXP_MAX = np.float32(-104.0), np.float32(89.0)
E2, E3, E4, E5, E6, E7 = (np.float32(c) for c in (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040))
I127, I23, I1 = np.int32(127), np.int32(23), np.int32(1)
SQRT_HALF_BITS = np.int32(0x3F3504F3)
MANTISSA = np.int32(0x007FFFFF)
TINY, SUBNORMAL_SCALE, SUBNORMAL_EXP = np.float32(1.17549435e-38), np.float32(2.0 ** 25), np.float32(25)
INF = np.float32(np.inf)
NAN = np.float32(np.nan)
HALF, TWO, TWENTY = np.float32(0.5), np.float32(2), np.float32(20)
L3, L4, L5, L6, L7, L8, L9, L10, L11 = (np.float32(c) for c in (
    3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1, -1.2420140846e-1, 1.1676998740e-1,
    -1.1514610310e-1, 7.0376836292e-2))
GELU_A, GELU_B = np.float32(0.79788456080286535588), np.float32(0.044715)


@helper
def pow2(n: Any) -> Any:
    """2^n of an int32 n in [-126, 127]."""
    return from_bits((n + I127) << I23)


@helper
def exp_parts(x: Any) -> Any:
    """r and n with exp(x) = 2^n exp(r), |r| <= ln(2)/2, for x in [-104, 89]."""
    n = rint(x * LOG2E)
    return fma(n, -LN2_LO, fma(n, -LN2_HI, x)), to_i32(n)


@helper
def exp_tail(r: Any) -> Any:
    """exp(r) - 1 for |r| <= ln(2)/2."""
    return fma(fma(fma(fma(fma(fma(E7, r, E6), r, E5), r, E4), r, E3), r, E2), r * r, r)


@helper
def exp(x: Any) -> Any:
    """e^x."""
    c = EXP_MIN if x < EXP_MIN else x
    c = EXP_MAX if c > EXP_MAX else c
    r, n = exp_parts(c)
    half = n >> I1  # in two factors, so that results below the normal range round once, at the end
    return (exp_tail(r) + F1) * pow2(half) * pow2(n - half)


@helper
def expm1(x: Any) -> Any:
    """e^x - 1, exact to rounding near 0."""
    c = EXP_MIN if x < EXP_MIN else x
    c = EXP_MAX if c > EXP_MAX else c
    r, n = exp_parts(c)
    half = n >> I1
    a, b = pow2(half), pow2(n - half)
    s = a * b
    return fma(s, exp_tail(r), s - F1) if s < INF else (exp_tail(r) + F1) * a * b


@helper
def log(x: Any) -> Any:
    """Natural logarithm; -inf at 0, NaN below."""
    small = x < TINY
    y = x * SUBNORMAL_SCALE if small else x
    bits = to_bits(y)
    e = (bits - SQRT_HALF_BITS) >> I23  # so that the mantissa lies in [sqrt(1/2), sqrt(2))
    m = from_bits(bits - (e << I23))
    n = itof(np.int64(e)) - (SUBNORMAL_EXP if small else F0)
    r = log_tail(m - F1, n)
    r = -INF if x == F0 else r
    r = NAN if x < F0 else r
    r = INF if x == INF else r
    return x if x != x else r


@helper
def log_tail(f: Any, n: Any) -> Any:
    """log(1 + f) + n ln 2 for 1 + f in [sqrt(1/2), sqrt(2))."""
    z = f * f
    p = fma(fma(fma(fma(fma(fma(fma(fma(L11, f, L10), f, L9), f, L8), f, L7), f, L6), f, L5), f, L4), f, L3)
    y = fma(n, LN2_LO, f * z * p)
    return fma(n, LN2_HI, fma(-HALF, z, y) + f)


@helper
def log1p(x: Any) -> Any:
    """log(1 + x), exact to rounding near 0."""
    u = F1 + x
    fix = (x - (u - F1)) / u
    r = log(u) + (fix if fabs(x) < INF else F0)
    return x if u == F1 else r


@helper
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return F1 / (F1 + exp(-x))


@helper
def silu(x: Any) -> Any:
    """x sigmoid(x)."""
    return x / (F1 + exp(-x))


@helper
def tanh(x: Any) -> Any:
    """Hyperbolic tangent, odd to the last bit."""
    a = fabs(x)
    c = TWENTY if a > TWENTY else a
    m = expm1(c + c)
    t = m / (m + TWO)
    return -t if x < F0 else t


@helper
def softplus(x: Any) -> Any:
    """log(1 + e^x); x itself above 20, as ggml (and every Mamba2 implementation) has it."""
    return x if x > TWENTY else log1p(exp(x))


@helper
def gelu(x: Any) -> Any:
    """The tanh form of GELU, as ggml_gelu."""
    return HALF * x * (F1 + tanh(GELU_A * x * fma(GELU_B * x, x, F1)))
