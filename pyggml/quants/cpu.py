"""Rows of stored weights to float32 on the CPU: `DEQUANT_ROW[type name]` is a helper (src, dst, n) for kernels to bind.

src points at a row's first block, dst at n float32 (n a multiple of the block); the two do not overlap. Values are those
of pyggml.quants.dequantize, bit for bit.
"""

from __future__ import annotations

from typing import Any

from pyggml.cpu.simd import Helper, Intrinsic, at, copy_bytes, helper, ld_bf16, ld_f16, st_f32
from pyggml.cpu.vector import LANES, store_floats
from pyggml.quants.units_cpu import UNITS, Unit


@helper
def dequant_row_f32(src: Any, dst: Any, n: Any) -> Any:
    """A copy."""
    copy_bytes(dst, src, n * 4)


@helper
def dequant_row_f16(src: Any, dst: Any, n: Any) -> Any:
    """Widen halves."""
    for i in range(n):
        st_f32(dst, i, ld_f16(src, i))


@helper
def dequant_row_bf16(src: Any, dst: Any, n: Any) -> Any:
    """Widen bfloat16s."""
    for i in range(n):
        st_f32(dst, i, ld_bf16(src, i))


def _store(name: str, unit: Unit) -> Intrinsic:
    """An intrinsic (dst, src) that stores a unit's weights."""
    def build(b: Any, ir: Any, dst: Any, src: Any) -> None:
        scales = None
        if unit.unpack is not None:
            with b.goto_entry_block():
                space = b.alloca(ir.ArrayType(ir.FloatType(), unit.n_scales))
            scales = b.bitcast(space, src.type)
            unit.unpack(b, ir, src, scales)
        for j, v in enumerate(unit.build(b, ir, src, scales)):
            store_floats(b, b.gep(dst, [ir.IntType(64)(j * LANES * 4)]), v)

    build.__name__ = f"store_{name}"
    return Intrinsic("void(ptr, ptr)", build)


STORES: dict[str, Intrinsic] = {name: _store(name, unit) for name, unit in UNITS.items() if name.startswith("q")}
globals().update({s.name: s for s in STORES.values()})  # a compiling process finds intrinsics by module and name
BLOCK, NBYTES = 32, 34  # bound to the type's


@helper
def store_unit(_dst: Any, _src: Any) -> None:
    """A unit's weights; bound to the type's."""


@helper
def dequant_row_blocks(src: Any, dst: Any, n: Any) -> Any:
    """n weights, block by block."""
    for i in range(n // BLOCK):
        store_unit(at(dst, i * BLOCK * 4), at(src, i * NBYTES))


DEQUANT_ROW: dict[str, Helper] = {
    "f32": dequant_row_f32, "f16": dequant_row_f16, "bf16": dequant_row_bf16,
    **{name: dequant_row_blocks.bind(store_unit=s, BLOCK=UNITS[name].n, NBYTES=UNITS[name].nbytes) for name, s in STORES.items()},
}
