"""Products in bfloat16 with sums in float32: tiles of AMX where the CPU has them, vdpbf16ps elsewhere, on the same packed operands.

A tile holds 32 values of k for 16 rows, 1 KB. Of the right-hand side (tokens) it is plain: 64 bytes per row. Of the left-hand
side (weights) it is turned in pairs: 64 bytes hold values 2p and 2p + 1 of all 16 rows. Tiles of one row block follow each
other along k. Where bfloat16 is not enough, a value is kept as two planes, the rounded value and what that left out, and
the tiles of both alternate; then products of planes are summed, all but the smallest one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from pyggml.cpu.simd import intrinsic
from pyggml.cpu.vector import LANES, float_constant, load, load_floats, loop, splat, store_floats, transposed

TILE = 1024  # bytes
TILE_K = 32  # values of k in a tile
BLOCK = 32  # rows and tokens that `products` computes at once, 2 x 2 tiles
_ROW = 64  # bytes of a tile's row
# Features with which a product here takes less time than in float32. vdpbf16ps is twice as fast as that on AMD's CPUs, which alone have sse4a, and slower
# on Intel's (84 against 143 GFLOP/s on a core).
BY_TILES, BY_VECTORS = frozenset({"avx512bf16", "amx-bf16"}), frozenset({"avx512bf16", "sse4a"})
FASTER_ON = BY_TILES, BY_VECTORS


def tile_unit() -> bool:
    """True when the level being compiled for has AMX tiles in bf16."""
    from pyggml.cpu.level import target_features
    return {"amx-tile", "amx-bf16"} <= target_features()


@functools.cache
def _bfloats(ir: Any) -> Any:
    """LLVM's <32 x bfloat>, which llvmlite has no name for."""
    class BFloat(ir.types.Type):  # type: ignore[misc]
        def _to_string(self) -> str:
            return "bfloat"

    return ir.VectorType(BFloat(), 2 * LANES)


def _call(b: Any, ir: Any, name: str, result: Any, args: Sequence[Any]) -> Any:
    fn = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(fn, list(args))


# Tiles


@intrinsic("void()")
def tiles_on(b: Any, ir: Any) -> None:
    """Make all eight tiles 16 rows of 64 bytes. Once in a kernel, before `products`; a kernel that did so ends with `tiles_off`."""
    if not tile_unit():
        return
    i8, place = ir.IntType(8), b.alloca(ir.ArrayType(ir.IntType(8), 64))
    place.align = 64
    config = [0] * 64
    config[0] = 1  # palette
    config[16:32] = [_ROW, 0] * 8  # bytes of a row, 16 bits each
    config[48:56] = [16] * 8  # rows
    b.store(ir.Constant(ir.ArrayType(i8, 64), config), place)
    _call(b, ir, "llvm.x86.ldtilecfg", ir.VoidType(), [b.bitcast(place, i8.as_pointer())])


@intrinsic("void()")
def tiles_off(b: Any, ir: Any) -> None:
    """Give the tiles back: threads that hold them are slower to switch."""
    if tile_unit():
        _call(b, ir, "llvm.x86.tilerelease", ir.VoidType(), [])


