"""Test cases of ops: an op call on leaf inputs that know how to fill themselves. One case serves test, perf and support.

    @cumsum.cases
    def _():
        yield case(f32(128, 5, 4, 3), dim=1)
        yield case(f32(5, 128, perm=(1, 0)), note="strided")

A case prints in ggml's form, `CUMSUM(type=f32,ne=[128,5,4,3],dim=1)`, which pyggml.casetext reads back, and its data depends on
that string and a seed alone. An op whose cases ggml writes in other variables than types and dims has a `form`:

    @form(mul_mat)
    def _mm(type_a, type_b, m, n, k, bs=(1, 1), nr=(1, 1)): return case(leaf(type_a, (k, m, *bs)), ...)
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from pyggml.dtypes import F16, F32, I32, DType, dtype
from pyggml.errors import ParamError
from pyggml.registry import OpDef, all_ops
from pyggml.tensor import Node, Shape, Tensor, contiguous_nb, shape4

Fill = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
T = TypeVar("T")
LARGE_ELEMENTS, LARGE_FLOPS = 4 << 20, 6e8


# Inputs

@dataclass(frozen=True, slots=True)
class Leaf:
    """An input of a case: type, ne, byte strides (None: contiguous), and how to fill it (NumPy order, float64 or int64; None:
    as the op says, else numbers in [-1, 1]). One of a block type is a constant of random blocks, its values within about [-1, 1]."""

    dtype: DType
    ne: Shape
    nb: Shape | None = None
    fill: Fill | None = None

    def tensor(self, name: str, rng: np.random.Generator | None = None) -> Tensor:
        """A fresh input tensor; blocks are made when there is a generator for them."""
        t = Tensor(self.dtype, self.ne, self.nb, name=name)
        if rng is not None and self.dtype.name in _SCALES:
            t.data = random_blocks(self.dtype, t.nbytes // self.dtype.nbytes, rng)
        return t


# Where a block holds float16 scales (byte offsets), and the size of each that makes weights of about 1.
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "q8_0": ((0, 1 / 128),), "q4_0": ((0, 1 / 8),), "q4_1": ((0, 1 / 16), (2, 1)), "q5_0": ((0, 1 / 16),), "q5_1": ((0, 1 / 32), (2, 1)),
    "q2_K": ((80, 1 / 45), (82, 1 / 15)), "q3_K": ((108, 1 / 128),),
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


def whole(lo: int, hi: int) -> Fill:
    """Whole numbers in [lo, hi)."""
    return lambda rng, shape: rng.integers(lo, hi, shape)


def distinct(n: int) -> Fill:
    """Whole numbers in [0, n), each at most once per row."""
    return lambda rng, shape: np.stack([rng.permutation(n)[: shape[-1]] for _ in range(math.prod(shape[:-1]))]).reshape(shape)


def leaf(dt: DType | str, ne: Sequence[int], fill: Fill | None = None, *, perm: Sequence[int] | None = None, gap: int = 0,
         inside: Sequence[int] | None = None) -> Leaf:
    """An input of type `dt`. `perm` permutes its dims after layout as ggml_permute does (dim i moves to perm[i]), so the
    leaf is strided; `gap` leaves that many unused elements after each row; `inside` lays it out as the first elements, in
    each dim, of a contiguous tensor of those dims."""
    kind, dims = dtype(dt), shape4(ne)
    room = shape4(inside) if inside is not None else (dims[0] + gap, dims[1], dims[2], dims[3])
    nb = contiguous_nb(kind, room)
    if perm is not None:
        order = (*perm, *range(len(perm), 4))
        new_ne, new_nb = [0] * 4, [0] * 4
        for i, axis in enumerate(order):
            new_ne[axis], new_nb[axis] = dims[i], nb[i]
        dims, nb = shape4(new_ne), (new_nb[0], new_nb[1], new_nb[2], new_nb[3])
    return Leaf(kind, dims, None if nb == contiguous_nb(kind, dims) else nb, fill)


def f32(*ne: int, lo: float | None = None, hi: float | None = None, perm: Sequence[int] | None = None, gap: int = 0,
        inside: Sequence[int] | None = None) -> Leaf:
    """A float32 input, spread evenly over [lo, hi] where these are given."""
    return leaf(F32, ne, None if lo is None or hi is None else uniform(lo, hi), perm=perm, gap=gap, inside=inside)


def f16(*ne: int, perm: Sequence[int] | None = None, gap: int = 0) -> Leaf:
    """A float16 input."""
    return leaf(F16, ne, perm=perm, gap=gap)


def i32(*ne: int, hi: int | None = None, lo: int = 0, unique: bool = False) -> Leaf:
    """Whole numbers in [lo, hi) where hi is given, each at most once per row when unique."""
    return leaf(I32, ne, None if hi is None else distinct(hi) if unique else whole(lo, hi))


# Cases

@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op. `limit` overrides the op's NMSE limit (with the reason in `note`); `perf` marks shapes that are timed;
    `shown` holds the variables of the op's form where the case was made by it."""

    op: OpDef
    inputs: tuple[Leaf | None, ...]
    attrs: dict[str, Any]
    note: str = ""
    limit: float | None = None
    perf: bool = False
    shown: dict[str, Any] | None = None

    def __str__(self) -> str:
        fields = {**(self._fields() if self.shown is None else self.shown), **({"note": self.note} if self.note else {})}
        return f"{self.op.name}({','.join(f'{k}={text(v)}' for k, v in fields.items())})"

    def _fields(self) -> dict[str, Any]:
        leaves = [(n, x) for n, x in zip(self.op.inputs, self.inputs, strict=True) if x is not None]
        fields: dict[str, Any] = {}
        for i, (n, x) in enumerate(leaves):
            suffix = "" if i == 0 else f"_{n}"
            fields[f"type{suffix}"] = x.dtype.name
            fields[f"ne{suffix}"] = x.ne
            if x.nb is not None:
                fields[f"nb{suffix}"] = x.nb
        fields.update({f"{k}_out" if leaves and k in ("type", "ne", "nb") else k: v for k, v in self.attrs.items() if v is not None})
        return fields

    def build(self, seed: int = 0) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
        """Fresh input tensors and the node's outputs. The seed is that of constant inputs."""
        return self._build(self.rng(seed))

    def _build(self, rng: np.random.Generator | None) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
        ins = tuple(x.tensor(n, rng) if x is not None else None for n, x in zip(self.op.inputs, self.inputs, strict=True))
        outs = self.op(*ins, **self.attrs)
        return ins, outs if isinstance(outs, tuple) else (outs,)

    def node(self) -> Node:
        """The node, for questions that need no data."""
        node = self._build(None)[1][0].node
        assert node is not None
        return node

    @property
    def n_elements(self) -> int:
        """Elements of all inputs and outputs."""
        node = self.node()
        return sum(t.n_elements for t in (*node.src, *node.outputs) if t is not None)

    @property
    def large(self) -> bool:
        """True when the case takes more than a moment in float64: tests leave it out unless it is asked for."""
        return self.n_elements > LARGE_ELEMENTS or self.op.cost_of(self.node()).flops > LARGE_FLOPS

    def nmse_limit(self, node: Node) -> float:
        """The NMSE that a backend's result may have against the reference."""
        return self.op.limit_of(node) if self.limit is None else self.limit

    def rng(self, seed: int = 0) -> np.random.Generator:
        """The generator that fills this case: seeded by its printed form and `seed`."""
        return np.random.default_rng([int.from_bytes(hashlib.sha256(str(self).encode()).digest()[:8], "little"), seed])

    def data(self, seed: int = 0) -> list[np.ndarray | None]:
        """Values of the inputs in NumPy order (float64 or int64, not yet rounded to the input's type); None for constants."""
        rng = self.rng(seed)
        fills = self.op.input_fills(dict(zip(self.op.inputs, self.inputs, strict=True)))
        values: list[np.ndarray | None] = []
        for name, x in zip(self.op.inputs, self.inputs, strict=True):
            if x is None or x.dtype.is_quantized:
                values.append(None)
                continue
            fill: Fill = x.fill or fills.get(name) or (whole(-100, 100) if x.dtype.is_int else uniform(-1.0, 1.0))
            values.append(np.asarray(fill(rng, x.ne[::-1])))
        return values


