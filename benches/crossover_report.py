"""What `crossover.py` measured, as a report in Markdown, as a plot, and as the README's section."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyggml.errors import FormatError
from pyggml.tools.common import human_bytes, note
from pyggml.tools.records import Row
from pyggml.tools.report import COLOURS, GREY, Points, is_ceiling

BY_CHUNK = (512, 2048)  # ubatches of the tables by chunk
README_UBATCHES = (1, 8, 64, 512, 2048, 8192)
MARKS = "<!-- crossover -->", "<!-- /crossover -->"
SCAN = "scan"
LABEL_HEIGHT = 0.055  # of the axes
Table = list[list[str]]


# Reading rows

def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    """The rows of the product or of the model."""
    return [r for r in rows if r["kind"] == kind]


def forms_of(rows: Sequence[Row]) -> list[str]:
    """Forms in the order in which they came, ggml's first."""
    return sorted(dict.fromkeys(r["form"] for r in rows), key=lambda form: not form.startswith("ggml"))


def best(rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """Of each form and ubatch the row of the fastest chunk; nothing where all were left out."""
    found: dict[str, dict[int, Row]] = {form: {} for form in forms_of(rows)}
    for r in rows:
        before = found[r["form"]].get(r["ubatch"])
        if r["left_out"] is None and (before is None or r["us_per_token"] < before["us_per_token"]):
            found[r["form"]][r["ubatch"]] = r
    return found


def speeds(of_form: Mapping[str, Mapping[int, Row]]) -> dict[str, Points]:
    """Tokens per second by ubatch, the recurrence first: what the others are held against."""
    found = {form: {n: 1e6 / r["us_per_token"] for n, r in points.items()} for form, points in of_form.items()}
    return {form: found[form] for form in sorted(found, key=lambda form: form != SCAN)}


def ahead(series: Mapping[str, Points]) -> Iterator[str]:
    """A line per form on the ubatches at which it is ahead of the first one."""
    first, *others = (form for form in series if not is_ceiling(form))
    for form in others:
        both = sorted(series[first].keys() & series[form].keys())
        leads = {n: series[form][n] > series[first][n] for n in both}
        runs = [list(run) for led, run in itertools.groupby(both, leads.__getitem__) if led]
        spans = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
        if spans:
            yield f"{form} is ahead of {first} at ubatch {' and '.join(spans)}."
        elif both:
            yield f"{form} is not ahead of {first} at ubatch {both[0]} to {both[-1]}."


# Tables

def markdown(table: Table) -> Iterator[str]:
    """A table's lines, numbers to the right."""
    head, *body = table
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join(["--:"] * len(head)) + "|"
    for line in body:
        yield "| " + " | ".join(line) + " |"


def micros(r: Row | None, with_chunk: bool = True) -> str:
    """Microseconds per token, with the chunk; a dash for what was left out."""
    if r is None or r["left_out"] is not None:
        return "-"
    value = r["us_per_token"]
    return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f}" + (f" ({r['chunk']})" if with_chunk and r["chunk"] else "")


def by_ubatch(product: Sequence[Row], ubatches: Sequence[int]) -> Table:
    """The best of each form by ubatch, and how far ahead of the recurrence pyggml's fastest one is."""
    found = best(product)
    table = [["ubatch", *found, "scan / best"]]
    for n in ubatches:
        own = {form: points[n]["us_per_token"] for form, points in found.items() if n in points and not form.startswith("ggml")}
        table.append([str(n), *(micros(points.get(n)) for points in found.values()), f"{own[SCAN] / min(own.values()):.2f}"])
    return table


def by_chunk(product: Sequence[Row], ubatch: int) -> Table:
    """Each chunk at one ubatch; the recurrence, which has none, in the first row."""
    here = {(r["form"], r["chunk"]): r for r in product if r["ubatch"] == ubatch}
    chunks = sorted({q for _, q in here if q})
    chunked = [form for form in forms_of(product) if any((form, q) in here for q in chunks)]
    plain = [(form, r) for (form, q), r in here.items() if q is None]
    table = [["chunk", *chunked]]
    table += [[str(q), *(micros(here.get((form, q)), with_chunk=False) for form in chunked)] for q in chunks]
    return [*table, ["none", *[", ".join(f"{form} {micros(r)}" for form, r in plain), *[""] * (len(chunked) - 1)]]]


