"""Graphs with some ops swapped, and runners that note what they run: what `bench` puts in place of a context's backend.

A variant says what stands for some ops. Each graph is rebuilt node by node before it is planned, with the stand-in called in the op's
place, so views, fusion and memory are planned as for any other graph.

  free ops (--noop): the op's kernel is replaced by one that does nothing. Inside a fused chain a pointwise op becomes the
    identity, as the chain's other ops still have to run. The values are garbage; what the rest costs is what is wanted.
  a kernel (--replace): a function with a kernel's arguments, (outputs..., inputs..., i0, i1); when @kernel registered it, its
    options (params, items, scratch, when, ...) hold too. Nodes that it refuses keep their own kernel.
  a graph (--replace): a function with the op's own signature, which builds the result from other ops. Its tensors must have the
    type and ne of the op's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyggml.backends import Backend, Runner
from pyggml.backends.cpu import CpuBackend, CpuRunner
from pyggml.errors import ParamError, UnsupportedOp
from pyggml.graph import Graph
from pyggml.plan import Plan, Step
from pyggml.registry import OPS, KernelDef, OpDef, Pointwise, find_op, load_kernels
from pyggml.tensor import Node, Tensor, scope
from pyggml.tools.common import load_function
from pyggml.tools.graph import step_bytes

Build = Callable[..., Any]  # called as the op is: tensors, then attributes by keyword; gives the op's outputs


@dataclass(frozen=True, slots=True)
class Variant:
    """What stands for some ops, by their names; None makes an op free. `text` names the variant in results."""

    text: str
    stand_ins: Mapping[str, Build | None]

    @property
    def free(self) -> bool:
        """True for --noop, whose output is no output."""
        return None in self.stand_ins.values()


def nothing(i0: Any, i1: Any) -> None:
    """The kernel of a free op."""


_NOTHING = KernelDef("nothing", nothing, None, {"operands": lambda node: [], "items": lambda node: 1, "chunk": lambda node: 1})


def free_ops(text: str) -> Variant:
    """The variant in which an op costs nothing, or several that are joined by +; ParamError for an op that costs nothing anyway."""
    load_kernels("cpu")
    ops = [find_op(name) for name in text.split("+")]
    for op in ops:
        if op.view:
            raise ParamError(f"--noop {op.name}: a view has no kernel and costs nothing")
    return Variant("noop " + "+".join(op.name for op in ops), {op.name: None for op in ops})


def replaced_op(text: str) -> Variant:
    """The variant that OP=MODULE:FUNCTION or OP=FILE.py:FUNCTION describes."""
    name, equals, where = text.partition("=")
    if not equals:
        raise ParamError(f"--replace {text!r}; legal: OP=MODULE:FUNCTION or OP=FILE.py:FUNCTION")
    load_kernels("cpu")
    op = find_op(name)
    before = {d.name: list(d.kernels.get("cpu", ())) for d in OPS.values()}
    fn = load_function(where)
    registered = next((k for k in op.kernels.get("cpu", ()) if k.fn is fn), None)
    for d in OPS.values():  # a file that registers kernels would otherwise change the base that it is held against
        if d.name in before:
            d.kernels.setdefault("cpu", [])[:] = before[d.name]
    label = f"{op.name}={where}"
    if registered is None and not _takes_items(op, label, fn):
        return Variant(label, {op.name: lambda *args, **kwargs: _checked(op, label, fn(*args, **kwargs), args, kwargs)})
    own = copy.copy(op)
    own.pointwise = None
    own.kernels = {"cpu": [registered or KernelDef(fn.__name__, fn), *op.kernels.get("cpu", ())]}
    return Variant(label, {op.name: own})


def _takes_items(op: OpDef, label: str, fn: Callable[..., Any]) -> bool:
    """True for a kernel, False for a graph; ParamError for a function that can be called as neither."""
    try:
        signature = inspect.signature(fn)
        if list(signature.parameters)[-2:] == ["i0", "i1"]:
            return True
        signature.bind(*op.inputs, **dict.fromkeys(op.attrs))
    except (TypeError, ValueError) as e:
        legal = f"FUNCTION({', '.join([*op.inputs, *op.attrs])}), or a kernel, whose last arguments are i0 and i1"
        raise ParamError(f"--replace {label}: {e}; legal: {legal}") from None
    return False


def _checked(op: OpDef, label: str, made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    want, got = op(*args, **kwargs), made
    want, got = (t if isinstance(t, tuple) else (t,) for t in (want, got))
    if len(want) != len(got) or not all(isinstance(g, Tensor) and (g.ne, g.dtype) == (w.ne, w.dtype) for w, g in zip(want, got, strict=True)):
        shapes = [" and ".join(f"{t.dtype.name} {list(t.ne)}" if isinstance(t, Tensor) else type(t).__name__ for t in ts) for ts in (got, want)]
        raise ParamError(f"--replace {label}: it gave {shapes[0]}; {op.name} gives {shapes[1]}")
    return made


# Rebuilding

def rebuilt(graph: Graph, stand_in: Callable[[Node], Build]) -> tuple[Graph, dict[int, Tensor]]:
    """The graph made anew, each node by what `stand_in` gives for it, and the new tensor for each old one's id. Leaves are shared."""
    new: dict[int, Tensor] = {}
    for node in graph.nodes:
        src = [None if t is None else new.get(id(t), t) for t in node.src]
        with scope(node.part, node.layer):
            made = stand_in(node)(*src, **node.params)
        for old, t in zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True):
            if t.nb != old.nb and old.root is old:
                raise ParamError(f"{node.op.name} ({node.name}): the tensor in its place has nb {list(t.nb)}; it must be {list(old.nb)}, without gaps")
            if t.node is not None and t.node.op.name == node.op.name:
                t.name = old.name
            new[id(old)] = t
    return Graph([new.get(id(t), t) for t in graph.outputs]), new


