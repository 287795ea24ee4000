"""Attention's own ops, and the choice of the largest: FLASH_ATTN_EXT, SOFT_MAX, ROPE, ARGSORT, TOP_K."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pyggml.dtypes import BF16, F16, F32, I32, Q4_0, Q8_0
from pyggml.errors import ParamError
from pyggml.registry import Cost, Spec, default_bytes, is_number, is_whole, like, op, out, require, require_type
from pyggml.tensor import Node, Tensor


@op("SOFT_MAX", inputs="x mask", limit=2e-13)
def soft_max(x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Spec:
    """softmax(x * scale + mask) over dim 0.

    x: f32 [n_kv, n, c2, c3]; mask: f32 or f16 [n_kv, m >= n, b2, b3], where b2 divides c2 and b3 divides c3, repeated over
    them. Where the mask is -inf the result is 0, whatever x holds there. A row that is -inf throughout gives zeros (ggml gives
    NaN); any other NaN in x makes its row NaN. Source: ggml_soft_max_ext, without its ALiBi slopes.

    >>> import numpy as np, pyggml as pg
    >>> x = pg.tensor(np.zeros((1, 2), np.float32))
    >>> pg.compute(pg.soft_max(x, pg.tensor(np.array([[0.0, -np.inf]], np.float32))), {}, backend="reference")
    array([1., 0.])
    """
    require_type("SOFT_MAX", "x", x, F32)
    require(_is_finite(scale), "SOFT_MAX", f"scale is {scale!r}; legal: a finite number", ParamError)
    if mask is not None:
        require_type("SOFT_MAX", "mask", mask, F32, F16)
        fits = mask.ne[0] == x.ne[0] and mask.ne[1] >= x.ne[1] and x.ne[2] % mask.ne[2] == 0 and x.ne[3] % mask.ne[3] == 0
        require(fits, "SOFT_MAX", f"mask has ne {list(mask.ne)}; legal for x of ne {list(x.ne)}: [{x.ne[0]}, {x.ne[1]} or more, a divisor of "
                f"{x.ne[2]}, a divisor of {x.ne[3]}]")
    return like(x)


@soft_max.reference
def _soft_max(x: np.ndarray, mask: np.ndarray | None, *, scale: float) -> np.ndarray:
    v = x * scale
    if mask is not None:
        m = mask[:, :, : x.shape[2]]
        m = np.tile(m, (x.shape[0] // m.shape[0], x.shape[1] // m.shape[1], 1, 1))
        v = np.where(m == -np.inf, m, v + m)
    top = v.max(axis=-1, keepdims=True)
    e = np.exp(v - np.where(top == -np.inf, 0.0, top))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total == 0, 1.0, total)


soft_max.slices(lambda node: (1, 2, 3))


@soft_max.cost
def _soft_max_cost(node: Node) -> Cost:
    return Cost(6 * node.out.n_elements, default_bytes(node))  # scale and mask, max, difference, exp, sum, product


KV_TYPES = (F32, F16, BF16, Q8_0, Q4_0)


@op("FLASH_ATTN_EXT", inputs="q k v mask", limit=1e-12)
def flash_attn_ext(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float = 1.0, max_bias: float = 0.0,
                   logit_softcap: float = 0.0) -> Spec:
    """Attention in one op: softmax(k q scale + slope mask) over n_kv, times v, without the scores of all cells in memory.

    q: f32 [d_k, n_tok, n_head, n_seqs]. k: [d_k, n_kv, n_head_kv, n_seqs], v: [d_v, n_kv, n_head_kv, n_seqs], each f32, f16, bf16,
    q8_0 or q4_0; query head h reads head h // (n_head / n_head_kv). mask: f32 or f16 [n_kv, n_tok or more, b2, b3], where b2 divides
    n_head and b3 divides n_seqs. All may be strided views, such as of a KV cache. Out: f32 [d_v, n_head, n_tok, n_seqs].

    A cell whose mask is -inf is left out, whatever k and v hold there; a token that sees no cell gets zeros. max_bias above 0 (ALiBi)
    gives each head a slope by which its mask is multiplied, else it is 1. logit_softcap c other than 0 makes each score s c tanh(s / c)
    before the mask is added. Sums and softmax are float32. Source: ggml_flash_attn_ext; Dao et al. 2022.

    >>> import numpy as np, pyggml as pg
    >>> x = pg.tensor(np.array([[[1.0, 0.0], [0.0, 1.0]]], np.float32))
    >>> causal = pg.tensor(np.array([[0.0, -np.inf], [0.0, 0.0]], np.float32))
    >>> pg.compute(pg.flash_attn_ext(x, x, x, causal), {}, backend="reference").round(3)
    array([[[1.   , 0.   ]],
           [[0.269, 0.731]]])
    """
    name = "FLASH_ATTN_EXT"
    require_type(name, "q", q, F32)
    require_type(name, "k", k, *KV_TYPES)
    require_type(name, "v", v, *KV_TYPES)
    (d_k, n_tok, n_head, n_seqs), (n_kv, n_head_kv) = q.ne, k.ne[1:3]
    require(k.ne[0] == d_k and k.ne[3] == n_seqs, name, f"k has ne {list(k.ne)}; for q of ne {list(q.ne)} it must be [{d_k}, n_kv, n_head_kv, {n_seqs}]")
    require(n_head % n_head_kv == 0, name, f"k has ne {list(k.ne)}: n_head_kv {n_head_kv} must divide n_head {n_head}")
    require(v.ne[1:] == k.ne[1:], name, f"v has ne {list(v.ne)}; for k of ne {list(k.ne)} it must be [d_v, {n_kv}, {n_head_kv}, {n_seqs}]")
    if mask is not None:
        require_type(name, "mask", mask, F32, F16)
        fits = mask.ne[0] == n_kv and mask.ne[1] >= n_tok and n_head % mask.ne[2] == 0 and n_seqs % mask.ne[3] == 0
        require(fits, name, f"mask has ne {list(mask.ne)}; legal: [{n_kv}, {n_tok} or more, a divisor of {n_head}, a divisor of {n_seqs}]")
    for option, value in (("scale", scale), ("max_bias", max_bias), ("logit_softcap", logit_softcap)):
        require(_is_finite(value), name, f"{option} is {value!r}; legal: a finite number", ParamError)
    require(max_bias == 0 or (max_bias > 0 and mask is not None), name, f"max_bias is {max_bias!r}; legal: 0, and numbers above 0 with a mask", ParamError)
    return out(F32, v.ne[0], n_head, n_tok, n_seqs)


def alibi(n_head: int, max_bias: float) -> tuple[int, float, float]:
    """ALiBi's slopes (Press et al. 2022) as ggml has them for any number of heads: n, a, b, where head h < n has the slope a^(h + 1), and the
    others have b^(2 (h - n) + 1). Both are 1 without a max_bias."""
    n = 1 << (n_head.bit_length() - 1)
    return n, 2.0 ** (-max_bias / n), 2.0 ** (-max_bias / 2 / n)


@flash_attn_ext.reference
def _flash_attn_ext(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None, *, scale: float, max_bias: float,
                    logit_softcap: float) -> np.ndarray:
    n_seqs, n_head, n_tok, _ = q.shape
    k, v = (np.repeat(t, n_head // t.shape[1], axis=1) for t in (k, v))
    s = q @ np.swapaxes(k, -1, -2) * scale  # [n_seqs, n_head, n_tok, n_kv]
    if logit_softcap != 0:
        s = logit_softcap * np.tanh(s / logit_softcap)
    m = np.zeros((1, 1, 1, 1))
    if mask is not None:
        m = np.tile(mask[:, :, :n_tok], (n_seqs // mask.shape[0], n_head // mask.shape[1], 1, 1))
        n, a, b = alibi(n_head, max_bias)
        slopes = np.array([a ** (h + 1) if h < n else b ** (2 * (h - n) + 1) for h in range(n_head)])
        s = np.where(m == -np.inf, m, s + slopes[:, None, None] * m)
    top = s.max(axis=-1, keepdims=True)
    e = np.exp(s - np.where(top == -np.inf, 0.0, top))
    total = e.sum(axis=-1, keepdims=True)
    p = e / np.where(total == 0, 1.0, total)
    if np.isfinite(v).all():
        y = p @ v
    else:  # of cells that are left out nothing may be multiplied
        y = np.where((m == -np.inf)[..., None], 0.0, p[..., None] * v[:, :, None]).sum(axis=-2)
    return y.transpose(0, 2, 1, 3)


@flash_attn_ext.cost
def _flash_attn_ext_cost(node: Node) -> Cost:
    q, k, v = node.src[:3]
    assert q is not None and k is not None and v is not None
    return Cost(2.0 * q.n_rows * k.ne[1] * (k.ne[0] + v.ne[0]), default_bytes(node))


@op("ROPE", inputs="x pos", limit=1e-13)
def rope(x: Tensor, pos: Tensor, *, n_dims: int, mode: str = "norm", freq_base: float = 10000.0, freq_scale: float = 1.0) -> Spec:
    """Rotate pairs among the first n_dims elements of each head by pos * freq_scale * freq_base^(-2i / n_dims) for pair i; the
    rest is copied. mode "norm" pairs neighbours (2i, 2i + 1), "neox" pairs (i, i + n_dims/2).

    x: f32 [head_dim, n_head, n_tokens, n_seqs]; pos: i32, contiguous, n_tokens positions for all sequences or
    n_tokens * n_seqs. Angles are computed in float64. Source: ggml_rope_ext without its scaling to longer contexts.

    >>> import numpy as np, pyggml as pg
    >>> x = pg.tensor(np.ones((1, 1, 4), np.float32))
    >>> pg.compute(pg.rope(x, pg.tensor(np.zeros(1, np.int32)), n_dims=4), {}, backend="reference")
    array([1., 1., 1., 1.])
    """
    require_type("ROPE", "x", x, F32)
    require_type("ROPE", "pos", pos, I32)
    n_tokens, n_seqs = x.ne[2], x.ne[3]
    require(pos.n_elements in (n_tokens, n_tokens * n_seqs) and pos.is_contiguous, "ROPE",
            f"pos has ne {list(pos.ne)} and nb {list(pos.nb)}; legal: {n_tokens} or {n_tokens * n_seqs} contiguous elements")
    require(is_whole(n_dims) and 0 < n_dims <= x.ne[0] and n_dims % 2 == 0, "ROPE",
            f"n_dims is {n_dims!r}; legal: even numbers from 2 to x's ne[0], {x.ne[0]}", ParamError)
    require(mode in ("norm", "neox"), "ROPE", f"mode is {mode!r}; legal: 'norm', 'neox'", ParamError)
    require(_is_finite(freq_base) and freq_base > 0, "ROPE", f"freq_base is {freq_base!r}; legal: numbers above 0", ParamError)
    require(_is_finite(freq_scale), "ROPE", f"freq_scale is {freq_scale!r}; legal: finite numbers", ParamError)
    return like(x)


@rope.reference
def _rope(x: np.ndarray, pos: np.ndarray, *, n_dims: int, mode: str, freq_base: float, freq_scale: float) -> np.ndarray:
    half = n_dims // 2
    angle = pos.reshape(-1, x.shape[1], 1, 1) * freq_scale * freq_base ** (-2.0 * np.arange(half) / n_dims)
    first, second = (slice(0, n_dims, 2), slice(1, n_dims, 2)) if mode == "norm" else (slice(0, half), slice(half, n_dims))
    y = np.array(x)
    y[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
    y[..., second] = x[..., first] * np.sin(angle) + x[..., second] * np.cos(angle)
    return y


@rope.cost
def _rope_cost(node: Node) -> Cost:
    return Cost(3 * node.params["n_dims"] * node.out.n_rows, default_bytes(node))


@op("ARGSORT", inputs="x")
def argsort(x: Tensor, order: str = "asc") -> Spec:
    """i32 positions that sort each row of x: order "asc" or "desc"; equal values in order of position, NaN last. x: f32.

    Source: ggml_argsort.

    >>> import numpy as np, pyggml as pg
    >>> pg.compute(pg.argsort(pg.tensor(np.array([3., 1., 3.], np.float32)), "desc"), {}, backend="reference")
    array([0, 2, 1])
    """
    require_type("ARGSORT", "x", x, F32)
    require(order in ("asc", "desc"), "ARGSORT", f"order is {order!r}; legal: 'asc', 'desc'", ParamError)
    return like(x, I32)


@argsort.reference
def _argsort(x: np.ndarray, *, order: str) -> np.ndarray:
    return np.argsort(-x if order == "desc" else x, axis=-1, kind="stable")


@argsort.cost
def _argsort_cost(node: Node) -> Cost:
    return Cost(node.out.n_elements * math.log2(2 * node.out.ne[0]), default_bytes(node))


@op("TOP_K", inputs="x")
def top_k(x: Tensor, k: int) -> Spec:
    """i32 [k, ...] positions of the k largest of each row, largest first; of equal values the first, NaN after all numbers.
    Also a row of NaN gives k different positions. x: f32, k at most ne[0].

    Source: ggml_top_k.

    >>> import numpy as np, pyggml as pg
    >>> pg.compute(pg.top_k(pg.tensor(np.array([3., 1., 4., 4.], np.float32)), 2), {}, backend="reference")
    array([2, 3])
    """
    require_type("TOP_K", "x", x, F32)
    require(is_whole(k) and 1 <= k <= x.ne[0], "TOP_K", f"k is {k!r}; legal: 1 to x's ne[0], {x.ne[0]}", ParamError)
    return out(I32, k, *x.ne[1:])


@top_k.reference
def _top_k(x: np.ndarray, *, k: int) -> np.ndarray:
    return np.argsort(-x, axis=-1, kind="stable")[..., :k]


@top_k.cost
def _top_k_cost(node: Node) -> Cost:
    x = node.src[0]
    assert x is not None
    return Cost(x.n_elements, default_bytes(node))


def _is_finite(v: Any) -> bool:
    return is_number(v) and math.isfinite(v)
