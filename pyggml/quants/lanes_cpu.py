"""Quantized weights as 16-bit whole numbers with the rows of a matrix side by side: in each vector, a lane of 32 bits holds two weights
of one of 16 rows. A sum of products with a column then needs no sum over lanes, a group's scale is a vector of 16 rows' own, and what is
unpacked serves any number of columns.

Of each four neighbouring weights w0 to w3 one vector holds (w0, w2), the next one (w1, w3). A super-block is 256 weights of each row;
types with blocks of 32 may end with a part of one. Scales are unpacked to memory first, a vector for each group of 32 or 16 weights
(w = d (q - low) - m): d of group g at byte 64 g, m at OFFSETS + 64 g. What else a builder keeps for a super-block stands at HIGH.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pyggml.cpu.vector import LANES, concat, float_constant, halves_to_floats, int_constant, load, loop, shuffle, splat, store_floats
from pyggml.quants.units_cpu import UNITS, and_all, int_floats, shift_right

OFFSETS, HIGH, SCALE_BYTES = 1024, 2048, 2560


class Rows(NamedTuple):
    """Pointers to a byte of rows 0, 4, 8 and 12 of 16, and the bytes from row to row."""

    fours: list[Any]
    step: Any

    def at(self, b: Any, offset: Any) -> Rows:
        return Rows([b.gep(p, [offset]) for p in self.fours], self.step)

    def row(self, b: Any, ir: Any, r: int, offset: int) -> Any:
        return b.gep(b.gep(self.fours[r // 4], [b.mul(self.step, ir.IntType(64)(r % 4))]), [ir.IntType(64)(offset)])


def rows_of(b: Any, ir: Any, p: Any, step: Any) -> Rows:
    """The 16 rows from p on. What the pointers have to do with each other is hidden from LLVM, which would else keep 16 offsets on the
    stack and load each for each use."""
    kind = ir.FunctionType(p.type, [p.type])
    return Rows([b.asm(kind, "", "=r,0", [b.gep(p, [b.mul(step, ir.IntType(64)(4 * k))])], False) for k in range(4)], step)


class Lanes(NamedTuple):
    """A type: weights of a group, low (a power of two, or 0), whether groups have offsets m, whether it has blocks of 32, bytes of a
    super-block, weights of a step, the builder (builder, ir, rows at a super-block, pointer to scales, blocks of 32) that unpacks scales,
    and the builder (builder, ir, rows, pointer to scales, number of a step) that yields 16 vectors of q for each 32 weights of a step."""

    group: int
    low: int
    offsets: bool
    blocks: bool
    nbytes: int
    step: int
    unpack: Callable[[Any, Any, Rows, Any, Any], None]
    build: Callable[[Any, Any, Rows, Any, Any], Iterator[list[Any]]]


# Pieces


def _turned(b: Any, ir: Any, rows: Rows, offset: int, n: int) -> list[Any]:
    """n = 16 or 32 bytes of each row as n / 4 vectors of 16 rows' 32 bits."""
    i32 = ir.IntType(32)

    def piece(r: int) -> Any:
        return load(b, ir, rows.row(b, ir, r, offset), i32, n // 4, 1)

    def four(vectors: Sequence[Any]) -> list[Any]:
        """Four vectors' 4 x 4 blocks, one for each quarter of a register, turned."""
        def pairs(x: Any, y: Any, k: int) -> Any:
            return shuffle(b, ir, x, y, [q + i for q in range(0, LANES, 4) for i in (k, LANES + k, k + 1, LANES + k + 1)])

        def halves(x: Any, y: Any, k: int) -> Any:
            return shuffle(b, ir, x, y, [q + i for q in range(0, LANES, 4) for i in (k, k + 1, LANES + k, LANES + k + 1)])

        low = [pairs(vectors[i], vectors[i + 1], 0) for i in (0, 2)]
        high = [pairs(vectors[i], vectors[i + 1], 2) for i in (0, 2)]
        return [halves(x, y, k) for x, y in (low, high) for k in (0, 2)]

    if n == 16:
        return four([concat(b, ir, concat(b, ir, piece(i), piece(4 + i)), concat(b, ir, piece(8 + i), piece(12 + i))) for i in range(4)])
    first, second = (four([concat(b, ir, piece(r + i), piece(r + 4 + i)) for i in range(4)]) for r in (0, 8))
    # Each quarter of these holds four rows' word i or 4 + i.
    even, odd = ([*range(k, k + 4), *range(k + 8, k + 12), *range(k + 16, k + 20), *range(k + 24, k + 28)] for k in (0, 4))
    return [shuffle(b, ir, x, y, order) for order in (even, odd) for x, y in zip(first, second, strict=True)]


def _halves(b: Any, ir: Any, rows: Rows, offset: int) -> Any:
    """The float16 at byte `offset` of each row, as float32."""
    i16 = ir.IntType(16)
    v = ir.Constant(ir.VectorType(i16, LANES), ir.Undefined)
    for r in range(LANES):
        v = b.insert_element(v, b.load(b.bitcast(rows.row(b, ir, r, offset), i16.as_pointer()), align=2), ir.IntType(32)(r))
    return halves_to_floats(b, ir, v)


def _half_of(b: Any, ir: Any, v: Any, k: int) -> Any:
    """float32 of the lower (k = 0) or upper float16 in each lane."""
    bits = b.trunc(shift_right(b, ir, v, 16 * k), ir.VectorType(ir.IntType(16), LANES))
    return halves_to_floats(b, ir, bits)


def _at(b: Any, ir: Any, s: Any, base: int, group: Any) -> Any:
    """Where the vector of a group stands."""
    return b.gep(s, [b.add(b.mul(group, ir.IntType(64)(64)), ir.IntType(64)(base))])


def _numbers(ir: Any, v: int) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(16), 2 * LANES), [v] * (2 * LANES))


