"""MUL_MAT of few columns, in float32 and in whole numbers (with rows side by side where registers are wide): types, numbers of columns and
edges against float64, and bits that depend on the two rows alone."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.backends.cpu import CpuBackend
from pyggml.cases import random_blocks
from pyggml.cpu.level import LEVELS, host_level, level_features
from pyggml.dtypes import dtype
from pyggml.graph import Graph
from pyggml.ops.matmul.defs import mul_mat
from pyggml.ops.matmul.gemv import MAX_N
from pyggml.ops.matmul.lanes import FEW
from pyggml.ops.matmul.planes import MOST_COLUMNS
from pyggml.quants import WEIGHT_TYPES, dequantize
from pyggml.quants.planes_cpu import PLANES
from pyggml.quants.units_cpu import UNITS
from pyggml.quants.words_cpu import WORDS
from pyggml.tensor import Tensor, encode
from pyggml.testing import nmse

NAMES = [t.name for t in WEIGHT_TYPES]
KINDS = [("f32", name, 1e-12) for name in NAMES] + [("auto", name, 5e-8) for name in WORDS]  # prec, type, limit
LEVELS_HERE = [v for v in LEVELS if LEVELS.index(v) <= LEVELS.index(host_level())]
LOWER = [v for v in ("portable", "avx2") if LEVELS.index(v) < LEVELS.index(host_level())]
ON_THE_WAY = {"quantize_columns"}


def kernel_for(prec: str, name: str, level: str, n: int) -> str:
    """The kernel that n columns are to run on."""
    if prec == "f32":
        return "mul_mat_few"
    features = level_features(level)
    if name in PLANES and features >= {"avx512bw", "avx512vnni"} and n <= MOST_COLUMNS:
        return "mul_mat_planes"
    return "mul_mat_lanes" if "avx512bw" in features and n > 1 else "mul_mat_words"


def weights(name: str, k: int, m: int, n_batch: int = 1) -> tuple[Tensor, np.ndarray]:
    """A constant [k, m, n_batch] of random values of a type, and the values in float64 [n_batch, m, k]."""
    rng, dt = np.random.default_rng(k + m), dtype(name)
    if dt.is_quantized:
        raw = random_blocks(dt, n_batch * m * k // dt.block, rng).reshape(-1)
    else:
        raw = encode(rng.uniform(-1, 1, (n_batch, m, k)).astype(np.float32), dt).reshape(-1).view(np.uint8)
    return pg.raw_tensor(raw, dt, (k, m, n_batch), "a"), dequantize(raw.reshape(n_batch, m, -1), dt).astype(np.float64)


def products(backend: CpuBackend, a: Tensor, x: np.ndarray, counts: list[int], kernel: str = "mul_mat_few") -> list[np.ndarray]:
    """a times the first n columns of x, for each n, by one graph: its kernels compile together."""
    ins = [pg.tensor([x.shape[-1], n, a.ne[2]], "f32", name=f"x{n}") for n in counts]
    outs = [mul_mat(a, t) for t in ins]
    runner = backend.compile(Graph(outs))
    assert {s.kernel_name for s in runner.plan.steps} - ON_THE_WAY == {kernel}
    for t, n in zip(ins, counts, strict=True):
        runner.set(t, np.ascontiguousarray(x[:, :n]).reshape(t.ne[2::-1]))
    runner.run()
    return [runner.get(y).reshape(a.ne[2], n, a.ne[1]) for y, n in zip(outs, counts, strict=True)]


@pytest.mark.parametrize(("prec", "name", "limit", "level"), [(*kind, host_level()) for kind in KINDS]
                         + [("auto", name, 5e-8, "avx2") for name in WORDS if "avx2" in LOWER])
def test_every_number_of_columns(prec: str, name: str, limit: float, level: str) -> None:
    """Rows that fill no item, two batches; a column is the same whatever the others and the threads are."""
    a, wide = weights(name, 800 if dtype(name).block < 256 else 1280, 37, 2)
    x = np.random.default_rng(1).uniform(-1, 1, (2, MAX_N, a.ne[0])).astype(np.float32)
    most = FEW if "amx-bf16" in level_features(level) and (prec == "auto" or name in ("f16", "bf16")) else MAX_N  # beyond: products in bfloat16
    counts = [*range(1, 18), 24, MAX_N] if name in ("q8_0", "q4_K") and level == host_level() else [1, 2, 4, 5, most]
    by_kernel: dict[str, list[int]] = {}
    for n in counts:
        if n <= most:
            by_kernel.setdefault(kernel_for(prec, name, level, n), []).append(n)
    for kernel, counts in by_kernel.items():
        got = products(open_backend("cpu", threads=2, poison=True, prec=prec, level=level), a, x, counts, kernel)
        n = counts[-1]
        assert nmse(got[-1], x[:, :n].astype(np.float64) @ wide.transpose(0, 2, 1)) <= limit
        assert all(np.array_equal(g, got[-1][:, :c]) for g, c in zip(got, counts, strict=True))
        for threads in (1, 7):
            assert np.array_equal(products(open_backend("cpu", threads=threads, prec=prec, level=level), a, x, counts[:1], kernel)[0], got[0])


@pytest.mark.parametrize(("prec", "name", "limit", "level"), [(*kind, level) for kind in KINDS for level in sorted({"avx2", host_level()} & {*LEVELS_HERE})])
def test_one_column_in_streams(prec: str, name: str, limit: float, level: str) -> None:
    """More whole items than streams take, and rows that fill none: each has its place, with the same bits wherever threads begin."""
    a, wide = weights(name, 512, 16 * 11 + 5, 2)
    x = np.random.default_rng(6).uniform(-1, 1, (2, 1, 512)).astype(np.float32)
    got = [products(open_backend("cpu", threads=n, poison=True, prec=prec, level=level), a, x, [1], kernel_for(prec, name, level, 1))[0] for n in (1, 2, 7)]
    assert nmse(got[0], x.astype(np.float64) @ wide.transpose(0, 2, 1)) <= limit
    assert all(np.array_equal(got[0], g) for g in got)


@pytest.mark.parametrize("n_rows", [5, 19])
@pytest.mark.parametrize(("prec", "name", "limit"), KINDS)
def test_short_rows(prec: str, name: str, limit: float, n_rows: int) -> None:
    """K of one to a few blocks: the loops' whole turns and what is left of them."""
    block = UNITS[name].n
    for k in (block, 3 * block, 9 * block):
        a, wide = weights(name, k, n_rows)
        x = np.random.default_rng(2).uniform(-1, 1, (1, 4, k)).astype(np.float32)
        got = products(open_backend("cpu", threads=1, prec=prec), a, x, [4], kernel_for(prec, name, host_level(), 4))[0]
        assert nmse(got, x.astype(np.float64) @ wide.transpose(0, 2, 1)) <= limit


