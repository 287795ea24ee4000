"""Norms of rows: RMS_NORM and NORM. Sums are float64, in an order that only the row length decides."""

from __future__ import annotations

import numpy as np

from pyggml.dtypes import F32
from pyggml.errors import ParamError
from pyggml.registry import Cost, Spec, default_bytes, is_number, like, op, require, require_type
from pyggml.tensor import Node, Tensor


def _rule(name: str, x: Tensor, eps: float) -> Spec:
    require_type(name, "x", x, F32)
    require(is_number(eps) and 0 <= eps < np.inf, name, f"eps {eps!r}; it must be a number >= 0", ParamError)
    return like(x)


@op("RMS_NORM", inputs="x", limit=1e-13)
def rms_norm(x: Tensor, eps: float = 1e-6) -> Spec:
    """Each row (dim 0) divided by the root of its mean square: x / sqrt(mean(x²) + eps).

    x: f32, any ne and strides; a grouped norm is one over x reshaped to [n / n_group, n_group, ...]. Out: like x.
    DTypeError, ParamError for a negative eps. Source: ggml_rms_norm.

    >>> import numpy as np
    >>> import pyggml as pg
    >>> pg.compute(pg.rms_norm(pg.tensor(np.array([3.0, 3.0, 3.0], np.float32)), 0.0), backend="reference")
    array([1., 1., 1.])
    """
    return _rule("RMS_NORM", x, eps)


@rms_norm.reference
def _rms_norm(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps)


@rms_norm.cost
def _rms_norm_cost(node: Node) -> Cost:
    return Cost(3 * node.out.n_elements, default_bytes(node))


@op("NORM", inputs="x", limit=1e-13)
def norm(x: Tensor, eps: float = 1e-5) -> Spec:
    """Each row (dim 0) less its mean, divided by its standard deviation: (x - mean) / sqrt(var + eps).

    x: f32, any ne and strides. Out: like x. DTypeError, ParamError for a negative eps. Source: ggml_norm.

    >>> import numpy as np
    >>> import pyggml as pg
    >>> pg.compute(pg.norm(pg.tensor(np.array([1.0, 3.0], np.float32)), 0.0), backend="reference")
    array([-1.,  1.])
    """
    return _rule("NORM", x, eps)


@norm.reference
def _norm(x: np.ndarray, eps: float) -> np.ndarray:
    d = x - np.mean(x, axis=-1, keepdims=True)
    return d / np.sqrt(np.mean(np.square(d), axis=-1, keepdims=True) + eps)


@norm.cost
def _norm_cost(node: Node) -> Cost:
    return Cost(6 * node.out.n_elements, default_bytes(node))


for _d in (rms_norm, norm):
    _d.slices(lambda node: (1, 2, 3))
