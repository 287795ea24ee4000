"""Tools for testing ops and models: NMSE, running a case on a backend, and tiny random GGUF files of an architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

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


def fabricate(arch: str, path: str | os.PathLike[str], *, seed: int = 0, drop: tuple[str, ...] = (), extra: dict[str, np.ndarray] | None = None,
              metadata: dict[str, Any] | None = None, **overrides: Any) -> None:
    """Write a tiny GGUF of an architecture with random float32 weights that keep activations sane and a byte-level vocabulary.

    The architecture's own tables (TINY, TENSORS) say which keys and tensors there are. `overrides` replace hyperparameters by their
    keys without the architecture (dots as `__`: `ssm__group_count=1`; None drops the key); `drop` leaves tensors out, `extra` adds
    some, `metadata` adds or replaces whole keys at the end, also by what contradicts the tensors.

    >>> import tempfile, pyggml as pg
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fabricate("mamba2", f"{folder}/tiny.gguf", block_count=3)
    ...     pg.load_model(f"{folder}/tiny.gguf").kinds
    ('mamba', 'mamba', 'mamba')
    """
    from pyggml.dtypes import F32
    from pyggml.gguf import write_gguf
    from pyggml.models.fabricate import TensorSpec, arch_tensors, random_rows, vocab_metadata
    from pyggml.models.loader import architectures

    keys = {**architectures()[arch].TINY, **{k.replace("__", "."): v for k, v in overrides.items()}}
    meta: dict[str, Any] = {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in keys.items() if v is not None}, **vocab_metadata(258)}
    tensors = {name: np.concatenate([*random_rows(TensorSpec(name, ne, F32), seed)]).reshape(ne[::-1])
               for name, ne in arch_tensors(arch, meta) if name not in drop}
    write_gguf(path, {**meta, **(metadata or {})}, {**tensors, **(extra or {})})


def compile_cases(cases: Iterable[Case] | None = None) -> int:
    """Compile the kernels of cases (default: all) in one go, so that a test run does not ask for them one by one. Their number."""
    from pyggml.backends.cpu import CpuBackend
    from pyggml.cases import all_cases
    from pyggml.cpu.compile import kernels_for
    from pyggml.cpu.team import TAPE_KERNELS
    from pyggml.errors import UnsupportedOp
    from pyggml.graph import Graph

    backend, specs = CpuBackend(), list(TAPE_KERNELS)
    for c in all_cases() if cases is None else cases:
        try:
            specs += [step.kernel.spec for step in backend.plan(Graph(c.node().outputs)).steps]
        except UnsupportedOp:
            continue
    kernels_for().addresses(specs)
    return len(specs)
