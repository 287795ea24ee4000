"""`pyggml perplexity`: counts against a plain calculation and against llama-perplexity's and transformers' figures, any number of sequences at
once, divergence from a saved base."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
import struct
from pathlib import Path

import numpy as np
import pytest

import pyggml as pg
from pyggml.dtypes import F32
from pyggml.gguf import read_gguf, write_gguf
from pyggml.models import Model, demo_path
from pyggml.testing import fabricate
from pyggml.tools import main
from pyggml.tools.logprobs import Divergence, log_softmax, pack_row, row_bytes, unpack_row

F32_CACHE = ("-ctk", "f32", "-ctv", "f32")
PROMPT = (demo_path().parent / "prompt.txt").read_text(encoding="utf-8").rstrip("\n")
TEXT = "\n\n".join([PROMPT, "\"I am sure,\" said she, \"that you will be very glad to see Captain Wentworth again.\"", PROMPT.upper(), PROMPT[::-1]])


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A file with a few hundred tokens, which the model finds partly likely and partly not."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT + "\n", encoding="utf-8")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert main(["perplexity", *args]) == 0
    return capsys.readouterr().out


def plain_nll(model: Model, ids: list[int], n_ctx: int, bos: int | None = None) -> np.ndarray:
    """[n_chunk, n_scored], chunk by chunk in a context of its own and in float64."""
    rows = []
    for i in range(0, len(ids) - n_ctx + 1, n_ctx):
        chunk = ids[i:i + n_ctx]
        fed = chunk if bos is None else [bos, *chunk[1:]]
        logits = model.context(n_ctx=n_ctx, type_k="f32", type_v="f32").decode(fed, all_logits=True).astype(np.float64)
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        rows.append([-np.log(p[t, chunk[t + 1]]) for t in range(n_ctx // 2, n_ctx - 1)])
    return np.array(rows)


def numbers(line: str) -> list[float]:
    return [float(x) for x in re.findall(r"\](\d+\.\d{4}),", line)]


@pytest.mark.parametrize("n_ctx", (32, 45))
def test_count_is_that_of_a_plain_calculation(capsys: pytest.CaptureFixture[str], text: str, n_ctx: int) -> None:
    model = pg.load_model(demo_path())
    nll = plain_nll(model, model.vocab.tokenize(TEXT), n_ctx)
    running, final = run(capsys, "-f", text, "-c", str(n_ctx), *F32_CACHE).splitlines()
    assert re.match(r"\[1\]\d+\.\d{4},\[2\]", running) and nll.shape == (len(numbers(running)), n_ctx - 1 - n_ctx // 2)
    assert numbers(running) == pytest.approx([np.exp(nll[:i + 1].mean()) for i in range(len(nll))], abs=2e-3)
    ppl = np.exp(nll.mean())
    error = ppl * nll.std(ddof=1) / nll.size**0.5
    value, spread = map(float, re.fullmatch(r"Final estimate: PPL = (\d+\.\d{4}) \+/- (\d+\.\d{5})", final).groups())  # type: ignore[union-attr]
    assert value == pytest.approx(ppl, rel=1e-5) and spread == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("form", ("scan", "ssd"))
def test_any_number_of_sequences_at_once(capsys: pytest.CaptureFixture[str], text: str, form: str) -> None:
    found = []
    for extra in (("-np", "1"), ("-np", "4"), ("-np", "3", "-ub", "7"), ("-np", "5", "-ub", "3"), ("-b", "64"), ("-np", "99")):
        out = run(capsys, "-f", text, "-c", "32", "--mamba2", form, *F32_CACHE, "-o", "json", *extra)
        found.append(json.loads(out)[0])
    assert [r["n_seq"] for r in found] == [1, 4, 3, 5, 2, found[0]["n_chunk"]]
    assert [r["ppl"] for r in found] == pytest.approx([found[0]["ppl"]] * 6, rel=1e-5)


def test_bos_takes_the_place_of_each_chunks_first_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the quick brown fox " * 6, encoding="utf-8")
    found = {}
    for bos in (False, True):
        path = tmp_path / f"{bos}.gguf"
        fabricate("granitehybrid", path, metadata={"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": True})
        model = pg.load_model(path)
        ids = model.vocab.tokenize("the quick brown fox " * 6, add_special=False)
        want = plain_nll(model, [0, *ids] if bos else ids, 16, 0 if bos else None)
        (row,) = json.loads(run(capsys, "-m", str(path), "-f", str(tmp_path / "t.txt"), "-c", "16", *F32_CACHE, "-o", "json"))
        assert row["ppl"] == pytest.approx(np.exp(want.mean()), rel=1e-5) and row["n_scored"] == want.size
        found[bos] = row["ppl"]
    assert found[True] != pytest.approx(found[False], rel=1e-4)


def test_several_texts(capsys: pytest.CaptureFixture[str], text: str, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(PROMPT * 3, encoding="utf-8")
    base = ("-c", "32", *F32_CACHE)
    alone = [run(capsys, "-f", f, *base).splitlines() for f in (text, str(other))]
    both = run(capsys, "-f", text, "-f", str(other), *base).splitlines()
    assert both[:6] == [text, *alone[0], str(other), *alone[1]]
    rows = json.loads(run(capsys, "-f", text, "-f", str(other), *base, "-o", "json"))
    logs = np.average(np.log([r["ppl"] for r in rows[:2]]), weights=[r["n_scored"] for r in rows[:2]])
    assert rows[2]["text"] == "all" and rows[2]["ppl"] == pytest.approx(np.exp(logs)) and both[6].startswith(f"All texts: PPL = {rows[2]['ppl']:.4f} +/- ")


def test_records(capsys: pytest.CaptureFixture[str], text: str) -> None:
    base = ("-f", text, "-c", "32", "--chunks", "2")
    (row,) = csv.DictReader(io.StringIO(run(capsys, *base, "-o", "csv")))
    assert row["text"] == text and (row["n_chunk"], row["n_scored"], row["mamba2"]) == ("2", "30", "auto") and float(row["ppl"]) > 1
    db = sqlite3.connect(":memory:")
    db.executescript(run(capsys, *base, "-o", "sql"))
    assert db.execute("SELECT ppl FROM perplexity").fetchone()[0] == pytest.approx(float(row["ppl"]))
    assert f"| {float(row['ppl']):.4f} |" in run(capsys, *base, "-o", "md")


def test_chunks_stops_after_the_first_ones(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert numbers(run(capsys, "-f", text, "-c", "32", "--chunks", "2", *F32_CACHE)) == numbers(run(capsys, "-f", text, "-c", "32", *F32_CACHE))[:2]


# transformers' and llama.cpp's figures for the F32 models, whose numbers the BF16 files hold: 43 chunks of 512 tokens, second halves
@pytest.mark.parametrize(("name", "final"), [("granite-h-demo-F32", "PPL = 24.7782 +/- 0.64577"), ("nemotron-h-demo-BF16", "PPL = 26.7812 +/- 0.71672"),
                                             ("mamba2-demo-BF16", "PPL = 27.0130 +/- 0.73711")])
def test_heldout_perplexity_of_trained_models(capsys: pytest.CaptureFixture[str], shared: Path, name: str, final: str) -> None:
    models = shared / "models"
    out = run(capsys, "-m", str(models / f"{name}.gguf"), "-f", str(models / "heldout.txt"), "-c", "512", "-np", "1", *F32_CACHE)
    assert len(numbers(out)) == 43 and out.splitlines()[1] == f"Final estimate: {final}"


# Divergence

def read_base(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n_chunk, n_ctx] and log-probabilities [n_chunk, n_scored, n_vocab] of a file in llama.cpp's layout, read byte by byte."""
    raw = path.read_bytes()
    assert raw[:8] == b"_logits_"
    n_ctx, n_vocab, n_chunk = struct.unpack_from("<Iii", raw, 8)
    tokens = np.frombuffer(raw, "<i4", n_chunk * n_ctx, 20).reshape(n_chunk, n_ctx)
    rows, at = [], 20 + 4 * tokens.size
    width = 2 * ((n_vocab + 1) // 2) + 4
    for _ in range(n_chunk * (n_ctx - 1 - n_ctx // 2)):
        scale, least = np.frombuffer(raw, "<f4", 2, at)
        rows.append(scale.astype(np.float64) * np.frombuffer(raw, "<u2", n_vocab, at + 8) + least)
        at += 2 * width
    assert at == len(raw)
    return tokens, np.array(rows).reshape(n_chunk, -1, n_vocab)


def test_saved_log_probabilities_are_the_models(capsys: pytest.CaptureFixture[str], text: str, tmp_path: Path) -> None:
    for n_seq in ("1", "3"):  # rows of several chunks arrive in turns
        run(capsys, "-f", text, "-c", "32", "-np", n_seq, "-ub", "20", "--kl-divergence-base", str(tmp_path / "b.kld"), *F32_CACHE)
        tokens, log_p = read_base(tmp_path / "b.kld")
        model = pg.load_model(demo_path())
        assert tokens.ravel().tolist() == model.vocab.tokenize(TEXT)[:tokens.size]
        for chunk, rows in zip(tokens, log_p, strict=True):
            logits = model.context(n_ctx=32, type_k="f32", type_v="f32").decode(chunk, all_logits=True)[16:31].astype(np.float64)
            want = logits - np.log(np.exp(logits).sum(1, keepdims=True))
            floor = want.max(1, keepdims=True) - 16
            assert np.abs(rows - np.maximum(want, floor)).max() <= 16 / 65535 / 2 + 1e-5
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".txt"] == ["b.kld"]


def test_divergence_is_that_of_a_plain_calculation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Against a base written here byte by byte, as another program would."""
    fabricate("granitehybrid", tmp_path / "m.gguf")
    model = pg.load_model(tmp_path / "m.gguf")
    rng = np.random.default_rng(0)
    n_ctx, n_vocab, n_chunk, n = 16, 258, 3, 7
    tokens = rng.integers(1, n_vocab, (n_chunk, n_ctx)).astype("<i4")
    scale, least, q = rng.uniform(1e-4, 2e-4, (n_chunk, n)), rng.uniform(-14, -12, (n_chunk, n)), rng.integers(0, 65536, (n_chunk, n, n_vocab))
    raw = b"_logits_" + struct.pack("<Iii", n_ctx, n_vocab, n_chunk) + tokens.tobytes()
    for c in range(n_chunk):
        for r in range(n):
            raw += struct.pack("<ff", scale[c, r], least[c, r]) + q[c, r].astype("<u2").tobytes()
    (tmp_path / "b.kld").write_bytes(raw)
    base = np.float32(scale)[..., None].astype(np.float64) * q + np.float32(least)[..., None]

    logits = np.array([model.context(n_ctx=n_ctx, type_k="f32", type_v="f32").decode(t, all_logits=True)[8:15] for t in tokens]).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    kld = (np.exp(base) * (base - log_p)).sum(-1)
    came = np.array([[t[i + 1] for i in range(8, 15)] for t in tokens])[..., None]
    nll, nll_base = -np.take_along_axis(log_p, came, 2)[..., 0], -np.take_along_axis(base, came, 2)[..., 0]
    diff = np.exp(-nll) - np.exp(-nll_base)

    args = ("-m", str(tmp_path / "m.gguf"), "--kl-divergence", "--kl-divergence-base", str(tmp_path / "b.kld"), *F32_CACHE)
    for extra in ((), ("-np", "1"), ("-np", "2", "-ub", "6")):
        (row,) = json.loads(run(capsys, *args, "-o", "json", *extra))
        assert row["ppl"] == pytest.approx(np.exp(nll.mean()), rel=1e-5) and row["ppl_base"] == pytest.approx(np.exp(nll_base.mean()), rel=1e-5)
        assert (row["kld"], row["kld_max"]) == pytest.approx((kld.mean(), kld.max()), rel=1e-4)
        assert row["kld_error"] == pytest.approx(kld.std(ddof=1) / kld.size**0.5, rel=1e-4)
        assert row["p_diff_rms"] == pytest.approx(np.sqrt(np.mean(diff**2)), rel=1e-4)
        assert row["same_top"] == (log_p.argmax(-1) == base.argmax(-1)).mean()
    out = run(capsys, *args)
    stats = {m[1].strip(): float(m[2]) for m in re.finditer(r"^(.+?): +(-?[\d.]+)", out, re.MULTILINE)}
    want = {"Mean    KLD": kld.mean(), "Maximum KLD": kld.max(), "Median  KLD": np.median(kld), "90.0%   KLD": np.percentile(kld, 90), "Minimum KLD": kld.min(),
            "Mean PPL(Q)": np.exp(nll.mean()), "Mean PPL(base)": np.exp(nll_base.mean()), "Mean ln(PPL(Q)/PPL(base))": (nll - nll_base).mean(),
            "Mean PPL(Q)-PPL(base)": np.exp(nll.mean()) - np.exp(nll_base.mean()),
            "Cor(ln(PPL(Q)), ln(PPL(base)))": 100 * np.corrcoef(nll.flat, nll_base.flat)[0, 1],
            "Mean    Δp": 100 * diff.mean(), "RMS Δp": 100 * np.sqrt(np.mean(diff**2)), "99.9%   Δp": 100 * np.percentile(diff, 99.9)}
    for name, value in want.items():
        assert stats[name] == pytest.approx(value, rel=1e-4, abs=6e-4 if "Δp" in name else 6e-3 if "Cor" in name else 1e-6), name
    spread = re.search(r"Mean ln\(PPL\(Q\)/PPL\(base\)\) +: +-[\d.]+ ± +([\d.]+)", out)
    assert spread and float(spread[1]) == pytest.approx(np.std(nll - nll_base, ddof=1) / nll.size**0.5, rel=1e-4)
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["1", "2", "3"]
    first = float(out.splitlines()[1].split()[7])
    assert first == pytest.approx(kld[0].mean(), abs=1e-4)


def test_a_model_does_not_diverge_from_itself_and_does_from_another(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base, text = str(tmp_path / "b.kld"), tmp_path / "likely.txt"
    text.write_text(f"{PROMPT} {PROMPT}", encoding="utf-8")
    run(capsys, "-f", str(text), "-c", "32", "--mamba2", "scan", "--save-all-logits", base, *F32_CACHE)
    args = ("--kl-divergence", "--kl-divergence-base", base, "-o", "json")
    (same,) = json.loads(run(capsys, *args, "--mamba2", "ssd", *F32_CACHE))
    assert abs(same["kld"]) < 1e-5 and same["kld_max"] < 1e-4 and same["same_top"] == 1 and same["ppl"] == pytest.approx(same["ppl_base"], rel=1e-4)
    with read_gguf(demo_path()) as f:
        tensors = {t.name: (f.raw(t.name), t.dtype, t.dims) for t in f.tensors.values()}
        tensors["output_norm.weight"] = (f.array("output_norm.weight") * np.float32(0.7), F32, None)
        write_gguf(tmp_path / "flatter.gguf", f.metadata, tensors)
    (other,) = json.loads(run(capsys, *args, "-m", str(tmp_path / "flatter.gguf"), *F32_CACHE))
    assert other["kld"] > 0.01 and other["same_top"] == 1
    (less,) = json.loads(run(capsys, *args, "--chunks", "1"))
    assert less["n_chunk"] == 1


def test_a_row_of_log_probabilities() -> None:
    log_p = log_softmax(np.array([3.0, 1.0, -40.0, 2.0, -12.5], np.float32))
    assert np.exp(log_p).sum() == pytest.approx(1) and log_p[0] - log_p[1] == pytest.approx(2)
    raw = pack_row(log_p)
    assert len(raw) == row_bytes(5) == 8 + 2 * 6
    back = unpack_row(raw, 5)
    assert back[2] == pytest.approx(log_p[0] - 16, rel=1e-6) and np.abs(back - log_p)[[0, 1, 3, 4]].max() <= 16 / 65535
    flat = pack_row(np.full(4, -np.log(4)))
    assert unpack_row(flat, 4) == pytest.approx(-np.log(4))


def test_what_is_too_unlikely_takes_no_part() -> None:
    d = Divergence(1, 1)
    base = np.log([1 - 1e-9, 1e-9])
    d.add(0, 0, np.log([0.5, 0.5]), base, 0)
    assert d.kld[0, 0] == pytest.approx(np.log(2), rel=1e-6) and d.same_top[0, 0] == 1


# Faults

def base_bytes(n_ctx: int = 8, n_vocab: int = 2048, n_chunk: int = 1, token: int = 5) -> bytes:
    return b"_logits_" + struct.pack("<Iii", n_ctx, n_vocab, n_chunk) + struct.pack("<i", token) * (n_ctx * n_chunk) + bytes(
        n_chunk * (n_ctx - 1 - n_ctx // 2) * (8 + 2 * n_vocab))


@pytest.mark.parametrize(("args", "match"), [
    ((), "no text; give one with -f"),
    (("-f", "no-such.txt"), "-f no-such.txt: No such file"),
    (("-f", "{tmp}/short.txt", "-c", "64"), r"-f .*short.txt: 2 tokens; legal: 64, a whole chunk, or more"),
    (("-f", "{tmp}/latin.txt"), "latin.txt: byte 2 is not UTF-8"),
    (("-f", "{tmp}/short.txt", "-c", "4"), "-c 4; legal: 8 or more"),
    (("-f", "a", "-f", "b", "--kl-divergence-base", "x"), "--kl-divergence-base x: 2 texts; legal: one"),
    (("-f", "{text}", "-c", "32", "--chunks", "1", "--kl-divergence-base", "{tmp}/no/x"), "no/x: cannot be written: No such file"),
    (("--kl-divergence",), "no base; give its file with --kl-divergence-base"),
    (("--kl-divergence", "--kl-divergence-base", "x", "-f", "y"), "-f y: with --kl-divergence the tokens come from the base's file"),
    (("--kl-divergence", "--kl-divergence-base", "{tmp}/none"), "none: cannot be read: No such file"),
    (("--kl-divergence", "--kl-divergence-base", "{text}"), r"the first bytes b'It was a'; legal: b'_logits_'"),
    (("--kl-divergence", "--kl-divergence-base", "{tmp}/cut"), r"cut: \d+ bytes; legal: \d+ for 1 chunks of 8 tokens and a vocabulary of 2048"),
    (("--kl-divergence", "--kl-divergence-base", "{tmp}/huge"), r"huge: \d+ bytes; legal: \d+ for 2147483647 chunks"),
    (("--kl-divergence", "--kl-divergence-base", "{tmp}/zero"), "zero: 0 chunks of 8 tokens, a vocabulary of 2048; legal"),
    (("--kl-divergence", "--kl-divergence-base", "{tmp}/token"), "token: token id -1; legal: 0 to 2047"),
    (("--kl-divergence", "--kl-divergence-base", "{tmp}/vocab"), "vocab: a vocabulary of 100; legal: the model's 2048"),
])
def test_faults_end_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, args: tuple[str, ...], match: str) -> None:
    (tmp_path / "short.txt").write_text("of the", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"na\xefve")
    whole = base_bytes()
    files = {"cut": whole[:-1], "huge": whole[:16] + struct.pack("<i", 2**31 - 1) + whole[20:], "zero": base_bytes(n_chunk=0), "token": base_bytes(token=-1),
             "vocab": base_bytes(n_vocab=100)}
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    before = sorted(tmp_path.iterdir())
    assert main(["perplexity", *(a.format(tmp=tmp_path, text=text) for a in args)]) == 1
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and re.search(match, err), err
    assert sorted(tmp_path.iterdir()) == before
