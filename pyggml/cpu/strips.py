"""Strips: the kernel of a region. An item is a slice of all the region's steps, which one thread runs one after the other; those of an
inner region it runs again and again, for each slice of that.

Params of its record: address of a table with a row per launch, and how many launches there are. A row of the table, in 64-bit words:
  0 entry   1 record as for slice 0   2 words of it   3 address of its moves   4 how many   5 scratch of the launch, from the thread's on
  6 rows to go back by after it   7 times that it is run for a slice   8 out: nanoseconds that it took, all threads together
A move says of a pointer in the record what it is for slice i, and slice j in that: 0 its word, 1 whether to add the thread's scratch,
2 step, 3 every, 4 step within the slice, 5 every: i // every * step + j // every * step bytes on.

A thread's scratch holds the record being run, then the values that are kept only in the slice, then the launches' own scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from pyggml.cpu.compile import HEADER_WORDS, KernelSpec
from pyggml.cpu.launch import Launch
from pyggml.cpu.records import pointers, record_size
from pyggml.cpu.regions import Region, Takes, form_inner_regions
from pyggml.cpu.simd import RAISED, atomic_add, call_kernel, clock_ns, helper, ldw, stw
from pyggml.cpu.sliced import Slices
from pyggml.cpu.tape import COUNTER, STATUS
from pyggml.plan import ALIGN, Arena, Step, storage_bytes
from pyggml.registry import for_one_thread
from pyggml.tensor import Tensor

SCRATCH, STRIDE = 4, 5  # words of a record: scratch of thread 0, bytes per thread
BACK, TIMES, SPENT = 6, 7, 8
ROW, MOVE = 9, 6  # words of the table's rows, and of moves


@helper
def further(i: Any, step: Any, every: Any) -> Any:
    """Bytes to slice i."""
    return i * step if every == 1 else i // every * step


@helper
def write_record(own: Any, row: Any, i: Any, j: Any) -> None:
    """The record of a row's launch for slice i, and slice j in that, at the start of the thread's scratch."""
    record, moves = ldw(row, 1), ldw(row, 3)
    for w in range(ldw(row, 2)):
        stw(own, w, ldw(record, w))
    stw(own, COUNTER, 0)
    stw(own, SCRATCH, own + ldw(row, 5))
    for m in range(moves, moves + ldw(row, 4) * (MOVE * 8), MOVE * 8):
        place = ldw(record, ldw(m, 0)) + further(i, ldw(m, 2), ldw(m, 3)) + further(j, ldw(m, 4), ldw(m, 5))
        stw(own, ldw(m, 0), place + own if ldw(m, 1) != 0 else place)


def run_strips(rec: Any, ith: Any, nth: Any) -> None:
    """Entry: slices until none is left."""
    n, own = ldw(rec, 0), ldw(rec, SCRATCH) + ith * ldw(rec, STRIDE)
    table, n_launches = ldw(rec, HEADER_WORDS), ldw(rec, HEADER_WORDS + 1)
    while True:
        i = atomic_add(rec, COUNTER, 1)
        if i >= n:
            return
        start, k, j = clock_ns(), 0, 0
        while k < n_launches:
            row = table + k * (ROW * 8)
            write_record(own, row, i, j)
            if call_kernel(ldw(row, 0), own, 0, 1) != 0:
                stw(ldw(own, STATUS), 0, RAISED)
            end = clock_ns()
            atomic_add(row, SPENT, end - start)
            start = end
            k += 1
            if ldw(row, BACK) > 0:
                j += 1
                if j < ldw(row, TIMES):
                    k -= ldw(row, BACK)
                else:
                    j = 0


class Stride(NamedTuple):
    """Slice i lies i // every * step bytes on."""

    step: int = 0
    every: int = 1


class Place(NamedTuple):
    """Where a root lies for slice 0: `offset` in the thread's scratch, or where another root does; and how far on for other slices of the
    region, and of the inner one."""

    offset: int = 0
    root: Tensor | None = None
    outer: Stride = Stride()
    inner: Stride = Stride()


