"""Dequantization of Q8_0 and Q4_0 rows on the CPU; layouts in pyggml.quants.legacy, values equal to it bit for bit."""

from __future__ import annotations

from typing import Any

from pyggml.cpu.simd import at, helper, intrinsic, ld_f16
from pyggml.cpu.vector import byte_constant, bytes_to_floats, concat, load_bytes, splat, store_floats


@intrinsic("void(ptr, ptr, f32)")
def scale_i8x32(b: Any, ir: Any, dst: Any, src: Any, d: Any) -> None:
    """dst[i] = d q[i] for 32 signed bytes q."""
    q = bytes_to_floats(b, ir, load_bytes(b, ir, src, 32))
    store_floats(b, dst, b.fmul(splat(b, ir, d, 32), q))


@intrinsic("void(ptr, ptr, f32)")
def scale_q4x32(b: Any, ir: Any, dst: Any, src: Any, d: Any) -> None:
    """dst[i] = d (q[i] - 8), q the low nibbles of 16 bytes, then the high ones."""
    packed = load_bytes(b, ir, src, 16)
    q = concat(b, ir, b.and_(packed, byte_constant(ir, 15, 16)), b.lshr(packed, byte_constant(ir, 4, 16)))
    store_floats(b, dst, b.fmul(splat(b, ir, d, 32), bytes_to_floats(b, ir, b.sub(q, byte_constant(ir, 8, 32)))))


@helper
def dequant_row_q8_0(src: Any, dst: Any, n: Any) -> Any:
    """n weights from blocks of 34 bytes."""
    for i in range(n // 32):
        block = at(src, i * 34)
        scale_i8x32(at(dst, i * 128), at(block, 2), ld_f16(block, 0))


@helper
def dequant_row_q4_0(src: Any, dst: Any, n: Any) -> Any:
    """n weights from blocks of 18 bytes."""
    for i in range(n // 32):
        block = at(src, i * 18)
        scale_q4x32(at(dst, i * 128), at(block, 2), ld_f16(block, 0))
