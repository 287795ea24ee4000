"""`pyggml perplexity`: how well a model predicts texts, counted as llama-perplexity counts, and how far its predictions are from a base model's.

A text is cut into chunks of -c tokens, each read on its own; the predictions of a chunk's second half are scored. Where the vocabulary adds BOS it
takes the place of each chunk's first token. With --kl-divergence-base the log-probabilities are saved, with --kl-divergence compared; see
tools/logprobs.py.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from typing import TextIO

import numpy as np

from pyggml import __version__
from pyggml.errors import ParamError
from pyggml.models import Model, demo_path
from pyggml.runtime.context import Context
from pyggml.tools.common import context_options, form_name, model_options, note, open_context, open_model, read_text, whole
from pyggml.tools.logprobs import CHUNK_HEADER, BaseFile, Divergence, create_base, first_scored, log_softmax, mean, n_scored, open_base
from pyggml.tools.records import FORMATS, Column, Row, write_rows

N_CTX = 512
MIN_CTX = 8
_RUN = (Column("n_seq", int), Column("mamba2"), Column("threads", int), Column("version"), Column("seconds", float))
_PPL = (Column("n_ctx", int, "n_ctx"), Column("n_chunk", int, "chunks"), Column("n_scored", int, "scored"),
        Column("ppl", float, "PPL", lambda v: f"{v:.4f}"), Column("ppl_error", float, "+/-", lambda v: f"{v:.5f}"))
COLUMNS = (Column("model", head="model"), Column("text", head="text"), *_PPL, *_RUN)
KL_COLUMNS = (Column("model", head="model"), Column("base", head="base"), *_PPL, Column("ppl_base", float, "PPL(base)", lambda v: f"{v:.4f}"),
              Column("kld", float, "KLD", lambda v: f"{v:.6f}"), Column("kld_error", float, "+/-", lambda v: f"{v:.6f}"),
              Column("kld_max", float, "max KLD", lambda v: f"{v:.6f}"), Column("kld_p99", float), Column("p_diff_rms", float),
              Column("same_top", float, "same top", lambda v: f"{100 * v:.3f} %"), *_RUN)


def options(p: argparse.ArgumentParser) -> None:
    """Options, by llama.cpp's names."""
    model_options(p)
    p.add_argument("-f", "--file", action="append", metavar="FILE", help="text to score; may be given several times")
    context_options(p, N_CTX)
    p.add_argument("-np", "--parallel", type=whole(1), metavar="N", help="chunks to run at once, as sequences of their own (-b / -c)")
    p.add_argument("-b", "--batch-size", type=whole(1), default=2048, metavar="N", help="tokens to run at once, where -np is not given (2048)")
    p.add_argument("--chunks", type=whole(1), metavar="N", help="score the first N chunks of a text only (all)")
    p.add_argument("--kl-divergence-base", "--save-all-logits", dest="base", metavar="FILE",
                   help="save the log-probabilities to FILE, in llama.cpp's format; with --kl-divergence: compare with those in FILE")
    p.add_argument("--kl-divergence", action="store_true", help="divergence from the base model whose log-probabilities are in the file of "
                   "--kl-divergence-base; the tokens come from there too")
    p.add_argument("-o", "--output", choices=("text", *FORMATS), default="text", metavar="FORMAT",
                   help=f"text (llama-perplexity's lines), or a row per text as {', '.join(FORMATS)} (text)")


def main(args: argparse.Namespace) -> int:
    """Run the tool."""
    lines = sys.stdout if args.output == "text" else sys.stderr
    rows = compare(args, lines) if args.kl_divergence else score(args, lines)
    if args.output == "text":
        for _ in rows:
            pass
    else:
        write_rows(rows, KL_COLUMNS if args.kl_divergence else COLUMNS, args.output, sys.stdout, "perplexity")
    return 0


def score(args: argparse.Namespace, out: TextIO) -> Iterator[Row]:
    """Perplexity of each text, and of all together where there are several; llama-perplexity's lines go to `out`."""
    if not args.file:
        raise ParamError("no text; give one with -f")
    if args.base is not None and len(args.file) > 1:
        raise ParamError(f"--kl-divergence-base {args.base}: {len(args.file)} texts; legal: one")
    model = open_model(args)
    chunks = {path: text_chunks(model, path, args.ctx_size, args.chunks) for path in args.file}
    n_seq = min(sequences(args, args.ctx_size), max(map(len, chunks.values())))
    ctx = open_context(model, args, n_ctx=n_seq * args.ctx_size, n_seq_max=n_seq)
    scores = []
    for path, tokens in chunks.items():
        start = time.perf_counter()
        if len(chunks) > 1:
            print(path, file=out)
        if args.base is None:
            nll = perplexity(ctx, tokens, n_seq, out)
        else:
            with create_base(args.base, model.n_vocab, tokens) as base:
                nll = perplexity(ctx, tokens, n_seq, out, base)
        print(f"Final estimate: {estimate(nll)}", file=out, flush=True)
        scores.append(nll)
        yield {**run_fields(args, ctx, n_seq), "text": path, "n_ctx": args.ctx_size, **row_of(nll), "seconds": time.perf_counter() - start}
    if len(chunks) > 1:
        every = np.concatenate(scores)
        print(f"All texts: {estimate(every)}", file=out)
        yield {**run_fields(args, ctx, n_seq), "text": "all", "n_ctx": args.ctx_size, **row_of(every)}


def run_fields(args: argparse.Namespace, ctx: Context, n_seq: int) -> Row:
    """What every row holds of the run."""
    return {"model": args.model or demo_path().name, "n_seq": n_seq, "mamba2": form_name(args.mamba2), "threads": ctx.threads, "version": __version__}


