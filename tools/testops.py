"""`pyggml test-ops`: every case of every op on backends against the reference, its speed, what is supported, and what no case reaches.

Modes, options and case strings are those of llama.cpp's test-backend-ops; a case string that it or this tool prints can be given to -o.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import __version__
from pyggml.backends import NAMES, Backend
from pyggml.cases import Case, Leaf, RandomDraw, cases_of, random_case
from pyggml.casetext import from_json, parse_case, split_list, to_json
from pyggml.cpu.level import describe
from pyggml.errors import ParamError, PyggmlError
from pyggml.graph import Graph
from pyggml.guards import THREADS, Verdict, check_case, guarded_backends
from pyggml.registry import OpDef, all_ops, find_op, load_ops
from pyggml.testing import compile_cases
from pyggml.tools.common import chunk, form, note, read_text, whole
from pyggml.tools.opcoverage import coverage
from pyggml.tools.opdocs import SUPPORT_COLUMNS, doc_files, support_rows, write_docs
from pyggml.tools.opperf import RUN_COLUMNS, beside, beside_columns, perf_backends, perf_rows
from pyggml.tools.records import FORMATS, Column, Row, write_rows

MODES = ("test", "perf", "support", "coverage")
DOC_BACKENDS = ("cpu", "ggml")
COVERAGE_COLUMNS = (Column("kind", head="hole"), Column("name", head="where"), Column("what", head="what"))


def options(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.add_argument("mode", nargs="?", default="test", choices=MODES, help="test: compare with the reference; perf: time; support: who takes what; "
                   "coverage: what no case reaches (test)")
    p.add_argument("-o", "--op", type=selection, action="extend", default=[], metavar="OP[,OP]", help="these ops, or cases by their full strings")
    p.add_argument("-p", "--params", type=regex, metavar="REGEX", help="only cases whose string matches")
    p.add_argument("-b", "--backend", type=backend_names, default=["cpu"], metavar="NAME[,NAME]", help="cpu, reference, ggml (cpu)")
    p.add_argument("-t", "--threads", type=whole(1, 256), metavar="N", help=f"threads (test: {', '.join(map(str, THREADS))}, "
                   "which must give equal bits; perf: all cores)")
    p.add_argument("--seed", type=whole(0), default=0, metavar="N", help="seed of the data, with each case's string (0)")
    p.add_argument("--large", action="store_true", help="also test the cases that take more than a moment in float64")
    p.add_argument("-v", "--verbose", action="store_true", help="a line for each case that is tested")
    p.add_argument("--output", choices=FORMATS, default="console", metavar="FORMAT", help=f"{', '.join(FORMATS)} (console)")
    source = p.add_mutually_exclusive_group()
    source.add_argument("--random", type=whole(1), metavar="N", help="N random cases of each family instead of the listed ones")
    source.add_argument("--from", dest="from_file", metavar="FILE", help="cases of a file that --export wrote")
    source.add_argument("--from-model", metavar="FILE", help="the cases that a model's own graph is made of")
    p.add_argument("-ub", "--ubatch-size", type=whole(1), default=512, metavar="N", help="tokens of the model's graph (512)")
    p.add_argument("--mamba2", type=form, default="ssd", metavar="FORM", help="form of its Mamba2 layers: scan, ssd, ssd-fused, or a function of yours (ssd)")
    p.add_argument("--chunk", type=chunk, metavar="N|none", help="tokens per chunk of the ssd forms")
    p.add_argument("--export", metavar="FILE", help="write the cases, one JSON object a line, and run none (-: stdout)")
    p.add_argument("--load", action="append", default=[], metavar="FILE.py", help="first run a script that registers ops or kernels of your own")
    p.add_argument("--write-docs", metavar="DIR", help="support: write ops.md and ops/BACKEND.csv below DIR, for all backends and ops")
    p.add_argument("--list-ops", action="store_true", help="list the ops, with the number of their cases")


def selection(text: str) -> list[str]:
    """An argparse type: the items of a list of names and case strings."""
    return [item.strip() for item in split_list(text)]


def regex(text: str) -> re.Pattern[str]:
    """An argparse type."""
    try:
        return re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {e}") from None


def backend_names(text: str) -> list[str]:
    """An argparse type: names of backends that compute."""
    legal = [n for n in NAMES if n != "null"]
    found = text.split(",")
    for name in found:
        if name not in legal:
            raise argparse.ArgumentTypeError(f"{name!r}; legal: {', '.join(legal)}")
    return found


def main(args: argparse.Namespace) -> int:
    """Run the tool."""
    load_ops()
    for script in args.load:
        runpy.run_path(script)
    if args.list_ops:
        for d in all_ops():
            print(f"{d.name:<18} {d.family:<11} {len(d.all_cases())} cases")
        return 0
    if args.write_docs is not None:
        return docs_mode(args)
    try:
        named = [parse_case(item) if "(" in item else find_op(item) for item in args.op]
    except PyggmlError as e:
        note(f"pyggml test-ops: -o: {e}")
        return 2
    if args.mode == "coverage":
        return coverage_mode(args, [x for x in named if isinstance(x, OpDef)])
    cases = select(args, named)
    if args.export is not None:
        return export(cases, args.export)
    if args.mode == "support":
        return support_mode(args, cases)
    if args.mode == "perf":
        return perf_mode(args, cases)
    return test_mode(args, cases, {str(x) for x in named if isinstance(x, Case)})


# Cases


def select(args: argparse.Namespace, named: Sequence[OpDef | Case]) -> list[Case]:
    """The cases that are asked for; ParamError when there are none."""
    ops = [x for x in named if isinstance(x, OpDef)]
    single = [x for x in named if isinstance(x, Case)]
    found = single + ([c for c in source(args, ops or all_ops()) if not ops or c.op in ops] if ops or not single else [])
    if args.params is not None:
        found = [c for c in found if args.params.search(str(c))]
    if args.mode == "perf" and not (args.random or args.from_file or args.from_model):
        found = [c for c in found if c.perf or c in single]
    if not found:
        raise ParamError(f"no case matches{''.join(f' -o {x}' for x in args.op)}{f' -p {args.params.pattern}' if args.params else ''}")
    order = {d.name: i for i, d in enumerate(all_ops())}
    return sorted(found, key=lambda c: order[c.op.name])


def source(args: argparse.Namespace, ops: Sequence[OpDef]) -> Iterable[Case]:
    """Where cases come from: the ops' lists, chance, a file or a model."""
    if args.random:
        return random_cases(ops, args.random, args.seed)
    if args.from_file is not None:
        return list(from_json(read_text(args.from_file, "--from").splitlines(), args.from_file))
    if args.from_model is not None:
        return model_cases(args.from_model, args.ubatch_size, args.mamba2, args.chunk)
    return [c for d in ops for c in cases_of(d)]


