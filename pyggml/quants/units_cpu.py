"""Weights in registers: for each type the LLVM IR that turns the bytes of a unit, some neighbouring weights of a row, into vectors of
16 float32.

A unit's builder yields its vectors one by one in the order of the weights, so that a kernel uses each while it is in a register and
goes on. Where scales are packed, another builder unpacks those of a unit to memory first, from where they are broadcast for nothing.
Values are those of pyggml.quants.dequantize, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pyggml.cpu.vector import (
    LANES,
    bytes_to_floats,
    concat,
    float_constant,
    halves_to_floats,
    int_constant,
    load,
    load_bytes,
    load_floats,
    shuffle,
    splat,
    store_floats,
    wide_registers,
)


class Unit(NamedTuple):
    """n weights in nbytes bytes, the builder (builder, ir, pointer, pointer to scales) of their vectors, how many float32 scales it
    reads, and the builder (builder, ir, pointer, pointer to scales) that writes those."""

    n: int
    nbytes: int
    build: Callable[[Any, Any, Any, Any], Iterator[Any]]
    n_scales: int = 0
    unpack: Callable[[Any, Any, Any, Any], None] | None = None


# Pieces


def at_byte(b: Any, ir: Any, p: Any, offset: int) -> Any:
    return b.gep(p, [ir.IntType(64)(offset)])


def half_splat(b: Any, ir: Any, p: Any, offset: int) -> Any:
    """The float16 at byte `offset`, in all lanes."""
    return halves_to_floats(b, ir, splat(b, ir, b.load(b.bitcast(at_byte(b, ir, p, offset), ir.IntType(16).as_pointer()), align=2)))


def _scale(b: Any, ir: Any, s: Any, i: int) -> Any:
    """Unpacked scale i, in all lanes."""
    return splat(b, ir, b.load(b.bitcast(at_byte(b, ir, s, 4 * i), ir.FloatType().as_pointer()), align=4))


def byte_ints(b: Any, ir: Any, p: Any, offset: int, n: int = LANES, *, signed: bool = False) -> Any:
    """n bytes as 32-bit numbers."""
    v, ty = load_bytes(b, ir, at_byte(b, ir, p, offset), n), ir.VectorType(ir.IntType(32), n)
    return b.sext(v, ty) if signed else b.zext(v, ty)


def shift_right(b: Any, ir: Any, v: Any, shifts: int | Sequence[int]) -> Any:
    return v if shifts == 0 else b.lshr(v, int_constant(ir, shifts, v.type.count))


def and_all(b: Any, ir: Any, v: Any, mask: int) -> Any:
    return b.and_(v, int_constant(ir, mask, v.type.count))


def int_floats(b: Any, ir: Any, v: Any) -> Any:
    """float32 of small whole numbers."""
    return b.sitofp(v, ir.VectorType(ir.FloatType(), v.type.count))


def _affine(b: Any, ir: Any, v: Any, bits: int, low: int, d: Any, m: Any = None) -> Any:
    """d (q + low) + m for q the low `bits` bits of each lane of v. Where a register holds 16 float32, the values of all q are made
    first and then picked, which takes one instruction a vector and needs no mask."""
    if wide_registers() and bits <= 4:
        values = b.fmul(d, ir.Constant(ir.VectorType(ir.FloatType(), LANES), [float(i % (1 << bits) + low) for i in range(LANES)]))
        if m is not None:
            values = b.fadd(values, m)
        name = "llvm.x86.avx512.permvar.sf.512"
        fn = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(values.type, [values.type, v.type]), name)
        return b.call(fn, [values, v])
    q = and_all(b, ir, v, (1 << bits) - 1)
    w = b.fmul(d, int_floats(b, ir, b.add(q, int_constant(ir, low, LANES)) if low else q))
    return w if m is None else b.fadd(w, m)


# Plain types and blocks of 32


def _f32(b: Any, ir: Any, p: Any, _: Any) -> Iterator[Any]:
    yield load_floats(b, ir, p)


def _f16(b: Any, ir: Any, p: Any, _: Any) -> Iterator[Any]:
    yield halves_to_floats(b, ir, load(b, ir, p, ir.IntType(16), LANES, 2))


def _bf16(b: Any, ir: Any, p: Any, _: Any) -> Iterator[Any]:
    v = b.zext(load(b, ir, p, ir.IntType(16), LANES, 2), ir.VectorType(ir.IntType(32), LANES))
    yield b.bitcast(b.shl(v, int_constant(ir, 16, LANES)), ir.VectorType(ir.FloatType(), LANES))


def _q8_0(b: Any, ir: Any, p: Any, _: Any) -> Iterator[Any]:
    d = half_splat(b, ir, p, 0)
    for k in (2, 18):
        yield b.fmul(d, bytes_to_floats(b, ir, load_bytes(b, ir, at_byte(b, ir, p, k), LANES)))


def _nibbles(b: Any, ir: Any, p: Any, offset: int, low: int, d: Any, m: Any = None) -> Iterator[Any]:
    """32 weights d (q + low) + m: the low nibbles of 16 bytes, then the high ones."""
    v = byte_ints(b, ir, p, offset)
    for shift in (0, 4):
        yield _affine(b, ir, shift_right(b, ir, v, shift), 4, low, d, m)


def _five_bits(b: Any, ir: Any, p: Any, offset: int, low: int, d: Any, m: Any = None) -> Iterator[Any]:
    """The same of 16 bytes whose fifth bits stand in the 4 bytes before them."""
    i32 = ir.IntType(32)
    high = splat(b, ir, b.load(b.bitcast(at_byte(b, ir, p, offset - 4), i32.as_pointer()), align=2))
    v = byte_ints(b, ir, p, offset)
    for k, shift in enumerate((0, 4)):
        bit = b.and_(high, int_constant(ir, [1 << (k * LANES + i) for i in range(LANES)], LANES))
        q = and_all(b, ir, shift_right(b, ir, v, shift), 15)
        fifth = b.select(b.icmp_unsigned("!=", bit, int_constant(ir, 0, LANES)), int_constant(ir, 16 + low, LANES), int_constant(ir, low, LANES))
        w = b.fmul(d, int_floats(b, ir, b.add(q, fifth)))
        yield w if m is None else b.fadd(w, m)


def _q4_0(b: Any, ir: Any, p: Any, _: Any) -> Iterator[Any]:
    return _nibbles(b, ir, p, 2, -8, half_splat(b, ir, p, 0))


def _q4_1(b: Any, ir: Any, p: Any, _: Any) -> Iterator[Any]:
    return _nibbles(b, ir, p, 4, 0, half_splat(b, ir, p, 0), half_splat(b, ir, p, 2))


def _q5_0(b: Any, ir: Any, p: Any, _: Any) -> Iterator[Any]:
    return _five_bits(b, ir, p, 6, -16, half_splat(b, ir, p, 0))


def _q5_1(b: Any, ir: Any, p: Any, _: Any) -> Iterator[Any]:
    return _five_bits(b, ir, p, 8, 0, half_splat(b, ir, p, 0), half_splat(b, ir, p, 2))


# Super-blocks of 256


def _scale_and_min(b: Any, ir: Any, p: Any, offset: int) -> Any:
    """The two float16 at byte `offset`: eight times the first, then eight times the negated second."""
    pair = halves_to_floats(b, ir, load(b, ir, at_byte(b, ir, p, offset), ir.IntType(16), 2, 2))
    return b.fmul(shuffle(b, ir, pair, pair, [0] * 8 + [1] * 8), ir.Constant(ir.VectorType(ir.FloatType(), LANES), [1.0] * 8 + [-1.0] * 8))


def six_bit_words(b: Any, ir: Any, p: Any) -> tuple[Any, Any]:
    """Of q4_K and q5_K: eight scales and eight mins, a byte each of two 64-bit words, from 12 bytes of six-bit numbers."""
    i32, i64 = ir.IntType(32), ir.IntType(64)
    x, y, z = (b.load(b.bitcast(at_byte(b, ir, p, 4 + 4 * i), i32.as_pointer()), align=2) for i in range(3))
    low, pairs, nibbles = i32(0x3F3F3F3F), i32(0x30303030), i32(0x0F0F0F0F)

    def word(first: Any, last: Any) -> Any:
        upper = b.or_(b.and_(last, nibbles), b.and_(b.lshr(first, i32(2)), pairs))
        return b.or_(b.zext(b.and_(first, low), i64), b.shl(b.zext(upper, i64), i64(32)))

    return word(x, z), word(y, b.lshr(z, i32(4)))


def _unpack_k4(b: Any, ir: Any, p: Any, s: Any) -> None:
    """Eight scales d sc, eight offsets -dmin mn."""
    scales, mins = (b.bitcast(v, ir.VectorType(ir.IntType(8), 8)) for v in six_bit_words(b, ir, p))
    q = b.zext(concat(b, ir, scales, mins), ir.VectorType(ir.IntType(32), LANES))
    store_floats(b, s, b.fmul(_scale_and_min(b, ir, p, 0), int_floats(b, ir, q)))


def _q4_K(b: Any, ir: Any, p: Any, s: Any) -> Iterator[Any]:
    for j in range(4):
        halves = [byte_ints(b, ir, p, 16 + 32 * j + 16 * k) for k in (0, 1)]
        for g in (0, 1):
            d, m = _scale(b, ir, s, 2 * j + g), _scale(b, ir, s, 8 + 2 * j + g)
            for v in halves:
                yield _affine(b, ir, shift_right(b, ir, v, 4 * g), 4, 0, d, m)


def byte_vector(ir: Any, v: int) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(8), 32), [v] * 32)


def _halves(b: Any, ir: Any, q: Any, *, signed: bool = False) -> list[Any]:
    """32 bytes as two vectors of float32."""
    i32 = ir.VectorType(ir.IntType(32), LANES)
    parts = [shuffle(b, ir, q, q, range(k, k + LANES)) for k in (0, LANES)]
    return [int_floats(b, ir, b.sext(v, i32) if signed else b.zext(v, i32)) for v in parts]


def bytes_q5_K(b: Any, ir: Any, p: Any) -> Iterator[Any]:
    """Eight vectors of 32 bytes: the weights' numbers."""
    high = load_bytes(b, ir, at_byte(b, ir, p, 16), 32)
    for j in range(4):
        packed = load_bytes(b, ir, at_byte(b, ir, p, 48 + 32 * j), 32)
        for g in (0, 1):
            fifth = b.icmp_unsigned("!=", b.and_(high, byte_vector(ir, 1 << (2 * j + g))), byte_vector(ir, 0))
            q = b.lshr(packed, byte_vector(ir, 4)) if g else b.and_(packed, byte_vector(ir, 15))
            yield b.select(fifth, b.or_(q, byte_vector(ir, 16)), q)


