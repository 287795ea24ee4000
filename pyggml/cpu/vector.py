"""Vectors for builders of intrinsics: loads and stores of any width, loops that carry vectors in registers, and the
sums of 16 lanes that matrix products and scans end in. All write LLVM IR and are called by builders alone,
but for `transpose_16x16`, which kernels call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyggml.cpu.simd import has_f16c, intrinsic

LANES = 16


def wide_registers() -> bool:
    """True when 32 registers hold 16 float32 each (AVX-512), so that 16 sums of 16 lanes can stay in them."""
    from pyggml.cpu.level import target_features
    return "avx512f" in target_features()


def load(b: Any, ir: Any, p: Any, element: Any, n: int, align: int) -> Any:
    """n elements at byte pointer p as a vector."""
    return b.load(b.bitcast(p, ir.VectorType(element, n).as_pointer()), align=align)


def load_bytes(b: Any, ir: Any, p: Any, n: int) -> Any:
    """n bytes at p as a vector; blocks of weights have no alignment."""
    return load(b, ir, p, ir.IntType(8), n, 1)


def load_floats(b: Any, ir: Any, p: Any, n: int = LANES) -> Any:
    """n float32 at byte pointer p as a vector."""
    return load(b, ir, p, ir.FloatType(), n, 4)


def store_floats(b: Any, p: Any, v: Any) -> None:
    """Store a vector of float32 at byte pointer p."""
    b.store(v, b.bitcast(p, v.type.as_pointer()), align=4)


def prefetch(b: Any, ir: Any, p: Any, level: int = 2) -> None:
    """Bring the cache line at p, which may lie anywhere, to the first or second level."""
    i32 = ir.IntType(32)
    fn = b.module.globals.get("llvm.prefetch.p0") or ir.Function(b.module, ir.FunctionType(ir.VoidType(), [p.type] + [i32] * 3), "llvm.prefetch.p0")
    b.call(fn, [p, i32(0), i32(4 - level), i32(1)])  # to read, locality 3 or 2, data


def shuffle(b: Any, ir: Any, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    """Lanes of x (numbered from 0) and y (numbered on from x's)."""
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes)))


def splat(b: Any, ir: Any, v: Any, n: int = LANES) -> Any:
    """n copies of a scalar."""
    one = b.insert_element(ir.Constant(ir.VectorType(v.type, n), ir.Undefined), v, ir.IntType(32)(0))
    return shuffle(b, ir, one, one, [0] * n)


def splat_at(b: Any, ir: Any, p: Any, offset: int, ty: Any) -> Any:
    """LANES copies of a 32-bit scalar at byte `offset` of p."""
    return splat(b, ir, b.load(b.bitcast(b.gep(p, [ir.IntType(64)(offset)]), ty.as_pointer()), align=4))


def concat(b: Any, ir: Any, x: Any, y: Any) -> Any:
    """The elements of vector x, then those of y."""
    return shuffle(b, ir, x, y, range(2 * x.type.count))


def float_constant(ir: Any, v: float, n: int = LANES) -> Any:
    """n copies of a constant float32."""
    return ir.Constant(ir.VectorType(ir.FloatType(), n), [v] * n)


def int_constant(ir: Any, v: int | Sequence[int], n: int = LANES) -> Any:
    """n 32-bit numbers, or n copies of one."""
    return ir.Constant(ir.VectorType(ir.IntType(32), n), [v] * n if isinstance(v, int) else list(v))


def nearest_ints(b: Any, ir: Any, x: Any) -> Any:
    """The whole numbers nearest to float32, of two the even one, as 32 bits; |x| < 2^22."""
    z = b.fadd(x, float_constant(ir, 1.5 * 2.0 ** 23))  # the rounded number is in its low bits
    return b.sub(b.bitcast(z, ir.VectorType(ir.IntType(32), LANES)), int_constant(ir, 0x4B400000))


def reduce_ints(b: Any, ir: Any, v: Any, op: str) -> Any:
    """All lanes of 32-bit numbers into one: `op` is LLVM's (add, umax)."""
    name = f"llvm.vector.reduce.{op}.v{LANES}i32"
    fn = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(ir.IntType(32), [v.type]), name)
    return b.call(fn, [v])


def bytes_to_floats(b: Any, ir: Any, q: Any) -> Any:
    """float32 of a vector of signed bytes."""
    return b.sitofp(q, ir.VectorType(ir.FloatType(), q.type.count))


def halves_to_floats(b: Any, ir: Any, h: Any) -> Any:
    """float32 of a vector of float16 bits (i16): exact."""
    n = h.type.count
    i32, f32 = ir.VectorType(ir.IntType(32), n), ir.VectorType(ir.FloatType(), n)
    if has_f16c():
        return b.fpext(b.bitcast(h, ir.VectorType(ir.HalfType(), n)), f32)

    def const(v: int) -> Any:
        return ir.Constant(i32, [v] * n)

    # As simd's scalar form: shifted into place and rescaled by 2^112, all-ones exponents kept.
    x = b.zext(h, i32)
    body = b.shl(b.and_(x, const(0x7FFF)), const(13))
    scaled = b.bitcast(b.fmul(b.bitcast(body, f32), float_constant(ir, 2.0 ** 112, n)), i32)
    bits = b.select(b.icmp_unsigned(">=", body, const(0x0F800000)), b.or_(body, const(0x7F800000)), scaled)
    return b.bitcast(b.or_(bits, b.shl(b.and_(x, const(0x8000)), const(16))), f32)


