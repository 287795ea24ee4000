"""MUL_MAT of many columns in bfloat16 (pyggml.cpu.tiles), for weights that are stored with at most 11 bits of precision.

`pack_tokens` brings b to tiles once for all products that read it. An item of `mul_mat_panels` is a block of rows of a and of
tokens: it turns a panel of a, as many rows and values of k as NARROW or WIDE says, into tiles in scratch and multiplies it with all tokens of the block.
So a weight is dequantized once per P_TOKENS tokens.

Planes (see tiles): quantized weights are rounded once, as are the tokens; bf16 weights are exact and meet two planes of
the tokens; of f16 weights two planes hold every bit, and three products keep 16 bits of the sum's terms.
"""

from __future__ import annotations

import math
from typing import Any

from pyggml.cpu.rows import loader, matrix_address
from pyggml.cpu.simd import F0, at, copy_bytes, helper, intrinsic, st_f32, zero_bytes
from pyggml.cpu.tiles import (
    BLOCK,
    BY_TILES,
    FASTER_ON,
    TILE,
    TILE_K,
    halves_x32,
    products_1x1,
    products_1x2,
    products_2x2,
    split_x32,
    tiles_off,
    tiles_on,
    turn_floats,
    turn_halves,
    turn_split,
)
from pyggml.cpu.vector import LANES, prefetch
from pyggml.dtypes import BF16, F16, F32
from pyggml.ops.matmul.gemv import operands_of
from pyggml.quants.cpu import DEQUANT_ROW
from pyggml.registry import Prepared, kernel
from pyggml.tensor import Node, Tensor

P_TOKENS = 1024
NARROW, WIDE = (64, 2048), (256, 1024)  # rows and values of k of a panel: in a wide one, tokens come from beyond the second-level cache a quarter as often
MIN_TOKENS = 17  # fewer: kernels that read a weight once for all columns are as fast and round nothing
MIN_ITEMS = 8
FETCH_K = 128  # bfloat16 values of a row that are asked for together
WIDEN_K = 256  # values of k that are dequantized at a time, of 16 rows; a multiple of every type's block
WIDE_ROW = (WIDEN_K + LANES) * 4  # bytes; no power of two, so that rows do not share cache sets


def _batched(node: Node) -> bool:
    """Whether the batches of b are products of their own, not more tokens: a has batches too, or the result's rows are not evenly spaced."""
    a, out = operands_of(node)[0], node.out
    return a.ne[2] * a.ne[3] > 1 or any(out.ne[d] > 1 and out.nb[d] != out.nb[1] * math.prod(out.ne[1:d]) for d in (2, 3))


def _tokens(node: Node) -> tuple[int, int]:
    """Tokens of a batch, and batches."""
    b = operands_of(node)[1]
    return (b.ne[1], node.out.ne[2] * node.out.ne[3]) if _batched(node) else (b.n_rows, 1)


def _planes(a: Tensor) -> tuple[int, int]:
    return {BF16: (1, 2), F16: (2, 2)}.get(a.dtype, (1, 1))


