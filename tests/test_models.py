"""Architectures on tiny fabricated files: against a float64 NumPy forward pass, and every way a file can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_forward import forward, mamba2

import pyggml as pg
from pyggml.errors import FormatError, ModelError, ParamError, ShapeError
from pyggml.gguf import read_gguf
from pyggml.models.base import Weights
from pyggml.models.ssd import auto_form
from pyggml.testing import fabricate, nmse

ARCHS = ("mamba2", "granitehybrid", "nemotron_h")
FORMS = ("scan", "ssd", "ssd-fused")
F32_CACHE = {"type_k": "f32", "type_v": "f32", "prec": "f32"}
IDS = [int(i) for i in np.random.default_rng(5).integers(1, 257, 37)]


def logits_of(path: Path, form: str = "ssd", chunk: int | str | None = 8, ids: list[int] = IDS) -> np.ndarray:
    model = pg.load_model(path)
    ctx = model.context(mamba2=form, chunk=chunk, **F32_CACHE)
    return ctx.decode(ids, all_logits=True)


def check(path: Path, form: str = "ssd") -> None:
    with read_gguf(path) as f:
        want = forward(f, IDS)
    assert nmse(logits_of(path, form), want) <= 1e-10


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arch", ARCHS)
def test_against_numpy(tmp_path: Path, arch: str, form: str) -> None:
    fabricate(arch, tmp_path / "m.gguf")
    check(tmp_path / "m.gguf", form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", (1, 2, 4, 8))
def test_mamba2_groups_are_normed_apart(tmp_path: Path, groups: int, form: str) -> None:
    fabricate("mamba2", tmp_path / "m.gguf", ssm__group_count=groups)
    check(tmp_path / "m.gguf", form)


@pytest.mark.parametrize("key", ("embedding_scale", "residual_scale", "logit_scale", "attention.scale"), ids=lambda k: f"f108-{k}")
@pytest.mark.parametrize("how", ("double", "absent"))
def test_fault_108_each_multiplier_counts_and_is_optional(tmp_path: Path, key: str, how: str) -> None:
    default = {"embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 3.0, "attention.scale": 0.1}[key]
    fabricate("granitehybrid", tmp_path / "a.gguf")
    fabricate("granitehybrid", tmp_path / "b.gguf", **{key.replace(".", "__"): 2 * default if how == "double" else None})
    check(tmp_path / "b.gguf")
    assert nmse(logits_of(tmp_path / "b.gguf"), logits_of(tmp_path / "a.gguf")) > 1e-6


def test_fault_109_granite_divides_by_the_logit_scale(tmp_path: Path) -> None:
    fabricate("granitehybrid", tmp_path / "a.gguf", logit_scale=None)
    fabricate("granitehybrid", tmp_path / "b.gguf", logit_scale=8.0)
    assert np.allclose(logits_of(tmp_path / "b.gguf") * 8, logits_of(tmp_path / "a.gguf"), rtol=1e-5, atol=1e-5)


def test_fault_110_scaled_outputs_have_names_of_their_own(tmp_path: Path) -> None:
    fabricate("granitehybrid", tmp_path / "m.gguf")
    g = pg.load_model(tmp_path / "m.gguf").graph(5, mamba2="scan")
    for il, kind in enumerate(("mamba", "attention", "mamba")):
        out = g.find(f"{'attn' if kind == 'attention' else kind}_out-{il}")
        scaled = g.find(f"{kind}_out_scaled-{il}")
        assert scaled.op == "SCALE" and scaled.params["s"] == 0.25
        assert scaled.src[0] is not None and scaled.src[0].root is out.root
        assert g.find(f"ffn_inp-{il}").src[0] is scaled


@pytest.mark.parametrize("switch", (True, False, None), ids=lambda s: f"f111-finetuned-{s}")
def test_fault_111_rope_only_when_the_file_says_so(tmp_path: Path, switch: bool | None) -> None:
    fabricate("granitehybrid", tmp_path / "m.gguf", rope__scaling__finetuned=switch, rope__freq_base=10000.0, rope__dimension_count=8)
    check(tmp_path / "m.gguf")
    ops = pg.load_model(tmp_path / "m.gguf").graph(5).stats().by_op
    assert ("ROPE" in ops) is (switch is not False)


def test_fault_111_without_positions_the_order_of_earlier_tokens_does_not_matter(tmp_path: Path) -> None:
    one = {"block_count": 1, "attention__head_count_kv": 2}
    ids = [5, 9, 200, 41, 7]
    for name, switch in (("nope", False), ("rope", True)):
        fabricate("granitehybrid", tmp_path / f"{name}.gguf", rope__scaling__finetuned=switch, **one)
        a, b = (logits_of(tmp_path / f"{name}.gguf", ids=x)[-1] for x in (ids, [*ids[:4][::-1], ids[4]]))
        assert (nmse(a, b) < 1e-12) is (name == "nope")


@pytest.mark.parametrize("case", ("no mamba layers", "rope on"), ids=lambda c: f"f112-{c.replace(' ', '-')}")
def test_fault_112_layer_kinds_come_from_the_file(tmp_path: Path, case: str) -> None:
    over: dict[str, Any] = {"expert_count": 0}
    over |= {"attention__head_count_kv": 2} if case == "no mamba layers" else {"rope__scaling__finetuned": True}
    fabricate("granitehybrid", tmp_path / "m.gguf", **over)
    check(tmp_path / "m.gguf")


def test_fault_113_key_and_value_length_win(tmp_path: Path) -> None:
    fabricate("nemotron_h", tmp_path / "m.gguf", attention__head_count=6, attention__head_count_kv=np.array([0, 0, 3, 0], np.int32),
              attention__key_length=16, attention__value_length=16)
    w = pg.load_model(tmp_path / "m.gguf").weights
    assert w["blk.2.attn_q.weight"].ne[:2] == (32, 96) and w["blk.2.attn_output.weight"].ne[:2] == (96, 32)
    check(tmp_path / "m.gguf")


def test_fault_115_parameters_are_counted(tmp_path: Path) -> None:
    fabricate("granitehybrid", tmp_path / "m.gguf")
    with read_gguf(tmp_path / "m.gguf") as f:
        assert pg.load_model(tmp_path / "m.gguf").n_params == sum(f.array(n).size for n in f.tensors)


def test_fault_118_480_layers(tmp_path: Path) -> None:
    fabricate("mamba2", tmp_path / "m.gguf", block_count=480)
    model = pg.load_model(tmp_path / "m.gguf")
    assert model.graph(64).n_nodes > 480 * 30
    assert np.isfinite(model.context(mamba2="scan").decode(IDS[:3])).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_node_count_does_not_depend_on_the_tokens(tmp_path: Path, arch: str) -> None:
    fabricate(arch, tmp_path / "m.gguf")
    model = pg.load_model(tmp_path / "m.gguf")
    assert len({model.graph(n, mamba2="ssd", chunk=c).n_nodes for n in (2, 64, 512, 4096) for c in (16, 64, None, "none")}) == 1
    assert model.graph(16384, mamba2="ssd", chunk=64).n_nodes == model.graph(2, mamba2="ssd").n_nodes


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", FORMS)
def test_fault_21_graphs_are_planned_without_data(tmp_path: Path, arch: str, form: str) -> None:
    fabricate(arch, tmp_path / "m.gguf")
    model = pg.load_model(tmp_path / "m.gguf")
    for n in (1, 7, 512):
        plan = pg.open_backend("null").compile(model.graph(n, mamba2=form)).plan
        assert plan.arena_bytes > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_fault_127_the_asked_form_is_in_every_recurrent_layer(tmp_path: Path, arch: str) -> None:
    fabricate(arch, tmp_path / "m.gguf")
    model = pg.load_model(tmp_path / "m.gguf")
    layers = [i for i, k in enumerate(model.kinds) if k == "mamba"]
    scan, ssd = model.graph(64, mamba2="scan"), model.graph(64, mamba2="ssd")
    assert scan.stats().by_op["SSM_SCAN"] == len(layers) and "SSM_SCAN" not in ssd.stats().by_op
    for il in layers:
        assert ssd.find(f"CB-{il}").op == "MUL_MAT"
    with pytest.raises(ParamError, match="mamba2 'fast'; legal: auto, scan, ssd, ssd-fused"):
        model.graph(64, mamba2="fast")


def test_a_users_function_in_place_of_the_layer(tmp_path: Path) -> None:
    fabricate("granitehybrid", tmp_path / "m.gguf")
    model = pg.load_model(tmp_path / "m.gguf")
    seen: list[str] = []

    def mine(x: pg.Tensor, weights: Weights, conv: pg.Tensor, ssm: pg.Tensor, hparams: Any, *, form: str, chunk: Any) -> tuple[pg.Tensor, ...]:
        seen.append(form)
        return pg.mamba2_layer(x, weights, conv, ssm, hparams, form="scan")

    got = model.context(mamba2=mine, **F32_CACHE).decode(IDS, all_logits=True)
    assert seen and set(seen) == {"user"}
    assert nmse(got, logits_of(tmp_path / "m.gguf", "scan")) <= 1e-12
    with pytest.raises(ParamError, match="it gave Tensor; expected three tensors"):
        model.context(mamba2=lambda x, *a, **k: x).decode(IDS)
    with pytest.raises(ShapeError, match=r"conv has ne \[16, 8, 8, 1\]; expected \[3, 128, 1\]"):
        model.context(mamba2=lambda x, w, conv, ssm, hp, **k: (x, ssm, ssm)).decode(IDS)
    with pytest.raises(ParamError, match=r"its graph has an input of its own, mine of ne \[1, 1, 1, 1\]; legal: tensors that it is given, and constants"):
        model.context(mamba2=lambda x, w, conv, ssm, hp, **k: (pg.mul(x, pg.tensor([1], name="mine")), conv, ssm)).decode(IDS)


# The layer on plain tensors

def layer(n: int, seqs: int, groups: int, form: str, chunk: int | str | None = None, *, decay: tuple[float, float] = (0.5, 1.0), dt_bias: float = -1.0,
          sizes: tuple[int, int, int] = (16, 8, 4)) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """mamba2_layer on random tensors, and the float64 recurrence: [y, conv, ssm] each. `sizes`: d_state, head_dim, n_head; -A in `decay`."""
    rng = np.random.default_rng(0)
    d_state, head_dim, n_head = sizes
    d_inner, n_embd = head_dim * n_head, 24
    conv_dim = d_inner + 2 * groups * d_state
    w = {"ssm_in.weight": rng.normal(0, n_embd ** -0.5, (d_inner + conv_dim + n_head, n_embd)), "ssm_conv1d.weight": rng.normal(0, 0.5, (conv_dim, 4)),
         "ssm_conv1d.bias": rng.normal(0, 0.5, conv_dim), "ssm_dt.bias": rng.normal(dt_bias, 0.5, n_head),
         "ssm_a": -rng.uniform(*decay, (n_head, 1)),
         "ssm_d": rng.normal(0, 1, (n_head, 1)), "ssm_norm.weight": rng.uniform(0.5, 1.5, (groups, d_inner // groups)),
         "ssm_out.weight": rng.normal(0, 0.2, (n_embd, d_inner))}
    w = {k: v.astype(np.float32) for k, v in w.items()}
    x = rng.normal(0, 1, (seqs, n, n_embd)).astype(np.float32)
    conv = rng.normal(0, 1, (seqs, conv_dim, 3)).astype(np.float32)
    ssm = rng.normal(0, 1, (seqs, n_head, d_inner // n_head, d_state)).astype(np.float32)
    hp = {"ssm_d_conv": 4, "ssm_d_inner": d_inner, "ssm_d_state": d_state, "ssm_n_group": groups, "ssm_dt_rank": n_head, "f_norm_rms_eps": 1e-5}
    outs = pg.mamba2_layer(pg.tensor(x), {k: pg.tensor(v) for k, v in w.items()}, pg.tensor(conv), pg.tensor(ssm), hp, form=form, chunk=chunk)
    got = [o.reshape(a.shape) for o, a in zip(pg.compute(outs), (x, conv, ssm), strict=True)]
    wide = {k: v.astype(np.float64) for k, v in w.items()}
    rows = [mamba2(wide, x[s].astype(np.float64), d_state, groups, n_head, 1e-5, conv[s].astype(np.float64), ssm[s].astype(np.float64)) for s in range(seqs)]
    return got, [np.stack([r[i] for r in rows]) for i in range(3)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", (1, 2, 3, 63, 64, 65, 127, 128, 129, 300), ids=lambda n: f"f8-{n}")
def test_fault_8_every_length(n: int, form: str) -> None:
    got, want = layer(n, 2, 2, form, 64)
    assert all(nmse(g, w) <= 1e-11 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", ((0.5, 1.0), (0.005, 0.02)), ids=("usual-decay", "f7-weak-decay"))
@pytest.mark.parametrize("chunk", (1, 16, 64, 100, "none"))
def test_fault_3_7_15_chunks_carry_their_state(form: str, decay: tuple[float, float], chunk: int | str) -> None:
    got, want = layer(130, 3, 1, form, chunk, decay=decay)
    assert all(nmse(g, w) <= 1e-11 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", (1, 2, 4), ids=lambda g: f"f1-{g}-groups")
def test_fault_1_groups(groups: int, form: str) -> None:
    got, want = layer(33, 1, groups, form, 8)
    assert all(nmse(g, w) <= 1e-11 for g, w in zip(got, want, strict=True))


def test_fault_45_46_padding_neither_decays_nor_adds() -> None:
    """257 tokens in chunks of 256: 255 padded steps behind a conv bias and A near -8. One that counted would leave nothing of the state."""
    got, want = layer(257, 2, 1, "ssd", 256, decay=(7.0, 8.0), dt_bias=-4.6)
    assert all(nmse(g, w) <= 1e-11 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sizes", "groups"), (((128, 80, 16), 8), ((96, 64, 16), 8), ((256, 64, 8), 2), ((128, 128, 4), 4), ((5, 7, 3), 3), ((16, 1, 6), 1)),
                         ids=lambda v: "f19-" + "x".join(map(str, v)) if isinstance(v, tuple) else None)
def test_fault_19_head_sizes_of_real_models_and_odd_ones(sizes: tuple[int, int, int], groups: int, form: str) -> None:
    got, want = layer(70, 1, groups, form, 32, sizes=sizes)
    assert all(nmse(g, w) <= 1e-11 for g, w in zip(got, want, strict=True))


def test_layer_errors() -> None:
    with pytest.raises(ParamError, match="form 'fast'; legal: scan, ssd, ssd-fused"):
        layer(3, 1, 1, "fast")
    with pytest.raises(ParamError, match="chunk 0; legal"):
        layer(3, 1, 1, "ssd", 0)
    with pytest.raises(ShapeError, match="ssm_n_group 3 must divide ssm_dt_rank"):
        layer(3, 1, 3, "ssd")


# Files that are wrong

def refuse(tmp_path: Path, match: str, arch: str = "nemotron_h", error: type[Exception] = ModelError, **kw: Any) -> None:
    fabricate(arch, tmp_path / "bad.gguf", **kw)
    with pytest.raises(error, match=match) as e:
        pg.load_model(tmp_path / "bad.gguf").vocab  # noqa: B018 - the vocabulary is read on first use
    assert "\n" not in str(e.value) and str(e.value).startswith(str(tmp_path / "bad.gguf"))


ONE = np.ones((1, 32), np.float32)


@pytest.mark.parametrize(("match", "kw"), [
    pytest.param("missing: blk.1.ssm_d; unread: v.extra.weight", {"drop": ("blk.1.ssm_d",), "extra": {"v.extra.weight": ONE}, "arch": "mamba2"},
                 id="f82-missing-and-unread"),
    pytest.param("unread: blk.1.ffn_up.scale", {"extra": {"blk.1.ffn_up.scale": ONE}}, id="f86-companion-tensor"),
    pytest.param("unread: blk.2.ffn_latent_down.weight", {"extra": {"blk.2.ffn_latent_down.weight": ONE}}, id="f107-latent-projection"),
    pytest.param(r"blk.0.ssm_out.weight: ne \[32, 32\], expected \[64, 32\]",
                 {"drop": ("blk.0.ssm_out.weight",), "extra": {"blk.0.ssm_out.weight": np.ones((32, 32), np.float32)}}, id="misshapen"),
    pytest.param("head_count_kv: found ndarray of 3; legal: a whole number, or an array of 4",
                 {"metadata": {"nemotron_h.attention.head_count_kv": np.array([0, 0, 2], np.int32)}}, id="f83-array-of-wrong-length"),
    pytest.param("expert_count: found 8; routed experts", {"arch": "granitehybrid", "expert_count": 8}, id="experts"),
    pytest.param("general.architecture: found 'llama'; legal: granitehybrid, mamba2, nemotron_h", {"metadata": {"general.architecture": "llama"}},
                 id="architecture"),
    pytest.param("ssm.group_count: found 0; legal: a number above 0", {"metadata": {"nemotron_h.ssm.group_count": 0}}, id="zero-groups"),
    pytest.param("head_count_kv 3 must divide head_count 4", {"attention__head_count_kv": np.array([0, 0, 3, 0], np.int32)}, id="kv-heads"),
    pytest.param("rope.scaling.type: found 'yarn'; legal: none, linear",
                 {"arch": "granitehybrid", "rope__scaling__finetuned": True, "rope__scaling__type": "yarn"}, id="yarn"),
    pytest.param("block_count: found 0", {"metadata": {"nemotron_h.block_count": 0}}, id="no-layers"),
    pytest.param("eps|epsilon: found '1e-5'; legal: a finite number", {"metadata": {"nemotron_h.attention.layer_norm_rms_epsilon": "1e-5"}}, id="eps-as-text"),
])
def test_bad_models(tmp_path: Path, match: str, kw: dict[str, Any]) -> None:
    refuse(tmp_path, match, **kw)


def test_fault_87_required_keys_fail_by_name(tmp_path: Path) -> None:
    fabricate("mamba2", tmp_path / "m.gguf")
    with read_gguf(tmp_path / "m.gguf") as f:
        meta, tensors = dict(f.metadata), {n: f.array(n) for n in f.tensors}
    for k in ("embedding_length", "ssm.state_size", "ssm.time_step_rank", "attention.layer_norm_rms_epsilon"):
        pg.gguf.write_gguf(tmp_path / "bad.gguf", {a: v for a, v in meta.items() if a != f"mamba2.{k}"}, tensors)
        with pytest.raises(ModelError, match=f"key mamba2.{k} is missing"):
            pg.load_model(tmp_path / "bad.gguf")


def test_fault_83_scalar_where_an_array_was(tmp_path: Path) -> None:
    fabricate("granitehybrid", tmp_path / "a.gguf", attention__head_count_kv=2)
    fabricate("granitehybrid", tmp_path / "b.gguf", attention__head_count_kv=np.array([2, 2, 2], np.int32),
              attention__head_count=np.array([4, 4, 4], np.uint32), feed_forward_length=np.array([48, 48, 48], np.int32))
    assert np.array_equal(logits_of(tmp_path / "a.gguf"), logits_of(tmp_path / "b.gguf"))


def test_kinds_are_checked_against_the_tensors(tmp_path: Path) -> None:
    refuse(tmp_path, r"layer 0: the metadata says attention, its tensors say mamba \(blk.0.ssm_in.weight\)", "granitehybrid",
           metadata={"granitehybrid.attention.head_count_kv": 2})


def test_fault_84_deep_arrays_are_whole(tmp_path: Path) -> None:
    kv = np.zeros(88, np.int32)
    kv[85] = 2
    fabricate("granitehybrid", tmp_path / "m.gguf", block_count=88, attention__head_count_kv=kv)
    model = pg.load_model(tmp_path / "m.gguf")
    assert [i for i, k in enumerate(model.kinds) if k == "attention"] == [85]


def test_unsupported_weight_type_is_named(shared: Path) -> None:
    with pytest.raises(ModelError, match="type iq4_nl is not supported here; legal: f32, f16, bf16, q8_0, q4_0, q4_1"):
        pg.load_model(shared / "models" / "granite-h-demo-IQ4_NL.gguf")
    with pytest.raises(ModelError, match="expert_count: found 8"):
        pg.load_model(shared / "models" / "granite-h-moe-demo-Q8_0.gguf")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(FormatError):
        pg.load_model(tmp_path / "x.gguf")


def test_auto_takes_the_faster_form() -> None:
    """The recurrence for few tokens and small states, SSD_SCAN beyond; a backend without that op keeps the recurrence."""
    model = pg.load_model(pg.models.demo_path())
    d_state = model.hparams.ssm_d_state
    assert [auto_form("cpu", n, 128) for n in (2, 31, 32, 4096)] == ["scan", "scan", "ssd-fused", "ssd-fused"]
    assert [auto_form("cpu", n, 128, "bf16") for n in (15, 16)] == ["scan", "ssd-fused"]
    assert auto_form("cpu", 4096, 16) == auto_form("ggml", 4096, 128) == "scan"
    for n in (1, 8, 100):
        assert model.form_for("auto", n) == (auto_form("cpu", n, d_state) if n > 1 else "scan")
        assert model.form_for("ssd", n) == ("ssd" if n > 1 else "scan")
    ctx = model.context(backend="reference", n_ctx=64)
    ctx.decode((IDS * 2)[:40])
    assert ctx.forms_used() == "scan at 40"
