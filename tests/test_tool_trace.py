"""`pyggml trace`: values against what a plain run computes, and --diff against errors planted in one op of one layer, other forms, backends,
saved dumps, and text from llama.cpp (data/mamba2-2-groups-llama-eval.txt: commit 0c1e570, ids 10 20 30, flash attention off, f32 cache, in the
format of its eval-callback)."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.cpu import regions
from pyggml.errors import FormatError, ParamError
from pyggml.models.layers import named
from pyggml.runtime.trace import Traced, TracedBackend
from pyggml.testing import fabricate, nmse
from pyggml.tools import main
from pyggml.tools.trace_diff import Difference, Item, Pair, Side, compare, fits, pair, read_dump, read_pairs
from pyggml.tools.trace_text import read_text

DATA = Path(__file__).parent / "data"
PROMPT = ("-p", "Mrs. Bennet was not quite so much pleased")
IDS = [1000, 3, 5, 8, 13, 21, 34]
VIEWS = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")


def trace(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main(["trace", *args]) == code, capsys.readouterr().err
    return capsys.readouterr().out


def fails(capsys: pytest.CaptureFixture[str], match: str, *args: str) -> None:
    assert main(["trace", *args]) == 1
    err = capsys.readouterr().err
    assert re.search(match, err), err
    assert len([x for x in err.splitlines() if not x.startswith("pyggml: compiling")]) == 1


def run(form: str = "ssd", **options: Any) -> tuple[list[Traced], np.ndarray]:
    """All tensors of a prompt through the bundled model, and its logits."""
    ctx = pg.load_model(pg.models.demo_path()).context(mamba2=form, chunk=4, **{"threads": 1, **options})
    seen: list[Traced] = []
    ctx.backend = TracedBackend(ctx.backend, seen.append)
    return seen, ctx.decode(IDS)


# A traced run

@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("form", ("scan", "ssd"))
def test_tracing_changes_nothing_and_sees_everything(form: str, threads: int) -> None:
    seen, logits = run(form, threads=threads, fuse=False, reuse=False)
    model = pg.load_model(pg.models.demo_path())
    assert np.array_equal(logits, model.context(mamba2=form, chunk=4).decode(IDS))
    nodes = model.graph(len(IDS), mamba2=form, chunk=4).nodes
    assert [(t.i, t.op) for t in seen if t.k == 0] == [(i, n.op.name) for i, n in enumerate(nodes)]
    assert sum(t.k for t in seen) == sum(len(n.outputs) - 1 for n in nodes)
    by_name = {t.name: t for t in seen}
    assert np.array_equal(by_name["result_output_scaled"].value.ravel(), logits)  # type: ignore[union-attr]
    for t in seen:
        view = t.op in VIEWS
        assert (t.kernel == "") == view and (t.seconds is None) == (view or t.k > 0)
        assert t.value is not None and t.value.shape == t.ne[::-1]
        assert t.seconds is None or 0 < t.seconds < 5
    scaled = by_name["inp_embd_scaled"]
    assert [s.name for s in scaled.src if s] == ["inp_embd"] and scaled.kernel == "scale[flat]" and scaled.part == "embedding"
    assert nmse(scaled.value, by_name["inp_embd"].value * np.float32(12)) < 1e-14  # type: ignore[operator,arg-type,union-attr]


@pytest.mark.parametrize("reuse", (False, True))
def test_fused_and_reused_memory_gives_the_same_values(reuse: bool) -> None:
    plain, _ = run(fuse=False, reuse=False)
    fused, _ = run(fuse=True, reuse=reuse)
    away = [t for t in fused if t.fused_into]
    assert away and all(t.value is None and t.seconds is None for t in away)
    assert {t.fused_into for t in away} <= {t.name for t in fused if t.value is not None}
    for a, b in zip(plain, fused, strict=True):
        assert b.fused_into or np.array_equal(a.value, b.value, equal_nan=True), b.name  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ("scan", "ssd"))
def test_regions_give_the_same_values(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the steps around them are reordered, a tensor that is stored is seen, once, as it is without them."""
    plain, _ = run(form, fuse=False, reuse=False)
    for limit in ("LARGE", "WORTH", "INNER_FROM", "INNER_LARGE", "INNER_WORTH"):
        monkeypatch.setattr(regions, limit, 1)
    fused, _ = run(form)
    assert any(" in strips[" in t.kernel and t.value is not None for t in fused)
    assert any(t.kernel.count(" in strips[") == 2 for t in fused) == (form == "ssd")
    assert sum(t.value is not None for t in fused) > len(fused) / 3
    for a, b in zip(plain, fused, strict=True):
        assert b.value is None or np.array_equal(a.value, b.value, equal_nan=True), b.name  # type: ignore[arg-type]


