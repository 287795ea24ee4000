"""GGUF architecture `nemotron_h`: Nemotron-H. One block per layer: Mamba2 (gated norm per group), attention without positions, or a
squared-ReLU MLP. Source: llama.cpp's build for nemotron_h; no clamp of dt.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.models.base import T, Weights, key
from pyggml.models.granitehybrid import ATTENTION, HEAD, MAMBA, head
from pyggml.models.layers import MambaChoice, attention, mamba_block, mlp_relu2, named, norm
from pyggml.ops.layout.defs import get_rows
from pyggml.ops.pointwise.defs import add
from pyggml.runtime.batch import GraphInputs
from pyggml.runtime.memory import Memory
from pyggml.tensor import Tensor

ARCH = "nemotron_h"


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
    ssm_d_conv: int = key("ssm.conv_kernel", positive=True)
    ssm_d_inner: int = key("ssm.inner_size", positive=True)
    ssm_d_state: int = key("ssm.state_size", positive=True)
    ssm_dt_rank: int = key("ssm.time_step_rank", positive=True)
    ssm_n_group: int = key("ssm.group_count", positive=True)
    n_vocab: int | None = key("vocab_size", None)


TENSORS = (
    *HEAD,
    T("blk.{i}.attn_norm.weight", "n_embd"),
    *MAMBA,
    *ATTENTION,
    T("blk.{i}.ffn_up.weight", "n_embd n_ff", "mlp"),
    T("blk.{i}.ffn_down.weight", "n_ff n_embd", "mlp"),
    T("blk.{i}.ffn_up.bias", "n_ff", "mlp", optional=True),
    T("blk.{i}.ffn_down.bias", "n_embd", "mlp", optional=True),
)


def kinds(hp: HParams) -> tuple[str, ...]:
    """KV heads make an attention layer, else a feed-forward length an MLP, else the layer is recurrent."""
    return tuple("attention" if kv else "mlp" if ff else "mamba" for kv, ff in zip(hp.n_head_kv, hp.n_ff, strict=True))


def check(hp: HParams) -> None:
    """Every legal set of hyperparameters is supported."""


def build(hp: HParams, w: Weights, inp: GraphInputs, mem: Memory, mamba: MambaChoice) -> Tensor:
    """Logits [n_vocab, n_outputs]."""
    x = named(get_rows(w["token_embd.weight"], inp.tokens), "inp_embd")          # [n_embd, n_tokens]
    for il, kind in enumerate(kinds(hp)):
        lw = w.layer(il)
        cur = norm(x, lw["attn_norm.weight"], hp.f_norm_rms_eps, "attn_norm", il)
        if kind == "mamba":
            cur = mamba_block(lw, cur, inp, mem, il, hp, mamba)
        elif kind == "attention":
            d_k = hp.key_length or hp.n_embd // hp.n_head[il]
            cur = attention(lw, cur, inp, mem, il, n_head=hp.n_head[il], n_head_kv=hp.n_head_kv[il], d_k=d_k, d_v=hp.value_length or d_k, kq_scale=d_k ** -0.5)
        else:
            cur = mlp_relu2(lw, cur, il)
        x = named(add(cur, x), "l_out", il)
    return head(w, x, inp, hp.f_norm_rms_eps)
