"""CPU kernels of attention and selection: one item is a row (SOFT_MAX, ARGSORT, TOP_K) or the heads of a token (ROPE)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pyggml.cpu.mathf import INF, exp
from pyggml.cpu.rows import load_next, loader, row_sum
from pyggml.cpu.simd import (
    F0,
    Helper,
    at,
    floor64,
    fma,
    fmax,
    helper,
    intrinsic,
    ld_f32,
    ld_f64,
    ld_i32,
    ld_i64,
    narrow,
    rint64,
    st_f32,
    st_f64,
    st_i32,
    st_i64,
    to_bits,
)
from pyggml.cpu.vector import LANES, float_constant, load_floats, loop, shuffle
from pyggml.registry import kernel
from pyggml.tensor import Node, Tensor

CHUNK = 4096  # elements a thread takes at a time, about


def _rows_at_once(n: int) -> int:
    return max(1, CHUNK // n)


@helper
def no_mask(_row: Any, _nb0: Any, _i: Any) -> Any:
    """Element of a mask that is not there."""
    return F0


X = MASK = load_next


def _load(t: Tensor | None) -> Helper:
    return no_mask if t is None else loader(t.dtype.name, t.rows_contiguous)


# SOFT_MAX


@intrinsic("f32(ptr, i64)")
def max_lanes(b: Any, ir: Any, p: Any, n: Any) -> Any:
    """The largest of n groups of LANES floats, NaN left out."""

    def larger(v: Any, top: Any) -> Any:
        return b.select(b.fcmp_ordered(">", v, top), v, top)

    def turn(i: Any, carried: list[Any]) -> list[Any]:
        group = b.gep(p, [b.mul(i, ir.IntType(64)(4 * LANES))])
        return [larger(load_floats(b, ir, group), carried[0])]

    (top,) = loop(b, ir, n, [float_constant(ir, -math.inf)], turn)
    for k in (8, 4, 2, 1):
        top = larger(shuffle(b, ir, top, top, [(i + k) % LANES for i in range(LANES)]), top)
    return b.extract_element(top, ir.IntType(32)(0))


@helper
def row_max(p: Any, n: Any) -> Any:
    """The largest of n floats, NaN left out; -inf when there is none."""
    m = max_lanes(p, n // LANES)
    for i in range(n // LANES * LANES, n):
        m = fmax(ld_f32(p, i), m)
    return m


@helper
def mask_row(mask: Any, i1: Any, i2: Any, i3: Any) -> Any:
    """The mask's row for row (i1, i2, i3) of x."""
    return at(mask.p, i1 * mask.nb1 + i2 % mask.ne2 * mask.nb2 + i3 % mask.ne3 * mask.nb3)


@helper
def no_row(mask: Any, i1: Any, i2: Any, i3: Any) -> Any:
    """The row of a mask that is not there: it is not read."""
    return mask.p


MASK_ROW = mask_row
LEAST = np.float32(-87.3)  # e^x below is taken as 0: subnormal numbers would make masked elements cost ten times as much


def _soft_max_loads(node: Node) -> dict[str, Any]:
    x, mask = node.src
    return {"X": _load(x), "MASK": _load(mask), "MASK_ROW": no_row if mask is None else mask_row}


@kernel("SOFT_MAX", "cpu", params=lambda n: [float(n.params["scale"])], bind=_soft_max_loads)
def soft_max(out: Any, x: Any, mask: Any, scale: Any, i0: Any, i1: Any) -> None:
    """Rows [i0, i1): scores, exponentials and quotients in the output's own memory."""
    s = np.float32(scale)
    n = out.ne0
    for r in range(i0, i1):
        q = r // out.ne1
        j1 = r - q * out.ne1
        j3 = q // out.ne2
        j2 = q - j3 * out.ne2
        d = at(out.p, j1 * out.nb1 + j2 * out.nb2 + j3 * out.nb3)
        a = at(x.p, j1 * x.nb1 + j2 * x.nb2 + j3 * x.nb3)
        m = MASK_ROW(mask, j1, j2, j3)
        for i in range(n):
            bias = MASK(m, mask.nb0, i)
            st_f32(d, i, bias if bias == -INF else fma(X(a, x.nb0, i), s, bias))
        top = row_max(d, n)
        top = F0 if top == -INF else top  # so that -inf - -inf does not make NaN of a row that is masked throughout
        for i in range(n):
            v = ld_f32(d, i) - top
            e = exp(LEAST if v < LEAST else v)
            st_f32(d, i, F0 if v < LEAST else e)
        total = row_sum(d, n)
        inv = F0 if total == 0.0 else narrow(1.0 / total)
        for i in range(n):
            st_f32(d, i, ld_f32(d, i) * inv)


