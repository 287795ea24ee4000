"""Op cases for tests: the listed ones in batches, and hypothesis strategies of random ones, made by the drawers that `pyggml test-ops --random` uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st

from pyggml.cases import Case, random_case
from pyggml.registry import OpDef, all_ops

T = TypeVar("T")
BATCH = 60  # cases of one test: thousands of tests would cost more than the cases


def batches(cases: Iterable[Case]) -> list[Any]:
    """The cases of each op, BATCH at a time, as parameters of a test."""
    found = []
    for d, group in groupby(cases, lambda c: c.op):
        of_op = list(group)
        found += [pytest.param(of_op[i:i + BATCH], id=f"{d.name}-{i // BATCH}") for i in range(0, len(of_op), BATCH)]
    return found


class HypothesisDraw:
    """Choices that hypothesis makes, and takes back one by one to find the smallest failing case."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, lo: int, hi: int) -> int:
        """A whole number in [lo, hi]."""
        return self._draw(st.integers(lo, hi))

    def choice(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.integer(0, len(values) - 1)]


@st.composite
def cases_of_op(draw: st.DrawFn, d: OpDef) -> Case:
    """Random cases of one op."""
    return random_case(d, HypothesisDraw(draw))


def cases_of_family(family: str) -> st.SearchStrategy[Case]:
    """Random cases of a family's ops."""
    return st.sampled_from([d for d in all_ops() if d.family == family]).flatmap(cases_of_op)
