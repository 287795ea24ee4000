"""Loading: a GGUF file, checked against its architecture's tables, becomes a Model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pyggml.dtypes import BF16, F16, F32, DType, dtype
from pyggml.errors import ContextError, FormatError, ModelError, ParamError
from pyggml.gguf import GGUFFile, read_gguf
from pyggml.graph import Graph
from pyggml.models.base import HybridHParams, Weights, check_tensors, read_hparams
from pyggml.models.layers import FORMS, SSM, MambaChoice
from pyggml.models.ssd import auto_form, check_chunk
from pyggml.ops.ssd.defs import SSD_PRECISIONS
from pyggml.quants import WEIGHT_TYPES
from pyggml.runtime.batch import GraphInputs
from pyggml.runtime.context import Context
from pyggml.runtime.memory import Memory, MemoryShape
from pyggml.runtime.vocab import Vocab
from pyggml.tensor import Tensor, raw_tensor, tensor

VECTOR_TYPES = (F32, F16, BF16)
CACHE_TYPES = ("f32", "f16", "bf16")
KV_TYPES = (*CACHE_TYPES, "q8_0")
PROBES = {"mamba": "ssm_in.weight", "attention": "attn_q.weight"}  # whose presence shows what a layer is


@cache
def architectures() -> dict[str, ModuleType]:
    """The modules of this package that describe an architecture, by its GGUF name."""
    modules = (import_module(f"pyggml.models.{p.stem}") for p in sorted(Path(__file__).parent.glob("[!_]*.py")))
    return {m.ARCH: m for m in modules if hasattr(m, "ARCH")}


def load_model(path: str | os.PathLike[str]) -> Model:
    """Open a GGUF file as a model. The file stays mapped; nothing is copied.

    FormatError for a broken file; ModelError for one that is sound but holds no model that pyggml runs: unknown architecture,
    missing keys, missing, misshapen or unread tensors, weight types without a kernel. Each message is one line.

    >>> import pyggml as pg
    >>> load_model(demo_path()).arch
    'granitehybrid'
    """
    return Model(read_gguf(path))


def demo_path() -> Path:
    """The bundled model's file."""
    return Path(__file__).parent / "demo" / "granite-h-demo-Q8_0.gguf"


