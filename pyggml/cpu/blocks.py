"""Products of small matrices that lie in scratch, on register tiles, and the vector arithmetic around them.

All products have one form: `dst[r][c] = sum over k of a[r][k] b[k][c]`, with rows of `a` (left operand) anywhere and the columns of
`b` (right operand) side by side, so that no sum runs across lanes. Operands are float32, or bfloat16 in pairs along k: then a row of
`a` is a plain row of bfloat16, and a row of `b` holds k and k + 1 of each column next to each other in 32 bits, which is what the
instructions for bfloat16 take. Both are addressed in words of 32 bits, so the loops are the same. A tile has 8 rows and 16, 32 or 48
columns; where the CPU has fewer registers it is computed in parts. Each result is summed over k in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyggml.cpu.simd import Intrinsic, intrinsic
from pyggml.cpu.vector import LANES, float_constant, load, load_floats, loop, multiply_add, shuffle, splat, store_floats, wide_registers

ROWS = 8  # of a tile


def _features() -> frozenset[str]:
    from pyggml.cpu.level import target_features
    return target_features()


def _at_once(vectors: int) -> tuple[int, int]:
    """Rows and vectors of a tile whose sums stay in registers."""
    if wide_registers():
        return ROWS, vectors
    return (4 if "avx2" in _features() else 2), 1


# -- products of words -------------------------------------------------------------------------------------------------------


def _float_words(b: Any, ir: Any, a: Any, x: Any, acc: Any) -> Any:
    f = ir.VectorType(ir.FloatType(), LANES)
    return multiply_add(b, ir, b.bitcast(a, f), b.bitcast(x, f), acc)


def _halves(b: Any, ir: Any, v: Any) -> tuple[Any, Any]:
    """float32 of the even and the odd bfloat16 of each word."""
    i32 = ir.VectorType(ir.IntType(32), LANES)
    f = ir.VectorType(ir.FloatType(), LANES)
    return b.bitcast(b.shl(v, ir.Constant(i32, [16] * LANES)), f), b.bitcast(b.and_(v, ir.Constant(i32, [0xFFFF0000] * LANES)), f)


def _bf16_words(b: Any, ir: Any, a: Any, x: Any, acc: Any) -> Any:
    if "avx512bf16" in _features():
        i32 = ir.VectorType(ir.IntType(32), LANES)
        return b.call(b.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", (), ir.FunctionType(acc.type, [acc.type, i32, i32])), [acc, a, x])
    (a0, a1), (x0, x1) = _halves(b, ir, a), _halves(b, ir, x)
    return multiply_add(b, ir, a1, x1, multiply_add(b, ir, a0, x0, acc))


Words = Callable[[Any, Any, Any, Any, Any], Any]
Sums = dict[tuple[int, int], Any]


def _sum_products(b: Any, ir: Any, words: Words, acc: Sums, a: Any, a_row: Any, x: Any, x_row: Any, n: Any) -> Sums:
    """The sums, by row and vector, with n words of k added."""
    i64, i32 = ir.IntType(64), ir.IntType(32)
    places = list(acc)
    a_rows = {r: b.gep(a, [b.mul(a_row, i64(r))]) for r in sorted({r for r, _ in places})}

    def term(i: Any, sums: list[Any]) -> list[Any]:
        row, offset = b.gep(x, [b.mul(i, x_row)]), b.shl(i, i64(2))
        xs = {v: load(b, ir, b.gep(row, [i64(v * LANES * 4)]), i32, LANES, 4) for v in sorted({v for _, v in places})}
        out = dict(zip(places, sums, strict=True))
        for r, p in a_rows.items():
            word = splat(b, ir, b.load(b.bitcast(b.gep(p, [offset]), i32.as_pointer()), align=4))
            for v, xv in xs.items():
                out[r, v] = words(b, ir, word, xv, out[r, v])
        return list(out.values())

    return dict(zip(places, loop(b, ir, n, list(acc.values()), term), strict=True))


def _parts(vectors: int) -> list[list[tuple[int, int]]]:
    """Places (row, vector) of a tile in parts that fit the registers."""
    rows, at_once = _at_once(vectors)
    return [[(r, v) for r in range(r0, r0 + rows) for v in range(v0, v0 + at_once)] for r0 in range(0, ROWS, rows) for v0 in range(0, vectors, at_once)]


def float_at(b: Any, ir: Any, p: Any, i: int) -> Any:
    """Lanes filled with float32 number i at p."""
    return splat(b, ir, b.load(b.bitcast(b.gep(p, [ir.IntType(64)(4 * i)]), ir.FloatType().as_pointer()), align=4))


def _place(b: Any, ir: Any, p: Any, row: Any, r: int, v: int) -> Any:
    i64 = ir.IntType(64)
    return b.gep(p, [b.add(b.mul(row, i64(r)), i64(v * LANES * 4))])


def _named(build: Callable[..., Any], name: str, sig: str) -> Intrinsic:
    build.__name__ = name
    return Intrinsic(sig, build)


def _product(words: Words, vectors: int, name: str) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, dst_row: Any, a: Any, a_row: Any, x: Any, x_row: Any, n: Any) -> None:
        for part in _parts(vectors):
            acc = _sum_products(b, ir, words, {p: float_constant(ir, 0.0) for p in part}, a, a_row, x, x_row, n)
            for (r, v), total in acc.items():
                store_floats(b, _place(b, ir, dst, dst_row, r, v), total)
    return _named(build, name, "void(ptr, i64, ptr, i64, ptr, i64, i64)")


def _product_onto(words: Words, vectors: int, name: str) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, dst_row: Any, factor: Any, a: Any, a_row: Any, x: Any, x_row: Any, n: Any) -> None:
        factors = splat(b, ir, factor)
        for part in _parts(vectors):
            acc = {(r, v): b.fmul(load_floats(b, ir, _place(b, ir, dst, dst_row, r, v)), factors) for r, v in part}
            for (r, v), total in _sum_products(b, ir, words, acc, a, a_row, x, x_row, n).items():
                store_floats(b, _place(b, ir, dst, dst_row, r, v), total)
    return _named(build, name, "void(ptr, i64, f32, ptr, i64, ptr, i64, i64)")


def _two_products(words: Words, vectors: int, name: str) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, dst_row: Any, a: Any, a_row: Any, x: Any, x_row: Any, n: Any, factors: Any,
              a2: Any, a2_row: Any, x2: Any, x2_row: Any, n2: Any) -> None:
        for part in _parts(vectors):
            acc = _sum_products(b, ir, words, {p: float_constant(ir, 0.0) for p in part}, a, a_row, x, x_row, n)
            acc = {(r, v): b.fmul(total, float_at(b, ir, factors, r)) for (r, v), total in acc.items()}
            for (r, v), total in _sum_products(b, ir, words, acc, a2, a2_row, x2, x2_row, n2).items():
                store_floats(b, _place(b, ir, dst, dst_row, r, v), total)
    return _named(build, name, "void(ptr, i64, ptr, i64, ptr, i64, i64, ptr, ptr, i64, ptr, i64, i64)")


# dst = a b: (dst, bytes of a row, a, bytes of a row, b, bytes of a row, words of k).
product_f32_1, product_f32_2, product_f32_3 = (_product(_float_words, v, f"product_f32_{v}") for v in (1, 2, 3))
product_bf16_1, product_bf16_2, product_bf16_3 = (_product(_bf16_words, v, f"product_bf16_{v}") for v in (1, 2, 3))
# dst = factor dst + a b: (dst, bytes of a row, factor, then as above).
onto_f32_1, onto_f32_2, onto_f32_3 = (_product_onto(_float_words, v, f"onto_f32_{v}") for v in (1, 2, 3))
onto_bf16_1, onto_bf16_2, onto_bf16_3 = (_product_onto(_bf16_words, v, f"onto_bf16_{v}") for v in (1, 2, 3))
# dst = (a b) factors[row] + a2 b2: (dst, bytes of a row, a and b as above, factors, a2 and b2 as above).
two_f32_1, two_f32_2, two_f32_3 = (_two_products(_float_words, v, f"two_f32_{v}") for v in (1, 2, 3))
two_bf16_1, two_bf16_2, two_bf16_3 = (_two_products(_bf16_words, v, f"two_bf16_{v}") for v in (1, 2, 3))


# -- to bfloat16 -----------------------------------------------------------------------------------------------------------


def _rounded_words(b: Any, ir: Any, v: Any) -> Any:
    """Words whose upper half is float32's nearest bfloat16, ties to even; NaN stays NaN."""
    i32 = ir.VectorType(ir.IntType(32), LANES)

    def c(n: int) -> Any:
        return ir.Constant(i32, [n] * LANES)

    u = b.bitcast(v, i32)
    up = b.add(u, b.add(c(0x7FFF), b.and_(b.lshr(u, c(16)), c(1))))
    return b.select(b.fcmp_unordered("uno", v, v), b.or_(u, c(0x400000)), up)


