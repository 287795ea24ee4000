"""Cases of the pointwise ops. An op that is added to the table gets those of its kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from pyggml.cases import Case, Draw, ErrorCase, Fill, Leaf, case, draw_dim, draw_ne, error, f16, f32, form, i32, leaf, perf, uniform
from pyggml.dtypes import BF16, F16, F32, F64, I32
from pyggml.errors import DTypeError, ParamError, ShapeError
from pyggml.ops.pointwise.defs import add, cast, clamp, div, mul, scale, sub
from pyggml.registry import OPS, OpDef

Ne = tuple[int, ...]
NE = ((128, 2, 2, 2), (5, 7, 11, 13))
FAR = uniform(-150.0, 150.0)

# One input


def _unary_of(d: OpDef) -> None:
    """Cases of an op without attributes."""
    math_op = d.name in ("SQR", "SQRT", "LOG")  # these are no "unary ops" in ggml, and their cases have other dims
    # In float64 the reference does not overflow: exponents stay where float32 is finite.
    fill: Fill | None = None if d.name in ("EXP", "EXPM1") else FAR

    if not math_op:
        @form(d)
        def unary(type: str, ne_a: Ne, v: int) -> Case:
            """v 1: part of a tensor 3, 2, 5 and 4 times as large."""
            return case(leaf(type, ne_a, fill, inside=[n * m for n, m in zip(ne_a, (3, 2, 5, 4), strict=True)] if v else None))

    @d.cases
    def cases() -> Iterator[Case]:
        for type in ("f32", "f16"):
            if math_op:
                for ne in ((10, 5, 4, 3), (7, 1, 5, 3), (1024, 1024)):
                    yield case(leaf(type, ne))
            else:
                for v in (0, 1):
                    for ne in NE:
                        yield d.form(type, ne, v)
        yield from _layout_cases()

    @d.errors
    def errors() -> Iterator[ErrorCase]:
        yield error(DTypeError, f"{d.name}: a is i32; legal: f32, f16, bf16", i32(4))

    d.random(_unary_random)


def _layout_cases(**attrs: Any) -> Iterator[Case]:
    yield case(f16(7, 33, 2, 3, perm=(1, 0, 3, 2)), note="permuted", **attrs)
    yield case(leaf(BF16, (33, 7, 2), gap=3), note="rows with gaps", **attrs)
    yield perf(f32(2048, 512), note="granite-4.0-h-350m ffn", **attrs)


def _random_leaf(draw: Draw) -> Leaf:
    """Any dims, in layouts and types for which the listed cases have kernels already."""
    match draw.choice(("plain", "plain", "part", "permuted", "gaps")):
        case "part":
            ne = draw_ne(draw, least=2)
            return leaf(draw.choice((F32, F16)), ne, inside=[n + draw.integer(1, 3) for n in ne])
        case "permuted":
            return leaf(F16, draw_ne(draw, least=2), perm=(1, 0, 3, 2))
        case "gaps":
            return leaf(BF16, draw_ne(draw, least=2), gap=draw.integer(1, 9))
    return leaf(draw.choice((F32, F16)), draw_ne(draw, draw.integer(1, 4)))


def _unary_random(draw: Draw) -> Case:
    return case(_random_leaf(draw))


@form(scale, inplace=0)
def _scale(type: str, ne: Ne, scale: float, bias: float = 0.0) -> Case:
    return case(leaf(type, ne), s=scale, b=bias)


@scale.cases
def _scale_cases() -> Iterator[Case]:
    yield _scale("f32", (10, 10, 10, 10), 2.0)
    yield _scale("f32", (10, 10, 10, 10), 2.0, 1.0)
    yield _scale("f32", (100, 10, 10, 10), 2.0, 1.0)
    yield from _layout_cases(s=2.5, b=-0.125)


@scale.errors
def _scale_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "SCALE: a is i32; legal: f32, f16, bf16, f64", i32(4), s=2.0)
    yield error(ParamError, "SCALE: s is str; it must be a number", f32(4), s="2")
    yield error(ParamError, "SCALE: b is NoneType; it must be a number", f32(4), s=2.0, b=None)


@scale.random
def _scale_random(draw: Draw) -> Case:
    return case(_random_leaf(draw), s=draw.choice((2.5, -1.0, 0.0, 1e-3)), b=draw.choice((0.0, -0.125)))


@form(clamp)
def _clamp(type: str, ne: Ne, min: float, max: float) -> Case:
    return case(leaf(type, ne), lo=min, hi=max)


@clamp.cases
def _clamp_cases() -> Iterator[Case]:
    for type in ("f32", "f16"):
        for ne in ((10, 5, 4, 3), (7, 1, 5, 3), (1024, 1024, 1, 1)):
            yield _clamp(type, ne, -0.5, 0.5)
    yield from _layout_cases(lo=-0.5, hi=0.5)


@clamp.errors
def _clamp_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "CLAMP: a is i32; legal: f32, f16, bf16, f64", i32(4), lo=0.0, hi=1.0)
    yield error(ParamError, "CLAMP: lo is list; it must be a number", f32(4), lo=[0], hi=1.0)
    yield error(ParamError, "CLAMP: lo 1 is above hi -1", f32(4), lo=1.0, hi=-1.0)
    yield error(ParamError, "CLAMP: lo nan is above hi 1", f32(4), lo=math.nan, hi=1.0)


@clamp.random
def _clamp_random(draw: Draw) -> Case:
    lo = draw.choice((-0.5, 0.0, float("-inf")))
    return case(_random_leaf(draw), lo=lo, hi=max(lo, draw.choice((0.0, 0.25, float("inf")))))


CASTS = ((F32, F16), (F32, BF16), (F32, F64), (F32, I32), (F16, F32), (BF16, F32), (F64, F32), (I32, F32), (F64, I32), (I32, F16), (BF16, F16), (F16, I32))


@cast.cases
def _cast_cases() -> Iterator[Case]:
    for src, dst in CASTS:
        yield case(leaf(src, (33, 5, 2)), type=dst.name)
    yield case(leaf(F32, (33, 5, 2), perm=(1, 0)), type="f16", note="permuted")
    yield case(leaf(I32, (33, 5, 2), gap=3), type="i32", note="rows with gaps")
    yield perf(f32(2048, 512), type="bf16", note="granite-4.0-h-350m ffn")


@cast.errors
def _cast_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "CAST: a is q8_0; legal: f32, f16, bf16, f64, i32", leaf("q8_0", (32,)), type="f32")
    yield error(DTypeError, "CAST: type q8_0; legal: f32, f16, bf16, f64, i32", f32(32), type="q8_0")


@cast.random
def _cast_random(draw: Draw) -> Case:
    src, dst = draw.choice(CASTS)
    return case(leaf(src, draw_ne(draw, draw.integer(1, 4))), type=dst.name)


# Two inputs

REPEATS = ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 2, 2), (1, 2, 2, 2), (2, 2, 2, 2))


def _binary_of(d: OpDef) -> None:
    """Cases of an op on two tensors that are broadcast."""
    near_one = uniform(0.9, 1.1) if d in (mul, div) else None

    @form(d, nf=1, src_overlap=0)
    def bcast(type: str, ne: Ne, nr: Ne, perm1: bool = False) -> Case:
        """nr: how often b, of dims ne, is repeated; perm1: b's dims in another order in memory."""
        n0, n1, n2, n3 = ne
        b = leaf(type, (n1, n2, n0, n3), near_one, perm=(1, 2, 0, 3)) if perm1 else leaf(type, ne, near_one)
        return case(leaf(type, [n * m for n, m in zip(ne, nr, strict=True)], near_one), b)

    @d.cases
    def cases() -> Iterator[Case]:
        a = (10, 5, 4, 3)
        yield case(f32(128, 2, 2, 2), f32(128, 2, 2, 2))
        for b in ((10,), (1, 5), (1, 1, 4, 3)):
            yield case(f32(*a), f32(*b))
        yield case(f32(1, 5), f32(10, 1, 4), note="broadcast both ways")
        yield case(f32(*a), f32(4, 10, 5, perm=(2, 0, 1)), note="permuted")
        yield case(f32(*a, gap=6), f32(10, 5), note="rows with gaps")
        yield case(leaf(BF16, a), f32(10))
        yield from _bcast_cases(d.form, permuted=d is add)
        yield perf(f32(1536, 512), f32(1536, 512), note="granite-4.0-h-1b residual")
        yield perf(f32(1536, 512), f32(1536), note="granite-4.0-h-1b norm weight")
        yield perf(f32(256 * 256, 48, 1, 2), f32(256 * 256, 1, 1, 2), note="granite-4.0-h-1b decay mask")
        if d is add:
            yield from _mixed_cases()
            yield d.form("f32", (4096, 1, 1, 1), (1, 1, 1, 1), perf=True)
            yield d.form("f32", (4096, 1, 1, 1), (1, 512, 1, 1), perf=True)
        if d is sub:
            yield case(leaf(F64, (1, 16, 3)), leaf(F64, (16, 1, 3)), type="f32", note="exponents of a chunk's decay")

    @d.errors
    def errors() -> Iterator[ErrorCase]:
        yield error(DTypeError, f"{d.name}: a is i32; legal: f32, f16, bf16, f64", i32(4), f32(4))
        yield error(DTypeError, f"{d.name}: b is q8_0; legal: f32, f16, bf16, f64", f32(32), leaf("q8_0", (32,)))
        yield error(DTypeError, f"{d.name}: type i32; legal: f32, f16, bf16, f64", f32(4), f32(4), type="i32")
        for ne in ((20, 5), (10, 3)):
            found = f"{d.name}: b has ne [{ne[0]}, {ne[1]}, 1, 1]; each dim must be 1, equal to or a divisor of a's [10, 5, 1, 1]"
            yield error(ShapeError, found, f32(10, 5), f32(*ne))

    d.random(_binary_random)


