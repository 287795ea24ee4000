"""Test cases of ops: an op call on leaf inputs that know how to fill themselves. One case serves test, perf and support.

    @cumsum.cases
    def _():
        yield case(f32(128, 5, 4, 3), dim=1)
        yield case(f32(5, 128, perm=(1, 0)), note="strided")

A case prints in ggml's form, `CUMSUM(type=f32,ne=[128,5,4,3],dim=1)`, and its data depends on that string alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.dtypes import F16, F32, I32, DType
from pyggml.registry import OPS, OpDef
from pyggml.tensor import Node, Shape, Tensor, contiguous_nb, shape4

Fill = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input of a case: type, ne, byte strides (None: contiguous), and how to fill it (NumPy order, float64 or int64).
    One of a block type is a constant of random blocks, its values within about [-1, 1]."""

    dtype: DType
    ne: Shape
    nb: Shape | None
    fill: Fill

    def tensor(self, name: str) -> Tensor:
        """A fresh input tensor."""
        t = Tensor(self.dtype, self.ne, self.nb, name=name)
        if self.dtype.is_quantized:
            t.data = random_blocks(self.dtype, t.nbytes // self.dtype.nbytes, np.random.default_rng((self.dtype.gguf_id, *self.ne)))
        return t


# Where a block holds float16 scales (byte offsets), and the size of each that makes weights of about 1.
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "q8_0": ((0, 1 / 128),), "q4_0": ((0, 1 / 8),),
    "q4_K": ((0, 1 / 945), (2, 1 / 126)), "q5_K": ((0, 1 / 1953), (2, 1 / 126)), "q6_K": ((208, 1 / 4096),),
}


def random_blocks(dt: DType, n: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes of n random blocks of a type (uint8, one dim)."""
    raw = rng.integers(0, 256, (n, dt.nbytes), dtype=np.uint8)
    for at, scale in _SCALES[dt.name]:
        raw[:, at:at + 2] = rng.uniform(scale / 2, scale, (n, 1)).astype("<f2").view(np.uint8)
    return raw.reshape(-1)


def uniform(lo: float, hi: float) -> Fill:
    """Evenly spread floats."""
    return lambda rng, shape: rng.uniform(lo, hi, shape)


def leaf(dt: DType, ne: Sequence[int], fill: Fill | None = None, *, perm: Sequence[int] | None = None, gap: int = 0) -> Leaf:
    """An input of type `dt`. `perm` permutes its dims after layout as ggml_permute does (dim i moves to perm[i]), so the
    leaf is strided; `gap` leaves that many unused elements after each row."""
    dims = shape4(ne)
    nb = contiguous_nb(dt, (dims[0] + gap, dims[1], dims[2], dims[3]))
    if perm is not None:
        order = (*perm, *range(len(perm), 4))
        new_ne, new_nb = [0] * 4, [0] * 4
        for i, axis in enumerate(order):
            new_ne[axis], new_nb[axis] = dims[i], nb[i]
        dims, nb = shape4(new_ne), (new_nb[0], new_nb[1], new_nb[2], new_nb[3])
    strided = perm is not None or gap
    return Leaf(dt, dims, nb if strided else None, fill or uniform(-1.0, 1.0))


def f32(*ne: int, lo: float = -1.0, hi: float = 1.0, perm: Sequence[int] | None = None, gap: int = 0) -> Leaf:
    """A float32 input spread evenly over [lo, hi]."""
    return leaf(F32, ne, uniform(lo, hi), perm=perm, gap=gap)


def f16(*ne: int, lo: float = -1.0, hi: float = 1.0, perm: Sequence[int] | None = None) -> Leaf:
    """A float16 input spread evenly over [lo, hi]."""
    return leaf(F16, ne, uniform(lo, hi), perm=perm)


def i32(*ne: int, hi: int, lo: int = 0, unique: bool = False) -> Leaf:
    """Whole numbers in [lo, hi), each at most once per row when unique."""

    def fill(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        if not unique:
            return rng.integers(lo, hi, shape)
        rows = math.prod(shape[:-1])
        return np.stack([rng.permutation(hi - lo)[: shape[-1]] + lo for _ in range(rows)]).reshape(shape)

    return leaf(I32, ne, fill)


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op. `limit` overrides the op's NMSE limit (with the reason in `note`); `perf` marks shapes that are timed."""

    op: OpDef
    inputs: tuple[Leaf | None, ...]
    attrs: dict[str, Any]
    note: str = ""
    limit: float | None = None
    perf: bool = False

    def __str__(self) -> str:
        return f"{self.op.name}({','.join(f'{k}={_text(v)}' for k, v in self._fields().items())})"

    def _fields(self) -> dict[str, Any]:
        leaves = [(n, x) for n, x in zip(self.op.inputs, self.inputs, strict=True) if x is not None]
        fields: dict[str, Any] = {}
        for i, (n, x) in enumerate(leaves):
            suffix = "" if i == 0 else f"_{n}"
            fields[f"type{suffix}"] = x.dtype.name
            fields[f"ne{suffix}"] = x.ne
            if x.nb is not None:
                fields[f"nb{suffix}"] = x.nb
        fields.update({f"{k}_out" if k in fields else k: v for k, v in self.attrs.items() if v is not None})
        if self.note:
            fields["note"] = self.note
        return fields

    def build(self) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
        """Fresh input tensors and the node's outputs."""
        ins = tuple(x.tensor(n) if x is not None else None for n, x in zip(self.op.inputs, self.inputs, strict=True))
        outs = self.op(*ins, **self.attrs)
        return ins, outs if isinstance(outs, tuple) else (outs,)

    def node(self) -> Node:
        """The built node."""
        node = self.build()[1][0].node
        assert node is not None
        return node

    def rng(self) -> np.random.Generator:
        """The generator that fills this case: seeded by its printed form."""
        return np.random.default_rng(int.from_bytes(hashlib.sha256(str(self).encode()).digest()[:8], "little"))

    def data(self) -> list[np.ndarray | None]:
        """Values of the inputs in NumPy order (float64 or int64, not yet rounded to the input's type); None for constants."""
        rng = self.rng()
        return [None if x is None or x.dtype.is_quantized else np.asarray(x.fill(rng, x.ne[::-1])) for x in self.inputs]


def _text(v: Any) -> str:
    if isinstance(v, tuple | list):
        return "[" + ",".join(str(x) for x in v) + "]"
    return f"{v:g}" if isinstance(v, float) else str(v)


def case(*inputs: Leaf | None, op: OpDef | None = None, note: str = "", limit: float | None = None, perf: bool = False, **attrs: Any) -> Case:
    """A case of the op whose `cases` generator yields it (or of `op`): inputs in order, attributes by keyword."""
    return Case(op, inputs, attrs, note, limit, perf)  # type: ignore[arg-type]


def perf(*inputs: Leaf | None, **attrs: Any) -> Case:
    """A case that is also timed."""
    return case(*inputs, perf=True, **attrs)


def cases_of(d: OpDef) -> Iterator[Case]:
    """The cases of an op, each bound to it; absent trailing inputs become None."""
    for c in d.all_cases():
        inputs = c.inputs + (None,) * (len(d.inputs) - len(c.inputs))
        yield Case(d, inputs, c.attrs, c.note, c.limit, c.perf)


def all_cases() -> Iterator[Case]:
    """The cases of every op that is registered."""
    for d in OPS.values():
        yield from cases_of(d)
