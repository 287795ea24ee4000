"""A long prompt by position: time per token of the Mamba2 layers, of attention and of the rest, and the memory it takes.

    python benches/long_prompt.py [MODEL ...] [-p N] [-ub N] [--mamba2 FORM] [-t THREADS] > docs/reports/long-prompt.md

The prompt goes through the model in graphs of one size. The recurrent state has one size at every position, and so has the Mamba2 layers' time;
attention reads what the cache holds, and its mask is a row of that length per token. Times are from runs that are timed after every step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from layer_product import provenance

from pyggml.backends.cpu import SharedMemory
from pyggml.models import demo_path, load_model
from pyggml.models.fabricate import dense_shapes, fabricate
from pyggml.models.layers import FORMS
from pyggml.tools.benchcases import Case, Settings
from pyggml.tools.benchrun import ModelLane
from pyggml.tools.benchswap import StepTimes
from pyggml.tools.common import human_bytes, whole
from pyggml.tools.records import Row

OF_MAMBA2 = ("in-proj", "conv", "scan", "gated norm", "out-proj", "state", "mamba2")
GROUPS = ("Mamba2 layers", "attention", "rest")
N_ROWS = 8


def group_of(part: str | None) -> str:
    """The column of a part of a model."""
    return "Mamba2 layers" if part in OF_MAMBA2 else "attention" if part == "attention" else "rest"


def seconds_by_group(times: list[StepTimes]) -> dict[str, float]:
    """Seconds of timed steps by column."""
    found = dict.fromkeys(GROUPS, 0.0)
    for t in times:
        for step, seconds in zip(t.steps, t.seconds.tolist(), strict=True):
            found[group_of(step.nodes[-1].part)] += seconds
    return found


def measure(settings: Settings, n_prompt: int) -> Iterator[Row]:
    """A row per graph: the position after it, seconds by column, bytes of state, cache and plan."""
    model = load_model(settings.model)
    lane = ModelLane(model, Case(settings, n_prompt, 0), SharedMemory(), warm=False)
    n = settings.n_ubatch
    lane.ctx.decode(lane.prompt[:n])  # compiles
    lane.ctx.reset()
    lane.notes.profiling = True
    for start in range(0, n_prompt, n):
        lane.notes.times.clear()
        lane.ctx.decode(lane.prompt[start:start + n])
        memory = lane.ctx.memory_bytes()
        times = list(lane.notes.times.values())
        plan = times[-1].plan
        mask = sum(t.nbytes for t in plan.graph.inputs if t.name == "inp_kq_mask")
        yield {"position": min(start + n, n_prompt), "n": min(n, n_prompt - start), **seconds_by_group(times), "state": memory["state"], "kv": memory["kv"],
               "plan": plan.arena_bytes, "mask": mask}


def table(rows: list[Row]) -> Iterator[str]:
    """At most N_ROWS stretches of the prompt: microseconds per token, and memory at each one's end."""
    yield "| tokens so far | us per token | " + " | ".join(GROUPS) + " | SSM and conv state | KV cache | plan memory | of it the mask |"
    yield "|" + "--:|" * (len(GROUPS) + 6)
    size = -(-len(rows) // N_ROWS)
    for i in range(0, len(rows), size):
        part, last = rows[i:i + size], rows[min(i + size, len(rows)) - 1]
        tokens = sum(r["n"] for r in part)
        own = [1e6 * sum(r[g] for r in part) / tokens for g in GROUPS]
        yield (f"| {last['position']} | {sum(own):.1f} | " + " | ".join(f"{v:.1f}" for v in own) + " | "
               + " | ".join(human_bytes(last[k]) for k in ("state", "kv", "plan", "mask")) + " |")


def main() -> None:
    """Measure and print the report."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="*", default=["mamba2-130m", str(demo_path())], metavar="MODEL",
                   help="GGUF files, and models of `pyggml fabricate` (mamba2-130m and the bundled model)")
    p.add_argument("-p", "--prompt", type=whole(1), default=131072, metavar="N", help="tokens (131072)")
    p.add_argument("-ub", "--ubatch", type=whole(1), default=2048, metavar="N", help="tokens per graph (2048)")
    p.add_argument("--mamba2", choices=FORMS, default="ssd-fused", help="form of the Mamba2 layers (ssd-fused)")
    p.add_argument("-t", "--threads", type=whole(1, 256), default=2, metavar="N", help="threads (2)")
    args = p.parse_args()
    print(f"# A long prompt by position\n\n{provenance(args.threads)}. {args.mamba2}, {args.prompt} tokens in graphs of {args.ubatch}. "
          f"`{' '.join(['python benches/long_prompt.py', *sys.argv[1:]])}`")
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            path = name
            if name in dense_shapes():
                path = f"{folder}/{name}.gguf"
                fabricate(name, "Q8_0", path)
            settings = Settings(path, args.ubatch, args.ubatch, args.threads, args.threads, "f16", "f16", "f32", "f32", args.mamba2, None, "cpu")
            print(f"\n## {Path(name).name}{', Q8_0, random weights' * (path != name)}\n")
            print("\n".join(table(list(measure(settings, args.prompt)))), flush=True)


if __name__ == "__main__":
    main()