def _bcast_cases(bcast: Callable[..., Case], *, permuted: bool) -> Iterator[Case]:
    """Layouts are the same code for every op, so the permuted ones stand with one op only."""
    once = (1, 1, 1, 1)
    for type in ("f16", "f32"):
        for perm1 in (False, True) if permuted else (False,):
            for ne, nr in (((1, 1, 8, 1), once), ((1, 1, 1, 1), (32, 1, 1, 1)), ((1, 1, 320, 320), once), ((10, 5, 1, 1), once), ((10, 5, 4, 1), once)):
                yield bcast(type, ne, nr, perm1)
            for nr in REPEATS:
                yield bcast(type, (10, 5, 4, 3), nr, perm1)
        yield bcast(type, (1, 1, 65536, 1), (256, 1, 1, 1))
        for ne in ((640, 1, 1, 1), (1280, 1, 1, 1), (1280, 16, 16, 1), (16, 16, 1280, 1), (64, 262144, 1, 1)):
            yield bcast(type, ne, once)
        for n0, n1, n2 in ((1280, 16, 16), (1280, 256, 1), (5120, 256, 1)):
            yield bcast(type, (n0, 1, 1, 1), (1, n1, n2, 1))
        for n2, n in ((1280, 16), (1920, 16), (2560, 16), (1280, 32), (1920, 32), (640, 32)):
            yield bcast(type, (1, 1, n2, 1), (n, n, 1, 1))


