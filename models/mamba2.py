"""GGUF architecture `mamba2`: a stack of Mamba2 layers (Dao & Gu 2024). The gated norm is per group, as in llama.cpp."""

from __future__ import annotations

from typing import Any

from pyggml.models.base import HEAD, MAMBA, TINY_MAMBA, MambaHParams, T, Weights
from pyggml.models.layers import MambaChoice, head, mamba_block, named, norm
from pyggml.ops.layout.defs import get_rows
from pyggml.ops.pointwise.defs import add
from pyggml.runtime.batch import GraphInputs
from pyggml.runtime.memory import Memory
from pyggml.tensor import Tensor, scope

ARCH = "mamba2"
HParams = MambaHParams
TENSORS = (*HEAD, T("blk.{i}.attn_norm.weight", "n_embd"), *MAMBA)
TINY: dict[str, Any] = {"block_count": 2, **TINY_MAMBA}


def kinds(hp: HParams) -> tuple[str, ...]:
    """Every layer is recurrent."""
    return ("mamba",) * hp.n_layer


def check(hp: HParams) -> None:
    """Every legal set of hyperparameters is supported."""


def build(hp: HParams, w: Weights, inp: GraphInputs, mem: Memory, mamba: MambaChoice) -> Tensor:
    """Logits [n_vocab, n_outputs]."""
    with scope("embedding"):
        x = named(get_rows(w["token_embd.weight"], inp.tokens), "inp_embd")          # [n_embd, n_tokens]
    for il in range(hp.n_layer):
        with scope("residual", il):
            lw = w.layer(il)
            cur = norm(x, lw["attn_norm.weight"], hp.f_norm_rms_eps, "attn_norm", il)
            x = named(add(mamba_block(lw, cur, inp, mem, il, hp, mamba), x), "l_out", il)
    return head(w, x, inp, hp.f_norm_rms_eps)