def _as_pairs(b: Any, ir: Any, v: Any) -> Any:
    return b.bitcast(v, ir.VectorType(ir.IntType(16), 2 * LANES))


def _field(b: Any, ir: Any, v: Any, shift: int, mask: int, to: int = 0) -> Any:
    """Bits of each 16-bit number from `shift` on, at `to`."""
    if to > shift:
        return b.shl(b.and_(v, _numbers(ir, mask << shift)), _numbers(ir, to - shift))
    v = b.lshr(v, _numbers(ir, shift - to)) if shift > to else v
    return v if to == 0 and mask << shift == 0xFFFF & -(1 << shift) else b.and_(v, _numbers(ir, mask << to))


# Blocks of 32


def _unpack_blocks(nbytes: int, offsets: bool) -> Callable[[Any, Any, Rows, Any, Any], None]:
    def unpack(b: Any, ir: Any, rows: Rows, s: Any, n: Any) -> None:
        def turn(i: Any, _: list[Any]) -> list[Any]:
            here = rows.at(b, b.mul(i, ir.IntType(64)(nbytes)))
            store_floats(b, _at(b, ir, s, 0, i), _halves(b, ir, here, 0))
            if offsets:
                store_floats(b, _at(b, ir, s, OFFSETS, i), b.fsub(float_constant(ir, -0.0), _halves(b, ir, here, 2)))
            return []

        loop(b, ir, n, [], turn)

    return unpack


def _q8_0(b: Any, ir: Any, rows: Rows, _s: Any, _i: Any) -> Iterator[list[Any]]:
    vectors = [b.xor(_as_pairs(b, ir, v), _numbers(ir, 0x8080)) for v in _turned(b, ir, rows, 2, 32)]
    yield [_field(b, ir, v, k, 255) for v in vectors for k in (0, 8)]


