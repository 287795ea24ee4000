"""Super-blocks of q4_K, q5_K and q6_K as unsigned bytes in registers, for products with activations of two planes of signed bytes.

A weight is S q + M with S and M of its group (q6_K: M = -32 S). A super-block is four vectors of 64 numbers q, a pair of low nibbles and a
pair of high ones. In both vectors of a pair a lane of four bytes belongs to the same group, so that whole sums over a pair take one
multiplication by a vector of S. What is unpacked stays in registers, of four rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pyggml.cpu.vector import LANES, concat, halves_to_floats, int_constant, load, load_bytes, shuffle
from pyggml.quants.units_cpu import at_byte, byte_ints, half_splat, int_floats

ROWS = 4  # unpacked together, those of a tile
BYTES = 64  # of a vector
PLACES = {32: (8, 64, 128, 16, 32), 16: (64, 16, 32, 128, 8)}
"""Where activations stand, by the size of groups: 8 numbers of a super-block from number 8 i on stand at the sum of these over the bits of i."""


class Planes(NamedTuple):
    """Weights of a group (32: with sums of activations go M of it; 16: -32 S), bytes of a super-block, the builder (builder, ir, pointer) of its
    two pairs of vectors, the builder (builder, ir, pointers) of a vector of factors for each of four rows, and for each pair the factor of
    each lane. Factors: S of each group, or S and M of each group in turn."""

    group: int
    nbytes: int
    numbers: Callable[[Any, Any, Any], list[list[Any]]]
    factors: Callable[[Any, Any, list[Any]], list[Any]]
    lanes: Sequence[Sequence[int]]


def _bytes(ir: Any, v: int) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(8), BYTES), [v] * BYTES)


def _nibble_pairs(b: Any, ir: Any, vectors: list[Any]) -> list[list[Any]]:
    return [[b.and_(v, _bytes(ir, 15)) for v in vectors], [b.lshr(v, _bytes(ir, 4)) for v in vectors]]


def _with_bits(b: Any, ir: Any, q: Any, high: Any, turn: Sequence[int], mask: int) -> Any:
    """q with the bits of `mask` from `high`, whose lanes of 32 bits are first rotated left. Bits of other bytes fall outside of the mask."""
    ty = ir.VectorType(ir.IntType(32), LANES)
    name = f"llvm.fshl.v{LANES}i32"
    fn = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(ty, [ty] * 3), name)
    v = b.bitcast(high, ty)
    turned = b.call(fn, [v, v, int_constant(ir, [n % 32 for n in turn])])
    return b.or_(q, b.and_(b.bitcast(turned, q.type), _bytes(ir, mask)))


# Groups of 32


def _of_quarters(b: Any, ir: Any, p: Any) -> list[Any]:
    """128 bytes: the first 16 of each 32, then the others."""
    low, high = (load_bytes(b, ir, at_byte(b, ir, p, k), BYTES) for k in (0, BYTES))
    return [shuffle(b, ir, low, high, [32 * j + 16 * k + i for j in range(4) for i in range(16)]) for k in (0, 1)]


def _q4_K(b: Any, ir: Any, p: Any) -> list[list[Any]]:
    return _nibble_pairs(b, ir, _of_quarters(b, ir, at_byte(b, ir, p, 16)))


def _q5_K(b: Any, ir: Any, p: Any) -> list[list[Any]]:
    pairs = _nibble_pairs(b, ir, _of_quarters(b, ir, at_byte(b, ir, p, 48)))
    fifths = [_four_times(b, ir, load_bytes(b, ir, at_byte(b, ir, p, 16 + 16 * k), 16)) for k in (0, 1)]
    return [[_with_bits(b, ir, q, high, [4 - g - 2 * (i // 4) for i in range(LANES)], 16) for q, high in zip(pair, fifths, strict=True)]
            for g, pair in enumerate(pairs)]


def _four_times(b: Any, ir: Any, v: Any) -> Any:
    return shuffle(b, ir, v, v, [i % 16 for i in range(BYTES)])


def _k4_factors(b: Any, ir: Any, rows: list[Any]) -> list[Any]:
    """Of 12 bytes x, y, z of six-bit numbers: scales are x & 63, then z & 15 with the upper bits of x; mins are those of y and of z >> 4."""
    i32 = ir.IntType(32)
    heads = [load(b, ir, p, i32, 4, 2) for p in rows]  # d and dmin, x, y, z
    v = concat(b, ir, concat(b, ir, *heads[:2]), concat(b, ir, *heads[2:]))

    def of_each(words: Sequence[int]) -> Any:
        return shuffle(b, ir, v, v, [4 * r + k for r in range(ROWS) for k in words])

    def per_row(*n: int) -> Any:
        return int_constant(ir, n * ROWS)

    low = b.and_(b.lshr(of_each((1, 2, 3, 3)), per_row(0, 0, 0, 4)), per_row(0x3F3F3F3F, 0x3F3F3F3F, 0x0F0F0F0F, 0x0F0F0F0F))
    upper = b.and_(b.lshr(of_each((0, 0, 1, 2)), per_row(2, 2, 2, 2)), per_row(0, 0, 0x30303030, 0x30303030))
    six = b.bitcast(b.or_(low, upper), ir.VectorType(ir.IntType(8), BYTES))
    dm = halves_to_floats(b, ir, b.bitcast(shuffle(b, ir, v, v, range(0, LANES, 4)), ir.VectorType(ir.IntType(16), 2 * ROWS)))
    in_turn = [8 * (g // 4) + g % 4 + 4 * m for g in range(8) for m in (0, 1)]
    six = shuffle(b, ir, six, six, [16 * r + k for r in range(ROWS) for k in in_turn])
    numbers = [b.zext(shuffle(b, ir, six, six, range(16 * r, 16 * r + 16)), v.type) for r in range(ROWS)]
    return [b.fmul(int_floats(b, ir, n), shuffle(b, ir, dm, dm, [2 * r, 2 * r + 1] * 8)) for r, n in enumerate(numbers)]


# Groups of 16


def _q6_K(b: Any, ir: Any, p: Any) -> list[list[Any]]:
    first, second, packed = (load_bytes(b, ir, at_byte(b, ir, p, BYTES * k), BYTES) for k in range(3))
    eights = [[64 * h + 16 * c + 8 * s + i for c in range(4) for h in (0, 1) for i in range(8)] for s in (0, 1)]  # of each 16, from both
    of_packed = [[32 * h + 16 * (c % 2) + 8 * s + i for c in range(4) for h in (0, 1) for i in range(8)] for s in (0, 1)]
    pairs = _nibble_pairs(b, ir, [shuffle(b, ir, first, second, lanes) for lanes in eights])
    highs = [shuffle(b, ir, packed, packed, lanes) for lanes in of_packed]
    return [[_with_bits(b, ir, q, high, [4 - 4 * g - 2 * (i // 8) for i in range(LANES)], 0x30) for q, high in zip(pair, highs, strict=True)]
            for g, pair in enumerate(pairs)]


def _q6_factors(b: Any, ir: Any, rows: list[Any]) -> list[Any]:
    return [b.fmul(int_floats(b, ir, byte_ints(b, ir, p, 192, signed=True)), half_splat(b, ir, p, 208)) for p in rows]


_LANES_OF_32 = tuple([4 * (i // 4) + 2 * g for i in range(LANES)] for g in (0, 1))
_LANES_OF_16 = tuple([8 * (i // 2 % 2) + 4 * g + i // 4 for i in range(LANES)] for g in (0, 1))

PLANES: dict[str, Planes] = {
    "q4_K": Planes(32, 144, _q4_K, _k4_factors, _LANES_OF_32),
    "q5_K": Planes(32, 176, _q5_K, _k4_factors, _LANES_OF_32),
    "q6_K": Planes(16, 210, _q6_K, _q6_factors, _LANES_OF_16),
}
