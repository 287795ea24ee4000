"""Options and small formats that several tools share."""

from __future__ import annotations

import argparse
import sys

from pyggml.models import Model, demo_path, load_model


def whole(least: int, most: int = 1 << 31) -> type:
    """An argparse type: a whole number from least to most."""
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}; legal: a whole number from {least} to {most}")
        return value
    return parse  # type: ignore[return-value]


def chunk(text: str) -> int | str:
    """An argparse type: a number of tokens, or none."""
    if text == "none":
        return text
    value: int = whole(1)(text)
    return value


def model_options(p: argparse.ArgumentParser) -> None:
    """-m and what a context takes."""
    p.add_argument("-m", "--model", metavar="FILE", help="GGUF file (default: the bundled model)")


def context_options(p: argparse.ArgumentParser) -> None:
    """Options of a context, by llama.cpp's names."""
    p.add_argument("-c", "--ctx-size", type=whole(1), default=4096, metavar="N", help="tokens of context (4096)")
    p.add_argument("-ub", "--ubatch-size", type=whole(1), default=512, metavar="N", help="tokens per graph (512)")
    p.add_argument("-t", "--threads", type=whole(1, 256), metavar="N", help="threads (all cores)")
    p.add_argument("--mamba2", choices=("auto", "scan", "ssd"), default="auto", help="graph of the Mamba2 layers (auto)")
    p.add_argument("--chunk", type=chunk, metavar="N|none", help="tokens per chunk of the ssd graph; none: one chunk (default: by a limit on plan memory)")
    p.add_argument("-ctk", "--cache-type-k", choices=("f32", "f16", "bf16"), default="f16", metavar="TYPE", help="type of the K cache: f32, f16, bf16 (f16)")
    p.add_argument("-ctv", "--cache-type-v", choices=("f32", "f16", "bf16"), default="f16", metavar="TYPE", help="type of the V cache (f16)")
    p.add_argument("--type-r", choices=("f32", "f16", "bf16"), default="f32", metavar="TYPE", help="type of the conv states (f32)")
    p.add_argument("--type-s", choices=("f32", "f16", "bf16"), default="f32", metavar="TYPE", help="type of the SSM states (f32)")


def open_model(args: argparse.Namespace) -> Model:
    """The model of -m, or the bundled one."""
    return load_model(args.model or demo_path())


def compile_line() -> str:
    """What compiling cost this process."""
    from pyggml.cpu.compile import STATS
    if STATS.n_compiled:
        return f"{STATS.n_compiled} kernels in {STATS.seconds:.1f} s (once per machine)"
    return f"nothing to do, {STATS.n_loaded} kernels from the cache"


def note(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


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
