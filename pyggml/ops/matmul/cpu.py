"""CPU kernels of MUL_MAT in float32: dot products for few columns, outer products for more. Bfloat16 is in panels.py.

`mul_mat`: the result is cut into items, blocks of m x n of one batch. Along K an item goes in blocks of K_BLOCK: rows that are not
plain float32 are brought to scratch as such (dequantized, widened, gathered, padded with zeros to whole vectors), then tiles
of 16 dot products are computed in registers. A dot product always has 16 partial sums, element k of the block in sum
k % 16, added in the order of `sums_of_lanes`; blocks of K are added in order.

`mul_mat_blocks`: K is the outer loop. A block of `a` is brought to panels in which 32 rows stand side by side for each k, and a tile of
32 x 8 results stays in registers, each summed over k in order, in blocks of K_OUTER. Where 8 columns of b begin or end with zeros (a
triangle has half of them) these terms are left out, unless the panel holds a number of which 0 times is not 0. A sum that is 0 is +0,
so that no bit tells. Numbers below the normal range count as 0: products of decays are full of them.

In both, the bits of a result depend on its two rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyggml.cpu.blocks import flush_tiny, restore_tiny
from pyggml.cpu.rows import matrix_address
from pyggml.cpu.simd import F0, LOAD, Helper, at, copy_bytes, helper, intrinsic, ld_f32, st_f32, zero_bytes
from pyggml.cpu.vector import LANES, float_constant, load_floats, loop, multiply_add, splat, store_floats, sums_of_lanes, transpose_16x16, wide_registers
from pyggml.dtypes import F32
from pyggml.ops.matmul import gemv, lanes, planes, words
from pyggml.ops.matmul.gemv import K_BLOCK, operands_of
from pyggml.quants.cpu import DEQUANT_ROW
from pyggml.registry import items_wanted, kernel
from pyggml.tensor import Node, Tensor

ROW = (K_BLOCK + LANES) * 4  # 4 + 4 rows of it fit in 32 KB; bytes of a packed row: no power of two, so that rows do not share cache sets
M_BLOCK, N_BLOCK = 64, 512
N_PACK = 16  # rows of b packed at a time
CHUNK_PRODUCTS = 65536


# Tiles


def _dots(b: Any, ir: Any, rows: int, cols: int, at_once: tuple[int, int], operands: Any) -> None:
    """rows x cols = 16 dot products of n_blocks * 16 elements, stored at dst column by column. Of a tile at the matrix's
    edge, rows beyond the last are computed from the last one again. `at_once`: as many sums as stay in registers."""
    a, a_row, a_last, x, x_row, x_last, n_blocks, dst = operands
    i64, zero = ir.IntType(64), float_constant(ir, 0.0)

    def row_pointers(p: Any, stride: Any, last: Any, n: int) -> list[Any]:
        return [b.gep(p, [b.mul(stride, b.select(b.icmp_signed("<", last, i64(r)), last, i64(r)))]) for r in range(n)]

    a_rows, x_rows = row_pointers(a, a_row, a_last, rows), row_pointers(x, x_row, x_last, cols)
    sums: dict[tuple[int, int], Any] = {}
    for r0 in range(0, rows, at_once[0]):
        for c0 in range(0, cols, at_once[1]):
            places = [(r, c) for c in range(c0, c0 + at_once[1]) for r in range(r0, r0 + at_once[0])]

            def block(i: Any, acc: list[Any], places: list[tuple[int, int]] = places) -> list[Any]:
                offset = b.mul(i, i64(LANES * 4))
                av = {r: load_floats(b, ir, b.gep(a_rows[r], [offset])) for r in sorted({r for r, _ in places})}
                xv = {c: load_floats(b, ir, b.gep(x_rows[c], [offset])) for c in sorted({c for _, c in places})}
                return [multiply_add(b, ir, av[r], xv[c], s) for (r, c), s in zip(places, acc, strict=True)]

            sums.update(zip(places, loop(b, ir, n_blocks, [zero] * len(places), block), strict=True))
    store_floats(b, dst, sums_of_lanes(b, ir, [sums[r, c] for c in range(cols) for r in range(rows)]))


@intrinsic("void(ptr, i64, i64, ptr, i64, i64, i64, ptr)")
def dots_4x4(b: Any, ir: Any, *operands: Any) -> None:
    """Tile for many columns: (a, bytes of a row, last row, b, bytes of a row, last row, blocks of 16 elements, dst)."""
    _dots(b, ir, 4, 4, (4, 4) if wide_registers() else (2, 2), operands)


@intrinsic("void(ptr, i64, i64, ptr, i64, i64, i64, ptr)")
def dots_16x1(b: Any, ir: Any, *operands: Any) -> None:
    """Tile for one column; operands as dots_4x4."""
    _dots(b, ir, 16, 1, (8, 1) if wide_registers() else (4, 1), operands)


# Packing


@helper
def widen(_src: Any, _dst: Any, _n: Any) -> Any:
    """A row as float32; bound to the type's."""


