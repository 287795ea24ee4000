"""Cases of MUL_MAT."""

from __future__ import annotations

from collections.abc import Iterator

from pyggml.cases import Case, Draw, ErrorCase, Leaf, case, draw_dim, draw_leaf, error, f32, form, i32, leaf, perf
from pyggml.dtypes import BF16, F16, F32, Q4_0, Q8_0, dtype
from pyggml.errors import DTypeError, ParamError, ShapeError
from pyggml.ops.matmul.defs import ACTIVATION_TYPES, PRECISIONS, mul_mat
from pyggml.quants import WEIGHT_TYPES

TYPES = [t.name for t in WEIGHT_TYPES]
BASE_TYPES = ("f32", "f16", "q8_0", "q4_0", "q4_K")
Pair = tuple[int, int]
ORDER = (0, 1, 2, 3)
ORDERS = ((0, 2, 1, 3), (0, 1, 3, 2), (0, 3, 2, 1))


@form(mul_mat, o=1)
def _mm(type_a: str, type_b: str, m: int, n: int, k: int, bs: Pair = (1, 1), nr: Pair = (1, 1), per: tuple[int, ...] = ORDER, k_v: int = 0) -> Case:
    """bs: batch of a, and nr times that of b; per: the order of dims in memory; k_v: elements from row to row, 0 for k."""
    a, b = (k, m, *bs), (k, n, bs[0] * nr[0], bs[1] * nr[1])
    perm = None if per == ORDER else per
    gap = k_v - k if k_v else 0
    return case(leaf(type_a, [a[i] for i in per], perm=perm, gap=gap), leaf(type_b, [b[i] for i in per], perm=perm, gap=gap))


@mul_mat.cases
def _mul_mat_cases() -> Iterator[Case]:
    for t in TYPES:
        for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16):
            if t not in BASE_TYPES or n not in (1, 16):  # those are in the next list
                yield _mm(t, "f32", 16, n, 256)
        yield _mm(t, "f32", 1, 64, 256)
    yield from _broadcast_cases()
    for t in ("q4_0", "q8_0"):
        yield _mm(t, "f32", 2880, 32, 2880)
    for args in ((64, 2, 128, (8, 1), (1, 1)), (83, 2, 128, (8, 1), (4, 1)), (64, 2, 64, (8, 1), (4, 1)), (83, 2, 64, (8, 1), (4, 1)),
                 (64, 45, 128, (8, 1), (4, 1)), (128, 45, 64, (8, 1), (4, 1)), (1056, 1, 193, (1, 1), (4, 1), (0, 2, 1, 3)),
                 (1056, 1, 67, (1, 1), (4, 1), (0, 2, 1, 3))):
        yield _mm("f16", "f32", *args)
    yield _mm("f32", "f32", 16, 32, 32, k_v=64)
    yield _mm("f32", "f32", 64, 77, 77, (12, 1))
    yield _mm("q4_0", "f32", 576, 512, 576)
    yield _mm("q4_0", "f32", 1, 2048, 8192)
    yield _mm("q8_0", "f32", 6, 4096, 5120)
    for b3 in (1, 3):
        for b2 in (1, 2, 4, 8):
            for r in (1, 4):
                for more in (0, 1):
                    for t in ("f16", "bf16", "f32"):
                        yield _mm(t, "f32", 1056 + more, 1, 128 + more, (b2, b3), (r, 1), (0, 2, 1, 3))
                        yield _mm(t, "f32", 128 + more, 1, 1056 + more, (b2, b3), (r, 1), k_v=2 * 1056 + more)
    yield from _own_cases()
    for bs in (1, 2, 3, 4, 5, 8, 512):
        for t in TYPES:
            yield _mm(t, "f32", 4096, bs, 14336, perf=True)
    yield _mm("f16", "f32", 16416, 1, 128, (8, 1), (4, 1), (0, 2, 1, 3), perf=True)
    yield _mm("f16", "f32", 128, 1, 16416, (8, 1), (4, 1), k_v=2 * 16416, perf=True)
    for t in ("f32", "f16", "q8_0", "q4_K"):
        for n in (1, 4, 512):
            yield _mm(t, "f32", 2048, n, 768, perf=True, note="granite-4.0-h-350m ffn")
    yield _mm("q8_0", "f32", 8192, 1, 2048, perf=True, note="granite-4.0-h-micro ffn, decode")
    yield perf(f32(64, 48, 256, 2, perm=(1, 2, 0, 3)), f32(256, 256, 48, 2), note="ssd M x")


