"""The sub-commands of the `pyggml` program, one file each: `parser(sub)` adds its options, `main(args)` runs it.

Results go to stdout, progress and notes to stderr. Exit codes: 0 done, 1 a fault that one line on stderr names, 2 wrong usage.
"""

from __future__ import annotations

if __name__ == "tools":
    raise ImportError("this folder is the package pyggml.tools: write `import pyggml.tools`, not `import tools`")

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from pyggml import __version__
from pyggml.errors import PyggmlError

COMMANDS = {"run": "predict text with a model", "info": "machine, kernels, and what a model file holds", "demo": "the bundled model in both graphs"}


def main(argv: Sequence[str] | None = None) -> int:
    """The `pyggml` program."""
    top = argparse.ArgumentParser(prog="pyggml", description="Graphs of state-space models, in Python at native speed.")
    top.add_argument("--version", action="version", version=f"pyggml {__version__}")
    subs = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    args_list = list(sys.argv[1:] if argv is None else argv)
    for name, text in COMMANDS.items():
        sub = subs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name in args_list[:1]:  # only the asked tool is imported
            import_module(f"pyggml.tools.{name}").options(sub)
    args = top.parse_args(args_list)
    try:
        code: int = import_module(f"pyggml.tools.{args.command}").main(args)
        sys.stdout.flush()
        return code
    except PyggmlError as e:
        print(f"pyggml {args.command}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\npyggml {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush meets no closed pipe
        return 1
