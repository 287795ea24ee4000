"""Cases of attention's own ops, and of sorting."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pyggml.cases import (
    Case,
    Draw,
    ErrorCase,
    Fill,
    Leaf,
    case,
    distinct,
    draw_dim,
    draw_leaf,
    draw_ne,
    error,
    f16,
    f32,
    form,
    i32,
    leaf,
    perf,
    uniform,
    whole,
)
from pyggml.dtypes import BF16, F16, F32, Q8_0, DType
from pyggml.errors import DTypeError, ParamError, ShapeError
from pyggml.ops.attention.defs import argsort, flash_attn_ext, rope, soft_max, top_k

Ne = tuple[int, ...]

# SOFT_MAX


def _causal(n_past: int) -> Fill:
    def fill(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        i, j = np.indices(shape[-2:])
        return np.broadcast_to(np.where(j <= i + n_past, 0.0, -np.inf), shape)
    return fill


def _holes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [-1, 1], and -inf at every fourth place or so."""
    return np.where(rng.random(shape) < 0.25, -np.inf, rng.uniform(-1.0, 1.0, shape))


@form(soft_max, sinks=0, max_bias=0.0, inplace=0)
def _softmax(type: str, ne: Ne, mask: bool, m_prec: str = "f32", nr23: tuple[int, int] = (1, 1), scale: float = 1.0) -> Case:
    return case(leaf(type, (ne[0], ne[1], ne[2] * nr23[0], ne[3] * nr23[1])), leaf(m_prec, ne) if mask else None, scale=scale)


@soft_max.cases
def _soft_max_cases() -> Iterator[Case]:
    for scale in (1.0, 0.1):
        for n0 in (16, 1024):
            for n1 in (16, 1024):
                for d in (0, 1):
                    yield _softmax("f32", (n0 - d, n1 - d, 1, 1), False, scale=scale)
                for m_prec in ("f32", "f16"):
                    for d in (0, 1):
                        yield _softmax("f32", (n0 - d, n1 - d, 1, 1), True, m_prec, (1, 1), scale)
                    if n0 == n1 == 16:
                        yield _softmax("f32", (16, 16, 1, 3), True, m_prec, (3, 1), scale)
                        yield _softmax("f32", (15, 15, 1, 1), True, m_prec, (2, 3), scale)
    for n0 in (16, 32):
        yield _softmax("f32", (n0, 2, 32, 1), True, "f16", (1, 1), 0.1)
        yield _softmax("f32", (n0, 2, 32, 1), True, "f32", (1, 1), 0.1)
    yield _softmax("f32", (16, 2, 32, 1), False, scale=0.1)
    for m_prec in ("f32", "f16"):
        yield _softmax("f32", (200001, 2, 3, 1), True, m_prec, (1, 1), 0.1)
    for ne in ((200000, 1, 1, 1), (200000, 4, 1, 1), (643251, 3, 1, 1)):
        yield _softmax("f32", ne, False)
    for n in (1, 15, 17, 200, 1025):
        yield case(f32(n, 5, 4, 3, lo=-5, hi=5))
    yield case(f32(37, 5, 6, 4), f16(37, 8, 2, 2), scale=0.1, note="mask of more rows, repeated over heads and sequences")
    yield case(f32(16, 2, 32, 1, lo=-100, hi=100), scale=0.25, note="large", limit=1e-11)  # products near 25 round to 1e-6
    yield case(f32(9, 40, 3, perm=(1, 0)), f32(9, 40, perm=(1, 0)), note="both strided")
    yield case(f32(64, 7, 12, perm=(0, 2, 1)), f16(64, 12), note="permuted")
    yield case(f32(96, 40, 12), leaf(F32, (96, 40), _causal(56)), scale=0.015625, note="granite-4.0-h 350m, 40 tokens after 56")
    yield case(f32(33, 4, 2), leaf(F32, (33, 4, 2), lambda rng, shape: np.full(shape, -np.inf)), note="all masked")
    yield perf(f32(512, 512, 12, lo=-5, hi=5), leaf(F32, (512, 512), _causal(0)), scale=0.015625, note="granite-4.0-h 350m")
    for n0, n1, n2 in ((4096, 4096, 5), (12888, 256, 5), (77, 4096, 5), (1024, 1024, 10), (77, 1024, 10), (256, 256, 20), (64, 64, 20), (77, 64, 20)):
        yield _softmax("f32", (n0, n1, n2, 1), False, perf=True)
    for columns in (8192, 16384, 32768, 65536, 131072, 262144, 524288):
        for rows in (1, 4, 16):
            yield _softmax("f32", (columns, rows, 1, 1), False, perf=True)


