"""CPU kernel of SSD_SCAN: all products on register tiles (pyggml.cpu.blocks), the state in scratch.

An item is a block of heads of one group of one sequence. It walks over the chunks of its sequence; of each chunk, what depends on B
and C alone is made once for all heads of the item:

  C as rows, B^T as rows (a left operand and, along d_state, a right one), CB[i][j] = C_i . B_j for j <= i by blocks of 16 x 16

and then for each head, with cs the running sums of softplus(dt) A inside the chunk, in float64:

  M[i][j] = CB[i][j] exp(cs_i - cs_j) dt_j for j <= i;  y = exp(cs_i) (C S) + M x;  S = exp(cs_last) S + B^T (x dt_j exp(cs_last - cs_j))

Exponents cost: exp(cs_i - cs_j) is the product of exp(cs_i - cs_I) and exp(cs_I - cs_j), I the first row of i's block, so that a block needs
two vectors of exponents. Left of the diagonal both are at most 1; in a block on the diagonal the second is not, and where the block
decays by more than exp(-NEAR) each of its exponents is computed by itself. S is [d_state][head_dim]. Sizes that are no whole vectors are
padded with zeros in scratch. Operands are float32 or pairs of bfloat16 (blocks); S is float32 and rounded when it is an operand.
"""

from __future__ import annotations

import functools
from typing import Any

from pyggml.cpu.blocks import (
    ROWS,
    TILE_ROWS,
    decays_since,
    decays_until,
    flush_tiny,
    onto_bf16_1,
    onto_bf16_2,
    onto_bf16_3,
    onto_f32_1,
    onto_f32_2,
    onto_f32_3,
    onto_tiles_1,
    onto_tiles_2,
    prefetch_read,
    prefetch_write,
    product_bf16_1,
    product_bf16_2,
    product_f32_1,
    product_f32_2,
    product_tiles_1,
    product_tiles_2,
    restore_tiny,
    two_bf16_1,
    two_bf16_2,
    two_bf16_3,
    two_f32_1,
    two_f32_2,
    two_f32_3,
    two_tiles_1,
    two_tiles_2,
    two_tiles_3,
    two_tiles_4,
)
from pyggml.cpu.mathf import softplus
from pyggml.cpu.simd import Arg, at, bad_index, bad_span, helper, ld_f32, ld_f64, ld_i32, st_f32, st_f64, wide, zero_bytes
from pyggml.cpu.tiles import BY_TILES, BY_VECTORS, tiles_off, tiles_on
from pyggml.cpu.vector import LANES
from pyggml.ops.ssd.operands import (
    GAP,
    PAIR,
    finish,
    inputs_bf16,
    inputs_f32,
    load_state,
    row_bf16,
    row_f32,
    row_of,
    rows_of_b_bf16,
    rows_of_b_f32,
    state_operand_bf16,
    state_operand_f32,
    store_state,
    weigh_bf16,
    weigh_diagonal_bf16,
    weigh_diagonal_f32,
    weigh_f32,
    weigh_far_bf16,
    weigh_far_f32,
)
from pyggml.registry import kernel
from pyggml.tensor import Node

MAX_CHUNK, CHUNK = 256, {"f32": 32, "bf16": 64}  # tokens: the most, and by default, which was fastest of 16 to 256
HEADS, MIN_ITEMS, STATE_BYTES = 8, 8, 512 << 10  # of an item: heads, fewer where there are few items or the states are large
NEAR = 32.0  # exp of it times any product CB of sane inputs is still a float32
WORD, TILES = 1, False  # elements of an operand in 32 bits: 1 float32 or 2 bfloat16; whether products are made in AMX tiles; bound
STATE_ROWS = ROWS  # rows of a block of a state, as ROWS of one of y; both bound


# A chunk