def text(v: Any) -> str:
    """A value as case strings show it: 1 and 0 for bool, floats without loss, lists without blanks."""
    match v:
        case bool():
            return str(int(v))
        case float() | np.floating():
            return repr(float(v)).removesuffix(".0")
        case tuple() | list():
            return "[" + ",".join(text(x) for x in v) + "]"
        case DType():
            return v.name
    return str(v)


def case(*inputs: Leaf | None, op: OpDef | None = None, note: str = "", limit: float | None = None, perf: bool = False, **attrs: Any) -> Case:
    """A case of the op whose `cases` generator yields it (or of `op`): inputs in order, attributes by keyword."""
    return Case(op, inputs, attrs, note, limit, perf)  # type: ignore[arg-type]


def perf(*inputs: Leaf | None, **attrs: Any) -> Case:
    """A case that is also timed."""
    return case(*inputs, perf=True, **attrs)


def bound(c: Case, d: OpDef) -> Case:
    """A case made for an op: bound to it, absent trailing inputs None."""
    return replace(c, op=d, inputs=c.inputs + (None,) * (len(d.inputs) - len(c.inputs)))


def cases_of(d: OpDef) -> Iterator[Case]:
    """The cases of an op."""
    for c in d.all_cases():
        yield bound(c, d)


def all_cases() -> Iterator[Case]:
    """The cases of every op."""
    for d in all_ops():
        yield from cases_of(d)


# Forms: cases in ggml's own variables

