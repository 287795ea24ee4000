"""The CPU backend: a plan becomes a tape of compiled kernels over one arena, walked by the team."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pyggml.backends.base import PRECISIONS, check_array, decode, require_input, require_inputs_set, typed_view
from pyggml.cpu import tape as tp
from pyggml.cpu.compile import HEADER_WORDS, Progress, kernels_for
from pyggml.cpu.fuse import finish_of, group, join, launch_of
from pyggml.cpu.inplace import write_pools
from pyggml.cpu.launch import Launch, launch, launch_prepared
from pyggml.cpu.level import check_level, host_level, level_features, n_cores
from pyggml.cpu.order import barriers, touched
from pyggml.cpu.records import record_size, record_words
from pyggml.cpu.regions import Region, form_regions
from pyggml.cpu.simd import BAD_SPAN, RAISED
from pyggml.cpu.sliced import sliced
from pyggml.cpu.slices import Dims
from pyggml.cpu.strips import Strips, address_in_slice, nests, spent_in, strips_of, table_of
from pyggml.cpu.team import TAPE_KERNELS, aligned, check_threads, team
from pyggml.errors import GraphError, KernelError, ParamError, UnsupportedOp
from pyggml.graph import Graph
from pyggml.plan import Plan, Step, make_plan
from pyggml.registry import KernelDef, Prepared, choose_kernel, load_kernels
from pyggml.tensor import Node, Tensor

POISON = 0xFF  # fills memory with NaN in every float type


class CpuBackend:
    """Options: `threads` (default: all cores), `level` (default: the host's), `prec` ("auto": products with quantized weights
    may round what they read, see MUL_MAT; "f32": no kernel does), `fuse` and `reuse` (off for bisecting), `strips` (steps of a region
    run slice by slice, see pyggml.cpu.regions; off without `fuse` or `reuse`, as not every value is in memory then),
    `poison` (fill the arena with NaN at first), `guard` (unused bytes around every tensor and each thread's scratch, for tests),
    `progress(done, total)` while compiling."""

    name = "cpu"

    def __init__(self, *, threads: int | None = None, level: str | None = None, prec: str = "auto", fuse: bool = True, reuse: bool = True, strips: bool = True,
                 poison: bool = False, guard: int = 0, progress: Progress | None = None) -> None:
        load_kernels("cpu")
        self.threads = n_cores() if threads is None else threads
        self.level = check_level(level)
        if prec not in PRECISIONS:
            raise ParamError(f"prec {prec!r}; legal: {', '.join(PRECISIONS)}")
        self.prec = prec
        self.fuse = fuse
        self.reuse = reuse
        self.poison = poison
        self.guard = guard
        self.strips = strips and fuse and reuse
        self.progress = progress
        check_threads(self.threads)
        self.memory = SharedMemory()

    def refuses(self, node: Node) -> str | None:
        """None when a kernel takes the node, else every kernel's reason."""
        if node.op.view or node.op.pointwise is not None:
            return None
        return choose_kernel(node, "cpu", self._unfit)[1] or None

    def _unfit(self, kernel: KernelDef) -> str | None:
        """Why this level and precision do not take a kernel."""
        missing = kernel.options.get("needs", set()) - level_features(self.level)
        if missing:
            return f"level {self.level} has no {', '.join(sorted(missing))} here"
        return "it rounds its inputs, and prec is f32" if self.prec == "f32" and kernel.options.get("rounds") else None

    def plan(self, graph: Graph) -> Plan:
        """Kernels, fusion groups, regions and memory of a graph; nothing is compiled."""
        refused: list[str] = []

        def choose(step: Step, prepared: _PreparedInputs) -> list[Step]:
            before: list[Step] = []
            if isinstance(step.kernel, Region):
                step.kernel = strips_of(step, partial(choose, prepared=_PreparedInputs()), self._same_for_slices)
            else:
                before = self._choose(step, prepared, refused)
            if step.kernel is not None:
                step.kernel_name, step.scratch = step.kernel.name, step.kernel.scratch
            return before

        def fused(graph: Graph) -> list[Step]:
            steps = write_pools(graph, join(graph, group(graph), self._ends_with_chains))
            takes = self._same_for_slices
            return form_regions(graph, steps, takes, partial(nests, takes=takes), self.threads) if self.strips else steps

        plan = make_plan(graph, partial(choose, prepared=_PreparedInputs()), fuse=fused if self.fuse else None, reuse=self.reuse, guard=self.guard)
        if refused:
            raise UnsupportedOp("; ".join(refused))
        return plan

    def _choose(self, step: Step, prepared: _PreparedInputs, refused: list[str]) -> list[Step]:
        """Set a step's kernel; the steps that it wants run before it."""
        ends = step.nodes[-1].op.pointwise is not None
        node = step.nodes[0 if ends else -1]  # the one that a kernel is chosen for
        if node.op.pointwise is not None:
            step.kernel = launch_of(step)
            return []
        before: list[Step] = []
        k, why = choose_kernel(node, "cpu", self._unfit)
        if k is None:
            refused.append(f"{node.op.name} ({node.name}): {why}")
            return []
        made = None
        if "before" in k.options:
            made, before = prepared.of(k.options["before"](node), node)
            step.ins = [*step.ins, made]
        step.kernel = launch(k, node, made)
        if ends:
            _end_with(step)
        if node.op.inplace is not None:
            prepared.written(node.out)
        return before

    def _ends_with_chains(self, node: Node) -> bool:
        k = choose_kernel(node, "cpu", self._unfit)[0]
        return k is not None and bool(k.options.get("epilogue"))

    def _same_for_slices(self, step: Step, dims: Dims, size: int) -> bool:
        """Whether a step's kernel is that of its slices of this size, too: the bits of a result then do not depend on the slices."""
        node = step.nodes[0]
        if node.op.pointwise is not None:
            return True
        k = choose_kernel(node, "cpu", self._unfit)[0]
        return k is not None and k is choose_kernel(sliced(node, dims, size), "cpu", self._unfit)[0]

    def compile(self, graph: Graph) -> CpuRunner:
        """Plan, compile what is not cached, lay out memory."""
        plan = self.plan(graph)
        specs = [k.spec for _, k in launches_of(plan)]
        kernels_for().addresses(TAPE_KERNELS if self.level != host_level() else [*specs, *TAPE_KERNELS], self.progress)  # all in one go
        return CpuRunner(self, plan, kernels_for(self.level).addresses(specs, self.progress))


def launches_of(plan: Plan) -> list[tuple[Step, Launch]]:
    """All launches of a plan, each with its step: first those of its steps, in order, then those inside of regions."""
    steps = [(s, s.kernel) for s in plan.steps]
    return [*steps, *(launch for _, k in steps if isinstance(k, Strips) for launch in k.launches)]


def _end_with(step: Step) -> None:
    """Bind a step's chain to the kernel of its first node, whose output the chain's result replaces."""
    first, *chain = step.nodes
    k: Launch = step.kernel
    finish, k.extra, k.extra_params = finish_of(chain, first.out)
    k.spec = replace(k.spec, binds={**k.spec.binds, "finish": finish})
    k.operands = [chain[-1].out if t is first.out else t for t in k.operands]
    k.name = "+".join([k.name, *(n.op.name.lower() for n in chain)])


class _PreparedInputs:
    """What kernels of one plan want made of their inputs beforehand: once for all that want the same."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def of(self, p: Prepared, node: Node) -> tuple[Tensor, list[Step]]:
        """The prepared tensor, and the step that makes it if it is new."""
        t = p.source
        key = (p.fn, p.key, id(t.root), t.offs, t.dtype.name, t.ne, t.nb, *map(id, p.more))
        if key in self.made:
            return self.made[key][1], []
        self.made[key] = t, p.out  # t is kept, so that its root's id stays its own
        k = launch_prepared(p)
        return p.out, [Step([node], [t, *p.more], [p.out], k, k.name, k.scratch)]

    def written(self, t: Tensor) -> None:
        """Forget what was made of memory that a step writes to; leaves may share theirs."""
        self.made = {k: v for k, v in self.made.items() if v[0].root is not t.root and (v[0].root.data is None or t.root.data is None)}


class SharedMemory:
    """Arena and scratch of all runners of one backend: they run one at a time, so one buffer of the largest size serves all."""

    def __init__(self) -> None:
        self.arena = aligned(1)
        self.scratch = aligned(1)
        self.user: object = None  # the ticket of the runner whose inputs and values the arena holds

    def grow(self, arena: int, scratch: int, fill: int) -> None:
        """Make room; a larger arena is a new one, which runners notice at their next use."""
        if arena > len(self.arena):
            self.arena = _allocated(arena, "values")
            self.user = None
            if fill:
                self.arena[...] = fill
        if scratch > len(self.scratch):
            self.scratch = _allocated(scratch, "scratch")


def _allocated(nbytes: int, what: str) -> np.ndarray:
    try:
        return aligned(nbytes)
    except (MemoryError, ValueError):
        raise GraphError(f"the graph needs {nbytes} bytes for {what}; this system does not give so many") from None


class CpuRunner:
    """A plan bound to memory. All runners of a backend share their arena: once another one has been set or run, inputs must be
    set again, and values are gone; GraphError says so. `view(t)` gives the live memory of a tensor."""

    def __init__(self, backend: CpuBackend, plan: Plan, addresses: list[int]) -> None:
        self.plan = plan
        self._n_threads = backend.threads
        self.team = team(backend.threads)
        self.memory = backend.memory
        self._ticket = object()
        self._inputs = {id(t) for t in plan.graph.inputs}
        self._addresses = addresses
        self._scratch_stride = -(-(plan.scratch_bytes + backend.guard) // 64) * 64
        self.memory.grow(plan.arena_bytes, self._scratch_stride * backend.threads, POISON if backend.poison else 0)
        self._given: set[int] = set()
        self._launches = launches_of(plan)
        self._status = np.zeros((len(self._launches), 3), np.int64)
        self._bind()

    def _sync(self) -> None:
        if self._arena is not self.memory.arena or self._scratch is not self.memory.scratch or self.team is not team(self._n_threads):
            self.team = team(self._n_threads)
            self._bind()

    def _claim(self) -> None:
        """Make the arena this runner's. What it held is gone when another one used it since."""
        if self.memory.user is not self._ticket:
            self.memory.user = self._ticket
            self._given.clear()

    def _bind(self) -> None:
        self._arena, self._scratch = self.memory.arena, self.memory.scratch
        steps = self.plan.steps
        launches = [k for _, k in self._launches]
        starts = np.concatenate([[0], np.cumsum([record_size(k) for k in launches])]).astype(np.int64)
        self._records = aligned(max(int(starts[-1]), 1) * 8).view(np.int64)
        places = (starts * 8 + self._records.ctypes.data).tolist()
        scratch = int(self._scratch.ctypes.data), self._scratch_stride
        single = [s.kernel.items <= s.kernel.chunk for s in steps]
        sync = barriers([touched([*s.ins, *s.kernel.operands, *s.kernel.extra], s.outs, alone, self.address) for s, alone in zip(steps, single, strict=True)])
        self._tape = np.zeros(3 * len(steps), np.int64)
        self._tables: dict[int, np.ndarray] = {}  # of regions, by step
        inside = len(steps)  # number of the first launch in the next region

        def write(i: int, chunk: int, address: Callable[[Tensor], int]) -> None:
            words = record_words(launches[i], chunk, self._status[i].ctypes.data, scratch, address)
            self._records[starts[i]:starts[i] + len(words)] = words

        for i, k in enumerate(launches[:len(steps)]):
            write(i, k.chunk_for(self._n_threads), self.address)
            flags = (tp.SINGLE if single[i] else 0) | (tp.SYNC if sync[i] else 0)
            self._tape[3 * i:3 * i + 3] = self._addresses[i], places[i], flags
            if isinstance(k, Strips):
                ends = inside + len(k.launches)
                for j in range(inside, ends):
                    write(j, launches[j].items, partial(address_in_slice, k, self.address))
                self._tables[i] = table_of(k, self._addresses[inside:ends], places[inside:ends])
                self._records[starts[i] + HEADER_WORDS] = self._tables[i].ctypes.data
                inside = ends

    def address(self, t: Tensor) -> int:
        """Address of a tensor's first element."""
        root = t.root
        if root.data is not None:
            return int(root.data.ctypes.data) + t.offs
        offset = self.plan.offsets.get(id(root))
        if offset is None:
            raise GraphError(f"{t.name or 'tensor'} is not part of this graph")
        return int(self._arena.ctypes.data) + offset + t.offs

    def view(self, t: Tensor) -> np.ndarray:
        """The live memory of a tensor, in NumPy order (BF16 as uint16 bits, block types as bytes; see typed_view)."""
        self._sync()
        if t.root.data is not None:
            return typed_view(t, t.root.data)
        start = self.plan.offsets.get(id(t.root))
        if start is None:
            raise GraphError(f"{t.name or 'tensor'} is not part of this graph")
        return typed_view(t, self._arena[start:])

    def set(self, t: Tensor, value: np.ndarray) -> None:
        """Fill an input; GraphError for any other tensor."""
        require_input(t, self._inputs)
        stored = check_array(t, value)
        self._claim()
        self.view(t)[...] = stored
        self._given.add(id(t))

    def get(self, t: Tensor) -> np.ndarray:
        """A copy of a tensor's value; BF16 and block types come as float32."""
        live = self.view(t)
        if t.root.data is None and self.memory.user is not self._ticket:
            raise GraphError(f"{t.name or 'tensor'} has no value: run the graph first, and again when another graph of its backend was used")
        return decode(t, live)

    def run(self, times: np.ndarray | None = None, *, repeat: int = 1) -> None:
        """Run all steps, `repeat` times on end; KernelError names the node whose kernel met bad data. `times` (int64, one per step run)
        receives the monotonic clock in ns at the end of each step; all threads then meet after every step, which otherwise the small ones skip."""
        self._sync()
        self._run_tape(self._tape if repeat == 1 else np.tile(self._tape, repeat), times)

    def shares(self, step: int) -> np.ndarray:
        """How the time of a region's step goes to its launches (Strips.launches): shares of 1, over all its runs so far."""
        spent = spent_in(self._tables[step], len(self.plan.steps[step].kernel.launches)).astype(np.float64)
        return spent / spent.sum() if spent.any() else np.full(len(spent), 1 / len(spent))

    def run_steps(self, first: int, last: int) -> float:
        """Run steps `first` to `last` - 1 alone, on memory as the steps before them left it. The seconds that they took."""
        self._sync()
        times = np.zeros(last - first, np.int64)
        self._run_tape(self._tape[3 * first:3 * last], times)
        return (int(times[-1]) - self.team.start_ns) * 1e-9

    def _run_tape(self, tape: np.ndarray, times: np.ndarray | None) -> None:
        self._claim()
        require_inputs_set(self.plan.graph, self._given)
        self._status[...] = 0
        if times is not None:
            tape = tape.copy()
            tape[2::3] |= tp.SYNC
        self.team.run(tape, times)
        if self._status.any():
            i = int(np.flatnonzero(self._status[:, 0])[0])
            (step, kernel), (code, index, n) = self._launches[i], self._status[i].tolist()
            where = f"{step.nodes[-1].op.name} ({step.nodes[-1].name})"
            if code == RAISED:
                raise KernelError(f"{where}: the kernel {kernel.name} raised an error; kernels must not")
            if code == BAD_SPAN:
                raise KernelError(f"{where}: bad span: a sequence has tokens {index} to {n}; legal: from 0, never falling, up to the number of tokens")
            raise KernelError(f"{where}: bad index {index}; legal: 0 to {n - 1}")

    def buffers(self) -> tuple[np.ndarray, np.ndarray]:
        """This plan's part of the arena, and the scratch as a row per thread, of which the plan uses the first scratch_bytes."""
        self._sync()
        used = self._scratch_stride * self.team.n_threads
        return self._arena[: self.plan.arena_bytes], self._scratch[:used].reshape(self.team.n_threads, self._scratch_stride)
