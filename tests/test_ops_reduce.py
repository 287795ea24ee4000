"""CUMSUM, SUM_ROWS, MEAN, RMS_NORM, NORM and TRI: rules, faults of peer engines, the same bits in every run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.dtypes import bf16_to_f32
from pyggml.tensor import Tensor

NAN, INF = float("nan"), float("inf")


def f32(values: Any) -> Tensor:
    return pg.tensor(np.asarray(values, np.float32))


def runs(outs: list[Tensor], n: int, **options: Any) -> list[list[bytes]]:
    """Bytes of the outputs of n runs of one plan whose memory is NaN at first."""
    runner = open_backend("cpu", poison=True, **options).compile(pg.Graph(outs))
    found = []
    for _ in range(n):
        runner.run()
        found.append([runner.get(t).tobytes() for t in outs])
    return found


def test_aliases_of_pull_request_16982() -> None:
    x = f32([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    outs = [pg.cumsum_0(x), pg.cumsum_0(x, dim=1), pg.cumsum_0(x, 0, type="f64"), pg.tri_keep(x, "upper"), pg.tri_dims(x, 1, 0, "lower"), pg.tri_keep(x)]
    along, down, wide, upper, swapped, lower = pg.compute(outs)
    assert along.tolist() == wide.tolist() == [[0, 1, 3], [0, 4, 9], [0, 7, 15]] and wide.dtype == np.float64
    assert down.tolist() == [[0, 0, 0], [1, 2, 3], [5, 7, 9]]
    assert upper.tolist() == swapped.tolist() == [[0, 2, 3], [0, 0, 6], [0, 0, 0]]
    assert lower.tolist() == [[1, 0, 0], [4, 5, 0], [7, 8, 9]]


# Faults of peer engines


def decay(a: np.ndarray, *, type: str = "f64") -> Tensor:
    """L[i, j] = exp(cs_i - cs_j) for j <= i of a's running sums, 0 elsewhere: ne [j, i]."""
    cs = pg.cumsum(pg.tensor(a.astype(np.float32)), type=type)
    exponent = pg.sub(pg.reshape(cs, [1, len(a)]), pg.reshape(cs, [len(a), 1]), type="f32")
    return pg.exp(pg.tri(exponent, fill=-INF))


def decay_f64(a: np.ndarray) -> np.ndarray:
    cs = np.cumsum(a.astype(np.float32).astype(np.float64))
    return np.tril(np.exp(np.minimum(cs[:, None] - cs[None, :], 0)))


def test_fault_9_exponents_are_masked_before_exp() -> None:
    a = np.full(256, -1.0)
    got = pg.compute(decay(a))
    np.testing.assert_allclose(got, decay_f64(a), rtol=1e-5, atol=1e-44)
    cs = np.cumsum(a)
    with np.errstate(all="ignore"):
        after = np.exp((cs[:, None] - cs[None, :]).astype(np.float32)) * np.tri(256, dtype=np.float32)
    assert np.isnan(after).any() and np.isfinite(got).all()


def test_fault_10_no_ratio_of_products() -> None:
    a = np.full(256, -1.0)
    with np.errstate(all="ignore"):
        product = np.cumprod(np.exp(a).astype(np.float32))
        ratio = product[:, None] / product[None, :]
    assert np.isnan(ratio).any() and np.isfinite(pg.compute(decay(a))).all()


def test_fault_11_neighbours_in_a_long_sum_keep_their_digits() -> None:
    a = np.where(np.arange(256) % 2 == 0, -50.0, -1e-3)
    want = decay_f64(a)
    double, single = (np.abs(np.diagonal(pg.compute(decay(a, type=t)), -1) / np.diagonal(want, -1) - 1)[::2].max() for t in ("f64", "f32"))
    assert double < 2e-7 < 1e-5 < single


