"""The CPU's level: which instruction sets kernels may use, found through LLVM's host features, and forced lower for tests.

Levels, each including the ones below it: `amx` (AVX-512 with AMX tiles in bf16), `avx512` (F, BW, DQ, VL), `avx2` (with FMA
and F16C), `portable` (what LLVM makes of plain vector IR). Other architectures are `portable`.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from typing import Any

from pyggml.errors import ParamError

LEVELS = ("portable", "avx2", "avx512", "amx")
_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_NEEDS = {"portable": set[str](), "avx2": _AVX2, "avx512": _AVX512, "amx": _AVX512 | {"amx-tile", "amx-bf16"}}
# A stand-in for an older CPU: LLVM's name and the features it may use.
_CPU_NAME = {"portable": "x86-64", "avx2": "haswell", "avx512": "skylake-avx512"}

_target: list[frozenset[str]] = []


@functools.cache
def machine() -> str:
    """x86_64, aarch64, or what the platform calls itself."""
    m = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(m, m)


@functools.cache
def host_features() -> frozenset[str]:
    """Features of this CPU by LLVM's names."""
    import llvmlite.binding as llvm
    return frozenset(k for k, on in llvm.get_host_cpu_features().items() if on)


def n_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_cpu_name() -> str:
    """The CPU model as the system gives it, or LLVM's name; it may be wrong in a virtual machine."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    import llvmlite.binding as llvm
    return str(llvm.get_host_cpu_name())


@functools.cache
def amx_permitted() -> bool:
    """True when the kernel grants this process the AMX tile state (asked for once, on Linux)."""
    if sys.platform != "linux" or machine() != "x86_64":
        return False
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return int(libc.syscall(arch_prctl, request_permission, tile_data)) == 0


@functools.cache
def host_level() -> str:
    """The highest level this CPU and its system offer."""
    if machine() != "x86_64":
        return "portable"
    have = host_features()
    best = "portable"
    for level in LEVELS[1:]:
        if have >= _NEEDS[level] and (level != "amx" or amx_permitted()):
            best = level
    return best


def check_level(level: str | None) -> str:
    """`level`, or the host's when None; ParamError when unknown or beyond this CPU."""
    if level is None:
        return host_level()
    if level not in LEVELS or LEVELS.index(level) > LEVELS.index(host_level()):
        raise ParamError(f"level {level!r}; legal on this CPU: {', '.join(LEVELS[: LEVELS.index(host_level()) + 1])}")
    return level


def numba_target(level: str) -> tuple[str, str]:
    """CPU name and feature string that numba is to compile for: the host's own at its full level."""
    import llvmlite.binding as llvm
    name, features = _CPU_NAME[level] if level in _CPU_NAME else "", ""
    if level == host_level():
        name, features = str(llvm.get_host_cpu_name()), str(llvm.get_host_cpu_features().flatten())
    if "avx512f" in level_features(level):  # LLVM makes vectors of half a register on Intel's, for the clock that old ones lost with whole ones
        features = ",".join(filter(None, [features, "-prefer-256-bit"]))
    return name, features


def level_features(level: str) -> frozenset[str]:
    """Features that kernels of a level may use: the host's own at its full level."""
    return host_features() if level == host_level() else frozenset(_NEEDS[level])


def set_target(level: str) -> None:
    """Say which level the kernels being compiled are for (a compiling process calls it once, before numba is used)."""
    _target[:] = [level_features(level)]


def target_features() -> frozenset[str]:
    """Features that the kernels being compiled may use."""
    return _target[0] if _target else host_features()


def describe() -> dict[str, Any]:
    """What `pyggml info` prints of the machine."""
    return {"cpu": host_cpu_name(), "cores": n_cores(), "level": host_level()}