def _mixed_cases() -> Iterator[Case]:
    """More layouts, and types in any mix."""
    a = (10, 5, 4, 3)
    for b in ((1, 1, 1, 3), (1,), (10, 5), (5,), (2, 5, 2, 3), (1, 1, 2)):
        yield case(f32(*a), f32(*b))
    yield case(f32(5, 10, 3, 4, perm=(1, 0, 3, 2)), f32(5, 10, 3, 4, perm=(1, 0, 3, 2)), note="permuted alike")
    yield case(f32(*a, gap=6), f32(5, 2, perm=(1, 0)), note="strided and repeated")
    yield case(leaf(F16, a), f32(*a))
    yield case(f32(*a), leaf(BF16, a), type="bf16")
    yield case(leaf(F64, a), f32(*a), note="f64")


def _binary_random(draw: Draw) -> Case:
    """Any dims, in the broadcasts and types of the listed cases."""
    kind = draw.choice(("same", "row", "column", "matrix", "outer", "repeated", "half"))
    if kind in ("same", "half"):
        ne = draw_ne(draw, draw.integer(1, 4))
        dt = F16 if kind == "half" else F32
        return case(leaf(dt, ne), leaf(dt, ne))
    n0, n1, n2, n3 = draw_ne(draw, least=2)
    match kind:
        case "row":
            return case(leaf(draw.choice((F32, BF16)), (n0, n1, n2, n3)), f32(n0))
        case "column":
            return case(f32(n0, n1, n2, n3), f32(1, n1))
        case "matrix":
            return case(f32(n0, n1, n2, n3, gap=draw.integer(1, 9)), f32(n0, n1))
        case "outer":
            return case(f32(1, n1), f32(n0, 1, n2))
    r0, r1, r2, r3 = draw.choice(REPEATS[1:])
    return case(f32(n0 * r0, n1 * r1, n2 * r2, n3 * r3), f32(n0, n1, n2, n3))


