"""GGUF architecture `mamba2`: a stack of Mamba2 layers (Dao & Gu 2024). The gated norm is per group, as in llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.models.base import T, Weights, key
from pyggml.models.granitehybrid import HEAD, MAMBA, head
from pyggml.models.layers import MambaChoice, mamba_block, named, norm
from pyggml.ops.layout.defs import get_rows
from pyggml.ops.pointwise.defs import add
from pyggml.runtime.batch import GraphInputs
from pyggml.runtime.memory import Memory
from pyggml.tensor import Tensor

ARCH = "mamba2"


@dataclass(frozen=True, slots=True)
class HParams:
    """Hyperparameters by llama.cpp's names."""

    n_layer: int = key("block_count", positive=True)
    n_embd: int = key("embedding_length", positive=True)
    n_ctx_train: int = key("context_length", 0)
    f_norm_rms_eps: float = key("attention.layer_norm_rms_epsilon", positive=True)
    ssm_d_conv: int = key("ssm.conv_kernel", positive=True)
    ssm_d_inner: int = key("ssm.inner_size", positive=True)
    ssm_d_state: int = key("ssm.state_size", positive=True)
    ssm_dt_rank: int = key("ssm.time_step_rank", positive=True)
    ssm_n_group: int = key("ssm.group_count", positive=True)
    n_vocab: int | None = key("vocab_size", None)


TENSORS = (*HEAD, T("blk.{i}.attn_norm.weight", "n_embd"), *MAMBA)


def kinds(hp: HParams) -> tuple[str, ...]:
    """Every layer is recurrent."""
    return ("mamba",) * hp.n_layer


def check(hp: HParams) -> None:
    """Every legal set of hyperparameters is supported."""


def build(hp: HParams, w: Weights, inp: GraphInputs, mem: Memory, mamba: MambaChoice) -> Tensor:
    """Logits [n_vocab, n_outputs]."""
    x = named(get_rows(w["token_embd.weight"], inp.tokens), "inp_embd")          # [n_embd, n_tokens]
    for il in range(hp.n_layer):
        lw = w.layer(il)
        cur = norm(x, lw["attn_norm.weight"], hp.f_norm_rms_eps, "attn_norm", il)
        x = named(add(mamba_block(lw, cur, inp, mem, il, hp, mamba), x), "l_out", il)
    return head(w, x, inp, hp.f_norm_rms_eps)
