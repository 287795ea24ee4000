"""CPU kernel of TRI: each row of the result is a run of fill, a run of x and a run of fill. An item is a row."""

from __future__ import annotations

from typing import Any

from pyggml.cpu.rows import load_next, loader
from pyggml.cpu.simd import STORE, as_f64, at, narrow, st_f32
from pyggml.dtypes import F64
from pyggml.registry import kernel
from pyggml.tensor import Node

load, store, as_element = load_next, st_f32, narrow


def _bind(node: Node) -> dict[str, Any]:
    x = node.src[0]
    assert x is not None
    return {"load": loader(x.dtype.name, x.rows_contiguous), "store": STORE[x.dtype.name], "as_element": as_f64 if x.dtype is F64 else narrow}


def _params(node: Node) -> list[int | float]:
    kind, (column, row) = node.params["kind"], node.params["dims"]
    return [column, row, int(kind.startswith("upper")), int(kind.endswith("diag")), float(node.params["fill"])]


@kernel("TRI", "cpu", bind=_bind, params=_params)
def tri_rows(out: Any, x: Any, column: Any, row: Any, upper: Any, diag: Any, fill: Any, i0: Any, i1: Any) -> None:
    """Rows [i0, i1). The elements kept of a row are [lo, hi), as j - i grows or falls along dim 0 or stays the same."""
    outside = as_element(fill)
    for r in range(i0, i1):
        q = r // out.ne1
        j1, j2, j3 = r - q * out.ne1, q % out.ne2, q // out.ne2
        j = j1 if column == 1 else j2 if column == 2 else j3
        i = j1 if row == 1 else j2 if row == 2 else j3
        lo, hi = 0, out.ne0
        if column == 0:
            if upper:
                lo = i + 1 - diag
            else:
                hi = i + diag
        elif row == 0:
            if upper:
                hi = j + diag
            else:
                lo = j + 1 - diag
        elif (j <= i - diag) if upper else (j >= i + diag):
            hi = 0
        lo, hi = min(lo, out.ne0), min(hi, out.ne0)
        to = at(out.p, j1 * out.nb1 + j2 * out.nb2 + j3 * out.nb3)
        at_x = at(x.p, j1 * x.nb1 + j2 * x.nb2 + j3 * x.nb3)
        for k in range(lo):
            store(to, k, outside)
        for k in range(lo, hi):
            store(to, k, load(at_x, x.nb0, k))
        for k in range(hi, out.ne0):
            store(to, k, outside)
