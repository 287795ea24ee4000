"""GGUF files of real models' shapes with random weights: what such a model costs, without its download.

The shapes are those of shapes.json, from the models' public configs. Matrices have rows of length about 1 (standard deviation ne[0]^-0.5), so
that activations stay near 1 through any number of layers; A and dt are drawn as mamba_ssm initializes them. Block types are not quantized from
numbers: their bits are drawn, with scales that give the same mean (0) and deviation. Everything streams: a file of any size is written in pieces
of a few MB.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pyggml.dtypes import BF16, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, DType, f32_to_bf16
from pyggml.errors import ParamError
from pyggml.gguf import GGUFWriter
from pyggml.models.base import expand, read_hparams
from pyggml.models.loader import architectures, is_matrix, layer_dims
from pyggml.runtime.vocab import CHAR_OF_BYTE

PIECE_BYTES = 4 << 20
"""Weights are drawn and written this many bytes at a time."""

# llama.cpp's file types: the type of most matrices, the number under general.file_type
FILE_TYPES: dict[str, tuple[DType, int]] = {"F32": (F32, 0), "F16": (F16, 1), "BF16": (BF16, 32), "Q8_0": (Q8_0, 7), "Q4_0": (Q4_0, 2),
                                            "Q4_K_M": (Q4_K, 15), "Q5_K_M": (Q5_K, 17), "Q6_K": (Q6_K, 18)}
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp"}
_BYTES_BY_USE = b" etaoinshrdlcumwfgypbvkjxqz"  # made-up merges start with these, so that words become few tokens
MIN_VOCAB = 257


class TensorSpec(NamedTuple):
    """A tensor of the file to be; ne innermost first. `gain` multiplies what its kind of weights is drawn as."""

    name: str
    ne: tuple[int, ...]
    dtype: DType
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class Fabricated:
    """What `fabricate` wrote: the kept layers by their index in the real model of n_layer layers and their kinds; the tensors; and those of
    them (`fallbacks`) that are Q8_0 because their rows do not divide into blocks of 256."""

    arch: str
    n_layer: int
    layers: list[tuple[int, str]]
    tensors: list[TensorSpec]
    fallbacks: list[TensorSpec]


def shapes() -> dict[str, dict[str, Any]]:
    """The published shapes by name of model."""
    table: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "shapes.json").read_text("utf-8"))
    return {name: shape for name, shape in table.items() if isinstance(shape, dict)}


def dense_shapes() -> dict[str, dict[str, Any]]:
    """Those of `shapes()` that `fabricate` takes: of an architecture that pyggml runs, without routed experts."""
    return {name: s for name, s in shapes().items() if not s.get("n_expert") and s["arch"] in architectures()}


def fabricate(like: str, type: str, path: str | os.PathLike[str], *, n_layer: int | None = None, n_vocab: int | None = None, seed: int = 0,
              progress: Callable[[int, int], None] | None = None) -> Fabricated:
    """Write a GGUF of a real model's shape with random weights.

    `like`: a name of `shapes()`; `type`: one of FILE_TYPES. `n_layer` keeps that many layers, at least one of each kind and otherwise in the model's
    proportions; `n_vocab` replaces the model's number of tokens. The same arguments give the same bytes, and weights in F32, F16 and BF16 are the
    same but for rounding. `progress` is called with (bytes written, bytes in all). ParamError for an unknown name or type, routed experts, or
    counts that the shape does not allow; FormatError when the file cannot be written.

    >>> import tempfile
    >>> from pyggml.gguf import read_gguf
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = fabricate("mamba2-130m", "Q4_0", f"{folder}/m.gguf", n_layer=1, n_vocab=512)
    ...     made.layers, read_gguf(f"{folder}/m.gguf").tensors["blk.0.ssm_in.weight"].ne
    ([(12, 'mamba')], (768, 3352, 1, 1))
    """
    shape = _shape(like)
    if type not in FILE_TYPES:
        raise ParamError(f"type {type!r}; legal: {', '.join(FILE_TYPES)}")
    all_kinds = _kinds(shape)
    keep = cut_layers(all_kinds, len(all_kinds) if n_layer is None else n_layer)
    kinds = [all_kinds[i] for i in keep]
    meta = _metadata(like, shape, kinds, type, shape["n_vocab"] if n_vocab is None else n_vocab)
    sizes = arch_tensors(shape["arch"], meta, () if shape["tied"] else ("output.weight",))
    gains = _gains(shape)
    tensors = [TensorSpec(name, ne, t, gains.get(name, 1.0)) for (name, ne), t in zip(sizes, tensor_types(type, sizes, len(kinds)), strict=True)]
    total = sum(_nbytes(t) for t in tensors)
    done = 0
    with GGUFWriter(path, None) as w:
        for key, value in meta.items():
            w.add(key, value)
        for t in tensors:
            w.add_tensor_info(t.name, t.dtype, t.ne)
        for t in tensors:
            for piece in random_rows(t, seed):
                w.write_data(t.name, piece)
                done += piece.nbytes
                if progress is not None:
                    progress(done, total)
    fallbacks = [t for t in tensors if t.dtype is Q8_0 and FILE_TYPES[type][0] is not Q8_0]
    return Fabricated(shape["arch"], len(all_kinds), list(zip(keep, kinds, strict=True)), tensors, fallbacks)


def _shape(like: str) -> dict[str, Any]:
    dense, table = dense_shapes(), shapes()
    if like not in dense:
        why = f": {table[like]['n_expert']} experts, which are not supported yet" if like in table else ""
        raise ParamError(f"model {like!r}{why}; legal: {', '.join(dense)}")
    return dense[like]


def _kinds(shape: Mapping[str, Any]) -> list[str]:
    """The kind of each layer of the real model."""
    if "pattern" in shape:
        return [_PATTERN[c] for c in shape["pattern"]]
    return ["attention" if i in shape.get("attention_layers", ()) else "mamba" for i in range(shape["n_layer"])]


def cut_layers(kinds: Sequence[str], n: int) -> list[int]:
    """n layers, ascending: at least one of each kind, the rest in the model's proportions, those of a kind spread evenly.

    >>> cut_layers(["mamba", "mamba", "attention", "mamba"], 2)
    [1, 2]
    """
    members = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)}
    if not len(members) <= n <= len(kinds):
        raise ParamError(f"{n} layers; legal: {len(members)} (of each kind one: {', '.join(members)}) to {len(kinds)}")
    count = dict.fromkeys(members, 1)
    for _ in range(n - len(members)):
        short = max(members, key=lambda k: len(members[k]) * n / len(kinds) - count[k])  # why it has members left: n is at most len(kinds)
        count[short] += 1
    return sorted(own[(2 * j + 1) * len(own) // (2 * count[k])] for k, own in members.items() for j in range(count[k]))


def _gains(shape: Mapping[str, Any]) -> dict[str, float]:
    """What makes up for a model's multipliers: tokens enter with length 1, so that the layers and not the token itself decide the next one,
    and logits have a deviation of 1."""
    embedding = shape.get("embedding_scale", 1.0)
    return {"token_embd.weight": 1 / embedding, "output_norm.weight": shape.get("logit_scale", 1.0) * (embedding if shape["tied"] else 1.0)}


# Metadata

def _metadata(like: str, s: Mapping[str, Any], kinds: Sequence[str], type: str, n_vocab: int) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for such a model."""
    keys: dict[str, Any] = {
        "block_count": len(kinds), "context_length": 131072, "embedding_length": s["n_embd"], "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.conv_kernel": s["ssm_d_conv"], "ssm.state_size": s["ssm_d_state"], "ssm.group_count": s["ssm_n_group"],
        "ssm.inner_size": s["ssm_heads"] * s["ssm_head_dim"], "ssm.time_step_rank": s["ssm_heads"],
    }
    if s["arch"] == "nemotron_h":
        keys["attention.layer_norm_epsilon"] = 1e-5  # llama.cpp does not load the model without
    if "n_head" in s:
        d_head = s.get("head_dim") or s["n_embd"] // s["n_head"]
        keys |= {"vocab_size": n_vocab, "attention.head_count": s["n_head"], "attention.key_length": d_head, "attention.value_length": d_head,
                 "attention.head_count_kv": _per_layer(kinds, "attention", s["n_head_kv"]), "rope.dimension_count": d_head, "rope.freq_base": 10000.0,
                 "rope.scaling.finetuned": s.get("rope", False),
                 "feed_forward_length": _per_layer(kinds, "mlp", s["n_ff"]) if "mlp" in kinds else s["n_ff"]}
    for name in ("embedding_scale", "residual_scale", "logit_scale", "attention_scale"):
        if name in s:
            keys[name.replace("attention_", "attention.")] = s[name]
    default, number = FILE_TYPES[type]
    return {"general.architecture": s["arch"], "general.type": "model", "general.name": f"{like}, random weights",
            **{f"{s['arch']}.{k}": v for k, v in keys.items()}, **vocab_metadata(n_vocab),
            **({"general.quantization_version": 2} if default.is_quantized else {}), "general.file_type": number}