class Loop(NamedTuple):
    """Launches `first` to `end` - 1, which are run n times for a slice."""

    first: int
    end: int
    n: int


@dataclass(slots=True)
class Strips(Launch):
    """The launch of a region: those of its steps on slice 0, each with the step that it is of; which of them are run in loops; where the slices' roots
    lie (by id)."""

    launches: list[tuple[Step, Launch]] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    values: int = 0  # bytes of scratch that the record and the slice's values take
    places: dict[int, Place] = field(default_factory=dict)
    roots: list[Tensor] = field(default_factory=list)  # so that ids stay their own


Choose = Callable[[Step], Sequence[Step]]


def strips_of(step: Step, choose: Choose, takes: Takes) -> Strips:
    """The launch of a region's step, in which inner regions become steps with steps inside. `choose` sets the kernel of a step on slice 0 and gives the
    steps to run before it; `takes` as of form_regions."""
    region: Region = step.kernel
    outer = Slices(region)
    of = {id(new): s for s, new in zip(region.steps, outer.steps, strict=True)}  # the plan's step of a slice's
    launches: list[tuple[Step, Step]] = []  # the plan's step, the slice's
    loops: list[tuple[Loop, Slices]] = []
    step.inside = []
    for new in form_inner_regions(region, outer.steps, {id(t) for t in outer.kept.values()}, outer.results_outside(), takes):
        if isinstance(new.kernel, Region):
            inner, first = Slices(new.kernel), len(launches)
            for s, slice_of_it in zip(new.kernel.steps, inner.steps, strict=True):
                launches += _chosen(of[id(s)], slice_of_it, choose)
            loops.append((Loop(first, len(launches), new.kernel.n_slices), inner))
            step.inside.append(_inner_step(new, [of[id(s)] for s in new.kernel.steps]))
        else:
            launches += _chosen(of[id(new)], new, choose)
            step.inside.append(of[id(new)])
    return _strips(region, outer, launches, loops)


def _chosen(s: Step, new: Step, choose: Choose) -> list[tuple[Step, Step]]:
    """The steps of a slice that step s comes to."""
    with for_one_thread():
        before = choose(new)
    s.kernel_name = "+".join(x.kernel_name for x in (*before, new))
    return [*((s, b) for b in before), (s, new)]


def _inner_step(new: Step, steps: list[Step]) -> Step:
    """An inner region among the steps of the plan."""
    region: Region = new.kernel
    stored = [s.outs[0] for s, own in zip(steps, region.steps, strict=True) if id(own.outs[0].root) not in region.local]
    return Step([n for s in steps for n in s.nodes], [t for s in steps for t in s.ins], stored, kernel_name=_name(region), inside=steps)


def _name(region: Region) -> str:
    return f"strips[{region.n_slices} x {region.size}]"


def _strips(region: Region, outer: Slices, steps: list[tuple[Step, Step]], loops: list[tuple[Loop, Slices]]) -> Strips:
    spread = [*outer.spread.values(), *(s for _, inner in loops for s in inner.spread.values())]
    within = {i: s.root for _, inner in loops for i, s in inner.spread.items()}
    record_bytes = max(record_size(new.kernel) for _, new in steps) * 8
    offsets, n_bytes = _laid_out([new for _, new in steps], [loop for loop, _ in loops], record_bytes, within, outer.spread)
    places = {i: Place(0, s.root, outer=Stride(s.step, s.every)) for i, s in outer.spread.items()}
    places |= {i: Place(offset) for i, offset in offsets.items()}
    for _, inner in loops:
        places |= {i: places.get(id(s.root), Place(0, s.root))._replace(inner=Stride(s.step, s.every)) for i, s in inner.spread.items()}
    launches: list[tuple[Step, Launch]] = []
    for s, new in steps:
        k: Launch = new.kernel
        k.chunk = max(1, k.items)
        launches.append((s, k))
    roots = [t.root for _, new in steps for t in (*new.ins, *new.outs) if t is not None] + [s.root for s in spread]
    return Strips(KernelSpec(run_strips, raw=True), _name(region), [], [0, len(launches)], region.n_slices, 1, n_bytes + max(k.scratch for _, k in launches),
                  launches=launches, loops=[loop for loop, _ in loops], values=n_bytes, places=places, roots=roots)


