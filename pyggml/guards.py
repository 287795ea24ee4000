"""Guarded runs: a case on a backend against the reference, with the memory around it watched.

On a backend that shows its memory (`buffers`), results are NaN before the run, unused bytes lie before and after every tensor and
each thread's scratch, and after the run not one byte outside the results' own elements may have changed: neither those nor the gaps
of strided tensors, nor the inputs. Several thread counts must give equal bits. Every output is compared, states too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pyggml.backends import Backend, Runner, open_backend
from pyggml.cases import Case
from pyggml.dtypes import F64
from pyggml.errors import PyggmlError
from pyggml.graph import Graph
from pyggml.plan import Plan
from pyggml.tensor import Tensor
from pyggml.testing import nmse

THREADS = (1, 2, 3, 7, 65)
GUARD = 1024  # bytes around every tensor
POISON = 0xFF  # NaN in every float type, -1 as an index


@runtime_checkable
class Watched(Protocol):
    """A runner that shows its memory: the arena, in which plan.offsets are places, and the scratch, a row per thread."""

    plan: Plan

    def view(self, t: Tensor) -> np.ndarray:
        """The live memory of a tensor."""

    def buffers(self) -> tuple[np.ndarray, np.ndarray]:
        """Arena and scratch."""


@dataclass(slots=True)
class Verdict:
    """What a case showed: `faults` in words (none: passed), the worst NMSE of its outputs and its limit, the kernel that ran, and
    `skipped`, the backend's reason where it does not take the op."""

    limit: float
    nmse: float = 0.0
    kernel: str = ""
    skipped: str = ""
    faults: list[str] = field(default_factory=list)


def guarded_backends(name: str, threads: Sequence[int] = THREADS, **options: Any) -> list[Backend]:
    """A backend ready for guarded runs: the CPU backend once per thread count, any other once."""
    if name == "cpu":
        return [open_backend(name, threads=n, guard=GUARD, **options) for n in threads]
    return [open_backend(name, **options)]


def stored_values(case: Case, seed: int = 0) -> list[np.ndarray | None]:
    """What the inputs are given: floats rounded to float32, as every backend gets them; None for constants and absent inputs."""
    pairs = zip(case.inputs, case.data(seed), strict=True)
    return [None if x is None or v is None else v.astype(x.dtype.np if x.dtype.is_int or x.dtype is F64 else np.float32) for x, v in pairs]


def check_case(case: Case, backends: Sequence[Backend], seed: int = 0) -> Verdict:
    """Run a case on each backend (thread counts of one kind, see `guarded_backends`) and compare with the reference.

    >>> from pyggml.casetext import parse_case
    >>> check_case(parse_case("CUMSUM(type=f32,ne=[10,5,4,3])"), [open_backend("reference")]).faults
    []
    """
    node = case.node()
    verdict = Verdict(case.nmse_limit(node), skipped=backends[0].refuses(node) or "")
    if verdict.skipped:
        return verdict
    values = stored_values(case, seed)
    want, _ = _run(case, open_backend("reference"), values, seed, verdict)
    first: list[np.ndarray] = []
    for backend in backends:
        try:
            got, verdict.kernel = _run(case, backend, values, seed, verdict)
        except PyggmlError as e:
            verdict.faults.append(f"{type(e).__name__}: {e}")
            break
        if first and not all(a.tobytes() == b.tobytes() for a, b in zip(first, got, strict=True)):
            verdict.faults.append(f"{_threads(backend)} threads give other bits than {_threads(backends[0])}")
        first = first or got
    if first:
        _compare(case, backends[0], values, first, want, verdict)
    return verdict


def _threads(backend: Backend) -> int:
    return int(getattr(backend, "threads", 1))


