"""Dequantization of Q8_0 and Q4_0 rows on the CPU; layouts in pyggml.quants.legacy, values equal to it bit for bit."""

from __future__ import annotations

from typing import Any

from pyggml.cpu.simd import at, helper, intrinsic, ld_f16


def load_bytes(b: Any, ir: Any, p: Any, n: int) -> Any:
    """n bytes at p as a vector (for builders of intrinsics); blocks have no alignment."""
    return b.load(b.bitcast(p, ir.VectorType(ir.IntType(8), n).as_pointer()), align=1)


def splat(b: Any, ir: Any, v: Any, n: int) -> Any:
    """n copies of a scalar (for builders of intrinsics)."""
    one = b.insert_element(ir.Constant(ir.VectorType(v.type, n), ir.Undefined), v, ir.IntType(32)(0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), n), [0] * n))


def constant(ir: Any, v: int, n: int) -> Any:
    """n copies of a constant byte (for builders of intrinsics)."""
    return ir.Constant(ir.VectorType(ir.IntType(8), n), [v] * n)


def concat(b: Any, ir: Any, x: Any, y: Any) -> Any:
    """The elements of vector x, then those of y (for builders of intrinsics)."""
    n = 2 * x.type.count
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), n), list(range(n))))


def store_floats(b: Any, dst: Any, v: Any) -> None:
    """Store a vector of float32 at dst (for builders of intrinsics)."""
    b.store(v, b.bitcast(dst, v.type.as_pointer()), align=4)


def to_floats(b: Any, ir: Any, q: Any) -> Any:
    """float32 of a vector of signed bytes (for builders of intrinsics)."""
    return b.sitofp(q, ir.VectorType(ir.FloatType(), q.type.count))


@intrinsic("void(ptr, ptr, f32)")
def scale_i8x32(b: Any, ir: Any, dst: Any, src: Any, d: Any) -> None:
    """dst[i] = d q[i] for 32 signed bytes q."""
    q = to_floats(b, ir, load_bytes(b, ir, src, 32))
    store_floats(b, dst, b.fmul(splat(b, ir, d, 32), q))


@intrinsic("void(ptr, ptr, f32)")
def scale_q4x32(b: Any, ir: Any, dst: Any, src: Any, d: Any) -> None:
    """dst[i] = d (q[i] - 8), q the low nibbles of 16 bytes, then the high ones."""
    packed = load_bytes(b, ir, src, 16)
    q = concat(b, ir, b.and_(packed, constant(ir, 15, 16)), b.lshr(packed, constant(ir, 4, 16)))
    store_floats(b, dst, b.fmul(splat(b, ir, d, 32), to_floats(b, ir, b.sub(q, constant(ir, 8, 32)))))


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
