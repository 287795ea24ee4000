"""Cases of the layout ops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from pyggml.cases import (
    Case,
    Draw,
    ErrorCase,
    Fill,
    Leaf,
    case,
    distinct,
    draw_dim,
    draw_leaf,
    draw_ne,
    error,
    f16,
    f32,
    form,
    i32,
    leaf,
    perf,
    whole,
)
from pyggml.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, Q8_0
from pyggml.errors import DTypeError, KernelError, ParamError, ShapeError
from pyggml.ops.layout.defs import (
    arange,
    concat,
    cont,
    cpy,
    fill,
    get_rows,
    pad,
    permute,
    repeat,
    repeat_interleave,
    reshape,
    set_rows,
    transpose,
    view,
)
from pyggml.quants import WEIGHT_TYPES
from pyggml.tensor import shape4

Ne = tuple[int, ...]
FLOATS = ("f32", "f16", "bf16")
PLAIN = (F32, F16, BF16, F64, I8, I16, I32, I64)
Q8 = leaf("q8_0", (64, 2))


def _permuted(dt: str, ne: Ne, order: Ne) -> Leaf:
    """A tensor of these dims, permuted; (0, 0, 0, 0) leaves it as it is."""
    return leaf(dt, ne, perm=order if any(order) else None)


# Views


@view.cases
def _view_cases() -> Iterator[Case]:
    yield case(f32(12), ne=(3, 2), nb=(24,), offset=4)
    yield case(f32(64, 8), ne=(16, 8), nb=(256,), offset=64, note="columns")
    yield case(f32(64, 8, gap=3), ne=(5, 2, 3), nb=(268, 536), note="of a strided leaf")


@view.errors
def _view_errors() -> Iterator[ErrorCase]:
    x = f32(6, 4)
    yield error(ShapeError, "VIEW: ne [6, 4] from byte 4 ends at byte 100; x's storage ends at byte 96", x, ne=[6, 4], nb=[24], offset=4)
    yield error(ShapeError, "offset is 2; legal: multiples of 4 bytes from 0", x, ne=[2], offset=2)
    yield error(ShapeError, "offset is -4", x, ne=[2], offset=-4)
    yield error(ShapeError, "nb is [24, 24]; legal: 1 multiples of 4 from 0", x, ne=[2, 2], nb=[24, 24])
    yield error(ShapeError, "nb is [10]", x, ne=[2, 2], nb=[10])
    yield error(ShapeError, "VIEW: ne: ne [0, 2] must be 1 to 4 whole numbers >= 1", x, ne=[0, 2])
    yield error(ShapeError, "ne[0] is 48; legal for q8_0: multiples of its block of 32", Q8, ne=[48])
    yield error(ShapeError, "offset is 32; legal: multiples of 34", Q8, ne=[32], offset=32)


@view.random
def _view_random(draw: Draw) -> Case:
    n0, n1 = draw_ne(draw, 2, least=2)
    first, rows = draw.integer(0, n0 - 1), draw.integer(0, n1 - 1)
    return case(f32(n0, n1), ne=(draw.integer(1, n0 - first), draw.integer(1, n1 - rows)), nb=(4 * n0,), offset=4 * (first + rows * n0))


@reshape.cases
def _reshape_cases() -> Iterator[Case]:
    yield case(f32(10, 6, 4), ne=(20, -1))
    yield case(f32(1), ne=(1, 1, 1, 1))


@reshape.errors
def _reshape_errors() -> Iterator[ErrorCase]:
    x = f32(6, 4)
    yield error(ShapeError, "RESHAPE: ne [5, 5] holds 25 elements; x has 24", x, ne=[5, 5])
    yield error(ShapeError, "RESHAPE: ne [5, -1] does not divide x's 24 elements", x, ne=[5, -1])
    yield error(ShapeError, "RESHAPE: ne: ne [-1, -1] must be", x, ne=[-1, -1])
    yield error(ShapeError, "it must be contiguous", f32(4, 6, perm=(1, 0)), ne=[24])
    yield error(ShapeError, "RESHAPE: ne[0] is 16; legal for q8_0: multiples of its block of 32", Q8, ne=[16, 8])


@reshape.random
def _reshape_random(draw: Draw) -> Case:
    ne = draw_ne(draw)
    return case(f32(*ne), ne=tuple(ne[d] for d in draw.choice(list(itertools.permutations(range(4))))))


@permute.cases
def _permute_cases() -> Iterator[Case]:
    yield case(f32(2, 3, 4, 5), a0=2, a1=0, a2=1, a3=3)
    yield case(f32(2, 3, 4, 5), a0=3, a1=2, a2=1, a3=0)


@permute.errors
def _permute_errors() -> Iterator[ErrorCase]:
    yield error(ParamError, "PERMUTE: axes are [0, 0, 1, 2]; legal: each of 0 1 2 3 once", f32(6, 4), a0=0, a1=0, a2=1, a3=2)
    yield error(DTypeError, "PERMUTE: x is q8_0, stored in blocks along dim 0", Q8, a0=1, a1=0, a2=2, a3=3)


@permute.random
def _permute_random(draw: Draw) -> Case:
    a0, a1, a2, a3 = draw.choice(list(itertools.permutations(range(4))))
    return case(draw_leaf(draw, F32, draw_ne(draw)), a0=a0, a1=a1, a2=a2, a3=a3)


@transpose.cases
def _transpose_cases() -> Iterator[Case]:
    yield case(f32(5, 3, 2))
    yield case(f32(1, 7, gap=2), note="gap")


@transpose.errors
def _transpose_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "TRANSPOSE: x is q8_0, stored in blocks along dim 0", Q8)


@transpose.random
def _transpose_random(draw: Draw) -> Case:
    return case(draw_leaf(draw, F32, draw_ne(draw)))


# Copies


@form(cont)
def _cont(type: str, ne: Ne, use_view_slice: bool) -> Case:
    """Of the transposed tensor, or of one row of each matrix."""
    return case(leaf(type, (ne[0], 1, *ne[2:]), inside=ne) if use_view_slice else leaf(type, ne, perm=(1, 0, 2, 3)))


@cont.cases
def _cont_cases() -> Iterator[Case]:
    for type in ("f32", "i32", "f16", "bf16"):
        for use_view_slice in (True, False) if type in ("f32", "i32") else (False,):
            for ne in ((2, 1, 1, 1), (2, 1, 3, 5), (2, 3, 5, 7), (1, 4, 4, 1), (1, 8, 17, 1), (10, 10, 10, 1)):
                yield _cont(type, ne, use_view_slice)
    yield case(f32(10, 5, 4, 3))
    yield case(f32(1), note="one element")
    for perm in ((1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3), (3, 2, 1, 0)):
        yield case(f32(33, 18, 5, 2, perm=perm))
    yield case(f16(9, 40, perm=(1, 0)))
    yield case(leaf(F64, (17, 12, 3), perm=(1, 0)))
    yield case(leaf(I32, (20, 19), perm=(1, 0)))
    yield case(f32(7, 9, 3, gap=5), note="gaps")
    yield case(f32(3, 1792, gap=1), note="granite-4.0-h conv state out of its window")
    yield perf(f32(512, 1792, perm=(1, 0)), note="granite-4.0-h 350m xBC")
    yield perf(f32(64, 12, 512, perm=(0, 2, 1)), note="heads before tokens")


@cont.errors
def _cont_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "CONT: x is q8_0; legal: types without blocks", Q8)


@cont.random
def _cont_random(draw: Draw) -> Case:
    return case(draw_leaf(draw, draw.choice(PLAIN), draw_ne(draw)))


@form(cpy)
def _cpy(type_src: str, type_dst: str, ne_src: Ne, permute_src: Ne = (0, 0, 0, 0), permute_dst: Ne = (0, 0, 0, 0), _src_transpose: bool = False, *,
         ne_dst: Ne = (), dst_alloc: Ne = ()) -> Case:
    """Between permuted tensors, to other dims, or into the first elements of a larger tensor."""
    src = leaf(type_src, ne_src, perm=(1, 0, 2, 3)) if _src_transpose else _permuted(type_src, ne_src, permute_src)
    dims = ne_dst or src.ne
    return case(src, leaf(type_dst, dims, inside=dst_alloc) if dst_alloc else _permuted(type_dst, dims, permute_dst))


@cpy.cases
def _cpy_cases() -> Iterator[Case]:
    for t in FLOATS:
        for k in (1, 2, 3):
            for orders in ((), ((0, 2, 1, 3),), ((0, 3, 1, 2), (0, 2, 1, 3))):
                yield _cpy(t, t, (k, 2, 3, 4), *orders)
        for other in FLOATS:
            yield _cpy(t, other, (256, 4, 4, 4))
            yield _cpy(t, other, (256, 2, 3, 4), (0, 2, 1, 3))
            if "bf16" not in (t, other):
                yield _cpy(t, other, (256, 2, 3, 4), (1, 0, 2, 3))
        for ne in ((256, 4, 3, 1), (256, 4, 1, 1)):
            yield _cpy(t, t, ne, _src_transpose=True)
    yield _cpy("f32", "f32", (256, 4, 3, 3), _src_transpose=True)
    yield _cpy("i32", "i32", (256, 4, 1, 1), _src_transpose=True)
    for t in ("i32", "f32"):
        yield _cpy(t, t, (256, 1, 4, 1), (1, 2, 0, 3))
    for ne in ((2, 2097121, 1, 1), (2, 2, 524281, 1)):
        yield _cpy("f32", "f32", ne, (1, 0, 2, 3))
    for t in ("f32", "f16"):
        yield _cpy(t, t, (128, 2, 3, 1), ne_dst=(128, 2, 3, 1), dst_alloc=(128, 4, 3, 1))
        for order in itertools.permutations((3, 5, 7, 32)):
            for ne_dst in ((3, 5, 7, 32), (32, 7, 5, 3)):
                if order != ne_dst:
                    yield _cpy(t, t, order, ne_dst=ne_dst)
    for a, b in ((F32, F16), (F16, F32), (F32, BF16), (BF16, F32), (F16, BF16)):
        yield case(leaf(a, (31, 6, 2), perm=(0, 2, 1)), leaf(b, (31, 2, 6)))
    yield case(f32(10, 40, 3, perm=(1, 0)), leaf(F16, (40, 10, 3)), note="transposed, converted")
    yield case(f32(40, 10, 3), f32(10, 40, 3, perm=(1, 0)), note="into a transposed tensor")
    yield case(f32(24, 2, 5), f32(6, 8, 5, gap=2), note="shapes differ, one contiguous")
    yield case(f32(9, 4, perm=(1, 0)), f32(6, 6, perm=(1, 0)), note="shapes differ, both strided")
    yield case(leaf(I32, (5, 7)), leaf(I32, (7, 5)))
    yield case(f32(3, 1792, gap=512), f32(5376), note="granite-4.0-h conv state, 512 tokens")
    yield perf(f32(256, 512), leaf(F16, (256, 512)), note="granite-4.0-h 350m K cache")
    yield _cpy("f32", "f16", (512, 3072, 1, 1), perf=True)
    for n in (8192, 3072):
        yield _cpy("f32", "f32", (n, 512, 2, 1), (0, 2, 1, 3), perf=True)
    for t in FLOATS:
        for transposed in (False, True):
            order = (0, 0, 0, 0) if transposed else (1, 0, 2, 3)
            if t != "bf16":
                yield _cpy(t, t, (768 * 1024, 256, 1, 1), order, _src_transpose=transposed, perf=True)
            if t != "f32" or transposed:
                yield _cpy(t, t, (768, 1024, 256, 1), order, _src_transpose=transposed, perf=True)


@cpy.errors
def _cpy_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "CPY: a is f32, b is i32; legal: f32, f16 and bf16 in any mix, or equal types", f32(24), i32(24))
    yield error(DTypeError, "CPY: a is q8_0; legal: types without blocks", Q8, Q8)
    yield error(ShapeError, "CPY: a has 24 elements, ne [6, 4, 1, 1]; b has 23, ne [23, 1, 1, 1]", f32(6, 4), f32(23))


@cpy.random
def _cpy_random(draw: Draw) -> Case:
    a, b = draw.choice(((F32, F32), (F32, F16), (F16, F32), (F32, BF16), (BF16, BF16), (I32, I32)))
    ne = draw_ne(draw)
    order = draw.choice(list(itertools.permutations(range(4)))) if draw.choice((True, False)) else (0, 1, 2, 3)
    return case(draw_leaf(draw, a, ne), draw_leaf(draw, b, [ne[d] for d in order]))


@form(concat)
def _concat(type: str, ne_a: Ne, ne_b_d: int, dim: int, v: int) -> Case:
    """v & 1: a is part of a larger tensor; v & 2: b is."""
    ne_b = tuple(ne_b_d if d == dim else n for d, n in enumerate(ne_a))

    def part(ne: Ne, factors: Ne) -> list[int]:
        return [n * m for n, m in zip(ne, factors, strict=True)]

    a = leaf(type, ne_a, inside=part(ne_a, (2, 4, 3, 1)) if v & 1 else None)
    return case(a, leaf(type, ne_b, inside=part(ne_b, (3, 2, 4, 1)) if v & 2 else None), dim=dim)


@concat.cases
def _concat_cases() -> Iterator[Case]:
    for v in (0, 1, 2, 3):
        for dim in (0, 1, 2, 3):
            for type in ("f32", "f16", "bf16", "i8", "i16", "i32", "i64"):
                yield _concat(type, (11, 12, 13, 14), 7, dim, v)
    yield case(f32(12, 11, 3, perm=(1, 0)), f32(12, 7, 3, perm=(1, 0)), dim=0, note="both strided")
    yield case(f32(5, 11, 4, perm=(0, 2, 1)), f32(5, 7, 4, perm=(0, 2, 1)), dim=2, note="both permuted")
    yield case(leaf(BF16, (6, 3)), leaf(BF16, (6, 2)), dim=1)
    yield case(f32(3, 1792, 2), f32(1792, 70, 2, perm=(1, 0), gap=100), dim=0, note="granite-4.0-h 350m conv window")
    yield case(f32(3, 1792, 8), f32(1792, 1, 8, perm=(1, 0), gap=100), dim=0, note="granite-4.0-h 350m conv window, decode")
    yield case(f32(1, 1), f32(1, 1), dim=0, note="smallest")
    for d in (1792, 3328):
        yield perf(f32(3, d), f32(d, 512, perm=(1, 0), gap=1600), dim=0, note="granite-4.0-h conv window")


@concat.errors
def _concat_errors() -> Iterator[ErrorCase]:
    x = f32(6, 4)
    yield error(ShapeError, "CONCAT: a has ne [6, 4, 1, 1], b has ne [6, 3, 1, 1]; they must agree in all dims but 0", x, f32(6, 3))
    yield error(DTypeError, "CONCAT: a is q8_0; legal: types without blocks", Q8, Q8)
    yield error(DTypeError, "CONCAT: b is f16; legal: f32", x, f16(6, 4))
    yield error(ParamError, "CONCAT: dim is 4; legal: 0 to 3", x, x, dim=4)


@concat.random
def _concat_random(draw: Draw) -> Case:
    dt, ne, dim = draw.choice(PLAIN), draw_ne(draw), draw.integer(0, 3)
    return case(draw_leaf(draw, dt, ne), draw_leaf(draw, dt, [draw.integer(1, 20) if d == dim else n for d, n in enumerate(ne)]), dim=dim)


@form(repeat)
def _repeat(type: str, ne: Ne, nr: Ne) -> Case:
    return case(leaf(type, ne), ne=tuple(n * m for n, m in zip(shape4(ne), shape4(nr), strict=True)))


@repeat.cases
def _repeat_cases() -> Iterator[Case]:
    for n3 in (1, 3):
        for nr in ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 3, 2, 2)):
            yield _repeat("f32", (10, 5, 4, n3), nr)
        yield _repeat("i32", (10, 5, 4, n3), (2, 1, 1, 1))
        yield _repeat("i16", (10, 5, 4, n3), (1, 1, 1, 2))
        yield _repeat("bf16", (10, 5, 4, n3), (2, 1, 1, 1))
    yield case(f16(3, 5, perm=(1, 0)), ne=(10, 3, 2))
    yield case(f32(1, 64), ne=(100, 64), note="one value a row")
    yield case(f32(7, 4, 3, perm=(1, 0)), ne=(8, 14, 3), note="strided")
    yield perf(f32(128, 1, 512), ne=(128, 48, 512), note="B of one group to granite-4.0-h's heads")


@repeat.errors
def _repeat_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "REPEAT: x is q8_0; legal: types without blocks", Q8, ne=[64, 4])
    yield error(ShapeError, "REPEAT: ne is [12, 5]; each dim must be a multiple of x's, ne [6, 4, 1, 1]", f32(6, 4), ne=[12, 5])


@repeat.random
def _repeat_random(draw: Draw) -> Case:
    ne = draw_ne(draw, most=512)
    return case(draw_leaf(draw, draw.choice((F32, F16, I32)), ne), ne=tuple(n * draw.integer(1, 3) for n in ne))


@repeat_interleave.cases
def _repeat_interleave_cases() -> Iterator[Case]:
    for dim in (0, 1, 2, 3):
        yield case(f32(10, 5, 4, 3), n=3, dim=dim)
    yield case(f32(5, 10, 4, perm=(1, 0)), n=2, dim=0, note="strided")
    yield case(f32(128, 8, 20, gap=7), n=16, dim=1, note="nemotron-h B by head")
    yield case(leaf(I32, (3, 2)), n=1, dim=1)
    yield perf(f32(128, 8, 512), n=16, dim=1, note="nemotron-h-8b B by head, 512 tokens")


@repeat_interleave.errors
def _repeat_interleave_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "REPEAT_INTERLEAVE: x is q8_0; legal: types without blocks", Q8, n=2)
    yield error(ParamError, "REPEAT_INTERLEAVE: n is 0; legal: whole numbers from 1", f32(6), n=0)
    yield error(ParamError, "REPEAT_INTERLEAVE: dim is -1; legal: 0 to 3", f32(6), n=2, dim=-1)


@repeat_interleave.random
def _repeat_interleave_random(draw: Draw) -> Case:
    return case(draw_leaf(draw, draw.choice((F32, F16, I32)), draw_ne(draw)), n=draw.integer(1, 5), dim=draw.integer(0, 3))


@form(pad, circular=0)
def _pad(type: str, ne_a: Ne, pad_0: int, pad_1: int) -> Case:
    return case(leaf(type, ne_a), p0=pad_0, p1=pad_1)


@pad.cases
def _pad_cases() -> Iterator[Case]:
    for n0, n1, p0, p1 in ((512, 512, 1, 1), (1024, 1, 1, 0), (1024, 2, 1, 0), (1024, 16, 0, 1), (1023, 1, 1, 0), (1023, 8, 1, 0), (1025, 1, 1, 0),
                           (1025, 8, 1, 0), (2048, 1, 1, 0), (2048, 4, 1, 0), (2049, 1, 1, 0), (100, 1, 100, 0), (100, 1, 0, 100), (100, 100, 50, 50)):
        yield _pad("f32", (n0, n1, 1, 1), p0, p1)
    yield case(f32(10, 5, 4, 3), p0=0, p1=0, p2=0, p3=0)
    yield case(f32(10, 5, 4, 3), p0=3, p1=2, p2=1, p3=2)
    yield case(f32(70, 33, 2, perm=(1, 0)), p0=5, p1=10, note="strided")
    yield case(f16(7), p0=25)
    yield perf(f32(48, 600), p0=0, p1=168, note="granite-4.0-h dt to whole chunks of 256")


@pad.errors
def _pad_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "PAD: x is q8_0; legal: types without blocks", Q8, p0=32)
    yield error(ParamError, "PAD: p0 to p3 are [-1, 0, 0, 0]; legal: whole numbers from 0", f32(6), p0=-1)


@pad.random
def _pad_random(draw: Draw) -> Case:
    x = draw_leaf(draw, draw.choice((F32, F16, I32)), draw_ne(draw))
    return case(x, p0=draw.integer(0, 20), p1=draw.integer(0, 5), p2=draw.integer(0, 2), p3=draw.integer(0, 2))


@fill.cases
def _fill_cases() -> Iterator[Case]:
    yield case(f32(10, 10, 4, 3), c=0.0)
    yield case(f32(303, 207, 11, 3), c=2.0)
    yield case(f32(800, 600, 4, 4), c=-152.0)
    yield case(f32(2048, 512, 2, 2), c=3.5)
    yield case(f32(303, 7, perm=(1, 0)), c=0.1)
    yield case(leaf(I32, (33,)), c=-7)
    yield case(f16(5, 3), c=math.inf)


@fill.errors
def _fill_errors() -> Iterator[ErrorCase]:
    yield error(ParamError, "FILL: c is 0.5; legal: a number, and a whole one for i32", i32(2), c=0.5)
    yield error(ParamError, "FILL: c is 'x'; legal: a number", f32(2), c="x")
    yield error(ParamError, "FILL: c is 2147483648; legal for i32: -2147483648 to 2147483647", i32(2), c=1 << 31)
    yield error(DTypeError, "FILL: x is q8_0; legal: types without blocks", Q8, c=0.0)


@fill.random
def _fill_random(draw: Draw) -> Case:
    return case(leaf(draw.choice((F32, F16, I32)), draw_ne(draw)), c=draw.integer(-9, 9))


@form(arange)
def _arange(type: str, start: float, stop: float, step: float) -> Case:
    return case(start=start, stop=stop, step=step)


@arange.cases
def _arange_cases() -> Iterator[Case]:
    yield _arange("f32", 0.0, 10.0, 1.0)
    yield _arange("f32", 0.0, 1048576.0, 1.0)
    yield case(start=5.0, stop=-1.0, step=-0.7)
    yield case(start=2.0, stop=2.5, step=1.0)


@arange.errors
def _arange_errors() -> Iterator[ErrorCase]:
    yield error(ParamError, "ARANGE: start, stop, step are [0, 0, 1.0]; legal: finite numbers with at least one step", start=0, stop=0)
    yield error(ParamError, "at least one step from start towards stop", start=0, stop=3, step=-1)


@arange.random
def _arange_random(draw: Draw) -> Case:
    n, step, start = draw_dim(draw, 4096), draw.choice((1.0, -0.5, 0.125)), draw.integer(-100, 100)
    return case(start=float(start), stop=start + step * n, step=step)


# Rows by index


@get_rows.fills
def _get_rows_fills(x: Leaf, **_: Leaf) -> dict[str, Fill]:
    return {"ids": whole(0, x.ne[1])}


@form(get_rows)
def _get(type: str, n: int, m: int, r: int, be1: int = 1, be2: int = 1, v: bool = False) -> Case:
    """r rows of m, each of n elements; v: of the ids the first half."""
    ids = leaf(I32, (r // 2, be1, be2), inside=(r, be1, be2)) if v else leaf(I32, (r, be1, be2))
    return case(leaf(type, (n, m, be1, be2)), ids)


@get_rows.cases
def _get_rows_cases() -> Iterator[Case]:
    yield _get("f32", 1, 8, 2)
    for type in (*(t.name for t in WEIGHT_TYPES), "i32"):
        for b in (1, 7):
            for v in (False, True):
                yield _get(type, 256, 5, 4, b, 1, v)
    for type in ("f32", "q4_0"):
        yield _get(type, 300 * 256, 5, 4, 1, 2)
        yield _get(type, 256, 80000, 70000, 2)
        yield _get(type, 256, 5, 4, 700, 100)
    yield case(f32(40, 5, 7, 3), i32(9, 7, 3))
    yield case(f32(5, 40, 3, perm=(1, 0)), i32(9, 3), note="columns")
    yield case(f16(5, 41, perm=(1, 0)), i32(9), note="columns")
    yield case(f32(33, 6, gap=2), leaf(I32, (1, 7), perm=(1, 0), gap=1), note="gaps, strided ids")
    yield case(f32(768, 1), i32(1), note="last token of one")
    yield perf(f16(768, 100352), i32(512), note="granite-4.0-h 350m embedding")
    yield perf(f16(768, 100352), i32(1), note="granite-4.0-h 350m embedding, decode")


@get_rows.errors
def _get_rows_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "GET_ROWS: x is f64; legal: f32, f16", leaf(F64, (4,)), i32(1))
    yield error(DTypeError, "GET_ROWS: ids is i64; legal: i32", f32(6, 4), leaf(I64, (3,)))
    yield error(ShapeError, "GET_ROWS: ids has ne [1, 2, 1, 1]; legal for x of ne [6, 4, 1, 1]: [k, 1, 1, 1]", f32(6, 4), i32(1, 2))
    for bad in (-1, 4):
        yield error(KernelError, f"bad index {bad}; legal: ", f32(6, 4), i32(3, lo=bad, hi=bad + 1))


@get_rows.random
def _get_rows_random(draw: Draw) -> Case:
    dt = draw.choice((*WEIGHT_TYPES, I32))
    n = dt.block * draw.integer(1, 3) if dt.is_quantized else draw_dim(draw, 70)
    ne = (n, draw.integer(1, 20), draw.integer(1, 4), draw.integer(1, 3))
    return case(leaf(dt, ne) if dt.is_quantized else draw_leaf(draw, dt, ne), draw_leaf(draw, I32, (draw.integer(1, 30), *ne[2:])))


@set_rows.fills
def _set_rows_fills(dst: Leaf, ids: Leaf, **_: Leaf) -> dict[str, Fill]:
    """Each row once where there are rows enough."""
    return {"ids": distinct(dst.ne[1]) if ids.ne[0] <= dst.ne[1] else whole(0, dst.ne[1])}


@form(set_rows)
def _set(type: str, type_idx: str, ne: Ne, nr23: tuple[int, int], r: int, v: bool) -> Case:
    """r rows into ne[1], over nr23 times the ids' dims 2 and 3; v: only the first half of rows and ids."""
    n0, n1, n2, n3 = ne
    c2, c3 = n2 * nr23[0], n3 * nr23[1]
    k = r // 2 if v else r
    return case(leaf(type, (n0, n1, c2, c3)), leaf(F32, (n0, k, c2, c3), inside=(n0, r, c2, c3)), leaf(type_idx, (k, n2, n3), inside=(r, n2, n3)))


