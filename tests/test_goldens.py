"""Trained models against the golden outputs of transformers and llama.cpp.

The bundled Q8_0 model's goldens are in tests/data (cut out of the full ones); all else runs when ../shared is there. Tolerances are those of the
references among themselves: llama.cpp is within 2.3e-5 of transformers in F32; quantized types are held to 1.15 times
llama.cpp's own distance from the exact product with the dequantized weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pyggml as pg
from pyggml.dtypes import bf16_to_f32
from pyggml.gguf import read_gguf, write_gguf
from pyggml.models import Model, demo_path
from pyggml.testing import nmse

FORMS = ("scan", "ssd", "ssd-fused")
PROMPTS = ("short", "mid", "long")
F32_CACHE = {"type_k": "f32", "type_v": "f32"}
MODELS = ("granite-h-demo", "nemotron-h-demo", "mamba2-demo")
TYPES = [("granite-h-demo", t) for t in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")] + [
    (m, t) for m in ("nemotron-h-demo", "mamba2-demo") for t in ("BF16", "Q8_0", "Q4_K_M")]
OPEN: dict[str, Model] = {}


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def open_f32(shared: Path, name: str, tmp: Path) -> Model:
    """The F32 model: from its file, or the BF16 file with every BF16 tensor widened (exact)."""
    if name not in OPEN:
        path = shared / "models" / f"{name}-F32.gguf"
        if not path.exists():
            path = tmp / f"{name}-F32.gguf"
            with read_gguf(shared / "models" / f"{name}-BF16.gguf") as f:
                tensors = {n: bf16_to_f32(f.raw(n).view(np.uint16)).reshape(t.shape) if t.dtype.name == "bf16" else f.array(n) for n, t in f.tensors.items()}
                write_gguf(path, dict(f.metadata), tensors)
        OPEN[name] = pg.load_model(path)
    return OPEN[name]


def greedy(ctx: pg.runtime.context.Context, logits: np.ndarray, n: int) -> list[int]:
    out = []
    for _ in range(n):
        out.append(int(np.argmax(logits)))
        logits = ctx.decode(out[-1:])
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_f32_logits_states_and_greedy(shared: Path, tmp_path_factory: pytest.TempPathFactory, name: str, form: str) -> None:
    model = open_f32(shared, name, tmp_path_factory.getbasetemp())
    z = np.load(shared / "models" / "goldens" / f"{name}.npz")
    ctx = model.context(mamba2=form, **F32_CACHE)
    for prompt in PROMPTS:
        ctx.reset()
        logits = ctx.decode(z[f"{prompt}/ids"].tolist(), all_logits=True)
        assert np.abs(logits[-1] - z[f"{prompt}/hf_last"]).max() <= 1e-4
        if f"{prompt}/hf_logits" in z:
            assert np.abs(logits - z[f"{prompt}/hf_logits"]).max() <= 1e-4
        else:
            top = np.take_along_axis(logits, z[f"{prompt}/hf_top8_ids"].astype(np.int64), 1)
            assert np.abs(top - z[f"{prompt}/hf_top8"]).max() <= 1e-4
            wide = logits.astype(np.float64)
            assert np.abs(np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1) - z[f"{prompt}/hf_logsumexp"]).max() <= 1e-4
        for row, layer in enumerate(z[f"{prompt}/mamba_layers"]):
            state = ctx.state(int(layer))
            assert nmse(state["conv"], z[f"{prompt}/hf_conv_state"][row]) <= 1e-9
            assert nmse(state["ssm"][:, ::8], z[f"{prompt}/hf_ssm_state_sub"][row]) <= 1e-9
            assert np.allclose(np.linalg.norm(state["ssm"].astype(np.float64), axis=(1, 2)), z[f"{prompt}/hf_ssm_norm"][row], rtol=1e-4)
        assert greedy(ctx, logits[-1], 64) == z[f"{prompt}/hf_greedy"].tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "type_"), TYPES)
def test_types_are_as_close_to_exact_as_llama_cpp(shared: Path, name: str, type_: str, form: str) -> None:
    path = shared / "models" / f"{name}-{type_}.gguf"
    ids = np.load(shared / "models" / "goldens" / f"{name}.npz")
    z = np.load(shared / "models" / "goldens" / f"{name}-quants.npz")
    model = pg.load_model(path)
    ctx, plain = (model.context(mamba2=form, prec=prec, **F32_CACHE) for prec in ("auto", "f32"))
    for prompt in PROMPTS:
        if f"{type_}/{prompt}/deq_last" not in z:
            continue
        ctx.reset()
        logits = ctx.decode(ids[f"{prompt}/ids"].tolist(), all_logits=True)
        exact = z[f"{type_}/{prompt}/deq_last"]
        assert rms(logits[-1] - exact) <= 1.15 * rms(z[f"{type_}/{prompt}/llama_last"] - exact)
        wrong = int(np.sum(logits.argmax(1) != z[f"{type_}/{prompt}/deq_argmax"]))
        assert wrong <= max(1, len(logits) // 100)  # llama.cpp's own: 6 to 23 of 600 (Q8_0, Q4_K_M); a margin of 0.005 is within the rounding's rms
        plain.reset()  # float32 products: as close as F32 weights are to their golden
        logits = plain.decode(ids[f"{prompt}/ids"].tolist(), all_logits=True)
        assert np.abs(logits[-1] - exact).max() <= 1e-4
        assert (logits.argmax(1) == z[f"{type_}/{prompt}/deq_argmax"]).mean() >= 0.998


@pytest.mark.parametrize("form", FORMS)
def test_bundled_model(form: str) -> None:
    z = np.load(Path(__file__).parent / "data" / "granite-h-demo-Q8_0.npz")
    model = pg.load_model(demo_path())
    ctx, plain = (model.context(mamba2=form, prec=prec, **F32_CACHE) for prec in ("auto", "f32"))
    for prompt in PROMPTS:
        ctx.reset()
        plain.reset()
        logits = ctx.decode(z[f"{prompt}/ids"].tolist(), all_logits=True)
        exact = z[f"{prompt}/deq_last"]
        assert rms(logits[-1] - exact) <= 1.15 * rms(z[f"{prompt}/llama_last"] - exact)
        logits = plain.decode(z[f"{prompt}/ids"].tolist(), all_logits=True)
        assert np.abs(logits[-1] - exact).max() <= 1e-4
        assert np.array_equal(logits.argmax(1), z[f"{prompt}/deq_argmax"])


@pytest.mark.parametrize("form", FORMS)
def test_mamba2_with_two_groups_against_llama_cpp(form: str) -> None:
    """The norm is per group there; transformers norms over all of d_inner. A fabricated file; logits by llama.cpp 0.5.0-dev (0c1e570), F32."""
    data = Path(__file__).parent / "data"
    z = np.load(data / "mamba2-2-groups-llama.npz")
    logits = pg.load_model(data / "mamba2-2-groups.gguf").context(mamba2=form).decode(z["ids"].tolist(), all_logits=True)
    assert np.abs(logits - z["logits"]).max() <= 2e-5
