"""hypothesis strategies of op cases: random legal shapes, strides and parameters, made by the drawers that `pyggml test-ops --random` uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

from pyggml.cases import Case, random_case
from pyggml.registry import OpDef, all_ops

T = TypeVar("T")


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
