"""`pyggml bench`: what runs is what llama-bench would run, its outputs through their own parsers, swapped ops, the profile, the peer."""

from __future__ import annotations

import argparse
import base64
import csv
import dataclasses
import io
import json
import re
import sqlite3
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as pg
from pyggml.backends.cpu import CpuBackend, SharedMemory
from pyggml.errors import ParamError, UnsupportedOp
from pyggml.models.layers import PARTS
from pyggml.registry import OPS
from pyggml.testing import fabricate, nmse
from pyggml.tools import bench as tool
from pyggml.tools import main
from pyggml.tools.benchcases import Case, Settings, cases, product, ranges, ubatches
from pyggml.tools.benchrun import LogitsCheck, ModelLane, cast_conv, rates
from pyggml.tools.benchswap import BenchBackend, Notes, Variant, free_ops, replaced_op

# The fields of llama-bench's JSON that hold for a CPU.
LLAMA_BENCH = ("build_commit build_number cpu_info gpu_info model_filename model_type model_size model_n_params n_batch n_ubatch n_threads type_k type_v "
               "n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts samples_ns samples_ts").split()
OWN = ("test median_ts spread mamba2 chunk n_nodes gflops_share gbps_share mem_weights mem_kv mem_state mem_compute ttft_ms compile_s").split()
QUICK = ("--no-ceiling", "-t", "2", "-r", "2")

