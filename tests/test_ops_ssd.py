"""SSD_SCAN beyond its cases: single numbers by hand, precision and final states at the sizes of models, packed sequences, bits, levels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.backends.cpu import CpuBackend
from pyggml.cases import cases_of
from pyggml.cpu.level import LEVELS, host_level, level_features
from pyggml.cpu.tiles import FASTER_ON
from pyggml.graph import Graph
from pyggml.guards import check_case, guarded_backends
from pyggml.models.ssd import default_chunk, ssd_graph
from pyggml.ops.ssd.defs import ssd_scan
from pyggml.ops.ssm.defs import ssm_scan
from pyggml.registry import find_op
from pyggml.testing import nmse

Arrays = dict[str, np.ndarray]
LIMITS = {"f32": (1e-11, 1e-11), "bf16": (1.5e-5, 8e-6)}  # NMSE of y and state
WEAK, USUAL = (-0.02, -0.005), (-1.0, -0.5)


def inputs(d_state: int, head_dim: int, n_head: int, n_group: int, n_tok: int, n_seqs: int = 1, *, decay: tuple[float, float] = WEAK, options: str = "",
           seed: int = 0) -> Arrays:
    """Random inputs in NumPy order."""
    rng = np.random.default_rng(seed)

    def uniform(*shape: int, lo: float = -1.0, hi: float = 1.0) -> np.ndarray:
        return rng.uniform(lo, hi, shape).astype(np.float32)

    a = {"s": uniform(n_seqs, n_head, head_dim, d_state), "x": uniform(n_seqs, n_tok, n_head, head_dim), "dt": uniform(n_seqs, n_tok, n_head, lo=-4, hi=2),
         "A": uniform(n_head, 1, lo=decay[0], hi=decay[1]), "B": uniform(n_seqs, n_tok, n_group, d_state), "C": uniform(n_seqs, n_tok, n_group, d_state),
         "ids": np.arange(n_seqs, dtype=np.int32)}
    extra = {"b": ("dt_bias", uniform(n_head)), "d": ("D", uniform(n_head, 1)), "z": ("z", uniform(n_seqs, n_tok, n_head, head_dim, lo=-6, hi=6))}
    return a | dict(extra[o] for o in options)


def scan(a: Arrays, backend: str = "cpu", threads: int = 2, **attrs: Any) -> tuple[np.ndarray, np.ndarray]:
    """y [n_seqs, n_tok, n_head, head_dim] and state [n_seqs, n_head, head_dim, d_state]."""
    options = {"threads": threads} if backend == "cpu" else {}
    y, state = pg.compute(ssd_scan(**{k: pg.tensor(v) for k, v in a.items()}, **attrs), {}, backend=backend, **options)
    return y.reshape(a["x"].shape), state.reshape(len(a["ids"]), *a["s"].shape[1:])


def inverse_softplus(d: float) -> float:
    return d if d > 20 else math.log(math.expm1(d))


def tokens(steps: list[float], A: float, **values: float) -> tuple[list[float], float]:
    """y of each token and the last state of one head with a state of one number; `steps` before softplus; x, B and C are 1 and s is 0 unless given."""
    n, given = len(steps), {"x": 1.0, "B": 1.0, "C": 1.0, "s": 0.0, **values}
    a = {k: np.full((1, n if k in "xBC" else 1, 1, 1), given[k], np.float32) for k in ("s", "x", "B", "C")}
    a |= {"dt": np.array(steps, np.float32).reshape(1, n, 1), "A": np.full((1, 1), A, np.float32), "ids": np.zeros(1, np.int32)}
    y, state = scan(a)
    return y.ravel().tolist(), float(state.item())


# By hand


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("n_head", "n_group"), [(4, 2), (15, 3)], ids=["f1", "f2"])
def test_fault_1_2_head_h_reads_group_h_over_heads_per_group(n_head: int, n_group: int, backend: str) -> None:
    a = inputs(1, 1, n_head, n_group, 1)
    a.update(s=np.zeros_like(a["s"]), x=np.ones_like(a["x"]), dt=np.full_like(a["dt"], inverse_softplus(1.0)), C=np.ones_like(a["C"]))
    a["B"] = (10.0 ** np.arange(n_group)).astype(np.float32).reshape(a["B"].shape)
    assert scan(a, backend)[0].ravel() == pytest.approx(np.repeat(10.0 ** np.arange(n_group), n_head // n_group), rel=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_bias_skip_and_gate(backend: str) -> None:
    """softplus(dt + bias) = 2, decay exp(-2 ln 2) = 1/4: states 4/4 + 2*3 = 7 and 7/4 + 2*3; y = (C h + D x) silu(z)."""
    a = inputs(1, 1, 1, 1, 2, options="bdz")
    a.update({k: np.full_like(a[k], v) for k, v in {"s": 4.0, "x": 3.0, "dt": inverse_softplus(2.0) + 5.0, "A": -math.log(2.0), "B": 1.0, "C": 10.0,
                                                    "dt_bias": -5.0, "D": 100.0, "z": 1.0}.items()})
    y, state = scan(a, backend)
    gate = 1.0 / (1.0 + math.exp(-1.0))
    assert y.ravel() == pytest.approx([370 * gate, 377.5 * gate], rel=1e-5) and state.item() == pytest.approx(7.75, rel=1e-5)


def test_gate_at_its_ends() -> None:
    a = inputs(1, 1, 1, 1, 6, options="z")
    a["z"] = np.array([-np.inf, -1e4, 0.0, 1e4, 100.0, -100.0], np.float32).reshape(a["z"].shape)
    plain = scan({k: v for k, v in a.items() if k != "z"})[0].ravel()
    assert scan(a)[0].ravel() == pytest.approx([0, 0, 0, plain[3] * 1e4, plain[4] * 100, 0], rel=1e-6, abs=1e-30)


def test_fault_12_13_14_softplus_and_decay_at_their_ends() -> None:
    """Identity above 20, log1p below, no clamp; a decay is at most 1."""
    for raw, want in ((89.0, 89.0), (20.5, 20.5), (150.0, 150.0), (-20.0, math.log1p(math.exp(-20.0))), (0.0, math.log(2.0))):
        y, state = tokens([raw], 0.0)
        assert y[0] == state == pytest.approx(want, rel=1e-6)
    assert tokens([-90.0], -1.0, x=0.0, s=1.0)[1] == 1.0 and tokens([120.0], -1.0, x=0.0, s=1.0)[1] == 0.0


def test_fault_9_10_11_sudden_and_tiny_decays_side_by_side() -> None:
    """Steps of 50 and 0.001 in turn: exponents reach -6400 in a chunk, and the decay between neighbours keeps its digits."""
    a = inputs(4, 3, 2, 1, 256)
    a["A"][:], a["dt"][:] = -1.0, np.where(np.arange(256) % 2, inverse_softplus(1e-3), 50.0).astype(np.float32).reshape(1, -1, 1)
    for got, want in zip(scan(a, chunk=256), scan(a, "reference"), strict=True):
        assert np.isfinite(got).all() and nmse(got, want) <= 1e-11


# Precision


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("decay", [WEAK, USUAL], ids=["f7-weak", "usual"])
@pytest.mark.parametrize("sizes", [(128, 64, 4, 1), (128, 80, 4, 2), (256, 64, 2, 2), (96, 128, 2, 1), (16, 32, 8, 1), (64, 64, 4, 1)],
                         ids=lambda s: "x".join(map(str, s)))
def test_y_and_state_at_sizes_of_models(sizes: tuple[int, int, int, int], decay: tuple[float, float], precision: str) -> None:
    a = inputs(*sizes, 200, decay=decay, options="b")
    for got, want, limit in zip(scan(a, precision=precision), scan(a, "reference"), LIMITS[precision], strict=True):
        assert nmse(got, want) <= limit


@pytest.mark.parametrize("chunk", [32, 64, 128])
@pytest.mark.parametrize("decay", [WEAK, USUAL], ids=["f7-weak", "usual"])
@pytest.mark.parametrize("precision", LIMITS)
def test_the_graph_of_primitive_ops_keeps_to_the_same_limits(precision: str, decay: tuple[float, float], chunk: int) -> None:
    n_tok, n_head = 384, 6
    a = inputs(64, 32, n_head, 2, n_tok, decay=decay)
    act = np.concatenate([a[k].reshape(1, n_tok, -1) for k in "xBC"], axis=-1)
    steps = np.log1p(np.exp(a["dt"].astype(np.float64))).astype(np.float32)
    got = pg.compute(ssd_graph(pg.tensor(act), pg.tensor(steps), pg.tensor(a["A"]), pg.tensor(np.zeros((n_head, 1), np.float32)), pg.tensor(a["s"]), 2, chunk,
                               precision=precision), threads=2)
    for y, want, limit in zip(got, scan(a, "reference"), LIMITS[precision], strict=True):
        assert nmse(y.reshape(want.shape), want) <= limit


def test_fault_16_state_stays_float32() -> None:
    """2000 tokens of slow decay, in pieces; in bf16 too the state is no worse than one chunk's rounding makes it."""
    a = inputs(16, 4, 2, 1, 2000)
    a["A"][:] = -0.0015
    want = scan(a, "reference")[1]
    for precision, limit in (("f32", 1e-11), ("bf16", 8e-6)):
        state = a["s"]
        for t in range(0, 2000, 200):
            part = {k: np.ascontiguousarray(v[:, t:t + 200]) if k in ("x", "dt", "B", "C") else v for k, v in a.items()}
            state = scan({**part, "s": state}, precision=precision)[1]
        assert nmse(state, want) <= limit


