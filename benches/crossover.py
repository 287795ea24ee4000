"""Where the chunked form of Mamba2 pays: one layer's product by ubatch and chunk, and the whole model beside what it would do if the recurrence were free.

    python benches/crossover.py --plot docs/reports/crossover --json crossover.jsonl --readme README.md > docs/reports/crossover.md
    python benches/crossover.py --from crossover.jsonl --plot docs/reports/crossover --readme README.md > docs/reports/crossover.md

The product, from x, B, C and the step sizes to y (with softplus and the skip D x) and the state, in these forms: SSM_SCAN; the ssd graph
and SSD_SCAN, each in f32 and bf16; the graph of llama.cpp PR 16982, one sub-graph per chunk; ggml's own SSM_SCAN where its library is found (--peer-lib).
The chunk is never longer than the ubatch. Errors are NMSE against the float64 recurrence. What needs more plan memory or nodes than the limits
say is left out, and the report says so. The model: tokens per second of prompts in graphs of each ubatch; SSM_SCAN as a no-op is the ceiling.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
from crossover_report import draw, report, with_section
from layer_product import Form, Lane, Shape, exact, first, inputs, medians, open_ggml, provenance, scan, ssd, ssd_fused, unrolled

from pyggml.backends import Backend, open_backend
from pyggml.backends.cpu import CpuBackend, SharedMemory
from pyggml.models import demo_path, load_model
from pyggml.ops.ssd.cpu import MAX_CHUNK
from pyggml.ops.ssd.defs import SSD_PRECISIONS
from pyggml.testing import nmse
from pyggml.tools.benchcases import Case, Settings, ranges
from pyggml.tools.benchrun import ModelLane, take_turns
from pyggml.tools.benchswap import free_ops
from pyggml.tools.common import human_bytes, note, whole
from pyggml.tools.records import Row

REPEAT_TOKENS = 512  # a sample of few tokens is as many runs as come to this number
MODEL_PROMPT = 512  # tokens of the model's prompts, or the ubatch where that is longer
MODEL_FORMS = (("scan", "f32"), *itertools.product(("ssd", "ssd-fused"), SSD_PRECISIONS))
QUICK = {"ubatch": [1, 8, 64, 256], "chunk": [16, 64], "runs": 3, "model_runs": 3}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make the product of a ubatch: the form's name, its chunk where it has one, and how it runs."""

    name: str
    chunk: int | None
    form: Form
    backend: Backend

    @property
    def key(self) -> str:
        """What tells it from others of one ubatch."""
        return f"{self.name}, {self.chunk}"


def ways(ubatch: int, chunks: Sequence[int], cpu: Backend, ggml: Backend | None) -> Iterator[Way]:
    """All ways to make the product of so many tokens."""
    yield Way("scan", None, scan, cpu)
    sizes = sorted({min(q, ubatch) for q in chunks})
    for name, make, most in (("ssd", ssd, ubatch), ("ssd-fused", ssd_fused, MAX_CHUNK)):
        for precision in SSD_PRECISIONS:
            for q in sizes:
                if q <= most:
                    yield Way(f"{name}, {precision}", q, make(q, precision), cpu)
    for q in sizes:
        yield Way("PR 16982", q, unrolled(q), cpu)
    if ggml is not None:
        yield Way("ggml SSM_SCAN", None, scan, ggml)


def too_large(lane: Lane, max_bytes: int, max_nodes: int) -> tuple[int | None, str | None]:
    """Bytes of a lane's plan where the backend tells, and why it is left out: more nodes or plan memory than the limits."""
    if lane.graph.n_nodes > max_nodes:
        return None, f"{lane.graph.n_nodes} nodes"
    if not isinstance(lane.backend, CpuBackend):
        return None, None
    nbytes = lane.backend.plan(lane.graph).arena_bytes
    return nbytes, f"{human_bytes(nbytes)} of plan memory" if nbytes > max_bytes else None


