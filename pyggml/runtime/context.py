"""Context: runs a model on batches of tokens of several sequences and keeps their memory between calls."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pyggml.backends import open_backend
from pyggml.dtypes import DType
from pyggml.errors import ContextError, ParamError
from pyggml.graph import Graph
from pyggml.runtime.batch import GraphInputs, Piece, Ubatch, split_equal
from pyggml.runtime.memory import Memory, MemoryShape
from pyggml.runtime.vocab import StreamDetokenizer, Vocab
from pyggml.tensor import Tensor

if TYPE_CHECKING:
    from pyggml.runtime.sampling import Sampler

Ids = Sequence[int] | np.ndarray
MAX_PLANS = 16  # the least recently used one is dropped: shapes that vary would fill memory with plans


class RunnableModel(Protocol):
    """What a context needs of a model."""

    n_vocab: int
    kinds: tuple[str, ...]

    @property
    def vocab(self) -> Vocab:
        """The tokenizer."""

    def memory_shape(self) -> MemoryShape:
        """Sizes of the KV cache and the states per layer."""

    def inputs(self, n_seq_tokens: int, n_seqs: int, n_kv: int, n_outputs: int, flash_attn: bool) -> GraphInputs:
        """Input tensors of a ubatch's graph, and how it computes attention."""

    def build(self, inp: GraphInputs, mem: Memory, mamba2: str | Callable[..., Any], chunk: int | str | None,
              precision: str = "f32", backend: str = "cpu") -> tuple[Tensor, list[Tensor]]:
        """The logits of a ubatch and the in-place state updates."""

    def form_for(self, mamba2: str | Callable[..., Any], n_seq_tokens: int, precision: str = "f32", backend: str = "cpu") -> str:
        """Name of the Mamba2 form that a graph of this many tokens per sequence takes."""


@dataclass(slots=True)
class Planned:
    """A plan for one shape of ubatch, ready to run."""

    inp: GraphInputs
    logits: Tensor
    runner: Any


@dataclass(slots=True)
class Timings:
    """Seconds and tokens so far: planning (graphs built, kernels looked up or compiled) apart from running."""

    n_plans: int = 0
    plan_seconds: float = 0.0
    n_tokens: int = 0
    run_seconds: float = 0.0