def _tile_products(b: Any, ir: Any, planes: tuple[int, int], operands: Any) -> None:
    """2 x 2 sums in tiles 0 to 3 (tokens x rows), tokens in 4 and 5, rows in 6 and 7."""
    a, a_block, x, x_block, n, dst, dst_row, first = operands
    i8, i64 = ir.IntType(8), ir.IntType(64)
    a_planes, x_planes = planes
    places = [b.gep(dst, [b.add(b.mul(dst_row, i64(16 * t)), i64(_ROW * r))]) for t in (0, 1) for r in (0, 1)]

    def tile(op: str, number: int, *rest: Any) -> None:
        _call(b, ir, f"llvm.x86.{op}", ir.VoidType(), [i8(number), *rest])

    with b.if_else(b.icmp_signed("!=", first, i64(0))) as (fresh, more):
        with fresh:
            for t in range(4):
                tile("tilezero", t)
        with more:
            for t in range(4):
                tile("tileloadd64", t, places[t], dst_row)
    a_rows, x_rows = [a, b.gep(a, [a_block])], [x, b.gep(x, [x_block])]

    def step(i: Any, _: list[Any]) -> list[Any]:
        a_at, x_at = b.mul(i, i64(TILE * a_planes)), b.mul(i, i64(TILE * x_planes))

        def fetch(number: int, rows: list[Any], at: Any, which: int, plane: int) -> None:
            tile("tileloadd64", number, b.gep(rows[which], [b.add(at, i64(TILE * plane))]), i64(_ROW))

        held: tuple[int, int] = (-1, -1)
        for a_plane, x_plane in [(0, p) for p in reversed(range(x_planes))] + [(p, 0) for p in range(1, a_planes)]:
            if a_plane != held[0]:
                fetch(6, a_rows, a_at, 0, a_plane)
            if x_plane != held[1]:
                fetch(4, x_rows, x_at, 0, x_plane)
            tile("tdpbf16ps", 0, i8(4), i8(6))
            if a_plane != held[0]:
                fetch(7, a_rows, a_at, 1, a_plane)
            tile("tdpbf16ps", 1, i8(4), i8(7))
            if x_plane != held[1]:
                fetch(5, x_rows, x_at, 1, x_plane)
            tile("tdpbf16ps", 2, i8(5), i8(6))
            tile("tdpbf16ps", 3, i8(5), i8(7))
            held = a_plane, x_plane
        return []

    loop(b, ir, n, [], step)
    for t in range(4):
        tile("tilestored64", t, places[t], dst_row)


