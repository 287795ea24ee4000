"""Tensors and nodes: the graph language's two data classes. Shapes and strides are ggml's.

`ne` holds the four dims, ne[0] innermost, and `nb` the strides in bytes (for block types nb[0] is the size of one
block). Arrays handed out or taken in are NumPy's, with shape `ne[::-1]`; that border is the only place where the
order is reversed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyggml.dtypes import BF16, DType, dtype, f32_to_bf16, from_numpy
from pyggml.errors import DTypeError, ShapeError

if TYPE_CHECKING:
    from pyggml.registry import OpDef

Shape = tuple[int, int, int, int]
_sequence = itertools.count()


def shape4(ne: Sequence[int], what: str = "tensor") -> Shape:
    """`ne` as four dims, padded with ones; ShapeError unless it has 1 to 4 positive whole numbers."""
    dims = tuple(ne) if isinstance(ne, Iterable) else ()
    if not 1 <= len(dims) <= 4 or not all(isinstance(n, int | np.integer) and n >= 1 for n in dims):
        raise ShapeError(f"{what}: ne {list(dims) or ne} must be 1 to 4 whole numbers >= 1")
    a, b, c, d = (*(int(n) for n in dims), 1, 1, 1)[:4]
    return a, b, c, d


def contiguous_nb(dt: DType, ne: Shape) -> Shape:
    """Strides in bytes of a tensor stored without gaps."""
    nb1 = dt.row_bytes(ne[0])
    return dt.nbytes, nb1, nb1 * ne[1], nb1 * ne[1] * ne[2]


class Tensor:
    """One value of a graph: a leaf (input, constant, state) or an output of a node.

    A view shares its root's storage: `root` is the tensor that owns the memory (itself when it is no view) and
    `offs` the distance in bytes from its start. `data` is set on leaves whose memory exists already (weights,
    states); leaves without data are inputs.
    """

    __slots__ = ("node", "index", "dtype", "ne", "nb", "name", "root", "offs", "data")

    def __init__(self, dt: DType, ne: Shape, nb: Shape | None = None, *, name: str = "", node: Node | None = None, index: int = 0,
                 root: Tensor | None = None, offs: int = 0, data: np.ndarray | None = None) -> None:
        self.dtype = dt
        self.ne = ne
        self.nb = contiguous_nb(dt, ne) if nb is None else nb
        self.name = name
        self.node = node
        self.index = index
        self.root: Tensor = self if root is None else root
        self.offs = offs
        self.data = data

    @property
    def op(self) -> str:
        """Name of the op that makes this tensor; NONE for a leaf, as in ggml."""
        return self.node.op.name if self.node is not None else "NONE"

    @property
    def src(self) -> tuple[Tensor | None, ...]:
        """Inputs of the node that makes this tensor; absent optional inputs are None."""
        return self.node.src if self.node is not None else ()

    @property
    def params(self) -> dict[str, Any]:
        """Attributes of the node that makes this tensor."""
        return self.node.params if self.node is not None else {}

    @property
    def n_elements(self) -> int:
        """Product of ne."""
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def n_rows(self) -> int:
        """ne[1] * ne[2] * ne[3]."""
        return self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last one."""
        return self.dtype.row_bytes(self.dtype.block) + (self.ne[0] // self.dtype.block - 1) * self.nb[0] + sum(
            (self.ne[i] - 1) * self.nb[i] for i in (1, 2, 3))

    @property
    def is_contiguous(self) -> bool:
        """True when the elements follow each other without gaps (strides of dims of size 1 do not matter)."""
        return self.contiguous_from(0)

    def contiguous_from(self, dim: int) -> bool:
        """True when dims >= `dim` follow each other without gaps, given the stride of `dim` (0: also inside rows)."""
        want = self.dtype.nbytes if dim == 0 else self.nb[dim]
        for i in range(dim, 4):
            n = self.ne[0] // self.dtype.block if i == 0 else self.ne[i]
            if self.ne[i] > 1 and n > 1 and self.nb[i] != want:
                return False
            want *= n
        return True

    @property
    def rows_contiguous(self) -> bool:
        """True when the elements of dim 0 follow each other."""
        return self.nb[0] == self.dtype.nbytes or self.ne[0] == self.dtype.block

    def __repr__(self) -> str:
        strides = "" if self.is_contiguous else f" nb={list(self.nb)}"
        return f"{self.name or '?'}: {self.op} {self.dtype.name} {list(self.ne)}{strides}"


class Scope(NamedTuple):
    """Where in a model a node was built: the part of a layer ("conv", "attention", ...; "" outside of any) and the layer's number."""

    part: str = ""
    layer: int | None = None


_scope: ContextVar[Scope] = ContextVar("scope", default=Scope())  # noqa: B039 - a NamedTuple cannot change


@contextmanager
def scope(part: str | None = None, layer: int | None = None) -> Iterator[None]:
    """Nodes built inside belong to this part of a model and this layer; what is not given stays as it is outside. Reports count by it.

    >>> import pyggml as pg
    >>> with pg.scope("conv", layer=3):
    ...     y = pg.silu(pg.tensor([8]))
    >>> y.node.part, y.node.layer
    ('conv', 3)
    """
    outer = _scope.get()
    token = _scope.set(Scope(outer.part if part is None else part, outer.layer if layer is None else layer))
    try:
        yield
    finally:
        _scope.reset(token)