def random_cases(ops: Iterable[OpDef], n: int, seed: int) -> Iterator[Case]:
    """n random cases of each family, dealt to its ops in turn; the same for the same seed."""
    families: dict[str, list[OpDef]] = {}
    for d in ops:
        if d.random_fn is not None:
            families.setdefault(d.family, []).append(d)
    for family, members in families.items():
        draw = RandomDraw(np.random.default_rng([seed, *family.encode()]))
        for i in range(n):
            yield random_case(members[i % len(members)], draw)


def model_cases(path: str, n_tokens: int, mamba2: Any, chunk_size: int | str | None) -> list[Case]:
    """The different cases of a model's graph."""
    from pyggml.models import load_model
    model = load_model(path)
    try:
        return graph_cases(model.graph(n_tokens, mamba2=mamba2, chunk=chunk_size), f"{Path(path).stem} -ub {n_tokens}")
    finally:
        model.close()


def graph_cases(graph: Graph, text: str) -> list[Case]:
    """The ops of a graph as cases, each once: types, dims and strides of their inputs, and attributes. Views run no kernel and are left out."""
    found: dict[str, Case] = {}
    for node in graph.nodes:
        if not node.op.view:
            inputs = tuple(None if t is None else Leaf(t.dtype, t.ne, None if t.is_contiguous else t.nb) for t in node.src)
            c = Case(node.op, inputs, dict(node.params), text)
            found.setdefault(str(c), c)
    return list(found.values())


def export(cases: Sequence[Case], path: str) -> int:
    """Write a case file."""
    lines = "".join(f"{line}\n" for line in to_json(cases))
    if path == "-":
        print(lines, end="")
        return 0
    try:
        Path(path).write_text(lines, encoding="utf-8")
    except OSError as e:
        raise ParamError(f"--export {path}: {e.strerror}") from None
    note(f"{len(cases)} cases written to {path}")
    return 0


# Modes


def machine() -> str:
    """The machine in one line."""
    m = describe()
    return f"{m['cpu']}, {m['cores']} cores, level {m['level']}"


@dataclass(slots=True)
class Tally:
    """Counts of one op on one backend, and the case that came nearest to its limit."""

    n: int = 0
    failed: int = 0
    skipped: int = 0
    worst: Verdict | None = None

    def add(self, v: Verdict) -> None:
        """Count a verdict."""
        self.n += 1
        self.failed += bool(v.faults)
        self.skipped += bool(v.skipped)
        if not v.skipped and (self.worst is None or _ratio(v) > _ratio(self.worst)):
            self.worst = v

    def cells(self) -> tuple[str, str, str]:
        """Result, worst NMSE and its limit."""
        ran = self.n - self.skipped
        result = f"{self.failed} FAILED" if self.failed else "ok" if ran else "-"
        left_out = f", {self.skipped} skipped" if self.skipped else ""
        worst = (f"{self.worst.nmse:.1e}", f"{self.worst.limit:.0e}") if self.worst is not None else ("", "")
        return result + left_out, *worst


