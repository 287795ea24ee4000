"""Cases of TRI."""

from __future__ import annotations

from collections.abc import Iterator

from pyggml.cases import Case, Draw, ErrorCase, case, draw_dim, draw_leaf, draw_ne, error, f32, form, i32, leaf, perf
from pyggml.dtypes import BF16, F16, F32, F64
from pyggml.errors import DTypeError, ParamError
from pyggml.ops.triangular.defs import KINDS, tri

GGML_KINDS = ("upper_diag", "upper", "lower_diag", "lower")  # by ggml_tri_type


@form(tri)
def _tri(type: str, ne: tuple[int, int, int, int], tri_type: int) -> Case:
    return case(leaf(type, ne), kind=GGML_KINDS[tri_type])


@tri.cases
def _tri_cases() -> Iterator[Case]:
    for tri_type, kind in enumerate(GGML_KINDS):
        yield _tri("f32", (10, 10, 4, 3), tri_type)
        yield case(f32(5, 3), kind=kind)
        yield case(f32(3, 70, 2), kind=kind, fill=-1.0)
        yield case(f32(9, 4, 6, 2), kind=kind, dims=(1, 0))
        yield case(f32(9, 4, 6, 2), kind=kind, dims=(2, 1))
        yield case(f32(9, 4, 6, 3), kind=kind, dims=(3, 0))
    yield case(f32(17, 12, 3, perm=(1, 0)), kind="lower_diag", fill=0.5, note="permuted")
    yield case(f32(17, 12, 3, gap=5), kind="upper", dims=(0, 2), note="rows with gaps")
    yield case(leaf(F64, (7, 7, 2)), kind="lower", fill=2.0)
    yield case(leaf(F16, (33, 33)), kind="upper_diag")
    yield case(leaf(BF16, (9, 5), perm=(1, 0)), kind="lower")
    yield perf(f32(256, 256, 48, 2), kind="lower_diag", fill=float("-inf"), note="granite-4.0-h chunk")
    yield perf(f32(64, 64, 48, 8), kind="lower_diag", fill=float("-inf"), note="granite-4.0-h-1b, 512 tokens in chunks of 64")
    yield _tri("f32", (256, 256, 4, 4), GGML_KINDS.index("lower"), perf=True)
    yield _tri("f32", (1024, 1024, 8, 4), GGML_KINDS.index("upper_diag"), perf=True)


@tri.errors
def _tri_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "TRI: x is i32; legal: f32, f16, bf16, f64", i32(3, 3))
    yield error(ParamError, "TRI: kind 'diag'; legal: lower_diag, lower, upper_diag, upper", f32(3, 3), kind="diag")
    for dims in ((0, 0), (0, 4), (1,), 1):
        yield error(ParamError, f"TRI: dims {dims!r}; legal: two different dims of 0 to 3", f32(3, 3), dims=dims)
    yield error(ParamError, "TRI: fill is str; it must be a number", f32(3, 3), fill="0")


@tri.random
def _tri_random(draw: Draw) -> Case:
    if draw.choice((True, False)):  # as ggml has it
        n = draw_dim(draw, 70)
        return case(f32(n, n, *draw_ne(draw, 2, 12)), kind=draw.choice(KINDS))
    first = draw.integer(0, 3)
    dims = (first, draw.choice([d for d in range(4) if d != first]))
    x = draw_leaf(draw, draw.choice((F32, F16, BF16, F64)), draw_ne(draw))
    return case(x, kind=draw.choice(KINDS), dims=dims, fill=draw.choice((0.0, 0.5, float("-inf"))))
