"""The attention family: rules, masked and dead rows, angles far out, order of ties and NaN, equal bits on any team."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import pyggml as pg
from pyggml.cpu.level import LEVELS, host_level
from pyggml.ops.attention.defs import argsort, flash_attn_ext, rope, soft_max, top_k
from pyggml.ops.layout.defs import permute
from pyggml.tensor import Tensor, tensor
from pyggml.testing import nmse

LEVELS_HERE = sorted({*LEVELS[: LEVELS.index(host_level()) + 1]} & {"portable", "avx2", host_level()})
INF, NAN = np.inf, np.nan


def run(out: Tensor, **options: Any) -> np.ndarray:
    """The value in four dims, NumPy order."""
    value: np.ndarray = pg.compute(out, **options)
    return value.reshape(out.ne[::-1])


# FLASH_ATTN_EXT


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None, **options: Any) -> np.ndarray:
    """Rows [n_tok, n_head, d_v] of one sequence."""
    scale = options.pop("scale", 1.0)
    ins = [tensor(t.astype(np.float32)) for t in (q, k, v)]
    return run(flash_attn_ext(*ins, None if mask is None else tensor(mask.astype(np.float16)), scale), **options)[0]


def random_attention(n_tok: int, n_kv: int, n_head: int = 4, n_head_kv: int = 2, d: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v, and a mask that hides about half of the cells."""
    rng = np.random.default_rng([n_tok, n_kv])
    q, k, v = (rng.uniform(-1, 1, s) for s in ((n_head, n_tok, d), (n_head_kv, n_kv, d), (n_head_kv, n_kv, d)))
    return q, k, v, np.where(rng.random((n_tok, n_kv)) < 0.5, -INF, 0.0)


def test_attention_of_known_values() -> None:
    q, k, v = (np.array(t) for t in ([[[1.0], [2.0]]], [[[0.0], [math.log(2)], [math.log(4)]]], [[[1.0], [2.0], [4.0]]]))
    mask = np.array([[0, 0, -INF], [0, -INF, 0]])
    assert np.allclose(attend(q, k, v, None).ravel(), [(1 + 4 + 16) / 7, (1 + 8 + 64) / 21], atol=1e-6)
    assert np.allclose(attend(q, k, v, mask).ravel(), [5 / 3, (1 + 64) / 17], atol=1e-6)
    assert np.allclose(attend(q, k, v, mask, scale=-1.0).ravel(), [(1 + 2 / 2) / 1.5, (1 + 4 / 16) / (17 / 16)], atol=1e-6)


def test_query_heads_share_the_kv_head_of_their_group() -> None:
    q, k, v = np.ones((6, 1, 1)), np.zeros((3, 2, 1)), np.arange(3.0).reshape(3, 1, 1).repeat(2, 1)
    assert attend(q, k, v, None).ravel().tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize(("n_tok", "n_kv"), [(1, 100), (5, 300), (70, 130)])
def test_what_hidden_cells_hold_reaches_no_token(n_tok: int, n_kv: int, bad: float) -> None:
    """Cells hidden from all tokens, and cells that the last token alone sees: the others have the bits of clean memory."""
    q, k, v, mask = random_attention(n_tok, n_kv)
    mask[:, 7], mask[:, 70] = -INF, -INF
    mask[-1, 70] = 0.0 if n_tok > 1 else -INF
    want = attend(q, k, v, mask)
    for cell in (7, 70):
        k[:, cell], v[:, cell] = bad, bad
    got = attend(q, k, v, mask)
    clean = slice(None) if n_tok == 1 else slice(0, -1)
    assert np.isfinite(want).all() and nmse(got[clean], want[clean]) < 1e-13
    assert n_tok == 1 or np.isnan(got[-1]).all()


def test_what_one_head_s_mask_hides_does_not_reach_it() -> None:
    q, k, v = np.ones((2, 1, 16)), np.ones((1, 70, 16)), np.ones((1, 70, 16))
    v[:, 3] = INF
    mask = np.zeros((2, 1, 70))
    mask[0, 0, 3] = -INF
    got = attend(q, k, v, mask)[0]
    assert np.allclose(got[0], 1.0) and (got[1] == INF).all()


