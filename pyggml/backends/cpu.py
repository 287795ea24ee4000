"""The CPU backend: a plan becomes a tape of compiled kernels over one arena, walked by the team."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pyggml.backends.base import check_array, decode, require_inputs_set
from pyggml.cpu import tape as tp
from pyggml.cpu.compile import ARG_WORDS, HEADER_WORDS, Progress, kernels_for
from pyggml.cpu.fuse import group, launch_of
from pyggml.cpu.launch import Launch, launch
from pyggml.cpu.level import check_level, host_level
from pyggml.cpu.team import TAPE_KERNELS, aligned, check_threads, n_cores, team
from pyggml.errors import GraphError, KernelError, UnsupportedOp
from pyggml.graph import Graph
from pyggml.plan import Plan, Step, make_plan
from pyggml.registry import choose_kernel, load_kernels
from pyggml.tensor import Node, Tensor

POISON = 0xFF  # fills memory with NaN in every float type


class CpuBackend:
    """Options: `threads` (default: all cores), `level` (default: the host's), `fuse` and `reuse` (off for bisecting),
    `poison` (fill the arena with NaN at first), `progress(done, total)` while compiling."""

    name = "cpu"

    def __init__(self, *, threads: int | None = None, level: str | None = None, fuse: bool = True, reuse: bool = True, poison: bool = False,
                 progress: Progress | None = None) -> None:
        load_kernels("cpu")
        self.threads = n_cores() if threads is None else threads
        self.level = check_level(level)
        self.fuse = fuse
        self.reuse = reuse
        self.poison = poison
        self.progress = progress
        check_threads(self.threads)
        self.memory = SharedMemory()

    def refuses(self, node: Node) -> str | None:
        """None when a kernel takes the node, else every kernel's reason."""
        if node.op.view or node.op.pointwise is not None:
            return None
        return choose_kernel(node, "cpu")[1] or None

    def compile(self, graph: Graph) -> CpuRunner:
        """Plan, compile what is not cached, lay out memory."""
        refused: list[str] = []

        def choose(step: Step) -> None:
            node = step.nodes[-1]
            if node.op.pointwise is not None:
                step.kernel = launch_of(step)
            else:
                k, why = choose_kernel(node, "cpu")
                if k is None:
                    refused.append(f"{node.op.name} ({node.name}): {why}")
                    return
                step.kernel = launch(k, node)
            step.kernel_name, step.scratch = step.kernel.name, step.kernel.scratch

        plan = make_plan(graph, choose, fuse=group if self.fuse else None, reuse=self.reuse)
        if refused:
            raise UnsupportedOp("; ".join(refused))
        specs = [s.kernel.spec for s in plan.steps]
        kernels_for().addresses(TAPE_KERNELS if self.level != host_level() else [*specs, *TAPE_KERNELS], self.progress)  # all in one go
        return CpuRunner(self, plan, kernels_for(self.level).addresses(specs, self.progress))


class SharedMemory:
    """Arena and scratch of all runners of one backend: they run one at a time, so one buffer of the largest size serves all."""

    def __init__(self) -> None:
        self.arena = aligned(1)
        self.scratch = aligned(1)

    def grow(self, arena: int, scratch: int, fill: int) -> None:
        """Make room; a larger arena is a new one, which runners notice at their next use."""
        if arena > len(self.arena):
            self.arena = aligned(arena)
            if fill:
                self.arena[...] = fill
        if scratch > len(self.scratch):
            self.scratch = aligned(scratch)


class CpuRunner:
    """A plan bound to memory. All runners of a backend share their arena: inputs are to be set before each run, and values
    read before another runner runs. `view(t)` gives the live memory of a tensor."""

    def __init__(self, backend: CpuBackend, plan: Plan, addresses: list[int]) -> None:
        self.plan = plan
        self.team = team(backend.threads)
        self.memory = backend.memory
        self._addresses = addresses
        self._scratch_stride = -(-plan.scratch_bytes // 64) * 64
        self.memory.grow(plan.arena_bytes, self._scratch_stride * backend.threads, POISON if backend.poison else 0)
        self._given: set[int] = set()
        self._status = np.zeros((len(plan.steps), 2), np.int64)
        self._bind()

    def _sync(self) -> None:
        if self._arena is not self.memory.arena or self._scratch is not self.memory.scratch:
            self._bind()

    def _bind(self) -> None:
        self._arena, self._scratch = self.memory.arena, self.memory.scratch
        addresses = self._addresses
        launches: list[Launch] = [s.kernel for s in self.plan.steps]
        sizes = [-(-(HEADER_WORDS + ARG_WORDS * len(k.operands) + len(k.params)) // 8) * 8 for k in launches]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._records = aligned(max(int(starts[-1]), 1) * 8).view(np.int64)
        self._tape = np.zeros(3 * len(launches), np.int64)
        base = self._records.ctypes.data
        single = [k.items <= k.chunk for k in launches] + [False]
        for i, k in enumerate(launches):
            words: list[int] = [k.items, k.chunk, 0, self._status[i].ctypes.data, self._scratch.ctypes.data, self._scratch_stride]
            for t in k.operands:
                words += [0] * ARG_WORDS if t is None else [self.address(t), *t.ne, *t.nb]
            for p in k.params:
                words.append(int(np.float64(p).view(np.int64)) if isinstance(p, float) else p)
            self._records[starts[i]:starts[i] + len(words)] = words
            last = i == len(launches) - 1
            sync = tp.SYNC if last or not (single[i] and single[i + 1]) else 0
            self._tape[3 * i:3 * i + 3] = addresses[i], base + int(starts[i]) * 8, (tp.SINGLE if single[i] else 0) | sync

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
        """The live memory of a tensor of a plain type, in NumPy order (BF16 as uint16 bits)."""
        if t.dtype.np is None:
            raise GraphError(f"{t.name}: {t.dtype.name} blocks have no NumPy view")
        self._sync()
        root = t.root
        if root.data is not None:
            flat = root.data.reshape(-1).view(np.uint8)[t.offs:]
        else:
            start = self.plan.offsets.get(id(root))
            if start is None:
                raise GraphError(f"{t.name or 'tensor'} is not part of this graph")
            flat = self._arena[start + t.offs:]
        typed = flat[: len(flat) // t.dtype.nbytes * t.dtype.nbytes].view(t.dtype.np)
        return as_strided(typed, t.ne[::-1], t.nb[::-1])

    def set(self, t: Tensor, value: np.ndarray) -> None:
        """Fill an input."""
        self.view(t)[...] = check_array(t, value)
        self._given.add(id(t))

    def get(self, t: Tensor) -> np.ndarray:
        """A copy of a tensor's value; BF16 comes as float32."""
        return decode(t, self.view(t))

    def run(self, times: np.ndarray | None = None) -> None:
        """Run all steps; KernelError names the node whose kernel met bad data."""
        require_inputs_set(self.plan.graph, self._given)
        self._sync()
        self._status[...] = 0
        self.team.run(self._tape, times)
        if self._status.any():
            i = int(np.flatnonzero(self._status[:, 0])[0])
            step, (code, value) = self.plan.steps[i], self._status[i].tolist()
            where = f"{step.nodes[-1].op.name} ({step.nodes[-1].name})"
            if code == tp.RAISED:
                raise KernelError(f"{where}: the kernel {step.kernel_name} raised an error; kernels must not")
            raise KernelError(f"{where}: bad index {value}; legal: rows of the tensor that it indexes")

    def buffers(self) -> list[np.ndarray]:
        """Arena and scratch."""
        return [self.memory.arena, self.memory.scratch]
