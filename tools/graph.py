"""`pyggml graph`: what a model's graph is made of and what it costs, without running it: nodes by op and by part of a layer, FLOPs, bytes,
plan memory, fusion groups; two forms side by side; drawings."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyggml.backends.cpu import CpuBackend
from pyggml.errors import ParamError
from pyggml.graph import Graph
from pyggml.models import Model
from pyggml.models.layers import PARTS, SSM
from pyggml.models.ssd import chunk_size
from pyggml.plan import Plan, Step, storage_bytes
from pyggml.registry import default_bytes
from pyggml.tensor import Node, Tensor
from pyggml.tools.common import chunk, form, form_name, human_bytes, human_count, model_options, numbers, open_model, whole
from pyggml.tools.records import FORMATS, Column, Row, write_rows

Form = str | Callable[..., Any]
COLOURS = ("#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5", "#d9d9d9", "#bc80bd", "#ccebc5", "#ffed6f")


def options(p: argparse.ArgumentParser) -> None:
    """Options."""
    model_options(p)
    p.add_argument("--mamba2", type=form, default="ssd", metavar="FORM", help="form of the Mamba2 layers: scan, ssd, ssd-fused, FILE.py:FUNCTION (ssd)")
    p.add_argument("--compare", type=forms, metavar="FORM,FORM", help="forms to lay side by side, such as scan,ssd")
    p.add_argument("--chunk", type=chunk, metavar="N|none", help="tokens per chunk of the ssd graph (default: by a limit on plan memory)")
    p.add_argument("-ub", "--ubatch-size", type=whole(1), default=512, metavar="N", help="tokens of the graph that the tables describe (512)")
    p.add_argument("--tokens", type=numbers(1), default=[1, 64, 512, 4096], metavar="N,N", help="tokens per graph in the overview (1,64,512,4096)")
    p.add_argument("-np", "--parallel", type=whole(1), default=1, metavar="N", help="sequences in the graph, which share its tokens evenly (1)")
    p.add_argument("--no-fuse", dest="fuse", action="store_false", help="plan without fusion")
    p.add_argument("--layer", type=numbers(0), metavar="N,N", help="layers to draw or list (all)")
    p.add_argument("-o", "--output", choices=FORMATS, default="console", metavar="FORMAT",
                   help=f"{', '.join(FORMATS)}; all but console and md hold the overview, or with --nodes the nodes, alone (console)")
    shape = p.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="everything as one JSON object, the nodes too")
    shape.add_argument("--nodes", action="store_true", help="list the nodes")
    shape.add_argument("--dot", action="store_true", help="the graph in Graphviz's language")
    shape.add_argument("--svg", metavar="FILE", help="draw it with Graphviz's program dot")


def forms(text: str) -> list[Form]:
    """An argparse type: forms separated by commas."""
    return [form(x) for x in text.split(",")]


def main(args: argparse.Namespace) -> int:
    """Run the tool."""
    model = open_model(args)
    many = args.compare or [args.mamba2]
    if args.nodes or args.dot or args.svg:
        graph = build(model, many[0], args.ubatch_size, args).graph
        chosen = in_layers(graph, args.layer)
        if args.nodes:
            write_rows((r for n, r in zip(graph.nodes, graph.records(), strict=True) if n in chosen), NODES, args.output, sys.stdout, "nodes")
        elif args.dot:
            print(dot(chosen))
        else:
            draw(dot(chosen), args.svg)
        return 0
    counts = sorted({*args.tokens, args.ubatch_size})
    by_form = [[build(model, f, n, args) for n in counts] for f in many]
    detail = [reports[counts.index(args.ubatch_size)] for reports in by_form]
    if args.json:
        print(json.dumps(as_json(model, by_form, detail), default=str, allow_nan=False))
    elif args.output in ("console", "md"):
        show(model, by_form, detail, args.output)
    else:
        write_rows((r.overview() for reports in by_form for r in reports), OVERVIEW, args.output, sys.stdout, "graphs")
    return 0


def in_layers(graph: Graph, layers: list[int] | None) -> list[Node]:
    """The nodes of these layers, or all."""
    found = [n for n in graph.nodes if layers is None or n.layer in layers]
    if not found:
        known = sorted({n.layer for n in graph.nodes if n.layer is not None})
        raise ParamError(f"--layer {','.join(map(str, layers or []))}: the graph has no such layer; legal: {known[0]} to {known[-1]}")
    return found


# What there is to know

@dataclass(slots=True)
class Report:
    """A graph of one form for one number of tokens, and its plan."""

    form: str
    chunk: int | None
    n_tokens: int
    n_seqs: int
    graph: Graph
    plan: Plan

    @property
    def steps(self) -> list[Step]:
        """The plan's steps that compute nodes; what kernels have made of their inputs beforehand is not a node's work."""
        return [s for s in self.plan.steps if s.outs and s.outs[0].node is not None]

    def overview(self) -> Row:
        """Counts and costs of the whole graph. `bytes` must move when every node runs alone, `bytes_fused` when the plan's steps do;
        `plan_bytes` is the arena without the caches and states, which live outside of it."""
        s = self.graph.stats()
        outside = sum(storage_bytes(t.root) for t in self.graph.inputs if t.name.startswith("cache_"))
        return {"form": self.form, "chunk": self.chunk, "n_tokens": self.n_tokens, "n_seqs": self.n_seqs, "n_nodes": s.n_nodes, "n_moves": s.n_moves,
                "moves_share": round(s.moves_share, 4), "n_steps": len(self.steps), "n_groups": sum(len(x.nodes) > 1 for x in self.steps),
                "flops": s.flops, "bytes": s.nbytes, "bytes_fused": sum(step_bytes(x) for x in self.steps),
                "plan_bytes": self.plan.arena_bytes - outside, "scratch_bytes": self.plan.scratch_bytes}

    def parts(self) -> list[Row]:
        """One row per part of a layer: layers that have it, nodes, steps, costs. A step counts where its last node does."""
        return sorted(self._rows("part", lambda n: n.part or "other"), key=lambda r: part_order(r["part"]))

    def ops(self) -> list[Row]:
        """One row per op, the most frequent first."""
        return sorted(self._rows("op", lambda n: n.op.name), key=lambda r: (-r["n_nodes"], r["op"]))

    def _rows(self, what: str, key: Callable[[Node], str]) -> list[Row]:
        total = self.overview()
        rows: dict[str, Row] = {}
        for n in self.graph.nodes:
            r = rows.setdefault(key(n), {what: key(n), "layers": set(), "n_nodes": 0, "n_moves": 0, "n_steps": 0, "flops": 0.0, "bytes_fused": 0.0})
            r["layers"].add(n.layer)
            r["n_nodes"] += 1
            r["n_moves"] += n.op.moves_data
            r["flops"] += n.op.cost_of(n).flops
        for step in self.steps:
            r = rows[key(step.nodes[-1])]
            r["n_steps"] += 1
            r["bytes_fused"] += step_bytes(step)
        for r in rows.values():
            r["layers"] = len(r["layers"] - {None})
            r["flops_share"] = r["flops"] / (total["flops"] or 1)
            r["bytes_share"] = r["bytes_fused"] / (total["bytes_fused"] or 1)
        return list(rows.values())

    def groups(self) -> list[Row]:
        """One row per kind of fusion group or region: its ops in order, how many there are, in which parts."""
        kinds: dict[str, list[Step]] = {}
        for step in self.steps:
            if len(step.nodes) > 1:
                kinds.setdefault(step_ops(step), []).append(step)
        return [{"n": len(steps), "ops": k, "parts": ", ".join(sorted({s.nodes[-1].part or "other" for s in steps}))}
                for k, steps in sorted(kinds.items(), key=lambda x: -len(x[1]))]

    def largest(self, n: int = 5) -> list[Row]:
        """The tensors that take most of the plan's memory."""
        made = {id(t.root): t.root for step in self.steps for t in step.outs}
        stored = sorted(((storage_bytes(t), t, t.node) for t in made.values() if t.node is not None), key=lambda x: -x[0])
        return [{"bytes": size, "name": t.name, "shape": _shape(t), "part": node.part} for size, t, node in stored[:n]]


