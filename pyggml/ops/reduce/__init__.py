"""The reduce ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyggml.tensor import Tensor


def cumsum_0(x: Tensor, dim: int = 0, *, type: str = "f32") -> Any:
    """Running sum along `dim` that starts with 0 and leaves the last element out: the ggml_cumsum_0 of llama.cpp PR 16982.

    >>> import numpy as np
    >>> import pyggml as pg
    >>> pg.compute(pg.cumsum_0(pg.tensor(np.array([1.0, 2.0, 3.0], np.float32))), backend="reference")
    array([0., 1., 3.])
    """
    from pyggml.ops.reduce.defs import cumsum
    return cumsum(x, dim=dim, exclusive=True, type=type)


ALIASES = {"cumsum_0": cumsum_0}