MINE = """
import pyggml as pg
from pyggml.cpu.simd import at, ld_f32, st_f32

def plus_one(out, x, i0, i1):
    for i in range(i0, i1):
        for k in range(out.ne0):
            st_f32(at(out.p, i * out.nb1), k, ld_f32(at(x.p, i * x.nb1), k) + 1.0)

@pg.kernel("SCALE", "cpu", params=lambda n: [float(n.params["s"])], when=lambda n: None if n.out.ne[0] == 3 else "not 3 wide")
def scaled_twice(out, x, s, i0, i1):
    for i in range(i0, i1):
        for k in range(out.ne0):
            st_f32(at(out.p, i * out.nb1), k, ld_f32(at(x.p, i * x.nb1), k) * s * s)

def swiglu(a, b):
    return pg.mul(pg.silu(a), b)

def first_half(x):
    return pg.view(x, [x.ne[0] // 2, x.ne[1]], [x.nb[1]])
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def bench(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main(["bench", *args, *QUICK]) == code
    return capsys.readouterr().out


def rows(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> list[dict[str, Any]]:
    return json.loads(bench(capsys, *args, "-o", "json", code=code))


def parsed(*args: str) -> argparse.Namespace:
    p = argparse.ArgumentParser()
    tool.options(p)
    return p.parse_args(args)


# Flags and cases

@pytest.mark.parametrize(("text", "values"), [
    ("5", [5]), ("1,2,4", [1, 2, 4]), ("8-11", [8, 9, 10, 11]), ("8-64+8", [8, 16, 24, 32, 40, 48, 56, 64]), ("8-64*2", [8, 16, 32, 64]),
    ("8-20*2,100", [8, 16, 100]), ("7-9+5", [7]), ("0", [0]),
])
def test_ranges(text: str, values: list[int]) -> None:
    assert ranges(0)(text) == values


@pytest.mark.parametrize(("text", "message"), [
    ("8-", "FIRST-LAST"), ("x", "FIRST-LAST"), ("", "FIRST-LAST"), ("9-8", "never ends"), ("8-64*1", "never ends"), ("8-64+0", "never ends"),
    ("1-9999999", "more than"), ("0", "at least 1"),
])
def test_ranges_that_are_none(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        ranges(1)(text)


def test_every_combination_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "-p", "4", "-p", "2", "-n", "0", "-pg", "2,1", "-ub", "2,4", "--mamba2", "scan,ssd")
    assert {(r["test"], r["n_ubatch"], r["mamba2"]) for r in found} == {
        (test, ub, form) for test in ("pp4", "pp2", "pp2+tg1") for ub in (2, 4) for form in ("scan", "ssd")}
    assert len(found) == 12


def test_cases_are_named_as_in_llama_bench() -> None:
    args = parsed("-p", "16,8", "-n", "4", "-pg", "3,2", "-pg", "5,1", "-d", "0,7", "-t", "1,2")
    found = list(cases(args))
    names = ["pp16", "pp8", "tg4", "pp3+tg2", "pp5+tg1"]
    assert [c.name for c in found] == [*names, *(f"{n} @ d7" for n in names)] * 2
    assert [c.settings.threads for c in found] == [1] * 10 + [2] * 10


def test_a_form_comes_once_for_what_it_does_not_have() -> None:
    found = product(parsed("--mamba2", "scan,ssd,ssd-fused", "--chunk", "16,32", "--ssd-precision", "f32,bf16"))
    assert [(s.mamba2, s.chunk, s.ssd_precision) for s in found] == [
        ("scan", None, "f32"), *((form, q, p) for form in ("ssd", "ssd-fused") for q in (16, 32) for p in ("f32", "bf16"))]


def test_defaults_are_those_of_llama_bench() -> None:
    assert [(c.name, c.settings.n_batch, c.settings.n_ubatch) for c in cases(parsed())] == [("pp512", 2048, 512), ("tg128", 2048, 512)]
    assert parsed().repetitions == 5
    assert [c.name for c in cases(parsed("-n", "0", "-p", "8", "-b", "4"))] == ["pp8"]
    assert next(cases(parsed("-b", "4"))).settings.n_ubatch == 4


def test_a_prompt_as_one_graph() -> None:
    def sizes(*args: str) -> list[tuple[str, int, int]]:
        return [(c.name, c.settings.n_batch, c.settings.n_ubatch) for c in cases(parsed(*args))]

    assert sizes("-p", "64,4096", "-n", "8", "-pg", "700,2", "-ub", "prompt") == [("pp64", 2048, 64), ("pp4096", 4096, 4096), ("tg8", 2048, 512),
                                                                                ("pp700+tg2", 2048, 700)]
    assert sizes("-p", "300", "-n", "0", "-b", "128", "-ub", "prompt,64-128*2") == [("pp300", 300, 300), ("pp300", 128, 64), ("pp300", 128, 128)]
    with pytest.raises(argparse.ArgumentTypeError, match="'promptly'; legal: a whole number"):
        ubatches("promptly")


def test_each_prompt_runs_as_one_graph(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "-p", "24,40", "-n", "0", "-ub", "prompt", "--mamba2", "ssd", "--chunk", "none")
    assert [(r["test"], r["n_ubatch"], r["chunk"]) for r in found] == [("pp24", 24, 24), ("pp40", 40, 40)]


# What runs

def settings(**changes: Any) -> Settings:
    usual = Settings(str(pg.models.demo_path()), 2048, 512, 2, 2, "f16", "f16", "f32", "f32", "scan", None, "cpu")
    return dataclasses.replace(usual, **changes)


@pytest.mark.parametrize("changes", [{}, {"n_batch": 5, "n_ubatch": 2}, {"threads_batch": 1}])
def test_a_lane_decodes_depth_prompt_and_generation(changes: dict[str, Any]) -> None:
    model = pg.load_model(pg.models.demo_path())
    lane = ModelLane(model, Case(settings(prec="f32", **changes), 9, 3, 4), SharedMemory())  # else one column and several round differently
    lane.warm_up()
    first, second = lane.run(), lane.run()
    ids = np.concatenate([lane.depth, lane.prompt, lane.gen])
    assert [len(x) for x in (lane.depth, lane.prompt, lane.gen)] == [4, 9, 3] and lane.ctx.n_past() == 16
    want = model.context(mamba2="scan", prec="f32").decode(ids)
    assert nmse(first.logits, want) < 1e-9
    assert np.array_equal(first.logits, second.logits)  # from an empty memory each time
    assert 0 < first.first_seconds < first.seconds
    assert lane.plans_timed == 0
    n_ubatch = lane.case.settings.n_ubatch
    assert lane.notes.work.n_runs == (5 if n_ubatch == 2 else 1) + 3  # 9 tokens in calls of 5 and 4, in ubatches of 2


def test_rates_as_llama_bench_counts_them() -> None:
    r = rates([0.5, 0.25, 1.0], 10)
    assert r.avg_ts == pytest.approx((20 + 40 + 10) / 3) and r.median_ts == 20 and r.spread == pytest.approx(1.5)
    assert r.stddev_ts == pytest.approx(np.std([20, 40, 10], ddof=1)) and r.samples_ns == [500_000_000, 250_000_000, 1_000_000_000]
    assert rates([0.5], 10).stddev_ts == 0


def test_conv_weights_of_another_type(tmp_path: Path) -> None:
    fabricate("mamba2", tmp_path / "m.gguf")
    want = pg.load_model(tmp_path / "m.gguf").context(mamba2="scan").decode([1, 2, 3])
    for name, least, most in (("f32", 0, 0), ("f16", 1e-12, 1e-6), ("bf16", 1e-9, 1e-4)):  # 11 and 8 bits: squares of 2^-11 and 2^-8 at most
        model = pg.load_model(tmp_path / "m.gguf")
        cast_conv(model, name)
        assert {t.dtype.name for n, t in model.weights.items() if n.endswith("ssm_conv1d.weight")} == {name}
        assert least <= nmse(model.context(mamba2="scan").decode([1, 2, 3]), want) <= most


# Outputs

def test_columns_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "-p", "6", "-n", "2", "--mamba2", "auto,ssd,ssd-fused", "--chunk", "4", "--ssd-precision", "bf16")
    model = pg.load_model(pg.models.demo_path())
    for r in found:
        assert {*LLAMA_BENCH, *OWN} <= r.keys()
        n = r["n_prompt"] + r["n_gen"]
        assert len(r["samples_ns"]) == len(r["samples_ts"]) == 2
        assert r["avg_ns"] == pytest.approx(np.mean(r["samples_ns"]), abs=2) and r["avg_ts"] == pytest.approx(np.mean([n * 1e9 / t for t in r["samples_ns"]]))
        assert r["mem_weights"] == r["model_size"] == model.nbytes and r["model_n_params"] == model.n_params
        shape = model.memory_shape()
        assert r["mem_state"] == 4 * sum(int(np.prod(ne)) for ne in (*shape.conv, *shape.ssm) if ne)
        assert r["mem_kv"] == 2 * n * (sum(shape.k) + sum(shape.v))
        assert r["mem_compute"] > 0 and r["n_plans_timed"] == 0 and r["gflops"] > 0
        assert r["check"] == "ok" and r["logits_nmse"] < (1e-3 if r["ssd_precision"] else 1e-9)
        assert re.fullmatch(r"granitehybrid 6\.00M Q8_0", r["model_type"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", r["test_time"])
    prompt = [("pp6", "scan", None, None), ("pp6", "ssd", 4, "bf16"), ("pp6", "ssd-fused", 4, "bf16")]
    assert [(r["test"], r["mamba2"], r["chunk"], r["ssd_precision"]) for r in found] == [*prompt, *[("tg2", "scan", None, None)] * 3]
    assert found[1]["n_nodes"] == model.graph(6, mamba2="ssd", chunk=4).n_nodes


def test_outputs_parse(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("-p", "3", "-n", "1")
    (head, *body) = csv.reader(io.StringIO(bench(capsys, *args, "-o", "csv")))
    assert {*LLAMA_BENCH, *OWN} <= {*head} and [r[head.index("test")] for r in body] == ["pp3", "tg1"]
    assert len(json.loads(body[0][head.index("samples_ns")])) == 2
    assert [json.loads(line)["test"] for line in bench(capsys, *args, "-o", "jsonl").splitlines()] == ["pp3", "tg1"]
    db = sqlite3.connect(":memory:")
    db.executescript(bench(capsys, *args, "-o", "sql"))
    assert db.execute("SELECT test, n_gen, avg_ts > 0, typeof(avg_ts) FROM test").fetchall() == [("pp3", 0, 1, "real"), ("tg1", 1, 1, "real")]
    table = [[c.strip() for c in line.strip("|").split("|")] for line in bench(capsys, *args, "-o", "md").splitlines()]
    assert table[0][:5] == ["model", "size", "params", "backend", "threads"] and "t/s" in table[0] and len({len(r) for r in table}) == 1
    assert re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", table[2][table[0].index("t/s")])
    assert bench(capsys, *args, "-o", "console").splitlines()[0].startswith("model ")


def test_tables_show_what_is_varied(capsys: pytest.CaptureFixture[str]) -> None:
    args = "-p 3 -n 0 -ub 1,2 -tb 1 --type-s f16 --prec f32 --mamba2 scan".split()
    heads = bench(capsys, *args, "-o", "md").splitlines()[0]
    assert all(f" {name} " in heads for name in ("n_ubatch", "threads_batch", "type_s", "prec"))
    assert not any(name in heads for name in ("type_r", "n_batch", "chunk"))


def test_shares_of_the_ceiling(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from pyggml.tools.probe import Ceiling
    monkeypatch.setattr(tool, "ceiling", lambda nbytes, threads: Ceiling(1e9, 2e9))
    assert main(["bench", "-p", "3", "-n", "0", "-r", "1", "-o", "json"]) == 0
    (r,) = json.loads(capsys.readouterr().out)
    assert r["gbps_share"] == pytest.approx(r["gbps"]) and r["gflops_share"] == pytest.approx(r["gflops"] / 2)


def test_plans_made_inside_timed_runs_are_noted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from pyggml.runtime import context
    monkeypatch.setattr(context, "MAX_PLANS", 1)
    assert main(["bench", "-p", "3", "-n", "0", "-ub", "2", "--mamba2", "scan", "-o", "json", *QUICK]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["n_plans_timed"] == 4 and "note: pp3, scan: 4 plans made inside the timed runs" in err


# Swapped ops

def run_swapped(variant: Variant, y: pg.Tensor, x: pg.Tensor, value: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """The value of y with an op swapped, and the kernels that made it."""
    runner = BenchBackend(CpuBackend(threads=2), variant.stand_ins, Notes()).compile(pg.Graph([y]))
    runner.set(x, value)
    runner.run()
    return runner.get(y), [s.kernel_name for s in runner.plan.steps]


X = np.arange(6, dtype=np.float32).reshape(2, 3) - 2


def test_a_free_op_in_a_chain_is_the_identity() -> None:
    x = pg.tensor([3, 2])
    got, kernels = run_swapped(free_ops("exp"), pg.scale(pg.exp(x), 3.0), x, X)
    assert np.array_equal(got.reshape(2, 3), 3 * X) and len(kernels) == 1


def test_a_free_triangle_keeps_all() -> None:
    """In a chain with rows, of which the kernel otherwise leaves out what the triangle does."""
    x = pg.tensor([3, 2])
    got, kernels = run_swapped(free_ops("TRI"), pg.scale(pg.tri(pg.mul(x, pg.tensor(np.float32([1, 2, 3]))), "lower"), 3.0), x, X)
    assert np.array_equal(got.reshape(2, 3), X * [3, 6, 9]) and len(kernels) == 1


def test_a_free_op_of_its_own_step_does_nothing() -> None:
    x = pg.tensor([3, 2])
    y = pg.cumsum(pg.exp(x))
    assert run_swapped(free_ops("EXP"), y, x, X)[1][0] == "nothing"
    assert run_swapped(free_ops("CUMSUM"), y, x, X)[1][1] == "nothing"
    assert run_swapped(free_ops("cumsum+exp"), y, x, X)[1] == ["nothing"] * 2


def test_free_ops_in_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    base, free = rows(capsys, "-p", "4", "-n", "0", "--noop", "SSM_SCAN")
    assert base["variant"] is None and base["check"] == "ok" and (free["variant"], free["check"]) == ("noop SSM_SCAN", "invalid by design")
    assert free["n_nodes"] == base["n_nodes"] and free["n_swapped"] == 5
    assert free["vs_base"] == pytest.approx(free["median_ts"] / base["median_ts"])
    assert 0 < free["op_share"] < 1 and free["amdahl"] == pytest.approx(1 / (1 - free["op_share"]))
    model = pg.load_model(pg.models.demo_path())
    lane = ModelLane(model, Case(settings(), 4, 0), SharedMemory(), free_ops("SSM_SCAN"))
    lane.warm_up()
    (planned,) = lane.ctx._plans.values()
    names = {n.op.name: s.kernel_name for s in planned.runner.plan.steps for n in s.nodes}
    assert names["SSM_SCAN"] == "nothing" and "nothing" not in {v for k, v in names.items() if k != "SSM_SCAN"}


def test_an_op_that_a_graph_lacks_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-p", "4", "-n", "0", "--mamba2", "ssd", "--noop", "SSM_SCAN", "-o", "json", *QUICK]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 1 and err.splitlines()[-1].startswith("note: noop SSM_SCAN: left out of pp4, ssd")


def test_an_op_replaced_by_a_kernel(mine: str) -> None:
    x = pg.tensor([3, 2])
    got, kernels = run_swapped(replaced_op(f"SILU={mine}:plus_one"), pg.silu(x), x, X)
    assert np.array_equal(got.reshape(2, 3), X + 1) and kernels == ["plus_one"]


def test_a_registered_kernel_keeps_its_options_and_stays_out_of_the_base(mine: str) -> None:
    before = list(OPS["SCALE"].kernels.get("cpu", []))
    swap = replaced_op(f"SCALE={mine}:scaled_twice")
    assert OPS["SCALE"].kernels.get("cpu", []) == before
    x = pg.tensor([3, 2])
    assert np.array_equal(run_swapped(swap, pg.scale(x, 3.0), x, X)[0].reshape(2, 3), 9 * X)
    with pytest.raises(UnsupportedOp, match="not 3 wide"):
        run_swapped(swap, pg.scale(pg.tensor([4, 2]), 3.0), x, X)


def test_an_op_replaced_by_a_graph(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    base, own = rows(capsys, "-p", "4", "-n", "0", "--replace", f"SWIGLU_SPLIT={mine}:swiglu", "--mamba2", "scan")
    assert own["n_nodes"] == base["n_nodes"] + own["n_swapped"] == base["n_nodes"] + 12  # one op becomes two
    assert own["check"] == "ok" and own["vs_base"] > 0 and own["amdahl"] is None and own["variant"].startswith("SWIGLU_SPLIT=")


def test_a_wrong_replacement_gets_no_speed(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    base, own = rows(capsys, "-p", "4", "-n", "0", "--replace", f"SILU={mine}:plus_one", code=1)
    assert base["avg_ts"] > 0 and own["avg_ts"] is own["median_ts"] is own["samples_ts"] is own["vs_base"] is None
    assert re.match(r"logits differ from scan: NMSE .*, limit 1e-02", own["check"])
    assert "wrong" in bench(capsys, "-p", "4", "-n", "0", "--replace", f"SILU={mine}:plus_one", "-o", "md", code=1).splitlines()[-1]


def test_forms_are_held_against_each_other() -> None:
    check, case = LogitsCheck(), Case(settings(), 4, 0)
    one = np.arange(8, dtype=np.float32)
    assert check.error(case, "scan", one) == (0, None)
    error, fault = check.error(case, "ssd", one * 1.01)
    assert error == pytest.approx(1e-4, rel=1e-3) and fault is None
    assert check.error(case, "ssd", one * 1.2)[1] == "logits differ from scan: NMSE 4.0e-02, limit 1e-02"
    assert check.error(case, "ssd", np.where(one == 3, np.nan, one))[1] == "1 of 8 logits are not finite"
    assert check.error(Case(settings(), 5, 0), "ssd", one * 1.2)[1] is None  # other tokens


# Profile

def test_the_profile_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "-p", "20", "-n", "3", "-ub", "8", "--mamba2", "scan", "--profile")
    model = pg.load_model(pg.models.demo_path())
    for test, n_graphs in (("pp20", 3), ("tg3", 3)):
        for by in ("op", "part"):
            table = [r for r in found if (r["test"], r["by"]) == (test, by)]
            assert sum(r["seconds"] for r in table) == pytest.approx(table[0]["wall_s"], rel=1e-9)
            assert sum(r["share"] for r in table) == pytest.approx(1)
            assert table[-1]["name"] == "host" and table[-1]["seconds"] > 0 and all(r["seconds"] >= 0 and r["calls"] for r in table[:-1])
        parts = {r["name"]: r for r in found if (r["test"], r["by"]) == (test, "part")}
        assert parts.keys() - {"host"} <= {*PARTS} and parts["scan"]["calls"] % (5 * n_graphs) == 0
        ops = {r["name"]: r for r in found if (r["test"], r["by"]) == (test, "op")}
        scans = [r for name, r in ops.items() if "SSM_SCAN" in name]  # with the write of the state into its pool
        assert sum(r["calls"] for r in scans) == 5 * n_graphs and ops["MUL_MAT"]["gflops"] > 0
    flops = sum(n.op.cost_of(n).flops for n in model.graph(3, mamba2="scan").nodes if n.op.name == "SSM_SCAN") / 3
    scan = next(r for r in found if r["test"] == "pp20" and "SSM_SCAN" in r["name"])
    assert scan["gflops"] * scan["seconds"] * 1e9 == pytest.approx(20 * flops)
    products = [n for n in model.graph(3, mamba2="scan").nodes if n.op.name == "MUL_MAT"]
    row = next(r for r in found if (r["test"], r["name"]) == ("tg3", "MUL_MAT"))  # quantized: a step of its own brings columns to whole numbers
    one = [n.op.cost_of(n) for n in model.graph(1, mamba2="scan").nodes if n.op.name == "MUL_MAT"]
    assert row["calls"] == 3 * len(products) and row["gflops"] * row["seconds"] * 1e9 == pytest.approx(3 * sum(c.flops for c in one))
    assert 3 * sum(c.nbytes for c in one) < row["gbps"] * row["seconds"] * 1e9 < 3.3 * sum(c.nbytes for c in one)


def test_the_profile_looks_into_regions(capsys: pytest.CaptureFixture[str]) -> None:
    """What a region's steps take adds up to its own time; their ops stand under their own names, as without regions."""
    found = rows(capsys, "-p", "512", "-n", "0", "-t", "2", "--mamba2", "ssd", "--profile")
    model = pg.load_model(pg.models.demo_path())
    backend = pg.open_backend("cpu", threads=2)
    graph = model.graph(512, mamba2="ssd")
    assert any(s.inside for s in backend.plan(graph).steps)
    backend.strips = False
    ops = [r for r in found if r["by"] == "op"]
    whole: dict[str, int] = {}
    for s in backend.plan(graph).steps:
        name = " + ".join(n.op.name for n in s.nodes)
        whole[name] = whole.get(name, 0) + 1
    assert {r["name"]: r["calls"] for r in ops[:-1]}.keys() == whole.keys()
    assert next(r for r in ops if r["name"] == "SUB + TRI + EXP")["seconds"] > 0
    assert sum(r["seconds"] for r in ops) == pytest.approx(ops[0]["wall_s"], rel=1e-9)


