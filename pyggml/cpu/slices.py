"""Slices of tensors along an axis: where they lie, and whether two views of one memory have the same ones.

An axis of memory is a stride and a length: element u of it lies u * stride bytes on, and the whole repeats every stride * length bytes. A tensor
is cut along the axis through one of its dims, or two that have been split from one (heads into groups and heads of a group). Slices are
`size` elements long and numbered from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyggml.tensor import Shape, Tensor

PAGE, LINE = 4096, 64

Dims = tuple[int, ...]  # of a tensor along which it is cut, the one with the shorter stride first


class Axis(NamedTuple):
    """Bytes from one element to the next, and how many there are."""

    stride: int
    length: int


class Cut(NamedTuple):
    """Slice i of a tensor: its ne, and i // every * step bytes from the tensor's first element."""

    ne: Shape
    step: int = 0
    every: int = 1


def length(t: Tensor, dims: Dims) -> int:
    """Elements of a tensor's dims together."""
    n = 1
    for d in dims:
        n *= t.ne[d]
    return n


def axis_of(t: Tensor, dims: Dims) -> Axis | None:
    """The axis that a tensor's dims walk; None where two of them do not walk one, or all elements are the same."""
    if t.nb[dims[0]] == 0 or (len(dims) == 2 and t.nb[dims[1]] != t.ne[dims[0]] * t.nb[dims[0]]):
        return None
    return Axis(t.nb[dims[0]], length(t, dims))


def dims_along(t: Tensor, axis: Axis) -> Dims | None:
    """The dims of a view that walk all of an axis of its memory from its start, so that slice i of the view lies in slice i of the memory.
    None where it has none such, or its rows reach into neighbours."""
    period = axis.stride * axis.length
    along: list[tuple[int, int]] = []
    inside = t.offs % axis.stride + t.dtype.nbytes + (t.ne[0] // t.dtype.block - 1) * t.nb[0] * (t.nb[0] < axis.stride)
    for d in range(4):
        n, nb = t.ne[d], t.nb[d]
        if n == 1:
            continue
        if nb < axis.stride:
            inside += (n - 1) * nb if d > 0 else 0
        elif nb < period:
            along.append((nb, d))
        elif nb % period:
            return None
    along.sort()
    dims = tuple(d for _, d in along)
    if inside > axis.stride or t.offs // axis.stride % axis.length or not 1 <= len(dims) <= 2:
        return None
    return dims if axis_of(t, dims) == axis else None


def cut(t: Tensor, ne: Shape, dims: Dims, size: int, grouped: bool) -> Cut | None:
    """The slices of an operand that belong to slices, `size` long, of a result with these ne along these dims; None where they are no
    evenly spaced ones. `grouped` as of OpDef.slices."""
    d = dims[0]
    if len(dims) == 1:
        return _cut_one(t, ne[d], d, size, grouped)
    outer = dims[1]
    if t.ne[d] == t.ne[outer] == 1:
        return Cut(t.ne)
    if ne[d] % size or t.ne[outer] != ne[outer]:
        return None
    if t.ne[d] == 1:  # one for all of the inner dim: the next slice after ne[d] / size of the result's
        return Cut(_with(t.ne, outer, 1), t.nb[outer], ne[d] // size)
    if t.ne[d] != ne[d] or axis_of(t, dims) is None:
        return None
    return Cut(_with(_with(t.ne, d, size), outer, 1), size * t.nb[d])


def _cut_one(t: Tensor, n: int, d: int, size: int, grouped: bool) -> Cut | None:
    own = t.ne[d]
    if own == n:
        return Cut(_with(t.ne, d, size), size * t.nb[d])
    if own == 1:
        return Cut(t.ne)
    if not grouped or n % own:
        return None
    share = n // own  # elements of the result for each of t's
    if size % share == 0:
        return Cut(_with(t.ne, d, size // share), size // share * t.nb[d])
    return Cut(_with(t.ne, d, 1), t.nb[d], share // size) if share % size == 0 else None


def _with(ne: Shape, d: int, n: int) -> Shape:
    return (*ne[:d], n, *ne[d + 1:])  # type: ignore[return-value]


def packed(t: Tensor, axis: Axis, size: int, root: Tensor | None, ne: Shape) -> Tensor:
    """A view of the memory of one slice kept alone, `root` (None: its own), that stands for `t` in the whole: its dims are `ne`."""
    period, kept = axis.stride * axis.length, axis.stride * size
    if kept % PAGE == 0:  # what stands so far apart shares cache sets
        kept += LINE
    elif kept == t.dtype.nbytes:  # what has gaps keeps them: kernels are chosen by it
        kept *= 2

    def moved(nbytes: int) -> int:
        return nbytes // period * kept + nbytes % period

    a, b, c, d = (moved(nb) for nb in t.nb)
    return Tensor(t.dtype, ne, (a, b, c, d), name=t.name, root=root, offs=moved(t.offs))


def sizes(n: int, dims: Sequence[Dims], tensors: Sequence[Tensor]) -> list[int]:
    """Lengths of slices into which n elements can be cut evenly, the largest first, where each tensor's inner dim of two is not passed."""
    inner = [t.ne[d[0]] for d, t in zip(dims, tensors, strict=True) if len(d) == 2]
    return [s for s in range(n, 0, -1) if n % s == 0 and all(m % s == 0 for m in inner)]