def _op_line(name: str, n: str, cells: Sequence[tuple[str, str, str]]) -> str:
    """A line of the console: op, number of cases, and per backend result, worst NMSE and limit."""
    return f"{name:<18}{n:>5}".ljust(24) + "".join(f"  {result:<16}{nmse:>8}{limit:>7}" for result, nmse, limit in cells).rstrip()


def _ratio(v: Verdict) -> float:
    return v.nmse / v.limit if v.limit > 0 else v.nmse * 1e300


def test_mode(args: argparse.Namespace, cases: Sequence[Case], explicit: set[str]) -> int:
    """Compare with the reference, guarded. Cases named in full are tested whatever their size."""
    chosen = [c for c in cases if args.large or str(c) in explicit or not c.large]
    if not chosen:
        raise ParamError(f"all {len(cases)} cases that match are large; --large tests them")
    if "cpu" in args.backend:
        compile_cases(chosen)
    threads = THREADS if args.threads is None else (args.threads,)
    backends = {name: guarded_backends(name, threads) if name == "cpu" else perf_backends([name], args.threads) for name in args.backend}
    report = Report(args, chosen)
    if args.output == "console":
        for _ in test_rows(chosen, backends, args, report):
            pass
    else:
        write_rows(test_rows(chosen, backends, args, report), RUN_COLUMNS, args.output, sys.stdout, "test_ops")
    report.end(len(cases) - len(chosen))
    return 1 if report.failures else 0


def test_rows(cases: Sequence[Case], backends: dict[str, list[Backend]], args: argparse.Namespace, report: Report) -> Iterator[Row]:
    """A row per case and backend."""
    where = machine()
    for i, c in enumerate(cases):
        for name, group in backends.items():
            try:
                v = check_case(c, group, args.seed)
            except PyggmlError as e:  # the case itself cannot be built or computed
                v = Verdict(0.0, faults=[f"{type(e).__name__}: {e}"])
            report.add(name, c, v)
            yield {"mode": "test", "op": c.op.name, "case": str(c), "backend": name, "supported": not v.skipped, "passed": not v.faults and not v.skipped,
                   "reason": v.skipped or "; ".join(v.faults), "nmse": None if v.skipped else v.nmse, "limit": v.limit, "kernel": v.kernel,
                   "threads": args.threads, "seed": args.seed, "machine": where, "version": __version__}
        if i + 1 == len(cases) or cases[i + 1].op is not c.op:
            report.op_done(c.op)


class Report:
    """What a person reads of a test run: on stdout in console form, else the failures on stderr."""

    def __init__(self, args: argparse.Namespace, cases: Sequence[Case]) -> None:
        self.args = args
        self.console = args.output == "console"
        self.start = time.perf_counter()
        self.tallies: dict[str, Tally] = {b: Tally() for b in args.backend}
        self.totals: dict[str, Tally] = {b: Tally() for b in args.backend}
        self.failures: list[str] = []
        self.n_printed = 0  # of the failures
        self.ops: set[str] = set()
        if self.console:
            threads = ", ".join(map(str, THREADS if args.threads is None else (args.threads,)))
            print(f"machine  {machine()}")
            print(f"seed {args.seed}; threads {threads}; {len(cases)} case{'s' * (len(cases) != 1)}\n")
            print(_op_line("op", "cases", [(b, "NMSE", "limit") for b in args.backend]))

    def add(self, backend: str, c: Case, v: Verdict) -> None:
        """Count a case."""
        self.tallies[backend].add(v)
        self.totals[backend].add(v)
        if self.args.verbose and self.console:
            state = "FAIL" if v.faults else "skip" if v.skipped else "ok"
            print(f"  {state:<4} {'' if v.skipped else f'{v.nmse:.1e}':<8} {backend:<9} {c}{f': {v.skipped}' if v.skipped else ''}", flush=True)
        if v.faults:
            self.failures.append(f"FAIL {c} on {backend}: {'; '.join(v.faults)}")

    def op_done(self, d: OpDef) -> None:
        """Print the line of an op, and its failures."""
        self.ops.add(d.name)
        if self.console:
            n = max(t.n for t in self.tallies.values())
            print(_op_line(d.name, str(n), [t.cells() for t in self.tallies.values()]), flush=True)
        for line in self.failures[self.n_printed:]:
            print(f"  {line}" if self.console else line, file=sys.stdout if self.console else sys.stderr, flush=True)
        self.n_printed = len(self.failures)
        self.tallies = {b: Tally() for b in self.tallies}

    def end(self, n_large: int) -> None:
        """Print the last lines."""
        seconds = time.perf_counter() - self.start
        lines = [f"{b}: {t.n - t.failed - t.skipped} passed, {t.failed} failed, {t.skipped} skipped" for b, t in self.totals.items()]
        large = f"; {n_large} large cases left out (--large tests them)" if n_large else ""
        text = f"{len(self.ops)} op{'s' * (len(self.ops) != 1)} in {seconds:.1f} s{large}"
        if self.console:
            print("\n" + "\n".join([*lines, text]))
            if self.failures:
                print(f"repeat one with: pyggml test-ops{f' --seed {self.args.seed}' if self.args.seed else ''} -o 'CASE'")
        else:
            note("; ".join([*lines, text]))


