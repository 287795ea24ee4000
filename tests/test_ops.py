"""Every case of every op on the CPU backend against the NumPy float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

from pyggml.cases import Case, all_cases
from pyggml.registry import OPS, load_ops
from pyggml.testing import nmse, run_case

load_ops()


@pytest.mark.parametrize("case", [c for c in all_cases() if not c.perf], ids=str)
def test_case(case: Case) -> None:
    got, want = run_case(case, "cpu", threads=2, poison=True)
    for g, w in zip(got, want, strict=True):
        if np.asarray(w).dtype.kind == "i":
            assert np.array_equal(g, w)
        else:
            assert nmse(g, w) <= (case.op.limit if case.limit is None else case.limit)


@pytest.mark.parametrize("name", sorted(OPS))
def test_op_is_complete(name: str) -> None:
    d = OPS[name]
    assert d.__doc__ and d.all_cases()
    assert d.view or d._reference is not None
