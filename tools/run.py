"""`pyggml run`: a prompt in, text out; timings and memory to stderr."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pyggml.errors import ParamError
from pyggml.models import Model
from pyggml.runtime.context import Context
from pyggml.runtime.sampling import Sampler
from pyggml.tools.common import compile_line, context_options, counted, form_name, human_bytes, model_options, note, open_context, open_model, read_text, whole


def options(p: argparse.ArgumentParser) -> None:
    """Options, by llama.cpp's names."""
    model_options(p)
    source = p.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="prompt (default: stdin, less a last newline; the bundled model has one of its own)")
    source.add_argument("-f", "--file", metavar="FILE", help="file with the prompt (a last newline is left out)")
    p.add_argument("-n", "--predict", type=whole(0), default=128, metavar="N", help="tokens to predict at most (128)")
    context_options(p)
    p.add_argument("--temp", type=float, default=0.8, metavar="X", help="temperature; 0: always the likeliest token (0.8)")
    p.add_argument("--top-k", type=whole(0), default=40, metavar="N", help="sample among the N likeliest tokens; 0: all (40)")
    p.add_argument("--top-p", type=float, default=0.95, metavar="X", help="and among the fewest whose probabilities reach X (0.95)")
    p.add_argument("-s", "--seed", type=whole(0, (1 << 63) - 1), metavar="N", help="seed of the sampler (default: a new one, printed)")
    p.add_argument("--no-display-prompt", action="store_true", help="print the predicted text only")


def main(args: argparse.Namespace) -> int:
    """Run the tool."""
    start = time.perf_counter()
    sampler = Sampler(temp=args.temp, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    with _nothing_collected():
        model = open_model(args)
        prompt = read_prompt(args)
        ids = model.vocab.tokenize(prompt)
        if not ids:
            raise ParamError("the prompt is empty; give one with -p, -f or stdin")
        ctx = open_context(model, args)
        loaded = time.perf_counter()
        ctx.prepare(len(ids))
        prepared = time.perf_counter()
    if not args.no_display_prompt:
        print(prompt, end="", flush=True)
    tokens: list[int] = []
    first = 0.0

    def on_token(token: int) -> None:
        nonlocal first
        first = first or time.perf_counter()
        tokens.append(token)

    eval_start = time.perf_counter()
    for piece in ctx.generate(ids, args.predict, sampler, on_token=on_token):
        print(piece, end="", flush=True)
    end = time.perf_counter()
    print(flush=True)
    first = first or end
    report(model, ctx, args, sampler, loaded - start, prepared - loaded, (len(ids), first - eval_start), first - start, (len(tokens), end - first))
    if len(tokens) < args.predict and not (tokens and tokens[-1] in model.vocab.eog_ids):
        note(f"stopped  the context is full: {args.ctx_size} tokens; -c N for more")
    return 0


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Loading makes hardly any garbage, but a vocabulary and plans are much for the collector to walk through again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_prompt(args: argparse.Namespace) -> str:
    """The text of -p, -f or stdin; the bundled model's own prompt when nothing is given at a terminal."""
    if args.prompt is not None:
        return str(args.prompt)
    if args.file is not None:
        return read_text(args.file).removesuffix("\n")
    if sys.stdin and not sys.stdin.isatty():
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as e:
            raise ParamError(f"stdin: byte {e.start} is not UTF-8") from None
        if text or args.model is not None:
            return text.removesuffix("\n")
    elif args.model is not None:
        raise ParamError("no prompt; give one with -p, -f or stdin")
    return demo_prompt()


def demo_prompt() -> str:
    """A prompt in the bundled model's language."""
    from pyggml.models import demo_path
    return (demo_path().parent / "prompt.txt").read_text(encoding="utf-8").rstrip("\n")


def report(model: Model, ctx: Context, args: argparse.Namespace, sampler: Sampler, load: float, prepare: float, prompt: tuple[int, float], ttft: float,
           predicted: tuple[int, float]) -> None:
    """Timings and memory, one line each, on stderr. `predicted`: tokens, and the seconds that those after the first one took."""
    from pyggml.cpu.compile import STATS
    memory = ctx.memory_bytes()
    form = form_name(args.mamba2) if args.mamba2 != "auto" else f"auto ({ctx.forms_used()})"
    note(f"compile  {compile_line()}")
    note(f"load     {load:.2f} s, plans {prepare - STATS.seconds:.2f} s")
    note(f"prompt   {counted(prompt[0], 'token')}, {prompt[0] / max(prompt[1], 1e-9):.1f} t/s; mamba2 {form}, {counted(ctx.threads, 'thread')}")
    if predicted[0]:
        note(f"first    {ttft:.2f} s from start to first token" + (f"; seed {sampler.seed}" if args.temp > 0 else ""))
    n_eval = predicted[0] - 1
    if n_eval > 0:
        note(f"eval     {counted(n_eval, 'token')}, {n_eval / max(predicted[1], 1e-9):.1f} t/s")
    note(f"memory   weights {human_bytes(model.nbytes)}, " + ", ".join(f"{k} {human_bytes(v)}" for k, v in memory.items()))
