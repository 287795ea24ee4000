"""Running the cases of a bench: a lane per way to run a case (as it is, with ops swapped, another engine), samples taken in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pyggml.backends import Backend
from pyggml.backends.cpu import CpuBackend, SharedMemory
from pyggml.dtypes import BF16, bf16_to_f32
from pyggml.models import Model, load_model
from pyggml.models.layers import SSM
from pyggml.models.ssd import chunk_size
from pyggml.runtime.context import Context
from pyggml.tensor import tensor
from pyggml.testing import nmse
from pyggml.tools.benchcases import Case, Settings
from pyggml.tools.benchswap import BenchBackend, Notes, StepTimes, Variant, Work
from pyggml.tools.common import FLASH_ATTN, form_name
from pyggml.tools.records import Row

SEED = 1
# Of the last logits of two ways to run a case: a tenth of their size. Random weights enlarge what bfloat16 products and types of states round off.
LOGITS_NMSE = 1e-2


@dataclass(slots=True)
class Sample:
    """One timed run: seconds in all and until the first logits, and the last logits."""

    seconds: float
    first_seconds: float
    logits: np.ndarray


class Lane(Protocol):
    """A way to run one case."""

    def warm_up(self) -> None:
        """Do all that is done once."""

    def run(self) -> Sample:
        """One repetition from an empty memory."""


def bench_tokens(n_vocab: int, n: int) -> np.ndarray:
    """The tokens of a case: random, the same for every lane and run."""
    return np.random.default_rng(SEED).integers(0, n_vocab, n)


def open_context(model: Model, s: Settings, *, n_ctx: int, n_seq_max: int = 1) -> Context:
    """A context with these settings."""
    own = {"prec": s.prec} if s.backend == "cpu" else {}
    return model.context(backend=s.backend, threads=s.threads, threads_batch=s.threads_batch, n_ctx=n_ctx, n_ubatch=s.n_ubatch, n_seq_max=n_seq_max,
                         mamba2=s.mamba2, chunk=s.chunk, ssd_precision=s.ssd_precision, flash_attn=FLASH_ATTN[s.flash_attn],
                         type_k=s.type_k, type_v=s.type_v, type_r=s.type_r, type_s=s.type_s, **own)


def form_ran(model: Model, s: Settings, n_seq_tokens: int, n_seqs: int) -> Row:
    """Which Mamba2 form a graph of so many tokens takes, and its chunk (all but ssd choose their own when none is given) and precision; None
    for what there is not."""
    row: Row = {"mamba2": None, "chunk": None, "ssd_precision": None}
    if not model.has_recurrent_state:
        return row
    ran = model.form_for(s.mamba2, n_seq_tokens, s.ssd_precision, s.backend)
    row["mamba2"] = form_name(s.mamba2) if ran == "user" else ran
    if ran == "ssd" or (ran != "scan" and s.chunk is not None):
        row["chunk"] = chunk_size(s.chunk, n_seq_tokens, n_seqs, SSM(model.hparams).n_head)
    if ran in ("ssd", "ssd-fused"):
        row["ssd_precision"] = s.ssd_precision
    return row


class Models:
    """Opened models; one at a time is kept."""

    def __init__(self) -> None:
        self._key: tuple[str, str | None] | None = None
        self._model: Model | None = None

    def get(self, s: Settings) -> Model:
        """The model of these settings."""
        if self._model is None or self._key != (s.model, s.type_conv):
            self._model, self._key = load_model(s.model), (s.model, s.type_conv)
            if s.type_conv is not None:
                cast_conv(self._model, s.type_conv)
        return self._model


def cast_conv(model: Model, type_name: str) -> None:
    """Keep a model's conv weights as another type: "f32", "f16" or "bf16"."""
    for name, t in model.weights.items():
        if name.endswith("ssm_conv1d.weight"):
            assert t.data is not None and t.dtype.np is not None
            stored = t.data.view(t.dtype.np)
            value = bf16_to_f32(stored) if t.dtype is BF16 else stored.astype(np.float32)
            model.weights[name] = tensor(value.reshape(t.ne[::-1]), type_name, name=name)


def pieces(n: int, n_batch: int) -> list[int]:
    """Sizes of the calls that n tokens take."""
    return [min(n_batch, n - i) for i in range(0, n, n_batch)]


