"""MUL_MAT beyond its cases: errors, cost, and results that depend on nothing but their two rows."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.cases import cases_of, random_blocks
from pyggml.cpu.level import LEVELS, host_level, level_features, machine
from pyggml.cpu.tiles import FASTER_ON
from pyggml.dtypes import dtype
from pyggml.errors import DTypeError, ParamError
from pyggml.graph import Graph
from pyggml.ops.matmul.defs import mul_mat
from pyggml.quants import WEIGHT_TYPES, dequantize
from pyggml.registry import find_op, load_kernels
from pyggml.tensor import Tensor, encode
from pyggml.testing import nmse, run_case


def weights(name: str, k: int, m: int, *batch: int, seed: int = 0) -> Tensor:
    """A constant [k, m, *batch] of random values of a type."""
    rng, dt, ne = np.random.default_rng(seed), dtype(name), (k, m, *batch)
    if dt.is_quantized:
        return pg.raw_tensor(random_blocks(dt, int(np.prod(ne)) // dt.block, rng), dt, ne, "a")
    raw = encode(rng.uniform(-1, 1, ne[::-1]).astype(np.float32), dt)
    return pg.raw_tensor(raw.reshape(-1).view(np.uint8), dt, ne, "a")


def stored(a: Tensor) -> np.ndarray:
    """The bytes of a constant."""
    assert a.data is not None
    return a.data[: a.nbytes]


def floats(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


@pytest.mark.parametrize("name", ["q4_K", "q5_K", "q6_K"], ids=lambda n: f"f96-{n}")
def test_fault_96_a_row_of_2688_has_no_k_blocks(name: str) -> None:
    with pytest.raises(DTypeError, match=f"{name}: a row of 2688 elements is not a multiple of its block of 256"):
        pg.tensor([2688, 16], name)


def test_fault_96_q8_0_takes_2688_and_any_m() -> None:
    a, x = weights("q8_0", 2688, 1856), floats(1, 2688)
    got = pg.compute(mul_mat(a, pg.tensor(x)), {}, threads=2, prec="f32")
    assert a.nbytes == 1856 * 84 * 34 and nmse(got, dequantize(stored(a).reshape(1856, -1), a.dtype).astype(np.float64) @ x[0]) <= 1e-12


def test_fault_123_cost() -> None:
    def flops(a: list[int], b: list[int]) -> float:
        return mul_mat.cost_of(mul_mat(pg.tensor(a), pg.tensor(b)).node).flops

    assert flops([256, 16], [256, 16]) == 131072
    assert flops([256, 16, 3, 2], [256, 16, 6, 4]) == 131072 * 24
    node = mul_mat(pg.tensor([256, 16], "q8_0"), pg.tensor([256, 16])).node
    assert mul_mat.cost_of(node).nbytes == 16 * 8 * 34 + 16 * 256 * 4 + 16 * 16 * 4


@pytest.mark.parametrize("k", [100, 255, 257, 300], ids=lambda k: f"f100-{k}")
def test_fault_100_ones_give_k_in_every_place(k: int) -> None:
    ones = pg.tensor(np.ones((k, k), np.float32))
    assert np.array_equal(pg.compute(mul_mat(ones, ones), {}, threads=2), np.full((k, k), k))


@pytest.mark.parametrize(("name", "k"), [("f32", 256), ("f32", 77), ("f32", 2000), ("bf16", 256), ("q8_0", 2688), ("q4_K", 1280)])
def test_bits_depend_on_the_two_rows_alone(name: str, k: int) -> None:
    """Any column of a 512-token product equals that of another product of many, any column of a few that of another few (of two to four, or of
    five and more, where quantized weights meet whole numbers); a row equals the product of a matrix of that one row."""
    m = 100
    a, x = weights(name, k, m), floats(512, k)
    for prec in ("auto", "f32"):
        whole_numbers = a.dtype.is_quantized and prec == "auto"
        for whole_n, counts in ((512, (65, 77)), *(((4, (2, 3)), (8, (5, 6, 7))) if whole_numbers else ((8, (1, 2, 3, 4, 5)),))):
            whole = pg.compute(mul_mat(a, pg.tensor(x[:whole_n])), {}, threads=2, prec=prec)
            for n in counts:
                for first in (0, min(whole_n // 2 - 1, whole_n - n), whole_n - n):
                    part = pg.compute(mul_mat(a, pg.tensor(x[first:first + n])), {}, threads=2, prec=prec)
                    assert np.array_equal(part.reshape(n, m), whole[first:first + n])
            row_bytes = a.dtype.row_bytes(k)
            for i in (0, 63, 99):
                one = pg.raw_tensor(stored(a)[i * row_bytes:(i + 1) * row_bytes], a.dtype, [k, 1], "a")
                assert np.array_equal(pg.compute(mul_mat(one, pg.tensor(x[:whole_n])), {}, threads=1, prec=prec).reshape(whole_n), whole[:, i])


@pytest.mark.parametrize("name", ["q8_0", "bf16"])
def test_panels_of_any_size_give_equal_bits(name: str) -> None:
    """Of many rows and a long K a thread takes more rows and less of K at a time than of few rows; both end in the middle of one here."""
    k, m, n = 2112, 2100, 70
    a, x = weights(name, k, m), pg.tensor(floats(n, k))
    row_bytes = a.dtype.row_bytes(k)
    whole = pg.compute(mul_mat(a, x), {}, threads=2)
    wide = dequantize(stored(a).reshape(m, -1), a.dtype).astype(np.float64)
    assert nmse(whole, floats(n, k).astype(np.float64) @ wide.T) <= 1.2e-5
    for first, last in ((0, 40), (1000, 1100), (2090, 2100)):
        part = pg.raw_tensor(stored(a)[first * row_bytes:last * row_bytes], a.dtype, [k, last - first], "a")
        assert np.array_equal(pg.compute(mul_mat(part, x), {}, threads=2).reshape(n, -1), whole[:, first:last])


@pytest.mark.parametrize("name", [t.name for t in WEIGHT_TYPES if t.name != "f32"])
def test_equals_f32_product_of_widened_weights(name: str) -> None:
    """With prec f32 no rounding beyond float32's: b is not quantized, weights are only widened."""
    a, x = weights(name, 768, 24, 2), floats(2, 5, 768)
    wide = dequantize(stored(a).reshape(2, 24, -1), a.dtype)
    got, want = pg.compute((mul_mat(a, pg.tensor(x)), mul_mat(pg.tensor(wide), pg.tensor(x))), {}, threads=2, prec="f32")
    assert np.array_equal(got, want)


