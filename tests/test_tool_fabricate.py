"""`pyggml fabricate`: real shapes, valid weights of every type with the promised mean and deviation, sane activations, bounded memory."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyggml as pg
from pyggml.dtypes import bf16_to_f32
from pyggml.errors import ParamError
from pyggml.gguf import read_gguf
from pyggml.models.fabricate import (
    FILE_TYPES,
    PIECE_BYTES,
    TensorSpec,
    arch_tensors,
    cut_layers,
    dense_shapes,
    fabricate,
    random_rows,
    shapes,
    tensor_types,
    vocab_metadata,
)
from pyggml.runtime.vocab import Vocab
from pyggml.tools import main

# Linux counts what a process held before exec into ru_maxrss, so a big parent would spoil it; VmHWM begins with exec
MEMORY_OF_A_RUN = """
import pathlib, re, resource, sys
from pyggml.tools import main
code = main(sys.argv[1:])
status = pathlib.Path("/proc/self/status")
if status.exists():
    print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]))
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""


@pytest.mark.parametrize("like", dense_shapes())
def test_shape_is_the_models_and_activations_are_sane(tmp_path: Path, like: str) -> None:
    s = shapes()[like]
    made = fabricate(like, "Q4_0", tmp_path / "m.gguf", n_layer=3, n_vocab=512)
    model = pg.load_model(tmp_path / "m.gguf")
    hp, w = model.hparams, model.weights
    assert (model.arch, hp.n_embd, len(model.kinds), model.n_vocab) == (s["arch"], s["n_embd"], 3, 512)
    assert (hp.ssm_dt_rank, hp.ssm_d_inner // hp.ssm_dt_rank, hp.ssm_d_state, hp.ssm_n_group) == (
        s["ssm_heads"], s["ssm_head_dim"], s["ssm_d_state"], s["ssm_n_group"])
    assert ("output.weight" in w) is not s["tied"]
    for name in ("embedding_scale", "residual_scale", "logit_scale", "attention_scale"):
        assert (getattr(hp, f"f_{name}", None) or 0) == pytest.approx(s.get(name, 0), rel=1e-6)
    for il, (_, kind) in enumerate(made.layers):
        if kind == "attention":
            d = s.get("head_dim", s["n_embd"] // s["n_head"])
            assert w[f"blk.{il}.attn_q.weight"].ne[:2] == (s["n_embd"], s["n_head"] * d) and w[f"blk.{il}.attn_k.weight"].ne[1] == s["n_head_kv"] * d
        if f"blk.{il}.ffn_up.weight" in w:
            assert w[f"blk.{il}.ffn_up.weight"].ne[:2] == (s["n_embd"], s["n_ff"])
    ids = np.random.default_rng(1).integers(1, 512, 24).tolist()
    logits = model.context(mamba2="scan", n_ctx=64).decode(ids, all_logits=True)
    assert np.isfinite(logits).all() and 0.5 < logits.std() < 2
    assert np.mean(logits.argmax(1) == ids) < 0.5, "a token's own embedding decides the next one"


def test_both_forms_agree_on_a_fabricated_file(tmp_path: Path) -> None:
    fabricate("granite-4.0-h-350m", "Q8_0", tmp_path / "m.gguf", n_layer=4, n_vocab=300)
    model = pg.load_model(tmp_path / "m.gguf")
    assert Counter(model.kinds) == {"mamba": 3, "attention": 1}
    scan, ssd = (model.context(mamba2=form, n_ctx=128, prec="f32").decode(list(range(1, 101)), all_logits=True) for form in ("scan", "ssd"))
    assert np.abs(scan - ssd).max() <= 1e-3 * scan.std()


def test_every_layer_of_every_pattern() -> None:
    for name, s in dense_shapes().items():
        kinds = Counter(s.get("pattern", ()))
        assert sum(kinds.values()) in (0, s["n_layer"]), name
        assert all(i < s["n_layer"] for i in s.get("attention_layers", ())), name


@pytest.mark.parametrize("type_", FILE_TYPES)
def test_weights_have_the_promised_mean_and_deviation(tmp_path: Path, type_: str) -> None:
    made = fabricate("mamba2-130m", type_, tmp_path / "m.gguf", n_layer=2, n_vocab=600)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{type_}" if type_ != "F32" else "ALL_F32"]
    assert [t.name for t in reader.tensors] == [t.name for t in made.tensors]
    types = set()
    for t, spec in zip(reader.tensors, made.tensors, strict=True):
        x = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64)
        assert x.shape[::-1] == spec.ne and np.isfinite(x).all()
        if len(spec.ne) == 2 and spec.name.endswith(("_in.weight", "_out.weight", "embd.weight")):
            types.add(t.tensor_type.name)
            std = spec.ne[0] ** -0.5
            assert abs(x.mean()) < 6 * std / x.size**0.5 + 1e-3 * std
            assert x.std() == pytest.approx(std, rel=0.03)
        else:
            assert t.tensor_type.name == "F32"
    assert types == {"Q4_K_M": {"Q4_K", "Q6_K"}, "Q5_K_M": {"Q5_K", "Q6_K"}, "Q4_0": {"Q4_0", "Q6_K"}}.get(type_, {type_})


