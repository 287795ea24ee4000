"""MUL_MAT: products of matrices, with ggml's broadcast over dims 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pyggml.cases import Case, Leaf, case, f32, leaf, perf
from pyggml.dtypes import BF16, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, DType
from pyggml.registry import Cost, Spec, default_bytes, op, out, require, require_type
from pyggml.tensor import Node, Tensor

WEIGHT_TYPES = (F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K)
"""Types that `a` may have."""
ACTIVATION_TYPES = (F32, F16, BF16)
"""Types that `b` may have."""


@op("MUL_MAT", inputs="a b", limit=1e-12)
def mul_mat(a: Tensor, b: Tensor) -> Spec:
    """Dot products of the rows of a with the rows of b: out[i, j] = sum over k of a[k, i] b[k, j].

    a: [K, m, a2, a3] of f32, f16, bf16, q8_0, q4_0, q4_K, q5_K or q6_K. b: [K, n, b2, b3] of f32, f16 or bf16, where a2 divides b2 and
    a3 divides b3: b's batch i2 reads a's batch i2 // (b2 / a2). Out: f32 [m, n, b2, b3]. Any strides, also in dim 0 (a
    transposed matrix need not be copied); only block types keep their rows whole.

    Values are widened to float32 (block types dequantized), products and sums are float32; b is not quantized. A column
    of the result has the same bits whatever n, the other columns and the number of threads are.
    Source: ggml_mul_mat.

    >>> import numpy as np, pyggml as pg
    >>> a, b = pg.tensor(np.array([[1, 2], [3, 4], [5, 6]], np.float32)), pg.tensor(np.array([[10, 1]], np.float32))
    >>> pg.compute(pg.mul_mat(a, b), {}, backend="reference")
    array([12., 34., 56.])
    """
    require_type("MUL_MAT", "a", a, *WEIGHT_TYPES)
    require_type("MUL_MAT", "b", b, *ACTIVATION_TYPES)
    require(a.ne[0] == b.ne[0], "MUL_MAT", f"a has ne {list(a.ne)} and b {list(b.ne)}; dim 0 must be the same K")
    for d in (2, 3):
        require(b.ne[d] % a.ne[d] == 0, "MUL_MAT", f"a has ne {list(a.ne)} and b {list(b.ne)}; in dim {d}, {a.ne[d]} must divide {b.ne[d]}")
    require(not a.dtype.is_quantized or a.rows_contiguous, "MUL_MAT",
            f"a is {a.dtype.name} with nb {list(a.nb)}; blocks of a row must follow each other")
    return out(F32, a.ne[1], b.ne[1], b.ne[2], b.ne[3])


@mul_mat.reference
def _mul_mat(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    for axis in (0, 1):
        a = np.repeat(a, b.shape[axis] // a.shape[axis], axis=axis)
    product: np.ndarray = b @ np.swapaxes(a, -1, -2)
    return product


@mul_mat.cost
def _mul_mat_cost(node: Node) -> Cost:
    b = node.src[1]
    assert b is not None
    return Cost(2.0 * node.out.n_elements * b.ne[0], default_bytes(node))


def _operands(dt: DType, m: int, n: int, k: int, bs: Sequence[int] = (1, 1), nr: Sequence[int] = (1, 1),
              per: Sequence[int] = (0, 1, 2, 3)) -> tuple[Leaf, Leaf]:
    """a and b of test-backend-ops: batch of a `bs`, of b `nr` times that; `per` is the order of dims in memory."""
    a, b = (k, m, *bs), (k, n, bs[0] * nr[0], bs[1] * nr[1])
    perm = None if tuple(per) == (0, 1, 2, 3) else per
    return leaf(dt, [a[i] for i in per], perm=perm), f32(*(b[i] for i in per), perm=perm)


@mul_mat.cases
def _mul_mat_cases() -> Iterator[Case]:
    for dt in WEIGHT_TYPES:
        for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16):
            yield case(*_operands(dt, 16, n, 256))
    for dt in (F32, F16, Q8_0, Q4_K):
        for bs in ((1, 1), (3, 1), (3, 2)):
            for nr in ((1, 1), (2, 1), (1, 2), (2, 2)):
                for n in (1, 16) if bs != (1, 1) or nr != (1, 1) else ():
                    yield case(*_operands(dt, 16, n, 256, bs, nr))
        for per in ((0, 2, 1, 3), (0, 1, 3, 2), (0, 3, 2, 1)):
            yield case(*_operands(dt, 16, 1, 256, (2, 3), per=per))
            yield case(*_operands(dt, 16, 8, 256, (2, 3), per=per))
    for k in (1, 7, 15, 17, 129, 1025, 2100):
        yield case(f32(k, 7, 2), f32(k, 5, 4))
        yield case(f32(k, 33), f32(k, 1))
        yield case(leaf(BF16, (k, 21)), leaf(F16, (k, 6)))
    for dt in (Q8_0, Q4_0):
        for k in (32, 64, 96, 192, 2688):
            yield case(*_operands(dt, 19, 3, k), note="f99")
    for k in (100, 255, 257, 300):
        yield case(f32(k, k, lo=1, hi=1), f32(k, 3, lo=1, hi=1), note="f100")
    yield case(*_operands(F32, 1, 1, 16384), limit=1e-11, note="one long sum")
    yield case(f32(40, 300, perm=(1, 0)), f32(300, 70), note="a transposed")
    yield case(f32(300, 40), f32(70, 300, perm=(1, 0)), note="b transposed")
    yield case(leaf(F16, (40, 50, 2), perm=(1, 0, 2)), leaf(BF16, (70, 50, 4), perm=(1, 0, 2)), note="both transposed")
    yield case(f32(3, 20, 50, perm=(2, 1, 0)), f32(6, 50, 17, perm=(2, 0, 1)), note="batch innermost")
    yield case(f32(64, 20, gap=7), f32(64, 9, gap=1), note="gaps between rows")
    # The chunked scan: C B^T per group from rows of the conv output, then (masked) M times x with time as the inner dim.
    yield case(f32(128, 2, 64, 3, perm=(0, 2, 1, 3)), f32(128, 2, 64, 3, perm=(0, 2, 1, 3)), note="ssd C B^T")
    yield case(f32(32, 6, 64, 3, perm=(1, 2, 0, 3)), f32(64, 64, 6, 3), note="ssd M x")
    yield case(f32(32, 6, 64, 3, perm=(1, 2, 0, 3)), f32(128, 6, 64, 3, perm=(1, 2, 0, 3)), note="ssd state of a chunk")
    for dt in (F32, F16, Q8_0, Q4_K):
        for n in (1, 4, 512):
            yield perf(*_operands(dt, 2048, n, 768))
    yield perf(f32(64, 48, 256, 2, perm=(1, 2, 0, 3)), f32(256, 256, 48, 2), note="ssd M x")
    yield perf(*_operands(Q8_0, 8192, 1, 2048))
