"""The layout family: rules, views, copies against NumPy's own indexing, ids out of range, quantized rows, equal bits on any team."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.cpu.level import LEVELS, host_level
from pyggml.dtypes import dtype
from pyggml.errors import KernelError, ShapeError
from pyggml.graph import Graph
from pyggml.ops.layout.defs import (
    arange,
    concat,
    cont,
    cpy,
    fill,
    get_rows,
    pad,
    permute,
    repeat,
    repeat_interleave,
    set_rows,
    transpose,
    view,
)
from pyggml.ops.pointwise.defs import add
from pyggml.tensor import Tensor, raw_tensor, tensor

Feeds = dict[Tensor, np.ndarray]
LEVELS_HERE = sorted({*LEVELS[: LEVELS.index(host_level()) + 1]} & {"portable", "avx2", host_level()})


def run(out: Tensor, feeds: Feeds | None = None, **options: Any) -> np.ndarray:
    """The value in four dims, NumPy order."""
    value: np.ndarray = pg.compute(out, feeds, **options)
    return value.reshape(out.ne[::-1])


def ramp(*ne: int) -> np.ndarray:
    """1, 2, 3, ... as a float32 array of these ggml dims."""
    return np.arange(1, np.prod(ne) + 1, dtype=np.float32).reshape(ne[::-1])


X = tensor([6, 4], name="x")
Q = raw_tensor(np.zeros(2 * 2 * 34, np.uint8), pg.dtype("q8_0"), [64, 2], "q")


def test_a_view_of_a_view_ends_with_the_storage() -> None:
    with pytest.raises(ShapeError, match="x's storage ends at byte 24"):
        view(view(X, [6], None, 72), [7])



# Views


def test_view_has_offset_and_strides_of_its_own() -> None:
    x = tensor(ramp(6, 4))
    y = view(x, [2, 3], [24], 8)
    assert (y.ne, y.nb, y.offs) == ((2, 3, 1, 1), (4, 24, 72, 72), 8)
    assert np.array_equal(run(cont(y))[0, 0], [[3, 4], [9, 10], [15, 16]])


def test_view_of_a_view_counts_from_it_and_may_pass_its_end() -> None:
    x = tensor(ramp(6, 4))
    y = view(view(x, [2], None, 24), [3, 2], [16], 4)
    assert np.array_equal(run(cont(y))[0, 0], [[8, 9, 10], [12, 13, 14]])


def test_view_of_blocks_counts_whole_blocks() -> None:
    rows = view(Q, [32, 2], [68], 34)
    assert (rows.nb, rows.offs) == ((34, 68, 136, 136), 34)


def test_permute_moves_dim_i_to_a_i() -> None:
    value = ramp(2, 3, 4, 5)
    y = permute(tensor(value), 2, 0, 1, 3)
    assert y.ne == (3, 4, 2, 5)
    got = run(cont(y))
    for i0, i1, i2, i3 in np.ndindex(2, 3, 4, 5):
        assert got[i3, i0, i2, i1] == value[i3, i2, i1, i0]


def test_a_view_of_a_written_tensor_sees_the_write() -> None:
    state = tensor([4, 2], name="state")
    written = cpy(tensor(ramp(4)), view(state, [4], None, 16))
    y = add(written, fill(written, 0.0))
    runner = open_backend("cpu", threads=1).compile(Graph([y]))
    runner.set(state, np.zeros((2, 4), np.float32))
    runner.run()
    assert np.array_equal(runner.get(state)[0, 0], [[0, 0, 0, 0], [1, 2, 3, 4]])
    assert np.array_equal(runner.get(y)[0, 0, 0], [1, 2, 3, 4])


# Copies

dims = st.lists(st.integers(1, 20), min_size=4, max_size=4).filter(lambda n: np.prod(n) <= 20_000)
orders = st.permutations(range(4))


def strided(value: np.ndarray, order: list[int], gap: int) -> tuple[Tensor, Feeds]:
    """`value` as a tensor whose dims lie in memory in the order given, with `gap` unused elements after each innermost run;
    the unused ones hold NaN."""
    axes = [3 - d for d in reversed(order)]
    stored = value.transpose(axes)
    full = np.pad(stored, [(0, 0)] * 3 + [(0, gap)], constant_values=np.nan)
    base = tensor([*full.shape[::-1]], name="base")
    n = stored.shape[::-1]
    inner = view(base, n, [base.nb[1], base.nb[2], base.nb[3]])
    return permute(inner, *order), {base: full}


@given(dims, orders, st.integers(0, 3))
@settings(max_examples=60)
def test_fault_48_cont_takes_any_strides(ne: list[int], order: list[int], gap: int) -> None:
    value = ramp(*ne)
    x, feeds = strided(value, order, gap)
    assert x.ne == tuple(ne)
    assert np.array_equal(run(cont(x), feeds, threads=2, poison=True), value)


@given(dims, orders, orders, st.integers(0, 2))
@settings(max_examples=40)
def test_fault_48_cpy_takes_any_strides_on_both_sides(ne: list[int], from_order: list[int], to_order: list[int], gap: int) -> None:
    value = ramp(*ne)
    a, feeds = strided(value, from_order, gap)
    b, more = strided(np.zeros_like(value), to_order, gap)
    runner = open_backend("cpu", threads=2).compile(Graph([cpy(a, b)]))
    for t, v in (feeds | more).items():
        runner.set(t, v)
    runner.run()
    assert np.array_equal(runner.get(b), value)
    (base,) = more
    assert np.isnan(runner.get(base)).sum() == np.isnan(more[base]).sum()  # the gaps were left alone


@given(dims, orders, st.integers(0, 3), st.integers(1, 20))
@settings(max_examples=40)
def test_fault_48_concat_takes_any_strides(ne: list[int], order: list[int], dim: int, n: int) -> None:
    value = ramp(*ne)
    other = -ramp(*[n if i == dim else m for i, m in enumerate(ne)])
    a, feeds = strided(value, order, 1)
    b, more = strided(other, order[::-1], 2)
    assert np.array_equal(run(concat(a, b, dim), feeds | more, threads=2, poison=True), np.concatenate([value, other], axis=3 - dim))


@pytest.mark.parametrize(("bits", "level"), [*((t, host_level()) for t in ("i8", "i16", "i64", "f16", "f64")), *(("f32", level) for level in LEVELS_HERE)])
def test_transposing_copy_keeps_every_bit(bits: str, level: str) -> None:
    t = pg.dtype(bits)
    assert t.np is not None
    raw = np.random.default_rng(1).integers(0, 256, 70 * 43 * t.nbytes).astype(np.uint8)
    got = pg.compute(cont(transpose(tensor(raw.view(t.np).reshape(43, 70), bits))), level=level)
    assert got.tobytes() == raw.view(t.np).reshape(43, 70).T.tobytes()  # NaN payloads too


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_cpy_rounds_to_nearest_even(level: str) -> None:
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65520.0, -0.0, np.inf, 2**-24, 2**-25, 1e-30], np.float32)
    f16, bf16 = tensor([8], "f16", name="h"), tensor([8], "bf16", name="b")
    runner = open_backend("cpu", level=level).compile(Graph([cpy(tensor(x), f16), cpy(tensor(x), bf16)]))
    runner.set(f16, np.zeros(8, np.float16))
    runner.set(bf16, np.zeros(8, np.uint16))
    runner.run()
    with np.errstate(over="ignore"):
        assert runner.get(f16).tobytes() == x.astype(np.float16).tobytes()
    half_way = np.array([1.0, 1.0, 65536.0, -0.0, np.inf, 2**-24, 2**-25, 0], np.float32)  # bf16 has 8 bits: 65520 rounds up
    assert np.array_equal(runner.get(bf16).ravel()[:7], half_way[:7])


def test_repeat_interleave_deals_heads_to_groups() -> None:
    groups = tensor(np.array([0, 1, 2], np.float32).reshape(3, 1))
    heads = run(repeat_interleave(groups, 5, 1))
    assert np.array_equal(heads.ravel(), [h // 5 for h in range(15)])


def test_fault_18_every_element_is_written() -> None:
    x = tensor(ramp(7, 5))
    outs = [pad(x, 20, 30, 2), concat(x, x, 1), repeat(x, [14, 10, 3]), repeat_interleave(x, 3, 0), arange(0, 5000), fill(x, 2.0), cont(transpose(x))]
    runner = open_backend("cpu", threads=2, poison=True).compile(Graph(outs))
    runner.run()
    first = [runner.get(t) for t in outs]
    assert all(np.isfinite(v).all() for v in first)
    runner.run()
    assert all(v.tobytes() == runner.get(t).tobytes() for v, t in zip(first, outs, strict=True))


# Rows by index


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_fault_101_get_rows_names_the_bad_id(bad: int, backend: str) -> None:
    ids = tensor(np.array([0, bad, 4], np.int32))
    with pytest.raises(KernelError, match=f"GET_ROWS.*bad index {bad};"):
        run(get_rows(tensor(ramp(8, 5)), ids), backend=backend)


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_fault_101_set_rows_names_the_bad_id(bad: int, backend: str) -> None:
    dst = tensor([8, 5], name="dst")
    runner = open_backend(backend).compile(Graph([set_rows(dst, tensor(np.full((2, 8), 9, np.float32)), tensor(np.array([bad, 1])))]))
    runner.set(dst, ramp(8, 5))
    with pytest.raises(KernelError, match=f"SET_ROWS.*bad index {bad};"):
        runner.run()
    changed = (runner.get(dst)[0, 0] != ramp(8, 5)).any(axis=1)
    assert not changed[[0, 2, 3, 4]].any()


def test_a_bad_id_is_forgotten_with_the_next_run() -> None:
    ids = tensor([2], "i32", name="ids")
    y = get_rows(tensor(ramp(3, 4)), ids)
    runner = open_backend("cpu", poison=True).compile(Graph([y]))
    runner.set(ids, np.array([1, 4], np.int32))
    with pytest.raises(KernelError, match="bad index 4"):
        runner.run()
    assert np.array_equal(runner.get(y)[0, 0], [[4, 5, 6], [0, 0, 0]])
    runner.set(ids, np.array([1, 3], np.int32))
    runner.run()
    assert np.array_equal(runner.get(y)[0, 0], [[4, 5, 6], [10, 11, 12]])


def test_fault_17_get_rows_reads_no_other_row() -> None:
    table = np.full((6, 33), np.nan, np.float32)
    table[[2, 5]] = ramp(33, 2)
    assert np.array_equal(run(get_rows(tensor(table), tensor(np.array([5, 2], np.int32))))[0, 0], ramp(33, 2)[::-1])


def test_set_rows_in_blocks() -> None:
    """The bytes are those of gguf's own quantizer; a value that is not finite makes NaN of its block alone."""
    x = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32) * np.float32(10.0) ** np.arange(-3, 3, dtype=np.float32)[:, None]
    dst = raw_tensor(np.zeros(8 * 3 * 34, np.uint8), dtype("q8_0"), [96, 8])
    ids = np.array([7, 0, 3, 1, 6, 2])
    pg.compute(set_rows(dst, pg.tensor(x), pg.tensor(ids)), {}, threads=2)
    assert dst.data is not None
    rows = dst.data.reshape(8, -1)
    assert np.array_equal(rows[ids], gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)) and not rows[[4, 5]].any()
    for value in (np.nan, np.inf, -np.inf):
        x[2, 40] = value
        for backend in ("cpu", "reference"):
            got = pg.compute(set_rows(dst, pg.tensor(x), pg.tensor(ids)), {}, backend=backend)[3]
            assert np.isnan(got[32:64]).all() and np.isfinite(got[:32]).all() and np.isfinite(got[64:]).all()


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("n", [3, 64, 1000])
def test_fault_126_set_rows_last_of_equal_ids_wins(threads: int, n: int) -> None:
    dst = tensor([n, 4], name="dst")
    src = np.random.default_rng(n).standard_normal((500, n)).astype(np.float32)
    ids = np.random.default_rng(7).integers(0, 3, 500)
    runner = open_backend("cpu", threads=threads).compile(Graph([set_rows(dst, tensor(src), tensor(ids))]))
    runner.set(dst, np.full((4, n), -1, np.float32))
    for _ in range(20):
        runner.run()
        got = runner.get(dst)[0, 0]
        assert all(np.array_equal(got[r], src[np.flatnonzero(ids == r)[-1]]) for r in range(3))
        assert (got[3] == -1).all()