# ROPE


# pi/2 in two parts: products of the first, which has 32 bits, with up to 2^21 quarter turns are exact.
PI_2_HI = math.floor(math.pi / 2 * 2.0**31) / 2.0**31
PI_2_LO = math.pi / 2 - PI_2_HI + 6.123233995736766e-17
TURNS = 2 / math.pi
S3, S5, S7, S9, S11 = (-1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800)  # sin to 7e-12 and cos to 4e-13 up to pi/4
C2, C4, C6, C8, C10, C12 = (-1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800, 1 / 479001600)


@helper
def sin_cos(a: Any) -> Any:
    """float32 sine and cosine of a float64 angle, right to the last bit or next to it; branch-free, so that loops vectorize."""
    q = rint64(a * TURNS)
    r = a - q * PI_2_HI - q * PI_2_LO
    z = r * r
    s = r + r * z * (S3 + z * (S5 + z * (S7 + z * (S9 + z * S11))))
    c = 1.0 + z * (C2 + z * (C4 + z * (C6 + z * (C8 + z * (C10 + z * C12)))))
    quarter = q - 4.0 * floor64(q * 0.25)
    odd = (quarter == 1.0) | (quarter == 3.0)
    sine, cosine = (c if odd else s), (s if odd else c)
    return narrow(-sine if quarter >= 2.0 else sine), narrow(-cosine if (quarter == 1.0) | (quarter == 2.0) else cosine)


@helper
def rotate_norm(d: Any, p: Any, nb0: Any, cosines: Any, sines: Any, half: Any) -> None:
    """Rotate the pairs (2i, 2i + 1) of a head."""
    for i in range(half):
        c, s, x0, x1 = ld_f32(cosines, i), ld_f32(sines, i), X(p, nb0, 2 * i), X(p, nb0, 2 * i + 1)
        st_f32(d, 2 * i, x0 * c - x1 * s)
        st_f32(d, 2 * i + 1, x0 * s + x1 * c)


@helper
def rotate_neox(d: Any, p: Any, nb0: Any, cosines: Any, sines: Any, half: Any) -> None:
    """Rotate the pairs (i, i + half) of a head."""
    for i in range(half):
        c, s, x0, x1 = ld_f32(cosines, i), ld_f32(sines, i), X(p, nb0, i), X(p, nb0, i + half)
        st_f32(d, i, x0 * c - x1 * s)
        st_f32(d, i + half, x0 * s + x1 * c)


ROTATE = rotate_norm


def _rotation(node: Node) -> dict[str, Any]:
    load = _load(node.src[0])
    return {"ROTATE": {"norm": rotate_norm, "neox": rotate_neox}[node.params["mode"]].bind(X=load), "X": load}


def _rope_params(node: Node) -> list[int | float]:
    n_dims = node.params["n_dims"]
    return [n_dims, float(node.params["freq_scale"]), float(node.params["freq_base"]) ** (-2 / n_dims)]


@kernel("ROPE", "cpu", params=_rope_params, bind=_rotation, scratch=lambda n: 8 * n.params["n_dims"], items=lambda n: n.out.ne[2] * n.out.ne[3],
        chunk=lambda n: _rows_at_once(n.out.ne[0] * n.out.ne[1]))