def sizes(product: Sequence[Row]) -> Table:
    """Nodes and plan memory of each form at its fastest chunk."""
    found = {form: points for form, points in best(product).items() if not form.startswith("ggml")}
    table = [["ubatch", *found]]
    for n in sorted({r["ubatch"] for r in product}):
        table.append([str(n), *(f"{points[n]['nodes']}, {human_bytes(points[n]['plan_bytes'])}" if n in points else "-" for points in found.values())])
    return table


def errors(product: Sequence[Row]) -> Table:
    """The largest error of each form over all ubatches and chunks."""
    table = [["form", "NMSE of y", "NMSE of the state"]]
    for form in forms_of(product):
        own = [r for r in product if r["form"] == form and r["left_out"] is None]
        table.append([form, *(f"{max(r[k] for r in own):.0e}" for k in ("nmse_y", "nmse_state"))])
    return table


def model_table(model: Sequence[Row]) -> Table:
    """Tokens per second of the model by ubatch, nodes of its graphs in brackets."""
    forms = list(dict.fromkeys(r["form"] for r in model))
    here = {(r["ubatch"], r["form"]): f"{r['tokens_per_second']:.0f} ({r['nodes']})" for r in model}
    return [["ubatch", *forms], *([str(n), *(here[n, form] for form in forms)] for n in dict.fromkeys(r["ubatch"] for r in model))]


def model_speeds(model: Sequence[Row]) -> dict[str, Points]:
    """Tokens per second of the model by form and ubatch."""
    found: dict[str, Points] = {}
    for r in model:
        found.setdefault(r["form"], {})[r["ubatch"]] = r["tokens_per_second"]
    return found


def left_out(product: Sequence[Row], limits: str) -> Iterator[str]:
    """A line per form and chunk that some ubatch left out."""
    found: dict[tuple[str, int], Row] = {}
    for r in product:
        if r["left_out"] is not None:
            found.setdefault((r["form"], r["chunk"]), r)
    if found:
        yield f"Left out ({limits}):"
        yield ""
        for (form, chunk), r in found.items():
            yield f"- {form}, chunk {chunk}, from ubatch {r['ubatch']} on: {r['left_out']}"
        yield ""


# The report

def report(rows: Sequence[Row], plot: str | None) -> Iterator[str]:
    """Lines of the whole report; `plot` is the picture's name."""
    about, product, model = of_kind(rows, "about")[0], of_kind(rows, "product"), of_kind(rows, "model")
    ubatches = sorted({r["ubatch"] for r in product})
    yield from ("# Where the chunked form of Mamba2 pays", "", f"{about['where']} `{about['command']}`", "")
    if plot:
        yield from (f"![product of one layer by ubatch]({plot}.png)", "")
    yield from ("## One layer's product by ubatch", "",
                f"d_state, head_dim, n_head, n_group {about['shape']}; microseconds per token, of the fastest chunk, which stands in brackets.",
                f"Chunks are at most the ubatch, and at most {about['max_fused_chunk']} in ssd-fused.", "")
    yield from (*markdown(by_ubatch(product, ubatches)), "", *(f"- {line}" for line in ahead(speeds(best(product)))), "")
    yield from left_out(product, about["limits"])
    for n in [n for n in BY_CHUNK if n in ubatches] or ubatches[-1:]:
        yield from (f"## By chunk, {n} tokens", "", "Microseconds per token.", "", *markdown(by_chunk(product, n)), "")
    yield from ("## Nodes and plan memory", "", "Of the product's graph at its fastest chunk; the arena holds inputs and outputs too.", "",
                *markdown(sizes(product)), "")
    yield from ("## Errors", "", "The largest over all ubatches and chunks, against the float64 recurrence.", "", *markdown(errors(product)))
    if model:
        yield from ("", "## The whole model", "",
                    f"{about['model']}: tokens per second (nodes) of prompts of {about['model_prompt']} tokens, or of the ubatch where that is longer;",
                    f"medians of {about['model_runs']} alternating runs. With SSM_SCAN as a no-op the recurrence costs nothing: the ceiling of that graph.", "",
                    *markdown(model_table(model)), "", *(f"- {line}" for line in ahead(model_speeds(model))))


