"""Pointwise ops: a table of scalar expressions, one line each. Kernels are generated from it (pyggml.cpu.fuse)."""

from __future__ import annotations


from typing import Any

import numpy as np

from pyggml.dtypes import F32, F64, I32, DType, dtype
from pyggml.errors import ShapeError
from pyggml.registry import Cost, OpDef, Pointwise, Spec, default_bytes, like, op, out, require, require_type
from pyggml.tensor import Node, Tensor


def broadcast(name: str, a: Tensor, b: Tensor) -> tuple[int, int, int, int]:
    """Dims of a pointwise result: per dim equal, or one is 1, or (ggml_can_repeat) b's divides a's."""
    ne = []
    for i in range(4):
        na, nb = a.ne[i], b.ne[i]
        if na != nb and nb != 1 and na != 1 and na % nb:
            raise ShapeError(f"{name}: b has ne {list(b.ne)}; each dim must be 1, equal to or a divisor of a's {list(a.ne)}")
        ne.append(max(na, nb))
    return ne[0], ne[1], ne[2], ne[3]


@op("ADD", inputs="a b")
def add(a: Tensor, b: Tensor) -> Spec:
    """a + b."""
    return Spec(a.dtype, broadcast("ADD", a, b))


add.pointwise = Pointwise("a + b")


@add.reference
def _add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a + b


@op("EXP", inputs="a")
def exp(a: Tensor) -> Spec:
    """e^a."""
    return like(a)


exp.pointwise = Pointwise("exp(a)")


@exp.reference
def _exp(a: np.ndarray) -> np.ndarray:
    return np.exp(a)
