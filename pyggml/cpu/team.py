"""The team: n - 1 threads that wait in native code for a tape to walk, and the caller's thread that leads them."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading

import numpy as np

from pyggml.cpu import tape as tp
from pyggml.cpu.compile import KernelSpec, kernels_for
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


def n_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def aligned(nbytes: int, align: int = 64) -> np.ndarray:
    """A zeroed uint8 array whose first byte is aligned."""
    raw = np.zeros(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start:start + nbytes]


class Team:
    """`n_threads` threads that run tapes together. One run at a time: concurrent callers wait for each other."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = check_threads(n_threads)
        self._lock = threading.Lock()
        self._ctl = aligned(tp.CTL_WORDS * 8).view(np.int64)
        self._addr = self._ctl.ctypes.data
        self._dummy = np.zeros(8, np.int64)
        self._run, self._serve, self._wake = (_ENTRY(a) for a in kernels_for().addresses(TAPE_KERNELS))
        self._threads: list[threading.Thread] = []
        # More threads than cores: whoever spins only keeps the one it waits for from running.
        self._ctl[tp.SPINS] = SPIN_PAUSES if n_threads <= n_cores() else 0
        self._ctl[tp.N_THREADS] = n_threads

    def _call(self, fn: ctypes._FuncPointer, ith: int) -> None:
        dummy = np.zeros(8, np.int64)
        fn(dummy.ctypes.data, dummy.ctypes.data, self._addr, ith, self.n_threads)

    def run(self, tape: np.ndarray, times: np.ndarray | None = None) -> None:
        """Walk a tape (int64, 3 words a step). `times` receives the clock in ns at the end of each step that ends in a
        barrier. A KeyboardInterrupt leaves it between two steps."""
        with self._lock:
            if self.n_threads > 1 and not self._threads:
                self._start()
            ctl = self._ctl
            ctl[tp.TAPE], ctl[tp.N_STEPS], ctl[tp.FIRST], ctl[tp.BUDGET] = tape.ctypes.data, len(tape) // 3, 0, PAUSE_NS
            ctl[tp.TIMES] = 0 if times is None else times.ctypes.data
            while ctl[tp.FIRST] < ctl[tp.N_STEPS]:
                self._run(self._dummy.ctypes.data, self._dummy.ctypes.data, self._addr, 0, self.n_threads)
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
                self._wake(self._dummy.ctypes.data, self._dummy.ctypes.data, self._addr, 0, self.n_threads)
                for t in self._threads:
                    t.join()
                self._threads = []


@functools.cache
def team(n_threads: int) -> Team:
    """The process's team of that size."""
    t = Team(n_threads)
    atexit.register(t.close)
    return t
