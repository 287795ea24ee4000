"""State-space ops: SSM_CONV, the causal convolution before the scan, and SSM_SCAN, the Mamba-2 recurrence."""

from __future__ import annotations

import numpy as np

from pyggml.dtypes import BF16, F16, F32, I32
from pyggml.errors import KernelError, ParamError
from pyggml.registry import Cost, Spec, default_bytes, is_whole, op, out, require, require_type
from pyggml.tensor import Node, Tensor


@op("SSM_CONV", inputs="sx c", limit=1e-13)
def ssm_conv(sx: Tensor, c: Tensor, *, n_t: int | None = None) -> Spec:
    """Causal depthwise convolution over time: out[i, t, s] = sum over k of sx[t + k, i, s] c[k, i].

    sx: f32 [d_conv - 1 + T, d_inner, n_seqs], the last d_conv - 1 inputs and the T new ones of each channel, any strides
    (time or channels innermost). c: f32, f16 or bf16 [d_conv, d_inner]. Out: f32 [d_inner, T, n_seqs]; with `n_t` (at least T) it
    has n_t tokens, those beyond T zero. Source: ggml_ssm_conv.

    >>> import numpy as np, pyggml as pg
    >>> sx, c = pg.tensor(np.array([[0, 0, 1, 2, 3]], np.float32)), pg.tensor(np.array([[1, 10, 100]], np.float32))
    >>> pg.compute(pg.ssm_conv(sx, c, n_t=4), {}, backend="reference")
    array([[100.],
           [210.],
           [321.],
           [  0.]])
    """
    require_type("SSM_CONV", "sx", sx, F32)
    require_type("SSM_CONV", "c", c, F32, F16, BF16)
    window, d_inner, n_seqs, _ = sx.ne
    d_conv = c.ne[0]
    require(sx.ne[3] == 1, "SSM_CONV", f"sx has ne {list(sx.ne)}; it must have 3 dims: d_conv - 1 + T, d_inner, n_seqs")
    require(c.ne == (d_conv, d_inner, 1, 1), "SSM_CONV", f"c has ne {list(c.ne)}; it must be [d_conv, {d_inner}], sx's channels")
    n_tok = window - d_conv + 1
    require(n_tok >= 1, "SSM_CONV", f"sx has ne {list(sx.ne)}; dim 0 must hold at least one window of d_conv {d_conv}")
    require(n_t is None or (is_whole(n_t) and n_t >= n_tok), "SSM_CONV",
            f"n_t {n_t!r}; legal: None or at least the {n_tok} tokens of sx", ParamError)
    return out(F32, d_inner, n_tok if n_t is None else n_t, n_seqs)


@ssm_conv.reference
def _ssm_conv(sx: np.ndarray, c: np.ndarray, *, n_t: int | None) -> np.ndarray:
    d_conv = c.shape[-1]
    windows = np.lib.stride_tricks.sliding_window_view(sx[0], d_conv, axis=-1)  # [n_seqs, d_inner, T, d_conv]
    y = np.einsum("sitk,ik->sti", windows, c[0, 0])
    return np.pad(y, ((0, 0), (0, (n_t or y.shape[1]) - y.shape[1]), (0, 0)))


@ssm_conv.cost
def _ssm_conv_cost(node: Node) -> Cost:
    sx, c = node.src
    assert sx is not None and c is not None
    return Cost(2.0 * c.ne[0] * (sx.ne[0] - c.ne[0] + 1) * sx.ne[1] * sx.ne[2], default_bytes(node))


