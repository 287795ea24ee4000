"""Dequantization of Q4_K, Q5_K and Q6_K rows on the CPU; layouts in pyggml.quants.k, values equal to it bit for bit."""

from __future__ import annotations

from typing import Any

from pyggml.cpu.simd import at, helper, intrinsic, itof, ld_f16, ld_i32
from pyggml.cpu.vector import byte_constant, bytes_to_floats, concat, load_bytes, splat, store_floats


def _store_affine(b: Any, ir: Any, dst: Any, q: Any, d: Any, m: Any) -> None:
    """dst[i] = d q[i] - m, in two roundings as the NumPy form has it."""
    n = q.type.count
    store_floats(b, dst, b.fsub(b.fmul(splat(b, ir, d, n), bytes_to_floats(b, ir, q)), splat(b, ir, m, n)))


@intrinsic("void(ptr, ptr, f32, f32, f32, f32)")
def affine_q4x64(b: Any, ir: Any, dst: Any, src: Any, d0: Any, m0: Any, d1: Any, m1: Any) -> None:
    """64 weights: d0 q - m0 of the low nibbles of 32 bytes, then d1 q - m1 of the high ones."""
    packed = load_bytes(b, ir, src, 32)
    _store_affine(b, ir, dst, b.and_(packed, byte_constant(ir, 15, 32)), d0, m0)
    _store_affine(b, ir, b.gep(dst, [ir.IntType(64)(128)]), b.lshr(packed, byte_constant(ir, 4, 32)), d1, m1)


@intrinsic("void(ptr, ptr, ptr, i64, f32, f32, f32, f32)")
def affine_q5x64(b: Any, ir: Any, dst: Any, src: Any, high: Any, bit: Any, d0: Any, m0: Any, d1: Any, m1: Any) -> None:
    """As affine_q4x64, with 16 more where a bit of the 32 bytes at `high` is set: `bit` (a power of two) for the low
    nibbles, the next one for the high."""
    packed, upper = load_bytes(b, ir, src, 32), load_bytes(b, ir, high, 32)
    mask = splat(b, ir, b.trunc(bit, ir.IntType(8)), 32)
    zero, sixteen = byte_constant(ir, 0, 32), byte_constant(ir, 16, 32)

    def fifth(bits: Any) -> Any:
        return b.select(b.icmp_unsigned("!=", b.and_(upper, bits), zero), sixteen, zero)

    _store_affine(b, ir, dst, b.or_(b.and_(packed, byte_constant(ir, 15, 32)), fifth(mask)), d0, m0)
    high_q = b.or_(b.lshr(packed, byte_constant(ir, 4, 32)), fifth(b.add(mask, mask)))
    _store_affine(b, ir, b.gep(dst, [ir.IntType(64)(128)]), high_q, d1, m1)


@intrinsic("void(ptr, ptr, ptr, ptr, f32)")
def scale_q6x128(b: Any, ir: Any, dst: Any, low: Any, high: Any, sc: Any, d: Any) -> None:
    """128 weights (d sc)(q - 32): nibbles in 64 bytes at `low`, upper bit pairs in 32 at `high`, a signed scale byte per 16."""
    i64, f32 = ir.IntType(64), ir.FloatType()
    nibbles = [load_bytes(b, ir, b.gep(low, [i64(32 * k)]), 32) for k in (0, 1)]
    pairs = load_bytes(b, ir, high, 32)
    for i in range(4):
        lo = b.and_(b.lshr(nibbles[i & 1], byte_constant(ir, 4 * (i >> 1), 32)), byte_constant(ir, 15, 32))
        hi = b.shl(b.and_(b.lshr(pairs, byte_constant(ir, 2 * i, 32)), byte_constant(ir, 3, 32)), byte_constant(ir, 4, 32))
        q = bytes_to_floats(b, ir, b.sub(b.or_(lo, hi), byte_constant(ir, 32, 32)))
        scales = [splat(b, ir, b.fmul(d, b.sitofp(b.load(b.gep(sc, [i64(2 * i + k)])), f32)), 16) for k in (0, 1)]
        store_floats(b, b.gep(dst, [i64(128 * i)]), b.fmul(concat(b, ir, *scales), q))


@helper
def scale_words(packed: Any) -> Any:
    """Eight 6-bit scales and eight mins from 12 bytes, one per byte of two words."""
    a, b, c = ld_i32(packed, 0), ld_i32(packed, 1), ld_i32(packed, 2)
    scales = (a & 0x3F3F3F3F) | (((c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030)) << 32)
    mins = (b & 0x3F3F3F3F) | ((((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)) << 32)
    return scales, mins


@helper
def dequant_row_q4_K(src: Any, dst: Any, n: Any) -> Any:
    """n weights from blocks of 144 bytes."""
    for i in range(n // 256):
        block, o = at(src, i * 144), at(dst, i * 1024)
        d, dmin = ld_f16(block, 0), ld_f16(block, 1)
        sc, mn = scale_words(at(block, 4))
        for j in range(4):
            s, m = sc >> (16 * j), mn >> (16 * j)
            affine_q4x64(at(o, j * 256), at(block, 16 + 32 * j), d * itof(s & 255), dmin * itof(m & 255),
                         d * itof((s >> 8) & 255), dmin * itof((m >> 8) & 255))


@helper
def dequant_row_q5_K(src: Any, dst: Any, n: Any) -> Any:
    """n weights from blocks of 176 bytes."""
    for i in range(n // 256):
        block, o = at(src, i * 176), at(dst, i * 1024)
        d, dmin = ld_f16(block, 0), ld_f16(block, 1)
        sc, mn = scale_words(at(block, 4))
        for j in range(4):
            s, m = sc >> (16 * j), mn >> (16 * j)
            affine_q5x64(at(o, j * 256), at(block, 48 + 32 * j), at(block, 16), 1 << (2 * j), d * itof(s & 255), dmin * itof(m & 255),
                         d * itof((s >> 8) & 255), dmin * itof((m >> 8) & 255))


@helper
def dequant_row_q6_K(src: Any, dst: Any, n: Any) -> Any:
    """n weights from blocks of 210 bytes."""
    for i in range(n // 256):
        block, o = at(src, i * 210), at(dst, i * 1024)
        d = ld_f16(block, 104)
        for h in range(2):
            scale_q6x128(at(o, h * 512), at(block, 64 * h), at(block, 128 + 32 * h), at(block, 192 + 8 * h), d)