@soft_max.errors
def _soft_max_errors() -> Iterator[ErrorCase]:
    x = f32(8, 5, 6, 2)
    yield error(DTypeError, "SOFT_MAX: x is f16; legal: f32", f16(8))
    yield error(DTypeError, "SOFT_MAX: mask is i32; legal: f32, f16", x, i32(8, 5))
    yield error(ShapeError, "SOFT_MAX: mask has ne [7, 5, 1, 1]; legal for x of ne [8, 5, 6, 2]: [8, 5 or more, a divisor of 6, a divisor of 2]", x, f32(7, 5))
    yield error(ShapeError, "mask has ne [8, 4, 1, 1]", x, f32(8, 4))
    yield error(ShapeError, "mask has ne [8, 5, 4, 1]", x, f32(8, 5, 4))
    yield error(ParamError, "SOFT_MAX: scale is nan; legal: a finite number", x, scale=math.nan)


@soft_max.random
def _soft_max_random(draw: Draw) -> Case:
    n0, n1, n2, n3 = draw_ne(draw)
    scale = draw.choice((1.0, 0.1, 0.125))
    x = draw_leaf(draw, F32, (n0, n1, n2, n3))
    if draw.choice((True, False)):
        return case(x, scale=scale)
    b2, b3 = (draw.choice([d for d in range(1, n + 1) if n % d == 0]) for n in (n2, n3))
    return case(x, draw_leaf(draw, draw.choice((F32, F16)), (n0, n1 + draw.integer(0, 3), b2, b3)), scale=scale)


@soft_max.fills
def _soft_max_fills(mask: Leaf | None, **_: Leaf) -> dict[str, Fill]:
    """A mask of attention."""
    return {"x": uniform(-5.0, 5.0), "mask": _holes}


# FLASH_ATTN_EXT


