"""CPU kernels of the reductions: an item is one row, or a block of columns that are summed side by side. Whole rows whose
elements do not follow each other are copied to scratch first.
"""

from __future__ import annotations

from typing import Any

from pyggml.cpu.rows import gather, load_next, loader, row_address, row_in_place, row_sum
from pyggml.cpu.simd import STORE, as_f64, at, ld_f64, narrow, st_f32, st_f64, wide
from pyggml.dtypes import F64
from pyggml.registry import kernel
from pyggml.tensor import Node, Tensor

COLUMNS = 64  # of CUMSUM along another dim than 0: what a thread sums side by side


def source(node: Node) -> Tensor:
    """The only input."""
    x = node.src[0]
    assert x is not None
    return x


def bind_row(node: Node) -> dict[str, Any]:
    """How kernels of whole rows reach a row without gaps (the name `contiguous` in them)."""
    return {"contiguous": row_in_place if source(node).rows_contiguous else gather}


def row_scratch(node: Node) -> int:
    """Room for one row where it must be copied."""
    return 0 if source(node).rows_contiguous else 4 * source(node).ne[0]


contiguous = row_in_place
load, store, result = load_next, st_f32, narrow


@kernel("SUM_ROWS", "cpu", bind=bind_row, scratch=row_scratch, params=lambda node: [1.0], chunk=lambda node: 4096 // source(node).ne[0])
@kernel("MEAN", "cpu", bind=bind_row, scratch=row_scratch, params=lambda node: [float(source(node).ne[0])], chunk=lambda node: 4096 // source(node).ne[0])
def sum_rows(out: Any, x: Any, divisor: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Rows [i0, i1)."""
    for r in range(i0, i1):
        row = contiguous(scratch, row_address(x, r), x.nb0, x.ne0)
        st_f32(row_address(out, r), 0, narrow(row_sum(row, x.ne0) / divisor))


def _with_dim_1(t: Tensor, dim: int) -> Tensor:
    """t with `dim` and dim 1 exchanged."""
    order = [0, 1, 2, 3]
    order[1], order[dim] = dim, 1
    ne, nb = [t.ne[d] for d in order], [t.nb[d] for d in order]
    return Tensor(t.dtype, (ne[0], ne[1], ne[2], ne[3]), (nb[0], nb[1], nb[2], nb[3]), name=t.name, root=t.root, offs=t.offs)


def _bind_cumsum(node: Node) -> dict[str, Any]:
    return {"load": loader("f32", source(node).rows_contiguous), "store": STORE[node.out.dtype.name],
            "result": as_f64 if node.out.dtype is F64 else narrow}


def _exclusive(node: Node) -> list[int | float]:
    return [int(node.params["exclusive"])]


def _column_items(node: Node) -> int:
    t = _with_dim_1(node.out, node.params["dim"])
    return -(-t.ne[0] // COLUMNS) * t.ne[2] * t.ne[3]


def _column_chunk(node: Node) -> int:
    t = _with_dim_1(node.out, node.params["dim"])
    return 4096 // (min(t.ne[0], COLUMNS) * t.ne[1])


@kernel("CUMSUM", "cpu", bind=_bind_cumsum, params=_exclusive, items=_column_items, chunk=_column_chunk, scratch=lambda node: 8 * COLUMNS,
        operands=lambda node: [_with_dim_1(t, node.params["dim"]) for t in (node.out, source(node))])
def cumsum_columns(out: Any, x: Any, exclusive: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Blocks [i0, i1) of columns, summed along dim 1: all float64 sums of a block in scratch."""
    n_blocks = (out.ne0 + COLUMNS - 1) // COLUMNS
    for r in range(i0, i1):
        q = r // n_blocks
        first = (r - q * n_blocks) * COLUMNS
        width = min(COLUMNS, out.ne0 - first)
        o = at(out.p, first * out.nb0 + q % out.ne2 * out.nb2 + q // out.ne2 * out.nb3)
        a = at(x.p, first * x.nb0 + q % x.ne2 * x.nb2 + q // x.ne2 * x.nb3)
        for i in range(width):
            st_f64(scratch, i, 0.0)
        for k in range(out.ne1):
            to, row = at(o, k * out.nb1), at(a, k * x.nb1)
            for i in range(width):
                before = ld_f64(scratch, i)
                after = before + wide(load(row, x.nb0, i))
                st_f64(scratch, i, after)
                store(to, i, result(before if exclusive else after))


@kernel("CUMSUM", "cpu", bind=_bind_cumsum, params=_exclusive, when=lambda node: None if node.params["dim"] == 0 else "the sum is not along dim 0")
def cumsum_rows(out: Any, x: Any, exclusive: Any, i0: Any, i1: Any) -> None:
    """Rows [i0, i1)."""
    for r in range(i0, i1):
        to, row = row_address(out, r), row_address(x, r)
        s = 0.0
        for i in range(out.ne0):
            after = s + wide(load(row, x.nb0, i))
            store(to, i, result(s if exclusive else after))
            s = after
