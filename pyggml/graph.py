"""Graph: the nodes that outputs need, in execution order, with names and statistics.

Execution order is the order in which the nodes were built. A state that is written in place (SET_ROWS, CPY) is
therefore read or written exactly in program order, whatever the outputs are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyggml.errors import GraphError
from pyggml.tensor import Node, Tensor


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Counts of a graph: nodes in all and by op, nodes that only move data (views and copies), FLOPs and bytes moved."""

    n_nodes: int
    by_op: dict[str, int]
    n_moves: int
    flops: float
    nbytes: float

    @property
    def moves_share(self) -> float:
        """Share of nodes that only move data, 0 to 1."""
        return self.n_moves / self.n_nodes if self.n_nodes else 0.0


class Graph:
    """The nodes needed for `outputs`, in execution order.

    >>> import pyggml as pg
    >>> g = Graph([pg.cumsum(pg.tensor([128, 5]))])
    >>> g.n_nodes
    1
    """

    def __init__(self, outputs: Tensor | Iterable[Tensor]) -> None:
        self.outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        for t in self.outputs:
            if not isinstance(t, Tensor):
                raise GraphError(f"Graph: an output is {type(t).__name__}; it must be a tensor")
        nodes: dict[int, Node] = {}
        leaves: dict[int, Tensor] = {}
        stack: list[Tensor] = list(self.outputs)
        while stack:
            t = stack.pop()
            if t.node is None:
                leaves.setdefault(id(t), t)
            elif t.node.seq not in nodes:
                nodes[t.node.seq] = t.node
                stack.extend(s for s in t.node.src if s is not None)
        self.nodes = [nodes[k] for k in sorted(nodes)]
        self.leaves = list(leaves.values())
        for i, node in enumerate(self.nodes):
            for k, t in enumerate(node.outputs):
                t.name = t.name or (f"node_{i}" if k == 0 else f"node_{i}.{node.op.outputs[k]}")
        for i, t in enumerate(self.leaves):
            t.name = t.name or f"leaf_{i}"

    @property
    def n_nodes(self) -> int:
        """Number of nodes, views included, as ggml counts them."""
        return len(self.nodes)

    @property
    def inputs(self) -> list[Tensor]:
        """Leaves without data."""
        return [t for t in self.leaves if t.data is None]

    def stats(self) -> GraphStats:
        """Counts of nodes, FLOPs and bytes."""
        costs = [n.op.cost_of(n) for n in self.nodes]
        return GraphStats(self.n_nodes, dict(Counter(n.op.name for n in self.nodes).most_common()), sum(n.op.moves_data for n in self.nodes),
                          sum(c.flops for c in costs), sum(c.nbytes for c in costs))

    def find(self, name: str) -> Tensor:
        """The tensor of that name; GraphError when there is none."""
        for n in self.nodes:
            for t in n.outputs:
                if t.name == name:
                    return t
        for t in self.leaves:
            if t.name == name:
                return t
        raise GraphError(f"no tensor named {name!r} among the {self.n_nodes} nodes and {len(self.leaves)} leaves")

    def records(self) -> list[dict[str, Any]]:
        """One dict per node: index, layer, part, name, op, type, ne, nb (when strided), src names, params."""
        return [{"i": i, "layer": n.layer, "part": n.part, "name": n.name, "op": n.op.name, "type": n.out.dtype.name, "ne": list(n.out.ne),
                 "nb": None if n.out.is_contiguous else list(n.out.nb), "src": [s.name if s is not None else None for s in n.src], "params": n.params}
                for i, n in enumerate(self.nodes)]

    def __str__(self) -> str:
        lines = [f"graph: {self.n_nodes} nodes, {len(self.leaves)} leaves"]
        for r in self.records():
            strides = f" nb={r['nb']}" if r["nb"] else ""
            lines.append(f"{r['i']:5d} {r['op']:<18} {r['name']:<28} {r['type']:<5} {r['ne']}{strides} <- {', '.join(str(s) for s in r['src'])}")
        return "\n".join(lines)
