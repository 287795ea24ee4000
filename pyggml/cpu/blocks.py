"""Products of small matrices that lie in scratch, on register tiles, and the vector arithmetic around them.

All products have one form: `dst[r][c] = sum over k of a[r][k] b[k][c]`, with rows of `a` (left operand) anywhere and the columns of
`b` (right operand) side by side, so that no sum runs across lanes. Operands are float32, or bfloat16 in pairs along k: then a row of
`a` is a plain row of bfloat16, and a row of `b` holds k and k + 1 of each column next to each other in 32 bits, which is what the
instructions for bfloat16 take (AVX-512 BF16 and AMX; bfloat16 has no other form here). Both are addressed in words of 32 bits, so the
loops are the same. A block has 8 rows and 16, 32 or 48 columns in vectors, which where the CPU has few registers are computed in parts, and
16 or 32 rows in AMX tiles. Each result is summed over k in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyggml.cpu.simd import Intrinsic, intrinsic
from pyggml.cpu.vector import LANES, float_constant, load, load_floats, loop, multiply_add, shuffle, splat, store_floats, wide_registers

ROWS = 8  # of a block in vectors


def _features() -> frozenset[str]:
    from pyggml.cpu.level import target_features
    return target_features()


def _at_once(vectors: int) -> tuple[int, int]:
    """Rows and vectors of a block whose sums stay in registers."""
    if wide_registers():
        return ROWS, vectors
    return (4 if "avx2" in _features() else 2), 1


# Products of words


def _float_words(b: Any, ir: Any, a: Any, x: Any, acc: Any) -> Any:
    f = ir.VectorType(ir.FloatType(), LANES)
    return multiply_add(b, ir, b.bitcast(a, f), b.bitcast(x, f), acc)


def _bf16_words(b: Any, ir: Any, a: Any, x: Any, acc: Any) -> Any:
    i32 = ir.VectorType(ir.IntType(32), LANES)
    return b.call(b.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", (), ir.FunctionType(acc.type, [acc.type, i32, i32])), [acc, a, x])


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
    """Places (row, vector) of a block in parts that fit the registers."""
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


_PRODUCT = "void(ptr, i64, ptr, i64, ptr, i64, i64)"
_ONTO = "void(ptr, i64, f32, ptr, i64, ptr, i64, i64, ptr)"
_TWO = "void(ptr, i64, ptr, i64, ptr, i64, i64, ptr, ptr, i64, ptr, i64, i64, i64, f32, ptr, i64)"


def _product(words: Words, vectors: int, name: str) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, dst_row: Any, a: Any, a_row: Any, x: Any, x_row: Any, n: Any) -> None:
        for part in _parts(vectors):
            acc = _sum_products(b, ir, words, {p: float_constant(ir, 0.0) for p in part}, a, a_row, x, x_row, n)
            for (r, v), total in acc.items():
                store_floats(b, _place(b, ir, dst, dst_row, r, v), total)
    return _named(build, name, _PRODUCT)


def _product_onto(words: Words, vectors: int, name: str) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, dst_row: Any, factor: Any, a: Any, a_row: Any, x: Any, x_row: Any, n: Any, pairs: Any) -> None:
        factors = splat(b, ir, factor)
        for part in _parts(vectors):
            acc = {(r, v): b.fmul(load_floats(b, ir, _place(b, ir, dst, dst_row, r, v)), factors) for r, v in part}
            acc = _sum_products(b, ir, words, acc, a, a_row, x, x_row, n)
            for (r, v), total in acc.items():
                store_floats(b, _place(b, ir, dst, dst_row, r, v), total)
                if words is _bf16_words and r % 2:
                    store_words(b, _place(b, ir, pairs, dst_row, r // 2, v), paired(b, ir, acc[r - 1, v], total))
    return _named(build, name, _ONTO)


def _two_products(words: Words, vectors: int, name: str) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, dst_row: Any, a: Any, a_row: Any, x: Any, x_row: Any, n: Any, factors: Any,
              a2: Any, a2_row: Any, x2: Any, x2_row: Any, n2: Any, with_third: Any, factor: Any, third: Any, third_row: Any) -> None:
        for part in _parts(vectors):
            acc = _sum_products(b, ir, words, {p: float_constant(ir, 0.0) for p in part}, a, a_row, x, x_row, n)
            acc = {(r, v): b.fmul(total, float_at(b, ir, factors, r)) for (r, v), total in acc.items()}

            def add(_: Any, sums: list[Any], part: list[tuple[int, int]] = part) -> list[Any]:
                scale = splat(b, ir, factor)
                return [multiply_add(b, ir, scale, load_floats(b, ir, _place(b, ir, third, third_row, r, v)), s) for (r, v), s in zip(part, sums, strict=True)]
            acc = dict(zip(part, loop(b, ir, with_third, list(acc.values()), add), strict=True))
            for (r, v), total in _sum_products(b, ir, words, acc, a2, a2_row, x2, x2_row, n2).items():
                store_floats(b, _place(b, ir, dst, dst_row, r, v), total)
    return _named(build, name, _TWO)


# dst = a b: (dst, bytes of a row, a, bytes of a row, b, bytes of a row, words of k).
product_f32_1, product_f32_2, product_f32_3 = (_product(_float_words, v, f"product_f32_{v}") for v in (1, 2, 3))
product_bf16_1, product_bf16_2, product_bf16_3 = (_product(_bf16_words, v, f"product_bf16_{v}") for v in (1, 2, 3))
# dst = factor dst + a b: (dst, bytes of a row, factor, then as above, and where the results go as a right operand too if those are bfloat16).
onto_f32_1, onto_f32_2, onto_f32_3 = (_product_onto(_float_words, v, f"onto_f32_{v}") for v in (1, 2, 3))
onto_bf16_1, onto_bf16_2, onto_bf16_3 = (_product_onto(_bf16_words, v, f"onto_bf16_{v}") for v in (1, 2, 3))
# dst = (a b) factors[row] + a2 b2 (+ factor c): (dst, bytes of a row, a and b as above, factors, a2 and b2 as above, 1 to add c or 0, factor, c,
# bytes of a row).
two_f32_1, two_f32_2, two_f32_3 = (_two_products(_float_words, v, f"two_f32_{v}") for v in (1, 2, 3))
two_bf16_1, two_bf16_2, two_bf16_3 = (_two_products(_bf16_words, v, f"two_bf16_{v}") for v in (1, 2, 3))


# The same in AMX tiles

TILE_ROWS, WORDS = 16, 16  # of a tile: rows, and words of k
_BUFFER = 2 * TILE_ROWS * 2 * TILE_ROWS * 4  # bytes of 4 tiles of sums


def _tile(b: Any, ir: Any, name: str, number: int, *rest: Any) -> None:
    void, i8 = ir.VoidType(), ir.IntType(8)
    args = [i8(number), *(i8(r) if isinstance(r, int) else r for r in rest)]
    fn = b.module.globals.get(f"llvm.x86.{name}") or ir.Function(b.module, ir.FunctionType(void, [a.type for a in args]), f"llvm.x86.{name}")
    b.call(fn, args)


def _tile_products(b: Any, ir: Any, dst: Any, dst_row: Any, a: Any, a_row: Any, x: Any, x_row: Any, n: Any, rows: int, vectors: int) -> None:
    """dst = a b for rows * 16 rows and vectors * 16 columns, at most 4 tiles of sums (0 to 3); a in tiles 4 and 5, b in 6 and 7. Words of k
    beyond n, up to whole tiles, are read: they are zero in one of the operands."""
    i64 = ir.IntType(64)
    for t in range(rows * vectors):
        _tile(b, ir, "tilezero", t)

    def step(i: Any, _: Sequence[Any]) -> list[Any]:
        a_at, x_at = b.gep(a, [b.mul(i, i64(4 * WORDS))]), b.gep(x, [b.mul(b.mul(i, i64(WORDS)), x_row)])
        for r in range(rows):
            _tile(b, ir, "tileloadd64", 4 + r, b.gep(a_at, [b.mul(a_row, i64(TILE_ROWS * r))]), a_row)
        for v in range(vectors):
            _tile(b, ir, "tileloadd64", 6 + v % 2, b.gep(x_at, [i64(v * LANES * 4)]), x_row)
            for r in range(rows):
                _tile(b, ir, "tdpbf16ps", r * vectors + v, 4 + r, 6 + v % 2)
        return []
    loop(b, ir, b.lshr(b.add(n, i64(WORDS - 1)), i64(4)), [], step)
    for r in range(rows):
        for v in range(vectors):
            _tile(b, ir, "tilestored64", r * vectors + v, _place(b, ir, dst, dst_row, TILE_ROWS * r, v), dst_row)


def _buffer(b: Any, ir: Any) -> Any:
    with b.goto_entry_block():
        place = b.alloca(ir.ArrayType(ir.IntType(8), _BUFFER))
        place.align = 64
    return b.bitcast(place, ir.IntType(8).as_pointer())


def _tile_product(vectors: int, name: str) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, dst_row: Any, a: Any, a_row: Any, x: Any, x_row: Any, n: Any) -> None:
        _tile_products(b, ir, dst, dst_row, a, a_row, x, x_row, n, 1, vectors)
    return _named(build, name, _PRODUCT)


def _tile_onto(vectors: int, name: str) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, dst_row: Any, factor: Any, a: Any, a_row: Any, x: Any, x_row: Any, n: Any, pairs: Any) -> None:
        sums, row, factors = _buffer(b, ir), n.type(vectors * LANES * 4), splat(b, ir, factor)
        _tile_products(b, ir, sums, row, a, a_row, x, x_row, n, 2, vectors)

        def add(pair: Any, _: Sequence[Any]) -> list[Any]:
            to, own = b.gep(dst, [b.mul(pair, b.shl(dst_row, n.type(1)))]), b.gep(sums, [b.mul(pair, b.shl(row, n.type(1)))])
            for v in range(vectors):
                totals = [multiply_add(b, ir, load_floats(b, ir, _place(b, ir, to, dst_row, r, v)), factors, load_floats(b, ir, _place(b, ir, own, row, r, v)))
                          for r in (0, 1)]
                for r in (0, 1):
                    store_floats(b, _place(b, ir, to, dst_row, r, v), totals[r])
                store_words(b, b.gep(pairs, [b.add(b.mul(pair, dst_row), n.type(v * LANES * 4))]), paired(b, ir, *totals))
            return []
        loop(b, ir, n.type(TILE_ROWS), [], add)
    return _named(build, name, _ONTO)


def _tile_two(vectors: int, name: str) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, dst_row: Any, a: Any, a_row: Any, x: Any, x_row: Any, n: Any, factors: Any,
              a2: Any, a2_row: Any, x2: Any, x2_row: Any, n2: Any, with_third: Any, factor: Any, third: Any, third_row: Any) -> None:
        first, second, row = _buffer(b, ir), _buffer(b, ir), n.type(vectors * LANES * 4)
        _tile_products(b, ir, first, row, a, a_row, x, x_row, n, 1, vectors)
        _tile_products(b, ir, second, row, a2, a2_row, x2, x2_row, n2, 1, vectors)

        def place(p: Any, stride: Any, r: Any, v: int) -> Any:
            return b.gep(p, [b.add(b.mul(r, stride), n.type(v * LANES * 4))])

        def add(r: Any, _: Sequence[Any]) -> list[Any]:
            decay = splat(b, ir, b.load(b.bitcast(b.gep(factors, [b.mul(r, n.type(4))]), ir.FloatType().as_pointer()), align=4))
            sums = [multiply_add(b, ir, load_floats(b, ir, place(first, row, r, v)), decay, load_floats(b, ir, place(second, row, r, v)))
                    for v in range(vectors)]

            def third_of(_i: Any, values: list[Any]) -> list[Any]:
                scale = splat(b, ir, factor)
                return [multiply_add(b, ir, scale, load_floats(b, ir, place(third, third_row, r, v)), s) for v, s in enumerate(values)]
            for v, s in enumerate(loop(b, ir, with_third, sums, third_of)):
                store_floats(b, place(dst, dst_row, r, v), s)
            return []
        loop(b, ir, n.type(TILE_ROWS), [], add)
    return _named(build, name, _TWO)


# 16 rows of `product` and `two`, 32 of `onto`, operands as above. The tiles are on (pyggml.cpu.tiles).
product_tiles_1, product_tiles_2 = (_tile_product(v, f"product_tiles_{v}") for v in (1, 2))
onto_tiles_1, onto_tiles_2 = (_tile_onto(v, f"onto_tiles_{v}") for v in (1, 2))
two_tiles_1, two_tiles_2, two_tiles_3, two_tiles_4 = (_tile_two(v, f"two_tiles_{v}") for v in (1, 2, 3, 4))


# Memory


def _prefetch(write: int, name: str) -> Intrinsic:
    def build(b: Any, ir: Any, p: Any, n: Any) -> None:
        i32, void = ir.IntType(32), ir.VoidType()
        fn = b.module.declare_intrinsic("llvm.prefetch", [p.type], ir.FunctionType(void, [p.type, i32, i32, i32]))
        each_vector(b, ir, n, lambda i: b.call(fn, [b.gep(p, [i]), i32(write), i32(2), i32(1)]))
    return _named(build, name, "void(ptr, i64)")


# Ask for the n vectors at p ahead of their use, into the second cache where the CPU lets one choose (2 to 7 % faster here than the first, which
# the operands of products fill). Any address will do.
prefetch_read, prefetch_write = _prefetch(0, "prefetch_read"), _prefetch(1, "prefetch_write")


_FLUSH = 0x8040  # MXCSR: numbers below the normal range are 0, as results and as operands


def _set_mode(b: Any, ir: Any, mode: Callable[[Any], Any]) -> Any:
    """Change MXCSR by `mode(old)`, where there is one; the old value."""
    from pyggml.cpu.level import machine
    i32 = ir.IntType(32)
    if machine() != "x86_64":
        return i32(0)
    with b.goto_entry_block():
        place = b.alloca(i32)
    p = b.bitcast(place, ir.IntType(8).as_pointer())
    fn = ir.FunctionType(ir.VoidType(), [p.type])
    b.call(b.module.declare_intrinsic("llvm.x86.sse.stmxcsr", (), fn), [p])
    old = b.load(place)
    b.store(mode(old), place)
    b.call(b.module.declare_intrinsic("llvm.x86.sse.ldmxcsr", (), fn), [p])
    return old


@intrinsic("i32()")
def flush_tiny(b: Any, ir: Any) -> Any:
    """From here on this thread takes numbers below the normal range for 0, where the CPU can: on some CPUs each costs a hundred cycles, and
    products of decays are full of them. Gives what `restore_tiny` takes at the kernel's end."""
    return _set_mode(b, ir, lambda old: b.or_(old, ir.IntType(32)(_FLUSH)))


