"""The state-space product of Mamba2 as chunked matrix products (SSD), in primitive ops.

Per head: h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T, y_t = C_t h_t + D x_t. With chunks of Q tokens, Nc of them, S sequences and
W = Nc S, all steps are batched over (head, chunk, sequence), so the graph has as many nodes for any number of tokens:

  cs = cumsum(dt A) inside each chunk, in float64;  L[j, i] = exp(cs_i - cs_j) for j <= i
  within a chunk    Y_intra = (L * C B^T) (dt x)                    [P, Q, H, W]
  a chunk's state   S_c = (B exp(cs_last - cs))^T (dt x)            [N, P, H, W]
  between chunks    S_in = (lower-triangular decay over chunks) [initial state, S_0, S_1, ...]; its last entry is the new state
  y = Y_intra + exp(cs) (C S_in) + D x

Dims in the comments are ne: P head_dim, H heads, N d_state, G groups. Head h uses group h // (H/G), which is MUL_MAT's own
broadcast. Exponents are masked before exp: above the diagonal they would overflow. Source: Dao & Gu 2024, section 6.

Names of intermediate tensors are those of llama.cpp's draft of SSD (PR 16982) where it has the same tensor for one chunk (CB there has been
repeated for every head); docs/porting.md shows both.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pyggml.errors import ParamError
from pyggml.ops.layout.defs import cont, pad, permute, reshape, view
from pyggml.ops.matmul.defs import mul_mat
from pyggml.ops.pointwise.defs import add, cast, exp, mul, sub
from pyggml.ops.reduce.defs import cumsum
from pyggml.ops.triangular.defs import tri
from pyggml.tensor import Tensor

CHUNKS = (64, 32, 16)  # work per token is least near Q = 2 N P / (N + P), 85 for the usual N 128, P 64
LONG, LONG_CHUNK = 2048, 128  # from so many tokens on: the product between chunks grows with the square of their number (benches/crossover.py: 4 to 9 %)
PLAN_BYTES = 256 << 20  # limit on one [Q, Q, n_head, chunks] float32 tensor, which decides the default chunk; in regions it takes no memory of the plan


# SSD_SCAN is faster than SSM_SCAN from this many tokens per sequence on, by its precision, where a head's state is large enough to pay
# for the products: `benches/ssd_scan.py --tokens 8,16,24,32,64`, one thread of two kinds of x86 CPU with AVX-512.
FUSED_FROM = {"f32": 32, "bf16": 16}
FUSED_STATE = 64


def auto_form(backend: str, n_tokens: int, d_state: int, precision: str = "f32") -> str:
    """The form that is fastest for a ubatch of n_tokens per sequence; backends other than cpu have the recurrence alone."""
    return "ssd-fused" if backend == "cpu" and d_state >= FUSED_STATE and n_tokens >= FUSED_FROM[precision] else "scan"


def default_chunk(n_tokens: int, n_seqs: int, n_head: int) -> int:
    """The largest chunk of CHUNKS, before them LONG_CHUNK for LONG sequences, for which the Q x Q decay matrices of all heads and chunks stay
    below PLAN_BYTES."""
    for q in (LONG_CHUNK, *CHUNKS) if n_tokens >= LONG else CHUNKS:
        if 4 * q * n_head * n_seqs * -(-n_tokens // q) * q <= PLAN_BYTES:
            return min(q, n_tokens)
    return min(CHUNKS[-1], n_tokens)


def check_chunk(chunk: int | str | None) -> int | str | None:
    """`chunk` itself when it is one."""
    if chunk is not None and chunk != "none" and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise ParamError(f"chunk {chunk!r}; legal: a whole number >= 1, None (chosen by the plan-memory limit) or \"none\" (one chunk)")
    return chunk


def chunk_size(chunk: int | str | None, n_tokens: int, n_seqs: int, n_head: int) -> int:
    """Tokens per chunk: the given number, the default for None, all tokens for "none"; never more than there are."""
    chunk = check_chunk(chunk)
    if chunk is None:
        return default_chunk(n_tokens, n_seqs, n_head)
    return n_tokens if isinstance(chunk, str) else min(chunk, n_tokens)


def split_xbc(act: Tensor, head_dim: int, n_head: int, d_state: int, n_group: int, n: int, w: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [P, H, n, w], B and C [N, G, n, w] as views of the conv output [P H + 2 N G, n w tokens]; a token is a row of it."""
    es, row = act.dtype.nbytes, act.nb[1]
    d_inner, bc = head_dim * n_head, n_group * d_state
    x = view(act, [head_dim, n_head, n, w], [head_dim * es, row, n * row])
    b = view(act, [d_state, n_group, n, w], [d_state * es, row, n * row], d_inner * es)
    c = view(act, [d_state, n_group, n, w], [d_state * es, row, n * row], (d_inner + bc) * es)
    return x, b, c


