"""Options and small formats that several tools share."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyggml.backends.base import PRECISIONS
from pyggml.errors import ParamError
from pyggml.models import Model, demo_path, load_model
from pyggml.models.layers import FORMS
from pyggml.models.loader import FLOAT_TYPES, KV_TYPES
from pyggml.ops.ssd.defs import SSD_PRECISIONS
from pyggml.runtime.context import Context

FLASH_ATTN: dict[str, bool | str] = {"on": True, "off": False, "auto": "auto"}


def whole(least: int, most: int = 1 << 31) -> Callable[[str], int]:
    """An argparse type: a whole number from least to most."""
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}; legal: a whole number from {least} to {most}")
        return value
    return parse


def numbers(least: int) -> Callable[[str], list[int]]:
    """An argparse type: whole numbers of at least `least`, separated by commas."""
    one = whole(least)
    return lambda text: [one(x) for x in text.split(",")]


def chunk(text: str) -> int | str:
    """An argparse type: a number of tokens, or none."""
    if text == "none":
        return text
    return whole(1)(text)


def precision(text: str) -> str:
    """An argparse type: a precision of SSD_SCAN."""
    if text not in SSD_PRECISIONS:
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r}; legal: {', '.join(SSD_PRECISIONS)}")
    return text


def attention(text: str) -> str:
    """An argparse type: a key of FLASH_ATTN, or llama-bench's 0 and 1."""
    found = {"0": "off", "1": "on"}.get(text, text)
    if found not in FLASH_ATTN:
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r}; legal: {', '.join(FLASH_ATTN)}, 0, 1")
    return found


def form(text: str) -> str | Callable[..., Any]:
    """An argparse type: a form of the Mamba2 layers by name, or a user's function."""
    if text in ("auto", *FORMS):
        return text
    if ":" not in text:
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r}; legal: auto, {', '.join(FORMS)}, FILE.py:FUNCTION, MODULE:FUNCTION")
    try:
        return load_function(text)
    except ParamError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def load_function(text: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION or MODULE:FUNCTION names; ParamError where there is none."""
    where, _, name = text.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except (ImportError, OSError, SyntaxError, ValueError) as e:
        raise ParamError(f"{text!r}: {where or 'no module'} cannot be imported: {e}") from None
    found = getattr(module, name, None)
    if not callable(found):
        raise ParamError(f"{text!r}: {where} has no function {name!r}")
    return found


def form_name(value: str | Callable[..., Any]) -> str:
    """How a form is printed: its name, or the function's."""
    return value if isinstance(value, str) else getattr(value, "__name__", repr(value))


def model_options(p: argparse.ArgumentParser) -> None:
    """-m and what a context takes."""
    p.add_argument("-m", "--model", metavar="FILE", help="GGUF file (default: the bundled model)")


def context_options(p: argparse.ArgumentParser, n_ctx: int = 4096) -> None:
    """Options of a context, by llama.cpp's names."""
    p.add_argument("-c", "--ctx-size", type=whole(1), default=n_ctx, metavar="N", help=f"tokens of context ({n_ctx})")
    p.add_argument("-ub", "--ubatch-size", type=whole(1), default=512, metavar="N", help="tokens per graph (512)")
    p.add_argument("-t", "--threads", type=whole(1, 256), metavar="N", help="threads (all cores)")
    p.add_argument("--prec", choices=PRECISIONS, default="auto", help="auto, or f32: no kernel rounds what it reads (auto)")
    p.add_argument("-fa", "--flash-attn", type=attention, default="auto", metavar="on|off|auto", help="attention as one op: on, off, or where the backend "
                   "has it (auto)")
    p.add_argument("--mamba2", type=form, default="auto", metavar="FORM", help="graph of the Mamba2 layers: auto, scan, ssd, ssd-fused, or a function of "
                   "yours as FILE.py:FUNCTION or MODULE:FUNCTION, with the signature of mamba2_layer (auto)")
    p.add_argument("--chunk", type=chunk, metavar="N|none", help="tokens per chunk of the ssd forms; none: one chunk (default: by a limit on plan memory)")
    p.add_argument("--ssd-precision", type=precision, default="f32", metavar="P", help=f"precision of ssd and ssd-fused: {', '.join(SSD_PRECISIONS)}, "
                   "which rounds where the CPU is faster with it (f32)")
    p.add_argument("-ctk", "--cache-type-k", choices=KV_TYPES, default="f16", metavar="TYPE", help=f"type of the K cache: {', '.join(KV_TYPES)} (f16)")
    p.add_argument("-ctv", "--cache-type-v", choices=KV_TYPES, default="f16", metavar="TYPE", help="type of the V cache (f16)")
    p.add_argument("--type-r", choices=FLOAT_TYPES, default="f32", metavar="TYPE", help="type of the conv states (f32)")
    p.add_argument("--type-s", choices=FLOAT_TYPES, default="f32", metavar="TYPE", help="type of the SSM states (f32)")


def open_model(args: argparse.Namespace) -> Model:
    """The model of -m, or the bundled one."""
    return load_model(demo_path() if args.model is None else args.model)


def open_context(model: Model, args: argparse.Namespace, *, n_ctx: int | None = None, n_seq_max: int = 1) -> Context:
    """A context as `context_options` ask, of n_ctx tokens instead where that is given."""
    return model.context(threads=args.threads, prec=args.prec, n_ctx=n_ctx or args.ctx_size, n_ubatch=args.ubatch_size, n_seq_max=n_seq_max,
                         mamba2=args.mamba2, chunk=args.chunk, ssd_precision=args.ssd_precision, flash_attn=FLASH_ATTN[args.flash_attn],
                         type_k=args.cache_type_k, type_v=args.cache_type_v, type_r=args.type_r, type_s=args.type_s)


def read_text(path: str, option: str = "-f") -> str:
    """The text of a UTF-8 file; ParamError, naming the option, where there is none."""
    try:
        return Path(path).read_bytes().decode("utf-8")  # as it is: no line end is translated
    except OSError as e:
        raise ParamError(f"{option} {path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ParamError(f"{option} {path}: byte {e.start} is not UTF-8") from None


def compile_line() -> str:
    """What compiling cost this process."""
    from pyggml.cpu.compile import STATS
    if STATS.n_compiled:
        return f"{counted(STATS.n_compiled, 'kernel')} in {STATS.seconds:.1f} s (once per machine)"
    return f"nothing to do, {counted(STATS.n_loaded, 'kernel')} from the cache"


def note(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def counted(n: int, noun: str) -> str:
    """2, "kernel" -> 2 kernels."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def human_bytes(n: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def human_count(n: int) -> str:
    """5999736 -> 6.00 M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return str(n)