def test_a_token_s_result_does_not_depend_on_the_others() -> None:
    q, k, v, mask = random_attention(50, 700)
    whole = attend(q, k, v, mask)
    for t in (0, 17, 49):
        assert nmse(attend(q[:, t:t + 1], k, v, mask[t:t + 1])[0], whole[t]) < 1e-13


@pytest.mark.parametrize("n_tok", [1, 40])
def test_a_long_context_loses_no_digits(n_tok: int) -> None:
    """Even weights on 32,768 cells: sums of random values, which a plain float32 sum rounds by 1e-6."""
    q, k, v, _ = random_attention(n_tok, 32768, 1, 1, 16)
    assert nmse(attend(q * 1e-3, k, v, None), attend(q * 1e-3, k, v, None, backend="reference")) < 1e-12


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_flash_attention_at_level(level: str) -> None:
    q, k, v, mask = random_attention(3, 400)
    assert nmse(attend(q, k, v, mask, level=level), attend(q, k, v, mask, backend="reference")) < 1e-12


# SOFT_MAX


def test_soft_max_of_known_values() -> None:
    x = tensor(np.log(np.array([1, 2, 5], np.float32)))
    mask = tensor(np.array([0, -INF, 0], np.float16))
    assert np.allclose(run(soft_max(x)).ravel(), [1 / 8, 2 / 8, 5 / 8], atol=1e-7)
    assert np.allclose(run(soft_max(x, mask, scale=2.0)).ravel(), [1 / 26, 0, 25 / 26], atol=1e-7)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_dead_rows_are_zero_and_nan_stays_in_its_row(backend: str) -> None:
    x = np.zeros((4, 20), np.float32)
    x[0, 3], x[1], x[2, 19] = NAN, -INF, INF
    got = run(soft_max(tensor(x)), backend=backend)[0, 0]
    assert np.isnan(got[0]).all() and np.isnan(got[2]).all()
    assert (got[1] == 0).all()
    assert np.allclose(got[3], 1 / 20, rtol=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("mask_type", ["f32", "f16"])
def test_fault_17_a_mask_selects(mask_type: str, backend: str) -> None:
    """Scores of unused cells may hold anything: the mask drops them bit for bit."""
    x = np.random.default_rng(2).standard_normal((6, 37)).astype(np.float32)
    mask = tensor(np.where(np.arange(37) < 30, 0, -INF) * np.ones((6, 1)), mask_type)
    clean, stale = x.copy(), x.copy()
    clean[:, 30:], stale[:, 30:] = 0, np.array([NAN, INF, -INF, 1e38, NAN, 3, -1e38])
    got = [run(soft_max(tensor(v), mask, scale=0.5), backend=backend) for v in (clean, stale)]
    assert got[0].tobytes() == got[1].tobytes()
    assert (got[1][..., 30:] == 0).all()


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_soft_max_on_every_level(level: str) -> None:
    x = np.random.default_rng(4).normal(0, 4, (9, 1000)).astype(np.float32)
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    assert nmse(run(soft_max(tensor(x)), level=level), e / e.sum(axis=1, keepdims=True)) < 2e-13


# ROPE


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_rope_far_angles_keep_float32_precision(level: str) -> None:
    """A pair (1, 0) turns into (cos, sin) of the angle itself: positions to 10^6 and beyond, both signs."""
    rng = np.random.default_rng(5)
    pos = np.concatenate([np.arange(-40, 40), rng.integers(-(10**6), 10**6, 4000), [10**6 - 1, 2**30, -(2**31)]]).astype(np.int32)
    x = np.broadcast_to(np.array([1, 0], np.float32), (1, len(pos), 1, 2))
    got = run(rope(tensor(x.copy()), tensor(pos), n_dims=2, freq_scale=0.7), level=level)[0, :, 0]
    angle = pos * 0.7
    assert np.abs(got - np.stack([np.cos(angle), np.sin(angle)], axis=1)).max() < 1e-7


def test_rope_known_values() -> None:
    x = tensor(np.array([1, 2, 3, 4, 5], np.float32).reshape(1, 1, 5))
    c0, s0, c1, s1 = math.cos(3), math.sin(3), math.cos(0.03), math.sin(0.03)  # 10000^(-2/4) is 1/100
    norm = [c0 - 2 * s0, s0 + 2 * c0, 3 * c1 - 4 * s1, 3 * s1 + 4 * c1, 5]
    neox = [c0 - 3 * s0, 2 * c1 - 4 * s1, s0 + 3 * c0, 2 * s1 + 4 * c1, 5]
    pos = tensor(np.array([3], np.int32))
    assert np.allclose(run(rope(x, pos, n_dims=4)).ravel(), norm, atol=1e-6)
    assert np.allclose(run(rope(x, pos, n_dims=4, mode="neox")).ravel(), neox, atol=1e-6)


@pytest.mark.parametrize("mode", ["norm", "neox"])
def test_rope_scores_depend_on_the_distance_alone(mode: str) -> None:
    rng = np.random.default_rng(6)
    q, k = (np.broadcast_to(rng.standard_normal(64).astype(np.float32), (3, 1, 64)).copy() for _ in range(2))
    at = [tensor(np.array(p, np.int32)) for p in ([9, 500, 99_009], [2, 493, 99_002])]
    a, b = (run(rope(tensor(v), p, n_dims=64, mode=mode))[0, :, 0].astype(np.float64) for v, p in zip((q, k), at, strict=True))
    scores = (a * b).sum(axis=1)
    assert np.ptp(scores) < 1e-5


def test_rope_of_permuted_heads() -> None:
    x = np.random.default_rng(8).standard_normal((3, 5, 16)).astype(np.float32)  # heads, tokens, head_dim
    pos = tensor(np.arange(5, dtype=np.int32))
    got = run(rope(permute(tensor(x), 0, 2, 1, 3), pos, n_dims=16))
    want = run(rope(tensor(x.transpose(1, 0, 2).copy()), pos, n_dims=16))
    assert got.tobytes() == want.tobytes()


# ARGSORT, TOP_K

rows = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 70)),
                  elements=st.one_of(st.sampled_from([0.0, -0.0, 1.0, INF, -INF, NAN]), st.floats(width=32)))