def test_the_profile_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    out = bench(capsys, "-p", "4", "-n", "0", "--profile", "-o", "console")
    assert re.search(r"^profile of pp4, scan: \d+\.\d\d ms with a time taken after each step, [+-]", out, re.M)
    assert re.search(r"^part +calls +ms +share +GFLOP/s +GB/s$", out, re.M) and re.search(r"^op +calls", out, re.M)
    assert len(re.findall(r"^host ", out, re.M)) == 2


# The peer

LLAMA = """
import ctypes, json, time
__version__ = "9.9"
llama_token = ctypes.c_int32
log = open({log!r}, "a")
class Params: pass
def note(*what): print(json.dumps(what), file=log, flush=True)
def llama_log_callback(f): return f
def llama_log_set(f, user): note("log")
def llama_backend_init(): pass
def llama_model_default_params(): return Params()
def llama_context_default_params(): return Params()
def llama_model_load_from_file(path, params): note("load", path.decode()); return 1
def llama_init_from_model(model, p): note("context", {{k: v for k, v in vars(p).items()}}); return 1
def llama_free(ctx): note("free")
def llama_get_memory(ctx): return 1
def llama_memory_clear(memory, data): note("clear")
def llama_batch_get_one(tokens, n): return list(tokens)
def llama_decode(ctx, batch): note("decode", batch); time.sleep(0.002); return 0
def llama_synchronize(ctx): pass
def llama_model_get_vocab(model): return 1
def llama_vocab_n_tokens(vocab): return 4
def llama_get_logits_ith(ctx, i): return (ctypes.c_float * 4)(1, 2, 3, 4)
"""