def multiply_add(b: Any, ir: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z: one instruction and one rounding where the CPU has it, two elsewhere (a library call per lane would be the
    alternative). The same for every vector of one compiled kernel."""
    name = f"llvm.fmuladd.v{x.type.count}f32"
    fn = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(x.type, [x.type] * 3), name)
    return b.call(fn, [x, y, z])


def multiply_pairs(b: Any, ir: Any, x: Any, y: Any) -> Any:
    """<32 x i16> times <32 x i16>: sixteen 32-bit sums of the products of two neighbours. No product of -32768 twice."""
    from pyggml.cpu.level import machine, target_features
    n, i32 = x.type.count, ir.IntType(32)
    kinds = {"avx512bw": (32, "llvm.x86.avx512.pmaddw.d.512"), "avx2": (16, "llvm.x86.avx2.pmadd.wd"), "": (8, "llvm.x86.sse2.pmadd.wd")}
    whole, name = next(v for k, v in kinds.items() if not k or k in target_features())
    if machine() != "x86_64":
        wide = ir.VectorType(i32, n)
        products = b.mul(b.sext(x, wide), b.sext(y, wide))
        return b.add(shuffle(b, ir, products, products, range(0, n, 2)), shuffle(b, ir, products, products, range(1, n, 2)))
    if n > whole:
        low, high = ([shuffle(b, ir, v, v, range(k, k + n // 2)) for v in (x, y)] for k in (0, n // 2))
        return concat(b, ir, multiply_pairs(b, ir, *low), multiply_pairs(b, ir, *high))
    fn = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(ir.VectorType(i32, n // 2), [x.type] * 2), name)
    return b.call(fn, [x, y])


def loop(b: Any, ir: Any, n: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """n turns (n >= 0, i64) of `body(i, values) -> values`, with the values carried from turn to turn; the last values."""
    i64 = ir.IntType(64)
    before, head, after = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.cbranch(b.icmp_signed(">", n, i64(0)), head, after)
    b.position_at_end(head)
    i = b.phi(i64)
    values = [b.phi(v.type) for v in carried]
    results = body(i, list(values))
    following = b.add(i, i64(1))
    i.add_incoming(i64(0), before)
    i.add_incoming(following, b.block)
    for phi, first, result in zip(values, carried, results, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(result, b.block)
    last = b.block
    b.cbranch(b.icmp_signed("<", following, n), head, after)
    b.position_at_end(after)
    final = [b.phi(v.type) for v in carried]
    for phi, first, result in zip(final, carried, results, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(result, last)
    return final


def sums_of_lanes(b: Any, ir: Any, vectors: Sequence[Any]) -> Any:
    """Vector of the 16 vectors' sums over their 16 lanes. Each sum is taken in the same order, lane i with lane i + 8, then
    + 4, + 2, + 1, so that a sum does not depend on its vector's place."""
    half, rows = LANES // 2, list(vectors)
    while half:
        # Row r holds the partial sums of several vectors, 2 * half of each; two rows become one with `half` of each.
        starts = range(0, LANES, 2 * half)
        low = [s + i for s in (*starts, *(LANES + s for s in starts)) for i in range(half)]
        rows = [b.fadd(shuffle(b, ir, x, y, low), shuffle(b, ir, x, y, [i + half for i in low])) for x, y in zip(rows[::2], rows[1::2], strict=True)]
        half //= 2
    return rows[0]


def transposed(b: Any, ir: Any, rows: Sequence[Any]) -> list[Any]:
    """The columns of n vectors of n elements, n a power of two."""
    n, step, turned = len(rows), 1, list(rows)
    while step < n:
        # Exchange the off-diagonal blocks of step x step within each block of twice that size.
        low = [i if i & step == 0 else i - step + n for i in range(n)]
        for r in (r for r in range(n) if r & step == 0):
            x, y = turned[r], turned[r + step]
            turned[r], turned[r + step] = shuffle(b, ir, x, y, low), shuffle(b, ir, x, y, [i + step for i in low])
        step *= 2
    return turned


@intrinsic("void(ptr, i64, ptr, i64)")
def transpose_16x16(b: Any, ir: Any, dst: Any, dst_row: Any, src: Any, src_row: Any) -> None:
    """dst[j][i] = src[i][j] for 16 rows of 16 float32; rows are dst_row and src_row bytes apart."""
    i64 = ir.IntType(64)
    rows = transposed(b, ir, [load_floats(b, ir, b.gep(src, [b.mul(src_row, i64(i))])) for i in range(LANES)])
    for j, row in enumerate(rows):
        store_floats(b, b.gep(dst, [b.mul(dst_row, i64(j))]), row)
