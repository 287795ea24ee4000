"""Blocks that architectures share: norm, linear, MLPs, attention over the KV cache, and the Mamba2 layer in its forms.

Names of intermediate tensors are llama.cpp's (`attn_norm-3`), so that dumps of two engines can be laid side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from pyggml.dtypes import F32
from pyggml.errors import ParamError, ShapeError
from pyggml.models import ssd
from pyggml.ops.attention.defs import flash_attn_ext, rope, soft_max
from pyggml.ops.layout.defs import arange, concat, cont, get_rows, pad, permute, reshape, set_rows, view
from pyggml.ops.matmul.defs import mul_mat
from pyggml.ops.norm.defs import rms_norm
from pyggml.ops.pointwise.defs import add, cast, mul, relu, scale, silu, softplus, sqr, swiglu_split
from pyggml.ops.ssd.defs import ssd_scan
from pyggml.ops.ssm.defs import ssm_conv, ssm_scan
from pyggml.runtime.batch import GraphInputs
from pyggml.runtime.memory import Memory
from pyggml.tensor import Tensor, current_scope, scope

FORMS = ("scan", "ssd", "ssd-fused")
# The parts of a model, by which reports count (pyggml.tensor.scope). residual: norms, multipliers and additions between the blocks; scan: the
# state-space product in any form; state: reads, copies and writes of the recurrent states; mamba2: what a user's function leaves unnamed.
PARTS = ("embedding", "residual", "in-proj", "conv", "scan", "gated norm", "out-proj", "state", "mamba2", "attention", "mlp", "head")
Mamba2Fn = Callable[..., tuple[Tensor, Tensor, Tensor]]


class LayerWeights(Protocol):
    """What a block asks of weights: required ones by [], optional ones by get. A dict of tensors will do."""

    def __getitem__(self, name: str) -> Tensor: ...

    def get(self, name: str) -> Tensor | None:
        """The tensor, or None."""


def named(t: Tensor, name: str, il: int | None = None) -> Tensor:
    """Name a tensor as llama.cpp does: `name-il`."""
    t.name = name if il is None else f"{name}-{il}"
    return t


def norm(x: Tensor, weight: Tensor, eps: float, name: str, il: int | None = None) -> Tensor:
    """RMS norm over dim 0, times weight."""
    return named(mul(rms_norm(x, eps=eps), weight), name, il)


def linear(w: LayerWeights, name: str, x: Tensor) -> Tensor:
    """x through `name.weight`, plus `name.bias` where the file has one."""
    y = mul_mat(w[f"{name}.weight"], x)
    bias = w.get(f"{name}.bias")
    return y if bias is None else add(y, bias)


def scaled(x: Tensor, factor: float | None, name: str, il: int | None = None) -> Tensor:
    """x times factor, under a name of its own; x itself when the model has no such multiplier."""
    return x if factor is None or factor == 1.0 else named(scale(x, factor), name, il)


def mlp_swiglu(w: LayerWeights, x: Tensor, il: int) -> Tensor:
    """down(silu(gate(x)) * up(x))."""
    with scope("mlp", il):
        gate = named(linear(w, "ffn_gate", x), "ffn_gate", il)
        up = named(linear(w, "ffn_up", x), "ffn_up", il)
        return named(linear(w, "ffn_down", named(swiglu_split(gate, up), "ffn_swiglu", il)), "ffn_out", il)


def mlp_relu2(w: LayerWeights, x: Tensor, il: int) -> Tensor:
    """down(relu(up(x))^2)."""
    with scope("mlp", il):
        up = named(linear(w, "ffn_up", x), "ffn_up", il)
        return named(linear(w, "ffn_down", named(sqr(relu(up)), "ffn_relu2", il)), "ffn_out", il)


def attention(w: LayerWeights, x: Tensor, inp: GraphInputs, mem: Memory, il: int, *, n_head: int, n_head_kv: int, d_k: int, d_v: int, kq_scale: float,
              rope_args: dict[str, Any] | None = None) -> Tensor:
    """Causal attention over the cache. x: [n_embd, n_tokens]; out: [n_embd, n_tokens]. Query head h uses KV head h // (n_head / n_head_kv)."""
    with scope("attention", il):
        n = inp.n_tokens
        q = named(reshape(linear(w, "attn_q", x), [d_k, n_head, n]), "Qcur", il)
        k = named(reshape(linear(w, "attn_k", x), [d_k, n_head_kv, n]), "Kcur", il)
        v = named(linear(w, "attn_v", x), "Vcur", il)
        if rope_args is not None:
            q = named(rope(q, inp.pos, **rope_args), "Qcur_rope", il)
            k = named(rope(k, inp.pos, **rope_args), "Kcur_rope", il)
        cache_k, cache_v = mem.k[il], mem.v[il]
        assert cache_k is not None and cache_v is not None
        cache_k = set_rows(cache_k, reshape(k, [d_k * n_head_kv, n]), inp.kv_idxs)
        cache_v = set_rows(cache_v, v, inp.kv_idxs)
        keys = permute(_heads(cache_k, d_k, n_head_kv, inp.n_kv), 0, 2, 1, 3)      # [d_k, n_kv, n_head_kv]
        queries = permute(q, 0, 2, 1, 3)                                           # [d_k, n_tokens, n_head]
        if inp.flash_attn:
            values = permute(_heads(cache_v, d_v, n_head_kv, inp.n_kv), 0, 2, 1, 3)   # [d_v, n_kv, n_head_kv]
            kqv = named(flash_attn_ext(queries, keys, values, inp.kq_mask, kq_scale), "__fattn__", il)
        else:
            values = permute(_heads(cache_v, d_v, n_head_kv, inp.n_kv), 1, 2, 0, 3)   # [n_kv, d_v, n_head_kv]
            kq = named(mul_mat(keys, queries), "kq", il)                           # [n_kv, n_tokens, n_head]
            kq = named(soft_max(kq, inp.kq_mask, scale=kq_scale), "kq_soft_max", il)
            kqv = cont(permute(named(mul_mat(values, kq), "kqv", il), 0, 2, 1, 3))
        merged = named(reshape(kqv, [d_v * n_head, n]), "kqv_out", il)             # kqv: [d_v, n_head, n_tokens]
        return named(linear(w, "attn_output", merged), "attn_out", il)