def _q5_K(b: Any, ir: Any, p: Any, s: Any) -> Iterator[Any]:
    for g, q in enumerate(bytes_q5_K(b, ir, p)):
        d, m = _scale(b, ir, s, g), _scale(b, ir, s, 8 + g)
        for v in _halves(b, ir, q):
            yield b.fadd(b.fmul(d, v), m)


def _unpack_q6_K(b: Any, ir: Any, p: Any, s: Any) -> None:
    store_floats(b, s, b.fmul(half_splat(b, ir, p, 208), int_floats(b, ir, byte_ints(b, ir, p, 192, signed=True))))


def bytes_q6_K(b: Any, ir: Any, p: Any) -> Iterator[Any]:
    """Eight vectors of 32 signed bytes: the weights' numbers."""
    for h in (0, 1):
        nibbles = [load_bytes(b, ir, at_byte(b, ir, p, 64 * h + 32 * k), 32) for k in (0, 1)]
        pairs = load_bytes(b, ir, at_byte(b, ir, p, 128 + 32 * h), 32)
        for i in range(4):
            low = b.and_(b.lshr(nibbles[i & 1], byte_vector(ir, 4 * (i >> 1))), byte_vector(ir, 15))
            two = b.and_(b.lshr(pairs, byte_vector(ir, 2 * i)), byte_vector(ir, 3))
            yield b.sub(b.or_(low, b.shl(two, byte_vector(ir, 4))), byte_vector(ir, 32))


