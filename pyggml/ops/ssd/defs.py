"""SSD_SCAN: the Mamba-2 recurrence by chunks of tokens as one op, with all that a layer does around it."""

from __future__ import annotations

import numpy as np

from pyggml.dtypes import F32, I32
from pyggml.errors import KernelError, ParamError
from pyggml.ops.ssm.defs import scan_cost
from pyggml.registry import Spec, is_whole, op, out, require, require_type
from pyggml.tensor import Node, Tensor

SSD_PRECISIONS = ("f32", "bf16")
LIMITS = {"f32": 1e-11, "bf16": 1.5e-5}  # NMSE; bf16 operands have 8 bits, products are summed in float32


@op("SSD_SCAN", inputs="s x dt A B C ids dt_bias D z cu_seqlens", outputs="y state", limit=LIMITS["f32"])
def ssd_scan(s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor, dt_bias: Tensor | None = None, D: Tensor | None = None,
             z: Tensor | None = None, cu_seqlens: Tensor | None = None, *, chunk: int | None = None, precision: str = "f32") -> tuple[Spec, Spec]:
    """The Mamba-2 recurrence of each head as matrix products over chunks of tokens: with d = softplus(dt_t + dt_bias),
    h_t = exp(d A) h_(t-1) + d B_t x_t^T and y_t = (C_t h_t + D x_t) silu(z_t). Gives y and the state after the last token.

    s: f32 [d_state, head_dim, n_head, n_rows], rows of states; sequence i starts from row ids[i] (i32 [n_seqs]).
    x: f32 [head_dim, n_head, n_tok, n_seqs]. dt: f32 [n_head, n_tok, n_seqs]; softplus(d) is log1p(exp(d)), and d itself above 20.
    A: f32 [1, n_head], negative. B, C: f32 [d_state, n_group, n_tok, n_seqs]; head h reads group h // (n_head / n_group).
    Optional: dt_bias f32 [n_head]; D f32 [1, n_head]; z f32, x's dims; cu_seqlens i32 [n_seqs + 1]: the sequences are then packed
    one after the other along n_tok (dim 3 of x, dt, B, C and z is 1), and sequence i has tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1:
    from 0, never falling, up to n_tok; one without tokens hands its state on.
    `chunk`: tokens per chunk at most (default: as suits the kernel). `precision`: what the products take, "f32" or, where the CPU is faster
    with it, "bf16"; the state, the decays and all sums are float32 or more in either.
    Out: y f32 [head_dim, n_head, n_tok, n_seqs], state f32 [d_state, head_dim, n_head, n_seqs]. s is not written. All inputs may be strided
    views. An id outside the rows of s, or cu_seqlens out of order, stops the run with KernelError.
    Source: Dao & Gu 2024 (Mamba-2), section 6; the arguments are those of SSM_SCAN and of vLLM's mamba_chunk_scan_combined.

    >>> import numpy as np, pyggml as pg
    >>> leaf = lambda v: pg.tensor(np.array(v, np.float32))
    >>> dt = leaf([[np.log(np.e - 1)]] * 3)  # softplus: 1
    >>> y, state = pg.ssd_scan(leaf([[[[4.0]]]]), leaf([[[[1.0]]] * 3]), dt, leaf([[-np.log(2)]]), leaf([[[[1.0]]] * 3]), leaf([[[[1.0]]] * 3]),
    ...                        pg.tensor(np.zeros(1, np.int32)), D=leaf([[10.0]]))
    >>> pg.compute((y, state), {}, backend="reference")[0].ravel().round(4)
    array([13.  , 12.5 , 12.25])
    """
    name = "SSD_SCAN"
    for arg, t in (("s", s), ("x", x), ("dt", dt), ("A", A), ("B", B), ("C", C), ("dt_bias", dt_bias), ("D", D), ("z", z)):
        if t is not None:
            require_type(name, arg, t, F32)
    require_type(name, "ids", ids, I32)
    require(precision in SSD_PRECISIONS, name, f"precision {precision!r}; legal: {', '.join(SSD_PRECISIONS)}", ParamError)
    require(chunk is None or (is_whole(chunk) and chunk >= 1), name, f"chunk {chunk!r}; legal: None or a whole number >= 1", ParamError)
    d_state, head_dim, n_head, _ = s.ne
    n_tok, n_rect = x.ne[2:]
    n_seqs, n_group = ids.ne[0], B.ne[1]
    require(x.ne[:2] == (head_dim, n_head), name,
            f"x has ne {list(x.ne)}; s has head_dim {head_dim}, n_head {n_head}: x must be [{head_dim}, {n_head}, n_tok, n_seqs]")
    require(dt.ne == (n_head, n_tok, n_rect, 1), name, f"dt has ne {list(dt.ne)}; it must be [{n_head}, {n_tok}, {n_rect}]: n_head, n_tok, n_seqs")
    require(A.ne == (1, n_head, 1, 1), name, f"A has ne {list(A.ne)}; it must be [1, {n_head}], one decay per head")
    require(n_head % n_group == 0, name, f"B has ne {list(B.ne)}: n_group {n_group} must divide n_head {n_head}")
    for arg, t in (("B", B), ("C", C)):
        require(t.ne == (d_state, n_group, n_tok, n_rect), name,
                f"{arg} has ne {list(t.ne)}; it must be [{d_state}, {n_group}, {n_tok}, {n_rect}]: d_state, n_group, n_tok, n_seqs")
    require(ids.ne == (n_seqs, 1, 1, 1), name, f"ids has ne {list(ids.ne)}; it must have one dim, one row of s per sequence")
    if dt_bias is not None:
        require(dt_bias.ne == (n_head, 1, 1, 1), name, f"dt_bias has ne {list(dt_bias.ne)}; it must be [{n_head}], one per head")
    if D is not None:
        require(D.ne == (1, n_head, 1, 1), name, f"D has ne {list(D.ne)}; it must be [1, {n_head}], one per head")
    if z is not None:
        require(z.ne == x.ne, name, f"z has ne {list(z.ne)}; it must have x's, {list(x.ne)}")
    if cu_seqlens is None:
        require(n_rect == n_seqs, name, f"ids has ne {list(ids.ne)}; it must be [{n_rect}], one row of s per sequence")
    else:
        require_type(name, "cu_seqlens", cu_seqlens, I32)
        require(cu_seqlens.ne == (n_seqs + 1, 1, 1, 1), name, f"cu_seqlens has ne {list(cu_seqlens.ne)}; it must be [{n_seqs + 1}], one more than ids")
        require(n_rect == 1, name, f"x has ne {list(x.ne)}; with cu_seqlens the tokens of all sequences follow each other in dim 2, and dim 3 must be 1")
    return out(F32, head_dim, n_head, n_tok, n_rect), out(F32, d_state, head_dim, n_head, n_seqs)


