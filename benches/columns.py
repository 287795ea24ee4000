"""Time of MUL_MAT by the number of columns, for the weight types and products of granite-4.0-h-350m.

    python benches/columns.py [-t TYPE,..] [-n N,..] [-r N] > docs/reports/columns.md

CPU time on one thread, medians of rounds in which all numbers of columns take turns; weights lie in the caches as they do between
repetitions. A product of n columns must not cost more than n products of one: where it does, or where fewer columns cost more than
more do, the number is marked. As Markdown.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np

import pyggml as pg
from pyggml.backends.cpu import CpuBackend, CpuRunner
from pyggml.cases import random_blocks
from pyggml.cpu.level import LEVELS, describe
from pyggml.dtypes import dtype
from pyggml.graph import Graph
from pyggml.tensor import encode, raw_tensor

TYPES = ("q8_0", "q4_K", "q5_K", "q6_K", "q4_0", "bf16", "f16", "f32")
SHAPES = ((2048, 768), (3376, 768), (768, 2048), (768, 1536))  # rows of the weights, K
COLUMNS = (*range(1, 17), 17, 24, 32, 33, 64, 65)
REPEAT_S = 2e-3  # CPU time of a measurement, at least


def runners(kind: str, m: int, k: int, columns: list[int], level: str | None) -> list[CpuRunner]:
    """A plan for each number of columns, on the same weights."""
    dt, rng = dtype(kind), np.random.default_rng(0)
    raw = random_blocks(dt, m * k // dt.block, rng) if dt.is_quantized else encode(rng.standard_normal((m, k)).astype(np.float32), dt)
    weights = raw_tensor(raw.reshape(-1).view(np.uint8), dt, [k, m])
    # A backend each: runners of one share their memory for inputs.
    inputs = [pg.tensor(rng.standard_normal((n, k)).astype(np.float32)) for n in columns]
    return [CpuBackend(threads=1, level=level).compile(Graph([pg.mul_mat(weights, x)])) for x in inputs]


def cpu_us(runner: CpuRunner, repeat: int) -> float:
    """CPU time of a run in microseconds."""
    start = time.process_time()
    runner.run(repeat=repeat)
    return (time.process_time() - start) / repeat * 1e6


def measure(made: list[CpuRunner], rounds: int) -> list[float]:
    """Median CPU time of each plan in microseconds."""
    repeats = []
    for runner in made:
        cpu_us(runner, 1)
        repeats.append(max(1, round(REPEAT_S * 1e6 / max(cpu_us(runner, 2), 1.0))))
    times = [[cpu_us(r, n) for r, n in zip(made, repeats, strict=True)] for _ in range(rounds)]
    return [median(t) for t in zip(*times, strict=True)]


def main() -> None:
    """Measure and print the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-t", default=",".join(TYPES), metavar="TYPE,..", help="types of the weights")
    p.add_argument("-n", default=",".join(map(str, COLUMNS)), metavar="N,..", help="numbers of columns; the first one is compared with")
    p.add_argument("-r", type=int, default=9, metavar="N", help="rounds (9)")
    p.add_argument("--level", choices=LEVELS, help="level of the kernels (the host's)")
    args = p.parse_args()
    columns = [int(n) for n in args.n.split(",")]
    m = describe()
    print(f"# MUL_MAT by the number of columns\n\n{m['cpu']}, level {args.level or m['level']}, one thread; pyggml {pg.__version__}; CPU time in microseconds, "
          f"medians of {args.r} rounds.\n`python benches/columns.py{f' --level {args.level}' if args.level else ''} -r {args.r}`. "
          "In bold: more than that many products of one column, or than a larger number of columns.\n")
    print(f"| type | rows x K | {' | '.join(map(str, columns))} |\n|---|---|{'--:|' * len(columns)}")
    for kind in args.t.split(","):
        for rows, k in SHAPES:
            us = measure(runners(kind, rows, k, columns, args.level), args.r)
            cells = [f"**{t:.0f}**" if t > n / columns[0] * us[0] * 1.02 or t > min(us[i:]) * 1.05 else f"{t:.0f}"
                     for i, (n, t) in enumerate(zip(columns, us, strict=True))]
            print(f"| {kind} | {rows} x {k} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