def _per_layer(kinds: Sequence[str], kind: str, value: int) -> np.ndarray:
    return np.array([value if k == kind else 0 for k in kinds], np.int32)


def vocab_metadata(n_vocab: int) -> dict[str, Any]:
    """The tokenizer keys of a byte-level vocabulary: an end token, the 256 bytes, and made-up merges of two bytes, then of three.

    >>> vocab_metadata(259)["tokenizer.ggml.merges"]
    ['Ġ Ġ', 'Ġ e']
    """
    if n_vocab < MIN_VOCAB:
        raise ParamError(f"a vocabulary of {n_vocab}; legal: {MIN_VOCAB} (an end token and every byte) or more")
    rest = bytes(set(range(256)) - set(_BYTES_BY_USE))
    letters = [CHAR_OF_BYTE[b] for b in _BYTES_BY_USE + rest]
    merges: list[tuple[str, str]] = []
    shorter = letters
    while len(merges) < n_vocab - MIN_VOCAB:
        level = list(itertools.islice(itertools.product(shorter, letters), n_vocab - MIN_VOCAB - len(merges)))
        merges += level
        shorter = [a + b for a, b in level]
    tokens = ["<|endoftext|>", *CHAR_OF_BYTE, *(a + b for a, b in merges)]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([3] + [1] * (n_vocab - 1), np.int32),
            "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges], "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.add_bos_token": False}


