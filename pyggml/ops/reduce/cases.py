"""Cases of the reductions."""

from __future__ import annotations

from collections.abc import Iterator

from pyggml.cases import Case, Draw, ErrorCase, case, draw_dim, draw_leaf, draw_ne, error, f16, f32, form, leaf, perf
from pyggml.dtypes import F32
from pyggml.errors import DTypeError, ParamError
from pyggml.ops.reduce.defs import cumsum, mean, sum_rows


@cumsum.cases
def _cumsum_cases() -> Iterator[Case]:
    for n in (1, 10, 31, 32, 33, 127, 128, 255, 256, 257, 511, 512, 1023, 1024, 2047, 2048, 2049):
        yield case(f32(n, 5, 4, 3))
    yield case(f32(20481, 4))
    for n in (201 * 1204, 312 * 1205):
        yield case(f32(n))
    for dim in (0, 1, 2, 3):
        yield case(f32(10, 5, 4, 3), dim=dim)
        yield case(f32(10, 5, 4, 3), dim=dim, exclusive=True)
    yield case(f32(130, 9, 2), dim=1, note="columns in three blocks")
    yield case(f32(1, 300, 2), dim=1)
    yield case(f32(5, 128, perm=(1, 0)), note="strided")
    yield case(f32(128, 5, perm=(1, 0)), dim=1, exclusive=True, note="strided")
    yield case(f32(256, 48, 2, gap=7), exclusive=True, type="f64", note="rows with gaps")
    yield perf(f32(48, 256, 2), dim=1, type="f64", note="granite-4.0-h decay sums")
    for ne in ((128, 128, 4, 4), (2048, 16, 5, 4), (20000, 10, 4)):
        yield perf(f32(*ne))
    for rows in (1, 4, 8, 16):
        for n in (128, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 200000, 2000000):
            yield perf(f32(n, rows))


@cumsum.errors
def _cumsum_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "CUMSUM: x is f16; legal: f32", f16(8))
    yield error(ParamError, "CUMSUM: dim 4; legal: 0 to 3", f32(8), dim=4)
    yield error(ParamError, "CUMSUM: dim -1; legal: 0 to 3", f32(8), dim=-1)
    yield error(DTypeError, "CUMSUM: type f16; legal: f32, f64", f32(8), type="f16")


@cumsum.random
def _cumsum_random(draw: Draw) -> Case:
    if draw.choice((True, False)):  # as ggml has it
        return case(draw_leaf(draw, F32, draw_ne(draw), layouts=("plain", "gap")))
    return case(draw_leaf(draw, F32, draw_ne(draw)), dim=draw.integer(0, 3), exclusive=draw.choice((False, True)), type=draw.choice(("f32", "f64")))


@form(sum_rows)
def _sum_rows(type: str, ne: tuple[int, int, int, int], permute: bool, slice: bool) -> Case:
    """slice: every other matrix of dim 2, and one matrix less in dim 3."""
    n0, n1, n2, n3 = ne
    perm = (0, 2, 3, 1) if permute else None
    if slice:
        return case(leaf(type, (n0, n1, n2 // 2, n3 - 1), perm=perm, inside=(n0, 2 * n1, n2 // 2, n3)))
    return case(leaf(type, ne, perm=perm))


@sum_rows.cases
def _sum_rows_cases() -> Iterator[Case]:
    for n in (11, 16):
        for permute, slice in ((True, False), (False, True), (True, True)):
            yield _sum_rows("f32", (n, 5, 6, 3), permute, slice)
    yield from _row_cases()


@mean.cases
def _row_cases() -> Iterator[Case]:
    for n in (1, 10, 15, 16, 32, 33, 255, 1025):
        yield case(f32(n, 5, 4, 3))
    for ne in ((32,), (33,), (32768,), (32769,), (32, 256), (33, 256), (33, 1024)):
        yield case(f32(*ne))
    yield case(f32(4, 7, 3, perm=(1, 0, 2)), note="strided")
    yield case(f32(64, 5, 3, gap=9), note="rows with gaps")
    yield case(f32(100352, 2), note="granite-4.0-h logits")
    yield perf(f32(100352, 64), note="granite-4.0-h logits")
    for timed in ((8192,), (8192, 8192), (128, 8192), (256, 256, 3)):
        yield perf(f32(*timed))


@sum_rows.errors
def _sum_rows_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "SUM_ROWS: x is f16; legal: f32", f16(8))


@mean.errors
def _mean_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "MEAN: x is f16; legal: f32", f16(8))


@sum_rows.random
@mean.random
def _row_random(draw: Draw) -> Case:
    rank = draw.integer(1, 4)
    return case(draw_leaf(draw, F32, draw_ne(draw, rank) if rank > 1 else (draw_dim(draw, 4096),)))
