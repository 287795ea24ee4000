"""`pyggml batched-bench`: llama-batched-bench's command lines and table, and that every sequence decodes its own tokens."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
from typing import Any

import numpy as np
import pytest

import pyggml as pg
from pyggml.testing import nmse
from pyggml.tools import main
from pyggml.tools.batchedbench import Batch, run_batch
from pyggml.tools.benchrun import bench_tokens

HEAD = "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |"
RULE = "|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|"


def batched(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[str, str]:
    assert main(["batched-bench", "-t", "2", *args]) == 0
    out, err = capsys.readouterr()
    return out, err


def test_a_command_line_for_llama_cpp_and_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(pg.models.demo_path())
    out, err = batched(capsys, *f"-m {model} -c 2048 -b 2048 -ub 512 -npp 4,6 -ntg 2 -npl 1,3 -pps -ngl 99 -fa".split())
    lines = out.splitlines()
    assert lines[:2] == [HEAD, RULE] and all(len(line) == len(HEAD) for line in lines)
    cells = [[float(c) for c in line.strip("|").split("|")] for line in lines[2:]]
    assert [c[:4] for c in cells] == [[4, 2, 1, 6], [4, 2, 3, 10], [6, 2, 1, 8], [6, 2, 3, 12]]  # the prompt counts once
    assert err.splitlines()[0] == "note: without effect: -ngl (there is no GPU backend)" and len(err.splitlines()) <= 2


def test_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    for shared, prompts in ((False, 3), (True, 1)):
        (r,) = json.loads(batched(capsys, *"-npp 4 -ntg 2 -npl 3 -o json".split(), *["-pps"] * shared)[0])
        assert (r["pp"], r["tg"], r["pl"], r["n_kv"], r["is_pp_shared"]) == (4, 2, 3, 4 * prompts + 6, shared)
        assert r["speed_pp"] == pytest.approx(4 * prompts / r["t_pp"]) and r["speed_tg"] == pytest.approx(6 / r["t_tg"])
        assert r["t"] == pytest.approx(r["t_pp"] + r["t_tg"]) and r["speed"] == pytest.approx(r["n_kv"] / r["t"])


def test_sweeps_stand_after_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = batched(capsys, *"-npp 4 -ntg 1 -npl 2 --mamba2 scan,ssd --chunk 2,4 --type-s f32,bf16 --type-r f16 --type-conv f32,bf16".split())
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in out.splitlines()]
    assert lines[0][:4] == ["PP", "TG", "B", "N_KV"] and lines[0][10:] == ["mamba2", "chunk", "type_s", "type_conv"]
    assert {tuple(line[10:]) for line in lines[2:]} == {(*form, s, c) for form in (("scan", ""), ("ssd", "2"), ("ssd", "4"))
                                                       for s in ("f32", "bf16") for c in ("f32", "bf16")}
    assert len(lines) == 2 + 12


def test_outputs_parse(capsys: pytest.CaptureFixture[str]) -> None:
    args = "-npp 3 -ntg 1 -npl 1,2".split()
    head, *body = csv.reader(io.StringIO(batched(capsys, *args, "-o", "csv")[0]))
    assert [r[head.index("pl")] for r in body] == ["1", "2"]
    assert [json.loads(line)["n_kv"] for line in batched(capsys, *args, "--output-format", "jsonl")[0].splitlines()] == [4, 8]
    db = sqlite3.connect(":memory:")
    db.executescript(batched(capsys, *args, "-o", "sql")[0])
    assert db.execute("SELECT pp, pl, n_kv, speed > 0 FROM batched").fetchall() == [(3, 1, 4, 1), (3, 2, 8, 1)]
    assert batched(capsys, *args, "-o", "console")[0].split()[:4] == ["PP", "TG", "B", "N_KV"]


def test_what_does_not_fit_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = batched(capsys, *"-c 10 -npp 3 -ntg 1 -npl 1,2,3 -o json".split())
    assert [r["pl"] for r in json.loads(out)] == [1, 2] and "note: PP 3, TG 1, B 3 left out: N_KV 12, -c 10" in err
    assert main(["batched-bench", *"-c 3 -npp 3 -ntg 1".split()]) == 1
    assert re.search(r"-c 3: no test fits; the smallest needs N_KV 4", capsys.readouterr().err)


@pytest.mark.parametrize(("batch", "n_batch", "calls"), [
    (Batch(4, 0, 2, False), 8, [[(0, 4), (1, 4)]]),
    (Batch(4, 0, 2, False), 3, [[(0, 3)], [(0, 1), (1, 2)], [(1, 2)]]),
    (Batch(4, 0, 3, True), 8, [[(0, 4)]]),
    (Batch(0, 2, 3, False), 8, []),
])
def test_prompts_are_cut_as_in_llama_batched_bench(batch: Batch, n_batch: int, calls: list[Any]) -> None:
    assert batch.prompt_calls(n_batch) == calls


@pytest.mark.parametrize("shared", [False, True])
def test_every_sequence_decodes_its_own_tokens(shared: bool) -> None:
    batch = Batch(5, 2, 3, shared)
    model = pg.load_model(pg.models.demo_path())
    ctx = model.context(n_ctx=batch.n_cells, n_seq_max=3, n_ubatch=4, mamba2="scan")
    run_batch(ctx, batch, 6)
    ids = bench_tokens(model.n_vocab, batch.n_cells).reshape(3, 7)
    for seq in range(3):
        alone = model.context(mamba2="scan")
        alone.decode(np.concatenate([ids[0 if shared else seq, :5], ids[seq, 5:]]))
        assert ctx.n_past(seq) == 7
        assert nmse(ctx.state(0, seq)["ssm"], alone.state(0)["ssm"]) < 1e-9
