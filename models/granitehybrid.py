"""GGUF architecture `granitehybrid`: Granite-4.0-H. Mamba2 or attention, then a SwiGLU MLP, in every layer.

Attention has no positions (NoPE) unless `rope.scaling.finetuned` is true (absent: true, as in llama.cpp). Four multipliers,
each optional: embedding_scale, residual_scale (on both sub-layers), attention.scale (replaces 1/sqrt(d)), logit_scale
(divides the logits). Routed experts are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.errors import ModelError
from pyggml.models.base import ATTENTION, HEAD, MAMBA, TINY_MAMBA, HybridHParams, T, Weights, key
from pyggml.models.layers import MambaChoice, attention, head, mamba_block, mlp_swiglu, named, norm, scaled
from pyggml.ops.layout.defs import get_rows
from pyggml.ops.pointwise.defs import add
from pyggml.runtime.batch import GraphInputs
from pyggml.runtime.memory import Memory
from pyggml.tensor import Tensor, scope

ARCH = "granitehybrid"


@dataclass(frozen=True, slots=True)
class HParams(HybridHParams):
    """A hybrid's, the multipliers and the positions."""

    f_attention_scale: float | None = key("attention.scale", None)
    f_embedding_scale: float | None = key("embedding_scale", None)
    f_residual_scale: float | None = key("residual_scale", None)
    f_logit_scale: float | None = key("logit_scale", None)
    rope_finetuned: bool = key("rope.scaling.finetuned", True)
    rope_scaling: str = key("rope.scaling.type", "none")
    rope_factor: float | None = key("rope.scaling.factor", None)
    rope_freq_base: float = key("rope.freq_base", 10000.0, positive=True)
    n_rot: int | None = key("rope.dimension_count", None)
    n_expert: int = key("expert_count", 0)


TENSORS = (
    *HEAD,
    T("blk.{i}.attn_norm.weight", "n_embd"),
    *MAMBA,
    *ATTENTION,
    T("blk.{i}.ffn_norm.weight", "n_embd"),
    T("blk.{i}.ffn_gate.weight", "n_embd n_ff"),
    T("blk.{i}.ffn_up.weight", "n_embd n_ff"),
    T("blk.{i}.ffn_down.weight", "n_ff n_embd"),
    T("blk.{i}.ffn_gate.bias", "n_ff", optional=True),
    T("blk.{i}.ffn_up.bias", "n_ff", optional=True),
    T("blk.{i}.ffn_down.bias", "n_embd", optional=True),
)
TINY: dict[str, Any] = {
    "block_count": 3, "feed_forward_length": 48, "attention.head_count": 4, "attention.head_count_kv": np.array([0, 2, 0], np.int32),
    "embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 3.0, "attention.scale": 0.1, "rope.scaling.finetuned": False, **TINY_MAMBA,
}


def kinds(hp: HParams) -> tuple[str, ...]:
    """A layer without KV heads is recurrent."""
    return tuple("attention" if n else "mamba" for n in hp.n_head_kv)


def check(hp: HParams) -> None:
    """ModelError for what this file asks and pyggml does not have."""
    if hp.n_expert:
        raise ModelError(f"key {ARCH}.expert_count: found {hp.n_expert}; routed experts are not supported, legal: 0")
    if hp.rope_finetuned and any(hp.n_head_kv) and hp.rope_scaling not in ("none", "linear"):
        raise ModelError(f"key {ARCH}.rope.scaling.type: found {hp.rope_scaling!r}; legal: none, linear")


def rope_args(hp: HParams, d_k: int) -> dict[str, Any] | None:
    """Arguments of ROPE, or None for NoPE."""
    if not hp.rope_finetuned:
        return None
    factor = hp.rope_factor if hp.rope_scaling == "linear" and hp.rope_factor else 1.0
    return {"n_dims": hp.n_rot or d_k, "mode": "norm", "freq_base": hp.rope_freq_base, "freq_scale": 1.0 / factor}


def build(hp: HParams, w: Weights, inp: GraphInputs, mem: Memory, mamba: MambaChoice) -> Tensor:
    """Logits [n_vocab, n_outputs]."""
    with scope("embedding"):
        x = named(get_rows(w["token_embd.weight"], inp.tokens), "inp_embd")          # [n_embd, n_tokens]
        x = scaled(x, hp.f_embedding_scale, "inp_embd_scaled")
    for il, kind in enumerate(kinds(hp)):
        with scope("residual", il):
            lw = w.layer(il)
            cur = norm(x, lw["attn_norm.weight"], hp.f_norm_rms_eps, "attn_norm", il)
            if kind == "mamba":
                cur = mamba_block(lw, cur, inp, mem, il, hp, mamba)
            else:
                d_k, d_v = hp.head_dims(il)
                cur = attention(lw, cur, inp, mem, il, n_head=hp.n_head[il], n_head_kv=hp.n_head_kv[il], d_k=d_k, d_v=d_v,
                                kq_scale=hp.f_attention_scale or d_k ** -0.5, rope_args=rope_args(hp, d_k))
            x = named(add(scaled(cur, hp.f_residual_scale, f"{kind}_out_scaled", il), x), "ffn_inp", il)
            cur = mlp_swiglu(lw, norm(x, lw["ffn_norm.weight"], hp.f_norm_rms_eps, "ffn_norm", il), il)
            x = named(add(scaled(cur, hp.f_residual_scale, "ffn_out_scaled", il), x), "l_out", il)
    return head(w, x, inp, hp.f_norm_rms_eps, hp.f_logit_scale)
