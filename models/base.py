"""What every architecture file is made of: hyperparameters as a table of keys, tensors as a table of names and dims.

An architecture module holds ARCH (GGUF `general.architecture`), HParams (a dataclass whose fields are made with `key`), TENSORS, TINY
(keys of the smallest file that fabricate() makes), `kinds(hp)` (one of "mamba", "attention", "mlp" per layer), `check(hp)` (ModelError for what
it has no graph for) and `build(hp, w, inp, mem, mamba)` (the graph). The loader finds it by its file, checks a GGUF file against the tables
and names all that is missing, misshapen or unread in one error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pyggml.errors import ModelError
from pyggml.tensor import Shape, Tensor, shape4

REQUIRED = object()
H = TypeVar("H")


def key(name: str, default: Any = REQUIRED, *, per_layer: bool = False, positive: bool = False) -> Any:
    """A field of an HParams dataclass, read from metadata key `ARCH.name`. Without a default the key is required;
    `per_layer` takes a number for all layers or an array of one number per layer and gives a tuple; `positive` refuses 0."""
    meta = {"key": name, "default": default, "per_layer": per_layer, "positive": positive}
    return dataclasses.field(metadata=meta)


@dataclass(frozen=True, slots=True)
class T:
    """One tensor (or one per layer, with `{i}` in the name): dims as names of hparams' `dims(il)`; `kind`: only in layers of
    that kind; optional ones may be absent."""

    name: str
    dims: str
    kind: str | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class MambaHParams:
    """Hyperparameters of a stack of Mamba2 layers, by llama.cpp's names."""

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


@dataclass(frozen=True, slots=True)
class HybridHParams(MambaHParams):
    """The same with attention and MLPs."""

    n_ff: tuple[int, ...] = key("feed_forward_length", per_layer=True)
    n_head: tuple[int, ...] = key("attention.head_count", per_layer=True)
    n_head_kv: tuple[int, ...] = key("attention.head_count_kv", per_layer=True)
    key_length: int | None = key("attention.key_length", None)
    value_length: int | None = key("attention.value_length", None)

    def head_dims(self, il: int) -> tuple[int, int]:
        """Elements of a head of K and of V: the file's own lengths, else n_embd / n_head for K and K's for V."""
        d_k = self.key_length or self.n_embd // self.n_head[il]
        return d_k, self.value_length or d_k


HEAD = (
    T("token_embd.weight", "n_embd n_vocab"),
    T("output_norm.weight", "n_embd"),
    T("output.weight", "n_embd n_vocab", optional=True),
)
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

TINY_MAMBA: dict[str, Any] = {
    "embedding_length": 32, "context_length": 4096, "attention.layer_norm_rms_epsilon": 1e-5,
    "ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 8, "ssm.group_count": 2,
}


def read_hparams(cls: type[H], arch: str, metadata: Mapping[str, Any]) -> H:
    """Fill an HParams dataclass; ModelError lists every key that is missing or has a wrong type or length."""
    faults: list[str] = []
    n_layer = metadata.get(f"{arch}.block_count")
    if not isinstance(n_layer, int) or isinstance(n_layer, bool) or not 1 <= n_layer <= 100_000:
        raise ModelError(f"key {arch}.block_count: found {n_layer!r}; legal: a whole number from 1 to 100000")
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        m = f.metadata
        name = f"{arch}.{m['key']}"
        found = metadata.get(name, m["default"])
        if found is REQUIRED:
            faults.append(f"key {name} is missing")
            continue
        try:
            values[f.name] = _convert(found, str(f.type), n_layer if m["per_layer"] else 0)
            if m["positive"] and not values[f.name] > 0:
                faults.append(f"key {name}: found {found!r}; legal: a number above 0")
        except ValueError as e:
            faults.append(f"key {name}: {e}")
    if faults:
        raise ModelError("; ".join(faults))
    return cls(**values)


