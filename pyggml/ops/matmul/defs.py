"""MUL_MAT: products of matrices, with ggml's broadcast over dims 2 and 3."""

from __future__ import annotations

import numpy as np

from pyggml.dtypes import BF16, F16, F32
from pyggml.errors import ParamError
from pyggml.quants import WEIGHT_TYPES
from pyggml.registry import Cost, Spec, default_bytes, op, out, require, require_type
from pyggml.tensor import Node, Tensor

ACTIVATION_TYPES = (F32, F16, BF16)
"""Types that `b` may have."""
PRECISIONS = (None, "bf16")


@op("MUL_MAT", inputs="a b", limit=1e-12)
def mul_mat(a: Tensor, b: Tensor, *, precision: str | None = None) -> Spec:
    """Dot products of the rows of a with the rows of b: out[i, j] = sum over k of a[k, i] b[k, j].

    a: [K, m, a2, a3] of f32, f16, bf16 or a block type (quants.WEIGHT_TYPES). b: [K, n, b2, b3] of f32, f16 or bf16, where a2
    divides b2 or b2 divides a2 (ggml has the first alone), and so in dim 3. Out: f32 [m, n, o2, o3], the larger of them; its batch
    i2 reads a's batch i2 // (o2 / a2). Any strides, also in dim 0 (a transposed matrix need not be copied); only block types keep
    their rows whole.

    Values are widened to float32 (block types dequantized), products and sums are float32; numbers below its normal range may count as
    0. With quantized weights a backend may round b to 16 bits for each 256 values, and of many columns both sides to bfloat16, where
    its CPU multiplies that faster (`prec="f32"` keeps it from it); infinities may then become NaN. A column of the result has the same
    bits whatever the other columns and the number of threads are, one of up to 16 columns and one of more than 64; those between are as
    one or the other, by type and CPU. With quantized weights one of up to 4 columns, or alone, may differ from one of more.
    `precision`: "bf16" lets a backend round float32 factors to bfloat16 too, where its CPU multiplies that faster.
    Source: ggml_mul_mat; ggml_mul_mat_set_prec.

    >>> import numpy as np, pyggml as pg
    >>> a, b = pg.tensor(np.array([[1, 2], [3, 4], [5, 6]], np.float32)), pg.tensor(np.array([[10, 1]], np.float32))
    >>> pg.compute(pg.mul_mat(a, b), {}, backend="reference")
    array([12., 34., 56.])
    """
    require_type("MUL_MAT", "a", a, *WEIGHT_TYPES)
    require_type("MUL_MAT", "b", b, *ACTIVATION_TYPES)
    require(a.ne[0] == b.ne[0], "MUL_MAT", f"a has ne {list(a.ne)} and b {list(b.ne)}; dim 0 must be the same K")
    require(precision in PRECISIONS, "MUL_MAT", f"precision {precision!r}; legal: {', '.join(map(repr, PRECISIONS))}", ParamError)
    for d in (2, 3):
        require(b.ne[d] % a.ne[d] == 0 or a.ne[d] % b.ne[d] == 0, "MUL_MAT",
                f"a has ne {list(a.ne)} and b {list(b.ne)}; in dim {d}, one of {a.ne[d]} and {b.ne[d]} must divide the other")
    require(not a.dtype.is_quantized or a.rows_contiguous, "MUL_MAT",
            f"a is {a.dtype.name} with nb {list(a.nb)}; blocks of a row must follow each other")
    return out(F32, a.ne[1], b.ne[1], max(a.ne[2], b.ne[2]), max(a.ne[3], b.ne[3]))


@mul_mat.limits
def _mul_mat_limit(node: Node) -> float:
    """Measured over 12,000 random products. Few columns of quantized weights: b rounded to 16 bits gives 1.4e-8 at most (q5_1, whose offsets cancel;
    else 4e-10). Many: both sides rounded to 8 significant bits give 4.7e-6 on average and 8.7e-6 at most over 256 results, f16 and bf16 weights in
    planes of bfloat16 1.4e-11. A mean over fewer results varies more, 3.3e-5 at most over 17; of a few, terms may cancel in all."""
    a, b = node.src
    assert a is not None and b is not None
    few = (b.n_rows if a.ne[2] * a.ne[3] == 1 else b.ne[1]) <= 16
    spread = 1 if node.out.n_elements >= 256 else 6 if node.out.n_elements >= 16 else 100
    if node.params["precision"] == "bf16" and a.dtype is F32 and b.dtype is F32:
        return spread * 1.2e-5
    if a.dtype is F32 or b.dtype is not F32 or (few and not a.dtype.is_quantized):
        return 1e-12
    return spread * (5e-8 if few else 1.2e-5 if a.dtype.is_quantized else 3e-11)


@mul_mat.reference
def _mul_mat(a: np.ndarray, b: np.ndarray, *, precision: str | None) -> np.ndarray:
    for axis in (0, 1):
        n = max(a.shape[axis], b.shape[axis])
        a, b = np.repeat(a, n // a.shape[axis], axis=axis), np.repeat(b, n // b.shape[axis], axis=axis)
    product: np.ndarray = b @ np.swapaxes(a, -1, -2)
    return product


@mul_mat.cost
def _mul_mat_cost(node: Node) -> Cost:
    b = node.src[1]
    assert b is not None
    return Cost(2.0 * node.out.n_elements * b.ne[0], default_bytes(node))


def _batches(node: Node) -> tuple[int, ...]:
    """Dims 2 and 3, but not of a weight that has no batches: that is one product, for which it is read once."""
    a = node.src[0]
    assert a is not None
    return () if a.root.data is not None and a.ne[2] * a.ne[3] == 1 else (2, 3)


mul_mat.slices(_batches, grouped=True)