def test_fault_17_what_is_masked_never_reaches_the_result() -> None:
    x = np.arange(36, dtype=np.float32).reshape(6, 6)
    poisoned = np.where(np.tri(6, dtype=bool), x, NAN).astype(np.float32)
    poisoned[0, 5] = INF
    plain, zero, fill = pg.compute([pg.tri(f32(x)), pg.tri(f32(poisoned)), pg.tri(f32(poisoned), fill=-INF)])
    assert zero.tobytes() == plain.tobytes() and np.array_equal(fill, np.where(np.tri(6, dtype=bool), x, -INF))


def everything(x: Tensor, y: Tensor) -> list[Tensor]:
    """Each op of the three families on rows (x) and on strided rows (y)."""
    return [f(t) for t in (x, y) for f in (pg.cumsum, lambda t: pg.cumsum(t, dim=1, exclusive=True), pg.sum_rows, pg.mean, pg.rms_norm, pg.norm,
                                           lambda t: pg.tri(t, "upper", fill=2.0))]


def test_fault_18_every_element_is_written() -> None:
    rng = np.random.default_rng(18)
    x = f32(rng.normal(size=(3, 65, 70)))
    first, second = runs(everything(x, pg.transpose(x)), 2)
    assert first == second and all(np.isfinite(np.frombuffer(b, np.float32)).all() for b in first)


def test_fault_54_running_sums_are_deterministic() -> None:
    rng = np.random.default_rng(54)
    rows = [rng.normal(size=(3, 4, 5, n)).astype(np.float32) for n in (1, 31, 32, 33, 255, 256, 257, 2049)]
    found = runs([pg.cumsum(pg.tensor(a)) for a in rows], 100, threads=2)
    assert all(f == found[0] for f in found)
    for a, got in zip(rows, found[0], strict=True):
        want = np.cumsum(a.astype(np.float64), axis=-1)
        np.testing.assert_array_equal(np.frombuffer(got, np.float32).reshape(a.shape), want.astype(np.float32))


@pytest.mark.parametrize("dim", [0, 1])
def test_fault_56_memory_is_linear(dim: int) -> None:
    n = 100352
    ne = [n, 1] if dim == 0 else [1, n]
    x = pg.tensor(ne)
    runner = open_backend("cpu", threads=2).compile(pg.Graph([pg.cumsum(x, dim=dim)]))
    assert runner.plan.arena_bytes + 2 * runner.plan.scratch_bytes < 2 * 4 * n + 10_000_000
    runner.set(x, np.ones(ne[::-1], np.float32))
    runner.run()
    assert np.array_equal(runner.get(runner.plan.graph.outputs[0]).ravel(), np.arange(1, n + 1, dtype=np.float32))


@pytest.mark.parametrize("ne", [(3, 3), (5, 3), (3, 5, 2)], ids=["f57-square", "f57-wide", "f57-two-matrices"])
def test_four_triangles(ne: tuple[int, ...]) -> None:
    x = f32(np.ones(ne[::-1]))
    names = ("lower_diag", "lower", "upper_diag", "upper")
    ones = np.ones(ne[::-1])
    want = [np.tril(ones), np.tril(ones, -1), np.triu(ones), np.triu(ones, 1)]
    for got, w in zip(pg.compute([pg.tri(x, n) for n in names]), want, strict=True):
        assert np.array_equal(got, w)


def test_fault_57_cumsum_is_inclusive_along_rows() -> None:
    assert pg.compute(pg.cumsum(f32([[1, 2, 3], [10, 20, 30]]))).tolist() == [[1, 3, 6], [10, 30, 60]]


def test_any_number_of_threads_gives_the_same_bits() -> None:
    """Faults 125 and 126: items are rows or blocks of columns, whatever the number of threads."""
    rng = np.random.default_rng(125)
    x = f32(rng.normal(size=(5, 131, 301)))
    outs = everything(x, pg.permute(x, 1, 0, 2, 3))
    one, two, seven = (runs(outs, 1, threads=n) for n in (1, 2, 7))
    assert one == two == seven


