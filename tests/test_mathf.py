"""The float32 functions of kernels against float64: errors in units in the last place, ends of the range, machine code."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyggml as pg
from pyggml.cpu import level as cpu_level
from pyggml.cpu import mathf
from pyggml.cpu.compile import _njit, _rebuild, _recipe
from pyggml.registry import OPS, OpDef, Pointwise, Spec, like, op
from pyggml.tensor import Tensor

pg.load_ops()
Reference = Callable[[np.ndarray], np.ndarray]

F32_MAX = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)


@pytest.fixture(scope="module")
def log1p() -> Any:
    """log1p is no op of the table, only a function for expressions; this op is its thin shell."""

    @op("TEST_LOG1P", inputs="a")
    def test_log1p(a: Tensor) -> Spec:
        """log(1 + a)."""
        return like(a)

    test_log1p.pointwise = Pointwise("log1p(a)")
    yield test_log1p
    del OPS["TEST_LOG1P"]


def sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def floats(step: int) -> np.ndarray:
    """Every `step`-th float32 from -max to max: the same number in every binade, subnormals too."""
    x = np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return x[np.isfinite(x)]


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """|got - want| in units in the last place of a float32 near want."""
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(want))), -126)
    return np.abs(got.astype(np.float64) - want) / np.exp2(exponent - 23)


@pytest.fixture(scope="module")
def dense() -> np.ndarray:
    """A million floats over all exponents and as many over the ranges where the functions bend."""
    return np.concatenate([floats(4219), *(np.linspace(-r, r, 250_000, dtype=np.float32) for r in (1, 4, 25, 105))])


@pytest.fixture(scope="module")
def results(dense: np.ndarray, log1p: OpDef) -> dict[str, np.ndarray]:
    """What the kernels give for `dense`, all compiled together."""
    names = ("exp", "expm1", "log", "tanh", "sigmoid", "silu", "softplus", "gelu")
    x = pg.tensor([len(dense)], "f32", name="x")
    outs = pg.compute([*(getattr(pg, n)(x) for n in names), log1p(x)], {x: dense})
    return dict(zip((*names, "log1p"), outs, strict=True))


@pytest.mark.parametrize(("name", "reference", "limit"), [
    ("exp", np.exp, 1.0), ("expm1", np.expm1, 1.5), ("log", np.log, 1.0), ("log1p", np.log1p, 1.5), ("tanh", np.tanh, 1.5),
    ("softplus", softplus, 2.0), ("sigmoid", sigmoid, 2.0), ("silu", lambda x: x * sigmoid(x), 2.0)])
def test_error_in_ulps(name: str, reference: Reference, limit: float, dense: np.ndarray, results: dict[str, np.ndarray]) -> None:
    got = results[name]
    with np.errstate(all="ignore"):
        want = reference(dense.astype(np.float64))
        rounded = want.astype(np.float32)
    assert np.array_equal(np.isnan(got), np.isnan(rounded))
    # sigmoid and silu divide by 1 + e^-x, which is inf below -88.72; what they then lose is below 3e-37.
    flushed = dense < -88.72 if name in ("sigmoid", "silu") else np.zeros(len(dense), bool)
    assert np.all(np.abs(got[flushed]) <= 3e-37)
    exact = np.isfinite(rounded) & ~flushed
    error = ulps(got[exact], want[exact])
    assert error.max() <= limit, f"{error.max():.3f} ulp at {dense[exact][error.argmax()]!r}"
    ends = ~np.isfinite(rounded) & ~np.isnan(rounded) & ~flushed
    assert np.array_equal(got[ends], rounded[ends])


def test_gelu_is_as_exact_as_its_argument(dense: np.ndarray, results: dict[str, np.ndarray]) -> None:
    with np.errstate(all="ignore"):
        want = gelu(dense.astype(np.float64))
    got = results["gelu"]
    right = dense >= -1
    assert ulps(got[right], want[right]).max() <= 3
    assert np.abs(got - want)[~right].max() <= 1e-7


def test_tanh_is_odd_and_exp_is_monotonic(dense: np.ndarray, results: dict[str, np.ndarray]) -> None:
    x = pg.tensor(np.unique(np.abs(dense)))
    there, back, up = pg.compute([pg.tanh(x), pg.tanh(pg.neg(x)), pg.exp(pg.tensor(np.unique(dense)))])
    assert np.array_equal(there, -back)
    # Neighbours may swap by one rounding; never by more.
    assert np.all(up[1:] >= up[:-1] * np.float32(1 - 2**-23))


SPECIAL: dict[str, list[tuple[float, float]]] = {
    "exp": [(0.0, 1.0), (-0.0, 1.0), (1e-40, 1.0), (88.7, 3.326e38), (88.73, np.inf), (1e30, np.inf), (np.inf, np.inf), (-103.9, 1.4e-45), (-104.0, 0.0),
            (-1e30, 0.0), (-np.inf, 0.0)],
    "expm1": [(0.0, 0.0), (-0.0, -0.0), (1e-40, 1e-40), (-1e-40, -1e-40), (88.7, 3.326e38), (88.73, np.inf), (-104.0, -1.0), (-np.inf, -1.0), (np.inf, np.inf)],
    "log": [(1.0, 0.0), (0.0, -np.inf), (-0.0, -np.inf), (-1e-45, np.nan), (-np.inf, np.nan), (np.inf, np.inf), (1e-45, -103.279), (F32_MAX, 88.7228)],
    "log1p": [(0.0, 0.0), (-0.0, -0.0), (1e-40, 1e-40), (-1.0, -np.inf), (-1.5, np.nan), (-np.inf, np.nan), (np.inf, np.inf), (F32_MAX, 88.7228)],
    "tanh": [(0.0, 0.0), (-0.0, -0.0), (1e-40, 1e-40), (1e30, 1.0), (-1e30, -1.0), (np.inf, 1.0), (-np.inf, -1.0)],
    "sigmoid": [(0.0, 0.5), (-np.inf, 0.0), (np.inf, 1.0), (-1e30, 0.0), (1e30, 1.0)],
    "silu": [(0.0, 0.0), (-0.0, -0.0), (np.inf, np.inf), (-np.inf, 0.0), (1e30, 1e30), (-1e30, 0.0), (1e-40, 5e-41)],
    "gelu": [(0.0, 0.0), (-0.0, -0.0), (np.inf, np.inf), (-np.inf, 0.0), (1e30, 1e30), (-1e30, 0.0)],
    "softplus": [(-np.inf, 0.0), (np.inf, np.inf), (20.0, 20.0), (20.000002, 20.000002), (89.0, 89.0), (1e30, 1e30), (-20.0, 2.0611537e-9), (-110.0, 0.0)],
}


def test_ends_of_the_range(log1p: OpDef) -> None:
    ins = [pg.tensor(np.array([x for x, _ in rows] + [np.nan], np.float32)) for rows in SPECIAL.values()]
    outs = pg.compute([log1p(x) if n == "log1p" else getattr(pg, n)(x) for n, x in zip(SPECIAL, ins, strict=True)])
    for (name, rows), got in zip(SPECIAL.items(), outs, strict=True):
        want = np.array([y for _, y in rows] + [np.nan], np.float32)
        np.testing.assert_allclose(got, want, rtol=1e-3, err_msg=name)
        zeros = want == 0
        if name not in ("silu", "gelu"):  # from below they go to -0
            assert np.array_equal(np.signbit(got[zeros]), np.signbit(want[zeros])), name


@pytest.mark.parametrize("level", [n for n in cpu_level.LEVELS if n != cpu_level.host_level()])
def test_every_level_gives_the_same_bits(level: str, log1p: OpDef) -> None:
    try:
        cpu_level.check_level(level)
    except pg.errors.ParamError:
        pytest.skip(f"this CPU has no {level}")
    x = pg.tensor(np.concatenate([floats(200_003), np.linspace(-105, 90, 5_000, dtype=np.float32)]))
    outs = [pg.exp(x), pg.tanh(x), log1p(x), pg.silu(x)]
    for a, b in zip(pg.compute(outs), pg.compute(outs, level=level), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.skipif(cpu_level.host_level() == "portable", reason="asks for x86 vectors")
@pytest.mark.parametrize("name", ["exp", "expm1", "log", "log1p", "sigmoid", "silu", "tanh", "softplus", "gelu"])
def test_loops_become_vectors_and_nothing_widens(name: str) -> None:
    numba = pytest.importorskip("numba")
    recipe = _recipe(getattr(mathf, name))
    assert recipe is not None
    fn = _rebuild(recipe, _njit)

    @numba.njit("void(float32[::1], float32[::1])", error_model="numpy")
    def loop(x: np.ndarray, y: np.ndarray) -> None:
        for i in range(len(x)):
            y[i] = fn(x[i])

    (code,) = loop.inspect_llvm().values()
    assert re.search(r"call <(8|16) x float> @llvm\.fma", code)
    assert not re.search(r"\b(fpext|double)\b", code)