def test_the_peer_runs_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llama_cpp.py").write_text(LLAMA.format(log=str(tmp_path / "log")))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} \"$@\"\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    found = rows(capsys, "-p", "5", "-n", "2", "-b", "4", "-ub", "2", "-tb", "1", "--mamba2", "scan,ssd", "--peer", str(python))
    assert [(r["backend"], r["test"]) for r in found] == [("cpu", "pp5"), ("cpu", "pp5"), ("llama.cpp", "pp5"), ("cpu", "tg2"), ("cpu", "tg2"),
                                                          ("llama.cpp", "tg2")]
    assert found[2]["build_commit"] == "llama-cpp-python 9.9" and found[2]["avg_ts"] < 5 / 0.004
    assert [r["vs_peer"] for r in found[:3]] == [pytest.approx(r["median_ts"] / found[2]["median_ts"]) for r in found[:2]] + [None]
    calls = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    context = next(c[1] for c in calls if c[0] == "context")
    assert context == {"n_ctx": 5, "n_batch": 4, "n_ubatch": 2, "n_threads": 2, "n_threads_batch": 1, "type_k": 1, "type_v": 1, "flash_attn_type": -1}
    lane = ModelLane(pg.load_model(pg.models.demo_path()), Case(settings(), 5, 0), SharedMemory())
    ids = lane.prompt.tolist()
    run = [["clear"], ["decode", ids[:4]], ["decode", ids[4:]]]
    assert calls[:3] == [["log"], ["load", str(pg.models.demo_path())], ["context", context]] and calls[3:12] == run * 3  # warm-up and two repetitions
    assert [c[0] for c in calls].count("load") == 1