def _heads(cache: Tensor, d: int, n_head: int, n_kv: int) -> Tensor:
    """The first n_kv cells of a cache, a head a row: [d, n_head, n_kv]."""
    return view(cache, [d, n_head, n_kv], [cache.dtype.row_bytes(d), cache.nb[1]])


def head(w: LayerWeights, x: Tensor, inp: GraphInputs, eps: float, logit_scale: float | None = None) -> Tensor:
    """Final norm and output projection of the wanted tokens; without output.weight the embedding serves. Out: [n_vocab, n_outputs]."""
    with scope("head"):
        if inp.out_ids is not None:
            x = named(get_rows(x, inp.out_ids), "inp_out")
        x = norm(x, w["output_norm.weight"], eps, "result_norm")
        out = w.get("output.weight")
        logits = named(mul_mat(out if out is not None else w["token_embd.weight"], x), "result_output")
        return scaled(logits, 1.0 / logit_scale if logit_scale else None, "result_output_scaled")


# Mamba2

MAMBA2_WEIGHTS = ("ssm_in.weight", "ssm_conv1d.weight", "ssm_conv1d.bias", "ssm_dt.bias", "ssm_a", "ssm_d", "ssm_out.weight")  # ssm_norm.weight may be absent


class SSM:
    """Sizes of a Mamba2 layer, from an object or a mapping with llama.cpp's hparam names: ssm_d_conv, ssm_d_inner, ssm_d_state,
    ssm_n_group, ssm_dt_rank (the number of heads), f_norm_rms_eps."""

    def __init__(self, hparams: Any) -> None:
        def get(name: str) -> Any:
            value = hparams.get(name) if isinstance(hparams, Mapping) else getattr(hparams, name, None)
            if value is None:
                raise ParamError(f"mamba2_layer: hparams has no {name}")
            return value
        self.d_conv, self.d_inner, self.d_state = int(get("ssm_d_conv")), int(get("ssm_d_inner")), int(get("ssm_d_state"))
        self.n_group, self.n_head, self.eps = int(get("ssm_n_group")), int(get("ssm_dt_rank")), float(get("f_norm_rms_eps"))
        if self.n_head < 1 or self.d_inner % self.n_head:
            raise ShapeError(f"mamba2_layer: ssm_dt_rank (heads) {self.n_head} must divide ssm_d_inner {self.d_inner}")
        if self.n_group < 1 or self.n_head % self.n_group:
            raise ShapeError(f"mamba2_layer: ssm_n_group {self.n_group} must divide ssm_dt_rank (heads) {self.n_head}")
        self.head_dim = self.d_inner // self.n_head
        self.d_group = self.d_inner // self.n_group
        self.conv_dim = self.d_inner + 2 * self.n_group * self.d_state
        self.d_in_proj = self.d_inner + self.conv_dim + self.n_head  # z, then x, B and C, then dt

    @property
    def conv_ne(self) -> tuple[int, int]:
        """ne of one sequence's conv state: the last d_conv - 1 inputs of each channel, oldest first."""
        return self.d_conv - 1, self.conv_dim

    @property
    def ssm_ne(self) -> tuple[int, int, int]:
        """ne of one sequence's SSM state."""
        return self.d_state, self.head_dim, self.n_head


