"""CPU kernels of the layout ops.

Copies are cut into blocks of rows by columns, by shape alone. Within a block one of four loops runs, chosen when the
graph is planned: whole rows, rows that change type, a transposing copy in 8 x 8 tiles held in registers, or any strides.
Without a change of type an element moves as a whole number of its width, so its bits stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyggml.cpu.rows import gather, row_address
from pyggml.cpu.simd import LOAD as LOADS
from pyggml.cpu.simd import STORE as STORES
from pyggml.cpu.simd import Helper, Intrinsic, at, bad_index, copy_bytes, element, helper, ld_i32, narrow, st_f16, st_f32, st_i32, zero_bytes
from pyggml.cpu.vector import load, transposed
from pyggml.dtypes import Q8_0, DType
from pyggml.quants.cpu import DEQUANT_ROW, quantize_q8_0
from pyggml.registry import kernel
from pyggml.tensor import Node, Shape, Tensor, contiguous_nb

BLOCK = 8192  # elements a thread copies at a time, about
WIDEST_TILED = 1024  # columns of a transposing block: fewer than in BLOCK, so that its rows fill whole cache lines
TILED_ROWS = 16  # rows of a transposing block are a multiple: 16 floats are a cache line of the source
SIZE, LOAD, STORE = 4, ld_i32, st_i32


# One block


def _transpose8(bits: int) -> Intrinsic:
    def build(b: Any, ir: Any, d: Any, dnb: Any, s: Any, snb: Any) -> None:
        i64, ty = ir.IntType(64), ir.IntType(bits)
        rows = transposed(b, ir, [load(b, ir, b.gep(s, [b.mul(snb, i64(r))]), ty, 8, bits // 8) for r in range(8)])
        for r, row in enumerate(rows):
            b.store(row, element(b, ir, b.gep(d, [b.mul(dnb, i64(r))]), i64(0), row.type), align=bits // 8)

    build.__name__ = f"transpose8_i{bits}"
    return Intrinsic("void(ptr, i64, ptr, i64)", build)


transpose8_i8 = _transpose8(8)
transpose8_i16 = _transpose8(16)
transpose8_i32 = _transpose8(32)
transpose8_i64 = _transpose8(64)
TRANSPOSE8 = transpose8_i32
_TRANSPOSE8 = {1: transpose8_i8, 2: transpose8_i16, 4: transpose8_i32, 8: transpose8_i64}


@helper
def copy_rows(d: Any, dnb0: Any, dnb1: Any, s: Any, snb0: Any, snb1: Any, n0: Any, n1: Any) -> None:
    """n1 rows of n0 elements, both sides without gaps in a row."""
    size = n0 * SIZE
    if dnb1 == size and snb1 == size:
        copy_bytes(d, s, size * n1)
    elif size >= 64:
        for j in range(n1):
            copy_bytes(at(d, j * dnb1), at(s, j * snb1), size)
    else:  # shorter than a call of memmove is worth: conv states of 3 columns
        for i in range(n0):
            for j in range(n1):
                STORE(at(d, j * dnb1), i, LOAD(at(s, j * snb1), i))


@helper
def convert_rows(d: Any, dnb0: Any, dnb1: Any, s: Any, snb0: Any, snb1: Any, n0: Any, n1: Any) -> None:
    """copy_rows with a change of type."""
    for j in range(n1):
        p, q = at(d, j * dnb1), at(s, j * snb1)
        for i in range(n0):
            STORE(p, i, LOAD(q, i))


@helper
def copy_transposed(d: Any, dnb0: Any, dnb1: Any, s: Any, snb0: Any, snb1: Any, n0: Any, n1: Any) -> None:
    """The destination's rows are contiguous, the source's columns are."""
    t0, t1 = n0 // 8 * 8, n1 // 8 * 8
    for i in range(0, t0, 8):
        for j in range(0, t1, 8):
            TRANSPOSE8(at(d, j * dnb1 + i * SIZE), dnb1, at(s, i * snb0 + j * SIZE), snb0)
    for i in range(n0):
        q = at(s, i * snb0)
        for j in range(t1 if i < t0 else 0, n1):
            STORE(at(d, j * dnb1), i, LOAD(q, j))


@helper
def copy_strided(d: Any, dnb0: Any, dnb1: Any, s: Any, snb0: Any, snb1: Any, n0: Any, n1: Any) -> None:
    """Any strides, with or without a change of type."""
    for j in range(n1):
        p, q = at(d, j * dnb1), at(s, j * snb1)
        for i in range(n0):
            STORE(at(p, i * dnb0), 0, LOAD(at(q, i * snb0), 0))


COPY = copy_rows


def _moves(dt: DType) -> dict[str, Any]:
    """Loads and stores that move an element of this type without looking at it."""
    bits = f"i{8 * dt.nbytes}"
    return {"SIZE": dt.nbytes, "LOAD": LOADS[bits], "STORE": STORES[bits]}


def _copy(dst: Tensor, src: Tensor) -> Helper:
    """The loop that copies a block of src into dst."""
    whole = dst.rows_contiguous and src.rows_contiguous
    if dst.dtype is not src.dtype:
        loop = convert_rows if whole else copy_strided
        return loop.bind(LOAD=LOADS[src.dtype.name], STORE=STORES[dst.dtype.name])
    size = dst.dtype.nbytes
    if whole:
        return copy_rows.bind(**_moves(dst.dtype))
    if dst.rows_contiguous and src.nb[1] == size:
        return copy_transposed.bind(**_moves(dst.dtype), TRANSPOSE8=_TRANSPOSE8[size])
    return copy_strided.bind(**_moves(dst.dtype))


# Cutting into blocks


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _grid(dst: Tensor, *srcs: Tensor) -> tuple[int, int, int, int]:
    """Columns and rows of a block of dst, number of blocks, and how many of them a thread takes at a time."""
    tiled = any(_copy(dst, s).fn is copy_transposed.fn for s in srcs)
    n0, n1, n2, n3 = dst.ne
    width = _up(-(-n0 // -(-n0 // (WIDEST_TILED if tiled else BLOCK))), 16)
    height = _up(max(1, BLOCK // min(width, n0)), TILED_ROWS if tiled else 1)
    return width, height, -(-n0 // width) * -(-n1 // height) * n2 * n3, BLOCK // (min(width, n0) * min(height, n1))


def _in_blocks(tensors: Callable[[Node], tuple[Tensor, ...]], *attrs: str) -> dict[str, Any]:
    """Options of a kernel that fills its first operand block by block from the others: PLACE0 and PLACE1 place the first and
    the second of them; the params are a block's columns and rows, then these attributes of the node."""

    def params(n: Node) -> list[int]:
        return [*_grid(*tensors(n))[:2], *(n.params[a] for a in attrs)]

    def bind(n: Node) -> dict[str, Any]:
        dst, *srcs = tensors(n)
        return {f"PLACE{i}": place.bind(COPY=_copy(dst, s)) for i, s in enumerate(srcs)} | {"SIZE": dst.dtype.nbytes}

    return {"operands": lambda n: list(tensors(n)), "params": params, "bind": bind, "items": lambda n: _grid(*tensors(n))[2],
            "chunk": lambda n: _grid(*tensors(n))[3]}