def test_float_types_hold_the_same_weights(tmp_path: Path) -> None:
    files = {}
    for t in ("F32", "F16", "BF16"):
        fabricate("mamba2-130m", t, tmp_path / f"{t}.gguf", n_layer=1, n_vocab=300, seed=7)
        files[t] = read_gguf(tmp_path / f"{t}.gguf")
    for name in files["F32"].tensors:
        x = files["F32"].array(name)
        assert np.allclose(files["F16"].array(name), x, rtol=2**-11, atol=2**-24)
        assert np.allclose(files["BF16"].array(name), x, rtol=2**-8)
    bits = files["BF16"].raw("blk.0.ssm_in.weight").view(np.uint16)
    assert np.array_equal(bf16_to_f32(bits), files["BF16"].array("blk.0.ssm_in.weight").ravel())


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        fabricate("mamba2-130m", "Q4_K_M", tmp_path / f"{name}.gguf", n_layer=1, n_vocab=300, seed=seed)
    a, b, c = ((tmp_path / f"{name}.gguf").read_bytes() for name in "abc")
    assert a == b and len(a) == len(c) and a != c


def test_dt_and_a_are_those_of_mamba2(tmp_path: Path) -> None:
    fabricate("mamba2-2.7b", "F32", tmp_path / "m.gguf", n_layer=1, n_vocab=300)
    with read_gguf(tmp_path / "m.gguf") as f:
        dt = np.log1p(np.exp(f.array("blk.0.ssm_dt.bias").astype(np.float64)))
        a = f.array("blk.0.ssm_a")
    assert 0.001 <= dt.min() < 0.002 and 0.05 < dt.max() <= 0.1001 and -16 <= a.min() < a.max() <= -1


