"""Tools for testing ops and models: NMSE, and running a case on a backend with guards around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pyggml.cases import Case


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    """Sum of squared differences over the sum of squares of `want` (plain sum when that is 0), in float64. Equal infinities
    count as equal; any other non-finite difference gives inf.

    >>> nmse(np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    0.0
    """
    a, b = np.asarray(got, np.float64).ravel(), np.asarray(want, np.float64).ravel()
    if a.shape != b.shape:
        return float("inf")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    a, b = np.where(same, 0.0, a), np.where(same, 0.0, b)
    scale = np.asarray(want, np.float64).ravel()
    power = float(np.sum(np.square(scale[np.isfinite(scale)])))
    err = float(np.sum(np.square(a - b)))
    if not np.isfinite(err):
        return float("inf")
    return err / power if power > 0 else err


def run_case(case: Case, backend: str = "cpu", **options: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Run a case on a backend and on the reference, with the same stored inputs: (got, want), one array per output, and
    for an op that writes in place the whole written tensor."""
    from pyggml.backends import open_backend
    from pyggml.graph import Graph

    ins, outs = case.build()
    data = case.data()
    graph = Graph(outs)
    results = []
    for name, opts in ((backend, options), ("reference", {})):
        runner = open_backend(name, **opts).compile(graph)
        for t, value in zip(ins, data, strict=True):
            if t is not None and value is not None:
                runner.set(t, _as_input(t, value))
        runner.run()
        node = outs[0].node
        assert node is not None
        target = node.src[node.op.inplace] if node.op.inplace is not None else None
        results.append([runner.get(t) for t in (outs if target is None else (*outs, target))])
    return results[0], results[1]


def _as_input(t: Any, value: np.ndarray) -> np.ndarray:
    if t.dtype.is_int:
        return value.astype(t.dtype.np)
    return value if t.dtype.name == "f64" else value.astype(np.float32)