@pytest.mark.parametrize("name", ["f32", "q8_0", "q4_K"])
@pytest.mark.parametrize("n", [1, 3, 40])
def test_thread_counts_give_equal_bits(name: str, n: int) -> None:
    a, x = weights(name, 768, 300), floats(n, 768)
    results = [pg.compute(mul_mat(a, pg.tensor(x)), {}, threads=t) for t in (1, 2, 7)]
    assert all(np.array_equal(r, results[0]) for r in results)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_K", "q5_K", "q6_K"], ids=lambda n: f"f102-{n}")
def test_fault_102_distribution_of_seeds(name: str) -> None:
    """1000 matrices at once: no seed crosses the limit."""
    a, x = weights(name, 256, 16, 1000, seed=7), floats(1000, 1, 256, seed=8)
    y = mul_mat(a, pg.tensor(x))
    got = pg.compute(y, {}, threads=2)
    wide = dequantize(stored(a).reshape(1000, 16, -1), a.dtype).astype(np.float64)
    errors = [nmse(g, w @ v[0]) for g, w, v in zip(got, wide, x, strict=True)]
    assert y.node is not None and max(errors) <= mul_mat.limit_of(y.node), f"max NMSE {max(errors):g} at matrix {int(np.argmax(errors))}"


def test_strides_give_the_bits_of_a_copy() -> None:
    a, x = floats(200, 70, seed=3), floats(70, 90, seed=4)  # a and x transposed: K is their outer dim
    ta, tx = pg.tensor([200, 70], "f32", name="a"), pg.tensor([90, 70], "f32", name="x")
    strided = mul_mat(pg.transpose(ta), pg.transpose(tx))
    copied = mul_mat(pg.tensor(np.ascontiguousarray(a)), pg.tensor(np.ascontiguousarray(x.T)))
    got, want = pg.compute((strided, copied), {ta: np.ascontiguousarray(a.T), tx: x}, threads=2)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("level", [v for v in ("portable", "avx2") if LEVELS.index(v) < LEVELS.index(host_level())])
