"""Rows of tensors in kernels: elements at any stride, addresses, copies, and sums in float64.

`row_sum` and `row_squares` add a row in 16 lanes, the lanes pairwise and then what is left over: an order that the length alone
decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyggml.cpu.simd import LOAD, Helper, at, helper, intrinsic, ld_f32, st_f32, wide
from pyggml.cpu.vector import LANES, load_floats, loop, shuffle, splat


@helper
def load_next(row: Any, _nb0: Any, i: Any) -> Any:
    """Element i of a row without gaps."""
    return ld_f32(row, i)


@helper
def load_strided(row: Any, nb0: Any, i: Any) -> Any:
    """Element i of a row whose elements are nb0 bytes apart."""
    return ld_f32(at(row, i * nb0), 0)


def loader(type_name: str, contiguous: bool) -> Helper:
    """The helper (row, nb0, i) that loads an element of a type, from rows without gaps or from any."""
    return (load_next if contiguous else load_strided).bind(ld_f32=LOAD[type_name])


@helper
def row_address(t: Any, r: Any) -> Any:
    """First element of row r, the rows counted through dims 1, 2, 3."""
    q = r // t.ne1
    return at(t.p, (r - q * t.ne1) * t.nb1 + q % t.ne2 * t.nb2 + q // t.ne2 * t.nb3)


@helper
def matrix_address(t: Any, out: Any, i2: Any, i3: Any) -> Any:
    """First element of the matrix of t that goes into matrix (i2, i3) of out: where t has fewer in a dim, into several neighbours."""
    return at(t.p, i2 // (out.ne2 // t.ne2) * t.nb2 + i3 // (out.ne3 // t.ne3) * t.nb3)


@helper
def gather(dst: Any, row: Any, nb0: Any, n: Any) -> Any:
    """Copy a strided row of float32 to dst, and give dst."""
    for i in range(n):
        st_f32(dst, i, ld_f32(at(row, i * nb0), 0))
    return dst


@helper
def finish(_extra: Any, _o: Any, _i: Any, _n: Any, _j1: Any, _j2: Any, _j3: Any) -> None:
    """What a kernel with an epilogue does to each run of its output: nothing, until a chain is bound (pyggml.cpu.launch)."""


@helper
def row_in_place(_dst: Any, row: Any, _nb0: Any, _n: Any) -> Any:
    """A row without gaps needs no copy."""
    return row


def _lanes(b: Any, ir: Any, p: Any, n: Any, term: Callable[[Any], Any]) -> Any:
    """Sum of term(x) over n elements, a multiple of LANES, in LANES float64 sums that are added pairwise at the end."""
    i64, ty = ir.IntType(64), ir.VectorType(ir.DoubleType(), LANES)

    def add(i: Any, sums: list[Any]) -> list[Any]:
        x = load_floats(b, ir, b.gep(p, [b.mul(i, i64(4 * LANES))]))
        return [b.fadd(sums[0], term(b.fpext(x, ty)))]

    (v,) = loop(b, ir, b.sdiv(n, i64(LANES)), [ir.Constant(ty, [0.0] * LANES)], add)
    width = LANES
    while width > 1:
        width //= 2
        v = b.fadd(shuffle(b, ir, v, v, range(width)), shuffle(b, ir, v, v, range(width, 2 * width)))
    return b.extract_element(v, ir.IntType(32)(0))


@intrinsic("f64(ptr, i64)")
def lanes_sum(b: Any, ir: Any, p: Any, n: Any) -> Any:
    """Sum of n float32, n a multiple of LANES."""
    return _lanes(b, ir, p, n, lambda x: x)


@intrinsic("f64(ptr, i64, f64)")
def lanes_squares(b: Any, ir: Any, p: Any, n: Any, mean: Any) -> Any:
    """Sum of (x - mean)^2 over n float32, n a multiple of LANES."""
    means = splat(b, ir, mean)

    def square(x: Any) -> Any:
        d = b.fsub(x, means)
        return b.fmul(d, d)

    return _lanes(b, ir, p, n, square)


@helper
def row_sum(p: Any, n: Any) -> Any:
    """Sum of n float32 that follow each other."""
    full = n // LANES * LANES
    s = lanes_sum(p, full)
    for i in range(full, n):
        s += wide(ld_f32(p, i))
    return s


@helper
def row_squares(p: Any, n: Any, mean: Any) -> Any:
    """Sum of (x - mean)^2 over n float32 that follow each other."""
    full = n // LANES * LANES
    s = lanes_squares(p, full, mean)
    for i in range(full, n):
        d = wide(ld_f32(p, i)) - mean
        s += d * d
    return s
