"""MUL_MAT of few columns: every type, number of columns and edge against float64, and bits that depend on the two rows alone."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.backends.cpu import CpuBackend
from pyggml.cases import random_blocks
from pyggml.cpu.level import LEVELS, host_level
from pyggml.dtypes import dtype
from pyggml.graph import Graph
from pyggml.ops.matmul.defs import mul_mat
from pyggml.ops.matmul.gemv import MAX_N
from pyggml.quants import WEIGHT_TYPES, dequantize
from pyggml.quants.units_cpu import UNITS
from pyggml.tensor import Tensor, encode
from pyggml.testing import nmse

NAMES = [t.name for t in WEIGHT_TYPES]
LOWER = [v for v in ("portable", "avx2") if LEVELS.index(v) < LEVELS.index(host_level())]


def weights(name: str, k: int, m: int, n_batch: int = 1) -> tuple[Tensor, np.ndarray]:
    """A constant [k, m, n_batch] of random values of a type, and the values in float64 [n_batch, m, k]."""
    rng, dt = np.random.default_rng(k + m), dtype(name)
    if dt.is_quantized:
        raw = random_blocks(dt, n_batch * m * k // dt.block, rng).reshape(-1)
    else:
        raw = encode(rng.uniform(-1, 1, (n_batch, m, k)).astype(np.float32), dt).reshape(-1).view(np.uint8)
    return pg.raw_tensor(raw, dt, (k, m, n_batch), "a"), dequantize(raw.reshape(n_batch, m, -1), dt).astype(np.float64)


def products(backend: CpuBackend, a: Tensor, x: np.ndarray, counts: list[int]) -> list[np.ndarray]:
    """a times the first n columns of x, for each n, by one graph: its kernels compile together."""
    ins = [pg.tensor([x.shape[-1], n, a.ne[2]], "f32", name=f"x{n}") for n in counts]
    outs = [mul_mat(a, t) for t in ins]
    runner = backend.compile(Graph(outs))
    assert {s.kernel_name for s in runner.plan.steps} == {"mul_mat_few"}
    for t, n in zip(ins, counts, strict=True):
        runner.set(t, np.ascontiguousarray(x[:, :n]).reshape(t.ne[2::-1]))
    runner.run()
    return [runner.get(y).reshape(a.ne[2], n, a.ne[1]) for y, n in zip(outs, counts, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_columns(name: str) -> None:
    """Rows that fill no item, two batches; a column is the same whatever the others and the threads are."""
    a, wide = weights(name, 768 if dtype(name).block < 256 else 1280, 37, 2)
    x = np.random.default_rng(1).uniform(-1, 1, (2, MAX_N, a.ne[0])).astype(np.float32)
    counts = list(range(1, MAX_N + 1)) if name in ("q8_0", "q4_K") else [1, 4, MAX_N]
    got = products(open_backend("cpu", threads=2, poison=True), a, x, counts)
    assert nmse(got[-1], x.astype(np.float64) @ wide.transpose(0, 2, 1)) <= 1e-12
    assert all(np.array_equal(g, got[-1][:, :n]) for g, n in zip(got, counts, strict=True))
    for threads in (1, 7):
        assert np.array_equal(products(open_backend("cpu", threads=threads), a, x, [4])[0], got[-1][:, :4])


@pytest.mark.parametrize("name", NAMES)
def test_short_rows(name: str) -> None:
    """K of one to a few units: the loop's whole turns and what is left of them."""
    block = UNITS[name].n
    for k in (block, 3 * block, 5 * block):
        a, wide = weights(name, k, 5)
        x = np.random.default_rng(2).uniform(-1, 1, (1, 4, k)).astype(np.float32)
        assert nmse(products(open_backend("cpu", threads=1), a, x, [4])[0], x.astype(np.float64) @ wide.transpose(0, 2, 1)) <= 1e-12


@pytest.mark.parametrize("level", LOWER)
def test_lower_levels_give_the_same_values(level: str) -> None:
    for name in NAMES:
        a, wide = weights(name, 768, 21)
        x = np.random.default_rng(3).uniform(-1, 1, (1, 2, 768)).astype(np.float32)
        assert nmse(products(open_backend("cpu", threads=2, level=level), a, x, [2])[0], x.astype(np.float64) @ wide.transpose(0, 2, 1)) <= 1e-12
