"""Cases of the norms."""

from __future__ import annotations

from collections.abc import Iterator

from pyggml.cases import Case, Draw, ErrorCase, Leaf, case, draw_dim, draw_leaf, draw_ne, error, f16, f32, form, leaf, perf
from pyggml.dtypes import F32
from pyggml.errors import DTypeError, ParamError
from pyggml.ops.norm.defs import norm, rms_norm

Ne = tuple[int, int, int, int]


def _input(type: str, ne: Ne, v: bool, noncontig_rows: bool = False) -> Leaf:
    """v: the first half of each dim of a tensor of that ne; noncontig_rows: dims 0 and 1 exchanged in memory."""
    n0, n1, n2, n3 = (n // 2 if v else n for n in ne)
    if noncontig_rows:
        return leaf(type, (n1, n0, n2, n3), perm=(1, 0, 2, 3), inside=(ne[1], ne[0], ne[2], ne[3]))
    return leaf(type, (n0, n1, n2, n3), inside=ne)


@form(norm)
def _norm(type: str, ne: Ne, v: bool, eps: float, noncontig_rows: bool = False) -> Case:
    return case(_input(type, ne, v, noncontig_rows), eps=eps)


@form(rms_norm, inplace=0)
def _rms_norm(type: str, ne: Ne, v: bool, eps: float) -> Case:
    return case(_input(type, ne, v), eps=eps)


def _common_cases() -> Iterator[Case]:
    yield case(f32(15, 3, lo=99.0, hi=101.0), note="mean far above the spread")
    yield case(f32(768, 7, gap=32), note="granite-4.0-h-350m, rows of a wider tensor")
    yield case(f32(5, 7, 3, perm=(1, 0)), note="strided")
    yield case(f32(1024, 8, 3), note="nemotron-h-8b, norm per group")
    for n in (1, 511, 8192, 33 * 512):
        yield case(f32(n))
    yield perf(f32(1536, 512), note="granite-4.0-h-1b")
    yield perf(f32(1536), note="granite-4.0-h-1b, decode")


@norm.cases
def _norm_cases() -> Iterator[Case]:
    for eps in (0.0, 1e-6, 1e-4, 0.1, 10.0):
        for n in (64, 1025):
            for v, noncontig_rows in ((False, False), (True, False), (False, True)):
                yield _norm("f32", (n, 5, 4, 3), v, eps, noncontig_rows)
    yield from _common_cases()


@rms_norm.cases
def _rms_norm_cases() -> Iterator[Case]:
    for eps in (0.0, 1e-6, 1e-4, 0.1, 10.0):
        for n in (64, 1025):
            for v in (False, True):
                yield _rms_norm("f32", (n, 5, 4, 3), v, eps)
    yield from _common_cases()


@norm.errors
def _norm_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "NORM: x is f16; legal: f32", f16(8))
    yield error(ParamError, "NORM: eps -1.0; it must be a number >= 0", f32(8), eps=-1.0)


@rms_norm.errors
def _rms_norm_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "RMS_NORM: x is f16; legal: f32", f16(8))
    yield error(ParamError, "RMS_NORM: eps nan; it must be a number >= 0", f32(8), eps=float("nan"))
    yield error(ParamError, "RMS_NORM: eps 'small'; it must be a number >= 0", f32(8), eps="small")


@norm.random
@rms_norm.random
def _random(draw: Draw) -> Case:
    rank = draw.integer(1, 4)
    ne = draw_ne(draw, rank) if rank > 1 else (draw_dim(draw, 4096),)
    return case(draw_leaf(draw, F32, ne), eps=draw.choice((1e-6, 1e-5, 0.1)))
