"""Regions: the bits of steps run slice by slice are those of the steps run whole, on any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from strategies import batches

import pyggml as pg
from pyggml import registry
from pyggml.backends import cpu as cpu_backend
from pyggml.backends import open_backend
from pyggml.cases import Case, all_cases, random_blocks
from pyggml.cpu import regions
from pyggml.cpu.level import host_level, level_features
from pyggml.cpu.regions import Region, all_cut, can_be_cut
from pyggml.cpu.simd import at, bad_index, ld_f32, st_f32
from pyggml.cpu.slices import Axis, axis_of, cut, dims_along, packed
from pyggml.cpu.tiles import FASTER_ON
from pyggml.dtypes import Q8_0
from pyggml.errors import KernelError, UnsupportedOp
from pyggml.graph import Graph
from pyggml.guards import stored_values
from pyggml.models.ssd import ssd_graph
from pyggml.plan import Plan, Step
from pyggml.registry import find_op, load_kernels
from pyggml.tensor import Tensor

Values = dict[Tensor, np.ndarray]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions and inner regions however little they save."""
    for limit in ("LARGE", "WORTH", "INNER_FROM", "INNER_LARGE", "INNER_WORTH"):
        monkeypatch.setattr(regions, limit, 1)


def results(outs: Sequence[Tensor], values: Values, **options: Any) -> tuple[list[bytes], Plan]:
    """Bytes of a graph's outputs, and its plan."""
    runner = open_backend("cpu", poison=True, **options).compile(Graph(outs))
    for t, v in values.items():
        runner.set(t, v)
    runner.run()
    return [runner.get(t).tobytes() for t in outs], runner.plan


def parts(plan: Plan) -> list[list[str]]:
    """The ops of each region's steps."""
    return [["+".join(n.op.name for n in s.nodes) for s in step.leaves()] for step in plan.steps if step.inside]


def inner(plan: Plan) -> list[list[str]]:
    """The ops of each inner region's steps."""
    return [["+".join(n.op.name for n in s.nodes) for s in part.inside] for step in plan.steps for part in step.inside if part.inside]


def same_bits(outs: Sequence[Tensor], values: Values, threads: Sequence[int] = (1, 2, 7)) -> Plan:
    """The plan with regions, whose results are checked against those without."""
    want, whole = results(outs, values, threads=1, strips=False)
    assert not parts(whole)
    for n in threads:
        got, plan = results(outs, values, threads=n)
        assert got == want, f"{n} threads: {parts(plan)}"
    return results(outs, values, threads=1)[1]