@pytest.mark.parametrize("prec", ["f32", "auto"])
@pytest.mark.parametrize("level", LOWER)
def test_lower_levels_give_the_same_values(level: str, prec: str) -> None:
    kinds = [(*weights(name, 768, 21), limit) for p, name, limit in KINDS if p == prec]
    x = np.random.default_rng(3).uniform(-1, 1, (2, 768)).astype(np.float32)
    outs = [mul_mat(a, pg.tensor(x)) for a, _, _ in kinds]
    runner = open_backend("cpu", threads=2, level=level, prec=prec).compile(Graph(outs))
    assert {s.kernel_name for s in runner.plan.steps} - ON_THE_WAY == {kernel_for(prec, name, level, 2) for p, name, _ in KINDS if p == prec}
    runner.run()
    for y, (_, wide, limit) in zip(outs, kinds, strict=True):
        assert nmse(runner.get(y)[0, 0], x.astype(np.float64) @ wide[0].T) <= limit


@pytest.mark.parametrize("name", ["q8_0", "q4_K", "bf16"])
def test_batches_of_b_are_columns_of_one_product(name: str) -> None:
    """Several sequences' tokens: the weights are read once for all, and each gets what it gets beside a single other one."""
    a, _ = weights(name, 512, 40)
    x = np.random.default_rng(4).uniform(-1, 1, (4, 1, 512)).astype(np.float32)
    whole = mul_mat(a, pg.tensor(x))
    plan = open_backend("cpu").plan(Graph([whole]))
    assert plan.steps[-1].kernel.items == 3
    many = open_backend("cpu").plan(Graph([mul_mat(a, pg.tensor([512, 1, 8]))]))
    assert many.steps[-1].kernel.items == 3, str(many)
    got = pg.compute(whole, {}, threads=2)
    for i in range(4):
        assert np.array_equal(got[i].ravel(), pg.compute(mul_mat(a, pg.tensor(x[[i, i - 1], 0])), {}, threads=1)[0])
        alone = pg.compute(mul_mat(a, pg.tensor(x[i])), {}, threads=1).ravel()
        assert nmse(got[i].ravel(), alone.astype(np.float64)) <= (1e-8 if a.dtype.is_quantized else 0)
    gaps = pg.tensor([512, 2, 4], "f32", name="gaps")
    strided = mul_mat(a, pg.view(gaps, [512, 1, 4], [gaps.nb[2]] * 2))  # every other row
    values = np.zeros((4, 2, 512), np.float32)
    values[:, :1] = x
    assert np.array_equal(pg.compute(strided, {gaps: values}, threads=2).reshape(got.shape), got)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("level", LEVELS_HERE)
