"""The state-space product of one layer: SSM_SCAN, SSD_SCAN in f32 and bf16, and ggml's SSM_SCAN beside them.

    python benches/ssd_scan.py [-t THREADS] [-r RUNS] [--tokens N,N] [--chunk N,N] [--shape N,P,H,G ...] [--peer-lib FOLDER] > docs/reports/ssd-scan.md

Shapes are d_state, head_dim, n_head, n_group. x, B and C are views of one row per token, as in a model. Runs alternate; medians, as Markdown,
with the NMSE of y and state against the float64 recurrence (of the first 512 tokens). --peer-lib: a folder with libggml-base and libggml-cpu
of llama.cpp's own build (default: the wheel libggml-python, where it is installed).
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import pyggml as pg
from pyggml.backends import Runner, open_backend
from pyggml.cpu.level import describe
from pyggml.errors import ParamError
from pyggml.graph import Graph
from pyggml.tensor import Tensor
from pyggml.testing import nmse

SHAPES = ("128,64,48,1", "128,80,128,1", "128,80,128,8", "128,64,128,8", "128,32,48,1")
Shape = tuple[int, int, int, int]


def inputs(shape: Shape, n_tok: int) -> dict[str, np.ndarray]:
    """Random inputs in NumPy order: rows x, B and C of a token; steps from 0.02 to 2, decays from -0.01 to -1."""
    d_state, head_dim, n_head, n_group = shape
    rng = np.random.default_rng(0)

    def uniform(*ne: int, lo: float = -1.0, hi: float = 1.0) -> np.ndarray:
        return rng.uniform(lo, hi, ne).astype(np.float32)

    return {"rows": uniform(n_tok, n_head * head_dim + 2 * n_group * d_state), "dt": uniform(1, n_tok, n_head, lo=-4, hi=2),
            "s": uniform(1, n_head, head_dim, d_state), "A": uniform(n_head, 1, lo=-1, hi=-0.01)}


def runner(shape: Shape, data: dict[str, np.ndarray], make: Callable[..., tuple[Tensor, Tensor]], backend: str, **options: Any) -> tuple[Runner, Graph]:
    """A graph of the op alone, ready to run."""
    d_state, head_dim, n_head, n_group = shape
    rows = pg.tensor(list(data["rows"].shape[::-1]), name="rows")
    n_tok, row, d_inner = rows.ne[1], rows.nb[1], n_head * head_dim
    x = pg.view(rows, [head_dim, n_head, n_tok, 1], [4 * head_dim, row, n_tok * row])
    b, c = (pg.view(rows, [d_state, n_group, n_tok, 1], [4 * d_state, row, n_tok * row], 4 * (d_inner + k * n_group * d_state)) for k in (0, 1))
    dt = pg.tensor([n_head, n_tok, 1], name="dt")
    graph = Graph(make(pg.tensor(data["s"]), x, dt, pg.tensor(data["A"]), b, c, pg.tensor(np.zeros(1, np.int32))))
    ready = open_backend(backend, **options).compile(graph)
    ready.set(rows, data["rows"])
    ready.set(dt, data["dt"])
    ready.run()
    return ready, graph


def medians(runners: dict[str, Runner], runs: int) -> dict[str, float]:
    """Median seconds of each, over runs that alternate."""
    seconds: dict[str, list[float]] = {k: [] for k in runners}
    for _ in range(runs):
        for k, r in runners.items():
            start = time.perf_counter()
            r.run()
            seconds[k].append(time.perf_counter() - start)
    return {k: median(v) for k, v in seconds.items()}


def errors(shape: Shape, data: dict[str, np.ndarray], make: Callable[..., tuple[Tensor, Tensor]], backend: str, options: dict[str, Any]) -> str:
    """NMSE of y and state against the reference."""
    part = {**data, "rows": data["rows"][:512], "dt": data["dt"][:, :512]}
    (got, graph), (want, exact) = runner(shape, part, make, backend, **options), runner(shape, part, pg.ssm_scan, "reference")
    return " / ".join(f"{nmse(got.get(g), want.get(w)):.0e}" for g, w in zip(graph.outputs, exact.outputs, strict=True))


def main() -> None:
    """Measure and print the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("-r", "--runs", type=int, default=9)
    p.add_argument("--tokens", type=lambda s: [int(n) for n in s.split(",")], default=[512])
    p.add_argument("--chunk", type=lambda s: [int(n) or None for n in s.split(",")], default=[None], help="tokens per chunk; 0: the kernel's default")
    p.add_argument("--shape", nargs="+", default=SHAPES)
    p.add_argument("--peer-lib", metavar="FOLDER")
    args = p.parse_args()
    machine, cpu = describe(), {"threads": args.threads}
    forms: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], str, dict[str, Any]]] = {"scan": (pg.ssm_scan, "cpu", cpu)}
    for precision in ("f32", "bf16"):
        for q in args.chunk:
            forms[f"ssd-fused {precision}" + (f", chunk {q}" if q else "")] = (functools.partial(pg.ssd_scan, precision=precision, chunk=q), "cpu", cpu)
    try:
        peer: dict[str, Any] = {"threads": args.threads, "lib": args.peer_lib}
        open_backend("ggml", **peer)
        forms["ggml SSM_SCAN"] = (pg.ssm_scan, "ggml", peer)
    except ParamError as e:
        print(f"(no ggml: {e})\n")
    print(f"# State-space product of one layer\n\n{machine['cpu']}, {machine['cores']} cores, level {machine['level']}; pyggml {pg.__version__}, "
          f"{args.threads} threads, medians of {args.runs} alternating runs. `python benches/ssd_scan.py`\n")
    print("| d_state, head_dim, n_head, n_group | tokens | form | ms | scan / form | NMSE of y / state |\n|---|---|---|---|---|---|")
    for text in args.shape:
        d_state, head_dim, n_head, n_group = (int(n) for n in text.split(","))
        shape = d_state, head_dim, n_head, n_group
        for n_tok in args.tokens:
            data = inputs(shape, n_tok)
            took = medians({k: runner(shape, data, make, backend, **options)[0] for k, (make, backend, options) in forms.items()}, args.runs)
            for k, seconds in took.items():
                wrong = errors(shape, data, *forms[k])
                print(f"| {text} | {n_tok} | {k} | {seconds * 1e3:.2f} | {took['scan'] / seconds:.2f} | {wrong} |", flush=True)


if __name__ == "__main__":
    main()
