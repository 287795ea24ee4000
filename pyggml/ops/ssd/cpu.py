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

from typing import Any

from pyggml.cpu.blocks import (
    TILE_ROWS,
    bf16_of,
    decays_since,
    decays_until,
    each_vector,
    exps,
    float_at,
    gate,
    lower_lanes,
    onto_bf16_1,
    onto_bf16_2,
    onto_bf16_3,
    onto_f32_1,
    onto_f32_2,
    onto_f32_3,
    onto_tiles_1,
    onto_tiles_2,
    paired,
    prefetch_read,
    prefetch_write,
    product_bf16_1,
    product_bf16_2,
    product_f32_1,
    product_f32_2,
    product_tiles_1,
    product_tiles_2,
    store_words,
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
    widened_differences,
)
from pyggml.cpu.mathf import softplus
from pyggml.cpu.rows import gather
from pyggml.cpu.simd import Intrinsic, at, bad_index, bad_span, copy_bytes, helper, intrinsic, ld_f32, ld_f64, ld_i32, st_f32, st_f64, wide, zero_bytes
from pyggml.cpu.tiles import tiles_off, tiles_on
from pyggml.cpu.vector import LANES, float_constant, load_floats, splat, store_floats, transpose_16x16
from pyggml.registry import kernel
from pyggml.tensor import Node

MAX_CHUNK, CHUNK = 256, {"f32": 64, "bf16": 64}  # tokens
HEADS, MIN_ITEMS, STATE_BYTES = 8, 8, 512 << 10  # of an item: heads, fewer where there are few items or the states are large
PAIR = 32  # rows of tokens that are turned at a time
GAP = 64  # bytes between rows in scratch, which are else often powers of two apart and would share cache sets
NEAR = 32.0
WORD, TILES = 1, False  # elements of an operand in 32 bits: 1 float32 or 2 bfloat16; whether products are made in AMX tiles. Bound, as the next two
ROWS, STATE_ROWS = 8, 8  # of a block of results


# -- operands ----------------------------------------------------------------------------------------------------------------


@helper
def row_of(tmp: Any, src: Any, nb: Any, n: Any, padded: Any) -> Any:
    """Pointer to n float32 with a stride, padded with zeros: where they are when they need no padding, else in tmp."""
    if nb == 4 and n == padded:
        return src
    gather(tmp, src, nb, n)
    zero_bytes(at(tmp, n * 4), (padded - n) * 4)
    return tmp


@intrinsic("void(ptr, ptr, i64)")
def row_f32(b: Any, ir: Any, dst: Any, src: Any, n: Any) -> None:
    """n vectors of float32 as they are."""
    each_vector(b, ir, n, lambda i: store_floats(b, b.gep(dst, [i]), load_floats(b, ir, b.gep(src, [i]))))


@intrinsic("void(ptr, ptr, i64)")
def row_bf16(b: Any, ir: Any, dst: Any, src: Any, n: Any) -> None:
    """n vectors of float32 as a row of bfloat16."""
    each_vector(b, ir, n, lambda i: store_words(b, b.gep(dst, [b.lshr(i, i.type(1))]), bf16_of(b, ir, load_floats(b, ir, b.gep(src, [i])))))


@intrinsic("void(ptr, ptr, ptr, i64)")
def pair_rows(b: Any, ir: Any, dst: Any, even: Any, odd: Any, n: Any) -> None:
    """Words of the bfloat16 of two rows of n vectors."""
    each_vector(b, ir, n, lambda i: store_words(b, b.gep(dst, [i]), paired(b, ir, load_floats(b, ir, b.gep(even, [i])), load_floats(b, ir, b.gep(odd, [i])))))


_INPUT = "void(ptr, ptr, i64, ptr, ptr, ptr, i64)"