class Model:
    """A model over a mapped file: `arch`, `hparams`, `vocab`, `metadata`, `weights`, `kinds` (of the layers)."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.closed = False
        self.metadata: Mapping[str, Any] = file.metadata
        try:
            self._read()
        except ModelError as e:
            raise ModelError(f"{file.path}: {e}") from None

    def _read(self) -> None:
        arch = self.metadata.get("general.architecture")
        if not isinstance(arch, str) or arch not in architectures():
            raise ModelError(f"key general.architecture: found {arch!r}; legal: {', '.join(architectures())}")
        self.arch = arch
        self._module = architectures()[arch]
        self.hparams = read_hparams(self._module.HParams, arch, self.metadata)
        self._module.check(self.hparams)
        self.kinds: tuple[str, ...] = self._module.kinds(self.hparams)
        self._check_sizes()
        self.n_vocab = self._count_vocab()
        shapes = {name: info.ne for name, info in self.file.tensors.items()}
        check_tensors(self._module.TENSORS, self.kinds, lambda il: layer_dims(self.hparams, self.kinds[il], il, self.n_vocab), shapes, PROBES)
        self.weights: dict[str, Tensor] = {}
        for name, info in self.file.tensors.items():
            legal = WEIGHT_TYPES if is_matrix(name) else (F32,) if name.endswith(("ssm_a", "ssm_d", "ssm_dt.bias")) else VECTOR_TYPES
            if info.dtype not in legal:
                raise ModelError(f"tensor {name}: type {info.dtype.name} is not supported here; legal: {', '.join(t.name for t in legal)}")
            self.weights[name] = raw_tensor(self.file.raw(name), info.dtype, info.ne, name)

    def _check_sizes(self) -> None:
        hp, arch = self.hparams, self.arch
        if "mamba" in self.kinds:
            try:
                SSM(hp)
            except ValueError as e:
                raise ModelError(f"keys {arch}.ssm.*: {str(e).removeprefix('mamba2_layer: ')}") from None
        for il, kind in enumerate(self.kinds):
            if kind == "attention" and (hp.n_head[il] < 1 or hp.n_head[il] % hp.n_head_kv[il]):
                raise ModelError(f"layer {il}: {arch}.attention.head_count_kv {hp.n_head_kv[il]} must divide head_count {hp.n_head[il]}")

    def _count_vocab(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, Sequence):
            return len(tokens)
        embd = self.file.tensors.get("token_embd.weight")
        return self.hparams.n_vocab or (embd.ne[1] if embd is not None else 0)

    # What users ask for

    @cached_property
    def vocab(self) -> Vocab:
        """The tokenizer; FormatError when the file's vocabulary is broken or of a kind that pyggml does not read."""
        try:
            return Vocab(self.metadata)
        except (FormatError, ModelError) as e:
            raise type(e)(f"{self.file.path}: {e}") from None

    @property
    def n_params(self) -> int:
        """Number of weights, counted."""
        return sum(t.n_elements for t in self.weights.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(info.nbytes for info in self.file.tensors.values())

    @property
    def has_recurrent_state(self) -> bool:
        """True for recurrent and hybrid models: a prefix of their state cannot be cut back."""
        return "mamba" in self.kinds

    def memory_shape(self) -> MemoryShape:
        """Sizes of the KV cache and the states per layer."""
        hp = self.hparams
        attn, rec = [k == "attention" for k in self.kinds], [k == "mamba" for k in self.kinds]
        ssm = SSM(hp) if any(rec) else None
        return MemoryShape(tuple(hp.n_head_kv[i] * hp.head_dims(i)[0] if a else 0 for i, a in enumerate(attn)),
                           tuple(hp.n_head_kv[i] * hp.head_dims(i)[1] if a else 0 for i, a in enumerate(attn)),
                           tuple(ssm.conv_ne if r and ssm else None for r in rec), tuple(ssm.ssm_ne if r and ssm else None for r in rec))

    def context(self, *, backend: str = "cpu", threads: int | None = None, threads_batch: int | None = None, n_ctx: int = 4096, n_ubatch: int = 512,
                n_seq_max: int = 1, mamba2: str | Callable[..., Any] = "auto", chunk: int | str | None = None, ssd_precision: str = "f32",
                type_k: str = "f16", type_v: str = "f16", type_r: str = "f32", type_s: str = "f32", flash_attn: bool | str = "auto",
                **options: Any) -> Context:
        """A place to run the model: memory for n_ctx tokens shared by n_seq_max sequences, states for each of them.

        `mamba2`: "auto", "scan", "ssd", "ssd-fused", or a function with the signature of `mamba2_layer` in its place. `chunk`: see
        `mamba2_layer`; `ssd_precision`: its `precision`. Types: K and V cache f32, f16, bf16, q8_0; conv (r) and SSM (s) states f32, f16,
        bf16.
        `threads_batch`: threads of graphs of more than one token per sequence (default: `threads`). `flash_attn`: attention as one op (True),
        as products and a softmax (False), or as one op where the backend has it ("auto"). `options` go to the backend: for cpu threads,
        level, prec ("f32": nothing is rounded to less than it is stored in).
        """
        types = {k: _cache_type(k, t) for k, t in (("type_k", type_k), ("type_v", type_v), ("type_r", type_r), ("type_s", type_s))}
        if types["type_v"].is_quantized and flash_attn is False:
            raise ParamError(f"type_v {type_v!r} needs attention as one op; legal without: {', '.join(CACHE_TYPES)}")
        for name, which in (("type_k", 0), ("type_v", 1)):
            for il in (i for i, n in enumerate(self.memory_shape().k) if n):
                size = self.hparams.head_dims(il)[which]
                if size % types[name].block:
                    raise ParamError(f"{name} {types[name].name!r}: the heads have {size} elements; legal for them: {', '.join(CACHE_TYPES)}")
        return Context(self, backend=backend, threads=threads, threads_batch=threads_batch, n_ctx=n_ctx, n_ubatch=n_ubatch, n_seq_max=n_seq_max,
                       mamba2=check_mamba2(mamba2), chunk=check_chunk(chunk), ssd_precision=check_precision(ssd_precision), flash_attn=flash_attn,
                       options=options, types=types)

    def build(self, inp: GraphInputs, mem: Memory, mamba2: str | Callable[..., Any], chunk: int | str | None,
              precision: str = "f32", backend: str = "cpu") -> tuple[Tensor, list[Tensor]]:
        """The logits of a ubatch and the in-place state updates, as tensors of one graph. `backend`: for which auto chooses."""
        if self.closed:
            raise ContextError(f"{self.file.path}: the model is closed")
        mem.updates = []
        form = mamba2 if callable(mamba2) else self.form_for(mamba2, inp.n_seq_tokens, precision, backend)
        logits = self._module.build(self.hparams, Weights(self.weights), inp, mem, MambaChoice(form, chunk, precision))
        return logits, mem.updates

    def form_for(self, mamba2: str | Callable[..., Any], n_seq_tokens: int, precision: str = "f32", backend: str = "cpu") -> str:
        """Name of the form that a graph of this many tokens per sequence takes."""
        if callable(mamba2):
            return "user"
        if n_seq_tokens == 1 or not self.has_recurrent_state:
            return "scan"
        return auto_form(backend, n_seq_tokens, SSM(self.hparams).d_state, precision) if mamba2 == "auto" else mamba2

    def graph(self, n_tokens: int = 512, n_seqs: int = 1, mamba2: str | Callable[..., Any] = "ssd", chunk: int | str | None = None,
              ssd_precision: str = "f32", n_ctx: int | None = None) -> Graph:
        """The graph of one ubatch alone, without memory: n_tokens per sequence. For reports, plans and tests."""
        if n_tokens < 1 or n_seqs < 1:
            raise ParamError(f"graph: n_tokens {n_tokens}, n_seqs {n_seqs}; legal: >= 1")
        cells = max(n_ctx or 0, n_tokens * n_seqs)
        mem = Memory(self.memory_shape(), cells, n_seqs, F16, F16, F32, F32, allocate=False)
        inp = self.inputs(n_tokens, n_seqs, cells, n_seqs)
        logits, updates = self.build(inp, mem, check_mamba2(mamba2), chunk, check_precision(ssd_precision))
        return Graph([logits, *updates])

    def inputs(self, n_seq_tokens: int, n_seqs: int, n_kv: int, n_outputs: int, flash_attn: bool = True) -> GraphInputs:
        """Input tensors of a ubatch's graph, and how it computes attention."""
        n = n_seq_tokens * n_seqs
        attn, rec = "attention" in self.kinds, "mamba" in self.kinds
        return GraphInputs(n_seq_tokens, n_seqs, n_kv, n_outputs, tokens=tensor([n], "i32", name="inp_tokens"),
                           rows=tensor([n_seqs], "i32", name="inp_rows") if rec else None, pos=tensor([n], "i32", name="inp_pos") if attn else None,
                           kv_idxs=tensor([n], "i64", name="inp_kv_idxs") if attn else None,
                           kq_mask=tensor([n_kv, n], "f16", name="inp_kq_mask") if attn else None,
                           out_ids=tensor([n_outputs], "i32", name="inp_out_ids") if n_outputs < n else None, flash_attn=flash_attn)

    def close(self) -> None:
        """Give up the file. It stays mapped while a context has plans over it; new plans are refused (ContextError)."""
        self.closed = True
        self.weights.clear()
        self.file.close()


def layer_dims(hp: Any, kind: str, il: int, n_vocab: int) -> dict[str, int]:
    """The dims by which the tensor tables name shapes, for one layer."""
    dims = {"n_embd": hp.n_embd, "n_vocab": n_vocab, "one": 1}
    if kind == "mamba":
        p = SSM(hp)
        dims.update(d_in_proj=p.d_in_proj, d_conv=p.d_conv, conv_dim=p.conv_dim, n_ssm_head=p.n_head, d_inner=p.d_inner, d_group=p.d_group, n_group=p.n_group)
    elif kind == "attention":
        (d_k, d_v), n, n_kv = hp.head_dims(il), hp.n_head[il], hp.n_head_kv[il]
        dims.update(n_embd_q=n * d_k, n_embd_k=n_kv * d_k, n_embd_v=n_kv * d_v, n_embd_o=n * d_v)
    if isinstance(hp, HybridHParams):
        dims["n_ff"] = hp.n_ff[il]
    return dims


def check_mamba2(mamba2: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """`mamba2` itself when it names a form or is a function that can be called as mamba2_layer is."""
    if callable(mamba2):
        try:
            inspect.signature(mamba2).bind("x", "weights", "conv", "ssm", "hparams", form="user", chunk=None)
        except (TypeError, ValueError) as e:
            name = getattr(mamba2, "__name__", repr(mamba2))
            raise ParamError(f"mamba2 function {name}: {e}; legal: {name}(x, weights, conv, ssm, hparams, *, form, chunk)") from None
    elif mamba2 not in ("auto", *FORMS):
        raise ParamError(f"mamba2 {mamba2!r}; legal: auto, {', '.join(FORMS)}, or a function with the signature of mamba2_layer")
    return mamba2


def check_precision(precision: str) -> str:
    """`precision` itself when SSD_SCAN has it."""
    if precision not in SSD_PRECISIONS:
        raise ParamError(f"ssd_precision {precision!r}; legal: {', '.join(SSD_PRECISIONS)}")
    return precision


def is_matrix(name: str) -> bool:
    """True for the tensors that MUL_MAT and GET_ROWS read, which may be quantized."""
    return name.endswith(".weight") and not name.endswith(("norm.weight", "ssm_conv1d.weight"))


def _cache_type(option: str, name: str) -> DType:
    legal = KV_TYPES if option in ("type_k", "type_v") else CACHE_TYPES
    if not isinstance(name, str) or name.lower() not in legal:
        raise ParamError(f"{option} {name!r}; legal: {', '.join(legal)}")
    return dtype(name)
