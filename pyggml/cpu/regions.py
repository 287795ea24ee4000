"""Regions: steps that are run together, slice by slice, so that what they hand on stays in the cache.

Most steps of a graph can be computed for some heads, or some chunks, alone, from the same heads or chunks of their inputs. Run one
after the other over a whole ubatch, each writes to memory what the next one reads back. A region is a set of steps that all follow
one axis (pyggml.cpu.slices): a thread takes a slice and goes through all of them (pyggml.cpu.strips). Values that no other step
touches are then as large as a slice, and each thread has its own.

A region grows from a step with a large result along one of its dims: to the steps that read it along this axis, and back to those with large results
that it reads. What lies between two of them but cannot be cut (a sum along the axis) ends it. Steps are reordered within the
run between two writes in place, which no step passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyggml.cpu.slices import Axis, Dims, axis_of, cut, dims_along, length, sizes
from pyggml.graph import Graph
from pyggml.plan import Arena, Step, storage_bytes
from pyggml.tensor import Node, Tensor

LARGE = 1 << 20  # bytes of a result that does not stay in the cache nearest to a core until it is read
WORTH = 2 << 20  # bytes of values that need no memory any more, from which a region is made
STRIP_BYTES = 512 << 10  # of a slice's values at a time, where slices can be so short
MOST_BYTES = 8 << 20  # of a slice's values at a time; where the shortest has more, no region is made: no cache would hold them
MIN_SLICES = 16  # where there are so many, for some threads


@dataclass(slots=True, eq=False)
class Region:
    """Steps, the dims along which each one's result is cut, the axis in the memory of each result (by id), and which of them are kept
    nowhere but in the slice; n elements of the axis, in slices of `size`."""

    steps: list[Step]
    dims: list[Dims]
    axes: dict[int, Axis]
    local: set[int]
    n: int
    size: int = 1


Takes = Callable[[Step, Dims, int], bool]


def form_regions(graph: Graph, steps: Sequence[Step], takes: Takes, threads: int) -> list[Step]:
    """Steps with regions made one step each, whose kernel is the Region. `takes(step, dims, size)`: whether the kernel of a step is the same for
    slices of that size along these dims of its result."""
    runs: list[list[Step]] = [[]]
    for s in steps:
        if _writes_in_place(s):
            runs += [[s], []]
        else:
            runs[-1].append(s)
    touched: dict[int, int] = {id(t.root): -1 for t in (*graph.outputs, *graph.inputs)}
    for i, run in enumerate(runs):
        for root in {id(t.root) for s in run for t in (*s.ins, *s.outs) if t is not None}:
            touched[root] = i if touched.get(root, i) == i else -1
    elsewhere = {root for root, i in touched.items() if i < 0}  # touched in several runs, or from outside
    return [s for run in runs for s in _with_regions(run, elsewhere, takes, threads)]


def _writes_in_place(s: Step) -> bool:
    return any(n.op.inplace is not None for n in s.nodes) or any(t.root.node is None for t in s.outs)


def _with_regions(run: list[Step], elsewhere: set[int], takes: Takes, threads: int) -> list[Step]:
    while True:
        found = _Run(run, elsewhere, takes).best(threads)
        if found is None:
            return run
        run = found


class _Run:
    """Steps none of which writes in place, and how they hang together: by number in the run."""

    def __init__(self, steps: list[Step], elsewhere: set[int], takes: Takes) -> None:
        self.steps = steps
        self.elsewhere = elsewhere
        self.takes = takes
        self.large = [s.kernel is None and len(s.outs) == 1 and s.outs[0].root.nbytes >= LARGE for s in steps]
        self.made_by: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        self.reads: list[set[int]] = []  # ids of roots
        if sum(s.outs[0].root.nbytes for s, large in zip(steps, self.large, strict=True) if large) >= WORTH:
            self.made_by = {id(t.root): i for i, s in enumerate(steps) for t in s.outs}
            self.reads = [{id(t.root) for t in s.ins if t is not None} for s in steps]
            for i, roots in enumerate(self.reads):
                for root in roots:
                    self.readers.setdefault(root, []).append(i)

    def best(self, threads: int) -> list[Step] | None:
        """The run with the region in it that keeps most out of memory; None where none is worth it."""
        tried: set[tuple[int, Dims]] = set()
        best: tuple[int, Region, dict[int, Dims]] | None = None
        for i, s in enumerate(self.steps if self.reads else ()):
            if not self.large[i]:
                continue
            for d in sorted(s.nodes[-1].op.sliceable(s.nodes[-1]), reverse=True):
                n = s.outs[0].ne[d]
                if n == 1 or not _busy(n, threads) or (i, (d,)) in tried:
                    continue
                members, axes = self._grown(i, (d,))
                tried |= set(members.items())
                kept = self._without_detours(members)
                local = {r for r in (id(self.steps[j].outs[0]) for j in kept) if self._is_local(r, kept)}
                saved = sum(storage_bytes(self.steps[j].outs[0]) for j in kept if id(self.steps[j].outs[0]) in local)
                if saved >= WORTH and (best is None or saved > best[0]):
                    order = sorted(kept)
                    region = Region([self.steps[j] for j in order], [kept[j] for j in order], axes, local, n)
                    best = (saved, region, kept) if _values_at_a_time(region) <= MOST_BYTES * n else best
        if best is None:
            return None
        _, region, kept = best
        _choose_size(region, self.takes, threads)
        return self._joined(region, kept)

    def _grown(self, i: int, dims: Dims) -> tuple[dict[int, Dims], dict[int, Axis]]:
        """All steps that follow the axis from step i on, each with its dims, and the axis in their results."""
        members: dict[int, Dims] = {}
        axes: dict[int, Axis] = {}
        todo = [(i, dims)]
        while todo:
            j, dims = todo.pop()
            axis = None if j in members else self._joins(j, dims, members, axes)
            if axis is None:
                continue
            s = self.steps[j]
            members[j], axes[id(s.outs[0])] = dims, axis
            for k in self.readers.get(id(s.outs[0]), ()):
                todo += [(k, d) for t in self.steps[k].ins if t is not None and t.root is s.outs[0] and (d := dims_along(t, axis))]
            for t in s.ins:
                k = -1 if t is None else self.made_by.get(id(t.root), -1)
                if t is not None and k >= 0 and self.large[k] and length(t, dims) == axis.length and (there := axis_of(t, dims)):
                    d = dims_along(self.steps[k].outs[0], there)
                    todo += [(k, d)] if d else []
        return members, axes

    def _joins(self, j: int, dims: Dims, members: dict[int, Dims], axes: dict[int, Axis]) -> Axis | None:
        """The axis in step j's result if it can be cut along these dims with what it reads and what reads it; else None."""
        s = self.steps[j]
        out = s.outs[0]
        if s.kernel is not None or len(s.outs) != 1 or out.root is not out or not can_be_cut(s, dims):
            return None
        for t in s.ins:
            if t is not None and id(t.root) in axes and dims_along(t, axes[id(t.root)]) != dims:
                return None
        axis = axis_of(out, dims)
        first = next(iter(axes.values()), axis)
        if axis is None or first is None or axis.length != first.length:
            return None
        for k in self.readers.get(id(out), ()):
            if k in members and any(dims_along(t, axis) != members[k] for t in self.steps[k].ins if t is not None and t.root is out):
                return None
        return axis if self.takes(s, dims, 1) else None

    def _without_detours(self, members: dict[int, Dims]) -> dict[int, Dims]:
        """Members without those that read what a step outside has made of other members' results."""
        kept = dict(members)
        made: set[int] = set()  # by members
        detour: set[int] = set()
        for j, s in enumerate(self.steps):
            reads = self.reads[j]
            if j in kept and not reads & detour:
                made |= {id(t.root) for t in s.outs}
            elif reads & (made | detour):
                detour |= {id(t.root) for t in s.outs}
                kept.pop(j, None)
        return kept

    def _is_local(self, root: int, members: dict[int, Dims]) -> bool:
        return root not in self.elsewhere and all(k in members for k in self.readers.get(root, ()))

    def _joined(self, region: Region, members: dict[int, Dims]) -> list[Step]:
        """The run with a region in place of its steps: where the last of them stood, before what reads of it."""
        before: list[Step] = []
        after: list[Step] = []
        made: set[int] = {id(t.root) for s in region.steps for t in s.outs}
        for j, s in enumerate(self.steps):
            if j in members:
                continue
            late = bool(self.reads[j] & made)
            if late:
                made |= {id(t.root) for t in s.outs}
            (after if late or j > max(members) else before).append(s)
        inside = {id(s.outs[0]) for s in region.steps}
        ins = [t for s in region.steps for t in s.ins if t is not None and id(t.root) not in inside]
        outs = [s.outs[0] for s in region.steps if id(s.outs[0]) not in region.local]
        nodes = sorted((n for s in region.steps for n in s.nodes), key=lambda n: n.seq)
        return [*before, Step(nodes, list(ins), outs, kernel=region, parts=region.steps), *after]


