"""MUL_MAT of few columns (1 to 32 tokens): weights are read once, from where they lie, made float32 in registers and multiplied with
up to 4 columns while they are there.

An item is 16 rows of one batch, computed in tiles of 4 rows. For one column, which takes as long as memory does, a tile has a row of
each of four items, which lie far from each other. Dot products are summed as `mul_mat` sums them, 16 partial sums for each K_BLOCK of k, so
that they have the same bits: they depend on their two rows alone.
"""

from __future__ import annotations

from typing import Any

from pyggml.cpu.level import target_features
from pyggml.cpu.rows import matrix_address
from pyggml.cpu.simd import Intrinsic, at, copy_bytes, helper, intrinsic
from pyggml.cpu.vector import LANES, float_constant, load_floats, loop, multiply_add, prefetch, store_floats, sums_of_lanes, wide_registers
from pyggml.dtypes import F32
from pyggml.quants.units_cpu import UNITS, Unit
from pyggml.tensor import Node, Tensor

MAX_N = 32  # columns
K_BLOCK = 1024  # values of k that are summed at a time, here and in `mul_mat`; a multiple of every type's block
MAX_COLS, ROWS = 4, 4  # of a tile
TURN = 64  # weights of a row per turn of a tile's loop, at least
AHEAD = 8192  # bytes that prefetches run ahead of the loads, at least: the hardware's own do not follow 4 rows of some blocks each
CHUNK_BYTES = 16 << 10  # of weights that a thread takes at a time, at least
SHARES = 4  # times that it does so, at most: what is fetched ahead of the end of a chunk comes to the wrong core
STREAM_AHEAD = 1024  # bytes that prefetches run ahead of loads where each row of a tile is of its own stream
SUMS = LANES * LANES * 4  # bytes of the partial sums of 16 rows and a column


# Tiles


