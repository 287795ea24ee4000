"""Real ggml through ctypes: every case against the reference and against our kernels, its refusals, and that nothing ends the process.

The pairs (op, reason) that ggml refuses are in tests/data/ggml_refusals.txt; after a change of cases or mappings,
`python tests/test_backend_ggml.py refusals` prints them anew.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strategies import batches

import pyggml as pg
from pyggml.backends import Backend, open_backend
from pyggml.cases import Case, Leaf, RandomDraw, all_cases, errors_of, random_case
from pyggml.dtypes import BF16, F16, F32, F64, I32, I64
from pyggml.errors import GraphError, KernelError, ParamError, PyggmlError, UnsupportedOp
from pyggml.graph import Graph
from pyggml.guards import stored_values
from pyggml.models.loader import architectures
from pyggml.registry import OPS, load_ops
from pyggml.tensor import Tensor
from pyggml.testing import fabricate, nmse

load_ops()
NOT_IN_GGML = {"REPEAT_INTERLEAVE", "SSD_SCAN"}
REFUSALS = Path(__file__).parent / "data" / "ggml_refusals.txt"
N_RANDOM = 30  # random cases of each op
MOST_ELEMENTS = 1 << 18  # `pyggml test-ops -b ggml` takes larger ones too
N_ODD = 1500  # cases with odd strides and types, in a process of their own

if __name__ != "__main__":
    pytest.importorskip("libggml", reason="the wheel libggml-python is not installed")


@pytest.fixture(scope="module")
def ggml() -> Backend:
    return open_backend("ggml", threads=2, poll=0, poison=True)


@pytest.fixture(scope="module")
def alone() -> Backend:
    """ggml on one thread, which waits for no other."""
    return open_backend("ggml", threads=1, poison=True)


def run(case: Case, backend: Backend, values: list[np.ndarray | None]) -> list[np.ndarray]:
    """Outputs of a case, and the tensor that it writes in place."""
    ins, outs = case.build()
    runner = backend.compile(Graph(outs))
    for t, value in zip(ins, values, strict=True):
        if t is not None and value is not None:
            runner.set(t, value)
    runner.run()
    node = outs[0].node
    assert node is not None
    written = [] if node.op.inplace is None else [node.src[node.op.inplace]]
    return [runner.get(t) for t in (*outs, *written) if t is not None]


def faults(case: Case, ggml: Backend) -> list[str]:
    """What is wrong with ggml's results of a case, held against the definitions (as ours are in test_ops)."""
    from pyggml.backends.ggml_compare import compare

    values = stored_values(case)
    got, want, limit, why = compare(case, values, run(case, ggml, values), run(case, open_backend("reference"), values))
    found = [nmse(g, w) for g, w in zip(got, want, strict=True)]
    return [f"{case}: NMSE {e:.2g}, limit {limit:.2g} {why}" for e in found if not e <= limit]


# Values


@pytest.mark.parametrize("cases", batches(c for c in all_cases() if not c.large and c.n_elements <= MOST_ELEMENTS))
def test_cases(cases: list[Case], alone: Backend) -> None:
    """All cases that ggml takes; which it does not, and why, is in the list of refusals."""
    assert [f for c in cases if alone.refuses(c.node()) is None for f in faults(c, alone)] == []


@pytest.mark.parametrize("name", sorted(OPS))
def test_random_cases(name: str, ggml: Backend) -> None:
    d = OPS[name]
    if d.random_fn is None:
        pytest.skip(f"{name} has no drawer of random cases")
    draw = RandomDraw(np.random.default_rng(len(name)))
    drawn = (random_case(d, draw) for _ in range(40 * N_RANDOM))
    taken = list(itertools.islice((c for c in drawn if ggml.refuses(c.node()) is None), N_RANDOM))
    if not taken:
        pytest.skip(f"ggml refuses {40 * N_RANDOM} random cases of {name}")
    assert [f for case in taken for f in faults(case, ggml)] == []


