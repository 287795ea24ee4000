"""Weights in registers: for each type the LLVM IR that turns the bytes of a unit, some neighbouring weights of a row, into vectors of
16 float32.

A unit's builder yields its vectors one by one in the order of the weights, so that a kernel uses each while it is in a register and
goes on. Values are those of pyggml.quants.dequantize, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pyggml.cpu.vector import LANES, bytes_to_floats, halves_to_floats, load, load_bytes, load_floats, splat


class Unit(NamedTuple):
    """n weights in nbytes bytes, and the builder (builder, ir, pointer) of their vectors."""

    n: int
    nbytes: int
    build: Callable[[Any, Any, Any], Iterator[Any]]


def _at(b: Any, ir: Any, p: Any, offset: int) -> Any:
    return b.gep(p, [ir.IntType(64)(offset)])


def _f32(b: Any, ir: Any, p: Any) -> Iterator[Any]:
    yield load_floats(b, ir, p)


def _f16(b: Any, ir: Any, p: Any) -> Iterator[Any]:
    yield halves_to_floats(b, ir, load(b, ir, p, ir.IntType(16), LANES, 2))


def _bf16(b: Any, ir: Any, p: Any) -> Iterator[Any]:
    i32 = ir.VectorType(ir.IntType(32), LANES)
    v = b.zext(load(b, ir, p, ir.IntType(16), LANES, 2), i32)
    yield b.bitcast(b.shl(v, ir.Constant(i32, [16] * LANES)), ir.VectorType(ir.FloatType(), LANES))


def _half(b: Any, ir: Any, p: Any, offset: int) -> Any:
    """The float16 at byte `offset`, in all lanes."""
    return halves_to_floats(b, ir, splat(b, ir, b.load(b.bitcast(_at(b, ir, p, offset), ir.IntType(16).as_pointer()), align=2)))


def _q8_0(b: Any, ir: Any, p: Any) -> Iterator[Any]:
    d = _half(b, ir, p, 0)
    for k in (2, 18):
        yield b.fmul(d, bytes_to_floats(b, ir, load_bytes(b, ir, _at(b, ir, p, k), LANES)))


UNITS: dict[str, Unit] = {
    "f32": Unit(16, 64, _f32), "f16": Unit(16, 32, _f16), "bf16": Unit(16, 32, _bf16), "q8_0": Unit(32, 34, _q8_0),
}
