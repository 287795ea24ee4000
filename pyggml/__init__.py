"""A compute-graph engine in pure Python, GGML in spirit: graphs of named ops, planned once, run on numba-compiled kernels.

    import pyggml as pg
    x = pg.tensor([128, 5], "f32", name="x")
    y = pg.cumsum(x, dim=1)
    out = pg.compute(y, {x: array})

Every op is a function here by its lower-case name. Shapes (`ne`) and dims are ggml's, dim 0 innermost; arrays are NumPy's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyggml import errors
from pyggml.dtypes import dtype
from pyggml.errors import PyggmlError
from pyggml.graph import Graph
from pyggml.registry import FAMILIES, Spec, find_op, kernel, like, load_ops, op
from pyggml.tensor import Tensor, current_scope, raw_tensor, scope, tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

__version__ = "0.1.0"


def compute(outputs: Tensor | Sequence[Tensor], feeds: Mapping[Tensor, np.ndarray] | None = None, *, backend: str = "cpu",
            threads: int | None = None, **options: Any) -> Any:
    """Build the graph of `outputs`, run it once, and give their values as NumPy arrays (shape = ne reversed, without
    leading ones): one array, or a tuple when several outputs are asked for. `feeds` gives the inputs' arrays.

    >>> import numpy as np, pyggml as pg
    >>> x = pg.tensor([3], "f32", name="x")
    >>> pg.compute(pg.cumsum(x), {x: np.ones(3, np.float32)}, backend="reference")
    array([1., 2., 3.])
    """
    from pyggml.backends import open_backend
    from pyggml.backends.base import natural_shape

    outs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    if threads is not None:
        options["threads"] = threads
    runner = open_backend(backend, **options).compile(Graph(outs))
    for t, value in (feeds or {}).items():
        if not isinstance(t, Tensor):
            raise errors.GraphError(f"compute: a key of feeds is {type(t).__name__}; it must be an input tensor of the graph")
        runner.set(t, value)
    runner.run()
    results = tuple(runner.get(t).reshape(natural_shape(t)) for t in outs)
    return results[0] if isinstance(outputs, Tensor) else results


def __getattr__(name: str) -> Any:
    from importlib import import_module

    value: Any
    if name in _MODULES:
        value = import_module(f"pyggml.{name}")
    elif name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
    else:
        if name.startswith("_"):
            raise AttributeError(f"module 'pyggml' has no attribute {name!r}")
        found = {d.__name__: d for d in load_ops().values()} | _aliases()
        if name not in found:
            raise AttributeError(f"module 'pyggml' has no op or attribute {name!r}")
        value = found[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_LAZY, *(d.__name__ for d in load_ops().values()), *_aliases()})


_MODULES = ("backends", "cpu", "gguf", "models", "ops", "runtime", "testing")
_LAZY = {"load_model": "pyggml.models", "mamba2_layer": "pyggml.models.layers", "Sampler": "pyggml.runtime.sampling", "open_backend": "pyggml.backends"}


def _aliases() -> dict[str, Any]:
    from importlib import import_module
    return {name: fn for family in FAMILIES for name, fn in getattr(import_module(f"pyggml.ops.{family}"), "ALIASES", {}).items()}


__all__ = ["Graph", "PyggmlError", "Spec", "Tensor", "compute", "current_scope", "dtype", "errors", "find_op", "kernel", "like", "load_ops", "op",
           "raw_tensor", "scope", "tensor"]
