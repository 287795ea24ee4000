"""Quantized weights as 16-bit whole numbers in registers, for products with activations of 16 bits.

A super-block is 256 weights. Types with a scale for each have w = D (q s) + m, with whole numbers q s of 16 bits; those of blocks of 32 have
w = D q + m with a D for each block. Builders yield q s, or q, as eight vectors of 32 numbers; what else a super-block has is unpacked to
memory first:

  byte 0    eight float32 D, one per block, or one
  byte 64   sixteen float32 offsets m, to be multiplied with sums of activations: of the 32 of each block, in the upper eight (the lower ones
            are not used), or of each 16
  byte 128  sixteen scales s, each twice, as 16-bit numbers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pyggml.cpu.vector import concat, float_constant, halves_to_floats, int_constant, load, load_bytes, shuffle, splat, store_floats
from pyggml.quants.units_cpu import (
    UNITS,
    and_all,
    at_byte,
    byte_ints,
    byte_vector,
    bytes_q5_K,
    bytes_q6_K,
    half_splat,
    int_floats,
    scale_ints_q3_K,
    shift_right,
    six_bit_words,
)

SUPER = 256
UNPACKED = 192  # bytes
OFFSETS, SCALES = 64, 128  # where they stand in these


class Words(NamedTuple):
    """A type: the sums that its offsets are for (0: it has none; 32 or 16), whether each block of 32 has its D, the bytes of a super-block,
    the builder (builder, ir, pointers to its blocks, pointer to what is unpacked) of its numbers, and the builder that unpacks."""

    offsets: int
    blocks: bool
    nbytes: int
    build: Callable[[Any, Any, list[Any], Any], Iterator[Any]]
    unpack: Callable[[Any, Any, list[Any], Any], None]


# Blocks of 32


def _half_of_each(b: Any, ir: Any, blocks: list[Any], offset: int) -> Any:
    """The float16 at byte `offset` of each of eight blocks, as float32."""
    i16 = ir.IntType(16)
    v = ir.Constant(ir.VectorType(i16, 8), ir.Undefined)
    for i, p in enumerate(blocks):
        v = b.insert_element(v, b.load(b.bitcast(at_byte(b, ir, p, offset), i16.as_pointer()), align=2), ir.IntType(32)(i))
    return halves_to_floats(b, ir, v)


def _unpack_d(b: Any, ir: Any, blocks: list[Any], s: Any) -> None:
    store_floats(b, s, _half_of_each(b, ir, blocks, 0))


def _unpack_dm(b: Any, ir: Any, blocks: list[Any], s: Any) -> None:
    _unpack_d(b, ir, blocks, s)
    store_floats(b, at_byte(b, ir, s, OFFSETS), float_constant(ir, 0.0, 8))
    store_floats(b, at_byte(b, ir, s, OFFSETS + 32), _half_of_each(b, ir, blocks, 2))


def _words(b: Any, ir: Any, v: Any, *, signed: bool = False) -> Any:
    """Bytes as 16-bit numbers."""
    ty = ir.VectorType(ir.IntType(16), v.type.count)
    return b.sext(v, ty) if signed else b.zext(v, ty)


def _constant(ir: Any, v: int, n: int = 32) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(16), n), [v] * n)


def _q8_0(b: Any, ir: Any, blocks: list[Any], _: Any) -> Iterator[Any]:
    for p in blocks:
        yield _words(b, ir, load_bytes(b, ir, at_byte(b, ir, p, 2), 32), signed=True)


def _nibbles(offset: int, low: int, high: int | None = None) -> Callable[[Any, Any, list[Any], Any], Iterator[Any]]:
    """The builder for nibbles of 16 bytes at `offset`, less `low`; fifth bits in the four bytes at `high`."""
    def build(b: Any, ir: Any, blocks: list[Any], _: Any) -> Iterator[Any]:
        for p in blocks:
            v = _words(b, ir, load_bytes(b, ir, at_byte(b, ir, p, offset), 16))
            q = concat(b, ir, b.and_(v, _constant(ir, 15, 16)), b.lshr(v, _constant(ir, 4, 16)))
            if high is not None:
                bits = b.load(b.bitcast(at_byte(b, ir, p, high), ir.IntType(32).as_pointer()), align=2)
                q = b.select(b.bitcast(bits, ir.VectorType(ir.IntType(1), 32)), b.or_(q, _constant(ir, 16)), q)
            yield b.sub(q, _constant(ir, low)) if low else q

    return build


# Super-blocks


def _store_scales(b: Any, ir: Any, s: Any, v: Any) -> None:
    """Sixteen 32-bit numbers, each as two of 16 bits."""
    twice = b.or_(and_all(b, ir, v, 0xFFFF), b.shl(v, int_constant(ir, 16)))
    b.store(twice, b.bitcast(at_byte(b, ir, s, SCALES), twice.type.as_pointer()), align=4)


def _store_d(b: Any, ir: Any, p: Any, s: Any, offset: int) -> None:
    d = half_splat(b, ir, p, offset)
    store_floats(b, s, shuffle(b, ir, d, d, range(4)))


def _scaled(b: Any, ir: Any, q: Any, s: Any, g: int, per: int) -> Any:
    """Group g of 32 numbers times its scale, or each half times its own."""
    place, i32 = at_byte(b, ir, s, SCALES + 4 * g * (32 // per)), ir.IntType(32)
    if per == 32:
        scales = splat(b, ir, b.load(b.bitcast(place, i32.as_pointer()), align=4))
    else:
        pair = load(b, ir, place, i32, 2, 4)
        scales = shuffle(b, ir, pair, pair, [0] * 8 + [1] * 8)
    return b.mul(q, b.bitcast(scales, q.type))


def _unpack_k4(b: Any, ir: Any, blocks: list[Any], s: Any) -> None:
    # Half-width vectors: this is done for each row and would otherwise take as long as the products of one column.
    p, f32 = blocks[0], ir.VectorType(ir.FloatType(), 8)
    scales, mins = (b.zext(b.bitcast(v, ir.VectorType(ir.IntType(8), 8)), ir.VectorType(ir.IntType(32), 8)) for v in six_bit_words(b, ir, p))
    twice = b.or_(scales, b.shl(scales, int_constant(ir, 16, 8)))
    b.store(twice, b.bitcast(at_byte(b, ir, s, SCALES), twice.type.as_pointer()), align=4)
    pair = halves_to_floats(b, ir, load(b, ir, p, ir.IntType(16), 2, 2))
    m = b.fsub(ir.Constant(f32, [-0.0] * 8), shuffle(b, ir, pair, pair, [1] * 8))
    store_floats(b, at_byte(b, ir, s, OFFSETS), float_constant(ir, 0.0, 8))
    store_floats(b, at_byte(b, ir, s, OFFSETS + 32), b.fmul(m, int_floats(b, ir, mins)))
    b.store(b.extract_element(pair, ir.IntType(32)(0)), b.bitcast(s, ir.FloatType().as_pointer()), align=4)


def _q4_K(b: Any, ir: Any, blocks: list[Any], s: Any) -> Iterator[Any]:
    for j in range(4):
        v = _words(b, ir, load_bytes(b, ir, at_byte(b, ir, blocks[0], 16 + 32 * j), 32))
        yield _scaled(b, ir, b.and_(v, _constant(ir, 15)), s, 2 * j, 32)
        yield _scaled(b, ir, b.lshr(v, _constant(ir, 4)), s, 2 * j + 1, 32)


def _q5_K(b: Any, ir: Any, blocks: list[Any], s: Any) -> Iterator[Any]:
    for g, q in enumerate(bytes_q5_K(b, ir, blocks[0])):
        yield _scaled(b, ir, _words(b, ir, q), s, g, 32)


def _unpack_q6_K(b: Any, ir: Any, blocks: list[Any], s: Any) -> None:
    _store_scales(b, ir, s, byte_ints(b, ir, blocks[0], 192, signed=True))
    _store_d(b, ir, blocks[0], s, 208)


def _q6_K(b: Any, ir: Any, blocks: list[Any], s: Any) -> Iterator[Any]:
    for g, q in enumerate(bytes_q6_K(b, ir, blocks[0])):
        yield _scaled(b, ir, _words(b, ir, q, signed=True), s, g, 16)


def _unpack_q2_K(b: Any, ir: Any, blocks: list[Any], s: Any) -> None:
    p = blocks[0]
    packed = byte_ints(b, ir, p, 0)
    _store_scales(b, ir, s, and_all(b, ir, packed, 15))
    m = b.fmul(half_splat(b, ir, p, 82), float_constant(ir, -1.0))
    store_floats(b, at_byte(b, ir, s, OFFSETS), b.fmul(m, int_floats(b, ir, shift_right(b, ir, packed, 4))))
    _store_d(b, ir, p, s, 80)


def _pairs(b: Any, ir: Any, p: Any, offset: int) -> Iterator[Any]:
    """Eight vectors of 32 bytes: bit pairs of 64 bytes."""
    for h in (0, 1):
        v = load_bytes(b, ir, at_byte(b, ir, p, offset + 32 * h), 32)
        for i in range(4):
            yield b.and_(b.lshr(v, byte_vector(ir, 2 * i)), byte_vector(ir, 3))


def _q2_K(b: Any, ir: Any, blocks: list[Any], s: Any) -> Iterator[Any]:
    for g, q in enumerate(_pairs(b, ir, blocks[0], 16)):
        yield _scaled(b, ir, _words(b, ir, q), s, g, 16)


def _unpack_q3_K(b: Any, ir: Any, blocks: list[Any], s: Any) -> None:
    _store_scales(b, ir, s, scale_ints_q3_K(b, ir, blocks[0]))
    _store_d(b, ir, blocks[0], s, 108)


def _q3_K(b: Any, ir: Any, blocks: list[Any], s: Any) -> Iterator[Any]:
    high = load_bytes(b, ir, blocks[0], 32)
    for g, q in enumerate(_pairs(b, ir, blocks[0], 32)):
        third = b.icmp_unsigned("!=", b.and_(high, byte_vector(ir, 1 << g)), byte_vector(ir, 0))
        q = b.select(third, q, b.sub(q, byte_vector(ir, 4)))
        yield _scaled(b, ir, _words(b, ir, q, signed=True), s, g, 16)


def _of_blocks(name: str, offsets: int, build: Callable[[Any, Any, list[Any], Any], Iterator[Any]]) -> Words:
    return Words(offsets, True, UNITS[name].nbytes * 8, build, _unpack_dm if offsets else _unpack_d)


WORDS: dict[str, Words] = {
    "q8_0": _of_blocks("q8_0", 0, _q8_0), "q4_0": _of_blocks("q4_0", 0, _nibbles(2, 8)), "q4_1": _of_blocks("q4_1", 32, _nibbles(4, 0)),
    "q5_0": _of_blocks("q5_0", 0, _nibbles(6, 16, 2)), "q5_1": _of_blocks("q5_1", 32, _nibbles(8, 0, 4)),
    "q2_K": Words(16, False, 84, _q2_K, _unpack_q2_K), "q3_K": Words(0, False, 110, _q3_K, _unpack_q3_K),
    "q4_K": Words(32, False, 144, _q4_K, _unpack_k4), "q5_K": Words(32, False, 176, _q5_K, _unpack_k4), "q6_K": Words(0, False, 210, _q6_K, _unpack_q6_K),
}
