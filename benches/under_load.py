"""Decode speed with and without a busy process beside it: what a team of threads loses when a core is shared.

    python benches/under_load.py [FILE.gguf] > docs/reports/under-load.md

Alternates quiet and loaded runs and prints medians as Markdown. A team whose threads only spin at its barriers loses far more than
the CPU time that the neighbour takes; ours sleeps on a futex after a short spin.
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

import pyggml as pg
from pyggml.cpu.level import describe
from pyggml.runtime.context import Context

N_TOKENS, N_PAIRS = 64, 7


def tokens_per_second(ctx: Context, ids: list[int]) -> float:
    """Greedy decode of N_TOKENS after the prompt."""
    ctx.reset()
    logits = ctx.decode(ids)
    start = time.perf_counter()
    for _ in range(N_TOKENS):
        logits = ctx.decode([int(logits.argmax())])
    return N_TOKENS / (time.perf_counter() - start)


def main() -> None:
    """Measure and print the table."""
    model = pg.load_model(sys.argv[1] if len(sys.argv) > 1 else pg.models.demo_path())
    ids = model.vocab.tokenize("Captain Wentworth had")
    machine = describe()
    print(f"# Decode beside a busy process\n\n{machine['cpu']}, {machine['cores']} cores, level {machine['level']}; pyggml {pg.__version__}; "
          f"{model.metadata.get('general.name')}, {N_TOKENS} tokens, medians of {N_PAIRS} alternating runs. `python benches/under_load.py`\n")
    print("| threads | quiet t/s | one busy process beside, t/s | kept |\n|---|---|---|---|")
    for threads in (1, machine["cores"]):
        ctx = model.context(threads=threads)
        tokens_per_second(ctx, ids)
        quiet, loaded = [], []
        for _ in range(N_PAIRS):
            quiet.append(tokens_per_second(ctx, ids))
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                time.sleep(0.3)
                loaded.append(tokens_per_second(ctx, ids))
            finally:
                busy.kill()
                busy.wait()
        print(f"| {threads} | {median(quiet):.1f} | {median(loaded):.1f} | {100 * median(loaded) / median(quiet):.0f} % |")


if __name__ == "__main__":
    main()