def section(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of the README's section, which is on pyggml's forms and the unrolled graph."""
    about, product = of_kind(rows, "about")[0], [r for r in of_kind(rows, "product") if not r["form"].startswith("ggml")]
    ubatches = [n for n in README_UBATCHES if n in {r["ubatch"] for r in product}]
    yield from ("### Where the chunked form pays", "",
                f"Microseconds per token of one layer's product (d_state, head_dim, n_head, n_group {about['shape']}), of the fastest chunk, which stands in",
                "brackets:", "", *markdown(by_ubatch(product, ubatches)), "", *(f"- {line}" for line in ahead(speeds(best(product)))), "",
                "![product of one layer by ubatch](docs/reports/crossover.png)", "", "```sh", about["command"], "```", "",
                f"{about['where']} By chunk, with nodes, errors and the whole model: [docs/reports/crossover.md](docs/reports/crossover.md).")


def with_section(text: str, rows: Sequence[Row]) -> str:
    """A README whose section stands between the marks; FormatError where they are missing."""
    start, end = MARKS
    if text.count(start) != 1 or text.count(end) != 1 or text.index(end) < text.index(start):
        raise FormatError(f"the file has no section between {start} and {end}")
    return "\n".join([text[:text.index(start)] + start, *section(rows), end + text[text.index(end) + len(end):]])


# The plot

def spread(values: Sequence[float], gap: float) -> list[float]:
    """The values moved apart as little as needed for neighbours to be `gap` apart, in their order.

    >>> spread([1.0, 1.0, 5.0], 1.0)
    [0.5, 1.5, 5.0]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    groups: list[list[float]] = []  # of each run of labels that touch: their number and the centre
    for i in order:
        groups.append([1, values[i]])
        while len(groups) > 1 and groups[-1][1] - groups[-2][1] < gap * (groups[-1][0] + groups[-2][0]) / 2:
            (n, a), (m, b) = groups[-2:]
            groups[-2:] = [[n + m, (n * a + m * b) / (n + m)]]
    moved = [centre + gap * (k - (n - 1) / 2) for n, centre in groups for k in range(int(n))]
    return [moved[order.index(i)] for i in range(len(values))]


def draw(rows: Sequence[Row], path: str) -> None:
    """The product's microseconds per token, and the model's speed beside that with scan where it was measured, as a PNG; a line on stderr without
    matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note("note: no plot: matplotlib is not installed; pip install 'pyggml[plot]'")
        return
    about, found, model = of_kind(rows, "about")[0], best(of_kind(rows, "product")), model_speeds(of_kind(rows, "model"))
    coloured = [form for form in found if not form.startswith("ggml")]
    colours = {form: GREY if form not in coloured else COLOURS[coloured.index(form)] for form in found}
    panels = 2 if model else 1
    figure = Figure(figsize=(8, 4.6 * panels), layout="constrained")
    axes = figure.subplots(panels, squeeze=False)[:, 0]
    axes[0].set_yscale("log")
    _lines(axes[0], {form: {n: r["us_per_token"] for n, r in points.items()} for form, points in found.items()}, colours)
    axes[0].set_ylabel("us per token")
    axes[0].set_title(f"one layer's product ({about['shape']}), the fastest chunk: lower is better", fontsize=11)
    if model:
        relative = {way: {n: ts / model[SCAN][n] for n, ts in points.items()} for way, points in model.items()}
        _lines(axes[1], relative, {way: colours.get(way.split(", noop")[0], GREY) for way in model})
        axes[1].set_ylabel("times scan")
        axes[1].set_title(f"{about['model']}, prefill, times the speed of scan: higher is better", fontsize=11)
    figure.savefig(path, dpi=160)
    note(f"wrote {path}")


def _lines(axes: Any, series: Mapping[str, Points], colours: Mapping[str, str]) -> None:
    """Curves over the ubatch on a logarithmic scale, each with its name at its right end."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
    for way, points in series.items():
        style: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.2} if is_ceiling(way) else {"marker": "o", "markersize": 4, "linewidth": 1.8}
        axes.plot(list(points), list(points.values()), color=colours[way], **style)
    ticks = sorted({n for points in series.values() for n in points})
    axes.set_xscale("log", base=2)
    low, high = (f(v for points in series.values() for v in points.values()) for f in (min, max))
    axes.set_ylim(*((low / 1.25, high * 1.25) if axes.get_yscale() == "log" else (low - 0.05 * high, 1.05 * high)))
    ends = {way: (max(points), points[max(points)]) for way, points in series.items() if points}
    into_axes = axes.transScale + axes.transLimits
    heights = [float(into_axes.transform(end)[1]) for end in ends.values()]
    for (way, end), height in zip(ends.items(), spread(heights, LABEL_HEIGHT), strict=True):
        axes.annotate(way, end, xytext=(1.03, height), textcoords="axes fraction", color=colours[way], fontsize=9.5, va="center",
                      arrowprops={"arrowstyle": "-", "color": colours[way], "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.tick_params(labelsize=9)
    axes.set_xlabel("ubatch (tokens per graph)")
    axes.grid(True, linewidth=0.4, color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