def _nibbles(offset: int, high: int | None = None) -> Callable[[Any, Any, Rows, Any, Any], Iterator[list[Any]]]:
    """The builder for nibbles of 16 bytes at `offset`; fifth bits in the four bytes at `high`."""
    def build(b: Any, ir: Any, rows: Rows, _s: Any, _i: Any) -> Iterator[list[Any]]:
        vectors = [_as_pairs(b, ir, v) for v in _turned(b, ir, rows, offset, 16)]
        q = [_field(b, ir, v, n + k, 15) for n in (0, 4) for v in vectors for k in (0, 8)]
        if high is not None:
            bits = _words_of(b, ir, rows, high)
            q = [b.or_(v, _fifth(b, ir, bits, 4 * (i // 2) + i % 2)) for i, v in enumerate(q)]
        yield q

    return build


def _words_of(b: Any, ir: Any, rows: Rows, offset: int) -> Any:
    """The 32 bits at byte `offset` of each row."""
    i32 = ir.IntType(32)
    v = ir.Constant(ir.VectorType(i32, LANES), ir.Undefined)
    for r in range(LANES):
        v = b.insert_element(v, b.load(b.bitcast(rows.row(b, ir, r, offset), i32.as_pointer()), align=1), i32(r))
    return v


def _fifth(b: Any, ir: Any, bits: Any, i: int) -> Any:
    """Bits i and i + 2 of each lane as the fifth bits of its two numbers."""
    def moved(bit: int, to: int) -> Any:
        v = and_all(b, ir, bits, 1 << bit)
        return b.shl(v, int_constant(ir, to - bit)) if to > bit else shift_right(b, ir, v, bit - to)

    return _as_pairs(b, ir, b.or_(moved(i, 4), moved(i + 2, 20)))


# Super-blocks


def _byte(b: Any, ir: Any, v: Any, k: int, mask: int, shift: int = 0) -> Any:
    """Bits of byte k of each lane, from `shift` on."""
    return and_all(b, ir, shift_right(b, ir, v, 8 * k + shift), mask)


def _unpack_k4(b: Any, ir: Any, rows: Rows, s: Any, _: Any) -> None:
    i64 = ir.IntType(64)
    dm, low, mid, high = _turned(b, ir, rows, 0, 16)
    d, m = _half_of(b, ir, dm, 0), _half_of(b, ir, dm, 1)
    for g in range(8):
        k = g % 4
        if g < 4:
            scale, least = _byte(b, ir, low, k, 63), _byte(b, ir, mid, k, 63)
        else:
            scale = b.or_(_byte(b, ir, high, k, 15), b.shl(_byte(b, ir, low, k, 3, 6), int_constant(ir, 4)))
            least = b.or_(_byte(b, ir, high, k, 15, 4), b.shl(_byte(b, ir, mid, k, 3, 6), int_constant(ir, 4)))
        store_floats(b, _at(b, ir, s, 0, i64(g)), b.fmul(d, int_floats(b, ir, scale)))
        store_floats(b, _at(b, ir, s, OFFSETS, i64(g)), b.fmul(m, int_floats(b, ir, least)))


def _q4_K(b: Any, ir: Any, rows: Rows, _s: Any, i: Any) -> Iterator[list[Any]]:
    vectors = [_as_pairs(b, ir, v) for v in _turned(b, ir, rows.at(b, b.mul(i, ir.IntType(64)(32))), 16, 32)]
    for n in (0, 4):
        yield [_field(b, ir, v, n + k, 15) for v in vectors for k in (0, 8)]


def _keep(b: Any, ir: Any, s: Any, vectors: list[Any]) -> None:
    for k, v in enumerate(vectors):
        b.store(v, b.bitcast(_at(b, ir, s, HIGH, ir.IntType(64)(k)), v.type.as_pointer()), align=4)


def _kept(b: Any, ir: Any, s: Any) -> list[Any]:
    return [load(b, ir, _at(b, ir, s, HIGH, ir.IntType(64)(k)), ir.IntType(16), 2 * LANES, 4) for k in range(8)]


def _shifted(b: Any, ir: Any, vectors: list[Any], by: Any) -> list[Any]:
    """16-bit numbers shifted right by a number of bits that is known at run time."""
    n = splat(b, ir, b.trunc(by, ir.IntType(16)), 2 * LANES)
    return [b.lshr(v, n) for v in vectors]


def _unpack_q5_K(b: Any, ir: Any, rows: Rows, s: Any, n: Any) -> None:
    _unpack_k4(b, ir, rows, s, n)
    _keep(b, ir, s, _turned(b, ir, rows, 16, 32))


def _q5_K(b: Any, ir: Any, rows: Rows, s: Any, i: Any) -> Iterator[list[Any]]:
    i64 = ir.IntType(64)
    vectors = [_as_pairs(b, ir, v) for v in _turned(b, ir, rows.at(b, b.mul(i, i64(32))), 48, 32)]
    high = _shifted(b, ir, _kept(b, ir, s), b.mul(i, i64(2)))
    for g in (0, 1):
        yield [b.or_(_field(b, ir, v, 4 * g + k, 15), _field(b, ir, h, g + k, 1, 4)) for v, h in zip(vectors, high, strict=True) for k in (0, 8)]


def _unpack_q6_K(b: Any, ir: Any, rows: Rows, s: Any, _: Any) -> None:
    d = _halves(b, ir, rows, 208)
    for k, v in enumerate(_turned(b, ir, rows, 192, 16)):
        for j in range(4):
            scale = b.ashr(b.shl(v, int_constant(ir, 24 - 8 * j)) if j < 3 else v, int_constant(ir, 24))
            store_floats(b, _at(b, ir, s, 0, ir.IntType(64)(4 * k + j)), b.fmul(d, int_floats(b, ir, scale)))


def _q6_K(b: Any, ir: Any, rows: Rows, _s: Any, i: Any) -> Iterator[list[Any]]:
    i64 = ir.IntType(64)
    at_step = rows.at(b, b.mul(i, i64(64)))
    low = [[_as_pairs(b, ir, v) for v in _turned(b, ir, at_step, 32 * k, 32)] for k in (0, 1)]
    high = [_as_pairs(b, ir, v) for v in _turned(b, ir, rows.at(b, b.mul(i, i64(32))), 128, 32)]
    for g in range(4):
        yield [b.or_(_field(b, ir, v, 4 * (g // 2) + k, 15), _field(b, ir, h, 2 * g + k, 3, 4))
               for v, h in zip(low[g % 2], high, strict=True) for k in (0, 8)]


def _unpack_q2_K(b: Any, ir: Any, rows: Rows, s: Any, _: Any) -> None:
    d, m = _halves(b, ir, rows, 80), _halves(b, ir, rows, 82)
    for k, v in enumerate(_turned(b, ir, rows, 0, 16)):
        for j in range(4):
            place = ir.IntType(64)(4 * k + j)
            store_floats(b, _at(b, ir, s, 0, place), b.fmul(d, int_floats(b, ir, _byte(b, ir, v, j, 15))))
            store_floats(b, _at(b, ir, s, OFFSETS, place), b.fmul(m, int_floats(b, ir, _byte(b, ir, v, j, 15, 4))))


def _q2_K(b: Any, ir: Any, rows: Rows, _s: Any, i: Any) -> Iterator[list[Any]]:
    vectors = [_as_pairs(b, ir, v) for v in _turned(b, ir, rows.at(b, b.mul(i, ir.IntType(64)(32))), 16, 32)]
    for g in range(4):
        yield [_field(b, ir, v, 2 * g + k, 3) for v in vectors for k in (0, 8)]


def _unpack_q3_K(b: Any, ir: Any, rows: Rows, s: Any, _: Any) -> None:
    words = _turned(b, ir, rows, 94, 16)  # two bytes of weights, twelve of scales, d
    d = _half_of(b, ir, words[3], 1)

    def bits(k: int, mask: int, shift: int) -> Any:
        return _byte(b, ir, words[(k + 2) // 4], (k + 2) % 4, mask, shift)

    for g in range(16):
        scale = b.or_(bits(g % 8, 15, 4 * (g // 8)), b.shl(bits(8 + g % 4, 3, 2 * (g // 4)), int_constant(ir, 4)))
        store_floats(b, _at(b, ir, s, 0, ir.IntType(64)(g)), b.fmul(d, int_floats(b, ir, b.sub(scale, int_constant(ir, 32)))))
    _keep(b, ir, s, _turned(b, ir, rows, 0, 32))


def _q3_K(b: Any, ir: Any, rows: Rows, s: Any, i: Any) -> Iterator[list[Any]]:
    i64 = ir.IntType(64)
    vectors = [_as_pairs(b, ir, v) for v in _turned(b, ir, rows.at(b, b.mul(i, i64(32))), 32, 32)]
    high = _shifted(b, ir, _kept(b, ir, s), b.mul(i, i64(4)))
    for g in range(4):
        yield [b.or_(_field(b, ir, v, 2 * g + k, 3), _field(b, ir, h, g + k, 1, 2)) for v, h in zip(vectors, high, strict=True) for k in (0, 8)]


def _of_blocks(name: str, low: int, offsets: bool, build: Callable[[Any, Any, Rows, Any, Any], Iterator[list[Any]]]) -> Lanes:
    nbytes = UNITS[name].nbytes
    return Lanes(32, low, offsets, True, nbytes * 8, 32, _unpack_blocks(nbytes, offsets), build)


LANE_TYPES: dict[str, Lanes] = {
    "q8_0": _of_blocks("q8_0", 128, False, _q8_0), "q4_0": _of_blocks("q4_0", 8, False, _nibbles(2)), "q4_1": _of_blocks("q4_1", 0, True, _nibbles(4)),
    "q5_0": _of_blocks("q5_0", 16, False, _nibbles(6, 2)), "q5_1": _of_blocks("q5_1", 0, True, _nibbles(8, 4)),
    "q2_K": Lanes(16, 0, True, False, 84, 128, _unpack_q2_K, _q2_K), "q3_K": Lanes(16, 4, False, False, 110, 128, _unpack_q3_K, _q3_K),
    "q4_K": Lanes(32, 0, True, False, 144, 64, _unpack_k4, _q4_K), "q5_K": Lanes(32, 0, True, False, 176, 64, _unpack_q5_K, _q5_K),
    "q6_K": Lanes(16, 32, False, False, 210, 128, _unpack_q6_K, _q6_K),
}
