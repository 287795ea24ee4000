"""What this machine can do at most: bytes read per second from a working set of some size, and float32 multiply-adds per second.

Perf rows are held against it. Each number is the best launch of one second on the threads that are asked for; a launch
works for milliseconds, so what starting it costs is not in it.
"""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cpu import CpuBackend
from pyggml.cpu.simd import at, intrinsic, ld_f32, st_f32
from pyggml.cpu.vector import LANES, load_floats, loop, multiply_add, shuffle, splat, wide_registers
from pyggml.dtypes import F32
from pyggml.graph import Graph
from pyggml.registry import KernelDef, OpDef, Spec, out
from pyggml.tensor import Tensor, tensor

SECONDS = 1.0
SMALLEST, LARGEST = 16 << 10, 256 << 20
LAUNCH_BYTES, LAUNCH_STEPS = 64 << 20, 1 << 17  # work of one launch
SUMS = 8  # vectors that are summed side by side


def _sum(b: Any, ir: Any, values: list[Any]) -> Any:
    """Sum of all lanes of vectors, so that no lane's work can be left out."""
    total, width = values[0], LANES
    for v in values[1:]:
        total = b.fadd(total, v)
    while width > 1:
        width //= 2
        total = b.fadd(*(shuffle(b, ir, total, total, [*range(k, k + width)]) for k in (0, width)))
    return b.extract_element(total, ir.IntType(32)(0))


@intrinsic("f32(ptr, i64)")
def read_floats(b: Any, ir: Any, p: Any, n: Any) -> Any:
    """Load n float32, a multiple of SUMS x LANES, and sum them."""
    i64, step = ir.IntType(64), SUMS * LANES
    zero = ir.Constant(ir.VectorType(ir.FloatType(), LANES), [0.0] * LANES)

    def body(i: Any, sums: list[Any]) -> list[Any]:
        start = b.mul(i, i64(4 * step))
        return [b.fadd(s, load_floats(b, ir, b.gep(p, [b.add(start, i64(4 * LANES * k))]))) for k, s in enumerate(sums)]

    return _sum(b, ir, loop(b, ir, b.sdiv(n, i64(step)), [zero] * SUMS, body))


@intrinsic("f32(i64, f32)")
def multiply_adds(b: Any, ir: Any, n: Any, x: Any) -> Any:
    """n rounds of a multiply-add on each of `chains()` vectors."""
    xs = splat(b, ir, x)
    starts = [b.fadd(xs, ir.Constant(xs.type, [float(k)] * LANES)) for k in range(chains())]
    return _sum(b, ir, loop(b, ir, n, starts, lambda i, values: [multiply_add(b, ir, v, xs, xs) for v in values]))


def chains() -> int:
    """Independent multiply-adds that fit into the registers."""
    return 16 if wide_registers() else 5


def _read(y: Any, x: Any, passes: Any, i0: Any, i1: Any) -> None:
    for i in range(i0, i1):
        for _ in range(passes):
            st_f32(at(y.p, i * y.nb1), 0, read_floats(at(x.p, i * x.nb1), x.ne0))


def _multiply(y: Any, x: Any, n: Any, i0: Any, i1: Any) -> None:
    for i in range(i0, i1):
        st_f32(at(y.p, i * y.nb1), 0, multiply_adds(n, ld_f32(x.p, i)))


def _rule(x: Tensor, n: int) -> Spec:
    return out(F32, 16, x.ne[1])  # a cache line for each thread


def _op(name: str, fn: Any) -> OpDef:
    """An op outside of the table: no user of ops meets it."""
    d = OpDef(name, _rule, ("x",), ("out",), "probe", False, None, False, 0.0)
    d.kernels["cpu"] = [KernelDef(fn.__name__, fn, None, {"params": lambda node: [node.params["n"]], "chunk": lambda node: 1})]
    return d


class Ceiling(NamedTuple):
    """Bytes read and float32 operations done per second, at most."""

    bytes_per_second: float
    flops: float

    def seconds(self, flops: float, nbytes: float) -> tuple[float, str]:
        """The least time that this much work takes, and what it waits for."""
        memory, compute = nbytes / self.bytes_per_second, flops / self.flops
        return (memory, "memory") if memory >= compute else (compute, "compute")


def ceiling(nbytes: float, threads: int) -> Ceiling:
    """The ceiling for a working set of this size, measured once per power of two."""
    size = SMALLEST
    while size < min(nbytes, LARGEST):
        size *= 2
    return Ceiling(bandwidth(size, threads), peak_flops(threads))


@functools.cache
def bandwidth(size: int, threads: int) -> float:
    """Bytes per second read from a working set of `size` bytes, an equal part by each thread."""
    step = 4 * SUMS * LANES
    row = max(step, size // threads // step * step)
    passes = max(1, LAUNCH_BYTES // (row * threads))
    x = tensor([row // 4, threads], "f32", name="x")
    return row * threads * passes / _best(_op("PROBE_READ", _read)(x, passes), x, threads)


@functools.cache
def peak_flops(threads: int) -> float:
    """float32 multiply-adds per second on all threads, each counted as two."""
    x = tensor([1, threads], "f32", name="x")
    return 2.0 * LANES * chains() * LAUNCH_STEPS * threads / _best(_op("PROBE_FMA", _multiply)(x, LAUNCH_STEPS), x, threads)


def _best(y: Tensor, x: Tensor, threads: int) -> float:
    """Seconds of the fastest launch of SECONDS of launches."""
    runner = CpuBackend(threads=threads).compile(Graph([y]))
    runner.set(x, np.full(x.ne[::-1], 1e-3, np.float32))
    runner.run()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        runner.run()
        best = min(best, time.perf_counter() - start)
    return best
