"""CPU kernels of the state-space ops.

SSM_CONV: an item is a block of channels and times. Where channels are innermost in sx, as models have it, 16 of them go through the
block's times with their window in registers. Where time is innermost, each channel's outputs are computed along time into
scratch and turned to channel order 16 x 16. Elsewhere, and for few tokens of those, the loop runs over channels. Sums run over the window
in order in all, so they give the same bits.

SSM_SCAN: an item is one head of one sequence. Its state stays in cache in the output's own memory while the loop runs
over the tokens; every token costs one pass over it, in vectors along d_state. A token's result does not depend on
how many tokens the run has.
"""

from __future__ import annotations

from typing import Any

from pyggml.cpu.mathf import exp, softplus
from pyggml.cpu.rows import finish, gather, load_next, loader
from pyggml.cpu.simd import LOAD, Intrinsic, at, bad_index, copy_bytes, helper, intrinsic, ld_f32, ld_i32, st_f32, zero_bytes
from pyggml.cpu.vector import (
    LANES,
    float_constant,
    load_floats,
    loop,
    multiply_add,
    prefetch,
    splat,
    store_floats,
    sums_of_lanes,
    transpose_16x16,
    wide_registers,
)
from pyggml.registry import kernel
from pyggml.tensor import Node

CHANNELS, TIMES = 64, 64  # of an SSM_CONV item
ABREAST, AT_ONCE = 256, 8  # channels of an item where they are innermost, and times of it that they go through together
TIME_ROW = (TIMES + 16) * 4  # bytes of a channel's times in scratch: no power of two, whose rows would share cache sets
TOKENS = 16  # of a block of SSM_SCAN
STRETCH = 128 << 10  # bytes of states of one sequence, of several, that a thread takes on end
D_STATE, IN_PLACE, POOL, HEADS = 16, True, False, 1  # bound to the node's: a constant row size makes the rows' offsets part of the instructions


# SSM_CONV


