"""float32 functions for kernels: branch-free, so that LLVM vectorizes loops that call them; the same bits in any lane.

Largest errors against float64, as tests/test_mathf.py measures them over all exponents, subnormal results included: exp
and log 1 ulp, expm1, log1p and tanh 1.5, softplus 2, sigmoid and silu 2 above -88.72 (below they give 0 for less than
3e-37). gelu is as exact as the float32 argument of its sigmoid: 3 ulp above -1, and within 1e-7 further left. exp overflows
to inf above 88.7228 and passes through the subnormals to 0 below -103.97. NaN stays NaN, infinities give the limits.

The coefficients are minimax fits of the relative error (Lawson's iteration in float64, then rounded one by one, the
rest fitted again).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyggml.cpu.simd import F0, F1, fabs, fma, fmax, fmin, helper, intrinsic

INF, NAN = np.float32(np.inf), np.float32(np.nan)
HALF, TWO, TWENTY = np.float32(0.5), np.float32(2), np.float32(20)
LOG2E = np.float32(1.44269504088896341)
LN2_HI = np.float32(0.693145751953125)  # 15 bits, so that n * LN2_HI is exact for |n| <= 150
LN2_LO = np.float32(1.42860682030941723e-6)
ROUND = np.float32(1.5 * 2.0 ** 23)  # x + ROUND holds x, rounded to a whole number, in its low bits
EXP_MIN, EXP_MAX, EXP_LAST = np.float32(-104.0), np.float32(89.0), np.float32(88.722839)  # beyond the last, e^x is inf
SIGMOID_MIN = np.float32(-86.0)  # 1 + e^x is 1 from far above it on; here half_pow2 still has its power
E3, E4, E5, E6, E7 = (np.float32(c) for c in (0.166666672, 0.0416664891, 0.00833320711, 0.00139326649, 0.000199451009))
L3, L4, L5, L6, L7, L8, L9, L10, L11 = (np.float32(c) for c in (
    0.333333135, -0.250000089, 0.200020716, -0.166679874, 0.14220354, -0.12406265, 0.118836425, -0.116699614, 0.0674885735))
T3, T5, T7, T9, T11 = (np.float32(c) for c in (-0.333332807, 0.133314058, -0.0537365153, 0.0206281673, -0.00569229666))
TANH_SMALL, TANH_ONE = np.float32(0.625), np.float32(10)
TINY, SUBNORMAL_SCALE, SUBNORMAL_EXP = np.float32(2.0 ** -126), np.float32(2.0 ** 25), np.float32(25)
GELU_A, GELU_B = np.float32(1.5957691216057308), np.float32(0.07135481627159763)  # 2 sqrt(2/pi), and times 0.044715


# Whole numbers stay 32 bits wide here: numba would make 64 of them, and AVX2 has no vector conversion for those.

@intrinsic("i32(f32)")
def rounded(b: Any, ir: Any, z: Any) -> Any:
    """The whole number in z = x + ROUND (any bits for NaN: no conversion that would be undefined)."""
    i32 = ir.IntType(32)
    return b.sub(b.bitcast(z, i32), i32(0x4B400000))


@intrinsic("f32(i32)")
def pow2(b: Any, ir: Any, n: Any) -> Any:
    """2^n for n in [-126, 127]; 0 for -127."""
    i32 = ir.IntType(32)
    return b.bitcast(b.shl(b.add(n, i32(127)), i32(23)), ir.FloatType())


@intrinsic("f32(i32)")
def half_pow2(b: Any, ir: Any, n: Any) -> Any:
    """2^(n - 1) for n in [-125, 128]."""
    i32 = ir.IntType(32)
    return b.bitcast(b.shl(b.add(n, i32(126)), i32(23)), ir.FloatType())


@intrinsic("f32(i32)")
def pow2_half(b: Any, ir: Any, n: Any) -> Any:
    """2^floor(n / 2)."""
    i32 = ir.IntType(32)
    return b.bitcast(b.shl(b.add(b.ashr(n, i32(1)), i32(127)), i32(23)), ir.FloatType())


@intrinsic("f32(i32)")
def pow2_rest(b: Any, ir: Any, n: Any) -> Any:
    """2^(n - floor(n / 2))."""
    i32 = ir.IntType(32)
    return b.bitcast(b.shl(b.add(b.sub(n, b.ashr(n, i32(1))), i32(127)), i32(23)), ir.FloatType())


@intrinsic("f32(i32)")
def pow2_minus(b: Any, ir: Any, n: Any) -> Any:
    """2^-n for n in [-127, 126], about 0 for larger n."""
    i32 = ir.IntType(32)
    few = b.select(b.icmp_signed("<", n, i32(126)), n, i32(126))
    return b.bitcast(b.shl(b.sub(i32(127), few), i32(23)), ir.FloatType())


@intrinsic("i32(f32)")
def exponent(b: Any, ir: Any, x: Any) -> Any:
    """e of x = 2^e m with m in [sqrt(1/2), sqrt(2)), for normal x > 0."""
    i32 = ir.IntType(32)
    return b.ashr(b.sub(b.bitcast(x, i32), i32(0x3F3504F3)), i32(23))


@intrinsic("f32(f32, i32)")
def mantissa(b: Any, ir: Any, x: Any, e: Any) -> Any:
    """m of x = 2^e m."""
    i32 = ir.IntType(32)
    return b.bitcast(b.sub(b.bitcast(x, i32), b.shl(e, i32(23))), ir.FloatType())


@intrinsic("f32(i32)")
def float_of(b: Any, ir: Any, n: Any) -> Any:
    """float32 of a 32-bit whole number."""
    return b.sitofp(n, ir.FloatType())


@intrinsic("f32(f32, f32)")
def with_sign(b: Any, ir: Any, x: Any, y: Any) -> Any:
    """x with the sign of y."""
    return b.call(b.module.declare_intrinsic("llvm.copysign", (x.type,), ir.FunctionType(x.type, [x.type, x.type])), [x, y])


def _saturated(b: Any, ir: Any, x: Any, largest: float) -> Any:
    # By hand: LLVM does not vectorize its own saturating conversion. `largest` is the last number of x's type below 2^31.
    i32, ty = ir.IntType(32), x.type
    low, high, top = ir.Constant(ty, -2.0 ** 31), ir.Constant(ty, largest), ir.Constant(ty, 2.0 ** 31)
    c = b.select(b.fcmp_ordered("==", x, x), x, ir.Constant(ty, 0.0))
    c = b.select(b.fcmp_ordered(">", c, low), c, low)
    c = b.select(b.fcmp_ordered("<", c, high), c, high)
    n = b.select(b.fcmp_ordered(">=", x, top), i32(2 ** 31 - 1), b.fptosi(c, i32))
    return b.sext(n, ir.IntType(64))


@intrinsic("i64(f32)")
def to_i32_f32(b: Any, ir: Any, x: Any) -> Any:
    """x truncated towards 0 to a 32-bit whole number: the nearest one beyond their range, 0 for NaN."""
    return _saturated(b, ir, x, 2.0 ** 31 - 128)


@intrinsic("i64(f64)")
def to_i32_f64(b: Any, ir: Any, x: Any) -> Any:
    """The same of a float64."""
    return _saturated(b, ir, x, 2.0 ** 31 - 1)


# Choices are selects in the IR: of `a if x < y else b` LLVM may make a branch around a costly a, and then no vectors.

@intrinsic("f32(f32, f32, f32, f32)")
def if_less(b: Any, ir: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """yes where x < y, else (also for NaN) no."""
    return b.select(b.fcmp_ordered("<", x, y), yes, no)


@intrinsic("f32(f32, f32, f32, f32)")
def if_at_most(b: Any, ir: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """yes where x <= y, else (also for NaN) no."""
    return b.select(b.fcmp_ordered("<=", x, y), yes, no)


@intrinsic("f32(f32, f32, f32, f32)")
def if_equal(b: Any, ir: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """yes where x == y, else (also for NaN) no."""
    return b.select(b.fcmp_ordered("==", x, y), yes, no)


@helper
def exp_tail(r: Any) -> Any:
    """exp(r) - 1 for |r| <= ln(2)/2."""
    return fma(fma(fma(fma(fma(fma(E7, r, E6), r, E5), r, E4), r, E3), r, HALF), r * r, r)


@helper
def reduce_exp(x: Any, n: Any) -> Any:
    """x - n ln 2."""
    return fma(n, -LN2_LO, fma(n, -LN2_HI, x))


@helper
def exp(x: Any) -> Any:
    """e^x."""
    c = if_less(x, EXP_MIN, F0, fmin(EXP_MAX, x))  # 0 for masked lanes (-inf): products that end below the normal range are slow
    z = fma(c, LOG2E, ROUND)
    n = rounded(z)
    # 2^n in two factors, so that results below the normal range round once, at the end.
    return if_less(x, EXP_MIN, F0, (exp_tail(reduce_exp(c, z - ROUND)) + F1) * pow2_half(n) * pow2_rest(n))


@helper
def expm1(x: Any) -> Any:
    """e^x - 1, exact to rounding near 0."""
    c = fmin(EXP_MAX, fmax(EXP_MIN, x))
    z = fma(c, LOG2E, ROUND)
    n = rounded(z)
    a, b = pow2_half(n), pow2_rest(n)
    s = a * b
    t = exp_tail(reduce_exp(c, z - ROUND))
    r = if_less(s, INF, fma(s, t, s - F1), (t + F1) * a * b)  # 2^128 is no float32, yet the result may be one
    return if_equal(x, F0, x, r)


@helper
def log_tail(f: Any, n: Any) -> Any:
    """log(1 + f) + n ln 2 for 1 + f in [sqrt(1/2), sqrt(2))."""
    z = f * f
    p = fma(fma(fma(fma(fma(fma(fma(fma(L11, f, L10), f, L9), f, L8), f, L7), f, L6), f, L5), f, L4), f, L3)
    y = fma(n, LN2_LO, f * z * p)
    return fma(n, LN2_HI, fma(-HALF, z, y) + f)


@helper
def log_ends(x: Any, r: Any) -> Any:
    """r, with -inf at x = 0, NaN below, and inf and NaN as they are."""
    r = if_equal(x, F0, -INF, r)
    r = if_less(x, F0, NAN, r)
    return if_less(x, INF, r, x)


@helper
def log(x: Any) -> Any:
    """Natural logarithm; -inf at 0, NaN below."""
    y = if_less(x, TINY, x * SUBNORMAL_SCALE, x)
    e = exponent(y)
    return log_ends(x, log_tail(mantissa(y, e) - F1, float_of(e) - if_less(x, TINY, SUBNORMAL_EXP, F0)))


@helper
def log1p(x: Any) -> Any:
    """log(1 + x), exact to rounding near 0; -inf at -1, NaN below."""
    u = F1 + x
    e = exponent(u)
    lost = x - (u - F1)  # what rounding took from 1 + x; it goes into the mantissa, where f = x again when e = 0
    r = log_tail(fma(lost, pow2_minus(e), mantissa(u, e) - F1), float_of(e))
    return if_equal(u, F1, x, log_ends(u, r))


@helper
def over_one_plus_exp(x: Any, u: Any) -> Any:
    """x / (1 + e^u), 0 where e^u overflows. e^u is added up in parts, not rounded before; by halves, whose powers of 2 do not overflow."""
    c = fmax(SIGMOID_MIN, fmin(EXP_MAX, u))
    z = fma(c, LOG2E, ROUND)
    s = half_pow2(rounded(z))
    whole = s + HALF
    d = whole + fma(s, exp_tail(reduce_exp(c, z - ROUND)), HALF - (whole - s))  # with what rounding took from `whole`
    return if_less(EXP_LAST, u, F0, HALF * x / d)


@helper
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return over_one_plus_exp(F1, -x)


@helper
def silu(x: Any) -> Any:
    """x sigmoid(x); 0 from -88.73 down, as there e^-x is inf."""
    return over_one_plus_exp(x, -x)


@helper
def tanh(x: Any) -> Any:
    """Hyperbolic tangent, odd to the last bit."""
    a = fabs(x)
    z = x * x
    near = fma(fma(fma(fma(fma(T11, z, T9), z, T7), z, T5), z, T3) * z, a, a)
    c = fmin(TANH_ONE, a)
    c = c + c
    w = fma(c, LOG2E, ROUND)
    far = F1 - TWO / fma(exp_tail(reduce_exp(c, w - ROUND)) + F1, pow2(rounded(w)), F1)
    return with_sign(if_less(a, TANH_SMALL, near, far), x)


@helper
def softplus(x: Any) -> Any:
    """log(1 + e^x); x itself above 20, as ggml (and every Mamba2 implementation) has it."""
    return if_less(TWENTY, x, x, log1p(exp(x)))


@helper
def gelu(x: Any) -> Any:
    """The tanh form of GELU, as ggml_gelu, through x (1 + tanh(u)) / 2 = x sigmoid(2u); 0 at -inf."""
    return over_one_plus_exp(x, -x * fma(GELU_B * x, x, GELU_A))