def names_of(n_layer: int, attention: tuple[int, ...], mlp: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    layers = [*(f"blk.{i}.attn_v.weight" for i in attention), *(f"blk.{i}.ffn_down.weight" for i in mlp)]
    return [(name, (512, 512)) for name in ("token_embd.weight", *layers, *(f"blk.{i}.ssm_in.weight" for i in range(n_layer)))]


@pytest.mark.parametrize(("n_layer", "attention", "mlp", "better"), [
    (7, (2, 5), tuple(range(7)), {"attn_v-5", "ffn_down-2", "ffn_down-5", "ffn_down-6"}),  # granite-h-demo-Q4_K_M.gguf by llama-quantize
    (8, (3,), (1, 5, 7), {"attn_v-3", "ffn_down-1"}),  # nemotron-h-demo-Q4_K_M.gguf
    (8, (), (), set()),  # mamba2-demo-Q4_K_M.gguf
])
def test_mixture_is_llama_quantizes(n_layer: int, attention: tuple[int, ...], mlp: tuple[int, ...], better: set[str]) -> None:
    tensors = names_of(n_layer, attention, mlp)
    for type_, default in (("Q4_K_M", "q4_K"), ("Q5_K_M", "q5_K")):
        types = dict(zip((name for name, _ in tensors), tensor_types(type_, tensors, n_layer), strict=True))
        found = {re.sub(r"blk\.(\d+)\.(\w+)\.weight", r"\2-\1", name) for name, t in types.items() if t.name == "q6_K"}
        assert found == better | {"token_embd.weight"}
        assert {t.name for t in types.values()} == {default, "q6_K"}


@pytest.mark.parametrize("type_", FILE_TYPES)
def test_types_are_those_of_real_files(shared: Path, type_: str) -> None:
    paths = sorted(p for p in (shared / "models").glob(f"*-{type_}.gguf") if "moe" not in p.name)
    assert paths
    for path in paths:
        with read_gguf(path) as f:
            want = {name: t.dtype for name, t in f.tensors.items()}
            arch = f.metadata["general.architecture"]
            sizes = arch_tensors(arch, f.metadata, [n for n in want if n == "output.weight"])
            ours = dict(zip((name for name, _ in sizes), tensor_types(type_, sizes, f.metadata[f"{arch}.block_count"]), strict=True))
        assert ours == want, path.name


@pytest.mark.parametrize(("like", "real"), [("nemotron-nano-9b-v2", "nemotron-h-demo"), ("granite-4.0-h-350m", "granite-h-demo"),
                                            ("mamba2-130m", "mamba2-demo")])
def test_keys_are_those_that_the_converter_writes(shared: Path, tmp_path: Path, like: str, real: str) -> None:
    """Of the model's own keys none is missing, but for counts of 0 and the size of experts: llama.cpp loads no file without one that it reads."""
    fabricate(like, "Q8_0", tmp_path / "m.gguf", n_layer=4, n_vocab=300)
    keys = []
    for path in (tmp_path / "m.gguf", shared / "models" / f"{real}-Q8_0.gguf"):
        with read_gguf(path) as f:
            keys.append({k for k, v in f.metadata.items() if not k.startswith(("general.", "tokenizer.")) and "expert" not in k and np.any(v)})
    assert keys[1] - keys[0] == set()


def test_rows_that_are_no_multiple_of_256(tmp_path: Path) -> None:
    made = fabricate("nemotron-nano-9b-v2", "Q4_K_M", tmp_path / "m.gguf", n_layer=3, n_vocab=300)
    assert {t.ne[0] for t in made.fallbacks} == {4480, 15680}
    assert {t.ne[0] for t in made.tensors if t.dtype.name == "q4_K"} == {5120, 10240}
    assert not fabricate("nemotron-nano-9b-v2", "Q8_0", tmp_path / "m.gguf", n_layer=3, n_vocab=300).fallbacks


@pytest.mark.parametrize("n", (257, 258, 300, 100352, 131072))
def test_vocabulary(n: int) -> None:
    meta = vocab_metadata(n)
    tokens = meta["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == len(meta["tokenizer.ggml.token_type"]) == n and len(meta["tokenizer.ggml.merges"]) == n - 257
    vocab = Vocab(meta)
    text = "It was a fine morning in October 1813.\n\t\x00 naïve 中文 🙂"
    ids = vocab.tokenize(text)
    assert vocab.detokenize(ids) == text and max(ids) < n
    assert (len(ids) < len(text.encode())) is (n > 258)
    assert {vocab.token_bytes(i) for i in range(1, 257)} == {bytes([b]) for b in range(256)}


@given(st.lists(st.sampled_from(("mamba", "attention", "mlp")), min_size=1, max_size=70), st.data())
def test_cut_layers_keeps_every_kind_and_the_proportions(kinds: list[str], data: st.DataObject) -> None:
    total = Counter(kinds)
    n = data.draw(st.integers(len(total), len(kinds)))
    kept = cut_layers(kinds, n)
    assert kept == sorted(set(kept)) and len(kept) == n and set(kept) <= set(range(len(kinds)))
    found = Counter(kinds[i] for i in kept)
    assert set(found) == set(total)
    for kind, count in found.items():
        assert count == 1 or count - total[kind] * n / len(kinds) < 1
    assert cut_layers(kinds, len(kinds)) == list(range(len(kinds)))


def test_pieces_are_small() -> None:
    for t in (TensorSpec("token_embd.weight", (5120, 131072), t) for t, _ in FILE_TYPES.values()):
        piece = next(random_rows(t))
        assert PIECE_BYTES // 8 < piece.nbytes <= PIECE_BYTES


def test_a_whole_350m_model_streams_to_disk(tmp_path: Path) -> None:
    start = time.perf_counter()
    path = tmp_path / "m.gguf"
    done = subprocess.run([sys.executable, "-c", MEMORY_OF_A_RUN, "fabricate", "--like", "granite-4.0-h-350m", "-t", "Q8_0", "-o", str(path)],
                          capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    *lines, memory = done.stdout.splitlines()
    assert lines[1:] == ["model       granitehybrid, like granite-4.0-h-350m, 32 layers: 28 mamba, 4 attention", "tensors     402: 233 f32, 169 q8_0"]
    assert path.stat().st_size > 360e6 and int(memory) < 300e6 and seconds < 60
    model = pg.load_model(path)
    assert model.n_params == pytest.approx(340e6, rel=0.02) and [i for i, k in enumerate(model.kinds) if k == "attention"] == [10, 13, 17, 27]
    model.close()
    path.unlink()


def test_info_of_100k_tokens_takes_less_than_half_a_second(tmp_path: Path) -> None:
    fabricate("mamba2-130m", "Q4_0", tmp_path / "m.gguf", n_layer=1, n_vocab=131072)
    times, out = [], io.StringIO()
    for _ in range(3):
        start = time.process_time()
        with redirect_stdout(out):
            assert main(["info", "-m", str(tmp_path / "m.gguf")]) == 0
        times.append(time.process_time() - start)
    assert "['<|endoftext|>', 'Ā', 'ā', ...] (131072)" in out.getvalue()
    assert min(times) < 0.5


def test_tool_says_what_was_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["fabricate", "--like", "nemotron-nano-9b-v2", "-t", "q4_k_m", "--layers", "4", "--vocab", "300", "-o", str(tmp_path / "m.gguf")]
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert "4 of 56 layers: 2 mamba (11 43), 1 mlp (28), 1 attention (30)" in out and "q4_K" in out
    assert re.fullmatch(r"note: \d+ tensors are q8_0: rows of 4480, 15680 are no multiple of 256, the block of Q4_K_M\n", err)


@pytest.mark.parametrize(("args", "match"), [
    (("--like", "granite-4.0-h-tiny"), "'granite-4.0-h-tiny': 64 experts, which are not supported yet; legal: granite-4.0-h-350m, "),
    (("--like", "nemotron-3-nano-30b-a3b"), "128 experts, which are not supported yet"),
    (("--like", "gpt-5"), "model 'gpt-5'; legal: granite-4.0-h-350m, "),
    (("--like", "nemotron-h-8b", "--layers", "2"), "2 layers; legal: 3 (of each kind one: mamba, mlp, attention) to 52"),
    (("--like", "mamba2-130m", "--layers", "25"), "25 layers; legal: 1 (of each kind one: mamba) to 24"),
    (("--like", "mamba2-130m", "-o", "no/such/folder/m.gguf"), "cannot be written"),
])
def test_faults_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], match: str) -> None:
    assert main(["fabricate", "-t", "Q8_0", "-o", str(tmp_path / "m.gguf"), *args]) == 1
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("pyggml fabricate: ") and match in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("args", "match"), [((), "required: --like"), (("--like", "mamba2-130m", "-t", "Q9", "-o", "m"), "invalid choice: 'Q9'"),
                                             (("--like", "mamba2-130m", "-t", "F32", "-o", "m", "--vocab", "256"), "legal: a whole number from 257")])
def test_wrong_usage(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], match: str) -> None:
    with pytest.raises(SystemExit) as e:
        main(["fabricate", *args])
    assert e.value.code == 2 and match in capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        assert 0 < done < total
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        fabricate("mamba2-130m", "Q8_0", tmp_path / "m.gguf", n_layer=1, n_vocab=300, progress=stop)
    assert not list(tmp_path.iterdir())


def test_library_faults(tmp_path: Path) -> None:
    for args, match in ((("mamba2-130m", "Q9"), "type 'Q9'; legal: F32, F16"), (("x", "F32"), "model 'x'; legal")):
        with pytest.raises(ParamError, match=match):
            fabricate(*args, tmp_path / "m.gguf")
    with pytest.raises(ParamError, match="a vocabulary of 256; legal: 257"):
        vocab_metadata(256)
