"""MUL_MAT of many small float32 matrices in bfloat16 (pyggml.cpu.tiles), for nodes whose `precision` is that.

An item is a block of rows and columns of one batch. Both sides are brought to tiles in scratch, K_BLOCK of k at a time, and a side that the
item before had too stays there: heads of one group share B or C.

Two planes of each factor, three products, were no faster than float32 (2 AMX cores: 1.1, 2.0 and 2.0 ms for the three products of a chunk, 1.0, 1.9
and 1.6 in float32), and NMSE was 2e-11.
"""

from __future__ import annotations

from typing import Any

from pyggml.cpu.rows import load_strided
from pyggml.cpu.simd import F0, at, copy_bytes, helper, st_f32
from pyggml.cpu.tiles import (
    BLOCK,
    FASTER_ON,
    TILE,
    TILE_K,
    halves_x32,
    plain_columns,
    products_1x1,
    tiles_off,
    tiles_on,
    turn_columns,
    turn_floats,
)
from pyggml.cpu.vector import LANES
from pyggml.dtypes import F32
from pyggml.ops.matmul.gemv import operands_of
from pyggml.registry import kernel
from pyggml.tensor import Node

M_BLOCK, N_BLOCK, K_BLOCK = 128, 128, 512
MIN_COLS = 8
WIDE_ROW = (TILE_K + LANES) * 4  # bytes; no power of two, so that rows do not share cache sets
CHUNK_PRODUCTS = 1 << 19


@helper
def gather_rows(wide: Any, src: Any, nb0: Any, nb1: Any, rows: Any, k: Any) -> None:
    """Up to 16 rows of up to 32 values, with zeros to the full numbers."""
    for r in range(LANES):
        row = at(wide, r * WIDE_ROW)
        for i in range(k if r < rows else 0):
            st_f32(row, i, load_strided(at(src, r * nb1), nb0, i))
        for i in range(k if r < rows else 0, TILE_K):
            st_f32(row, i, F0)


