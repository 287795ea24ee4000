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
