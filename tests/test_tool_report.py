"""`pyggml report`: tables and cross-overs from known results, files that are none, the plots where matplotlib is."""

from __future__ import annotations

import json
import struct
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from pyggml.tools import main
from pyggml.tools.report import crossovers


def row(form: str | None, ubatch: int, ts: float | None, **more: Any) -> dict[str, Any]:
    return {"model_type": "mamba2 1.00M F32", "cpu_info": "a CPU", "n_threads": 2, "backend": "cpu", "n_prompt": 512, "n_gen": 0, "n_depth": 0,
            "n_ubatch": ubatch, "mamba2": form, "chunk": None, "variant": None, "avg_ts": ts, "median_ts": ts, **more}


# scan is flat; ssd gains a factor of 4 from 64 to 256, so they meet at 128, half way on a logarithmic scale.
RESULTS = [row("scan", 64, 100.0), row("ssd", 64, 50.0, chunk=16), row("scan", 64, 160.0, variant="noop SSM_SCAN"),
           row("scan", 256, 100.0), row("ssd", 256, 200.0, chunk=64), row("scan", 256, 180.0, variant="noop SSM_SCAN"),
           row("scan", 512, 20.0, n_prompt=0, n_gen=8)]
TABLE = """\
## mamba2 1.00M F32 (a CPU, 2 threads)

| test | ubatch | scan | ssd | scan, noop SSM_SCAN |
| --- | ---: | ---: | ---: | ---: |
| pp512 | 64 | 100.00 | 50.00 | 160.00 |
| pp512 | 256 | 100.00 | 200.00 | 180.00 |
| tg8 |  | 20.00 |  |  |

Tokens per second, medians of the repetitions.
ssd is faster than scan from ubatch 128 on.
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "r.json").write_text(json.dumps(RESULTS))
    return tmp_path / "r.json"


def report(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> tuple[str, str]:
    assert main(["report", *map(str, args)]) == code
    out, err = capsys.readouterr()
    return out, err


def test_the_table(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, results, "--no-plot") == (TABLE, "")


def test_the_lead_over_the_first_form(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = report(capsys, results, "--no-plot", "--lead")[0]
    assert "| pp512 | 64 | 100.00 | 50.00 (0.50x) | 160.00 (1.60x) |\n" in out
    assert "| pp512 | 256 | 100.00 | 200.00 (2.00x) | 180.00 (1.80x) |\n| tg8 |  | 20.00 |  |  |\n" in out
    assert "medians of the repetitions; in brackets how many times that of scan.\n" in out
    (tmp_path / "wrong.json").write_text(json.dumps([row("scan", 64, None), row("ssd", 64, 50.0), row("scan", 32, 1.0), row("ssd", 32, None)]))
    out = report(capsys, tmp_path / "wrong.json", "--no-plot", "--lead")[0]
    assert "| pp512 | 64 | wrong | 50.00 |" in out and "| pp512 | 32 | 1.00 | wrong |" in out


def test_a_row_per_line_and_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, part in (("a", RESULTS[:3]), ("b", RESULTS[3:])):
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in part))
    assert report(capsys, tmp_path / "a", tmp_path / "b", "--no-plot")[0] == TABLE


def test_what_tells_results_apart_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("ssd", 64, 1.0, chunk=16), row("ssd", 64, 2.0, chunk=32), row("ssd", 64, None, chunk=32, n_threads=1),
            row(None, 64, 4.0, backend="llama.cpp", model_type="mamba2 1.00M F32")]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    lines = report(capsys, tmp_path / "r.json", "--no-plot")[0].splitlines()
    assert lines[2] == "| test | ubatch | ssd chunk 16, 2 threads | ssd chunk 32, 2 threads | ssd chunk 32, 1 threads | llama.cpp, 2 threads |"
    assert lines[4] == "| pp512 | 64 | 1.00 | 2.00 | wrong | 4.00 |"


def test_files_of_llama_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"model_type": "granitehybrid 350M Q8_0", "backends": "CPU", "n_threads": 2, "n_ubatch": 512, "n_prompt": 512, "n_gen": 0, "avg_ts": 331.0}]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    assert "| pp512 | 512 | 331.00 |" in report(capsys, tmp_path / "r.json", "--no-plot")[0]


def test_crossovers() -> None:
    flat, steep = {64: 100.0, 256: 100.0, 1024: 100.0}, {64: 50.0, 256: 200.0, 1024: 50.0}
    assert [(round(x, 6), up) for x, up in crossovers(flat, steep)] == [(128, True), (512, False)]
    assert crossovers(flat, {64: 1.0, 256: 2.0}) == [] and crossovers(flat, {32: 1.0}) == []


@pytest.mark.parametrize(("at_8", "at_16", "line"), [
    (1.0, 1.0, "scan is faster than ssd at every ubatch from 8 to 16."), (2.5, 3.0, "ssd is faster than scan at every ubatch from 8 to 16."),
    (1.99, 1.0, "scan is at least as fast as ssd at every ubatch from 8 to 16."),
    (1.99, 1.98, "scan is as fast, within 2 %, as ssd at every ubatch from 8 to 16."),
])
def test_who_leads_throughout(at_8: float, at_16: float, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text(json.dumps([row(f, ub, ts) for ub, own in ((8, at_8), (16, at_16)) for f, ts in (("scan", 2.0), ("ssd", own))]))
    assert report(capsys, tmp_path / "r.json", "--no-plot")[0].endswith(f"{line}\n")


@pytest.mark.parametrize(("text", "message"), [
    ("[]", "no results"), ("", "no results"), ("[1]", "result 0 has no n_prompt"), ('[{"n_prompt": 1}]', "result 0 has no n_gen, n_ubatch, avg_ts"),
    ("[{", "line 1: "), ('{"a": 1}\nnot', "line 2: "), ("[\n{]", "line 2: "), ("[" * 100_000, "line 1: maximum recursion depth"),
    ('[{"n_prompt": "8", "n_gen": 0, "n_ubatch": 8, "avg_ts": 1}]', "result 0: n_prompt '8'; legal: a whole number of at least 0"),
    ('[{"n_prompt": 8, "n_gen": 0, "n_ubatch": 0, "avg_ts": 1}]', "result 0: n_ubatch 0; legal: a whole number of at least 1"),
    ('[{"n_prompt": 8, "n_gen": 0, "n_ubatch": 8, "avg_ts": 0}]', "result 0: avg_ts 0; legal: a number above 0, or null"),
    ('[{"n_prompt": 8, "n_gen": 0, "n_ubatch": 8, "avg_ts": NaN}]', "result 0: avg_ts nan"),
    ('[{"n_prompt": 8, "n_gen": 0, "n_ubatch": 8, "avg_ts": 1, "median_ts": [1]}]', "result 0: median_ts [1]"),
])
def test_files_that_are_no_results(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text(text)
    out, err = report(capsys, tmp_path / "r.json", code=1)
    assert out == "" and len(err.splitlines()) == 1 and message in err and "r.json" in err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, tmp_path / "none.json", code=1)[1] == f"pyggml report: file {tmp_path}/none.json: No such file or directory\n"


def test_without_matplotlib_there_is_the_table_and_one_line(results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report(capsys, results, "--plot", results.with_name("p")) == (TABLE, "note: no plot: matplotlib is not installed; pip install 'pyggml[plot]'\n")
    assert not list(results.parent.glob("p.*"))


def test_one_ubatch_makes_no_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text(json.dumps(RESULTS[:3]))
    assert "note: no plot: it takes prompts" in report(capsys, tmp_path / "r.json")[1]


def test_plots(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    report(capsys, results, "--plot", results.with_name("p"))
    head = results.with_name("p.png").read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:])
    assert head.startswith(b"\x89PNG") and width >= 1000 and height >= 600
    assert ET.parse(results.with_name("p.svg")).getroot().tag.endswith("svg")
