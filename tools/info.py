"""`pyggml info`: the machine and its kernels, what a model file holds, and with --check whether the file is sound."""

from __future__ import annotations

import argparse
import math
import os
from collections import defaultdict
from importlib.metadata import version
from typing import Any

from pyggml import __version__
from pyggml.cpu.compile import cache_folder
from pyggml.cpu.level import describe
from pyggml.errors import ModelError, escaped
from pyggml.gguf import GGUFFile, check_gguf, read_gguf
from pyggml.models import Model, demo_path
from pyggml.tools.common import human_bytes, human_count, model_options


def options(p: argparse.ArgumentParser) -> None:
    """Options."""
    model_options(p)
    p.add_argument("--check", action="store_true", help="verify the file: header, bounds, padding, NaN and inf in tensors; exit code 1 on a finding")


def main(args: argparse.Namespace) -> int:
    """Run the tool."""
    path = demo_path() if args.model is None else args.model
    for line in machine_lines():
        print(line)
    print()
    with read_gguf(path) as f:
        for line in file_lines(f):
            print(line)
        print()
        status = 0
        try:
            print("\n".join(model_lines(Model(f))))
        except ModelError as e:
            print(f"model       not runnable: {str(e).removeprefix(f'{f.path}: ')}")
            status = 1
    if args.check:
        findings = check_gguf(path)
        print("\n".join(["", *(f"check       {x}" for x in findings or ["sound: header, bounds, padding and values"])]))
        status = status or int(bool(findings))
    return status


def machine_lines() -> list[str]:
    """Versions, CPU, kernel level, cache."""
    m = describe()
    kernels = sum(name.endswith(".o") for name in os.listdir(cache_folder()))
    return [f"pyggml      {__version__}, numpy {version('numpy')}, numba {version('numba')}, llvmlite {version('llvmlite')}",
            f"cpu         {m['cpu']}, {m['cores']} cores, kernel level {m['level']}", f"kernels     {kernels} compiled in {cache_folder()}"]


def file_lines(f: GGUFFile) -> list[str]:
    """Size, metadata, tensors by type."""
    n_params = sum(math.prod(t.ne) for t in f.tensors.values())
    nbytes = sum(t.nbytes for t in f.tensors.values())
    lines = [f"file        {escaped(f.path)}", f"            GGUF v{f.version}, {human_bytes(f.size)}, {len(f.metadata)} keys, {len(f.tensors)} tensors"]
    lines += [f"  {escaped(k):<48} {str(f.types[k]):<9} {_short(v)}" for k, v in f.metadata.items()]
    by_type: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for t in f.tensors.values():
        row = by_type[t.dtype.name]
        row[0], row[1], row[2] = row[0] + 1, row[1] + math.prod(t.ne), row[2] + t.nbytes
    largest_first = sorted(by_type.items(), key=lambda x: -x[1][2])
    lines += [f"tensors     {n:4d} {name:<6} {human_count(e):>9} weights {human_bytes(b):>10}" for name, (n, e, b) in largest_first]
    bits = f"{8 * nbytes / n_params:.2f} bits per weight" if n_params else "no weights"
    return [*lines, f"weights     {human_count(n_params)} ({n_params:,}), {bits}"]


def model_lines(m: Model) -> list[str]:
    """Architecture, layers, state sizes."""
    shape = m.memory_shape()
    counts = {k: m.kinds.count(k) for k in dict.fromkeys(m.kinds)}
    kv = 2 * (sum(shape.k) + sum(shape.v))
    state = 4 * sum(math.prod(ne) for ne in (*shape.conv, *shape.ssm) if ne)
    return [f"model       {m.arch}, {len(m.kinds)} layers ({', '.join(f'{n} {k}' for k, n in counts.items())}), vocabulary {m.n_vocab}",
            f"memory      KV {kv} bytes per token (f16), state {human_bytes(state)} per sequence (f32)"]


def _short(value: Any) -> str:
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else repr(value[:57] + "...")
    if hasattr(value, "__len__"):
        head = ", ".join(repr(x.item() if hasattr(x, "item") else x) for x in value[:3])
        return f"[{head}{', ...' if len(value) > 3 else ''}] ({len(value)})"
    return f"{value:g}" if isinstance(value, float) else str(value)