@pytest.mark.parametrize("chunk", [1, 16, 50, 64, 256, None])
def test_agrees_with_the_scan(chunk: int | None) -> None:
    a = inputs(32, 24, 6, 2, 300, 2)
    want = pg.compute(ssm_scan(**{k: pg.tensor(v) for k, v in a.items()}), {}, threads=2)
    for got, w in zip(scan(a, chunk=chunk), want, strict=True):
        assert nmse(got, w) <= 1e-12


# Sequences


@pytest.mark.parametrize("precision", LIMITS)
def test_packed_sequences_have_the_bits_of_runs_alone(precision: str) -> None:
    lengths = [70, 0, 1, 64, 131]
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    a = inputs(32, 16, 6, 2, int(cu[-1]), options="bdz")
    a.update(s=inputs(32, 16, 6, 2, 1, 7)["s"], ids=np.array([3, 1, 6, 0, 3], np.int32))
    y, state = scan({**a, "cu_seqlens": cu}, precision=precision)
    for i, n in enumerate(lengths):
        if n == 0:
            assert np.array_equal(state[i], a["s"][a["ids"][i]])
            continue
        part = {k: np.ascontiguousarray(v[:, cu[i]:cu[i + 1]]) if k in ("x", "dt", "B", "C", "z") else v for k, v in a.items()}
        y_i, state_i = scan({**part, "ids": a["ids"][i:i + 1]}, precision=precision)
        assert np.array_equal(y[:, cu[i]:cu[i + 1]], y_i) and np.array_equal(state[i], state_i[0])


