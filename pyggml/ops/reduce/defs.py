"""Reductions along a dim: CUMSUM, SUM_ROWS, MEAN. All accumulate in float64, in an order that only the shape decides."""

from __future__ import annotations

import numpy as np

from pyggml.dtypes import F32, dtype
from pyggml.errors import DTypeError, ParamError
from pyggml.registry import Cost, Spec, default_bytes, like, op, out, require, require_type
from pyggml.tensor import Node, Tensor


@op("CUMSUM", inputs="x", limit=1e-13)
def cumsum(x: Tensor, *, dim: int = 0, exclusive: bool = False, type: str = "f32") -> Spec:
    """Running sum along `dim`, accumulated in float64; `exclusive` starts with 0 and leaves the last element out. `type` f64
    keeps the sums unrounded, so that differences of neighbours in a long sum stay exact.

    x: f32, any ne and strides. Out: x's dims. DTypeError, ParamError. Source: ggml_cumsum (dim 0, inclusive), with the dim of
    llama.cpp PR 16982.

    >>> import numpy as np
    >>> import pyggml as pg
    >>> pg.compute(pg.cumsum(pg.tensor(np.ones((2, 3), np.float32))), backend="reference")
    array([[1., 2., 3.],
           [1., 2., 3.]])
    """
    require_type("CUMSUM", "x", x, F32)
    require(dim in (0, 1, 2, 3), "CUMSUM", f"dim {dim!r}; legal: 0 to 3", ParamError)
    require(dtype(type).name in ("f32", "f64"), "CUMSUM", f"type {dtype(type).name}; legal: f32, f64", DTypeError)
    return like(x, dtype(type))


@cumsum.reference
def _cumsum(x: np.ndarray, *, dim: int, exclusive: bool, type: str) -> np.ndarray:
    sums = np.cumsum(x, axis=-1 - dim)
    if not exclusive:
        return sums
    first = np.zeros_like(np.take(x, [0], axis=-1 - dim))
    return np.concatenate([first, np.take(sums, range(x.shape[-1 - dim] - 1), axis=-1 - dim)], axis=-1 - dim)


@op("SUM_ROWS", inputs="x", limit=1e-13)
def sum_rows(x: Tensor) -> Spec:
    """Sum of each row (dim 0), accumulated in float64.

    x: f32, any ne and strides. Out: [1, ne1, ne2, ne3]. DTypeError. Source: ggml_sum_rows.

    >>> import numpy as np
    >>> import pyggml as pg
    >>> pg.compute(pg.sum_rows(pg.tensor(np.ones((2, 3), np.float32))), backend="reference")
    array([[3.],
           [3.]])
    """
    require_type("SUM_ROWS", "x", x, F32)
    return out(F32, 1, *x.ne[1:])


@sum_rows.reference
def _sum_rows(x: np.ndarray) -> np.ndarray:
    return np.sum(x, axis=-1, keepdims=True)


@op("MEAN", inputs="x", limit=1e-13)
def mean(x: Tensor) -> Spec:
    """Mean of each row (dim 0), accumulated in float64.

    x: f32, any ne and strides. Out: [1, ne1, ne2, ne3]. DTypeError. Source: ggml_mean.

    >>> import numpy as np
    >>> import pyggml as pg
    >>> pg.compute(pg.mean(pg.tensor(np.array([1.0, 2.0, 6.0], np.float32))), backend="reference")
    array([3.])
    """
    require_type("MEAN", "x", x, F32)
    return out(F32, 1, *x.ne[1:])


@mean.reference
def _mean(x: np.ndarray) -> np.ndarray:
    return np.mean(x, axis=-1, keepdims=True)


def _input_flops(node: Node) -> Cost:
    x = node.src[0]
    assert x is not None
    return Cost(x.n_elements, default_bytes(node))


for _d in (sum_rows, mean):
    _d.cost(_input_flops)
    _d.slices(lambda node: (1, 2, 3))
cumsum.slices(lambda node: {1, 2, 3} - {node.params["dim"]})
