"""What a bench runs: flags with lists and ranges, as llama-bench takes them, and the cross product of what they say."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyggml.backends import NAMES
from pyggml.backends.base import PRECISIONS
from pyggml.cpu.level import n_cores
from pyggml.models import demo_path
from pyggml.models.layers import FORMS
from pyggml.models.loader import CACHE_TYPES, KV_TYPES
from pyggml.ops.ssd.defs import SSD_PRECISIONS
from pyggml.tools.common import attention, chunk, form, precision, whole

Form = str | Callable[..., Any]
MAX_VALUES = 10_000  # of one range: more is a slip of the pen
N_BATCH, N_UBATCH = 2048, 512  # defaults, as llama-bench's
PER_PROMPT = 0
"""The ubatch that stands for the number of tokens of each test's prompt."""
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")


def ranges(least: int) -> Callable[[str], list[int]]:
    """An argparse type: whole numbers and ranges of at least `least`, separated by commas. 8-11 is 8,9,10,11; 8-64+8 adds 8, 8-64*2
    doubles.

    >>> ranges(1)("1,8-32*2,40-48+4")
    [1, 8, 16, 32, 40, 44, 48]
    """
    def parse(text: str) -> list[int]:
        return [n for item in text.split(",") for n in _expand(item, least)]
    return parse


def ubatches(text: str) -> list[int]:
    """An argparse type: whole numbers and ranges from 1 as `ranges` takes them, and `prompt`, which is PER_PROMPT."""
    return [n for item in text.split(",") for n in ([PER_PROMPT] if item.strip() == "prompt" else _expand(item, 1))]


def _expand(item: str, least: int) -> list[int]:
    m = _RANGE.fullmatch(item.strip())
    if m is None:
        raise argparse.ArgumentTypeError(f"{item!r}; legal: a whole number, FIRST-LAST, FIRST-LAST+STEP or FIRST-LAST*FACTOR")
    first, last, how, by = int(m[1]), int(m[2] or m[1]), m[3] or "+", int(m[4] or 1)
    if first < least:
        raise argparse.ArgumentTypeError(f"{item!r}; legal: numbers of at least {least}")
    if last < first or (by < 2 if how == "*" else by < 1) or (how == "*" and first < 1):
        raise argparse.ArgumentTypeError(f"{item!r}: it never ends or is empty; legal: FIRST at most LAST, a STEP of at least 1, a FACTOR of at least 2")
    values = list(itertools.islice(itertools.takewhile(lambda n: n <= last, _numbers(first, how, by)), MAX_VALUES + 1))
    if len(values) > MAX_VALUES:
        raise argparse.ArgumentTypeError(f"{item!r}: more than {MAX_VALUES} values")
    return values


def _numbers(first: int, how: str, by: int) -> Iterator[int]:
    n = first
    while True:
        yield n
        n = n * by if how == "*" else n + by


def pair(text: str) -> list[tuple[int, int]]:
    """An argparse type: PROMPT,GEN of -pg."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r}; legal: PROMPT,GEN, such as 512,128")
    return [(whole(1)(parts[0]), whole(1)(parts[1]))]


def each(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values of another type, separated by commas."""
    return lambda text: [one(x) for x in text.split(",")]


def word(*legal: str) -> Callable[[str], str]:
    """An argparse type: one of these words, whatever its case."""
    def parse(text: str) -> str:
        if text.lower() not in legal:
            raise argparse.ArgumentTypeError(f"{text!r}; legal: {', '.join(legal)}")
        return text.lower()
    return parse


def several(p: argparse.ArgumentParser, *flags: str, kind: Callable[[str], Any], metavar: str, text: str, dest: str | None = None) -> None:
    """An option that takes a list and may be given again, which makes the list longer."""
    more = {} if dest is None else {"dest": dest}
    p.add_argument(*flags, action="extend", type=kind, metavar=metavar, help=text, **more)  # type: ignore[arg-type]


def sweep_options(p: argparse.ArgumentParser) -> None:
    """The Mamba2 options over which tools sweep."""
    several(p, "--mamba2", kind=each(form), metavar="FORM,..", text=f"graphs of the Mamba2 layers: auto, {', '.join(FORMS)}, FILE.py:FUNCTION (auto)")
    several(p, "--chunk", kind=each(chunk), metavar="N|none,..", text="tokens per chunk of the ssd forms (default: by a limit on plan memory)")
    several(p, "--ssd-precision", kind=each(precision), metavar="P,..", text=f"precisions of ssd and ssd-fused: {', '.join(SSD_PRECISIONS)} (f32)")
    several(p, "--type-r", kind=each(word(*CACHE_TYPES)), metavar="TYPE,..", text=f"types of the conv states: {', '.join(CACHE_TYPES)} (f32)")
    several(p, "--type-s", kind=each(word(*CACHE_TYPES)), metavar="TYPE,..", text="types of the SSM states (f32)")


IGNORED = {"-ngl": "there is no GPU backend", "-mmp": "files are always mapped"}


def ignored_options(p: argparse.ArgumentParser) -> None:
    """Options that command lines for llama.cpp hold and that change nothing here; see `note_ignored`."""
    for flags, metavar in ((("-ngl", "--n-gpu-layers"), "N"), (("-mmp", "--mmap"), "0|1")):
        p.add_argument(*flags, dest=flags[0].strip("-"), nargs="?", const="on", metavar=metavar, help=f"accepted; without effect, as {IGNORED[flags[0]]}")


