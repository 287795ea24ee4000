"""Batches and ubatches: tokens with positions and sequences, split so that each piece fits one graph.

Recurrent layers advance every sequence of a graph by the same number of tokens, so a ubatch is a rectangle: n_seqs
sequences, n_seq_tokens each. A ragged batch becomes several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.tensor import Tensor


@dataclass(slots=True)
class Piece:
    """Tokens of one sequence, in order; `outputs` marks those whose logits are wanted; `index` is each token's place in the batch."""

    seq: int
    tokens: np.ndarray
    outputs: np.ndarray
    index: np.ndarray


@dataclass(slots=True)
class Ubatch:
    """A rectangle of tokens: row s holds n_seq_tokens tokens of sequence seqs[s]."""

    seqs: list[int]
    tokens: np.ndarray   # [n_seqs, n_seq_tokens]
    outputs: np.ndarray  # bool, same shape
    index: np.ndarray    # place in the batch, same shape

    @property
    def n_seq_tokens(self) -> int:
        """Tokens of each sequence."""
        return int(self.tokens.shape[1])


def split_equal(pieces: Sequence[Piece], n_ubatch: int) -> Iterator[Ubatch]:
    """Rectangles of at most n_ubatch tokens: as many sequences at once as have tokens left, each advanced by the shortest rest."""
    done = [0] * len(pieces)
    while True:
        active = [k for k, p in enumerate(pieces) if done[k] < len(p.tokens)][:n_ubatch]
        if not active:
            return
        n = min(min(len(pieces[k].tokens) - done[k] for k in active), n_ubatch // len(active))
        cut = [slice(done[k], done[k] + n) for k in active]
        yield Ubatch([pieces[k].seq for k in active], *(np.stack([getattr(pieces[k], f)[c] for k, c in zip(active, cut, strict=True)])
                                                        for f in ("tokens", "outputs", "index")))
        for k in active:
            done[k] += n


@dataclass(slots=True)
class GraphInputs:
    """Input tensors of a model's graph for one shape of ubatch; those that the model does not use are None."""

    n_seq_tokens: int
    n_seqs: int
    n_kv: int
    n_outputs: int
    tokens: Tensor             # i32 [n_tokens]
    rows: Tensor | None        # i32 [n_seqs], the state row of each sequence
    pos: Tensor | None         # i32 [n_tokens]
    kv_idxs: Tensor | None     # i64 [n_tokens], the cache cell of each token
    kq_mask: Tensor | None     # f16 [n_kv, n_tokens], 0 or -inf
    out_ids: Tensor | None     # i32 [n_outputs], the tokens whose logits are wanted
    flash_attn: bool = True    # attention as one op, or as two products and a softmax

    @property
    def n_tokens(self) -> int:
        """Tokens of the ubatch."""
        return self.n_seq_tokens * self.n_seqs
