"""Where the time of a test goes: per op and per part of a layer, from a run that is timed after every step.

All threads meet after every step of such a run, which small steps otherwise skip, so it takes a little longer; the table says how much. What is
left of the wall time is `host`: inputs, logits, Python between two graphs. The rows therefore add up to the run's wall time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, TextIO

import numpy as np

from pyggml.plan import Step
from pyggml.tools.benchswap import StepTimes
from pyggml.tools.graph import part_order, step_bytes
from pyggml.tools.records import Column, Row, number, write_rows

PROFILE = (
    Column("model_filename"), Column("test"), Column("mamba2"), Column("chunk", int), Column("n_ubatch", int), Column("n_threads", int), Column("by"),
    Column("name", str, "name"), Column("calls", int, "calls", lambda n: str(n) if n else ""), Column("seconds", float, "ms", lambda s: f"{s * 1e3:.2f}"),
    Column("share", float, "share", number(".1%")), Column("gflops", float, "GFLOP/s", number(".1f")), Column("gbps", float, "GB/s", number(".1f")),
    Column("wall_s", float), Column("plain_s", float),
)


def profile_rows(times: Sequence[StepTimes], wall: float, about: Row) -> list[Row]:
    """Rows by op (fused ops together) and by part, both with a host row; `wall` is this run's time, `about` the test's row."""
    plain = float(np.median(about["samples_ns"])) * 1e-9 if about["samples_ns"] else None
    common = {k: about[k] for k in ("model_filename", "test", "mamba2", "chunk", "n_ubatch", "n_threads")} | {"wall_s": wall, "plain_s": plain}
    by_op = _rows(times, wall, lambda s: " + ".join(n.op.name for n in s.nodes))
    by_part = _rows(times, wall, lambda s: s.nodes[-1].part or "other")
    by_op.sort(key=lambda r: -r["seconds"])
    by_part.sort(key=lambda r: part_order(r["name"]))
    host = wall - sum(float(t.seconds.sum()) for t in times)
    last: Row = {"name": "host", "seconds": host, "share": host / wall}
    return [{**common, "by": by, **r} for by, rows in (("op", by_op), ("part", by_part)) for r in [*rows, last]]


def _rows(times: Sequence[StepTimes], wall: float, key: Callable[[Step], str]) -> list[Row]:
    sums: dict[str, list[float]] = {}
    for t in times:
        for step, seconds in zip(t.steps, t.seconds.tolist(), strict=True):
            found = sums.setdefault(key(step), [0.0, 0.0, 0.0, 0.0])
            runs = 0 if step.prepares else t.n_runs  # what it prepares for counts
            flops = sum(n.op.cost_of(n).flops for n in step.nodes)
            for i, x in enumerate((seconds, flops * runs, step_bytes(step) * t.n_runs, runs)):
                found[i] += x
    return [{"name": k, "calls": int(n), "seconds": s, "share": s / wall, "gflops": f / s / 1e9 if s > 0 else None, "gbps": b / s / 1e9 if s > 0 else None}
            for k, (s, f, b, n) in sums.items()]


def op_share(times: Sequence[StepTimes], ops: Container[str], wall: float) -> float:
    """Share of a run's wall time that some ops take. The time of a fused step counts evenly for each of its ops."""
    return sum(seconds * sum(n.op.name in ops for n in step.nodes) / len(step.nodes)
               for t in times for step, seconds in zip(t.steps, t.seconds.tolist(), strict=True)) / wall


def show_profile(rows: Sequence[Row], output: str, out: TextIO) -> None:
    """The tables of one test for people."""
    first = rows[0]
    than = f", {first['wall_s'] / first['plain_s'] - 1:+.1%} on the median without" if first["plain_s"] else ""
    form = f", {first['mamba2']}" if first["mamba2"] else ""
    print(f"\nprofile of {first['test']}{form}: {first['wall_s'] * 1e3:.2f} ms with a time taken after each step{than}", file=out)
    for by in ("part", "op"):
        print(file=out)
        table = [r for r in rows if r["by"] == by]
        total: dict[str, Any] = {"name": "all", "seconds": sum(r["seconds"] for r in table), "share": sum(r["share"] for r in table)}
        heads = [c._replace(head=by) if c.name == "name" else c for c in PROFILE]
        write_rows([*table, total], heads, output, out)
