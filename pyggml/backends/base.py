"""What a backend must offer. A plan is made for it once; its runner then only moves data and calls kernels."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pyggml.dtypes import BF16, bf16_to_f32
from pyggml.errors import GraphError, ShapeError
from pyggml.graph import Graph
from pyggml.plan import Plan
from pyggml.quants import dequantize
from pyggml.tensor import Node, Tensor, encode

PRECISIONS = ("auto", "f32")
"""auto: products of many columns with quantized weights may round both sides to bfloat16; f32: nothing is rounded to less than it is stored in."""


class Runner(Protocol):
    """A plan bound to memory. Inputs are set, `run` computes, results are read."""

    plan: Plan

    def set(self, t: Tensor, value: np.ndarray) -> None:
        """Fill an input. The array's shape is t.ne reversed (leading ones may be dropped)."""

    def get(self, t: Tensor) -> np.ndarray:
        """A copy of a tensor's value in NumPy order; BF16 and block types come as float32."""

    def run(self) -> None:
        """Compute all steps."""


@runtime_checkable
class SteppedRunner(Runner, Protocol):
    """A runner that can stop between any two steps of its plan, for tracing."""

    def run_steps(self, first: int, last: int) -> float:
        """Compute steps `first` to `last` - 1 alone, on memory as the steps before them left it. The seconds that they took."""


class Backend(Protocol):
    """Kernels and memory of one kind of device. Options are given when it is opened; nothing is read from the environment."""

    name: str

    def refuses(self, node: Node) -> str | None:
        """None when a kernel takes the node, else the reason in words."""

    def compile(self, graph: Graph) -> Runner:
        """Plan the graph and bind it to memory. UnsupportedOp names every node that no kernel takes."""


def check_array(t: Tensor, value: np.ndarray) -> np.ndarray:
    """`value` as stored type of t with t's four dims in NumPy order; ShapeError when the shapes differ, DTypeError for what is no array of numbers."""
    try:
        value = np.asarray(value)
    except ValueError as e:
        raise ShapeError(f"{t.name or 'input'}: no array can be made of the {type(value).__name__} given: {e}") from None
    want = t.ne[::-1]
    shape = tuple(value.shape)
    if (1,) * (4 - len(shape)) + shape != want:
        raise ShapeError(f"{t.name or 'input'}: an array of shape {shape} was given; ne {list(t.ne)} takes shape {_natural(want)}")
    return encode(value, t.dtype).reshape(want)


def typed_view(t: Tensor, storage: np.ndarray, offset: int | None = None) -> np.ndarray:
    """A tensor over its root's storage (bytes), in NumPy order; BF16 as uint16 bits, block types as bytes: [..., blocks of a row, bytes of a block].
    `offset`: where in it the tensor begins, if not at t.offs."""
    raw = storage.reshape(-1).view(np.uint8)[t.offs if offset is None else offset:]
    if t.dtype.np is None:
        return as_strided(raw, (*t.ne[:0:-1], t.ne[0] // t.dtype.block, t.dtype.nbytes), (*t.nb[::-1], 1))
    return as_strided(raw[: len(raw) // t.dtype.nbytes * t.dtype.nbytes].view(t.dtype.np), t.ne[::-1], t.nb[::-1])


def natural_shape(t: Tensor) -> tuple[int, ...]:
    """NumPy shape of a tensor without the leading ones that ggml adds."""
    return _natural(t.ne[::-1])


def _natural(shape: tuple[int, ...]) -> tuple[int, ...]:
    first = next((i for i, n in enumerate(shape) if n > 1), 3)
    return shape[first:]


def decode(t: Tensor, stored: np.ndarray) -> np.ndarray:
    """A contiguous copy of a tensor's stored value; BF16 bits and blocks become float32."""
    if t.dtype.is_quantized:
        return dequantize(stored, t.dtype).reshape(t.ne[::-1])
    return bf16_to_f32(stored) if t.dtype is BF16 else np.array(stored, order="C")


def require_input(t: Tensor, inputs: Container[int]) -> None:
    """GraphError unless t is one of a graph's inputs (their ids): constants and states lie in memory of their own, the rest is computed."""
    if id(t) not in inputs:
        kind = t.op if t.node is not None else "a leaf" if t.data is None else "a constant"
        raise GraphError(f"{t.name or 'a tensor'} ({kind}) was given a value; it is not an input of this graph")


def require_inputs_set(graph: Graph, given: set[int]) -> None:
    """GraphError that names inputs without data."""
    missing = [t.name for t in graph.inputs if id(t) not in given]
    if missing:
        raise GraphError(f"inputs without data: {', '.join(missing)}")
