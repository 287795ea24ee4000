"""The team: n - 1 threads that wait in native code for a tape to walk, and the caller's thread that leads them."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time

import numpy as np

from pyggml.cpu import tape as tp
from pyggml.cpu.compile import KernelSpec, kernels_for
from pyggml.cpu.level import n_cores
from pyggml.errors import ParamError

SPIN_PAUSES = 2000
PAUSE_NS = 50_000_000  # how long a run may keep Python from seeing a signal
MAX_THREADS = 256
_ENTRY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


TAPE_KERNELS = [KernelSpec(f, raw=True) for f in (tp.run_tape, tp.serve_tape, tp.wake_all)]


def check_threads(n: int) -> int:
    """n, or ParamError."""
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_THREADS:
        raise ParamError(f"threads: {n!r}; legal: 1 to {MAX_THREADS}")
    return n


def clock_ns() -> int:
    """The clock of a tape's times, where the platform has it (see cpu.simd.clock_ns), else 0."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) if hasattr(time, "CLOCK_MONOTONIC") else 0


def aligned(nbytes: int, align: int = 64) -> np.ndarray:
    """A zeroed uint8 array whose first byte is aligned."""
    raw = np.zeros(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start:start + nbytes]


class Team:
    """`n_threads` threads that run tapes together. One run at a time: concurrent callers wait for each other. `start_ns`: the clock when
    the last run began."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = check_threads(n_threads)
        self._lock = threading.Lock()
        self._ctl = aligned(tp.CTL_WORDS * 8).view(np.int64)
        self._run, self._serve, self._wake = (_ENTRY(a) for a in kernels_for().addresses(TAPE_KERNELS))
        self._threads: list[threading.Thread] = []
        self.start_ns = 0
        # More threads than cores: whoever spins only keeps the one it waits for from running.
        self._ctl[tp.SPINS] = SPIN_PAUSES if n_threads <= n_cores() else 0
        self._ctl[tp.N_THREADS] = n_threads

    def _call(self, fn: ctypes._FuncPointer, ith: int) -> None:
        unused = np.zeros(8, np.int64)  # numba's convention has places for a result and an exception first
        fn(unused.ctypes.data, unused.ctypes.data, self._ctl.ctypes.data, ith, self.n_threads)

    def run(self, tape: np.ndarray, times: np.ndarray | None = None) -> None:
        """Walk a tape (int64, 3 words a step). `times` receives the clock in ns at the end of each step that ends in a
        barrier. A KeyboardInterrupt leaves it between two steps."""
        with self._lock:
            if self.n_threads > 1 and not self._threads:
                self._start()
            ctl = self._ctl
            ctl[tp.TAPE], ctl[tp.N_STEPS], ctl[tp.FIRST], ctl[tp.BUDGET] = tape.ctypes.data, len(tape) // 3, 0, PAUSE_NS
            ctl[tp.TIMES] = 0 if times is None else times.ctypes.data
            self.start_ns = clock_ns()
            while ctl[tp.FIRST] < ctl[tp.N_STEPS]:
                self._call(self._run, 0)
                ctl[tp.FIRST] = ctl[tp.NEXT]

    def _start(self) -> None:
        self._ctl[tp.JOB] = self._ctl[tp.QUIT] = 0
        for i in range(1, self.n_threads):
            t = threading.Thread(target=self._call, args=(self._serve, i), name=f"pyggml-{i}", daemon=True)
            t.start()
            self._threads.append(t)

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            if self._threads:
                self._ctl[tp.QUIT] = 1
                self._ctl[tp.N_STEPS] = 0
                self._ctl[tp.FIRST] = 0
                self._call(self._wake, 0)
                for t in self._threads:
                    t.join()
                self._threads = []


_teams: dict[int, Team] = {}
_teams_lock = threading.Lock()


def team(n_threads: int) -> Team:
    """The process's team of that size. A forked child gets another one: the threads of its parent's are not there."""
    with _teams_lock:
        if n_threads not in _teams:
            _teams[n_threads] = Team(n_threads)
        return _teams[n_threads]


@atexit.register
def _close_teams() -> None:
    for t in _teams.values():
        t.close()


def _forget_teams() -> None:
    global _teams_lock
    _teams_lock = threading.Lock()  # a thread of the parent may hold the old one
    _teams.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_teams)