@pytest.mark.parametrize("arch", architectures())
def test_model_graph_in_real_ggml(arch: str, tmp_path: Path) -> None:
    """A whole model in scan form, prompt in two steps and one token more, states and KV cache written in place. In FLASH_ATTN_EXT, ggml rounds
    q and sums to float16."""
    fabricate(arch, tmp_path / "m.gguf")
    model = pg.load_model(tmp_path / "m.gguf")
    ids = np.random.default_rng(1).integers(0, 200, 23).tolist()
    for flash_attn, limit in ((False, 1e-6), (True, 1e-5)):
        logits = {}
        for backend, options in (("ggml", {"poll": 0}), ("cpu", {})):
            ctx = model.context(backend=backend, threads=2, mamba2="scan", n_ctx=64, n_ubatch=16, flash_attn=flash_attn, **options)
            logits[backend] = np.concatenate([ctx.decode(ids, all_logits=True), ctx.decode([7], all_logits=True)])
        assert nmse(logits["ggml"], logits["cpu"]) < limit


# Where the two differ beyond rounding: op, input, ggml's result, ours.
DIFFERENCES: list[tuple[str, Callable[[Tensor], Tensor], list[float], list[float], list[float]]] = [
    ("relu", pg.relu, [np.nan, -1.0], [0.0, 0.0], [np.nan, 0.0]),
    ("clamp", lambda t: pg.clamp(t, -1.0, 1.0), [np.nan, 3.0], [1.0, 1.0], [np.nan, 1.0]),
    ("silu", pg.silu, [-np.inf, 0.0], [np.nan, 0.0], [0.0, 0.0]),
    ("expm1", pg.expm1, [1e-8], [0.0], [1e-8]),
    ("softplus", pg.softplus, [-17.0], [0.0], [4.1399e-8]),
    ("gelu", pg.gelu, [-10.0, 1e-8], [0.0, 0.0], [-1.204e-37, 5e-9]),
    ("cast", lambda t: pg.cast(t, "i32"), [np.nan, 3e9, -3e9, -1.5], [-(2**31)] * 3 + [-1], [0, 2**31 - 1, -(2**31), -1]),
    ("soft_max", pg.soft_max, [-np.inf, -np.inf], [np.nan, np.nan], [0.0, 0.0]),
    ("rms_norm", pg.rms_norm, [1e20, -1e20], [0.0, -0.0], [1.0, -1.0]),
    ("mean", pg.mean, [3e38, 3e38], [np.inf], [3e38]),
    ("cumsum", pg.cumsum, [3e38, 3e38, -3e38], [3e38, np.inf, np.inf], [3e38, np.inf, 3e38]),
    ("top_k", lambda t: pg.top_k(t, 3), [2.0, 1.0, 4.0, 3.0], [3, 2, 0], [2, 3, 0]),
]


@pytest.mark.parametrize(("name", "op", "x", "theirs", "ours"), DIFFERENCES, ids=[d[0] for d in DIFFERENCES])
def test_documented_difference(name: str, op: Callable[[Tensor], Tensor], x: list[float], theirs: list[float], ours: list[float]) -> None:
    graph_input = pg.tensor(np.array(x, np.float32))
    for backend, want in (("ggml", theirs), ("cpu", ours)):
        np.testing.assert_allclose(np.atleast_1d(pg.compute(op(graph_input), {}, backend=backend, threads=1)), want, rtol=1e-3)


# Refusals


def refusals(backend: Backend) -> Counter[str]:
    """`OP: reason` of every case that ggml refuses, with the number of cases."""
    found: Counter[str] = Counter()
    for c in all_cases():
        why = backend.refuses(c.node())
        if why is not None:
            found[f"{c.op.name}: {why}"] += 1
    return found


def test_refusals_are_the_known_ones(ggml: Backend) -> None:
    found, known = set(refusals(ggml)), set(REFUSALS.read_text("utf-8").splitlines())
    assert not found - known, "cases that ggml refuses and the list does not hold"
    assert not known - found, "refusals of the list that no case meets"


def test_every_op_that_ggml_has_runs(ggml: Backend) -> None:
    runs = {c.op.name for c in all_cases() if ggml.refuses(c.node()) is None}
    assert {name for name in OPS if OPS[name].family != "user"} - runs == NOT_IN_GGML


def test_graph_with_refused_nodes_names_them(ggml: Backend) -> None:
    x = pg.tensor([4, 3], name="x")
    with pytest.raises(UnsupportedOp, match=r"^CUMSUM \(node_0\): dim is not 0; ggml sums along dim 0; TRI \(node_1\): x is not square"):
        ggml.compile(Graph([pg.tri(pg.cumsum(x, dim=1))]))


