"""MUL_MAT of two and more columns (more than planes.py takes) with quantized weights in whole numbers, 16 rows side by side
(pyggml.quants.lanes_cpu): weights are read and unpacked once for all columns, and a column costs one instruction for each 32 weights and
few more for each group of them.

Columns are rounded as pyggml.ops.matmul.words has it: x = sx q for each 256 values. A block of X_BYTES holds 256 q (i16), of each four
neighbours the two in the middle exchanged; at X_LESS32 the negative sums of q over each 32 (i32), at X_LESS16 those over each 16, at X_SCALE
sx.

Sums of whole numbers are exact and the order of the others is fixed, so the bits of a result depend on its two rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyggml.cpu.level import host_features, target_features
from pyggml.cpu.rows import matrix_address
from pyggml.cpu.simd import Intrinsic, at, copy_bytes, helper, intrinsic
from pyggml.cpu.vector import LANES, float_constant, int_constant, load_floats, loop, multiply_add, multiply_pairs, prefetch, splat_at, store_floats
from pyggml.ops.matmul.gemv import SHARES, columns_refused, flat_operands, operands_of, row_chunk, row_items
from pyggml.ops.matmul.words import keep_words, quantize, quantized
from pyggml.quants.lanes_cpu import LANE_TYPES, OFFSETS, SCALE_BYTES, Lanes, rows_of
from pyggml.quants.words_cpu import SUPER
from pyggml.tensor import Node, Tensor

X_LESS32, X_LESS16, X_SCALE, X_BYTES = 512, 544, 608, 640
CHAINS = 4  # of whole sums, so that a column's products need not wait for one another
MAX_COLUMNS = 64
FEW = 16  # columns for which nothing is rounded to bfloat16
AHEAD_ROWS = 2 * LANES  # that prefetches run ahead: the hardware's own do not follow 16 rows
SUM_BYTES = 2 * LANES * 4  # of a column: sums of all super-blocks, sums of the last one


def most_columns() -> int:
    """Columns for which this is as fast as products in bfloat16. Where the CPU has matrix units those are faster from 12 to 16 columns on, but round."""
    return FEW if "amx-bf16" in host_features() else MAX_COLUMNS


def _flat(node: Node) -> list[Tensor | None]:
    return flat_operands(node, most_columns())


@intrinsic("void(ptr, ptr, i64)")
def quantize_pairs(b: Any, ir: Any, dst: Any, src: Any, n: Any) -> None:
    """A block of n <= 256 float32, n a multiple of 32; the rest of dst is zero already."""
    i32, i64 = ir.IntType(32), ir.IntType(64)

    def keep_sum(i: Any, which: int, total: Any) -> None:
        place = b.add(i64(X_LESS16 + 4 * which - 4), b.mul(i, i64(8))) if which else b.add(i64(X_LESS32), b.mul(i, i64(4)))
        b.store(b.sub(i32(0), total), b.bitcast(b.gep(dst, [place]), i32.as_pointer()), align=4)

    order = [j for i in range(0, LANES, 4) for j in (i, i + 2, i + 1, i + 3)]
    quantize(b, ir, b.gep(dst, [i64(X_SCALE)]), src, n, keep_words(b, ir, dst, order), keep_sum)


# 16 rows times all columns


def _add_products(b: Any, ir: Any, total: Any, x: Any, y: Any) -> Any:
    """total + the sums of two neighbours' products."""
    if "avx512vnni" not in target_features():
        return b.add(total, multiply_pairs(b, ir, x, y))
    # Written out, as sums of sums would be put into one chain, whose latency is what a single column waits for.
    name = "llvm.x86.avx512.vpdpwssd.512"
    fn = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(total.type, [total.type] * 3), name)
    return b.call(fn, [total, b.bitcast(x, total.type), b.bitcast(y, total.type)])