def normal(t: Tensor, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(t.ne[::-1]).astype(np.float32)


# Slices of tensors


def elements(t: Tensor) -> np.ndarray:
    """Where each element of a tensor lies, in NumPy order."""
    at = np.full(t.ne[::-1], t.offs)
    for d in range(4):
        at += np.arange(t.ne[d]).reshape([-1 if 3 - d == axis else 1 for axis in range(4)]) * t.nb[d]
    return at


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=4, max_size=4), st.integers(1, 3), st.permutations(range(4)), st.data())
def test_views_that_follow_an_axis_have_the_same_slices(ne: list[int], dim: int, order: list[int], data: st.DataObject) -> None:
    """Against the places of every element: slice i of the view touches what slice i of the memory holds, all of it or some."""
    if ne[dim] == 1:
        return
    root = pg.tensor(ne)
    t: Any = pg.permute(root, *order)
    if data.draw(st.booleans()) and t.is_contiguous:
        t = pg.reshape(t, [t.ne[0] * t.ne[1], t.ne[2], t.ne[3]])
    if data.draw(st.booleans()):
        d = data.draw(st.integers(0, 3))
        first = data.draw(st.integers(0, t.ne[d] - 1))
        t = pg.view(t, [n - first * (k == d) for k, n in enumerate(t.ne)], list(t.nb[1:]), first * t.nb[d]) if t.nb[0] == 4 else t
    axis = axis_of(root, (dim,))
    assert axis is not None
    dims = dims_along(t, axis)
    index = elements(t) // axis.stride % axis.length
    if dims is None:
        return
    assert len(dims) == 1 and t.ne[dims[0]] == axis.length
    want = np.arange(axis.length).reshape([-1 if 3 - dims[0] == k else 1 for k in range(4)])
    assert np.array_equal(index, np.broadcast_to(want, index.shape))
    for size in (1, axis.length):
        c = cut(t, t.ne, dims, size, False)
        assert c is not None
        small = packed(root, axis, size, None, tuple(size if d == dim else n for d, n in enumerate(root.ne)))  # type: ignore[arg-type]
        view = packed(t, axis, size, small, c.ne)
        whole = np.take(elements(root), range(size), axis=3 - dim)  # where what slice 0 holds lies in the whole
        place = np.full(small.nbytes // 4, -1)
        place[elements(small) // 4] = whole
        assert np.array_equal(place[elements(view) // 4], np.take(elements(t), range(size), axis=3 - dims[0]))
        gaps = [d for d in range(4) if view.ne[d] > 1 and t.nb[d] > 4]
        assert all(view.nb[d] > 4 for d in gaps)


def test_two_dims_of_one_axis() -> None:
    """Heads split into groups and heads of a group: cut within groups; what a group shares is passed on from group to group."""
    heads = pg.tensor([8, 12, 5])
    axis = axis_of(heads, (1,))
    assert axis == Axis(32, 12)
    split = pg.reshape(heads, [8, 4, 3, 5])
    assert dims_along(split, axis) == (1, 2)
    assert cut(split, split.ne, (1, 2), 2, False) == ((8, 2, 1, 5), 64, 1)
    assert cut(split, split.ne, (1, 2), 3, False) is None
    shared = pg.tensor([8, 1, 3, 5])
    assert cut(shared, split.ne, (1, 2), 2, False) == ((8, 1, 1, 5), 32, 2)
    assert cut(pg.tensor([8, 4, 1, 5]), split.ne, (1, 2), 2, False) is None
    groups = pg.tensor([8, 3, 5])
    assert cut(groups, heads.ne, (1,), 2, True) == ((8, 1, 5, 1), 32, 2)
    assert cut(groups, heads.ne, (1,), 8, True) == ((8, 2, 5, 1), 64, 1)
    assert cut(groups, heads.ne, (1,), 3, True) is None
    assert cut(groups, heads.ne, (1,), 2, False) is None
    assert dims_along(pg.view(heads, [8, 11, 5], list(heads.nb[1:3]), 32), axis) is None
    assert dims_along(pg.reshape(heads, [96, 5]), axis) is None


# Ops


def whole_step_regions(dim: int, size: int) -> Callable[..., list[Step]]:
    """In place of form_regions: each step by itself, cut along one dim."""
    def form(graph: Graph, steps: list[Step], takes: Callable[..., bool], nests: Any, threads: int) -> list[Step]:
        made = []
        for s in steps:
            region = Region([s], [(dim,)], {}, set(), s.outs[0].ne[dim], size)
            ok = can_be_cut(s, (dim,)) and s.outs[0].ne[dim] % size == 0 and all_cut(region, size) and takes(s, (dim,), size)
            made.append(Step(s.nodes, s.ins, s.outs, kernel=region, inside=[s]) if ok else s)
        return made
    return form


CUT = [c for c in all_cases() if not c.perf and c.node().out.n_elements < 1 << 18 and any(c.node().out.ne[d] > 1 for d in c.op.sliceable(c.node()))]


def test_ops_that_are_cut() -> None:
    """Every op that claims to be has cases here."""
    assert {c.op.name for c in CUT} >= {"MUL_MAT", "CUMSUM", "SUM_ROWS", "MEAN", "RMS_NORM", "NORM", "SOFT_MAX", "TRI", "CONT", "CONCAT", "REPEAT",
                                        "REPEAT_INTERLEAVE", "PAD", "ADD", "MUL", "EXP", "CAST", "SWIGLU", "FILL"}


@pytest.mark.parametrize("cases", batches(CUT))
def test_slices_have_the_bits_of_the_whole(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op, along each dim that it says it can be cut along."""
    for case in cases:
        node = case.node()
        try:
            want = one_case(case, threads=1, strips=False)
        except UnsupportedOp:
            continue
        for d in node.op.sliceable(node):
            n = node.out.ne[d]
            for size in {1, max(s for s in range(1, n) if n % s == 0)} if n > 1 else ():
                monkeypatch.setattr(cpu_backend, "form_regions", whole_step_regions(d, size))
                assert one_case(case, threads=2) == want, (str(case), d, size)


def one_case(case: Case, **options: Any) -> list[bytes]:
    ins, outs = case.build(1)
    given = zip(ins, stored_values(case, 1), strict=True)
    return results(outs, {t: v for t, v in given if t is not None and v is not None and t.data is None}, **options)[0]


# Graphs


def ssd(n_tokens: int, n_seqs: int, chunk: int, n_group: int, n_head: int = 12, **options: Any) -> tuple[list[Tensor], Values]:
    """The chunked state-space product in primitive ops, and values of its inputs."""
    d_state, head_dim = 32, 16
    act = pg.tensor([head_dim * n_head + 2 * n_group * d_state, n_tokens, n_seqs], name="act")
    dt, a, d = pg.tensor([n_head, n_tokens, n_seqs]), pg.tensor([1, n_head]), pg.tensor([1, n_head])
    state = pg.tensor([d_state, head_dim, n_head, n_seqs])
    values = {t: normal(t, i) for i, t in enumerate((act, dt, a, d, state))}
    values[dt], values[a] = np.abs(values[dt]) * 0.1, -np.abs(values[a])
    return list(ssd_graph(act, dt, a, d, state, n_group, chunk, **options)), values


@pytest.mark.parametrize(("n_seqs", "n_group"), [(1, 1), (3, 1), (2, 3), (1, 12)], ids=str)
def test_ssd(n_seqs: int, n_group: int, eager: None) -> None:
    """All products of a head in one region, whatever heads share a group."""
    plan = same_bits(*ssd(128, n_seqs, 16, n_group))
    assert sum(s == "MUL_MAT" for region in parts(plan) for s in region) >= 4, parts(plan)


BF16 = pytest.mark.skipif(not any(f <= level_features(host_level()) for f in FASTER_ON), reason="this CPU has no fast products in bfloat16")


@BF16
@pytest.mark.parametrize("n_group", [1, 3])
def test_ssd_in_bfloat16(n_group: int, eager: None) -> None:
    plan = same_bits(*ssd(256, 2, 32, n_group, precision="bf16"))
    assert sum(p.kernel_name == "mul_mat_small" for s in plan.steps for p in s.leaves()) == 3, str(plan)


@BF16
def test_what_a_kernel_has_prepared(eager: None) -> None:
    """Tiles that a product has made of its columns beforehand are made for each slice."""
    rng = np.random.default_rng(3)
    a = pg.raw_tensor(random_blocks(Q8_0, 64 * 48 * 6 // 32, rng), Q8_0, (64, 48, 6), "a")
    x = pg.tensor([64, 80, 6])
    plan = same_bits([pg.rms_norm(pg.mul_mat(a, pg.exp(x)))], {x: normal(x)})
    assert [p.kernel_name for s in plan.steps for p in s.leaves()] == ["exp[flat]", "pack_tokens+mul_mat_panels", "rms_norm_rows"]


def test_large_ssd() -> None:
    """With the thresholds as they are; the values between the products take no memory of the arena."""
    outs, values = ssd(2048, 1, 64, 1)
    plan = same_bits(outs, values)
    assert len(parts(plan)) == 1 and plan.arena_bytes < results(outs, values, threads=1, strips=False)[1].arena_bytes / 2
    assert not parts(same_bits(*ssd(64, 1, 64, 1)))  # too small to be worth it


def test_attention(eager: None) -> None:
    """Scores, softmax and values of a head, of heads that share keys, with a mask for all of them."""
    q, k, v = pg.tensor([32, 40, 6]), pg.tensor([32, 40, 2]), pg.tensor([32, 40, 2])
    mask = pg.tensor([40, 40])
    p = pg.soft_max(pg.mul_mat(k, q), mask, scale=0.2)
    out = pg.cont(pg.permute(pg.mul_mat(pg.permute(v, 1, 0, 2, 3), p), 0, 2, 1, 3))
    values = {t: normal(t, i) for i, t in enumerate((q, k, v, mask))}
    assert parts(same_bits([out], values)) == [["MUL_MAT", "SOFT_MAX", "MUL_MAT", "CONT"]]


def test_slices_that_no_cache_holds() -> None:
    """Scores of 2 heads, 16 MiB each, are not cut by head; what follows the product is, by row."""
    q, k = pg.tensor([8, 2048, 2]), pg.tensor([8, 2048, 2])
    plan = open_backend("cpu", threads=1).plan(Graph([pg.sum_rows(pg.exp(pg.mul_mat(k, q)))]))
    assert parts(plan) == [["EXP", "SUM_ROWS"]] and [s.nodes[0].op.name for s in plan.steps if not s.inside] == ["MUL_MAT"]


def test_a_sum_along_the_axis_ends_a_region(eager: None) -> None:
    """Two regions with the sum between them; a value that both read, and one that is an output, are whole."""
    x, y = pg.tensor([16, 8, 24]), pg.tensor([16, 8, 24])
    both = pg.exp(pg.mul_mat(x, y))
    first = pg.mul_mat(both, both)
    total = pg.cumsum(first, dim=2)
    last = pg.mul_mat(pg.cont(pg.permute(total, 1, 0, 2, 3)), both)
    plan = same_bits([last, first], {x: normal(x, 1) * 0.1, y: normal(y, 2) * 0.1})
    assert [s.nodes[0].op.name for s in plan.steps if not s.inside] == ["CUMSUM"] and len(parts(plan)) == 2, parts(plan)


def test_no_step_passes_a_write_in_place(eager: None) -> None:
    """What was read before a write and after it stays apart."""
    pool = pg.tensor(np.ones((4, 8, 16), np.float32), name="pool")
    x = pg.tensor([16, 8, 4])
    before = pg.rms_norm(pg.mul(pool, x))
    stored = pg.cpy(pg.scale(x, 2.0), pool)
    after = pg.rms_norm(pg.mul(stored, before))
    last = pg.cumsum(after)
    runner = open_backend("cpu", threads=2).compile(Graph([last, before]))
    assert len(parts(runner.plan)) == 2
    value = normal(x)
    runner.set(x, value)
    runner.run()

    def norm(v: Any) -> Any:
        return v / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(runner.get(before), norm(value.astype(np.float64)), rtol=1e-5)
    wide = value.astype(np.float64)
    np.testing.assert_allclose(runner.get(last), np.cumsum(norm(2 * wide * norm(wide)), axis=-1), rtol=1e-4, atol=1e-5)


def test_an_operand_that_repeats_along_the_axis(eager: None) -> None:
    """A view with stride 0 has as many elements for a slice as the slice, not as the whole."""
    one, x, y = pg.tensor([1]), pg.tensor([1, 64, 5]), pg.tensor([16, 8, 64])
    shared = pg.tensor([16, 8])
    for out in (pg.rms_norm(pg.mul(pg.cumsum(x), pg.view(one, [1, 64], [0]))), pg.rms_norm(pg.mul_mat(pg.view(shared, [16, 8, 64], [64, 0]), pg.exp(y)))):
        assert parts(same_bits([out], {t: normal(t) for t in Graph([out]).inputs}))


@BF16
@pytest.mark.parametrize("n_columns", [5, 8])
def test_products_whose_kernel_depends_on_the_slice(n_columns: int, eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of heads that share a weight are one product with the columns of all: they are no longer than its kernel stays the same."""
    load_kernels("cpu")
    for kernel in find_op("MUL_MAT").kernels["cpu"]:
        if kernel.name == "mul_mat_lanes":  # it takes few columns and many
            monkeypatch.setitem(kernel.options, "needs", {"nothing has this"})
    a = pg.raw_tensor(random_blocks(Q8_0, 64 * 48 * 2 // 32, np.random.default_rng(3)), Q8_0, (64, 48, 2), "a")
    x = pg.tensor([64, n_columns, 64])
    plan = same_bits([pg.rms_norm(pg.mul_mat(a, pg.exp(x)))], {x: normal(x)})
    assert [p.kernel_name for s in plan.steps for p in s.leaves()] == ["exp[flat]", "quantize_columns+mul_mat_words", "rms_norm_rows"]


@BF16
@pytest.mark.parametrize("n_columns", [6, 40, 80])
def test_results_of_one_weight_in_several_places(n_columns: int, eager: None) -> None:
    """Of a slice of one head all batches are columns of its weight; their products lie among those of other heads, or beside them."""
    a = pg.raw_tensor(random_blocks(Q8_0, 64 * 48 * 3 // 32, np.random.default_rng(3)), Q8_0, (64, 48, 3), "a")
    x = pg.tensor([64, n_columns, 12, 3])
    y = pg.mul_mat(a, pg.exp(x))
    for out in (y, pg.rms_norm(y)):
        assert parts(same_bits([out], {x: normal(x)}, threads=(1, 7)))


def test_a_slice_has_the_gaps_of_the_whole(eager: None) -> None:
    """One number per head, of which a product reads a matrix: side by side in a slice of one head, it would be multiplied by another kernel."""
    x, b = pg.tensor([8, 16, 40, 64]), pg.tensor([64, 3, 16])
    out = pg.rms_norm(pg.mul_mat(pg.permute(pg.sum_rows(x), 3, 2, 1, 0), b))
    assert parts(same_bits([out], {x: normal(x), b: normal(b, 1)})) == [["SUM_ROWS", "MUL_MAT", "RMS_NORM"]]


def test_columns_side_by_side_of_results_that_are_not(eager: None) -> None:
    """A slice's columns, kept alone, are those of one matrix; their products, stored among others', are not."""
    a, x = pg.tensor([64, 48]), pg.tensor([64, 1, 64, 3])
    assert parts(same_bits([pg.mul_mat(a, pg.exp(x))], {a: normal(a), x: normal(x, 1)})) == [["EXP", "MUL_MAT"]]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Tensor], Values]:
    """Products, sums, copies and pointwise ops over tensors of one shape, [8, 8, heads, chunks], with some of the results as outputs."""
    heads, chunks = draw(st.sampled_from([2, 4, 6])), draw(st.sampled_from([1, 3]))
    ins = [pg.tensor([8, 8, heads, chunks], name=f"in{i}") for i in range(2)] + [pg.tensor([8, 8, 1, chunks], name="shared")]
    found: list[Tensor] = list(ins)
    for _ in range(draw(st.integers(3, 9))):
        x, y = (found[draw(st.integers(0, len(found) - 1))] for _ in range(2))
        x, y = (y, x) if x.ne[2] < y.ne[2] else (x, y)
        match draw(st.integers(0, 7)):
            case 0 | 1:
                new = pg.mul_mat(y, x)
            case 2:
                new = pg.mul_mat(pg.permute(x, 1, 0, 2, 3), pg.permute(x, 1, 0, 2, 3))
            case 3:
                new = pg.mul(pg.tanh(x), y)
            case 4:
                new = pg.cumsum(x, dim=draw(st.integers(0, 3)))
            case 5:
                new = pg.cont(pg.permute(x, 1, 0, 2, 3))
            case 6:
                new = pg.rms_norm(x)
            case _:
                n = x.ne[2]
                new = pg.reshape(pg.scale(pg.reshape(x, [64, n // 2, 2, chunks] if n > 1 else [64, 1, 1, chunks]), 0.5), [8, 8, n, chunks])
        found.append(new)
    kept = draw(st.lists(st.sampled_from(found[3:]), max_size=2, unique=True))
    outs = [pg.rms_norm(found[-1]), *(t for t in kept if t is not found[-1])]
    leaves = Graph(outs).inputs
    return outs, {t: normal(t, i) for i, t in enumerate(leaves)}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs())
def test_any_graph(eager: None, drawn: tuple[list[Tensor], Values]) -> None:
    """The same bits as without regions."""
    same_bits(*drawn, threads=(1, 3))


# Inner regions


@pytest.mark.parametrize(("n_chunks", "n_seqs", "n_group", "n_head", "want"), [
    (1, 1, 1, 12, []), (2, 1, 1, 5, [2, 1]), (5, 1, 1, 12, [2, 1]), (6, 1, 3, 9, [2, 1]), (4, 3, 1, 7, [2, 1, 1]), (1, 4, 2, 4, [4])])
@pytest.mark.parametrize("strip_bytes", [1, 512 << 10])
def test_ssd_in_inner_regions(n_chunks: int, n_seqs: int, n_group: int, n_head: int, want: list[int], strip_bytes: int, eager: None,
                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Along heads, and in a head's slice along chunks: the products before that between chunks, and those after it; of several sequences, that one
    along these."""
    monkeypatch.setattr(regions, "STRIP_BYTES", strip_bytes)
    plan = same_bits(*ssd(16 * n_chunks, n_seqs, 16, n_group, n_head), threads=(1, 3))
    products = [n for steps in inner(plan) if (n := steps.count("MUL_MAT"))]
    assert products == want, str(plan)
    assert any(steps.count("MUL_MAT") >= 4 for steps in parts(plan)), str(plan)


@BF16
@pytest.mark.parametrize("n_group", [1, 3])
def test_ssd_in_inner_regions_in_bfloat16(n_group: int, eager: None) -> None:
    plan = same_bits(*ssd(32 * 4, 2, 32, n_group, precision="bf16"), threads=(1, 3))
    assert [s.count("MUL_MAT") for s in inner(plan) if "MUL_MAT" in s] == [2, 1, 1], str(plan)
    assert sum(p.kernel_name == "mul_mat_small" for s in plan.steps for p in s.leaves()) == 3, str(plan)


def test_long_ssd() -> None:
    """With the thresholds as they are, a head's slice of 4096 tokens is cut once more."""
    outs, values = ssd(4096, 1, 128, 1, n_head=16)
    want, _ = results(outs, values, threads=1, strips=False)
    got, plan = results(outs, values, threads=2)
    assert got == want and len(inner(plan)) == 2, str(plan)


def test_a_slice_that_only_inner_regions_make_small(monkeypatch: pytest.MonkeyPatch, eager: None) -> None:
    """Where the slices of a region are larger than any cache, it is made if most of what it saves stays in inner ones."""
    monkeypatch.setattr(regions, "MOST_BYTES", 1)
    assert len(inner(same_bits(*ssd(128, 1, 16, 1)))) == 2
    monkeypatch.setattr(regions, "INNER_WORTH", 1 << 40)
    assert all("MUL_MAT" not in steps for steps in parts(same_bits(*ssd(128, 1, 16, 1))))


def chunked(x: Tensor, factors: Tensor) -> Tensor:
    """Products along the last dim of [8, 8, heads, chunks], as between chunks: cut along heads alone."""
    n, chunks = x.ne[2], x.ne[3]
    states = pg.permute(pg.reshape(x, [64, n, chunks, 1]), 1, 2, 0, 3)
    return pg.reshape(pg.cont(pg.permute(pg.mul_mat(states, factors), 0, 2, 1, 3)), [8, 8, n, chunks])


def test_what_others_read_of_an_inner_region(eager: None) -> None:
    """Within the slice, outside of the region, or as an output: it is whole there."""
    x, f = pg.tensor([8, 8, 6, 4]), pg.tensor([4, 4, 6])
    first = pg.rms_norm(pg.exp(x))
    y = pg.mul_mat(first, pg.tanh(first))
    last = pg.rms_norm(pg.mul(pg.tanh(chunked(y, f)), y))
    values = {x: normal(x), f: normal(f, 1)}
    for outs in ([last], [last, y], [last, pg.cumsum(y, dim=2)]):
        plan = same_bits(outs, values)
        assert [len(steps) for steps in inner(plan)] == [4, 3], str(plan)


def test_what_an_inner_region_reads_stays_until_its_end(eager: None) -> None:
    """One value for all slices of the inner region: its memory in the slice is not used again before the last of them is done."""
    x, shared = pg.tensor([8, 8, 6, 4]), pg.tensor([8, 8, 6, 1])
    once = pg.rms_norm(pg.exp(shared))
    y = pg.mul_mat(once, x)
    for _ in range(3):
        y = pg.rms_norm(pg.mul_mat(y, y))
    plan = same_bits([y], {x: normal(x), shared: normal(shared, 1)})
    assert [len(steps) for steps in inner(plan)] == [2, 7] and len(parts(plan)) == 1, str(plan)


@BF16
def test_what_a_kernel_has_prepared_in_inner_regions(eager: None) -> None:
    """Tiles made of a value that all inner slices read are there for those that read it later; those of a slice are made for each."""
    a = pg.raw_tensor(random_blocks(Q8_0, 64 * 64 * 6 // 32, np.random.default_rng(3)), Q8_0, (64, 64, 6), "a")
    x, shared = pg.tensor([64, 80, 6, 3]), pg.tensor([64, 80, 6, 1])
    of_all = pg.exp(shared)
    y = pg.rms_norm(pg.mul(pg.mul_mat(a, pg.exp(x)), pg.mul_mat(a, of_all)))
    z = pg.rms_norm(pg.mul(pg.cumsum(y, dim=3), pg.mul_mat(a, of_all)))
    assert inner(same_bits([z], {x: normal(x) * 0.1, shared: normal(shared, 1) * 0.1}))


@st.composite
def graphs_of_two_axes(draw: st.DrawFn) -> tuple[list[Tensor], Values]:
    """Ops that can be cut along both heads and chunks, along one of them, or along none, over [8, 8, heads, chunks] or with one of either."""
    heads, chunks = draw(st.sampled_from([2, 3, 6])), draw(st.sampled_from([2, 4, 5]))
    factors = pg.tensor([chunks, chunks, heads], name="factors")
    found = [pg.tensor([8, 8, heads, chunks], name="x"), pg.tensor([8, 8, heads, 1], name="head"), pg.tensor([8, 8, 1, chunks], name="chunk")]
    for _ in range(draw(st.integers(4, 12))):
        x, y = found[draw(st.integers(0, len(found) - 1))], found[draw(st.integers(0, len(found) - 1))]
        match draw(st.integers(0, 7)):
            case 0 | 1:
                new = pg.mul_mat(x, y)
            case 2:
                new = pg.mul_mat(pg.permute(x, 1, 0, 2, 3), x)
            case 3 if all(a % b == 0 for a, b in zip(x.ne, y.ne, strict=True)):
                new = pg.mul(pg.tanh(x), y)
            case 4 if x.ne[2:] == (heads, chunks):
                new = chunked(x, factors)
            case 5:
                new = pg.cumsum(x, dim=draw(st.integers(1, 3)))
            case 6:
                new = pg.cont(pg.permute(x, 1, 0, 2, 3))
            case _:
                new = pg.rms_norm(x)
        found.append(new)
    kept = draw(st.lists(st.sampled_from(found[3:]), max_size=2, unique=True))
    outs = [pg.rms_norm(found[-1]), *(t for t in kept if t is not found[-1])]
    return outs, {t: normal(t, i) for i, t in enumerate(Graph(outs).inputs)}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs_of_two_axes(), st.sampled_from([1, 512 << 10]))
def test_any_graph_of_two_axes(eager: None, drawn: tuple[list[Tensor], Values], strip_bytes: int) -> None:
    """The same bits as without regions, in the shortest slices and in longer ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "STRIP_BYTES", strip_bytes)
        plan = same_bits(*drawn, threads=(1, 3))
    event(f"{min(len(inner(plan)), 3)} inner regions")


def test_times_of_inner_regions(eager: None) -> None:
    """Every launch has its share of the region's time, however often it is run."""
    outs, values = ssd(128, 1, 16, 1)
    runner = open_backend("cpu", threads=2).compile(Graph(outs))
    for t, v in values.items():
        runner.set(t, v)
    runner.run(repeat=3)
    for i, s in enumerate(runner.plan.steps):
        if s.inside:
            shares = runner.shares(i)
            assert len(shares) == len([*s.leaves()]) and shares.min() > 0 and shares.sum() == pytest.approx(1)


def test_a_plan_shows_inner_regions(eager: None) -> None:
    lines = str(open_backend("cpu", threads=1).plan(Graph(ssd(128, 1, 16, 1)[0]))).splitlines()
    outer = next(i for i, line in enumerate(lines) if "strips[12 x 1]" in line)
    nested = [i for i, line in enumerate(lines) if i > outer and "steps by slices" in line]
    assert len(nested) == 2 and all(line.startswith(" " * 6) for line in lines[outer + 1:])
    assert all(lines[i][6] != " " and lines[i + 1].startswith(" " * 10) for i in nested)


# Errors


def test_an_error_inside_names_the_node(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the region, of which its step is a part."""
    monkeypatch.setattr(registry, "OPS", dict(registry.OPS))  # the op is this test's alone
    @pg.op("CHECKED", inputs="x")
    def checked(x: Tensor) -> Any:
        return pg.Spec(x.dtype, x.ne)

    @pg.kernel("CHECKED", "cpu", status=True)
    def checked_f32(out: Any, x: Any, status: Any, i0: Any, i1: Any) -> None:
        for i in range(i0, i1):
            q = i // x.ne1
            for k in range(x.ne0):
                v = ld_f32(at(x.p, (i - q * x.ne1) * x.nb1 + q * x.nb2), k)
                if v > 100:
                    bad_index(status, 101, 100)
                st_f32(at(out.p, (i - q * x.ne1) * out.nb1 + q * out.nb2), k, v)

    op: Any = checked
    op.slices(lambda node: (1, 2))
    x = pg.tensor([8, 4, 6])
    made = op(pg.mul_mat(x, x))
    made.name = "the_checked"
    runner = open_backend("cpu", threads=2).compile(Graph([pg.rms_norm(made)]))
    assert parts(runner.plan) == [["MUL_MAT", "CHECKED", "RMS_NORM"]]
    value = np.ones((1, 6, 4, 8), np.float32)
    runner.set(x, value)
    runner.run()
    value[0, 5] = 20
    runner.set(x, value)
    with pytest.raises(KernelError, match=r"CHECKED \(the_checked\): bad index 101; legal: 0 to 99"):
        runner.run()
