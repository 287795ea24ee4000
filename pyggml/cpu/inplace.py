"""States written where they lie: a step that reads rows of a pool and gives their new values, which SET_ROWS then copies into the same
rows, is told to write them there itself. A state then crosses the memory bus twice per step instead of five times.

A kernel that can do so says so by its option `pool`: (number of the output, of the input that is the pool, of the one with the rows' ids). It
sees from the node's outputs that it has to: the pool stands where the new values otherwise do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyggml.cpu.fuse import same_memory
from pyggml.graph import Graph
from pyggml.plan import Step
from pyggml.tensor import Node, Tensor


def write_pools(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """Steps with each such SET_ROWS taken into the step whose values it copies."""
    made_by = {id(t.root): i for i, s in enumerate(steps) for t in s.outs}
    readers: dict[int, int] = {}
    for s in steps:
        for root in {id(t.root) for t in s.ins if t is not None}:
            readers[root] = readers.get(root, 0) + 1
    kept = {id(t.root) for t in graph.outputs}
    found = list(steps)
    for i, s in enumerate(steps):
        node = s.nodes[-1]
        value = node.src[1] if node.op.name == "SET_ROWS" else None
        if value is None or readers[id(value.root)] != 1 or id(value.root) in kept or id(value.root) not in made_by:
            continue
        at = made_by[id(value.root)]
        merged = _merged(steps[at], node)
        if merged is not None and not any(same_memory(t.root, node.out.root) for t in _touched(steps[at + 1:i])):
            found[at], found[i] = merged, Step([], [], [])
    return [s for s in found if s.nodes]


def _touched(steps: Sequence[Step]) -> list[Tensor]:
    return [t for s in steps for t in (*s.ins, *s.outs) if t is not None]


def _merged(step: Step, write: Node) -> Step | None:
    """The step that computes and writes; None where this node cannot, or the rows written are not those read."""
    node = step.nodes[-1]
    place = next((k.options["pool"] for k in node.op.kernels.get("cpu", ()) if "pool" in k.options), None)
    if place is None:
        return None
    output, pool, ids = node.outputs[place[0]], node.src[place[1]], node.src[place[2]]
    dst, value, rows = write.src
    assert pool is not None and ids is not None and dst is not None and value is not None and rows is not None
    whole = value.root is output.root and value.offs == output.offs and value.n_elements == output.n_elements and _flat(value)
    same = dst.root is pool.root and dst.offs == pool.offs and dst.nb[1] == pool.nb[3] and dst.dtype is pool.dtype and _flat(pool)
    shape = dst.ne == (math.prod(pool.ne[:3]), pool.ne[3], 1, 1)
    if not (whole and same and shape and (rows.root, rows.offs, rows.ne, rows.nb, rows.dtype) == (ids.root, ids.offs, ids.ne, ids.nb, ids.dtype)):
        return None
    writing = Node(node.op, node.src, node.params)
    writing.seq, writing.part, writing.layer = node.seq, node.part, node.layer
    writing.outputs = tuple(pool if i == place[0] else t for i, t in enumerate(node.outputs))
    return Step([write, writing], step.ins, [*(t for t in step.outs if t is not output), write.out])


def _flat(t: Tensor) -> bool:
    """True when all elements follow each other."""
    return all(n == 1 or nb == t.dtype.nbytes * math.prod(t.ne[:d]) for d, (n, nb) in enumerate(zip(t.ne, t.nb, strict=True)))
