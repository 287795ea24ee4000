"""Steps cut to one slice of their region: what the kernels of slice 0 are chosen for, and where the memory of the other slices lies."""

from __future__ import annotations

from typing import NamedTuple

from pyggml.cpu.regions import Region
from pyggml.cpu.slices import Cut, Dims, cut, packed
from pyggml.plan import Step
from pyggml.tensor import Node, Shape, Tensor


class Spread(NamedTuple):
    """Where slice i of a root lies: i // every * step bytes on in another one."""

    root: Tensor
    step: int
    every: int


class Slices:
    """The tensors of a region's slice 0."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.kept: dict[int, Tensor] = {}  # id of a local root -> that of the slice
        self.spread: dict[int, Spread] = {}  # id of a root that stands for one outside -> that one
        self._chains: dict[int, Tensor] = {}  # id of what a chain does not store -> that of the slice
        self._outer: dict[tuple[int, int, int], Tensor] = {}  # id of a root outside, with how far apart its slices are -> what stands for it
        self.steps = [self._step(s, dims) for s, dims in zip(region.steps, region.dims, strict=True)]

    def _step(self, s: Step, dims: Dims) -> Step:
        """The step for slice 0."""
        out = s.outs[0]
        nodes = []
        for n in s.nodes:
            new = Node(n.op, tuple(None if t is None else self._operand(t, n, dims) for t in n.src), n.params)
            new.seq, new.part, new.layer = n.seq, n.part, n.layer
            new.outputs = (self._result(n.out, dims, n.out is out),)
            nodes.append(new)
        return Step(nodes, [t for n in nodes for t in n.src], [nodes[-1].out])

    def _result(self, t: Tensor, dims: Dims, stored: bool) -> Tensor:
        c = cut(t, t.ne, dims, self.region.size, False)
        assert c is not None
        if not stored:
            new = self._chains[id(t)] = Tensor(t.dtype, c.ne, name=t.name)
        elif id(t.root) in self.region.local:
            new = self.kept[id(t.root)] = packed(t, self.region.axes[id(t.root)], self.region.size, None, c.ne)
        else:
            new = self._outside(t, c)
        return new

    def _operand(self, t: Tensor, node: Node, dims: Dims) -> Tensor:
        if id(t) in self._chains:
            return self._chains[id(t)]
        c = cut(t, node.out.ne, dims, self.region.size, node.op.grouped)
        assert c is not None
        if id(t.root) in self.region.local:
            return packed(t, self.region.axes[id(t.root)], self.region.size, self.kept[id(t.root)], c.ne)
        if c.step:
            return self._outside(t, c)
        return t if c.ne == t.ne else Tensor(t.dtype, c.ne, t.nb, name=t.name, root=t.root, offs=t.offs)  # one for all slices

    def _outside(self, t: Tensor, c: Cut) -> Tensor:
        key = id(t.root), c.step, c.every
        if key not in self._outer:
            new = self._outer[key] = Tensor(t.root.dtype, t.root.ne, t.root.nb, name=t.root.name)
            self.spread[id(new)] = Spread(t.root, c.step, c.every)
        return Tensor(t.dtype, c.ne, t.nb, name=t.name, root=self._outer[key], offs=t.offs)

    def results_outside(self) -> set[int]:
        """Ids of the roots of results that lie among those of other slices, where all that read of one find it by the same root."""
        outside = [k[0] for k in self._outer]
        roots = (s.outs[0].root for s in self.steps)
        return {id(t) for t in roots if id(t) in self.spread and outside.count(id(self.spread[id(t)].root)) == 1}


def sliced(node: Node, dims: Dims, size: int) -> Node:
    """A node for slices along dims of its result, as far as the choice of its kernel goes."""
    def one(t: Tensor, ne: Shape) -> Tensor:
        return Tensor(t.dtype, ne, t.nb, name=t.name, root=t.root, offs=t.offs, data=t.data)
    cuts = [None if t is None else cut(t, node.out.ne, dims, size, node.op.grouped) for t in node.src]
    new = Node(node.op, tuple(None if t is None or c is None else one(t, c.ne) for t, c in zip(node.src, cuts, strict=True)), node.params)
    own = cut(node.out, node.out.ne, dims, size, False)
    assert own is not None
    new.outputs = (one(node.out, own.ne),)
    return new