def _convert(found: Any, type_name: str, n_layer: int) -> Any:
    if n_layer:
        if isinstance(found, int | np.integer) and not isinstance(found, bool):
            return (_whole(found),) * n_layer
        if not isinstance(found, np.ndarray | tuple | list) or len(found) != n_layer:
            count = f" of {len(found)}" if isinstance(found, np.ndarray | tuple | list) else ""
            raise ValueError(f"found {type(found).__name__}{count}; legal: a whole number, or an array of {n_layer} (one per layer)")
        return tuple(_whole(v) for v in found)
    if isinstance(found, np.ndarray | list | tuple):
        raise ValueError(f"found an array of {len(found)}; legal: one {type_name.split(' ')[0]}")
    if found is None:
        return None
    if type_name.startswith("bool"):
        if not isinstance(found, bool):
            raise ValueError(f"found {found!r}; legal: a bool")
        return found
    if type_name.startswith("int"):
        return _whole(found)
    if type_name.startswith("str"):
        return str(found)
    if isinstance(found, bool) or not isinstance(found, int | float) or not np.isfinite(found):
        raise ValueError(f"found {found!r}; legal: a finite number")
    return float(found)


def _whole(v: Any) -> int:
    if isinstance(v, bool | np.bool_) or not isinstance(v, int | np.integer) or not 0 <= int(v) < 1 << 31:
        raise ValueError(f"found {v!r}; legal: whole numbers from 0 to {(1 << 31) - 1}")
    return int(v)


def check_tensors(table: Sequence[T], kinds: Sequence[str], dims: Callable[[int], Mapping[str, int]], found: Mapping[str, Shape],
                  known_kinds: Mapping[str, str]) -> None:
    """ModelError listing, in one line, layers whose tensors contradict their kind, and missing, misshapen and unread tensors.
    `known_kinds` maps a kind to the tensor whose presence shows it."""
    faults: list[str] = []
    for il, kind in enumerate(kinds):
        shown = [k for k, probe in known_kinds.items() if f"blk.{il}.{probe}" in found]
        if shown and kind not in shown:
            faults.append(f"layer {il}: the metadata says {kind}, its tensors say {shown[0]} (blk.{il}.{known_kinds[shown[0]]})")
    read: set[str] = set()
    missing: list[str] = []
    for t, il, name in expand(table, kinds):
        ne = found.get(name)
        read.add(name)
        if ne is None:
            if not t.optional:
                missing.append(name)
            continue
        want = shape4([dims(il)[d] for d in t.dims.split()], name)
        if ne != want:
            faults.append(f"{name}: ne {_short(ne)}, expected {_short(want)} ({t.dims.replace(' ', ', ')})")
    unread = [n for n in found if n not in read]
    if missing:
        faults.append(f"missing: {_list(missing)}")
    if unread:
        faults.append(f"unread: {_list(unread)}")
    if faults:
        raise ModelError("tensors: " + "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else ""))


def expand(table: Sequence[T], kinds: Sequence[str]) -> Iterable[tuple[T, int, str]]:
    """Every tensor that a model of these layers has: entry, layer, name."""
    for t in table:
        if "{i}" not in t.name:
            yield t, 0, t.name
            continue
        for il, kind in enumerate(kinds):
            if t.kind is None or t.kind == kind:
                yield t, il, t.name.format(i=il)


def _short(ne: Shape) -> list[int]:
    dims = list(ne)
    while len(dims) > 1 and dims[-1] == 1:
        dims.pop()
    return dims


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class Weights:
    """The weights of a model, or of one layer (`w.layer(3)["ssm_in.weight"]`). `get` gives None for absent optional ones."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        self._tensors = tensors
        self._prefix = prefix

    def layer(self, il: int) -> Weights:
        """Weights of layer il, by their names without `blk.N.`."""
        return Weights(self._tensors, f"blk.{il}.")

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def get(self, name: str) -> Tensor | None:
        """The tensor, or None."""
        return self._tensors.get(self._prefix + name)
