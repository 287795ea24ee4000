"""What the cases of the ops leave out: ops without cases, kernels that none of them runs, checks of rules that no refused call meets."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyggml.backends import open_backend
from pyggml.cases import ErrorCase, cases_of, errors_of
from pyggml.errors import KernelError, PyggmlError
from pyggml.graph import Graph
from pyggml.guards import stored_values
from pyggml.registry import KernelDef, OpDef, choose_kernel, load_kernels

CHECKS = ("require", "require_type")


@dataclass(frozen=True, slots=True)
class Hole:
    """Something that no case reaches: `kind` is op, kernel, error or refusal."""

    kind: str
    name: str
    what: str


@dataclass(slots=True)
class Coverage:
    """Counts of what there is, and the holes."""

    n_ops: int
    n_kernels: int
    n_checks: int
    holes: list[Hole]


def coverage(ops: Sequence[OpDef]) -> Coverage:
    """Check every op, every kernel of the CPU backend and every check in the files that declare the ops."""
    load_kernels("cpu")
    holes = [Hole("op", d.name, what) for d in ops for what in _missing(d)]
    n_kernels, unused = _kernels(ops)
    sites = {site for path in {Path(d.rule.__code__.co_filename) for d in ops} for site in checks_in(path)}
    raised: set[tuple[str, int]] = set()
    for d in ops:
        for e in errors_of(d):
            why, lines = refusal(e)
            raised |= lines
            if why:
                holes.append(Hole("refusal", str(e), why))
    unmet = sorted(s for s in sites if not any((s.path, line) in raised for line in range(s.first, s.last + 1)))
    holes += [*unused, *(Hole("check", f"{_short(s.path)}:{s.first}", s.text) for s in unmet)]
    return Coverage(len(ops), n_kernels, len(sites), holes)


def _missing(d: OpDef) -> Iterator[str]:
    if not any(not c.large for c in cases_of(d)):
        yield "has no cases"
    if d.random_fn is None:
        yield "has no drawer of random cases"
    if not d.view and not d.has_reference:
        yield "has no reference"


def _kernels(ops: Iterable[OpDef]) -> tuple[int, list[Hole]]:
    """Number of registered CPU kernels, and those that no tested case chooses, on whatever CPU: one with the features that some kernel needs."""
    n, holes = 0, []
    for d in ops:
        kernels = d.kernels.get("cpu", [])
        cpus = {frozenset(k.options.get("needs", ())) for k in kernels}
        nodes = [c.node() for c in cases_of(d) if not c.large] if kernels else []
        run = {id(choose_kernel(node, "cpu", _lacks(has))[0]) for node in nodes for has in cpus}
        n += len(kernels)
        holes += [Hole("kernel", k.name, f"{d.name}: no case runs it") for k in kernels if id(k) not in run]
    return n, holes


def _lacks(features: frozenset[str]) -> Callable[[KernelDef], str | None]:
    """Why a CPU with these features alone does not take a kernel."""
    return lambda k: None if features.issuperset(k.options.get("needs", ())) else "its CPU lacks features"


# Checks

@dataclass(frozen=True, slots=True, order=True)
class Check:
    """A place that can refuse a call: a file and its lines."""

    path: str
    first: int
    last: int
    text: str


def checks_in(path: Path) -> Iterator[Check]:
    """The `raise` statements of a file and its calls of `require`, `require_type` and of functions named `_require...`."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Raise() if node.exc is not None:
                yield Check(str(path), node.lineno, node.end_lineno or node.lineno, ast.unparse(node)[:100])
            case ast.Call(func=ast.Name(id=name)) if name in CHECKS or name.startswith("_require"):
                yield Check(str(path), node.lineno, node.end_lineno or node.lineno, ast.unparse(node)[:100])


def refusal(e: ErrorCase) -> tuple[str, set[tuple[str, int]]]:
    """Make a refused call: what is wrong with how it ended ("": nothing), and the lines that its error passed through."""
    try:
        case = e.as_case()
        ins, outs = case.build()
        if e.error is not KernelError:
            return "the call was accepted", set()
        runner = open_backend("reference").compile(Graph(outs))
        for t, value in zip(ins, stored_values(case), strict=True):
            if t is not None and value is not None:
                runner.set(t, value)
        runner.run()
        return "the run ended well", set()
    except PyggmlError as error:
        lines = {(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)}
        if type(error) is not e.error or e.match not in str(error) or "\n" in str(error):
            return f"it ended in {type(error).__name__}: {error}", lines
        return "", lines


def _short(path: str) -> str:
    parts = Path(path).parts
    return "/".join(parts[parts.index("pyggml"):]) if "pyggml" in parts else path