def can_be_cut(s: Step, dims: Dims) -> bool:
    """Whether a step can be computed for slices of its result along these dims."""
    out, inner = s.outs[0], {id(n.out) for n in s.nodes}

    def fits(n: Node) -> bool:
        able = n.op.sliceable(n)
        return n.out.ne == out.ne and all(d in able for d in dims) and all(
            id(t) in inner or cut(t, out.ne, dims, 1, n.op.grouped) is not None for t in n.src if t is not None)
    return all(fits(n) for n in s.nodes)


def _busy(n: int, threads: int) -> bool:
    """Whether n equal items keep threads busy for three quarters of the time at least."""
    return 4 * n >= 3 * threads * -(-n // threads)


def _choose_size(region: Region, takes: Takes, threads: int) -> None:
    """The longest slices whose values stay within STRIP_BYTES, of which there are still enough for the threads."""
    results = [s.outs[0] for s in region.steps]
    enough = min(region.n, max(MIN_SLICES, 4 * threads))
    whole = _values_at_a_time(region)
    for size in sizes(region.n, region.dims, results):
        if size == 1 or (region.n // size >= enough and whole * size <= STRIP_BYTES * region.n and all_cut(region, size)
                         and all(takes(s, dims, size) for s, dims in zip(region.steps, region.dims, strict=True))):
            region.size = size
            return


def all_cut(region: Region, size: int) -> bool:
    """Whether every operand of a region's steps can be cut into slices that belong to results of this size."""
    return all(cut(t, s.outs[0].ne, dims, size, n.op.grouped) is not None
               for s, dims in zip(region.steps, region.dims, strict=True) for n in s.nodes for t in n.src if t is not None)


def _values_at_a_time(region: Region) -> int:
    """Bytes of the region's local results that are alive at once, were they whole."""
    arena = Arena(0)
    last = {id(t.root): i for i, s in enumerate(region.steps) for t in (*s.ins, *s.outs) if t is not None}
    places: list[tuple[Tensor, int]] = []
    for i, s in enumerate(region.steps):
        if id(s.outs[0]) in region.local:
            places.append((s.outs[0], arena.take(storage_bytes(s.outs[0]))))
        for t, at in places:
            if last[id(t)] == i:
                arena.give(at, storage_bytes(t))
    return arena.end