def test_an_op_of_the_users_own_is_refused(ggml: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "OWN", None)
    own = pg.op("OWN", inputs="x")(lambda x: pg.like(x))
    assert ggml.refuses(own(pg.tensor([3])).node) == "ggml has no such op"


def test_a_function_that_the_library_lacks_is_a_refusal(ggml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ggml.lib._bound, "ggml_expm1")
    assert ggml.refuses(pg.expm1(pg.tensor([3])).node) == f"libggml {ggml.lib.version} has no ggml_expm1"
    assert ggml.refuses(pg.exp(pg.tensor([3])).node) is None


# Indices: ggml aborts on a bad one


@pytest.mark.parametrize("case", [e.as_case() for d in OPS.values() if d.name not in NOT_IN_GGML for e in errors_of(d) if e.error is KernelError],
                         ids=lambda c: c.op.name)
def test_bad_index_ends_in_an_error(case: Case, ggml: Backend) -> None:
    with pytest.raises(KernelError, match=f"^{case.op.name} .*bad index"):
        run(case, ggml, stored_values(case))


@pytest.mark.parametrize("ids", [[0, 5], [-1, 0]])
def test_bad_constant_index_ends_in_an_error(ids: list[int], ggml: Backend) -> None:
    runner = ggml.compile(Graph([pg.get_rows(pg.tensor(np.zeros((5, 2), np.float32)), pg.tensor(np.array(ids, np.int32)))]))
    for _ in range(2):
        with pytest.raises(KernelError, match="GET_ROWS .*: bad index"):
            runner.run()


def test_computed_indices(ggml: Backend) -> None:
    x, scores = pg.tensor([4, 6], name="x"), pg.tensor([6], name="scores")
    best = pg.get_rows(x, pg.top_k(scores, 2))
    assert ggml.refuses(best.node) is None
    runner = ggml.compile(Graph([best]))
    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    runner.set(x, rows)
    runner.set(scores, np.array([0, 9, 1, 8, 2, 3], np.float32))
    runner.run()
    assert sorted(runner.get(best)[0, 0, :, 0]) == [rows[1, 0], rows[3, 0]]
    too_few = pg.get_rows(pg.tensor([4, 5]), pg.top_k(scores, 2))
    made = pg.get_rows(x, pg.cast(scores, "i32"))
    for t in (too_few, made):
        assert str(ggml.refuses(t.node)).startswith("ids are computed in the graph")


def test_indices_that_the_graph_writes_are_refused(ggml: Backend) -> None:
    ids = pg.tensor(np.zeros(2, np.int32), name="ids")
    written = pg.cpy(pg.tensor([2], "i32"), ids)
    with pytest.raises(UnsupportedOp, match="GET_ROWS .*: ids are written in the graph"):
        ggml.compile(Graph([written, pg.get_rows(pg.tensor([3, 4]), ids)]))


# Memory


def test_writes_in_place_keep_their_order(ggml: Backend) -> None:
    state = pg.tensor(np.zeros((3, 2), np.float32), name="state")
    x, ids = pg.tensor([2, 1], name="x"), pg.tensor([1], "i64", name="ids")
    before = pg.scale(state, 2.0)
    after = pg.set_rows(state, x, ids)
    read = pg.add(state, state)
    runner = ggml.compile(Graph([read, before, after]))
    runner.set(x, np.array([[5.0, 7.0]], np.float32))
    for row in (0, 2):
        runner.set(ids, np.array([row]))
        old = state.data.copy()
        runner.run()
        assert np.array_equal(runner.get(before)[0, 0], 2 * old)
        assert np.array_equal(state.data[row], [5, 7])  # the array that the user holds
        assert np.array_equal(runner.get(read)[0, 0], 2 * state.data)
        assert np.array_equal(runner.get(after)[0, 0], state.data)


def test_results_that_are_overwritten_are_not_read(ggml: Backend) -> None:
    x = pg.tensor([64, 8], name="x")
    steps = [x]
    for _ in range(5):
        steps.append(pg.scale(steps[-1], 2.0))
    data = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    runner = ggml.compile(Graph([steps[-1]]))
    runner.set(x, data)
    runner.run()
    assert np.array_equal(runner.get(steps[-1])[0, 0], data * 32)
    with pytest.raises(GraphError, match="its memory is used again; legal: outputs, inputs, and all with reuse=False"):
        runner.get(steps[2])
    every = open_backend("ggml", threads=1, poll=0, reuse=False).compile(Graph([steps[-1]]))
    every.set(x, data)
    every.run()
    for i, t in enumerate(steps):
        assert np.array_equal(every.get(t)[0, 0], data * 2**i)
    assert runner.plan.arena_bytes < every.plan.arena_bytes