def test_without_a_peer_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('no such library')")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    for path, why in ((str(python), "llama_cpp cannot be imported"), (str(tmp_path / "none"), "No such file")):
        assert main(["bench", "-p", "2", "-n", "0", "--peer", path, "-o", "json", *QUICK]) == 0
        out, err = capsys.readouterr()
        assert len(json.loads(out)) == 1
        (line,) = [x for x in err.splitlines() if x.startswith("note:")]
        assert why in line


def test_a_peer_that_talks_nonsense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = tmp_path / "python"
    for said in ("Welcome to this shell", "[1]"):
        python.write_text(f"#!/bin/sh\nread line\necho '{said}'\nread line\n")
        python.chmod(0o755)
        assert main(["bench", "-p", "2", "-n", "0", "--peer", str(python), "-o", "json", *QUICK]) == 0
        out, err = capsys.readouterr()
        assert len(json.loads(out)) == 1
        assert err == f"note: --peer {python}: it answered '{said}'; expected an object in JSON; the bench goes on without a peer\n"


def test_a_peer_that_dies_leaves_what_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It answers the first test's hello, open, warm-up and two runs, then it ends."""
    reply = json.dumps({"version": "0", "seconds": 1.0, "first_seconds": 1.0, "logits": base64.b64encode(np.ones(8192, np.float32).tobytes()).decode()})
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nfor i in 1 2 3 4 5; do read line; echo '{reply}'; done\n")
    python.chmod(0o755)
    assert main(["bench", "-p", "2,3", "-n", "0", "--peer", str(python), "-o", "json", *QUICK]) == 1
    out, err = capsys.readouterr()
    assert [(r["test"], r["backend"]) for r in json.loads(out)] == [("pp2", "cpu"), ("pp2", "llama.cpp")]
    assert "the process ended with code" in err and "Traceback" not in err


