"""The sub-commands of the `pyggml` program, one file each: `options(p)` adds its options to a parser, `main(args)` runs it.

Results go to stdout, progress and notes to stderr. Exit codes: 0 done, 1 a fault that one line on stderr names, 2 wrong usage.
"""

from __future__ import annotations

if __name__ == "tools":
    raise ImportError("this folder is the package pyggml.tools: write `import pyggml.tools`, not `import tools`")

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from pyggml import __version__
from pyggml.errors import PyggmlError

COMMANDS = {
    "run": "predict text with a model",
    "info": "machine, kernels, and what a model file holds",
    "demo": "the bundled model in both graphs",
    "bench": "how fast a model runs, in the manner of llama-bench; what if an op were free; where the time goes",
    "batched-bench": "how fast a model runs several sequences at once, in the manner of llama-batched-bench",
    "report": "results of bench as a table and as plots",
    "perplexity": "how well a model predicts texts, and its distance from another",
    "fabricate": "write a file of a real model's shape with random weights",
    "test-ops": "every op on every backend: right, how fast, supported",
    "graph": "what a graph is made of and what it costs, without running it",
    "trace": "every tensor of a run, and the first one in which two runs differ",
}


def _module(command: str) -> str:
    return f"pyggml.tools.{command.replace('-', '')}"


def main(argv: Sequence[str] | None = None) -> int:
    """The `pyggml` program."""
    top = argparse.ArgumentParser(prog="pyggml", description="Graphs of state-space models, in Python at native speed.")
    top.add_argument("--version", action="version", version=f"pyggml {__version__}")
    subs = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    args_list = list(sys.argv[1:] if argv is None else argv)
    for name, text in COMMANDS.items():
        sub = subs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name in args_list[:1]:  # only the asked tool is imported
            import_module(_module(name)).options(sub)
    args = top.parse_args(args_list)
    if not sys.stderr:
        sys.stderr = open(os.devnull, "w")  # closed; print would take its lines to stdout
    if not sys.stdout:
        print(f"pyggml {args.command}: stdout is closed", file=sys.stderr)
        return 1
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal's encoding lacks is shown as ?
    try:
        code: int = import_module(_module(args.command)).main(args)
        sys.stdout.flush()
        return code
    except PyggmlError as e:
        print(f"pyggml {args.command}: {e}", file=sys.stderr)
        return 1
    except MemoryError as e:
        hint = "; a smaller -c or -ub takes less" if hasattr(args, "ctx_size") else ""
        print(f"pyggml {args.command}: out of memory: {e}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\npyggml {args.command}: interrupted", file=sys.stderr)
        return 130
    except OSError as e:  # a pipe that its reader closed, a full disk
        if not isinstance(e, BrokenPipeError):
            print(f"pyggml {args.command}: {e}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush meets no closed pipe
        return 1
