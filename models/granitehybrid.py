"""GGUF architecture `granitehybrid`: Granite-4.0-H. Mamba2 or attention, then a SwiGLU MLP, in every layer.

Attention has no positions (NoPE) unless `rope.scaling.finetuned` is true (absent: true, as in llama.cpp). Four multipliers,
each optional: embedding_scale, residual_scale (on both sub-layers), attention.scale (replaces 1/sqrt(d)), logit_scale
(divides the logits). Routed experts are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyggml.errors import ModelError
from pyggml.models.base import T, Weights, key
from pyggml.models.layers import MambaChoice, attention, mamba_block, mlp_swiglu, named, norm, scaled
from pyggml.ops.layout.defs import get_rows
from pyggml.ops.matmul.defs import mul_mat
from pyggml.ops.pointwise.defs import add
from pyggml.runtime.batch import GraphInputs
from pyggml.runtime.memory import Memory
from pyggml.tensor import Tensor

ARCH = "granitehybrid"


@dataclass(frozen=True, slots=True)
class HParams:
    """Hyperparameters by llama.cpp's names."""

    n_layer: int = key("block_count", positive=True)
    n_embd: int = key("embedding_length", positive=True)
    n_ctx_train: int = key("context_length", 0)
    n_ff: tuple[int, ...] = key("feed_forward_length", per_layer=True)
    n_head: tuple[int, ...] = key("attention.head_count", per_layer=True)
    n_head_kv: tuple[int, ...] = key("attention.head_count_kv", per_layer=True)
    key_length: int | None = key("attention.key_length", None)
    value_length: int | None = key("attention.value_length", None)
    f_norm_rms_eps: float = key("attention.layer_norm_rms_epsilon", positive=True)
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
    ssm_d_conv: int = key("ssm.conv_kernel", positive=True)
    ssm_d_inner: int = key("ssm.inner_size", positive=True)
    ssm_d_state: int = key("ssm.state_size", positive=True)
    ssm_dt_rank: int = key("ssm.time_step_rank", positive=True)
    ssm_n_group: int = key("ssm.group_count", positive=True)
    n_vocab: int | None = key("vocab_size", None)


MAMBA = (
    T("blk.{i}.ssm_in.weight", "n_embd d_in_proj", "mamba"),
    T("blk.{i}.ssm_conv1d.weight", "d_conv conv_dim", "mamba"),
    T("blk.{i}.ssm_conv1d.bias", "conv_dim", "mamba"),
    T("blk.{i}.ssm_dt.bias", "n_ssm_head", "mamba"),
    T("blk.{i}.ssm_a", "one n_ssm_head", "mamba"),
    T("blk.{i}.ssm_d", "one n_ssm_head", "mamba"),
    T("blk.{i}.ssm_norm.weight", "d_group n_group", "mamba"),
    T("blk.{i}.ssm_out.weight", "d_inner n_embd", "mamba"),
)
ATTENTION = (
    T("blk.{i}.attn_q.weight", "n_embd n_embd_q", "attention"),
    T("blk.{i}.attn_k.weight", "n_embd n_embd_k", "attention"),
    T("blk.{i}.attn_v.weight", "n_embd n_embd_v", "attention"),
    T("blk.{i}.attn_output.weight", "n_embd_o n_embd", "attention"),
    T("blk.{i}.attn_q.bias", "n_embd_q", "attention", optional=True),
    T("blk.{i}.attn_k.bias", "n_embd_k", "attention", optional=True),
    T("blk.{i}.attn_v.bias", "n_embd_v", "attention", optional=True),
    T("blk.{i}.attn_output.bias", "n_embd", "attention", optional=True),
)
HEAD = (
    T("token_embd.weight", "n_embd n_vocab"),
    T("output_norm.weight", "n_embd"),
    T("output.weight", "n_embd n_vocab", optional=True),
)
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
    x = named(get_rows(w["token_embd.weight"], inp.tokens), "inp_embd")          # [n_embd, n_tokens]
    x = scaled(x, hp.f_embedding_scale, "inp_embd_scaled")
    for il, kind in enumerate(kinds(hp)):
        lw = w.layer(il)
        cur = norm(x, lw["attn_norm.weight"], hp.f_norm_rms_eps, "attn_norm", il)
        if kind == "mamba":
            cur = mamba_block(lw, cur, inp, mem, il, hp, mamba)
        else:
            d_k = hp.key_length or hp.n_embd // hp.n_head[il]
            cur = attention(lw, cur, inp, mem, il, n_head=hp.n_head[il], n_head_kv=hp.n_head_kv[il], d_k=d_k, d_v=hp.value_length or d_k,
                            kq_scale=hp.f_attention_scale or d_k ** -0.5, rope_args=rope_args(hp, d_k))
        x = named(add(scaled(cur, hp.f_residual_scale, f"{kind}_out_scaled", il), x), "ffn_inp", il)
        cur = mlp_swiglu(lw, norm(x, lw["ffn_norm.weight"], hp.f_norm_rms_eps, "ffn_norm", il), il)
        x = named(add(scaled(cur, hp.f_residual_scale, "ffn_out_scaled", il), x), "l_out", il)
    return head(w, x, inp, hp.f_norm_rms_eps, hp.f_logit_scale)


def head(w: Weights, x: Tensor, inp: GraphInputs, eps: float, logit_scale: float | None = None) -> Tensor:
    """Final norm and output projection of the wanted tokens; without output.weight the embedding serves."""
    if inp.out_ids is not None:
        x = named(get_rows(x, inp.out_ids), "inp_out")
    x = norm(x, w["output_norm.weight"], eps, "result_norm")
    out = w.get("output.weight")
    logits = named(mul_mat(out if out is not None else w["token_embd.weight"], x), "result_output")
    return scaled(logits, 1.0 / logit_scale if logit_scale else None, "result_output_scaled")
