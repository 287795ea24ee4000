"""CPU kernels of the state-space ops.

SSM_CONV: an item is a block of channels and times. Where time is innermost in sx, each channel's outputs are computed
along time into scratch and turned to channel order 16 x 16; elsewhere the loop runs over channels. Sums run over the
window in order either way, so both give the same bits.

SSM_SCAN: an item is one head of one sequence. Its state stays in cache in the output's own memory while the loop runs
over the tokens; every token costs one pass over it, in vectors along d_state. A token's result does not depend on
how many tokens the run has.
"""

from __future__ import annotations

from typing import Any

import pyggml.ops.ssm.defs  # noqa: F401  (a compiling process imports this module alone, for its intrinsics)
from pyggml.cpu.mathf import exp, softplus
from pyggml.cpu.simd import LOAD, at, copy_bytes, helper, intrinsic, ld_f32, ld_i32, st_f32, stw, zero_bytes
from pyggml.cpu.vector import LANES, float_constant, load_floats, loop, multiply_add, splat, store_floats, sums_of_lanes, transpose_16x16, wide_registers
from pyggml.registry import kernel
from pyggml.tensor import Node

CHANNELS, TIMES = 64, 64  # of an SSM_CONV item
TIME_ROW = (TIMES + 16) * 4  # bytes of a channel's times in scratch: no power of two, whose rows would share cache sets
D_STATE = 16  # bound


# -- SSM_CONV -------------------------------------------------------------------------------------------------------------


@helper
def near(p: Any, i: Any, _nb: Any) -> Any:
    """Element i of a contiguous row."""
    return ld_f32(p, i)


@helper
def far(p: Any, i: Any, nb: Any) -> Any:
    """Element i of a row with a stride."""
    return ld_f32(at(p, i * nb), 0)


