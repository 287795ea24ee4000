"""MUL_MAT of many small float32 matrices in bfloat16 (pyggml.cpu.tiles), for nodes whose `precision` allows it.

An item is a block of rows and columns of one batch. Both sides are brought to tiles in scratch, K_BLOCK of k at a time, and a side that the
item before had too stays there: heads of one group share B or C. `split` keeps each factor in two planes, 16 bits of it.
"""

from __future__ import annotations

from typing import Any

from pyggml.cpu.rows import load_strided
from pyggml.cpu.simd import F0, at, copy_bytes, helper, st_f32
from pyggml.cpu.tiles import (
    BLOCK,
    TILE,
    TILE_K,
    halves_x32,
    plain_columns,
    plain_columns_split,
    products_1x1,
    products_2x2,
    split_x32,
    tiles_off,
    tiles_on,
    turn_columns,
    turn_columns_split,
    turn_floats,
    turn_split,
)
from pyggml.cpu.vector import LANES
from pyggml.dtypes import F32
from pyggml.registry import kernel
from pyggml.tensor import Node, Tensor

M_BLOCK, N_BLOCK, K_BLOCK = 128, 128, 512
MIN_COLS = 8
WIDE_ROW = (TILE_K + LANES) * 4  # bytes; no power of two, so that rows do not share cache sets
CHUNK_PRODUCTS = 1 << 19


def _ab(node: Node) -> tuple[Tensor, Tensor]:
    a, b = node.src
    assert a is not None and b is not None
    return a, b


@helper
def turn(_dst: Any, _src: Any, _stride: Any) -> None:
    """A turned tile of 16 rows of a; bound by the number of planes, as all of these. Its rows are `stride` bytes apart."""


@helper
def turn_along(_dst: Any, _src: Any, _stride: Any) -> None:
    """The same where it is the values of k that are `stride` bytes apart, and rows are side by side."""


@helper
def plain(_dst: Any, _src: Any) -> None:
    """32 values of a row of b in a tile."""


@helper
def plain_along(_dst: Any, _src: Any, _stride: Any) -> None:
    """A tile of 16 rows of b that are side by side."""