@helper
def block(out: Any, w: Any, h: Any, i: Any) -> Any:
    """Block i of out: its columns [c0, c1), rows [r0, r1) and plane."""
    nw, nh = (out.ne0 + w - 1) // w, (out.ne1 + h - 1) // h
    q = i // nw
    c0 = (i - q * nw) * w
    p = q // nh
    r0 = (q - p * nh) * h
    i3 = p // out.ne2
    return c0, min(c0 + w, out.ne0), r0, min(r0 + h, out.ne1), p - i3 * out.ne2, i3


@helper
def place(out: Any, x: Any, o0: Any, o1: Any, o2: Any, o3: Any, c0: Any, c1: Any, r0: Any, r1: Any, i2: Any, i3: Any) -> None:
    """Copy what of x falls into columns [c0, c1) and rows [r0, r1) of plane (i2, i3), where x's first element comes to
    position (o0, o1, o2, o3) of out."""
    a0, a1 = max(c0, o0), min(c1, o0 + x.ne0)
    b0, b1 = max(r0, o1), min(r1, o1 + x.ne1)
    j2, j3 = i2 - o2, i3 - o3
    if a0 < a1 and b0 < b1 and 0 <= j2 < x.ne2 and 0 <= j3 < x.ne3:
        d = at(out.p, a0 * out.nb0 + b0 * out.nb1 + i2 * out.nb2 + i3 * out.nb3)
        s = at(x.p, (a0 - o0) * x.nb0 + (b0 - o1) * x.nb1 + j2 * x.nb2 + j3 * x.nb3)
        COPY(d, out.nb0, out.nb1, s, x.nb0, x.nb1, a1 - a0, b1 - b0)


