"""CPU kernels of FLASH_ATTN_EXT: softmax over blocks of cells as they come, in float32.

An item is a block of tokens with the query heads of one KV head: up to ROWS rows, which share what is loaded of K and V. Cells go in
blocks of 64. K is turned on its way to scratch, so that scores of 64 cells stand side by side in registers, and V widened; both products
run on the same register tiles. Each row keeps the largest score, the sum of its exponentials and the weighted sum of V so far, and
rescales them when the largest one grows. For few tokens an item has all heads, so that K and V are read from end to end.

Blocks that no row of the item sees are skipped. Of cells that some rows see the others' weight is 0, and where V is not finite these
products are left out one by one, so that what one sequence holds never reaches another.

With few items (decode) the cells are cut into parts, by size alone: the first step leaves each part's rows and sums in a tensor, and
`flash_combine` adds them in order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pyggml.cpu.mathf import E3, E4, E5, E6, E7, INF, LN2_HI, LN2_LO, LOG2E, ROUND, exp, tanh
from pyggml.cpu.rows import load_next, loader
from pyggml.cpu.simd import F0, F1, LOAD, Helper, at, copy_bytes, helper, intrinsic, ld_f32, st_f32, zero_bytes
from pyggml.cpu.vector import LANES, float_constant, load_floats, loop, multiply_add, shuffle, splat, store_floats, transpose_16x16, wide_registers
from pyggml.dtypes import F32
from pyggml.ops.attention.defs import alibi
from pyggml.quants.cpu import DEQUANT_ROW
from pyggml.registry import Prepared, kernel
from pyggml.tensor import Node, Tensor

CELLS, TILE = 64, 4  # cells of a block, rows of a tile
VECTORS = CELLS // LANES
ROWS = 48  # of an item, about
FEW_ROWS = 64  # up to here an item has all heads
MANY_ITEMS, PART, MOST_PARTS = 32, 128, 64
SUMS = 4 * LANES  # bytes at the end of a part's row: the largest score, the sum of exponentials
LEAST = -87.3  # e^x below is taken as 0, as in SOFT_MAX


# Tiles


def _tile(b: Any, ir: Any, vectors: int, operands: Any) -> dict[tuple[int, int], Any]:
    """Sums over n of TILE x (16 vectors) products: elements side by side at a, times one number of each row of x."""
    a, a_step, x, x_row, n = operands
    i64, zero, f32 = ir.IntType(64), float_constant(ir, 0.0), ir.FloatType().as_pointer()
    x_rows = [b.gep(x, [b.mul(x_row, i64(r))]) for r in range(TILE)]
    at_once = vectors if wide_registers() else 1
    sums: dict[tuple[int, int], Any] = {}
    for v0 in range(0, vectors, at_once):
        places = [(r, v) for r in range(TILE) for v in range(v0, v0 + at_once)]

        def term(i: Any, acc: list[Any], places: list[tuple[int, int]] = places, v0: int = v0) -> list[Any]:
            row = b.gep(a, [b.mul(i, a_step)])
            av = {v: load_floats(b, ir, b.gep(row, [i64(v * LANES * 4)])) for v in range(v0, v0 + at_once)}
            offset = b.mul(i, i64(4))
            xv = [splat(b, ir, b.load(b.bitcast(b.gep(p, [offset]), f32), align=4)) for p in x_rows]
            return [multiply_add(b, ir, av[v], xv[r], s) for (r, v), s in zip(places, acc, strict=True)]

        sums.update(zip(places, loop(b, ir, n, [zero] * len(places), term), strict=True))
    return sums


def _values(b: Any, ir: Any, vectors: int, operands: Any) -> None:
    *factors, dst, dst_row, sums = operands
    i64, f32 = ir.IntType(64), ir.FloatType().as_pointer()
    tile = _tile(b, ir, vectors, factors)
    for r in range(TILE):
        rescale = splat(b, ir, b.load(b.bitcast(b.gep(sums, [i64(16 * r + 8)]), f32), align=4))
        for v in range(vectors):
            place = b.gep(dst, [b.add(b.mul(dst_row, i64(r)), i64(4 * LANES * v))])
            store_floats(b, place, multiply_add(b, ir, load_floats(b, ir, place), rescale, tile[r, v]))


@intrinsic("void(ptr, i64, ptr, i64, i64, ptr)")
def scores_tile(b: Any, ir: Any, *operands: Any) -> None:
    """Scores of TILE rows for 64 cells: (K turned, bytes to the next element, rows of q, bytes of a row, d_k, scores)."""
    *factors, dst = operands
    for (r, v), total in _tile(b, ir, VECTORS, factors).items():
        store_floats(b, b.gep(dst, [ir.IntType(64)(4 * (CELLS * r + LANES * v))]), total)


_VALUES = "void(ptr, i64, ptr, i64, i64, ptr, i64, ptr)"


@intrinsic(_VALUES)
def values_tile(b: Any, ir: Any, *operands: Any) -> None:
    """Rescale 64 values of TILE rows and add what the block gives: (V, bytes of a cell, weights, bytes of a row of them, cells, values, bytes
    of a row, the rows' sums)."""
    _values(b, ir, VECTORS, operands)


@intrinsic(_VALUES)
def values_edge(b: Any, ir: Any, *operands: Any) -> None:
    """The same of 16 values."""
    _values(b, ir, 1, operands)


# Softmax


def _larger(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _over_lanes(b: Any, ir: Any, v: Any, combine: Any) -> Any:
    """One number from a vector: lane i with lane i + 8, then + 4, + 2, + 1; in all lanes."""
    for k in (8, 4, 2, 1):
        v = combine(v, shuffle(b, ir, v, v, [(i + k) % LANES for i in range(LANES)]))
    return v


def _exp(b: Any, ir: Any, x: Any) -> Any:
    """e^x of a vector of numbers that are 0 or less, to 1 ulp; 0 below LEAST, NaN for NaN. The polynomial is mathf.exp's."""
    i32s = ir.VectorType(ir.IntType(32), LANES)

    def const(v: Any) -> Any:
        return float_constant(ir, float(v))

    def whole(v: int) -> Any:
        return ir.Constant(i32s, [v] * LANES)

    low = b.fcmp_ordered("<", x, const(LEAST))
    c = b.select(low, const(LEAST), x)
    z = multiply_add(b, ir, c, const(LOG2E), const(ROUND))
    n = b.fsub(z, const(ROUND))
    r = multiply_add(b, ir, n, const(-LN2_LO), multiply_add(b, ir, n, const(-LN2_HI), c))
    p = const(E7)
    for e in (E6, E5, E4, E3, 0.5):
        p = multiply_add(b, ir, p, r, const(e))
    p = b.fadd(multiply_add(b, ir, p, b.fmul(r, r), r), const(1.0))
    bits = b.shl(b.add(b.sub(b.bitcast(z, i32s), whole(0x4B400000)), whole(127)), whole(23))
    return b.select(low, const(0.0), b.fmul(p, b.bitcast(bits, x.type)))


@intrinsic("void(ptr, ptr, f32, ptr)")
def soft_block(b: Any, ir: Any, scores: Any, bias: Any, slope: Any, sums: Any) -> None:
    """Make weights of a row's 64 scores. Of `sums`, the largest score and the sum of exponentials move on; the third number is by how
    much all that came before shrinks."""
    f32, i32 = ir.FloatType(), ir.IntType(32)
    hidden, zero, slopes = float_constant(ir, -math.inf), float_constant(ir, 0.0), splat(b, ir, slope)
    places = [b.gep(scores, [ir.IntType(64)(4 * LANES * v)]) for v in range(VECTORS)]
    state = [b.gep(b.bitcast(sums, f32.as_pointer()), [i32(i)]) for i in range(3)]
    before = splat(b, ir, b.load(state[0], align=4))
    xs, top = [], before
    for v, place in enumerate(places):
        m = load_floats(b, ir, b.gep(bias, [ir.IntType(64)(4 * LANES * v)]))
        x = multiply_add(b, ir, m, slopes, load_floats(b, ir, place))
        xs.append(b.select(b.fcmp_ordered("==", m, hidden), hidden, x))
        top = _larger(b, xs[-1], top)
    top = _over_lanes(b, ir, top, lambda x, y: _larger(b, x, y))
    start = b.select(b.fcmp_ordered("==", top, hidden), zero, top)  # so that -inf - -inf does not make NaN of a row that has seen no cell yet
    total = zero
    for x, place in zip(xs, places, strict=True):
        e = _exp(b, ir, b.fsub(x, start))
        store_floats(b, place, e)
        total = b.fadd(total, e)
    total = b.extract_element(_over_lanes(b, ir, total, b.fadd), i32(0))
    shrink = b.extract_element(_exp(b, ir, b.fsub(before, start)), i32(0))
    b.store(b.extract_element(top, i32(0)), state[0], align=4)
    b.store(b.fadd(b.fmul(b.load(state[1], align=4), shrink), total), state[1], align=4)
    b.store(shrink, state[2], align=4)


@intrinsic("i64(ptr, i64)")
def all_finite(b: Any, ir: Any, p: Any, n: Any) -> Any:
    """1 when n vectors of 16 floats hold neither inf nor NaN."""
    i64, zero = ir.IntType(64), float_constant(ir, 0.0)

    def add(i: Any, acc: list[Any]) -> list[Any]:
        return [multiply_add(b, ir, load_floats(b, ir, b.gep(p, [b.mul(i, i64(4 * LANES))])), zero, acc[0])]

    total = b.extract_element(_over_lanes(b, ir, loop(b, ir, n, [zero], add)[0], b.fadd), ir.IntType(32)(0))
    return b.zext(b.fcmp_ordered("==", total, total), i64)


@intrinsic("void(ptr)")
def prefetch(b: Any, ir: Any, p: Any) -> None:
    """Ask for a line of memory, to read it soon."""
    i32 = ir.IntType(32)
    fnty = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), i32, i32, i32])
    b.call(b.module.declare_intrinsic("llvm.prefetch", [ir.IntType(8).as_pointer()], fnty), [p, i32(0), i32(2), i32(1)])


