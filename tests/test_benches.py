"""The programs in benches/: what they time computes what the recurrence says; their reports say what was measured."""

from __future__ import annotations

import importlib
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.errors import FormatError
from pyggml.testing import nmse

Load = Callable[[str], ModuleType]
# Enough shapes to have padding, groups of several heads, and chunks that do not divide the tokens.
SHAPE, N_TOK, CHUNKS = (32, 16, 4, 2), 37, (1, 8, 16, 64)


@pytest.fixture
def load(root: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports a program of benches/ as Python does that runs it: its folder is the first on the path."""
    if not (root / "benches").is_dir():
        pytest.skip("no benches/ beside the tests")
    monkeypatch.syspath_prepend(root / "benches")
    return importlib.import_module


def by_hand(data: dict[str, np.ndarray], shape: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """y and state head by head and token by token, in float64."""
    d_state, head_dim, n_head, n_group = shape
    rows, dt = data["rows"].astype(np.float64), np.log1p(np.exp(data["dt"][0].astype(np.float64)))
    state, y = data["s"][0].astype(np.float64), np.zeros((len(rows), n_head, head_dim))
    for t, row in enumerate(rows):
        x, (b, c) = row[:n_head * head_dim].reshape(n_head, head_dim), row[n_head * head_dim:].reshape(2, n_group, d_state)
        for h in range(n_head):
            g = h // (n_head // n_group)
            state[h] = state[h] * np.exp(dt[t, h] * data["A"][h, 0]) + dt[t, h] * np.outer(x[h], b[g])
            y[t, h] = state[h] @ c[g] + data["D"][h, 0] * x[h]
    return y, state


def test_the_exact_recurrence_at_every_length(load: Load) -> None:
    layer = load("layer_product")
    shape = layer.Shape(*SHAPE)
    data = layer.inputs(shape, N_TOK)
    for n, y, state in layer.exact(data, shape, [1, 5, N_TOK]):
        want = by_hand(layer.first(data, n), SHAPE)
        assert y.shape == (1, n, 4, 16) and nmse(y, want[0]) < 1e-28 and nmse(state, want[1]) < 1e-28


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("form", "limit"), [("scan", 1e-12), ("ssd f32", 1e-12), ("ssd bf16", 1.5e-5), ("ssd_fused f32", 1e-11),
                                             ("ssd_fused bf16", 1.5e-5), ("unrolled", 1e-12)])
def test_every_form_makes_the_product(form: str, limit: float, chunk: int, load: Load) -> None:
    layer = load("layer_product")
    shape = layer.Shape(*SHAPE)
    name, _, precision = form.partition(" ")
    made = layer.scan if name == "scan" else getattr(layer, name)(chunk, *[precision] * bool(precision))
    data = layer.inputs(shape, N_TOK)
    lane = layer.Lane(shape, data, made, open_backend("cpu", threads=2))
    for got, want in zip(lane.outputs(), by_hand(data, SHAPE), strict=True):
        assert nmse(got, want) <= limit


def test_lanes_take_turns_on_one_memory(load: Load) -> None:
    layer = load("layer_product")
    shape, backend = layer.Shape(*SHAPE), open_backend("cpu", threads=2)
    data = layer.inputs(shape, N_TOK)
    lanes = {"scan": layer.Lane(shape, data, layer.scan, backend), "ssd": layer.Lane(shape, data, layer.ssd(16), backend)}
    before = [lane.outputs()[0] for lane in lanes.values()]
    took = layer.medians(lanes, 2, repeat=3)
    assert list(took) == ["scan", "ssd"] and min(took.values()) > 0
    assert all(np.array_equal(a, lane.outputs()[0]) for a, lane in zip(before, lanes.values(), strict=True))


# The cross-over

def row(ubatch: int, form: str, chunk: int | None, us: float | None, **more: Any) -> dict[str, Any]:
    found = {"kind": "product", "ubatch": ubatch, "form": form, "chunk": chunk, "nodes": 6, "plan_bytes": 2048, "left_out": None if us else "9999 nodes"}
    return found | ({"us_per_token": us, "nmse_y": 2e-14, "nmse_state": 1e-14} if us else {}) | more


ABOUT = {"kind": "about", "where": "a CPU.", "command": "python benches/crossover.py", "limits": "--max-nodes 9", "shape": "32,16,4,2", "model": "m.gguf",
         "model_runs": 1, "model_prompt": 512, "max_fused_chunk": 256}
# ssd is half as fast as scan at 64 tokens and twice as fast at 256, so they meet at 128; its fastest chunk changes.
ROWS = [ABOUT, row(64, "scan", None, 20.0), row(64, "ssd", 16, 40.0), row(64, "ssd", 32, 41.0), row(64, "PR 16982", 16, 50.0), row(64, "PR 16982", 32, 60.0),
        row(64, "ggml SSM_SCAN", None, 5.0),
        row(256, "scan", None, 20.0), row(256, "ssd", 16, 11.0), row(256, "ssd", 32, 10.0, nmse_y=3e-13), row(256, "PR 16982", 16, None),
        row(256, "PR 16982", 32, 123.4), row(256, "ggml SSM_SCAN", None, 5.25)]
MODEL = [{"kind": "model", "ubatch": n, "form": form, "nodes": 313, "prompt": 512, "tokens_per_second": ts}
         for n, rates in ((64, (1000.0, 1500.0, 900.0)), (256, (1000.0, 1600.0, 1300.0)))
         for form, ts in zip(("scan", "scan, noop SSM_SCAN", "ssd"), rates, strict=True)]
BY_UBATCH = """\
| ubatch | ggml SSM_SCAN | scan | ssd | PR 16982 | scan / best |
|--:|--:|--:|--:|--:|--:|
| 64 | 5.00 | 20.0 | 40.0 (16) | 50.0 (16) | 1.00 |
| 256 | 5.25 | 20.0 | 10.0 (32) | 123 (32) | 2.00 |
"""


def test_the_report_of_a_crossover(load: Load) -> None:
    text = "\n".join(load("crossover_report").report([*ROWS, *MODEL], "c"))
    assert BY_UBATCH in text and "a CPU. `python benches/crossover.py`" in text and "![product of one layer by ubatch](c.png)" in text
    assert "- ssd is ahead of scan at ubatch 256." in text and "- PR 16982 is not ahead of scan at ubatch 64 to 256." in text
    assert "- ggml SSM_SCAN is ahead of scan at ubatch 64 to 256." in text
    assert "Left out (--max-nodes 9):\n\n- PR 16982, chunk 16, from ubatch 256 on: 9999 nodes\n" in text
    assert "## By chunk, 256 tokens" in text and "| 16 | 11.0 | - |\n| 32 | 10.0 | 123 |\n| none | scan 20.0, ggml SSM_SCAN 5.25 |  |\n" in text
    assert "| ssd | 3e-13 | 1e-14 |" in text and "| 256 | 6, 2.0 KiB | 6, 2.0 KiB | 6, 2.0 KiB |" in text
    assert "| 256 | 1000 (313) | 1600 (313) | 1300 (313) |" in text


def test_the_section_of_the_readme(load: Load) -> None:
    own = load("crossover_report")
    found = own.with_section("before\n<!-- crossover -->\nold\n<!-- /crossover -->\nafter\n", ROWS)
    assert found.startswith("before\n<!-- crossover -->\n") and found.endswith("\n<!-- /crossover -->\nafter\n") and "old" not in found
    assert "| 64 | 20.0 | 40.0 (16) | 50.0 (16) | 1.00 |" in found and "ggml SSM_SCAN" not in found and "| 256 |" not in found  # of the section's few ubatches
    assert own.with_section(found, ROWS) == found
    with pytest.raises(FormatError, match="no section between <!-- crossover -->"):
        own.with_section("no marks", ROWS)


def test_labels_are_moved_apart(load: Load) -> None:
    spread = load("crossover_report").spread
    assert spread([3.0, 1.0, 2.0], 0.5) == [3.0, 1.0, 2.0] and spread([], 1.0) == []
    assert spread([1.0, 1.0, 5.0], 1.0) == [0.5, 1.5, 5.0]
    assert spread([0.0, 1.1, 0.1], 1.0) == pytest.approx([-0.6, 1.4, 0.4])  # the pair that touches moves onto the third, so all three share a centre


def test_the_plot_of_a_crossover(load: Load, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw = load("crossover_report").draw
    for name, rows in (("one", ROWS), ("two", [*ROWS, *MODEL])):
        draw(rows, str(tmp_path / f"{name}.png"))
    sizes = [struct.unpack(">II", (tmp_path / f"{name}.png").read_bytes()[16:24]) for name in ("one", "two")]
    assert sizes[0][0] >= 1000 and sizes[1][0] == sizes[0][0] and sizes[1][1] > sizes[0][1]


def test_no_plot_without_matplotlib(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    draw = load("crossover_report").draw
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    draw(ROWS, str(tmp_path / "p.png"))
    assert capsys.readouterr().err == "note: no plot: matplotlib is not installed; pip install 'pyggml[plot]'\n" and not list(tmp_path.iterdir())


def test_a_small_crossover(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, kept = load("crossover"), tmp_path / "r.jsonl"
    (tmp_path / "README.md").write_text("<!-- crossover --><!-- /crossover -->", encoding="utf-8")
    program.main(["-ub", "1,8,40", "--chunk", "16,512", "--shape", "32,16,4,2", "-r", "1", "--model-runs", "1", "--max-nodes", "100", "--json", str(kept),
                  "--readme", str(tmp_path / "README.md")])
    text, rows = capsys.readouterr().out, [json.loads(line) for line in kept.read_text().splitlines()]
    product = {(r["ubatch"], r["form"], r["chunk"]): r for r in rows if r["kind"] == "product" and not r["form"].startswith("ggml")}
    assert {(n, q) for n, form, q in product if form == "ssd, bf16"} == {(1, 1), (8, 8), (40, 16), (40, 40)}  # no chunk is longer than the ubatch
    assert [key for key, r in product.items() if r["left_out"]] == [(40, "PR 16982", 16)]  # three chunks of some 50 nodes
    for (_, form, _), r in product.items():
        if not r["left_out"]:
            assert max(r["nmse_y"], r["nmse_state"]) < (1.5e-5 if form.endswith("bf16") else 1e-11) and r["us_per_token"] > 0
    assert {r["nodes"] for key, r in product.items() if key[1] == "ssd, f32" and key[0] == key[2]} == {product[1, "ssd, f32", 1]["nodes"]}
    model = {(r["ubatch"], r["form"]): r["nodes"] for r in rows if r["kind"] == "model"}
    assert {form for _, form in model} == {"scan", "scan, noop SSM_SCAN", "ssd, f32", "ssd, bf16", "ssd-fused, f32", "ssd-fused, bf16"}
    assert model[40, "ssd, f32"] == pg.load_model(pg.models.demo_path()).graph(n_tokens=40, mamba2="ssd").n_nodes
    assert "| 8 |" in (tmp_path / "README.md").read_text()
    program.main(["--from", str(kept)])
    assert capsys.readouterr().out == text


def test_the_command_names_no_files(load: Load) -> None:
    given = ["-r", "3", "--json", "a/b.jsonl", "--plot=c", "--peer-lib", "lib", "--readme", "README.md", "-ub", "1,8"]
    assert " ".join(load("crossover").public(given)) == "-r 3 --peer-lib FOLDER -ub 1,8"


# Whole models, long prompts

def test_whole_models(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = load("whole_models")
    pg.models.fabricate.fabricate("granite-4.0-h-350m", "Q8_0", str(tmp_path / "granite-4.0-h-350m-Q8_0.gguf"), n_layer=2, n_vocab=300)
    monkeypatch.setattr(sys, "argv", ["whole_models.py", "--like", "granite-4.0-h-350m", "-p", "16,32", "-r", "1", "--folder", str(tmp_path)])
    program.main()
    text = capsys.readouterr().out
    assert "pyggml bench -m granite-4.0-h-350m-Q8_0.gguf -p 16,32 -n 0 -b 32 -ub prompt -t 2 -r 1 --mamba2 scan,ssd,ssd-fused" in text
    assert "| test | ubatch | scan | ssd, ssd precision f32 | ssd, ssd precision bf16 | ssd-fused, ssd precision f32 | ssd-fused, ssd precision bf16 |" in text
    assert [line[:14] for line in text.splitlines() if line.startswith("| pp")] == ["| pp16 | 16 | ", "| pp32 | 32 | "]


def test_a_long_prompt(load: Load) -> None:
    program = load("long_prompt")
    settings = importlib.import_module("pyggml.tools.benchcases").Settings(
        str(pg.models.demo_path()), 64, 64, 2, 2, "f16", "f16", "f32", "f32", "ssd-fused", None, "cpu")
    rows = list(program.measure(settings, 150))
    assert [(r["position"], r["n"]) for r in rows] == [(64, 64), (128, 64), (150, 22)]
    assert len({r["state"] for r in rows}) == 1 and all(r[g] > 0 for r in rows for g in program.GROUPS)
    lines = list(program.table(rows))
    assert len(lines) == 5 and lines[-1].startswith("| 150 |")
    assert len(list(program.table(rows * 10))) == 2 + 8