def test_lower_levels(level: str) -> None:
    wanted = [c for c in cases_of(find_op("MUL_MAT")) if c.note in ("a transposed", "ssd M x") and not c.perf
              or str(c) in [f"MUL_MAT(type_a={t},type_b=f32,m=16,n={n},k=256,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0)" for t, n in (("q4_K", 9), ("q8_0", 1))]]
    assert len(wanted) == 5  # "ssd M x" in bf16 too, which these levels serve in float32
    open_backend("cpu", level=level).compile(Graph([c.node().out for c in wanted]))  # the kernels of all cases at once
    for case in wanted:
        got, want = run_case(case, "cpu", threads=2, level=level, poison=True)
        assert nmse(got[0], want[0]) <= mul_mat.limit_of(case.node())


@pytest.mark.skipif(not any(f <= level_features(host_level()) for f in FASTER_ON), reason="this CPU has no fast products in bfloat16")
def test_tokens_are_packed_once_for_all_that_read_them() -> None:
    """Two products of one b share its tiles; after a write into b's memory they are made anew."""
    a = [weights("q8_0", 64, 48, seed=i) for i in range(3)]
    x, row = floats(72, 64), floats(1, 64, seed=2)
    b, ids = pg.tensor(x.copy()), pg.tensor(np.array([3], np.int64))
    first, second = (mul_mat(w, b) for w in a[:2])
    third = mul_mat(a[2], pg.set_rows(b, pg.tensor(row), ids))
    names = [s.kernel_name for s in open_backend("cpu").plan(Graph([first, second, third])).steps]
    assert names.count("pack_tokens") == 2 and names.count("mul_mat_panels") == 3
    assert names.index("pack_tokens") < names.index("mul_mat_panels") and names[-2:] == ["pack_tokens", "mul_mat_panels"]
    written = x.copy()
    written[3] = row
    for w, y, rows in zip(a, pg.compute((first, second, third), {}, threads=2), (x, x, written), strict=True):
        assert nmse(y, rows.astype(np.float64) @ dequantize(stored(w).reshape(48, -1), w.dtype).astype(np.float64).T) < 8e-6


def test_prec_f32_rounds_nothing() -> None:
    a, x = weights("q4_K", 256, 40), floats(64, 256)
    got = pg.compute(mul_mat(a, pg.tensor(x)), {}, prec="f32")
    assert nmse(got, x.astype(np.float64) @ dequantize(stored(a).reshape(40, -1), a.dtype).astype(np.float64).T) < 1e-12
    with pytest.raises(ParamError, match="prec 'f16'; legal: auto, f32"):
        open_backend("cpu", prec="f16")