def _q6_K(b: Any, ir: Any, p: Any, s: Any) -> Iterator[Any]:
    for g, q in enumerate(bytes_q6_K(b, ir, p)):
        for k, v in enumerate(_halves(b, ir, q, signed=True)):
            yield b.fmul(_scale(b, ir, s, 2 * g + k), v)


def _unpack_q2_K(b: Any, ir: Any, p: Any, s: Any) -> None:
    """Sixteen scales d sc, sixteen offsets -dmin mn."""
    packed = byte_ints(b, ir, p, 0)
    store_floats(b, s, b.fmul(half_splat(b, ir, p, 80), int_floats(b, ir, and_all(b, ir, packed, 15))))
    m = b.fmul(half_splat(b, ir, p, 82), float_constant(ir, -1.0))
    store_floats(b, at_byte(b, ir, s, 64), b.fmul(m, int_floats(b, ir, shift_right(b, ir, packed, 4))))


def _q2_K(b: Any, ir: Any, p: Any, s: Any) -> Iterator[Any]:
    for h in (0, 1):
        halves = [byte_ints(b, ir, p, 16 + 32 * h + 16 * k) for k in (0, 1)]
        for i in range(4):
            for k, v in enumerate(halves):
                place = 8 * h + 2 * i + k
                yield _affine(b, ir, shift_right(b, ir, v, 2 * i), 2, 0, _scale(b, ir, s, place), _scale(b, ir, s, 16 + place))