@helper
def pack_a(dst: Any, block: Any, src: Any, nb0: Any, nb1: Any, rows: Any, n_k: Any, wide: Any) -> None:
    """Turned tiles of `rows` rows, blocks of 16 `block` bytes apart."""
    for r in range(0, rows, LANES):
        for k in range(0, n_k, TILE_K):
            tile, p = at(dst, r // LANES * block + k // TILE_K * TILE), at(src, r * nb1 + k * nb0)
            whole = rows - r >= LANES and n_k - k >= TILE_K
            if whole and nb0 == 4:
                turn_floats(tile, p, nb1)
            elif whole and nb1 == 4:
                turn_columns(tile, p, nb0)
            else:
                gather_rows(wide, p, nb0, nb1, min(LANES, rows - r), min(TILE_K, n_k - k))
                turn_floats(tile, wide, WIDE_ROW)


@helper
def pack_b(dst: Any, block: Any, src: Any, nb0: Any, nb1: Any, rows: Any, n_k: Any, wide: Any) -> None:
    """Plain tiles of `rows` rows, blocks of 16 `block` bytes apart."""
    for r in range(0, rows, LANES):
        for k in range(0, n_k, TILE_K):
            tile, p, row = at(dst, r // LANES * block + k // TILE_K * TILE), at(src, r * nb1 + k * nb0), nb1
            if rows - r < LANES or n_k - k < TILE_K or (nb0 != 4 and nb1 != 4):
                gather_rows(wide, p, nb0, nb1, min(LANES, rows - r), min(TILE_K, n_k - k))
                p, row = wide, WIDE_ROW
            elif nb0 != 4:
                plain_columns(tile, p, nb0)
                continue
            for t in range(LANES):
                halves_x32(at(tile, t * 64), at(p, t * row))


def _panel(rows: int, most: int, k: int) -> int:
    """Bytes of a side's tiles."""
    return -(-min(rows, most) // BLOCK) * BLOCK // LANES * -(-min(k, K_BLOCK) // TILE_K) * TILE


def _params(node: Node) -> tuple[int]:
    a, _ = operands_of(node)
    return (_panel(a.ne[1], M_BLOCK, a.ne[0]),)


def _scratch(node: Node) -> int:
    a, b = operands_of(node)
    return LANES * WIDE_ROW + BLOCK * BLOCK * 4 + _params(node)[0] + _panel(b.ne[1], N_BLOCK, a.ne[0])


def _items(node: Node) -> int:
    m, n, o2, o3 = node.out.ne
    return -(-m // M_BLOCK) * -(-n // N_BLOCK) * o2 * o3


def _chunk(node: Node) -> int:
    return CHUNK_PRODUCTS // (min(M_BLOCK, node.out.ne[0]) * min(N_BLOCK, node.out.ne[1]) * operands_of(node)[0].ne[0])


def _not_rounded(node: Node) -> str | None:
    a, b = operands_of(node)
    if node.params["precision"] != "bf16":
        return "precision is not bf16"
    if a.dtype is not F32 or b.dtype is not F32:
        return "a or b is not f32"
    if a.ne[0] < TILE_K or b.ne[1] < MIN_COLS:
        return f"K is {a.ne[0]}, and there are {b.ne[1]} columns; fewer than {TILE_K} or {MIN_COLS}"
    return None


def mul_mat_small(out: Any, a: Any, b: Any, a_bytes: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Items [i0, i1), blocks of rows fastest. Scratch: 16 rows being gathered, a block of results, tiles of a, tiles of b."""
    tile_c = at(scratch, LANES * WIDE_ROW)
    a_tiles = at(tile_c, BLOCK * BLOCK * 4)
    b_tiles = at(a_tiles, a_bytes)
    n_mb, n_nb = (out.ne0 + M_BLOCK - 1) // M_BLOCK, (out.ne1 + N_BLOCK - 1) // N_BLOCK
    block = (min(a.ne0, K_BLOCK) + TILE_K - 1) // TILE_K * TILE
    a_had, b_had, m_had, n_had = -1, -1, 0, 0  # the sides in the tiles: where they lie (views may overlap), and how many rows of them
    tiles_on()
    for item in range(i0, i1):
        m0, rest = item % n_mb * M_BLOCK, item // n_mb
        n0, batch = rest % n_nb * N_BLOCK, rest // n_nb
        i2, i3 = batch % out.ne2, batch // out.ne2
        m, n = min(M_BLOCK, out.ne0 - m0), min(N_BLOCK, out.ne1 - n0)
        a_at = m0 * a.nb1 + i2 // (out.ne2 // a.ne2) * a.nb2 + i3 // (out.ne3 // a.ne3) * a.nb3
        b_at = n0 * b.nb1 + i2 // (out.ne2 // b.ne2) * b.nb2 + i3 // (out.ne3 // b.ne3) * b.nb3
        o_p = at(out.p, m0 * 4 + n0 * out.nb1 + i2 * out.nb2 + i3 * out.nb3)
        for k0 in range(0, a.ne0, K_BLOCK):
            k, first = min(K_BLOCK, a.ne0 - k0), 1 if k0 == 0 else 0
            if a_at != a_had or m > m_had:
                pack_a(a_tiles, block, at(a.p, a_at + k0 * a.nb0), a.nb0, a.nb1, m, k, scratch)
            if b_at != b_had or n > n_had:
                pack_b(b_tiles, block, at(b.p, b_at + k0 * b.nb0), b.nb0, b.nb1, n, k, scratch)
            for t in range(0, n, BLOCK):
                x, n_t = at(b_tiles, t // LANES * block), min(BLOCK, n - t)
                for r in range(0, m, BLOCK):
                    w, o, n_r = at(a_tiles, r // LANES * block), at(o_p, r * 4 + t * out.nb1), min(BLOCK, m - r)
                    if n_r == BLOCK and n_t == BLOCK:
                        products_1x1(w, block, x, block, (k + TILE_K - 1) // TILE_K, o, out.nb1, first)
                        continue
                    for j in range(n_t if first == 0 else 0):
                        copy_bytes(at(tile_c, j * BLOCK * 4), at(o, j * out.nb1), n_r * 4)
                    products_1x1(w, block, x, block, (k + TILE_K - 1) // TILE_K, tile_c, BLOCK * 4, first)
                    for j in range(n_t):
                        copy_bytes(at(o, j * out.nb1), at(tile_c, j * BLOCK * 4), n_r * 4)
        a_had, b_had = (a_at, b_at) if a.ne0 <= K_BLOCK else (-1, -1)
        m_had, n_had = m, n
    tiles_off()


for features in FASTER_ON:
    kernel("MUL_MAT", "cpu", when=_not_rounded, needs=features, rounds=True, items=_items, chunk=_chunk, params=_params, scratch=_scratch)(mul_mat_small)
