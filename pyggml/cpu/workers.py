"""Compiling processes: two, started when a kernel is missing, kept for a while because the next request often follows.

Each reads pickled requests (level, folder, [(key, recipe), ...]) from stdin and answers one line per kernel; after IDLE
seconds without a request it ends. numba therefore never runs in the user's process, and two kernels compile at a time.
"""

from __future__ import annotations

import os
import pickle
import select
import selectors
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyggml.errors import KernelError

N_WORKERS = 2
IDLE_SECONDS = 10.0
_LENGTH = struct.Struct("<Q")
_workers: dict[str, list[subprocess.Popen[bytes]]] = {}  # by level: numba is set up for one level per process

Job = tuple[str, bytes]  # key, packed recipe


def compile_jobs(level: str, folder: Path, jobs: list[Job], on_done: Callable[[int], None]) -> list[str]:
    """Compile jobs into `folder`; `on_done(n)` after each. Error messages, one per failed kernel."""
    left, errors, n_done = dict(jobs), [], 0
    try:
        for _ in range(2):  # again for what a worker that was just ending did not take
            for line in _answers(level, folder, list(left.items())):
                key, _, outcome = line.partition(" ")
                if left.pop(key, None) is not None:
                    n_done += 1
                    on_done(n_done)
                if outcome.startswith("error "):
                    errors.append(outcome[6:])
            if not left:
                return errors
    except BaseException:  # Ctrl-C too: a worker left in the middle of its jobs would answer the next caller with them
        _stop(level)
        raise
    codes = [w.poll() for w in _workers[level]]
    _stop(level)
    raise KernelError(f"{len(left)} kernels were not compiled: the compiling processes ended with codes {codes}")


def _answers(level: str, folder: Path, jobs: list[Job]) -> Iterator[str]:
    """Lines of all workers as they come, until every job is answered or its worker has ended."""
    shares = [s for s in (jobs[i::N_WORKERS] for i in range(N_WORKERS)) if s]
    with selectors.DefaultSelector() as sel:
        for i, share in enumerate(shares):
            worker = _worker(level, i)
            assert worker.stdin is not None and worker.stdout is not None
            data = pickle.dumps((level, str(folder), share))
            try:
                worker.stdin.write(_LENGTH.pack(len(data)) + data)
                worker.stdin.flush()
            except BrokenPipeError:  # it ended between two requests; its share is sent again
                worker.wait()
                continue
            sel.register(worker.stdout, selectors.EVENT_READ, [len(share), b"", worker])
        while sel.get_map():
            for event, _ in sel.select():
                data = os.read(event.fd, 65536)
                *lines, event.data[1] = (event.data[1] + data).split(b"\n")
                event.data[0] -= len(lines)
                yield from (x.decode() for x in lines)
                if not data:
                    event.data[2].wait()  # an ending process closes its pipes first: it must not be taken for a living one again
                if not data or event.data[0] <= 0:
                    sel.unregister(event.fileobj)


def _worker(level: str, i: int) -> subprocess.Popen[bytes]:
    team = _workers.setdefault(level, [])
    while len(team) <= i:
        team.append(_start())
    if team[i].poll() is not None:
        _close(team[i])
        team[i] = _start()
    return team[i]


def _start() -> subprocess.Popen[bytes]:
    path = [*sys.path, str(Path(__file__).resolve().parents[2])]  # the user's: -c alone would put the current folder first
    code = f"import sys; sys.path[:] = {path!r}; from pyggml.cpu.workers import serve; serve()"
    # A process group of its own: Ctrl-C at the terminal reaches the user's process alone, which ends its workers.
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)


def _stop(level: str) -> None:
    for w in _workers.pop(level, []):
        w.kill()
        _close(w)


def _close(w: subprocess.Popen[bytes]) -> None:
    w.wait()
    for pipe in (w.stdin, w.stdout):
        if pipe is not None and not pipe.closed:
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # bytes that the ended process never read


def serve() -> None:
    """A compiling process's main loop; it ends with its parent (end of file), or when idle."""
    from pyggml.cpu.compile import compile_object, prepare_numba, unpack, write_object
    prepared = False
    stdin = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # unbuffered, so that select sees every request
    while select.select([stdin], [], [], IDLE_SECONDS)[0]:
        head = _read_exactly(stdin, _LENGTH.size)
        if head is None:
            return
        body = _read_exactly(stdin, _LENGTH.unpack(head)[0])
        if body is None:
            return
        level, folder, jobs = pickle.loads(body)
        if not prepared:
            prepare_numba(level)
            prepared = True
        for key, recipe in jobs:
            try:
                symbol, code = compile_object(unpack(recipe))
                write_object(Path(folder) / f"{key}.o", symbol, code)
                outcome = "ok"
            except (KernelError, OSError) as e:
                outcome = f"error {e}"
            try:
                os.write(sys.stdout.fileno(), f"{key} {outcome}\n".encode())
            except BrokenPipeError:
                return  # the user's process is gone


def _read_exactly(stream: Any, n: int) -> bytes | None:
    data = b""
    while len(data) < n:
        part = stream.read(n - len(data))
        if not part:
            return None
        data += part
    return data
