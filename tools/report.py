"""`pyggml report`: results of bench as Markdown tables and as plots of prefill against the ubatch, for each form of the Mamba2 layers.

A table per model, a row per test and ubatch, a column per way to run it. Where two forms cross over, the ubatch is read off between the
measured ones, on a logarithmic scale. Results with a free op (bench --noop) are dashed lines: what the rest of the model would allow. Files of
llama-bench itself (-o json) are read too.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyggml.errors import FormatError
from pyggml.tools.common import counted, note, read_text
from pyggml.tools.records import Row

LEGAL = "legal: what bench writes with -o json or -o jsonl"
NEEDED = ("n_prompt", "n_gen", "n_ubatch", "avg_ts")
# What tells results of one test apart, besides form, chunk, variant and engine: named where a model's results differ in it.
DETAILS = {"n_threads": "{} threads", "n_depth": "depth {}", "n_batch": "batch {}", "type_k": "K {}", "type_v": "V {}", "type_r": "conv state {}",
           "type_s": "SSM state {}", "prec": "prec {}", "ssd_precision": "ssd precision {}",
           "flash_attn": "flash attention {}"}
TIE = math.log(1.02)  # a lead that says nothing
Points = dict[int, float]  # tokens per second by ubatch


def options(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.add_argument("results", nargs="+", metavar="RESULTS.json", help="files that bench wrote with -o json or -o jsonl")
    p.add_argument("--plot", metavar="NAME", help="write the plots to NAME.png and NAME.svg (the first file's name, in this folder)")
    p.add_argument("--lead", action="store_true", help="with each speed how many times the first column's it is")
    p.add_argument("--no-plot", action="store_true", help="tables alone")


def main(args: argparse.Namespace) -> int:
    """Run the tool."""
    rows = [r for path in args.results for r in read_results(path)]
    models = by_model(rows)
    print("\n\n".join("\n".join(report(name, found, args.lead)) for name, found in models.items()))
    prefill = {name: prefill_series(found) for name, found in models.items()}
    prefill = {name: series for name, series in prefill.items() if any(len(points) > 1 for points in series.values())}
    if args.no_plot:
        return 0
    if not prefill:
        note("note: no plot: it takes prompts (pp) of one model at two or more ubatches")
        return 0
    draw(prefill, args.plot or Path(args.results[0]).stem)
    return 0


# Reading

def read_results(path: str) -> list[Row]:
    """The rows of a file, a JSON array or a row per line; FormatError for anything else."""
    text = read_text(path, "file")
    rows: list[Row] = []
    whole = text.lstrip().startswith("[")
    for i, part in enumerate([text] if whole else text.splitlines()):
        if part.strip():
            try:
                found = json.loads(part)
            except (ValueError, RecursionError) as e:  # no JSON; a number of thousands of digits; brackets without end
                raise FormatError(f"{path}: line {i + getattr(e, 'lineno', 1)}: {getattr(e, 'msg', e)}; {LEGAL}") from None
            rows += found if whole else [found]
    if not rows:
        raise FormatError(f"{path}: no results")
    for i, r in enumerate(rows):
        missing = [k for k in NEEDED if k not in r] if isinstance(r, dict) else NEEDED
        if missing:
            raise FormatError(f"{path}: result {i} has no {', '.join(missing)}; {LEGAL}")
        for k, least in (("n_prompt", 0), ("n_gen", 0), ("n_ubatch", 1)):
            if not isinstance(r[k], int) or r[k] < least:
                raise FormatError(f"{path}: result {i}: {k} {r[k]!r}; legal: a whole number of at least {least}")
        for k in ("avg_ts", "median_ts"):
            if r.get(k) is not None and not (isinstance(r[k], int | float) and 0 < r[k] < math.inf):
                raise FormatError(f"{path}: result {i}: {k} {r[k]!r}; legal: a number above 0, or null where the output was wrong")
    return rows


def by_model(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Rows by model, then by the name of the way they were run."""
    found: dict[str, list[Row]] = {}
    for r in rows:
        found.setdefault(str(r.get("model_type") or r.get("model_filename") or "model"), []).append(r)
    return {name: _ways(of_model) for name, of_model in found.items()}