@intrinsic(_INPUT)
def inputs_f32(b: Any, ir: Any, plain: Any, weighted: Any, row: Any, even: Any, odd: Any, weights: Any, n: Any) -> None:
    """Two tokens' rows of x as rows of right operands, plain and times their weights."""
    for k, src in enumerate((even, odd)):
        weight, at_row = float_at(b, ir, weights, k), b.mul(row, row.type(k))

        def copy(i: Any, src: Any = src, weight: Any = weight, at_row: Any = at_row) -> None:
            x, place = load_floats(b, ir, b.gep(src, [i])), b.add(at_row, i)
            store_floats(b, b.gep(plain, [place]), x)
            store_floats(b, b.gep(weighted, [place]), b.fmul(x, weight))
        each_vector(b, ir, n, copy)


@intrinsic(_INPUT)
def inputs_bf16(b: Any, ir: Any, plain: Any, weighted: Any, row: Any, even: Any, odd: Any, weights: Any, n: Any) -> None:
    """Two tokens' rows of x as one row of pairs of right operands, plain and times their weights."""
    w0, w1 = float_at(b, ir, weights, 0), float_at(b, ir, weights, 1)

    def copy(i: Any) -> None:
        x0, x1 = load_floats(b, ir, b.gep(even, [i])), load_floats(b, ir, b.gep(odd, [i]))
        store_words(b, b.gep(plain, [i]), paired(b, ir, x0, x1))
        store_words(b, b.gep(weighted, [i]), paired(b, ir, b.fmul(x0, w0), b.fmul(x1, w1)))
    each_vector(b, ir, n, copy)


@helper
def rows_of_b_f32(rows: Any, _right: Any, src: Any, src_row: Any, n: Any, row: Any, _right_row: Any, j: Any, _tmp: Any) -> None:
    """B of PAIR tokens from token j on, n values each, as columns j... of B^T: its rows are a left operand and, along n, a right one."""
    for half in range(0, PAIR, LANES):
        for i in range(0, n, LANES):
            transpose_16x16(at(rows, i * row + (j + half) * 4), row, at(src, half * src_row + i * 4), src_row)