@ssd_scan.reference
def _ssd_scan(s: np.ndarray, x: np.ndarray, dt: np.ndarray, A: np.ndarray, B: np.ndarray, C: np.ndarray, ids: np.ndarray,
              dt_bias: np.ndarray | None, D: np.ndarray | None, z: np.ndarray | None, cu_seqlens: np.ndarray | None,
              *, chunk: int | None, precision: str) -> tuple[np.ndarray, np.ndarray]:
    n_tok, n_head = x.shape[1:3]
    rows = ids.reshape(-1)
    bad = rows[(rows < 0) | (rows >= len(s))]
    if bad.size:
        raise KernelError(f"SSD_SCAN: id {bad[0]}; legal: 0 to {len(s) - 1}, the rows of s")
    raw = dt[0] if dt_bias is None else dt[0] + dt_bias.reshape(-1)
    delta = np.where(raw > 20, raw, np.log1p(np.exp(np.minimum(raw, 20))))  # [n_seqs, n_tok, n_head]
    decay = np.exp(delta * A[0, 0, :, 0])
    per_head = n_head // B.shape[2]
    state, y = s[rows], np.zeros_like(x)
    for h, (i, t0, t1) in zip(state, _spans(len(rows), n_tok, cu_seqlens), strict=True):
        for t in range(t0, t1):
            b, c = np.repeat(B[i, t], per_head, axis=0), np.repeat(C[i, t], per_head, axis=0)  # [n_head, d_state]
            h *= decay[i, t, :, None, None]
            h += (delta[i, t, :, None] * x[i, t])[..., None] * b[:, None, :]
            y[i, t] = (h @ c[..., None])[..., 0]
    if D is not None:
        y = y + D.reshape(-1, 1) * x
    if z is not None:
        with np.errstate(over="ignore"):
            y = y * (z / (1.0 + np.exp(-z)))
    return y, state


def _spans(n_seqs: int, n_tok: int, cu_seqlens: np.ndarray | None) -> list[tuple[int, int, int]]:
    """Of each sequence: its index in dim 3, its first token and the one after its last."""
    if cu_seqlens is None:
        return [(i, 0, n_tok) for i in range(n_seqs)]
    cu = cu_seqlens.reshape(-1).tolist()
    if cu[0] != 0 or cu[-1] != n_tok or sorted(cu) != cu:
        raise KernelError(f"SSD_SCAN: cu_seqlens {cu}; legal: from 0, never falling, up to n_tok {n_tok}")
    return [(0, t0, t1) for t0, t1 in zip(cu[:-1], cu[1:], strict=True)]


@ssd_scan.limits
def _ssd_scan_limit(node: Node) -> float:
    return LIMITS[node.params["precision"]]


ssd_scan.cost(scan_cost)