def test_writes_in_place_are_seen_at_their_time() -> None:
    pool = pg.tensor(np.zeros((3, 2), np.float32), name="pool")
    rows, one, two = pg.tensor([2, 1], name="rows"), pg.tensor([1], "i32", name="one"), pg.tensor([1], "i32", name="two")
    first = pg.set_rows(pool, rows, one)
    second = pg.set_rows(first, pg.scale(rows, 10.0), two)
    seen: list[Traced] = []
    runner = TracedBackend(open_backend("cpu", threads=1), seen.append).compile(pg.Graph([second]))
    for t, v in ((rows, [[1.0, 2.0]]), (one, [0]), (two, [2])):
        runner.set(t, np.array(v, t.dtype.np))
    runner.run()
    values = {t.i: t.value.reshape(-1, 2).tolist() for t in seen if t.op == "SET_ROWS" and t.value is not None}
    assert list(values.values()) == [[[1, 2], [0, 0], [0, 0]], [[1, 2], [0, 0], [10, 20]]]


@pytest.mark.parametrize("threads", (1, 2))
def test_times_are_there_for_every_step(threads: int) -> None:
    x = pg.tensor([64, 8], name="x")
    y = x
    for _ in range(5):
        y = pg.cont(pg.transpose(pg.reshape(pg.mul_mat(y, y), [8, 8])))
    runner: Any = open_backend("cpu", threads=threads, fuse=False).compile(pg.Graph([y]))
    runner.set(x, np.full((8, 64), 0.01, np.float32))
    times = np.zeros(len(runner.plan.steps), np.int64)
    runner.run(times)
    assert (np.diff(np.concatenate([[runner.team.start_ns], times])) > 0).all()
    want = runner.get(y)
    for i in range(len(runner.plan.steps)):
        assert 0 < runner.run_steps(i, i + 1) < 5
    assert np.array_equal(runner.get(y), want)


def test_stats() -> None:
    def of(*values: float) -> Traced:
        return Traced(0, 0, None, "", "ADD", "t", "f32", (len(values), 1, 1, 1), None, (), value=np.array(values, np.float32).reshape(1, 1, 1, -1))

    assert of(1, -2, 4).stats() == (3.0, -2.0, 4.0, 0, 0)
    s = of(1, np.nan, np.inf, -np.inf).stats()
    assert s is not None and s.n_nan == 1 and s.n_inf == 2
    assert of(1, 2, 3, 4, 5).ends(2) == ([1, 2], [4, 5]) and of(1, 2, 3).ends(2) == ([1, 2, 3], []) and of(1, 2, 3).ends(0) == ([], [])


# What is printed

def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    out = trace(capsys, *PROMPT, "--layer", "0", "--mamba2", "ssd", "--chunk", "4")
    line, facts = next((a, b) for a, b in zip(out.splitlines(), out.splitlines()[1:], strict=False) if " CONCAT " in a)
    assert re.search(r"^ +\d+ L0  conv +CONCAT +conv_input-0 +f32 \[768, 12\]  <- node_\d+ f32 \[768, 3\], ssm_in-0 \(view\) f32 \[768, 9\]$", line)
    assert re.search(r"^ +concat +[\d.]+ us  sum +\S+  min +\S+  max +\S+ +0\.0000 +0\.0000 +0\.0000  \.\.\.( +-?\d+\.\d{4}){3}$", facts)
    assert re.search(r"VIEW +ssm_in-0 \(view\) +f32 \[512, 9\] nb \[4, 5152, \d+, \d+\]", out)
    assert re.search(r"segsum_masked-0 .*\n +tri\[rows\] .* min +-inf .* \d+ inf ", out)
    short = trace(capsys, *PROMPT, "--filter", "attn_norm-[05]$", "--values", "1", "--precision", "2")
    assert len(short.splitlines()) == 4 and re.search(r" -?\d+\.\d\d  \.\.\. +-?\d+\.\d\d$", short.splitlines()[1])
    assert trace(capsys, *PROMPT, "--filter", "dt-0", "--values", "all").count("\n") > 9
    assert trace(capsys, *PROMPT, "--filter", "dt-0", "--filter", "l_out", "--layer", "0,1").count("<-") == 3