def _run(case: Case, backend: Backend, values: list[np.ndarray | None], seed: int, verdict: Verdict) -> tuple[list[np.ndarray], str]:
    """Outputs of the case and the kernel's name; what the guards saw goes to the verdict."""
    ins, outs = case.build(seed)
    constants = [(t, *_surrounded(t)) for t in ins if t is not None and t.data is not None]
    runner = backend.compile(Graph(outs))
    if isinstance(runner, Watched):
        for buffer in runner.buffers():
            buffer[...] = POISON
    for t, value in zip(ins, values, strict=True):
        if t is not None and value is not None:
            runner.set(t, value)
    before = [b.copy() for b in runner.buffers()] if isinstance(runner, Watched) else []
    runner.run()
    if isinstance(runner, Watched):
        made = [t for step in runner.plan.steps for t in step.outs if not any(t is x for x in outs)]  # what a kernel has prepared of its inputs
        verdict.faults += _seen(runner, [t for t in ins if t is not None], [*outs, *made], before, f" on {_threads(backend)} threads")
    for t, around, data in constants:
        assert t.data is not None
        if not all((guard == POISON).all() for guard in around):
            verdict.faults.append(f"bytes beside the constant {t.name} were written")
        if not any(t is o.root for o in outs) and not np.array_equal(t.data, data):
            verdict.faults.append(f"the constant {t.name} was written")
    return [runner.get(t) for t in outs], _kernel_of(runner)


def _kernel_of(runner: Runner) -> str:
    return "+".join(s.kernel_name for s in runner.plan.steps)


def _surrounded(t: Tensor) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Give a constant's data poisoned bytes on both sides. These, and the data."""
    data = t.data
    assert data is not None
    whole = np.full(data.nbytes + 2 * GUARD + 64, POISON, np.uint8)
    start = GUARD + -whole.ctypes.data % 64
    t.data = whole[start:start + data.nbytes]
    t.data[...] = data
    return (whole[:start], whole[start + data.nbytes:]), data


def _seen(runner: Watched, ins: list[Tensor], outs: list[Tensor], before: list[np.ndarray], where: str) -> list[str]:
    """Bytes that changed outside the results, and elements of results that were not written."""
    arena, scratch = runner.buffers()
    may_change = np.zeros(len(arena), bool)
    for t in {id(t): t for t in (*outs, *(t for s in runner.plan.steps for t in s.outs))}.values():  # what steps make for each other is theirs
        place = runner.plan.offsets.get(id(t.root))
        if place is not None:
            cells = as_strided(may_change[place + t.offs:], (*t.ne[::-1], t.dtype.nbytes), (*t.nb[::-1], 1))
            cells[...] = True
    faults = []
    changed = np.flatnonzero((arena != before[0]) & ~may_change)
    if changed.size:
        faults.append(f"{changed.size} bytes outside the results were written, the first {_place(runner.plan, [*ins, *outs], int(changed[0]))}{where}")
    if not np.array_equal(scratch[:, runner.plan.scratch_bytes:], before[1][:, runner.plan.scratch_bytes:]):
        faults.append(f"bytes beyond the scratch of {runner.plan.scratch_bytes} were written{where}")
    for t in outs:
        if t.root.node is not None and t.dtype.is_float and t.dtype.np is not None:
            view = np.ascontiguousarray(runner.view(t))
            raw = view.view(f"<u{view.itemsize}")
            missed = int(np.count_nonzero(raw == np.iinfo(raw.dtype).max))
            if missed:
                faults.append(f"{missed} of {t.n_elements} elements of {t.name} were not written{where}")
    return faults


def _place(plan: Plan, tensors: list[Tensor], at: int) -> str:
    """Where a byte of the arena lies, in words."""
    placed = [(plan.offsets[id(t.root)], t.root) for t in tensors if id(t.root) in plan.offsets]
    before = [p for p in placed if p[0] <= at]
    if not before:
        return f"{min(p[0] for p in placed) - at} bytes before the first tensor"
    start, t = max(before, key=lambda p: p[0])
    return f"in {t.name}, at byte {at - start}" if at - start < t.nbytes else f"{at - start - t.nbytes} bytes after the end of {t.name}"


def _compare(case: Case, backend: Backend, values: list[np.ndarray | None], got: list[np.ndarray], want: list[np.ndarray], verdict: Verdict) -> None:
    if backend.name == "ggml":
        from pyggml.backends.ggml_compare import compare
        got, want, verdict.limit, _ = compare(case, values, got, want)
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        name = case.op.outputs[k]
        if w.dtype.kind == "i":
            wrong = int(np.count_nonzero(np.asarray(g) != w))
            if wrong:
                verdict.faults.append(f"{wrong} of {w.size} numbers of {name} differ from the reference")
                verdict.nmse = float("inf")
            continue
        err = nmse(g, w)
        verdict.nmse = max(verdict.nmse, err)
        if not err <= verdict.limit:
            verdict.faults.append(f"NMSE of {name} is {err:.2g}; its limit is {verdict.limit:.2g}")
