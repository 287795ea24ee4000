"""`pyggml batched-bench`: how fast a model runs several sequences at once, in the manner of llama-batched-bench.

PP: prompt tokens of each sequence; TG: generated tokens of each; B: sequences; N_KV: tokens in memory at the end. T_PP, T_TG, T: seconds of
prompt, generation and both; S_PP, S_TG, S: their tokens per second, of all sequences together. With -pps one prompt serves all sequences.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.errors import ParamError
from pyggml.models.loader import FLOAT_TYPES
from pyggml.runtime.context import Context
from pyggml.tools.benchcases import Settings, context_lists, each, ignored_options, note_ignored, product, ranges, several, sweep_options, word
from pyggml.tools.benchrun import Models, bench_tokens, form_ran, open_context
from pyggml.tools.common import note, whole
from pyggml.tools.records import FORMATS, Column, Row, number, write_rows


def options(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.epilog = ("Lists and ranges as for bench: 1,2,4 or 128-512*2; an option may be given several times; every combination is run.\n\n"
                + (__doc__ or "").partition("\n\n")[2])
    several(p, "-m", "--model", kind=each(str), metavar="FILE,..", text="GGUF files (the bundled model)")
    p.add_argument("-c", "--ctx-size", type=whole(0), default=0, metavar="N", help="largest N_KV; tests that need more are left out (0: no limit)")
    several(p, "-npp", kind=ranges(0), metavar="N,..", text="prompt tokens of each sequence (128)")
    several(p, "-ntg", kind=ranges(0), metavar="N,..", text="generated tokens of each sequence (32)")
    several(p, "-npl", kind=ranges(1), metavar="N,..", text="sequences (1,2,4)")
    p.add_argument("-pps", action="store_true", help="the sequences share one prompt")
    p.add_argument("-r", "--repetitions", type=whole(1), default=1, metavar="N", help="repetitions, of which the median counts (1)")
    context_lists(p)
    sweep_options(p)
    several(p, "--type-conv", kind=each(word(*FLOAT_TYPES)), metavar="TYPE,..",
            text=f"types to cast the conv weights to: {', '.join(FLOAT_TYPES)} (the file's)")
    ignored_options(p)
    p.add_argument("-o", "--output", "--output-format", choices=FORMATS, default="md", metavar="FORMAT",
                   help=f"{', '.join(FORMATS)}; md is llama-batched-bench's table, with the swept options after it (md)")


@dataclass(frozen=True, slots=True)
class Batch:
    """One test: prompt and generated tokens of each of n_seqs sequences."""

    n_prompt: int
    n_gen: int
    n_seqs: int
    shared: bool

    @property
    def n_kv(self) -> int:
        """Tokens in memory at the end, a shared prompt counted once."""
        return (self.n_prompt if self.shared else self.n_prompt * self.n_seqs) + self.n_gen * self.n_seqs

    @property
    def n_cells(self) -> int:
        """Cells that the context needs; a shared prompt is copied to each sequence."""
        return (self.n_prompt + self.n_gen) * self.n_seqs

    def prompt_calls(self, n_batch: int) -> list[list[tuple[int, int]]]:
        """The calls of the prompt, n_batch tokens each, as (sequence, tokens): one sequence after the other, cut where a call is full."""
        n_seqs = 1 if self.shared else self.n_seqs
        cuts = sorted({*range(0, n_seqs * self.n_prompt, n_batch), *range(0, n_seqs * self.n_prompt + 1, self.n_prompt or 1)})
        calls: list[list[tuple[int, int]]] = []
        for start, end in itertools.pairwise(cuts):
            if start % n_batch == 0:
                calls.append([])
            calls[-1].append((start // self.n_prompt, end - start))
        return calls

    def gen_calls(self) -> list[list[tuple[int, int]]]:
        """The calls of the generation: a token of every sequence each."""
        return [[(seq, 1) for seq in range(self.n_seqs)]] * self.n_gen


def main(args: argparse.Namespace) -> int:
    """Run the tool."""
    if text := note_ignored(args):
        note(text)
    batches = [Batch(pp, tg, pl, args.pps) for pp in args.npp or [128] for tg in args.ntg or [32] for pl in args.npl or [1, 2, 4]]
    fitting = [b for b in batches if 0 < b.n_kv <= (args.ctx_size or b.n_kv)]
    if not fitting:
        raise ParamError(f"-c {args.ctx_size}: no test fits; the smallest needs N_KV {min(b.n_kv for b in batches)}, of at least 1")
    for b in [b for b in batches if b not in fitting]:
        note(f"note: PP {b.n_prompt}, TG {b.n_gen}, B {b.n_seqs} left out: N_KV {b.n_kv}, -c {args.ctx_size}")
    todo = product(args)
    rows = bench_rows(todo, fitting, args.repetitions)
    if args.output == "md":
        for line in table(rows, swept(todo)):
            print(line, flush=True)
    else:
        write_rows(rows, [c if c.name not in swept(todo) else c._replace(head=c.name) for c in COLUMNS], args.output, sys.stdout, "batched")
    return 0


def bench_rows(todo: Sequence[Settings], batches: Sequence[Batch], repetitions: int) -> Iterator[Row]:
    """A row per settings and batch."""
    models = Models()
    for s in todo:
        model = models.get(s)
        ctx = open_context(model, s, n_ctx=max(b.n_cells for b in batches), n_seq_max=max(b.n_seqs for b in batches))
        for b in batches:
            ctx.reset()
            ctx.prepare_batches(b.prompt_calls(s.n_batch))
            if b.shared and b.n_seqs > 1:  # the generation starts from copies of the prompt, where its cells are
                run_batch(ctx, b, s.n_batch, prompt_only=True)
            ctx.prepare_batches([*([] if b.shared and b.n_seqs > 1 else b.prompt_calls(s.n_batch)), *b.gen_calls()])
            samples = [run_batch(ctx, b, s.n_batch) for _ in range(repetitions)]
            t_pp, t_tg = (float(np.median([x[i] for x in samples])) for i in (0, 1))
            n_seq_tokens = max(1, min(b.n_prompt, s.n_ubatch // (1 if b.shared else min(b.n_seqs, s.n_ubatch))))
            yield row_of(s, b, t_pp, t_tg) | form_ran(model, s, n_seq_tokens, 1 if b.shared else b.n_seqs)
        ctx.close()


def run_batch(ctx: Context, b: Batch, n_batch: int, *, prompt_only: bool = False) -> tuple[float, float]:
    """Seconds of the prompt and of the generation, from an empty memory."""
    ids = bench_tokens(ctx.model.n_vocab, b.n_cells).reshape(b.n_seqs, -1)
    done = [0] * b.n_seqs
    ctx.reset()

    def run(calls: Sequence[Sequence[tuple[int, int]]]) -> float:
        start = time.perf_counter()
        for call in calls:
            ctx.decode_batch([(seq, ids[seq, done[seq]:done[seq] + n]) for seq, n in call])
            for seq, n in call:
                done[seq] += n
        return time.perf_counter() - start

    t_pp = run(b.prompt_calls(n_batch))
    if b.shared:
        for seq in range(1, b.n_seqs):
            ctx.copy(0, seq)
            done[seq] = done[0]
    return t_pp, 0.0 if prompt_only else run(b.gen_calls())


def row_of(s: Settings, b: Batch, t_pp: float, t_tg: float) -> Row:
    """The numbers of a test; field names are llama-batched-bench's."""
    n_pp = b.n_prompt * (1 if b.shared else b.n_seqs)
    return {"model_filename": s.model, "n_batch": s.n_batch, "n_ubatch": s.n_ubatch, "n_threads": s.threads, "n_threads_batch": s.threads_batch,
            "type_k": s.type_k, "type_v": s.type_v, "type_r": s.type_r, "type_s": s.type_s, "type_conv": s.type_conv, "prec": s.prec,
            "flash_attn": s.flash_attn, "is_pp_shared": b.shared,
            "pp": b.n_prompt, "tg": b.n_gen, "pl": b.n_seqs, "n_kv": b.n_kv, "t_pp": t_pp, "speed_pp": n_pp / t_pp if n_pp else 0.0, "t_tg": t_tg,
            "speed_tg": b.n_gen * b.n_seqs / t_tg if b.n_gen else 0.0, "t": t_pp + t_tg, "speed": b.n_kv / (t_pp + t_tg)}


