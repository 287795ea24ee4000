"""Layout: views of memory, copies, and rows picked by index. No op here computes; each gives the very bits it was given.

A view shares the storage of its source and no kernel runs. All others take any strides, also in dim 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pyggml.dtypes import BF16, F16, F32, I32, I64, Q8_0
from pyggml.errors import DTypeError, KernelError, ParamError
from pyggml.quants import WEIGHT_TYPES
from pyggml.registry import Cost, Pointwise, Spec, is_number, is_whole, like, op, out, require, require_type
from pyggml.tensor import Node, Tensor, contiguous_nb, shape4

# Views


@op("VIEW", inputs="x", view=True)
def view(x: Tensor, ne: Sequence[int], nb: Sequence[int] | None = None, offset: int = 0) -> Spec:
    """`ne` elements of x's storage from `offset` bytes after x's first element; `nb` gives the byte strides of dims 1 and
    up (len(ne) - 1 of them), None the strides of rows without gaps.

    The view may reach beyond x's own elements, yet not beyond the storage x lies in. For block types offset and
    strides count whole blocks. A stride of 0 repeats. Source: ggml_view_1d to ggml_view_4d.

    >>> import numpy as np, pyggml as pg
    >>> x = pg.tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
    >>> pg.compute(pg.view(x, [2, 3], [16], 4), {}, backend="reference")
    array([[ 1.,  2.],
           [ 5.,  6.],
           [ 9., 10.]])
    """
    dims, unit = shape4(ne, "VIEW: ne"), x.dtype.nbytes
    require(dims[0] % x.dtype.block == 0, "VIEW", f"ne[0] is {dims[0]}; legal for {x.dtype.name}: multiples of its block of {x.dtype.block}")
    strides = contiguous_nb(x.dtype, dims)
    if nb is not None:
        fits = isinstance(nb, Sequence | np.ndarray) and len(nb) == len(ne) - 1 and all(is_whole(b) and b >= 0 and b % unit == 0 for b in nb)
        require(fits, "VIEW", f"nb is {nb!r}; legal: {len(ne) - 1} multiples of {unit} from 0, the strides of dims 1 to {len(ne) - 1} in bytes")
        s = [unit, *(int(b) for b in nb)]
        while len(s) < 4:
            s.append(s[-1] * (dims[len(s) - 1] if len(s) > 1 else dims[0] // x.dtype.block))
        strides = (s[0], s[1], s[2], s[3])
    require(is_whole(offset) and offset >= 0 and offset % unit == 0, "VIEW", f"offset is {offset!r}; legal: multiples of {unit} bytes from 0")
    size = Tensor(x.dtype, dims, strides).nbytes
    room = x.root.nbytes - x.offs
    require(offset + size <= room, "VIEW", f"ne {list(ne)} from byte {offset} ends at byte {offset + size}; x's storage ends at byte {room}")
    return Spec(x.dtype, dims, strides, view_of=x, offs=int(offset))


@op("RESHAPE", inputs="x", view=True)
def reshape(x: Tensor, ne: Sequence[int]) -> Spec:
    """x with other dims and the same elements in the same order; one dim may be -1 and takes what is left. x: contiguous.

    Source: ggml_reshape.

    >>> import pyggml as pg
    >>> pg.reshape(pg.tensor([6, 4]), [3, -1]).ne
    (3, 8, 1, 1)
    """
    require(x.is_contiguous, "RESHAPE", f"x has ne {list(x.ne)} and nb {list(x.nb)}; it must be contiguous (cont makes it so)")
    dims = list(ne)
    if dims.count(-1) == 1:
        known = -math.prod(dims)
        require(known > 0 and x.n_elements % known == 0, "RESHAPE", f"ne {list(ne)} does not divide x's {x.n_elements} elements")
        dims[dims.index(-1)] = x.n_elements // known
    shape = shape4(dims, "RESHAPE: ne")
    require(math.prod(shape) == x.n_elements, "RESHAPE", f"ne {list(ne)} holds {math.prod(shape)} elements; x has {x.n_elements}")
    require(shape[0] % x.dtype.block == 0, "RESHAPE", f"ne[0] is {shape[0]}; legal for {x.dtype.name}: multiples of its block of {x.dtype.block}")
    return Spec(x.dtype, shape, contiguous_nb(x.dtype, shape), view_of=x)


@op("PERMUTE", inputs="x", view=True)
def permute(x: Tensor, a0: int, a1: int, a2: int, a3: int) -> Spec:
    """x with its dims in another order: dim i of x becomes dim a_i of the result. Source: ggml_permute.

    >>> import pyggml as pg
    >>> pg.permute(pg.tensor([2, 3, 4]), 2, 0, 1, 3).ne
    (3, 4, 2, 1)
    """
    axes = (a0, a1, a2, a3)
    require(all(map(is_whole, axes)) and sorted(axes) == [0, 1, 2, 3], "PERMUTE", f"axes are {list(axes)}; legal: each of 0 1 2 3 once", ParamError)
    return _permuted("PERMUTE", x, axes)


@op("TRANSPOSE", inputs="x", view=True)
def transpose(x: Tensor) -> Spec:
    """x with dims 0 and 1 exchanged. Source: ggml_transpose.

    >>> import pyggml as pg
    >>> pg.transpose(pg.tensor([2, 3])).ne
    (3, 2, 1, 1)
    """
    return _permuted("TRANSPOSE", x, (1, 0, 2, 3))


def _permuted(name: str, x: Tensor, axes: tuple[int, int, int, int]) -> Spec:
    require(axes[0] == 0 or not x.dtype.is_quantized, name, f"x is {x.dtype.name}, stored in blocks along dim 0; dim 0 must stay dim 0", DTypeError)
    ne, nb = [0] * 4, [0] * 4
    for i, a in enumerate(axes):
        ne[a], nb[a] = x.ne[i], x.nb[i]
    return Spec(x.dtype, (ne[0], ne[1], ne[2], ne[3]), (nb[0], nb[1], nb[2], nb[3]), view_of=x)


# Copies


def _unchanged(node: Node) -> list[int]:
    """Dims that the first input has, too."""
    x = node.src[0]
    assert x is not None
    return [d for d in (1, 2, 3) if x.ne[d] == node.out.ne[d]]


@op("CONT", inputs="x", moves_data=True, limit=0.0)
def cont(x: Tensor) -> Spec:
    """A contiguous copy of x. x: any plain type, any strides. Source: ggml_cont.

    >>> import numpy as np, pyggml as pg
    >>> pg.compute(pg.cont(pg.transpose(pg.tensor(np.array([[1., 2.], [3., 4.]], np.float32)))), {}, backend="reference")
    array([[1., 3.],
           [2., 4.]])
    """
    _require_plain("CONT", "x", x)
    return like(x)


@cont.reference
def _cont(x: np.ndarray) -> np.ndarray:
    return x


cont.slices(lambda node: (1, 2, 3))


@op("CPY", inputs="a b", inplace=1, moves_data=True, limit=0.0)
def cpy(a: Tensor, b: Tensor) -> Spec:
    """Copy a into b's memory, converted to b's type, element after element in the order of dims 0 to 3; the result is b.

    a, b: f32, f16 or bf16 in any mix, or both of one other plain type; as many elements, dims and strides of their own.
    The two must not overlap. Source: ggml_cpy.

    >>> import numpy as np, pyggml as pg
    >>> state = pg.tensor(np.zeros((2, 2), np.float32))
    >>> pg.compute(pg.cpy(pg.tensor(np.arange(4, dtype=np.float32)), state), {}, backend="reference")
    array([[0., 1.],
           [2., 3.]])
    """
    require(a.dtype is b.dtype or {a.dtype, b.dtype} <= {F32, F16, BF16}, "CPY",
            f"a is {a.dtype.name}, b is {b.dtype.name}; legal: f32, f16 and bf16 in any mix, or equal types", DTypeError)
    _require_plain("CPY", "a", a)
    require(a.n_elements == b.n_elements, "CPY", f"a has {a.n_elements} elements, ne {list(a.ne)}; b has {b.n_elements}, ne {list(b.ne)}")
    return Spec(b.dtype, b.ne, b.nb, view_of=b)


@cpy.reference
def _cpy(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.reshape(b.shape)


@cpy.cost
def _cpy_cost(node: Node) -> Cost:
    return Cost(0, _bytes(node.src[0]) + _bytes(node.src[1]))


@op("CONCAT", inputs="a b", moves_data=True, limit=0.0)
def concat(a: Tensor, b: Tensor, dim: int = 0) -> Spec:
    """a, then b, along `dim`. a, b: one plain type, equal dims but for `dim`. Source: ggml_concat.

    >>> import numpy as np, pyggml as pg
    >>> pg.compute(pg.concat(pg.tensor(np.ones(2, np.float32)), pg.tensor(np.zeros(1, np.float32))), {}, backend="reference")
    array([1., 1., 0.])
    """
    require(dim in (0, 1, 2, 3), "CONCAT", f"dim is {dim!r}; legal: 0 to 3", ParamError)
    _require_plain("CONCAT", "a", a)
    require_type("CONCAT", "b", b, a.dtype)
    require(all(a.ne[i] == b.ne[i] for i in range(4) if i != dim), "CONCAT",
            f"a has ne {list(a.ne)}, b has ne {list(b.ne)}; they must agree in all dims but {dim}")
    return out(a.dtype, *(n + (b.ne[i] if i == dim else 0) for i, n in enumerate(a.ne)))


@concat.reference
def _concat(a: np.ndarray, b: np.ndarray, *, dim: int) -> np.ndarray:
    return np.concatenate([a, b], axis=-1 - dim)


concat.slices(lambda node: {1, 2, 3} - {node.params["dim"]})


@op("REPEAT", inputs="x", moves_data=True, limit=0.0)
def repeat(x: Tensor, ne: Sequence[int]) -> Spec:
    """x tiled to dims `ne`, each a multiple of x's. Source: ggml_repeat.

    >>> import numpy as np, pyggml as pg
    >>> pg.compute(pg.repeat(pg.tensor(np.array([1., 2.], np.float32)), [4]), {}, backend="reference")
    array([1., 2., 1., 2.])
    """
    _require_plain("REPEAT", "x", x)
    dims = shape4(ne, "REPEAT: ne")
    require(all(n % m == 0 for n, m in zip(dims, x.ne, strict=True)), "REPEAT", f"ne is {list(ne)}; each dim must be a multiple of x's, ne {list(x.ne)}")
    return out(x.dtype, *dims)


@repeat.reference
def _repeat(x: np.ndarray, *, ne: Sequence[int]) -> np.ndarray:
    want = (*reversed(ne),)
    full = (1,) * (4 - len(want)) + want
    return np.tile(x, [n // m for n, m in zip(full, x.shape, strict=True)])


repeat.slices(_unchanged)


@op("REPEAT_INTERLEAVE", inputs="x", moves_data=True, limit=0.0)
def repeat_interleave(x: Tensor, n: int, dim: int = 0) -> Spec:
    """Each element n times in a row along `dim`: 1 2 becomes 1 1 2 2. It deals groups to heads: head h of H heads gets
    group h // (H / n_group). Source: torch.repeat_interleave.

    >>> import numpy as np, pyggml as pg
    >>> pg.compute(pg.repeat_interleave(pg.tensor(np.array([1., 2.], np.float32)), 2), {}, backend="reference")
    array([1., 1., 2., 2.])
    """
    _require_plain("REPEAT_INTERLEAVE", "x", x)
    require(dim in (0, 1, 2, 3), "REPEAT_INTERLEAVE", f"dim is {dim!r}; legal: 0 to 3", ParamError)
    require(is_whole(n) and n >= 1, "REPEAT_INTERLEAVE", f"n is {n!r}; legal: whole numbers from 1", ParamError)
    return out(x.dtype, *(m * (n if i == dim else 1) for i, m in enumerate(x.ne)))


@repeat_interleave.reference
def _repeat_interleave(x: np.ndarray, *, n: int, dim: int) -> np.ndarray:
    return np.repeat(x, n, axis=-1 - dim)


repeat_interleave.slices(_unchanged)


@op("PAD", inputs="x", moves_data=True, limit=0.0)
def pad(x: Tensor, p0: int, p1: int = 0, p2: int = 0, p3: int = 0) -> Spec:
    """x with p_i zeros after the end of dim i. Source: ggml_pad.

    >>> import numpy as np, pyggml as pg
    >>> pg.compute(pg.pad(pg.tensor(np.ones(2, np.float32)), 3), {}, backend="reference")
    array([1., 1., 0., 0., 0.])
    """
    _require_plain("PAD", "x", x)
    more = (p0, p1, p2, p3)
    require(all(is_whole(p) and p >= 0 for p in more), "PAD", f"p0 to p3 are {list(more)}; legal: whole numbers from 0", ParamError)
    return out(x.dtype, *(n + p for n, p in zip(x.ne, more, strict=True)))


@pad.reference
def _pad(x: np.ndarray, *, p0: int, p1: int, p2: int, p3: int) -> np.ndarray:
    return np.pad(x, [(0, p) for p in (p3, p2, p1, p0)])


pad.slices(_unchanged)


@op("FILL", inputs="x", moves_data=True, limit=1e-14)
def fill(x: Tensor, c: float) -> Spec:
    """A new tensor of x's type and dims, full of c. ParamError for a c that a whole-number type, or float64, cannot hold. Source: ggml_fill.

    >>> import numpy as np, pyggml as pg
    >>> pg.compute(pg.fill(pg.tensor(np.ones(2, np.float32)), 0.5), {}, backend="reference")
    array([0.5, 0.5])
    """
    _require_plain("FILL", "x", x)
    require(is_number(c) and (not x.dtype.is_int or float(c).is_integer()), "FILL",
            f"c is {c!r}; legal: a number, and a whole one for {x.dtype.name}", ParamError)
    if x.dtype.is_int:
        top = 1 << min(8 * x.dtype.nbytes - 1, 53)  # kernels take params as float64
        require(-top <= c < top, "FILL", f"c is {c!r}; legal for {x.dtype.name}: {-top} to {top - 1}", ParamError)
    return like(x)


fill.pointwise = Pointwise("c", params=("c",))


@fill.reference
def _fill(x: np.ndarray, *, c: float) -> np.ndarray:
    return np.full_like(x, c)


@fill.cost
def _fill_cost(node: Node) -> Cost:
    return Cost(0, _bytes(node.out))


@op("ARANGE", inputs="", limit=1e-14)
def arange(start: float, stop: float, step: float = 1.0) -> Spec:
    """f32 [ceil((stop - start) / step)]: start + i * step. Source: ggml_arange.

    >>> import pyggml as pg
    >>> pg.compute(pg.arange(1, 3, 0.5), {}, backend="reference")
    array([1. , 1.5, 2. , 2.5])
    """
    values = (start, stop, step)
    require(all(is_number(v) and math.isfinite(v) for v in values) and step != 0 and (stop - start) / step > 0, "ARANGE",
            f"start, stop, step are {list(values)}; legal: finite numbers with at least one step from start towards stop", ParamError)
    return out(F32, math.ceil((stop - start) / step))


@arange.reference
def _arange(*, start: float, stop: float, step: float) -> np.ndarray:
    return start + np.arange(math.ceil((stop - start) / step)) * step


# Rows by index


@op("GET_ROWS", inputs="x ids", moves_data=True, limit=1e-13)
def get_rows(x: Tensor, ids: Tensor) -> Spec:
    """Rows of x by number: out[:, k, i, j] = x[:, ids[k, i, j], i, j].

    x: [n, m, b1, b2] of f32, f16, bf16 or a block type (pyggml.quants.WEIGHT_TYPES), which gives f32, or i32, which gives i32;
    ids: i32 [k, b1, b2]. An id outside 0 to m - 1 ends the run in KernelError. Source: ggml_get_rows.

    >>> import numpy as np, pyggml as pg
    >>> x = pg.tensor(np.array([[1., 2.], [3., 4.]], np.float32))
    >>> pg.compute(pg.get_rows(x, pg.tensor(np.array([1, 1, 0], np.int32))), {}, backend="reference")
    array([[3., 4.],
           [3., 4.],
           [1., 2.]])
    """
    require_type("GET_ROWS", "x", x, *WEIGHT_TYPES, I32)
    require_type("GET_ROWS", "ids", ids, I32)
    k, b1, b2, rest = ids.ne
    require((b1, b2, rest) == (x.ne[2], x.ne[3], 1), "GET_ROWS", f"ids has ne {list(ids.ne)}; legal for x of ne {list(x.ne)}: [k, {x.ne[2]}, {x.ne[3]}, 1]")
    return out(I32 if x.dtype is I32 else F32, x.ne[0], k, b1, b2)


@get_rows.reference
def _get_rows(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    _check_ids("GET_ROWS", ids, x.shape[-2])
    return np.take_along_axis(x, ids[0][..., None], axis=-2)


@get_rows.cost
def _get_rows_cost(node: Node) -> Cost:
    x, ids, o = node.src[0], node.src[1], node.out
    assert x is not None and ids is not None
    return Cost(0, o.n_rows * x.dtype.row_bytes(x.ne[0]) + _bytes(ids) + _bytes(o))


@op("SET_ROWS", inputs="dst src ids", inplace=0, moves_data=True, limit=0.0)
def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> Spec:
    """Write rows into dst by number: dst[:, ids[k, i, j], i', j'] = src[:, k, i', j'], with i = i' % b1, j = j' % b2; the
    result is dst. Of equal ids the last row wins, on any number of threads.

    dst: [n, m, c1, c2] of f32, f16, bf16, q8_0; src: f32 [n, k, c1, c2]; ids: i64 or i32 [k, b1, b2], where b1 divides c1 and b2
    divides c2. A row whose id is outside 0 to m - 1 is not written, and the run ends in KernelError. Source: ggml_set_rows.

    >>> import numpy as np, pyggml as pg
    >>> cache = pg.tensor(np.zeros((3, 2), np.float32))
    >>> pg.compute(pg.set_rows(cache, pg.tensor(np.ones((1, 2), np.float32)), pg.tensor(np.array([1]))), {}, backend="reference")
    array([[0., 0.],
           [1., 1.],
           [0., 0.]])
    """
    require_type("SET_ROWS", "dst", dst, F32, F16, BF16, Q8_0)
    require_type("SET_ROWS", "src", src, F32)
    require_type("SET_ROWS", "ids", ids, I64, I32)
    n, _, c1, c2 = dst.ne
    k, b1, b2, rest = ids.ne
    require(src.ne == (n, k, c1, c2), "SET_ROWS", f"src has ne {list(src.ne)}; legal for dst of ne {list(dst.ne)} and {k} ids: {[n, k, c1, c2]}")
    require(c1 % b1 == 0 and c2 % b2 == 0 and rest == 1, "SET_ROWS", f"ids has ne {list(ids.ne)}; dims 1 and 2 must divide {c1} and {c2}, dim 3 must be 1")
    return Spec(dst.dtype, dst.ne, dst.nb, view_of=dst)


@set_rows.reference
def _set_rows(dst: np.ndarray, src: np.ndarray, ids: np.ndarray) -> np.ndarray:
    _check_ids("SET_ROWS", ids, dst.shape[-2])
    result = np.array(dst)
    for j, i in np.ndindex(dst.shape[:2]):
        for k, row in enumerate(ids[0, j % ids.shape[1], i % ids.shape[2]]):
            result[j, i, row] = src[j, i, k]
    return result


@set_rows.cost
def _set_rows_cost(node: Node) -> Cost:
    src, ids = node.src[1], node.src[2]
    assert src is not None
    written = src.n_elements // node.out.dtype.block * node.out.dtype.nbytes
    return Cost(0, _bytes(src) + written + _bytes(ids))


# What the rules share


def _require_plain(name: str, arg: str, x: Tensor) -> None:
    require(not x.dtype.is_quantized, name, f"{arg} is {x.dtype.name}; legal: types without blocks (f32 f16 bf16 f64 i8 i16 i32 i64)", DTypeError)


def _bytes(t: Tensor | None) -> float:
    assert t is not None
    return t.n_elements // t.dtype.block * t.dtype.nbytes


def _check_ids(name: str, ids: np.ndarray, n: int) -> None:
    bad = ids[(ids < 0) | (ids >= n)]
    if bad.size:
        raise KernelError(f"{name}: bad index {int(bad.flat[0])}; legal: 0 to {n - 1}")
