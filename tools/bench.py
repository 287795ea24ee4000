"""`pyggml bench`: how fast a model runs, in the manner of llama-bench; what it would gain if an op were free or another kernel took its place;
where the time goes; the same runs on llama.cpp.

--noop OP[,OP] runs every test once more for each op, with the op's kernel doing nothing, so that one sees the ceiling before a better kernel is
written (OP+OP: both at once). The row's output is invalid by design. --replace OP=MODULE:FUNCTION (or FILE.py:FUNCTION) swaps the op for yours: a
kernel, which is a function whose last arguments are i0 and i1 (with @kernel its options hold too), or a function with the op's own signature that
builds the result from other ops. Base and variants take turns, repetition by repetition.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pyggml import __version__
from pyggml.backends.cpu import SharedMemory
from pyggml.cpu.compile import STATS
from pyggml.cpu.level import describe
from pyggml.errors import ParamError
from pyggml.models import Model
from pyggml.models.fabricate import FILE_TYPES
from pyggml.runtime.context import MAX_PLANS
from pyggml.testing import nmse
from pyggml.tools.benchcases import Case, cases, context_lists, each, grouped, ignored_options, note_ignored, pair, ranges, several, sweep_options
from pyggml.tools.benchpeer import Peer, PeerLane, find_peer
from pyggml.tools.benchprofile import PROFILE, op_share, profile_rows, show_profile
from pyggml.tools.benchrun import LogitsCheck, ModelLane, Models, Rates, Sample, bench_tokens, form_ran, pieces, rates, take_turns
from pyggml.tools.benchswap import Variant, free_ops, replaced_op
from pyggml.tools.common import counted, form_name, human_bytes, human_count, note, whole
from pyggml.tools.probe import ceiling
from pyggml.tools.records import FORMATS, Column, Row, number, write_rows

PROFILED_RUNS = 3


def options(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.epilog = ("Lists and ranges: 128,256 and 8-64+8 and 8-64*2; an option may be given several times; every combination is run.\n\n"
                + (__doc__ or "").partition("\n\n")[2])
    several(p, "-m", "--model", kind=each(str), metavar="FILE,..", text="GGUF files (the bundled model)")
    several(p, "-p", "--n-prompt", kind=ranges(0), metavar="N,..", text="prompt tokens; 0 leaves the test out (512)")
    several(p, "-n", "--n-gen", kind=ranges(0), metavar="N,..", text="generated tokens; 0 leaves the test out (128)")
    several(p, "-pg", kind=pair, metavar="PROMPT,GEN", text="a prompt and generated tokens after it, in one test")
    several(p, "-d", "--n-depth", kind=ranges(0), metavar="N,..", text="tokens that the context holds before a test, not timed (0)")
    p.add_argument("-r", "--repetitions", type=whole(1), default=5, metavar="N", help="repetitions of each test (5)")
    context_lists(p, per_prompt=True)
    sweep_options(p)
    several(p, "--noop", kind=each(str), metavar="OP,..", text="run each test again for each of these ops as if it were free; OP+OP: several at once")
    p.add_argument("--replace", action="append", metavar="OP=MODULE:FUNCTION",
                   help="run each test again with the op swapped for a kernel or a graph of yours")
    p.add_argument("--profile", action="store_true",
                   help="time per op and per part of a layer, from the median of up to 3 more runs; with csv, json, jsonl and sql these rows alone")
    p.add_argument("--peer", nargs="?", const=sys.executable, metavar="PYTHON",
                   help="the same runs on llama.cpp, in turn, through the llama-cpp-python of that interpreter (this one)")
    p.add_argument("--delay", type=whole(0), default=0, metavar="SECONDS", help="pause between tests (0)")
    p.add_argument("--no-warmup", dest="warmup", action="store_false", help="no run before the timed ones; kernels are compiled before them all the same")
    p.add_argument("--no-ceiling", dest="ceiling", action="store_false",
                   help="skip measuring what the machine can do at most (2 seconds per number of threads)")
    p.add_argument("--progress", action="store_true", help="a line per test on stderr")
    ignored_options(p)
    p.add_argument("-o", "--output", choices=FORMATS, default="md", metavar="FORMAT", help=f"{', '.join(FORMATS)} (md)")


def main(args: argparse.Namespace) -> int:
    """Run the tool."""
    if text := note_ignored(args):
        note(text)
    todo = list(cases(args))
    if not todo:
        raise ParamError("-p 0 -n 0: nothing to run; legal: at least one test of -p, -n or -pg")
    others = {c.settings.backend for c in todo} - {"cpu"}
    if others and (args.noop or args.replace or args.profile):
        raise ParamError(f"backend {', '.join(sorted(others))}: --noop, --replace and --profile are for the cpu backend alone")
    with contextlib.closing(Bench(args)) as bench:
        if args.profile and args.output not in ("console", "md"):
            write_rows((r for group in grouped(todo) for r in bench.profiled(group)), PROFILE, args.output, sys.stdout, "profile")
        else:
            try:
                write_rows((r for group in grouped(todo) for r in bench.rows(group)), columns(todo, args), args.output, sys.stdout, "test")
            finally:
                for profile in bench.profiles:
                    show_profile(profile, args.output, sys.stdout)
        return int(bench.n_faults > 0)


class Bench:
    """Runs cases and makes their rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.models = Models()
        self.check = LogitsCheck()
        self.variants: list[Variant] = [*map(free_ops, args.noop or ()), *map(replaced_op, args.replace or ())]
        self.peer: Peer | None = find_peer(args.peer) if args.peer else None
        self.machine = describe()
        self.profiles: list[list[Row]] = []
        self.n_done = self.n_faults = 0
        self._noted: set[str] = set()

    def close(self) -> None:
        """End the peer."""
        if self.peer is not None:
            self.peer.close()

    def rows(self, group: Sequence[Case]) -> list[Row]:
        """The rows of cases that differ in form, chunk and its precision alone, which take turns: each as it is and in each variant, then the peer's."""
        if self.n_done:
            time.sleep(self.args.delay)
        self.n_done += 1
        first = group[0]
        if self.args.progress or sys.stderr.isatty():
            forms = ", ".join(dict.fromkeys(form_name(c.settings.mamba2) for c in group))
            note(f"bench: {self.n_done}: {first.name}, {forms}, ubatch {first.settings.n_ubatch}, {first.settings.threads} threads")
        model = self.models.get(first.settings)
        lanes = self._lanes(model, group)
        peer = self._peer_lane(model, first)
        found = take_turns([*lanes, *peer], self.args.repetitions, self.peer.settle if self.peer else lambda: None)
        rows = [self._row(lane, samples) for lane, samples in zip(lanes, found, strict=False)]
        for i, lane in enumerate(lanes):
            if lane.variant is None:
                n = sum(x.case is lane.case for x in lanes)
                self._compare(lanes[i:i + n], rows[i:i + n])
        if peer:
            rows.append(self._peer_row(first, peer[0].label, found[0][-1], found[-1]))
            for lane, row in zip(lanes, rows, strict=False):
                if row["median_ts"] and lane.variant is None:
                    row["vs_peer"] = row["median_ts"] / rows[-1]["median_ts"]
        for lane in lanes:
            lane.ctx.close()
        return rows

    def profiled(self, group: Sequence[Case]) -> list[Row]:
        """The rows of these cases' profiles alone."""
        n = len(self.profiles)
        self.rows(group)
        return [r for profile in self.profiles[n:] for r in profile]

    def _lanes(self, model: Model, group: Sequence[Case]) -> list[ModelLane]:
        """A lane per case and one per variant whose ops are in the case's graphs, warmed up."""
        lanes = []
        arena = SharedMemory()  # lanes run one at a time
        for case in group:
            for variant in (None, *self.variants):
                lane = ModelLane(model, case, arena, variant, self.args.warmup)
                compiled = STATS.seconds
                lane.warm_up()
                lane.compile_s = STATS.seconds - compiled
                if variant is None or lane.notes.n_swapped:
                    lanes.append(lane)
                else:
                    self._note_once(f"note: {variant.text}: left out of {case.name}, {form_name(case.settings.mamba2)}: no such op in its graphs")
        return lanes

    def _peer_lane(self, model: Model, case: Case) -> list[PeerLane]:
        if self.peer is None:
            return []
        lane = self.peer.lane(case, bench_tokens(model.n_vocab, case.n_depth + case.n_prompt + case.n_gen), self.args.warmup)
        lane.warm_up()
        return [lane]

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            note(text)

    def _row(self, lane: ModelLane, samples: Sequence[Sample]) -> Row:
        case, s = lane.case, lane.case.settings
        n_first = pieces(case.n_prompt, min(s.n_batch, s.n_ubatch))[0] if case.n_prompt else 1  # tokens of the first graph
        own: Row = {"type_r": s.type_r, "type_s": s.type_s, "prec": s.prec, "flash_attn": s.flash_attn}
        row = self._common(case, samples) | own | form_ran(lane.model, s, n_first, 1)
        memory = lane.ctx.memory_bytes()
        work = lane.notes.work
        row |= {"backend": s.backend, "variant": lane.variant and lane.variant.text, "n_nodes": work.n_nodes, "n_plans_timed": lane.plans_timed,
                "mem_weights": lane.model.nbytes, "mem_kv": memory["kv"], "mem_state": memory["state"], "mem_compute": memory["compute"],
                "memory": "/".join(f"{memory[k] / (1 << 20):.1f}" for k in ("kv", "state", "compute")), "build_commit": f"pyggml {__version__}",
                "compile_s": lane.compile_s, "plan_s": lane.ctx.timings.plan_seconds - lane.compile_s}
        if lane.variant is None:
            seconds = float(np.median([s.seconds for s in samples]))
            row |= {"gflops": work.flops / seconds / 1e9, "gbps": work.nbytes / seconds / 1e9}
            if self.args.ceiling and s.backend == "cpu":
                most = ceiling(work.nbytes / work.n_runs, lane.ctx.threads if not case.n_prompt else s.threads_batch)
                row |= {"gflops_share": work.flops / seconds / most.flops, "gbps_share": work.nbytes / seconds / most.bytes_per_second}
        how = " ".join([str(row["mamba2"]), *([f"chunk {row['chunk']}"] if row["chunk"] else []), *([row["ssd_precision"]] if row["ssd_precision"] else [])])
        row["rate"] = f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"
        if lane.plans_timed:
            note(f"note: {case.name}, {how}: {counted(lane.plans_timed, 'plan')} made inside the timed runs, as a context keeps {MAX_PLANS}; nothing compiled")
        if lane.variant is not None and lane.variant.free:
            return {**row, "check": "invalid by design"}
        row["logits_nmse"], fault = self.check.error(case, how, samples[-1].logits)
        row["check"] = fault or "ok"
        if fault is not None:
            self.n_faults += 1
            note(f"bench: {case.name}, {row['variant'] or how}: {fault}; no speed is reported")
            row |= {**dict.fromkeys(SPEEDS), "rate": "wrong"}
        return row

    def _common(self, case: Case, samples: Sequence[Sample]) -> Row:
        """What the rows of all engines hold."""
        s = case.settings
        found: Rates = rates([x.seconds for x in samples], case.n_prompt + case.n_gen)
        model = self.models.get(s)
        return {"test": case.name, "n_prompt": case.n_prompt, "n_gen": case.n_gen, "n_depth": case.n_depth, "model_filename": s.model,
                "model_type": f"{model.arch} {human_count(model.n_params).replace(' ', '')} {file_type(model)}", "model_size": model.nbytes,
                "model_n_params": model.n_params, "cpu_info": self.machine["cpu"], "n_batch": s.n_batch, "n_ubatch": s.n_ubatch,
                "n_threads": s.threads, "n_threads_batch": s.threads_batch, "type_k": s.type_k, "type_v": s.type_v,
                "test_time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "avg_ns": round(found.avg_ns), "stddev_ns": round(found.stddev_ns),
                "avg_ts": found.avg_ts, "stddev_ts": found.stddev_ts, "median_ts": found.median_ts, "spread": found.spread,
                "samples_ns": found.samples_ns, "samples_ts": found.samples_ts, "ttft_ms": float(np.median([x.first_seconds for x in samples])) * 1e3}

    def _compare(self, lanes: Sequence[ModelLane], rows: Sequence[Row]) -> None:
        """Swapped against base: how much faster, and for free ops what their share of the time foretold. The profile, when wanted."""
        base = rows[0]
        if not self.args.profile and len(lanes) == 1:
            return
        seconds, times = lanes[0].profiled(min(PROFILED_RUNS, self.args.repetitions))
        if self.args.profile:
            self.profiles.append(profile_rows(times, seconds, base))
        for lane, row in zip(lanes[1:], rows[1:], strict=True):
            assert lane.variant is not None
            part = op_share(times, lane.variant.stand_ins, seconds)
            row |= {"n_swapped": lane.notes.n_swapped, "op_share": part}
            if base["median_ts"] and row["median_ts"]:
                row["vs_base"] = row["median_ts"] / base["median_ts"]
            if lane.variant.free:
                row["amdahl"] = 1.0 / (1.0 - part)

    def _peer_row(self, case: Case, label: str, ours: Sample, samples: Sequence[Sample]) -> Row:
        row = self._common(case, samples) | {"backend": "llama.cpp", "build_commit": label, "type_r": "f32", "type_s": "f32"}
        row["rate"] = f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"
        return {**row, "logits_nmse": nmse(samples[-1].logits, ours.logits), "check": "not checked: logits_nmse is the distance from ours"}