def current_scope() -> Scope:
    """The scope in which a node built now would be."""
    return _scope.get()


class Node:
    """One op applied to tensors: `op`, `src`, `params`, `outputs`. `seq` grows with every node built: execution order.
    `part` and `layer` say where in a model it was built (see `scope`)."""

    __slots__ = ("op", "src", "params", "outputs", "seq", "part", "layer")

    def __init__(self, op: OpDef, src: tuple[Tensor | None, ...], params: dict[str, Any]) -> None:
        self.op = op
        self.src = src
        self.params = params
        self.outputs: tuple[Tensor, ...] = ()
        self.seq = next(_sequence)
        self.part, self.layer = _scope.get()

    @property
    def out(self) -> Tensor:
        """The first output."""
        return self.outputs[0]

    @property
    def name(self) -> str:
        """Name of the first output."""
        return self.outputs[0].name

    def __repr__(self) -> str:
        args = ", ".join("None" if t is None else f"{t.name or '?'} {list(t.ne)}" for t in self.src)
        return f"{self.op.name}({args}) -> {', '.join(f'{t.dtype.name} {list(t.ne)}' for t in self.outputs)}"


def tensor(value: Sequence[int] | np.ndarray, dt: str | DType | None = None, *, name: str = "", nb: Sequence[int] | None = None) -> Tensor:
    """A leaf: an input of shape `ne` (a list of 1 to 4 numbers), or a constant holding a NumPy array.

    Arrays of float64 are kept as f64; pass `dt` to store them as another plain type. `nb` gives an input strides
    in bytes of its own (a strided leaf).

    >>> tensor([128, 5], "f32", name="x")
    x: NONE f32 [128, 5, 1, 1]
    >>> tensor(np.ones((2, 3), np.float32)).ne
    (3, 2, 1, 1)
    """
    if isinstance(value, np.ndarray):
        if nb is not None:
            raise ShapeError("tensor: nb was given with an array, which is stored without gaps; legal with ne, for an input")
        return _constant(value, dt, name)
    ne = shape4(value)
    t = Tensor(dtype(dt or "f32"), ne, name=name)
    if nb is not None:
        strides = tuple(nb) if isinstance(nb, Iterable) else ()
        if len(strides) != 4 or not all(isinstance(b, int | np.integer) and b >= 0 and b % t.dtype.nbytes == 0 for b in strides):
            raise ShapeError(f"tensor: nb {list(strides) or nb} must be 4 multiples of {t.dtype.nbytes}")
        t.nb = (int(strides[0]), int(strides[1]), int(strides[2]), int(strides[3]))
    return t


def _constant(value: np.ndarray, dt: str | DType | None, name: str) -> Tensor:
    if not 1 <= value.ndim <= 4:
        raise ShapeError(f"tensor: an array of {value.ndim} dims; legal are 1 to 4")
    want = from_numpy(value.dtype) if dt is None else dtype(dt)
    return Tensor(want, shape4(value.shape[::-1]), name=name, data=encode(value, want))


def encode(value: np.ndarray, dt: DType) -> np.ndarray:
    """Contiguous array that stores `value` as plain type `dt` (BF16 as uint16 bits, rounded to nearest even; uint16 arrays are
    its bits already). DTypeError for block types, for what is no real number, and for fractions and numbers out of range as a
    whole-number type."""
    if dt.np is None:
        raise DTypeError(f"an array cannot be stored as {dt.name}; give the blocks as a GGUF file or raw bytes")
    if value.dtype.kind not in ("iub" if dt.is_int else "iubf"):
        raise DTypeError(f"an array of {value.dtype} cannot be stored as {dt.name}")
    if dt is BF16:
        if value.dtype == np.uint16:
            return np.ascontiguousarray(value)
        return f32_to_bf16(np.asarray(value, np.float32))
    if dt.is_int and value.size and not np.can_cast(value.dtype, dt.np):
        least, most = int(value.min()), int(value.max())
        if least < np.iinfo(dt.np).min or most > np.iinfo(dt.np).max:
            raise DTypeError(f"an array of {value.dtype} from {least} to {most} cannot be stored as {dt.name}")
    return np.ascontiguousarray(value, dtype=dt.np)


def raw_tensor(raw: np.ndarray, dt: DType, ne: Sequence[int], name: str = "") -> Tensor:
    """A constant over memory that exists already (a weight in a mapped file, a state): `raw` is uint8, one dim, no copy."""
    dims = shape4(ne, name or "raw_tensor")
    t = Tensor(dt, dims, name=name, data=raw)
    if raw.dtype != np.uint8 or raw.ndim != 1 or not raw.flags.c_contiguous or raw.nbytes < t.nbytes:
        raise ShapeError(f"{name or 'raw_tensor'}: {raw.dtype} of shape {raw.shape}; {dt.name} {list(dims)} needs {t.nbytes} bytes of uint8 in one dim")
    return t
