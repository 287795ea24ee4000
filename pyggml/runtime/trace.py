"""Tracing: a backend whose runners hand over every tensor of a graph as it is computed, with its value at that time.

A value is taken right after the step that makes it, so writes in place and memory that is used again later do not change it. A
backend whose runners cannot stop between steps (they lack `run_steps`) runs the graph as a whole first; open it with reuse=False.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.base import Backend, Runner, SteppedRunner
from pyggml.graph import Graph
from pyggml.plan import Plan, Step
from pyggml.tensor import Node, Shape, Tensor


class Source(NamedTuple):
    """An input of a traced node."""

    name: str
    dtype: str
    ne: Shape


class Stats(NamedTuple):
    """Numbers that sum up a value, in float64: sum, least and greatest of all elements, and how many are NaN and infinite."""

    sum: float
    min: float
    max: float
    n_nan: int
    n_inf: int


@dataclass(slots=True, eq=False)
class Traced:
    """One tensor of a traced run. `i` is the node's index in its graph and `k` the index among the node's outputs; `nb` is None when the
    elements follow each other; `kernel` is "" for views; `seconds` is None where no step of its own was timed; `value` (NumPy order, four
    dims) is None for blocks of weights and for values that a fused kernel never stored, whose `fused_into` names the tensor that it did."""

    i: int
    k: int
    layer: int | None
    part: str
    op: str
    name: str
    dtype: str
    ne: Shape
    nb: Shape | None
    src: tuple[Source | None, ...]
    kernel: str = ""
    seconds: float | None = None
    fused_into: str = ""
    value: np.ndarray | None = None

    def stats(self) -> Stats | None:
        """Sum and range; None without a value."""
        if self.value is None:
            return None
        v = self.value.astype(np.float64)
        bad = np.isnan(v)
        with np.errstate(invalid="ignore", over="ignore"):
            return Stats(float(v.sum()), float(v.min()), float(v.max()), int(bad.sum()), int(np.isinf(v).sum()))

    def ends(self, n: int) -> tuple[list[float], list[float]]:
        """The first and the last n elements in memory order of ne; all of them are in the first list when there are at most 2 n."""
        flat = np.zeros(0) if self.value is None else self.value.reshape(-1)
        return (flat.tolist(), []) if len(flat) <= 2 * n else (flat[:n].tolist(), flat[-n:].tolist() if n else [])

    def record(self, n: int = 3) -> dict[str, Any]:
        """A flat description for tables and files: where, what, from what, how long, and the value summed up."""
        s = self.stats()
        first, last = self.ends(n)
        return {"i": self.i, "k": self.k, "layer": self.layer, "part": self.part, "op": self.op, "name": self.name, "type": self.dtype,
                "ne": list(self.ne), "nb": list(self.nb) if self.nb else None,
                "src": [f"{t.name} {t.dtype} {list(t.ne)}" if t else None for t in self.src],
                "kernel": self.kernel, "us": None if self.seconds is None else round(self.seconds * 1e6, 1), "fused_into": self.fused_into,
                "sum": s and s.sum, "min": s and s.min, "max": s and s.max, "n_nan": s and s.n_nan, "n_inf": s and s.n_inf,
                "first": first, "last": last}


Sink = Callable[[Traced], None]


class TracedBackend:
    """`inner`, except that what its runners compute goes to `sink`, while `active`. Put in place of a context's backend:

    >>> import pyggml as pg
    >>> ctx = pg.load_model(pg.models.demo_path()).context(fuse=False, reuse=False)
    >>> seen = []
    >>> ctx.backend = TracedBackend(ctx.backend, seen.append)
    >>> logits = ctx.decode([1, 2, 3])
    >>> seen[-1].name, len({t.i for t in seen}) == ctx.model.graph(3, mamba2="scan").n_nodes
    ('result_output_scaled', True)
    """

    def __init__(self, inner: Backend, sink: Sink) -> None:
        self.inner = inner
        self.sink = sink
        self.active = True
        self.name = inner.name

    def refuses(self, node: Node) -> str | None:
        """As the inner backend does."""
        return self.inner.refuses(node)

    def compile(self, graph: Graph) -> TracedRunner:
        """A runner that tells the sink."""
        return TracedRunner(self, self.inner.compile(graph))


class TracedRunner:
    """A runner that goes through its graph node by node."""

    def __init__(self, owner: TracedBackend, inner: Runner) -> None:
        self.owner = owner
        self.inner = inner
        self.plan: Plan = inner.plan

    def set(self, t: Tensor, value: np.ndarray) -> None:
        """Fill an input."""
        self.inner.set(t, value)

    def get(self, t: Tensor) -> np.ndarray:
        """A copy of a tensor's value."""
        return self.inner.get(t)

    def run(self) -> None:
        """Compute all steps; each tensor goes to the sink after the step that makes it."""
        if not self.owner.active:
            self.inner.run()
            return
        runner = self.inner
        walk = _Walk(runner, self.plan) if isinstance(runner, SteppedRunner) else None
        if walk is None:
            runner.run()
        steps_of: dict[int, list[int]] = {}  # a node's own step is its last; what is to be prepared for that stands before it
        for k, s in enumerate(self.plan.steps):
            for node in s.nodes:
                steps_of.setdefault(node.seq, []).append(k)
        made = (t for s in self.plan.steps for t in s.outs)  # a state that goes straight to its pool is not
        stored = {id(t.root) for t in (*made, *self.plan.graph.leaves)}
        for i, node in enumerate(self.plan.graph.nodes):
            seconds, kernel, fused_into = None, "", ""
            at = steps_of.get(node.seq)
            if at is not None:
                kernel = "+".join(self.plan.steps[k].kernel_name for k in at)
                step = self.plan.steps[at[-1]]
                last = step.nodes[-1]
                if step.inside:
                    kernel = " in ".join(s.kernel_name for s in _path(step, node))
                if node.seq != last.seq and not (step.inside and any(t is node.out for t in step.outs)):
                    fused_into = last.name
                elif walk is not None:
                    took = walk.run(at[0], at[-1])
                    seconds = took if node.seq == last.seq else None
            for k, t in enumerate(node.outputs):
                value = None if fused_into or t.dtype.np is None or id(t.root) not in stored else runner.get(t) if walk is None else walk.value(t)
                src = tuple(None if s is None else Source(s.name, s.dtype.name, s.ne) for s in node.src)
                self.owner.sink(Traced(i, k, node.layer, node.part, node.op.name, t.name, t.dtype.name, t.ne, None if t.is_contiguous else t.nb, src,
                                       kernel, seconds if k == 0 else None, fused_into, value))


