"""The graph language: tensors, views, rules at build time, execution order, planning, ops from a user's script."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pyggml as pg
from pyggml.cases import Case, case, cases_of, f32
from pyggml.errors import DTypeError, GraphError, ParamError, ShapeError, UnsupportedOp
from pyggml.plan import make_plan
from pyggml.registry import OPS, Spec, like, op, require_type
from pyggml.tensor import contiguous_nb, shape4
from pyggml.testing import nmse, run_case


def test_tensor_dims_and_strides() -> None:
    x = pg.tensor([128, 5, 4, 3], "f16", name="x")
    assert x.ne == (128, 5, 4, 3) and x.nb == (2, 256, 1280, 5120) and x.nbytes == 15360 and x.n_rows == 60
    q = pg.raw_tensor(np.zeros(204, np.uint8), pg.dtype("q8_0"), [64, 3])
    assert q.nb[:2] == (34, 68) and q.nbytes == 204 and q.rows_contiguous and q.is_contiguous
    assert pg.tensor(np.zeros((2, 3, 4), np.int32)).ne == (4, 3, 2, 1)
    assert contiguous_nb(pg.dtype("f32"), shape4([3])) == (4, 12, 12, 12)


def frozen() -> pg.Tensor:
    """Memory that must not be written, as a mapped file's."""
    array = np.zeros((3, 2), np.float32)
    array.setflags(write=False)
    return pg.tensor(array, name="frozen")