class Context:
    """Memory and plans for a model; made by `model.context(...)`. One call at a time: a second thread's gets ContextError."""

    def __init__(self, model: RunnableModel, *, backend: str, threads: int | None, n_ctx: int, n_ubatch: int, n_seq_max: int,
                 mamba2: str | Callable[..., Any], chunk: int | str | None, ssd_precision: str, types: dict[str, DType], options: dict[str, Any],
                 threads_batch: int | None = None, flash_attn: bool | str = "auto") -> None:
        for name, value in (("n_ctx", n_ctx), ("n_ubatch", n_ubatch), ("n_seq_max", n_seq_max)):
            _check_count(name, value, 1)
        self.model = model
        self.n_ctx = n_ctx
        self.n_ubatch = min(n_ubatch, n_ctx)
        self.n_seq_max = n_seq_max
        self.mamba2 = mamba2
        self.chunk = chunk
        self.ssd_precision = ssd_precision
        if not isinstance(flash_attn, bool) and flash_attn != "auto":
            raise ParamError(f"flash_attn {flash_attn!r}; legal: True, False, 'auto'")
        self.flash_attn = flash_attn
        if threads is not None:
            options = {**options, "threads": threads}
        self.backend = open_backend(backend, **options)
        own = threads_batch not in (None, self.threads)
        self.batch_backend = open_backend(backend, **{**options, "threads": threads_batch}) if own else None  # of prompts, where they take other threads
        self._memory: Memory | None = Memory(model.memory_shape(), n_ctx, n_seq_max, types["type_k"], types["type_v"], types["type_r"], types["type_s"])
        self._plans: OrderedDict[tuple[int, int, int, int], Planned] = OrderedDict()
        self._invalid: set[int] = set()
        self._lock = threading.Lock()
        self.timings = Timings()

    # Decoding

    def decode(self, ids: Ids, seq: int = 0, all_logits: bool = False) -> np.ndarray:
        """Append tokens to a sequence. Logits of the last one, float32 [n_vocab], or of all, [n_tokens, n_vocab]."""
        logits = self.decode_batch([(seq, ids)], all_logits)[0]
        return logits if all_logits else logits[-1]

    def decode_batch(self, pieces: Sequence[tuple[int, Ids]], all_logits: bool = False) -> list[np.ndarray]:
        """One step for several sequences of any lengths: [(seq, ids), ...]. Per sequence, in the order given, float32
        [n_tokens, n_vocab] with all_logits, else [1, n_vocab] of its last token."""
        try:
            pairs = [(seq, ids) for seq, ids in pieces]
        except (TypeError, ValueError):
            raise ParamError(f"decode_batch: found {type(pieces).__name__}; legal: a list of pairs (sequence, token ids)") from None
        made, place = [], 0
        for seq, ids in pairs:
            tokens = self._check_ids(ids)
            outputs = np.ones(len(tokens), bool) if all_logits else np.arange(len(tokens)) == len(tokens) - 1
            made.append(Piece(self._check_seq(seq), tokens, outputs, np.arange(place, place + len(tokens))))
            place += len(tokens)
        if len({p.seq for p in made}) != len(made):
            raise ParamError("decode_batch: a sequence is given twice; give all its tokens in one entry")
        found = self._process(made)
        return [_rows([found[int(i)] for i in p.index[p.outputs]]) for p in made]

    def decode_tokens(self, tokens: Ids, positions: Ids, seqs: Ids, outputs: Sequence[bool] | np.ndarray | None = None) -> np.ndarray:
        """A batch token by token, in any order across sequences: token, position and sequence of each. Within a sequence
        the positions must follow on what is there. Logits of the marked tokens (default: all), in batch order."""
        ids = self._check_ids(tokens)
        pos, seq = (_whole_numbers(what, v).astype(np.int64) for what, v in (("positions", positions), ("sequences", seqs)))
        marks = np.ones(len(ids), bool) if outputs is None else np.asarray(outputs, bool).reshape(-1)
        if not len(ids) == len(pos) == len(seq) == len(marks):
            raise ParamError(f"decode_tokens: {len(ids)} tokens, {len(pos)} positions, {len(seq)} sequences, {len(marks)} outputs; the counts must be equal")
        made = []
        for s in dict.fromkeys(seq.tolist()):
            index = np.flatnonzero(seq == s)
            index = index[np.argsort(pos[index], kind="stable")]
            start = self.n_past(self._check_seq(s))
            if not np.array_equal(pos[index], np.arange(start, start + len(index))):
                raise ParamError(f"decode_tokens: sequence {s} has {start} tokens; its positions must be {start} to {start + len(index) - 1}, "
                                 f"found {pos[index].tolist()[:8]}")
            made.append(Piece(s, ids[index], marks[index], index))
        found = self._process(made)
        return _rows([found[i] for i in range(len(ids)) if marks[i]]) if marks.any() else np.zeros((0, self.model.n_vocab), np.float32)

    def _process(self, pieces: list[Piece]) -> dict[int, np.ndarray]:
        mem = self.memory
        found: dict[int, np.ndarray] = {}
        finished = False
        with self._alone():
            for p in pieces:
                if p.seq in self._invalid:
                    raise ContextError(f"sequence {p.seq}: its last step was interrupted and its state is not usable; reset({p.seq}) first")
            self._check_room([(p.seq, len(p.tokens)) for p in pieces])
            try:
                for ub in split_equal(pieces, self.n_ubatch):
                    self._run(mem, ub, found)
                finished = True
            finally:
                if not finished:
                    self._invalid.update(p.seq for p in pieces)
        return found

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise ContextError("the context is in the middle of another call; give each thread a context of its own")
        try:
            yield
        finally:
            self._lock.release()

    def _check_room(self, counts: list[tuple[int, int]]) -> None:
        """ContextError unless so many more tokens of each sequence fit: [(seq, n), ...]."""
        mem = self.memory
        total = sum(n for _, n in counts)
        if mem.shape.has_attention and total > mem.room():
            raise ContextError(f"the context is full: {total} tokens given, {mem.room()} of {self.n_ctx} cells are free; give a larger n_ctx or reset")
        for seq, n in counts:
            if mem.n_past[seq] + n > self.n_ctx:
                raise ContextError(f"the context is full: sequence {seq} has {mem.n_past[seq]} tokens, {n} given, n_ctx is {self.n_ctx}; "
                                   "give a larger n_ctx or reset")

    def _run(self, mem: Memory, ub: Ubatch, found: dict[int, np.ndarray]) -> None:
        n = ub.n_seq_tokens
        placed = [mem.place(s, n) for s in ub.seqs]
        pos = np.concatenate([p for _, p in placed])
        wanted = np.flatnonzero(ub.outputs.ravel())
        planned = self._plan(n, len(ub.seqs), mem.n_kv(), max(len(wanted), 1))
        start = time.perf_counter()
        runner = planned.runner
        for t in runner.plan.graph.inputs:
            runner.set(t, self._input(t, planned.inp, ub, placed, pos, wanted))
        runner.run()
        mem.check_range(ub.seqs)
        if len(wanted):
            logits = runner.get(planned.logits).reshape(-1, self.model.n_vocab)
            for row, i in enumerate(ub.index.ravel()[wanted]):
                found[int(i)] = logits[row]
        for s in ub.seqs:
            mem.n_past[s] += n
        self.timings.n_tokens += ub.tokens.size
        self.timings.run_seconds += time.perf_counter() - start

    def _input(self, t: Tensor, inp: GraphInputs, ub: Ubatch, placed: list[tuple[np.ndarray, np.ndarray]], pos: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """The value of one of the graph's inputs for this ubatch."""
        if t is inp.tokens:
            return ub.tokens.ravel().astype(np.int32)
        if t is inp.rows:
            return np.asarray(ub.seqs, np.int32)
        if t is inp.pos:
            return pos.astype(np.int32)
        if t is inp.kv_idxs:
            return np.concatenate([cells for cells, _ in placed])
        if t is inp.kq_mask:
            return self.memory.mask(np.repeat(ub.seqs, ub.n_seq_tokens), pos, inp.n_kv)
        if t is inp.out_ids:
            return wanted.astype(np.int32) if len(wanted) else np.zeros(1, np.int32)
        raise ParamError(f"mamba2 function: its graph has an input of its own, {t.name} of ne {list(t.ne)}; legal: tensors that it is given, and constants")

    def _plan(self, n_seq_tokens: int, n_seqs: int, n_kv: int, n_outputs: int) -> Planned:
        key = (n_seq_tokens, n_seqs, n_kv, n_outputs)
        planned = self._plans.get(key)
        if planned is None:
            start = time.perf_counter()
            backend = self.backend if self.batch_backend is None or n_seq_tokens == 1 else self.batch_backend
            inp, logits, graph = self._graph(key, self.flash_attn is not False)
            if self.flash_attn == "auto" and any(n.op.name == "FLASH_ATTN_EXT" and backend.refuses(n) for n in graph.nodes):
                inp, logits, graph = self._graph(key, False)
            planned = self._plans[key] = Planned(inp, logits, backend.compile(graph))
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
            self.timings.n_plans += 1
            self.timings.plan_seconds += time.perf_counter() - start
        self._plans.move_to_end(key)
        return planned

    def _graph(self, key: tuple[int, int, int, int], flash_attn: bool) -> tuple[GraphInputs, Tensor, Graph]:
        inp = self.model.inputs(*key, flash_attn)
        logits, updates = self.model.build(inp, self.memory, self.mamba2, self.chunk, self.ssd_precision, self.backend.name)
        return inp, logits, Graph([logits, *updates])

    def prepare(self, n_tokens: int, seq: int = 0) -> None:
        """Make the plans that a prompt of n_tokens and the tokens predicted after it need, so that nothing is compiled later."""
        _check_count("n_tokens", n_tokens, 0)
        with self._alone():
            self._check_room([(self._check_seq(seq), n_tokens)])
        self.prepare_batches([[(seq, n_tokens)], [(seq, 1)]])

    def prepare_batches(self, calls: Iterable[Sequence[tuple[int, int]]]) -> None:
        """Make the plans that calls of decode_batch will need, one after another from here on; nothing runs. Each call is given
        as [(seq, number of tokens), ...]."""
        mem, done = self.memory, 0
        with self._alone():
            for counts in calls:
                pieces = [Piece(self._check_seq(seq), np.zeros(n, np.int64), np.arange(n) == n - 1, np.arange(n)) for seq, n in counts]
                for ub in split_equal(pieces, self.n_ubatch):
                    done += ub.tokens.size
                    self._plan(ub.n_seq_tokens, len(ub.seqs), mem.n_kv(done), max(int(ub.outputs.sum()), 1))

    def forms_used(self) -> str:
        """The Mamba2 forms of the plans made so far, by tokens per sequence: `ssd at 600, scan at 1`."""
        forms = {n: self.model.form_for(self.mamba2, n, self.ssd_precision, self.backend.name) for n, *_ in self._plans}
        return ", ".join(f"{form} at {n}" for n, form in sorted(forms.items(), reverse=True))

    @property
    def threads(self) -> int:
        """Threads of the backend."""
        return int(getattr(self.backend, "threads", 1))

    # Text

    def generate(self, ids: Ids, n_predict: int = 64, sampler: Sampler | None = None, seq: int = 0,
                 on_token: Callable[[int], None] | None = None) -> Iterator[str]:
        """Feed `ids`, then predict up to n_predict tokens; pieces of text as they come, never half a character. Stops
        early at an end-of-generation token or when the context is full. `on_token` sees each predicted id."""
        from pyggml.runtime.sampling import Sampler
        _check_count("n_predict", n_predict, 0)
        sampler = sampler or Sampler()
        text = StreamDetokenizer(self.model.vocab, skip_special=True)
        logits = self.decode(ids, seq)
        for i in range(n_predict):
            token = sampler.sample(logits)
            if on_token is not None:
                on_token(token)
            if token in self.model.vocab.eog_ids:
                break
            piece = text.push(token)
            if piece:
                yield piece
            if i + 1 == n_predict or not self._fits(seq):
                break
            logits = self.decode([token], seq)
        rest = text.flush()
        if rest:
            yield rest

    def _fits(self, seq: int) -> bool:
        mem = self.memory
        return mem.n_past[seq] < self.n_ctx and (not mem.shape.has_attention or mem.room() > 0)

    # Life cycle

    @property
    def memory(self) -> Memory:
        """The context's memory; ContextError once it is closed."""
        if self._memory is None:
            raise ContextError("the context is closed")
        return self._memory

    def n_past(self, seq: int = 0) -> int:
        """Tokens that a sequence holds."""
        return self.memory.n_past[self._check_seq(seq)]

    def state(self, layer: int, seq: int = 0) -> dict[str, np.ndarray]:
        """Copies of a recurrent layer's states: {"conv": [conv_dim, d_conv-1], "ssm": [n_head, head_dim, d_state]}, float32."""
        kinds = self.model.kinds
        if not isinstance(layer, int) or not 0 <= layer < len(kinds) or kinds[layer] != "mamba":
            legal = [i for i, k in enumerate(kinds) if k == "mamba"]
            raise ParamError(f"state: layer {layer!r} has no recurrent state; legal: {legal}")
        return self.memory.state(layer, self._check_seq(seq))

    def reset(self, seq: int | None = None) -> None:
        """Forget one sequence, or all: the next prompt meets a fresh memory. The id may be used again."""
        with self._alone():
            for s in range(self.n_seq_max) if seq is None else (self._check_seq(seq),):
                self.memory.clear(s)
                self._invalid.discard(s)

    def copy(self, src: int, dst: int) -> None:
        """Make sequence dst hold what src holds, such as a prompt that several continue; what dst held is forgotten."""
        if self._check_seq(src) == self._check_seq(dst):
            raise ParamError(f"copy: sequence {src} onto itself; legal: two different sequences")
        with self._alone():
            if src in self._invalid:
                raise ContextError(f"sequence {src}: its last step was interrupted and its state is not usable; reset({src}) first")
            self.memory.clear(dst)
            self._invalid.discard(dst)
            self._check_room([(dst, self.memory.n_past[src])])
            self.memory.copy(src, dst)

    def close(self) -> None:
        """Drop memory and plans. Calling it again does nothing."""
        with self._alone():
            self._memory = None
            self._plans.clear()

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of `kv`, `state` and `compute` (the arenas of the plans in use)."""
        sizes: dict[bool, list[list[int]]] = {}
        for (n_seq_tokens, *_), p in self._plans.items():
            batch = self.batch_backend is not None and n_seq_tokens > 1
            sizes.setdefault(batch, []).append([b.nbytes for b in getattr(p.runner, "buffers", tuple)()])
        return {**self.memory.nbytes(), "compute": sum(sum(map(max, zip(*s, strict=True))) for s in sizes.values())}  # a backend's plans run one at a time

    def _check_seq(self, seq: int) -> int:
        if not isinstance(seq, int | np.integer) or isinstance(seq, bool) or not 0 <= seq < self.n_seq_max:
            raise ParamError(f"sequence {seq!r}; legal: 0 to {self.n_seq_max - 1} (n_seq_max {self.n_seq_max})")
        return int(seq)

    def _check_ids(self, ids: Ids) -> np.ndarray:
        tokens = _whole_numbers("token ids", ids)
        bad = tokens[(tokens < 0) | (tokens >= self.model.n_vocab)]
        if len(bad):
            raise ParamError(f"token id {int(bad[0])}; legal: 0 to {self.model.n_vocab - 1}")
        return tokens.astype(np.int64)


def _rows(found: list[np.ndarray]) -> np.ndarray:
    """Rows one under the other; a lone one is not copied again."""
    return found[0][None] if len(found) == 1 else np.stack(found)


def _whole_numbers(what: str, values: Ids) -> np.ndarray:
    try:
        found = np.asarray(values)
    except ValueError:
        raise ParamError(f"{what}: found rows of different lengths; legal: one or more whole numbers") from None
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu":
        raise ParamError(f"{what}: found {type(values).__name__} of shape {found.shape}; legal: one or more whole numbers")
    return found


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ParamError(f"{name} {value!r}; legal: a whole number >= {least}")
