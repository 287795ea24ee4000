"""SSM_CONV and SSM_SCAN beyond their cases: errors, the arithmetic of single tokens by hand, runs in pieces, bad ids."""

from __future__ import annotations

import math

import numpy as np
import pytest

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.cases import cases_of
from pyggml.cpu.level import LEVELS, host_level
from pyggml.errors import KernelError, ShapeError
from pyggml.graph import Graph
from pyggml.ops.ssm.defs import ssm_conv, ssm_scan
from pyggml.registry import find_op
from pyggml.tensor import Tensor
from pyggml.testing import nmse, run_case

Arrays = dict[str, np.ndarray]


def inputs(d_state: int, head_dim: int, n_head: int, n_group: int, n_tok: int, n_seqs: int = 1, *, n_rows: int = 0, seed: int = 0) -> Arrays:
    """Random inputs of a scan, in NumPy order; weak decay, so that a lost state shows."""
    rng = np.random.default_rng(seed)

    def uniform(*shape: int, lo: float = -1.0, hi: float = 1.0) -> np.ndarray:
        return rng.uniform(lo, hi, shape).astype(np.float32)

    return {"s": uniform(n_rows or n_seqs, n_head, head_dim, d_state), "x": uniform(n_seqs, n_tok, n_head, head_dim),
            "dt": uniform(n_seqs, n_tok, n_head, lo=-4, hi=2), "A": uniform(n_head, 1, lo=-0.02, hi=-0.005),
            "B": uniform(n_seqs, n_tok, n_group, d_state), "C": uniform(n_seqs, n_tok, n_group, d_state), "ids": np.arange(n_seqs, dtype=np.int32)}


def scan(a: Arrays, threads: int = 2, backend: str = "cpu") -> tuple[np.ndarray, np.ndarray]:
    """y [n_seqs, n_tok, n_head, head_dim] and state [n_seqs, n_head, head_dim, d_state]."""
    options = {"threads": threads} if backend == "cpu" else {}
    y, state = pg.compute(ssm_scan(**{k: pg.tensor(v) for k, v in a.items()}), {}, backend=backend, **options)
    return y.reshape(a["x"].shape), state.reshape(len(a["ids"]), *a["s"].shape[1:])


def inverse_softplus(d: float) -> float:
    return d if d > 20 else math.log(math.expm1(d))


def one_token(dt: float, A: float = -1.0, *, s: float = 1.0, x: float = 0.0, B: float = 0.0, C: float = 1.0) -> tuple[float, float]:
    """y and state of one head with a state of one number after one token; `dt` before softplus."""
    y, state = scan({"s": np.full((1, 1, 1, 1), s, np.float32), "x": np.full((1, 1, 1, 1), x, np.float32), "dt": np.full((1, 1, 1), dt, np.float32),
                     "A": np.full((1, 1), A, np.float32), "B": np.full((1, 1, 1, 1), B, np.float32), "C": np.full((1, 1, 1, 1), C, np.float32),
                     "ids": np.zeros(1, np.int32)})
    return float(y.item()), float(state.item())


# SSM_SCAN


@pytest.mark.parametrize("d_state", [1, 5, 16, 20])
@pytest.mark.parametrize("name", ["x", "dt"])
def test_an_infinite_input_stays_infinite_whatever_the_padding(name: str, d_state: int) -> None:
    """Lanes that pad d_state to whole vectors do not turn inf into NaN, and heads that do not hold it are as without it."""
    a = inputs(d_state, 3, 2, 1, 4)
    a["B"], a["C"] = np.abs(a["B"]), np.abs(a["C"])
    a["x"] = np.abs(a["x"])
    plain = scan(a)
    a[name][0, 2, 1] = np.inf
    want = scan(a, backend="reference")
    for got, ref, before, head in zip(scan(a), want, plain, ((0, slice(None), 0), (0, 0)), strict=True):
        assert np.isposinf(ref).any() and not np.isnan(ref).any() and np.array_equal(np.isposinf(got), np.isposinf(ref)) and not np.isnan(got).any()
        assert np.array_equal(got[head], before[head])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_fault_1_head_h_reads_group_h_over_heads_per_group(backend: str) -> None:
    a = inputs(1, 1, 4, 2, 1)
    a.update(s=np.zeros_like(a["s"]), x=np.ones_like(a["x"]), dt=np.full_like(a["dt"], inverse_softplus(1.0)), A=np.full_like(a["A"], -1),
             B=np.array([1, 10], np.float32).reshape(1, 1, 2, 1), C=np.ones_like(a["C"]))
    assert scan(a, backend=backend)[0].ravel() == pytest.approx([1, 1, 10, 10], rel=1e-6)