@helper
def rows_of_b_bf16(rows: Any, right: Any, src: Any, src_row: Any, n: Any, row: Any, right_row: Any, j: Any, tmp: Any) -> None:
    """The same in pairs: of tokens in the left operand, of values of a token in the right one."""
    tmp_row = n * 4 + GAP
    for t in range(0, PAIR, 2):
        pair_rows(at(tmp, t // 2 * tmp_row), at(src, t * src_row), at(src, (t + 1) * src_row), n // LANES)
    for i in range(0, n, LANES):
        transpose_16x16(at(rows, i * row + j * 2), row, at(tmp, i * 4), tmp_row)
    for half in range(0, PAIR, LANES):
        for t in range(LANES):
            row_bf16(at(tmp, t * tmp_row), at(src, (half + t) * src_row), n // LANES)
        for i in range(0, n // 2, LANES):
            transpose_16x16(at(right, i * right_row + (j + half) * 4), right_row, at(tmp, i * 4), tmp_row)


@helper
def state_operand_f32(_dst: Any, state: Any, _row: Any, _n: Any, _vectors: Any) -> Any:
    """The state is a right operand as it stands."""
    return state


@helper
def state_operand_bf16(dst: Any, state: Any, row: Any, n: Any, vectors: Any) -> Any:
    """The state rounded to bfloat16, in pairs along d_state."""
    for i in range(0, n, 2):
        pair_rows(at(dst, i // 2 * row), at(state, i * row), at(state, (i + 1) * row), vectors)
    return dst


# -- M: products C B times decays --------------------------------------------------------------------------------------------


def _as_float(b: Any, ir: Any, p: Any, v: Any) -> None:
    store_floats(b, p, v)


def _as_bf16(b: Any, ir: Any, p: Any, v: Any) -> None:
    store_words(b, p, bf16_of(b, ir, v))


def _weigh(store: Any, name: str, masked: bool) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, row: Any, products: Any, products_row: Any, since: Any, until: Any) -> None:
        untils = load_floats(b, ir, until)
        for i in range(LANES):
            k = row.type(i)
            v = load_floats(b, ir, b.gep(products, [b.mul(products_row, k)]))
            v = b.fmul(b.fmul(v, untils), float_at(b, ir, since, i))
            if masked:
                v = b.select(lower_lanes(ir, i), v, float_constant(ir, 0.0))
            store(b, ir, b.gep(dst, [b.mul(row, k)]), v)
    build.__name__ = name
    return Intrinsic("void(ptr, i64, ptr, i64, ptr, ptr)", build)


# A block of M: (dst, bytes of a row, block of CB, bytes of a row, decays of its rows since its first row, decays of its columns until there times dt).
weigh_f32, weigh_bf16 = _weigh(_as_float, "weigh_f32", False), _weigh(_as_bf16, "weigh_bf16", False)
weigh_diagonal_f32, weigh_diagonal_bf16 = _weigh(_as_float, "weigh_diagonal_f32", True), _weigh(_as_bf16, "weigh_diagonal_bf16", True)


def _weigh_far(store: Any, name: str) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, row: Any, products: Any, products_row: Any, sums: Any, steps: Any) -> None:
        dts, masked = load_floats(b, ir, steps), float_constant(ir, float("-inf"))
        for i in range(LANES):
            k, lower = row.type(i), lower_lanes(ir, i)
            own = b.load(b.bitcast(b.gep(sums, [row.type(8 * i)]), ir.DoubleType().as_pointer()), align=8)
            decays = exps(b, ir, b.select(lower, widened_differences(b, ir, sums, own, negated=True), masked))
            v = b.fmul(b.fmul(load_floats(b, ir, b.gep(products, [b.mul(products_row, k)])), dts), decays)
            store(b, ir, b.gep(dst, [b.mul(row, k)]), b.select(lower, v, float_constant(ir, 0.0)))
    build.__name__ = name
    return Intrinsic("void(ptr, i64, ptr, i64, ptr, ptr)", build)


# A block on the diagonal with an exponent for each pair: (dst, bytes of a row, block of CB, bytes of a row, sums of its tokens, their dt).
weigh_far_f32, weigh_far_bf16 = _weigh_far(_as_float, "weigh_far_f32"), _weigh_far(_as_bf16, "weigh_far_bf16")


# -- a chunk -----------------------------------------------------------------------------------------------------------------

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
def multiply_rows(y: Any, y_row: Any, c: Any, c_row: Any, s: Any, row: Any, words: Any, decays: Any, m: Any, m_row: Any, x: Any, i: Any, vectors: Any,
                  with_skip: Any, skip: Any, plain_x: Any, plain_row: Any, soon: Any, soon_row: Any) -> None:
    """y = decays (C S) + M x (+ skip plain_x) for rows i to i + 15, which y and m hold; rows of S and x have `row` bytes. Rows of `soon`, which
    are written next, are fetched meanwhile: those of a head lie far apart."""
    for r in range(0, LANES, ROWS):
        for k in range(ROWS):
            prefetch_write(at(soon, (i + r + k) * soon_row), vectors)
        o, c_r, m_r, n = at(y, r * y_row), at(c, (i + r) * c_row), at(m, r * m_row), (i + r + ROWS) // WORD
        f, own, v = at(decays, (i + r) * 4), at(plain_x, (i + r) * plain_row), 0
        while v < vectors:
            p = v * LANES * 4
            left = vectors - v
            if left == 1:
                two_1(at(o, p), y_row, c_r, c_row, at(s, p), row, words, f, m_r, m_row, at(x, p), row, n, with_skip, skip, at(own, p), plain_row)
                v += 1
            elif left % 2 == 1:
                two_3(at(o, p), y_row, c_r, c_row, at(s, p), row, words, f, m_r, m_row, at(x, p), row, n, with_skip, skip, at(own, p), plain_row)
                v += 3
            elif TILES and left >= 4:
                two_4(at(o, p), y_row, c_r, c_row, at(s, p), row, words, f, m_r, m_row, at(x, p), row, n, with_skip, skip, at(own, p), plain_row)
                v += 4
            else:
                two_2(at(o, p), y_row, c_r, c_row, at(s, p), row, words, f, m_r, m_row, at(x, p), row, n, with_skip, skip, at(own, p), plain_row)
                v += 2


@helper
def advance_state(s: Any, row: Any, decay: Any, b: Any, b_row: Any, x: Any, words: Any, n_state: Any, vectors: Any, soon: Any, soon_row: Any,
                  n: Any) -> None:
    """S = decay S + B^T x. n rows of `soon`, which are read next, are fetched meanwhile."""
    v, at_once = 0, (n * STATE_ROWS + n_state - 1) // n_state
    while v < vectors:
        p, left = v * LANES * 4, vectors - v
        for i in range(0, n_state, STATE_ROWS):
            if v == 0:
                for k in range(at_once):
                    prefetch_read(at(soon, (i // STATE_ROWS * at_once + k) * soon_row), vectors)
            if left == 1:
                onto_1(at(s, i * row + p), row, decay, at(b, i * b_row), b_row, at(x, p), row, words)
            elif left % 2 == 1 and not TILES:
                onto_3(at(s, i * row + p), row, decay, at(b, i * b_row), b_row, at(x, p), row, words)
            else:
                onto_2(at(s, i * row + p), row, decay, at(b, i * b_row), b_row, at(x, p), row, words)
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


# -- outputs -----------------------------------------------------------------------------------------------------------------


@intrinsic("void(ptr, ptr, ptr, f32, i64)")
def finish_skip(b: Any, ir: Any, dst: Any, y: Any, x: Any, d: Any, n: Any) -> None:
    """dst = y + d x, n vectors."""
    ds = splat(b, ir, d)
    each_vector(b, ir, n, lambda i: store_floats(b, b.gep(dst, [i]), b.fadd(
        load_floats(b, ir, b.gep(y, [i])), b.fmul(ds, load_floats(b, ir, b.gep(x, [i]))))))


@intrinsic("void(ptr, ptr, i64)")
def finish_gate(b: Any, ir: Any, y: Any, z: Any, n: Any) -> None:
    """y = y silu(z), n vectors."""
    each_vector(b, ir, n, lambda i: store_floats(b, b.gep(y, [i]), b.fmul(load_floats(b, ir, b.gep(y, [i])), gate(b, ir, load_floats(b, ir, b.gep(z, [i]))))))


@helper
def finish(y: Any, y_nb2: Any, rows: Any, row: Any, x: Any, x_nb0: Any, x_nb2: Any, has_d: Any, d: Any, has_z: Any, z: Any, z_nb0: Any, z_nb2: Any,
           head_dim: Any, padded: Any, done: Any, n: Any, tmp: Any) -> None:
    """Rows of y plus d x, times silu(z), to the output, where the first `done` rows are already; the pointers are those of the first token."""
    vectors = padded // LANES
    if has_z:
        for t in range(done):
            finish_gate(at(y, t * y_nb2), row_of(tmp, at(z, t * z_nb2), z_nb0, head_dim, padded), vectors)
    for t in range(done, n):
        out, src = at(y, t * y_nb2), at(rows, t * row)
        dst = out if head_dim == padded else src
        if has_d:
            finish_skip(dst, src, row_of(tmp, at(x, t * x_nb2), x_nb0, head_dim, padded), d, vectors)
        elif head_dim == padded:
            row_f32(dst, src, vectors)
        if has_z:
            finish_gate(dst, row_of(tmp, at(z, t * z_nb2), z_nb0, head_dim, padded), vectors)
        if head_dim != padded:
            copy_bytes(out, src, head_dim * 4)


# -- states ------------------------------------------------------------------------------------------------------------------


@helper
def load_state(dst: Any, row: Any, src: Any, nb0: Any, nb1: Any, n_state: Any, n_padded: Any, head_dim: Any, padded: Any, tmp: Any) -> None:
    """dst [d_state][head_dim] of a state [head_dim][d_state], with zeros where there is padding."""
    for p in range(0, padded, LANES):
        for r in range(p + LANES, p + 2 * LANES):
            prefetch_read(at(src, r * nb1), n_padded // LANES)
        for i in range(0, n_padded, LANES):
            block, block_row, m, n = at(src, p * nb1 + i * nb0), nb1, min(LANES, head_dim - p), min(LANES, n_state - i)
            if nb0 != 4 or m < LANES or n < LANES:
                zero_bytes(tmp, LANES * LANES * 4)
                for r in range(m):
                    gather(at(tmp, r * LANES * 4), at(block, r * nb1), nb0, n)
                block, block_row = tmp, LANES * 4
            transpose_16x16(at(dst, i * row + p * 4), row, block, block_row)


@helper
def store_state(dst: Any, nb1: Any, src: Any, row: Any, n_state: Any, head_dim: Any, tmp: Any) -> None:
    """A state back as [head_dim][d_state]."""
    for p in range(0, head_dim, LANES):
        for i in range(0, n_state, LANES):
            block, m, n = at(dst, p * nb1 + i * 4), min(LANES, head_dim - p), min(LANES, n_state - i)
            if m == LANES and n == LANES:
                transpose_16x16(block, nb1, at(src, i * row + p * 4), row)
            else:
                transpose_16x16(tmp, LANES * 4, at(src, i * row + p * 4), row)
                for r in range(m):
                    copy_bytes(at(block, r * nb1), at(tmp, r * LANES * 4), n * 4)


# -- the kernel --------------------------------------------------------------------------------------------------------------


def _padded(n: int, to: int) -> int:
    return -(-n // to) * to


def _chunk_and_heads(node: Node) -> tuple[int, int]:
    """Tokens of a chunk and heads of an item, from the shape alone."""
    s, x, b, ids = node.src[0], node.src[1], node.src[4], node.src[6]
    assert s is not None and x is not None and b is not None and ids is not None
    q = min(node.params["chunk"] or CHUNK[node.params["precision"]], MAX_CHUNK, max(x.ne[2], 1))
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


def _scratch(node: Node) -> int:
    s = node.src[0]
    assert s is not None
    q, heads = _chunk_and_heads(node)
    q, n_state, dim, word = _padded(q, PAIR), _padded(s.ne[0], PAIR), _padded(s.ne[1], LANES), 2 if node.params["precision"] == "bf16" else 1
    row_n, row_q, row_p, row_cb = n_state * 4 // word + GAP, q * 4 // word + GAP, dim * 4 + GAP, q * 4 + GAP
    vectors = q * (4 + 8 + 4 + 4) + 2 * LANES * 4
    turned = (LANES + PAIR) * (n_state * 4 + GAP) + 3 * dim * 4
    operands = q * row_n + n_state * row_q + (n_state // 2 * row_cb if word == 2 else 0) + q * row_cb + LANES * row_q
    return vectors + turned + operands + 3 * q * row_p + (heads + (1 if word == 2 else 0)) * n_state * row_p


_BF16: dict[str, Any] = {
    "pack_c": pack_c.bind(left_row=row_bf16, WORD=2),
    "pack_b": pack_b.bind(rows_of_b=rows_of_b_bf16),
    "multiply_cb": multiply_cb.bind(product_1=product_bf16_1, product_2=product_bf16_2),
    "weigh_rows": weigh_rows.bind(weigh=weigh_bf16, weigh_diagonal=weigh_diagonal_bf16, weigh_far=weigh_far_bf16, WORD=2),
    "multiply_rows": multiply_rows.bind(two_1=two_bf16_1, two_2=two_bf16_2, two_3=two_bf16_3, WORD=2),
    "advance_state": advance_state.bind(onto_1=onto_bf16_1, onto_2=onto_bf16_2, onto_3=onto_bf16_3),
    "pack_x": pack_x.bind(inputs_of=inputs_bf16, WORD=2),
    "state_operand": state_operand_bf16,
    "WORD": 2,
}
_TILES: dict[str, Any] = {
    **_BF16,
    "multiply_cb": multiply_cb.bind(product_1=product_tiles_1, product_2=product_tiles_2, ROWS=TILE_ROWS),
    "weigh_rows": _BF16["weigh_rows"].bind(TILES=True),
    "multiply_rows": multiply_rows.bind(two_1=two_tiles_1, two_2=two_tiles_2, two_3=two_tiles_3, two_4=two_tiles_4, WORD=2, TILES=True, ROWS=TILE_ROWS),
    "advance_state": advance_state.bind(onto_1=onto_tiles_1, onto_2=onto_tiles_2, TILES=True, STATE_ROWS=2 * TILE_ROWS),
    "TILES": True,
}


def ssd_scan_chunks(y: Any, state: Any, s: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, ids: Any, bias: Any, skip: Any, z: Any, cu: Any,
                    q: Any, heads: Any, status: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Items [i0, i1), blocks of heads fastest, then groups. Scratch as _scratch counts it."""
    if TILES:
        tiles_on()
    n_state, dim, q_rows = (s.ne0 + PAIR - 1) // PAIR * PAIR, (s.ne1 + LANES - 1) // LANES * LANES, (q + PAIR - 1) // PAIR * PAIR
    vectors, words = dim // LANES, n_state // WORD
    row_n, row_q, row, row_cb = n_state * 4 // WORD + GAP, q_rows * 4 // WORD + GAP, dim * 4 + GAP, q_rows * 4 + GAP
    steps = scratch
    sums = at(steps, q_rows * 4)
    whole = at(sums, q_rows * 8)
    weights = at(whole, q_rows * 4)
    since = at(weights, q_rows * 4)
    until = at(since, LANES * 4)
    tmp = at(until, LANES * 4)
    x_tmp = at(tmp, (PAIR + LANES) * (n_state * 4 + GAP))
    c_rows = at(x_tmp, 3 * dim * 4)
    b_rows = at(c_rows, q_rows * row_n)
    b_right = b_rows if WORD == 1 else at(b_rows, n_state * row_q)
    row_b = row_q if WORD == 1 else row_cb
    cb = at(b_right, n_state // WORD * row_b)
    m = at(cb, q_rows * row_cb)
    plain = at(m, LANES * row_q)
    weighted = at(plain, q_rows * row)
    rows = at(weighted, q_rows * row)
    s_right = at(rows, q_rows * row)
    states = s_right if WORD == 1 else at(s_right, n_state * row)
    per_group = s.ne2 // b.ne1
    blocks = (per_group + heads - 1) // heads
    for item in range(i0, i1):
        seq, rest = item // (blocks * b.ne1), item % (blocks * b.ne1)
        group = rest // blocks
        h0 = group * per_group + rest % blocks * heads
        h1, source = min(h0 + heads, (group + 1) * per_group), ld_i32(at(ids.p, seq * ids.nb0), 0)
        first, end, i3 = 0, x.ne2, seq
        if cu.ne0 > 0:
            first, end, i3 = ld_i32(at(cu.p, seq * cu.nb0), 0), ld_i32(at(cu.p, (seq + 1) * cu.nb0), 0), 0
            if first < 0 or end < first or end > x.ne2 or (seq == 0 and first != 0) or (seq == ids.ne0 - 1 and end != x.ne2):
                bad_span(status, first, end)
                continue
        if source < 0 or source >= s.ne3:
            bad_index(status, source, s.ne3)
            continue
        for h in range(h0, h1):
            load_state(at(states, (h - h0) * n_state * row), row, at(s.p, h * s.nb2 + source * s.nb3), s.nb0, s.nb1, s.ne0, n_state, s.ne1, dim, tmp)
        for t in range(first, end, q):
            n = min(q, end - t)
            direct = n if s.ne1 == dim and x.nb0 == 4 else 0  # tokens whose y needs no scratch
            n_rows, n_16 = (n + PAIR - 1) // PAIR * PAIR, (n + LANES - 1) // LANES * LANES
            b_t, c_t = at(b.p, group * b.nb1 + t * b.nb2 + i3 * b.nb3), at(c.p, group * c.nb1 + t * c.nb2 + i3 * c.nb3)
            share = (q * LANES + (h1 - h0) * n_16 - 1) // ((h1 - h0) * n_16)  # tokens of the next chunk to fetch at each block of rows
            pack_c(c_rows, row_n, c_t, c.nb0, c.nb2, s.ne0, n_state, n, n_rows, tmp)
            pack_b(b_rows, row_q, b_right, row_b, b_t, b.nb0, b.nb2, s.ne0, n_state, n, n_rows, tmp)
            multiply_cb(cb, row_cb, c_rows, row_n, b_right, row_b, words, n_16)
            for h in range(h0, h1):
                own, bias_h, skip_h = at(states, (h - h0) * n_state * row), 0.0, 0.0
                x_h, z_h = at(x.p, h * x.nb1 + t * x.nb2 + i3 * x.nb3), at(z.p, h * z.nb1 + t * z.nb2 + i3 * z.nb3)
                y_h = at(y.p, h * y.nb1 + t * y.nb2 + i3 * y.nb3)
                if bias.ne0 > 0:
                    bias_h = ld_f32(at(bias.p, h * bias.nb0), 0)
                if skip.ne0 > 0:
                    skip_h = ld_f32(at(skip.p, h * skip.nb1), 0)
                step_sums(steps, sums, at(dt.p, h * dt.nb0 + t * dt.nb1 + i3 * dt.nb2), dt.nb1, bias_h, ld_f32(at(a.p, h * a.nb1), 0), n, n_rows)
                last = ld_f64(sums, n_rows - 1)
                for i in range(0, n_rows, LANES):
                    decays_since(at(whole, i * 4), at(sums, i * 8), 0.0)
                    decays_until(at(weights, i * 4), at(sums, i * 8), last, at(steps, i * 4))
                pack_x(plain, weighted, row, x_h, x.nb0, x.nb2, x.ne0, dim, weights, n, n_rows, x_tmp)
                operand = state_operand(s_right, own, row, n_state, vectors)
                for i in range(0, n_16, LANES):
                    weigh_rows(m, row_q, cb, row_cb, sums, steps, since, until, i)
                    o, o_row, with_skip = at(rows, i * row), row, 0
                    if i + LANES <= direct:
                        o, o_row, with_skip = at(y_h, i * y.nb2), y.nb2, 1 if skip.ne0 > 0 else 0
                    multiply_rows(o, o_row, c_rows, row_n, operand, row, words, whole, m, row_q, plain, i, vectors, with_skip, skip_h, x_h, x.nb2,
                                  y_h, y.nb2)
                    for k in range((((h - h0) * n_16 + i) // LANES) * share, (((h - h0) * n_16 + i) // LANES + 1) * share):
                        prefetch_read(at(b_t, (q + k) * b.nb2), n_state // LANES)
                        prefetch_read(at(c_t, (q + k) * c.nb2), n_state // LANES)
                next_x = at(x_h, x.nb1) if h + 1 < h1 else at(x_h, (h0 - h) * x.nb1 + q * x.nb2)
                advance_state(own, row, ld_f32(whole, n_rows - 1), b_rows, row_q, weighted, n_rows // WORD, n_state, vectors, next_x, x.nb2, n)
                finish(y_h, y.nb2, rows, row, x_h, x.nb0, x.nb2, skip.ne0 > 0, skip_h, z.ne0 > 0, z_h, z.nb0, z.nb2, x.ne0, dim,
                       direct // LANES * LANES, n, x_tmp)
        for h in range(h0, h1):
            store_state(at(state.p, h * state.nb2 + seq * state.nb3), state.nb1, at(states, (h - h0) * n_state * row), row, s.ne0, s.ne1, tmp)
    if TILES:
        tiles_off()


def _not_bf16(node: Node) -> str | None:
    return None if node.params["precision"] == "bf16" else "precision is not bf16"


_OPTIONS: dict[str, Any] = {"items": _items, "chunk": lambda node: 1, "params": _chunk_and_heads, "scratch": _scratch, "status": True}
kernel("SSD_SCAN", "cpu", **_OPTIONS)(ssd_scan_chunks)  # serves bf16 too where the CPU has no products of bfloat16, or prec is f32
kernel("SSD_SCAN", "cpu", when=_not_bf16, needs={"avx512bf16"}, rounds=True, bind=lambda node: _BF16, **_OPTIONS)(ssd_scan_chunks)
kernel("SSD_SCAN", "cpu", when=_not_bf16, needs={"avx512bf16", "amx-bf16"}, rounds=True, bind=lambda node: _TILES, **_OPTIONS)(ssd_scan_chunks)