def _vector_products(b: Any, ir: Any, planes: tuple[int, int], operands: Any) -> None:
    """The same for CPUs without tiles: 8 tokens x 32 rows in registers at a time, a pair of k a step."""
    a, a_block, x, x_block, n, dst, dst_row, first = operands
    i32, i64, floats, halves = ir.IntType(32), ir.IntType(64), ir.VectorType(ir.FloatType(), LANES), _bfloats(ir)
    a_planes, x_planes = planes
    a_rows, tokens, pairs = [a, b.gep(a, [a_block])], 8, 4
    steps = b.mul(n, i64(LANES // pairs))
    for t0 in range(0, BLOCK, tokens):
        x_rows = b.gep(x, [b.add(b.mul(x_block, i64(t0 // LANES)), i64(t0 % LANES * _ROW))])

        def step(i: Any, sums: list[Any], x_rows: Any = x_rows) -> list[Any]:
            k, part = b.lshr(i, i64(2)), b.and_(i, i64(3))
            a_at = b.add(b.mul(k, i64(TILE * a_planes)), b.mul(part, i64(pairs * _ROW)))
            x_at = b.add(b.mul(k, i64(TILE * x_planes)), b.mul(part, i64(pairs * 4)))
            for p in range(pairs):
                for a_plane in range(a_planes):
                    av = [b.bitcast(load(b, ir, b.gep(r, [b.add(a_at, i64(TILE * a_plane + _ROW * p))]), ir.FloatType(), LANES, 4), halves) for r in a_rows]
                    for x_plane in range(x_planes if a_plane == 0 else 1):
                        for t in range(tokens):
                            place = b.gep(x_rows, [b.add(x_at, i64(TILE * x_plane + _ROW * t + 4 * p))])
                            xv = b.bitcast(splat(b, ir, b.load(b.bitcast(place, i32.as_pointer()), align=4)), halves)
                            for r in (0, 1):
                                sums[2 * t + r] = _call(b, ir, "llvm.x86.avx512bf16.dpbf16ps.512", floats, [sums[2 * t + r], xv, av[r]])
            return sums

        places = [b.gep(dst, [b.add(b.mul(dst_row, i64(t0 + t)), i64(_ROW * r))]) for t in range(tokens) for r in (0, 1)]
        fresh, zero = b.icmp_signed("!=", first, i64(0)), float_constant(ir, 0.0)
        before = b.block
        with b.if_then(b.not_(fresh)):
            there = [load_floats(b, ir, p) for p in places]
            loaded = b.block
        begin = []
        for v in there:
            phi = b.phi(floats)
            phi.add_incoming(zero, before)
            phi.add_incoming(v, loaded)
            begin.append(phi)
        for place, total in zip(places, loop(b, ir, steps, begin, step), strict=True):
            store_floats(b, place, total)


def _products(b: Any, ir: Any, planes: tuple[int, int], operands: Any) -> None:
    (_tile_products if tile_unit() else _vector_products)(b, ir, planes, operands)


_PRODUCTS = "void(ptr, i64, ptr, i64, i64, ptr, i64, i64)"


@intrinsic(_PRODUCTS)
def products_1x1(b: Any, ir: Any, *operands: Any) -> None:
    """32 tokens x 32 rows of float32 at dst: (tiles of the rows, bytes to the next 16, tiles of the tokens, bytes to the next
    16, tiles along k, dst, bytes from token to token, first: 1 to store, 0 to add to what is there)."""
    _products(b, ir, (1, 1), operands)


@intrinsic(_PRODUCTS)
def products_1x2(b: Any, ir: Any, *operands: Any) -> None:
    """The same with two planes of the tokens."""
    _products(b, ir, (1, 2), operands)


@intrinsic(_PRODUCTS)
def products_2x2(b: Any, ir: Any, *operands: Any) -> None:
    """The same with two planes of both; the product of the two small ones is left out."""
    _products(b, ir, (2, 2), operands)


# Packing


def _round(b: Any, ir: Any, low: Any, high: Any) -> Any:
    """32 bfloat16 of two vectors of 16 float32."""
    return _call(b, ir, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _bfloats(ir), [high, low])


def _words(b: Any, ir: Any, v: Any) -> Any:
    """A vector of 64 bytes as 16 float32, the unit of shuffles and stores."""
    return b.bitcast(v, ir.VectorType(ir.FloatType(), LANES))


def _planes(b: Any, ir: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """32 values of two vectors of float32 as two planes of bfloat16: the rounded value, and what rounding took from it.

    A value that rounds to infinity stands in the second plane alone, with zero in the first: the second meets one factor, so a sum
    becomes infinite, where two planes of different signs would make it a NaN.
    """
    i32s, floats, zero = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES), float_constant(ir, 0.0)
    bits = b.bitcast(_round(b, ir, low, high), ir.VectorType(ir.IntType(16), 2 * LANES))
    first, rest = [], []
    for k, x in enumerate((low, high)):
        half = b.shuffle_vector(bits, bits, ir.Constant(i32s, [LANES * k + i for i in range(LANES)]))
        rounded = b.bitcast(b.shl(b.zext(half, i32s), ir.Constant(i32s, [16] * LANES)), floats)
        infinite = b.fcmp_ordered("==", _magnitude(b, ir, rounded), float_constant(ir, math.inf))
        first.append(b.select(infinite, zero, x))
        rest.append(b.select(infinite, x, b.fsub(x, rounded)))
    return _round(b, ir, *first), _round(b, ir, *rest)


def _magnitude(b: Any, ir: Any, x: Any) -> Any:
    return _call(b, ir, "llvm.fabs.v16f32", x.type, [x])


@intrinsic("void(ptr, ptr)")
def halves_x32(b: Any, ir: Any, dst: Any, src: Any) -> None:
    """32 float32 at src as bfloat16 at dst."""
    low, high = (load_floats(b, ir, b.gep(src, [ir.IntType(64)(_ROW * k)])) for k in (0, 1))
    store_floats(b, dst, _words(b, ir, _round(b, ir, low, high)))


@intrinsic("void(ptr, ptr)")
def split_x32(b: Any, ir: Any, dst: Any, src: Any) -> None:
    """32 float32 at src in two planes, a tile apart."""
    low, high = (load_floats(b, ir, b.gep(src, [ir.IntType(64)(_ROW * k)])) for k in (0, 1))
    for plane, halves in enumerate(_planes(b, ir, low, high)):
        store_floats(b, b.gep(dst, [ir.IntType(64)(TILE * plane)]), _words(b, ir, halves))


def _store_turned(b: Any, ir: Any, dst: Any, rows: list[Any]) -> None:
    for i, row in enumerate(transposed(b, ir, [_words(b, ir, r) for r in rows])):
        store_floats(b, b.gep(dst, [ir.IntType(64)(_ROW * i)]), row)


def _float_rows(b: Any, ir: Any, src: Any, row: Any) -> list[tuple[Any, Any]]:
    """32 float32 of each of 16 rows."""
    i64 = ir.IntType(64)
    starts = [b.gep(src, [b.mul(row, i64(r))]) for r in range(LANES)]
    return [(load_floats(b, ir, p), load_floats(b, ir, b.gep(p, [i64(_ROW)]))) for p in starts]


@intrinsic("void(ptr, ptr, i64)")
def turn_floats(b: Any, ir: Any, dst: Any, src: Any, row: Any) -> None:
    """A turned tile at dst of 32 float32 of 16 rows, `row` bytes apart."""
    _store_turned(b, ir, dst, [_round(b, ir, *v) for v in _float_rows(b, ir, src, row)])


@intrinsic("void(ptr, ptr, i64)")
def turn_split(b: Any, ir: Any, dst: Any, src: Any, row: Any) -> None:
    """The same in two planes, a tile apart."""
    rows = [_planes(b, ir, *v) for v in _float_rows(b, ir, src, row)]
    for plane in (0, 1):
        _store_turned(b, ir, b.gep(dst, [ir.IntType(64)(TILE * plane)]), [planes[plane] for planes in rows])


@intrinsic("void(ptr, ptr, i64)")
def turn_halves(b: Any, ir: Any, dst: Any, src: Any, row: Any) -> None:
    """A turned tile at dst of 32 bfloat16 of 16 rows, `row` bytes apart."""
    i64 = ir.IntType(64)
    _store_turned(b, ir, dst, [load(b, ir, b.gep(src, [b.mul(row, i64(r))]), ir.FloatType(), LANES, 2) for r in range(LANES)])


def _columns(b: Any, ir: Any, src: Any, stride: Any) -> list[Any]:
    """16 float32 at each of 32 places."""
    return [load_floats(b, ir, b.gep(src, [b.mul(stride, ir.IntType(64)(k))])) for k in range(TILE_K)]


@intrinsic("void(ptr, ptr, i64)")
def turn_columns(b: Any, ir: Any, dst: Any, src: Any, stride: Any) -> None:
    """turn_floats of rows that stand side by side: value k of all of them is at src + k * stride."""
    halves, order = ir.VectorType(ir.IntType(16), 2 * LANES), [i // 2 + LANES * (i % 2) for i in range(2 * LANES)]
    places = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), order)
    columns = _columns(b, ir, src, stride)
    for i in range(LANES):
        bits = b.bitcast(_round(b, ir, columns[2 * i], columns[2 * i + 1]), halves)
        store_floats(b, b.gep(dst, [ir.IntType(64)(_ROW * i)]), _words(b, ir, b.shuffle_vector(bits, bits, places)))


@intrinsic("void(ptr, ptr, i64)")
def plain_columns(b: Any, ir: Any, dst: Any, src: Any, stride: Any) -> None:
    """A plain tile of 16 rows of 32 float32 that stand side by side, as for turn_columns."""
    columns = _columns(b, ir, src, stride)
    for r, (low, high) in enumerate(zip(*(transposed(b, ir, columns[k:k + LANES]) for k in (0, LANES)), strict=True)):
        store_floats(b, b.gep(dst, [ir.IntType(64)(_ROW * r)]), _words(b, ir, _round(b, ir, low, high)))
