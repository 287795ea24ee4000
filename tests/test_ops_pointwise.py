"""Pointwise ops: values at the ends of their ranges, rules, faults. Fusion: chains against their nodes one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.cpu.compile import kernels_for
from pyggml.cpu.fuse import group, launch_of
from pyggml.cpu.simd import Arg
from pyggml.dtypes import BF16, bf16_to_f32, f32_to_bf16
from pyggml.errors import DTypeError, UnsupportedOp
from pyggml.ops.pointwise import defs
from pyggml.plan import Step, make_plan
from pyggml.registry import OPS, Pointwise, Spec, like, op
from pyggml.tensor import Tensor, contiguous_nb
from pyggml.testing import nmse

pg.load_ops()

UNARY = ("sqr sqrt exp expm1 log neg abs sgn step relu sigmoid silu tanh gelu softplus").split()
TABLE = (*UNARY, "add", "sub", "mul", "div", "scale", "clamp", "cast", "swiglu", "reglu", "swiglu_split", "reglu_split")
Feeds = dict[Tensor, np.ndarray]


def f32(*values: float) -> Tensor:
    return pg.tensor(np.array(values, np.float32))


# The table


@pytest.mark.parametrize("name", TABLE)
def test_an_op_is_a_line_of_the_table(name: str) -> None:
    d = OPS[name.upper()]
    assert getattr(defs, name) is d and getattr(pg, name) is d and d.family == "pointwise"
    assert d.pointwise is not None and d.__doc__ and f"Source: ggml_{name}" in d.__doc__
    node = d.all_cases()[0]
    assert node.perf is False and sum(c.perf for c in d.all_cases()) >= 1


SPECIAL = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, -1e-40, 88.7, 88.73, -104.0, 1e30, -1e30, 1.0, -1.0, 20.0, 20.5], np.float32)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_special_values(dtype: str) -> None:
    """inf, NaN, signed zeros, subnormals and both ends of exp, against the reference rounded to the type."""
    stored = pg.cast(pg.tensor(SPECIAL), dtype)
    outs = [getattr(pg, n)(stored) for n in UNARY] + [pg.clamp(stored, -2.0, 2.0), pg.scale(stored, -2.0)]
    with np.errstate(all="ignore"):
        got, want = pg.compute(outs), pg.compute(outs, backend="reference")
        for name, g, w in zip((*UNARY, "clamp", "scale"), got, want, strict=True):
            w = w.astype(np.float16 if dtype == "f16" else np.float32).astype(np.float32)  # beyond the largest number is inf
            small = 3e-37 if name in ("sigmoid", "silu", "gelu") else 2e-45  # those three go to 0 a little early
            np.testing.assert_allclose(g.astype(np.float32), w, rtol={"f32": 4e-7, "f16": 1e-3, "bf16": 8e-3}[dtype], atol=small, err_msg=name)
            propagates = name not in ("sgn", "step")
            assert np.isnan(g[2]) == propagates, name


def test_zero_keeps_its_sign_where_the_function_is_odd() -> None:
    zero = f32(-0.0)
    odd = [pg.expm1(zero), pg.tanh(zero), pg.silu(zero), pg.gelu(zero), pg.relu(zero), pg.sqrt(zero), pg.mul(zero, f32(1.0)), pg.clamp(zero, -1.0, 1.0)]
    assert all(np.signbit(y[0]) for y in pg.compute(odd))


def test_division_and_differences_of_special_values() -> None:
    a, b = f32(1.0, -1.0, 0.0, np.inf, np.inf, np.nan), f32(0.0, 0.0, 0.0, np.inf, -np.inf, 1.0)
    q, d = pg.compute([pg.div(a, b), pg.sub(a, b)])
    np.testing.assert_array_equal(q, np.array([np.inf, -np.inf, np.nan, np.nan, np.nan, np.nan], np.float32))
    np.testing.assert_array_equal(d, np.array([1.0, -1.0, 0.0, np.nan, np.inf, np.nan], np.float32))


def test_casts_round_to_even_and_saturate() -> None:
    x = np.array([0.1, -2.5, 2.5, 2049.0, 2051.0, 65519.0, 65520.0, 1e-8, -1e30, np.nan, np.inf, 2147483520.0, 2147483648.0], np.float32)
    t = pg.tensor(x)
    half, brain, whole, back = pg.compute([pg.cast(t, "f16"), pg.cast(t, "bf16"), pg.cast(t, "i32"), pg.cast(pg.cast(t, "f64"), "i32")])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half, x.astype(np.float16))
    np.testing.assert_array_equal(brain, bf16_to_f32(f32_to_bf16(x)))
    want = [0, -2, 2, 2049, 2051, 65519, 65520, 0, -(2**31), 0, 2**31 - 1, 2147483520, 2**31 - 1]
    assert whole.dtype == np.int32 and whole.tolist() == back.tolist() == want
    exact = pg.tensor(np.array([2147483646.75, -2147483648.5, -1e300]))
    assert pg.compute(pg.cast(exact, "i32")).tolist() == [2147483646, -(2**31), -(2**31)]
    ids = pg.tensor(np.array([7, -3, 2**24 + 1], np.int32))
    floats, same, wide = pg.compute([pg.cast(ids, "f32"), pg.cast(ids, "i32"), pg.cast(ids, "f64")])
    assert floats.tolist() == [7.0, -3.0, 2.0**24] and same.tolist() == [7, -3, 2**24 + 1] and wide.tolist() == [7.0, -3.0, 2.0**24 + 1]


def test_f64_is_computed_in_f64() -> None:
    a, b = pg.tensor(np.array([1e8 + 1e-7])), pg.tensor(np.array([1e8]))
    single, double = pg.compute([pg.sub(a, b, type="f32"), pg.sub(a, b)])
    assert double.dtype == np.float64 and double[0] == (1e8 + 1e-7) - 1e8 and single == np.float32(double)
    wide = pg.compute(pg.mul(f32(1 / 3), f32(3.0), type="f64"))
    assert wide[0] == np.float64(np.float32(1 / 3)) * 3.0


def test_types_that_do_not_exist_or_are_not_computed() -> None:
    with pytest.raises(DTypeError, match="unknown type 'f8'"):
        pg.cast(pg.tensor([4]), "f8")
    with pytest.raises(DTypeError, match="EXP: a is f64; legal: f32, f16, bf16$"):
        pg.exp(pg.tensor([4], "f64"))



# Faults of peer engines


@pytest.mark.parametrize("raw, want", [(89.0, 89.0), (-20.0, 2.0611537e-9), (150.0, 150.0)], ids=["f12-above", "f12-below", "f14-not-clamped"])
def test_softplus(raw: float, want: float) -> None:
    bias = f32(0.5)
    got = pg.compute(pg.softplus(pg.add(f32(raw - 0.5), bias)))
    assert got[0] == np.float32(want)


def test_fault_13_softplus_makes_a_decay() -> None:
    dt = pg.softplus(f32(-2.0, 30.0, -1e30))
    step, decay = pg.compute([dt, pg.exp(pg.mul(dt, f32(-1.0)))])
    assert np.all(step >= 0) and abs(decay[0] - 0.8808) < 1e-4 and np.all((decay >= 0) & (decay <= 1))


def test_fault_14_small_steps_pass() -> None:
    raw = np.log(np.expm1(np.array([1e-4]))).astype(np.float32)
    np.testing.assert_allclose(pg.compute(pg.softplus(pg.tensor(raw))), 1e-4, rtol=1e-6)


def test_fault_17_dead_lanes_do_not_reach_live_ones() -> None:
    """A clamp or relu of one element never mixes with its NaN neighbours, whatever vector they share."""
    x = np.where(np.arange(1000) % 3 == 0, np.nan, np.linspace(-2, 2, 1000)).astype(np.float32)
    clean = np.nan_to_num(x)
    got, want = pg.compute([pg.silu(pg.clamp(pg.tensor(x), -1.0, 1.0)), pg.silu(pg.clamp(pg.tensor(clean), -1.0, 1.0))])
    live = ~np.isnan(x)
    assert got[live].tobytes() == want[live].tobytes() and np.isnan(got[~live]).all()


# Fusion: what the kernels give


def strided(ne: Sequence[int], nb: Sequence[int], dtype: str = "f32") -> Tensor:
    return pg.tensor(list(ne), dtype, nb=nb)


def leaf(*ne: int, dtype: str = "f32") -> Tensor:
    return pg.tensor(list(ne), dtype)


def chain_of_bias_and_gate() -> list[Tensor]:
    return [pg.mul(pg.silu(pg.add(leaf(70, 9, 2), leaf(70))), leaf(70, 9, 2))]


def diamond() -> list[Tensor]:
    y = pg.exp(leaf(70, 9))
    return [pg.add(pg.sqr(y), pg.mul(pg.tanh(y), y))]


def read_twice_by_one() -> list[Tensor]:
    y = pg.tanh(leaf(70, 9))
    return [pg.mul(y, y)]


def inner_value_is_an_output() -> list[Tensor]:
    y = pg.tanh(leaf(70, 9))
    return [y, pg.neg(y)]


def inner_value_seen_through_a_view() -> list[Tensor]:
    y = pg.tanh(leaf(70, 9))
    return [pg.add(pg.neg(y), pg.reshape(y, [70, 9])), pg.transpose(pg.reshape(y, [9, 70]))]


def permuted_and_gaps() -> list[Tensor]:
    return [pg.scale(pg.sub(strided((33, 7, 5), (28, 4, 924, 4620)), strided((33, 7, 5), (4, 160, 1120, 5600))), 0.5, 1.0)]


def one_number() -> list[Tensor]:
    return [pg.scale(pg.mul(leaf(1), leaf(1)), 3.0), pg.add(pg.neg(leaf(70, 9)), leaf(1))]


def repeats_in_every_dim() -> list[Tensor]:
    x = pg.add(pg.mul(leaf(24, 6, 4, 6), leaf(8, 3)), leaf(12, 1, 2, 3))
    return [pg.add(x, strided((6, 2), (8, 4, 48, 48)))]


def narrow_rows() -> list[Tensor]:
    return [pg.mul(pg.add(leaf(1, 6, 50), leaf(1, 6)), leaf(1, 1, 50))]


def decays_rounded_between() -> list[Tensor]:
    d = pg.sub(leaf(1, 40, 3, dtype="f64"), leaf(40, 1, 3, dtype="f64"), type="f32")
    return [pg.add(pg.mul(pg.exp(pg.neg(pg.abs(d))), leaf(40, 40)), leaf(40, 40, 3, dtype="f64"), type="f64")]


def rounded_then_wide() -> list[Tensor]:
    return [pg.sub(pg.add(leaf(40, 3, dtype="f64"), leaf(40, dtype="f64"), type="f32"), leaf(40, 3, dtype="f64"), type="f64")]


def two_gated_units() -> list[Tensor]:
    return [pg.add(pg.swiglu(leaf(66, 9)), pg.reglu(strided((66, 9), (36, 4, 2376, 2376)), swapped=True))]


def values_of_other_dims() -> list[Tensor]:
    return [pg.mul(pg.neg(leaf(40, 3)), pg.neg(leaf(40))), pg.swiglu(pg.neg(leaf(40, 3)))]


def one_memory_in_two_shapes() -> list[Tensor]:
    x = leaf(40, 3)
    return [pg.mul(pg.add(x, pg.view(x, [8, 3], [160])), pg.view(x, [40], offset=160))]


def sixteen_bit_sources() -> list[Tensor]:
    return [pg.mul(pg.add(leaf(50, 4), leaf(50, dtype="bf16")), leaf(50, 4, dtype="f16"))]


def sixteen_bit_value_between() -> list[Tensor]:
    return [pg.neg(pg.cast(pg.tanh(leaf(50, 4)), "f16"))]


def more_operands_than_a_kernel_takes() -> list[Tensor]:
    x = leaf(40, 3)
    for _ in range(20):
        x = pg.add(x, leaf(40, 3))
    return [x]


def whole_numbers() -> list[Tensor]:
    return [pg.scale(pg.cast(leaf(40, 3, dtype="i32"), "f32"), 0.5), pg.cast(pg.scale(leaf(40, 3), 100.0), "i32")]


def a_write_between() -> list[Tensor]:
    state, new = leaf(40, 3), leaf(40, 3)
    before = pg.neg(state)
    written = pg.cpy(new, state)
    return [pg.add(before, pg.neg(written))]


def a_write_to_a_view_between() -> list[Tensor]:
    state, new = leaf(40, 3), leaf(10, 3)
    before = pg.neg(state)
    pg_view = pg.cpy(new, pg.view(state, [10, 3], [160], 40))
    return [pg.mul(before, leaf(40, 3)), pg.sqr(pg_view)]


def norm_times_weight() -> list[Tensor]:
    return [pg.mul(pg.rms_norm(leaf(40, 3, 2), eps=1e-5), leaf(40))]


def norm_of_strided_rows_and_more() -> list[Tensor]:
    x = pg.rms_norm(pg.permute(leaf(3, 40, 2), 1, 0, 2, 3), eps=1e-5)
    return [pg.add(pg.silu(pg.scale(x, 0.5)), pg.permute(leaf(3, 40, 2), 1, 0, 2, 3))]


def conv_bias_gate() -> list[Tensor]:
    return [pg.silu(pg.add(pg.ssm_conv(leaf(40, 70, 2), leaf(4, 70)), leaf(70)))]


def conv_of_few_tokens_padded() -> list[Tensor]:
    return [pg.mul(pg.add(pg.ssm_conv(leaf(8, 70, 2), leaf(4, 70), n_t=9), leaf(70)), leaf(1, 9, 2))]


def norm_read_twice() -> list[Tensor]:
    x = pg.rms_norm(leaf(40, 3), eps=1e-5)
    return [pg.mul(x, leaf(40)), pg.sqr(x)]


def norm_repeats_in_a_row() -> list[Tensor]:
    return [pg.mul(pg.rms_norm(leaf(40, 3), eps=1e-5), leaf(20))]


def norm_is_an_output() -> list[Tensor]:
    x = pg.rms_norm(leaf(40, 3), eps=1e-5)
    return [pg.mul(x, leaf(40)), x]


def norm_before_a_write() -> list[Tensor]:
    state, new = leaf(40, 3), leaf(40, 3)
    x = pg.rms_norm(state, eps=1e-5)
    return [pg.mul(x, pg.cpy(new, state))]


def a_write_before_and_elsewhere() -> list[Tensor]:
    state, other, new = leaf(40, 3), leaf(40, 3), leaf(40, 3)
    after = pg.neg(pg.cpy(new, state))
    elsewhere = pg.cpy(new, other)
    return [pg.mul(after, new), pg.sqr(elsewhere)]


GRAPHS: dict[Callable[[], list[Tensor]], int] = {  # the graph, and how many steps it takes when fused
    chain_of_bias_and_gate: 1, diamond: 1, read_twice_by_one: 1, inner_value_is_an_output: 2, inner_value_seen_through_a_view: 2, permuted_and_gaps: 1,
    one_number: 2, repeats_in_every_dim: 1, narrow_rows: 1, decays_rounded_between: 1, rounded_then_wide: 1, two_gated_units: 1,
    values_of_other_dims: 4, one_memory_in_two_shapes: 1, sixteen_bit_sources: 1, sixteen_bit_value_between: 2,
    more_operands_than_a_kernel_takes: 3, whole_numbers: 2, a_write_between: 3, a_write_to_a_view_between: 4, a_write_before_and_elsewhere: 4}


def feeds(graph: pg.Graph, seed: int = 0) -> Feeds:
    rng = np.random.default_rng(seed)
    return {t: rng.integers(-99, 99, t.ne[::-1]).astype(np.int32) if t.dtype.is_int else rng.uniform(-2, 2, t.ne[::-1]).astype(
        np.float64 if t.dtype.name == "f64" else np.float32) for t in graph.inputs}


def run(graph: pg.Graph, values: Feeds, backend: str = "cpu", **options: Any) -> list[np.ndarray]:
    runner = open_backend(backend, **options).compile(graph)
    for t, v in values.items():
        runner.set(t, v)
    runner.run()
    return [runner.get(t) for t in graph.outputs]


@pytest.fixture(scope="module")
def compiled() -> dict[Callable[[], list[Tensor]], pg.Graph]:
    """All graphs, their pointwise kernels compiled in one go."""
    graphs = {build: pg.Graph(build()) for build in GRAPHS}
    steps = [s for g in graphs.values() for s in (*group(g), *(Step([n], list(n.src), list(n.outputs)) for n in g.nodes))]
    kernels_for().addresses([launch_of(s).spec for s in steps if s.nodes[-1].op.pointwise is not None])
    return graphs


@pytest.mark.parametrize("build", GRAPHS, ids=lambda f: f.__name__)
def test_fused_equals_unfused_equals_reference(build: Callable[[], list[Tensor]], compiled: dict[Callable[[], list[Tensor]], pg.Graph]) -> None:
    graph = compiled[build]
    values = feeds(graph)
    fused, single, want = run(graph, values, poison=True), run(graph, values, fuse=False, poison=True), run(graph, values, "reference")
    assert len(group(graph)) == GRAPHS[build]
    for a, b, w in zip(fused, single, want, strict=True):
        assert a.tobytes() == b.tobytes()
        assert np.array_equal(a, w) if a.dtype == np.int32 else nmse(a, w) <= 1e-13


ENDINGS: dict[Callable[[], list[Tensor]], int] = {  # chains after kernels that can end with one, and how many steps are left
    norm_times_weight: 1, norm_of_strided_rows_and_more: 1, conv_bias_gate: 1, conv_of_few_tokens_padded: 1, norm_read_twice: 3, norm_repeats_in_a_row: 2,
    norm_is_an_output: 2, norm_before_a_write: 3}


@pytest.mark.parametrize("build", ENDINGS, ids=lambda f: f.__name__)
def test_a_kernel_that_ends_with_a_chain(build: Callable[[], list[Tensor]]) -> None:
    graph = pg.Graph(build())
    values = feeds(graph)
    assert len(open_backend("cpu").plan(graph).steps) == ENDINGS[build]
    fused, single, want = run(graph, values, poison=True, threads=3), run(graph, values, fuse=False, poison=True), run(graph, values, "reference")
    for a, b, w in zip(fused, single, want, strict=True):
        assert a.tobytes() == b.tobytes() and nmse(a, w) <= 1e-12


@pytest.mark.parametrize("build", [permuted_and_gaps, repeats_in_every_dim, two_gated_units], ids=lambda f: f.__name__)
def test_fault_18_first_run_equals_second(build: Callable[[], list[Tensor]], compiled: dict[Callable[[], list[Tensor]], pg.Graph]) -> None:
    graph = compiled[build]
    runner = open_backend("cpu", poison=True).compile(graph)
    for t, v in feeds(graph).items():
        runner.set(t, v)
    runs = []
    for _ in range(2):
        runner.run()
        runs.append(runner.get(graph.outputs[0]))
    assert np.isfinite(runs[0]).all() and runs[0].tobytes() == runs[1].tobytes()


def test_any_number_of_threads_gives_the_same_bits() -> None:
    """Faults 125 and 126: chunks are cut by shape, each thread owns its elements; sizes that no thread count divides."""
    outs = [pg.softplus(pg.add(leaf(48, 1021), leaf(48))), pg.gelu(leaf(30011)), pg.mul(strided((1021, 48), (192, 4, 196032, 196032)), leaf(1021))]
    graph = pg.Graph(outs)
    values = feeds(graph)
    first, *others = (run(graph, values, threads=n, poison=True) for n in (1, 2, 7))
    assert all(a.tobytes() == b.tobytes() for other in others for a, b in zip(first, other, strict=True))


def test_two_leaves_over_one_array_are_one_memory() -> None:
    memory = np.arange(8, dtype=np.float32).view(np.uint8)
    whole, tail = pg.raw_tensor(memory, pg.dtype("f32"), [8], "whole"), pg.raw_tensor(memory[16:], pg.dtype("f32"), [4], "tail")
    before = pg.neg(whole)
    written = pg.cpy(f32(9, 9, 9, 9), tail)
    got, _ = pg.compute([pg.scale(before, 1.0), written])
    assert got.tolist() == [0, -1, -2, -3, -4, -5, -6, -7] and memory.view(np.float32).tolist() == [0, 1, 2, 3, 9, 9, 9, 9]


def test_an_op_of_ones_own_fuses() -> None:
    """One line for the expression, one for the reference: it broadcasts, fuses and takes strides like the table's ops."""

    @op("TEST_MISH", inputs="a")
    def test_mish(a: Tensor, *, s: float = 1.0) -> Spec:
        """a tanh(softplus(s a)) where a < 50."""
        return like(a)

    test_mish.pointwise = Pointwise("a * tanh(softplus(s * a)) if a < 5e1 else a", ("s",))
    test_mish.reference(lambda a, s: np.where(a < 50, a * np.tanh(np.log1p(np.exp(np.minimum(s * a, 50)))), a))
    try:
        y = pg.neg(test_mish(f32(-1.0, 0.5, 60.0, np.nan), s=2.0))
        assert len(group(pg.Graph([y]))) == 1
        np.testing.assert_allclose(pg.compute(y), pg.compute(y, backend="reference"), rtol=1e-6)
    finally:
        del OPS["TEST_MISH"]


