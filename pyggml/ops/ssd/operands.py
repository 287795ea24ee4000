"""What SSD_SCAN's kernel makes of its inputs, and of its results on the way out: operands of products in scratch, with sizes padded to whole
vectors; the decayed products M; rows of y with skip and gate; states, which lie transposed in scratch."""

from __future__ import annotations

from typing import Any

from pyggml.cpu.blocks import bf16_of, each_vector, exps, float_at, gate, lower_lanes, paired, prefetch_read, store_words, widened_differences
from pyggml.cpu.rows import gather
from pyggml.cpu.simd import Intrinsic, at, copy_bytes, helper, intrinsic, zero_bytes
from pyggml.cpu.vector import LANES, float_constant, load_floats, splat, store_floats, transpose_16x16

PAIR = 32  # rows of tokens that are turned at a time
GAP = 64  # bytes between rows in scratch, which are else often powers of two apart and would share cache sets

# Operands


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
def state_operand_f32(_dst: Any, _state: Any, _row: Any, _n: Any, _vectors: Any) -> None:
    """The state is a right operand as it stands."""


@helper
def state_operand_bf16(dst: Any, state: Any, row: Any, n: Any, vectors: Any) -> None:
    """The state rounded to bfloat16, in pairs along d_state."""
    for i in range(0, n, 2):
        pair_rows(at(dst, i // 2 * row), at(state, i * row), at(state, (i + 1) * row), vectors)


# M: products C B times decays


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


# Outputs


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


# States


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