def _conv_items(node: Node) -> int:
    d_inner, n_t, n_seqs, _ = node.out.ne
    return -(-d_inner // CHANNELS) * -(-n_t // TIMES) * n_seqs


def _conv_chunk(node: Node) -> int:
    return max(1, 4096 // (CHANNELS * min(TIMES, node.out.ne[1])))


def _conv_binds(node: Node) -> dict[str, Any]:
    sx, c = node.src
    assert sx is not None and c is not None
    return {"load_c": LOAD[c.dtype.name], "load_x": near if sx.nb[1] == 4 else far}


@helper
def load_c(_p: Any, _i: Any) -> Any:
    """An element of c as float32; bound to its type."""


@helper
def load_x(_p: Any, _i: Any, _nb: Any) -> Any:
    """Channel i of a time of sx; bound to near or far."""


@kernel("SSM_CONV", "cpu", items=_conv_items, chunk=_conv_chunk, bind=_conv_binds)
def ssm_conv_channels(out: Any, sx: Any, c: Any, i0: Any, i1: Any) -> None:
    """Any strides: for each time, loops over the block's channels."""
    n_cb, n_tb, n_tok = (out.ne0 + CHANNELS - 1) // CHANNELS, (out.ne1 + TIMES - 1) // TIMES, sx.ne0 - c.ne0 + 1
    for item in range(i0, i1):
        seq, rest = item // (n_cb * n_tb), item % (n_cb * n_tb)
        t0, ch = rest // n_cb * TIMES, rest % n_cb * CHANNELS
        n_ch = min(CHANNELS, out.ne0 - ch)
        for t in range(t0, min(t0 + TIMES, out.ne1)):
            o = at(out.p, ch * 4 + t * out.nb1 + seq * out.nb2)
            if t >= n_tok:
                zero_bytes(o, n_ch * 4)
                continue
            for k in range(c.ne0):
                w, x = at(c.p, k * c.nb0 + ch * c.nb1), at(sx.p, (t + k) * sx.nb0 + ch * sx.nb1 + seq * sx.nb2)
                if k == 0:
                    for i in range(n_ch):
                        st_f32(o, i, load_x(x, i, sx.nb1) * load_c(at(w, i * c.nb1), 0))
                else:
                    for i in range(n_ch):
                        st_f32(o, i, ld_f32(o, i) + load_x(x, i, sx.nb1) * load_c(at(w, i * c.nb1), 0))


def _time_innermost(node: Node) -> str | None:
    sx, c = node.src
    assert sx is not None and c is not None
    if sx.nb[0] != 4:
        return "time is not innermost in sx"
    return None if sx.ne[0] - c.ne[0] + 1 >= LANES else f"fewer than {LANES} tokens"


@kernel("SSM_CONV", "cpu", when=_time_innermost, items=_conv_items, chunk=_conv_chunk, bind=_conv_binds, scratch=lambda _: CHANNELS * TIME_ROW)
def ssm_conv_times(out: Any, sx: Any, c: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Time innermost in sx: along time into scratch, then turned."""
    n_cb, n_tb, n_tok = (out.ne0 + CHANNELS - 1) // CHANNELS, (out.ne1 + TIMES - 1) // TIMES, sx.ne0 - c.ne0 + 1
    for item in range(i0, i1):
        seq, rest = item // (n_cb * n_tb), item % (n_cb * n_tb)
        t0, ch = rest // n_cb * TIMES, rest % n_cb * CHANNELS
        n_ch, n_t = min(CHANNELS, out.ne0 - ch), max(0, min(TIMES, n_tok - t0))
        for i in range(n_ch):
            x, row = at(sx.p, t0 * 4 + (ch + i) * sx.nb1 + seq * sx.nb2), at(scratch, i * TIME_ROW)
            for k in range(c.ne0):
                w, xk = load_c(at(c.p, k * c.nb0 + (ch + i) * c.nb1), 0), at(x, k * 4)
                if k == 0:
                    for t in range(n_t):
                        st_f32(row, t, ld_f32(xk, t) * w)
                else:
                    for t in range(n_t):
                        st_f32(row, t, ld_f32(row, t) + ld_f32(xk, t) * w)
        o = at(out.p, ch * 4 + t0 * out.nb1 + seq * out.nb2)
        whole_t, whole_ch = n_t // LANES * LANES, n_ch // LANES * LANES
        for t in range(0, whole_t, LANES):
            for i in range(0, whole_ch, LANES):
                transpose_16x16(at(o, t * out.nb1 + i * 4), out.nb1, at(scratch, i * TIME_ROW + t * 4), TIME_ROW)
        for t in range(n_t):
            for i in range(whole_ch if t < whole_t else 0, n_ch):
                st_f32(at(o, t * out.nb1), i, ld_f32(at(scratch, i * TIME_ROW), t))
        for t in range(n_t, min(TIMES, out.ne1 - t0)):
            zero_bytes(at(o, t * out.nb1), n_ch * 4)


# -- SSM_SCAN -------------------------------------------------------------------------------------------------------------


@intrinsic("void(ptr, ptr, i64, ptr, ptr, ptr, f32, ptr)")
def scan_16_rows(b: Any, ir: Any, dst: Any, src: Any, row: Any, b_t: Any, c_t: Any, xdt: Any, decay: Any, y: Any) -> None:
    """One token on 16 rows (head_dim) of the state, each `row` bytes: dst = decay src + xdt B, y = dst C."""
    i64, zero = ir.IntType(64), float_constant(ir, 0.0)
    n_blocks, decays = b.sdiv(row, i64(LANES * 4)), splat(b, ir, decay)
    at_once = LANES if wide_registers() else 4
    sums: list[Any] = []
    for first in range(0, LANES, at_once):
        def block(i: Any, acc: list[Any], first: int = first) -> list[Any]:
            offset = b.mul(i, i64(LANES * 4))
            b_i, c_i = load_floats(b, ir, b.gep(b_t, [offset])), load_floats(b, ir, b.gep(c_t, [offset]))
            for r in range(first, first + at_once):
                place = b.add(offset, b.mul(row, i64(r)))
                x = splat(b, ir, b.load(b.gep(b.bitcast(xdt, ir.FloatType().as_pointer()), [i64(r)]), align=4))
                h = multiply_add(b, ir, b_i, x, b.fmul(load_floats(b, ir, b.gep(src, [place])), decays))
                store_floats(b, b.gep(dst, [place]), h)
                acc[r - first] = multiply_add(b, ir, h, c_i, acc[r - first])
            return acc
        sums += loop(b, ir, n_blocks, [zero] * at_once, block)
    store_floats(b, y, sums_of_lanes(b, ir, sums))


def _padded(n: int) -> int:
    return -(-n // LANES) * LANES


def _scan_chunk(node: Node) -> int:
    d_state, head_dim, _, _ = node.outputs[1].ne
    return max(1, 16384 // (d_state * head_dim * node.out.ne[2]))


def _scan_scratch(node: Node) -> int:
    d_state, head_dim = _padded(node.outputs[1].ne[0]), _padded(node.outputs[1].ne[1])
    return 4 * (2 * head_dim + 2 * d_state + d_state * head_dim)


def _scan_options(node: Node) -> dict[str, Any]:
    return {"D_STATE": _padded(node.outputs[1].ne[0])}


@helper
def gather(dst: Any, src: Any, n: Any, nb: Any, padded: Any) -> Any:
    """n float32 with a stride, then zeros up to `padded`."""
    for i in range(n):
        st_f32(dst, i, ld_f32(at(src, i * nb), 0))
    zero_bytes(at(dst, n * 4), (padded - n) * 4)


@helper
def dead_head(y: Any, state: Any, head: Any, seq: Any) -> Any:
    """Zero the outputs of a head whose id is bad."""
    for t in range(y.ne2):
        zero_bytes(at(y.p, head * y.nb1 + t * y.nb2 + seq * y.nb3), y.ne0 * 4)
    zero_bytes(at(state.p, head * state.nb2 + seq * state.nb3), state.nb2)


@kernel("SSM_SCAN", "cpu", items=lambda n: n.out.ne[1] * n.out.ne[3], chunk=_scan_chunk, bind=_scan_options, scratch=_scan_scratch, status=True)
def ssm_scan_any(y: Any, state: Any, s: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, ids: Any, status: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Any sizes and strides: state, B and C are brought to scratch, padded with zeros to whole vectors."""
    head_dim = (s.ne1 + LANES - 1) // LANES * LANES
    xdt, yt, bt = scratch, at(scratch, head_dim * 4), at(scratch, head_dim * 8)
    ct, h = at(bt, D_STATE * 4), at(bt, D_STATE * 8)
    zero_bytes(xdt, head_dim * 4)
    for item in range(i0, i1):
        seq, head = item // s.ne2, item % s.ne2
        row = ld_i32(at(ids.p, seq * ids.nb0), 0)
        if row < 0 or row >= s.ne3:
            stw(status, 1, row)
            stw(status, 0, 1)
            dead_head(y, state, head, seq)
            continue
        for p in range(head_dim):
            if p < s.ne1:
                gather(at(h, p * D_STATE * 4), at(s.p, p * s.nb1 + head * s.nb2 + row * s.nb3), s.ne0, s.nb0, D_STATE)
            else:
                zero_bytes(at(h, p * D_STATE * 4), D_STATE * 4)
        group, rate = head // (s.ne2 // b.ne1), ld_f32(at(a.p, head * a.nb1), 0)
        for t in range(x.ne2):
            d = softplus(ld_f32(at(dt.p, head * dt.nb0 + t * dt.nb1 + seq * dt.nb2), 0))
            x_t = at(x.p, head * x.nb1 + t * x.nb2 + seq * x.nb3)
            for p in range(s.ne1):
                st_f32(xdt, p, ld_f32(at(x_t, p * x.nb0), 0) * d)
            gather(bt, at(b.p, group * b.nb1 + t * b.nb2 + seq * b.nb3), s.ne0, b.nb0, D_STATE)
            gather(ct, at(c.p, group * c.nb1 + t * c.nb2 + seq * c.nb3), s.ne0, c.nb0, D_STATE)
            for p in range(0, head_dim, LANES):
                h_p = at(h, p * D_STATE * 4)
                scan_16_rows(h_p, h_p, D_STATE * 4, bt, ct, at(xdt, p * 4), exp(d * rate), at(yt, p * 4))
            copy_bytes(at(y.p, head * y.nb1 + t * y.nb2 + seq * y.nb3), yt, s.ne1 * 4)
        for p in range(s.ne1):
            copy_bytes(at(state.p, p * state.nb1 + head * state.nb2 + seq * state.nb3), at(h, p * D_STATE * 4), s.ne0 * 4)


def _whole_vectors(node: Node) -> str | None:
    s, x, _, _, b, c, _ = node.src
    assert s is not None and x is not None and b is not None and c is not None
    if s.ne[0] % LANES or s.ne[1] % LANES:
        return f"d_state {s.ne[0]} or head_dim {s.ne[1]} is no multiple of {LANES}"
    if s.nb[0] != 4 or s.nb[1] != 4 * s.ne[0]:
        return "the state of a head has gaps"
    return None if x.nb[0] == b.nb[0] == c.nb[0] == 4 else "dim 0 of x, B or C is strided"


@kernel("SSM_SCAN", "cpu", when=_whole_vectors, items=lambda n: n.out.ne[1] * n.out.ne[3], chunk=_scan_chunk, bind=_scan_options,
        scratch=lambda n: 4 * n.out.ne[0], status=True)
def ssm_scan_heads(y: Any, state: Any, s: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, ids: Any, status: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Whole vectors in place: the first token reads s, later ones the output's state."""
    for item in range(i0, i1):
        seq, head = item // s.ne2, item % s.ne2
        row = ld_i32(at(ids.p, seq * ids.nb0), 0)
        if row < 0 or row >= s.ne3:
            stw(status, 1, row)
            stw(status, 0, 1)
            dead_head(y, state, head, seq)
            continue
        h, src = at(state.p, head * state.nb2 + seq * state.nb3), at(s.p, head * s.nb2 + row * s.nb3)
        group, rate = head // (s.ne2 // b.ne1), ld_f32(at(a.p, head * a.nb1), 0)
        for t in range(x.ne2):
            d = softplus(ld_f32(at(dt.p, head * dt.nb0 + t * dt.nb1 + seq * dt.nb2), 0))
            decay = exp(d * rate)
            x_t, y_t = at(x.p, head * x.nb1 + t * x.nb2 + seq * x.nb3), at(y.p, head * y.nb1 + t * y.nb2 + seq * y.nb3)
            b_t, c_t = at(b.p, group * b.nb1 + t * b.nb2 + seq * b.nb3), at(c.p, group * c.nb1 + t * c.nb2 + seq * c.nb3)
            for p in range(x.ne0):
                st_f32(scratch, p, ld_f32(x_t, p) * d)
            for p in range(0, x.ne0, LANES):
                scan_16_rows(at(h, p * D_STATE * 4), at(src, p * D_STATE * 4), D_STATE * 4, b_t, c_t, at(scratch, p * 4), decay, at(y_t, p * 4))
            src = h
