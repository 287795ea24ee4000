"""TRI: keep one triangle of a matrix, put a number elsewhere."""

from __future__ import annotations

import functools

import numpy as np

from pyggml.dtypes import BF16, F16, F32, F64
from pyggml.errors import ParamError
from pyggml.registry import Cost, Pointwise, Spec, default_bytes, is_number, like, op, require, require_type
from pyggml.tensor import Node, Tensor, tensor

KINDS = ("lower_diag", "lower", "upper_diag", "upper")


@op("TRI", inputs="x", limit=0.0)
def tri(x: Tensor, kind: str = "lower_diag", *, dims: tuple[int, int] = (0, 1), fill: float = 0.0) -> Spec:
    """x inside one triangle of two of its dims, `fill` elsewhere. With column j along dims[0] and row i along dims[1],
    lower_diag keeps j <= i, lower j < i, upper_diag j >= i, upper j > i.

    Elements outside are chosen, not multiplied by 0: what stands there (NaN, inf) never reaches the result. fill=-inf masks
    an exponent before exp.

    x: f32, f16, bf16, f64, any ne (square or not) and strides. Out: like x. ParamError for another kind or equal dims.
    Source: ggml_tri, with the dims of llama.cpp PR 16982.

    >>> import numpy as np
    >>> import pyggml as pg
    >>> pg.compute(pg.tri(pg.tensor(np.ones((3, 3), np.float32)), "lower"), backend="reference")
    array([[0., 0., 0.],
           [1., 0., 0.],
           [1., 1., 0.]])
    """
    require_type("TRI", "x", x, F32, F16, BF16, F64)
    require(kind in KINDS, "TRI", f"kind {kind!r}; legal: {', '.join(KINDS)}", ParamError)
    two = isinstance(dims, tuple | list) and len(dims) == 2 and all(d in (0, 1, 2, 3) for d in dims) and dims[0] != dims[1]
    require(two, "TRI", f"dims {dims!r}; legal: two different dims of 0 to 3", ParamError)
    require(is_number(fill), "TRI", f"fill is {type(fill).__name__}; it must be a number", ParamError)
    return like(x)


@tri.reference
def _tri(x: np.ndarray, kind: str, dims: tuple[int, int], fill: float) -> np.ndarray:
    j, i = (np.arange(x.shape[-1 - d]).reshape([-1 if axis == x.ndim - 1 - d else 1 for axis in range(x.ndim)]) for d in dims)
    keep = {"lower_diag": j <= i, "lower": j < i, "upper_diag": j >= i, "upper": j > i}[kind]
    return np.where(keep, x, fill)


@functools.cache
def _index(n: int, dim: int) -> Tensor:
    """0 to n - 1 along a dim; float64 where float32 would round."""
    dt = F32 if n <= 1 << 24 else F64
    return tensor(np.arange(n, dtype=dt.np).reshape([n if d == dim else 1 for d in (3, 2, 1, 0)]), name=f"index {dim}")


def _chosen(node: Node) -> tuple[str, list[Tensor]]:
    """As a choice by column b and row c, so that it fuses with its neighbours."""
    order = {"lower_diag": "b <= c", "lower": "b < c", "upper_diag": "b >= c", "upper": "b > c"}[node.params["kind"]]
    return f"a if {order} else fill", [_index(node.out.ne[d], d) for d in node.params["dims"]]


tri.pointwise = Pointwise("", ("fill",), select=_chosen)
tri.slices(lambda node: {1, 2, 3} - set(node.params["dims"]))


@tri.cost
def _tri_cost(node: Node) -> Cost:
    return Cost(0, default_bytes(node))