def scale_ints_q3_K(b: Any, ir: Any, p: Any) -> Any:
    """Sixteen scales, less 32: the low nibbles of 8 bytes, the high ones, and upper bit pairs in 4 bytes more."""
    packed = load_bytes(b, ir, at_byte(b, ir, p, 96), 12)
    i32 = ir.VectorType(ir.IntType(32), LANES)
    low = b.zext(shuffle(b, ir, packed, packed, [j % 8 for j in range(LANES)]), i32)
    low = and_all(b, ir, shift_right(b, ir, low, [0] * 8 + [4] * 8), 15)
    two = b.zext(shuffle(b, ir, packed, packed, [8 + j % 4 for j in range(LANES)]), i32)
    two = and_all(b, ir, shift_right(b, ir, two, [2 * (j // 4) for j in range(LANES)]), 3)
    return b.sub(b.or_(low, b.shl(two, int_constant(ir, 4, LANES))), int_constant(ir, 32, LANES))


def _unpack_q3_K(b: Any, ir: Any, p: Any, s: Any) -> None:
    store_floats(b, s, b.fmul(half_splat(b, ir, p, 108), int_floats(b, ir, scale_ints_q3_K(b, ir, p))))


def _q3_K(b: Any, ir: Any, p: Any, s: Any) -> Iterator[Any]:
    high = [byte_ints(b, ir, p, 16 * k) for k in (0, 1)]
    for h in (0, 1):
        halves = [byte_ints(b, ir, p, 32 + 32 * h + 16 * k) for k in (0, 1)]
        for i in range(4):
            for k, v in enumerate(halves):
                bit = 4 * h + i
                third = high[k] if bit == 2 else b.shl(high[k], int_constant(ir, 2 - bit, LANES)) if bit < 2 else shift_right(b, ir, high[k], bit - 2)
                q = b.or_(and_all(b, ir, shift_right(b, ir, v, 2 * i), 3), and_all(b, ir, third, 4))
                yield _affine(b, ir, q, 3, -4, _scale(b, ir, s, 8 * h + 2 * i + k))


UNITS: dict[str, Unit] = {
    "f32": Unit(16, 64, _f32), "f16": Unit(16, 32, _f16), "bf16": Unit(16, 32, _bf16), "q8_0": Unit(32, 34, _q8_0),
    "q4_0": Unit(32, 18, _q4_0), "q4_1": Unit(32, 20, _q4_1), "q5_0": Unit(32, 22, _q5_0), "q5_1": Unit(32, 24, _q5_1),
    "q2_K": Unit(256, 84, _q2_K, 32, _unpack_q2_K), "q3_K": Unit(256, 110, _q3_K, 16, _unpack_q3_K),
    "q4_K": Unit(256, 144, _q4_K, 16, _unpack_k4), "q5_K": Unit(256, 176, _q5_K, 16, _unpack_k4), "q6_K": Unit(256, 210, _q6_K, 16, _unpack_q6_K),
}