@helper
def fetch_cell(t: Any, head: Any, n_heads: Any, seq: Any, j: Any) -> None:
    """Prefetch K or V of a cell for an item's heads: these rows lie too far apart for the CPU to see where reading goes."""
    for line in range(0, min(t.nb1, n_heads * t.nb2), 64):
        prefetch(at(t.p, j * t.nb1 + head * t.nb2 + seq * t.nb3 + line))


@helper
def no_cap(_scores: Any, _n: Any, _cap: Any) -> None:
    """Scores as they are."""


@helper
def soft_cap(scores: Any, n: Any, cap: Any) -> None:
    """cap tanh(s) of n scores, which were divided by it with q."""
    for i in range(n):
        st_f32(scores, i, cap * tanh(ld_f32(scores, i)))


# What an item reads. The names below are bound to helpers for the types and strides of the node's inputs.


@helper
def widen_next(row: Any, _nb0: Any, dst: Any, n: Any) -> None:
    """A row of K or V without gaps as float32."""
    dequant(row, dst, n)


@helper
def widen_strided(row: Any, nb0: Any, dst: Any, n: Any) -> None:
    """The same of any row."""
    for i in range(n):
        st_f32(dst, i, load(at(row, i * nb0), 0))


dequant, load = DEQUANT_ROW["f32"], LOAD["f32"]
widen_k = widen_v = widen_next
load_mask = load_next
cap_scores = no_cap