def _k_tiles(a: Tensor) -> int:
    return -(-a.ne[0] // TILE_K)


# Tokens


@helper
def pack_x32(_dst: Any, _src: Any) -> None:
    """32 values to tiles; bound by the number of planes."""


load_x = loader("f32", True)
PLANES = 1  # bound, as the two above


def _pack_binds(b: Tensor, planes: int) -> dict[str, Any]:
    return {"pack_x32": split_x32 if planes == 2 else halves_x32, "load_x": loader("f32", b.nb[0] == 4), "PLANES": planes}


def pack_tokens(out: Any, b: Any, batched: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Tiles of 16 tokens, items in order of out: [512 values, PLANES x tiles along k, blocks of 16 tokens, batches]."""
    n = b.ne1 if batched else b.ne1 * b.ne2 * b.ne3
    for item in range(i0, i1):
        batch, t0 = item // out.ne2, item % out.ne2 * LANES
        for t in range(LANES):
            dst = at(out.p, batch * out.nb3 + item % out.ne2 * out.nb2 + t * 64)
            token = t0 + t
            i1_, rest = token % b.ne1, token // b.ne1 + batch
            row = at(b.p, i1_ * b.nb1 + rest % b.ne2 * b.nb2 + rest // b.ne2 * b.nb3)
            for k in range(0, b.ne0, TILE_K):
                tile = at(dst, k // TILE_K * (TILE * PLANES))
                if token >= n:
                    zero_bytes(tile, 64)
                    if PLANES == 2:
                        zero_bytes(at(tile, TILE), 64)
                elif k + TILE_K <= b.ne0 and b.nb0 == 4:
                    pack_x32(tile, at(row, k * 4))
                else:
                    left = min(TILE_K, b.ne0 - k)
                    for i in range(left):
                        st_f32(scratch, i, load_x(at(row, k * b.nb0), b.nb0, i))
                    for i in range(left, TILE_K):
                        st_f32(scratch, i, F0)
                    pack_x32(tile, scratch)


def _prepare(node: Node) -> Prepared:
    a, b = operands_of(node)
    planes = _planes(a)[1]
    batched = int(_batched(node))
    (n, _), tiles, batches = _tokens(node), _k_tiles(a), b.ne[2] * b.ne[3] if batched else 1
    blocks = -(-n // BLOCK) * (BLOCK // LANES)
    packed = Tensor(BF16, (TILE // 2, planes * tiles, blocks, batches), name=f"{b.name} (tiles)")
    return Prepared(pack_tokens, b, packed, (batched, planes), {"items": blocks * batches, "chunk": max(1, 16384 // (LANES * b.ne[0])), "params": (batched,),
                                                               "bind": _pack_binds(b, planes), "scratch": 4 * TILE_K})


# Panels


@intrinsic("void(ptr)")
def fetch_line(b: Any, ir: Any, p: Any) -> None:
    """Ask for the cache line at p, which may lie anywhere."""
    prefetch(b, ir, p)


@helper
def fetch(p: Any, n: Any) -> None:
    """Ask for the lines of n bytes: of 16 rows a few hundred bytes each, the hardware's own prefetches do not follow."""
    for line in range(0, n, 64):
        fetch_line(at(p, line))


@helper
def widen(_src: Any, _dst: Any, _n: Any) -> None:
    """Part of a row as float32; bound to the type's."""


@helper
def turn(_dst: Any, _src: Any, _row: Any) -> None:
    """A turned tile; bound by the number of planes."""


A_BLOCK, A_BYTES, A_PLANES, X_PLANES, DIRECT = 1, 2, 1, 1, False  # of the type, and whether its rows are tiles' values already; bound


@helper
def panel_rows(dst: Any, src: Any, row: Any, last: Any, k: Any, wide: Any) -> None:
    """Tiles of 16 rows from src, k values each; of a row beyond the last one, the last one's."""
    for k0 in range(0, k, WIDEN_K):
        n = min(WIDEN_K, k - k0)
        for r in range(LANES):
            w = at(wide, r * WIDE_ROW)
            fetch(at(src, r * row + (k0 + n) // A_BLOCK * A_BYTES) if k0 + n < k else at(src, (r + LANES) * row), WIDEN_K // A_BLOCK * A_BYTES)
            widen(at(src, min(r, last) * row + k0 // A_BLOCK * A_BYTES), w, n)
            zero_bytes(at(w, n * 4), -n % TILE_K * 4)
        for i in range(0, n, TILE_K):
            turn(at(dst, (k0 + i) // TILE_K * (TILE * A_PLANES)), at(wide, i * 4), WIDE_ROW)


@helper
def panel_halves(dst: Any, src: Any, row: Any, last: Any, k: Any, wide: Any) -> None:
    """The same of bfloat16 rows, whole tiles of which are turned as they are."""
    whole = k // TILE_K * TILE_K if last >= LANES - 1 else 0
    for i in range(0, whole, TILE_K):
        if i % FETCH_K == 0:
            for r in range(LANES):
                fetch(at(src, r * row + (i + FETCH_K) * 2) if i + FETCH_K < k else at(src, (r + LANES) * row), FETCH_K * 2)
        turn_halves(at(dst, i // TILE_K * TILE), at(src, i * 2), row)
    if whole < k:
        panel_rows(at(dst, whole // TILE_K * TILE), at(src, whole * 2), row, last, k - whole, wide)


panel = panel_rows
products = products_1x1


def _binds(node: Node) -> dict[str, Any]:
    a, _ = operands_of(node)
    a_planes, x_planes = _planes(a)
    rows = panel_rows.bind(widen=DEQUANT_ROW[a.dtype.name], A_BLOCK=a.dtype.block, A_BYTES=a.dtype.nbytes, A_PLANES=a_planes,
                           turn=turn_split if a_planes == 2 else turn_floats)
    return {"panel": panel_halves.bind(panel_rows=rows) if a.dtype is BF16 else rows, "A_BLOCK": a.dtype.block, "A_BYTES": a.dtype.nbytes,
            "A_PLANES": a_planes, "X_PLANES": x_planes, "products": {(1, 1): products_1x1, (1, 2): products_1x2, (2, 2): products_2x2}[a_planes, x_planes]}


def _blocks(node: Node) -> tuple[int, int, int, int]:
    """Rows, tokens and values of k of an item's panels, and tokens of a batch, from the shape alone: less until there are items for some threads."""
    (n, batches), m, a = _tokens(node), node.out.ne[0], operands_of(node)[0]
    mb, kb = WIDE if a.ne[0] > NARROW[1] or _planes(a)[1] > 1 else NARROW  # the tokens of NARROW are few enough
    nb = P_TOKENS

    def few() -> bool:
        return -(-m // mb) * -(-n // nb) * batches < MIN_ITEMS

    while few() and mb > NARROW[0]:
        mb //= 2
    while few() and nb > 4 * BLOCK:
        nb //= 2
    return BLOCK if few() else mb, nb, kb, n


def _items(node: Node) -> int:
    mb, nb, _, n = _blocks(node)
    return -(-node.out.ne[0] // mb) * -(-n // nb) * _tokens(node)[1]


def _scratch(node: Node) -> int:
    a, _ = operands_of(node)
    mb, _, kb, _ = _blocks(node)
    return LANES * WIDE_ROW + BLOCK * BLOCK * 4 + mb * min(kb, _k_tiles(a) * TILE_K) * 2 * _planes(a)[0]


def _not_tiles(node: Node) -> str | None:
    a, b = operands_of(node)
    if a.dtype is F32 or b.dtype is not F32:
        return "the weights are f32" if a.dtype is F32 else "b is not f32"
    if not a.rows_contiguous:
        return "the rows of a have gaps"
    n = b.n_rows if a.ne[2] * a.ne[3] == 1 else b.ne[1]  # by shape alone: a slice takes the kernel of the whole, however it lies
    return f"{n} columns, fewer than {MIN_TOKENS}" if n < MIN_TOKENS else None


def _rounded(node: Node) -> str | None:
    return _not_tiles(node) or (None if _planes(operands_of(node)[0]) == (1, 1) else "the weights are not quantized")


def _split(node: Node) -> str | None:
    # Without AMX two or three products in bfloat16 are nowhere faster than one in float32.
    return _not_tiles(node) or (None if _planes(operands_of(node)[0]) != (1, 1) else "the weights are quantized")


def mul_mat_panels(out: Any, a: Any, b: Any, tokens: Any, mb: Any, nb: Any, kb: Any, n: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Items [i0, i1), blocks of rows fastest."""
    tile_c = at(scratch, LANES * WIDE_ROW)
    tiles = at(tile_c, BLOCK * BLOCK * 4)
    m_blocks, n_blocks = (a.ne1 + mb - 1) // mb, (n + nb - 1) // nb
    tiles_on()
    for item in range(i0, i1):
        m0, rest = item % m_blocks * mb, item // m_blocks
        n0, batch = rest % n_blocks * nb, rest // n_blocks
        i2, i3 = batch % out.ne2, batch // out.ne2
        m1, n1 = min(m0 + mb, a.ne1), min(n0 + nb, n)
        a_p, o_p = matrix_address(a, out, i2, i3), at(out.p, i2 * out.nb2 + i3 * out.nb3)
        x_p = at(tokens.p, (i3 // (out.ne3 // b.ne3) * b.ne2 + i2 // (out.ne2 // b.ne2)) * tokens.nb3 if tokens.ne3 > 1 else 0)
        for k0 in range(0, a.ne0, kb):
            k = min(kb, a.ne0 - k0)
            n_tiles, first = (k + TILE_K - 1) // TILE_K, 1 if k0 == 0 else 0
            block = n_tiles * (TILE * A_PLANES)
            for m in range(m0, m1, LANES):
                panel(at(tiles, (m - m0) // LANES * block), at(a_p, m * a.nb1 + k0 // A_BLOCK * A_BYTES), a.nb1, a.ne1 - 1 - m, k, scratch)
            for t in range(n0, n1, BLOCK):
                x = at(x_p, t // LANES * tokens.nb2 + k0 // TILE_K * (TILE * X_PLANES))
                for m in range(m0, m1, BLOCK):
                    w, o = at(tiles, (m - m0) // LANES * block), at(o_p, m * 4 + t * out.nb1)
                    n_m, n_t = min(BLOCK, m1 - m), min(BLOCK, n1 - t)
                    if n_m == BLOCK and n_t == BLOCK:
                        products(w, block, x, tokens.nb2, n_tiles, o, out.nb1, first)
                        continue
                    for j in range(n_t if first == 0 else 0):
                        copy_bytes(at(tile_c, j * BLOCK * 4), at(o, j * out.nb1), n_m * 4)
                    products(w, block, x, tokens.nb2, n_tiles, tile_c, BLOCK * 4, first)
                    for j in range(n_t):
                        copy_bytes(at(o, j * out.nb1), at(tile_c, j * BLOCK * 4), n_m * 4)
    tiles_off()


_OPTIONS: dict[str, Any] = {"items": _items, "chunk": lambda _: 1, "params": _blocks, "bind": _binds, "scratch": _scratch, "before": _prepare}
for features in FASTER_ON:
    kernel("MUL_MAT", "cpu", when=_rounded, needs=features, rounds=True, **_OPTIONS)(mul_mat_panels)
kernel("MUL_MAT", "cpu", when=_split, needs=BY_TILES, **_OPTIONS)(mul_mat_panels)
