"""The tape: kernels in order, walked by a team of threads without Python.

Control block (64-bit words at `ctl`; what several threads write sits on cache lines of its own):
  0 address of the tape (3 words a step: entry, record, flags)   1 steps        2 threads        3 first step of this run
  4 out: the step to go on with                                  5 ns until a pause (0: never)   6 address of per-step end times (0: none)
  7 spins before a thread sleeps                                 8, 16 "go on" of even and odd barriers
  24 job number      32 threads arrived at the barrier      40 barrier phase      48 sleepers      56 quit
Flags of a step: 1 only thread 0 works on it; 2 a barrier follows.

A record's counter is 0 before a run. The last thread to come to a barrier sets back those of the steps since the one before.

Thread 0 decides at a barrier whether the run pauses, so that Python can see a Ctrl-C; the others read the decision after it, in
the word of its parity.
"""

from __future__ import annotations

from typing import Any

from pyggml.cpu.simd import RAISED, atomic_add, atomic_ldw, atomic_stw, call_kernel, clock_ns, helper, ldw, pause, stw, wait_word, wake_word

TAPE, N_STEPS, N_THREADS, FIRST, NEXT, BUDGET, TIMES, SPINS, GO = 0, 1, 2, 3, 4, 5, 6, 7, 8
JOB, ARRIVED, PHASE, SLEEPERS, QUIT, CTL_WORDS = 24, 32, 40, 48, 56, 64
SINGLE, SYNC = 1, 2
COUNTER, STATUS = 2, 3  # words of a record: items taken so far, address of the status words


@helper
def await_change(ctl: Any, index: Any, old: Any) -> Any:
    """Wait until word `index` differs from `old`: spin for a while, then sleep. The new value."""
    spins = ldw(ctl, SPINS)
    now = atomic_ldw(ctl, index)
    while now == old:
        if spins > 0:
            spins -= 1
            pause()
        else:
            atomic_add(ctl, SLEEPERS, 1)
            wait_word(ctl + index * 8, old)
            atomic_add(ctl, SLEEPERS, -1)
        now = atomic_ldw(ctl, index)
    return now


@helper
def barrier(ctl: Any, nth: Any, tape: Any, first: Any, last: Any) -> None:
    """Return when all nth threads have come here, from steps `first` to last - 1."""
    phase = atomic_ldw(ctl, PHASE)
    if atomic_add(ctl, ARRIVED, 1) == nth - 1:
        for i in range(first, last):
            stw(ldw(tape, i * 3 + 1), COUNTER, 0)
        atomic_stw(ctl, ARRIVED, 0)
        atomic_stw(ctl, PHASE, phase + 1)
        if atomic_add(ctl, SLEEPERS, 0) > 0:
            wake_word(ctl + PHASE * 8)
    else:
        await_change(ctl, PHASE, phase)


@helper
def walk(ctl: Any, ith: Any) -> None:
    """Run the tape from its first step to the end or to a pause."""
    tape, n, nth, i = ldw(ctl, TAPE), ldw(ctl, N_STEPS), ldw(ctl, N_THREADS), ldw(ctl, FIRST)
    budget, times, start, parity, first = ldw(ctl, BUDGET), ldw(ctl, TIMES), clock_ns(), 0, i
    while i < n:
        flags = ldw(tape, i * 3 + 2)
        if ith == 0 or flags & SINGLE == 0:
            if call_kernel(ldw(tape, i * 3), ldw(tape, i * 3 + 1), ith, nth) != 0:
                stw(ldw(ldw(tape, i * 3 + 1), STATUS), 0, RAISED)
        i += 1
        if flags & SYNC and nth > 1:
            if ith == 0:
                stw(ctl, GO + parity * 8, 0 if budget > 0 and clock_ns() - start > budget else 1)
            barrier(ctl, nth, tape, first, i)
            first = i
            if ith == 0 and times != 0:
                stw(times, i - 1, clock_ns())
            if ldw(ctl, GO + parity * 8) == 0:
                break
            parity = 1 - parity
        elif nth == 1:
            stw(ldw(tape, i * 3 - 2), COUNTER, 0)
            if times != 0:
                stw(times, i - 1, clock_ns())
            if budget > 0 and clock_ns() - start > budget:
                break
    if ith == 0:
        stw(ctl, NEXT, i)


def run_tape(ctl: Any, ith: Any, nth: Any) -> None:
    """Entry of the calling thread: start the others, walk, meet them at the end."""
    if nth > 1:
        atomic_add(ctl, JOB, 1)
        if atomic_add(ctl, SLEEPERS, 0) > 0:
            wake_word(ctl + JOB * 8)
    walk(ctl, 0)
    if nth > 1:
        barrier(ctl, nth, 0, 0, 0)


def serve_tape(ctl: Any, ith: Any, nth: Any) -> None:
    """Entry of the other threads: walk the tape once per job until told to quit."""
    job = 0
    while True:
        job = await_change(ctl, JOB, job)
        if atomic_ldw(ctl, QUIT) != 0:
            return
        walk(ctl, ith)
        barrier(ctl, nth, 0, 0, 0)


def wake_all(ctl: Any, ith: Any, nth: Any) -> None:
    """Entry that starts a job without walking it: with the quit word set, the other threads return."""
    atomic_add(ctl, JOB, 1)
    wake_word(ctl + JOB * 8)