def blocks(name: str, n_rows: int, n: int) -> np.ndarray:
    """Random rows of a block type, uint8 [n_rows, bytes], whose scales are small numbers."""
    dt = pg.dtype(name)
    rng = np.random.default_rng(dt.gguf_id)
    raw = rng.integers(0, 256, (n_rows * n // dt.block, dt.nbytes)).astype(np.uint8)
    for at in {"q8_0": [0], "q4_0": [0], "q4_K": [0, 2], "q5_K": [0, 2], "q6_K": [208]}[name]:
        raw[:, at:at + 2] = rng.uniform(-0.1, 0.1, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(n_rows, -1)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_K", "q5_K", "q6_K"])
def test_get_rows_of_blocks(name: str) -> None:
    raw = blocks(name, 7, 768)
    ids = np.array([6, 0, 3, 3], np.int32)
    got = run(get_rows(raw_tensor(raw.reshape(-1), pg.dtype(name), [768, 7], "w"), tensor(ids)))[0, 0]
    want = dequantize(raw, gguf.GGMLQuantizationType(pg.dtype(name).gguf_id))[ids]
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


def test_fault_126_bits_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(3)
    x = tensor(rng.standard_normal((300, 417)).astype(np.float32))
    w = raw_tensor(blocks("q4_K", 50, 512).reshape(-1), pg.dtype("q4_K"), [512, 50], "w")
    ids = tensor(rng.integers(0, 50, 200).astype(np.int32))
    outs = [cont(transpose(x)), concat(x, x, 0), pad(x, 3, 9), repeat(x, [834, 600]), repeat_interleave(x, 2, 1), get_rows(w, ids)]
    results = [[v.tobytes() for v in pg.compute(outs, threads=n)] for n in (1, 2, 7)]
    assert results[0] == results[1] == results[2]


def test_cost_counts_bytes_that_move_once() -> None:
    table, cache = tensor([64, 1000], "f16"), tensor([64, 1000], "f16")
    rows = get_rows(table, tensor([3], "i32"))
    stored = set_rows(cache, tensor([64, 3]), tensor([3], "i64"))
    copied = cpy(tensor([8, 2]), tensor([16], "f16"))
    nbytes = [t.node.op.cost_of(t.node).nbytes for t in (rows, stored, copied) if t.node is not None]
    assert nbytes == [3 * 64 * (2 + 4) + 12, 3 * 64 * (4 + 2) + 24, 16 * (4 + 2)]