def test_memory_is_written_by_set_alone(ggml: Backend) -> None:
    fixed, x = pg.tensor(np.arange(3, dtype=np.float32), name="fixed"), pg.tensor([3], name="x")
    total = pg.add(x, fixed)
    runner = ggml.compile(Graph([total]))
    runner.set(x, np.ones(3, np.float32))
    runner.run()
    assert runner.get(total).ravel().tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        runner.view(x)[...] = 2
    for t, kind in ((total, "ADD"), (fixed, "a constant"), (pg.tensor([3], name="other"), "a leaf")):
        with pytest.raises(GraphError, match=rf"\({kind}\) was given a value; it is not an input of this graph"):
            runner.set(t, np.ones(3, np.float32))
    with pytest.raises(GraphError, match="is not part of this graph"):
        runner.get(pg.tensor([3], name="other"))


def test_one_of_two_outputs(ggml: Backend) -> None:
    """The state of a scan that nothing asks for has no place, and the packed result of ggml's op is taken apart right."""
    rng = np.random.default_rng(3)
    s, x, b = (pg.tensor(rng.normal(size=shape).astype(np.float32)) for shape in ((1, 2, 3, 4), (1, 5, 2, 3), (1, 5, 1, 4)))
    dt, decay = pg.tensor(rng.normal(size=(1, 5, 2)).astype(np.float32)), pg.tensor(-np.ones((2, 1), np.float32))
    y, state = pg.ssm_scan(s, x, dt, decay, b, b, pg.tensor(np.zeros(1, np.int32)))
    for outputs in ([y], [state], [pg.scale(state, 1.0)], [state, y]):
        for t, got in zip(outputs, pg.compute(outputs, {}, backend="ggml", threads=2, poll=0, poison=True), strict=True):
            assert nmse(got, pg.compute(t, {}, backend="reference")) < 1e-12


def test_graph_of_leaves_alone(ggml: Backend) -> None:
    x = pg.tensor([3], name="x")
    assert pg.compute(x, {x: np.arange(3, dtype=np.float32)}, backend="ggml").tolist() == [0, 1, 2]
    assert pg.compute(pg.pad(x, np.int64(1)), {x: np.ones(3, np.float32)}, backend="ggml").tolist() == [1, 1, 1, 0]


def test_clamp_leaves_its_input_alone(ggml: Backend) -> None:
    x = pg.tensor(np.array([-2.0, 0.5, 2.0], np.float32))
    runner = ggml.compile(Graph([pg.clamp(x, -1.0, 1.0)]))
    runner.run()
    assert x.data.tolist() == [-2.0, 0.5, 2.0]


def test_steps_name_ggmls_functions(ggml: Backend) -> None:
    a, b = pg.tensor([8, 4]), pg.tensor([8, 3])
    plan = ggml.compile(Graph([pg.scale(pg.mul_mat(a, b), 2.0), pg.mul_mat(pg.transpose(pg.tensor([4, 8])), b)])).plan
    assert [s.kernel_name for s in plan.steps] == ["ggml_mul_mat", "ggml_scale_bias", "ggml_cont+ggml_mul_mat"]


def test_idle_threads_sleep_and_wake(ggml: Any) -> None:
    x = pg.tensor(np.ones((64, 8), np.float32))
    runner = ggml.compile(Graph([pg.exp(x)]))
    for _ in range(3):
        runner.run()
        ggml.pause()
    ggml.pause()
    runner.run()


def test_backends_come_and_go() -> None:
    x = pg.tensor(np.ones((4, 8), np.float32))
    for threads in (1, 2, 3, 7):
        for _ in range(5):
            assert pg.compute(pg.sum_rows(x), {}, backend="ggml", threads=threads, poll=0).tolist() == [[8.0]] * 4


# The library


@pytest.mark.parametrize(("options", "message"), [({"threads": 0}, "threads: 0; legal: 1 to 512"), ({"threads": True}, "threads: True"),
                                                  ({"threads": 2.0}, "threads: 2.0"), ({"poll": 101}, "poll: 101; legal: 0 to 100")])
def test_bad_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamError, match=message):
        open_backend("ggml", **options)