def _rows_at_once(cols: int) -> int:
    """Rows whose sums stay in registers together."""
    if wide_registers():
        return ROWS
    return max(1, (4 if "avx2" in target_features() else 2) // cols)


def _dots(b: Any, ir: Any, unit: Unit, cols: int, operands: Any) -> None:
    """Partial sums of 4 rows x cols columns over n_units units: 16 of (row, col) at dst + col * ROWS * SUMS + row * dst_row. Rows beyond the last
    are computed from the last one again."""
    a, a_row, a_last, x, x_col, n_units, ahead, dst, dst_row, scales = operands
    i64 = ir.IntType(64)
    a_rows = [b.gep(a, [b.mul(a_row, b.select(b.icmp_signed("<", a_last, i64(r)), a_last, i64(r)))]) for r in range(ROWS)]
    x_cols = [b.gep(x, [b.mul(x_col, i64(c))]) for c in range(cols)]
    several, at_once, s_unit = max(1, TURN // unit.n), _rows_at_once(cols), unit.n_scales * 4
    s_rows = [b.gep(scales, [b.mul(n_units, i64(s_unit * r))]) for r in range(ROWS)]
    if unit.unpack is not None:
        _unpack(b, ir, unit, a_rows, s_rows, n_units)

    def units(rows: list[Any], s_here: list[Any], first: Any, count: Any, sums: list[Any], per_turn: int) -> list[Any]:
        """count turns of per_turn units each, from unit `first` on."""
        def turn(i: Any, acc: list[Any]) -> list[Any]:
            start = b.add(first, b.mul(i, i64(per_turn)))
            here = [b.gep(p, [b.mul(start, i64(unit.nbytes))]) for p in rows]
            x_here = [b.gep(p, [b.mul(start, i64(unit.n * 4))]) for p in x_cols]
            for p in here:
                for line in range(0, per_turn * unit.nbytes, 64):
                    prefetch(b, ir, b.gep(p, [b.add(ahead, i64(line))]), prefetch_level(cols))
            for u in range(per_turn):
                weights = [unit.build(b, ir, b.gep(p, [i64(u * unit.nbytes)]), b.gep(s, [b.mul(start, i64(s_unit))]))
                           for p, s in zip(here, s_here, strict=True)]
                for j in range(unit.n // LANES):
                    xs = [load_floats(b, ir, b.gep(p, [i64((u * unit.n + j * LANES) * 4)])) for p in x_here]
                    for r, row in enumerate(weights):
                        w = next(row)
                        acc[r * cols:(r + 1) * cols] = [multiply_add(b, ir, w, v, s) for v, s in zip(xs, acc[r * cols:(r + 1) * cols], strict=True)]
            return acc

        return loop(b, ir, count, sums, turn)

    turns = b.sdiv(n_units, i64(several))
    done = b.mul(turns, i64(several))
    for r0 in range(0, ROWS, at_once):
        rows = a_rows[r0:r0 + at_once], s_rows[r0:r0 + at_once]
        sums = units(*rows, i64(0), turns, [float_constant(ir, 0.0)] * (at_once * cols), several)
        if several > 1:
            sums = units(*rows, done, b.sub(n_units, done), sums, 1)
        for i, v in enumerate(sums):
            store_floats(b, b.gep(dst, [b.add(i64(i % cols * ROWS * SUMS), b.mul(dst_row, i64(r0 + i // cols)))]), v)


def _unpack(b: Any, ir: Any, unit: Unit, rows: list[Any], s_rows: list[Any], n_units: Any) -> None:
    """Scales of all units of some rows."""
    i64, unpack = ir.IntType(64), unit.unpack
    assert unpack is not None

    def turn(i: Any, _: list[Any]) -> list[Any]:
        for p, s in zip(rows, s_rows, strict=True):
            unpack(b, ir, b.gep(p, [b.mul(i, i64(unit.nbytes))]), b.gep(s, [b.mul(i, i64(unit.n_scales * 4))]))
        return []

    loop(b, ir, n_units, [], turn)


def _tile(name: str, unit: Unit, cols: int) -> Intrinsic:
    def build(b: Any, ir: Any, *operands: Any) -> None:
        _dots(b, ir, unit, cols, operands)

    build.__name__ = f"dots_{name}_{cols}"
    return Intrinsic("void(ptr, i64, i64, ptr, i64, i64, i64, ptr, i64, ptr)", build)


TILES: dict[tuple[str, int], Intrinsic] = {(t, c): _tile(t, u, c) for t, u in UNITS.items() for c in range(1, MAX_COLS + 1)}
"""The tile of a type and a number of columns: (a, bytes to the next row, last row, x, bytes of a column, units, bytes to prefetch ahead, dst, bytes
to the next row's sums, scratch for scales)."""


@intrinsic("void(ptr, ptr, i64)")
def add_sums_16(b: Any, ir: Any, dst: Any, src: Any, first: Any) -> None:
    """Add the sums of 16 vectors of 16 lanes to dst; `first`: 1 to store them."""
    i64 = ir.IntType(64)
    sums = sums_of_lanes(b, ir, [load_floats(b, ir, b.gep(src, [i64(r * LANES * 4)])) for r in range(LANES)])
    store_floats(b, dst, b.select(b.icmp_signed("!=", first, i64(0)), sums, b.fadd(load_floats(b, ir, dst), sums)))


# Rows of a tile


def prefetch_level(cols: int) -> int:
    """The cache that tiles prefetch to: with streams as little is on its way as the first one holds."""
    return 1 if cols == 1 else 2


@helper
def stream_items(first: Any, n: Any, n_rows: Any) -> Any:
    """Items of each of ROWS streams: a quarter of those that are whole among n items from item `first` of n_rows rows on. Few
    columns are multiplied with a row of each stream at a time, as memory is read fastest at some places far from each other."""
    return min(n, n_rows // LANES - first) // ROWS


@helper
def tile_layout(n: Any) -> Any:
    """With n items in each stream (0: there are none): streams, rows from a tile to the next, rows of `a` from one row of a tile to the next,
    and bytes between the sums of these."""
    return (ROWS, 1, n * LANES, SUMS) if n > 0 else (1, ROWS, 1, LANES * 4)


# The kernel


def operands_of(node: Node) -> tuple[Tensor, Tensor]:
    """a and b."""
    a, b = node.src
    assert a is not None and b is not None
    return a, b


def _as_columns(t: Tensor) -> Tensor | None:
    """All rows of t as those of one matrix; None where their addresses are not evenly spaced."""
    rows = [(n, nb) for n, nb in zip(t.ne[1:], t.nb[1:], strict=True) if n > 1]
    if any(nb != n_before * nb_before for (n_before, nb_before), (_, nb) in zip(rows, rows[1:], strict=False)):
        return None
    step = rows[0][1] if rows else t.nb[1]
    return Tensor(t.dtype, (t.ne[0], t.n_rows, 1, 1), (t.nb[0], step, step * t.n_rows, step * t.n_rows), name=t.name, root=t.root, offs=t.offs)


def flat_operands(node: Node, most: int = MAX_N) -> list[Tensor | None]:
    """Result, a and b; batches of b are more columns of one product where a has none and they are `most` at most."""
    a, b = operands_of(node)
    flat = _as_columns(b) if a.ne[2] * a.ne[3] == 1 and b.n_rows <= most else None
    out = _as_columns(node.out)
    return [node.out, a, b] if flat is None or out is None else [out, a, flat]


def columns_refused(node: Node, most: int = MAX_N, *, together: bool = False) -> str | None:
    """Why products of few columns do not take b. `together`: columns of all its batches count where they meet one matrix, which is then read once."""
    a, b = operands_of(node)
    n = b.n_rows if together and a.ne[2] * a.ne[3] == 1 else b.ne[1]
    if n > most:
        return f"{n} columns, more than {most}"
    return "the columns of b are not float32 without gaps" if b.dtype is not F32 or b.nb[0] != 4 else None


def _not_few(node: Node) -> str | None:
    a, _ = operands_of(node)
    if why := columns_refused(node):
        return why
    if not a.dtype.is_quantized and a.nb[0] != a.dtype.nbytes:
        return "the rows of a have gaps"
    unit = UNITS.get(a.dtype.name)
    if unit is None:
        return f"a is {a.dtype.name}"
    return f"K is {a.ne[0]}, no multiple of {unit.n}" if a.ne[0] % unit.n else None


def row_items(node: Node, most: int = MAX_N) -> int:
    """16 rows of a batch each."""
    out = flat_operands(node, most)[0]
    assert out is not None
    return -(-out.ne[0] // LANES) * out.ne[2] * out.ne[3]


def row_chunk(node: Node) -> int:
    """Items of CHUNK_BYTES of weights."""
    a, _ = operands_of(node)
    return CHUNK_BYTES // (LANES * a.dtype.row_bytes(a.ne[0]))


def tile_columns(node: Node) -> int:
    """Columns of a tile: of as few tiles as possible, all alike."""
    out = flat_operands(node)[0]
    assert out is not None
    return -(-out.ne[1] // -(-out.ne[1] // MAX_COLS))


def _binds(node: Node) -> dict[str, Any]:
    a, cols = operands_of(node)[0].dtype.name, tile_columns(node)
    unit = UNITS[a]
    return {"dots": TILES[a, cols], "COLS": cols, "UNIT": unit.n, "NBYTES": unit.nbytes, "SCALES": ROWS * K_BLOCK // unit.n * unit.n_scales * 4}


def _scratch(node: Node) -> int:
    a, _ = operands_of(node)
    unit = UNITS[a.dtype.name]
    return LANES * 4 + ROWS * K_BLOCK // unit.n * unit.n_scales * 4 + MAX_COLS * ROWS * SUMS * -(-a.ne[0] // K_BLOCK)


@helper
def dots(_a: Any, _a_row: Any, _a_last: Any, _x: Any, _x_col: Any, _n_units: Any, _ahead: Any, _dst: Any, _dst_row: Any, _scales: Any) -> None:
    """A tile; bound to the type's."""


COLS, UNIT, NBYTES, SCALES = 1, 16, 64, 0  # bound


def mul_mat_few(out: Any, a: Any, b: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Items [i0, i1), rows fastest. Scratch: 16 sums, scales of 4 rows, then for each block of k partial sums of COLS columns x 16 rows of each
    stream."""
    n_mb, n_kb, tile, item = (a.ne1 + LANES - 1) // LANES, (a.ne0 + K_BLOCK - 1) // K_BLOCK, ROWS * a.nb1, i0
    ahead = STREAM_AHEAD if COLS == 1 else (AHEAD + tile - 1) // tile * tile  # whole tiles, or else rows of one would fetch each other's
    scales = at(scratch, LANES * 4)
    sums = at(scales, SCALES)
    while item < i1:
        batch, m0 = item // n_mb, item % n_mb * LANES
        i2, i3, m = batch % out.ne2, batch // out.ne2, min(LANES, a.ne1 - m0)
        n = stream_items(item % n_mb, i1 - item, a.ne1) if COLS == 1 else 0
        streams, between, step, sums_row = tile_layout(n)
        b_p = matrix_address(b, out, i2, i3)
        for q in range(max(n, 1)):
            a_p, o_p = at(matrix_address(a, out, i2, i3), (m0 + q * LANES) * a.nb1), at(out.p, (m0 + q * LANES) * 4 + i2 * out.nb2 + i3 * out.nb3)
            for j in range(0, b.ne1, COLS):
                first = min(j, b.ne1 - COLS)  # the last tile may compute columns again: they come out the same
                for r in range(0, m, between):
                    last = ROWS - 1 if n > 0 else min(ROWS, m - r) - 1
                    for kb in range(n_kb):
                        units = (min(a.ne0, (kb + 1) * K_BLOCK) - kb * K_BLOCK) // UNIT
                        dots(at(a_p, r * a.nb1 + kb * (K_BLOCK // UNIT) * NBYTES), step * a.nb1, last, at(b_p, first * b.nb1 + kb * K_BLOCK * 4),
                             b.nb1, units, ahead, at(sums, kb * COLS * ROWS * SUMS + r * LANES * 4), sums_row, scales)
                for c in range(COLS):
                    for s in range(streams):
                        o = at(o_p, (first + c) * out.nb1 + s * step * 4)
                        to = o if m == LANES else scratch
                        for kb in range(n_kb):
                            add_sums_16(to, at(sums, ((kb * COLS + c) * ROWS + s) * SUMS), 1 if kb == 0 else 0)
                        if m < LANES:
                            copy_bytes(o, scratch, m * 4)
        item += max(n * ROWS, 1)


OPTIONS: dict[str, Any] = {"when": _not_few, "operands": flat_operands, "items": row_items, "chunk": row_chunk, "shares": lambda _: SHARES, "bind": _binds,
                           "scratch": _scratch}