class ModelLane:
    """A case on pyggml, as it is or in a variant of it. Lanes that run one at a time share an arena. `notes.work` is what the last
    run came to; `plans_timed` counts plans made inside timed runs, `compile_s` the seconds of compiling before them."""

    def __init__(self, model: Model, case: Case, arena: SharedMemory, variant: Variant | None = None, warm: bool = True) -> None:
        self.model, self.case, self.variant, self.warm = model, case, variant, warm
        self.notes = Notes()
        self.plans_timed = 0
        self.compile_s = 0.0
        n_ctx = case.n_depth + case.n_prompt + case.n_gen
        self.ctx = open_context(model, case.settings, n_ctx=n_ctx)
        self.ctx.backend = self._noting(self.ctx.backend, arena)
        if self.ctx.batch_backend is not None:
            self.ctx.batch_backend = self._noting(self.ctx.batch_backend, arena)
        self.depth, self.prompt, self.gen = np.split(bench_tokens(model.n_vocab, n_ctx), [case.n_depth, case.n_depth + case.n_prompt])

    def _noting(self, backend: Backend, arena: SharedMemory) -> BenchBackend:
        if isinstance(backend, CpuBackend):
            backend.memory = arena
        return BenchBackend(backend, self.variant.stand_ins if self.variant else {}, self.notes)

    def warm_up(self) -> None:
        """Plan all that the case needs, which compiles, and unless `warm` is off run the prompt and one token."""
        c, b = self.case, self.case.settings.n_batch
        self.ctx.prepare_batches([(0, n)] for n in [*pieces(c.n_depth, b), *pieces(c.n_prompt, b), *[1] * c.n_gen])
        if self.warm:
            self._feed(self.prompt)
            if c.n_gen:
                self.ctx.decode(self.gen[:1])

    def run(self) -> Sample:
        """One repetition from an empty memory; the depth is not timed."""
        self.ctx.reset()
        self._feed(self.depth)
        self.notes.work = Work()
        self.notes.times.clear()
        n_plans = self.ctx.timings.n_plans
        start = time.perf_counter()
        logits = self._feed(self.prompt)
        first = time.perf_counter()
        for i in range(len(self.gen)):
            logits = self.ctx.decode(self.gen[i:i + 1])
            if i == 0 and not len(self.prompt):
                first = time.perf_counter()
        seconds = time.perf_counter() - start
        self.plans_timed += self.ctx.timings.n_plans - n_plans
        return Sample(seconds, first - start, logits)

    def profiled(self, n_runs: int) -> tuple[float, list[StepTimes]]:
        """Seconds of a run that is timed after every step, and the steps' times: of n_runs the one of median length."""
        self.notes.profiling = True
        runs = [(self.run().seconds, list(self.notes.times.values())) for _ in range(n_runs)]
        self.notes.profiling = False
        return sorted(runs, key=lambda r: r[0])[n_runs // 2]

    def _feed(self, ids: np.ndarray) -> np.ndarray:
        """Decode tokens, n_batch a call; as in llama-bench each call gives the logits of its last token alone."""
        logits = np.zeros(0, np.float32)
        for i in range(0, len(ids), self.case.settings.n_batch):
            logits = self.ctx.decode(ids[i:i + self.case.settings.n_batch])
        return logits


def take_turns(lanes: Sequence[Lane], repetitions: int, between: Callable[[], None]) -> list[list[Sample]]:
    """Samples of each lane; the lanes run in turn, so that a machine that changes its speed changes it for all."""
    found: list[list[Sample]] = [[] for _ in lanes]
    for _ in range(repetitions):
        for lane, samples in zip(lanes, found, strict=True):
            between()
            samples.append(lane.run())
    return found


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of samples, as llama-bench counts them, and the times behind them."""

    avg_ns: float
    stddev_ns: float
    avg_ts: float
    stddev_ts: float
    median_ts: float
    spread: float
    samples_ns: list[int]
    samples_ts: list[float]


def rates(seconds: Sequence[float], n_tokens: int) -> Rates:
    """Mean, standard deviation (of n - 1), median, and spread: largest less smallest rate, over the median."""
    ns, ts = np.asarray(seconds) * 1e9, n_tokens / np.asarray(seconds)
    deviation = [float(x.std(ddof=1)) if len(x) > 1 else 0.0 for x in (ns, ts)]
    median = float(np.median(ts))
    return Rates(float(ns.mean()), deviation[0], float(ts.mean()), deviation[1], median, float(np.ptp(ts)) / median,
                 [round(n) for n in ns.tolist()], [round(t, 6) for t in ts.tolist()])


class LogitsCheck:
    """Whether ways to run the same tokens agree: each first way seen is what the later ones are held against."""

    def __init__(self) -> None:
        self._first: dict[tuple[object, ...], tuple[str, np.ndarray]] = {}

    def error(self, case: Case, how: str, logits: np.ndarray) -> tuple[float, str | None]:
        """NMSE of a case's last logits against the first way's, and what is wrong with them in words; None when nothing is."""
        s = case.settings
        key = (s.model, s.backend, s.type_k, s.type_v, s.type_r, s.type_s, s.type_conv, case.n_prompt, case.n_gen, case.n_depth)
        name, first = self._first.setdefault(key, (how, logits))
        found = nmse(logits, first)
        if not np.isfinite(logits).all():
            return found, f"{int((~np.isfinite(logits)).sum())} of {len(logits)} logits are not finite"
        return found, None if found <= LOGITS_NMSE else f"logits differ from {name}: NMSE {found:.1e}, limit {LOGITS_NMSE:.0e}"