def note_ignored(args: argparse.Namespace) -> str | None:
    """One line that names the options given without effect; None when there are none."""
    given = [f"{flag} ({why})" for flag, why in IGNORED.items() if getattr(args, flag.strip("-")) is not None]
    return f"note: without effect: {', '.join(given)}" if given else None


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model runs: the file and what its context takes. `type_conv`: the type to which conv weights are cast, None for the file's."""

    model: str
    n_batch: int
    n_ubatch: int
    threads: int
    threads_batch: int
    type_k: str
    type_v: str
    type_r: str
    type_s: str
    mamba2: Form
    chunk: int | str | None
    backend: str
    prec: str = "auto"
    ssd_precision: str = "f32"
    type_conv: str | None = None
    flash_attn: str = "auto"


@dataclass(frozen=True, slots=True)
class Case:
    """One test: settings, and tokens of prompt, generation and depth (what the context holds before)."""

    settings: Settings
    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def name(self) -> str:
        """llama-bench's name of the test: pp512, tg128 @ d4096, pp512+tg128."""
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(self.n_gen)
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


def product(args: argparse.Namespace) -> list[Settings]:
    """Every combination of the options that describe how to run, models outermost. A form comes once for all values of what it does not have:
    chunks and precisions in scan."""
    lists: list[Sequence[Any]] = [
        args.model or [str(demo_path())], args.batch_size or [N_BATCH], args.ubatch_size or [N_UBATCH], args.threads or [n_cores()],
        args.threads_batch or [None], args.cache_type_k or ["f16"], args.cache_type_v or ["f16"], args.type_r or ["f32"], args.type_s or ["f32"],
        args.mamba2 or ["auto"], args.chunk or [None], args.backend or ["cpu"], args.prec or ["auto"], args.ssd_precision or ["f32"],
        getattr(args, "type_conv", None) or [None], args.flash_attn or ["auto"]]
    found = (Settings(m, b, min(ub, b), t, tb or t, *rest) for m, b, ub, t, tb, *rest in itertools.product(*lists))
    return list(dict.fromkeys(replace(s, chunk=None if s.mamba2 == "scan" else s.chunk,
                                      ssd_precision="f32" if s.mamba2 == "scan" else s.ssd_precision) for s in found))


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Every test of a bench: for each combination of settings and each depth the prompts, the generations, the pairs."""
    # As in llama-bench, -p, -n and -pg each have their own default, and 0 leaves a kind of test out.
    prompts, gens = args.n_prompt or [512], args.n_gen or [128]
    for settings in product(args):
        for depth in args.n_depth or [0]:
            tests = [*((p, 0) for p in prompts if p), *((0, n) for n in gens if n), *(args.pg or [])]
            yield from (Case(settings if settings.n_ubatch != PER_PROMPT else one_graph(settings, p), p, n, depth) for p, n in tests)


def one_graph(settings: Settings, n_prompt: int) -> Settings:
    """The settings with a ubatch, and a batch at least, of the whole prompt; the default ubatch where there is no prompt."""
    n = n_prompt or min(N_UBATCH, settings.n_batch)
    return replace(settings, n_batch=max(settings.n_batch, n), n_ubatch=n)


def grouped(todo: Iterable[Case]) -> list[list[Case]]:
    """Cases that differ in nothing but form, chunk and its precision together, in the order of each one's first."""
    groups: dict[Case, list[Case]] = {}
    for case in todo:
        groups.setdefault(replace(case, settings=replace(case.settings, mamba2="", chunk=None, ssd_precision="")), []).append(case)
    return list(groups.values())


def context_lists(p: argparse.ArgumentParser, per_prompt: bool = False) -> None:
    """Options of contexts as lists: sizes, threads, cache types, backends. `per_prompt`: the ubatch may be `prompt`."""
    several(p, "-b", "--batch-size", kind=ranges(1), metavar="N,..", text="tokens per call (2048)")
    if per_prompt:
        several(p, "-ub", "--ubatch-size", kind=ubatches, metavar="N|prompt,..", text="tokens per graph; prompt: each test's prompt is one graph (512)")
    else:
        several(p, "-ub", "--ubatch-size", kind=ranges(1), metavar="N,..", text="tokens per graph (512)")
    several(p, "-t", "--threads", kind=ranges(1), metavar="N,..", text="threads (all cores)")
    several(p, "-tb", "--threads-batch", kind=ranges(1), metavar="N,..", text="threads for graphs of several tokens per sequence (as -t)")
    several(p, "-ctk", "--cache-type-k", kind=each(word(*KV_TYPES)), metavar="TYPE,..", text=f"types of the K cache: {', '.join(KV_TYPES)} (f16)")
    several(p, "-ctv", "--cache-type-v", kind=each(word(*KV_TYPES)), metavar="TYPE,..", text="types of the V cache (f16)")
    several(p, "--prec", kind=each(word(*PRECISIONS)), metavar="PREC,..", text="auto, or f32: no kernel rounds what it reads (auto)")
    p.add_argument("-fa", "--flash-attn", action="extend", nargs="?", const=["on"], type=each(attention), metavar="on|off|auto,..",
                   help="attention as one op: on, off, or where the backend has it (auto)")
    several(p, "--backend", kind=each(word(*(n for n in NAMES if n != "null"))), metavar="NAME,..",
            text=f"backends: {', '.join(n for n in NAMES if n != 'null')} (cpu)")