def test_profiles_that_are_finished_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for output in ("md", "csv"):
        assert main(["bench", "-m", f"{pg.models.demo_path()},none.gguf", "-p", "2", "-n", "0", "--profile", "-o", output, *QUICK]) == 1
        out, err = capsys.readouterr()
        assert "pp2" in out and "host" in out and "none.gguf" in err


# Errors

@pytest.mark.parametrize(("args", "message"), [
    (["--noop", "VIEW"], "--noop VIEW: a view has no kernel and costs nothing"),
    (["--noop", "NONE"], "unknown op 'NONE'"),
    (["--replace", "SILU"], "--replace 'SILU'; legal: OP=MODULE:FUNCTION"),
    (["--replace", "SILU=nowhere:f"], "'nowhere:f': nowhere cannot be imported"),
    (["--replace", "SILU=os:getcwd"], "--replace SILU=os:getcwd: too many positional arguments; legal: FUNCTION(a), or a kernel, whose last arguments are i0"),
    (["--replace", "SCALE=math:sqrt"], "got an unexpected keyword argument 's'; legal: FUNCTION(a, s, b), or a kernel"),
    (["--replace", "SILU=builtins:dict"], "--replace SILU=builtins:dict: no signature found"),
    (["--mamba2", "os:getcwd"], "mamba2 function getcwd: too many positional arguments; legal: getcwd(x, weights, conv, ssm, hparams, *, form, chunk)"),
    (["-p", "0", "-n", "0"], "nothing to run"),
    (["-m", "none.gguf"], "none.gguf"),
    (["--backend", "cpu,ggml", "--profile"], "backend ggml: --noop"),
    (["--backend", "reference", "--noop", "SSM_SCAN"], "backend reference: --noop, --replace and --profile are for the cpu backend alone"),
])
def test_errors_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *args, *([] if "-p" in args else ["-p", "2", "-n", "0"])]) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("note")]
    assert message in line