def rope(out: Any, x: Any, pos: Any, n_dims: Any, freq_scale: Any, ratio: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Tokens [i0, i1). Scratch: the angles of a token's pairs, then their cosines and sines, which all its heads share."""
    half = n_dims // 2
    cosines, sines = at(scratch, 8 * half), at(scratch, 12 * half)
    n_pos = pos.ne0 * pos.ne1 * pos.ne2 * pos.ne3
    for t in range(i0, i1):
        angle = ld_i32(pos.p, t % n_pos) * freq_scale
        for i in range(half):
            st_f64(scratch, i, angle)
            angle *= ratio
        for i in range(half):
            s, c = sin_cos(ld_f64(scratch, i))
            st_f32(cosines, i, c)
            st_f32(sines, i, s)
        i3 = t // x.ne2
        for h in range(x.ne1):
            d = at(out.p, t * out.nb2 + h * out.nb1)
            p = at(x.p, h * x.nb1 + (t - i3 * x.ne2) * x.nb2 + i3 * x.nb3)
            ROTATE(d, p, x.nb0, cosines, sines, half)
            for i in range(n_dims, x.ne0):
                st_f32(d, i, X(p, x.nb0, i))


# ARGSORT, TOP_K


@helper
def sort_key(v: Any, descending: Any, i: Any) -> Any:
    """A whole number that sorts as (v, i) does, equal values by position and NaN last; its low 32 bits are i."""
    bits = np.int64(to_bits(v + F0))  # + 0 makes one zero of both
    up = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    k = ~up if descending else up
    return ((0x7FFFFFFF if v != v else k) << 32) | i


@helper
def sift_down(heap: Any, i: Any, n: Any) -> None:
    """Move entry i down to its place in a heap of n entries, the largest on top."""
    v = ld_i64(heap, i)
    child = 2 * i + 1
    while child < n:
        if child + 1 < n and ld_i64(heap, child + 1) > ld_i64(heap, child):
            child += 1
        if ld_i64(heap, child) <= v:
            break
        st_i64(heap, i, ld_i64(heap, child))
        i = child
        child = 2 * i + 1
    st_i64(heap, i, v)


def _first_input_row(node: Node) -> int:
    x = node.src[0]
    assert x is not None
    return x.ne[0]


def _selection(descending: Callable[[Node], bool]) -> dict[str, Any]:
    return {"params": lambda n: [int(descending(n))], "bind": lambda n: {"X": _load(n.src[0])}, "scratch": lambda n: 8 * n.out.ne[0],
            "chunk": lambda n: _rows_at_once(_first_input_row(n))}


@kernel("ARGSORT", "cpu", **_selection(lambda n: n.params["order"] == "desc"))
@kernel("TOP_K", "cpu", **_selection(lambda n: True))
def select(out: Any, x: Any, descending: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """The out.ne0 first positions in sorted order: a heap keeps the first so many keys seen, and is then sorted in place."""
    k = out.ne0
    for r in range(i0, i1):
        q = r // out.ne1
        j3 = q // out.ne2
        p = at(x.p, (r - q * out.ne1) * x.nb1 + (q - j3 * out.ne2) * x.nb2 + j3 * x.nb3)
        for i in range(k):
            st_i64(scratch, i, sort_key(X(p, x.nb0, i), descending, i))
        for i in range(k // 2 - 1, -1, -1):
            sift_down(scratch, i, k)
        for i in range(k, x.ne0):
            key = sort_key(X(p, x.nb0, i), descending, i)
            if key < ld_i64(scratch, 0):
                st_i64(scratch, 0, key)
                sift_down(scratch, 0, k)
        for n in range(k - 1, 0, -1):
            last = ld_i64(scratch, n)
            st_i64(scratch, n, ld_i64(scratch, 0))
            st_i64(scratch, 0, last)
            sift_down(scratch, 0, n)
        d = at(out.p, r * out.nb1)
        for i in range(k):
            st_i32(d, i, ld_i64(scratch, i) & 0x7FFFFFFF)


from pyggml.ops.attention import flash as flash  # noqa: E402  its kernels too
