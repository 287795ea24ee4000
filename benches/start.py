"""What a start costs: time from the start of the process to the first token, memory at its highest, and compiling all kernels.

    python benches/start.py -m FILE[,FILE..] [-r N] > docs/reports/start.md

`pyggml run -n 1` as processes of their own. The first start of a file has an empty folder for compiled kernels, the others find them there.
"Beside the file": the largest resident size less the file, which is mapped, the KV cache and the states. As Markdown.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pyggml as pg
from pyggml.cpu.level import describe

PROMPT = "Captain Wentworth had"
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
MIB = UNITS["MiB"]


class Start(NamedTuple):
    """Seconds to the first token, seconds to the end, CPU seconds, largest resident bytes, what was written to stderr."""

    first: float
    wall: float
    cpu: float
    rss: int
    notes: str


def start(model: str, cache: str) -> Start:
    """One process."""
    with tempfile.TemporaryFile("w+") as notes:
        begin = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "pyggml", "run", "-m", model, "-p", PROMPT, "-n", "1", "--temp", "0"], stdout=subprocess.PIPE,
                                   stderr=notes, env={**os.environ, "XDG_CACHE_HOME": cache})
        assert process.stdout is not None
        seen = process.stdout.read(len(PROMPT.encode()) + 1)  # the prompt, and something of the token or the end of the line
        first = time.perf_counter() - begin
        process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        notes.seek(0)
        text = notes.read()
    if process.returncode or not seen.startswith(PROMPT.encode()):
        raise SystemExit(text)
    return Start(first, wall, used.ru_utime + used.ru_stime, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024), text)


def in_notes(pattern: str, notes: str) -> float:
    """A number of the lines that `pyggml run` ends with; 0 where it is not there."""
    found = re.search(pattern, notes)
    return float(found[1]) if found else 0.0


def kept_bytes(notes: str) -> float:
    """Bytes of the KV cache and the states."""
    return sum(float(n) * UNITS[unit] for n, unit in re.findall(r"(?:kv|state) ([0-9.]+) ([KMG]?i?B)", notes))


def main() -> None:
    """Measure and print the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", default=str(pg.models.demo_path()), metavar="FILE,..", help="GGUF files (the bundled model)")
    p.add_argument("-r", type=int, default=7, metavar="N", help="starts, of which the medians are printed (7)")
    args = p.parse_args()
    m = describe()
    print(f"# Starting\n\n{m['cpu']}, {m['cores']} cores, level {m['level']}; Python {sys.version.split()[0]}, pyggml {pg.__version__}; medians of {args.r} "
          "starts.\n`python benches/start.py -m FILE,..`\n")
    print("| file | MiB | kernels | compiled in s | first token s | process s | CPU s | peak RSS MiB | beside the file MiB |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for model in args.m.split(","):
        with tempfile.TemporaryDirectory() as cache:
            cold = start(model, cache)
            warm = [start(model, cache) for _ in range(args.r)]
        size, rss = Path(model).stat().st_size, median(s.rss for s in warm)
        kernels, seconds = in_notes(r"compile +([0-9]+) kernel", cold.notes), in_notes(r"kernels? in ([0-9.]+) s", cold.notes)
        times = " | ".join(f"{median(t):.2f}" for t in ([s.first for s in warm], [s.wall for s in warm], [s.cpu for s in warm]))
        print(f"| {Path(model).name} | {size / MIB:.0f} | {kernels:.0f} | {seconds:.1f} | {times} | {rss / MIB:.0f} "
              f"| {(rss - size - kept_bytes(cold.notes)) / MIB:.0f} |", flush=True)


if __name__ == "__main__":
    main()
