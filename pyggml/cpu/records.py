"""Records: what a launch's kernel reads, in 64-bit words (layout in pyggml.cpu.compile)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pyggml.cpu.compile import ARG_WORDS, HEADER_WORDS
from pyggml.cpu.launch import Launch
from pyggml.tensor import Tensor


def record_size(k: Launch) -> int:
    """Words of a launch's record, rounded up to whole cache lines."""
    return -(-(HEADER_WORDS + ARG_WORDS * (len(k.operands) + len(k.extra)) + len(k.params) + len(k.extra_params)) // 8) * 8


def record_words(k: Launch, chunk: int, status: int, scratch: tuple[int, int], address: Callable[[Tensor], int]) -> list[int]:
    """The words of a launch: items a thread takes at a time, address of its status words, scratch of thread 0 and bytes per thread, `address`
    of a tensor's first element."""
    words = [k.items, chunk, 0, status, *scratch]
    for operands, params in ((k.operands, k.params), (k.extra, k.extra_params)):
        for t in operands:
            words += [0] * ARG_WORDS if t is None else [address(t), *t.ne, *t.nb]
        words += [_as_word(p) for p in params]
    return words


def pointers(k: Launch) -> Iterator[tuple[int, Tensor]]:
    """The words of a record that hold pointers, and the tensors whose first elements they point to."""
    at = HEADER_WORDS
    groups: tuple[tuple[Sequence[Tensor | None], int], ...] = ((k.operands, len(k.params)), (k.extra, len(k.extra_params)))
    for operands, n_params in groups:
        for t in operands:
            if t is not None:
                yield at, t
            at += ARG_WORDS
        at += n_params


def _as_word(p: int | float) -> int:
    return int(np.float64(p).view(np.int64)) if isinstance(p, float) else p