def _with(value: float) -> Fill:
    """Numbers in [-1, 1] with one other among them, or all 0."""
    def fill(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        x = rng.uniform(-1, 1, shape) * (1e-33 if value == 1e-33 else 1) * (value != 0)
        x[..., 5] = value
        return x
    return fill


@set_rows.cases
def _set_rows_cases() -> Iterator[Case]:
    for type_idx in ("i64", "i32"):
        yield _set("f32", type_idx, (1, 8, 1, 3), (1, 1), 2, False)
    for type in FLOATS:
        for b in (1, 7):
            for v in (False, True):
                for ne, nr23, r in (((256, 5, b, 3), (1, 1), 1), ((256, 11, 1, b), (2, 3), 7), ((3, 3, b, 1), (2, 3), 2), ((31, 3, b, 1), (2, 3), 2),
                                    ((33, 5, 1, b), (2, 3), 1)):
                    if r > 1 or not v:  # half of one row is none
                        yield _set(type, "i64", ne, nr23, r, v)
    yield case(f32(40, 9, 6, 4), f32(40, 5, 6, 4), i32(5, 3, 2), note="ids shared by heads")
    yield case(leaf(F16, (9, 40, 2), perm=(1, 0)), f32(40, 3, 2), i32(3, 2), note="columns")
    yield case(f32(40, 9), f32(3, 40, perm=(1, 0)), i32(3), note="strided rows")
    yield case(f32(130, 3), f32(130, 64), i32(64), note="equal ids")
    for type_idx, ne, nr23, r in (("i64", (256, 5, 7, 3), (1, 1), 1), ("i32", (96, 11, 1, 7), (2, 3), 7)):
        yield _set("q8_0", type_idx, ne, nr23, r, False)
    yield case(leaf(Q8_0, (64, 9)), f32(3, 64, perm=(1, 0)), i32(3), note="strided rows")
    yield case(leaf(Q8_0, (64, 3)), f32(64, 40), i32(40), note="equal ids")
    for value in (1e-33, 0.0, 1e9):
        yield case(leaf(Q8_0, (32, 2)), Leaf(F32, (32, 1, 1, 1), fill=_with(value)), i32(1), note=f"a value of {value}")
    yield perf(leaf(F16, (256, 4096)), f32(256, 512), leaf(I64, (512,)), note="granite-4.0-h 350m K cache")
    yield perf(f32(196608, 4), f32(196608, 1), leaf(I64, (1,)), note="granite-4.0-h 350m SSM state")


@set_rows.errors
def _set_rows_errors() -> Iterator[ErrorCase]:
    x, ids = f32(6, 4), leaf(I64, (3,))
    yield error(DTypeError, "SET_ROWS: dst is i32; legal: f32, f16, bf16, q8_0", i32(6, 4), f32(6, 3), ids)
    yield error(DTypeError, "SET_ROWS: src is f16; legal: f32", x, f16(6, 3), ids)
    yield error(DTypeError, "SET_ROWS: ids is f32; legal: i64, i32", x, f32(6, 3), f32(3))
    yield error(ShapeError, "SET_ROWS: src has ne [6, 2, 1, 1]; legal for dst of ne [6, 4, 1, 1] and 3 ids: [6, 3, 1, 1]", x, f32(6, 2), ids)
    yield error(ShapeError, "ids has ne [2, 3, 1, 1]; dims 1 and 2 must divide 4 and 1, dim 3 must be 1", f32(6, 4, 4), f32(6, 2, 4), leaf(I64, (2, 3)))
    for bad in (-1, 4):
        yield error(KernelError, f"bad index {bad}; legal: ", x, f32(6, 1), i32(1, lo=bad, hi=bad + 1))


@set_rows.random
def _set_rows_random(draw: Draw) -> Case:
    dt = draw.choice((F32, F16, BF16, Q8_0))
    n = 32 * draw.integer(1, 4) if dt is Q8_0 else draw_dim(draw, 140)
    m, b1, b2 = draw.integer(1, 20), draw.integer(1, 3), draw.integer(1, 2)
    c1, c2 = b1 * draw.integer(1, 2), b2 * draw.integer(1, 2)
    k = draw.integer(1, 30)
    dst = leaf(dt, (n, m, c1, c2)) if dt is Q8_0 else draw_leaf(draw, dt, (n, m, c1, c2))
    return case(dst, draw_leaf(draw, F32, (n, k, c1, c2)), draw_leaf(draw, draw.choice((I64, I32)), (k, b1, b2)))