def by_rule(row: np.ndarray, order: str) -> list[int]:
    """Positions in the order that the docstrings promise, by Python's own sort."""
    numbers = [i for i, v in enumerate(row) if v == v]
    return sorted(numbers, key=lambda i: float(row[i] if order == "asc" else -row[i])) + [i for i, v in enumerate(row) if v != v]


@given(rows, st.sampled_from(["asc", "desc"]), st.data())
def test_order_is_stable_with_nan_last(x: np.ndarray, order: str, data: st.DataObject) -> None:
    want = [by_rule(row, order) for row in x]
    t = tensor(x)
    assert run(argsort(t, order))[0, 0].tolist() == want
    if order == "desc":
        k = data.draw(st.integers(1, x.shape[1]))
        assert run(top_k(t, k))[0, 0].tolist() == [r[:k] for r in want]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_fault_106_top_k_of_nan_rows_stays_in_range(backend: str) -> None:
    router = np.full((3, 64), NAN, np.float32)
    router[1, [7, 50]] = [1, 2]
    router[2] = np.arange(64)
    got = run(top_k(tensor(router), 6), backend=backend)[0, 0]
    assert got.tolist() == [[0, 1, 2, 3, 4, 5], [50, 7, 0, 1, 2, 3], [63, 62, 61, 60, 59, 58]]


@pytest.mark.parametrize("x", [np.arange(30_000.0), -np.arange(30_000.0), np.zeros(30_000), np.full(30_000, NAN)], ids=["up", "down", "equal", "nan"])
def test_sort_of_long_ordered_rows(x: np.ndarray) -> None:
    """Inputs on which a quadratic sort would take minutes."""
    t = tensor(x.astype(np.float32))
    assert np.array_equal(run(argsort(t)).ravel(), np.argsort(x, kind="stable"))
    assert np.array_equal(run(top_k(t, 9000)).ravel(), np.argsort(-x, kind="stable")[:9000])


# All


def test_fault_126_bits_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(9)
    x = tensor(rng.standard_normal((2, 12, 30, 96)).astype(np.float32))
    mask = tensor(np.triu(np.full((30, 96), -INF), 67), "f16")
    pos = tensor(rng.integers(0, 4096, 12).astype(np.int32))
    outs = [soft_max(x, mask, scale=0.125), rope(x, pos, n_dims=64), rope(x, pos, n_dims=64, mode="neox"), argsort(x, "desc"), top_k(x, 5)]
    results = [[v.tobytes() for v in pg.compute(outs, threads=n)] for n in (1, 2, 7)]
    assert results[0] == results[1] == results[2]