def _kq_mask(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [-1, 1]; about half of the cells hidden, in runs, and of a last token that is not alone all."""
    hidden = np.repeat(rng.random((*shape[:-1], -(-shape[-1] // 24))) < 0.5, 24, axis=-1)[..., : shape[-1]]
    hidden[..., -1, :] |= shape[-2] > 1
    return np.where(hidden, -np.inf, rng.uniform(-1.0, 1.0, shape))


@flash_attn_ext.fills
def _flash_fills(mask: Leaf | None, **_: Leaf) -> dict[str, Fill]:
    return {"mask": _kq_mask}


@form(flash_attn_ext, sinks=0, prec="f32", v_is_view_of_k=0, n_kv_max=0)
def _flash(hsk: int, hsv: int, nh: int, nr23: tuple[int, int], kv: int, nb: int, mask: bool, max_bias: float = 0.0, logit_softcap: float = 0.0,
           type_K: str = "f16", type_V: str = "f16", permute: tuple[int, int, int, int] = (0, 1, 2, 3), *, kv_view: bool = False,
           n_past: int | None = None) -> Case:
    """nh KV heads, nr23 times as many query heads, and as many sequences; nb tokens, kv cells. permute [0,2,1,3]: tokens' or cells' heads side by
    side. kv_view: K and V are half of a cache. n_past: token i sees cells up to n_past + i."""
    def make(type: str, d: int, rows: int, heads: int, view: bool) -> Leaf:
        dims = (d, rows, heads, nr23[1])
        if permute == (0, 2, 1, 3):
            dims = (d, heads, rows, nr23[1])
        elif permute != (0, 1, 2, 3):
            raise ParamError(f"FLASH_ATTN_EXT: permute {list(permute)}; legal: [0,1,2,3], [0,2,1,3]")
        return leaf(type, dims, perm=permute, inside=(dims[0], 2 * dims[1], *dims[2:]) if view else None)

    bias = leaf(F16, (kv, nb, 1, nr23[1]), None if n_past is None else _causal(n_past)) if mask else None
    return case(make("f32", hsk, nb, nh * nr23[0], False), make(type_K, hsk, kv, nh, kv_view), make(type_V, hsv, kv, nh, kv_view), bias,
                scale=hsk ** -0.5, max_bias=max_bias, logit_softcap=logit_softcap)


@flash_attn_ext.cases
def _flash_cases() -> Iterator[Case]:
    heads_first = (0, 2, 1, 3)
    for hsk, hsv in ((40, 40), (64, 64), (72, 72), (80, 80), (96, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (320, 256), (512, 512),
                     (576, 512)):
        for nb in (1, 3, 32, 75):
            yield _flash(hsk, hsv, 4, (1, 1), 113, nb, True, kv_view=True)
    for types in (("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "f32")):
        for nb in (1, 32):
            yield _flash(64, 64, 4, (1, 1), 512, nb, True, 0.0, 0.0, *types)
            yield _flash(64, 64, 4, (4, 1), 512, nb, True, 0.0, 0.0, *types, heads_first, kv_view=True)
    for kv in (1, 17, 63, 64, 65, 128, 129, 192, 1024):
        for nb in (1, 75):
            yield _flash(64, 64, 4, (1, 3), kv, nb, True)
    for nr2 in (1, 4, 5, 12):
        for max_bias, cap in ((0.0, 0.0), (8.0, 0.0), (0.0, 10.0), (8.0, 10.0)):
            yield _flash(128, 128, 4, (nr2, 1), 512, 3, True, max_bias, cap)
        yield _flash(128, 128, 4, (nr2, 1), 512, 75, False, 0.0, 10.0)
        yield _flash(128, 128, 4, (nr2, 2), 260, 1, False)
    yield _flash(65, 67, 4, (1, 1), 113, 75, True, 8.0)
    yield _flash(65, 67, 3, (2, 1), 17, 75, False, 0.0, 1.0)
    yield _flash(72, 64, 4, (1, 1), 256, 2, True)
    yield case(f32(48, 20, 6, 2), f32(48, 130, 2, 2), f32(32, 130, 2, 2), f32(130, 24, 6, 2), scale=0.2, note="a mask of more rows for each head")
    yield case(f32(20, 64, 6, perm=(1, 0)), f32(130, 64, 2, perm=(1, 0)), f16(130, 33, 2, perm=(1, 0)), f32(20, 130, perm=(1, 0)), note="all strided")
    yield case(f32(64, 3, 8), f16(64, 200, 2), f16(64, 200, 2), leaf(F32, (200, 3), lambda rng, shape: np.full(shape, -np.inf)), note="all hidden")
    for hs, nh, nr2, note in ((64, 4, 3, "granite-4.0-h-350m"), (128, 8, 4, "nemotron-h-8b")):
        for kv in (512, 4096, 32768):
            for nb in (1, 4, 512):
                yield _flash(hs, hs, nh, (nr2, 1), kv, nb, True, permute=heads_first, n_past=kv - nb, perf=True, note=note)
    for nb in (1, 4):
        yield _flash(64, 64, 8, (8, 1), 7680, nb, True, perf=True)
    for nb in (1, 512):
        yield _flash(256, 256, 4, (6, 1), 4096, nb, True, perf=True)


@flash_attn_ext.errors
def _flash_errors() -> Iterator[ErrorCase]:
    q, k, v, mask = f32(64, 5, 6, 2), f16(64, 9, 2, 2), f16(32, 9, 2, 2), f16(9, 5)
    name = "FLASH_ATTN_EXT: "
    yield error(DTypeError, name + "q is f16; legal: f32", f16(64, 5, 6, 2), k, v)
    yield error(DTypeError, name + "k is q4_K; legal: f32, f16, bf16, q8_0, q4_0", q, leaf("q4_K", (256, 9, 2, 2)), v)
    yield error(DTypeError, name + "v is i32", q, k, i32(32, 9, 2, 2))
    yield error(ShapeError, name + "k has ne [32, 9, 2, 2]; for q of ne [64, 5, 6, 2] it must be [64, n_kv, n_head_kv, 2]", q, f16(32, 9, 2, 2), v)
    yield error(ShapeError, name + "k has ne [64, 9, 2, 1]", q, f16(64, 9, 2), v)
    yield error(ShapeError, name + "k has ne [64, 9, 4, 2]: n_head_kv 4 must divide n_head 6", q, f16(64, 9, 4, 2), v)
    yield error(ShapeError, name + "v has ne [32, 8, 2, 2]; for k of ne [64, 9, 2, 2] it must be [d_v, 9, 2, 2]", q, k, f16(32, 8, 2, 2))
    yield error(DTypeError, name + "mask is i32; legal: f32, f16", q, k, v, i32(9, 5))
    for ne in ((8, 5), (9, 4), (9, 5, 4), (9, 5, 1, 3)):
        yield error(ShapeError, name + "mask has ne ", q, k, v, f16(*ne))
    yield error(ParamError, name + "scale is nan; legal: a finite number", q, k, v, mask, scale=math.nan)
    yield error(ParamError, name + "logit_softcap is inf", q, k, v, mask, logit_softcap=math.inf)
    yield error(ParamError, name + "max_bias is -1.0; legal: 0, and numbers above 0 with a mask", q, k, v, mask, max_bias=-1.0)
    yield error(ParamError, name + "max_bias is 8.0; legal: 0, and numbers above 0 with a mask", q, k, v, max_bias=8.0)


@flash_attn_ext.random
def _flash_random(draw: Draw) -> Case:
    n_tok, n_kv = draw_dim(draw, 70), draw_dim(draw, 400)
    n_head_kv, n_seqs = draw.integer(1, 3), draw.integer(1, 2)
    n_head = n_head_kv * draw.integer(1, 6)
    t = draw.choice((F16, F16, F16, F32, F32, BF16, Q8_0))  # of each type few kinds, as each is a kernel to compile
    d_k, d_v = (32 * draw.integer(1, 3) if t.is_quantized else draw_dim(draw, 100) for _ in "kv")

    def make(dt: DType, d: int, rows: int, heads: int) -> Leaf:
        if draw.choice((True, False)):
            return leaf(dt, (d, heads, rows, n_seqs), perm=(0, 2, 1, 3))
        return leaf(dt, (d, rows, heads, n_seqs), gap=draw.integer(0, 5) if not dt.is_quantized else 0)

    strided = t is F32 and draw.choice((True, False))
    q, k, v = (draw_leaf(draw, F32, (d, rows, heads, n_seqs)) if strided else make(dt, d, rows, heads)
               for dt, d, rows, heads in ((F32, d_k, n_tok, n_head), (t, d_k, n_kv, n_head_kv), (t, d_v, n_kv, n_head_kv)))
    options: dict[str, Any] = {"scale": draw.choice((1.0, 0.125)), "logit_softcap": draw.choice((0.0, 0.0, 10.0)) if t is F16 else 0.0}
    if draw.choice((True, False, False)):
        return case(q, k, v, **options)
    ne = (n_kv, n_tok + draw.integer(0, 3), draw.choice((1, 1, n_head)), draw.choice((1, n_seqs)))
    mask = draw_leaf(draw, F32, ne) if strided else leaf(F32 if t is BF16 else F16, ne)
    return case(q, k, v, mask, max_bias=draw.choice((0.0, 0.0, 8.0)), **options)


# ROPE

MODES = {0: "norm", 2: "neox"}  # by GGML_ROPE_TYPE


@rope.fills
def _rope_fills(**_: Leaf) -> dict[str, Fill]:
    return {"pos": whole(0, 512)}


@form(rope, ef=0.0, af=1.0, ff=0, inplace=0)
def _rope(type: str, ne_a: Ne, n_dims: int, mode: int, n_ctx: int = 512, fs: float = 1.0, v: int = 0) -> Case:
    """v 1: x is part of a tensor twice, 4 and 3 times as large; 2: the second half of rows."""
    n0, n1, n2, n3 = ne_a
    inside = (2 * n0, 4 * n1, 3 * n2, n3) if v & 1 else (2 * n0, n1, n2, n3) if v == 2 else None
    if mode not in MODES:
        raise ParamError(f"ROPE: mode {mode}; legal: 0 (norm), 2 (neox)")
    return case(leaf(type, ne_a, inside=inside), i32(n2, hi=n_ctx), n_dims=n_dims, mode=MODES[mode], freq_scale=fs)


@rope.cases
def _rope_cases() -> Iterator[Case]:
    for fs in (1.0, 1.4245):
        for v in (0, 1):
            if fs == 1.0:
                for heads in (40, 52, 64):
                    yield _rope("f32", (128, heads, 2, 1), 128, 0, fs=fs, v=v)
                for heads in (1, 71, 8):
                    yield _rope("f32", (64, heads, 2, 1), 64, 2, fs=fs, v=v)
                for mode in MODES:
                    yield _rope("f32", (16, 16, 8192, 1), 16, mode, fs=fs, v=v)
                    for n_dims, n_tok in ((20, 2), (32, 2), (32, 4)):
                        yield _rope("f32", (80, 32, n_tok, 1), n_dims, mode, fs=fs, v=v)
            yield _rope("f32", (128, 32, 2, 1), 128, 0, fs=fs, v=v, note="llama 7b")
            yield _rope("f32", (64, 128, 2, 1), 64, 2, fs=fs, v=v, note="falcon 40b")
        for mode in MODES:
            yield _rope("f32", (36, 16, 2457, 1), 36, mode, fs=fs, v=2)
    for mode in MODES:
        yield _rope("f32", (128, 32, 2, 3), 128, mode, fs=1.4245, v=1)
    for kind in MODES.values():
        yield case(f32(2, 1, 1), i32(1, hi=9), n_dims=2, mode=kind, note="smallest")
        yield case(f32(64, 12, 7, 3), i32(21, hi=4096), n_dims=64, mode=kind, freq_scale=0.25, note="a position for each token of each sequence")
        yield case(f32(64, 3, 5, 2), i32(5, hi=4096), n_dims=64, mode=kind, note="positions shared by sequences")
        yield case(f32(64, 5, 4, perm=(0, 2, 1)), i32(5, hi=64), n_dims=48, mode=kind, note="permuted")
        yield case(f32(5, 16, 4, perm=(1, 0)), i32(4, hi=64), n_dims=16, mode=kind, note="strided")
        yield case(f32(128, 8, 9), i32(9, lo=999_000, hi=1_000_000), n_dims=128, mode=kind, note="far positions")
    for head_dim, heads, n_dims, mode, note in ((128, 32, 128, 0, "bamba 9b Q"), (128, 64, 128, 0, "llama 65b"), (80, 32, 20, 2, "stablelm"),
                                                (64, 8, 64, 2, "falcon 40b")):
        for v in (0, 1):
            yield _rope("f32", (head_dim, heads, 512, 1), n_dims, mode, v=v, perf=True, note=note)


@rope.errors
def _rope_errors() -> Iterator[ErrorCase]:
    x, pos = f32(8, 5, 6, 2), i32(6)
    yield error(DTypeError, "ROPE: x is f16; legal: f32", f16(8), i32(1), n_dims=8)
    yield error(DTypeError, "ROPE: pos is i64; legal: i32", x, leaf("i64", (6,)), n_dims=8)
    yield error(ShapeError, "ROPE: pos has ne [5, 1, 1, 1] and nb [4, 20, 20, 20]; legal: 6 or 12 contiguous elements", x, i32(5), n_dims=8)
    yield error(ShapeError, "ROPE: pos has ne [6, 1, 1, 1]", x, replace(pos, nb=(8, 48, 48, 48)), n_dims=8)
    yield error(ParamError, "ROPE: n_dims is 5; legal: even numbers from 2 to x's ne[0], 8", x, pos, n_dims=5)
    yield error(ParamError, "ROPE: n_dims is 10", x, pos, n_dims=10)
    yield error(ParamError, "ROPE: mode is 'gptj'; legal: 'norm', 'neox'", x, pos, n_dims=8, mode="gptj")
    yield error(ParamError, "ROPE: freq_base is 0.0; legal: numbers above 0", x, pos, n_dims=8, freq_base=0.0)
    yield error(ParamError, "ROPE: freq_scale is inf; legal: finite numbers", x, pos, n_dims=8, freq_scale=math.inf)


@rope.random
def _rope_random(draw: Draw) -> Case:
    ne = (draw.integer(2, 80), draw.integer(1, 9), draw.integer(1, 40), draw.integer(1, 3))
    pos = i32(ne[2] * draw.choice((1, ne[3])))
    return case(draw_leaf(draw, F32, ne), pos, n_dims=2 * draw.integer(1, ne[0] // 2), mode=draw.choice(("norm", "neox")),
                freq_base=draw.choice((10000.0, 500000.0)), freq_scale=draw.choice((1.0, 0.25)))


# ARGSORT, TOP_K

ORDERS = ("asc", "desc")  # by ggml_sort_order


def _ties(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice(np.array([-np.inf, -1.0, -0.0, 0.0, 1.0, 2.0, np.inf, np.nan]), shape)


@argsort.fills
@top_k.fills
def _sort_fills(**_: Leaf) -> dict[str, Fill]:
    """Either different numbers or ties."""
    return {"x": lambda rng, shape: _ties(rng, shape) if rng.random() < 0.5 else rng.uniform(-1.0, 1.0, shape)}


def _few_values(each: int) -> Fill:
    """0, 1, 2, ... shuffled in each row, each of them `each` times."""
    def fill(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return distinct(shape[-1])(rng, shape) // each
    return fill


@form(argsort)
def _sort(type: str, ne: Ne, order: int | str) -> Case:
    """Rows of different whole numbers."""
    return case(leaf(type, ne, _few_values(1)), order=ORDERS[order] if isinstance(order, int) else order)


@argsort.cases
def _argsort_cases() -> Iterator[Case]:
    for i in range(2, 21):
        for n in ((1 << i) - 1, 1 << i):
            yield _sort("f32", (n, 1, 1, 1), 0)
    for order in (0, 1):
        for ne in ((16, 10, 10, 10), (60, 10, 10, 10), (1023, 2, 1, 3), (1024, 2, 1, 3), (1025, 2, 1, 3), (1025, 256, 1, 1), (2047, 2, 1, 3),
                   (2048, 2, 1, 3), (2049, 2, 1, 3), (2, 8, 8192, 1), (2048, 512, 1, 1)):
            yield _sort("f32", ne, order)
        yield case(f32(1), order=ORDERS[order], note="smallest")
        yield case(leaf(F32, (97, 5), _ties), order=ORDERS[order], note="ties, zeros of both signs, NaN, inf")
        yield case(f32(5, 64, 3, perm=(1, 0)), order=ORDERS[order], note="strided")
    yield perf(f32(72, 512), order="desc", note="granite-4.0-h-small router")
    for ne in ((65000, 16, 1, 1), (200000, 1, 1, 1), (200000, 16, 1, 1)):
        yield _sort("f32", ne, 0, perf=True)


@argsort.errors
def _argsort_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "ARGSORT: x is i32; legal: f32", i32(8))
    yield error(ParamError, "ARGSORT: order is 'down'; legal: 'asc', 'desc'", f32(8), order="down")


@argsort.random
def _argsort_random(draw: Draw) -> Case:
    return case(draw_leaf(draw, F32, draw_ne(draw)), order=draw.choice(ORDERS))


@form(top_k)
def _top(type: str, ne: Ne, k: int, ties: bool) -> Case:
    """Rows of different whole numbers; with ties, of each some times."""
    return case(leaf(type, ne, _few_values(max(1, min(10, k // 2)) if ties else 1)), k=k)


@top_k.cases
def _top_k_cases() -> Iterator[Case]:
    for n in range(1, 5):
        for k in range(1, n + 1):
            yield _top("f32", (n, 2, 1, 3), k, True)
    for i in range(20):
        for k in (1, 2, 3, 7, 15, 100, 500, 1023, 9999):
            if k <= 1 << i:
                yield _top("f32", (1 << i, 1, 1, 1), k, False)
                for ties in (False, True):
                    yield _top("f32", ((1 << i) + 11, 1, 2, 1), k, ties)
    for k in (1, 2, 3, 7, 15):
        for ne in ((16, 10, 10, 10), (60, 10, 10, 10), (1023, 2, 1, 3), (1024, 2, 1, 3), (1025, 2, 1, 3), (2047, 2, 1, 3), (2048, 2, 1, 3), (2049, 2, 1, 3)):
            yield _top("f32", ne, k, False)
    yield case(f32(17, 3, 2), k=17, note="all")
    yield case(leaf(F32, (97, 5), _ties), k=40, note="ties, zeros of both signs, NaN, inf")
    yield case(f32(5, 64, 3, perm=(1, 0)), k=6, note="strided")
    yield case(leaf(F32, (64, 3), lambda rng, shape: np.full(shape, np.nan)), k=6, note="all NaN")
    yield perf(f32(64, 512), k=6, note="granite-4.0-h-tiny router")
    yield perf(f32(100352, 1), k=40, note="granite-4.0-h logits")
    for k in (1, 10, 40, 400):
        for rows in (1, 16):
            for columns in (k, 1000, 65000, 200000):
                if (columns, rows) != (1, 1):  # which stands above
                    yield _top("f32", (columns, rows, 1, 1), k, False, perf=True)


@top_k.errors
def _top_k_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "TOP_K: x is f16; legal: f32", f16(8), k=1)
    yield error(ParamError, "TOP_K: k is 9; legal: 1 to x's ne[0], 8", f32(8), k=9)
    yield error(ParamError, "TOP_K: k is 0", f32(8), k=0)


@top_k.random
def _top_k_random(draw: Draw) -> Case:
    ne = draw_ne(draw)
    return case(draw_leaf(draw, F32, ne), k=draw_dim(draw, ne[0]))