def part_order(part: str) -> int:
    """Place of a part in tables: as in a layer, unknown ones last."""
    return PARTS.index(part) if part in PARTS else len(PARTS)


def step_ops(step: Step) -> str:
    """A step's ops: A + B for a chain, strips(A, B + C) for a region."""
    return f"strips({', '.join(map(step_ops, step.inside))})" if step.inside else " + ".join(n.op.name for n in step.nodes)


def step_bytes(step: Step) -> float:
    """Bytes that a step moves: the node's own count, or for a chain, a region or what prepares an input each tensor that comes in or goes out, once."""
    if not step.inside and not step.prepares and (len(step.nodes) == 1 or step.nodes[-1].op.pointwise is None):
        return step.nodes[-1].op.cost_of(step.nodes[-1]).nbytes
    node = Node(step.nodes[-1].op, tuple(step.ins), {})
    node.outputs = tuple(step.outs)
    return default_bytes(node)


def build(model: Model, f: Form, n_tokens: int, args: argparse.Namespace) -> Report:
    """The graph of a ubatch of about n_tokens tokens in one form, planned for the CPU; nothing is compiled or computed."""
    n = max(n_tokens // args.parallel, 1)
    graph = model.graph(n, args.parallel, mamba2=f, chunk=args.chunk)
    q = None
    if model.form_for(f, n) == "ssd" and model.has_recurrent_state:
        q = chunk_size(args.chunk, n, args.parallel, SSM(model.hparams).n_head)
    return Report(form_name(f), q, n * args.parallel, args.parallel, graph, CpuBackend(threads=1, fuse=args.fuse).plan(graph))


# As text

def some(text: Callable[[Any], str]) -> Callable[[Any], str]:
    """How a value is shown, with - for nothing and for zero."""
    return lambda value: text(value) if value else "-"


def human_flops(n: float) -> str:
    """1.5e9 -> 1.50 G."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f}"


def percent(x: float) -> str:
    """0.125 -> 12.5 %."""
    return f"{100 * x:.1f} %"


def dims(ne: Sequence[int]) -> str:
    """ne as it is printed."""
    return f"[{', '.join(map(str, ne))}]"


OVERVIEW = (Column("form", str, "form"), Column("chunk", int, "chunk", some(str)), Column("n_tokens", int, "tokens"), Column("n_seqs", int),
            Column("n_nodes", int, "nodes"), Column("n_moves", int), Column("moves_share", float, "only move", lambda x: f"{100 * x:.0f} %"),
            Column("n_steps", int, "steps"), Column("n_groups", int, "groups"), Column("flops", float, "FLOP", human_flops),
            Column("bytes", float, "bytes", human_bytes), Column("bytes_fused", float, "fused", human_bytes),
            Column("plan_bytes", int, "plan memory", human_bytes), Column("scratch_bytes", int))
COSTS = (Column("flops", float, "FLOP", some(human_flops)), Column("flops_share", float, "share", some(percent)),
         Column("bytes_fused", float, "bytes", some(human_bytes)), Column("bytes_share", float, "share", some(percent)))
COUNTS = (Column("n_nodes", int, "nodes"), Column("n_moves", int, "only move", some(str)), Column("n_steps", int, "steps", some(str)))
PART = (Column("part", str, "part"), Column("layers", int, "layers", some(str)), *COUNTS, *COSTS)
OP = (Column("op", str, "op"), *COUNTS, *COSTS)
GROUP = (Column("n", int, "n"), Column("ops", str, "ops"), Column("parts", str, "in"))
LARGEST = (Column("bytes", int, "memory", human_bytes), Column("name", str, "name"), Column("shape", str, "type ne"), Column("part", str, "in"))
NODES = (Column("i", int, "i"), Column("layer", int, "layer"), Column("part", str, "part"), Column("op", str, "op"), Column("name", str, "name"),
         Column("type", str, "type"), Column("ne", str, "ne", dims), Column("nb", str, "nb if strided", some(dims)),
         Column("src", str, "sources", lambda names: ", ".join(n or "-" for n in names)), Column("params", str))


def show(model: Model, by_form: list[list[Report]], detail: list[Report], output: str) -> None:
    """The report for people."""
    def section(title: str, rows: list[Row], columns: Sequence[Column]) -> None:
        print(title + ("\n" if output == "md" else ""))
        if rows:
            write_rows(rows, columns, output, sys.stdout)
        else:
            print("none")
        print()

    kinds = ", ".join(f"{n} {k}" for k, n in Counter(model.kinds).items())
    title = f"{model.file.path}: {model.arch}, {len(model.kinds)} layers ({kinds}), {human_count(model.n_params)} weights"
    section(title, [r.overview() for reports in by_form for r in reports], OVERVIEW)
    for reports in by_form:
        print(growth([r for r in reports if r.n_tokens > r.n_seqs] or reports))
    print()
    first = detail[0]
    size = f"{first.n_tokens} tokens" + (f" of {first.n_seqs} sequences" if first.n_seqs > 1 else "")
    names = " | ".join(r.form for r in detail)
    if len(detail) == 1:
        section(f"{names}, {size}, by part of a layer", first.parts(), PART)
        section(f"{names}, {size}, by op", first.ops(), OP)
    else:
        section(f"{names}, {size}, by part of a layer", *side_by_side(detail, [r.parts() for r in detail], "part"))
        section(f"{names}, {size}, by op", *side_by_side(detail, [r.ops() for r in detail], "op"))
    for r in detail:
        section(f"{r.form}, {size}, fusion groups and regions", r.groups(), GROUP)
        section(f"{r.form}, {size}, largest tensors of the plan", r.largest(), LARGEST)


def growth(reports: list[Report]) -> str:
    """One sentence on the node counts of a form at different numbers of tokens."""
    tokens, nodes = [str(r.n_tokens) for r in reports], [r.graph.n_nodes for r in reports]
    if len(set(nodes)) == 1:
        return f"{reports[0].form}: {nodes[0]} nodes at {' = '.join(tokens)} tokens"
    return f"{reports[0].form}: the node count changes with the tokens: {', '.join(f'{n} at {t}' for n, t in zip(nodes, tokens, strict=True))}"


def side_by_side(reports: list[Report], tables: list[list[Row]], key: str) -> tuple[list[Row], list[Column]]:
    """Nodes, FLOPs and bytes of several forms next to each other: a row per part or op that any of them has, and a sum."""
    shown = [("n_nodes", int, "nodes", some(str)), ("flops", float, "FLOP", some(human_flops)), ("bytes_fused", float, "bytes", some(human_bytes))]
    keys = list(dict.fromkeys(r[key] for t in tables for r in t))
    if key == "part":
        keys.sort(key=part_order)
    found: list[dict[str, Row]] = [{r[key]: r for r in t} for t in tables]
    rows: list[Row] = [{key: k, **{f"{c}_{i}": f.get(k, {}).get(c) for c, *_ in shown for i, f in enumerate(found)}} for k in keys]
    rows.append({key: "all", **{f"{c}_{i}": sum(r[c] for r in t) for c, *_ in shown for i, t in enumerate(tables)}})
    names = [r.form for r in reports]
    columns = [Column(f"{c}_{i}", kind, f"{head} {n}", text) for c, kind, head, text in shown for i, n in enumerate(names)]
    return rows, [Column(key, str, key), *columns]


# As data and as a drawing

def as_json(model: Model, by_form: list[list[Report]], detail: list[Report]) -> dict[str, Any]:
    """Everything, for programs: the overview of every graph, and of each form in detail parts, ops, groups and nodes."""
    def nodes(graph: Graph) -> list[Row]:
        def plain(x: Any) -> Any:
            return str(x) if isinstance(x, float) and not math.isfinite(x) else x  # JSON has no infinity
        return [{**r, "params": {k: plain(v) for k, v in r["params"].items()}} for r in graph.records()]

    return {"model": str(model.file.path), "arch": model.arch, "kinds": list(model.kinds), "n_params": model.n_params,
            "graphs": [r.overview() for reports in by_form for r in reports],
            "detail": [{**r.overview(), "parts": r.parts(), "ops": r.ops(), "groups": r.groups(), "largest": r.largest(), "nodes": nodes(r.graph)}
                       for r in detail]}


def dot(nodes: list[Node]) -> str:
    """Nodes in Graphviz's language: a box per node in its part's colour (dashed where it only moves data), clusters per layer, ellipses for
    weights, states, inputs and what comes from other layers."""
    inside = {id(t) for n in nodes for t in n.outputs}
    lines = ["digraph pyggml {", '  rankdir=TB; node [shape=box, style=filled, fontname="Helvetica", fontsize=10]; edge [arrowsize=0.6];']
    for layer in dict.fromkeys(n.layer for n in nodes):
        name, label = ("model", "") if layer is None else (str(layer), f"layer {layer}")
        lines.append(f'  subgraph cluster_{name} {{ label="{label}"; color=gray70;')
        for n in nodes:
            if n.layer == layer:
                colour = COLOURS[PARTS.index(n.part) % len(COLOURS)] if n.part in PARTS else "white"
                style = "filled,dashed" if n.op.moves_data else "filled"
                text = f"{n.op.name}\\n{_quoted(n.name)}\\n{_shape(n.out)}"
                lines.append(f'    n{n.seq} [label="{text}", fillcolor="{colour}", style="{style}", tooltip="{n.part}"];')
        lines.append("  }")
    for leaf in dict.fromkeys(t for n in nodes for t in n.src if t is not None and id(t) not in inside):
        lines.append(f'  t{id(leaf)} [label="{_quoted(leaf.name)}\\n{_shape(leaf)}", shape=ellipse, fillcolor=gray95];')
    for n in nodes:
        for k, t in zip(n.op.inputs, n.src, strict=True):
            if t is not None:
                origin = f"n{t.node.seq}" if id(t) in inside and t.node is not None else f"t{id(t)}"
                lines.append(f'  {origin} -> n{n.seq} [tooltip="{k}"];')
    return "\n".join([*lines, "}"])


def draw(text: str, path: str) -> None:
    """An SVG through Graphviz's dot; ParamError where it is missing or refuses."""
    program = shutil.which("dot")
    if program is None:
        raise ParamError("--svg needs Graphviz's program dot, which is not installed; --dot prints its input")
    done = subprocess.run([program, "-Tsvg", "-o", path], input=text.encode(), capture_output=True, check=False)
    if done.returncode:
        raise ParamError(f"--svg {path}: dot says: {' '.join(done.stderr.decode(errors='replace').split())}")


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _shape(t: Tensor) -> str:
    return f"{t.dtype.name} {dims(t.ne)}"
