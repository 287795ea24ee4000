"""GGUF architecture `nemotron_h`: Nemotron-H. One block per layer: Mamba2 (gated norm per group), attention without positions, or a
squared-ReLU MLP. Source: llama.cpp's build for nemotron_h; no clamp of dt.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyggml.models.base import ATTENTION, HEAD, MAMBA, TINY_MAMBA, HybridHParams, T, Weights
from pyggml.models.layers import MambaChoice, attention, head, mamba_block, mlp_relu2, named, norm
from pyggml.ops.layout.defs import get_rows
from pyggml.ops.pointwise.defs import add
from pyggml.runtime.batch import GraphInputs
from pyggml.runtime.memory import Memory
from pyggml.tensor import Tensor, scope

ARCH = "nemotron_h"
HParams = HybridHParams
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
TINY: dict[str, Any] = {"block_count": 4, "feed_forward_length": np.array([0, 48, 0, 0], np.int32), "attention.head_count": 4,
                        "attention.head_count_kv": np.array([0, 0, 2, 0], np.int32), **TINY_MAMBA}


def kinds(hp: HParams) -> tuple[str, ...]:
    """KV heads make an attention layer, else a feed-forward length an MLP, else the layer is recurrent."""
    return tuple("attention" if kv else "mlp" if ff else "mamba" for kv, ff in zip(hp.n_head_kv, hp.n_ff, strict=True))


def check(hp: HParams) -> None:
    """Every legal set of hyperparameters is supported."""


def build(hp: HParams, w: Weights, inp: GraphInputs, mem: Memory, mamba: MambaChoice) -> Tensor:
    """Logits [n_vocab, n_outputs]."""
    with scope("embedding"):
        x = named(get_rows(w["token_embd.weight"], inp.tokens), "inp_embd")          # [n_embd, n_tokens]
    for il, kind in enumerate(kinds(hp)):
        with scope("residual", il):
            lw = w.layer(il)
            cur = norm(x, lw["attn_norm.weight"], hp.f_norm_rms_eps, "attn_norm", il)
            if kind == "mamba":
                cur = mamba_block(lw, cur, inp, mem, il, hp, mamba)
            elif kind == "attention":
                d_k, d_v = hp.head_dims(il)
                cur = attention(lw, cur, inp, mem, il, n_head=hp.n_head[il], n_head_kv=hp.n_head_kv[il], d_k=d_k, d_v=d_v, kq_scale=d_k ** -0.5)
            else:
                cur = mlp_relu2(lw, cur, il)
            x = named(add(cur, x), "l_out", il)
    return head(w, x, inp, hp.f_norm_rms_eps)