def _broadcast_cases() -> Iterator[Case]:
    """Batches, repeats and permutations."""
    for t in BASE_TYPES:
        for b in ("f32", "f16"):
            for k in (256, 4) if dtype(t).block == 1 else (256,):
                for n in (1, 16):
                    for bs in ((1, 1), (3, 1), (3, 2)):
                        for nr in ((1, 1), (2, 1), (1, 2), (2, 2)):
                            if nr[1] == 1 or bs == (3, 2) or (bs == (1, 1) and nr == (1, 2)):
                                yield _mm(t, b, 16, n, k, bs, nr)
                yield _mm(t, b, 16, 4, k, (3, 2), (2, 2))
                for n in (1, 8, 16):
                    for per in ORDERS:
                        yield _mm(t, b, 16, n, k, (2, 3), per=per)
                yield _mm(t, b, 16, 4, k, (2, 3), per=ORDERS[2])
            for n in (1, 8, 16):
                yield _mm(t, b, 16, n, 1024, (3, 2))
            yield _mm(t, b, 16, 8, 256, (1536, 1))
    for n in (1, 8, 16):
        for per in ORDERS:
            yield _mm("bf16", "f32", 16, n, 256, (2, 3), per=per)


def _own_cases() -> Iterator[Case]:
    """Odd lengths, strides that ggml has no case for, and the products of the chunked scan."""
    for k in (1, 7, 15, 17, 129, 1025, 2100):
        yield case(f32(k, 7, 2), f32(k, 5, 4))
        yield case(f32(k, 33), f32(k, 1))
        yield case(leaf(BF16, (k, 21)), leaf(F16, (k, 6)))
    for dt in (Q8_0, Q4_0):
        for k in (32, 64, 96, 192, 2688):
            yield case(leaf(dt, (k, 19)), f32(k, 3), note="f99")
    for k in (100, 255, 257, 300):
        yield case(f32(k, k, lo=1, hi=1), f32(k, 3, lo=1, hi=1), note="f100")
    yield case(f32(16384, 1), f32(16384, 1), limit=1e-11, note="one long sum")
    yield case(f32(40, 300, perm=(1, 0)), f32(300, 70), note="a transposed")
    yield case(f32(300, 40), f32(70, 300, perm=(1, 0)), note="b transposed")
    yield case(leaf(F16, (40, 50, 2), perm=(1, 0, 2)), leaf(BF16, (70, 50, 4), perm=(1, 0, 2)), note="both transposed")
    yield case(f32(3, 20, 50, perm=(2, 1, 0)), f32(6, 50, 17, perm=(2, 0, 1)), note="batch innermost")
    yield case(f32(64, 20, gap=7), f32(64, 9, gap=1), note="gaps between rows")
    for t in ("f32", "f16", "bf16", "q8_0"):
        yield case(leaf(t, (64, 37, 6, 2)), f32(64, 41, 2, 4), note="b repeated")
        yield case(leaf(t, (64, 5, 6, 2)), f32(64, 3, 3), note="b repeated")
    # The chunked scan: C B^T per group from rows of the conv output, then (masked) M times x with time as the inner dim.
    yield case(f32(128, 2, 64, 3, perm=(0, 2, 1, 3)), f32(128, 2, 64, 3, perm=(0, 2, 1, 3)), note="ssd C B^T")
    yield case(f32(32, 6, 64, 3, perm=(1, 2, 0, 3)), f32(64, 64, 6, 3), note="ssd M x")
    yield case(f32(32, 6, 64, 3, perm=(1, 2, 0, 3)), f32(128, 6, 64, 3, perm=(1, 2, 0, 3)), note="ssd state of a chunk")
    yield case(f32(128, 32, 6, 3), f32(128, 2, 64, 3, perm=(0, 2, 1, 3)), note="ssd state times C")
    for k, m, n in ((32, 32, 32), (64, 130, 140), (33, 45, 8), (600, 31, 41), (1100, 20, 9), (31, 40, 40), (64, 32, 7)):
        yield case(f32(k, m, 2), f32(k, n, 4), precision="bf16")
    yield case(f32(45, 100, 3, perm=(1, 0, 2)), f32(77, 100, 3, perm=(1, 0, 2)), precision="bf16", note="both transposed")
    yield case(f32(3, 45, 70, perm=(2, 1, 0)), f32(3, 77, 70, perm=(2, 1, 0)), precision="bf16", note="batch innermost")
    yield case(f32(32, 6, 64, 3, perm=(1, 2, 0, 3)), f32(64, 64, 6, 3), precision="bf16", note="ssd M x")
    yield case(f32(32, 6, 64, 3, perm=(1, 2, 0, 3)), f32(128, 6, 64, 3, perm=(1, 2, 0, 3)), precision="bf16", note="ssd state of a chunk")
    yield case(f32(128, 32, 6, 3), f32(128, 2, 64, 3, perm=(0, 2, 1, 3)), precision="bf16", note="ssd state times C")
    yield perf(f32(64, 48, 256, 2, perm=(1, 2, 0, 3)), f32(256, 256, 48, 2), precision="bf16", note="ssd M x")