# Tensors

def arch_tensors(arch: str, metadata: Mapping[str, Any], optional: Sequence[str] = ()) -> list[tuple[str, tuple[int, ...]]]:
    """Names and ne of the tensors that a file with these keys has, by the architecture's own table: all required ones, and of the others those
    named in `optional`."""
    module = architectures()[arch]
    hp = read_hparams(module.HParams, arch, metadata)
    kinds, n_vocab = module.kinds(hp), len(metadata["tokenizer.ggml.tokens"])
    found = []
    for t, il, name in expand(module.TENSORS, kinds):
        if not t.optional or name in optional:
            dims = layer_dims(hp, kinds[il], il, n_vocab)
            found.append((name, tuple(dims[d] for d in t.dims.split())))
    return found


def tensor_types(type: str, tensors: Sequence[tuple[str, tuple[int, ...]]], n_layer: int) -> list[DType]:
    """The types that llama.cpp's quantizer gives these tensors in a file of this type. Only matrices are quantized; the output matrix is Q6_K where
    others have less than 8 bits, and in the mixtures so are about half of the ffn_down and attn_v tensors. Rows that are no multiple of 256 get
    Q8_0 here (there Q5_0, Q5_1 or Q8_0)."""
    default, _ = FILE_TYPES[type]
    names = [name for name, _ in tensors]
    head = "output.weight" if "output.weight" in names else "token_embd.weight"
    wv = [name for name in names if name.endswith("attn_v.weight")]
    down = [name for name in names if name.endswith("ffn_down.weight")]
    better: set[str] = set()
    if type.endswith("_M"):
        better = {name for own, n in ((wv, len(wv)), (down, n_layer)) for i, name in enumerate(own) if _use_more_bits(i, n)}
    if type in ("Q4_0", "Q4_K_M", "Q5_K_M"):
        better.add(head)
    found = []
    for name, ne in tensors:
        t = F32 if not is_matrix(name) else Q6_K if name in better else default
        found.append(Q8_0 if t.block == 256 and ne[0] % 256 else t)
    return found