def test_fault_17_rows_of_other_sequences_do_not_matter() -> None:
    a = inputs(32, 16, 4, 2, 9, 2)
    a.update(s=inputs(32, 16, 4, 2, 1, 5)["s"], ids=np.array([3, 1], np.int32))
    dirty = dict(a, s=a["s"].copy())
    dirty["s"][[0, 2, 4]] = np.nan
    for x, y in zip(scan(a), scan(dirty), strict=True):
        assert np.isfinite(x).all() and np.array_equal(x, y)


@pytest.mark.parametrize("precision", LIMITS)
def test_fault_22_repeats_and_thread_counts_give_equal_bits(precision: str) -> None:
    a = inputs(20, 24, 12, 2, 257, options="dz")
    first = scan(a, threads=1, precision=precision)
    for threads in (2, 7):
        runner = open_backend("cpu", threads=threads, poison=True).compile(
            Graph(outs := ssd_scan(**{k: pg.tensor(v) for k, v in a.items()}, precision=precision)))
        for _ in range(20):
            runner.run()
            assert all(np.array_equal(runner.get(t).ravel(), f.ravel()) for t, f in zip(outs, first, strict=True))


def test_no_product_is_rounded_where_the_backend_rounds_nothing() -> None:
    a = {k: pg.tensor(v) for k, v in inputs(32, 24, 6, 2, 70).items()}
    runs = ("f32", "auto"), ("bf16", "f32"), ("bf16", "auto")
    exact, asked, rounded = (pg.compute(ssd_scan(**a, precision=p, chunk=32), threads=2, prec=prec)[0] for p, prec in runs)
    assert np.array_equal(asked, exact)
    assert np.array_equal(rounded, exact) is not any(f <= level_features(host_level()) for f in FASTER_ON)


def test_numbers_below_the_normal_range_are_left_as_they_were() -> None:
    """The kernel takes them for 0; the thread that it ran on, here the test's own, must not keep to that."""
    scan(inputs(16, 16, 2, 1, 40), threads=1)
    assert np.array([1e-40], np.float32)[0] * np.float32(0.5) == np.float32(5e-41) != 0.0


def test_scratch_does_not_grow_with_tokens() -> None:
    def scratch(n_tok: int, **attrs: Any) -> int:
        node = ssd_scan(*(pg.tensor(ne) for ne in ([128, 64, 48], [64, 48, n_tok], [48, n_tok], [1, 48], [128, 1, n_tok], [128, 1, n_tok])),
                        pg.tensor([1], "i32"), **attrs)
        return CpuBackend(threads=1).plan(Graph(node)).scratch_bytes

    assert scratch(512) == scratch(131072) < 1 << 20
    assert scratch(131072, chunk=131072) == scratch(512, chunk=256) < 2 << 20


@pytest.mark.parametrize("level", [v for v in LEVELS[:-1] if LEVELS.index(v) < LEVELS.index(host_level())])
def test_lower_levels(level: str) -> None:
    cases = [c for c in cases_of(find_op("SSD_SCAN")) if c.note in ("f12", "f9", "strided in each dim", "f2") or ("head_dim=80" in str(c) and not c.perf)]
    open_backend("cpu", level=level).compile(Graph([c.node().out for c in cases]))  # the kernels of all cases at once
    for case in cases:
        assert check_case(case, guarded_backends("cpu", (2,), level=level)).faults == []


def test_default_chunk() -> None:
    """By length, and by what the decay matrices of 48 and 512 heads take: 4 Q n_head n_tok bytes, at most 256 MiB."""
    asked = [(1, 48), (40, 48), (512, 48), (2048, 48), (16384, 48), (4096, 512), (16384, 512)]
    assert [default_chunk(n_tok, 1, n_head) for n_tok, n_head in asked] == [1, 40, 64, 128, 64, 32, 16]
