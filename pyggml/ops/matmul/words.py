"""MUL_MAT of few columns with quantized weights in whole numbers: columns are brought to 16 bits once for all products that read them, and
the numbers of a super-block of weights are multiplied with them two by two into sums of 32 bits (pyggml.quants.words_cpu).

Of a column, each 256 values become x = sx q with |q| <= 32767: a block of X_BYTES holds 256 q (i16), at X_SUMS32 eight zeros and the sums of
q over each 32 (float32), at X_SUMS16 those over each 16, at X_SCALE sx. That rounds to 15 bits of the largest of 256 values; llama.cpp
rounds to 7 bits of the largest of 32 or 256. Where one of them is not finite, sx is infinite or NaN, and the results are NaN.

Whole sums are exact, so bits of a result depend on its two rows alone here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyggml.cpu.rows import matrix_address
from pyggml.cpu.simd import Intrinsic, at, copy_bytes, helper, intrinsic, zero_bytes
from pyggml.cpu.vector import (
    LANES,
    float_constant,
    int_constant,
    load,
    load_floats,
    loop,
    multiply_add,
    multiply_pairs,
    nearest_ints,
    prefetch,
    reduce_ints,
    shuffle,
    splat,
    splat_at,
    store_floats,
    wide_registers,
)
from pyggml.dtypes import F32
from pyggml.ops.matmul.gemv import (
    AHEAD,
    MAX_COLS,
    ROWS,
    SHARES,
    STREAM_AHEAD,
    SUMS,
    add_sums_16,
    columns_refused,
    flat_operands,
    operands_of,
    prefetch_level,
    row_chunk,
    row_items,
    stream_items,
    tile_columns,
    tile_layout,
)
from pyggml.quants.words_cpu import OFFSETS, SUPER, UNPACKED, WORDS, Words
from pyggml.registry import Prepared
from pyggml.tensor import Node, Tensor

X_SUMS32, X_SUMS16, X_SCALE, X_BYTES = 512, 576, 640, 704
LARGEST = 32767
INFINITY = 0x7F800000  # as bits


# Activations


def quantize(b: Any, ir: Any, scale: Any, src: Any, n: Any, keep: Callable[[Any, Any], None], keep_sum: Callable[[Any, int, Any], None],
             largest: int = LARGEST) -> None:
    """A block of n <= 256 float32, n a multiple of 32. keep(i, q) is told 16 numbers from number i on, keep_sum(i, w, total) the sums of the
    numbers of 32, the i-th ones (w = 0), and of their halves (1 and 2); `scale` is where the scale goes. A block with one infinity has a
    scale of infinity and one number that is not 0; with several or with NaN its scale is NaN."""
    i16, i32, i64, f32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
    ints = ir.VectorType(i32, LANES)

    def most(i: Any, acc: list[Any]) -> list[Any]:
        bits = b.and_(b.bitcast(load_floats(b, ir, b.gep(src, [b.mul(i, i64(64))])), ints), int_constant(ir, 0x7FFFFFFF))
        return [b.select(b.icmp_unsigned(">", bits, acc[0]), bits, acc[0])]

    (m,) = loop(b, ir, b.sdiv(n, i64(LANES)), [int_constant(ir, 0)], most)  # as whole numbers: NaN is the largest of all
    bits = reduce_ints(b, ir, m, "umax")
    top, limit = b.bitcast(bits, f32), ir.Constant(f32, float(largest))
    usable = b.and_(b.icmp_unsigned("<", bits, i32(INFINITY)), b.fcmp_ordered(">", top, ir.Constant(f32, 2.0 ** -110)))
    inverse = splat(b, ir, b.select(usable, b.fdiv(limit, top), ir.Constant(f32, 0.0)))
    factor = b.select(usable, b.fdiv(top, limit), ir.Constant(f32, 0.0))
    finite = b.icmp_unsigned("<", bits, i32(INFINITY))

    def numbers(i: Any, n_infinite: list[Any]) -> list[Any]:
        pair, here = i32(0), n_infinite[0]
        for k in (0, 1):
            start = b.add(b.mul(i, i64(2 * LANES)), i64(k * LANES))
            x = load_floats(b, ir, b.gep(src, [b.mul(start, i64(4))]))
            q = nearest_ints(b, ir, b.fmul(x, inverse))
            sign = b.or_(b.ashr(b.bitcast(x, ints), int_constant(ir, 31)), int_constant(ir, 1))
            infinite = b.icmp_unsigned("==", b.and_(b.bitcast(x, ints), int_constant(ir, 0x7FFFFFFF)), int_constant(ir, INFINITY))
            q = b.select(infinite, sign, q)
            here = b.add(here, b.zext(infinite, ints))
            q16 = b.trunc(q, ir.VectorType(i16, LANES))
            keep(start, q16)
            total = reduce_ints(b, ir, b.sext(q16, ints), "add")  # of what is stored
            keep_sum(i, 1 + k, total)
            pair = b.add(pair, total)
        keep_sum(i, 0, pair)
        return [here]

    (n_infinite,) = loop(b, ir, b.sdiv(n, i64(2 * LANES)), [int_constant(ir, 0)], numbers)
    one = b.and_(b.icmp_unsigned("==", bits, i32(INFINITY)), b.icmp_unsigned("==", reduce_ints(b, ir, n_infinite, "add"), i32(1)))
    factor = b.select(finite, factor, b.select(one, ir.Constant(f32, float("inf")), ir.Constant(f32, float("nan"))))
    b.store(factor, b.bitcast(scale, f32.as_pointer()), align=4)


def keep_words(b: Any, ir: Any, dst: Any, order: Sequence[int]) -> Callable[[Any, Any], None]:
    """Numbers as words, of each 16 in `order`."""
    def keep(start: Any, q: Any) -> None:
        b.store(shuffle(b, ir, q, q, order), b.bitcast(b.gep(dst, [b.mul(start, ir.IntType(64)(2))]), q.type.as_pointer()), align=2)

    return keep


@intrinsic("void(ptr, ptr, i64)")
def quantize_block(b: Any, ir: Any, dst: Any, src: Any, n: Any) -> None:
    """A block as the tiles here read it; the rest of dst is zero already."""
    i64, f32 = ir.IntType(64), ir.FloatType()

    def keep_sum(i: Any, which: int, total: Any) -> None:
        place = b.add(i64(X_SUMS16 + 4 * which - 4), b.mul(i, i64(8))) if which else b.add(i64(X_SUMS32 + 32), b.mul(i, i64(4)))
        b.store(b.sitofp(total, f32), b.bitcast(b.gep(dst, [place]), f32.as_pointer()), align=4)

    quantize(b, ir, b.gep(dst, [i64(X_SCALE)]), src, n, keep_words(b, ir, dst, range(LANES)), keep_sum)


block_of_16_bits, BLOCK_BYTES = quantize_block, X_BYTES  # bound


def quantize_columns(out: Any, x: Any, i0: Any, i1: Any) -> None:
    """Columns [i0, i1) of x, whose rows have no gaps."""
    for r in range(i0, i1):
        q = r // x.ne1
        row, to = at(x.p, r % x.ne1 * x.nb1 + q % x.ne2 * x.nb2 + q // x.ne2 * x.nb3), at(out.p, r * out.nb1)
        zero_bytes(to, out.nb1)
        for k in range(0, x.ne0, SUPER):
            block_of_16_bits(at(to, k // SUPER * BLOCK_BYTES), at(row, k * 4), min(SUPER, x.ne0 - k))


def quantized(x: Tensor | None, block: Intrinsic, nbytes: int) -> Prepared:
    """Columns made blocks of so many bytes by `block` (dst, 256 or fewer float32, their number)."""
    assert x is not None
    words = -(-x.ne[0] // SUPER) * nbytes // 4
    out = Tensor(F32, (words, *x.ne[1:]), name=f"{x.name} (16 bits)")
    return Prepared(quantize_columns, x, out, (block.name,), {"items": x.n_rows, "chunk": max(1, 4096 // x.ne[0]),
                                                              "bind": {"block_of_16_bits": block, "BLOCK_BYTES": nbytes}})


# Tiles


def _rows_at_once(cols: int) -> int:
    """Rows whose sums stay in registers together."""
    if wide_registers():
        return ROWS if cols <= 2 else 2
    return 2 if cols == 1 else 1


def _dots(b: Any, ir: Any, kind: Words, cols: int, operands: Any) -> None:
    """Partial sums of 4 rows x cols columns as gemv's tiles have them, over n_whole super-blocks and n_left blocks of 32 more."""
    a, a_row, a_last, x, x_col, n_whole, n_left, ahead, dst, dst_row, scratch = operands
    i64, zero = ir.IntType(64), float_constant(ir, 0.0)
    per_block = kind.nbytes // 8
    x_cols = [b.gep(x, [b.mul(x_col, i64(c))]) for c in range(cols)]
    at_once = _rows_at_once(cols)

    def blocks(p: Any, last: Any = None) -> list[Any]:
        """Pointers to the blocks of a super-block; those beyond the last are the last."""
        if not kind.blocks:
            return [p]
        places = [i64(k) if last is None else b.select(b.icmp_signed("<", last, i64(k)), last, i64(k)) for k in range(8)]
        return [b.gep(p, [b.mul(k, i64(per_block))]) for k in places]

    def products(rows: list[list[Any]], slots: list[Any], xs: list[Any], acc: list[Any]) -> list[Any]:
        """Add one super-block of each row times each column."""
        numbers = [kind.build(b, ir, r, s) for r, s in zip(rows, slots, strict=True)]
        sums: list[Any] = [None] * (len(rows) * cols)
        for j in range(8):
            xv = [load(b, ir, b.gep(p, [i64(64 * j)]), ir.IntType(16), 32, 2) for p in xs]
            for r, row in enumerate(numbers):
                w = next(row)
                for c in range(cols):
                    t, k = multiply_pairs(b, ir, w, xv[c]), r * cols + c
                    if kind.blocks:
                        f, d = b.sitofp(t, zero.type), splat_at(b, ir, slots[r], 4 * j, zero.type.element)
                        sums[k] = b.fmul(f, d) if j == 0 else multiply_add(b, ir, f, d, sums[k])
                    else:
                        sums[k] = t if j == 0 else b.add(sums[k], t)
        for r, s in enumerate(slots):
            for c, p in enumerate(xs):
                k = r * cols + c
                v = sums[k] if kind.blocks else b.fmul(b.sitofp(sums[k], zero.type), splat_at(b, ir, s, 0, zero.type.element))
                if kind.offsets:
                    of = load_floats(b, ir, b.gep(p, [i64(X_SUMS32 if kind.offsets == 32 else X_SUMS16)]))
                    v = multiply_add(b, ir, load_floats(b, ir, b.gep(s, [i64(OFFSETS)])), of, v)
                acc[k] = multiply_add(b, ir, v, splat_at(b, ir, p, X_SCALE, zero.type.element), acc[k])
        return acc

    for r0 in range(0, ROWS, at_once):
        numbers = range(r0, r0 + at_once)
        rows = [b.gep(a, [b.mul(a_row, b.select(b.icmp_signed("<", a_last, i64(r)), a_last, i64(r)))]) for r in numbers]

        def slots(i: Any) -> list[Any]:
            """Where what is unpacked of super-block i stands; two take turns."""
            return [b.gep(scratch, [b.add(b.mul(b.and_(i, i64(1)), i64(ROWS * UNPACKED)), i64(r * UNPACKED))]) for r in range(at_once)]

        def unpack(i: Any, last: Any = None, rows: list[Any] = rows) -> None:
            for p, s in zip(rows, slots(i), strict=True):
                kind.unpack(b, ir, blocks(b.gep(p, [b.mul(i, i64(kind.nbytes))]), last), s)

        def start(_: Any, __: list[Any]) -> list[Any]:
            unpack(i64(0))
            return []

        def turn(i: Any, acc: list[Any], rows: list[Any] = rows) -> list[Any]:
            here = [b.gep(p, [b.mul(i, i64(kind.nbytes))]) for p in rows]
            for p in here:
                for line in range(0, kind.nbytes, 64):
                    prefetch(b, ir, b.gep(p, [b.add(ahead, i64(line))]), prefetch_level(cols))
            following = b.add(i, i64(1))
            unpack(b.select(b.icmp_signed("<", following, n_whole), following, i))
            return products([blocks(p) for p in here], slots(i), [b.gep(p, [b.mul(i, i64(X_BYTES))]) for p in x_cols], acc)

        def rest(_: Any, acc: list[Any], rows: list[Any] = rows) -> list[Any]:
            last = b.sub(n_left, i64(1))
            unpack(n_whole, last)
            here = [blocks(b.gep(p, [b.mul(n_whole, i64(kind.nbytes))]), last) for p in rows]
            return products(here, slots(n_whole), [b.gep(p, [b.mul(n_whole, i64(X_BYTES))]) for p in x_cols], acc)

        some = b.zext(b.icmp_signed(">", n_whole, i64(0)), i64)
        loop(b, ir, some, [], start)
        sums = loop(b, ir, n_whole, [zero] * (at_once * cols), turn)
        if kind.blocks:
            sums = loop(b, ir, b.zext(b.icmp_signed(">", n_left, i64(0)), i64), sums, rest)
        for i, v in enumerate(sums):
            store_floats(b, b.gep(dst, [b.add(i64(i % cols * ROWS * SUMS), b.mul(dst_row, i64(r0 + i // cols)))]), v)


def _tile(name: str, kind: Words, cols: int) -> Intrinsic:
    def build(b: Any, ir: Any, *operands: Any) -> None:
        _dots(b, ir, kind, cols, operands)

    build.__name__ = f"words_{name}_{cols}"
    return Intrinsic("void(ptr, i64, i64, ptr, i64, i64, i64, i64, ptr, i64, ptr)", build)


TILES: dict[tuple[str, int], Intrinsic] = {(t, c): _tile(t, w, c) for t, w in WORDS.items() for c in range(1, MAX_COLS + 1)}


# The kernel


def _not_words(node: Node) -> str | None:
    a, _ = operands_of(node)
    return f"a is {a.dtype.name}" if a.dtype.name not in WORDS else columns_refused(node)


def _binds(node: Node) -> dict[str, Any]:
    a, cols = operands_of(node)[0].dtype.name, tile_columns(node)
    return {"dots": TILES[a, cols], "COLS": cols}


@helper
def dots(_a: Any, _a_row: Any, _a_last: Any, _x: Any, _x_col: Any, _n_whole: Any, _n_left: Any, _ahead: Any, _dst: Any, _dst_row: Any,
         _scratch: Any) -> None:
    """A tile; bound to the type's."""


COLS = 1  # bound


def _scratch(_: Node) -> int:
    return LANES * 4 + 2 * ROWS * UNPACKED + MAX_COLS * ROWS * SUMS


def mul_mat_words(out: Any, a: Any, _b: Any, x: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Items [i0, i1), 16 rows each, rows fastest. Scratch: 16 sums, what is unpacked, partial sums of COLS columns x 16 rows of each stream."""
    n_mb, tile, item = (a.ne1 + LANES - 1) // LANES, ROWS * a.nb1, i0
    ahead = STREAM_AHEAD if COLS == 1 else (AHEAD + tile - 1) // tile * tile
    unpacked, sums = at(scratch, LANES * 4), at(scratch, LANES * 4 + 2 * ROWS * UNPACKED)
    n_whole, n_left = a.ne0 // SUPER, a.ne0 % SUPER // 32
    while item < i1:
        batch, m0 = item // n_mb, item % n_mb * LANES
        i2, i3, m = batch % out.ne2, batch // out.ne2, min(LANES, a.ne1 - m0)
        n = stream_items(item % n_mb, i1 - item, a.ne1) if COLS == 1 else 0
        streams, between, step, sums_row = tile_layout(n)
        x_p = matrix_address(x, out, i2, i3)
        for q in range(max(n, 1)):
            a_p, o_p = at(matrix_address(a, out, i2, i3), (m0 + q * LANES) * a.nb1), at(out.p, (m0 + q * LANES) * 4 + i2 * out.nb2 + i3 * out.nb3)
            for j in range(0, x.ne1, COLS):
                first = min(j, x.ne1 - COLS)  # the last tile may compute columns again: they come out the same
                for r in range(0, m, between):
                    last = ROWS - 1 if n > 0 else min(ROWS, m - r) - 1
                    dots(at(a_p, r * a.nb1), step * a.nb1, last, at(x_p, first * x.nb1), x.nb1, n_whole, n_left, ahead,
                         at(sums, r * LANES * 4), sums_row, unpacked)
                for c in range(COLS):
                    for s in range(streams):
                        o = at(o_p, (first + c) * out.nb1 + s * step * 4)
                        add_sums_16(o if m == LANES else scratch, at(sums, (c * ROWS + s) * SUMS), 1)
                        if m < LANES:
                            copy_bytes(o, scratch, m * 4)
        item += max(n * ROWS, 1)


OPTIONS: dict[str, Any] = {"when": _not_words, "rounds": True, "operands": flat_operands, "items": row_items, "chunk": row_chunk, "shares": lambda _: SHARES,
                           "bind": _binds, "before": lambda node: quantized(flat_operands(node)[2], quantize_block, X_BYTES), "scratch": _scratch}
