"""Every case of every op on the CPU backend against the NumPy float64 reference, guarded; every refused call; random cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import batches, cases_of_family, cases_of_op

from pyggml.backends import Backend, open_backend
from pyggml.cases import Case, ErrorCase, RandomDraw, all_cases, errors_of, random_case
from pyggml.errors import KernelError, PyggmlError
from pyggml.graph import Graph
from pyggml.guards import check_case, guarded_backends, stored_values
from pyggml.registry import FAMILIES, OPS, OpDef, all_ops
from pyggml.tools.opcoverage import refusal

N_RANDOM = 50  # cases of each family
MOST_ELEMENTS = 1 << 19  # `pyggml test-ops` takes larger ones too
ERRORS = [e for d in all_ops() for e in errors_of(d)]


@pytest.fixture(scope="module")
def cpu() -> list[Backend]:
    return guarded_backends("cpu")


@pytest.mark.parametrize("cases", batches(c for c in all_cases() if not c.large and c.n_elements <= MOST_ELEMENTS))
def test_cases(cases: list[Case], cpu: list[Backend]) -> None:
    """Every case on 1, 2, 3 and 7 threads, every eighth also on 65 (which take five times as long as the others together)."""
    found = [(str(c), check_case(c, cpu if i % 8 == 0 else cpu[:-1])) for i, c in enumerate(cases)]
    assert [(name, v.skipped or v.faults) for name, v in found if v.skipped or v.faults] == []


@pytest.mark.parametrize("refused", ERRORS, ids=str)
def test_refused_call(refused: ErrorCase) -> None:
    """Each ends in its error, whose message is one line, when the node is built or (bad indices) on the reference and the CPU."""
    assert refusal(refused)[0] == ""
    if refused.error is KernelError:
        case = refused.as_case()
        ins, outs = case.build()
        for threads in (1, 3):
            runner = open_backend("cpu", threads=threads).compile(Graph(outs))
            for t, value in zip(ins, stored_values(case), strict=True):
                if t is not None and value is not None:
                    runner.set(t, value)
            with pytest.raises(KernelError, match=f"^{case.op.name} .*bad (index|span)"):
                runner.run()


@pytest.mark.parametrize("family", FAMILIES)
def test_random_cases(family: str, cpu: list[Backend]) -> None:
    """Each family's strategy, with choices that are the same in every run."""

    @settings(max_examples=N_RANDOM, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases_of_family(family))
    def check(case: Case) -> None:
        assert check_case(case, cpu[1:3]).faults == [], str(case)

    check()


@pytest.mark.parametrize("d", all_ops(), ids=lambda d: d.name)
def test_random_cases_are_legal_and_seeded(d: OpDef) -> None:
    first, again, other = ([str(random_case(d, draw)) for _ in range(30)] for draw in (RandomDraw(np.random.default_rng(s)) for s in (1, 1, 2)))
    assert first == again != other

    @settings(max_examples=10, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def builds(data: st.DataObject) -> None:
        data.draw(cases_of_op(d)).node()

    builds()


@pytest.mark.parametrize("name", sorted(OPS))
def test_op_is_complete(name: str) -> None:
    d = OPS[name]
    assert d.__doc__ and d.all_cases() and d.random_fn is not None
    assert d.view or d.has_reference


def test_errors_are_the_engine_s_own() -> None:
    assert all(issubclass(e.error, PyggmlError) for e in ERRORS)