@pytest.mark.parametrize(("make", "error", "match"), [
    (lambda: pg.tensor([0, 4]), ShapeError, r"ne \[0, 4\] must be 1 to 4 whole numbers >= 1"),
    (lambda: pg.tensor([1, 2, 3, 4, 5]), ShapeError, "1 to 4 whole numbers"),
    (lambda: pg.tensor([4], "f33"), DTypeError, "unknown type 'f33'; known: "),
    (lambda: pg.tensor(np.zeros((1,) * 5)), ShapeError, "an array of 5 dims"),
    (lambda: pg.tensor(np.zeros(3, bool)), DTypeError, "no type for NumPy arrays of bool"),
    (lambda: pg.tensor(np.zeros(3), "i32"), DTypeError, "float64 cannot be stored as i32"),
    (lambda: pg.tensor([8], "f32", nb=[3, 1, 1, 1]), ShapeError, "4 multiples of 4"),
    (lambda: pg.raw_tensor(np.zeros(3, np.uint8), pg.dtype("f32"), [4]), ShapeError, "needs 16 bytes"),
    (lambda: pg.raw_tensor(np.zeros(64, np.uint8)[::4], pg.dtype("f32"), [4]), ShapeError, "needs 16 bytes of uint8 in one dim"),
    (lambda: pg.tensor(np.zeros(3, np.float32), nb=[4, 12, 12, 12]), ShapeError, "nb was given with an array"),
    (lambda: pg.tensor([8], "f32", nb=[4, None, 32, 32]), ShapeError, "4 multiples of 4"),  # type: ignore[list-item]
    (lambda: pg.tensor(np.array(["a"]), "f32"), DTypeError, "an array of <U1 cannot be stored as f32"),
    (lambda: pg.tensor(np.array([300]), "i8"), DTypeError, "an array of int64 from 300 to 300 cannot be stored as i8"),
    (lambda: pg.fill(pg.tensor([3], "i8"), 300), ParamError, "FILL: c is 300; legal for i8: -128 to 127"),
    (lambda: pg.scale(pg.tensor([3]), 10**400), ParamError, "SCALE: s is"),
    (lambda: pg.permute(pg.tensor([3]), "a", 1, 2, 3), ParamError, "PERMUTE: axes are"),
    (lambda: pg.view(pg.tensor([4, 4]), [2, 2], 16), ShapeError, "VIEW: nb is 16; legal: 1 multiples of 4 from 0"),
    (lambda: pg.set_rows(frozen(), pg.tensor([2, 1]), pg.tensor([1], "i64")), ParamError, "SET_ROWS: dst lies in read-only memory .frozen.; it is written"),
    (lambda: pg.cpy(pg.tensor([2]), pg.view(frozen(), [2])), ParamError, "CPY: b lies in read-only memory"),
    (lambda: pg.add(pg.tensor([3]), np.zeros(3)), DTypeError, "ADD: b is ndarray; it must be a tensor"),
    (lambda: pg.add(pg.tensor([3])), ParamError, r"ADD: argument 'b' is missing; legal: add\("),
    (lambda: pg.cumsum(pg.tensor([3]), axis=1), ParamError, "CUMSUM: argument 'axis' is unknown"),
    (lambda: pg.cumsum(pg.tensor([3]), dim=4), ParamError, "CUMSUM: dim 4; legal: 0 to 3"),
    (lambda: pg.mul_mat(pg.tensor([4, 2]), pg.tensor([5, 2])), ShapeError, "MUL_MAT"),
    (lambda: pg.find_op("FOO"), ParamError, "unknown op 'FOO'; known: "),
    (lambda: pg.compute(pg.cumsum(pg.tensor([3])), backend="tpu"), ParamError, "backend 'tpu' is unknown; legal: cpu, reference, ggml, null"),
    (lambda: pg.Graph([3]), GraphError, "an output is int"),
])
def test_errors_come_when_the_node_is_built(make: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as e:
        make()  # type: ignore[operator]
    assert "\n" not in str(e.value)


def test_messages_are_one_line_whatever_names_hold() -> None:
    assert str(ShapeError("blk\n0\x1b[2J\u202e: é 中 🙂")) == "blk\\n0\\x1b[2J\\u202e: é 中 🙂"


def test_group_error_names_op_input_and_dims() -> None:
    t = pg.tensor
    with pytest.raises(ShapeError, match=r"SSM_SCAN: B has ne \[128, 8, 64, 1\]: n_group 8 must divide n_head 20"):
        pg.ssm_scan(t([128, 64, 20, 1]), t([64, 20, 64, 1]), t([20, 64, 1]), t([1, 20]), t([128, 8, 64, 1]), t([128, 8, 64, 1]), t([1], "i32"))


@pytest.mark.parametrize("backend", ("cpu", "reference"))
def test_compute(backend: str) -> None:
    rng = np.random.default_rng(0)
    x = pg.tensor([128, 5, 4, 3], "f32", name="x")
    a = rng.normal(size=(3, 4, 5, 128)).astype(np.float32)
    out = pg.compute(pg.cumsum(x, dim=1), {x: a}, backend=backend)
    assert out.shape == (3, 4, 5, 128) and nmse(out, np.cumsum(a, axis=-2, dtype=np.float64)) < 1e-12
    both = pg.compute([pg.scale(x, 2.0), pg.sum_rows(x)], {x: a}, backend=backend)
    assert isinstance(both, tuple) and nmse(both[0], 2 * a) == 0 and both[1].shape == (3, 4, 5, 1)
    with pytest.raises(ShapeError, match=r"x: an array of shape \(3, 4, 5\) was given; ne \[128, 5, 4, 3\] takes shape \(3, 4, 5, 128\)"):
        pg.compute(pg.cumsum(x), {x: a[..., 0]}, backend=backend)
    with pytest.raises(GraphError, match="inputs without data: x"):
        pg.compute(pg.cumsum(x), backend=backend)


@pytest.mark.parametrize("backend", ("cpu", "reference"))
def test_multiple_outputs_and_views(backend: str) -> None:
    a = np.arange(24, dtype=np.float32).reshape(4, 6)
    x = pg.tensor(a)
    part = pg.view(x, [3, 2], [x.nb[1]], 6 * 4 + 8)
    assert part.root is x and part.offs == 32
    twisted = pg.permute(pg.reshape(part, [3, 2]) if part.is_contiguous else part, 1, 0, 2, 3)
    got = pg.compute([part, pg.cont(twisted)], backend=backend)
    assert np.array_equal(got[0], a[1:3, 2:5]) and np.array_equal(got[1], a[1:3, 2:5].T)


@pytest.mark.parametrize("backend", ("cpu", "reference"))
def test_states_are_read_and_written_in_program_order(backend: str) -> None:
    state = pg.tensor(np.zeros((3, 4), np.float32), name="state")
    ids = pg.tensor(np.array([1], np.int32))
    before = pg.scale(state, 1.0)
    written = pg.set_rows(state, pg.tensor(np.full((1, 4), 7, np.float32)), ids)
    after = pg.scale(state, 1.0)                      # reads the root, not the op's output: still after the write
    chained = pg.scale(written, 2.0)
    again = pg.set_rows(state, pg.tensor(np.full((1, 4), 9, np.float32)), ids)
    outs = pg.compute([after, again, chained, before], backend=backend)
    assert not outs[3].any() and outs[0][1].tolist() == [7] * 4 and outs[2][1].tolist() == [14] * 4 and outs[1][1].tolist() == [9] * 4


def test_graph_order_names_stats_and_print() -> None:
    x = pg.tensor([8, 2], name="x")
    y = pg.exp(pg.scale(x, 2.0))
    y.name = "y-3"
    g = pg.Graph([y, pg.cont(pg.transpose(x))])
    assert [n.op.name for n in g.nodes] == ["SCALE", "EXP", "TRANSPOSE", "CONT"] and g.n_nodes == 4
    stats = g.stats()
    assert stats.by_op["EXP"] == 1 and stats.n_moves == 2 and stats.moves_share == 0.5 and stats.flops > 0
    assert "graph: 4 nodes, 1 leaves" in str(g) and "y-3" in str(g) and g.find("y-3") is y
    with pytest.raises(GraphError, match="no tensor named 'z'"):
        g.find("z")


def test_deep_graphs_need_no_recursion() -> None:
    h = pg.tensor([4])
    for _ in range(20_000):
        h = pg.scale(h, 1.0)
    assert pg.Graph([h]).n_nodes == 20_000


def test_plan_reuses_memory_and_keeps_what_is_needed() -> None:
    x = pg.tensor([1000], name="x")
    h, kept = x, None
    for i in range(50):
        h = pg.scale(h, 1.0)
        kept = h if i == 10 else kept
    assert kept is not None
    g = pg.Graph([h, kept])

    def choose(step: object) -> None:
        pass

    reused, apart = make_plan(g, choose), make_plan(g, choose, reuse=False)
    assert reused.arena_bytes == 4 * 4032 and apart.arena_bytes == 51 * 4032  # x, the kept one, two in turn
    assert all(reused.offsets[id(n.out)] != reused.offsets[id(kept)] for n in g.nodes[11:])
    places = sorted((apart.offsets[id(n.out)], n.out.nbytes) for n in g.nodes)
    assert all(a + size <= b for (a, size), (b, _) in zip(places, places[1:], strict=False))
    assert all(offset % 64 == 0 for offset in reused.offsets.values())


def test_planner_and_fusion_can_be_switched_off() -> None:
    rng = np.random.default_rng(1)
    a = rng.normal(size=(30, 40)).astype(np.float32)
    x = pg.tensor(a)
    y = pg.silu(pg.add(pg.mul(x, x), pg.scale(x, 0.5)))
    results = [pg.compute(y, fuse=f, reuse=r, poison=True) for f in (True, False) for r in (True, False)]
    assert all(np.array_equal(results[0], r) for r in results[1:])


def test_an_op_of_ones_own() -> None:
    """Reference alone is enough for the reference backend; a kernel makes it run on the CPU; cases make it testable."""

    @op("DOUBLE_SUM", inputs="x", limit=1e-12)
    def double_sum(x: pg.Tensor) -> Spec:
        """Twice the sum of each row."""
        require_type("DOUBLE_SUM", "x", x, pg.dtype("f32"))
        return Spec(x.dtype, (1, *x.ne[1:]))

    @double_sum.reference
    def _ref(x: np.ndarray) -> np.ndarray:
        return 2 * x.sum(-1, keepdims=True)

    @double_sum.cases
    def _cases() -> Iterator[Case]:
        yield case(f32(33, 4))

    a = np.ones((4, 33), np.float32)
    try:
        y = double_sum(pg.tensor(a))
        assert pg.compute(y, backend="reference").tolist() == [[66.0]] * 4
        with pytest.raises(UnsupportedOp, match="DOUBLE_SUM .*: no cpu kernel is registered"):
            pg.compute(y)
        pg.kernel("DOUBLE_SUM", "cpu")(double_sum_kernel)
        assert pg.compute(y, threads=2).tolist() == [[66.0]] * 4
        for c in cases_of(double_sum):
            got, want = run_case(c)
            assert nmse(got[0], want[0]) <= double_sum.limit
    finally:
        del OPS["DOUBLE_SUM"]


from pyggml.cpu.simd import at, ld_f32, st_f32  # noqa: E402 - a kernel's globals, as a user's script would have them


def double_sum_kernel(out, x, i0, i1):  # type: ignore[no-untyped-def]
    for i in range(i0, i1):
        row = at(x.p, i * x.nb1)
        s = 0.0
        for k in range(x.ne0):
            s += ld_f32(row, k)
        st_f32(at(out.p, i * out.nb1), 0, np.float32(2.0 * s))


def test_rules_may_not_lie() -> None:
    with pytest.raises(ParamError, match="must be the inputs"):
        op("BAD", inputs="a b")(lambda x: like(x))


def test_a_script_with_its_own_op_runs(tmp_path: Path, root: Path) -> None:
    """As a file of the user's: the kernel lives in __main__, which no other process can import."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    block = readme.split("<!-- own-op -->")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "own.py").write_text(block, encoding="utf-8")
    env = {"PYTHONPATH": str(root), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["api", "layer"])
def test_readme_block_runs(name: str, root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    block = readme.split(f"<!-- {name} -->")[1].split("```python\n")[1].split("```")[0]
    assert len(block.strip().splitlines()) <= 20
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_misuse_of_compute_ends_in_one_line() -> None:
    x = pg.tensor([3], name="x")
    with pytest.raises(GraphError, match="a key of feeds is str"):
        pg.compute(pg.sqr(x), {"x": np.ones(3)})  # type: ignore[dict-item]
    with pytest.raises(ParamError, match="backend cpu has no option 'thread'; legal: threads, level"):
        pg.compute(pg.sqr(x), {x: np.ones(3)}, thread=2)
    with pytest.raises(ShapeError, match="tensor: ne 3 must be"):
        pg.tensor(3)  # type: ignore[arg-type]
    assert pg.compute(pg.sqr(x), {x: [1, 2, 3]}, backend="reference", threads=2).tolist() == [1, 4, 9]  # type: ignore[dict-item]
    assert pg.Graph(pg.sqr(x)).n_nodes == 1 and {"cumsum", "cumsum_0", "load_model"} <= set(dir(pg))