@mul_mat.errors
def _mul_mat_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "MUL_MAT: a is i32; legal: f32, f16, bf16", i32(4, 2), f32(4, 3))
    yield error(DTypeError, "MUL_MAT: a is iq2_s; legal: f32, f16, bf16", leaf("iq2_s", (256, 2)), f32(256, 3))
    yield error(DTypeError, "MUL_MAT: b is q8_0; legal: f32, f16, bf16", f32(32, 2), leaf("q8_0", (32, 3)))
    yield error(ParamError, "MUL_MAT: precision 'f16'; legal: None, 'bf16'", f32(4, 2), f32(4, 3), precision="f16")
    yield error(ShapeError, "a has ne [5, 2, 1, 1] and b [4, 3, 1, 1]; dim 0 must be the same K", f32(5, 2), f32(4, 3))
    yield error(ShapeError, "in dim 2, one of 3 and 4 must divide the other", f32(4, 2, 3), f32(4, 2, 4))
    yield error(ShapeError, "in dim 3, one of 2 and 3 must divide the other", f32(4, 2, 1, 2), f32(4, 2, 1, 3))
    yield error(ShapeError, "a is q8_0 with nb [68, 34, 136, 136]; blocks of a row must follow each other",
                Leaf(Q8_0, (64, 2, 1, 1), (68, 34, 136, 136)), f32(64, 3))


@mul_mat.random
def _mul_mat_random(draw: Draw) -> Case:
    a_type = draw.choice(WEIGHT_TYPES)
    k = a_type.block * draw.integer(1, 4) if a_type.is_quantized else draw_dim(draw, 300)
    a2, a3, m, n = (draw.integer(1, 3), draw.integer(1, 2), draw_dim(draw, 33), draw_dim(draw, 33))
    a_ne, b_ne = (k, m, a2, a3), (k, n, a2 * draw.integer(1, 3), a3 * draw.integer(1, 2))
    if draw.integer(1, 4) == 1:  # b repeated: not in ggml
        a_ne, b_ne = (k, m, *b_ne[2:]), (k, n, a2, a3)
    a = leaf(a_type, a_ne) if a_type.is_quantized else draw_leaf(draw, a_type, a_ne)
    b_type = draw.choice(ACTIVATION_TYPES) if a_type is F32 else F32
    b = draw_leaf(draw, b_type, b_ne)
    return case(a, b, precision=draw.choice(PRECISIONS)) if a_type is b_type is F32 else case(a, b)