def test_largest_numbers_do_not_overflow(level: str, n: int) -> None:
    """q6_K: numbers of -32, scales of -128 and equal activations reach 4096 x 32767 x 16, just below 2^31, and numbers of 31 are the largest
    without a sign; likewise 15 and 31 of q4_K and q5_K. q8_0: numbers of -128."""
    least, most = np.zeros(210, np.uint8), np.full(210, 255, np.uint8)
    for block in least, most:
        block[192:208] = 128
        block[208:210] = np.array([2.0 ** -12], "<f2").view(np.uint8)
    bytes_ = np.full(34, 128, np.uint8)
    bytes_[:2] = np.array([-2.0 ** -7], "<f2").view(np.uint8)
    q4, q5 = np.full(144, 255, np.uint8), np.full(176, 255, np.uint8)  # scales and mins of 63
    for block in q4, q5:
        block[:4] = np.array([2.0 ** -6, 0], "<f2").view(np.uint8)
    for name, one, per, value in (("q6_K", least, 256, 1), ("q6_K", most, 256, -31 / 32), ("q8_0", bytes_, 32, 1), ("q4_K", q4, 256, 15 * 63 / 64),
                                  ("q5_K", q5, 256, 31 * 63 / 64)):
        a = pg.raw_tensor(np.tile(one, 16 * 512 // per), dtype(name), (512, 16), "a")
        for sign in (1, -1):
            x = pg.tensor([512, n], "f32", name="x")
            runner = open_backend("cpu", threads=1, level=level).compile(Graph([y := mul_mat(a, x)]))
            runner.set(x, np.full((n, 512), sign, np.float32))
            runner.run()
            assert np.allclose(runner.get(y), sign * 512.0 * value, rtol=1e-6)


@pytest.mark.parametrize("name", WORDS)
def test_a_column_that_is_no_number_or_tiny(name: str) -> None:
    a, wide = weights(name, 512, 21)
    for value in (np.inf, -np.inf, np.nan):
        x = np.random.default_rng(7).uniform(-1, 1, (1, 512)).astype(np.float32)
        x[0, 300] = value
        assert not np.isfinite(pg.compute(mul_mat(a, pg.tensor(x)), {}, threads=1)).any()
    tiny = np.random.default_rng(8).uniform(-1e-37, 1e-37, (1, 512)).astype(np.float32)
    assert np.abs(pg.compute(mul_mat(a, pg.tensor(tiny)), {}, threads=1)).max() <= 2e-37 * np.abs(wide[0]).sum()
    assert not pg.compute(mul_mat(a, pg.tensor(np.zeros((1, 512), np.float32))), {}, threads=1).any()


@pytest.mark.parametrize("n_rows", [15, 16])
def test_activations_that_are_no_numbers_or_tiny(n_rows: int) -> None:
    a, wide = weights("q8_0", 512, n_rows)
    x = np.zeros((5, 512), np.float32)
    x[1, 7], x[2, 300], x[3] = np.inf, np.nan, np.random.default_rng(5).uniform(-1e-37, 1e-37, 512)
    got = pg.compute(mul_mat(a, pg.tensor(x)), {}, threads=1)
    assert np.isnan(got[2]).all() and not got[0].any() and not got[4].any()
    if "avx512bw" in level_features(host_level()):  # else it is NaN
        assert np.array_equal(got[1], np.where(wide[0, :, 7] == 0, np.nan, np.copysign(np.inf, wide[0, :, 7])), equal_nan=True)
    two = np.zeros((1, 512), np.float32)
    two[0, 7], two[0, 8] = np.inf, -np.inf
    assert np.isnan(pg.compute(mul_mat(a, pg.tensor(two)), {}, threads=1)).all()
    assert np.abs(got[3]).max() <= 2e-37 * np.abs(wide[0]).sum()
