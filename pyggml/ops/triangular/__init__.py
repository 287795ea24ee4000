"""The triangular ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyggml.tensor import Tensor


def tri_keep(x: Tensor, kind: str = "lower_diag") -> Any:
    """TRI on dims 0 and 1 with 0 elsewhere: the ggml_tri_keep of llama.cpp PR 16982."""
    from pyggml.ops.triangular.defs import tri
    return tri(x, kind)


def tri_dims(x: Tensor, dim_x: int, dim_y: int, kind: str = "lower_diag") -> Any:
    """TRI on any two dims, with 0 elsewhere: columns run along `dim_x`, rows along `dim_y`. The ggml_tri_dims of llama.cpp PR 16982."""
    from pyggml.ops.triangular.defs import tri
    return tri(x, kind, dims=(dim_x, dim_y))


ALIASES = {"tri_keep": tri_keep, "tri_dims": tri_dims}