PLACE0 = PLACE1 = place


def _operands(node: Node) -> tuple[Tensor, ...]:
    return (node.out, *(t for t in node.src if t is not None))


# CONT, CPY


def _with(t: Tensor, ne: Shape, nb: Shape) -> Tensor:
    return Tensor(t.dtype, ne, nb, name=t.name, root=t.root, offs=t.offs)


def _pair(node: Node) -> tuple[Tensor, ...]:
    """Destination and source with equal dims, as few and as long as the strides allow: the destination's shortest stride
    first, then a dim along which the source is contiguous. Empty when their shapes differ and neither is contiguous."""
    dst, src = _operands(node)[:2]
    if dst.ne != src.ne:
        if src.is_contiguous:
            src = _with(src, dst.ne, contiguous_nb(src.dtype, dst.ne))
        elif dst.is_contiguous:
            dst = _with(dst, src.ne, contiguous_nb(dst.dtype, src.ne))
        else:
            return ()
    dims: list[tuple[int, int, int]] = []
    for d, s, n in sorted((d, s, n) for d, s, n in zip(dst.nb, src.nb, dst.ne, strict=True) if n > 1):
        if dims and (d, s) == (dims[-1][0] * dims[-1][2], dims[-1][1] * dims[-1][2]):
            dims[-1] = (*dims[-1][:2], dims[-1][2] * n)
        else:
            dims.append((d, s, n))
    dims[1:] = sorted(dims[1:], key=lambda dim: dim[1] != src.dtype.nbytes)
    dims += [(dst.dtype.nbytes, src.dtype.nbytes, 1)] * (4 - len(dims))
    dnb, snb, ne = ((t[0], t[1], t[2], t[3]) for t in zip(*dims, strict=True))
    return _with(dst, ne, dnb), _with(src, ne, snb)


def _loads(node: Node) -> dict[str, Any]:
    dst, src = _operands(node)[:2]
    return _moves(src.dtype) if src.dtype is dst.dtype else {"LOAD": LOADS[src.dtype.name], "STORE": STORES[dst.dtype.name]}


@kernel("CPY", "cpu", operands=lambda n: _operands(n)[:2], bind=_loads)
def copy_in_order(out: Any, x: Any, i0: Any, i1: Any) -> None:
    """Rows [i0, i1) of out, for shapes that differ: x is walked element by element."""
    for r in range(i0, i1):
        q = r // out.ne1
        j3 = q // out.ne2
        d = at(out.p, (r - q * out.ne1) * out.nb1 + (q - j3 * out.ne2) * out.nb2 + j3 * out.nb3)
        e = r * out.ne0
        k0, e = e % x.ne0, e // x.ne0
        k1, e = e % x.ne1, e // x.ne1
        k2, k3 = e % x.ne2, e // x.ne2
        for i in range(out.ne0):
            STORE(at(d, i * out.nb0), 0, LOAD(at(x.p, k0 * x.nb0 + k1 * x.nb1 + k2 * x.nb2 + k3 * x.nb3), 0))
            k0 += 1
            if k0 == x.ne0:
                k0, k1 = 0, k1 + 1
                if k1 == x.ne1:
                    k1, k2 = 0, k2 + 1
                    if k2 == x.ne2:
                        k2, k3 = 0, k3 + 1