def _use_more_bits(i: int, n: int) -> bool:
    """llama.cpp's rule: the first and the last eighth, and every third in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _nbytes(t: TensorSpec) -> int:
    return t.dtype.row_bytes(t.ne[0]) * int(np.prod(t.ne[1:], dtype=np.int64))


# Random weights

def random_rows(t: TensorSpec, seed: int = 0) -> Iterator[np.ndarray]:
    """A tensor's rows, some MB at a time, as GGUFWriter.write_data takes them: [rows, ne[0]] of float types, [blocks, bytes] of block types."""
    rng = np.random.default_rng([seed, zlib.crc32(t.name.encode())])
    n_rows, row_bytes = int(np.prod(t.ne[1:], dtype=np.int64)), t.dtype.row_bytes(t.ne[0])
    step = max(1, PIECE_BYTES // (4 * t.ne[0] if t.dtype.np is not None else row_bytes))
    for start in range(0, n_rows, step):
        rows = min(step, n_rows - start)
        if t.dtype.np is None:
            yield _BLOCKS[t.dtype](rng, rows * t.ne[0] // t.dtype.block, t.gain * t.ne[0] ** -0.5)
            continue
        x = _floats(rng, t.name, rows, t.ne[0]) * np.float32(t.gain)
        yield f32_to_bf16(x) if t.dtype is BF16 else x if t.dtype is F32 else x.astype(t.dtype.np)


def _floats(rng: np.random.Generator, name: str, rows: int, n: int) -> np.ndarray:
    """float32 [rows, n]."""
    shape = rows, n
    if name.endswith("norm.weight"):
        x = rng.uniform(0.5, 1.5, shape)
    elif name.endswith("ssm_a"):
        x = -rng.uniform(1, 16, shape)
    elif name.endswith("ssm_d"):
        x = rng.uniform(0.5, 1.5, shape)
    elif name.endswith("ssm_dt.bias"):
        x = np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))))  # softplus of it is log-uniform from 0.001 to 0.1
    elif name.endswith("bias"):
        x = rng.normal(0, 0.25, shape)
    else:
        w: np.ndarray = rng.standard_normal(shape, np.float32)
        w *= np.float32(n ** -0.5)
        return w
    return x.astype(np.float32)


def _bits(rng: np.random.Generator, n: int, width: int) -> np.ndarray:
    """uint8 [n, width], all bits random."""
    words = rng.integers(0, 1 << 64, -(-n * width // 8), np.uint64)
    return words.view(np.uint8)[:n * width].reshape(n, width)


def _scales(rng: np.random.Generator, n: int, deviation: float, signed: bool = False) -> np.ndarray:
    """float32 [n]: around the deviation, as a block's scale is; signed: as often negative, so that lopsided integers have mean 0."""
    d: np.ndarray = rng.uniform(0.75, 1.25, n).astype(np.float32) * np.float32(deviation)
    return np.where(_bits(rng, n, 1)[:, 0] & 1, d, -d) if signed else d


def _half(d: np.ndarray) -> np.ndarray:
    """uint8 [n, 2]: float16 bytes."""
    return d.astype("<f2").view(np.uint8).reshape(-1, 2)


def _q8_0(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    q = _bits(rng, n, 32) | 1  # odd int8: -127 to 127, mean 0, deviation 73.9
    return np.concatenate([_half(_scales(rng, n, std / 73.9)), q], axis=1)


def _q4_0(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    q = _bits(rng, n, 16)  # nibbles less 8: deviation 4.64 around 0
    return np.concatenate([_half(_scales(rng, n, std / 4.64, signed=True)), q], axis=1)


def _affine(rng: np.random.Generator, n: int, std: float, width: int, mean: float, deviation: float) -> np.ndarray:
    """Q4_K or Q5_K: 6-bit scales of 32 to 63 (48.4 rms). Each min equals its scale and dmin is d times the integers' mean, so the weights' mean
    is 0."""
    d = _scales(rng, n, std / (48.4 * deviation))
    sc = _bits(rng, n, 8) & 31 | 32
    low, high = sc[:, :4], sc[:, 4:]
    first = low | high >> 4 << 6
    packed = np.concatenate([first, first, (high & 15) * 17], axis=1)
    return np.concatenate([_half(d), _half(d * np.float32(mean)), packed, _bits(rng, n, width)], axis=1)


def _q4_k(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    return _affine(rng, n, std, 128, 7.5, 4.61)


def _q5_k(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    return _affine(rng, n, std, 160, 15.5, 9.23)


def _q6_k(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    sc = (_bits(rng, n, 16) & 63 | 64).view(np.int8)  # 64 to 127, 97.3 rms; half of them negative
    sc = np.where(_bits(rng, n, 16) & 1, sc, -sc).view(np.uint8)
    return np.concatenate([_bits(rng, n, 192), sc, _half(_scales(rng, n, std / (97.3 * 18.5)))], axis=1)


_BLOCKS: dict[DType, Callable[[np.random.Generator, int, float], np.ndarray]] = {Q8_0: _q8_0, Q4_0: _q4_0, Q4_K: _q4_k, Q5_K: _q5_k, Q6_K: _q6_k}