product_1, product_2 = product_f32_1, product_f32_2  # bound to the precision's, as these
two_1, two_2, two_3, two_4 = two_f32_1, two_f32_2, two_f32_3, two_f32_2
onto_1, onto_2, onto_3 = onto_f32_1, onto_f32_2, onto_f32_3
weigh, weigh_diagonal, weigh_far = weigh_f32, weigh_diagonal_f32, weigh_far_f32
inputs_of, left_row, rows_of_b, state_operand = inputs_f32, row_f32, rows_of_b_f32, state_operand_f32


@helper
def pack_c(dst: Any, dst_row: Any, c: Any, nb0: Any, nb2: Any, n_state: Any, padded: Any, n: Any, n_rows: Any, tmp: Any) -> None:
    """C of n tokens as rows of a left operand; zero rows up to n_rows."""
    for t in range(n):
        left_row(at(dst, t * dst_row), row_of(tmp, at(c, t * nb2), nb0, n_state, padded), padded // LANES)
    for t in range(n, n_rows):
        zero_bytes(at(dst, t * dst_row), padded * 4 // WORD)


@helper
def pack_b(rows: Any, row: Any, right: Any, right_row: Any, b: Any, nb0: Any, nb2: Any, n_state: Any, padded: Any, n: Any, n_rows: Any, tmp: Any) -> None:
    """B of n tokens as both operands, with zeros up to token n_rows."""
    copied_row = padded * 4 + GAP
    copied = at(tmp, LANES * copied_row)
    for j in range(0, n_rows, PAIR):
        src, src_row = at(b, j * nb2), nb2
        if nb0 != 4 or n_state != padded or n - j < PAIR:
            m = min(PAIR, n - j)
            for t in range(m):
                row_f32(at(copied, t * copied_row), row_of(tmp, at(src, t * nb2), nb0, n_state, padded), padded // LANES)
            for t in range(m, PAIR):
                zero_bytes(at(copied, t * copied_row), padded * 4)
            src, src_row = copied, copied_row
        rows_of_b(rows, right, src, src_row, padded, row, right_row, j, tmp)


@helper
def multiply_cb(cb: Any, cb_row: Any, c: Any, c_row: Any, b: Any, b_row: Any, words: Any, n: Any) -> None:
    """CB[i][j] of the blocks on and below the diagonal."""
    for i in range(0, n, ROWS):
        columns = i // LANES * LANES + LANES
        for j in range(0, columns, 2 * LANES):
            if j + LANES < columns:
                product_2(at(cb, i * cb_row + j * 4), cb_row, at(c, i * c_row), c_row, at(b, j * 4), b_row, words)
            else:
                product_1(at(cb, i * cb_row + j * 4), cb_row, at(c, i * c_row), c_row, at(b, j * 4), b_row, words)


@helper
def step_sums(steps: Any, sums: Any, dt: Any, nb1: Any, bias: Any, rate: Any, n: Any, n_rows: Any) -> None:
    """softplus(dt + bias) of n tokens and their running sums times rate in float64; beyond n, steps of 0."""
    for t in range(n):
        st_f32(steps, t, ld_f32(at(dt, t * nb1), 0) + bias)
    for t in range(n):
        st_f32(steps, t, softplus(ld_f32(steps, t)))
    zero_bytes(at(steps, n * 4), (n_rows - n) * 4)
    total = 0.0
    for t in range(n):
        total += wide(ld_f32(steps, t)) * wide(rate)
        st_f64(sums, t, total)
    for t in range(n, n_rows):
        st_f64(sums, t, total)


@helper
def weigh_rows(m: Any, m_row: Any, cb: Any, cb_row: Any, sums: Any, steps: Any, since: Any, until: Any, i: Any) -> None:
    """Rows i to i + 15 of M, up to the diagonal."""
    first = ld_f64(sums, i)
    products = at(cb, i * cb_row)
    decays_since(since, at(sums, i * 8), first)
    for j in range(0, i, LANES):
        decays_until(until, at(sums, j * 8), first, at(steps, j * 4))
        weigh(at(m, j * 4 // WORD), m_row, at(products, j * 4), cb_row, since, until)
    if first - ld_f64(sums, i + LANES - 1) <= NEAR:
        decays_until(until, at(sums, i * 8), first, at(steps, i * 4))
        weigh_diagonal(at(m, i * 4 // WORD), m_row, at(products, i * 4), cb_row, since, until)
    else:
        weigh_far(at(m, i * 4 // WORD), m_row, at(products, i * 4), cb_row, at(sums, i * 8), at(steps, i * 4))
    if TILES and i % PAIR == 0:  # tiles end at a multiple of 32
        for r in range(LANES):
            zero_bytes(at(m, r * m_row + (i + LANES) * 2), LANES * 2)


@helper
def multiply_rows(y: Any, y_row: Any, c: Any, c_row: Any, s: Any, row: Any, words: Any, decays: Any, m: Any, m_row: Any, x: Any, i: Any, n: Any, vectors: Any,
                  with_skip: Any, skip: Any, plain_x: Any, plain_row: Any, soon: Any, soon_row: Any) -> None:
    """y = decays (C S) + M x (+ skip plain_x) for rows i to i + 15, of n, which y and m hold; rows of S and x have `row` bytes. Rows of `soon`, which
    are written next, are fetched meanwhile: those of a head lie far apart."""
    for r in range(0, min(LANES, n - i), ROWS):
        for k in range(ROWS):
            prefetch_write(at(soon, (i + r + k) * soon_row), vectors)
        o, c_r, m_r, m_words = at(y, r * y_row), at(c, (i + r) * c_row), at(m, r * m_row), (i + r + ROWS) // WORD
        f, own, v = at(decays, (i + r) * 4), at(plain_x, (i + r) * plain_row), 0
        while v < vectors:
            p = v * LANES * 4
            left = vectors - v
            if left == 1:
                two_1(at(o, p), y_row, c_r, c_row, at(s, p), row, words, f, m_r, m_row, at(x, p), row, m_words, with_skip, skip, at(own, p), plain_row)
                v += 1
            elif left % 2 == 1:
                two_3(at(o, p), y_row, c_r, c_row, at(s, p), row, words, f, m_r, m_row, at(x, p), row, m_words, with_skip, skip, at(own, p), plain_row)
                v += 3
            elif TILES and left >= 4:
                two_4(at(o, p), y_row, c_r, c_row, at(s, p), row, words, f, m_r, m_row, at(x, p), row, m_words, with_skip, skip, at(own, p), plain_row)
                v += 4
            else:
                two_2(at(o, p), y_row, c_r, c_row, at(s, p), row, words, f, m_r, m_row, at(x, p), row, m_words, with_skip, skip, at(own, p), plain_row)
                v += 2


@helper
def advance_state(s: Any, right: Any, row: Any, decay: Any, b: Any, b_row: Any, x: Any, words: Any, n_state: Any, vectors: Any, soon: Any,
                  soon_row: Any, n: Any) -> None:
    """S = decay S + B^T x, also as a right operand. n rows of `soon`, which are read next, are fetched meanwhile."""
    v, at_once = 0, (n * STATE_ROWS + n_state - 1) // n_state
    while v < vectors:
        p, left = v * LANES * 4, vectors - v
        for i in range(0, n_state, STATE_ROWS):
            if v == 0:
                for k in range(at_once):
                    prefetch_read(at(soon, (i // STATE_ROWS * at_once + k) * soon_row), vectors)
            if left == 1:
                onto_1(at(s, i * row + p), row, decay, at(b, i * b_row), b_row, at(x, p), row, words, at(right, i // WORD * row + p))
            elif left % 2 == 1 and not TILES:
                onto_3(at(s, i * row + p), row, decay, at(b, i * b_row), b_row, at(x, p), row, words, at(right, i // WORD * row + p))
            else:
                onto_2(at(s, i * row + p), row, decay, at(b, i * b_row), b_row, at(x, p), row, words, at(right, i // WORD * row + p))
        v += 1 if left == 1 else 3 if left % 2 == 1 and not TILES else 2


@helper
def pack_x(plain: Any, weighted: Any, row: Any, x: Any, nb0: Any, nb2: Any, head_dim: Any, padded: Any, weights: Any, n: Any, n_rows: Any, tmp: Any) -> None:
    """x of n tokens as right operands, plain and weighted, with zeros up to token n_rows."""
    zeros = at(tmp, padded * 4)
    zero_bytes(zeros, padded * 4)
    other = at(zeros, padded * 4)
    for t in range(0, n, 2):
        even, odd = row_of(tmp, at(x, t * nb2), nb0, head_dim, padded), zeros
        if t + 1 < n:
            odd = row_of(other, at(x, (t + 1) * nb2), nb0, head_dim, padded)
        inputs_of(at(plain, t // WORD * row), at(weighted, t // WORD * row), row, even, odd, at(weights, t * 4), padded // LANES)
    done = (n + 1) // 2 * 2 // WORD
    for t in range(done, n_rows // WORD):
        zero_bytes(at(plain, t * row), padded * 4)
        zero_bytes(at(weighted, t * row), padded * 4)


# The kernel


def _padded(n: int, to: int) -> int:
    return -(-n // to) * to


def _chunk_and_heads(node: Node) -> tuple[int, int]:
    """Tokens of a chunk and heads of an item, from the shape alone."""
    s, x, b, ids = node.src[0], node.src[1], node.src[4], node.src[6]
    assert s is not None and x is not None and b is not None and ids is not None
    q = min(node.params["chunk"] or CHUNK[node.params["precision"]], MAX_CHUNK, x.ne[2])
    per_group = s.ne[2] // b.ne[1]
    state = 4 * _padded(s.ne[0], PAIR) * _padded(s.ne[1], LANES)
    heads = max(1, min(HEADS, per_group, STATE_BYTES // state))
    while heads > 1 and -(-per_group // heads) * b.ne[1] * ids.ne[0] < MIN_ITEMS:
        heads -= 1
    return q, heads


def _items(node: Node) -> int:
    s, b, ids = node.src[0], node.src[4], node.src[6]
    assert s is not None and b is not None and ids is not None
    return -(-(s.ne[2] // b.ne[1]) // _chunk_and_heads(node)[1]) * b.ne[1] * ids.ne[0]


def _scratch(node: Node, word: int) -> int:
    """Bytes of what lay_out lays out, of a kernel with this WORD."""
    s = node.src[0]
    assert s is not None
    q, heads = _chunk_and_heads(node)
    q, n_state, dim = _padded(q, PAIR), _padded(s.ne[0], PAIR), _padded(s.ne[1], LANES)
    row_n, row_q, row, row_cb = n_state * 4 // word + GAP, q * 4 // word + GAP, dim * 4 + GAP, q * 4 + GAP
    vectors = q * (4 + 8 + 4 + 4) + 2 * LANES * 4
    turned = (LANES + PAIR) * (n_state * 4 + GAP) + 3 * dim * 4
    operands = q * row_n + n_state * row_q + (n_state // 2 * row_cb if word == 2 else 0) + q * row_cb + LANES * row_q
    return vectors + turned + operands + 3 * q * row + (heads if word == 1 else heads + heads // 2 + 1) * n_state * row


@helper
def lay_out(scratch: Any, q: Any, n_state: Any, dim: Any, heads: Any) -> Any:
    """Where things stand in scratch, and the bytes of their rows; `q`, `n_state` and `dim` are whole blocks. In order: dt and cs of the chunk's
    tokens, exp(cs), weights of x, two vectors of a block's decays, room for turning B and C and for rows of x; C as rows, B as left and as right
    operand, CB, 16 rows of M, x plain and weighted, y, the heads' states and, in bfloat16, these as right operands."""
    row_n, row_q, row, row_cb = n_state * 4 // WORD + GAP, q * 4 // WORD + GAP, dim * 4 + GAP, q * 4 + GAP
    steps = scratch
    sums = at(steps, q * 4)
    since_start = at(sums, q * 8)
    weights = at(since_start, q * 4)
    block = at(weights, q * 4)
    turned = at(block, 2 * LANES * 4)
    tmp = at(turned, (LANES + PAIR) * (n_state * 4 + GAP))
    c = at(tmp, 3 * dim * 4)
    b = at(c, q * row_n)
    b_right = b if WORD == 1 else at(b, n_state * row_q)
    row_b = row_q if WORD == 1 else row_cb
    cb = at(b_right, n_state // WORD * row_b)
    m = at(cb, q * row_cb)
    plain = at(m, LANES * row_q)
    weighted = at(plain, q * row)
    y = at(weighted, q * row)
    states = at(y, q * row)
    rights = states if WORD == 1 else at(states, heads * n_state * row)
    return (steps, sums, since_start, weights, block, turned, tmp, c, b, b_right, cb, m, plain, weighted, y, states, rights), (row_n, row_q, row_b, row_cb, row)


@helper
def fetch_next(b: Any, b_row: Any, c: Any, c_row: Any, vectors: Any, q: Any, part: Any, parts: Any) -> None:
    """Fetch one of the parts of the next chunk's B and C, which stand q rows further on."""
    share = (q + parts - 1) // parts
    for k in range(part * share, (part + 1) * share):
        prefetch_read(at(b, (q + k) * b_row), vectors)
        prefetch_read(at(c, (q + k) * c_row), vectors)


@helper
def head_chunk(y: Any, s: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, bias: Any, skip: Any, z: Any, places: Any, strides: Any, n_state: Any, dim: Any,
               q: Any, n: Any, h: Any, h0: Any, h1: Any) -> None:
    """One head's part of a chunk of n tokens; y, x, dt, B, C and z begin at its first token, B and C at the group."""
    steps, sums, since_start, weights, block, _, tmp, c_rows, b_rows, _, cb, m, plain, weighted, rows, states, rights = places
    row_n, row_q, _, row_cb, row = strides
    n_rows, n_16, vectors, words = (n + PAIR - 1) // PAIR * PAIR, (n + LANES - 1) // LANES * LANES, dim // LANES, n_state // WORD
    x_h, y_h, z_h, own = at(x.p, h * x.nb1), at(y.p, h * y.nb1), at(z.p, h * z.nb1), (h - h0) * n_state * row
    bias_h, skip_h, has_skip = 0.0, 0.0, 0
    if bias.ne0 > 0:
        bias_h = ld_f32(at(bias.p, h * bias.nb0), 0)
    if skip.ne0 > 0:
        skip_h, has_skip = ld_f32(at(skip.p, h * skip.nb1), 0), 1
    step_sums(steps, sums, at(dt.p, h * dt.nb0), dt.nb1, bias_h, ld_f32(at(a.p, h * a.nb1), 0), n, n_rows)
    last = ld_f64(sums, n_rows - 1)
    for i in range(0, n_rows, LANES):
        decays_since(at(since_start, i * 4), at(sums, i * 8), 0.0)
        decays_until(at(weights, i * 4), at(sums, i * 8), last, at(steps, i * 4))
    pack_x(plain, weighted, row, x_h, x.nb0, x.nb2, s.ne1, dim, weights, n, n_rows, tmp)
    done = n // LANES * LANES if s.ne1 == dim and x.nb0 == 4 else 0  # tokens whose y needs no scratch
    for i in range(0, n_16, LANES):
        weigh_rows(m, row_q, cb, row_cb, sums, steps, block, at(block, LANES * 4), i)
        fetch_next(b.p, b.nb2, c.p, c.nb2, n_state // LANES, q, ((h - h0) * n_16 + i) // LANES, (h1 - h0) * n_16 // LANES)
        o, o_row, with_skip = at(rows, i * row), row, 0
        if i < done:
            o, o_row, with_skip = at(y_h, i * y.nb2), y.nb2, has_skip
        multiply_rows(o, o_row, c_rows, row_n, at(rights, own // WORD), row, words, since_start, m, row_q, plain, i, n, vectors, with_skip, skip_h,
                      x_h, x.nb2, y_h, y.nb2)
    next_x = at(x_h, x.nb1) if h + 1 < h1 else at(x_h, (h0 - h) * x.nb1 + q * x.nb2)
    advance_state(at(states, own), at(rights, own // WORD), row, ld_f32(since_start, n_rows - 1), b_rows, row_q, weighted, (n + WORD - 1) // WORD, n_state,
                  vectors, next_x, x.nb2, n)
    finish(y_h, y.nb2, rows, row, x_h, x.nb0, x.nb2, has_skip, skip_h, z.ne0 > 0, z_h, z.nb0, z.nb2, s.ne1, dim, done, n, tmp)


@helper
def shared_products(b: Any, c: Any, places: Any, strides: Any, n_state: Any, q: Any, n: Any) -> None:
    """What all heads of an item share of a chunk of n tokens: B and C as operands, and CB."""
    _, _, _, _, _, turned, _, c_rows, b_rows, b_right, cb, _, _, _, _, _, _ = places
    row_n, row_q, row_b, row_cb, _ = strides
    n_rows, n_16 = (n + PAIR - 1) // PAIR * PAIR, (n + LANES - 1) // LANES * LANES
    pack_c(c_rows, row_n, c.p, c.nb0, c.nb2, c.ne0, n_state, n, n_rows, turned)
    pack_b(b_rows, row_q, b_right, row_b, b.p, b.nb0, b.nb2, b.ne0, n_state, n, n_rows, turned)
    multiply_cb(cb, row_cb, c_rows, row_n, b_right, row_b, n_state // WORD, n_16)


@helper
def further(t: Any, nbytes: Any) -> Any:
    """Operand t from nbytes on."""
    return Arg(at(t.p, nbytes), t.ne0, t.ne1, t.ne2, t.ne3, t.nb0, t.nb1, t.nb2, t.nb3)


def ssd_scan_chunks(y: Any, state: Any, s: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, ids: Any, bias: Any, skip: Any, z: Any, cu: Any,
                    q: Any, heads: Any, status: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Items [i0, i1), blocks of heads fastest, then groups."""
    mode = flush_tiny()
    if TILES:
        tiles_on()
    n_state, dim = (s.ne0 + PAIR - 1) // PAIR * PAIR, (s.ne1 + LANES - 1) // LANES * LANES
    places, strides = lay_out(scratch, (q + PAIR - 1) // PAIR * PAIR, n_state, dim, heads)
    turned, states, rights, row = places[5], places[15], places[16], strides[4]
    per_group = s.ne2 // b.ne1
    blocks = (per_group + heads - 1) // heads
    for item in range(i0, i1):
        seq, group, block = item // (blocks * b.ne1), item // blocks % b.ne1, item % blocks
        h0, source = group * per_group + block * heads, ld_i32(at(ids.p, seq * ids.nb0), 0)
        h1, first, end, i3 = min(h0 + heads, (group + 1) * per_group), 0, x.ne2, seq
        if cu.ne0 > 0:
            first, end, i3 = ld_i32(at(cu.p, seq * cu.nb0), 0), ld_i32(at(cu.p, (seq + 1) * cu.nb0), 0), 0
            if first < 0 or end < first or end > x.ne2 or (seq == 0 and first != 0) or (seq == ids.ne0 - 1 and end != x.ne2):
                bad_span(status, first, end)
                continue
        if source < 0 or source >= s.ne3:
            bad_index(status, source, s.ne3)
            continue
        for h in range(h0, h1):
            own = (h - h0) * n_state * row
            load_state(at(states, own), row, at(s.p, h * s.nb2 + source * s.nb3), s.nb0, s.nb1, s.ne0, n_state, s.ne1, dim, turned)
            state_operand(at(rights, own // WORD), at(states, own), row, n_state, dim // LANES)
        for t in range(first, end, q):
            n = min(q, end - t)
            b_t, c_t = further(b, group * b.nb1 + t * b.nb2 + i3 * b.nb3), further(c, group * c.nb1 + t * c.nb2 + i3 * c.nb3)
            y_t, x_t, z_t = further(y, t * y.nb2 + i3 * y.nb3), further(x, t * x.nb2 + i3 * x.nb3), further(z, t * z.nb2 + i3 * z.nb3)
            dt_t = further(dt, t * dt.nb1 + i3 * dt.nb2)
            shared_products(b_t, c_t, places, strides, n_state, q, n)
            for h in range(h0, h1):
                head_chunk(y_t, s, x_t, dt_t, a, b_t, c_t, bias, skip, z_t, places, strides, n_state, dim, q, n, h, h0, h1)
        for h in range(h0, h1):
            own = (h - h0) * n_state * row
            store_state(at(state.p, h * state.nb2 + seq * state.nb3), state.nb1, at(states, own), row, s.ne0, s.ne1, turned)
    if TILES:
        tiles_off()
    restore_tiny(mode)


_SHARED: dict[str, Any] = {"pack_c": pack_c.bind(left_row=row_bf16, WORD=2), "pack_b": pack_b.bind(rows_of_b=rows_of_b_bf16)}
_WEIGH: dict[str, Any] = {"weigh": weigh_bf16, "weigh_diagonal": weigh_diagonal_bf16, "weigh_far": weigh_far_bf16, "WORD": 2}
_ALL: dict[str, Any] = {"lay_out": lay_out.bind(WORD=2), "state_operand": state_operand_bf16, "WORD": 2}
_PACK_X = pack_x.bind(inputs_of=inputs_bf16, WORD=2)
_BF16: dict[str, Any] = {
    "shared_products": shared_products.bind(**_SHARED, multiply_cb=multiply_cb.bind(product_1=product_bf16_1, product_2=product_bf16_2), WORD=2),
    "head_chunk": head_chunk.bind(
        pack_x=_PACK_X, weigh_rows=weigh_rows.bind(**_WEIGH), multiply_rows=multiply_rows.bind(two_1=two_bf16_1, two_2=two_bf16_2, two_3=two_bf16_3, WORD=2),
        advance_state=advance_state.bind(onto_1=onto_bf16_1, onto_2=onto_bf16_2, onto_3=onto_bf16_3, WORD=2), WORD=2),
    **_ALL,
}
_IN_TILES: dict[str, Any] = {
    "shared_products": shared_products.bind(
        **_SHARED, multiply_cb=multiply_cb.bind(product_1=product_tiles_1, product_2=product_tiles_2, ROWS=TILE_ROWS), WORD=2),
    "head_chunk": head_chunk.bind(
        pack_x=_PACK_X, weigh_rows=weigh_rows.bind(**_WEIGH, TILES=True),
        multiply_rows=multiply_rows.bind(two_1=two_tiles_1, two_2=two_tiles_2, two_3=two_tiles_3, two_4=two_tiles_4, WORD=2, TILES=True, ROWS=TILE_ROWS),
        advance_state=advance_state.bind(onto_1=onto_tiles_1, onto_2=onto_tiles_2, WORD=2, TILES=True, STATE_ROWS=2 * TILE_ROWS), WORD=2),
    **_ALL, "TILES": True,
}


def _not_bf16(node: Node) -> str | None:
    return None if node.params["precision"] == "bf16" else "precision is not bf16"


_OPTIONS: dict[str, Any] = {"items": _items, "chunk": lambda node: 1, "params": _chunk_and_heads, "status": True}
_ROUNDED: dict[str, Any] = {**_OPTIONS, "when": _not_bf16, "rounds": True, "scratch": functools.partial(_scratch, word=2)}
# The first serves bf16 too where the CPU has no fast products of bfloat16, or the backend's prec is f32.
kernel("SSD_SCAN", "cpu", scratch=functools.partial(_scratch, word=1), **_OPTIONS)(ssd_scan_chunks)
kernel("SSD_SCAN", "cpu", needs=BY_VECTORS, bind=lambda node: _BF16, **_ROUNDED)(ssd_scan_chunks)
kernel("SSD_SCAN", "cpu", needs=BY_TILES, bind=lambda node: _IN_TILES, **_ROUNDED)(ssd_scan_chunks)