def file_type(model: Model) -> str:
    """llama.cpp's name of a file's weight types: as the file says, else the type of most bytes."""
    names = {n: name for name, (_, n) in FILE_TYPES.items()}
    sizes: dict[str, int] = {}
    for t in model.file.tensors.values():
        sizes[t.dtype.name] = sizes.get(t.dtype.name, 0) + t.nbytes
    said = model.metadata.get("general.file_type")
    return names[said] if isinstance(said, int) and said in names else max(sizes, key=lambda k: sizes[k]).upper()


# As a table

SPEEDS = ("avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "median_ts", "spread", "samples_ns", "samples_ts", "ttft_ms", "gflops", "gbps", "gflops_share",
          "gbps_share")
FOR_PEOPLE = ("rate", "memory")  # columns that say again what others hold as numbers
COLUMNS = (
    Column("build_commit"), Column("build_number", int), Column("cpu_info"), Column("gpu_info"), Column("model_filename"), Column("model_type", str, "model"),
    Column("model_size", int, "size", human_bytes), Column("model_n_params", int, "params", human_count), Column("backend", str, "backend"),
    Column("n_threads", int, "threads"), Column("n_threads_batch", int), Column("n_batch", int), Column("n_ubatch", int), Column("type_k"), Column("type_v"),
    Column("type_r"), Column("type_s"), Column("prec"), Column("flash_attn"), Column("mamba2", str, "mamba2"), Column("chunk", int, "chunk"),
    Column("ssd_precision"), Column("n_nodes", int, "nodes"), Column("variant"), Column("test", str, "test"), Column("n_prompt", int), Column("n_gen", int),
    Column("n_depth", int), Column("test_time"), Column("avg_ns", int), Column("stddev_ns", int), Column("avg_ts", float), Column("stddev_ts", float),
    Column("samples_ns"), Column("samples_ts"), Column("rate", float, "t/s"), Column("median_ts", float, "median", number(".2f")),
    Column("spread", float, "spread", number(".0%")), Column("vs_base", float), Column("op_share", float), Column("amdahl", float), Column("vs_peer", float),
    Column("n_swapped", int), Column("gflops", float), Column("gbps", float), Column("gflops_share", float, "of FLOPS", number(".0%")),
    Column("gbps_share", float, "of GB/s", number(".0%")), Column("ttft_ms", float, "TTFT ms", number(".1f")), Column("mem_weights", int),
    Column("mem_kv", int), Column("mem_state", int), Column("mem_compute", int), Column("memory", str, "KV/state/compute MiB"), Column("compile_s", float),
    Column("plan_s", float), Column("n_plans_timed", int), Column("logits_nmse", float), Column("check"),
)
# Shown in tables when they differ between tests or from what they are by default, as in llama-bench.
VARIED: dict[str, tuple[str, Callable[[Case], Any], Any]] = {
    "n_threads_batch": ("threads_batch", lambda c: c.settings.threads_batch - c.settings.threads, 0),
    "n_batch": ("n_batch", lambda c: c.settings.n_batch, 2048), "n_ubatch": ("n_ubatch", lambda c: c.settings.n_ubatch, 512),
    "type_k": ("type_k", lambda c: c.settings.type_k, "f16"), "type_v": ("type_v", lambda c: c.settings.type_v, "f16"),
    "type_r": ("type_r", lambda c: c.settings.type_r, "f32"), "type_s": ("type_s", lambda c: c.settings.type_s, "f32"),
    "prec": ("prec", lambda c: c.settings.prec, "auto"), "ssd_precision": ("ssd prec", lambda c: c.settings.ssd_precision, "f32"),
    "flash_attn": ("fa", lambda c: c.settings.flash_attn, "auto"),
}


def columns(todo: Sequence[Case], args: argparse.Namespace) -> list[Column]:
    """The columns of all rows; headings for those that this bench has something to show in."""
    heads: dict[str, tuple[str, Callable[[Any], str] | None]] = {}
    for name, (head, get, usual) in VARIED.items():
        if {get(c) for c in todo} - {usual}:
            heads[name] = (head, None)
    if args.noop or args.replace:
        heads |= {"variant": ("variant", None), "vs_base": ("x base", number(".2f")), "op_share": ("op share", number(".0%"))}
    if args.noop:
        heads["amdahl"] = ("Amdahl", number(".2f"))
    if args.peer:
        heads["vs_peer"] = ("x peer", number(".2f"))
    if not args.ceiling:
        heads |= {"gflops_share": ("", None), "gbps_share": ("", None)}
    if all(c.settings.mamba2 == "scan" for c in todo):
        heads["chunk"] = ("", None)
    people = args.output in ("console", "md")
    return [c if c.name not in heads else c._replace(head=heads[c.name][0], text=heads[c.name][1] or c.text)
            for c in COLUMNS if people or c.name not in FOR_PEOPLE]
