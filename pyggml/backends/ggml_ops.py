"""How each op is said in ggml: the function to call, its arguments, and what ggml's asserts demand, checked before it is called.

ggml ends the process on input it does not take, and on some it reads the wrong memory without a word; so each mapping states all that its
function, and the kernel behind it, rely on (ggml 0.20.2: ggml.c, ggml-cpu/ops.cpp, ggml-cpu.c). What a mapping refuses, it refuses in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.dtypes import BF16, F16, F32, I16, I32, I64, DType, dtype
from pyggml.tensor import Node, Tensor, contiguous_nb

SINGLE = (F32, F16, BF16)


class Refused(Exception):
    """ggml does not take the node; the message says why."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of ggml_`function` with tensors, copies of tensors, None and numbers. `ids` are checked at run time to lie within
    0 to `n_rows` - 1. `turned`: the output is the result with dims 0 and 1 exchanged. Where the result's ne is not the output's,
    the outputs lie one after the other in its memory."""

    function: str
    args: tuple[Any, ...]
    ids: Tensor | None = None
    n_rows: int = 0
    turned: bool = False

    @property
    def name(self) -> str:
        """What is called, copies of arguments and of the result included."""
        return "ggml_cont+" * any(isinstance(a, Copied) for a in self.args) + f"ggml_{self.function}" + "+ggml_cont" * self.turned


@dataclass(frozen=True, slots=True)
class Copied:
    """An argument that ggml_cont makes contiguous first."""

    x: Tensor


MAPPINGS: dict[str, Callable[[Node], Call]] = {}


def maps(*names: str) -> Callable[[Callable[[Node], Call]], Callable[[Node], Call]]:
    """Register the mapping of ops."""

    def register(fn: Callable[[Node], Call]) -> Callable[[Node], Call]:
        MAPPINGS.update(dict.fromkeys(names, fn))
        return fn

    return register


def call_of(node: Node) -> Call:
    """The call that computes a node; Refused."""
    mapping = MAPPINGS.get(node.op.name)
    if mapping is None:
        raise Refused("ggml has no such op")
    return mapping(node)


# What functions demand


def _need(ok: bool, why: str) -> None:
    if not ok:
        raise Refused(why)


def _inputs(node: Node) -> tuple[Tensor, ...]:
    return tuple(t for t in node.src if t is not None)


def _types(arg: str, x: Tensor, *types: DType) -> None:
    _need(x.dtype in types, f"{arg} is {x.dtype.name}; ggml takes {', '.join(t.name for t in types)}")


def _dense_rows(arg: str, x: Tensor) -> None:
    """nb0 as ggml's kernels assert it, also where a row has one element."""
    _need(x.nb[0] == x.dtype.nbytes, f"{arg} is strided in dim 0; ggml takes rows without gaps")


def _one_row_stride(arg: str, x: Tensor) -> None:
    """ggml_is_contiguous_1: row i of all rows starts at i * nb1."""
    _dense_rows(arg, x)
    _need(x.contiguous_from(1), f"{arg} is permuted; ggml takes rows at one stride")


def _contiguous(arg: str, x: Tensor) -> None:
    _need(x.is_contiguous, f"{arg} is strided; ggml takes contiguous {arg}")


def _packed(arg: str, x: Tensor) -> None:
    """Contiguous by every stride, those of dims of size 1 too: the kernel steps by them."""
    _need(x.nb == contiguous_nb(x.dtype, x.ne), f"{arg} is strided; ggml takes contiguous {arg}")


