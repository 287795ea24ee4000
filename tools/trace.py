"""`pyggml trace`: every tensor of a prompt's graph as it is computed (llama.cpp's eval-callback), and with --diff the first tensor in which two
runs differ. Graphs are planned without fusion and without reuse of memory, so that each node has a value; --fuse and --reuse turn them on."""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends import NAMES as BACKENDS
from pyggml.errors import ParamError
from pyggml.models import Model
from pyggml.models.layers import FORMS
from pyggml.registry import load_ops
from pyggml.runtime.memory import KV_PAD
from pyggml.runtime.trace import Sink, Traced, TracedBackend
from pyggml.tools.common import (
    FLASH_ATTN,
    attention,
    chunk,
    context_options,
    counted,
    form,
    form_name,
    model_options,
    note,
    numbers,
    open_model,
    precision,
    whole,
)
from pyggml.tools.records import FORMATS, Column, Row, write_rows
from pyggml.tools.run import read_prompt
from pyggml.tools.trace_diff import Difference, Dump, Item, Side, compare, finite, item_of, pair, read_dump, read_pairs, text_side

SHOWN = 30  # rows of differences without --all
MAX_DEPTH = 5  # nodes to go back from a difference to what was compared
VIEWS = {name for name, op in load_ops().items() if op.view}
NAMED = ("auto", *FORMS)
# What a run specification may change: key -> (attribute, parser).
KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "m": ("model", str), "mamba2": ("mamba2", form), "chunk": ("chunk", chunk), "ssd-precision": ("ssd_precision", precision),
    "backend": ("backend", str), "level": ("level", str), "prec": ("prec", str), "fa": ("flash_attn", attention),
    "t": ("threads", whole(1, 256)), "ub": ("ubatch_size", whole(1)), "ctk": ("cache_type_k", str), "ctv": ("cache_type_v", str),
    "type-r": ("type_r", str), "type-s": ("type_s", str)}
SPEC = ("Steps run on one thread unless -t asks for more, so that their times hold no waiting, with --prec f32 unless auto is asked for, so that "
        "runs differ by what is compared, and in a context as large as the prompt unless -c says so. A run of --diff is a form (scan, ssd, ssd-fused, "
        "FILE.py:FUNCTION), a GGUF file, a backend, fuse, reuse, one of "
        f"{' '.join(f'{k}=' for k in KEYS)} or several of them joined by commas; the other options hold for both. A folder that --save "
        "wrote, or a file of what llama.cpp's eval-callback printed, may stand in its place.")


class Stop(Exception):
    """Ends a traced run early."""


def options(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.epilog = SPEC
    model_options(p)
    source = p.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="prompt (default: stdin; the bundled model has one of its own)")
    source.add_argument("-f", "--file", metavar="FILE", help="file with the prompt")
    source.add_argument("--ids", type=numbers(0), metavar="N,N", help="token ids in place of a prompt")
    p.add_argument("--past", type=whole(0), default=0, metavar="N", help="run the first N tokens untraced, as a context of what is traced (0)")
    context_options(p)
    p.set_defaults(ctx_size=None, threads=1, prec="f32")
    p.add_argument("--backend", choices=[b for b in BACKENDS if b != "null"], default="cpu", help="what computes (cpu)")
    p.add_argument("--level", metavar="NAME", help="instruction set of the cpu backend (the host's)")
    switch = argparse.BooleanOptionalAction
    p.add_argument("--fuse", action=switch, default=False, help="let the planner fuse nodes; what a group does not store has no value (no)")
    p.add_argument("--reuse", action=switch, default=False, help="let the planner reuse memory (no)")
    p.add_argument("--filter", type=pattern, action="append", metavar="REGEX", help="only tensors whose name begins so; may be given several times")
    p.add_argument("--layer", type=numbers(0), metavar="N,N", help="only these layers")
    p.add_argument("--values", type=count, default=3, metavar="N|all", help="first and last elements to print (3)")
    p.add_argument("--precision", type=whole(0, 17), default=4, metavar="D", help="digits after the point (4)")
    p.add_argument("-o", "--output", choices=FORMATS, default="console", metavar="FORMAT", help=f"{', '.join(FORMATS)} (console)")
    p.add_argument("--save", metavar="DIR", help="write every value to DIR: values.npz and index.json")
    p.add_argument("--nan-stop", action="store_true", help="stop at the first tensor that holds a NaN; exit code 1")
    p.add_argument("--diff", nargs=2, metavar=("A", "B"), help="name the first tensor in which two runs differ; exit code 1 when there is one")
    p.add_argument("--pairs", metavar="FILE", help="tensors to compare under different names: A's name, B's name a line; {il} stands for any layer")
    p.add_argument("--limit", type=nmse_limit, default=1e-6, metavar="X", help="greatest NMSE that counts as equal (1e-6)")
    p.add_argument("--all", action="store_true", help="list every comparison, not only those over the limit")


