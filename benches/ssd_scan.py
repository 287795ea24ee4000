"""The state-space product of one layer: SSM_SCAN, SSD_SCAN in f32 and bf16, and ggml's SSM_SCAN beside them.

    python benches/ssd_scan.py [-t THREADS] [-r RUNS] [--tokens N,N] [--chunk N,N] [--shape N,P,H,G ...] [--peer-lib FOLDER] > docs/reports/ssd-scan.md

Shapes are d_state, head_dim, n_head, n_group. x, B and C are views of one row per token, as in a model. Runs alternate; medians, as Markdown,
with the NMSE of y and state against the float64 recurrence (of the first 512 tokens). --peer-lib: a folder with libggml-base and libggml-cpu
of llama.cpp's own build (default: the wheel libggml-python, where it is installed).
"""

from __future__ import annotations

import argparse

from layer_product import Form, Lane, Operands, Shape, exact, first, inputs, medians, open_ggml, provenance

import pyggml as pg
from pyggml.backends import Backend, open_backend
from pyggml.tensor import Tensor
from pyggml.testing import nmse
from pyggml.tools.common import numbers

SHAPES = [Shape.parse(text) for text in ("128,64,48,1", "128,80,128,1", "128,80,128,8", "128,64,128,8", "128,32,48,1")]
N_EXACT = 512  # tokens of which the float64 recurrence is taken


def scan_alone(o: Operands) -> tuple[Tensor, Tensor]:
    """SSM_SCAN."""
    return pg.ssm_scan(*o.scan)


def fused_alone(chunk: int | None, precision: str) -> Form:
    """SSD_SCAN without what else it can do."""
    return lambda o: pg.ssd_scan(*o.scan, chunk=chunk, precision=precision)


def main() -> None:
    """Measure and print the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("-r", "--runs", type=int, default=9)
    p.add_argument("--tokens", type=numbers(1), default=[512])
    p.add_argument("--chunk", type=numbers(0), default=[0], help="tokens per chunk; 0: the kernel's default")
    p.add_argument("--shape", nargs="+", type=Shape.parse, default=SHAPES)
    p.add_argument("--peer-lib", metavar="FOLDER")
    args = p.parse_args()
    cpu, ggml = open_backend("cpu", threads=args.threads), open_ggml(args.threads, args.peer_lib)
    forms: dict[str, tuple[Form, Backend]] = {"scan": (scan_alone, cpu)}
    for precision in ("f32", "bf16"):
        for q in args.chunk:
            forms[f"ssd-fused {precision}" + (f", chunk {q}" if q else "")] = fused_alone(q or None, precision), cpu
    if ggml is not None:
        forms["ggml SSM_SCAN"] = scan_alone, ggml
    print(f"# State-space product of one layer\n\n{provenance(args.threads)}, medians of {args.runs} alternating runs. `python benches/ssd_scan.py`\n")
    print("| d_state, head_dim, n_head, n_group | tokens | form | ms | scan / form | NMSE of y / state |\n|---|---|---|---|---|---|")
    for shape in args.shape:
        for n_tok in args.tokens:
            data = inputs(shape, n_tok)
            lanes = {k: Lane(shape, data, *form) for k, form in forms.items()}
            for lane in lanes.values():
                lane.seconds()
            took = medians(lanes, args.runs)
            part = first(data, N_EXACT)
            _, *want = next(exact(part, shape, [min(n_tok, N_EXACT)], skip=False))
            for k, seconds in took.items():
                wrong = " / ".join(f"{nmse(g, w):.0e}" for g, w in zip(Lane(shape, part, *forms[k]).outputs(), want, strict=True))
                print(f"| {shape} | {n_tok} | {k} | {seconds * 1e3:.2f} | {took['scan'] / seconds:.2f} | {wrong} |", flush=True)


if __name__ == "__main__":
    main()