@kernel("CPY", "cpu", when=lambda n: None if _pair(n) else "shapes differ and neither side is contiguous", **_in_blocks(_pair))
@kernel("CONT", "cpu", **_in_blocks(_pair))
def copy(out: Any, x: Any, w: Any, h: Any, i0: Any, i1: Any) -> None:
    """Blocks [i0, i1)."""
    for i in range(i0, i1):
        c0, c1, r0, r1, i2, i3 = block(out, w, h, i)
        PLACE0(out, x, 0, 0, 0, 0, c0, c1, r0, r1, i2, i3)


# CONCAT, PAD


@kernel("CONCAT", "cpu", **_in_blocks(_operands, "dim"))
def concat(out: Any, a: Any, b: Any, w: Any, h: Any, dim: Any, i0: Any, i1: Any) -> None:
    """Blocks [i0, i1): what of a and what of b falls into each."""
    o0, o1 = (a.ne0 if dim == 0 else 0), (a.ne1 if dim == 1 else 0)
    o2, o3 = (a.ne2 if dim == 2 else 0), (a.ne3 if dim == 3 else 0)
    for i in range(i0, i1):
        c0, c1, r0, r1, i2, i3 = block(out, w, h, i)
        PLACE0(out, a, 0, 0, 0, 0, c0, c1, r0, r1, i2, i3)
        PLACE1(out, b, o0, o1, o2, o3, c0, c1, r0, r1, i2, i3)


@kernel("PAD", "cpu", **_in_blocks(_operands))
def pad(out: Any, x: Any, w: Any, h: Any, i0: Any, i1: Any) -> None:
    """Blocks [i0, i1): what of x falls into each, zeros in the rest."""
    for i in range(i0, i1):
        c0, c1, r0, r1, i2, i3 = block(out, w, h, i)
        PLACE0(out, x, 0, 0, 0, 0, c0, c1, r0, r1, i2, i3)
        for r in range(r0, r1):
            start = max(c0, x.ne0 if r < x.ne1 and i2 < x.ne2 and i3 < x.ne3 else 0)
            if start < c1:
                zero_bytes(at(out.p, start * SIZE + r * out.nb1 + i2 * out.nb2 + i3 * out.nb3), (c1 - start) * SIZE)


# REPEAT, REPEAT_INTERLEAVE


@helper
def tile(i: Any, n: Any, times: Any) -> Any:
    """Index in x of index i of x (n long) repeated."""
    return i % n


@helper
def deal(i: Any, n: Any, times: Any) -> Any:
    """Index in x of index i of x with each element `times` times in a row."""
    return i // times


@helper
def tile_row(d: Any, s: Any, nb0: Any, n: Any, times: Any) -> None:
    """A row of n elements, repeated."""
    if n == 1:
        v = LOAD(s, 0)
        for i in range(times):
            STORE(d, i, v)
    else:
        COPY(d, SIZE, 0, s, nb0, 0, n, 1)
        for t in range(1, times):
            copy_bytes(at(d, t * n * SIZE), d, n * SIZE)


@helper
def deal_row(d: Any, s: Any, nb0: Any, n: Any, times: Any) -> None:
    """A row of n elements, each `times` times in a row."""
    if times == 1:
        COPY(d, SIZE, 0, s, nb0, 0, n, 1)
    else:
        for i in range(n):
            v = LOAD(at(s, i * nb0), 0)
            for t in range(times):
                STORE(d, i * times + t, v)