def nests(region: Region, takes: Takes) -> bool:
    """Whether most of what a region saves, in slices of 1, stays in inner regions."""
    slices = Slices(replace(region, size=1))
    steps = form_inner_regions(slices.region, slices.steps, {id(t) for t in slices.kept.values()}, slices.results_outside(), takes)
    return 2 * sum(s.kernel.local_bytes for s in steps if s.kernel is not None) > sum(storage_bytes(t) for t in slices.kept.values())


def address_in_slice(k: Strips, address: Callable[[Tensor], int], t: Tensor) -> int:
    """Where slice 0 of an operand lies: its address, or for what is kept in the slice alone, bytes from the thread's scratch on."""
    place = k.places.get(id(t.root))
    if place is None:
        return address(t)
    return t.offs + (place.offset if place.root is None else address(place.root))


def table_of(k: Strips, entries: Sequence[int], records: Sequence[int]) -> np.ndarray:
    """The table of a region: entries of its launches, and where their records are."""
    launches = [launch for _, launch in k.launches]
    ends = {loop.end - 1: (loop.end - loop.first, loop.n) for loop in k.loops}
    moves = [[(word, int(p.root is None), *p.outer, *p.inner) for word, t in pointers(launch) if (p := k.places.get(id(t.root))) is not None]
             for launch in launches]
    table = np.zeros(ROW * len(launches) + MOVE * sum(map(len, moves)), np.int64)
    at = ROW * len(launches)
    for i, (launch, own) in enumerate(zip(launches, moves, strict=True)):
        table[ROW * i:ROW * i + SPENT] = (entries[i], records[i], record_size(launch), table.ctypes.data + 8 * at, len(own), k.values, *ends.get(i, (0, 1)))
        for move in own:
            table[at:at + MOVE] = move
            at += MOVE
    return table


def spent_in(table: np.ndarray, n_launches: int) -> np.ndarray:
    """Nanoseconds that each of a region's launches took."""
    return table[:ROW * n_launches].reshape(n_launches, ROW)[:, SPENT]


def _laid_out(steps: Sequence[Step], loops: Sequence[Loop], start: int, within: dict[int, Tensor], outside: Collection[int]) -> tuple[dict[int, int], int]:
    """Places in a thread's scratch for results of slices, from byte `start` on, each reused when its last reader is through; and the bytes
    that the launches' own scratch then begins after. `within`: by id, for roots that stand for slices of others, those others. `outside`: roots that
    lie elsewhere. What a loop alone touches is remade each time; all else that it touches stays for as long as it runs."""
    loop_of = {i: loop for loop in loops for i in range(loop.first, loop.end)}
    made: dict[int, Tensor] = {}
    touched: dict[int, list[int]] = {}
    for i, s in enumerate(steps):
        made |= {id(root): root for t in s.outs if id(root := within.get(id(t.root), t.root)) not in outside}
        for t in (*s.ins, *s.outs):
            if t is not None:
                touched.setdefault(id(within.get(id(t.root), t.root)), []).append(i)
    begins: dict[int, list[Tensor]] = {}
    expiring: dict[int, list[Tensor]] = {}
    for key, root in made.items():
        first, last = touched[key][0], touched[key][-1]
        if loop_of.get(first) is not loop_of.get(last):
            first, last = loop_of[first].first if first in loop_of else first, loop_of[last].end - 1 if last in loop_of else last
        begins.setdefault(first, []).append(root)
        expiring.setdefault(last, []).append(root)
    arena = Arena(start)
    offsets: dict[int, int] = {}
    for i in range(len(steps)):
        for t in begins.get(i, ()):
            offsets[id(t)] = arena.take(storage_bytes(t))
        for t in expiring.get(i, ()):
            arena.give(offsets[id(t)], storage_bytes(t))
    return offsets, -(-arena.end // ALIGN) * ALIGN
