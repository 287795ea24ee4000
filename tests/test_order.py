"""Barriers of a tape: where a step must wait, and where it need not."""

from __future__ import annotations

import numpy as np

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.cpu import tape as tp
from pyggml.cpu.order import Touched, barriers, byte_range
from pyggml.graph import Graph


def step(reads: list[int], writes: list[int], *, single: bool = False) -> Touched:
    """A step over places of ten bytes, by number."""
    return Touched([(10 * r, 10 * r + 10) for r in reads], [(10 * w, 10 * w + 10) for w in writes], single)


def test_independent_steps_share_a_barrier() -> None:
    assert barriers([step([0], [1]), step([0], [2]), step([1, 2], [3])]) == [False, True, True]


def test_every_kind_of_conflict_needs_one() -> None:
    assert barriers([step([0], [1]), step([1], [2])]) == [True, True]  # read after write
    assert barriers([step([0], [1]), step([2], [0])]) == [True, True]  # write after read: memory taken again
    assert barriers([step([0], [1]), step([2], [1])]) == [True, True]  # write after write


def test_a_conflict_with_any_step_since_the_last_barrier_counts() -> None:
    assert barriers([step([0], [1]), step([2], [3]), step([1], [4])]) == [False, True, True]
    assert barriers([step([0], [1]), step([1], [2]), step([0], [1])]) == [True, True, True]


def test_one_thread_runs_its_own_steps_in_order() -> None:
    assert barriers([step([0], [1], single=True), step([1], [2], single=True), step([2], [3])]) == [False, True, True]


def test_ranges_of_views_and_blocks() -> None:
    x = pg.tensor([6, 5], "f32")
    assert byte_range(x, 1000) == (1000, 1120)
    assert byte_range(pg.transpose(x), 1000) == (1000, 1120)
    assert byte_range(pg.tensor([64, 3], "q8_0"), 0) == (0, 3 * 68)


def test_products_of_one_input_run_without_a_barrier_and_agree() -> None:
    rng = np.random.default_rng(0)
    a, b, x = (rng.standard_normal(s).astype(np.float32) for s in ((512, 256), (300, 256), (1, 256)))
    backend, t = open_backend("cpu", threads=2), pg.tensor([256], "f32", name="x")
    outs = [pg.mul_mat(pg.tensor(a), t), pg.mul_mat(pg.tensor(b), t)]
    runner = backend.compile(Graph(outs))
    assert [int(f) & tp.SYNC for f in runner._tape[2::3]] == [0, tp.SYNC]
    runner.set(t, x[0])
    for _ in range(300):  # counters are set back for both steps between two runs
        runner.run(repeat=3)
    for got, w in zip(outs, (a, b), strict=True):
        assert np.allclose(runner.get(got).ravel(), w @ x[0], rtol=1e-4, atol=1e-4)
