"""The grid of vLLM's SSD tests on every form of the Mamba2 layer, gate z and skip D included: sequences alone, continuous batches whose
sequences advance by different lengths and start anew, and prefill that is taken up again. Outputs and both states are compared with the
float64 recurrence. (Sizes are those of vllm tests/kernels/mamba/test_mamba_ssm_ssd.py; there as here a head has a group of its own, and
d_state is the head's size.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy_forward import mamba2

import pyggml as pg
from pyggml.models.layers import FORMS
from pyggml.runtime.batch import Piece, split_equal
from pyggml.testing import nmse

N_EMBD, D_CONV, EPS = 8, 4, 1e-5
LIMIT = 1e-10
Weights = dict[str, np.ndarray]
States = tuple[np.ndarray, np.ndarray]  # conv [n_seqs, conv_dim, d_conv - 1], ssm [n_seqs, n_head, head_dim, d_state]


@functools.cache
def weights(n_head: int, d: int) -> Weights:
    """Random weights in NumPy order; slow and fast decays."""
    rng = np.random.default_rng([n_head, d])
    d_inner, conv_dim = n_head * d, 3 * n_head * d

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.normal(0, 1, shape)).astype(np.float32)

    return {"ssm_in.weight": normal(d_inner + conv_dim + n_head, N_EMBD, scale=N_EMBD ** -0.5), "ssm_conv1d.weight": normal(conv_dim, D_CONV, scale=0.5),
            "ssm_conv1d.bias": normal(conv_dim, scale=0.1), "ssm_dt.bias": normal(n_head, scale=0.5),
            "ssm_a": -rng.uniform(0.01, 1.0, (n_head, 1)).astype(np.float32), "ssm_d": normal(n_head, 1),
            "ssm_out.weight": normal(N_EMBD, d_inner, scale=d_inner ** -0.5)}


def tokens(n: int, seed: int) -> np.ndarray:
    """Layer inputs [n, n_embd]."""
    return np.random.default_rng(seed).normal(0, 1, (n, N_EMBD)).astype(np.float32)


@functools.cache
def recurrence(n_head: int, d: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y [n, n_embd] and both states after `tokens(n, seed)`, in float64."""
    w = {k: v.astype(np.float64) for k, v in weights(n_head, d).items()}
    return mamba2(w, tokens(n, seed).astype(np.float64), d, n_head, n_head, EPS)


def zeros(n_seqs: int, n_head: int, d: int) -> States:
    """States of fresh sequences."""
    return np.zeros((n_seqs, 3 * n_head * d, D_CONV - 1), np.float32), np.zeros((n_seqs, n_head, d, d), np.float32)


def advance(n_head: int, d: int, x: np.ndarray, states: States, form: str, chunk: int) -> tuple[np.ndarray, States]:
    """One graph: x [n_seqs, n, n_embd] from the states."""
    hp = {"ssm_d_conv": D_CONV, "ssm_d_inner": n_head * d, "ssm_d_state": d, "ssm_n_group": n_head, "ssm_dt_rank": n_head, "f_norm_rms_eps": EPS}
    w = {k: pg.tensor(v) for k, v in weights(n_head, d).items()}
    y, conv, ssm = pg.compute(pg.mamba2_layer(pg.tensor(x), w, pg.tensor(states[0]), pg.tensor(states[1]), hp, form=form, chunk=chunk), threads=2)
    return y.reshape(x.shape), (conv.reshape(states[0].shape), ssm.reshape(states[1].shape))


def same(got: np.ndarray, want: np.ndarray) -> None:
    assert nmse(got, want) <= LIMIT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n_tok", "chunk"), [(119, 17), (128, 32)])
@pytest.mark.parametrize("d", [5, 8, 19, 32, 128])
@pytest.mark.parametrize("n_head", [3, 4, 11, 16, 32])
def test_one_sequence(n_head: int, d: int, n_tok: int, chunk: int, form: str) -> None:
    y, (conv, ssm) = advance(n_head, d, tokens(n_tok, 0)[None], zeros(1, n_head, d), form, chunk)
    for got, want in zip((y[0], conv[0], ssm[0]), recurrence(n_head, d, n_tok, 0), strict=True):
        same(got, want)


