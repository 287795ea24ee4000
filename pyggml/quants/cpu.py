"""Rows of stored weights to float32 on the CPU: `DEQUANT_ROW[type name]` is a helper (src, dst, n) for kernels to bind.

src points at a row's first block, dst at n float32 (n a multiple of the block); the two do not overlap. Values are those
of pyggml.quants.dequantize, bit for bit.
"""

from __future__ import annotations

from typing import Any

from pyggml.cpu.simd import Helper, copy_bytes, helper, ld_bf16, ld_f16, st_f32
from pyggml.quants.k_cpu import dequant_row_q4_K, dequant_row_q5_K, dequant_row_q6_K
from pyggml.quants.legacy_cpu import dequant_row_q4_0, dequant_row_q8_0


@helper
def dequant_row_f32(src: Any, dst: Any, n: Any) -> Any:
    """A copy."""
    copy_bytes(dst, src, n * 4)


@helper
def dequant_row_f16(src: Any, dst: Any, n: Any) -> Any:
    """Widen halves."""
    for i in range(n):
        st_f32(dst, i, ld_f16(src, i))


@helper
def dequant_row_bf16(src: Any, dst: Any, n: Any) -> Any:
    """Widen bfloat16s."""
    for i in range(n):
        st_f32(dst, i, ld_bf16(src, i))


DEQUANT_ROW: dict[str, Helper] = {
    "f32": dequant_row_f32, "f16": dequant_row_f16, "bf16": dequant_row_bf16, "q8_0": dequant_row_q8_0, "q4_0": dequant_row_q4_0,
    "q4_K": dequant_row_q4_K, "q5_K": dequant_row_q5_K, "q6_K": dequant_row_q6_K,
}
