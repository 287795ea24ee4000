"""A context's memory: KV cache of the attention layers, conv and SSM states of the recurrent ones.

KV: one pool of n_ctx cells shared by all sequences; each cell holds one token's K and V in every attention layer.
States: one row per sequence and recurrent layer; their size does not depend on n_ctx. A row is cleared once, when its sequence starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.dtypes import BF16, F16, DType, bf16_to_f32
from pyggml.errors import ContextError
from pyggml.tensor import Tensor

KV_PAD = 256  # the part of the cache that a graph sees grows in these steps, so that decode keeps its plan


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """Sizes per layer, in elements; 0 where a layer has no such memory. `conv` and `ssm` are the ne of one sequence's state."""

    k: tuple[int, ...]
    v: tuple[int, ...]
    conv: tuple[tuple[int, ...] | None, ...]
    ssm: tuple[tuple[int, ...] | None, ...]

    @property
    def has_attention(self) -> bool:
        """True when some layer has a KV cache."""
        return any(self.k)


class Memory:
    """Tensors over the pools and the bookkeeping of cells and sequences. With `allocate=False` the tensors have no data
    (for graphs that are only looked at). `updates` collects the in-place writes of the graph being built."""

    def __init__(self, shape: MemoryShape, n_ctx: int, n_seq_max: int, type_k: DType, type_v: DType, type_r: DType, type_s: DType, *,
                 allocate: bool = True) -> None:
        self.shape = shape
        self.n_ctx = n_ctx
        self.n_seq_max = n_seq_max
        self.updates: list[Tensor] = []

        def pool(name: str, il: int, ne: tuple[int, ...] | None, rows: int, dt: DType) -> Tensor | None:
            if not ne:
                return None
            n = int(np.prod(ne))
            t = Tensor(dt, (n, rows, 1, 1), name=f"{name}_l{il}")
            if allocate:
                t.data = _zeros(dt.row_bytes(n) * rows, np.uint8, t.name)
            return t

        layers = range(len(shape.k))
        self.k = [pool("cache_k", i, (shape.k[i],) if shape.k[i] else None, n_ctx, type_k) for i in layers]
        self.v = [pool("cache_v", i, (shape.v[i],) if shape.v[i] else None, n_ctx, type_v) for i in layers]
        self.conv = [pool("cache_r", i, shape.conv[i], n_seq_max, type_r) for i in layers]
        self.ssm = [pool("cache_s", i, shape.ssm[i], n_seq_max, type_s) for i in layers]
        self.cell_seq = _zeros(n_ctx if shape.has_attention else 0, np.int64, "cells") - 1
        self.cell_pos = np.zeros(len(self.cell_seq), np.int64)
        self.n_past = [0] * n_seq_max

    # Cells

    def room(self) -> int:
        """Free cells: how many more tokens of all sequences together fit. Without attention layers there are none, and no such limit."""
        return int(np.count_nonzero(self.cell_seq < 0))

    def place(self, seq: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Take cells for the next n tokens of a sequence: (cells, positions). `n_past` is the caller's to move on, once they are computed."""
        pos = np.arange(self.n_past[seq], self.n_past[seq] + n)
        if not self.shape.has_attention:
            return np.zeros(0, np.int64), pos
        cells = np.flatnonzero(self.cell_seq < 0)[:n]
        if len(cells) < n:
            raise ContextError(f"the context is full: {n} more tokens of sequence {seq}, {len(cells)} of {self.n_ctx} cells are free")
        self.cell_seq[cells], self.cell_pos[cells] = seq, pos
        return cells, pos

    def n_kv(self, n_more: int = 0) -> int:
        """Cells that a graph must see, also when n_more tokens have been placed: up to the last used one, rounded up. 0 without
        attention layers."""
        taken, free = np.flatnonzero(self.cell_seq >= 0), np.flatnonzero(self.cell_seq < 0)
        last = max((int(cells[-1]) for cells in (taken, free[:n_more]) if len(cells)), default=-1)
        return min(-(-(last + 1) // KV_PAD) * KV_PAD, self.n_ctx)

    def mask(self, seqs: np.ndarray, pos: np.ndarray, n_kv: int) -> np.ndarray:
        """float16 [n_tokens, n_kv]: 0 where a token sees a cell (same sequence, not later), else -inf."""
        sees = (self.cell_seq[None, :n_kv] == seqs[:, None]) & (self.cell_pos[None, :n_kv] <= pos[:, None])
        return np.where(sees, np.float16(0), np.float16(-np.inf))

    # Sequences

    def clear(self, seq: int) -> None:
        """Forget a sequence: its cells become free, cells and state rows zero. A product with V gives dead cells the weight 0, and 0
        times an infinity that one holds would be NaN."""
        cells = np.flatnonzero(self.cell_seq == seq)
        self.cell_seq[cells] = -1
        for tensors, rows, which in (((*self.k, *self.v), self.n_ctx, cells), ((*self.conv, *self.ssm), self.n_seq_max, [seq])):
            for t in tensors:
                if t is not None and t.data is not None:
                    t.data.reshape(rows, -1)[which] = 0
        self.n_past[seq] = 0

    def copy(self, src: int, dst: int) -> None:
        """Make an empty sequence hold what another one holds, in cells of its own."""
        cells = np.flatnonzero(self.cell_seq == src)
        cells = cells[np.argsort(self.cell_pos[cells])]
        own, _ = self.place(dst, self.n_past[src])
        for tensors, rows, to, of in (((*self.k, *self.v), self.n_ctx, own, cells), ((*self.conv, *self.ssm), self.n_seq_max, [dst], [src])):
            for t in tensors:
                if t is not None and t.data is not None:
                    memory = t.data.reshape(rows, -1)
                    memory[to] = memory[of]
        self.n_past[dst] = self.n_past[src]

    def check_range(self, seqs: Sequence[int]) -> None:
        """ContextError when a float16 state of one of these sequences is not finite: float32 values up to 3e38 were stored in it."""
        for option, tensors in (("type_r", self.conv), ("type_s", self.ssm)):
            for t in tensors:
                if t is None or t.data is None or t.dtype is not F16:
                    continue
                rows = t.data.view(np.int16).reshape(self.n_seq_max, -1)
                for seq in seqs:
                    # why: two reductions without a copy; bits of infinities and NaNs are the largest of either sign
                    if rows[seq].max() >= 0x7C00 or rows[seq].view(np.uint16).max() >= 0xFC00:
                        raise ContextError(f"sequence {seq}: its state {t.name} is beyond float16 (65504) or NaN; choose f32 or bf16 as {option}")

    def state(self, il: int, seq: int) -> dict[str, np.ndarray]:
        """Copies of a layer's states of one sequence as float32: conv [conv_dim, d_conv-1], ssm [n_head, head_dim, d_state]."""
        out = {}
        for name, t, ne in (("conv", self.conv[il], self.shape.conv[il]), ("ssm", self.ssm[il], self.shape.ssm[il])):
            assert t is not None and t.data is not None and ne is not None and t.dtype.np is not None
            row = t.data.reshape(self.n_seq_max, -1)[seq].view(t.dtype.np)
            out[name] = (bf16_to_f32(row) if t.dtype is BF16 else row.astype(np.float32)).reshape(ne[::-1])
        return out

    def nbytes(self) -> dict[str, int]:
        """Bytes of the KV cache and of the recurrent states."""
        def size(ts: list[Tensor | None]) -> int:
            return sum(t.nbytes for t in ts if t is not None)
        return {"kv": size(self.k) + size(self.v), "state": size(self.conv) + size(self.ssm)}


def _zeros(n: int, dt: type, what: str) -> np.ndarray:
    try:
        return np.zeros(n, dt)
    except (MemoryError, ValueError):
        nbytes = n * np.dtype(dt).itemsize
        raise ContextError(f"{what} needs {nbytes} bytes, which this system does not give; choose a smaller n_ctx or n_seq_max") from None