def _path(step: Step, node: Node) -> list[Step]:
    """The step that a node belongs to, in a region's step, and the regions around it, the innermost first."""
    within = next((s for s in step.inside if any(n is node for n in s.nodes)), None)
    return [*_path(within, node), step] if within is not None else [step]


class _Walk:
    """The steps of a plan, run as far as the nodes of its graph are gone through. A plan with regions has other steps before some node's than the graph
    has nodes: what those give is kept until its turn, as are all results of a region."""

    def __init__(self, runner: SteppedRunner, plan: Plan) -> None:
        self.runner = runner
        self.steps = plan.steps
        self.n_run = 0
        self.seconds: dict[int, float] = {}  # by step
        self.kept: dict[int, np.ndarray] = {}  # by id of the tensor
        self.tensors: dict[int, list[Tensor]] = {}  # of the graph, by root
        for n in plan.graph.nodes:
            for t in n.outputs:
                self.tensors.setdefault(id(t.root), []).append(t)

    def run(self, first: int, last: int) -> float:
        """Run all steps up to `last`, unless that is done. The seconds of steps `first` to `last`."""
        for k in range(self.n_run, first):
            self._run(k, k + 1, keep=True)
        if self.n_run <= last:
            self._run(max(first, self.n_run), last + 1, keep=bool(self.steps[last].inside))
        return self.seconds[last]

    def _run(self, first: int, end: int, *, keep: bool) -> None:
        self.seconds[end - 1] = self.runner.run_steps(first, end)
        self.n_run = end
        for root in {id(t.root) for s in self.steps[first:end] for t in s.outs}:
            for t in self.tensors.get(root, ()):
                self.kept.pop(id(t), None)
                if keep and t.dtype.np is not None:
                    self.kept[id(t)] = self.runner.get(t)

    def value(self, t: Tensor) -> np.ndarray:
        """A tensor's value, when its node has been come to."""
        kept = self.kept.get(id(t))
        return self.runner.get(t) if kept is None else kept