@pytest.mark.parametrize(("args", "message"), [
    (["-p", "8-4"], "never ends"), (["-pg", "5"], "PROMPT,GEN"), (["-ctk", "q4_0"], "legal: f32, f16, bf16, q8_0"), (["--backend", "null"], "legal: cpu"),
    (["--mamba2", "conv"], "legal: auto, scan, ssd"),
])
def test_wrong_usage(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *args])
    assert message in capsys.readouterr().err


def test_a_graph_of_another_shape(mine: str) -> None:
    x = pg.tensor([4, 2])
    with pytest.raises(ParamError, match=r"first_half: it gave f32 \[2, 2, 1, 1\]; SILU gives f32 \[4, 2, 1, 1\]"):
        run_swapped(replaced_op(f"SILU={mine}:first_half"), pg.silu(x), x, X)


def test_options_without_effect_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-p", "2", "-n", "0", "-ngl", "99", "-mmp", "0", *QUICK]) == 0
    assert capsys.readouterr().err.splitlines()[0] == "note: without effect: -ngl (there is no GPU backend), -mmp (files are always mapped)"


def test_attention_as_one_op_or_several(capsys: pytest.CaptureFixture[str]) -> None:
    """Each attention layer in several ops has two more products' and a softmax's nodes; the logits agree."""
    found = rows(capsys, "-p", "6", "-n", "0", "--mamba2", "scan", "-fa", "0,1", "-fa", "auto")
    off, on, auto = (r["n_nodes"] for r in found)
    assert [r["flash_attn"] for r in found] == ["off", "on", "auto"] and off > on == auto
    assert all(r["check"] == "ok" and r["logits_nmse"] < 1e-6 for r in found)
    assert [s.flash_attn for s in product(parsed("-fa"))] == ["on"]
    with pytest.raises(SystemExit, match="2"):
        parsed("-fa", "yes")