# Accuracy and ends


def test_strided_rows_give_the_bits_of_contiguous_ones() -> None:
    rng = np.random.default_rng(3)
    a = rng.normal(size=(33, 70)).astype(np.float32)
    x, transposed = pg.tensor(a), pg.transpose(pg.tensor(np.ascontiguousarray(a.T)))
    functions = (pg.sum_rows, pg.mean, pg.rms_norm, pg.norm, pg.cumsum)
    straight, across = pg.compute([f(x) for f in functions]), pg.compute([f(transposed) for f in functions])
    assert all(s.tobytes() == t.tobytes() for s, t in zip(straight, across, strict=True))


def test_sums_are_rounded_once() -> None:
    """Rows that a float32 sum gets wrong: many small numbers after a large one, and cancellation."""
    small = np.full(100_001, 1e-3, np.float32)
    small[0] = 1e5
    cancelling = np.tile(np.array([1e8, 1.0, -1e8, 1.0], np.float32), 1000)
    for row in (small, cancelling):
        want = np.float32(np.sum(row.astype(np.float64)))
        total, average, running = pg.compute([pg.sum_rows(pg.tensor(row)), pg.mean(pg.tensor(row)), pg.cumsum(pg.tensor(row))])
        assert total[0] == running[-1] == want and average[0] == np.float32(np.mean(row.astype(np.float64)))


def test_norms_at_the_ends() -> None:
    rows = f32([[0, 0, 0, 0], [1e-30, -1e-30, 1e-30, -1e-30], [1e30, -1e30, 1e30, -1e30], [7, 7, 7, 7]])
    rms, norm = pg.compute([pg.rms_norm(rows, 0.0), pg.norm(rows, 1e-5)])
    assert np.isnan(rms[0]).all()  # 0 / 0, as the formula says; with eps it is 0
    np.testing.assert_allclose(rms[1:], [[1, -1, 1, -1], [1, -1, 1, -1], [1, 1, 1, 1]], rtol=1e-6)
    np.testing.assert_allclose(norm, [[0, 0, 0, 0], [0, 0, 0, 0], [1, -1, 1, -1], [0, 0, 0, 0]], rtol=1e-6, atol=1e-26)
    assert pg.compute(pg.rms_norm(f32([0, 0]))).tolist() == [0, 0]


def test_nan_stays_in_its_row_and_behind_itself() -> None:
    x = f32([[1, 2, 3], [1, NAN, 3], [1, 2, INF]])
    running, shifted, total, rms = pg.compute([pg.cumsum(x), pg.cumsum_0(x), pg.sum_rows(x), pg.rms_norm(x)])
    np.testing.assert_array_equal(running, np.array([[1, 3, 6], [1, NAN, NAN], [1, 3, INF]], np.float32))
    np.testing.assert_array_equal(shifted, np.array([[0, 1, 3], [0, 1, NAN], [0, 1, 3]], np.float32))
    np.testing.assert_array_equal(total.ravel(), np.array([6, NAN, INF], np.float32))
    assert np.isfinite(rms[0]).all() and np.isnan(rms[1]).all()


def test_tri_keeps_the_bits_of_every_type() -> None:
    rng = np.random.default_rng(7)
    inside = np.tri(5, 4, dtype=bool)
    x = rng.normal(size=(5, 4))
    whole: dict[str, np.ndarray] = {"f64": x, "f16": x.astype(np.float16), "bf16": rng.integers(0, 2**14, (5, 4)).astype(np.uint16)}
    got = pg.compute([pg.tri(pg.tensor(values, dtype), "lower_diag") for dtype, values in whole.items()])
    for (dtype, values), g in zip(whole.items(), got, strict=True):
        assert np.array_equal(g, np.where(inside, bf16_to_f32(values) if dtype == "bf16" else values, 0))
