"""Rows of stored weights to float32 on the CPU: `DEQUANT_ROW[type name]` is a helper (src, dst, n) for kernels to bind.

src points at a row's first block, dst at n float32 (n a multiple of the block); the two do not overlap. Values are those
of pyggml.quants.dequantize, bit for bit.
"""

from __future__ import annotations

from typing import Any

from pyggml.cpu.simd import Helper, Intrinsic, at, copy_bytes, helper, intrinsic, ld_bf16, ld_f16, st_f32
from pyggml.cpu.vector import LANES, int_constant, load_floats, nearest_ints, reduce_ints, splat, store_floats
from pyggml.quants.legacy import Q8_LEAST
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
BLOCK, NBYTES = 32, 34  # bound to the type's


@helper
def store_unit(_dst: Any, _src: Any) -> None:
    """A unit's weights; bound to the type's."""


@helper
def dequant_row_blocks(src: Any, dst: Any, n: Any) -> Any:
    """n weights, block by block."""
    for i in range(n // BLOCK):
        store_unit(at(dst, i * BLOCK * 4), at(src, i * NBYTES))


@intrinsic("f32(ptr, ptr)")
def quantize_q8_0(b: Any, ir: Any, dst: Any, src: Any) -> Any:
    """The 32 whole numbers of a block at dst, of 32 float32 at src; gives the scale. As quants.legacy.quantize_q8_0, bit for bit."""
    f32, i32s = ir.FloatType(), ir.VectorType(ir.IntType(32), LANES)
    xs = [load_floats(b, ir, b.gep(src, [ir.IntType(64)(4 * LANES * k)])) for k in (0, 1)]
    bits = [b.and_(b.bitcast(x, i32s), int_constant(ir, 0x7FFFFFFF)) for x in xs]
    larger = b.select(b.icmp_unsigned(">", *bits), *bits)  # as whole numbers: NaN is the largest of all
    top_bits = reduce_ints(b, ir, larger, "umax")
    top, finite = b.bitcast(top_bits, f32), b.icmp_unsigned("<", top_bits, ir.IntType(32)(0x7F800000))
    usable = b.and_(finite, b.fcmp_ordered(">", top, ir.Constant(f32, Q8_LEAST)))
    d = b.fdiv(top, ir.Constant(f32, 127.0))
    inverse = splat(b, ir, b.select(usable, b.fdiv(ir.Constant(f32, 1.0), d), ir.Constant(f32, 0.0)))
    for k, x in enumerate(xs):
        q = nearest_ints(b, ir, b.fmul(x, inverse))
        q8 = b.select(splat(b, ir, usable), b.trunc(q, ir.VectorType(ir.IntType(8), LANES)), ir.Constant(ir.VectorType(ir.IntType(8), LANES), [0] * LANES))
        b.store(q8, b.bitcast(b.gep(dst, [ir.IntType(64)(LANES * k)]), q8.type.as_pointer()), align=1)
    return b.select(usable, d, b.select(finite, ir.Constant(f32, 0.0), ir.Constant(f32, float("nan"))))


DEQUANT_ROW: dict[str, Helper] = {
    "f32": dequant_row_f32, "f16": dequant_row_f16, "bf16": dequant_row_bf16,
    **{name: dequant_row_blocks.bind(store_unit=s, BLOCK=UNITS[name].n, NBYTES=UNITS[name].nbytes) for name, s in STORES.items()},
}
