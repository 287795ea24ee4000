"""Strips: the kernel of a region. An item is a slice of all the region's steps, which one thread runs one after the other.

Params of its record: address of a table with a row per launch, and how many launches there are. A row of the table, in 64-bit words:
  0 entry   1 record as for slice 0   2 words of it   3 address of its moves   4 how many   5 scratch of the launch, from the thread's on
  6 out: nanoseconds that it took, all threads together
A move says of a pointer in the record what it is for slice i: 0 its word, 1 whether to add the thread's scratch, 2 step, 3 every:
i // every * step bytes on.

A thread's scratch holds the record being run, then the values that are kept only in the slice, then the launches' own scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pyggml.cpu.compile import HEADER_WORDS, KernelSpec
from pyggml.cpu.launch import Launch
from pyggml.cpu.records import pointers, record_size
from pyggml.cpu.regions import Region
from pyggml.cpu.simd import RAISED, atomic_add, call_kernel, clock_ns, ldw, stw
from pyggml.cpu.slices import Cut, Dims, cut, packed
from pyggml.cpu.tape import COUNTER, STATUS
from pyggml.plan import ALIGN, Arena, Step, storage_bytes
from pyggml.registry import for_one_thread
from pyggml.tensor import Node, Shape, Tensor

SCRATCH, STRIDE = 4, 5  # words of a record: scratch of thread 0, bytes per thread
SPENT = 6
ROW, MOVE = 7, 4  # words of the table's rows, and of moves


def run_strips(rec: Any, ith: Any, nth: Any) -> None:
    """Entry: slices until none is left."""
    n, own = ldw(rec, 0), ldw(rec, SCRATCH) + ith * ldw(rec, STRIDE)
    table, n_launches = ldw(rec, HEADER_WORDS), ldw(rec, HEADER_WORDS + 1)
    while True:
        item = atomic_add(rec, COUNTER, 1)
        if item >= n:
            return
        start = clock_ns()
        for k in range(n_launches):
            row = table + k * (ROW * 8)
            record, moves = ldw(row, 1), ldw(row, 3)
            for w in range(ldw(row, 2)):
                stw(own, w, ldw(record, w))
            stw(own, COUNTER, 0)
            stw(own, SCRATCH, own + ldw(row, 5))
            for m in range(moves, moves + ldw(row, 4) * (MOVE * 8), MOVE * 8):
                place = ldw(record, ldw(m, 0)) + item // ldw(m, 3) * ldw(m, 2)
                stw(own, ldw(m, 0), place + own if ldw(m, 1) != 0 else place)
            if call_kernel(ldw(row, 0), own, 0, 1) != 0:
                stw(ldw(own, STATUS), 0, RAISED)
            end = clock_ns()
            atomic_add(row, SPENT, end - start)
            start = end


class Place(NamedTuple):
    """Where slice i of a root lies: `offset` in the thread's scratch, or i // every * step bytes on in another root."""

    offset: int = 0
    root: Tensor | None = None
    step: int = 0
    every: int = 1


@dataclass(slots=True)
class Strips(Launch):
    """The launch of a region: those of its steps on slice 0 (each with the step that it is of), and where the slices' roots lie (by id)."""

    parts: list[tuple[Step, Launch]] = field(default_factory=list)
    values: int = 0  # bytes of scratch that the record and the slice's values take
    places: dict[int, Place] = field(default_factory=dict)
    roots: list[Tensor] = field(default_factory=list)  # so that ids stay their own