# As a table

CELLS = (("PP", "pp", "6d"), ("TG", "tg", "6d"), ("B", "pl", "4d"), ("N_KV", "n_kv", "6d"), ("T_PP s", "t_pp", "8.3f"), ("S_PP t/s", "speed_pp", "8.2f"),
         ("T_TG s", "t_tg", "8.3f"), ("S_TG t/s", "speed_tg", "8.2f"), ("T s", "t", "8.3f"), ("S t/s", "speed", "8.2f"))
COLUMNS = (
    Column("model_filename"), Column("n_batch", int), Column("n_ubatch", int), Column("n_threads", int), Column("n_threads_batch", int), Column("type_k"),
    Column("type_v"), Column("is_pp_shared", bool),
    *(Column(name, int if spec[-1] == "d" else float, head, number(spec.lstrip("68"))) for head, name, spec in CELLS),
    Column("mamba2"), Column("chunk", int), Column("ssd_precision"), Column("type_r"), Column("type_s"), Column("type_conv"), Column("prec"),
    Column("flash_attn"),
)
SWEPT = {"model_filename": "model", **{name: name for name in ("n_batch", "n_ubatch", "type_k", "type_v", "mamba2", "chunk", "ssd_precision", "type_r",
                                                               "type_s", "type_conv", "prec", "flash_attn")},
         "n_threads": "threads", "n_threads_batch": "threads_batch"}


def swept(todo: Sequence[Settings]) -> list[str]:
    """The columns over which there is a sweep."""
    return [name for name, field in SWEPT.items() if len({getattr(s, field) for s in todo}) > 1]


def table(rows: Iterator[Row], more: Sequence[str]) -> Iterator[str]:
    """llama-batched-bench's table, row by row, and the swept options after it."""
    cells = [(head, name, spec, int(spec.rstrip("df").partition(".")[0])) for head, name, spec in CELLS]
    yield "|" + " | ".join(f"{head:>{width}}" for head, _, _, width in cells) + " |" + "".join(f" {name:>14} |" for name in more)
    yield "|" + "-|-".join("-" * width for *_, width in cells) + "-|" + ("-" * 16 + "|") * len(more)
    for r in rows:
        values = ["" if r[name] is None else str(r[name]) for name in more]
        yield "|" + " | ".join(format(r[name], spec) for _, name, spec, _ in cells) + " |" + "".join(f" {v:>14} |" for v in values)