@helper
def pack_q(dst: Any, row_bytes: Any, q: Any, t0: Any, n_t: Any, head: Any, n_rows: Any, seq: Any, factor: Any) -> None:
    """Rows of q times factor, heads by tokens, and zeros up to whole tiles."""
    f = np.float32(factor)
    for r in range(n_rows):
        row = at(q.p, (t0 + r % n_t) * q.nb1 + (head + r // n_t) * q.nb2 + seq * q.nb3)
        for i in range(q.ne0):
            st_f32(at(dst, r * row_bytes), i, ld_f32(at(row, i * q.nb0), 0) * f)
    zero_bytes(at(dst, n_rows * row_bytes), -n_rows % TILE * row_bytes)


@helper
def pack_mask(bias: Any, seen: Any, mask: Any, t0: Any, n_t: Any, head: Any, n_rows: Any, seq: Any, j0: Any, n: Any) -> Any:
    """The mask of a block as float32, -inf beyond the last cell, and for each cell the most that a row has of it. 1 if some row sees a cell."""
    for j in range(CELLS):
        st_f32(seen, j, -INF)
    for r in range(n_rows):
        b = at(bias, r * CELLS * 4)
        if mask.ne0 > 0:
            row = at(mask.p, j0 * mask.nb0 + (t0 + r % n_t) * mask.nb1 + (head + r // n_t) % mask.ne2 * mask.nb2 + seq % mask.ne3 * mask.nb3)
            for j in range(n):
                st_f32(b, j, load_mask(row, mask.nb0, j))
        else:
            zero_bytes(b, n * 4)
        for j in range(n, CELLS):
            st_f32(b, j, -INF)
        for j in range(CELLS):
            st_f32(seen, j, ld_f32(seen, j) if ld_f32(b, j) == -INF else F0)
    found = 0
    for j in range(n):
        found |= 1 if ld_f32(seen, j) == F0 else 0
    return found


@helper
def pack_k(dst: Any, d_k: Any, k: Any, cells: Any, seen: Any, n: Any, wide: Any) -> None:
    """K of n cells turned, an element of 64 cells side by side; cells that nobody sees are left as they are, 16 by 16."""
    for j in range(0, n, LANES):
        some = False
        for i in range(LANES):
            if ld_f32(seen, j + i) == F0:
                some = True
                widen_k(at(cells, (j + i) * k.nb1), k.nb0, at(wide, i * d_k * 4), k.ne0)
        if some:
            for c in range(0, d_k, LANES):
                transpose_16x16(at(dst, (c * CELLS + j) * 4), CELLS * 4, at(wide, c * 4), d_k * 4)


@helper
def pack_v(dst: Any, d_v: Any, v: Any, cells: Any, seen: Any, n: Any) -> None:
    """V of n cells, zeros where nobody sees it."""
    for j in range(n):
        row = at(dst, j * d_v * 4)
        if ld_f32(seen, j) == F0:
            widen_v(at(cells, j * v.nb1), v.nb0, row, v.ne0)
            zero_bytes(at(row, v.ne0 * 4), (d_v - v.ne0) * 4)
        else:
            zero_bytes(row, d_v * 4)


@helper
def add_values_seen(o: Any, d_v: Any, v: Any, weights: Any, bias: Any, n: Any, sums: Any) -> None:
    """Rescale a row and add what each cell gives that it sees, for a V that is not finite."""
    shrink = ld_f32(sums, 2)
    for i in range(d_v):
        st_f32(o, i, ld_f32(o, i) * shrink)
    for j in range(n):
        if ld_f32(bias, j) != -INF:
            w = ld_f32(weights, j)
            for i in range(d_v):
                st_f32(o, i, ld_f32(o, i) + w * ld_f32(v, j * d_v + i))


@helper
def add_values(o: Any, d_v: Any, v: Any, weights: Any, n_rows: Any, n: Any, sums: Any) -> None:
    """Rescale the rows and add what the block gives."""
    for r in range(0, n_rows, TILE):
        w, row, s = at(weights, r * CELLS * 4), r * d_v * 4, at(sums, 16 * r)
        for i in range(0, d_v // CELLS * CELLS, CELLS):
            values_tile(at(v, i * 4), d_v * 4, w, CELLS * 4, n, at(o, row + i * 4), d_v * 4, s)
        for i in range(d_v // CELLS * CELLS, d_v, LANES):
            values_edge(at(v, i * 4), d_v * 4, w, CELLS * 4, n, at(o, row + i * 4), d_v * 4, s)


@helper
def store_part(dst: Any, d_v: Any, o: Any, sums: Any, n_rows: Any) -> None:
    """Rows and sums of a part."""
    for r in range(n_rows):
        row = at(dst, r * (d_v * 4 + SUMS))
        copy_bytes(row, at(o, r * d_v * 4), d_v * 4)
        copy_bytes(at(row, d_v * 4), at(sums, 16 * r), 8)


@helper
def store_row(row: Any, o: Any, total: Any, n: Any) -> None:
    """A row divided by its sum; zeros for one that saw no cell."""
    inv = F0 if total == F0 else F1 / total
    for i in range(n):
        st_f32(row, i, ld_f32(o, i) * inv)


@helper
def slope_of(head: Any, n_first: Any, ratio: Any, ratio_rest: Any) -> Any:
    """A head's factor of the mask."""
    if ratio == 1.0:
        return F1
    slope, base, turns = 1.0, ratio, head + 1
    if head >= n_first:
        base, turns = ratio_rest, 2 * (head - n_first) + 1
    for _ in range(turns):
        slope *= base
    return np.float32(slope)


# The kernels


def _operands(node: Node) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, mask = node.src
    assert q is not None and k is not None and v is not None
    return q, k, v, mask


def _up(n: int, m: int) -> int:
    return -(-n // m) * m


def _heads(node: Node) -> int:
    """KV heads of an item."""
    q, k, _, _ = _operands(node)
    return k.ne[2] if q.ne[1] * q.ne[2] <= FEW_ROWS else 1


def _tokens(node: Node) -> int:
    """Tokens of an item."""
    q, k, _, _ = _operands(node)
    return q.ne[1] if _heads(node) > 1 else max(1, min(q.ne[1], ROWS * k.ne[2] // q.ne[2]))


def _rows(node: Node) -> int:
    """Rows of a KV head in an item, rounded up to those of a tile."""
    q, k, _, _ = _operands(node)
    return _up(_tokens(node) * (q.ne[2] // k.ne[2]), TILE)


def _blocks(node: Node) -> int:
    """Items, if all cells were one part."""
    q, k, _, _ = _operands(node)
    return -(-q.ne[1] // _tokens(node)) * (k.ne[2] // _heads(node)) * q.ne[3]


def _part(node: Node) -> int:
    """Cells of a part; by the shape alone."""
    n_kv = _operands(node)[1].ne[1]
    return n_kv if _blocks(node) >= MANY_ITEMS else max(PART, _up(-(-n_kv // MOST_PARTS), CELLS))


def _n_parts(node: Node) -> int:
    return -(-_operands(node)[1].ne[1] // _part(node))


def _params(node: Node, to_parts: int = 0) -> list[int | float]:
    """KV heads and tokens of an item, cells of a part, whether these are the result, factor of q, cap of the scores, and the heads' slopes."""
    p = node.params
    cap = float(p["logit_softcap"])
    return [_heads(node), _tokens(node), _part(node), to_parts, float(p["scale"]) / (cap or 1.0), cap, *alibi(_operands(node)[0].ne[2], float(p["max_bias"]))]


def _widener(t: Tensor) -> Helper:
    if t.nb[0] == t.dtype.nbytes:
        return widen_next.bind(dequant=DEQUANT_ROW[t.dtype.name])
    return widen_strided.bind(load=LOAD[t.dtype.name])


def _binds(node: Node) -> dict[str, Any]:
    _, k, v, mask = _operands(node)
    load = loader("f16", True) if mask is None else loader(mask.dtype.name, mask.nb[0] == mask.dtype.nbytes)
    return {"cap_scores": soft_cap if node.params["logit_softcap"] else no_cap, "pack_mask": pack_mask.bind(load_mask=load),
            "pack_k": pack_k.bind(widen_k=_widener(k)), "pack_v": pack_v.bind(widen_v=_widener(v))}


def _scratch(node: Node) -> int:
    rows = _heads(node) * _rows(node)
    d_k, d_v = _up(_operands(node)[1].ne[0], LANES), _up(_operands(node)[2].ne[0], LANES)
    return 4 * (rows * (d_k + d_v + 4) + 2 * _rows(node) * CELLS + CELLS * (d_k + d_v + 1) + LANES * d_k)


@kernel("FLASH_ATTN_EXT", "cpu", items=_blocks, chunk=lambda _: 1, params=_params, bind=_binds, scratch=_scratch)
def flash_attn(out: Any, q: Any, k: Any, v: Any, mask: Any, n_heads: Any, n_tokens: Any, part: Any, to_parts: Any, factor: Any, cap: Any, n_first: Any,
               ratio: Any, ratio_rest: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Items [i0, i1): parts, groups of KV heads, token blocks, sequences. `out` is the result, or with `to_parts` the parts' rows."""
    n_blocks, n_groups, per_kv = (q.ne1 + n_tokens - 1) // n_tokens, k.ne2 // n_heads, q.ne2 // k.ne2
    n_parts = (k.ne1 + part - 1) // part
    most = (n_tokens * per_kv + TILE - 1) // TILE * TILE
    rows, d_k, d_v, mask_of_heads = n_heads * most, (k.ne0 + LANES - 1) // LANES * LANES, (v.ne0 + LANES - 1) // LANES * LANES, mask.ne2 > 1
    o, sums = at(scratch, rows * d_k * 4), at(scratch, rows * (d_k + d_v) * 4)
    scores = at(sums, rows * 16)
    bias = at(scores, most * CELLS * 4)
    turned = at(bias, most * CELLS * 4)
    values = at(turned, d_k * CELLS * 4)
    seen = at(values, d_v * CELLS * 4)
    wide = at(seen, CELLS * 4)
    for item in range(i0, i1):
        p, block = item % n_parts, item // n_parts
        kv0, seq = block % n_groups * n_heads, block // n_groups // n_blocks
        t0 = block // n_groups % n_blocks * n_tokens
        n_t = min(n_tokens, q.ne1 - t0)
        n_rows = n_t * per_kv
        for i in range(n_heads):
            pack_q(at(scratch, i * most * d_k * 4), d_k * 4, q, t0, n_t, (kv0 + i) * per_kv, n_rows, seq, factor)
        zero_bytes(o, rows * d_v * 4)
        for r in range(rows):
            st_f32(sums, 4 * r, -INF)
            st_f32(sums, 4 * r + 1, F0)
            st_f32(sums, 4 * r + 2, F1)
        last = min(p * part + part, k.ne1)
        for j in range(p * part, last, CELLS):
            n, some = min(CELLS, last - j), 0
            for i in range(n_heads):
                kv, head, first = kv0 + i, (kv0 + i) * per_kv, i * most
                for t in range(j + CELLS + i * CELLS // n_heads, min(last, j + CELLS + (i + 1) * CELLS // n_heads)):
                    fetch_cell(k, kv0, n_heads, seq, t)
                    fetch_cell(v, kv0, n_heads, seq, t)
                if i == 0 or mask_of_heads:
                    some = pack_mask(bias, seen, mask, t0, n_t, head, n_rows if mask_of_heads else n_t, seq, j, n)
                if some == 0:
                    continue
                pack_k(turned, d_k, k, at(k.p, j * k.nb1 + kv * k.nb2 + seq * k.nb3), seen, n, wide)
                pack_v(values, d_v, v, at(v.p, j * v.nb1 + kv * v.nb2 + seq * v.nb3), seen, n)
                for r in range(0, n_rows, TILE):
                    scores_tile(turned, CELLS * 4, at(scratch, (first + r) * d_k * 4), d_k * 4, k.ne0, at(scores, r * CELLS * 4))
                cap_scores(scores, n_rows * CELLS, np.float32(cap))
                for r in range(n_rows):
                    slope = slope_of(head + r // n_t, n_first, ratio, ratio_rest)
                    soft_block(at(scores, r * CELLS * 4), at(bias, (r if mask_of_heads else r % n_t) * CELLS * 4), slope, at(sums, 16 * (first + r)))
                if (n_t == 1 and not mask_of_heads) or all_finite(values, n * (d_v // LANES)) == 1:  # all rows of one token see what is seen
                    add_values(at(o, first * d_v * 4), d_v, values, scores, n_rows, n, at(sums, 16 * first))
                else:
                    for r in range(n_rows):
                        m = at(bias, (r if mask_of_heads else r % n_t) * CELLS * 4)
                        add_values_seen(at(o, (first + r) * d_v * 4), d_v, values, at(scores, r * CELLS * 4), m, n, at(sums, 16 * (first + r)))
        if to_parts != 0:
            store_part(at(out.p, item * out.nb2), d_v, o, sums, rows)
        else:
            for r in range(n_heads * n_rows):
                i, g = r // n_rows, r % n_rows
                row = at(out.p, ((kv0 + i) * per_kv + g // n_t) * out.nb1 + (t0 + g % n_t) * out.nb2 + seq * out.nb3)
                store_row(row, at(o, (i * most + g) * d_v * 4), ld_f32(sums, 4 * (i * most + g) + 1), out.ne0)


def _before(node: Node) -> Prepared:
    q, k, v, mask = _operands(node)
    ne = (_up(v.ne[0], LANES) + LANES, _heads(node) * _rows(node), _n_parts(node) * _blocks(node), 1)
    parts = Tensor(F32, ne, name=f"{node.out.name} (parts)")
    return Prepared(flash_attn, q, parts, (id(node),), {"items": ne[2], "chunk": 1, "params": _params(node, to_parts=1), "bind": _binds(node),
                                                        "scratch": _scratch(node)}, (k, v, mask))


def _one_part(node: Node) -> str | None:
    return "the cells are one part" if _n_parts(node) == 1 else None


@kernel("FLASH_ATTN_EXT", "cpu", when=_one_part, params=lambda n: [_heads(n), _tokens(n), _n_parts(n), _rows(n)],
        scratch=lambda n: 4 * n.out.ne[0], before=_before)
def flash_combine(out: Any, q: Any, k: Any, v: Any, mask: Any, parts: Any, n_heads: Any, n_tokens: Any, n_parts: Any, most: Any, scratch: Any, i0: Any,
                  i1: Any) -> None:
    """Rows [i0, i1) of the result, each from its parts in order."""
    n_blocks, n_groups, per_kv = (q.ne1 + n_tokens - 1) // n_tokens, k.ne2 // n_heads, q.ne2 // k.ne2
    state = parts.nb1 // 4 - LANES
    for item in range(i0, i1):
        head, t, seq = item % out.ne1, item // out.ne1 % out.ne2, item // out.ne1 // out.ne2
        tb, kv = t // n_tokens, head // per_kv
        block = (seq * n_blocks + tb) * n_groups + kv // n_heads
        r = kv % n_heads * most + head % per_kv * min(n_tokens, q.ne1 - tb * n_tokens) + t % n_tokens
        first = at(parts.p, block * n_parts * parts.nb2 + r * parts.nb1)
        top, total = -INF, F0
        for p in range(n_parts):
            most_here = ld_f32(at(first, p * parts.nb2), state)
            top = most_here if most_here > top else top
        zero_bytes(scratch, 4 * out.ne0)
        for p in range(n_parts):
            row = at(first, p * parts.nb2)
            if ld_f32(row, state) != -INF:
                w = exp(ld_f32(row, state) - top)
                total += w * ld_f32(row, state + 1)
                for i in range(out.ne0):
                    st_f32(scratch, i, ld_f32(scratch, i) + w * ld_f32(row, i))
        store_row(at(out.p, item * out.nb1), scratch, total, out.ne0)