class _Slices:
    """The tensors of a region's slice 0."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.made: dict[int, Tensor] = {}  # id of a result -> that of the slice
        self.roots: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}  # of what lies outside, with how far apart its slices are

    def step(self, s: Step, dims: Dims) -> Step:
        """The step for slice 0."""
        out = s.outs[0]
        nodes = []
        for n in s.nodes:
            new = Node(n.op, tuple(None if t is None else self._operand(t, n, dims) for t in n.src), n.params)
            new.seq, new.part, new.layer = n.seq, n.part, n.layer
            new.outputs = (self._result(n.out, dims, n.out is out),)
            nodes.append(new)
        return Step(nodes, [t for n in nodes for t in n.src], [nodes[-1].out])

    def _result(self, t: Tensor, dims: Dims, stored: bool) -> Tensor:
        c = cut(t, t.ne, dims, self.region.size, False)
        assert c is not None
        if not stored:
            new = Tensor(t.dtype, c.ne, name=t.name)
        elif id(t) in self.region.local:
            new = packed(t, self.region.axes[id(t)], self.region.size, None, c.ne)
        else:
            new = self._outside(t, c)
        self.made[id(t)] = new
        return new

    def _operand(self, t: Tensor, node: Node, dims: Dims) -> Tensor:
        if id(t) in self.made and id(t) not in self.region.axes:
            return self.made[id(t)]  # inside a chain
        c = cut(t, node.out.ne, dims, self.region.size, node.op.grouped)
        assert c is not None
        if id(t.root) in self.region.local:
            return packed(t, self.region.axes[id(t.root)], self.region.size, self.made[id(t.root)], c.ne)
        if c.step:
            return self._outside(t, c)
        return t if c.ne == t.ne else Tensor(t.dtype, c.ne, t.nb, name=t.name, root=t.root, offs=t.offs)  # one for all slices

    def _outside(self, t: Tensor, c: Cut) -> Tensor:
        new = self.roots.setdefault((id(t.root), c.step, c.every), (t.root, Tensor(t.root.dtype, t.root.ne, t.root.nb, name=t.root.name)))[1]
        return Tensor(t.dtype, c.ne, t.nb, name=t.name, root=new, offs=t.offs)


def strips_of(region: Region, choose: Callable[[Step], Sequence[Step]]) -> Strips:
    """The launch of a region. `choose` sets the kernel of a step on slice 0 and gives the steps to run before it."""
    slices = _Slices(region)
    steps: list[tuple[Step, Step]] = []  # of the plan, of the slice
    for s, dims in zip(region.steps, region.dims, strict=True):
        new = slices.step(s, dims)
        with for_one_thread():
            before = choose(new)
        s.kernel_name = "+".join(x.kernel_name for x in (*before, new))
        steps += [*((s, b) for b in before), (s, new)]
    places = {id(new): Place(0, root, step, every) for (_, step, every), (root, new) in slices.roots.items()}
    offsets, n_bytes = _laid_out([new for _, new in steps], max(record_size(new.kernel) for _, new in steps) * 8, {*places})
    places |= {i: Place(offset) for i, offset in offsets.items()}
    n = region.n // region.size
    name = f"strips[{n} x {region.size}]"
    parts = []
    for s, new in steps:
        k: Launch = new.kernel
        k.chunk = max(1, k.items)
        parts.append((s, k))
    return Strips(KernelSpec(run_strips, raw=True), name, [], [0, len(parts)], n, 1, n_bytes + max(k.scratch for _, k in parts), parts=parts, values=n_bytes,
                  places=places, roots=[t for _, new in steps for t in new.outs] + [t for pair in slices.roots.values() for t in pair])


def sliced(node: Node, dims: Dims, size: int) -> Node:
    """A node for slices along dims of its result, as far as the choice of its kernel goes."""
    def one(t: Tensor, ne: Shape) -> Tensor:
        return Tensor(t.dtype, ne, t.nb, name=t.name, root=t.root, offs=t.offs, data=t.data)
    cuts = [None if t is None else cut(t, node.out.ne, dims, size, node.op.grouped) for t in node.src]
    new = Node(node.op, tuple(None if t is None or c is None else one(t, c.ne) for t, c in zip(node.src, cuts, strict=True)), node.params)
    own = cut(node.out, node.out.ne, dims, size, False)
    assert own is not None
    new.outputs = (one(node.out, own.ne),)
    return new


def address_in_slice(k: Strips, address: Callable[[Tensor], int], t: Tensor) -> int:
    """Where slice 0 of an operand lies: its address, or for what is kept in the slice alone, bytes from the thread's scratch on."""
    place = k.places.get(id(t.root))
    if place is None:
        return address(t)
    return t.offs + (place.offset if place.root is None else address(place.root))


def table_of(k: Strips, entries: Sequence[int], records: Sequence[int]) -> np.ndarray:
    """The table of a region: entries of its launches, and where their records are."""
    launches = [part for _, part in k.parts]
    moves = [[(word, int(p.root is None), p.step, p.every) for word, t in pointers(part) if (p := k.places.get(id(t.root))) is not None] for part in launches]
    table = np.zeros(ROW * len(launches) + MOVE * sum(map(len, moves)), np.int64)
    at = ROW * len(launches)
    for i, (part, own) in enumerate(zip(launches, moves, strict=True)):
        table[ROW * i:ROW * i + SPENT] = entries[i], records[i], record_size(part), table.ctypes.data + 8 * at, len(own), k.values
        for move in own:
            table[at:at + MOVE] = move
            at += MOVE
    return table


def spent_in(table: np.ndarray, n_launches: int) -> np.ndarray:
    """Nanoseconds that each of a region's launches took."""
    return table[:ROW * n_launches].reshape(n_launches, ROW)[:, SPENT]


def _laid_out(steps: Sequence[Step], start: int, outside: set[int]) -> tuple[dict[int, int], int]:
    """Places in a thread's scratch for results of slices, from byte `start` on, each reused when its last reader is through; and the bytes
    that the launches' own scratch then begins after."""
    arena = Arena(start)
    last = {id(t.root): i for i, s in enumerate(steps) for t in (*s.ins, *s.outs) if t is not None}
    offsets: dict[int, int] = {}
    expiring: dict[int, list[Tensor]] = {}
    for i, s in enumerate(steps):
        for t in s.outs:
            if id(t.root) not in outside:
                offsets[id(t.root)] = arena.take(storage_bytes(t.root))
                expiring.setdefault(last[id(t.root)], []).append(t.root)
        for t in expiring.get(i, ()):
            arena.give(offsets[id(t)], storage_bytes(t))
    return offsets, -(-arena.end // ALIGN) * ALIGN
