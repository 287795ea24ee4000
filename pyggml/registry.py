"""The one table of ops and kernels that all else is generated from: public functions, tests, reports, docs.

An op is declared by its shape rule, next to its NumPy reference, cost and cases:

    @op("CUMSUM", inputs="x")
    def cumsum(x, *, dim=0):
        \"\"\"Running sum along `dim`.\"\"\"
        return like(x)

    @cumsum.reference
    def _(x, *, dim):
        return np.cumsum(x, axis=-1 - dim)

The decorated name is the op itself, and calling it builds a node: `y = cumsum(x, dim=1)`. Parameters after the inputs
are attributes. Kernels are plain functions registered beside it with `@kernel("CUMSUM", "cpu")`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import DTypeError, ParamError, ShapeError
from pyggml.tensor import Node, Shape, Tensor

OPS: dict[str, OpDef] = {}
FAMILIES = tuple(sorted(p.parent.name for p in (Path(__file__).parent / "ops").glob("*/defs.py")))


class Spec(NamedTuple):
    """What a rule says of one output: type and dims; for a view also its strides, source and offset in bytes."""

    dtype: DType
    ne: Shape
    nb: Shape | None = None
    view_of: Tensor | None = None
    offs: int = 0


class Cost(NamedTuple):
    """Work of one node: floating-point operations and bytes that must move (each input and output once)."""

    flops: float
    nbytes: float


class Pointwise(NamedTuple):
    """What makes an op pointwise, and so fusable: a scalar expression over its inputs `a`, `b`, `c` and the attributes
    named in `params`. `halves`: a and b are the two halves of the only input's rows (a fused GLU; `swapped` exchanges them).
    `select(node)`: the expression and further operands, constants, where both depend on the node's attributes."""

    expr: str
    params: tuple[str, ...] = ()
    halves: bool = False
    select: Callable[[Node], tuple[str, list[Tensor]]] | None = None


def like(x: Tensor, dt: DType | None = None) -> Spec:
    """A new contiguous tensor of x's dims."""
    return Spec(dt or x.dtype, x.ne)


def out(dt: DType, *ne: int) -> Spec:
    """A new contiguous tensor of these dims."""
    a, b, c, d = (*map(int, ne), 1, 1, 1)[:4]
    return Spec(dt, (a, b, c, d))


def require(ok: bool, op_name: str, message: str, error: type[Exception] = ShapeError) -> None:
    """Raise `error` with `OP: message` unless ok. Rules call it, so a message stands next to the user's line."""
    if not ok:
        raise error(f"{op_name}: {message}")


def require_type(op_name: str, arg: str, x: Tensor, *types: DType) -> None:
    """DTypeError unless x has one of these types."""
    if x.dtype not in types:
        raise DTypeError(f"{op_name}: {arg} is {x.dtype.name}; legal: {', '.join(t.name for t in types)}")


def is_whole(v: Any) -> bool:
    """True for a whole number, Python's or NumPy's; False for bool."""
    return isinstance(v, int | np.integer) and not isinstance(v, bool)


def is_number(v: Any) -> bool:
    """True for a real number that a float64 can hold, Python's or NumPy's, inf and NaN included; False for bool."""
    return isinstance(v, float | np.floating) or (is_whole(v) and abs(int(v)) < 1 << 1023)


