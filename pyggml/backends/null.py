"""No kernels and no data: makes plans, so that planner and model tests need no compiler."""

from __future__ import annotations

import numpy as np

from pyggml.errors import GraphError
from pyggml.graph import Graph
from pyggml.plan import Plan, Step, make_plan
from pyggml.tensor import Node, Tensor


class NullRunner:
    """A plan without memory."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def set(self, t: Tensor, value: np.ndarray) -> None:
        """Accepts anything."""

    def get(self, t: Tensor) -> np.ndarray:
        """There is nothing to read."""
        raise GraphError("the null backend computes nothing")

    def run(self) -> None:
        """Does nothing."""


class NullBackend:
    """Plans any graph."""

    name = "null"

    def __init__(self, *, reuse: bool = True) -> None:
        self.reuse = reuse

    def refuses(self, node: Node) -> str | None:
        """Takes every node."""
        return None

    def compile(self, graph: Graph) -> NullRunner:
        """A plan with one step per node."""
        def choose(step: Step) -> None:
            step.kernel_name = "null"
        return NullRunner(make_plan(graph, choose, reuse=self.reuse))