@pytest.fixture
def fresh_load(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    from pyggml.backends import ggml_lib

    return ggml_lib.load.__wrapped__


def test_wheel_is_absent(fresh_load: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ParamError, match=r"^backend 'ggml' needs the wheel libggml-python, which is not installed: pip install 'pyggml\[ggml\]'$"):
        fresh_load()


def test_wheel_of_another_layout(fresh_load: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("libggml", tmp_path / "__init__.py", submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ParamError, match="no library ggml-base in "):
        fresh_load()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libggml-base.so").write_bytes(b"no library")
    with pytest.raises(ParamError, match="libggml-base.so cannot be loaded on this machine"):
        fresh_load()


def test_library_of_another_abi(fresh_load: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from pyggml.backends import ggml_lib

    monkeypatch.setattr(ggml_lib, "_OBJECT_BYTES", 48)
    with pytest.raises(ParamError, match="has tensors of 368 bytes, this backend knows those of 384"):
        fresh_load()
    monkeypatch.setitem(ggml_lib.FUNCTIONS, "ggml_gone", (None, ()))
    with pytest.raises(ParamError, match="this libggml has no ggml_gone; install the wheel"):
        fresh_load()


def test_library_for_another_cpu(fresh_load: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from pyggml.backends import ggml_lib

    if ggml_lib.machine() != "x86_64":
        pytest.skip("instruction sets are asked for on x86-64 alone")
    monkeypatch.setattr(ggml_lib, "host_features", lambda: frozenset({"avx"}))
    with pytest.raises(ParamError, match="is built for a CPU with .*avx2.*, which this one lacks"):
        fresh_load()


# Nothing ends the process


def odd(x: Leaf | None, rng: np.random.Generator) -> Leaf | None:
    """The leaf with other strides: dims in any order in memory, gaps, rows that overlap, strides of dims of size 1 that mean nothing; or of
    another type."""
    if x is None or rng.random() < 0.25:
        return x
    dt = x.dtype
    if not dt.is_quantized and rng.random() < 0.15:
        dt = (F32, F16, BF16, F64, I32, I64)[rng.integers(6)]
    order = [0, *(rng.permutation(3) + 1)] if dt.is_quantized or rng.random() < 0.6 else rng.permutation(4)
    nb, stride = [0] * 4, dt.nbytes
    for i in map(int, order):
        n = x.ne[i] // dt.block if i == 0 else x.ne[i]
        if n == 1 and i > 0 and rng.random() < 0.3:
            nb[i] = dt.nbytes * int(rng.integers(0, 5))
            continue
        nb[i] = stride
        stride = stride * n + dt.nbytes * int(rng.integers(0, 4)) * int(rng.random() < 0.2)
    if rng.random() < 0.06:
        nb[int(rng.integers(1, 4))] = 0
    return Leaf(dt, x.ne, (nb[0], nb[1], nb[2], nb[3]), x.fill)


def survive(n_odd: int) -> None:
    """Run every case that must fail, and odd ones; each is printed before it runs, so the last line tells which one ended the process."""
    backend = open_backend("ggml", threads=1, poison=True)
    cases = [c for c in all_cases() if not c.large]
    bad = [e.as_case() for d in OPS.values() for e in errors_of(d)]
    rng = np.random.default_rng(7)
    small = [c for c in cases if c.op.cost_of(c.node()).nbytes < 1 << 20]
    odds = [replace(c, inputs=tuple(odd(x, rng) for x in c.inputs), shown=None) for c in (small[rng.integers(len(small))] for _ in range(n_odd))]
    ran = 0
    for case in (*bad, *odds):
        print(case, flush=True)
        try:
            if backend.refuses(case.node()) is None:
                run(case, backend, stored_values(case))
                ran += 1
        except PyggmlError:
            continue
    print(f"ran {ran} of {n_odd}")  # of the odd ones: those that must fail never run


def test_no_case_ends_the_process(root: Path) -> None:
    code = f"import sys; sys.path.insert(0, 'tests'); import test_backend_ggml as t; t.survive({N_ODD})"
    env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=280, env=env)
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    assert done.returncode == 0, f"{last}\n{done.stderr[-2000:]}"
    ran, total = (int(word) for word in last.split() if word.isdigit())
    assert ran > total / 2


if __name__ == "__main__":
    print("\n".join(sorted(refusals(open_backend("ggml", threads=1)))))
