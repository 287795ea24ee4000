"""`pyggml fabricate`: a GGUF file of a real model's shape with random weights, to measure what the model costs without its download."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

from pyggml.models.fabricate import FILE_TYPES, MIN_VOCAB, Fabricated, dense_shapes, fabricate
from pyggml.tools.common import human_bytes, note, whole


def options(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.add_argument("--like", required=True, metavar="NAME", help=f"the model whose shape to take: {', '.join(dense_shapes())}")
    p.add_argument("-t", "--type", required=True, type=str.upper, choices=FILE_TYPES, metavar="TYPE",
                   help=f"type of the weights, a mixture as llama.cpp's where it has one: {', '.join(FILE_TYPES)}")
    p.add_argument("-o", "--output", required=True, metavar="FILE", help="file to write")
    p.add_argument("--layers", type=whole(1), metavar="N", help="keep N layers, at least one of each kind (all)")
    p.add_argument("--vocab", type=whole(MIN_VOCAB, 1 << 22), metavar="N", help="tokens of the vocabulary (the model's)")
    p.add_argument("-s", "--seed", type=whole(0, (1 << 63) - 1), default=0, metavar="N", help="seed of the weights (0)")


def main(args: argparse.Namespace) -> int:
    """Run the tool."""
    start = time.perf_counter()
    with progress_bar() as progress:
        made = fabricate(args.like, args.type, args.output, n_layer=args.layers, n_vocab=args.vocab, seed=args.seed, progress=progress)
    seconds = time.perf_counter() - start
    print(f"file        {args.output}, {human_bytes(os.path.getsize(args.output))} in {seconds:.1f} s")
    print("\n".join(made_lines(made, args.like)))
    if made.fallbacks:
        rows = ", ".join(str(n) for n in sorted({t.ne[0] for t in made.fallbacks}))
        note(f"note: {len(made.fallbacks)} tensors are q8_0: rows of {rows} are no multiple of 256, the block of {args.type}")
    return 0


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """What `fabricate` reports its progress to: a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
    with Progress(BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def made_lines(made: Fabricated, like: str) -> list[str]:
    """Layers kept, and tensors by type."""
    kinds = dict.fromkeys(kind for _, kind in made.layers)
    own = {kind: [i for i, k in made.layers if k == kind] for kind in kinds}
    if len(made.layers) == made.n_layer:
        kept = f"{made.n_layer} layers: " + ", ".join(f"{len(i)} {kind}" for kind, i in own.items())
    else:
        listed = ", ".join(f"{len(i)} {kind} ({' '.join(map(str, i))})" for kind, i in own.items())
        kept = f"{len(made.layers)} of {made.n_layer} layers: {listed}"
    types = Counter(t.dtype.name for t in made.tensors)
    counted = ", ".join(f"{n} {name}" for name, n in types.most_common())
    return [f"model       {made.arch}, like {like}, {kept}", f"tensors     {len(made.tensors)}: {counted}"]