def perf_mode(args: argparse.Namespace, cases: Sequence[Case]) -> int:
    """Time cases."""
    if "cpu" in args.backend:
        compile_cases(cases)
    backends = perf_backends(args.backend, args.threads)
    where = machine()
    rows: list[Row] = []

    def kept() -> Iterator[Row]:
        for row in perf_rows(cases, backends, args.seed):
            rows.append({**row, "machine": where, "version": __version__})
            yield rows[-1]

    if args.output in ("console", "md"):
        for i, _ in enumerate(kept()):
            progress(i + 1, len(cases) * len(backends))
        columns: Sequence[Column] = RUN_COLUMNS if len(backends) == 1 else beside_columns([b.name for b in backends])
        print(f"pyggml {__version__} on {where}; {backends[0].name}: {getattr(backends[0], 'threads', 1)} threads\n")
        write_rows(rows if len(backends) == 1 else beside(rows), columns, args.output, sys.stdout)
    else:
        write_rows(kept(), RUN_COLUMNS, args.output, sys.stdout, "test_ops")
    return 1 if any(r.get("passed") is False for r in rows) else 0


def progress(done: int, total: int) -> None:
    """One line on a terminal's stderr, rewritten in place."""
    if sys.stderr.isatty():
        print(f"\rtimed {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def support_mode(args: argparse.Namespace, cases: Sequence[Case]) -> int:
    """Say which backend takes which case, and why not."""
    backends = perf_backends(args.backend, args.threads)
    if args.output not in ("console", "md"):
        write_rows(support_rows(cases, backends), SUPPORT_COLUMNS, args.output, sys.stdout, "test_ops")
        return 0
    found: dict[tuple[str, str], dict[str, int]] = {}
    for r in support_rows(cases, backends):
        reasons = found.setdefault((r["op"], r["backend"]), {})
        reasons[r["reason"]] = reasons.get(r["reason"], 0) + 1
    columns = (Column("op", head="op"), Column("backend", head="backend"), Column("cases", int, "cases"), Column("taken", int, "taken"),
               Column("why", head="why not"))
    rows = [{"op": o, "backend": b, "cases": sum(reasons.values()), "taken": reasons.get("", 0),
             "why": "; ".join(f"{text} ({n})" for text, n in reasons.items() if text)} for (o, b), reasons in found.items()]
    write_rows(rows, columns, args.output, sys.stdout)
    return 0


def docs_mode(args: argparse.Namespace) -> int:
    """Write the support tables of all backends that are installed."""
    files = doc_files(all_ops(), perf_backends(DOC_BACKENDS, 1))
    changed = write_docs(Path(args.write_docs), files)
    note("\n".join(f"wrote {p}" for p in changed) or f"{len(files)} files below {args.write_docs} are current")
    return 0


def coverage_mode(args: argparse.Namespace, ops: Sequence[OpDef]) -> int:
    """List what no case reaches."""
    found = coverage(ops or all_ops())
    rows = [{"kind": h.kind, "name": h.name, "what": h.what} for h in found.holes]
    if args.output != "console":
        write_rows(rows, COVERAGE_COLUMNS, args.output, sys.stdout, "coverage")
        return 1 if rows else 0
    count = {k: sum(h.kind == k for h in found.holes) for k in ("op", "kernel", "check", "refusal")}
    print(f"ops      {found.n_ops}" + (f", with {count['op']} holes" if count["op"] else ": each has cases, a reference and a drawer of random cases"))
    print(f"kernels  {found.n_kernels - count['kernel']} of {found.n_kernels} are run by a case")
    print(f"checks   {found.n_checks - count['check']} of {found.n_checks} in rules and references are met by a refused call")
    if rows:
        print()
        write_rows(rows, COVERAGE_COLUMNS, "console", sys.stdout)
    return 1 if rows else 0