BATCHES = {  # name: full length of a sequence, chunk, tokens of each sequence in each step
    "halves": (64, 8, [(64, 32), (64, 32)]),
    "three halves": (64, 8, [(32, 32), (32, 32), (32, 32)]),
    "whole chunks": (64, 8, [(8, 8), (8, 8), (8, 8)]),
    "half chunks": (64, 8, [(4, 4), (4, 4), (4, 4), (4, 4)]),
    "five lengths": (64, 8, [(64, 32, 16, 8, 8), (8, 16, 32, 16, 8), (8, 8, 16, 32, 16)]),
    "odd chunk": (64, 29, [(11, 4), (13, 23), (19, 22), (21, 15)]),
    "one short": (64, 256, [(5,), (1,), (1,), (1,)]),
    "short": (64, 256, [(5, 30), (1, 2), (1, 2), (1, 2)]),
    "long": (768, 128, [(138, 225), (138, 225)]),
}


SIZES = [*((n, d) for n in (4, 8, 13) for d in (5, 16, 21, 32)), (16, 8), (32, 8), (4, 128)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "n_head", "d"), [(b, *size) for b in BATCHES for size in SIZES if b != "long" or size in SIZES[:2]])
def test_continuous_batch(batch: str, n_head: int, d: int, form: str) -> None:
    full, chunk, steps = BATCHES[batch]
    n_seqs = len(steps[0])
    states = zeros(n_seqs, n_head, d)
    done = [0] * n_seqs
    for lengths in steps:
        xs = [tokens(full, s)[at:at + n] for s, (at, n) in enumerate(zip(done, lengths, strict=True))]
        for s, y in batch_step(n_head, d, xs, states, form, chunk):
            same(y, recurrence(n_head, d, full, s)[0][done[s]:done[s] + len(y)])
        for s, n in enumerate(lengths):
            done[s] = (done[s] + n) % full
            if done[s] == 0:  # finished: the next step starts it anew
                same(states[1][s], recurrence(n_head, d, full, s)[2])
                states[0][s], states[1][s] = 0.0, 0.0


def batch_step(n_head: int, d: int, xs: Sequence[np.ndarray], states: States, form: str, chunk: int) -> Iterator[tuple[int, np.ndarray]]:
    """Advance sequence s by xs[s], in the rectangles that a context cuts a ragged batch into. Writes the states and gives each sequence's y."""
    ys = [np.zeros_like(x) for x in xs]
    index = [np.arange(len(x)) for x in xs]
    for u in split_equal([Piece(s, i, np.ones(len(i), bool), i) for s, i in enumerate(index)], 1 << 20):
        x = np.stack([xs[s][t] for s, t in zip(u.seqs, u.tokens, strict=True)])
        y, (conv, ssm) = advance(n_head, d, x, (states[0][u.seqs], states[1][u.seqs]), form, chunk)
        states[0][u.seqs], states[1][u.seqs] = conv, ssm
        for k, s in enumerate(u.seqs):
            ys[s][u.tokens[k]] = y[k]
    yield from enumerate(ys)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [8, 256])
@pytest.mark.parametrize("lengths", [(16, 20), (270, 88, 212, 203)], ids=str)
def test_resumed_prefill(lengths: tuple[int, ...], chunk: int, form: str) -> None:
    n_head, d = 16, 64
    states = zeros(len(lengths), n_head, d)
    for part in range(2):
        cut = [slice(0, n // 2) if part == 0 else slice(n // 2, n) for n in lengths]
        for s, y in batch_step(n_head, d, [tokens(n, s)[c] for s, (n, c) in enumerate(zip(lengths, cut, strict=True))], states, form, chunk):
            same(y, recurrence(n_head, d, lengths[s], s)[0][cut[s]])
    for s, n in enumerate(lengths):
        for got, want in zip((states[0][s], states[1][s]), recurrence(n_head, d, n, s)[1:], strict=True):
            same(got, want)