@intrinsic("void(i32)")
def restore_tiny(b: Any, ir: Any, old: Any) -> None:
    """Undo flush_tiny."""
    _set_mode(b, ir, lambda _: old)


# To bfloat16


def paired(b: Any, ir: Any, even: Any, odd: Any) -> Any:
    """Words of the bfloat16 of two vectors, lane by lane: `even` in the low half."""
    i16 = ir.VectorType(ir.IntType(16), 2 * LANES)
    fn = ir.FunctionType(i16, [even.type, even.type])
    both = b.call(b.module.declare_intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", (), fn), [odd, even])
    mixed = shuffle(b, ir, both, both, [i + half for i in range(LANES) for half in (0, LANES)])
    return b.bitcast(mixed, ir.VectorType(ir.IntType(32), LANES))


def bf16_of(b: Any, ir: Any, v: Any) -> Any:
    """The bfloat16 of 16 float32, as 16-bit numbers."""
    fn = ir.FunctionType(ir.VectorType(ir.IntType(16), LANES), [v.type])
    return b.call(b.module.declare_intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", (), fn), [v])


def store_words(b: Any, p: Any, v: Any) -> None:
    """Store a vector of whole numbers at byte pointer p."""
    b.store(v, b.bitcast(p, v.type.as_pointer()), align=4)


# Exp

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
