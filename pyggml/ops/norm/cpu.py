"""CPU kernels of the norms: an item is a row. Rows whose elements do not follow each other are copied to scratch first."""

from __future__ import annotations

from typing import Any

from pyggml.cpu.rows import finish, row_address, row_in_place, row_squares, row_sum
from pyggml.cpu.simd import ld_f32, narrow, sqrt64, st_f32, wide
from pyggml.ops.reduce.cpu import bind_row, row_scratch
from pyggml.registry import kernel
from pyggml.tensor import Node

contiguous = row_in_place


def _eps(node: Node) -> list[int | float]:
    return [float(node.params["eps"])]


@kernel("RMS_NORM", "cpu", bind=bind_row, scratch=row_scratch, params=_eps, epilogue=True)
def rms_norm_rows(out: Any, x: Any, eps: Any, extra: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Rows [i0, i1)."""
    for r in range(i0, i1):
        row, to = contiguous(scratch, row_address(x, r), x.nb0, x.ne0), row_address(out, r)
        scale = narrow(1.0 / sqrt64(row_squares(row, x.ne0, 0.0) / x.ne0 + eps))
        for i in range(x.ne0):
            st_f32(to, i, ld_f32(row, i) * scale)
        q = r // out.ne1
        finish(extra, to, 0, x.ne0, r - q * out.ne1, q % out.ne2, q // out.ne2)


@kernel("NORM", "cpu", bind=bind_row, scratch=row_scratch, params=_eps)
def norm_rows(out: Any, x: Any, eps: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Rows [i0, i1). The mean is taken off in float64: it may be far above the spread."""
    for r in range(i0, i1):
        row, to = contiguous(scratch, row_address(x, r), x.nb0, x.ne0), row_address(out, r)
        mean = row_sum(row, x.ne0) / x.ne0
        scale = 1.0 / sqrt64(row_squares(row, x.ne0, mean) / x.ne0 + eps)
        for i in range(x.ne0):
            st_f32(to, i, narrow((wide(ld_f32(row, i)) - mean) * scale))
