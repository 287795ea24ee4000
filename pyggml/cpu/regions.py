"""Regions: steps that are run together, slice by slice, so that what they hand on stays in the cache.

Most steps of a graph can be computed for some heads, or some chunks, alone, from the same heads or chunks of their inputs. Run one
after the other over a whole ubatch, each writes to memory what the next one reads back. A region is a set of steps that all follow
one axis (pyggml.cpu.slices): a thread takes a slice and goes through all of them (pyggml.cpu.strips). Values that no other step
touches are then as large as a slice, and each thread has its own.

Where a slice is larger than the cache nearest to a core, its steps are taken together once more, along a second axis: an inner region,
whose slices the thread goes through one after the other. Only what passes between inner regions is then as large as the outer slice.

A region grows from a step with a large result along one of its dims: to the steps that read it along this axis, and back to those with large results
that it reads. What lies between two of them but cannot be cut (a sum along the axis) ends it. Steps are reordered within the
run between two writes in place, which no step passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyggml.cpu.slices import Axis, Dims, axis_of, cut, dims_along, length, sizes
from pyggml.graph import Graph
from pyggml.plan import Arena, Step, storage_bytes
from pyggml.tensor import Node, Tensor

LARGE = 1 << 20  # bytes of a result that does not stay in the cache nearest to a core until it is read
WORTH = 2 << 20  # bytes of values that need no memory any more, from which a region is made
STRIP_BYTES = 512 << 10  # of a slice's values at a time, where slices can be so short
MOST_BYTES = 8 << 20  # of a slice's values at a time; where the shortest has more, most of them must stay in inner regions: no cache would hold them
MIN_SLICES = 16  # where there are so many, for some threads
INNER_FROM = 1 << 20  # bytes of a slice's values at a time from which inner regions are looked for
INNER_LARGE = 64 << 10  # as LARGE and WORTH, of inner regions
INNER_WORTH = 256 << 10


class Limits(NamedTuple):
    """What makes a region: bytes of a result to begin from, bytes that it must save, slices that it must have, threads that are to be kept busy."""

    large: int
    worth: int
    slices: int
    threads: int


@dataclass(slots=True, eq=False)
class Region:
    """Steps, the dims along which each one's result is cut, the axis in the memory of each result (by id of its root), and which of these roots
    are kept nowhere but in the slice; n elements of the axis, in slices of `size`."""

    steps: list[Step]
    dims: list[Dims]
    axes: dict[int, Axis]
    local: set[int]
    n: int
    size: int = 1

    @property
    def n_slices(self) -> int:
        """Slices of the axis."""
        return self.n // self.size

    @property
    def local_bytes(self) -> int:
        """Bytes of the results that are kept nowhere but in slices, were they whole."""
        return sum(storage_bytes(s.outs[0]) for s in self.steps if id(s.outs[0].root) in self.local)


Takes = Callable[[Step, Dims, int], bool]


def form_regions(graph: Graph, steps: Sequence[Step], takes: Takes, nests: Callable[[Region], bool], threads: int) -> list[Step]:
    """Steps with regions made one step each, whose kernel is the Region. `takes(step, dims, size)`: whether the kernel of a step is the same for
    slices of that size along these dims of its result. `nests(region)`: whether most of what it saves stays in inner regions."""
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
    limits = Limits(LARGE, WORTH, max(MIN_SLICES, 4 * threads), threads)

    def fits(region: Region) -> bool:
        return _values_at_a_time(region) <= MOST_BYTES * region.n or nests(region)
    return [s for run in runs for s in _with_regions(run, elsewhere, set(), takes, fits, limits)]


def form_inner_regions(region: Region, steps: list[Step], local: Collection[int], stored: Collection[int], takes: Takes) -> list[Step]:
    """The steps of a region's slice with inner regions made one step each. `local`: roots of what is kept in the slice alone; `stored`: those of
    its other results."""
    if _values_at_a_time(region) // region.n_slices < INNER_FROM:
        return steps
    elsewhere = {id(t.root) for s in steps for t in (*s.ins, *s.outs) if t is not None}.difference(local)
    return _with_regions(steps, elsewhere, stored, takes, lambda inner: True, Limits(INNER_LARGE, INNER_WORTH, 2, 1))


def _writes_in_place(s: Step) -> bool:
    return any(n.op.inplace is not None for n in s.nodes) or any(t.root.node is None for t in s.outs)


def _with_regions(run: list[Step], elsewhere: Collection[int], stored: Collection[int], takes: Takes, fits: Callable[[Region], bool],
                  limits: Limits) -> list[Step]:
    @functools.cache  # a run is gone through again after each region found
    def able(s: Step, dims: Dims) -> bool:
        return can_be_cut(s, dims) and takes(s, dims, 1)

    while True:
        r = _Run(run, elsewhere, stored, able, limits)
        found = r.best(fits)
        if found is None:
            return run
        _choose_size(found, takes, limits.slices)
        run = r.joined(found)


class _Run:
    """Steps none of which writes in place, and how they hang together: by number in the run. `elsewhere`: roots that others touch; `stored`: those
    of results that lie among those of other slices; `able`: whether a step can be run in slices along some dims."""

    def __init__(self, steps: list[Step], elsewhere: Collection[int], stored: Collection[int], able: Callable[[Step, Dims], bool], limits: Limits) -> None:
        self.steps = steps
        self.elsewhere = elsewhere
        self.stored = stored
        self.able = able
        self.limits = limits
        self.large = [s.kernel is None and len(s.outs) == 1 and s.outs[0].root is s.outs[0] and s.outs[0].nbytes >= limits.large for s in steps]
        self.made_by: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        self.reads: list[set[int]] = []  # ids of roots
        if sum(s.outs[0].nbytes for s, large in zip(steps, self.large, strict=True) if large) >= limits.worth:
            self.made_by = {id(t.root): i for i, s in enumerate(steps) for t in s.outs}
            self.reads = [{id(t.root) for t in s.ins if t is not None} for s in steps]
            for i, roots in enumerate(self.reads):
                for root in roots:
                    self.readers.setdefault(root, []).append(i)

    def best(self, fits: Callable[[Region], bool]) -> Region | None:
        """The region that keeps most out of memory, of those that fit; None where none is worth it."""
        found = [(saved, r) for r in self._regions() if (saved := r.local_bytes) >= self.limits.worth]
        return next((r for _, r in sorted(found, key=lambda x: -x[0]) if fits(r)), None)

    def _regions(self) -> Iterator[Region]:
        """Those that grow from steps with large results, each along any of its dims."""
        tried: set[tuple[int, Dims]] = set()
        for i, d in self._starts():
            if (i, (d,)) not in tried:
                members, axes = self._grown(i, (d,))
                tried |= set(members.items())
                yield self._region(self._without_detours(members), axes, self.steps[i].outs[0].ne[d])

    def _starts(self) -> Iterator[tuple[int, int]]:
        """Steps with large results, and dims of these along which there are enough slices."""
        for i, s in enumerate(self.steps if self.reads else ()):
            for d in sorted(s.nodes[-1].op.sliceable(s.nodes[-1]), reverse=True) if self.large[i] else ():
                if s.outs[0].ne[d] > 1 and _busy(s.outs[0].ne[d], self.limits.threads):
                    yield i, d

    def _region(self, members: dict[int, Dims], axes: dict[int, Axis], n: int) -> Region:
        order = sorted(members)
        roots = (s.outs[0] for s in map(self.steps.__getitem__, order) if s.outs[0].root is s.outs[0])
        return Region([self.steps[j] for j in order], [members[j] for j in order], axes, {id(t) for t in roots if self._is_local(id(t), members)}, n)

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
            root = s.outs[0].root
            members[j], axes[id(root)] = dims, axis
            for k in self.readers.get(id(root), ()):
                todo += [(k, d) for t in self.steps[k].ins if t is not None and t.root is root and (d := dims_along(t, axis))]
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
        if s.kernel is not None or len(s.outs) != 1 or not (out.root is out or id(out.root) in self.stored) or not self.able(s, dims):
            return None
        for t in s.ins:
            if t is not None and id(t.root) in axes and dims_along(t, axes[id(t.root)]) != dims:
                return None
        axis = axis_of(out, dims)
        first = next(iter(axes.values()), axis)
        if axis is None or first is None or axis.length != first.length:
            return None
        for k in self.readers.get(id(out.root), ()):
            if k in members and any(dims_along(t, axis) != members[k] for t in self.steps[k].ins if t is not None and t.root is out.root):
                return None
        return axis

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

    def joined(self, region: Region) -> list[Step]:
        """The run with a region in place of its steps: where the last of them stood, before what reads of it."""
        own = {id(s) for s in region.steps}
        members = {j for j, s in enumerate(self.steps) if id(s) in own}
        before: list[Step] = []
        after: list[Step] = []
        inside = {id(t.root) for s in region.steps for t in s.outs}
        made = set(inside)
        for j, s in enumerate(self.steps):
            if j in members:
                continue
            late = bool(self.reads[j] & made)
            if late:
                made |= {id(t.root) for t in s.outs}
            (after if late or j > max(members) else before).append(s)
        ins = [t for s in region.steps for t in s.ins if t is not None and id(t.root) not in inside]
        outs = [s.outs[0] for s in region.steps if id(s.outs[0].root) not in region.local]
        nodes = sorted((n for s in region.steps for n in s.nodes), key=lambda n: n.seq)
        return [*before, Step(nodes, list(ins), outs, kernel=region, inside=region.steps), *after]


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


def _choose_size(region: Region, takes: Takes, slices: int) -> None:
    """The longest slices whose values stay within STRIP_BYTES, of which there are still that many, if so many there are."""
    results = [s.outs[0] for s in region.steps]
    enough = min(region.n, slices)
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
        if id(s.outs[0].root) in region.local:
            places.append((s.outs[0], arena.take(storage_bytes(s.outs[0]))))
        for t, at in places:
            if last[id(t)] == i:
                arena.give(at, storage_bytes(t))
    return arena.end