def row_of(nll: np.ndarray) -> Row:
    """Perplexity and what it is the mean of."""
    value, error = mean(nll)
    return {"n_chunk": len(nll), "n_scored": nll.size, "ppl": math.exp(value), "ppl_error": math.exp(value) * error}


def sequences(args: argparse.Namespace, n_ctx: int) -> int:
    """Chunks to run at once."""
    return int(args.parallel or max(1, args.batch_size // n_ctx))


def text_chunks(model: Model, path: str, n_ctx: int, most: int | None) -> np.ndarray:
    """The tokens of a text in whole chunks, [n_chunk, n_ctx]; one newline at the text's end is dropped, and BOS put in front, as llama.cpp does."""
    if n_ctx < MIN_CTX:
        raise ParamError(f"-c {n_ctx}; legal: {MIN_CTX} or more")
    vocab = model.vocab
    ids = [vocab.bos_id] * vocab.add_bos + vocab.tokenize(read_text(path).removesuffix("\n"), add_special=False)
    if len(ids) < n_ctx:
        raise ParamError(f"-f {path}: {len(ids)} tokens; legal: {n_ctx}, a whole chunk, or more (or a smaller -c)")
    n_chunk = min(len(ids) // n_ctx, most or len(ids))
    return np.array(ids[:n_chunk * n_ctx], np.int64).reshape(n_chunk, n_ctx)


def chunk_logits(ctx: Context, chunks: np.ndarray, n_seq: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Run the chunks, n_seq at once: (chunk, row, logits [n, n_vocab]) for its scored positions row to row + n - 1, as soon as a ubatch has them."""
    vocab = ctx.model.vocab
    n_chunk, n_ctx = chunks.shape
    for start in range(0, n_chunk, n_seq):
        began = time.perf_counter()
        group = chunks[start:start + n_seq].copy()
        if vocab.add_bos:
            group[:, 0] = vocab.bos_id
        n = len(group)
        ctx.reset()
        step = max(1, ctx.n_ubatch // n)
        for i in range(0, n_ctx, step):
            pos = np.arange(i, min(i + step, n_ctx))
            scored = (pos >= first_scored(n_ctx)) & (pos < n_ctx - 1)
            logits = ctx.decode_tokens(group[:, pos].ravel(), np.tile(pos, n), np.repeat(np.arange(n), len(pos)), np.tile(scored, n))
            if scored.any():
                for k, rows in enumerate(logits.reshape(n, -1, logits.shape[1])):
                    yield start + k, int(pos[scored][0]) - first_scored(n_ctx), rows
        if start == 0:
            seconds = time.perf_counter() - began
            minutes = math.ceil(n_chunk / n_seq) * seconds / 60
            note(f"perplexity: {n_chunk} chunks, n_ctx={n_ctx}, n_seq={n_seq}, {seconds:.2f} seconds per pass, {minutes:.2f} minutes in all")


def perplexity(ctx: Context, chunks: np.ndarray, n_seq: int, out: TextIO, base: BaseFile | None = None) -> np.ndarray:
    """Score the chunks, printing the estimate after each; saves the log-probabilities to `base`. Gives the negative log-likelihoods of the scored
    tokens in nats, [n_chunk, n_scored]."""
    first, n = first_scored(chunks.shape[1]), n_scored(chunks.shape[1])
    nll = np.zeros((len(chunks), n))
    for chunk, row, logits in chunk_logits(ctx, chunks, n_seq):
        for i, x in enumerate(logits, row):
            log_p = log_softmax(x)
            nll[chunk, i] = -log_p[chunks[chunk, first + i + 1]]
            if base is not None:
                base.write(chunk, i, log_p)
        if row + len(logits) == n:
            print(f"[{chunk + 1}]{math.exp(nll[:chunk + 1].mean()):.4f},", end="", file=out, flush=True)
    print(file=out)
    return nll


def estimate(nll: np.ndarray) -> str:
    """Perplexity and its standard error in llama-perplexity's words."""
    row = row_of(nll)
    return f"PPL = {row['ppl']:.4f} +/- {row['ppl_error']:.5f}"


def compare(args: argparse.Namespace, out: TextIO) -> Iterator[Row]:
    """Divergence from the base model in a file; llama-perplexity's lines go to `out`."""
    if args.base is None:
        raise ParamError("--kl-divergence: no base; give its file with --kl-divergence-base")
    if args.file:
        raise ParamError(f"-f {args.file[0]}: with --kl-divergence the tokens come from the base's file; legal: no -f")
    model = open_model(args)
    start = time.perf_counter()
    with open_base(args.base) as base:
        if base.n_vocab != model.n_vocab:
            raise ParamError(f"{args.base}: a vocabulary of {base.n_vocab}; legal: the model's {model.n_vocab}")
        tokens = base.tokens[:args.chunks]
        n_seq = min(sequences(args, base.n_ctx), len(tokens))
        ctx = open_context(model, args, n_ctx=n_seq * base.n_ctx, n_seq_max=n_seq)
        first, n = first_scored(base.n_ctx), n_scored(base.n_ctx)
        total = Divergence(len(tokens), n)
        print(CHUNK_HEADER, file=out)
        for chunk, row, logits in chunk_logits(ctx, tokens, n_seq):
            for i, x in enumerate(logits, row):
                total.add(chunk, i, log_softmax(x), base.read(chunk, i), int(tokens[chunk, first + i + 1]))
            if row + len(logits) == n:
                print(total.chunk_line(chunk + 1), file=out, flush=True)
    print("\n".join(["", *total.summary()]), file=out)
    seconds = time.perf_counter() - start
    yield {**run_fields(args, ctx, n_seq), "base": args.base, "n_ctx": base.n_ctx, **row_of(total.nll), **total.row(), "seconds": seconds}