@pytest.mark.parametrize("expr, dtype, match", [
    ("sin(a)", "f32", r"TEST_BAD: 'sin\(a\)' in the expression 'sin\(a\)'; legal for f32: a, numbers, \+ - \* /, x if y < z else w, sqrt, abs"),
    ("exp(a)", "f64", r"TEST_BAD: 'exp\(a\)'.*legal for f64: a, numbers, \+ - \* /, x if y < z else w, sqrt, abs$"),
    ("a ** 2", "f32", r"'a \*\* 2'"), ("a if a else 0", "f32", "'a if a else 0'"), ("a * k", "f32", "'k'")])
def test_an_expression_that_no_kernel_can_be_made_of(expr: str, dtype: str, match: str) -> None:
    @op("TEST_BAD", inputs="a")
    def test_bad(a: Tensor) -> Spec:
        """Not for use."""
        return like(a)

    test_bad.pointwise = Pointwise(expr)
    try:
        with pytest.raises(UnsupportedOp, match=match):
            pg.compute(test_bad(pg.tensor(np.ones(3, np.float64 if dtype == "f64" else np.float32))))
    finally:
        del OPS["TEST_BAD"]


# Fusion: random graphs, their kernels run as plain Python


class Interpreter:
    """Runs a plan step by step with the generated kernels as Python functions over an arena of bytes: every graph can be
    tried, as nothing is compiled. Memory starts as NaN; a store outside of the step's result fails."""

    def __init__(self, graph: pg.Graph, fuse: bool, reuse: bool) -> None:
        self.plan = make_plan(graph, lambda step: None, fuse=group if fuse else None, reuse=reuse)
        self.arena = np.full(self.plan.arena_bytes, 0xFF, np.uint8)

    def view(self, t: Tensor) -> np.ndarray:
        flat = self.arena[self.address(t):]
        assert t.dtype.np is not None
        return as_strided(flat[: len(flat) // t.dtype.nbytes * t.dtype.nbytes].view(t.dtype.np), t.ne[::-1], t.nb[::-1])

    def address(self, t: Tensor) -> int:
        return self.plan.offsets[id(t.root)] + t.offs

    def run(self) -> None:
        for step in self.plan.steps:
            node = step.nodes[-1]
            if node.op.pointwise is not None:
                self.pointwise(step)
            else:
                ins = (self.view(t) for t in node.src if t is not None)
                self.view(node.out)[...] = node.op.reference_fn(*ins, **node.params).reshape(node.out.ne[::-1])

    def pointwise(self, step: Step) -> None:
        launch = launch_of(step)
        out = step.nodes[-1].out
        room = range(self.address(out), self.address(out) + out.nbytes)

        def cell(p: int, i: int, dt: Any) -> np.ndarray:
            at = p + i * np.dtype(dt).itemsize
            return self.arena[at:at + np.dtype(dt).itemsize].view(dt)

        def store(p: int, i: int, v: Any) -> None:
            assert p + i * out.dtype.nbytes in room
            cell(p, i, out.dtype.np)[:] = f32_to_bf16(np.array([v])) if out.dtype is BF16 else v

        scope = {**launch.spec.fn.__globals__, "store": store, "at": lambda p, n: p + n, "if_less": lambda x, y, a, b: a if x < y else b}
        for name, bound in launch.spec.binds.items():
            if name.startswith("load"):
                scope[name] = self.loader(bound.name, cell)
            elif name != "store":
                scope[name] = self.function(*name.rsplit("_", 1))
        fn = FunctionType(launch.spec.fn.__code__, scope)
        args = [Arg(self.address(t), *t.ne, *t.nb) for t in launch.operands if t is not None]
        for i0 in range(0, launch.items, 7):
            fn(*args, *launch.params, i0, min(i0 + 7, launch.items))

    @staticmethod
    def function(name: str, kind: str) -> Callable[[Any], Any]:
        return lambda x: (np.float32 if kind == "f32" else np.float64)(getattr(np, name)(np.float64(x)))

    @staticmethod
    def loader(name: str, cell: Callable[[int, int, Any], np.ndarray]) -> Callable[[int, int], Any]:
        dt = {"ld_f32": "<f4", "ld_f64": "<f8", "ld_f16": "<f2", "ld_bf16": "<u2"}[name]
        if name == "ld_bf16":
            return lambda p, i: bf16_to_f32(cell(p, i, dt))[0]
        return lambda p, i: np.float64(cell(p, i, dt)[0]) if name == "ld_f64" else np.float32(cell(p, i, dt)[0])


DIM = st.sampled_from([1, 2, 3, 4, 6])


@st.composite
def operands(draw: st.DrawFn, ne: tuple[int, ...], whole: bool) -> Tensor:
    """A leaf that broadcasts to ne (`whole`: has just these dims), permuted, with gaps, or neither."""
    own = [n if whole else draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in ne]
    dtype = draw(st.sampled_from(["f32", "f32", "f64", "f16", "bf16"]))
    order = draw(st.permutations(range(4)))
    nb, step = [0] * 4, pg.dtype(dtype).nbytes
    for d in order:
        nb[d], step = step, step * (own[d] + draw(st.integers(0, 2)))
    return pg.tensor(own, dtype, nb=nb if draw(st.booleans()) else contiguous_nb(pg.dtype(dtype), (own[0], own[1], own[2], own[3])))


@st.composite
def graphs(draw: st.DrawFn) -> pg.Graph:
    """A random graph of pointwise nodes over one shape, with views, copies in place and several outputs."""
    ne = tuple(draw(DIM) for _ in range(4))
    pool = [draw(operands(ne, True)) for _ in range(draw(st.integers(1, 2)))]
    state = pg.tensor(ne)
    pool.append(state)
    for _ in range(draw(st.integers(2, 9))):
        a = draw(st.sampled_from(pool[-4:]))
        match draw(st.sampled_from(["unary", "function", "clamp", "leaf", "pool", "cast", "glu", "copy", "view", "transpose"])):
            case "unary":
                y = draw(st.sampled_from([pg.neg, pg.abs, pg.relu, pg.step, pg.sgn]))(a)
            case "function":
                y = draw(st.sampled_from([pg.tanh, pg.exp]))(pg.clamp(pg.add(a, pg.tensor(ne), type="f32"), -2.0, 2.0))
            case "clamp":
                y = pg.scale(pg.clamp(a, -1.5, 1.25), 0.75, -0.5)
            case "leaf":
                b = draw(operands(ne, False))
                b = draw(st.sampled_from([b, pg.neg(b)]))
                y = draw(st.sampled_from([pg.add, pg.sub, pg.mul]))(a, b, type=draw(st.sampled_from([None, None, "f32", "f64"])))
            case "pool":
                y = draw(st.sampled_from([pg.add, pg.sub]))(a, draw(st.sampled_from(pool)))
            case "cast":
                y = pg.cast(a, draw(st.sampled_from(["f32", "f64", "f16"])))
            case "glu":
                x = draw(operands((2 * ne[0], *ne[1:]), True))
                y = pg.add(a, pg.reglu(pg.cast(x, "f32") if x.dtype.name == "f64" else x, swapped=draw(st.booleans())))
            case "copy":
                pool.append(pg.neg(state))
                y = pg.cpy(pg.cast(a, "f32"), state)
            case "view":
                y = pg.reshape(a, list(ne)) if a.is_contiguous else pg.permute(a, 0, 1, 2, 3)
            case "transpose":
                y = pg.transpose(a) if ne[0] == ne[1] else pg.neg(a)
        pool.append(y)
    results = [t for t in pool if t.node is not None]
    return pg.Graph([pool[-1], *draw(st.lists(st.sampled_from(results), max_size=2))])


@settings(max_examples=300)
@given(graphs(), st.booleans())
def test_random_graphs(graph: pg.Graph, reuse: bool) -> None:
    values = feeds(graph)
    results = []
    for fuse in (True, False):
        machine = Interpreter(graph, fuse, reuse)
        for t, v in values.items():
            machine.view(t)[...] = f32_to_bf16(v) if t.dtype is BF16 else v
        machine.run()
        results.append([np.array(machine.view(t)) for t in graph.outputs])
    for t, a, b, w in zip(graph.outputs, *results, run(graph, values, "reference"), strict=True):
        assert a.tobytes() == b.tobytes()
        got = bf16_to_f32(a) if t.dtype is BF16 else a
        steps = 1e-2 if any(n.out.dtype.name in ("f16", "bf16") for n in graph.nodes) else 1e-5
        np.testing.assert_allclose(got.astype(np.float64), w, rtol=steps, atol=steps * 8)


def test_names_of_kernels_tell_the_chain() -> None:
    plan = open_backend("cpu").compile(pg.Graph(chain_of_bias_and_gate())).plan
    assert re.fullmatch(r"add\+silu\+mul\[rows\]", plan.steps[0].kernel_name)


@pytest.mark.parametrize("ne", ([40, 33], [7, 20], [64, 9, 3], [1, 5]), ids=str)
@pytest.mark.parametrize("kind", ("lower", "lower_diag", "upper_diag"))
def test_rows_of_a_triangle(kind: str, ne: list[int]) -> None:
    """Of a row of a lower triangle the elements outside are stored without being computed, where all that follows in the chain is the same for
    them; alone or in a chain, and where it is not the same, the values are the reference's."""
    x, w = pg.tensor(ne, name="x"), pg.tensor(ne, name="w")
    rng = np.random.default_rng(5)
    values = {x: rng.standard_normal(ne[::-1]).astype(np.float32), w: rng.standard_normal(ne[::-1]).astype(np.float32)}
    a = pg.scale(x, 1.5)
    t = pg.tri(a, kind, fill=-np.inf)
    for out in (t, pg.scale(pg.exp(t), 2.0, 0.5), pg.mul(pg.exp(t), w), pg.add(pg.exp(t), a)):
        given = {k: v for k, v in values.items() if k in pg.Graph([out]).leaves}
        fused, single = (pg.compute(out, given, fuse=f, poison=True) for f in (True, False))
        assert np.array_equal(fused, single)
        np.testing.assert_allclose(fused, pg.compute(out, given, backend="reference"), rtol=1e-5, atol=1e-6)


def test_an_output_may_be_a_view_of_what_a_chain_reads() -> None:
    """The chain is then not moved into the kernel that makes its input, as that is kept."""
    x = pg.tensor([16, 8])
    made = pg.rms_norm(x)
    outs = [pg.reshape(made, [8, 16]), pg.exp(made)]
    given = {x: np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)}
    for got, want in zip(pg.compute(outs, given, poison=True), pg.compute(outs, given, backend="reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
