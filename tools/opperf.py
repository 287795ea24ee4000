"""Timing of op cases: runs of one op on end, held against what the machine can do at most."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pyggml.backends import Backend, Runner, open_backend
from pyggml.backends.cpu import CpuRunner
from pyggml.backends.ggml import GgmlBackend
from pyggml.cases import Case
from pyggml.errors import UnsupportedOp
from pyggml.graph import Graph
from pyggml.guards import check_case, stored_values
from pyggml.tools.probe import ceiling
from pyggml.tools.records import Column, Row, number

RUN_COLUMNS = (
    Column("mode"), Column("op"), Column("case", head="case"), Column("backend"), Column("supported", bool), Column("passed", bool), Column("reason"),
    Column("nmse", float, "NMSE", number(".1e")), Column("limit", float), Column("us_per_run", float, "us/run", number(".2f")), Column("n_runs", int),
    Column("flops", float), Column("gflops", float, "GFLOPS", number(".1f")), Column("bytes", float), Column("gbps", float, "GB/s", number(".1f")),
    Column("share", float, "of ceiling", number(".0%")), Column("bound", head="bound by"), Column("kernel", head="kernel"), Column("threads", int),
    Column("seed", int), Column("machine"), Column("version"),
)
BATCH_SECONDS, CASE_SECONDS, LEAST_BATCHES = 0.02, 0.5, 3


def perf_rows(cases: Iterable[Case], backends: Sequence[Backend], seed: int = 0) -> Iterator[Row]:
    """A row per case and backend: time of one run, its rates, their share of the ceiling, and (of cases that are not large) the NMSE."""
    for case in cases:
        for backend in backends:
            row = _row(case, backend, seed)
            if isinstance(backend, GgmlBackend):
                backend.pause()  # its threads would spin for a while yet, in the time of what is measured next
            yield row


def _row(case: Case, backend: Backend, seed: int) -> Row:
    node = case.node()
    threads = int(getattr(backend, "threads", 1))
    row: Row = {"mode": "perf", "op": case.op.name, "case": str(case), "backend": backend.name, "threads": threads, "seed": seed}
    why = backend.refuses(node)
    if why:
        return {**row, "supported": False, "reason": why}
    flops, nbytes = case.op.cost_of(node)
    row |= {"supported": True, "flops": flops, "bytes": nbytes}
    if not case.large:
        verdict = check_case(case, [backend], seed)
        row |= {"passed": not verdict.faults, "nmse": verdict.nmse, "limit": verdict.limit, "reason": "; ".join(verdict.faults)}
        if verdict.faults:
            return row  # how fast a wrong result comes is of no interest
    try:
        runner = _ready(case, backend, seed)
    except UnsupportedOp as e:
        return {**row, "supported": False, "reason": str(e)}
    seconds, n_runs = time_runner(runner)
    least, bound = ceiling(nbytes, threads).seconds(flops, nbytes)
    return {**row, "us_per_run": seconds * 1e6, "n_runs": n_runs, "gflops": flops / seconds / 1e9, "gbps": nbytes / seconds / 1e9, "bound": bound,
            "share": least / seconds, "kernel": "+".join(s.kernel_name for s in runner.plan.steps)}


def _ready(case: Case, backend: Backend, seed: int) -> Runner:
    ins, outs = case.build(seed)
    runner = backend.compile(Graph(outs))
    for t, value in zip(ins, stored_values(case, seed), strict=True):
        if t is not None and value is not None:
            runner.set(t, value)
    return runner


def time_runner(runner: Runner) -> tuple[float, int]:
    """Seconds of one run, the median over batches of runs, and the number of runs. The first run is not counted."""
    runner.run()
    start = time.perf_counter()
    runner.run()
    per_batch = max(1, int(BATCH_SECONDS / max(time.perf_counter() - start, 1e-7)))
    batches: list[float] = []
    end = time.perf_counter() + CASE_SECONDS
    while time.perf_counter() < end or len(batches) < LEAST_BATCHES:
        start = time.perf_counter()
        _run(runner, per_batch)
        batches.append((time.perf_counter() - start) / per_batch)
    return float(np.median(batches)), per_batch * len(batches)


def _run(runner: Runner, times: int) -> None:
    """The CPU backend walks its tape `times` over; others are called that often."""
    if isinstance(runner, CpuRunner):
        runner.run(repeat=times)
    else:
        for _ in range(times):
            runner.run()


def perf_backends(names: Iterable[str], threads: int | None) -> list[Backend]:
    """Backends to be timed."""
    return [open_backend(n, **({"threads": threads} if threads is not None and n in ("cpu", "ggml") else {})) for n in names]


def beside(rows: Sequence[Row]) -> Iterator[Row]:
    """One row per case with every backend's time, and how much faster the first is than each other."""
    by_case: dict[str, dict[str, Row]] = {}
    for r in rows:
        by_case.setdefault(r["case"], {})[r["backend"]] = r
    for text, found in by_case.items():
        first, *others = found.values()
        row: Row = {"case": text, **{k: first.get(k) for k in ("gflops", "gbps", "share", "bound")}}
        row |= {f"us_{n}": r.get("us_per_run") for n, r in found.items()}
        for other in others:
            if "us_per_run" in first and "us_per_run" in other:
                row[f"times_{other['backend']}"] = other["us_per_run"] / first["us_per_run"]
        yield row


def beside_columns(names: Sequence[str]) -> list[Column]:
    """Columns of `beside`; rates and shares are the first backend's."""
    shared = {c.name: c for c in RUN_COLUMNS}
    return [Column("case", head="case"), *(Column(f"us_{n}", float, f"us {n}", number(".1f", "-")) for n in names),
            *(Column(f"times_{n}", float, f"{n} / {names[0]}", number(".2f", "-")) for n in names[1:]),
            *(shared[k]._replace(head=f"{names[0]} {shared[k].head}") for k in ("gflops", "gbps", "share")), shared["bound"]]