def _ways(rows: Sequence[Row]) -> dict[str, list[Row]]:
    def values(name: str, among: Sequence[Row]) -> set[Any]:
        return {r.get(name) for r in among} - {None}

    details = {k: text for k, text in DETAILS.items() if len(values(k, rows)) > 1}
    ways: dict[str, list[Row]] = {}
    for r in rows:
        form = r.get("mamba2") or ("llama.cpp" if "mamba2" not in r else r.get("backend"))  # of llama-bench, of a peer, of a model without Mamba2 layers
        # A chunk stands in the name when the form ran with several at one ubatch; else it follows from the ubatch.
        same = [x for x in rows if all(x.get(k) == r.get(k) for k in ("mamba2", "n_ubatch", "n_prompt", "n_gen"))]
        parts = [f"{form} chunk {r['chunk']}" if r.get("chunk") and len(values("chunk", same)) > 1 else str(form)]
        parts += [str(v) for v in [r.get("variant")] if v] + [text.format(r[k]) for k, text in details.items() if r.get(k) is not None]
        ways.setdefault(", ".join(parts), []).append(r)
    return ways


# The table

def test_name(r: Row) -> str:
    """The test without its depth, which is a detail of the way it was run."""
    return "+".join([f"pp{r['n_prompt']}"] * bool(r["n_prompt"]) + [f"tg{r['n_gen']}"] * bool(r["n_gen"]))


def rate(r: Row) -> float | None:
    """Tokens per second: the median where there is one, else the mean; None for a run whose output was wrong."""
    found = r.get("median_ts", r["avg_ts"])
    return None if found is None else float(found)


def report(name: str, ways: Mapping[str, list[Row]], lead: bool = False) -> Iterator[str]:
    """One model's heading, table and cross-overs; with `lead` also how many times the first way's each speed is."""
    about = next(iter(ways.values()))[0]
    threads = {r.get("n_threads") for rows in ways.values() for r in rows}
    machine = [str(about[k]) for k in ("cpu_info",) if about.get(k)] + [counted(n, "thread") for n in threads if n and len(threads) == 1]
    yield f"## {name}" + (f" ({', '.join(machine)})" if machine else "")
    yield ""
    speeds: dict[tuple[str, int], dict[str, float | None]] = {}
    for way, rows in ways.items():
        for r in rows:
            speeds.setdefault((test_name(r), r["n_ubatch"] if r["n_prompt"] else 0), {})[way] = rate(r)
    first = next(iter(ways))

    def cell(found: Mapping[str, float | None], way: str) -> str:
        if way not in found:
            return ""
        ts, base = found[way], found.get(first) if lead and way != first else None
        return "wrong" if ts is None else f"{ts:.2f}" + (f" ({ts / base:.2f}x)" if base else "")

    yield "| test | ubatch | " + " | ".join(way.replace("|", "\\|") for way in ways) + " |"
    yield "| --- | ---: | " + " | ".join("---:" for _ in ways) + " |"
    for (test, ubatch), found in speeds.items():
        yield f"| {test} | {ubatch or ''} | " + " | ".join(cell(found, way) for way in ways) + " |"
    yield ""
    yield "Tokens per second, medians of the repetitions" + (f"; in brackets how many times that of {first}." if lead else ".")
    yield from crossings(prefill_series(ways))


def prefill_series(ways: Mapping[str, list[Row]]) -> dict[str, Points]:
    """Prefill of each way by the tokens of its graphs: the ubatch, or the prompt where that is shorter. Of several prompts the longest counts."""
    series: dict[str, Points] = {}
    for way, rows in ways.items():
        points = {min(r["n_ubatch"], r["n_prompt"]): ts for r in sorted(rows, key=lambda r: r["n_prompt"])
                  if r["n_prompt"] and not r["n_gen"] and (ts := rate(r)) is not None}
        if points:
            series[way] = dict(sorted(points.items()))
    return series


def is_ceiling(way: str) -> bool:
    """True for a way in which an op was free."""
    return "noop " in way