PLANES = 1  # bound


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
            tile, p = at(dst, r // LANES * block + k // TILE_K * (TILE * PLANES)), at(src, r * nb1 + k * nb0)
            whole = rows - r >= LANES and n_k - k >= TILE_K
            if whole and nb0 == 4:
                turn(tile, p, nb1)
            elif whole and nb1 == 4:
                turn_along(tile, p, nb0)
            else:
                gather_rows(wide, p, nb0, nb1, min(LANES, rows - r), min(TILE_K, n_k - k))
                turn(tile, wide, WIDE_ROW)


@helper
def pack_b(dst: Any, block: Any, src: Any, nb0: Any, nb1: Any, rows: Any, n_k: Any, wide: Any) -> None:
    """Plain tiles of `rows` rows, blocks of 16 `block` bytes apart."""
    for r in range(0, rows, LANES):
        for k in range(0, n_k, TILE_K):
            tile, p, row = at(dst, r // LANES * block + k // TILE_K * (TILE * PLANES)), at(src, r * nb1 + k * nb0), nb1
            if rows - r < LANES or n_k - k < TILE_K or (nb0 != 4 and nb1 != 4):
                gather_rows(wide, p, nb0, nb1, min(LANES, rows - r), min(TILE_K, n_k - k))
                p, row = wide, WIDE_ROW
            elif nb0 != 4:
                plain_along(tile, p, nb0)
                continue
            for t in range(LANES):
                plain(at(tile, t * 64), at(p, t * row))


products = products_1x1  # bound


def _tiles(k: int) -> int:
    return -(-min(k, K_BLOCK) // TILE_K)


def _panel(rows: int, most: int, k: int, planes: int) -> int:
    """Bytes of a side's tiles."""
    return -(-min(rows, most) // BLOCK) * BLOCK // LANES * _tiles(k) * TILE * planes


def _planes(node: Node) -> int:
    return 2 if node.params["precision"] == "split" else 1


def _params(node: Node) -> tuple[int]:
    a, _ = _ab(node)
    return (_panel(a.ne[1], M_BLOCK, a.ne[0], _planes(node)),)


def _scratch(node: Node) -> int:
    a, b = _ab(node)
    return LANES * WIDE_ROW + BLOCK * BLOCK * 4 + _params(node)[0] + _panel(b.ne[1], N_BLOCK, a.ne[0], _planes(node))


def _items(node: Node) -> int:
    m, n, o2, o3 = node.out.ne
    return -(-m // M_BLOCK) * -(-n // N_BLOCK) * o2 * o3


def _chunk(node: Node) -> int:
    return CHUNK_PRODUCTS // (min(M_BLOCK, node.out.ne[0]) * min(N_BLOCK, node.out.ne[1]) * _ab(node)[0].ne[0])


def _binds(node: Node) -> dict[str, Any]:
    split = node.params["precision"] == "split"
    a = {"turn": turn_split, "turn_along": turn_columns_split} if split else {"turn": turn_floats, "turn_along": turn_columns}
    b = {"plain": split_x32, "plain_along": plain_columns_split} if split else {"plain": halves_x32, "plain_along": plain_columns}
    return {"pack_a": pack_a.bind(**a, PLANES=_planes(node)), "pack_b": pack_b.bind(**b, PLANES=_planes(node)), "PLANES": _planes(node),
            "products": products_2x2 if split else products_1x1}


def _not_rounded(node: Node, precision: str) -> str | None:
    a, b = _ab(node)
    if node.params["precision"] != precision:
        return f"precision is {node.params['precision']}"
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
    block = (min(a.ne0, K_BLOCK) + TILE_K - 1) // TILE_K * (TILE * PLANES)
    a_had, b_had = -1, -1
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
            if a_at != a_had:
                pack_a(a_tiles, block, at(a.p, a_at + k0 * a.nb0), a.nb0, a.nb1, m, k, scratch)
            if b_at != b_had:
                pack_b(b_tiles, block, at(b.p, b_at + k0 * b.nb0), b.nb0, b.nb1, n, k, scratch)
            for t in range(0, n, BLOCK):
                x, n_t = at(b_tiles, t // LANES * block), min(BLOCK, n - t)
                for r in range(0, m, BLOCK):
                    w, o, n_r = at(a_tiles, r // LANES * block), at(o_p, r * 4 + t * out.nb1), min(BLOCK, m - r)
                    if n_r == BLOCK and n_t == BLOCK:
                        products(w, block, x, block, (k + TILE_K - 1) // TILE_K, o, out.nb1, first)
                        continue
                    for j in range(n_t if first == 0 else 0):
                        copy_bytes(at(tile_c, j * BLOCK * 4), at(o, j * out.nb1), n_r * 4)
                    products(w, block, x, block, (k + TILE_K - 1) // TILE_K, tile_c, BLOCK * 4, first)
                    for j in range(n_t):
                        copy_bytes(at(o, j * out.nb1), at(tile_c, j * BLOCK * 4), n_r * 4)
        a_had, b_had = (a_at, b_at) if a.ne0 <= K_BLOCK else (-1, -1)
    tiles_off()


_OPTIONS: dict[str, Any] = {"items": _items, "chunk": _chunk, "params": _params, "bind": _binds, "scratch": _scratch, "rounds": True}
kernel("MUL_MAT", "cpu", when=lambda node: _not_rounded(node, "bf16"), needs={"avx512bf16"}, **_OPTIONS)(mul_mat_small)
# Without AMX three products in bfloat16 are slower than one in float32.
kernel("MUL_MAT", "cpu", when=lambda node: _not_rounded(node, "split"), needs={"avx512bf16", "amx-bf16"}, **_OPTIONS)(mul_mat_small)