def pattern(text: str) -> re.Pattern[str]:
    """An argparse type: a regular expression."""
    try:
        return re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError(f"{text!r}: {e}") from None


def count(text: str) -> int | None:
    """An argparse type: a number, or None for all."""
    if text == "all":
        return None
    value: int = whole(0)(text)
    return value


def nmse_limit(text: str) -> float:
    """An argparse type: a number of at least 0, which NaN is not."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}; legal: a number of at least 0")
    return value


def main(args: Namespace) -> int:
    """Run the tool."""
    args.read = functools.cache(lambda: read_prompt(args))  # once, also where two runs take it from stdin
    if args.diff is None:
        return show(args)
    if args.save or args.nan_stop:
        raise ParamError("--diff compares; --save and --nan-stop go with a single run")
    return diff(args)


# A run

def traced_run(args: Namespace, sink: Sink) -> str:
    """Run the traced part of the prompt; each tensor goes to the sink. A line about the run. A Stop from the sink ends it."""
    model = open_model(args)
    ids = args.ids if args.ids is not None else model.vocab.tokenize(args.read())
    n = len(ids) - args.past
    if n < 1:
        raise ParamError(f"the prompt has {len(ids)} tokens, --past {args.past}; at least one must be left to trace")
    if n > args.ubatch_size:
        raise ParamError(f"{n} tokens to trace; legal: at most -ub {args.ubatch_size}, so that they are one graph")
    options = {"cpu": {"fuse": args.fuse, "reuse": args.reuse, "level": args.level, "prec": args.prec}, "ggml": {"reuse": args.reuse}}.get(args.backend, {})
    n_ctx = args.ctx_size or -(-len(ids) // KV_PAD) * KV_PAD
    ctx = model.context(backend=args.backend, threads=None if args.backend == "reference" else args.threads, n_ctx=n_ctx, n_ubatch=args.ubatch_size,
                        mamba2=args.mamba2, chunk=args.chunk, ssd_precision=args.ssd_precision, flash_attn=FLASH_ATTN[args.flash_attn],
                        type_k=args.cache_type_k, type_v=args.cache_type_v, type_r=args.type_r, type_s=args.type_s, **options)
    backend = TracedBackend(ctx.backend, sink)
    ctx.backend = backend
    if args.past:
        backend.active = False
        ctx.decode(ids[:args.past])
        backend.active = True
    try:
        ctx.decode(ids[args.past:])
    except Stop:
        pass
    return about(args, model, n)


def about(args: Namespace, model: Model, n: int) -> str:
    """One line that tells a run from others."""
    took = model.form_for(args.mamba2, n, args.ssd_precision, args.backend)
    words = [Path(model.file.path).name, form_name(args.mamba2) + ("" if took in (args.mamba2, "user") else f" ({took})")]
    if took == "ssd":
        words.append(f"chunk {args.chunk or 'by default'}")
    words.append(args.backend + (f" at level {args.level}" if args.level else ""))
    if args.backend == "cpu":
        words.append("fused" if args.fuse else "not fused")
        if args.prec != "f32":
            words.append(f"prec {args.prec}")
    if args.backend != "reference":
        words.append("memory reused" if args.reuse else "no memory reused")
    return ", ".join([*words, f"{n} tokens" + (f" after {args.past}" if args.past else "")])


def wanted(args: Namespace, name: str, layer: int | None) -> bool:
    """True for tensors that --filter and --layer let through."""
    return (args.filter is None or any(p.match(name) for p in args.filter)) and (args.layer is None or layer in args.layer)


TRACED = (
    Column("i", int, "i"), Column("k", int), Column("layer", int, "layer"), Column("part", str, "part"), Column("op", str, "op"),
    Column("name", str, "name"), Column("type", str, "type"), Column("ne", str, "ne"), Column("nb", str, "nb"), Column("src", str, "sources"),
    Column("kernel", str, "kernel"), Column("us", float, "us"), Column("fused_into", str), Column("sum", float, "sum"), Column("min", float, "min"),
    Column("max", float, "max"), Column("n_nan", int, "NaN"), Column("n_inf", int, "inf"), Column("first", str, "first"), Column("last", str, "last"))


def show(args: Namespace) -> int:
    """Print a run, or save it."""
    status, seen = 0, 0
    rows: list[Row] = []
    with Dump(args.save) if args.save else nullcontext() as dump:
        def sink(t: Traced) -> None:
            nonlocal status, seen
            if wanted(args, t.name, t.layer):
                seen += 1
                if dump is not None:
                    dump.add(t)
                elif args.output == "console":
                    print("\n".join(as_text(t, args.values, args.precision)))
                else:
                    rows.append(finite(t.record(math.prod(t.ne) if args.values is None else args.values)))
            if args.nan_stop and t.value is not None and np.isnan(t.value).any():
                status = 1
                note(f"pyggml trace: {item_of(t).where} holds the first NaN, made by {t.op} from {', '.join(s.name for s in t.src if s)}")
                raise Stop
        line = traced_run(args, sink)
        if dump is not None:
            dump.about = line
    if args.output != "console" and dump is None:
        write_rows(rows, TRACED, args.output, sys.stdout, "tensors")
    if not seen and status == 0:
        raise ParamError("no tensor passes --filter and --layer")
    note(f"trace    {line}: {counted(seen, 'tensor')}" + (f", saved in {args.save}" if args.save else ""))
    return status


def as_text(t: Traced, n: int | None, digits: int) -> list[str]:
    """A tensor for people: where, op, name, type and shape, sources; then kernel, time and what the value is like."""
    layer = "" if t.layer is None else f"L{t.layer}"
    shape = f"{t.dtype} {dims(t.ne)}" + (f" nb {list(t.nb)}" if t.nb else "")
    sources = ", ".join("-" if s is None else f"{s.name} {s.dtype} {dims(s.ne)}" for s in t.src)
    lines = [f"{t.i:5d} {layer:<4}{t.part:<11}{t.op:<13}{t.name:<26} {shape}" + (f"  <- {sources}" if sources else "")]
    made = f"{'':22}{t.kernel or 'view':<24}" + (f"{t.seconds * 1e6:9.1f} us" if t.seconds is not None else f"{'':12}")
    s = t.stats()
    if s is None or t.value is None:
        return [*lines, f"{made}  " + (f"fused into {t.fused_into}" if t.fused_into else "no value: blocks of a weight")]
    width = digits + 8
    facts = [f"{word} {x:{width}.{digits + 1}g}" for word, x in (("sum", s.sum), ("min", s.min), ("max", s.max))]
    facts += [f"{k} {word}" for k, word in ((s.n_nan, "NaN"), (s.n_inf, "inf")) if k]
    line = f"{made}  {'  '.join(facts)}"
    if n is None:
        with np.printoptions(precision=digits, suppress=True, threshold=t.value.size + 1, linewidth=150):
            body = str(t.value.reshape([m for m in t.ne[::-1] if m > 1] or [1]))
        return [*lines, line, *(f"{'':22}{x}" for x in body.splitlines())]
    first, last = t.ends(n)
    shown = "".join(f"{x:{width}.{digits}f}" for x in first) + (f"  ...{''.join(f'{x:{width}.{digits}f}' for x in last)}" if last else "")
    return [*lines, f"{line} {shown}".rstrip()]


def dims(ne: tuple[int, ...]) -> str:
    """ne without the trailing ones."""
    shown = list(ne)
    while len(shown) > 1 and shown[-1] == 1:
        shown.pop()
    return f"[{', '.join(map(str, shown))}]"


# Two runs

def side(spec: str, args: Namespace) -> Side:
    """What a word of --diff stands for."""
    path = Path(spec)
    if spec not in (*NAMED, *BACKENDS) and path.suffix != ".gguf":
        if path.is_dir():
            return read_dump(path, spec)
        if path.is_file():
            return text_side(path, spec)
    run = Namespace(**vars(args))
    for word in spec.split(","):
        _change(run, word, spec)
    items: list[Item] = []
    line = traced_run(run, lambda t: items.append(item_of(t)))
    return Side(spec, line, items)


def _change(run: Namespace, word: str, spec: str) -> None:
    key, equals, value = word.partition("=")
    try:
        if equals and key in KEYS:
            name, parse = KEYS[key]
            setattr(run, name, parse(value))
        elif word in ("fuse", "reuse"):
            setattr(run, word, True)
        elif word in BACKENDS and word != "null":
            run.backend = word
        elif word.endswith(".gguf"):
            run.model = word
        elif word in NAMED or ":" in word:
            run.mamba2 = form(word)
        else:
            legal = ", ".join(f"{k}=" for k in KEYS)
            raise ParamError(f"--diff {spec}: {word!r} is no form, no backend, none of fuse, reuse, {legal}, and no file or folder")
    except argparse.ArgumentTypeError as e:
        raise ParamError(f"--diff {spec}: {key}: {e}") from None


DIFFERENCES = (
    Column("layer", int, "layer"), Column("part", str, "part"), Column("op", str, "op"), Column("name", str, "name"), Column("name_a", str),
    Column("type", str, "type"), Column("ne", str, "ne"), Column("ne_a", str), Column("how", str, "compared"), Column("i_a", int, "i in A"),
    Column("i_b", int, "i in B"), Column("nmse", float, "NMSE", lambda x: f"{x:.1e}" if x is not None else "-"),
    Column("max_abs", float, "max |A-B|", lambda x: f"{x:.2g}" if x is not None else "-"))


def diff(args: Namespace) -> int:
    """Compare two sides."""
    names = read_pairs(args.pairs) if args.pairs else []
    a, b = (side(spec, args) for spec in args.diff)
    pairs, how = pair(a, b, names)
    pairs = [p for p in pairs if wanted(args, p.b.name, p.b.layer if p.b.layer is not None else p.a.layer)]
    found = [d for d in map(compare, pairs) if d is not None]
    done = [d for d in found if d.compared]
    if not done:
        raise ParamError("there are no two tensors to compare: no name that --filter and --layer let through is in both; --pairs FILE can list some")
    over = [d for d in done if d.nmse > args.limit]
    rows = [row(d) for d in (found if args.all else over)]
    if args.output not in ("console", "md"):
        write_rows([finite(r) for r in rows], DIFFERENCES, args.output, sys.stdout, "differences")
        return int(bool(over))
    print(f"A  {a.about}\nB  {b.about}")
    others = len(found) - len(done)
    print(f"{counted(len(done), 'tensor')} compared, {how}" + (f"; {others} of other shapes left out" if others else ""))
    print()
    if over:
        print("\n".join(headline(over[0], done, b, args.limit)))
    else:
        worst = max(done, key=lambda d: d.nmse)
        print(f"no difference: the greatest NMSE is {worst.nmse:.1e} (limit {args.limit:g}), of {worst.pair.b.where}, made by {worst.pair.b.op}"
              if worst.nmse else "no difference at all")
    if rows:
        print(f"\n{'all comparisons' if args.all else f'over the limit: {len(over)} of {len(done)}'}" + ("\n" if args.output == "md" else ""))
        write_rows(rows if args.all else rows[:SHOWN], DIFFERENCES, args.output, sys.stdout)
        if not args.all and len(over) > SHOWN:
            print(f"and {len(over) - SHOWN} more; --all lists everything")
    return int(bool(over))


def row(d: Difference) -> Row:
    """A comparison as a record."""
    a, b = d.pair
    name = b.name if a.name == b.name else f"{b.name} (A: {a.name})"
    return {"layer": a.layer if b.layer is None else b.layer, "part": b.part or a.part, "op": b.op, "name": name, "name_a": a.name, "type": b.dtype,
            "ne": dims(b.ne), "ne_a": dims(a.ne), "how": d.how, "i_a": a.i, "i_b": b.i, "nmse": d.nmse if d.compared else None,
            "max_abs": d.max_abs if d.compared else None}


def headline(first: Difference, done: list[Difference], side_b: Side, limit: float) -> list[str]:
    """What there is to say about the first tensor that differs."""
    a, b = first.pair
    bearers: dict[str, list[Item]] = {}
    for x in side_b.items:
        bearers.setdefault(x.name, []).append(x)
    known = {d.pair.b.name: d for d in done}
    lines = [f"first difference  {b.where}" + (f" (A: {a.name})" if a.name != b.name else ""),
             f"made by           {maker(b, bearers)}" + (f"; in A by {a.op}" if a.op != b.op else ""),
             f"NMSE              {first.nmse:.2e} (limit {limit:g}), {b.dtype} {dims(b.ne)}"
             + (f", A {a.dtype} {dims(a.ne)}" if a.ne != b.ne or a.dtype != b.dtype else "") + (f", {first.how}" if first.how else ""),
             f"greatest          |A - B| = {first.max_abs:.3g} at {list(first.at)}: A {first.value_a:.7g}, B {first.value_b:.7g}"]
    found: dict[str, Origin] = {}
    for o in origins(b, bearers, known):
        found.setdefault(o.name, o)
    words = [f"{o.name}: NMSE {known[o.name].nmse:.1e}{o.path}" for o in found.values() if o.kind == "compared"]
    for kind, title in (("leaf", "weights and inputs"), ("unknown", "not compared")):
        names = [o.name for o in found.values() if o.kind == kind]
        words += [f"{title}: {', '.join(names)}"] if names else []
    lines += [f"{'' if k else 'from':<18}{x}" for k, x in enumerate(words)]
    before = done[: done.index(first)]
    if before:
        lines.append(f"before it         {len(before)} tensors within the limit, the last one {before[-1].pair.b.where} (NMSE {before[-1].nmse:.1e})")
    return lines


def maker(x: Item, bearers: dict[str, list[Item]]) -> str:
    """The op that computed a tensor: its own, or behind views the one that they look at."""
    views = []
    while x.op in VIEWS and x.src and (source := earlier(x, x.src[0], bearers)) is not None:
        views.append(x.op)
        x = source
    return f"{x.op}{f' ({x.kernel})' if x.kernel else ''}" + (f" as {x.name}, seen through {' and '.join(views)}" if views else "")


class Origin(NamedTuple):
    """A tensor that another was made from: "compared", a "leaf" (weight, state, input) or "unknown", and in words the nodes between."""

    name: str
    kind: str
    path: str


def origins(x: Item, bearers: dict[str, list[Item]], known: dict[str, Difference], through: tuple[str, ...] = ()) -> Iterator[Origin]:
    """What a tensor was made from: back to tensors that were compared, weights and inputs, over MAX_DEPTH nodes at most."""
    more = f" and {len(through) - 3} more" if len(through) > 3 else ""
    path = f", through {', '.join(through[:3])}{more}" if through else ""
    for name in x.src:
        source = earlier(x, name, bearers)
        if name in known:
            yield Origin(name, "compared", path)
        elif source is None:
            yield Origin(name, "leaf", path)
        elif source.op in VIEWS:
            yield from origins(source, bearers, known, through)
        elif len(through) == MAX_DEPTH:
            yield Origin(name, "unknown", path)
        else:
            yield from origins(source, bearers, known, (*through, f"{source.name} ({source.op})"))


def earlier(x: Item, name: str, bearers: dict[str, list[Item]]) -> Item | None:
    """The last tensor of that name that was there before x."""
    return next((y for y in reversed(bearers.get(name, [])) if y.i < x.i), None)