def crossovers(a: Points, b: Points) -> list[tuple[float, bool]]:
    """Where two curves meet, and whether b is the faster one beyond: on a logarithmic scale of the ubatch, between points that both have."""
    at = sorted(a.keys() & b.keys())
    lead = [math.log(b[x] / a[x]) for x in at]
    found = []
    for (x0, d0), (x1, d1) in zip(zip(at, lead, strict=True), zip(at[1:], lead[1:], strict=True), strict=False):
        if d0 * d1 < 0:
            found.append((2 ** (math.log2(x0) + (math.log2(x1) - math.log2(x0)) * d0 / (d0 - d1)), d1 > 0))
    return found


def compared(series: Mapping[str, Points]) -> Iterator[tuple[str, str, list[tuple[float, bool]]]]:
    """The first way against each other one that is no ceiling, with their cross-overs."""
    first, *others = [way for way in series if not is_ceiling(way)] or [""]
    for way in others:
        yield first, way, crossovers(series[first], series[way])


def crossings(series: Mapping[str, Points]) -> Iterator[str]:
    """A line per cross-over, or on who leads throughout."""
    for first, way, found in compared(series):
        a, b = series[first], series[way]
        both = sorted(a.keys() & b.keys())
        if len(both) < 2:
            continue
        for x, b_leads in found:
            yield f"{way if b_leads else first} is faster than {first if b_leads else way} from ubatch {x:.0f} on."
        if not found:
            lead = [math.log(b[x] / a[x]) for x in both]  # all of one sign
            leads, behind = (way, first) if sum(lead) > 0 else (first, way)
            clear = [abs(x) > TIE for x in lead]
            verb = "is faster than" if all(clear) else "is at least as fast as" if any(clear) else "is as fast, within 2 %, as"
            yield f"{leads} {verb} {behind} at every ubatch from {both[0]} to {both[-1]}."


# The plot

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito's: told apart by colour-blind eyes too
GREY = "#777777"


def draw(models: Mapping[str, Mapping[str, Points]], name: str) -> None:
    """Prefill against ubatch, a panel per model, as NAME.png and NAME.svg; a line on stderr when there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
    except ImportError:
        note("note: no plot: matplotlib is not installed; pip install 'pyggml[plot]'")
        return
    figure = Figure(figsize=(8, 4.8 * len(models)), layout="constrained")
    for axes, (title, series) in zip(figure.subplots(len(models), squeeze=False)[:, 0], models.items(), strict=True):
        ways = [way for way in series if not is_ceiling(way)]
        for way, points in series.items():
            base = next((w for w in ways if way.startswith(f"{w},")), way)
            colour = GREY if base not in ways or base.startswith("llama.cpp") else COLOURS[ways.index(base) % len(COLOURS)]
            style: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.2} if is_ceiling(way) else {"marker": "o", "markersize": 4.5, "linewidth": 1.8}
            axes.plot(list(points), list(points.values()), label=way, color=colour, **style)
        ticks = sorted({x for points in series.values() for x in points})
        marks = [(x, *((way, first) if b_leads else (first, way))) for first, way, found in compared(series) for x, b_leads in found]
        for i, (x, ahead, behind) in enumerate(sorted(marks)):
            axes.axvline(x, color=GREY, linewidth=0.9, linestyle=":")
            side = -1 if x * x > ticks[0] * ticks[-1] else 1  # towards the middle
            axes.annotate(f"{ahead} ahead of {behind} from {x:.0f}", (x, 0.99 - 0.05 * (i % 2)), xycoords=("data", "axes fraction"), xytext=(4 * side, 0),
                          textcoords="offset points", ha="right" if side < 0 else "left", va="top", fontsize=8.5, color="#444444")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_ylim(0, 1.12 * max(max(points.values()) for points in series.values()))  # the marks' text stands above the curves
        axes.set_xlabel("ubatch (tokens per graph)")
        axes.set_ylabel("prefill (tokens/s)")
        axes.set_title(title, fontsize=11)
        axes.grid(True, linewidth=0.4, color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    for path in (f"{name}.png", f"{name}.svg"):
        figure.savefig(path, dpi=160)
        note(f"wrote {path}")