def ssd_graph(act: Tensor, dt: Tensor, a: Tensor, d: Tensor, state: Tensor, n_group: int, q: int, il: int = 0, precision: str = "f32") -> tuple[Tensor, Tensor]:
    """y [P, H, Nc Q, S] and the new state [N, P, H, S], with gaps only between sequences.

    act: [P H + 2 N G, Nc Q, S] (x, B, C after conv and silu); dt: [H, Nc Q, S] after bias and softplus, 0 in padded steps;
    a, d: [1, H]; state: [N, P, H, S]; q: tokens per chunk. `precision`: of the products that come once per head; the one between chunks
    is float32 in any, as it repeats the rounding of states.
    """
    n_state, p, h, s = state.ne
    g, nc = n_group, act.ne[1] // q
    w, np_ = nc * s, n_state * p
    of_heads = None if precision == "f32" else precision  # as MUL_MAT has it

    def name(t: Tensor, text: str) -> Tensor:
        t.name = f"{text}-{il}"
        return t

    x, b, c = split_xbc(act, p, h, n_state, g, q, w)
    b, c = (cont(permute(t, 0, 2, 1, 3)) for t in (b, c))                        # [N, Q, G, W]; every head reads them: without other rows between
    dt = reshape(dt, [h, q, w])
    dta = name(mul(dt, reshape(a, [h])), "dtA")                                  # [H, Q, W]
    cs = name(cumsum(dta, dim=1, type="f64"), "dtA_cumsum")
    dtx = name(mul(x, reshape(dt, [1, h, q, w])), "dtX")                         # [P, H, Q, W]

    decay = name(_segments(name, cs, "segsum_masked"), "decay_masked")           # L: [Qj, Qi, H, W]
    cb = name(mul_mat(b, c), "CB")                                               # [Qj, Qi, G, W]
    if g == 1:
        m = mul(decay, cb)
    else:  # head h uses group h // (H/G), where MUL repeats cb's in turn
        m = reshape(mul(reshape(decay, [q * q, h // g, g, w]), reshape(cb, [q * q, 1, g, w])), [q, q, h, w])
    m = name(m, "surrogate_attention_matrix")
    y_intra = name(mul_mat(permute(dtx, 1, 2, 0, 3), m, precision=of_heads), "y_chunk")  # [P, Q, H, W]

    last = view(cs, [h, 1, w], [cs.nb[1], cs.nb[2]], (q - 1) * cs.nb[1])
    to_end = name(exp(sub(last, cs, type="f32")), "decay_last")                  # [H, Q, W]
    weighted = name(mul(dtx, reshape(to_end, [1, h, q, w])), "dtxdecay")
    own = mul_mat(permute(b, 1, 0, 2, 3), permute(weighted, 1, 2, 0, 3), precision=of_heads)  # S_c: [N, P, H, W]
    own = name(own, "next_state")

    total = cast(view(cs, [h, nc, s], [cs.nb[2], nc * cs.nb[2]], (q - 1) * cs.nb[1]), "f32")
    before = cumsum(pad(total, 0, 1), dim=1, exclusive=True, type="f64")         # log decay before each chunk: [H, Nc+1, S]
    before = name(before, "chunk_cumsum")
    carry = name(_segments(name, before, "chunk_segsum_masked"), "chunk_decay_masked")  # [m, c, H, S], row 0 for the initial state
    of_own = view(carry, [nc, nc + 1, h, s], list(carry.nb[1:]), carry.nb[0])
    of_state = view(carry, [1, nc + 1, h, s], list(carry.nb[1:]))
    states = permute(reshape(own, [np_, h, nc, s]), 1, 2, 0, 3)                  # [m, N P, H, S]
    by_chunk = permute(mul_mat(states, of_own), 0, 2, 1, 3)                      # [N P, H, c, S]
    of_state = permute(of_state, 0, 2, 1, 3)                                     # [1, H, c, S]

    def entering(first: int, n: int) -> Tensor:
        """The states before n chunks: what is left of the chunks before each, plus what is left of the initial state."""
        initial = view(state, [np_, h, n, s], [state.nb[2], 0, state.nb[3]])     # the same for every chunk
        left, factor = (view(t, [t.ne[0], h, n, s], list(t.nb[1:]), first * t.nb[2]) for t in (by_chunk, of_state))
        return add(left, mul(initial, factor))

    s_in, new_state = name(entering(0, nc), "next_state_updated"), entering(nc, 1)

    y_inter = name(mul_mat(reshape(s_in, [n_state, p, h, w]), c, precision=of_heads), "y_prev")  # [P, Q, H, W]
    from_start = name(exp(cast(cs, "f32")), "exp_dtA_cumsum")                    # [H, Q, W]
    y_inter = mul(permute(y_inter, 0, 2, 1, 3), reshape(from_start, [1, h, q, w]))
    y = add(name(y_inter, "y_prev_mul"), permute(y_intra, 0, 2, 1, 3))
    y = add(name(y, "y_chunk_updated"), mul(x, d))                               # [P, H, Q, W]
    return reshape(y, [p, h, nc * q, s]), reshape(new_state, [n_state, p, h, s])


def _segments(name: Callable[[Tensor, str], Tensor], cs: Tensor, text: str) -> Tensor:
    """exp(cs_i - cs_j) for j <= i, else 0, from running sums [H, n, W] in float64: [j, i, H, W]."""
    h, n, w = cs.ne[0], cs.ne[1], cs.ne[2]
    line = cont(permute(cs, 1, 0, 2, 3))                                         # [n, H, W]: rows that vectors read
    seg = sub(reshape(line, [1, n, h, w]), reshape(line, [n, 1, h, w]), type="f32")
    return exp(name(tri(seg, "lower_diag", fill=-math.inf), text))