# Gated units


def _glu_of(d: OpDef) -> None:
    """Cases of an op on the halves of rows."""

    @form(d)
    def glu(type: str, ne_a: Ne, v: int, swapped: bool) -> Case:
        """v 1: rows of a tensor with rows three times as long."""
        return case(leaf(type, ne_a, FAR, gap=2 * ne_a[0] if v else 0), swapped=swapped)

    @d.cases
    def cases() -> Iterator[Case]:
        for type in ("f32", "f16"):
            for v in (0, 1):
                for swapped in (False, True):
                    yield d.form(type, NE[0], v, swapped)
                    yield d.form(type, (10, 7, 11, 13), v, swapped)
        yield case(f32(7, 10, 3, perm=(1, 0)), note="permuted")
        yield case(leaf(BF16, (66, 7)), swapped=True)
        yield perf(f32(4096, 512), note="granite-4.0-h-350m ffn")

    @d.errors
    def errors() -> Iterator[ErrorCase]:
        yield error(DTypeError, f"{d.name}: a is f64; legal: f32, f16, bf16", leaf(F64, (4,)))
        yield error(ShapeError, f"{d.name}: a has ne [7, 2, 1, 1]; ne0 must be even (two halves)", f32(7, 2))

    @d.random
    def random(draw: Draw) -> Case:
        dt, gap = draw.choice(((F32, 0), (F16, 0), (F32, 2), (F16, 2), (BF16, 0)))
        return case(leaf(dt, (2 * draw_dim(draw, 100, 2), *draw_ne(draw, 3, 40, 2)), gap=gap), swapped=dt is BF16 or draw.choice((False, True)))


def _glu_split_of(d: OpDef) -> None:
    """Cases of an op on two tensors of the same dims."""

    @form(d)
    def glu_split(type: str, ne_a: Ne, v: int) -> Case:
        """v 1: rows of tensors with rows three times as long."""
        x = leaf(type, ne_a, FAR, gap=2 * ne_a[0] if v else 0)
        return case(x, x)

    @d.cases
    def cases() -> Iterator[Case]:
        for type in ("f32", "f16"):
            for v in (0, 1):
                for ne in NE:
                    yield d.form(type, ne, v)
        yield case(f32(5, 7, 11, 13, gap=2), f32(7, 5, 11, 13, perm=(1, 0)), note="gaps and permuted")
        yield case(leaf(BF16, (33, 7), gap=1), leaf(BF16, (33, 7)))
        yield perf(f32(2048, 512), f32(2048, 512), note="granite-4.0-h-350m ffn")

    @d.errors
    def errors() -> Iterator[ErrorCase]:
        yield error(DTypeError, f"{d.name}: a is f64; legal: f32, f16, bf16", leaf(F64, (4,)), f32(4))
        yield error(DTypeError, f"{d.name}: b is f16; legal: f32", f32(4), f16(4))
        yield error(ShapeError, f"{d.name}: b has ne [2, 1, 1, 1]; it must be a's [4, 1, 1, 1]", f32(4), f32(2))

    @d.random
    def random(draw: Draw) -> Case:
        dt, gap = draw.choice(((F32, 0), (F16, 0), (F32, 2), (F16, 2)))
        x = leaf(dt, draw_ne(draw, least=2), gap=gap)
        return case(x, x)


for _d in [x for x in OPS.values() if x.family == "pointwise" and x not in (scale, clamp, cast)]:
    assert _d.pointwise is not None
    _kind = _glu_of if _d.pointwise.halves else _unary_of if _d.inputs == ("a",) else _binary_of if _d.attrs else _glu_split_of
    _kind(_d)
