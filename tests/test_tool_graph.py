"""`pyggml graph`: its counts against the graph and the plan that really run, its outputs through their own parsers; the unrolled example."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
import sqlite3
import stat
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.models.layers import PARTS, SSM
from pyggml.testing import fabricate, nmse
from pyggml.tools import main

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "pr16982_unrolled.py"
ARCHS = ("mamba2", "granitehybrid", "nemotron_h")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pr16982_unrolled", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def graph(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main(["graph", *args]) == code
    return capsys.readouterr().out


# Counts and costs

@pytest.mark.parametrize("arch", ARCHS)
def test_the_rows_add_up(arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fabricate(arch, tmp_path / "m.gguf")
    model = pg.load_model(tmp_path / "m.gguf")
    out = json.loads(graph(capsys, "-m", str(tmp_path / "m.gguf"), "--compare", "scan,ssd", "-ub", "40", "--tokens", "1,2,64", "--chunk", "16", "--json"))
    assert [(g["form"], g["n_tokens"]) for g in out["graphs"]] == [(f, n) for f in ("scan", "ssd") for n in (1, 2, 40, 64)]
    for form in ("scan", "ssd"):
        counts = {g["n_tokens"]: g["n_nodes"] for g in out["graphs"] if g["form"] == form}
        assert counts[2] == counts[40] == counts[64] == model.graph(64, mamba2=form).n_nodes
    for d in out["detail"]:
        real = model.graph(40, mamba2=d["form"], chunk=16)
        assert d["n_nodes"] == real.n_nodes == len(d["nodes"]) and d["flops"] == real.stats().flops and d["bytes"] == real.stats().nbytes
        for rows in (d["parts"], d["ops"]):
            for key in ("n_nodes", "n_moves", "n_steps", "flops", "bytes_fused"):
                assert sum(r[key] for r in rows) == pytest.approx(d[key])
            assert sum(r["flops_share"] for r in rows) == pytest.approx(1)
        assert {r["op"]: r["n_nodes"] for r in d["ops"]} == real.stats().by_op
        assert {n["part"] for n in d["nodes"]} <= set(PARTS) and [r["part"] for r in d["parts"]] == [p for p in PARTS if p in {n["part"] for n in d["nodes"]}]
        assert d["n_groups"] == sum(g["n"] for g in d["groups"])
        assert d["n_nodes"] - d["n_steps"] == sum(r["n_nodes"] for r in d["ops"] if r["op"] in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")) + sum(
            g["n"] * g["ops"].count("+") for g in d["groups"])


def test_regions_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = json.loads(graph(capsys, "-m", str(pg.models.demo_path()), "--compare", "ssd", "-ub", "512", "--tokens", "512", "--json"))["detail"][0]
    listed = {g["ops"]: g["n"] for g in out["groups"]}
    region = next(ops for ops in listed if ops.startswith("strips("))
    assert listed[region] == 5 and "SUB + TRI + EXP + MUL, MUL_MAT" in region and region.count("MUL_MAT") == 4
    assert out["n_groups"] == sum(listed.values()) and sum(r["n_steps"] for r in out["parts"]) == out["n_steps"]
    model = pg.load_model(pg.models.demo_path())
    plan = open_backend("cpu", threads=1).plan(model.graph(512, mamba2="ssd"))
    lines = str(plan).splitlines()
    first = next(i for i, line in enumerate(lines) if "strips[8 x 1]" in line)
    assert lines[first + 2].split() == ["SUB+TRI+EXP+MUL", "sub+tri+exp+mul[rows]", "->", "surrogate_attention_matrix-0"]


def test_every_part_is_where_it_should_be(tmp_path: Path) -> None:
    fabricate("granitehybrid", tmp_path / "m.gguf")
    g = pg.load_model(tmp_path / "m.gguf").graph(20, mamba2="ssd", chunk=4)
    part = {n.name: (n.part, n.layer) for n in g.nodes}
    assert part["ssm_in-0"] == ("in-proj", 0) and part["conv_output_silu-0"] == ("conv", 0) and part["surrogate_attention_matrix-2"] == ("scan", 2)
    assert part["mamba2_gated-2"] == ("gated norm", 2) and part["mamba_out-0"] == ("out-proj", 0) and part["conv_state-0"] == ("state", 0)
    assert part["__fattn__-1"] == ("attention", 1) and part["ffn_up-1"] == ("mlp", 1) and part["l_out-1"] == ("residual", 1)
    assert part["inp_embd"] == ("embedding", None) and part["result_output"] == ("head", None)
    layers = [n.layer for n in g.nodes if n.layer is not None]
    assert set(layers) == {0, 1, 2}


@pytest.mark.parametrize("form", ("scan", "ssd"))
def test_plan_memory_is_what_a_context_allocates(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = json.loads(graph(capsys, "--mamba2", form, "--chunk", "16", "-ub", "48", "--tokens", "48", "-o", "jsonl"))
    ctx = pg.load_model(pg.models.demo_path()).context(n_ctx=48, mamba2=form, chunk=16, threads=1)
    ctx.decode(list(range(48)))
    (planned,) = ctx._plans.values()
    assert row["plan_bytes"] == planned.runner.plan.arena_bytes and row["scratch_bytes"] == planned.runner.plan.scratch_bytes
    assert row["n_steps"] == sum(s.outs[0].node is not None for s in planned.runner.plan.steps)


def test_without_fusion_every_node_that_is_no_view_is_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    (d,) = json.loads(graph(capsys, "--no-fuse", "-ub", "8", "--tokens", "8", "--json"))["detail"]
    assert d["n_groups"] == 0 and not d["groups"] and d["bytes"] == d["bytes_fused"]
    steps = {r["op"]: (r["n_steps"], r["n_nodes"]) for r in d["ops"] if r["op"] not in ("VIEW", "RESHAPE", "PERMUTE")}
    products = steps.pop("MUL_MAT")  # some have their columns prepared by a step before
    assert products[0] >= products[1] and all(n == nodes for n, nodes in steps.values())
    assert d["n_steps"] == products[0] + sum(n for n, _ in steps.values())


def test_sequences_share_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(x) for x in graph(capsys, "-np", "4", "-ub", "64", "--tokens", "64", "-o", "jsonl").splitlines()]
    assert [(r["n_tokens"], r["n_seqs"]) for r in rows] == [(64, 4)]
    assert rows[0]["n_nodes"] == pg.load_model(pg.models.demo_path()).graph(16, 4, mamba2="ssd").n_nodes


# What people read

def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    out = graph(capsys, "--tokens", "1,64,4096")
    assert re.search(r"^ssd: (\d+) nodes at 64 = 512 = 4096 tokens$", out, re.M)
    for title in ("by part of a layer", "by op", "fusion groups", "largest tensors of the plan"):
        assert f"ssd, 512 tokens, {title}" in out
    assert re.search(r"^attention +2 +\d+ ", out, re.M) and re.search(r"^ *\d+  SSM_CONV \+ ADD \+ SILU +conv$", out, re.M)
    assert re.search(r"^2\.5 MiB  ssm_in-0 ", out, re.M)
    both = graph(capsys, "--compare", "scan,ssd", "--tokens", "8", "-ub", "8")
    assert re.search(r"^part +nodes scan +nodes ssd +FLOP scan +FLOP ssd +bytes scan +bytes ssd$", both, re.M)
    assert re.search(r"^SSM_SCAN +5 +- ", both, re.M) and re.search(r"^all +\d+ +\d+ ", both, re.M)
    assert graph(capsys, "--tokens", "8", "-ub", "8", "-o", "md").count("| ---") >= 5


def test_rows_parse_as_csv_json_and_sql(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--compare", "scan,ssd", "--tokens", "1,8", "-ub", "8")
    want = [json.loads(x) for x in graph(capsys, *args, "-o", "jsonl").splitlines()]
    assert json.loads(graph(capsys, *args, "-o", "json")) == want and len(want) == 4
    rows = list(csv.DictReader(io.StringIO(graph(capsys, *args, "-o", "csv"))))
    assert [(r["form"], int(r["n_nodes"]), float(r["flops"])) for r in rows] == [(r["form"], r["n_nodes"], r["flops"]) for r in want]
    db = sqlite3.connect(":memory:")
    db.executescript(graph(capsys, *args, "-o", "sql"))
    assert db.execute("select form, n_nodes, plan_bytes from graphs").fetchall() == [(r["form"], r["n_nodes"], r["plan_bytes"]) for r in want]
    nodes = [json.loads(x) for x in graph(capsys, "--nodes", "--layer", "2", "-ub", "8", "-o", "jsonl").splitlines()]
    assert {n["layer"] for n in nodes} == {2} and nodes[-1]["name"] == "l_out-2"
    assert "__fattn__-2" in graph(capsys, "--nodes", "--layer", "2", "-ub", "8")


def test_dot_declares_what_it_joins(capsys: pytest.CaptureFixture[str]) -> None:
    for layers in ((), ("--layer", "0,2")):
        text = graph(capsys, "--dot", "-ub", "8", *layers)
        declared = set(re.findall(r"^ +([nt]\d+) \[", text, re.M))
        edges = re.findall(r"^  ([nt]\d+) -> (n\d+) ", text, re.M)
        assert text.startswith("digraph") and text.count("{") == text.count("}") and {x for e in edges for x in e} <= declared
        g = pg.load_model(pg.models.demo_path()).graph(8, mamba2="ssd")
        assert len([d for d in declared if d[0] == "n"]) == sum(not layers or n.layer in (0, 2) for n in g.nodes)


def test_svg_through_dot(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["graph", "--svg", str(tmp_path / "g.svg"), "--layer", "0"]) == 1
    assert capsys.readouterr().err == "pyggml graph: --svg needs Graphviz's program dot, which is not installed; --dot prints its input\n"
    dot = tmp_path / "dot"
    refuse = '[ "$3" = bad.svg ] && { echo "no such format" >&2; exit 3; }'
    dot.write_text(f'#!/bin/sh\n{refuse}\nwhile read -r line; do echo "$line"; done > "$3"\n', encoding="utf-8")
    dot.chmod(dot.stat().st_mode | stat.S_IEXEC)
    graph(capsys, "--svg", str(tmp_path / "g.svg"), "--layer", "0")
    assert (tmp_path / "g.svg").read_text(encoding="utf-8").startswith("digraph")
    assert main(["graph", "--svg", "bad.svg", "--layer", "0"]) == 1
    assert "dot says: no such format" in capsys.readouterr().err


@pytest.mark.parametrize(("args", "match"), [
    (("--layer", "99", "--dot"), "--layer 99: the graph has no such layer; legal: 0 to 6"),
    (("-m", "no-such.gguf"), "no-such.gguf"),
])
def test_faults_end_in_one_line(args: tuple[str, ...], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", *args]) == 1
    err = capsys.readouterr().err
    assert match in err and err.count("\n") == 1


@pytest.mark.parametrize(("form", "match"), [
    ("fast", "invalid choice: 'fast'; legal: auto, scan, ssd"), ("nowhere.py:f", "nowhere.py cannot be imported"), ("math:sine", "math has no function 'sine'"),
    ("math:pi", "math has no function 'pi'"), (":f", "no module cannot be imported"),
])
def test_a_form_that_is_none(form: str, match: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["graph", "--mamba2", form])
    assert match in capsys.readouterr().err


# The unrolled graph of PR 16982

def hparams(groups: int) -> dict[str, Any]:
    return {"n_embd": 32, "ssm_d_conv": 4, "ssm_d_inner": 64, "ssm_d_state": 16, "ssm_n_group": groups, "ssm_dt_rank": 8, "f_norm_rms_eps": 1e-5}


@pytest.mark.parametrize("groups", (1, 2, 8))
@pytest.mark.parametrize("n_seqs", (1, 3))
def test_unrolled_gives_what_the_scan_gives(example: ModuleType, groups: int, n_seqs: int) -> None:
    hp = hparams(groups)
    rng, p = np.random.default_rng(groups), SSM(hp)
    weights = example.layer_weights(hp, rng)
    x = pg.tensor([32, 21, n_seqs])
    conv, ssm = pg.tensor([*p.conv_ne, n_seqs]), pg.tensor([*p.ssm_ne, n_seqs])
    feeds = {t: rng.normal(size=t.ne[::-1]).astype(np.float32) for t in (x, conv, ssm)}
    want = pg.compute(pg.mamba2_layer(x, weights, conv, ssm, hp, form="scan"), feeds)
    got = pg.compute(example.pr16982_layer(x, weights, conv, ssm, hp, chunk=8), feeds)
    assert max(nmse(g, w) for g, w in zip(got, want, strict=True)) < 1e-11


def test_unrolled_grows_by_the_same_nodes_per_chunk(example: ModuleType) -> None:
    hp = hparams(1)
    weights, p = example.layer_weights(hp, np.random.default_rng(0)), SSM(hp)

    def count(n: int) -> int:
        return pg.Graph(example.pr16982_layer(pg.tensor([32, n]), weights, pg.tensor([*p.conv_ne]), pg.tensor([*p.ssm_ne]), hp, chunk=8)).n_nodes

    assert count(16) - count(8) == count(24) - count(16) == count(800) - count(792) > 40


def test_unrolled_runs_inside_a_model_and_is_reported(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    model = pg.load_model(pg.models.demo_path())
    ids = model.vocab.tokenize("Captain Wentworth had been in the navy")
    want = model.context(mamba2="scan", prec="f32").decode(ids)
    assert nmse(model.context(mamba2=example.pr16982_layer, chunk=3, prec="f32").decode(ids), want) < 1e-10
    out = graph(capsys, "--compare", f"ssd,{EXAMPLE}:pr16982_layer", "--chunk", "8", "--tokens", "8,16,24", "-ub", "8")
    assert re.search(r"^ssd: \d+ nodes at 8 = 16 = 24 tokens$", out, re.M)
    assert re.search(r"^pr16982_layer: the node count changes with the tokens: \d+ at 8, \d+ at 16, \d+ at 24$", out, re.M)


def test_unrolled_prints_its_growth(example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pr16982_unrolled.py", "--tokens", "16,64", "--chunk", "16", "-r", "1", "-t", "1", "-o", "csv"])
    example.main()
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    nodes = {(r["form"], r["chunk"], r["tokens"]): int(r["nodes"]) for r in rows}
    assert nodes["ssd", "16", "16"] == nodes["ssd", "16", "64"] and nodes["unrolled", "16", "64"] > nodes["unrolled", "16", "16"] + 100
    assert all(float(r["nmse"]) < 1e-11 and float(r["run_ms"]) > 0 for r in rows)


def test_porting_page(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Its program runs and gives its table; every name in it is in the graphs that it describes."""
    page = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
    program = page.partition("<!-- porting -->\n```python\n")[2].partition("```")[0].replace("from examples.pr16982_unrolled import", "from pr16982 import")
    module = ModuleType("pr16982")
    module.__dict__.update(vars(example))
    with pytest.MonkeyPatch.context() as m:
        m.setitem(__import__("sys").modules, "pr16982", module)
        exec(compile(program, "porting.md", "exec"), {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = [[x.replace("nodes", "").strip() for x in line.strip("|").split("|")] for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    assert printed == table and len(table) == 4
    hp = hparams(2)
    weights, p = example.layer_weights(hp, np.random.default_rng(0)), SSM(hp)
    args = pg.tensor([32, 24]), weights, pg.tensor([*p.conv_ne]), pg.tensor([*p.ssm_ne]), hp
    theirs = {n.name for n in pg.Graph(example.pr16982_layer(*args, chunk=8)).nodes}
    ours = {n.name for n in pg.Graph(pg.mamba2_layer(*args, form="ssd", chunk=8)).nodes}
    rows = [line.split("|")[1:4] for line in page.partition("| name | the draft")[2].partition("\n\n")[0].splitlines()[2:]]
    for name, draft, here in rows:
        for n in re.findall(r"`(\w+)`", name):
            assert f"{n}-0" in theirs
            assert f"{n}-0" in ours or f"{n}_masked-0" in ours and f"{n}_masked" in here
        for n in re.findall(r"`(\w+_chunk|exp_dtA_cumsum_last)`", draft):
            assert f"{n}-0" in theirs
    assert len(rows) == 16