def _pair_sums(b: Any, ir: Any, weights: list[Any], x: Any, start: Any) -> Any:
    """start + the products of vectors of weights with pairs of numbers at x, in CHAINS sums."""
    sums = [start, *([int_constant(ir, 0)] * (CHAINS - 1))]
    for k, w in enumerate(weights):
        sums[k % CHAINS] = _add_products(b, ir, sums[k % CHAINS], w, b.bitcast(splat_at(b, ir, x, 4 * k, ir.IntType(32)), w.type))
    while len(sums) > 1:
        sums = [b.add(s, t) for s, t in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _group_scales(b: Any, ir: Any, kind: Lanes, scales: Any, block: Any) -> tuple[list[Any], list[Any]]:
    """d of the groups of a block of 32, and their m where there are offsets."""
    i64, groups = ir.IntType(64), 32 // kind.group
    place = b.gep(scales, [b.mul(block, i64(64 * groups))])
    d, m = ([load_floats(b, ir, b.gep(place, [i64(base + 64 * g)])) for g in range(groups)] for base in (0, OFFSETS))
    return d, m if kind.offsets else []


def _add_block(b: Any, ir: Any, kind: Lanes, weights: list[Any], dm: tuple[list[Any], list[Any]], x: Any, block: Any, acc: Any) -> Any:
    """acc + a block of 32 weights of each row times those of a column, whose super-block is at x."""
    i64, (d, m) = ir.IntType(64), dm
    per = len(weights) // len(d)
    xq = b.gep(x, [b.mul(block, i64(64))])
    xs = b.gep(x, [b.add(b.mul(block, i64(4 * len(d))), i64(X_LESS32 if kind.group == 32 else X_LESS16))])
    for g in range(len(d)):
        start = int_constant(ir, 0)
        if kind.low:
            start = b.shl(splat_at(b, ir, xs, 4 * g, ir.IntType(32)), int_constant(ir, kind.low.bit_length() - 1))
        if m:
            acc = multiply_add(b, ir, m[g], b.sitofp(splat_at(b, ir, xs, 4 * g, ir.IntType(32)), acc.type), acc)
        t = _pair_sums(b, ir, weights[g * per:(g + 1) * per], b.gep(xq, [i64(4 * g * per)]), start)
        acc = multiply_add(b, ir, b.sitofp(t, acc.type), d[g], acc)
    return acc


def _super_blocks(b: Any, ir: Any, kind: Lanes, operands: Any, add: Callable[..., None], finish: Callable[[Any], None]) -> None:
    """Unpack 16 rows: add(weights, dm, x, block) for each block of 32, finish(x) after each super-block."""
    a, a_row, x, n_blocks, scales = operands
    i64 = ir.IntType(64)
    all_rows = rows_of(b, ir, a, a_row)
    ahead = b.gep(a, [b.mul(a_row, i64(AHEAD_ROWS))])
    per_step = LANES * kind.nbytes * kind.step // SUPER

    def super_block(i: Any, _: list[Any]) -> list[Any]:
        rows = all_rows.at(b, b.mul(i, i64(kind.nbytes)))
        x_here = b.gep(x, [b.mul(i, i64(X_BYTES))])
        left = b.sub(n_blocks, b.mul(i, i64(8)))
        here = b.select(b.icmp_signed("<", left, i64(8)), left, i64(8))
        kind.unpack(b, ir, rows, scales, here)

        def step(j: Any, _: list[Any]) -> list[Any]:
            following = b.gep(ahead, [b.add(b.mul(i, i64(LANES * kind.nbytes)), b.mul(j, i64(per_step)))])
            at_step = rows.at(b, b.mul(j, i64(kind.nbytes // 8))) if kind.blocks else rows
            for k, weights in enumerate(kind.build(b, ir, at_step, scales, j)):
                for line in range(0, per_step, 64)[k::kind.step // 32]:  # as much of the rows to come, in the order in which they lie
                    prefetch(b, ir, b.gep(following, [i64(line)]))
                block = b.add(b.mul(j, i64(kind.step // 32)), i64(k))
                add(weights, _group_scales(b, ir, kind, scales, block), x_here, block)
            return []

        loop(b, ir, here if kind.blocks else i64(SUPER // kind.step), [], step)
        finish(x_here)
        return []

    loop(b, ir, b.sdiv(b.add(n_blocks, i64(7)), i64(8)), [], super_block)


def _times_columns(b: Any, ir: Any, kind: Lanes, operands: Any) -> None:
    """16 rows times n columns: the sums of a super-block stand in memory, behind those of all before it."""
    a, a_row, x, x_col, n, n_blocks, sums, scales = operands
    i64, zero = ir.IntType(64), float_constant(ir, 0.0)
    behind = MAX_COLUMNS * 64

    def clear(c: Any, _: list[Any]) -> list[Any]:
        for k in (0, behind):
            store_floats(b, b.gep(sums, [b.add(b.mul(c, i64(64)), i64(k))]), zero)
        return []

    def add(weights: list[Any], dm: Any, x: Any, block: Any) -> None:
        def column(c: Any, _: list[Any]) -> list[Any]:
            p = b.gep(sums, [b.add(b.mul(c, i64(64)), i64(behind))])
            store_floats(b, p, _add_block(b, ir, kind, weights, dm, b.gep(x, [b.mul(c, x_col)]), block, load_floats(b, ir, p)))
            return []

        loop(b, ir, n, [], column)

    def finish(x: Any) -> None:
        def column(c: Any, _: list[Any]) -> list[Any]:
            total = b.gep(sums, [b.mul(c, i64(64))])
            p, scale = b.gep(total, [i64(behind)]), splat_at(b, ir, b.gep(x, [b.mul(c, x_col)]), X_SCALE, ir.FloatType())
            store_floats(b, total, multiply_add(b, ir, load_floats(b, ir, p), scale, load_floats(b, ir, total)))
            store_floats(b, p, zero)
            return []

        loop(b, ir, n, [], column)

    loop(b, ir, n, [], clear)
    _super_blocks(b, ir, kind, (a, a_row, x, n_blocks, scales), add, finish)


def _tile(name: str, kind: Lanes) -> Intrinsic:
    def build(b: Any, ir: Any, *operands: Any) -> None:
        _times_columns(b, ir, kind, operands)

    build.__name__ = f"lanes_{name}"
    return Intrinsic("void(ptr, i64, ptr, i64, i64, i64, ptr, ptr)", build)


TILES: dict[str, Intrinsic] = {t: _tile(t, k) for t, k in LANE_TYPES.items()}
"""16 rows of a type times columns: (a, bytes of a row, x, bytes of a column, columns, blocks of 32, sums, scratch for scales)."""


# The kernel


def _not_lanes(node: Node) -> str | None:
    a, b = operands_of(node)
    if a.dtype.name not in LANE_TYPES:
        return f"a is {a.dtype.name}"
    x = _flat(node)[2]
    if x is not None and x.ne[1] == 1:
        return "one column, for which kernels of a few rows at a time read memory faster"
    return columns_refused(node, most_columns(), together=True)


@helper
def rows_times_columns(_a: Any, _a_row: Any, _x: Any, _x_col: Any, _n: Any, _n_blocks: Any, _sums: Any, _scales: Any) -> None:
    """16 rows; bound to the type's."""


def mul_mat_lanes(out: Any, a: Any, _b: Any, x: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Items [i0, i1), 16 rows each, rows fastest; the last one's begin earlier. Of fewer rows each is an item, 16 times the same. Scratch:
    sums, then scales."""
    rows, step = (LANES, a.nb1) if a.ne1 >= LANES else (1, 0)
    n_mb = (a.ne1 + rows - 1) // rows
    scales = at(scratch, MAX_COLUMNS * SUM_BYTES)
    for item in range(i0, i1):
        batch, m0 = item // n_mb, item % n_mb * rows
        i2, i3, m = batch % out.ne2, batch // out.ne2, min(rows, a.ne1 - m0)
        skip = rows - m
        a_p, x_p = at(matrix_address(a, out, i2, i3), (m0 - skip) * a.nb1), matrix_address(x, out, i2, i3)
        o_p = at(out.p, m0 * 4 + i2 * out.nb2 + i3 * out.nb3)
        rows_times_columns(a_p, step, x_p, x.nb1, x.ne1, a.ne0 // 32, scratch, scales)
        for c in range(x.ne1):
            copy_bytes(at(o_p, c * out.nb1), at(scratch, c * 64 + skip * 4), m * 4)


def _items(node: Node) -> int:
    return row_items(node, most_columns()) * (1 if node.out.ne[0] >= LANES else node.out.ne[0])


OPTIONS: dict[str, Any] = {
    "when": _not_lanes, "rounds": True, "needs": {"avx512bw"}, "operands": _flat,
    "items": _items, "chunk": row_chunk, "shares": lambda _: SHARES, "before": lambda node: quantized(_flat(node)[2], quantize_pairs, X_BYTES),
    "bind": lambda node: {"rows_times_columns": TILES[operands_of(node)[0].dtype.name]}, "scratch": lambda _: MAX_COLUMNS * SUM_BYTES + SCALE_BYTES}