PICK, ROW = tile, tile_row


def _rows_of(pick: Helper, row: Helper) -> Callable[[Node], dict[str, Any]]:
    def bind(node: Node) -> dict[str, Any]:
        out, x = _operands(node)
        loop = copy_rows if x.rows_contiguous else copy_strided
        return {"PICK": pick, "ROW": row.bind(COPY=loop.bind(**_moves(out.dtype)), **_moves(out.dtype))}
    return bind


@kernel("REPEAT", "cpu", bind=_rows_of(tile, tile_row))
@kernel("REPEAT_INTERLEAVE", "cpu", bind=_rows_of(deal, deal_row))
def repeat_rows(out: Any, x: Any, i0: Any, i1: Any) -> None:
    """Rows [i0, i1)."""
    t0, t1, t2, t3 = out.ne0 // x.ne0, out.ne1 // x.ne1, out.ne2 // x.ne2, out.ne3 // x.ne3
    for r in range(i0, i1):
        q = r // out.ne1
        j3 = q // out.ne2
        k1, k2, k3 = PICK(r - q * out.ne1, x.ne1, t1), PICK(q - j3 * out.ne2, x.ne2, t2), PICK(j3, x.ne3, t3)
        ROW(row_address(out, r), at(x.p, k1 * x.nb1 + k2 * x.nb2 + k3 * x.nb3), x.nb0, x.ne0, t0)


# ARANGE


@kernel("ARANGE", "cpu", params=lambda n: [float(n.params["start"]), float(n.params["step"])], items=lambda n: n.out.ne[0], chunk=lambda n: BLOCK)
def arange(out: Any, start: Any, step: Any, i0: Any, i1: Any) -> None:
    """Elements [i0, i1)."""
    for i in range(i0, i1):
        st_f32(out.p, i, narrow(start + i * step))


# GET_ROWS, SET_ROWS


@helper
def dequant_row(d: Any, dnb0: Any, dnb1: Any, s: Any, snb0: Any, snb1: Any, n0: Any, n1: Any) -> None:
    """One row of n0 elements of a block type to f32."""
    DEQUANT(s, d, n0)


LOAD_ID, DEQUANT = ld_i32, copy_bytes


def _row(node: Node) -> dict[str, Any]:
    out, x = _operands(node)[:2]
    return {"COPY": dequant_row.bind(DEQUANT=DEQUANT_ROW[x.dtype.name]) if x.dtype.is_quantized else _copy(out, x)}


@kernel("GET_ROWS", "cpu", bind=_row, status=True)
def get_rows(out: Any, x: Any, ids: Any, status: Any, i0: Any, i1: Any) -> None:
    """Rows [i0, i1) of out; one whose id is bad is zero."""
    for r in range(i0, i1):
        q = r // out.ne1
        k = r - q * out.ne1
        i3 = q // out.ne2
        i2 = q - i3 * out.ne2
        d = at(out.p, r * out.nb1)
        row = ld_i32(at(ids.p, k * ids.nb0 + i2 * ids.nb1 + i3 * ids.nb2), 0)
        if 0 <= row < x.ne1:
            COPY(d, out.nb0, 0, at(x.p, row * x.nb1 + i2 * x.nb2 + i3 * x.nb3), x.nb0, 0, out.ne0, 1)
        else:
            bad_index(status, row, x.ne1)
            zero_bytes(d, out.nb1)


def _n_ids(node: Node) -> int:
    ids = node.src[2]
    assert ids is not None
    return ids.ne[0]