def test_infinities_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite activation gives an infinite sum, not a NaN, in planes of bfloat16 too, which CPUs without tiles can run as well."""
    load_kernels("cpu")
    for kernel in mul_mat.kernels["cpu"]:
        if "needs" in kernel.options:
            monkeypatch.setitem(kernel.options, "needs", kernel.options["needs"] - {"amx-bf16"})
    for name in ("q8_0", "bf16", "f16"):
        a, x = weights(name, 64, 32), floats(32, 64)
        x[5, 7], x[6, 8], x[7, 9], x[8, 10] = np.inf, -np.inf, np.nan, 3.4e38  # the last one is beyond bfloat16's range
        wide = dequantize(stored(a).reshape(32, -1), a.dtype)
        got = pg.compute(mul_mat(a, pg.tensor(x)), {}, threads=1)
        for row, k, sign in ((5, 7, 1), (6, 8, -1)):
            assert np.array_equal(got[row], np.where(wide[:, k] != 0, sign * np.sign(wide[:, k]) * np.inf, np.nan), equal_nan=True), name
        assert np.isnan(got[7]).all() and not np.isnan(got[8][wide[:, 10] != 0]).any()
        rest = np.delete(got, [5, 6, 7, 8], 0)
        assert nmse(rest, np.delete(x, [5, 6, 7, 8], 0).astype(np.float64) @ wide.astype(np.float64).T) < (8e-6 if name == "q8_0" else 3e-11)


@pytest.mark.skipif(not any(f <= level_features(host_level()) for f in FASTER_ON), reason="this CPU has no fast products in bfloat16")
def test_the_limit_knows_that_few_results_vary() -> None:
    """Products with 65 results each: some are beyond the limit of a large product, none beyond its own."""
    products = [mul_mat(weights("q8_0", 64, 1, seed=i), pg.tensor(floats(65, 64, seed=1000 + i))) for i in range(300)]
    errors = []
    for y, got in zip(products, pg.compute(products, {}, threads=2), strict=True):
        a, x = y.node.src
        wide = dequantize(stored(a).reshape(1, -1), a.dtype)[0].astype(np.float64)
        errors.append(nmse(got.ravel(), x.data.view(np.float32).reshape(65, 64) @ wide))
    assert 8e-6 < max(errors) < mul_mat.limit_of(products[0].node)


@pytest.mark.parametrize("overlapping", ["a", "b"])
@pytest.mark.skipif(not any(f <= level_features(host_level()) for f in FASTER_ON), reason="this CPU has no fast products in bfloat16")
def test_overlapping_batches_in_bfloat16(overlapping: str) -> None:
    """The first block of a batch lies where the last, shorter one of the batch before it does."""
    x, y = floats(513, 32), floats(4, 8, 32, seed=1)
    windows = np.stack([x[128 * i:128 * i + 129] for i in range(4)]).astype(np.float64)
    view, other = pg.view(pg.tensor(x), [32, 129, 4], [128, 128 * 128]), pg.tensor(y)
    got = pg.compute(mul_mat(view, other, precision="bf16") if overlapping == "a" else mul_mat(other, view, precision="bf16"), {}, threads=1)
    want = np.einsum("bnk,bmk->bnm", y, windows)
    assert nmse(got, want if overlapping == "a" else want.swapaxes(1, 2)) < 1.2e-5


@pytest.mark.skipif(machine() != "x86_64", reason="only there kernels say what is done with numbers below the normal range")
def test_numbers_below_the_normal_range_are_0() -> None:
    """As factors and as sums, in products that would be slow for them; the caller's own arithmetic keeps them."""
    a, b = np.ones((40, 64), np.float32), np.ones((40, 64), np.float32)
    a[3], b[5], a[7], b[7] = 1e-40, 1e30, 1e-20, 1e-20
    for threads in (1, 2):
        got = pg.compute(mul_mat(pg.tensor(a), pg.tensor(b)), {}, threads=threads)
        assert np.all(got[:, 3] == 0) and got[7, 7] == 0 and got[5, 7] > 6e10 and got[0, 0] == 64
    assert np.float32(1e-20) * np.float32(1e-20) > 0 and np.float32(1e-40) * np.float32(1e30) > 0


@pytest.mark.parametrize("k", [24, 64, 300, 520])
@pytest.mark.parametrize("shape", ["lower", "upper", "band", "none"])
@pytest.mark.parametrize("value", [1.0, np.inf, np.nan, -1e-45])
def test_zeros_at_the_ends_of_columns(k: int, shape: str, value: float) -> None:
    """They are left out of sums: the bits are those of columns beside which no zeros stand, and 0 times inf stays NaN."""
    n, m = 40, 70
    row, col = np.arange(k)[None, :], (np.arange(n) * k // n)[:, None]
    keep = {"lower": row <= col, "upper": row >= col, "band": abs(row - col) < 9, "none": row < 0}[shape]
    a, b = floats(m, k), np.where(keep, floats(n, k, seed=3), np.float32(0))
    a[[3, 40]], a[:, [2, k - 2]] = -a[[3, 40]], value
    b[5] *= np.float32(1e-38)  # sums that underflow, to zeros of either sign
    with np.errstate(all="ignore"):
        want = b.astype(np.float64) @ a.astype(np.float64).T
    got = pg.compute(mul_mat(pg.tensor(a), pg.tensor(b)), {}, threads=1)
    assert np.array_equal(np.isnan(got), np.isnan(want)) and nmse(got[np.isfinite(want)], want[np.isfinite(want)]) < 1e-12
    beside = np.stack([b, floats(n, k, seed=4)], 1).reshape(2 * n, k)
    assert np.array_equal(pg.compute(mul_mat(pg.tensor(a), pg.tensor(beside)), {}, threads=1)[::2].view(np.int32)[~np.isnan(got)],
                          got.view(np.int32)[~np.isnan(got)])
