"""Plan: fusion groups, kernel choice, liveness and memory, decided once per graph.

A backend says which kernel takes a step (`choose`) and what scratch it needs; the plan gives every tensor that owns
memory a place in one arena. Places are reused when the last step that touches a tensor is past, views included;
inputs, outputs and leaves keep theirs. With `reuse=False` every tensor has its own place (for bisecting).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pyggml.graph import Graph
from pyggml.tensor import Node, Tensor

ALIGN = 64


@dataclass(slots=True, eq=False)
class Step:
    """One kernel launch: the nodes it computes (more than one when fused), what it reads and writes, and the kernel's name. `inside`:
    the steps of a region, which this one runs slice by slice."""

    nodes: list[Node]
    ins: list[Tensor | None]
    outs: list[Tensor]
    kernel: Any = None
    kernel_name: str = ""
    scratch: int = 0
    inside: list[Step] = field(default_factory=list)

    def leaves(self) -> Iterator[Step]:
        """The steps that are no regions: itself, or those inside, in order."""
        if not self.inside:
            yield self
        for s in self.inside:
            yield from s.leaves()

    @property
    def prepares(self) -> bool:
        """Whether it makes none of its node's results but an input of the kernel that does: the step belongs to the one after it."""
        return not any(t in n.outputs for n in self.nodes for t in self.outs)


@dataclass(slots=True)
class Plan:
    """Steps in order and a place (offset in the arena) for each tensor that owns memory in it."""

    graph: Graph
    steps: list[Step]
    offsets: dict[int, int] = field(default_factory=dict)  # id(root tensor) -> byte offset
    arena_bytes: int = 0
    scratch_bytes: int = 0

    def __str__(self) -> str:
        lines = [f"plan: {len(self.steps)} steps for {self.graph.n_nodes} nodes, arena {self.arena_bytes} bytes, scratch {self.scratch_bytes} bytes a thread"]
        for i, s in enumerate(self.steps):
            lines.append(_line(f"{i:5d} ", s, ", ".join(f"{t.name}@{self.offsets.get(id(t.root), -1)}" for t in s.outs)))
            lines += _lines_inside(s, " " * 6)
        return "\n".join(lines)


def _line(start: str, s: Step, places: str) -> str:
    ops = f"{len(s.inside)} steps by slices" if s.inside else "+".join(n.op.name for n in s.nodes)
    return f"{start}{ops:<30} {s.kernel_name:<24} -> {places}"


def _lines_inside(s: Step, indent: str) -> list[str]:
    """A region's steps, those of a region in it further in."""
    return [line for p in s.inside for line in (_line(indent, p, ", ".join(t.name for t in p.outs)), *_lines_inside(p, indent + " " * 4))]


def make_plan(graph: Graph, choose: Callable[[Step], list[Step] | None], *, fuse: Callable[[Graph], list[Step]] | None = None, reuse: bool = True,
              guard: int = 0) -> Plan:
    """Plan a graph. `choose` sets each step's kernel, name and scratch or raises UnsupportedOp, and gives the steps to run before
    it; `fuse` groups nodes into steps (default: one step per node that computes or copies; views need none). `guard` leaves that many unused bytes before
    and after every place, and no place is reused then."""
    steps = fuse(graph) if fuse is not None else single_steps(graph)
    steps = [step for s in steps for step in (*(choose(s) or ()), s)]
    plan = Plan(graph, steps, scratch_bytes=max((s.scratch for s in steps), default=0))
    _place(plan, reuse and not guard, -(-guard // ALIGN) * ALIGN)
    return plan


def single_steps(graph: Graph) -> list[Step]:
    """One step per node that is not a view."""
    return [Step([n], list(n.src), list(n.outputs)) for n in graph.nodes if not n.op.view]


def _place(plan: Plan, reuse: bool, guard: int) -> None:
    last_use: dict[int, int] = {}
    for i, s in enumerate(plan.steps):
        for t in (*s.ins, *s.outs):
            if t is not None:
                last_use[id(t.root)] = i
    never = len(plan.steps)
    for t in (*plan.graph.outputs, *plan.graph.inputs):
        last_use[id(t.root)] = never
    arena = Arena(guard)
    for t in plan.graph.inputs:
        plan.offsets[id(t.root)] = arena.take(storage_bytes(t.root) + guard)
    expiring: dict[int, list[Tensor]] = {}
    for i, s in enumerate(plan.steps):
        for t in s.outs:
            root = t.root
            if root.data is None and id(root) not in plan.offsets:
                plan.offsets[id(root)] = arena.take(storage_bytes(root) + guard)
                expiring.setdefault(last_use[id(root)], []).append(root)
        if reuse:
            for root in expiring.get(i, ()):
                arena.give(plan.offsets[id(root)], storage_bytes(root))
    plan.arena_bytes = arena.end


def storage_bytes(t: Tensor) -> int:
    """Bytes of a tensor's own memory, rounded up to the alignment."""
    return -(-t.nbytes // ALIGN) * ALIGN


class Arena:
    """Offsets in a growing arena: best fit among the free ranges (offset, size), neighbours of which are merged."""

    def __init__(self, start: int) -> None:
        self.free: list[tuple[int, int]] = []
        self.end = start

    def take(self, size: int) -> int:
        fits = [(n, at) for at, n in self.free if n >= size]
        if fits:
            n, at = min(fits)
            self.free.remove((at, n))
            if n > size:
                self.free.append((at + size, n - size))
            return at
        tail = next(((at, n) for at, n in self.free if at + n == self.end), None)
        at = self.end
        if tail is not None:
            self.free.remove(tail)
            at = tail[0]
        self.end = at + size
        return at

    def give(self, at: int, size: int) -> None:
        before = next((r for r in self.free if r[0] + r[1] == at), None)
        after = next((r for r in self.free if r[0] == at + size), None)
        for r in (before, after):
            if r is not None:
                self.free.remove(r)
                at, size = min(at, r[0]), size + r[1]
        self.free.append((at, size))
