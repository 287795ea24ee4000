"""Pointwise ops: one table of scalar expressions. Kernels, alone and in fused chains, are generated from it (pyggml.cpu.fuse).

A new unary op is one line: name, expression, NumPy reference, what it computes. In expressions `a` and `b` are the inputs,
attributes go by their names, and functions are those of pyggml.cpu.mathf. Values are computed in float32; in float64 where
an input or the result is f64.

NaN stays NaN in every function of this table but SGN and STEP, which compare and give 0 as ggml's do. (ggml's relu and
clamp turn NaN into a number.)

>>> import numpy as np, pyggml as pg
>>> x = pg.tensor(np.array([-1.0, 0.0, 2.0], np.float32))
>>> pg.compute(pg.relu(x), backend="reference")
array([0., 0., 2.])
>>> pg.compute(pg.clamp(pg.add(x, x), -1.0, 3.0), backend="reference")
array([-1.,  0.,  3.])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pyggml.cases import Fill, Leaf, uniform, whole
from pyggml.dtypes import BF16, F16, F32, F64, I32, DType, dtype
from pyggml.errors import DTypeError, ParamError, ShapeError
from pyggml.registry import Cost, OpDef, Pointwise, Spec, default_bytes, is_number, like, op, out, require, require_type
from pyggml.tensor import Node, Tensor

SINGLE = (F32, F16, BF16)
FLOATS = (F32, F16, BF16, F64)
CASTS = (F32, F16, BF16, F64, I32)
LIMIT, LIMIT_F64 = 1e-13, 1e-28
ULP = {"f16": 2.0 ** -11, "bf16": 2.0 ** -8}
GATE = uniform(-4.0, 4.0)

Array = np.ndarray


def broadcast(name: str, a: Tensor, b: Tensor) -> tuple[int, int, int, int]:
    """Dims of a pointwise result: per dim equal, or one is 1, or (ggml_can_repeat) b's divides a's."""
    for na, nb in zip(a.ne, b.ne, strict=True):
        require(na == 1 or na % nb == 0, name, f"b has ne {list(b.ne)}; each dim must be 1, equal to or a divisor of a's {list(a.ne)}, or a's must be 1")
    n0, n1, n2, n3 = (max(na, nb) for na, nb in zip(a.ne, b.ne, strict=True))
    return n0, n1, n2, n3


def _spread(a: Array, b: Array) -> tuple[Array, Array]:
    """Both arrays with b repeated in the dims where its size divides a's; size 1 is left to NumPy."""
    reps = [na // nb if nb > 1 and na > nb else 1 for na, nb in zip(a.shape, b.shape, strict=True)]
    return a, np.tile(b, reps)


def _names(types: tuple[DType, ...]) -> str:
    return ", ".join(t.name for t in types)


def _limit(node: Node) -> float:
    """A result one float32 rounding away from a tie rounds to the other neighbour in a 16-bit type: off by an ULP on a few
    elements, one in 25 or a single one of a small tensor."""
    dt = node.out.dtype
    if dt.name in ULP:
        return ULP[dt.name] ** 2 * min(1.0, 0.04 + 4 / node.out.n_elements)
    return LIMIT_F64 if dt is F64 else LIMIT


def _define(name: str, inputs: str, rule: Callable[..., Spec], pointwise: Pointwise, ref: Callable[..., Any], doc: str, flops: int,
            fills: dict[str, Fill] | None = None) -> OpDef:
    rule.__name__ = rule.__qualname__ = name.lower()
    rule.__doc__ = doc
    d = op(name, inputs=inputs, limit=LIMIT)(rule)
    d.pointwise = pointwise
    d.reference(ref)
    d.cost(lambda node: Cost(flops * node.out.n_elements, default_bytes(node)))
    d.limits(_limit)
    d.fills(lambda **_: fills or {})
    return d


# One input

def _unary(name: str, expr: str, ref: Callable[..., Array], doc: str, *, flops: int = 1, lo: float = -4.0, hi: float = 4.0,
           types: tuple[DType, ...] = SINGLE) -> OpDef:
    """An op on each element. `lo` and `hi` bound what cases feed it; `types` are legal (f64 where no transcendental is used)."""

    def rule(a: Tensor) -> Spec:
        require_type(name, "a", a, *types)
        return like(a)

    text = f"{doc}\n\na: {_names(types)}, any ne and strides. Out: like a. DTypeError for other types. Source: ggml_{name.lower()}."
    return _define(name, "a", rule, Pointwise(expr), ref, text, flops, {"a": uniform(lo, hi)})


def _sigmoid(a: Array) -> Array:
    e = np.exp(-np.abs(a))
    return np.where(a < 0, e, 1.0) / (1.0 + e)


def _times_sigmoid(a: Array, x: Array) -> Array:
    return np.asarray(np.where(a == -np.inf, 0.0, a * _sigmoid(x)))


def _silu(a: Array) -> Array:
    return _times_sigmoid(a, a)


def _gelu(a: Array) -> Array:
    return _times_sigmoid(a, np.sqrt(8 / np.pi) * a * (1 + 0.044715 * np.square(a)))


def _softplus(a: Array) -> Array:
    return np.where(a > 20, a, np.log1p(np.exp(np.minimum(a, 20))))


def _relu(a: Array) -> Array:
    return np.where(a < 0, 0.0, a)


sqr = _unary("SQR", "a * a", np.square, "a².", types=FLOATS)
sqrt = _unary("SQRT", "sqrt(a)", np.sqrt, "Square root; NaN below 0.", lo=0.0, types=FLOATS)
exp = _unary("EXP", "exp(a)", np.exp, "e^a; inf above 88.72 in f32.", flops=10, lo=-10.0)
expm1 = _unary("EXPM1", "expm1(a)", np.expm1, "e^a - 1, exact near 0.", flops=12)
log = _unary("LOG", "log(a)", np.log, "Natural logarithm; -inf at 0, NaN below.", flops=12, lo=1e-4)
neg = _unary("NEG", "-a", np.negative, "-a.", types=FLOATS)
abs = _unary("ABS", "abs(a)", np.abs, "Absolute value.", types=FLOATS)
sgn = _unary("SGN", "1 if a > 0 else -1 if a < 0 else 0", lambda a: np.nan_to_num(np.sign(a)), "1, 0 or -1 by the sign of a; 0 for NaN.", types=FLOATS)
step = _unary("STEP", "1 if a > 0 else 0", lambda a: np.heaviside(np.nan_to_num(a), 0.0), "1 where a > 0, else (also for NaN) 0.", types=FLOATS)
relu = _unary("RELU", "0 if a < 0 else a", _relu, "a where it is not negative, else 0.", types=FLOATS)
sigmoid = _unary("SIGMOID", "sigmoid(a)", _sigmoid, "1 / (1 + e^-a).", flops=12)
silu = _unary("SILU", "silu(a)", _silu, "a sigmoid(a); 0 at -inf.", flops=12)
tanh = _unary("TANH", "tanh(a)", np.tanh, "Hyperbolic tangent.", flops=20)
gelu = _unary("GELU", "gelu(a)", _gelu, "The tanh form of GELU: a (1 + tanh(sqrt(2/pi) (a + 0.044715 a³))) / 2; 0 at -inf.", flops=16)
softplus = _unary("SOFTPLUS", "softplus(a)", _softplus, lo=-25.0, hi=25.0, flops=24,
                  doc="log(1 + e^a); a itself above 20. Below, log1p keeps small results: 2.06e-9 at -20, where ggml's log(1 + e^a) is 0.")


def _scale_rule(a: Tensor, s: float, b: float = 0.0) -> Spec:
    require_type("SCALE", "a", a, *FLOATS)
    for k, v in (("s", s), ("b", b)):
        _require_number("SCALE", k, v)
    return like(a)


def _clamp_rule(a: Tensor, lo: float, hi: float) -> Spec:
    require_type("CLAMP", "a", a, *FLOATS)
    for k, v in (("lo", lo), ("hi", hi)):
        _require_number("CLAMP", k, v)
    require(lo <= hi, "CLAMP", f"lo {lo:g} is above hi {hi:g}", ParamError)
    return like(a)


def _require_number(name: str, arg: str, value: Any) -> None:
    require(is_number(value), name, f"{arg} is {type(value).__name__}; it must be a number", ParamError)


scale = _define("SCALE", "a", _scale_rule, Pointwise("a * s + b", ("s", "b")), lambda a, s, b: a * s + b, flops=2,
                doc="a s + b for numbers s and b.\n\na: f32, f16, bf16, f64. Out: like a. Source: ggml_scale_bias.")
clamp = _define("CLAMP", "a", _clamp_rule, Pointwise("lo if a < lo else hi if a > hi else a", ("lo", "hi")), lambda a, lo, hi: np.clip(a, lo, hi), flops=2,
                doc="a, but at least lo and at most hi; NaN stays NaN.\n\na: f32, f16, bf16, f64. Out: like a. ParamError when lo > hi. Source: ggml_clamp.")


def _cast_rule(a: Tensor, type: str | DType) -> Spec:
    require_type("CAST", "a", a, *CASTS)
    require(dtype(type) in CASTS, "CAST", f"type {dtype(type).name}; legal: {_names(CASTS)}", DTypeError)
    return like(a, dtype(type))


def _cast(a: Array, type: str | DType) -> Array:
    if dtype(type) is not I32:
        return a
    return np.clip(np.trunc(np.where(np.isnan(a), 0.0, a)), -2.0 ** 31, 2.0 ** 31 - 1).astype(np.int64)


cast = _define("CAST", "a", _cast_rule, Pointwise("a"), _cast, flops=0,
               doc="a as another type, rounded to nearest even; to i32 truncated towards 0, clamped to its range, NaN to 0.\n\n"
                   "a and type: f32, f16, bf16, f64, i32. Out: a's dims. Source: ggml_cast.")


@cast.fills
def _cast_fills(a: Leaf) -> dict[str, Fill]:
    return {"a": whole(-1000, 1000) if a.dtype.is_int else uniform(-1000.0, 1000.0)}


# Two inputs

def _binary(name: str, expr: str, ref: Callable[[Array, Array], Array], doc: str, *, lo: float = -1.0) -> OpDef:
    """An op on pairs of elements. `lo` bounds the b that cases feed it (a divisor must not be near 0)."""

    def rule(a: Tensor, b: Tensor, *, type: str | DType | None = None) -> Spec:
        require_type(name, "a", a, *FLOATS)
        require_type(name, "b", b, *FLOATS)
        dt = a.dtype if type is None else dtype(type)
        require(dt in FLOATS, name, f"type {dt.name}; legal: {_names(FLOATS)}", DTypeError)
        return out(dt, *broadcast(name, a, b))

    text = (f"{doc}\n\na, b: f32, f16, bf16, f64, any strides; per dim equal, or one is 1, or b's divides a's (b repeats). Out: the larger\n"
            "dims, of a's type unless `type` says another; where any of the three is f64, computed in f64. ShapeError, DTypeError.\n"
            f"Source: ggml_{name.lower()}.")
    return _define(name, "a b", rule, Pointwise(expr), lambda a, b, type: ref(*_spread(a, b)), text, 1, {"b": uniform(lo, 2.0)})


add = _binary("ADD", "a + b", np.add, "a + b.")
sub = _binary("SUB", "a - b", np.subtract, "a - b.")
mul = _binary("MUL", "a * b", np.multiply, "a b.")
div = _binary("DIV", "a / b", np.divide, "a / b.", lo=0.5)


# Gated units

def _glu(name: str, expr: str, act: Callable[[Array], Array], doc: str, flops: int) -> OpDef:
    """A gated unit on the halves of each row: act(first) second."""

    def rule(a: Tensor, *, swapped: bool = False) -> Spec:
        require_type(name, "a", a, *SINGLE)
        if a.ne[0] % 2:
            raise ShapeError(f"{name}: a has ne {list(a.ne)}; ne0 must be even (two halves)")
        return out(a.dtype, a.ne[0] // 2, *a.ne[1:])

    def ref(a: Array, swapped: bool) -> Array:
        gate, up = np.split(a, 2, axis=-1)
        return act(up) * gate if swapped else act(gate) * up

    text = (f"{doc} of the two halves of each row; `swapped` exchanges them.\n\na: f32, f16, bf16, ne0 even, any strides. Out: ne0 halved.\n"
            f"ShapeError, DTypeError. Source: ggml_{name.lower()}.")
    return _define(name, "a", rule, Pointwise(expr, halves=True), ref, text, flops, {"a": GATE})


def _glu_split(name: str, expr: str, act: Callable[[Array], Array], doc: str, flops: int) -> OpDef:
    """A gated unit on two tensors: act(a) b."""

    def rule(a: Tensor, b: Tensor) -> Spec:
        require_type(name, "a", a, *SINGLE)
        require_type(name, "b", b, a.dtype)
        require(a.ne == b.ne, name, f"b has ne {list(b.ne)}; it must be a's {list(a.ne)}")
        return like(a)

    text = f"{doc}.\n\na, b: f32, f16, bf16, of one type and ne, any strides. Out: like a. ShapeError, DTypeError. Source: ggml_{name.lower()}."
    return _define(name, "a b", rule, Pointwise(expr), lambda a, b: act(a) * b, text, flops, {"a": GATE, "b": GATE})


swiglu = _glu("SWIGLU", "silu(a) * b", _silu, "silu(first) second", 13)
reglu = _glu("REGLU", "(0 if a < 0 else a) * b", _relu, "relu(first) second", 2)
swiglu_split = _glu_split("SWIGLU_SPLIT", "silu(a) * b", _silu, "silu(a) b", 13)
reglu_split = _glu_split("REGLU_SPLIT", "(0 if a < 0 else a) * b", _relu, "relu(a) b", 2)