def test_fusion_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    out = trace(capsys, *PROMPT, "--layer", "0", "--fuse", "--reuse", "--filter", "node|conv_output_silu-0$")
    assert re.search(r"ADD +node_\d+ .*\n +ssm_conv_windows\+add\+silu +fused into conv_output_silu-0$", out, re.M)


def test_past_is_run_and_not_traced(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(x) for x in trace(capsys, "--ids", "1,2,3,4", "--past", "3", "-o", "jsonl", "--values", "all").splitlines()]
    ctx = pg.load_model(pg.models.demo_path()).context(prec="f32")
    want = [ctx.decode([1, 2, 3]), ctx.decode([4])][1]
    last = next(r for r in rows if r["name"] == "result_output_scaled")
    assert np.array_equal(np.array(last["first"], np.float32), want) and next(r for r in rows if r["name"] == "attn_norm-0")["ne"] == [256, 1, 1, 1]


def test_rows_parse(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--ids", "1,2,3", "--layer", "2", "--mamba2", "ssd")
    want = [json.loads(x) for x in trace(capsys, *args, "-o", "jsonl").splitlines()]
    assert {r["layer"] for r in want} == {2} and {"kernel", "us", "sum", "min", "max", "n_nan", "first", "last", "src", "nb"} <= want[0].keys()
    assert [r["name"] for r in csv.DictReader(io.StringIO(trace(capsys, *args, "-o", "csv")))] == [r["name"] for r in want]
    assert [r["sum"] for r in json.loads(trace(capsys, *args, "-o", "json"))] == [r["sum"] for r in want]
    db = sqlite3.connect(":memory:")
    db.executescript(trace(capsys, *args, "-o", "sql"))
    assert db.execute("select op, name, sum from tensors").fetchall() == [(r["op"], r["name"], r["sum"]) for r in want]


USER = '''
import math
import pyggml as pg
from pyggml.models import ssd


def wrong(layer, name, change):
    """mamba2_layer in the ssd form, whose `name` op gets `change` in one layer."""
    def made(x, weights, conv, ssm, hparams, *, form, chunk):
        good = getattr(ssd, name)
        if pg.current_scope().layer == layer:
            setattr(ssd, name, lambda *a, **k: change(good, *a, **k))
        try:
            return pg.mamba2_layer(x, weights, conv, ssm, hparams, form="ssd", chunk=chunk)
        finally:
            setattr(ssd, name, good)
    return made


cumsum_3 = wrong(3, "cumsum", lambda f, x, **k: f(x, **{**k, "exclusive": True}))
tri_4 = wrong(4, "tri", lambda f, x, kind, fill: f(x, kind, fill=-3.0))
exp_1 = wrong(1, "exp", lambda f, x: f(pg.scale(x, 1.01)))
mul_mat_6 = wrong(6, "mul_mat", lambda f, a, b, **k: f(a, pg.scale(b, 1.001), **k))


def nan_3(x, weights, conv, ssm, hparams, *, form, chunk):
    y, conv, ssm = pg.mamba2_layer(x, weights, conv, ssm, hparams, form="ssd", chunk=chunk)
    return (pg.log(pg.scale(y, -1.0)) if pg.current_scope().layer == 3 else y), conv, ssm
'''


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("user") / "layers.py"
    path.write_text(USER, encoding="utf-8")
    return str(path)


def test_nan_stop(user: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *PROMPT, "--mamba2", f"{user}:nan_3", "--nan-stop"]) == 1
    got = capsys.readouterr()
    assert re.search(r"^pyggml trace: node_\d+, layer 3, mamba2 holds the first NaN, made by LOG from node_\d+$", got.err, re.M)
    assert " LOG " in got.out.splitlines()[-2] and re.search(r" \d+ NaN ", got.out.splitlines()[-1])


# Two runs