def _free(op: OpDef, alone: bool) -> OpDef:
    """The op without its work: alone in its step nothing at all, else the identity."""
    own = copy.copy(op)
    own.pointwise = None if alone or op.pointwise is None else Pointwise("a", halves=op.pointwise.halves)
    own.kernels = {"cpu": [_NOTHING]}
    return own


def with_stand_ins(graph: Graph, stand_ins: Mapping[str, Build | None], plan: Callable[[Graph], Plan]) -> tuple[Graph, dict[int, Tensor]]:
    """The graph with what stands for its ops; `plan` tells which of the free ones have a step of their own."""
    free = {name for name, build in stand_ins.items() if build is None}
    steps = [s for step in plan(graph).steps for s in step.leaves()] if free else []
    alone = {n.seq for step in steps if all(n.op.name in free for n in step.nodes) for n in step.nodes}

    def stand_in(node: Node) -> Build:
        if node.op.name not in stand_ins:
            return node.op
        return stand_ins[node.op.name] or _free(node.op, node.seq in alone)

    return rebuilt(graph, stand_in)


# Running

@dataclass(slots=True)
class Work:
    """What the runs of a test came to: FLOPs and bytes of their steps, nodes of the largest graph."""

    n_runs: int = 0
    flops: float = 0.0
    nbytes: float = 0.0
    n_nodes: int = 0


@dataclass(slots=True)
class StepTimes:
    """Seconds of a plan's steps, those inside of regions for themselves, summed over its runs."""

    plan: Plan
    steps: list[Step]
    seconds: np.ndarray
    n_runs: int = 0


@dataclass(slots=True)
class Notes:
    """What a backend and its runners note: work always, times per step while `profiling`; the most nodes swapped in one graph."""

    work: Work = field(default_factory=Work)
    n_swapped: int = 0
    profiling: bool = False
    times: dict[int, StepTimes] = field(default_factory=dict)  # by id of the plan


class BenchBackend:
    """`inner`, except that ops are swapped and runs are noted. Put in place of a context's backend."""

    def __init__(self, inner: Backend, stand_ins: Mapping[str, Build | None], notes: Notes) -> None:
        if stand_ins and not isinstance(inner, CpuBackend):
            raise UnsupportedOp(f"backend {inner.name}: ops are swapped on the cpu backend alone")
        self.inner = inner
        self.stand_ins = stand_ins
        self.notes = notes
        self.name = inner.name
        self.threads = int(getattr(inner, "threads", 1))

    def refuses(self, node: Node) -> str | None:
        """As the inner backend does."""
        return self.inner.refuses(node)

    def compile(self, graph: Graph) -> BenchRunner:
        """A runner that notes what it runs."""
        new: dict[int, Tensor] = {}
        n_swapped = sum(n.op.name in self.stand_ins for n in graph.nodes)
        self.notes.n_swapped = max(self.notes.n_swapped, n_swapped)
        if isinstance(self.inner, CpuBackend) and n_swapped:
            graph, new = with_stand_ins(graph, self.stand_ins, self.inner.plan)
        return BenchRunner(self.notes, self.inner.compile(graph), new)


class BenchRunner:
    """A runner that notes its runs and answers to the tensors of the graph before its ops were swapped."""

    def __init__(self, notes: Notes, inner: Runner, new: dict[int, Tensor]) -> None:
        self.notes = notes
        self.inner = inner
        self.plan = inner.plan
        self._new = new
        self._flops = sum(n.op.cost_of(n).flops for n in self.plan.graph.nodes)
        self._nbytes = sum(step_bytes(s) for s in self.plan.steps)

    def set(self, t: Tensor, value: np.ndarray) -> None:
        """Fill an input."""
        self.inner.set(t, value)

    def get(self, t: Tensor) -> np.ndarray:
        """A copy of a tensor's value."""
        return self.inner.get(self._new.get(id(t), t))

    def buffers(self) -> tuple[np.ndarray, ...]:
        """The inner runner's memory."""
        return self.inner.buffers() if isinstance(self.inner, CpuRunner) else ()

    def run(self) -> None:
        """Compute all steps."""
        work = self.notes.work
        work.n_runs += 1
        work.flops += self._flops
        work.nbytes += self._nbytes
        work.n_nodes = max(work.n_nodes, self.plan.graph.n_nodes)
        if self.notes.profiling and isinstance(self.inner, CpuRunner):
            self._run_timed(self.inner)
        else:
            self.inner.run()

    def _run_timed(self, runner: CpuRunner) -> None:
        ends = np.zeros(len(self.plan.steps), np.int64)
        runner.run(ends)
        seconds = np.diff(ends, prepend=runner.team.start_ns) * 1e-9
        found = self.notes.times.get(id(self.plan))
        if found is None:
            steps = [own for s in self.plan.steps for own in ([of for of, _ in s.kernel.launches] if s.inside else [s])]
            found = self.notes.times[id(self.plan)] = StepTimes(self.plan, steps, np.zeros(len(steps)))
        found.seconds += np.concatenate([x * (runner.shares(i) if s.inside else np.ones(1))
                                         for i, (s, x) in enumerate(zip(self.plan.steps, seconds, strict=True))])
        found.n_runs += 1