def paired(b: Any, ir: Any, even: Any, odd: Any) -> Any:
    """Words of the bfloat16 of two vectors, lane by lane: `even` in the low half."""
    i32 = ir.VectorType(ir.IntType(32), LANES)
    if "avx512bf16" in _features():
        both = _convert_two(b, ir, even, odd)
        return b.bitcast(shuffle(b, ir, both, both, [i + half for i in range(LANES) for half in (0, LANES)]), i32)
    low, high = _rounded_words(b, ir, even), _rounded_words(b, ir, odd)
    return b.or_(b.lshr(low, ir.Constant(i32, [16] * LANES)), b.and_(high, ir.Constant(i32, [0xFFFF0000] * LANES)))


def _convert_two(b: Any, ir: Any, first: Any, second: Any) -> Any:
    """32 bfloat16 as 16-bit numbers: those of `first`, then those of `second`."""
    i16 = ir.VectorType(ir.IntType(16), 2 * LANES)
    fn = ir.FunctionType(i16, [first.type, first.type])
    return b.call(b.module.declare_intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", (), fn), [second, first])


def bf16_of(b: Any, ir: Any, v: Any) -> Any:
    """The bfloat16 of 16 float32, as 16-bit numbers."""
    i16, i32 = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.IntType(32), LANES)
    if "avx512bf16" in _features():
        return b.call(b.module.declare_intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", (), ir.FunctionType(i16, [v.type])), [v])
    return b.trunc(b.lshr(_rounded_words(b, ir, v), ir.Constant(i32, [16] * LANES)), i16)


def store_words(b: Any, p: Any, v: Any) -> None:
    """Store a vector of whole numbers at byte pointer p."""
    b.store(v, b.bitcast(p, v.type.as_pointer()), align=4)


# -- exp -------------------------------------------------------------------------------------------------------------------

_LOG2E, _LN2_HI, _LN2_LO, _ROUND = 1.44269504088896341, 0.693145751953125, 1.42860682030941723e-6, 1.5 * 2.0 ** 23
_EXP = (0.000199451009, 0.00139326649, 0.00833320711, 0.0416664891, 0.166666672, 0.5)  # as in mathf
_LOWEST, _HIGHEST = -87.33654, 88.72283  # beyond: 0, which loses what is below the normal range, and inf


def exps(b: Any, ir: Any, x: Any) -> Any:
    """e^x of 16 float32, within 1 ulp; 0 below -87.3."""
    i32 = ir.VectorType(ir.IntType(32), LANES)

    def f(v: float) -> Any:
        return float_constant(ir, v)

    c = b.select(b.fcmp_ordered("<", x, f(_LOWEST)), f(_LOWEST), x)
    c = b.select(b.fcmp_ordered(">", c, f(_HIGHEST)), f(_HIGHEST), c)
    z = multiply_add(b, ir, c, f(_LOG2E), f(_ROUND))
    n = b.fsub(z, f(_ROUND))
    r = multiply_add(b, ir, n, f(-_LN2_LO), multiply_add(b, ir, n, f(-_LN2_HI), c))
    p = f(_EXP[0])
    for k in _EXP[1:]:
        p = multiply_add(b, ir, p, r, f(k))
    p = b.fadd(multiply_add(b, ir, p, b.fmul(r, r), r), f(1.0))
    whole = b.sub(b.bitcast(z, i32), ir.Constant(i32, [0x4B400000] * LANES))
    e = b.bitcast(b.add(b.bitcast(p, i32), b.shl(whole, ir.Constant(i32, [23] * LANES))), x.type)
    e = b.select(b.fcmp_ordered("<", x, f(_LOWEST)), f(0.0), e)
    e = b.select(b.fcmp_ordered(">", x, f(_HIGHEST)), f(float("inf")), e)
    return b.select(b.fcmp_unordered("uno", x, x), x, e)


def widened_differences(b: Any, ir: Any, p: Any, base: Any, negated: bool) -> Any:
    """float32 of 16 float64 at p minus `base`, or of base minus them."""
    ty = ir.VectorType(ir.DoubleType(), LANES)
    v, bases = b.load(b.bitcast(p, ty.as_pointer()), align=8), splat(b, ir, base)
    return b.fptrunc(b.fsub(bases, v) if negated else b.fsub(v, bases), ir.VectorType(ir.FloatType(), LANES))


@intrinsic("void(ptr, ptr, f64)")
def decays_since(b: Any, ir: Any, dst: Any, sums: Any, base: Any) -> None:
    """dst[i] = exp(sums[i] - base) for 16 float64 sums."""
    store_floats(b, dst, exps(b, ir, widened_differences(b, ir, sums, base, negated=False)))


@intrinsic("void(ptr, ptr, f64, ptr)")
def decays_until(b: Any, ir: Any, dst: Any, sums: Any, base: Any, weights: Any) -> None:
    """dst[i] = exp(base - sums[i]) weights[i] for 16 float64 sums."""
    store_floats(b, dst, b.fmul(exps(b, ir, widened_differences(b, ir, sums, base, negated=True)), load_floats(b, ir, weights)))


def lower_lanes(ir: Any, i: int) -> Any:
    """True in lanes 0 to i."""
    return ir.Constant(ir.VectorType(ir.IntType(1), LANES), [int(lane <= i) for lane in range(LANES)])


def gate(b: Any, ir: Any, z: Any) -> Any:
    """silu of 16 float32; 0 at -inf."""
    finite = b.select(b.fcmp_ordered("<", z, float_constant(ir, -3.4028234e38)), float_constant(ir, -3.4028234e38), z)
    return b.fdiv(finite, b.fadd(float_constant(ir, 1.0), exps(b, ir, b.fneg(z))))


def each_vector(b: Any, ir: Any, n: Any, body: Callable[[Any], None]) -> None:
    """n turns of body(byte offset of the vector)."""
    def turn(i: Any, _: Sequence[Any]) -> list[Any]:
        body(b.mul(i, ir.IntType(64)(LANES * 4)))
        return []
    loop(b, ir, n, [], turn)
