"""`pyggml demo`: the bundled hybrid model in both graphs, in about ten lines."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
import time
from pathlib import Path

import numpy as np

from pyggml.cpu.level import describe
from pyggml.models import demo_path, load_model
from pyggml.models.loader import Model
from pyggml.runtime.context import Context
from pyggml.runtime.sampling import Sampler
from pyggml.tools.common import compile_line, whole
from pyggml.tools.run import demo_prompt

N_PROMPT, N_PREDICT, N_RUNS = 600, 64, 5
TOKEN_COUNTS = (2, 64, 512, 4096)


def options(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.add_argument("-t", "--threads", type=whole(1, 256), metavar="N", help="threads (all cores)")


def main(args: argparse.Namespace) -> int:
    """Run the tool."""
    m = describe()
    print(f"machine  {m['cpu']}, {m['cores']} cores, kernel level {m['level']}")
    model = load_model(demo_path())
    ids = model.vocab.tokenize(demo_prompt())
    prompt = (ids * (N_PROMPT // len(ids) + 1))[:N_PROMPT]
    contexts, exact = ({form: model.context(threads=args.threads, mamba2=form, n_ubatch=N_PROMPT, prec=prec) for form in ("scan", "ssd")}
                       for prec in ("auto", "f32"))
    for ctx in (*contexts.values(), *exact.values()):
        ctx.prepare(N_PROMPT)
    print(f"compile  {compile_line()}")
    times, logits = prefill(contexts, prompt), {form: ctx.decode(prompt, all_logits=True) for form, ctx in exact.items()}
    n_scan = model.graph(N_PROMPT, mamba2="scan").n_nodes
    print(f"scan     {n_scan} nodes, {N_PROMPT}-token prefill {times['scan'] * 1e3:.0f} ms")
    print(f"ssd      {ssd_line(model)}, {times['ssd'] * 1e3:.0f} ms")
    texts, tokens = greedy(exact, ids)
    same = "same" if tokens["scan"] == tokens["ssd"] else "DIFFERENT"
    print(f"compare  max |dlogit| {np.abs(logits['scan'] - logits['ssd']).max():.1e} over {N_PROMPT} positions in float32, {same} {N_PREDICT} tokens")
    text = f"{demo_prompt()}{texts['ssd']}".replace("\n", " ")
    print(textwrap.fill(text, 150, initial_indent="text     ", subsequent_indent="         "))
    name = program()
    commands = {f"{name} run -p 'Mrs. Bennet was' --temp 0": "your prompt", f"{name} info": "what the file holds",
                f"{name} run --help": "all options; -m FILE for your own GGUF"}
    width = max(map(len, commands))
    for head, (command, what) in zip(("next", "", ""), commands.items(), strict=True):
        print(f"{head:<8} {command:<{width}}    {what}")
    return 0


def program() -> str:
    """What a shell here takes for this program: its name, or the path of its script where the name is not found."""
    script = Path(sys.executable).with_name("pyggml")
    found = shutil.which("pyggml")
    if found and Path(found).parent.samefile(script.parent):
        return "pyggml"
    path = script if script.exists() else Path(sys.executable)
    return min(os.path.relpath(path), str(path), key=len) + ("" if path == script else " -m pyggml")


def prefill(contexts: dict[str, Context], prompt: list[int]) -> dict[str, float]:
    """Median seconds of the prefill per form, alternating."""
    seconds: dict[str, list[float]] = {form: [] for form in contexts}
    for ctx in contexts.values():
        ctx.decode(prompt)
    for _ in range(N_RUNS):
        for form, ctx in contexts.items():
            ctx.reset()
            start = time.perf_counter()
            ctx.decode(prompt)
            seconds[form].append(time.perf_counter() - start)
    return {form: float(np.median(s)) for form, s in seconds.items()}


def ssd_line(model: Model) -> str:
    """Node counts of the ssd graph over numbers of tokens, and the share of nodes that only move data."""
    graphs = [model.graph(n, mamba2="ssd") for n in TOKEN_COUNTS]
    counts = [g.n_nodes for g in graphs]
    equal = len(set(counts)) == 1
    where = " = ".join(map(str, TOKEN_COUNTS)) if equal else " / ".join(map(str, TOKEN_COUNTS))
    shown = str(counts[0]) if equal else " / ".join(map(str, counts))
    return f"{shown} nodes at {where} tokens, {100 * graphs[-1].stats().moves_share:.0f} % of nodes only move data"


def greedy(contexts: dict[str, Context], ids: list[int]) -> tuple[dict[str, str], dict[str, list[int]]]:
    """64 greedy tokens per form."""
    texts, tokens = {}, {}
    for form, ctx in contexts.items():
        ctx.reset()
        seen: list[int] = []
        texts[form] = "".join(ctx.generate(ids, N_PREDICT, Sampler(temp=0.0), on_token=seen.append))
        tokens[form] = seen
    return texts, tokens