@pytest.mark.parametrize(("function", "tensor", "op", "layer"), [
    ("cumsum_3", "dtA_cumsum-3", "CUMSUM", 3), ("tri_4", "segsum_masked-4", "TRI", 4), ("exp_1", "decay_masked-1", "EXP", 1),
    ("mul_mat_6", "CB-6", "MUL_MAT", 6),
])
def test_a_planted_error_is_named(user: str, function: str, tensor: str, op: str, layer: int, capsys: pytest.CaptureFixture[str]) -> None:
    out = trace(capsys, *PROMPT, "--chunk", "4", "--diff", "ssd", f"{user}:{function}", code=1)
    assert re.search(rf"^first difference  {tensor}, layer {layer}, scan$", out, re.M)
    assert re.search(rf"^made by           {op} \(", out, re.M)
    assert re.search(r"^NMSE              \S+ \(limit 1e-06\), f(32|64) \[", out, re.M) and re.search(r"^greatest          \|A - B\| = ", out, re.M)
    assert "(NMSE 0.0e+00)" in next(x for x in out.splitlines() if x.startswith("before it"))
    against_scan = trace(capsys, *PROMPT, "--chunk", "4", "--diff", "scan", f"{user}:{function}", code=1)
    assert re.search(rf"^first difference  (ssm_state|mamba2_y_add_d)-{layer}, layer {layer}, scan$", against_scan, re.M)