class OpDef:
    """One op: `name` as in ggml, `inputs`, `attrs` with defaults, `outputs`, and the functions attached to it.

    `view`: the output shares the input's memory and no kernel runs. `inplace`: index of the input whose memory the
    first output shares and the kernel writes (SET_ROWS, CPY). `moves_data`: the op computes nothing (reports count it).
    """

    def __init__(self, name: str, rule: Callable[..., Spec | tuple[Spec, ...]], inputs: tuple[str, ...], outputs: tuple[str, ...],
                 family: str, view: bool, inplace: int | None, moves_data: bool, limit: float) -> None:
        self.name = name
        self.rule = rule
        self.inputs = inputs
        self.outputs = outputs
        self.family = family
        self.view = view
        self.inplace = inplace
        self.moves_data = moves_data
        self.limit = limit
        self.pointwise: Pointwise | None = None
        self.kernels: dict[str, list[KernelDef]] = {}
        self._reference: Callable[..., Any] | None = None
        self._cost: Callable[[Node], Cost] | None = None
        self._limit: Callable[[Node], float] | None = None
        self._fills: Callable[..., dict[str, Any]] | None = None
        self._cases: Callable[[], Iterator[Any]] | None = None
        self._errors: Callable[[], Iterator[Any]] | None = None
        self._random: Callable[[Any], Any] | None = None
        self._slices: Callable[[Node], Iterable[int]] | None = None
        self.grouped = False
        self.form: Any = None  # how a case is written in ggml's own variables (pyggml.cases.form)
        sig = inspect.signature(rule)
        self.__doc__ = rule.__doc__
        self.__name__ = rule.__name__
        self.__module__ = rule.__module__
        self.__signature__ = sig
        self._names = tuple(sig.parameters)
        if self._names[: len(inputs)] != inputs:
            raise ParamError(f"{name}: the rule's first parameters {self._names} must be the inputs {inputs}")
        self._n_positional = sum(p.kind is not p.KEYWORD_ONLY for p in sig.parameters.values())
        self._defaults = {k: p.default for k, p in sig.parameters.items() if p.default is not p.empty}
        self.attrs: dict[str, Any] = {k: self._defaults.get(k) for k in self._names[len(inputs):]}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build a node: its output, or a tuple of them. ParamError for wrong arguments, DTypeError for an input that is no tensor, and what the rule raises."""
        if len(args) > self._n_positional:
            raise ParamError(f"{self.name}: {len(args)} positional arguments; legal: {self.__name__}{self.__signature__}")
        values = {**self._defaults, **dict(zip(self._names, args, strict=False))}
        for k, v in kwargs.items():
            if k not in self._names or k in self._names[: len(args)]:
                raise ParamError(f"{self.name}: argument {k!r} is unknown or given twice; legal: {self.__name__}{self.__signature__}")
            values[k] = v
        for k in self._names:
            if k not in values:
                raise ParamError(f"{self.name}: argument {k!r} is missing; legal: {self.__name__}{self.__signature__}")
        for k in self.inputs:
            if not (isinstance(values[k], Tensor) or (values[k] is None and self._defaults.get(k, 0) is None)):
                raise DTypeError(f"{self.name}: {k} is {type(values[k]).__name__}; it must be a tensor")
        specs = self.rule(**{k: values[k] for k in self._names})
        if self.inplace is not None:
            _require_writable(self.name, self.inputs[self.inplace], values[self.inputs[self.inplace]])
        many = isinstance(specs, tuple) and not isinstance(specs, Spec)
        node = Node(self, tuple(values[k] for k in self.inputs), {k: values[k] for k in self.attrs})
        node.outputs = tuple(_output(node, i, s) for i, s in enumerate(specs if many else (specs,)))  # type: ignore[arg-type]
        return node.outputs if many else node.outputs[0]

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def reference(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Attach the NumPy float64 reference: arrays in NumPy order (ne reversed) in, attributes by keyword, array(s) out."""
        self._reference = fn
        return fn

    def cost(self, fn: Callable[[Node], Cost]) -> Callable[[Node], Cost]:
        """Attach the cost model of a node; without one an op costs one FLOP per output element and its bytes once."""
        self._cost = fn
        return fn

    def limits(self, fn: Callable[[Node], float]) -> Callable[[Node], float]:
        """Attach the NMSE limit of a node, where one number does not do for all types."""
        self._limit = fn
        return fn

    def fills(self, fn: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Attach what inputs may hold: from the inputs (by keyword) to a filling by name, for those that numbers in [-1, 1] do not suit."""
        self._fills = fn
        return fn

    def cases(self, fn: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
        """Attach a generator of test cases (pyggml.cases)."""
        self._cases = fn
        return fn

    def errors(self, fn: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
        """Attach a generator of calls that the op refuses (pyggml.cases.error)."""
        self._errors = fn
        return fn

    def random(self, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Attach a drawer of random legal cases: from a pyggml.cases.Draw to a case."""
        self._random = fn
        return fn

    def slices(self, fn: Callable[[Node], Iterable[int]], *, grouped: bool = False) -> Callable[[Node], Iterable[int]]:
        """Attach along which dims of its output a node can be computed slice by slice, with the same bits: elements [i, i + n) of such a dim come
        from the same elements of that dim in every input, or from all of it where it has one. `grouped`: an input may also have fewer, of
        which element i * its length // the output's is read. Without it, pointwise ops are taken apart along any dim and others along none."""
        self._slices, self.grouped = fn, grouped
        return fn

    def sliceable(self, node: Node) -> tuple[int, ...]:
        """The dims of `slices`; dim 0 is never one, as rows are what kernels are fast on."""
        if self._slices is not None:
            return tuple(d for d in self._slices(node) if d > 0)
        return (1, 2, 3) if self.pointwise is not None and self.pointwise.select is None else ()

    @property
    def has_reference(self) -> bool:
        """True when a NumPy reference is registered."""
        return self._reference is not None

    @property
    def reference_fn(self) -> Callable[..., Any]:
        """The NumPy reference."""
        if self._reference is None:
            raise ParamError(f"{self.name}: no reference was registered with @{self.__name__}.reference")
        return self._reference

    def all_cases(self) -> list[Any]:
        """All cases of the op; an empty list when none are registered."""
        self.load_cases()
        return list(self._cases()) if self._cases is not None else []

    def all_errors(self) -> list[Any]:
        """All calls that the op is known to refuse."""
        self.load_cases()
        return list(self._errors()) if self._errors is not None else []

    @property
    def random_fn(self) -> Callable[[Any], Any] | None:
        """The drawer of random cases; None when none is registered."""
        self.load_cases()
        return self._random

    def load_cases(self) -> None:
        """Import the family's cases, which stand beside its declarations in a file of their own."""
        package = self.__module__.rpartition(".")[0]
        if package.startswith("pyggml.ops.") and importlib.util.find_spec(f"{package}.cases") is not None:
            importlib.import_module(f"{package}.cases")

    def input_fills(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """How inputs that ordinary numbers do not suit are filled, by name."""
        self.load_cases()
        return self._fills(**inputs) if self._fills is not None else {}

    def limit_of(self, node: Node) -> float:
        """NMSE limit of a node of this op."""
        return self.limit if self._limit is None else self._limit(node)

    def cost_of(self, node: Node) -> Cost:
        """FLOPs and bytes of a node of this op."""
        if self._cost is not None:
            return self._cost(node)
        if self.view:
            return Cost(0, 0)
        moved = default_bytes(node)
        return Cost(0 if self.moves_data else node.out.n_elements, moved)


def default_bytes(node: Node) -> float:
    """Bytes of all distinct inputs and of the outputs, each once."""
    seen = {id(t): t for t in (*node.src, *node.outputs) if t is not None}
    return float(sum(t.n_elements // t.dtype.block * t.dtype.nbytes for t in seen.values()))


def _require_writable(op_name: str, arg: str, x: Tensor) -> None:
    """ParamError when x lies in memory that must not be written: a weight of a mapped file, a read-only array."""
    data = x.root.data
    if data is not None and not data.flags.writeable:
        raise ParamError(f"{op_name}: {arg} lies in read-only memory{f' ({x.root.name})' if x.root.name else ''}; it is written, so it must be writable")


def _output(node: Node, index: int, spec: Spec) -> Tensor:
    if spec.view_of is None:
        return Tensor(spec.dtype, spec.ne, spec.nb, node=node, index=index)
    base = spec.view_of
    return Tensor(spec.dtype, spec.ne, spec.nb, node=node, index=index, root=base.root, offs=base.offs + spec.offs,
                  name=f"{base.name} (view)" if base.name else "")


def op(name: str, inputs: str, *, outputs: str = "out", view: bool = False, inplace: int | None = None, moves_data: bool = False,
       limit: float = 1e-7, family: str = "user") -> Callable[[Callable[..., Any]], OpDef]:
    """Register an op from its shape rule. `inputs` and `outputs` are names separated by blanks; `limit` is the NMSE limit
    of float32 kernels against the reference. The rule sees tensors, never data, and returns one Spec or a tuple of them."""

    def register(rule: Callable[..., Any]) -> OpDef:
        module = rule.__module__.split(".")
        fam = module[2] if module[:2] == ["pyggml", "ops"] else family
        d = OpDef(name, rule, tuple(inputs.split()), tuple(outputs.split()), fam, view, inplace, moves_data or view, limit)
        OPS[name] = d
        return d

    return register


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What a kernel wants done to one of its inputs beforehand: `fn` makes `out` of `source`, and of the tensors of `more`. A plan does
    it once for all that read the same source with the same fn and key."""

    fn: Callable[..., Any]
    source: Tensor
    out: Tensor
    key: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    more: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelDef:
    """A kernel of one backend. `when(node)` gives None when it takes the node, else the reason; the rest is the
    backend's (see pyggml.cpu.launch for the CPU's options)."""

    name: str
    fn: Callable[..., Any]
    when: Callable[[Node], str | None] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def refuses(self, node: Node) -> str | None:
        """None when the kernel takes the node, else why not."""
        return self.when(node) if self.when is not None else None


def kernel(op_name: str, backend: str, *, when: Callable[[Node], str | None] | None = None,
           **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a kernel. Later registrations are tried first, so the general kernel stands first in its file."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        if op_name not in OPS and fn.__module__.startswith("pyggml.ops."):  # a compiling process imports a kernel's file alone
            importlib.import_module(fn.__module__.rpartition(".")[0] + ".defs")
        find_op(op_name).kernels.setdefault(backend, []).insert(0, KernelDef(fn.__name__, fn, when, options))
        return fn

    return register


_items_wanted: ContextVar[int] = ContextVar("items_wanted", default=16)


def items_wanted() -> int:
    """Items into which a kernel should cut its work where each costs something of its own: enough for some threads, or one."""
    return _items_wanted.get()


@contextmanager
def for_one_thread() -> Iterator[None]:
    """Launches made inside are run by one thread, whatever their number of items."""
    token = _items_wanted.set(1)
    try:
        yield
    finally:
        _items_wanted.reset(token)


def find_op(name: str) -> OpDef:
    """The op of that name (case does not matter)."""
    found = OPS.get(name.upper())
    if found is None:
        raise ParamError(f"unknown op {name!r}; known: {', '.join(sorted(OPS))}")
    return found


def load_ops() -> dict[str, OpDef]:
    """All ops, with every family's declarations imported."""
    for family in FAMILIES:
        importlib.import_module(f"pyggml.ops.{family}.defs")
    return OPS


def all_ops() -> list[OpDef]:
    """All ops, family by family, each family in the order of its declarations."""
    place = {f: i for i, f in enumerate(FAMILIES)}
    return sorted(load_ops().values(), key=lambda d: place.get(d.family, len(place)))


def load_kernels(backend: str) -> None:
    """Import the kernels of every family for a backend; a family without such a file has none."""
    load_ops()
    for family in FAMILIES:
        name = f"pyggml.ops.{family}.{backend}"
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def choose_kernel(node: Node, backend: str, unfit: Callable[[KernelDef], str | None] = lambda _: None) -> tuple[KernelDef | None, str]:
    """The first kernel that takes the node, or None and every kernel's reason. `unfit(kernel)`: the backend's own reason not to take it."""
    reasons = []
    for k in node.op.kernels.get(backend, ()):
        why = unfit(k) or k.refuses(node)
        if why is None:
            return k, ""
        reasons.append(f"{k.name}: {why}")
    return None, "; ".join(reasons) or f"no {backend} kernel is registered"
