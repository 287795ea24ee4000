"""Which steps of a plan must wait until all threads are through with those before them.

Steps in order need no barrier between them when neither writes what the other touches: a thread that finds no work left in one goes
on with the next. Nor do steps that only the first thread works on, among themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyggml.tensor import Tensor

Range = tuple[int, int]  # first byte and the one past the last


class Touched(NamedTuple):
    """What a step reads and writes, and whether one thread alone works on it."""

    reads: list[Range]
    writes: list[Range]
    single: bool


def byte_range(t: Tensor, address: int) -> Range:
    """From a tensor's first byte to past its last, gaps included."""
    inner = (t.ne[0] // t.dtype.block - 1) * t.nb[0] + t.dtype.nbytes
    return address, address + inner + sum((n - 1) * nb for n, nb in zip(t.ne[1:], t.nb[1:], strict=True))


def touched(reads: Sequence[Tensor | None], writes: Sequence[Tensor], single: bool, address: Callable[[Tensor], int]) -> Touched:
    """What a step touches; `address` of a tensor's first element."""
    return Touched([byte_range(t, address(t)) for t in reads if t is not None], [byte_range(t, address(t)) for t in writes], single)


def barriers(steps: Sequence[Touched]) -> list[bool]:
    """For each step whether a barrier follows it; one follows the last."""
    found: list[bool] = []
    window: list[Touched] = []  # steps since the last barrier
    for s in steps:
        if window:
            found.append(any(_conflict(s, w) for w in window if not (s.single and w.single)))
            if found[-1]:
                window.clear()
        window.append(s)
    return [*found, True] if window else []


def _conflict(a: Touched, b: Touched) -> bool:
    return _overlap(a.writes, b.writes) or _overlap(a.writes, b.reads) or _overlap(a.reads, b.writes)


def _overlap(xs: Sequence[Range], ys: Sequence[Range]) -> bool:
    return any(x[0] < y[1] and y[0] < x[1] for x in xs for y in ys)