def _columns(node: Node) -> int:
    """Columns of a block that one thread writes in all rows."""
    return _up(max(1, BLOCK // _n_ids(node)), 64)


def _set_row(node: Node) -> dict[str, Any]:
    dst, src, ids = node.src
    assert dst is not None and src is not None and ids is not None
    return {"COPY": _copy(dst, src), "LOAD_ID": LOADS[ids.dtype.name]}


def _blocks_written(node: Node) -> str | None:
    return f"dst is {node.out.dtype.name}" if node.out.dtype.is_quantized else None


# why blocks of columns: each destination element then has one writer, which takes the rows in order, so of equal ids the last wins.
@kernel("SET_ROWS", "cpu", when=_blocks_written, operands=lambda n: list(n.src), params=lambda n: [_columns(n)], bind=_set_row, status=True,
        items=lambda n: -(-n.out.ne[0] // _columns(n)) * n.out.ne[2] * n.out.ne[3],
        chunk=lambda n: BLOCK // (min(_columns(n), n.out.ne[0]) * _n_ids(n)))
def set_rows(dst: Any, src: Any, ids: Any, w: Any, status: Any, i0: Any, i1: Any) -> None:
    """Blocks [i0, i1) of w columns, in all rows of src."""
    nw = (dst.ne0 + w - 1) // w
    for i in range(i0, i1):
        p = i // nw
        c0 = (i - p * nw) * w
        n = min(w, dst.ne0 - c0)
        i3 = p // dst.ne2
        i2 = p - i3 * dst.ne2
        d = at(dst.p, c0 * dst.nb0 + i2 * dst.nb2 + i3 * dst.nb3)
        s = at(src.p, c0 * src.nb0 + i2 * src.nb2 + i3 * src.nb3)
        row_ids = at(ids.p, i2 % ids.ne1 * ids.nb1 + i3 % ids.ne2 * ids.nb2)
        for k in range(src.ne1):
            row = LOAD_ID(at(row_ids, k * ids.nb0), 0)
            if 0 <= row < dst.ne1:
                COPY(at(d, row * dst.nb1), dst.nb0, 0, at(s, k * src.nb1), src.nb0, 0, n, 1)
            else:
                bad_index(status, row, dst.ne1)


def _not_q8_0(node: Node) -> str | None:
    return None if node.out.dtype is Q8_0 else f"dst is {node.out.dtype.name}"


def _set_blocks(node: Node) -> dict[str, Any]:
    _, src, ids = node.src
    assert src is not None and ids is not None
    return {"IN_PLACE": src.nb[0] == 4, "LOAD_ID": LOADS[ids.dtype.name]}


IN_PLACE = True  # bound: the rows of src have no gaps


@kernel("SET_ROWS", "cpu", when=_not_q8_0, operands=lambda n: list(n.src), bind=_set_blocks, status=True, scratch=lambda _: 4 * Q8_0.block,
        items=lambda n: n.out.ne[0] // Q8_0.block * n.out.ne[2] * n.out.ne[3], chunk=lambda n: BLOCK // (Q8_0.block * _n_ids(n)))
def set_rows_q8_0(dst: Any, src: Any, ids: Any, status: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Blocks [i0, i1) of 32 columns, in all rows of src."""
    n_blocks = dst.ne0 // 32
    for i in range(i0, i1):
        plane, block = i // n_blocks, i % n_blocks
        i2, i3 = plane % dst.ne2, plane // dst.ne2
        row_ids = at(ids.p, i2 % ids.ne1 * ids.nb1 + i3 % ids.ne2 * ids.nb2)
        for k in range(src.ne1):
            row = LOAD_ID(at(row_ids, k * ids.nb0), 0)
            if row < 0 or row >= dst.ne1:
                bad_index(status, row, dst.ne1)
                continue
            values = at(src.p, block * 32 * src.nb0 + k * src.nb1 + i2 * src.nb2 + i3 * src.nb3)
            if not IN_PLACE:
                gather(scratch, values, src.nb0, 32)
                values = scratch
            to = at(dst.p, block * dst.nb0 + row * dst.nb1 + i2 * dst.nb2 + i3 * dst.nb3)
            st_f16(to, 0, quantize_q8_0(at(to, 2), values))