@helper
def load(_p: Any, _i: Any) -> Any:
    """An element as float32; bound to the type's."""


BLOCK, NBYTES = 1, 4  # of the type; bound


@helper
def pack_rows(dst: Any, src: Any, _nb0: Any, nb1: Any, n_rows: Any, k0: Any, n: Any, _turn: Any) -> Any:
    """Elements k0 to k0 + n of rows stored without gaps."""
    for r in range(n_rows):
        widen(at(src, r * nb1 + k0 // BLOCK * NBYTES), at(dst, r * ROW), n)
        zero_bytes(at(dst, r * ROW + n * 4), -n % LANES * 4)


@helper
def pack_strided(dst: Any, src: Any, nb0: Any, nb1: Any, n_rows: Any, k0: Any, n: Any, turn: Any) -> Any:
    """The same of rows with any strides. Where the rows' k-th elements lie side by side, 16 x 16 blocks are turned."""
    turned_rows = n_rows // LANES * LANES if nb1 == NBYTES else 0
    turned_k = n // LANES * LANES
    for r in range(0, turned_rows, LANES):
        for k in range(0, turned_k, LANES):
            for i in range(LANES):
                widen(at(src, r * nb1 + (k0 + k + i) * nb0), at(turn, i * LANES * 4), LANES)
            transpose_16x16(at(dst, r * ROW + k * 4), ROW, turn, LANES * 4)
    for k in range(n):
        for r in range(turned_rows if k < turned_k else 0, n_rows):
            st_f32(at(dst, r * ROW), k, load(at(src, r * nb1 + (k0 + k) * nb0), 0))
    for r in range(n_rows):
        zero_bytes(at(dst, r * ROW + n * 4), -n % LANES * 4)


@helper
def no_pack(_dst: Any, _src: Any, _nb0: Any, _nb1: Any, _n_rows: Any, _k0: Any, _n: Any, _turn: Any) -> None:
    """Rows of plain float32 are read where they are."""


def _packer(t: Tensor) -> Helper:
    if _is_plain(t):
        return no_pack
    if t.rows_contiguous:
        return pack_rows.bind(widen=DEQUANT_ROW[t.dtype.name], BLOCK=t.dtype.block, NBYTES=t.dtype.nbytes)
    return pack_strided.bind(widen=DEQUANT_ROW[t.dtype.name], load=LOAD[t.dtype.name], NBYTES=t.dtype.nbytes)


def _is_plain(t: Tensor) -> bool:
    return t.dtype is F32 and t.nb[0] == 4 and t.ne[0] % LANES == 0


# The kernel


def _n_items(node: Node, mb: int, nb: int) -> int:
    """Blocks of so many rows and columns."""
    m, n, b2, b3 = node.out.ne
    return -(-m // mb) * -(-n // nb) * b2 * b3


def _halved(node: Node, mb: int, nb: int, least_m: int, least_n: int) -> tuple[int, int]:
    """Rows and columns of an item, from the shape alone: halved until there are enough items for some threads."""
    while _n_items(node, mb, nb) < items_wanted() and nb > least_n:
        nb //= 2
    while _n_items(node, mb, nb) < items_wanted() and mb > least_m:
        mb //= 2
    return mb, nb


def _blocks(node: Node) -> tuple[int, int]:
    return _halved(node, *((M_BLOCK, N_BLOCK) if node.out.ne[1] > 4 else (LANES, 4)), LANES, 32)


def _items(node: Node) -> int:
    return _n_items(node, *_blocks(node))


def _chunk(node: Node) -> int:
    mb, nb = _blocks(node)
    return CHUNK_PRODUCTS // (mb * min(nb, node.out.ne[1]) * operands_of(node)[0].ne[0])


def _scratch(node: Node) -> int:
    return 4 * LANES * (1 + LANES) + (M_BLOCK + N_PACK) * ROW


def _binds(node: Node) -> dict[str, Any]:
    a, b = operands_of(node)
    tile = {"dots": dots_16x1, "ROWS": 16, "COLS": 1} if node.out.ne[1] == 1 else {"dots": dots_4x4, "ROWS": 4, "COLS": 4}
    return {**tile, "PACK_A": not _is_plain(a), "PACK_B": not _is_plain(b), "pack_a": _packer(a), "pack_b": _packer(b)}


dots: Callable[..., None] = dots_4x4
pack_a = pack_b = no_pack
ROWS, COLS, PACK_A, PACK_B = 4, 4, False, False  # bound, as the four above


@kernel("MUL_MAT", "cpu", items=_items, chunk=_chunk, params=_blocks, bind=_binds, scratch=_scratch)
def mul_mat(out: Any, a: Any, b: Any, mb: Any, nb: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Items [i0, i1), blocks of m fastest. Scratch: a tile, a 16 x 16 block being turned, packed rows of a and of b."""
    tile, turn = scratch, at(scratch, 4 * LANES)
    a_packed = at(turn, 4 * LANES * LANES)
    b_packed = at(a_packed, M_BLOCK * ROW)
    n_mb, n_nb = (a.ne1 + mb - 1) // mb, (b.ne1 + nb - 1) // nb
    for item in range(i0, i1):
        m0, rest = item % n_mb * mb, item // n_mb
        n0, batch = rest % n_nb * nb, rest // n_nb
        i2, i3 = batch % out.ne2, batch // out.ne2
        m, n1 = min(mb, a.ne1 - m0), min(n0 + nb, b.ne1)
        a_p, b_p = at(matrix_address(a, out, i2, i3), m0 * a.nb1), matrix_address(b, out, i2, i3)
        o_p = at(out.p, m0 * 4 + i2 * out.nb2 + i3 * out.nb3)
        for k0 in range(0, a.ne0, K_BLOCK):
            k = min(K_BLOCK, a.ne0 - k0)
            n_blocks = (k + LANES - 1) // LANES
            rows_a, row_a = at(a_p, k0 * 4), a.nb1
            if PACK_A:
                pack_a(a_packed, a_p, a.nb0, a.nb1, m, k0, k, turn)
                rows_a, row_a = a_packed, ROW
            for j in range(n0, n1, N_PACK):
                n_j = min(N_PACK, n1 - j)
                rows_b, row_b = at(b_p, j * b.nb1 + k0 * 4), b.nb1
                if PACK_B:
                    pack_b(b_packed, at(b_p, j * b.nb1), b.nb0, b.nb1, n_j, k0, k, turn)
                    rows_b, row_b = b_packed, ROW
                for c0 in range(0, n_j, COLS):
                    cols = min(COLS, n_j - c0)
                    for r0 in range(0, m, ROWS):
                        rows = min(ROWS, m - r0)
                        dots(at(rows_a, r0 * row_a), row_a, rows - 1, at(rows_b, c0 * row_b), row_b, cols - 1, n_blocks, tile)
                        for c in range(cols):
                            o, s = at(o_p, r0 * 4 + (j + c0 + c) * out.nb1), at(tile, c * ROWS * 4)
                            if k0 == 0:
                                for r in range(rows):
                                    st_f32(o, r, ld_f32(s, r))
                            else:
                                for r in range(rows):
                                    st_f32(o, r, ld_f32(o, r) + ld_f32(s, r))


# Blocks of outer products

K_OUTER = 256  # partial sums of so many terms, so that rounding does not grow with K
P_ROWS, P_COLS = 32, 8  # of a tile; a panel of `a` holds P_ROWS rows, element by element of K
P_STEP = P_ROWS * 4  # bytes of a panel from one k to the next
B_COLS = 64  # columns of b that are brought to scratch at a time
B_STEP = B_COLS * 4
P_BLOCK = 128  # rows of an item
MIN_COLS = 17  # fewer: turning `a` costs more than sums over lanes do


@intrinsic("void(ptr, ptr, i64, i64, i64, ptr, i64, i64)")
def outer_tile(b: Any, ir: Any, a: Any, x: Any, x_k: Any, x_col: Any, n: Any, dst: Any, dst_col: Any, first: Any) -> None:
    """P_ROWS x P_COLS results: for each k a panel's 32 elements times one element of each column. (panel, x, bytes to the next k, to
    the next column, terms, dst, bytes of a column, first: 1 to store, 0 to add to what is there)."""
    i64, zero, f32 = ir.IntType(64), float_constant(ir, 0.0), ir.FloatType().as_pointer()
    x_cols = [b.gep(x, [b.mul(x_col, i64(c))]) for c in range(P_COLS)]
    at_once = P_COLS if wide_registers() else 2
    for c0 in range(0, P_COLS, at_once):
        places = [(v, c) for c in range(c0, c0 + at_once) for v in range(P_ROWS // LANES)]

        def term(i: Any, acc: list[Any], places: list[tuple[int, int]] = places, c0: int = c0) -> list[Any]:
            row, offset = b.gep(a, [b.mul(i, i64(P_STEP))]), b.mul(i, x_k)
            av = [load_floats(b, ir, b.gep(row, [i64(v * LANES * 4)])) for v in range(P_ROWS // LANES)]
            xv = {c: splat(b, ir, b.load(b.bitcast(b.gep(x_cols[c], [offset]), f32), align=4)) for c in range(c0, c0 + at_once)}
            return [multiply_add(b, ir, av[v], xv[c], s) for (v, c), s in zip(places, acc, strict=True)]

        for (v, c), total in zip(places, loop(b, ir, n, [zero] * len(places), term), strict=True):
            place = b.gep(dst, [b.add(b.mul(dst_col, i64(c)), i64(v * LANES * 4))])
            total = b.fadd(total, zero)  # +0 of -0
            store_floats(b, place, b.select(b.icmp_signed("!=", first, i64(0)), total, b.fadd(load_floats(b, ir, place), total)))


SPAN = 8  # elements of K that are looked at together


@intrinsic("i64(ptr, i64)")
def any_used(b: Any, ir: Any, x: Any, x_col: Any) -> Any:
    """0 when SPAN elements of K are zero in each of P_COLS columns."""
    words = ir.VectorType(ir.IntType(32), SPAN)
    bits = ir.Constant(words, None)
    for c in range(P_COLS):
        bits = b.or_(bits, b.load(b.bitcast(b.gep(x, [b.mul(x_col, ir.IntType(64)(c))]), words.as_pointer()), align=4))
    bits = b.bitcast(b.shl(bits, ir.Constant(words, [1] * SPAN)), ir.IntType(32 * SPAN))  # without the signs
    return b.zext(b.icmp_unsigned("!=", bits, bits.type(0)), ir.IntType(64))


@intrinsic("f32(ptr, i64)")
def zero_times(b: Any, ir: Any, panel: Any, n: Any) -> Any:
    """0 times all numbers of a panel of n elements of K: NaN where one of them is not finite."""
    zero = float_constant(ir, 0.0)

    def term(i: Any, acc: list[Any]) -> list[Any]:
        row = b.gep(panel, [b.mul(i, ir.IntType(64)(P_STEP))])
        return [multiply_add(b, ir, load_floats(b, ir, b.gep(row, [ir.IntType(64)(v * LANES * 4)])), zero, s) for v, s in enumerate(acc)]

    sums = loop(b, ir, n, [zero] * (P_ROWS // LANES), term)
    return b.extract_element(sums_of_lanes(b, ir, [b.fadd(*sums)] * LANES), ir.IntType(32)(0))


@helper
def used_span(x: Any, x_col: Any, n: Any) -> Any:
    """The first element of K that is not zero in all of P_COLS columns, and the one after the last such, to SPAN elements."""
    lo, hi = 0, n
    while hi >= SPAN and any_used(at(x, (hi - SPAN) * 4), x_col) == 0:
        hi -= SPAN
    while lo + SPAN <= hi and any_used(at(x, lo * 4), x_col) == 0:
        lo += SPAN
    return lo, hi


@helper
def panel_of_columns(panel: Any, src: Any, nb0: Any, _nb1: Any, m: Any, k0: Any, n: Any, _rows: Any, _turn: Any) -> None:
    """A panel of m <= P_ROWS rows that stand side by side, elements k0 to k0 + n."""
    for k in range(n):
        if m == P_ROWS:
            copy_bytes(at(panel, k * P_STEP), at(src, (k0 + k) * nb0), P_STEP)
        else:
            copy_bytes(at(panel, k * P_STEP), at(src, (k0 + k) * nb0), m * 4)


@helper
def panel_of_rows(panel: Any, src: Any, nb0: Any, nb1: Any, m: Any, k0: Any, n: Any, rows: Any, turn: Any) -> None:
    """The same of any rows, 16 at a time: brought to `rows` where they are not plain float32, then turned."""
    for r in range(0, m, LANES):
        p, row = at(src, r * nb1 + k0 * 4), nb1
        if PACK_A or m - r < LANES:
            pack_a(rows, at(src, r * nb1), nb0, nb1, min(LANES, m - r), k0, n, turn)
            p, row = rows, ROW
        for k in range(0, n, LANES):
            transpose_16x16(at(panel, k * P_STEP + r * 4), P_STEP, at(p, k * 4), row)


@helper
def load_b(_p: Any, _i: Any) -> Any:
    """An element of b as float32; bound to its type."""


@helper
def columns_of(dst: Any, src: Any, nb0: Any, nb1: Any, cols: Any, n: Any) -> None:
    """B_COLS columns of b, element by element of K; zeros beyond the last one."""
    for k in range(n if SIDE_BY_SIDE else 0):
        if cols == B_COLS:
            copy_bytes(at(dst, k * B_STEP), at(src, k * nb0), B_STEP)
        else:
            copy_bytes(at(dst, k * B_STEP), at(src, k * nb0), cols * 4)
            zero_bytes(at(dst, k * B_STEP + cols * 4), B_STEP - cols * 4)
    for c in range(0 if SIDE_BY_SIDE else -(-cols // P_COLS) * P_COLS):
        for k in range(n):
            st_f32(at(dst, k * B_STEP), c, load_b(at(src, k * nb0 + c * nb1), 0) if c < cols else F0)


def _columns(a: Tensor) -> bool:
    """True when rows of float32 stand side by side."""
    return a.dtype is F32 and a.nb[1] == 4 and a.nb[0] != 4


def _not_blocks(node: Node) -> str | None:
    n, least = node.out.ne[1], 2 if _columns(operands_of(node)[0]) else MIN_COLS
    return f"{n} columns, fewer than {least}" if n < least else None


def _panel_blocks(node: Node) -> tuple[int, int]:
    return _halved(node, P_BLOCK, N_BLOCK, P_ROWS, B_COLS)


def _panel_items(node: Node) -> int:
    return _n_items(node, *_panel_blocks(node))


def _panel_chunk(node: Node) -> int:
    mb, nb = _panel_blocks(node)
    return CHUNK_PRODUCTS // (min(mb, node.out.ne[0]) * min(nb, node.out.ne[1]) * operands_of(node)[0].ne[0])


def _panel_scratch(node: Node) -> int:
    return P_BLOCK * K_OUTER * 4 + LANES * ROW + 4 * LANES * LANES + B_STEP * K_OUTER + P_STEP * P_COLS + P_BLOCK // P_ROWS * 4


def _panel_binds(node: Node) -> dict[str, Any]:
    a, b = operands_of(node)
    packer = pack_rows.bind(widen=DEQUANT_ROW["f32"], BLOCK=1, NBYTES=4) if _is_plain(a) else _packer(a)
    panel = panel_of_columns if _columns(a) else panel_of_rows.bind(PACK_A=not _is_plain(a), pack_a=packer)
    return {"panel_a": panel, "PACK_B": not (b.dtype is F32 and b.nb[0] == 4),
            "columns_b": columns_of.bind(load_b=LOAD[b.dtype.name], SIDE_BY_SIDE=b.dtype is F32 and b.nb[1] == 4)}


panel_a, columns_b, SIDE_BY_SIDE = panel_of_rows, columns_of, False  # bound


@kernel("MUL_MAT", "cpu", when=_not_blocks, items=_panel_items, chunk=_panel_chunk, params=_panel_blocks, bind=_panel_binds, scratch=_panel_scratch)
def mul_mat_blocks(out: Any, a: Any, b: Any, mb: Any, nb: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Items [i0, i1), blocks of m fastest. Scratch: panels of a, rows of it, a 16 x 16 block being turned, columns of b, a
    tile, 0 times each panel once one was needed."""
    mode = flush_tiny()
    rows = at(scratch, P_BLOCK * K_OUTER * 4)
    turn = at(rows, LANES * ROW)
    columns = at(turn, 4 * LANES * LANES)
    tile = at(columns, B_STEP * K_OUTER)
    finite = at(tile, P_STEP * P_COLS)
    n_mb, n_nb = (a.ne1 + mb - 1) // mb, (b.ne1 + nb - 1) // nb
    for item in range(i0, i1):
        m0, rest = item % n_mb * mb, item // n_mb
        n0, batch = rest % n_nb * nb, rest // n_nb
        i2, i3 = batch % out.ne2, batch // out.ne2
        m, n1 = min(mb, a.ne1 - m0), min(n0 + nb, b.ne1)
        a_p, b_p = at(matrix_address(a, out, i2, i3), m0 * a.nb1), matrix_address(b, out, i2, i3)
        o_p = at(out.p, m0 * 4 + i2 * out.nb2 + i3 * out.nb3)
        for k0 in range(0, a.ne0, K_OUTER):
            k, first = min(K_OUTER, a.ne0 - k0), 1 if k0 == 0 else 0
            for r in range(0, m, P_ROWS):
                panel_a(at(scratch, r * K_OUTER * 4), at(a_p, r * a.nb1), a.nb0, a.nb1, min(P_ROWS, m - r), k0, k, rows, turn)
            looked = 0
            for j in range(n0, n1, P_COLS):
                cols = min(P_COLS, n1 - j)
                before = P_COLS - cols if n1 - n0 >= P_COLS and not PACK_B else 0  # columns of a last tile that are computed again, and dropped
                x, x_k, x_col = at(b_p, (j - before) * b.nb1 + k0 * b.nb0), b.nb0, b.nb1
                if PACK_B or cols + before < P_COLS:
                    place = (j - n0) % B_COLS if PACK_B else 0
                    if place == 0:
                        columns_b(columns, x, x_k, x_col, min(B_COLS, n1 - j), k)
                    x, x_k, x_col = at(columns, place * 4), B_STEP, 4
                lo, hi = used_span(x, x_col, k) if not PACK_B and cols == P_COLS else (0, k)
                if looked == 0 and hi - lo < k:
                    looked = 1
                    for r in range(0, m, P_ROWS):
                        st_f32(finite, r // P_ROWS, zero_times(at(scratch, r * K_OUTER * 4), k))
                for r in range(0, m, P_ROWS):
                    o, panel = at(o_p, r * 4 + j * out.nb1), at(scratch, r * K_OUTER * 4)
                    if m - r >= P_ROWS and cols == P_COLS:
                        if hi - lo < k and ld_f32(finite, r // P_ROWS) == F0:
                            outer_tile(at(panel, lo * P_STEP), at(x, lo * x_k), x_k, x_col, hi - lo, o, out.nb1, first)
                        else:
                            outer_tile(panel, x, x_k, x_col, k, o, out.nb1, first)
                        continue
                    outer_tile(panel, x, x_k, x_col, k, tile, P_STEP, 1)
                    for c in range(cols):
                        to, of = at(o, c * out.nb1), at(tile, (before + c) * P_STEP)
                        for i in range(min(P_ROWS, m - r)):
                            st_f32(to, i, ld_f32(of, i) if first == 1 else ld_f32(to, i) + ld_f32(of, i))
    restore_tiny(mode)


# Registered later, so tried first: few columns, whole numbers before float32.
kernel("MUL_MAT", "cpu", **gemv.OPTIONS)(gemv.mul_mat_few)
kernel("MUL_MAT", "cpu", **words.OPTIONS)(words.mul_mat_words)

from pyggml.ops.matmul import panels as panels  # noqa: E402
from pyggml.ops.matmul import small as small  # noqa: E402

kernel("MUL_MAT", "cpu", **lanes.OPTIONS)(lanes.mul_mat_lanes)
kernel("MUL_MAT", "cpu", **planes.OPTIONS)(planes.mul_mat_planes)
