"""MUL_MAT of few columns with super-blocks of weights in whole numbers, where the CPU multiplies four bytes by four bytes into a lane
(pyggml.quants.planes_cpu): weights need no widening, and 64 of them cost two such products.

A column is rounded as pyggml.ops.matmul.words has it, x = sx q for each 256 values, with |q| <= 127 * 257: q = 256 h + l with signed bytes
h and l. A block of X_BYTES holds 256 h and 256 l, both in the order of the type's numbers; at X_SUMS sixteen float32 that go with the type's
factors, the sums of q over each 16 times -32, or 0 and the negative sum over each 32 in turn; at X_SCALE sx.

Whole sums are exact, so bits of a result depend on its two rows alone here too.
"""

from __future__ import annotations

from typing import Any

from pyggml.cpu.rows import matrix_address
from pyggml.cpu.simd import Intrinsic, at, copy_bytes, helper
from pyggml.cpu.vector import LANES, float_constant, int_constant, load, load_floats, loop, multiply_add, prefetch, shuffle, splat_at, store_floats
from pyggml.ops.matmul.gemv import (
    MAX_COLS,
    ROWS,
    SHARES,
    STREAM_AHEAD,
    SUMS,
    add_sums_16,
    columns_refused,
    flat_operands,
    operands_of,
    row_chunk,
    row_items,
    stream_items,
    tile_layout,
)
from pyggml.ops.matmul.words import quantize, quantized
from pyggml.quants.planes_cpu import BYTES, PLACES, PLANES, Planes
from pyggml.quants.words_cpu import SUPER
from pyggml.tensor import Node, Tensor

X_LOW, X_SUMS, X_SCALE, X_BYTES = 256, 512, 576, 640
LARGEST = 127 * 257
MOST_COLUMNS = MAX_COLS  # more: rows side by side (lanes.py) are as fast


# The column


def _quantizer(group: int) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, src: Any, n: Any) -> None:
        i8, i64, f32 = ir.IntType(8), ir.IntType(64), ir.FloatType()

        def keep(start: Any, q: Any) -> None:
            rounded = b.add(q, ir.Constant(q.type, [128] * LANES))
            eight = b.lshr(start, i64(3))
            place = i64(0)
            for bit, step in enumerate(PLACES[group]):
                place = b.add(place, b.mul(b.and_(b.lshr(eight, i64(bit)), i64(1)), i64(step)))
            for plane, v in ((0, b.lshr(rounded, ir.Constant(q.type, [8] * LANES))), (X_LOW, q)):
                v = b.trunc(v, ir.VectorType(i8, LANES))
                for k in (0, 1):
                    half = shuffle(b, ir, v, v, range(8 * k, 8 * k + 8))
                    to = b.gep(dst, [b.add(place, i64(plane + k * PLACES[group][0]))])
                    b.store(half, b.bitcast(to, half.type.as_pointer()), align=1)

        def keep_sum(i: Any, which: int, total: Any) -> None:
            if (which == 0) != (group == 32):
                return
            place = b.add(b.mul(i, i64(8)), i64(X_SUMS + (4 if group == 32 else 4 * which - 4)))
            less = b.fmul(b.sitofp(total, f32), ir.Constant(f32, -1.0 if group == 32 else -32.0))
            b.store(less, b.bitcast(b.gep(dst, [place]), f32.as_pointer()), align=4)

        quantize(b, ir, b.gep(dst, [i64(X_SCALE)]), src, n, keep, keep_sum, LARGEST)

    build.__name__ = f"quantize_planes_{group}"
    return Intrinsic("void(ptr, ptr, i64)", build)


QUANTIZERS: dict[int, Intrinsic] = {group: _quantizer(group) for group in PLACES}


# Tiles


def _add_products(b: Any, ir: Any, total: Any, numbers: Any, x: Any) -> Any:
    """total + the sums of four neighbours' products, unsigned bytes times signed ones."""
    name = "llvm.x86.avx512.vpdpbusd.512"
    fn = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(total.type, [total.type] * 3), name)
    return b.call(fn, [total, b.bitcast(numbers, total.type), x])