def _conv_items(node: Node, channels: int = CHANNELS) -> int:
    d_inner, n_t, n_seqs, _ = node.out.ne
    return -(-d_inner // channels) * -(-n_t // TIMES) * n_seqs


def _conv_chunk(node: Node, channels: int = CHANNELS) -> int:
    return max(1, 4096 // (channels * min(TIMES, node.out.ne[1])))


def _conv_binds(node: Node) -> dict[str, Any]:
    sx, c = node.src
    assert sx is not None and c is not None
    return {"load_c": LOAD[c.dtype.name], "load_x": loader("f32", sx.nb[1] == 4)}  # along channels


@helper
def load_c(_p: Any, _i: Any) -> Any:
    """An element of c as float32; bound to its type."""


load_x = load_next


@kernel("SSM_CONV", "cpu", items=_conv_items, chunk=_conv_chunk, bind=_conv_binds, scratch=lambda n: 4 * CHANNELS * n.src[1].ne[0], epilogue=True)
def ssm_conv_channels(out: Any, sx: Any, c: Any, extra: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Any strides: for each time, loops over the block's channels, whose weights stand in scratch, a row per k."""
    n_cb, n_tb, n_tok = (out.ne0 + CHANNELS - 1) // CHANNELS, (out.ne1 + TIMES - 1) // TIMES, sx.ne0 - c.ne0 + 1
    for item in range(i0, i1):
        seq, rest = item // (n_cb * n_tb), item % (n_cb * n_tb)
        t0, ch = rest // n_cb * TIMES, rest % n_cb * CHANNELS
        n_ch = min(CHANNELS, out.ne0 - ch)
        for k in range(c.ne0):
            for i in range(n_ch):
                st_f32(scratch, k * CHANNELS + i, load_c(at(c.p, k * c.nb0 + (ch + i) * c.nb1), 0))
        for t in range(t0, min(t0 + TIMES, out.ne1)):
            o = at(out.p, ch * 4 + t * out.nb1 + seq * out.nb2)
            if t >= n_tok:
                zero_bytes(o, n_ch * 4)
            for k in range(c.ne0 if t < n_tok else 0):
                w, x = at(scratch, k * CHANNELS * 4), at(sx.p, (t + k) * sx.nb0 + ch * sx.nb1 + seq * sx.nb2)
                if k == 0:
                    for i in range(n_ch):
                        st_f32(o, i, load_x(x, sx.nb1, i) * ld_f32(w, i))
                else:
                    for i in range(n_ch):
                        st_f32(o, i, ld_f32(o, i) + load_x(x, sx.nb1, i) * ld_f32(w, i))
            finish(extra, o, ch, n_ch, t, seq, 0)


def _many_times(node: Node) -> str | None:
    sx, c = node.src
    assert sx is not None and c is not None
    if sx.nb[0] != 4:
        return "time is not innermost in sx"
    return None if sx.ne[0] - c.ne[0] + 1 >= LANES else f"fewer than {LANES} tokens"


@kernel("SSM_CONV", "cpu", when=_many_times, items=_conv_items, chunk=_conv_chunk, bind=_conv_binds, scratch=lambda _: CHANNELS * TIME_ROW, epilogue=True)
def ssm_conv_times(out: Any, sx: Any, c: Any, extra: Any, scratch: Any, i0: Any, i1: Any) -> None:
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
        for t in range(min(TIMES, out.ne1 - t0)):
            finish(extra, at(o, t * out.nb1), ch, n_ch, t0 + t, seq, 0)


def _window(taps: int) -> Intrinsic:
    def build(b: Any, ir: Any, o: Any, o_row: Any, x: Any, x_row: Any, w: Any, n: Any) -> None:
        i64 = ir.IntType(64)
        weights = [load_floats(b, ir, b.gep(w, [i64(4 * ABREAST * k)])) for k in range(taps)]
        newest = b.gep(x, [b.mul(x_row, i64(taps - 1))])

        def turn(t: Any, before: list[Any]) -> list[Any]:
            window = [*before, load_floats(b, ir, b.gep(newest, [b.mul(x_row, t)]))]
            total = b.fmul(window[0], weights[0])
            for v, weight in zip(window[1:], weights[1:], strict=True):
                total = b.fadd(total, b.fmul(v, weight))
            store_floats(b, b.gep(o, [b.mul(o_row, t)]), total)
            return window[1:]

        loop(b, ir, n, [load_floats(b, ir, b.gep(x, [b.mul(x_row, i64(k))])) for k in range(taps - 1)], turn)

    build.__name__ = f"conv_16_{taps}"
    return Intrinsic("void(ptr, i64, ptr, i64, ptr, i64)", build)


WINDOWS = {taps: _window(taps) for taps in range(1, 5)}  # 16 channels at n times: (o, bytes from time to time, x, the same of it, weights, n)


@helper
def conv_16(_o: Any, _o_row: Any, _x: Any, _x_row: Any, _w: Any, _n: Any) -> None:
    """One of WINDOWS; bound to d_conv."""


def _many_channels(node: Node) -> str | None:
    sx, c = node.src
    assert sx is not None and c is not None
    if sx.nb[1] != 4 or c.ne[0] not in WINDOWS:
        return f"d_conv is {c.ne[0]}; up to {max(WINDOWS)} stay in registers" if sx.nb[1] == 4 else "channels are not innermost in sx"
    return None if sx.ne[1] >= LANES else f"fewer than {LANES} channels"


def _window_binds(node: Node) -> dict[str, Any]:
    assert node.src[1] is not None
    return {**_conv_binds(node), "conv_16": WINDOWS[node.src[1].ne[0]]}


@kernel("SSM_CONV", "cpu", when=_many_channels, items=lambda n: _conv_items(n, ABREAST), chunk=lambda n: _conv_chunk(n, ABREAST), bind=_window_binds,
        scratch=lambda n: 4 * ABREAST * n.src[1].ne[0], epilogue=True)
def ssm_conv_windows(out: Any, sx: Any, c: Any, extra: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Channels innermost in sx, whose weights stand in scratch, a row per k. A few times at once, so that few pages are in use."""
    n_cb, n_tb, n_tok = (out.ne0 + ABREAST - 1) // ABREAST, (out.ne1 + TIMES - 1) // TIMES, sx.ne0 - c.ne0 + 1
    for item in range(i0, i1):
        seq, rest = item // (n_cb * n_tb), item % (n_cb * n_tb)
        first, ch = rest // n_cb * TIMES, rest % n_cb * ABREAST
        n_ch, end = min(ABREAST, out.ne0 - ch), min(first + TIMES, out.ne1)
        whole = n_ch // LANES * LANES
        for k in range(c.ne0):
            for i in range(n_ch):
                st_f32(scratch, k * ABREAST + i, load_c(at(c.p, k * c.nb0 + (ch + i) * c.nb1), 0))
        for t0 in range(first, end, AT_ONCE):
            n_t, t1 = max(0, min(AT_ONCE, n_tok - t0)), min(t0 + AT_ONCE, end)
            x, o = at(sx.p, t0 * sx.nb0 + ch * 4 + seq * sx.nb2), at(out.p, ch * 4 + t0 * out.nb1 + seq * out.nb2)
            for i in range(0, whole if n_t > 0 else 0, LANES):
                conv_16(at(o, i * 4), out.nb1, at(x, i * 4), sx.nb0, at(scratch, i * 4), n_t)
            for t in range(n_t):
                for i in range(whole, n_ch):
                    total = ld_f32(at(x, t * sx.nb0), i) * ld_f32(scratch, i)
                    for k in range(1, c.ne0):
                        total += ld_f32(at(x, (t + k) * sx.nb0), i) * ld_f32(scratch, k * ABREAST + i)
                    st_f32(at(o, t * out.nb1), i, total)
            for t in range(n_t, t1 - t0):
                zero_bytes(at(o, t * out.nb1), n_ch * 4)
            for t in range(t0, t1):
                finish(extra, at(o, (t - t0) * out.nb1), ch, n_ch, t, seq, 0)


# SSM_SCAN


def _scan_16(b: Any, ir: Any, operands: Any, padded: bool, fetch: bool = False) -> None:
    """One token on 16 rows (head_dim) of the state, each `row` bytes: dst = decay src + xdt B, y = dst C. If `padded`, lanes from `n` on stay 0.
    `fetch`: ask for the 16 rows after these."""
    dst, src, row, n, b_t, c_t, xdt, decay, y = operands
    i64, zero = ir.IntType(64), float_constant(ir, 0.0)
    n_blocks, decays = b.sdiv(row, i64(LANES * 4)), splat(b, ir, decay)
    lanes, live = ir.Constant(ir.VectorType(i64, LANES), list(range(LANES))), splat(b, ir, n)
    at_once = LANES if wide_registers() else 4
    sums: list[Any] = []
    for first in range(0, LANES, at_once):
        def block(i: Any, acc: list[Any], first: int = first) -> list[Any]:
            offset = b.mul(i, i64(LANES * 4))
            b_i, c_i = load_floats(b, ir, b.gep(b_t, [offset])), load_floats(b, ir, b.gep(c_t, [offset]))
            used = b.icmp_signed("<", b.add(splat(b, ir, b.mul(i, i64(LANES))), lanes), live)
            for r in range(first, first + at_once):
                place = b.add(offset, b.mul(row, i64(r)))
                if fetch:
                    prefetch(b, ir, b.gep(src, [b.add(place, b.mul(row, i64(LANES)))]))
                x = splat(b, ir, b.load(b.gep(b.bitcast(xdt, ir.FloatType().as_pointer()), [i64(r)]), align=4))
                h = multiply_add(b, ir, b_i, x, b.fmul(load_floats(b, ir, b.gep(src, [place])), decays))
                h = b.select(used, h, zero) if padded else h  # an infinite x times the padding's 0 would be NaN
                store_floats(b, b.gep(dst, [place]), h)
                acc[r - first] = multiply_add(b, ir, h, c_i, acc[r - first])
            return acc
        sums += loop(b, ir, n_blocks, [zero] * at_once, block)
    store_floats(b, y, sums_of_lanes(b, ir, sums))


@intrinsic("void(ptr, ptr, i64, i64, ptr, ptr, ptr, f32, ptr)")
def scan_whole(b: Any, ir: Any, *operands: Any) -> None:
    """_scan_16 where d_state is a multiple of 16."""
    _scan_16(b, ir, operands, padded=False)


@intrinsic("void(ptr, ptr, i64, i64, ptr, ptr, ptr, f32, ptr)")
def scan_padded(b: Any, ir: Any, *operands: Any) -> None:
    """_scan_16 for any d_state."""
    _scan_16(b, ir, operands, padded=True)


@intrinsic("void(ptr, ptr, i64, i64, ptr, ptr, ptr, f32, ptr)")
def scan_once(b: Any, ir: Any, *operands: Any) -> None:
    """scan_whole for a lone token, whose state comes from memory: the hardware does not follow 16 rows at once."""
    _scan_16(b, ir, operands, padded=False, fetch=True)


scan_16_rows = scan_whole  # bound


def _padded(n: int) -> int:
    return -(-n // LANES) * LANES


def _scan_items(node: Node) -> int:
    return node.out.ne[1] * node.out.ne[3]


def _writes_pool(node: Node) -> bool:
    return node.outputs[1] is node.src[0]


def _together(node: Node) -> int:
    """Heads of a sequence that are taken one after the other before the next sequence's: memory is slow where a thread goes back and forth between rows."""
    d_state, head_dim, n_head, _ = node.outputs[1].ne
    return max(1, min(STRETCH // (4 * d_state * head_dim), n_head // 8)) if node.out.ne[2] < TOKENS else 1


def _scan_chunk(node: Node) -> int:
    d_state, head_dim, _, _ = node.outputs[1].ne
    if _writes_pool(node):
        return _together(node) * node.out.ne[3]  # a thread takes all sequences of a head: two may name one row
    return max(1, 16384 // (d_state * head_dim * node.out.ne[2]))


def _scan_scratch(node: Node) -> int:
    d_state, head_dim = _padded(node.outputs[1].ne[0]), _padded(node.outputs[1].ne[1])
    return 4 * (2 * TOKENS + 2 * TOKENS * head_dim + 2 * d_state + d_state * head_dim)


def _scan_binds(node: Node) -> dict[str, Any]:
    s, _, _, _, b, c, _ = node.src
    assert s is not None and b is not None and c is not None
    whole = s.ne[0] % LANES == 0 and s.ne[1] % LANES == 0 and s.nb[:2] == (4, 4 * s.ne[0])
    return {"POOL": _writes_pool(node), "HEADS": _together(node) if _writes_pool(node) else 1,
            "D_STATE": _padded(s.ne[0]), "IN_PLACE": whole and b.nb[0] == 4 and c.nb[0] == 4,
            "scan_16_rows": scan_padded if s.ne[0] % LANES else scan_once if node.out.ne[2] == 1 else scan_whole}


@helper
def gather_padded(dst: Any, src: Any, nb: Any, n: Any, padded: Any) -> Any:
    """n float32 with a stride, then zeros up to `padded`."""
    gather(dst, src, nb, n)
    zero_bytes(at(dst, n * 4), (padded - n) * 4)


@helper
def load_tokens(scratch: Any, dt: Any, dt_nb1: Any, rate: Any, x: Any, x_nb0: Any, x_nb2: Any, head_dim: Any, padded: Any, n: Any) -> Any:
    """Of n tokens of a head, at the pointers dt and x: softplus(dt), decays, and rows of x softplus(dt), padded with zeros."""
    for t in range(n):
        st_f32(scratch, t, ld_f32(at(dt, t * dt_nb1), 0))
    for t in range(n):
        d = softplus(ld_f32(scratch, t))
        st_f32(scratch, t, d)
        st_f32(scratch, TOKENS + t, exp(d * rate))
    for t in range(n):
        d, row = ld_f32(scratch, t), at(scratch, 4 * (2 * TOKENS + t * padded))
        gather_padded(row, at(x, t * x_nb2), x_nb0, head_dim, padded)
        for p in range(padded):
            st_f32(row, p, ld_f32(row, p) * d)


@helper
def dead_head(y: Any, head: Any, seq: Any) -> Any:
    """Zero the results of a head whose id is bad."""
    for t in range(y.ne2):
        zero_bytes(at(y.p, head * y.nb1 + t * y.nb2 + seq * y.nb3), y.ne0 * 4)


@helper
def comes_again(ids: Any, seq: Any, row: Any) -> Any:
    """True when a later sequence has the same row."""
    for i in range(seq + 1, ids.ne0):
        if ld_i32(at(ids.p, i * ids.nb0), 0) == row:
            return True
    return False


@kernel("SSM_SCAN", "cpu", pool=(1, 0, 6), items=_scan_items, chunk=_scan_chunk, bind=_scan_binds, scratch=_scan_scratch, status=True)
def ssm_scan_heads(y: Any, state: Any, s: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, ids: Any,
                   status: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """The state of an item stands in the output (the first token reads s), or padded in scratch unless IN_PLACE. If POOL, the output is s. x and y
    pass through scratch in blocks of tokens: their rows are far apart, and a lone store that misses the cache would hold
    up those of the state."""
    head_dim = (s.ne1 + LANES - 1) // LANES * LANES
    xdt, yt = at(scratch, 8 * TOKENS), at(scratch, 8 * TOKENS + 4 * TOKENS * head_dim)
    bt = at(yt, 4 * TOKENS * head_dim)
    ct, padded = at(bt, 4 * D_STATE), at(bt, 8 * D_STATE)
    for item in range(i0, i1):
        first = item // (HEADS * ids.ne0) * HEADS if POOL else 0
        n_heads, rest = min(HEADS, s.ne2 - first) if POOL else s.ne2, item - first * ids.ne0
        seq, head = rest // n_heads, first + rest % n_heads
        row = ld_i32(at(ids.p, seq * ids.nb0), 0)
        if row < 0 or row >= s.ne3:
            bad_index(status, row, s.ne3)
            dead_head(y, head, seq)
            if not POOL:
                zero_bytes(at(state.p, head * state.nb2 + seq * state.nb3), state.nb2)
            continue
        group, rate = head // (s.ne2 // b.ne1), ld_f32(at(a.p, head * a.nb1), 0)
        src, result = at(s.p, head * s.nb2 + row * s.nb3), at(state.p, head * state.nb2 + (row if POOL else seq) * state.nb3)
        lost = POOL and comes_again(ids, seq, row)  # the last one's state stays
        h = result if IN_PLACE and not lost else padded
        if not IN_PLACE:
            zero_bytes(h, 4 * head_dim * D_STATE)
            for p in range(s.ne1):
                gather_padded(at(h, p * D_STATE * 4), at(src, p * s.nb1), s.nb0, s.ne0, D_STATE)
            src = h
        for t0 in range(0, x.ne2, TOKENS):
            n = min(TOKENS, x.ne2 - t0)
            load_tokens(scratch, at(dt.p, head * dt.nb0 + t0 * dt.nb1 + seq * dt.nb2), dt.nb1, rate,
                        at(x.p, head * x.nb1 + t0 * x.nb2 + seq * x.nb3), x.nb0, x.nb2, x.ne0, head_dim, n)
            for t in range(n):
                b_t = at(b.p, group * b.nb1 + (t0 + t) * b.nb2 + seq * b.nb3)
                c_t = at(c.p, group * c.nb1 + (t0 + t) * c.nb2 + seq * c.nb3)
                if not IN_PLACE:
                    gather_padded(bt, b_t, b.nb0, s.ne0, D_STATE)
                    gather_padded(ct, c_t, c.nb0, s.ne0, D_STATE)
                    b_t, c_t = bt, ct
                for p in range(0, head_dim, LANES):
                    place = 4 * (t * head_dim + p)
                    scan_16_rows(at(h, p * D_STATE * 4), at(src, p * D_STATE * 4), D_STATE * 4, s.ne0, b_t, c_t, at(xdt, place),
                                 ld_f32(scratch, TOKENS + t), at(yt, place))
                src = h
            for t in range(n):
                copy_bytes(at(y.p, head * y.nb1 + (t0 + t) * y.nb2 + seq * y.nb3), at(yt, 4 * t * head_dim), y.ne0 * 4)
        if not IN_PLACE and not lost:
            for p in range(s.ne1):
                copy_bytes(at(result, p * state.nb1), at(h, p * D_STATE * 4), s.ne0 * 4)
