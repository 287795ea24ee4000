"""Pointwise functions, softmax and RMS norm beside a plain copy of the same bytes, and how exact the functions are.

    python benches/glue.py [-t N] [-r N] > docs/reports/glue.md

GB/s of what is read and written, medians of rounds in which all ops take turns; tensors of 512 KiB stay in the second-level cache, those of
64 MiB lie beyond the third. On one thread CPU time is taken, on several the wall's. Errors are in units of the last place against float64,
the largest over a dense sweep of float32. As Markdown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np

import pyggml as pg
from pyggml.backends.cpu import CpuBackend, CpuRunner
from pyggml.cpu.level import LEVELS, describe, n_cores
from pyggml.graph import Graph
from pyggml.tensor import Tensor

ROW = 1024
SIZES = {"512 KiB": 512 << 10, "64 MiB": 64 << 20}
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": pg.cont, "exp": pg.exp, "softplus": pg.softplus, "silu": pg.silu, "soft_max": pg.soft_max, "rms_norm": lambda x: pg.rms_norm(x, eps=1e-6)}
SWEEP_STEP = 61  # every so many-th float32


def runner(op: Callable[[Tensor], Tensor], nbytes: int, threads: int, level: str | None) -> CpuRunner:
    """A plan of one op; its input lies where a constant does."""
    rows = nbytes // (4 * ROW)
    x = pg.tensor(np.random.default_rng(0).standard_normal((rows, ROW)).astype(np.float32))
    return CpuBackend(threads=threads, level=level).compile(Graph([op(x)]))


def seconds(r: CpuRunner, repeat: int, threads: int) -> float:
    """Time of a run."""
    clock = time.process_time if threads == 1 else time.perf_counter
    start = clock()
    r.run(repeat=repeat)
    return (clock() - start) / repeat


def largest_error(op: Callable[[Tensor], Tensor], exact: Callable[[np.ndarray], np.ndarray], low: float, high: float) -> float:
    """In units of the last place of the exact result, over float32 in [low, high]."""
    bits = np.arange(0, 0x7F800000, SWEEP_STEP, np.uint32)
    x = np.concatenate([bits.view(np.float32), -bits.view(np.float32)])
    x = x[(x >= low) & (x <= high)]
    want = exact(x.astype(np.float64))
    got = pg.compute(op(pg.tensor(x)), {}, threads=1).astype(np.float64)
    place = np.spacing(np.maximum(np.abs(want), np.finfo(np.float32).tiny).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(got - want) / place))


def main() -> None:
    """Measure and print the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-t", type=int, default=n_cores(), metavar="N", help="threads (all cores)")
    p.add_argument("-r", type=int, default=9, metavar="N", help="rounds (9)")
    p.add_argument("--level", choices=LEVELS, help="level of the kernels (the host's)")
    args = p.parse_args()
    m = describe()
    print(f"# Functions at the memory's speed\n\n{m['cpu']}, {args.t} thread{'' if args.t == 1 else 's'}, level {args.level or m['level']}; pyggml "
          f"{pg.__version__}; medians of {args.r} rounds. `python benches/glue.py -t {args.t} -r {args.r}`\n")
    print("| op | " + " | ".join(f"{s}, GB/s" for s in SIZES) + " | of the copy's |\n|---|" + "--:|" * (len(SIZES) + 1))
    rates: dict[str, list[float]] = {name: [] for name in OPS}
    for nbytes in SIZES.values():
        made = {name: runner(op, nbytes, args.t, args.level) for name, op in OPS.items()}
        repeat = max(1, (16 << 20) // nbytes)
        rounds = [{name: seconds(r, repeat, args.t) for name, r in made.items()} for _ in range(args.r + 1)][1:]
        for name in OPS:
            rates[name].append(2 * nbytes / median(t[name] for t in rounds) * 1e-9)
    for name, of in rates.items():
        print(f"| {name} | " + " | ".join(f"{v:.1f}" for v in of) + f" | {100 * of[-1] / rates['copy'][-1]:.0f} % |")
    print("\n| function | float32 from | to | largest error, ulp |\n|---|--:|--:|--:|")
    for name, low, high, exact in (("exp", -87.33, 88.72, np.exp), ("softplus", -87.33, 20.0, lambda x: np.log1p(np.exp(x))),
                                   ("silu", -87.33, 3.4e38, lambda x: x / (1 + np.exp(-x)))):
        print(f"| {name} | {low:g} | {high:g} | {largest_error(OPS[name], exact, low, high):.2f} |")


if __name__ == "__main__":
    main()