def _dots(b: Any, ir: Any, kind: Planes, cols: int, operands: Any) -> None:
    """Partial sums of 4 rows x cols columns over n super-blocks, 16 of each. Rows beyond the last are computed from the last one again."""
    a, a_row, a_last, x, x_col, n, dst, dst_row = operands
    i32, i64, zero = ir.IntType(32), ir.IntType(64), int_constant(ir, 0)
    rows = [b.gep(a, [b.mul(a_row, b.select(b.icmp_signed("<", a_last, i64(r)), a_last, i64(r)))]) for r in range(ROWS)]

    def turn(i: Any, acc: list[Any]) -> list[Any]:
        here = [b.gep(p, [b.mul(i, i64(kind.nbytes))]) for p in rows]
        for p in here:
            for line in range(0, kind.nbytes, 64):
                prefetch(b, ir, b.gep(p, [i64(STREAM_AHEAD + line)]), 1)
        factors, numbers = kind.factors(b, ir, here), [kind.numbers(b, ir, p) for p in here]
        x_here = [b.gep(x, [b.add(b.mul(i, i64(X_BYTES)), b.mul(x_col, i64(c)))]) for c in range(cols)]
        return [s for c, p in enumerate(x_here) for s in products(p, factors, numbers, acc[c * ROWS:(c + 1) * ROWS])]

    def products(p: Any, factors: list[Any], numbers: list[list[list[Any]]], acc: list[Any]) -> list[Any]:
        """Add a super-block of each row times the column's at p."""
        high, low = ([load(b, ir, b.gep(p, [i64(plane + BYTES * k)]), i32, LANES, 4) for k in range(4)] for plane in (0, X_LOW))
        sums_of_x, scale = load_floats(b, ir, b.gep(p, [i64(X_SUMS)])), splat_at(b, ir, p, X_SCALE, ir.FloatType())
        v = [b.fmul(f, sums_of_x) for f in factors]
        for k, lanes in enumerate(kind.lanes):
            t = [zero] * ROWS  # of all rows side by side: what waits for earlier products does not fill the CPU's queues
            for plane in (high, low):
                t = [b.shl(s, int_constant(ir, 8)) for s in t] if plane is low else t
                for i_q, xv in enumerate(plane[2 * k:2 * k + 2]):
                    t = [_add_products(b, ir, s, pairs[k][i_q], xv) for s, pairs in zip(t, numbers, strict=True)]
            v = [multiply_add(b, ir, b.sitofp(s, f.type), shuffle(b, ir, f, f, lanes), w) for s, w, f in zip(t, v, factors, strict=True)]
        return [multiply_add(b, ir, w, scale, s) for w, s in zip(v, acc, strict=True)]

    for k, v in enumerate(loop(b, ir, n, [float_constant(ir, 0.0)] * (cols * ROWS), turn)):
        store_floats(b, b.gep(dst, [b.add(b.mul(dst_row, i64(k % ROWS)), i64(k // ROWS * ROWS * SUMS))]), v)


def _tile(name: str, kind: Planes, cols: int) -> Intrinsic:
    def build(b: Any, ir: Any, *operands: Any) -> None:
        _dots(b, ir, kind, cols, operands)

    build.__name__ = f"planes_{name}_{cols}"
    return Intrinsic("void(ptr, i64, i64, ptr, i64, i64, ptr, i64)", build)


TILES: dict[tuple[str, int], Intrinsic] = {(t, c): _tile(t, k, c) for t, k in PLANES.items() for c in range(1, MAX_COLS + 1)}
"""The tile of a type and a number of columns: (a, bytes to the next row, last row, x, bytes to the next column, super-blocks, dst, bytes to the next row's)."""


# The kernel


def _not_planes(node: Node) -> str | None:
    a, _ = operands_of(node)
    if a.dtype.name not in PLANES:
        return f"a is {a.dtype.name}"
    return columns_refused(node, MOST_COLUMNS, together=True)


def _flat(node: Node) -> list[Tensor | None]:
    return flat_operands(node, MOST_COLUMNS)


@helper
def dots(_a: Any, _a_row: Any, _a_last: Any, _x: Any, _x_col: Any, _n: Any, _dst: Any, _dst_row: Any) -> None:
    """A tile; bound to the type's of as many columns."""



def mul_mat_planes(out: Any, a: Any, _b: Any, x: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Items [i0, i1), 16 rows each, rows fastest. Scratch: 16 sums, partial sums of each column x 16 rows of each stream."""
    n_mb, sums, item = (a.ne1 + LANES - 1) // LANES, at(scratch, LANES * 4), i0
    while item < i1:
        batch, m0 = item // n_mb, item % n_mb * LANES
        i2, i3, m = batch % out.ne2, batch // out.ne2, min(LANES, a.ne1 - m0)
        n = stream_items(item % n_mb, i1 - item, a.ne1)
        streams, between, step, sums_row = tile_layout(n)
        x_p = matrix_address(x, out, i2, i3)
        for q in range(max(n, 1)):
            a_p, o_p = at(matrix_address(a, out, i2, i3), (m0 + q * LANES) * a.nb1), at(out.p, (m0 + q * LANES) * 4 + i2 * out.nb2 + i3 * out.nb3)
            for r in range(0, m, between):
                last = ROWS - 1 if n > 0 else min(ROWS, m - r) - 1
                dots(at(a_p, r * a.nb1), step * a.nb1, last, x_p, x.nb1, a.ne0 // SUPER, at(sums, r * LANES * 4), sums_row)
            for k in range(streams * x.ne1):
                s, c = k % streams, k // streams
                o = at(o_p, s * step * 4 + c * out.nb1)
                add_sums_16(o if m == LANES else scratch, at(sums, (c * ROWS + s) * SUMS), 1)
                if m < LANES:
                    copy_bytes(o, scratch, m * 4)
        item += max(n * ROWS, 1)


def _binds(node: Node) -> dict[str, Any]:
    x = _flat(node)[2]
    assert x is not None
    return {"dots": TILES[operands_of(node)[0].dtype.name, x.ne[1]]}


OPTIONS: dict[str, Any] = {
    "when": _not_planes, "rounds": True, "needs": {"avx512bw", "avx512vnni"}, "operands": _flat, "items": lambda node: row_items(node, MOST_COLUMNS),
    "chunk": row_chunk, "shares": lambda _: SHARES, "bind": _binds, "scratch": lambda _: LANES * 4 + MAX_COLS * ROWS * SUMS,
    "before": lambda node: quantized(_flat(node)[2], QUANTIZERS[PLANES[operands_of(node)[0].dtype.name].group], X_BYTES)}
