"""Whole models of real shapes, each prompt in one graph: every form of the Mamba2 layers, and its lead over the recurrence.

    python benches/whole_models.py [--like NAME ...] [--type TYPE] [-p N,N] [-r RUNS] [-t THREADS] [--folder FOLDER] > docs/reports/whole-models.md

What `pyggml fabricate`, `pyggml bench -ub prompt` and `pyggml report --lead` do one after the other; the report names the commands. Weights are
random, which changes no time. Files are written to a folder of their own and removed, or kept in --folder and used again.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from layer_product import provenance

from pyggml.models.fabricate import fabricate
from pyggml.tools import bench
from pyggml.tools.benchcases import cases, grouped
from pyggml.tools.common import whole
from pyggml.tools.records import Row
from pyggml.tools.report import by_model, report

MODELS = ["granite-4.0-h-350m", "granite-4.0-h-1b"]


def bench_options(files: list[str], args: argparse.Namespace) -> list[str]:
    """The command line of `pyggml bench`; one batch size for all prompts, so that they stand in one column."""
    longest = str(max(map(int, args.prompts.split(","))))
    return ["-m", ",".join(files), "-p", args.prompts, "-n", "0", "-b", longest, "-ub", "prompt", "-t", str(args.threads), "-r", str(args.runs),
            "--mamba2", "scan,ssd,ssd-fused", "--ssd-precision", "f32,bf16", "--no-ceiling"]


def measured(options: list[str]) -> list[Row]:
    """The rows of a bench."""
    p = argparse.ArgumentParser()
    bench.options(p)
    args = p.parse_args(options)
    with contextlib.closing(bench.Bench(args)) as run:
        return [r for group in grouped(cases(args)) for r in run.rows(group)]


def lines(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Lines of the report."""
    files = [folder / f"{name}-{args.type}.gguf" for name in args.like]
    yield from ("# Whole models, each prompt in one graph", "",
                f"{provenance(args.threads)}, medians of {args.runs} alternating runs. Weights are random, {args.type}.", "", "```sh")
    for name, path in zip(args.like, files, strict=True):
        yield f"pyggml fabricate --like {name} -t {args.type} -o {path.name}"
    yield f"pyggml bench {' '.join(bench_options([path.name for path in files], args))} -o json > models.json"
    asked = f"--like {' '.join(args.like)} --type {args.type} -p {args.prompts} -r {args.runs} -t {args.threads}"
    yield from (f"pyggml report --lead --no-plot models.json    # or all of it: python benches/whole_models.py {asked}", "```")
    for name, path in zip(args.like, files, strict=True):
        if not path.exists():
            fabricate(name, args.type, str(path))
        yield ""
        for model, ways in by_model(measured(bench_options([str(path)], args))).items():
            yield from report(f"{name}: {model}", ways, lead=True)


def main() -> None:
    """Measure and print the report."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--like", nargs="+", default=MODELS, metavar="NAME", help=f"models of `pyggml fabricate` ({' '.join(MODELS)})")
    p.add_argument("--type", default="Q8_0", help="type of the weights (Q8_0)")
    p.add_argument("-p", dest="prompts", default="512,1024,2048,4096", metavar="N,N", help="prompts (512,1024,2048,4096)")
    p.add_argument("-r", "--runs", type=whole(1), default=3, metavar="N", help="runs of which the median counts (3)")
    p.add_argument("-t", "--threads", type=whole(1, 256), default=2, metavar="N", help="threads (2)")
    p.add_argument("--folder", metavar="FOLDER", help="where the files are, or are written and stay")
    args = p.parse_args()
    with contextlib.nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as folder:
        for line in lines(args, Path(folder)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
