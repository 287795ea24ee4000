"""Reductions along a dim: CUMSUM, SUM_ROWS, MEAN."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyggml.cases import Case, case, f32, perf
from pyggml.dtypes import F32, F64, dtype
from pyggml.registry import Spec, like, op, out, require, require_type
from pyggml.tensor import Tensor


@op("CUMSUM", inputs="x", limit=1e-12)
def cumsum(x: Tensor, *, dim: int = 0, exclusive: bool = False, type: str = "f32") -> Spec:
    """Running sum along `dim`, accumulated in float64; `exclusive` starts with 0. `type` f64 keeps the sums unrounded.

    x: f32, any ne and strides. Out: like x. Source: ggml_cumsum (dim 0, inclusive), with the dim of llama.cpp PR 16982.

    >>> import numpy as np, pyggml as pg
    >>> pg.compute(pg.cumsum(pg.tensor(np.ones((2, 3), np.float32))), {}, backend="reference")
    array([[1., 2., 3.],
           [1., 2., 3.]])
    """
    require_type("CUMSUM", "x", x, F32)
    require(dim in (0, 1, 2, 3), "CUMSUM", f"dim {dim!r}; legal: 0 to 3")
    require(type in ("f32", "f64"), "CUMSUM", f"type {type!r}; legal: f32, f64")
    return like(x, dtype(type))


@cumsum.reference
def _cumsum(x: np.ndarray, *, dim: int, exclusive: bool, type: str) -> np.ndarray:
    sums = np.cumsum(x, axis=-1 - dim)
    return sums - x if exclusive else sums


@cumsum.cases
def _cumsum_cases() -> Iterator[Case]:
    for n in (1, 31, 32, 33, 127, 128, 255, 256, 257, 1023, 2049):
        yield case(f32(n, 5, 4, 3))
    for dim in (0, 1, 2, 3):
        yield case(f32(10, 5, 4, 3), dim=dim)
        yield case(f32(10, 5, 4, 3), dim=dim, exclusive=True)
    yield case(f32(5, 128, perm=(1, 0)), note="strided")
    yield case(f32(48, 256, 2), dim=1, type="f64", note="granite-4.0-h decay sums")
    yield perf(f32(2048, 16, 5, 4))
