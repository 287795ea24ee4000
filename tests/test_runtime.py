"""Contexts: ubatches, sequences, states, resets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import pyggml as pg
from pyggml.errors import ContextError, KernelError, ParamError, UnsupportedOp
from pyggml.models import Model, demo_path
from pyggml.models.ssd import chunk_size
from pyggml.runtime.batch import Piece, split_equal
from pyggml.testing import fabricate, nmse

FORMS = ("scan", "ssd", "ssd-fused")
F32_CACHE = {"type_k": "f32", "type_v": "f32", "prec": "f32"}
RNG = np.random.default_rng(11)
IDS = [int(i) for i in RNG.integers(1, 2048, 700)]


@pytest.fixture(scope="module")
def demo() -> Model:
    return pg.load_model(demo_path())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    out = {}
    for arch in ("mamba2", "granitehybrid", "nemotron_h"):
        path = tmp_path_factory.mktemp("tiny") / f"{arch}.gguf"
        fabricate(arch, path)
        out[arch] = pg.load_model(path)
    return out


def small(n: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(1, 257, n)]


def greedy(ctx: pg.runtime.context.Context, ids: list[int], n: int, seq: int = 0) -> list[int]:
    logits, out = ctx.decode(ids, seq), []
    for _ in range(n):
        out.append(int(np.argmax(logits)))
        logits = ctx.decode(out[-1:], seq)
    return out


@pytest.mark.parametrize("n", (1, 2, 63, 64, 65, 257, 600))
@pytest.mark.parametrize("form", FORMS[1:])
def test_scan_and_ssd_agree(demo: Model, n: int, form: str) -> None:
    """Fault 6: one model, three graphs; in F32 they differ by rounding alone, over ubatch and chunk."""
    want = demo.context(mamba2="scan", **F32_CACHE).decode(IDS[:n], all_logits=True)
    seen = set()
    for ub, chunk in product((1, 7, 64, 512), (16, 64, 256, "none")):
        chunks = tuple(chunk_size(chunk, min(ub, n - at), 1, 1) for at in range(0, n, ub))
        if chunks in seen or (ub == 1 and n > 65):
            continue  # the same graphs again; and one token a step is the recurrence in all forms, whatever the length
        seen.add(chunks)
        got = demo.context(mamba2=form, n_ubatch=ub, chunk=chunk, **F32_CACHE).decode(IDS[:n], all_logits=True)
        assert np.abs(got - want).max() <= 1e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", (1, 2, 3, 4, 10), ids=lambda n: f"f4-{n}")
def test_fault_4_prefill_and_step_equal_the_longer_prefill(tiny: dict[str, Model], n: int, form: str) -> None:
    for model in tiny.values():
        a, b = (model.context(mamba2=form, **F32_CACHE) for _ in range(2))
        a.decode(small(n))
        assert nmse(a.decode([7]), b.decode([*small(n), 7])) <= 1e-11
        for il, kind in enumerate(model.kinds):
            if kind == "mamba":
                assert all(nmse(a.state(il)[k], b.state(il)[k]) <= 1e-11 for k in ("conv", "ssm"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ub", (64, 256), ids=lambda u: f"f24-ubatch-{u}")
def test_fault_24_any_number_of_ubatches(demo: Model, ub: int, form: str) -> None:
    whole = demo.context(mamba2=form, n_ubatch=1024, **F32_CACHE).decode(IDS)
    assert nmse(demo.context(mamba2=form, n_ubatch=ub, **F32_CACHE).decode(IDS), whole) <= 1e-9


@pytest.mark.parametrize("split", ([128] * 5 + [60], [146] * 4 + [116]), ids=("f5-128", "f5-146"))
@pytest.mark.parametrize("form", FORMS[1:])
def test_fault_5_splitting_a_prompt_changes_nothing(demo: Model, split: list[int], form: str) -> None:
    whole = demo.context(mamba2=form, n_ubatch=1024, **F32_CACHE).decode(IDS)
    ctx, at = demo.context(mamba2=form, **F32_CACHE), 0
    for n in split:
        logits = ctx.decode(IDS[at:at + n])
        at += n
    assert at == 700 and nmse(logits, whole) <= 1e-9


def test_fault_25_a_row_is_cleared_once(tiny: dict[str, Model]) -> None:
    for model in tiny.values():
        parts = model.context(n_ubatch=2, **F32_CACHE).decode([5, 6, 7], all_logits=True)
        whole = model.context(**F32_CACHE).decode([5, 6, 7], all_logits=True)
        assert nmse(parts, whole) <= 1e-11 and np.array_equal(parts.argmax(1), whole.argmax(1))


@pytest.mark.parametrize(("n", "ub"), ((8, 3), (5, 1)), ids=("f26-8-by-3", "f26-5-by-1"))
def test_fault_26_any_ubatch(tiny: dict[str, Model], n: int, ub: int) -> None:
    for model in tiny.values():
        got = model.context(n_ubatch=ub, **F32_CACHE).decode(small(n), all_logits=True)
        assert nmse(got, model.context(**F32_CACHE).decode(small(n), all_logits=True)) <= 1e-11


def test_fault_27_token_order_across_sequences_does_not_matter(tiny: dict[str, Model]) -> None:
    for model in tiny.values():
        mixed = model.context(n_seq_max=2, **F32_CACHE).decode_tokens([10, 20, 11, 21, 22], [0, 0, 1, 1, 2], [0, 1, 0, 1, 1])
        a = model.context(**F32_CACHE).decode([10, 11], all_logits=True)
        b = model.context(**F32_CACHE).decode([20, 21, 22], all_logits=True)
        assert nmse(mixed[[0, 2]], a) <= 1e-11 and nmse(mixed[[1, 3, 4]], b) <= 1e-11
        with pytest.raises(ParamError, match=r"positions must be 0 to 1, found \[1, 2\]"):
            model.context().decode_tokens([1, 2], [1, 2], [0, 0])


@pytest.mark.parametrize("form", FORMS)
def test_fault_28_batched_sequences_equal_solo_runs(demo: Model, form: str) -> None:
    prompts = [IDS[:3], IDS[3:20], IDS[20:84], IDS[84:149]]
    solo = []
    for p in prompts:
        solo.append(greedy(demo.context(mamba2=form, **F32_CACHE), p, 16))
    ctx = demo.context(mamba2=form, n_seq_max=4, **F32_CACHE)
    logits = [x[-1] for x in ctx.decode_batch(list(enumerate(prompts)))]
    got: list[list[int]] = [[] for _ in prompts]
    for _ in range(16):
        for s, x in enumerate(logits):
            got[s].append(int(np.argmax(x)))
        logits = [x[-1] for x in ctx.decode_batch([(s, got[s][-1:]) for s in range(4)])]
    assert got == solo


def test_fault_29_alternating_sequences_read_their_own_rows(demo: Model) -> None:
    prompt, ctx = IDS[:9], demo.context(n_seq_max=3, **F32_CACHE)
    for s in range(3):
        ctx.decode(prompt, s)
    texts: list[list[int]] = [[], [], []]
    last = [prompt[-1]] * 3
    for _ in range(12):
        for s in (2, 0, 1):
            last[s] = int(np.argmax(ctx.decode([last[s]], s)))
            texts[s].append(last[s])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("form", FORMS)
def test_fault_31_reset_forgets_everything(tiny: dict[str, Model], form: str) -> None:
    for model in tiny.values():
        ctx, fresh = (model.context(mamba2=form, **F32_CACHE) for _ in range(2))
        ctx.decode(small(64, 1))
        ctx.reset(0)
        assert np.array_equal(ctx.decode(small(20), all_logits=True), fresh.decode(small(20), all_logits=True))
        for il, kind in enumerate(model.kinds):
            if kind == "mamba":
                assert all(np.array_equal(ctx.state(il)[k], fresh.state(il)[k]) for k in ("conv", "ssm"))


def test_fault_39_sequence_ids_are_used_again(tiny: dict[str, Model]) -> None:
    for model in tiny.values():
        ctx = model.context(n_seq_max=2, **F32_CACHE)
        ctx.decode(small(5), 0)
        ctx.decode(small(6), 1)
        ctx.reset(0)
        assert nmse(ctx.decode(small(5, 3), 0), model.context(**F32_CACHE).decode(small(5, 3))) <= 1e-11
        with pytest.raises(ParamError, match=r"sequence 2; legal: 0 to 1 \(n_seq_max 2\)"):
            ctx.decode([1], 2)


def test_fault_40_41_memory_sizes(demo: Model, tiny: dict[str, Model]) -> None:
    small_ctx, large = demo.context(n_ctx=512).memory_bytes(), demo.context(n_ctx=65536).memory_bytes()
    assert small_ctx["state"] == large["state"] == 5 * (768 * 3 + 8 * 64 * 128) * 4
    assert small_ctx["kv"] == 512 * 2 * 2 * 128 * 2  # two attention layers, K and V of 2 heads of 64 in f16
    assert tiny["mamba2"].context(n_ctx=65536).memory_bytes()["kv"] == 0


def test_fault_41_kv_of_granite_1b_shape(tmp_path: Path) -> None:
    kv = np.array([8 if i in (5, 15, 25, 35) else 0 for i in range(40)], np.int32)
    fabricate("granitehybrid", tmp_path / "m.gguf", block_count=40, attention__head_count=8, attention__head_count_kv=kv, attention__key_length=128)
    assert pg.load_model(tmp_path / "m.gguf").context(n_ctx=4096).memory_bytes()["kv"] == 64 << 20


@pytest.mark.parametrize("form", FORMS)
def test_fault_42_a_full_context_stops(tiny: dict[str, Model], form: str) -> None:
    for model in tiny.values():
        ctx = model.context(n_ctx=16, mamba2=form, **F32_CACHE)
        seen: list[int] = []
        list(ctx.generate(small(4), 20, pg.Sampler(temp=0.0), on_token=seen.append))
        assert len(seen) <= 13 and ctx.n_past() <= 16
        with pytest.raises(ContextError, match="the context is full"):
            ctx.decode(small(17))
        before = ctx.n_past()
        with pytest.raises(ContextError, match="the context is full"):
            ctx.decode(small(17 - before))
        assert ctx.n_past() == before  # nothing was touched


def test_fault_43_counts_are_checked(tiny: dict[str, Model]) -> None:
    ctx = tiny["mamba2"].context()
    with pytest.raises(ParamError, match="n_predict -7; legal: a whole number >= 0"):
        list(ctx.generate([1], -7))
    for bad in ({"n_ctx": 0}, {"n_ubatch": -5}, {"n_seq_max": 0}, {"n_ctx": 2.5}):
        with pytest.raises(ParamError, match="legal: a whole number >= 1"):
            tiny["mamba2"].context(**bad)  # type: ignore[arg-type]


def test_fault_44_ragged_lengths(tiny: dict[str, Model]) -> None:
    for model in tiny.values():
        both = model.context(n_seq_max=2, **F32_CACHE).decode_batch([(0, small(5, 1)), (1, small(9, 2))], all_logits=True)
        for got, ids in zip(both, (small(5, 1), small(9, 2)), strict=True):
            assert nmse(got, model.context(**F32_CACHE).decode(ids, all_logits=True)) <= 1e-11


@pytest.mark.parametrize("n_ctx", (1, 1000, 4097), ids=lambda n: f"f51-{n}")
def test_fault_51_any_context_size(tiny: dict[str, Model], n_ctx: int) -> None:
    for model in tiny.values():
        ids = small(min(n_ctx, 300))
        assert nmse(model.context(n_ctx=n_ctx, **F32_CACHE).decode(ids), model.context(**F32_CACHE).decode(ids)) <= 1e-11


def test_fault_50_one_predicate_for_recurrent_state(tiny: dict[str, Model]) -> None:
    assert all(m.has_recurrent_state for m in tiny.values())


@pytest.mark.parametrize("form", FORMS)
def test_fault_17_18_dead_memory_does_not_leak(tiny: dict[str, Model], form: str) -> None:
    """Unused rows and cells full of NaN, the arena poisoned: the same bits as clean memory, first run and second."""
    for model in tiny.values():
        clean = model.context(n_seq_max=3, mamba2=form, **F32_CACHE)
        dirty = model.context(n_seq_max=3, mamba2=form, poison=True, **F32_CACHE)
        for t in (*dirty.memory.conv, *dirty.memory.ssm):
            if t is not None and t.data is not None:
                t.data.reshape(3, -1)[[0, 2]] = 0xFF
        for t in (*dirty.memory.k, *dirty.memory.v):
            if t is not None and t.data is not None:
                t.data[...] = 0xFF
        want = clean.decode(small(21), 1, all_logits=True)
        assert np.array_equal(dirty.decode(small(21), 1, all_logits=True), want)
        dirty.reset(1)
        assert np.array_equal(dirty.decode(small(21), 1, all_logits=True), want)


@pytest.mark.parametrize("form", FORMS)
def test_fault_17_infinities_of_a_finished_sequence(tiny: dict[str, Model], form: str) -> None:
    """Cells are used again: what they held is multiplied by 0 until then, and 0 times infinity would be NaN."""
    for arch in ("granitehybrid", "nemotron_h"):
        ctx = tiny[arch].context(n_seq_max=2, mamba2=form, **F32_CACHE)
        want = ctx.decode(small(5, 1), 1, all_logits=True)
        ctx.reset()
        ctx.decode(small(40), 0)
        for t in (*ctx.memory.k, *ctx.memory.v):
            if t is not None and t.data is not None:
                t.data.view(np.float32).reshape(ctx.n_ctx, -1)[ctx.memory.cell_seq == 0] = np.inf
        ctx.reset(0)
        assert np.array_equal(ctx.decode(small(5, 1), 1, all_logits=True), want)


def test_infinities_of_a_live_sequence_stay_with_it(tiny: dict[str, Model]) -> None:
    """Cells of two sequences lie among each other, in prompts and token by token; one of them holds what is no number."""
    for arch in ("granitehybrid", "nemotron_h"):
        model = tiny[arch]
        logits = []
        for bad in (1.0, np.inf, np.nan):
            ctx = model.context(n_seq_max=2, **F32_CACHE)
            ctx.decode_batch([(0, small(9, 1)), (1, small(9, 2))])
            for t in (*ctx.memory.k, *ctx.memory.v):
                if t is not None and t.data is not None:
                    t.data.view(np.float32).reshape(ctx.n_ctx, -1)[ctx.memory.cell_seq == 0] = bad
            steps = [ctx.decode_batch([(0, small(n)), (1, small(n, 3))], all_logits=True) for n in (20, 1, 1)]
            logits.append(np.concatenate([s[1] for s in steps]))
            assert np.isfinite(steps[-1][0]).all() == (bad == 1.0)
        assert all(nmse(x, logits[0]) <= 1e-11 for x in logits)


@pytest.mark.parametrize("types", [{}, {"type_k": "f32", "type_v": "f32"}, {"type_k": "bf16", "type_v": "bf16"}, {"type_k": "q8_0"}], ids=str)
def test_both_graphs_of_attention_agree(demo: Model, types: dict[str, str]) -> None:
    outs = []
    for flash_attn in (True, False):
        ctx = demo.context(flash_attn=flash_attn, n_seq_max=2, n_ubatch=64, prec="f32", **types)
        prompts = ctx.decode_batch([(0, IDS[:100]), (1, IDS[50:90])], all_logits=True)
        outs.append([*prompts, *ctx.decode_batch([(0, IDS[:1]), (1, IDS[:1])]), ctx.decode([7], 1)])
    assert all(nmse(a, b) <= 1e-10 for a, b in zip(*outs, strict=True))


def test_flash_attn_is_true_false_or_auto(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParamError, match="flash_attn 'yes'; legal: True, False, 'auto'"):
        demo.context(flash_attn="yes")
    attention = pg.find_op("FLASH_ATTN_EXT")
    monkeypatch.setattr(attention, "kernels", {})
    ids = small(5)
    assert np.isfinite(demo.context(flash_attn="auto").decode(ids)).all()  # the products, as no kernel takes the op
    with pytest.raises(UnsupportedOp, match="FLASH_ATTN_EXT"):
        demo.context(flash_attn=True).decode(ids)


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_keeps_states_between_steps(tiny: dict[str, Model], form: str) -> None:
    """Each shape of ubatch is a graph of its own; all go on from the same memory."""
    for model in tiny.values():
        outs = []
        for backend in ("cpu", "reference"):
            ctx = model.context(backend=backend, n_ctx=64, n_ubatch=8, mamba2=form, type_k="f32", type_v="f32")
            ctx.decode(small(30, 3))
            ctx.reset()
            outs.append([ctx.decode(small(11)), ctx.decode([5]), ctx.decode([6]), ctx.state(0)["ssm"]])
        assert all(np.abs(a - b).max() < 1e-4 for a, b in zip(*outs, strict=True))


NARROW = ({"type_k": "f16", "type_v": "f16"}, {"type_k": "bf16", "type_v": "bf16"}, {"type_k": "q8_0", "type_v": "q8_0"}, {"type_s": "f16"},
          {"type_s": "bf16", "type_r": "bf16"})


@pytest.mark.parametrize("types", NARROW, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_narrow_caches_and_states(demo: Model, types: dict[str, str], form: str) -> None:
    want = demo.context(mamba2=form, **F32_CACHE).decode(IDS[:100])
    ctx = demo.context(mamba2=form, n_ubatch=32, **{**F32_CACHE, **types})
    err = nmse(ctx.decode(IDS[:100]), want)
    limit = {"f16": 1e-5, "bf16": 1e-3, "q8_0": 1e-3}[next(iter(types.values()))]  # rounding of 11, 8 and 7 bits, through seven layers
    assert 0 < err <= limit


def test_where_the_cache_cannot_be_q8_0(demo: Model, tmp_path: Path) -> None:
    with pytest.raises(ParamError, match="type_v 'q8_0' needs attention as one op; legal without: f32, f16, bf16"):
        demo.context(type_v="q8_0", flash_attn=False)
    fabricate("granitehybrid", tmp_path / "m.gguf")
    with pytest.raises(ParamError, match="type_k 'q8_0': the heads have 8 elements; legal for them: f32, f16, bf16"):
        pg.load_model(tmp_path / "m.gguf").context(type_k="q8_0")
    with pytest.raises(ParamError, match="type_s 'q8_0'; legal: f32, f16, bf16"):
        demo.context(type_s="q8_0")


def test_fault_16_a_float16_state_is_never_silently_infinite(tmp_path: Path) -> None:
    """Large steps and hardly any decay: the state grows beyond 65504, in float32 and bfloat16 it stays a number."""
    fabricate("mamba2", tmp_path / "m.gguf")
    model = pg.load_model(tmp_path / "m.gguf")
    for name, value in (("ssm_dt.bias", 30.0), ("ssm_a", -1e-4), ("ssm_conv1d.bias", 8.0)):
        weight = model.weights[f"blk.0.{name}"]
        weight.data = np.full(weight.n_elements, value, np.float32).view(np.uint8)
    for type_s in ("f32", "bf16"):
        ctx = model.context(type_s=type_s)
        assert np.isfinite(ctx.decode(small(40))).all() and 65504 < ctx.state(0)["ssm"].max() < np.inf
    ctx = model.context(type_s="f16", n_seq_max=2)
    ctx.decode(small(2), 1)
    with pytest.raises(ContextError, match="sequence 0: its state cache_s_l0 is beyond float16 .65504. or NaN; choose f32 or bf16 as type_s"):
        ctx.decode(small(40))
    with pytest.raises(ContextError, match=r"reset\(0\) first"):
        ctx.decode([1])
    assert np.isfinite(ctx.decode(small(2), 1)).all()  # the others go on


def test_threads_give_the_same_bits(demo: Model) -> None:
    for form in FORMS:
        outs = [demo.context(threads=t, mamba2=form, **F32_CACHE).decode(IDS[:130], all_logits=True) for t in (1, 2, 7)]
        assert all(np.array_equal(o, outs[0]) for o in outs[1:])


def test_plans_are_used_again(demo: Model) -> None:
    ctx = demo.context(**F32_CACHE)
    ctx.decode(IDS[:10])
    ctx.decode(IDS[:1])
    compute = ctx.memory_bytes()["compute"]
    for i in range(20):
        ctx.decode([IDS[i]])
    assert ctx.timings.n_plans == 2
    sizes = []
    for n in (10, 1):
        alone = demo.context(**F32_CACHE)
        alone.decode(IDS[:n])
        sizes.append(alone.memory_bytes()["compute"])
    assert compute == ctx.memory_bytes()["compute"] < sum(sizes)  # plans share one memory


def test_prompts_take_other_threads_than_single_tokens(demo: Model) -> None:
    ctx, plain = demo.context(threads=1, threads_batch=2), demo.context(threads=1)
    assert ctx.threads == 1 and ctx.batch_backend is not None and ctx.batch_backend.threads == 2 and plain.batch_backend is None
    for ids in (IDS[:9], IDS[9:10]):
        assert np.array_equal(ctx.decode(ids), plain.decode(ids))
    used = {n: p.runner.team.n_threads for (n, *_), p in ctx._plans.items()}
    assert used == {9: 2, 1: 1}
    one, other = ctx.memory_bytes()["compute"], plain.memory_bytes()["compute"]
    assert one > other  # an arena each


@pytest.mark.parametrize("arch", ["mamba2", "granitehybrid", "nemotron_h"])
def test_plans_are_made_before_the_calls_that_need_them(arch: str, tiny: dict[str, Model]) -> None:
    ctx = tiny[arch].context(n_ctx=700, n_seq_max=2, n_ubatch=16)
    calls = [[(0, 250), (1, 20)], [(0, 1)], [(0, 1), (1, 1)], *[[(1, 1)]] * 20]
    ctx.prepare_batches(calls)
    made = ctx.timings.n_plans
    done = [0, 0]
    for call in calls:
        ctx.decode_batch([(s, small(done[s] + n)[done[s]:]) for s, n in call])
        for s, n in call:
            done[s] += n
    assert ctx.timings.n_plans == made and done == [252, 41]


@pytest.mark.parametrize("arch", ["mamba2", "granitehybrid", "nemotron_h"])
def test_a_copied_sequence_goes_its_own_way(arch: str, tiny: dict[str, Model]) -> None:
    ctx, alone = tiny[arch].context(n_ctx=64, n_seq_max=3), tiny[arch].context(n_ctx=64)
    ids = small(20)
    ctx.decode(small(5, seed=1), 2)  # forgotten by the copy
    ctx.decode(ids[:10], 0)
    ctx.copy(0, 2)
    ctx.decode(ids[:4], 0)
    alone.decode(ids[:10])
    assert ctx.n_past(2) == 10 and nmse(ctx.decode(ids[10:], 2), alone.decode(ids[10:])) < 1e-12  # other cells, so another order of sums


def test_copies_that_cannot_be(tiny: dict[str, Model]) -> None:
    ctx = tiny["granitehybrid"].context(n_ctx=10, n_seq_max=2)
    ctx.decode(small(6))
    with pytest.raises(ContextError, match="full"):
        ctx.copy(0, 1)
    with pytest.raises(ParamError, match="onto itself"):
        ctx.copy(0, 0)
    with pytest.raises(ParamError, match="sequence 2"):
        ctx.copy(0, 2)


def test_an_interrupted_step_invalidates_its_sequences(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = demo.context(n_seq_max=2, **F32_CACHE)
    ctx.decode(IDS[:5], 1)

    def interrupted(*_a: object, **_k: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr("pyggml.cpu.team.Team.run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ctx.decode(IDS[:5], 0)
    with pytest.raises(ContextError, match=r"sequence 0: its last step was interrupted .* reset\(0\) first"):
        ctx.decode([1], 0)
    ctx.reset(0)
    fresh = demo.context(**F32_CACHE).decode(IDS[:5])
    assert np.array_equal(ctx.decode(IDS[:5], 0), fresh)
    assert ctx.n_past(1) == 5


def test_split_equal_is_rectangular() -> None:
    pieces = [Piece(s, np.arange(n), np.ones(n, bool), np.arange(n)) for s, n in enumerate((3, 17, 64, 65))]
    shapes = [(len(u.seqs), u.n_seq_tokens) for u in split_equal(pieces, 512)]
    assert shapes == [(4, 3), (3, 14), (2, 47), (1, 1)]
    assert all(len(u.seqs) * u.n_seq_tokens <= 5 for u in split_equal(pieces, 5))


def test_bad_arguments(tiny: dict[str, Model]) -> None:
    model = tiny["granitehybrid"]
    ctx = model.context(n_seq_max=2)
    few = "one or more whole numbers"
    for bad, match in (([], few), ([1.5], few), ([258], "token id 258; legal: 0 to 257"), ([-1], "token id -1"), ([[1], [1, 2]], "rows of different")):
        with pytest.raises(ParamError, match=match):
            ctx.decode(bad)  # type: ignore[arg-type]
    for pieces in ([0, 1], [(0, [1], 2)], {0: [1]}, 5):
        with pytest.raises(ParamError, match="legal: a list of pairs .sequence, token ids."):
            ctx.decode_batch(pieces)  # type: ignore[arg-type]
    for positions, seqs in ((["a"], [0]), (None, [0]), ([0.5], [0]), ([0], [None])):
        with pytest.raises(ParamError, match=few):
            ctx.decode_tokens([1], positions, seqs)  # type: ignore[arg-type]
    with pytest.raises(ContextError, match="cache_k_l1 needs .* bytes, which this system does not give; choose a smaller n_ctx or n_seq_max"):
        model.context(n_ctx=1 << 50)
    with pytest.raises(ParamError, match="a sequence is given twice"):
        ctx.decode_batch([(0, [1]), (0, [2])])
    with pytest.raises(ParamError, match=r"layer 1 has no recurrent state; legal: \[0, 2\]"):
        ctx.state(1)
    with pytest.raises(ParamError, match="type_s 'q8_0'; legal: f32, f16, bf16"):
        model.context(type_s="q8_0")
    with pytest.raises(ParamError, match="backend 'vulkan' is unknown"):
        model.context(backend="vulkan")
    with pytest.raises(ParamError, match="threads: 0; legal: 1 to 256"):
        model.context(threads=0)
    ctx.close()
    ctx.close()
    with pytest.raises(ContextError, match="the context is closed"):
        ctx.decode([1])


def test_a_closed_model(tmp_path: Path) -> None:
    """Plans that a context has go on, over a file that stays mapped; new ones are refused."""
    fabricate("granitehybrid", tmp_path / "m.gguf")
    model = pg.load_model(tmp_path / "m.gguf")
    ctx = model.context()
    want = ctx.decode(small(3))
    model.close()
    model.close()
    ctx.reset()
    assert np.array_equal(ctx.decode(small(3)), want)
    for call in (lambda: ctx.decode(small(2)), lambda: model.graph(2)):
        with pytest.raises(ContextError, match="m.gguf: the model is closed"):
            call()


def test_one_call_at_a_time(tiny: dict[str, Model]) -> None:
    """A second thread's call, or one from within a step, finds the context busy, and changes nothing."""
    model = tiny["mamba2"]
    said: list[str] = []

    def curious(*args: object, **kwargs: object) -> tuple[pg.Tensor, pg.Tensor, pg.Tensor]:
        for call in (lambda: ctx.decode([1], 1), lambda: ctx.reset(), lambda: ctx.close()):
            thread = threading.Thread(target=lambda call=call: said.append(message(call)))  # type: ignore[misc]
            thread.start()
            thread.join()
        return pg.mamba2_layer(*args, **{**kwargs, "form": "scan"})  # type: ignore[arg-type]

    def message(call: Callable[[], object]) -> str:
        with pytest.raises(ContextError) as e:
            call()
        return str(e.value)

    ctx = model.context(n_seq_max=2, mamba2=curious)
    assert np.array_equal(ctx.decode(small(4)), model.context(n_seq_max=2, mamba2="scan").decode(small(4)))
    assert set(said) == {"the context is in the middle of another call; give each thread a context of its own"} and ctx.n_past(1) == 0


def test_a_bad_row_id_is_named() -> None:
    x, ids = pg.tensor(np.ones((4, 3), np.float32)), pg.tensor(np.array([0, 4], np.int32))
    with pytest.raises(KernelError, match="GET_ROWS .*: bad index 4"):
        pg.compute(pg.get_rows(x, ids))