def test_a_planted_node_is_named(user: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The graphs differ in a node: what lies between the first difference and tensors that are equal says which."""
    out = trace(capsys, *PROMPT, "--chunk", "4", "--diff", "ssd", f"{user}:exp_1", code=1)
    assert re.search(r"^from              segsum_masked-1: NMSE 0\.0e\+00, through node_\d+ \(SCALE\)$", out, re.M)


def test_an_error_in_a_kernel_is_named_against_the_reference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = pg.find_op("SSM_CONV").reference_fn

    def bad(sx: np.ndarray, c: np.ndarray, *, n_t: int | None) -> np.ndarray:
        y: np.ndarray = good(sx, c, n_t=n_t)
        return y * np.where(np.arange(y.shape[-1]) == 5, 1.5, 1)

    monkeypatch.setattr(pg.find_op("SSM_CONV"), "_reference", bad)
    out = trace(capsys, *PROMPT, "--diff", "reference", "cpu", "--mamba2", "ssd", code=1)
    assert re.search(r"^made by           SSM_CONV \(ssm_conv", out, re.M) and re.search(r"^first difference  node_\d+, layer 0, conv$", out, re.M)
    assert re.search(r"^greatest          \|A - B\| = \S+ at \[5, \d, 0, 0\]", out, re.M)


@pytest.mark.parametrize(("a", "b"), [
    ("scan", "ssd"), ("cpu", "reference"), ("ssd,chunk=3", "ssd,chunk=64"), ("ssd", "ssd,fuse,reuse,t=2"), ("level=avx2", "level=portable"),
    ("type-s=f32", "scan,mamba2=scan"), ("ctk=f32,ctv=f32", "ctk=f32,ctv=f32,reference"),
])
def test_what_is_the_same_has_no_difference(a: str, b: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = trace(capsys, *PROMPT, "--mamba2", "ssd", "--chunk", "4", "--diff", a, b)
    assert re.search(r"^no difference", out, re.M) and int(re.search(r"^(\d+) tensors compared", out, re.M).group(1)) > 80  # type: ignore[union-attr]


def test_two_quantizations(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(shared / "models" / f"granite-h-demo-{t}.gguf") for t in ("F32", "Q8_0")]
    out = trace(capsys, *PROMPT, "--diff", *files, code=1)
    assert "first difference  inp_embd, embedding" in out and "token_embd.weight" in out and "node by node" in out
    trace(capsys, *PROMPT, "--diff", *files, "--limit", "1e-2")


def test_ggml_backend(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("libggml")
    fabricate("granitehybrid", tmp_path / "m.gguf")
    trace(capsys, "-m", str(tmp_path / "m.gguf"), "--ids", "5,6,7,8", "--diff", "cpu", "ggml", "--mamba2", "scan", "-fa", "off")


def test_differences_parse(user: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = (*PROMPT, "--chunk", "4", "--diff", "ssd", f"{user}:exp_1", "--layer", "1")
    rows = [json.loads(x) for x in trace(capsys, *args, "-o", "jsonl", code=1).splitlines()]
    assert rows[0]["name"] == "decay_masked-1" and rows[0]["nmse"] > 1e-6 and all(r["nmse"] > 1e-6 for r in rows)
    everything = list(csv.DictReader(io.StringIO(trace(capsys, *args, "--all", "-o", "csv", code=1))))
    assert len(everything) > len(rows) and {r["layer"] for r in everything} == {"1"}
    assert "| decay_masked-1" in trace(capsys, *args, "-o", "md", code=1)


# Saved runs

def test_save_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "dump"
    assert trace(capsys, "--ids", "1,2,3", "--mamba2", "ssd", "--save", str(folder)) == ""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    seen = {t["name"]: t for t in index["tensors"]}
    z = np.load(folder / "values.npz")
    assert index["about"] == "granite-h-demo-Q8_0.gguf, ssd, chunk by default, cpu, not fused, no memory reused, 3 tokens"
    assert len(z.files) == len(index["tensors"])
    logits = pg.load_model(pg.models.demo_path()).context(mamba2="ssd", prec="f32").decode([1, 2, 3])
    assert np.array_equal(z[seen["result_output_scaled"]["key"]].ravel(), logits)
    assert "no difference at all" in trace(capsys, "--ids", "1,2,3", "--diff", str(folder), "ssd")
    assert "no difference: " in trace(capsys, "--ids", "1,2,3", "--diff", "scan", str(folder))
    key = seen["ffn_up-4"]["key"]
    wrong = z[key].copy()
    wrong[0, 0, 1, 7] += 1
    np.savez(folder / "values.npz", **{k: wrong if k == key else z[k] for k in z.files})
    out = trace(capsys, "--ids", "1,2,3", "--diff", "ssd", str(folder), code=1)
    assert "first difference  ffn_up-4, layer 4, mlp" in out and "over the limit: 1 of" in out and "at [7, 1, 0, 0]" in out


def test_a_filtered_save_holds_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace(capsys, "--ids", "1,2,3", "--filter", "l_out", "--save", str(tmp_path / "d"))
    assert [x.name for x in read_dump(tmp_path / "d", "d").items] == [f"l_out-{i}" for i in range(7)]
    assert re.search(r"^7 tensors compared, by the names", trace(capsys, "--ids", "1,2,3", "--diff", str(tmp_path / "d"), "ssd"), re.M)


@pytest.mark.parametrize("how", ("no-index", "no-values", "not-json", "short", "key", "shape", "cut"))
def test_broken_dumps(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "d"
    trace(capsys, "--ids", "1,2", "--filter", "l_out", "--save", str(folder))
    index, values = folder / "index.json", folder / "values.npz"
    text = index.read_text(encoding="utf-8")
    match how:
        case "no-index":
            index.unlink()
        case "no-values":
            values.unlink()
        case "not-json":
            index.write_text(text[:-9], encoding="utf-8")
        case "short":
            index.write_text('{"about": "x", "tensors": [{"i": 1}]}', encoding="utf-8")
        case "key":
            index.write_text(re.sub(r'"key": "(\d+)"', '"key": "x"', text, count=1), encoding="utf-8")
        case "shape":
            index.write_text(text.replace('"ne": [256, 2, 1, 1]', '"ne": [256, 3, 1, 1]', 1), encoding="utf-8")
        case "cut":
            values.write_bytes(values.read_bytes()[:-100])
    fails(capsys, f"pyggml trace: {folder}: ", "--ids", "1,2", "--diff", str(folder), "scan")


# Llama.cpp's text

LLAMA = DATA / "mamba2-2-groups-llama-eval.txt"
MODEL = ("-m", str(DATA / "mamba2-2-groups.gguf"), "--ids", "10,20,30")


@pytest.mark.parametrize("form", ("scan", "ssd,chunk=2", "reference"))
def test_llama_cpp_agrees(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = trace(capsys, *MODEL, "--diff", str(LLAMA), form, "--all")
    assert re.search(r"^11 tensors compared, by the names that both graphs give$", out, re.M)
    for name in (r"inp_embd \(A: embd\)", "attn_norm-0", "mamba2_y_add_d-1", "mamba_out-0", "l_out-1", "result_norm", "result_output"):
        assert re.search(rf" {name} .* elements and the sum ", out), name
    assert "no difference" in trace(capsys, *MODEL, "--diff", form, str(LLAMA))


@pytest.mark.parametrize("what", ("element", "sum"))
def test_a_wrong_number_in_the_text_is_named(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = LLAMA.read_text(encoding="utf-8")
    at = text.index("mamba_out-1 = (f32)")
    number = re.compile(r"(?<=\[)\s+-?\d+\.\d{4}(?=,)" if what == "element" else r"(?<=sum = )-?\d+\.\d+")
    found = number.search(text, at)
    assert found is not None
    (tmp_path / "wrong.txt").write_text(text[:found.start()] + f"{float(found[0]) + 0.5:.4f}" + text[found.end():], encoding="utf-8")
    out = trace(capsys, *MODEL, "--diff", "scan", str(tmp_path / "wrong.txt"), code=1)
    assert re.search(r"^first difference  mamba_out-1, layer 1", out, re.M) and "made by           MUL_MAT" in out and "over the limit: 1 of 11" in out
    same = trace(capsys, "--diff", str(LLAMA), str(tmp_path / "wrong.txt"), code=1 if what == "element" else 0)
    assert what == "sum" or "first difference  mamba_out-1" in same


def test_a_hybrid_against_llama_cpp_names(tmp_path: Path) -> None:
    """Names that llama.cpp gives to other tensors, and rows that it drops before the last layer's MLP."""
    (tmp_path / "t.txt").write_text("\n".join(
        f"common_debug_cb_eval: {name} = (f32) {op}(a{{4, 3, 1, 1}}, }}) = {{{ne}}}\n    [\n        [\n"
        "            [      1.0000,       2.0000  ],\n        ],\n    ]\n    sum = 3.0"
        for name, op, ne in (("embd", "SCALE", "2, 1, 1, 1"), ("kqv_out-4", "CONT", "2, 1, 1, 1"), ("l_out-6", "ADD", "2, 1, 1, 1"),
                             ("result_output", "SCALE", "2, 1, 1, 1"))), encoding="utf-8")
    from pyggml.tools.trace_diff import text_side
    b = text_side(tmp_path / "t.txt", "t")
    row = np.array([1.0, 2.0])

    def item(i: int, name: str, value: np.ndarray) -> Item:
        ne = (*value.shape[::-1], 1, 1, 1)[:4]
        return Item(i, None, "", "ADD", name, "f32", (ne[0], ne[1], ne[2], ne[3]), [], "", lambda: value.reshape(ne[::-1]))

    a = Side("a", "a", [item(0, "inp_embd", row * 0), item(1, "inp_embd_scaled", row), item(2, "kqv_out-4", row),
                        item(3, "l_out-6", np.stack([row * 0, row])), item(4, "result_output", row * 0), item(5, "result_output_scaled", row)])
    pairs, _ = pair(a, b)
    assert [(p.a.name, p.b.name) for p in pairs] == [("inp_embd_scaled", "embd"), ("kqv_out-4", "kqv_out-4"), ("l_out-6", "l_out-6"),
                                                     ("result_output_scaled", "result_output")]
    found = [compare(p) for p in pairs]
    assert all(d is not None and d.nmse == 0 for d in found)
    assert found[2] is not None and found[2].how.startswith("last 1 of 2, ")


OLD = """
ggml_debug:                 inp_embd = (f32)   GET_ROWS(token_embd.weight{2560, 51200, 1, 1}, inp_tokens{1, 1, 1, 1}}) = {6, 2, 1, 1}
                                     [
                                      [
                                       [ -0.0181,   0.0272,   0.0272, ...],
                                       [  1.5000,   2.0000,   inf, ...],
                                      ],
                                     ]
ggml_debug:                   norm-0 = (f32)       NORM(CUDA0#inp_embd#0{2560, 1, 1, 1}, }) = {2560, 1, 1, 1}
unrelated text
"""


def test_old_text(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text(OLD, encoding="utf-8")
    a, b = read_text(tmp_path / "old.txt")
    assert (a.name, a.op, a.dtype, a.ne, a.total) == ("inp_embd", "GET_ROWS", "f32", (6, 2, 1, 1), None)
    assert a.src == [("token_embd.weight", (2560, 51200, 1, 1)), ("inp_tokens", (1, 1, 1, 1))] and b.src == [("CUDA0#inp_embd#0", (2560, 1, 1, 1))]
    assert a.values is not None and a.values.shape == (1, 1, 2, 3) and a.at[0].tolist() == [0, 1, 2] and np.isinf(a.values[0, 0, 1, 2]) and b.values is None


@pytest.mark.parametrize(("text", "match"), [
    ("nothing here\n", "no line of the form"), (OLD.replace("1.5000,   ", ""), r"'inp_embd' \[6, 2, 1, 1\]: 5 elements are printed where 6 belong"),
    (OLD.replace("1.5000", "x"), "'inp_embd': could not convert"),
])
def test_broken_text(text: str, match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=match):
        read_text(tmp_path / "t.txt")
    fails(capsys, match, *MODEL, "--diff", str(tmp_path / "t.txt"), "scan")


# Pairs and shapes

def test_pairs_file(tmp_path: Path, user: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = "# scan's name, ssd's\nmamba2_gated-{il}, mamba2_gated-{il}\ndt-0 mamba_out-0   # wrong on purpose\n"
    (tmp_path / "pairs").write_text(text, encoding="utf-8")
    out = trace(capsys, *PROMPT, "--diff", "scan", "ssd", "--pairs", str(tmp_path / "pairs"), "--filter", "mamba_out-0$|mamba2_gated", "--all")
    assert "6 by the list" in out and "no difference" in out and re.search(r"mamba_out-0 \(A: dt-0\).* fit by no transpose or view", out)
    (tmp_path / "pairs").write_text("l_out-0 = l_out-1\n", encoding="utf-8")
    args = (*PROMPT, "--diff", "scan", "ssd", "--pairs", str(tmp_path / "pairs"))
    fails(capsys, r"--pairs .*, line 1: found 'l_out-0 = l_out-1'; legal: A's name, B's name", *args)
    (tmp_path / "pairs").write_text("mine-{il} yours-{il}\n", encoding="utf-8")
    fails(capsys, "--pairs: none of its 1 pairs is there; A has inp_embd", *args)
    with pytest.raises(ParamError, match="^--pairs nowhere: No such file or directory$"):
        read_pairs("nowhere")


def item(name: str, value: np.ndarray, part: str = "conv", i: int = 0) -> Item:
    v = value.reshape((1,) * (4 - value.ndim) + value.shape)
    ne = v.shape[::-1]
    return Item(i, 0, part, "ADD", name, "f32", (ne[0], ne[1], ne[2], ne[3]), [], "", lambda: v)


X = np.random.default_rng(0).normal(size=(3, 4, 5))


@pytest.mark.parametrize(("a", "b", "how", "inside"), [
    (X, X, "", True), (X, X[:, None], "", True), (X, X.transpose(2, 0, 1), "transposed", True), (X, X.reshape(12, 5), "reshaped", False),
    (X, X.transpose(1, 0, 2).reshape(4, 15), "transposed and reshaped", False), (X.transpose(1, 0, 2).reshape(4, 15), X, "transposed and reshaped", False),
    (X, X[:, :2], "first 2 of 4", False), (X[:, 2:], X, "last 2 of 4", False), (X[0], X[0, 3], "last 1 of 4", False),
    (X.reshape(6, 10), X, "reshaped", False), (X[0, 0], X[0, 0], "", True),
])
def test_layouts_that_mean_the_same(a: np.ndarray, b: np.ndarray, how: str, inside: bool) -> None:
    d = compare(Pair(item("x", a), item("x", b)))
    assert d is not None and d.nmse == 0 and d.how == how
    within = compare(Pair(item("x", a, "scan"), item("x", b, "scan")))
    assert within is not None and within.compared == inside


def test_layouts_that_do_not() -> None:
    for a, b in ((X, X[:2].transpose(2, 1, 0)), (X, np.zeros(7)), (X, np.zeros((3, 4, 6))[:, :3])):
        d = compare(Pair(item("x", a), item("x", b)))
        assert d is not None and not d.compared and "fit by no transpose or view" in d.how
    assert len(list(fits(X, (4, 3, 5), True))) == 1


@pytest.mark.parametrize(("a", "b", "want"), [
    ([1, 2, 3, 4], [1, 2, 3, 4], 0), ([1, np.nan], [1, np.nan], 0), ([np.inf, 1], [np.inf, 1], 0), ([1, 2], [1, np.nan], np.inf),
    ([np.inf, 1], [-np.inf, 1], np.inf), ([3, 4], [3, 5], 1 / 25), ([0, 0], [0, 2], 4),
])
def test_nmse_of_a_pair(a: list[float], b: list[float], want: float) -> None:
    d = compare(Pair(item("x", np.array(a, float)), item("x", np.array(b, float))))
    assert d is not None and d.nmse == pytest.approx(want)
    assert want == 0 or (d.at == (1, 0, 0, 0) or d.at == (0, 0, 0, 0)) and d.max_abs > 0


def side(*names: str, op: str = "ADD") -> Side:
    made = [item(n, np.ones(3), i=i) for i, n in enumerate(names)]
    for x in made:
        x.op = op
    return Side("s", "s", made)


def test_pairing() -> None:
    def names(a: Side, b: Side) -> list[tuple[int, int]]:
        return [(p.a.i, p.b.i) for p in pair(a, b)[0]]

    assert names(side("node_0", "x", "x"), side("node_0", "x", "x")) == [(0, 0), (1, 1), (2, 2)]  # the same graph: unnamed nodes too
    assert names(side("node_0", "x", "y", "x"), side("node_0", "x", "x", "z")) == [(1, 1), (3, 2)]  # the k-th with the k-th
    assert names(side("x", "x", "x"), side("y", "x")) == [(2, 1)]  # else the last with the last
    assert names(side("x (view)", "node_1", "leaf_2", "y"), side("x (view)", "node_1", "y", "leaf_2", "w")) == [(3, 2)]
    assert names(side("x", "x (view)", op="VIEW"), side("x", "x (view)", op="VIEW")) == [(0, 0)]  # a view without a name repeats its source
    assert isinstance(compare(pair(side("x"), side("x", "y"))[0][0]), Difference)


# Wrong use

@pytest.mark.parametrize(("args", "match"), [
    (("--diff", "scan", "sdd", "-p", "x"), "--diff sdd: 'sdd' is no form, no backend, none of fuse, reuse, m=, mamba2=, "),
    (("--diff", "chunk=0", "ssd", "-p", "x"), "--diff chunk=0: chunk: '0'; legal: a whole number"),
    (("--diff", "scan", "backend=tpu", "-p", "x"), "backend 'tpu' is unknown"),
    (("--diff", "scan", "no.py:f", "-p", "x"), "--diff no.py:f: .*cannot be imported"),
    (("--diff", "scan", "ssd", "-p", "x", "--filter", "nothing"), "there are no two tensors to compare"),
    (("--diff", "scan", "ssd", "--save", "x"), "--save and --nan-stop go with a single run"),
    (("-p", "x", "--filter", "nothing"), "no tensor passes --filter and --layer"),
    (("-p", "x", "--past", "9"), "the prompt has 1 tokens, --past 9; at least one must be left"),
    (("--ids", "1,2,3", "-ub", "2"), "3 tokens to trace; legal: at most -ub 2"),
    (("--ids", "1,99999"), "token id 99999"),
    (("-p", "x", "--level", "sse"), "level"),
    (("-p", "x", "--diff", "fa=maybe", "scan"), "--diff fa=maybe: fa: invalid choice: 'maybe'; legal: on, off, auto, 0, 1"),
    (("-p", "x", "--save", __file__), "--save .*: "),
])
def test_faults_end_in_one_line(args: tuple[str, ...], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    fails(capsys, match, *args)


@pytest.mark.parametrize(("args", "match"), [
    (("--filter", "("), "argument --filter: '\\('"), (("--values", "some"), "argument --values: 'some'"), (("--diff", "scan"), "expected 2 arguments"),
    (("--backend", "null"), "invalid choice: 'null'"), (("-p", "x", "--ids", "1"), "not allowed with"),
    (("--limit", "nan"), "argument --limit: 'nan'; legal: a number of at least 0"), (("--limit", "-1"), "argument --limit: '-1'"),
])
def test_wrong_usage(args: tuple[str, ...], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["trace", *args])
    assert re.search(match, capsys.readouterr().err)


def test_stdin_serves_both_sides(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Emma was")))
    assert "no difference" in trace(capsys, "-m", str(pg.models.demo_path()), "--diff", "scan", "ssd")


def test_a_user_layer_names_its_tensors_by_the_layer_it_is_in() -> None:
    def mine(x: pg.Tensor, weights: Any, conv: pg.Tensor, ssm: pg.Tensor, hparams: Any, *, form: str, chunk: Any) -> tuple[pg.Tensor, ...]:
        y, c, s = pg.mamba2_layer(x, weights, conv, ssm, hparams, form="ssd", chunk=chunk)
        return named(pg.scale(y, 1.0), "mine", pg.current_scope().layer), c, s

    g = pg.load_model(pg.models.demo_path()).graph(8, mamba2=mine)
    node: Callable[[str], Any] = lambda name: g.find(name).node  # noqa: E731
    assert (node("mine-3").part, node("mine-3").layer) == ("mamba2", 3) and (node("CB-4").part, node("CB-4").layer) == ("scan", 4)