def product_rows(args: argparse.Namespace) -> Iterator[Row]:
    """A row per ubatch, form and chunk."""
    cpu, ggml = open_backend("cpu", threads=args.threads), open_ggml(args.threads, args.peer_lib)
    data = inputs(args.shape, max(args.ubatch))
    for ubatch, y, state in exact(data, args.shape, sorted(set(args.ubatch))):
        note(f"crossover: product of {ubatch} tokens")
        part, rows, lanes = first(data, ubatch), {}, {}
        for way in ways(ubatch, args.chunk, cpu, ggml):
            lane = Lane(args.shape, part, way.form, way.backend)
            nbytes, left_out = too_large(lane, args.max_plan << 20, args.max_nodes)
            rows[way.key] = {"kind": "product", "ubatch": ubatch, "form": way.name, "chunk": way.chunk, "nodes": lane.graph.n_nodes, "plan_bytes": nbytes,
                             "left_out": left_out}
            if left_out is None:
                lanes[way.key] = lane
        for key, lane in lanes.items():
            got = lane.outputs()
            rows[key] |= {"nmse_y": nmse(got[0], y), "nmse_state": nmse(got[1], state)}
        for key, seconds in medians(lanes, args.runs, max(1, REPEAT_TOKENS // ubatch)).items():
            rows[key]["us_per_token"] = 1e6 * seconds / ubatch
        yield from rows.values()


def model_rows(args: argparse.Namespace) -> Iterator[Row]:
    """A row per ubatch and form of the whole model, and one with SSM_SCAN as a no-op."""
    model, free = load_model(args.model), free_ops("SSM_SCAN")
    for ubatch in args.ubatch:
        note(f"crossover: model, ubatch {ubatch}")
        lanes: dict[str, ModelLane] = {}
        arena = SharedMemory()  # lanes run one at a time
        n = max(ubatch, MODEL_PROMPT)
        for form, precision in MODEL_FORMS:
            settings = Settings(args.model, n, ubatch, args.threads, args.threads, "f16", "f16", "f32", "f32", form, None, "cpu", ssd_precision=precision)
            name = form if form == "scan" else f"{form}, {precision}"
            for label, variant in ((name, None), *([(f"{name}, noop SSM_SCAN", free)] if form == "scan" else [])):
                lanes[label] = ModelLane(model, Case(settings, n, 0), arena, variant)
        for lane in lanes.values():
            lane.warm_up()
            lane.run()
        for (label, lane), samples in zip(lanes.items(), take_turns(list(lanes.values()), args.model_runs, lambda: None), strict=True):
            yield {"kind": "model", "ubatch": ubatch, "form": label, "nodes": lane.notes.work.n_nodes, "prompt": n,
                   "tokens_per_second": n / float(np.median([s.seconds for s in samples]))}
            lane.ctx.close()


def public(given: Sequence[str]) -> Iterator[str]:
    """The options that change what is measured; folders and files of one machine are left out."""
    words = iter(given)
    for word in words:
        option, equals, _ = word.partition("=")
        if option in ("--json", "--plot", "--readme", "--peer-lib"):
            if not equals:
                next(words, None)
            if option == "--peer-lib":
                yield "--peer-lib FOLDER"
        else:
            yield word


def about(args: argparse.Namespace) -> Row:
    """What was asked for, and of what machine."""
    return {"kind": "about", "where": f"{provenance(args.threads)}, medians of {args.runs} alternating runs.",
            "command": " ".join(["python benches/crossover.py", *public(args.given)]),
            "limits": f"--max-plan {args.max_plan} (MiB), --max-nodes {args.max_nodes}",
            "shape": str(args.shape), "max_fused_chunk": MAX_CHUNK, "model": Path(args.model).name, "model_runs": args.model_runs,
            "model_prompt": MODEL_PROMPT}


def noted(rows: Iterable[Row], kept: TextIO) -> Iterator[Row]:
    """The rows, each written as a line of JSON as soon as it is there: what is measured is kept when a long run is stopped."""
    for r in rows:
        print(json.dumps(r), file=kept, flush=True)
        yield r


def options() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-t", "--threads", type=whole(1, 256), default=2, metavar="N", help="threads (2)")
    p.add_argument("-r", "--runs", type=whole(1), default=7, metavar="N", help="runs of the product of which the median counts (7)")
    p.add_argument("--model-runs", type=whole(1), default=5, metavar="N", help="runs of the model (5)")
    p.add_argument("-ub", "--ubatch", type=ranges(1), default=ranges(1)("1-8192*2"), metavar="N,..", help="tokens per graph (1-8192*2)")
    p.add_argument("--chunk", type=ranges(1), default=ranges(1)("16-512*2"), metavar="N,..", help="tokens per chunk (16-512*2)")
    p.add_argument("--shape", type=Shape.parse, default=Shape(128, 64, 48, 1), metavar="N,P,H,G",
                   help="d_state, head_dim, n_head, n_group (128,64,48,1: granite-4.0-h-350m and -1b)")
    p.add_argument("-m", "--model", default=str(demo_path()), metavar="FILE", help="GGUF file (the bundled model)")
    p.add_argument("--no-model", action="store_true", help="the product alone")
    p.add_argument("--max-plan", type=whole(1), default=1024, metavar="MIB", help="leave out what needs more plan memory (1024)")
    p.add_argument("--max-nodes", type=whole(1), default=4096, metavar="N", help="leave out what has more nodes (4096)")
    p.add_argument("--peer-lib", metavar="FOLDER", help="folder with libggml-base and libggml-cpu (the wheel libggml-python)")
    p.add_argument("--quick", action="store_true", help="few sizes and runs: " + ", ".join(f"{k} {v}" for k, v in QUICK.items()))
    p.add_argument("--plot", metavar="NAME", help="draw NAME.png")
    p.add_argument("--json", metavar="FILE", help="keep the results, a row per line as soon as it is there")
    p.add_argument("--from", dest="source", metavar="FILE", help="results that --json kept, in place of measuring")
    p.add_argument("--readme", metavar="FILE", help="write the short section between its two marks in this file")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, or read what was measured, and print the report."""
    argv = sys.argv[1:] if argv is None else argv
    args = options().parse_args(argv)
    args.given = argv
    if args.quick:
        vars(args).update(QUICK)
    if args.source:
        rows = [json.loads(line) for line in Path(args.source).read_text(encoding="utf-8").splitlines()]
    else:
        with open(args.json or os.devnull, "w", encoding="utf-8") as kept:
            rows = list(noted(itertools.chain([about(args)], product_rows(args), () if args.no_model else model_rows(args)), kept))
    if args.plot:
        draw(rows, f"{args.plot}.png")
    if args.readme:
        path = Path(args.readme)
        path.write_text(with_section(path.read_text(encoding="utf-8"), rows), encoding="utf-8")
    print("\n".join(report(rows, Path(args.plot).name if args.plot else None)))


if __name__ == "__main__":
    main()