def test_fault_2_groups_that_are_no_power_of_two() -> None:
    a = inputs(16, 1, 15, 3, 1)
    a.update(s=np.zeros_like(a["s"]), x=np.ones_like(a["x"]), dt=np.full_like(a["dt"], inverse_softplus(1.0)), C=np.ones_like(a["C"]))
    a["B"] = np.repeat(np.array([1, 2, 4], np.float32), 16).reshape(1, 1, 3, 16)
    assert scan(a)[0].ravel() == pytest.approx([16] * 5 + [32] * 5 + [64] * 5, rel=1e-6)


def test_fault_2_refused_by_the_rule() -> None:
    with pytest.raises(ShapeError, match=r"SSM_SCAN: B has ne \[16, 4, 1, 1\]: n_group 4 must divide n_head 15"):
        ssm_scan(**{k: pg.tensor(v) for k, v in inputs(16, 2, 15, 4, 1).items()})


def pieces(a: Arrays, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The scan run in pieces of these lengths, each from the state that the last one left."""
    ys, state, t = [], a["s"], 0
    for n in lengths:
        part = {k: v[:, t:t + n] if k in ("x", "dt", "B", "C") else v for k, v in a.items()}
        y, state = scan({**{k: np.ascontiguousarray(v) for k, v in part.items()}, "s": state})
        ys.append(y)
        t += n
    return np.concatenate(ys, axis=1), state


@pytest.mark.parametrize("lengths", [[128] * 8, [146] * 7 + [2], [1, 1023], [1023, 1], [3, 17, 1004]], ids=lambda v: f"f5-{len(v)}-{v[0]}-{v[-1]}")
def test_fault_5_a_run_in_pieces_gives_the_bits_of_the_whole(lengths: list[int]) -> None:
    a = inputs(16, 16, 4, 2, 1024, 2)
    whole, parts = scan(a), pieces(a, lengths)
    assert np.array_equal(whole[0], parts[0]) and np.array_equal(whole[1], parts[1])


def test_fault_4_token_by_token_odd_sizes() -> None:
    a = inputs(20, 3, 4, 2, 11)
    whole, parts = scan(a), pieces(a, [1] * 11)
    assert np.array_equal(whole[0], parts[0]) and np.array_equal(whole[1], parts[1])


@pytest.fixture(scope="module")
def long_run() -> tuple[Arrays, np.ndarray]:
    """Inputs and y of 8193 tokens, checked against the float64 recurrence."""
    a = inputs(16, 2, 2, 1, 8193, 2, seed=3)
    got, want = scan(a), scan(a, backend="reference")
    assert nmse(got[0], want[0]) <= ssm_scan.limit and nmse(got[1], want[1]) <= ssm_scan.limit
    return a, got[0]


@pytest.mark.parametrize("n_tok", [1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 257, 300, 8193], ids=lambda n: f"f8-{n}")
def test_fault_8_a_shorter_run_is_a_prefix(n_tok: int, long_run: tuple[Arrays, np.ndarray]) -> None:
    a, y = long_run
    part = {k: np.ascontiguousarray(v[:, :n_tok]) if k in ("x", "dt", "B", "C") else v for k, v in a.items()}
    assert np.array_equal(scan(part)[0], y[:, :n_tok])


def test_fault_12_softplus() -> None:
    """Identity above 20 (no overflow at 89); log1p keeps small steps: 2.06e-9 at -20, where log(1 + e^x) gives 0."""
    for raw, want in ((89.0, 89.0), (20.5, 20.5), (-20.0, math.log1p(math.exp(-20.0))), (0.0, math.log(2.0))):
        y, state = one_token(raw, A=0.0, s=0.0, x=1.0, B=1.0)
        assert y == state == pytest.approx(want, rel=1e-6)


def test_fault_13_decay_is_at_most_1() -> None:
    assert one_token(-2.0)[1] == pytest.approx(0.880797, rel=1e-5)
    assert one_token(-90.0)[1] == 1.0 and one_token(120.0)[1] == 0.0


@pytest.mark.parametrize("step", [1e-4, 150.0], ids=lambda v: f"f14-{v:g}")
def test_fault_14_steps_are_not_clamped(step: float) -> None:
    y, _ = one_token(inverse_softplus(step), A=0.0, s=0.0, x=1.0, B=1.0)
    assert y == pytest.approx(step, rel=2e-5)  # -9.21 as float32 resolves 1e-4 to 1e-6 of itself


def test_fault_16_state_stays_float32() -> None:
    y, state = one_token(50.0, A=-1e-4, s=0.0, x=40.0, B=40.0, C=1e-4)
    assert y == pytest.approx(8.0, rel=1e-6) and state == pytest.approx(80000.0)
    a = inputs(16, 1, 1, 1, 2000, seed=5)
    a["A"][:] = -0.0015
    got, want = pieces(a, [1] * 200 + [1800])[1], scan(a, backend="reference")[1]
    assert nmse(got, want) <= 1e-12


def test_fault_17_rows_of_other_sequences_do_not_matter() -> None:
    a = inputs(32, 16, 4, 2, 9, 2, n_rows=5)
    a["ids"] = np.array([3, 1], np.int32)
    clean, dirty = dict(a), dict(a, s=a["s"].copy())
    dirty["s"][[0, 2, 4]] = np.nan
    for x, y in zip(scan(clean), scan(dirty), strict=True):
        assert np.isfinite(x).all() and np.array_equal(x, y)


def test_fault_20_heads_of_one_channel() -> None:
    a = inputs(16, 1, 1024, 1, 32)
    for got, want in zip(scan(a), scan(a, backend="reference"), strict=True):
        assert nmse(got, want) <= ssm_scan.limit


@pytest.mark.parametrize("dims", [(16, 16, 4, 2, 257, 1), (20, 6, 4, 2, 257, 1)], ids=["f22-whole-vectors", "f22-odd"])
def test_fault_22_repeats_and_thread_counts_give_equal_bits(dims: tuple[int, ...]) -> None:
    a = inputs(*dims)
    first = scan(a, threads=1)
    for threads in (2, 7):
        runner = open_backend("cpu", threads=threads, poison=True).compile(Graph(outs := ssm_scan(**{k: pg.tensor(v) for k, v in a.items()})))
        for _ in range(100):
            runner.run()
            assert all(np.array_equal(runner.get(t).ravel(), f.ravel()) for t, f in zip(outs, first, strict=True))


def test_fault_47_output_is_cut_at_the_right_end() -> None:
    x = np.arange(1, 9, dtype=np.float32)
    sx, c = np.concatenate([np.zeros(3, np.float32), x]).reshape(1, 11), np.array([[0, 0, 0, 1]], np.float32)
    assert np.array_equal(pg.compute(ssm_conv(pg.tensor(sx), pg.tensor(c)), {}).ravel(), x)


def test_fault_48_views_of_one_in_proj_row() -> None:
    """x, dt, B and C of 8 sequences of 1024 tokens where they stand in the rows that one projection gave."""
    n_head, head_dim, n_group, d_state, n_tok, n_seqs = 4, 16, 2, 16, 1024, 8
    d_inner, d_group = n_head * head_dim, n_group * d_state
    width = 2 * d_inner + 2 * d_group + n_head  # z, x, B, C, dt
    rng = np.random.default_rng(48)
    zxbcdt = rng.uniform(-1, 1, (n_seqs, n_tok, width)).astype(np.float32)
    rows = pg.tensor([width, n_tok, n_seqs], "f32", name="zxBCdt")
    nb = [4 * width, 4 * width * n_tok]
    x = pg.view(rows, [head_dim, n_head, n_tok, n_seqs], [4 * head_dim, *nb], 4 * d_inner)
    B = pg.view(rows, [d_state, n_group, n_tok, n_seqs], [4 * d_state, *nb], 8 * d_inner)
    C = pg.view(rows, [d_state, n_group, n_tok, n_seqs], [4 * d_state, *nb], 8 * d_inner + 4 * d_group)
    dt = pg.view(rows, [n_head, n_tok, n_seqs], nb, 8 * d_inner + 8 * d_group)
    a = inputs(d_state, head_dim, n_head, n_group, 1, n_seqs)
    got = pg.compute(ssm_scan(pg.tensor(a["s"]), x, dt, pg.tensor(a["A"]), B, C, pg.tensor(a["ids"])), {rows: zxbcdt}, threads=2)
    cut = np.split(zxbcdt, np.cumsum([d_inner, d_inner, d_group, d_group]), axis=-1)
    a.update(x=cut[1].reshape(n_seqs, n_tok, n_head, head_dim), B=cut[2].reshape(n_seqs, n_tok, n_group, d_state),
             C=cut[3].reshape(n_seqs, n_tok, n_group, d_state), dt=cut[4])
    want = scan({k: np.ascontiguousarray(v) for k, v in a.items()}, backend="reference")
    for g, w in zip(got, want, strict=True):
        assert nmse(g, w) <= ssm_scan.limit


@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1])
@pytest.mark.parametrize("d_state", [16, 5])
def test_id_out_of_range_stops_the_run(bad: int, d_state: int) -> None:
    a = inputs(d_state, 16, 4, 2, 3, 2, n_rows=3)
    a["ids"] = np.array([2, bad], np.int32)
    with pytest.raises(KernelError, match=rf"SSM_SCAN \(.*\): bad index {bad};"):
        scan(a)
    with pytest.raises(KernelError, match=f"SSM_SCAN: id {bad}; legal: 0 to 2, the rows of s"):
        scan(a, backend="reference")


# SSM_CONV


def conv(sx: np.ndarray, c: np.ndarray, n_t: int | None = None, *, channels_innermost: bool = False, threads: int = 2) -> np.ndarray:
    """out [n_seqs, n_t, d_inner] of sx [n_seqs, d_inner, time]; the other layout has the same values transposed by stride."""
    if not channels_innermost:
        t: Tensor = pg.tensor(sx)
        return np.asarray(pg.compute(ssm_conv(t, pg.tensor(c), n_t=n_t), {}, threads=threads)).reshape(len(sx), -1, len(c))
    held = pg.tensor(np.ascontiguousarray(sx.transpose(0, 2, 1)))
    return np.asarray(pg.compute(ssm_conv(pg.transpose(held), pg.tensor(c), n_t=n_t), {}, threads=threads)).reshape(len(sx), -1, len(c))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 10, 100], ids=lambda n: f"f4-{n}")
@pytest.mark.parametrize("channels_innermost", [False, True])
def test_fault_4_prefill_and_step_equal_one_run(n: int, channels_innermost: bool) -> None:
    rng = np.random.default_rng(n)
    x, c = rng.uniform(-1, 1, (2, 70, n + 1)).astype(np.float32), rng.uniform(-1, 1, (70, 4)).astype(np.float32)
    padded = np.concatenate([np.zeros((2, 70, 3), np.float32), x], axis=2)
    whole = conv(padded, c, channels_innermost=channels_innermost)
    prefill = conv(np.ascontiguousarray(padded[:, :, :-1]), c, channels_innermost=channels_innermost)
    step = conv(np.ascontiguousarray(padded[:, :, -4:]), c, channels_innermost=channels_innermost)
    assert np.array_equal(whole, np.concatenate([prefill, step], axis=1))


@pytest.mark.parametrize("n_tok", [1, 15, 16, 63, 64, 65, 200])
def test_conv_pads_time_with_zeros_and_layouts_agree(n_tok: int) -> None:
    rng = np.random.default_rng(n_tok)
    sx, c = rng.uniform(-1, 1, (2, 70, n_tok + 3)).astype(np.float32), rng.uniform(-1, 1, (70, 4)).astype(np.float32)
    plain = conv(sx, c)
    for n_t in (n_tok, n_tok + 1, 256):
        for channels_innermost in (False, True):
            padded = conv(sx, c, n_t, channels_innermost=channels_innermost)
            assert padded.shape == (2, n_t, 70) and np.array_equal(padded[:, :n_tok], plain) and not padded[:, n_tok:].any()


def test_conv_thread_counts_give_equal_bits() -> None:
    rng = np.random.default_rng(0)
    sx, c = rng.uniform(-1, 1, (2, 300, 203)).astype(np.float32), rng.uniform(-1, 1, (300, 4)).astype(np.float32)
    results = [conv(sx, c, threads=t) for t in (1, 2, 7)]
    assert all(np.array_equal(r, results[0]) for r in results)


def test_cost() -> None:
    node = ssm_conv(pg.tensor([67, 100, 2]), pg.tensor([4, 100])).node
    assert ssm_conv.cost_of(node) == (2 * 4 * 64 * 100 * 2, 4 * (67 * 100 * 2 + 400 + 64 * 100 * 2))
    node = ssm_scan(**{k: pg.tensor(v) for k, v in inputs(16, 8, 4, 2, 10, 2, n_rows=100).items()})[0].node
    state = 16 * 8 * 4 * 2
    assert ssm_scan.cost_of(node) == (5 * state * 10, 4 * (2 * state + 2 * 8 * 4 * 10 * 2 + 4 * 10 * 2 + 4 + 2 * 16 * 2 * 10 * 2 + 2))


@pytest.mark.parametrize("level", [v for v in ("portable", "avx2") if LEVELS.index(v) < LEVELS.index(host_level())])
def test_lower_levels(level: str) -> None:
    wanted = [next(c for c in cases_of(find_op(name)) if c.note == note) for name, note in
              (("SSM_CONV", "granite-4.0-h-350m"), ("SSM_CONV", "channels innermost"), ("SSM_SCAN", "f2"), ("SSM_SCAN", "granite-4.0-h-350m"))]
    wanted.append(next(c for c in cases_of(find_op("SSM_CONV")) if "type_c=f16" in str(c)))
    open_backend("cpu", level=level).compile(Graph([c.node().out for c in wanted]))  # the kernels of all cases at once
    for case in wanted:
        got, want = run_case(case, "cpu", threads=2, level=level, poison=True)
        for g, w in zip(got, want, strict=True):
            assert nmse(g, w) <= case.op.limit