class Form:
    """How test-backend-ops writes an op's cases: variables with defaults, and the case that they stand for. Variables before
    the `*` are always printed, the others where they differ from their default; `fixed` are variables of ggml's that pyggml
    knows one value of."""

    def __init__(self, d: OpDef, make: Callable[..., Case], fixed: dict[str, Any]) -> None:
        self.op = d
        self.fixed = fixed
        self._make = make
        self._signature = inspect.signature(make)
        self.params = self._signature.parameters
        self.required = {k for k, p in self.params.items() if p.default is p.empty}

    def __call__(self, *args: Any, note: str = "", limit: float | None = None, perf: bool = False, **values: Any) -> Case:
        try:
            given = self._signature.bind(*args, **values)
        except TypeError as e:
            raise ParamError(f"{self.op.name}: {e}; legal: {', '.join(self.params)}") from None
        given.apply_defaults()
        shown = {k: v for k, v in given.arguments.items() if self.params[k].kind is not inspect.Parameter.KEYWORD_ONLY or v != self.params[k].default}
        c = bound(self._make(**given.arguments), self.op)
        return replace(c, shown=shown, note=note, limit=c.limit if limit is None else limit, perf=perf or c.perf)


def form(d: OpDef, **fixed: Any) -> Callable[[Callable[..., Case]], Form]:
    """Register a function from ggml's variables to a case as the op's form."""

    def register(make: Callable[..., Case]) -> Form:
        made = d.form = Form(d, make, fixed)
        return made

    return register


# Calls that are refused

@dataclass(frozen=True, slots=True)
class ErrorCase:
    """A call that must fail with an error of this class whose message holds `match`: when the node is built or, for what only
    data can show, when it runs."""

    op: OpDef
    error: type[Exception]
    match: str
    inputs: tuple[Leaf | None, ...]
    attrs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.op.name}: {self.match}"

    def as_case(self) -> Case:
        """The call as a case (which cannot be built, or fails when it runs)."""
        return Case(self.op, self.inputs, self.attrs)


def error(kind: type[Exception], match: str, /, *inputs: Leaf | None, **attrs: Any) -> ErrorCase:
    """A refused call of the op whose `errors` generator yields it."""
    return ErrorCase(None, kind, match, inputs, attrs)  # type: ignore[arg-type]


def errors_of(d: OpDef) -> Iterator[ErrorCase]:
    """The calls that an op is known to refuse."""
    for e in d.all_errors():
        yield replace(e, op=d, inputs=e.inputs + (None,) * (len(d.inputs) - len(e.inputs)))


# Random cases

class Draw(Protocol):
    """Where random cases take their choices from: a seeded generator, or hypothesis, which then finds the smallest failing one."""

    def integer(self, lo: int, hi: int) -> int:
        """A whole number in [lo, hi]."""

    def choice(self, values: Sequence[T]) -> T:
        """One of the values."""


class RandomDraw:
    """Choices of a NumPy generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def integer(self, lo: int, hi: int) -> int:
        """A whole number in [lo, hi]."""
        return int(self.rng.integers(lo, hi + 1))

    def choice(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.integer(0, len(values) - 1)]


_EDGES = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025)


def draw_dim(draw: Draw, most: int, least: int = 1) -> int:
    """A size in [least, most]: half of the time one beside a power of two, where kernels change their pace."""
    edges = [n for n in _EDGES if least <= n <= most]
    near_edge = draw.choice((True, False))
    return draw.choice(edges) if edges and near_edge else draw.integer(least, most)


def draw_ne(draw: Draw, rank: int = 4, most: int = 4096, least: int = 1) -> tuple[int, ...]:
    """Dims of a tensor of at most `most` elements (more only where `least` asks for it)."""
    ne: list[int] = []
    for d in range(rank):
        room = max(least, most // (math.prod(ne) * least ** (rank - d - 1)))
        ne.append(draw_dim(draw, min(room, 300 if d == 0 else 40), least))
    return tuple(ne)


def draw_leaf(draw: Draw, dt: DType | str, ne: Sequence[int], fill: Fill | None = None, layouts: Sequence[str] = ("plain", "gap", "perm")) -> Leaf:
    """An input of these dims: contiguous, with unused elements after each row, or with dims in another order in memory."""
    match draw.choice(layouts):
        case "gap":
            return leaf(dt, ne, fill, gap=draw.integer(1, 9))
        case "perm":
            dims = shape4(ne)
            order = draw.choice(((1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3), (3, 2, 1, 0), (0, 1, 3, 2)))
            return leaf(dt, [dims[axis] for axis in order], fill, perm=order)
    return leaf(dt, ne, fill)


def random_case(d: OpDef, draw: Draw) -> Case:
    """A random legal case of an op; ParamError when it has no drawer."""
    if d.random_fn is None:
        raise ParamError(f"{d.name}: no drawer of random cases was registered with @{d.__name__}.random")
    return bound(d.random_fn(draw), d)