def mamba2_layer(x: Tensor, weights: LayerWeights, conv: Tensor, ssm: Tensor, hparams: Any, *, form: str = "ssd", chunk: int | str | None = None,
                 precision: str = "f32", ids: Tensor | None = None, il: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """One Mamba2 layer on plain tensors: input projection, causal conv, state-space product, gated norm, output projection.

    x: f32 [n_embd, n_tokens, n_seqs], n_tokens per sequence. weights: a mapping with ssm_in.weight, ssm_conv1d.weight,
    ssm_conv1d.bias, ssm_dt.bias, ssm_a (negative), ssm_d, ssm_norm.weight (optional; normalized per group), ssm_out.weight.
    conv: [d_conv-1, conv_dim, n_seqs]; ssm: [d_state, head_dim, n_head, n_seqs]: the states before x. Gives y [n_embd,
    n_tokens, n_seqs] and both states after x. `form`: "scan" (the recurrence, SSM_SCAN), "ssd" (the chunked products of the
    paper, in primitive ops, with as many nodes for any number of tokens) or "ssd-fused" (the same as one op, SSD_SCAN); one
    token per sequence takes the recurrence in all. `chunk`: tokens per chunk of the ssd forms, None (for ssd from the
    plan-memory limit of ssd.default_chunk, for ssd-fused as suits its kernel) or "none" (one chunk; for ssd-fused as large as
    its kernel makes them). `precision`: of the products of both chunked forms, "f32" or, where the CPU is faster with it, "bf16". `ids` (i32 [n_seqs]):
    conv and ssm are then pools of rows, and sequence s uses row ids[s]. `il`: the layer's number in names (default: that of
    the scope around, else 0). Source: Dao & Gu 2024 (Mamba-2), listing 1; llama.cpp's build_mamba2_layer.

    >>> import pyggml as pg
    >>> hp = dict(ssm_d_conv=4, ssm_d_inner=64, ssm_d_state=16, ssm_n_group=1, ssm_dt_rank=4, f_norm_rms_eps=1e-5)
    >>> w = {"ssm_in.weight": pg.tensor([32, 164]), "ssm_conv1d.weight": pg.tensor([4, 96]), "ssm_conv1d.bias": pg.tensor([96]),
    ...      "ssm_dt.bias": pg.tensor([4]), "ssm_a": pg.tensor([1, 4]), "ssm_d": pg.tensor([1, 4]), "ssm_out.weight": pg.tensor([64, 32])}
    >>> y, conv, ssm = pg.mamba2_layer(pg.tensor([32, 100]), w, pg.tensor([3, 96]), pg.tensor([16, 16, 4]), hp, form="ssd", chunk=16)
    >>> y.ne, conv.ne, ssm.ne
    ((32, 100, 1, 1), (3, 96, 1, 1), (16, 16, 4, 1))
    """
    if form not in FORMS:
        raise ParamError(f"mamba2_layer: form {form!r}; legal: {', '.join(FORMS)}")
    il = current_scope().layer or 0 if il is None else il
    p = SSM(hparams)
    for name, t in {"x": x, "conv": conv, "ssm": ssm, **{w: weights.get(w) for w in MAMBA2_WEIGHTS}}.items():
        if not isinstance(t, Tensor):
            raise ParamError(f"mamba2_layer: {name} is {'missing' if t is None else type(t).__name__}; it must be a tensor")
    n, s = x.ne[1], x.ne[2]
    with scope("in-proj", il):
        zxbcdt = named(mul_mat(weights["ssm_in.weight"], x), "ssm_in", il)
        if zxbcdt.ne[0] != p.d_in_proj:
            raise ShapeError(f"mamba2_layer: ssm_in.weight gives {zxbcdt.ne[0]} rows; z, x, B, C and dt need {p.d_in_proj}")
        row, seq, es = zxbcdt.nb[1], zxbcdt.nb[2], 4
        z = view(zxbcdt, [p.d_inner, n, s], [row, seq])
        xbc = view(zxbcdt, [p.conv_dim, n, s], [row, seq], p.d_inner * es)
        dt = view(zxbcdt, [p.n_head, n, s], [row, seq], (p.d_inner + p.conv_dim) * es)
    recurrent, fused = form == "scan" or n == 1, form == "ssd-fused" and n > 1
    one_op = recurrent or fused
    q = 0 if one_op else ssd.chunk_size(chunk, n, s, p.n_head)
    n_pad = n if one_op else -(-n // q) * q

    with scope("state", il):
        conv0 = _checked(_gathered(conv, ids, [*p.conv_ne, s]), [*p.conv_ne, s], "mamba2_layer: conv")
    with scope("conv", il):  # its window: the last d_conv - 1 inputs, then the new ones; channels innermost, as the new ones come
        window = named(concat(permute(conv0, 1, 0, 2, 3), xbc, 1), "conv_input", il)  # [conv_dim, d_conv-1 + n, n_seqs]
        act = silu(add(ssm_conv(permute(window, 1, 0, 2, 3), weights["ssm_conv1d.weight"], n_t=n_pad), weights["ssm_conv1d.bias"]))
        act = named(act, "conv_output_silu", il)                                # [conv_dim, n_pad, n_seqs]
    with scope("state", il):
        last = view(window, [p.conv_dim, p.conv_ne[0], s], [window.nb[1], window.nb[2]], n * window.nb[1])
        new_conv = named(cont(permute(last, 1, 0, 2, 3)), "conv_state", il)
        in_place = one_op and ids is not None and ssm.dtype is F32              # the op reads the pool's rows itself
        state0 = reshape(ssm, [*p.ssm_ne, -1]) if in_place else _gathered(ssm, ids, [*p.ssm_ne, s])
        state0 = _checked(state0, [*p.ssm_ne, state0.ne[3] if one_op else s], "mamba2_layer: ssm")
    with scope("scan", il):
        a, d = reshape(weights["ssm_a"], [1, p.n_head]), reshape(weights["ssm_d"], [1, p.n_head])
        if one_op:
            rows = ids if in_place else cast(arange(0, s), "i32")
            xs, b, c = ssd.split_xbc(act, p.head_dim, p.n_head, p.d_state, p.n_group, n, s)
        if not fused:
            dt = named(add(dt, weights["ssm_dt.bias"]), "dt", il)
        if fused:
            gate = view(zxbcdt, [p.head_dim, p.n_head, n, s], [p.head_dim * es, row, seq])
            y, new_ssm = ssd_scan(state0, xs, dt, a, b, c, rows, weights["ssm_dt.bias"], d, gate, chunk=n if isinstance(chunk, str) else chunk,
                                  precision=precision)
        elif recurrent:
            y, new_ssm = ssm_scan(state0, xs, dt, a, b, c, rows)
            y = named(add(y, mul(xs, d)), "mamba2_y_add_d", il)                 # [head_dim, n_head, n, n_seqs]
        else:
            delta = pad(named(softplus(dt), "dt_softplus", il), 0, n_pad - n)   # a padded step has dt 0: it decays by 1 and adds nothing
            y, new_ssm = ssd.ssd_graph(act, delta, a, d, state0, p.n_group, q, il, precision)
            y = view(y, [p.head_dim, p.n_head, n, s], [y.nb[1], y.nb[2], y.nb[2] * n_pad])
            y = named(y, "mamba2_y_add_d", il)
    with scope("gated norm", il):
        y = _rows(y, p.d_inner, n, s)
        y = named(y if fused else swiglu_split(z, y), "mamba2_gated", il)       # silu(z) * y
        weight = weights.get("ssm_norm.weight")
        if weight is not None:
            groups = reshape(y, [p.d_group, p.n_group, n, s])
            y = reshape(mul(rms_norm(groups, eps=p.eps), reshape(weight, [p.d_group, p.n_group])), [p.d_inner, n, s])
    with scope("out-proj", il):
        out = named(mul_mat(weights["ssm_out.weight"], y), "mamba_out", il)
    return out, new_conv, named(new_ssm, "ssm_state", il)


def _rows(y: Tensor, d_inner: int, n: int, s: int) -> Tensor:
    """[head_dim, n_head, n, n_seqs] with gaps only between sequences, as rows [d_inner, n, n_seqs]."""
    return view(y, [d_inner, n, s], [y.nb[2], y.nb[3]])


def _gathered(state: Tensor, ids: Tensor | None, ne: list[int]) -> Tensor:
    """A state of this ne, gathered from its pool's rows when there are ids."""
    if ids is None:
        return state
    n = math.prod(ne[:-1])
    return reshape(get_rows(reshape(state, [n, -1]), ids), ne)


def _checked(t: Tensor, ne: list[int], what: str) -> Tensor:
    if t.ne != (*ne, 1, 1, 1)[:4]:
        raise ShapeError(f"{what} has ne {list(t.ne)}; expected {ne}")
    return t


class MambaChoice(NamedTuple):
    """How a context runs its Mamba2 layers: a form of `mamba2_layer` or a user's function in its place, the chunk, and the
    precision of the chunked forms."""

    form: str | Mamba2Fn
    chunk: int | str | None = None
    precision: str = "f32"


def mamba_block(w: LayerWeights, x: Tensor, inp: GraphInputs, mem: Memory, il: int, hparams: Any, mamba: MambaChoice) -> Tensor:
    """A Mamba2 layer inside a model: states come from the pools' rows and go back there. x: [n_embd, n_tokens]."""
    n, s = inp.n_seq_tokens, inp.n_seqs
    conv, ssm = mem.conv[il], mem.ssm[il]
    assert conv is not None and ssm is not None and inp.rows is not None
    xs = reshape(x, [x.ne[0], n, s])
    if callable(mamba.form):
        p = SSM(hparams)
        with scope("state", il):
            states = _gathered(conv, inp.rows, [*p.conv_ne, s]), _gathered(ssm, inp.rows, [*p.ssm_ne, s])
        with scope("mamba2", il):
            made = mamba.form(xs, w, *states, hparams, form="user", chunk=mamba.chunk)
            y, new_conv, new_ssm = _checked_user(made, (x.ne[0], n, s), p)
    else:
        y, new_conv, new_ssm = mamba2_layer(xs, w, conv, ssm, hparams, form=mamba.form, chunk=mamba.chunk, precision=mamba.precision, ids=inp.rows,
                                            il=il)
    with scope("state", il):
        mem.updates += [set_rows(conv, _state_rows(new_conv, conv.ne[0], s), inp.rows), set_rows(ssm, _state_rows(new_ssm, ssm.ne[0], s), inp.rows)]
    return reshape(y, [y.ne[0], inp.n_tokens])


def _state_rows(state: Tensor, n: int, s: int) -> Tensor:
    """A state [.., .., .., n_seqs], gapless within each sequence, as rows [n, n_seqs]."""
    return view(state, [n, s], [state.nb[2] if state.ne[3] == 1 and state.ne[2] == s else state.nb[3]])


def _checked_user(made: Any, y_ne: tuple[int, int, int], p: SSM) -> tuple[Tensor, Tensor, Tensor]:
    if not (isinstance(made, tuple) and len(made) == 3 and all(isinstance(t, Tensor) for t in made)):
        raise ParamError(f"mamba2 function: it gave {type(made).__name__}; expected three tensors (y, conv, ssm)")
    y, conv, ssm = made
    s = y_ne[2]
    for t, ne, what in ((y, [*y_ne], "y"), (conv, [*p.conv_ne, s], "conv"), (ssm, [*p.ssm_ne, s], "ssm")):
        _checked(t, ne, f"mamba2 function: {what}")
    return tuple(t if t.is_contiguous else cont(t) for t in made)