@op("SSM_SCAN", inputs="s x dt A B C ids", outputs="y state", limit=1e-12)
def ssm_scan(s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor) -> tuple[Spec, Spec]:
    """The Mamba-2 recurrence of each head, token by token: with d = softplus(dt_t),
    h_t = exp(d A) h_(t-1) + d B_t x_t^T and y_t = C_t h_t. Gives y and the state after the last token.

    s: f32 [d_state, head_dim, n_head, n_rows], rows of states; sequence i starts from row ids[i] (i32 [n_seqs]).
    x: f32 [head_dim, n_head, n_tok, n_seqs]. dt: f32 [n_head, n_tok, n_seqs], bias added, before softplus; softplus(d) is
    log1p(exp(d)), and d itself above 20; nothing is clamped. A: f32 [1, n_head], negative.
    B, C: f32 [d_state, n_group, n_tok, n_seqs]; head h reads group h // (n_head / n_group).
    Out: y f32 [head_dim, n_head, n_tok, n_seqs], state f32 [d_state, head_dim, n_head, n_seqs]. s is not written.
    All inputs may be strided views. An id outside the rows of s stops the run with KernelError.
    Source: ggml_ssm_scan (its scalar decay per head; Mamba-1's A per state entry is refused).

    >>> import numpy as np, pyggml as pg
    >>> leaf = lambda v: pg.tensor(np.array(v, np.float32))
    >>> dt = leaf([[np.log(np.e - 1)] * 4])  # softplus: 1
    >>> y, state = pg.ssm_scan(leaf(np.zeros((1, 4, 1, 1))), leaf(np.ones((1, 1, 4, 1))), dt, leaf([[-1.0]] * 4), leaf([[[1.0], [10.0]]]),
    ...                        leaf([[[1.0], [1.0]]]), pg.tensor(np.zeros(1, np.int32)))
    >>> pg.compute(y, {}, backend="reference").ravel().round(6)
    array([ 1.,  1., 10., 10.])
    """
    for name, t in (("s", s), ("x", x), ("dt", dt), ("A", A), ("B", B), ("C", C)):
        require_type("SSM_SCAN", name, t, F32)
    require_type("SSM_SCAN", "ids", ids, I32)
    d_state, head_dim, n_head, _ = s.ne
    n_tok, n_seqs = x.ne[2:]
    n_group = B.ne[1]
    require(x.ne[:2] == (head_dim, n_head), "SSM_SCAN",
            f"x has ne {list(x.ne)}; s has head_dim {head_dim}, n_head {n_head}: x must be [{head_dim}, {n_head}, n_tok, n_seqs]")
    require(dt.ne == (n_head, n_tok, n_seqs, 1), "SSM_SCAN",
            f"dt has ne {list(dt.ne)}; it must be [{n_head}, {n_tok}, {n_seqs}]: n_head, n_tok, n_seqs")
    require(A.ne[0] == 1 or A.ne != (d_state, n_head, 1, 1), "SSM_SCAN",
            f"A has ne {list(A.ne)}, a decay per state entry (Mamba-1); legal: [1, {n_head}], one per head")
    require(A.ne == (1, n_head, 1, 1), "SSM_SCAN", f"A has ne {list(A.ne)}; it must be [1, {n_head}], one decay per head")
    require(n_head % n_group == 0, "SSM_SCAN", f"B has ne {list(B.ne)}: n_group {n_group} must divide n_head {n_head}")
    for name, t in (("B", B), ("C", C)):
        require(t.ne == (d_state, n_group, n_tok, n_seqs), "SSM_SCAN",
                f"{name} has ne {list(t.ne)}; it must be [{d_state}, {n_group}, {n_tok}, {n_seqs}]: d_state, n_group, n_tok, n_seqs")
    require(ids.ne == (n_seqs, 1, 1, 1), "SSM_SCAN", f"ids has ne {list(ids.ne)}; it must be [{n_seqs}], one row of s per sequence")
    return out(F32, head_dim, n_head, n_tok, n_seqs), out(F32, d_state, head_dim, n_head, n_seqs)


@ssm_scan.reference
def _ssm_scan(s: np.ndarray, x: np.ndarray, dt: np.ndarray, A: np.ndarray, B: np.ndarray, C: np.ndarray,
              ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    n_tok, n_head = x.shape[1:3]
    rows = ids.reshape(-1)
    bad = rows[(rows < 0) | (rows >= len(s))]
    if bad.size:
        raise KernelError(f"SSM_SCAN: id {bad[0]}; legal: 0 to {len(s) - 1}, the rows of s")
    delta = np.where(dt[0] > 20, dt[0], np.log1p(np.exp(np.minimum(dt[0], 20))))  # [n_seqs, n_tok, n_head]
    decay = np.exp(delta * A[0, 0, :, 0])
    per_head = n_head // B.shape[2]
    B, C = np.repeat(B, per_head, axis=2), np.repeat(C, per_head, axis=2)  # [n_seqs, n_tok, n_head, d_state]
    h, y = s[rows], np.empty_like(x)
    for t in range(n_tok):
        h = decay[:, t, :, None, None] * h + (delta[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        y[:, t] = (h @ C[:, t, :, :, None])[..., 0]
    return y, h


@ssm_scan.cost
def scan_cost(node: Node) -> Cost:
    """Work of the recurrence on the state of every token, whatever computes it."""
    s, x = node.src[:2]
    assert s is not None and x is not None
    state = float(node.outputs[1].n_elements)
    moved = default_bytes(node) - 4.0 * (s.n_elements - min(state, s.n_elements))  # of s, only the rows that ids name are read
    return Cost(5.0 * s.ne[0] * x.n_elements, moved)