def _apart(arg: str, x: Tensor) -> None:
    """What ggml asserts of a tensor that it makes a whole view of: its elements would fit into the bytes that they span."""
    _need(x.n_elements // x.dtype.block * x.dtype.nbytes <= x.nbytes, f"{arg}'s elements overlap; ggml takes none that do")


def _safe_ids(ids: Tensor, n_rows: int) -> None:
    """ggml aborts on an id out of range, or reads beyond the tensor, so ids must be known before a run or right by their making."""
    made = ids.root.node
    if made is None:
        return
    x = made.src[0]
    right = made.op.name in ("ARGSORT", "TOP_K") and x is not None and x.ne[0] <= n_rows
    _need(right, "ids are computed in the graph; ggml takes no id that is out of range, so they must be an input or come of ARGSORT or TOP_K")


# Pointwise


@maps("SQR", "SQRT", "EXP", "EXPM1", "LOG", "NEG", "ABS", "SGN", "STEP", "RELU", "SIGMOID", "TANH", "SOFTPLUS", "SILU", "GELU")
def _unary(node: Node) -> Call:
    (a,) = _inputs(node)
    _types("a", a, *((F32, F16) if node.op.name in ("SILU", "GELU") else SINGLE))
    _dense_rows("a", a)
    return Call(node.op.name.lower(), (a,))


@maps("SCALE")
def _scale(node: Node) -> Call:
    (a,) = _inputs(node)
    _types("a", a, F32)
    _packed("a", a)
    return Call("scale_bias", (a, node.params["s"], node.params["b"]))


@maps("CLAMP")
def _clamp(node: Node) -> Call:
    (a,) = _inputs(node)
    _types("a", a, F32, F16)
    _one_row_stride("a", a)
    _apart("a", a)
    return Call("clamp", (a, node.params["lo"], node.params["hi"]))


@maps("CAST")
def _cast(node: Node) -> Call:
    (a,) = _inputs(node)
    to = dtype(node.params["type"])
    known = a.dtype is to or {a.dtype, to} <= set(SINGLE) or {a.dtype, to} == {F32, I32}
    _need(known, f"from {a.dtype.name} to {to.name}; ggml casts f32, f16 and bf16 to each other, f32 to i32 and back")
    return Call("cast", (a, to.gguf_id))


@maps("ADD", "SUB", "MUL", "DIV")
def _binary(node: Node) -> Call:
    a, b = _inputs(node)
    _types("a", a, *SINGLE)
    _types("b", b, *((F32,) if a.dtype is F32 else (a.dtype, F32)))
    _need(node.out.dtype is a.dtype, f"the result is {node.out.dtype.name}; ggml gives a's type, {a.dtype.name}")
    _need(node.out.ne == a.ne, "a is broadcast; ggml repeats b alone")
    _dense_rows("a", a)
    return Call(node.op.name.lower(), (a, b))


@maps("SWIGLU", "REGLU")
def _glu(node: Node) -> Call:
    (a,) = _inputs(node)
    _types("a", a, F32, F16)
    _one_row_stride("a", a)
    return Call(node.op.name.lower() + "_swapped" * bool(node.params["swapped"]), (a,))


@maps("SWIGLU_SPLIT", "REGLU_SPLIT")
def _glu_split(node: Node) -> Call:
    for arg, t in zip("ab", _inputs(node), strict=True):
        _types(arg, t, F32, F16)
        _one_row_stride(arg, t)
    return Call(node.op.name.lower(), _inputs(node))


# Reductions, norms, triangles


@maps("SUM_ROWS", "MEAN")
def _reduce_rows(node: Node) -> Call:
    (x,) = _inputs(node)
    _dense_rows("x", x)
    return Call(node.op.name.lower(), (x,))


@maps("CUMSUM")
def _cumsum(node: Node) -> Call:
    (x,) = _inputs(node)
    p = node.params
    _need(p["dim"] == 0, "dim is not 0; ggml sums along dim 0")
    _need(not p["exclusive"], "exclusive; ggml's sums include the element")
    _need(node.out.dtype is F32, f"the result is {node.out.dtype.name}; ggml gives f32")
    _dense_rows("x", x)
    return Call("cumsum", (x,))


@maps("NORM")
def _norm(node: Node) -> Call:
    return Call("norm", (*_inputs(node), node.params["eps"]))


@maps("RMS_NORM")
def _rms_norm(node: Node) -> Call:
    (x,) = _inputs(node)
    _dense_rows("x", x)
    return Call("rms_norm", (x, node.params["eps"]))


@maps("TRI")
def _tri(node: Node) -> Call:
    (x,) = _inputs(node)
    _types("x", x, F32)
    p = node.params
    _need(tuple(p["dims"]) == (0, 1), "dims are not 0 and 1; ggml's triangle is of dims 0 and 1")
    _need(p["fill"] == 0, "fill is not 0; ggml fills with 0")
    _need(x.ne[0] == x.ne[1], "x is not square; ggml takes square matrices")
    _contiguous("x", x)
    return Call("tri", (x, {"upper_diag": 0, "upper": 1, "lower_diag": 2, "lower": 3}[p["kind"]]))


# Layout


@maps("CONT")
def _cont(node: Node) -> Call:
    return Call("cont", _inputs(node))


@maps("CPY")
def _cpy(node: Node) -> Call:
    _apart("b", node.out)
    return Call("cpy", _inputs(node))


@maps("CONCAT")
def _concat(node: Node) -> Call:
    return Call("concat", (*_inputs(node), node.params["dim"]))


@maps("REPEAT")
def _repeat(node: Node) -> Call:
    (x,) = _inputs(node)
    _types("x", x, *SINGLE, I16, I32)
    _dense_rows("x", x)
    return Call("repeat_4d", (x, *node.out.ne))


@maps("REPEAT_INTERLEAVE")
def _repeat_interleave(node: Node) -> Call:
    raise Refused("ggml has no op that repeats each element in place")


@maps("PAD")
def _pad(node: Node) -> Call:
    (x,) = _inputs(node)
    _types("x", x, F32)
    return Call("pad", (x, *(node.params[k] for k in ("p0", "p1", "p2", "p3"))))


@maps("FILL")
def _fill(node: Node) -> Call:
    (x,) = _inputs(node)
    _types("x", x, F32, F16)
    _contiguous("x", x)
    return Call("fill", (x, node.params["c"]))


@maps("ARANGE")
def _arange(node: Node) -> Call:
    start, stop, step = (np.float32(node.params[k]) for k in ("start", "stop", "step"))
    _need(bool(stop > start), "stop is below start; ggml counts upwards")
    steps = (stop - start) / step if step else math.inf
    same = bool(np.isfinite(steps)) and math.ceil(steps) == node.out.ne[0]
    _need(same, "the number of steps is another one in float32, in which ggml counts")
    return Call("arange", (start, stop, step))


@maps("GET_ROWS")
def _get_rows(node: Node) -> Call:
    x, ids = _inputs(node)
    _dense_rows("x", x)
    _safe_ids(ids, x.ne[1])
    return Call("get_rows", (x, ids), ids, x.ne[1])


@maps("SET_ROWS")
def _set_rows(node: Node) -> Call:
    dst, src, ids = _inputs(node)
    _types("ids", ids, I64, I32)
    for arg, t in (("dst", dst), ("src", src)):
        _dense_rows(arg, t)
    _apart("dst", dst)
    _safe_ids(ids, dst.ne[1])
    return Call("set_rows", (dst, src, ids), ids, dst.ne[1])


# Matmul, attention, choice of the largest


@maps("MUL_MAT")
def _mul_mat(node: Node) -> Call:
    a, b = _inputs(node)
    _types("b", b, *((F32,) if a.dtype is F32 or a.dtype.is_quantized else (F32, a.dtype)))
    turned = any(m > n for m, n in zip(a.ne[2:], b.ne[2:], strict=True))  # ggml repeats its first operand alone: b a^T, turned
    if turned:
        _need(a.dtype is F32 and b.dtype is F32 and a.ne[2] >= b.ne[2] and a.ne[3] >= b.ne[3], "ggml repeats the batches of its first operand alone")
        a, b = b, a
    dense = [t.nb[0] == t.dtype.nbytes and (t is b or t.nb[0] <= t.nb[1]) for t in (a, b)]
    return Call("mul_mat", tuple(t if ok else Copied(t) for t, ok in zip((a, b), dense, strict=True)), turned=turned)


@maps("SOFT_MAX")
def _soft_max(node: Node) -> Call:
    x, mask = node.src
    assert x is not None
    _contiguous("x", x)
    if mask is not None:
        _contiguous("mask", mask)
    return Call("soft_max_ext", (x, mask, node.params["scale"], 0.0))


@maps("FLASH_ATTN_EXT")
def _flash_attn_ext(node: Node) -> Call:
    q, k, v, mask = node.src
    assert q is not None and k is not None and v is not None
    for arg, t in (("q", q), ("k", k), ("v", v)):
        _dense_rows(arg, t)
    if mask is not None:
        _types("mask", mask, F16)
        _contiguous("mask", mask)
    return Call("flash_attn_ext", (q, k, v, mask, *(node.params[n] for n in ("scale", "max_bias", "logit_softcap"))))


@maps("ROPE")
def _rope(node: Node) -> Call:
    x, pos = _inputs(node)
    p = node.params
    _dense_rows("x", x)
    _need(x.ne[0] % 2 == 0, "x has an odd ne0; ggml copies the elements beyond n_dims in pairs")
    if pos.n_elements != x.ne[2]:  # a position for each token of each sequence: ggml takes the sequences as one row of tokens
        _need(x.nb[3] == x.nb[2] * x.ne[2], "x's sequences do not follow each other; ggml takes positions of one row of tokens")
        x = _view(x, (x.ne[0], x.ne[1], x.ne[2] * x.ne[3], 1))
    mode = {"norm": 0, "neox": 2}[p["mode"]]
    no_yarn = (0.0, 1.0, 0.0, 0.0)
    return Call("rope_ext", (x, _view(pos, (pos.n_elements, 1, 1, 1)), None, p["n_dims"], mode, 0, p["freq_base"], p["freq_scale"], *no_yarn))


def _view(x: Tensor, ne: tuple[int, int, int, int]) -> Tensor:
    """x by other dims, its first strides kept."""
    nb = (x.nb[0], x.nb[1], x.nb[2], x.nb[2] * ne[2])
    return Tensor(x.dtype, ne, nb, root=x.root, offs=x.offs)


@maps("ARGSORT")
def _argsort(node: Node) -> Call:
    (x,) = _inputs(node)
    _one_row_stride("x", x)
    return Call("argsort", (x, {"asc": 0, "desc": 1}[node.params["order"]]))


@maps("TOP_K")
def _top_k(node: Node) -> Call:
    (x,) = _inputs(node)
    _one_row_stride("x", x)
    return Call("top_k", (x, node.params["k"]))


# State space


@maps("SSM_CONV")
def _ssm_conv(node: Node) -> Call:
    sx, c = _inputs(node)
    _types("c", c, F32)
    _need(node.out.ne[1] == sx.ne[0] - c.ne[0] + 1, "n_t is beyond the tokens of sx; ggml adds no tokens")
    _packed("c", c)
    return Call("ssm_conv", (sx if sx.is_contiguous else Copied(sx), c))


@maps("SSD_SCAN")
def _ssd_scan(node: Node) -> Call:
    raise Refused("ggml has no chunked state-space product")


@maps("SSM_SCAN")
def _ssm_scan(node: Node) -> Call:
    s, x, dt, decay, b, c, ids = _inputs(node)
    for arg, t in (("s", s), ("dt", dt), ("A", decay), ("ids", ids)):
        if arg == "s":
            _packed(arg, t)
        else:
            _contiguous(arg, t)
    for arg, t in (("x", x), ("dt", dt), ("A", decay), ("B", b), ("C", c), ("ids", ids)):
        _dense_rows(arg, t)
    for arg, t in (("x", x), ("B", b), ("C", c)):
        _need(t.nb[1] == t.ne[0] * t.nb[0], f"{arg} has gaps in dim 1; ggml takes a token's {arg} without gaps")
    _safe_ids(ids, s.ne[3])
    return Call("ssm_scan", (s, x, dt, decay, b, c, ids, 1), ids, s.ne[3])
