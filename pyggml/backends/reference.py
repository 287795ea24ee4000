"""The definition of the ops: every node by its NumPy reference, float values carried in float64.

Each tensor that owns memory has a float64 (or integer) shadow, element for element, so that views, in-place writes
and strides mean the same as in real memory. Values of f16 and bf16 tensors are rounded to their type; f32 values are not
(this is the oracle for float32 kernels). What a run writes into a constant (a state) also goes to the constant's own memory, and
every run reads constants anew unless they are read-only, as the weights of a mapped file.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pyggml.backends.base import check_array, require_input, require_inputs_set, typed_view
from pyggml.dtypes import BF16, F16, F64, DType, bf16_to_f32, f32_to_bf16
from pyggml.errors import ShapeError
from pyggml.graph import Graph
from pyggml.plan import Plan, single_steps
from pyggml.quants import dequantize, quantize
from pyggml.tensor import Node, Tensor, encode


class ReferenceRunner:
    """Shadows of all tensors of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.plan = Plan(graph, single_steps(graph))
        self._inputs = {id(t) for t in graph.inputs}
        self._shadow: dict[int, np.ndarray] = {}
        self._given: set[int] = set()

    def set(self, t: Tensor, value: np.ndarray) -> None:
        """Fill an input; values beyond the input's type are rounded to it. GraphError for any other tensor."""
        require_input(t, self._inputs)
        self._view(t)[...] = _as_float(t.dtype, check_array(t, value))
        self._given.add(id(t))

    def get(self, t: Tensor) -> np.ndarray:
        """A copy of the value: float64, or the integer type."""
        return np.array(self._view(t))

    def run(self) -> None:
        """Compute every node in order."""
        self.run_steps(0, len(self.plan.steps))

    def run_steps(self, first: int, last: int) -> float:
        """Compute steps `first` to `last` - 1 alone, on values as the steps before them left them. The seconds that they took."""
        require_inputs_set(self.plan.graph, self._given)
        if first == 0:
            for t in self.plan.graph.leaves:
                if t.data is not None and t.data.flags.writeable:
                    self._shadow.pop(id(t), None)
        start = time.perf_counter()
        for step in self.plan.steps[first:last]:
            self._compute(step.nodes[0])
        return time.perf_counter() - start

    def _compute(self, node: Node) -> None:
        ins = [self._view(s) if s is not None else None for s in node.src]
        with np.errstate(all="ignore"):
            got = node.op.reference_fn(*ins, **node.params)
        for t, value in zip(node.outputs, got if isinstance(got, tuple) else (got,), strict=True):
            value = np.asarray(value)
            if value.size != t.n_elements:
                raise ShapeError(f"{node.op.name}: the reference gave shape {value.shape}; the rule says ne {list(t.ne)}")
            value, live = value.reshape(t.ne[::-1]), self._view(t)
            if t.dtype.is_quantized:
                _write_blocks(t, value, live)
                continue
            rounded = _round(t.dtype, value)
            live[...] = rounded
            if t.root.data is not None:
                with np.errstate(over="ignore"):
                    typed_view(t, t.root.data)[...] = encode(rounded, t.dtype)

    def _view(self, t: Tensor) -> np.ndarray:
        root = t.root
        store = self._shadow.get(id(root))
        if store is None:
            store = self._shadow[id(root)] = _new_shadow(root)
        per_block, nbytes = root.dtype.block, root.dtype.nbytes
        item = store.itemsize
        strides = tuple(b // nbytes * per_block * item for b in t.nb[1:][::-1])
        inner = item if t.dtype.is_quantized else t.nb[0] // nbytes * item
        return as_strided(store[t.offs // nbytes * per_block:], t.ne[::-1], (*strides, inner))


def _new_shadow(root: Tensor) -> np.ndarray:
    n = root.nbytes // root.dtype.nbytes * root.dtype.block
    if root.data is None:
        return np.full(n, np.nan) if not root.dtype.is_int else np.zeros(n, np.int64)
    if root.dtype.is_quantized:
        return dequantize(root.data[: root.nbytes].reshape(-1), root.dtype).astype(np.float64).reshape(-1)
    assert root.dtype.np is not None
    flat = root.data.reshape(-1).view(root.dtype.np)
    return np.array(_as_float(root.dtype, flat))


def _write_blocks(t: Tensor, value: np.ndarray, live: np.ndarray) -> None:
    """Write blocks whose values change, and those alone: a block may not survive that its own values are quantized again."""
    blocks = (*t.ne[::-1][:-1], -1, t.dtype.block)
    new, old = value.reshape(blocks), live.reshape(blocks)
    changed = ((new != old) & ~(np.isnan(new) & np.isnan(old))).any(axis=-1)
    stored = quantize(new[changed].astype(np.float32), t.dtype)
    old[changed] = dequantize(stored, t.dtype)
    live[...] = old.reshape(live.shape)
    if t.root.data is not None:
        typed_view(t, t.root.data)[changed] = stored


def _as_float(dt: DType, stored: np.ndarray) -> np.ndarray:
    if dt is BF16:
        return bf16_to_f32(stored).astype(np.float64)
    return stored.astype(np.int64 if dt.is_int else np.float64)


def _round(dt: DType, value: np.ndarray) -> np.ndarray:
    if dt is F16:
        return value.astype(np.float32).astype(np.float16).astype(np.float64)
    if dt is BF16:
        return bf16_to_f32(f32_to_bf16(value.astype(np.float32))).astype(np.float64)
    return value if dt is F64 or not dt.is_int else value.astype(np.int64)


class ReferenceBackend:
    """NumPy, one op at a time."""

    name = "reference"

    def refuses(self, node: Node) -> str | None:
        """Takes every op that has a reference; views need none."""
        return None if node.op.view or node.op.has_reference else "no reference is registered"

    def compile(self, graph: Graph) -> ReferenceRunner:
        """Shadows are made on first use."""
        return ReferenceRunner(graph)
