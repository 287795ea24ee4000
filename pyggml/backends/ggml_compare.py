"""Real ggml's results beside the definitions of the ops: what may differ, by how much, and why.

Most float32 results agree within the op's own NMSE limit. Where ggml rounds inside an op, the limit is that of its rounding; where it leaves open
what the definition settles (the order of equal values, a row without a maximum), results are brought into one form first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pyggml.cases import Case
from pyggml.dtypes import F32
from pyggml.tensor import Node

Values = list[np.ndarray | None]
Arrays = list[np.ndarray]

ROUNDING, ROUNDING_F16 = 2.0 ** -24, 2.0 ** -11  # of float32 and float16, relative


class Comparison(NamedTuple):
    """Results ready for an NMSE, the limit that it has, and the reason where limit or results are not the op's plain ones."""

    got: Arrays
    want: Arrays
    limit: float
    why: str


def compare(case: Case, values: Values, got: Arrays, want: Arrays) -> Comparison:
    """Results of ggml (`got`) and of another backend for the same inputs. `values` holds the arrays that the inputs were given, of shape ne reversed;
    None for constants and absent inputs."""
    node = case.node()
    limit, why = _limit(node, values, want[0])
    match node.op.name:
        case "SOFT_MAX":
            empty = np.isnan(got[0]) & (want[0] == 0)
            if empty.any():
                got, why = [np.where(empty, 0.0, got[0])], "a row that is -inf throughout is NaN in ggml, 0 here"
        case "ARGSORT" | "TOP_K":
            got, want = _as_values(node, values, got), _as_values(node, values, want)
            why = "ggml leaves open the order of equal values and that of the k largest, and all of a row that holds NaN"
        case "SET_ROWS":
            once = _rows_named_once(node, values)
            if not once.all():
                got, want = [np.where(once, x, 0) for x in got], [np.where(once, x, 0) for x in want]
                why = "of equal ids any row may win in ggml, by its threads"
    return Comparison(got, want, max(limit, case.nmse_limit(node)), why)


def _limit(node: Node, values: Values, want: np.ndarray) -> tuple[float, str]:
    """The NMSE that ggml's own rounding may cause, and what it rounds; 0 where it computes as the definition says."""
    a, b = (*node.src, None, None)[:2]
    match node.op.name:
        case "GELU" if a is not None and a.dtype is F32 and values[0] is not None:
            off = (1.13 * np.abs(values[0]) + np.abs(want)) * ROUNDING_F16  # GELU is nowhere steeper than 1.13
            return _share(off, want), "ggml looks GELU up in a table of float16"
        case "CUMSUM" if a is not None:
            return a.ne[0] * ROUNDING ** 2 / 2, "ggml keeps running sums in float32"
        case "NORM" if values[0] is not None:
            x = values[0]
            off = 2 * ROUNDING * np.mean(x, axis=-1, keepdims=True) / np.sqrt(np.var(x, axis=-1, keepdims=True) + node.params["eps"] + 1e-30)
            return _share(np.broadcast_to(off, x.shape), want), "ggml rounds the mean to float32 before it takes it off"
        case "ROPE" if values[1] is not None:
            far = float(np.max(np.abs(values[1].astype(np.float64))))
            return _rope_limit(node, far), "ggml makes each pair's angle of the last one's, in float32"
        case "FLASH_ATTN_EXT" if any(t is not None and t.dtype is not F32 for t in node.src[1:3]):
            return 5e-4, "ggml rounds q to the kind of k, and adds up values in float16 where v is"  # test-backend-ops' own limit
        case "MUL_MAT" if a is not None and b is not None and b.dtype is F32:
            limit, why = _MUL_MAT_B.get(a.dtype.name, (5e-4, "ggml quantizes b to 8 bits") if a.dtype.is_quantized else (0.0, ""))
            return limit * _cancelled(values, want), why
    return 0.0, ""


# What happens to a float32 b before it is multiplied, by a's type; block types: 8 bits, test-backend-ops' own limit.
_MUL_MAT_B = {"f16": (5e-7, "ggml rounds b to float16"), "bf16": (3e-5, "ggml rounds b to bfloat16")}


def _power(x: np.ndarray) -> float:
    return float(np.sum(np.square(x, dtype=np.float64)))


def _share(off: np.ndarray, want: np.ndarray) -> float:
    """NMSE of results that are off by this much."""
    return _power(off) / (_power(want) or 1.0)


def _cancelled(values: Values, want: np.ndarray) -> float:
    """By how much products of random signs would outweigh the sums: a few results near 0 show b's rounding many times over."""
    a_square = 1 / 3 if values[0] is None else float(np.mean(np.square(values[0])))  # blocks of cases hold about [-1, 1]
    b = values[1]
    assert b is not None
    products = want.size * b.shape[-1] * a_square * float(np.mean(np.square(b)))
    return float(max(1.0, products / (_power(want) or 1.0)))


def _rope_limit(node: Node, far: float) -> float:
    """The angle of pair i, pos freq_base^(-2i / n_dims), is off by i roundings. That is largest at pair n_dims / (2 ln freq_base)."""
    pairs, grow = node.params["n_dims"] / 2, np.log(max(node.params["freq_base"], 1.0))
    steps = pairs if grow * np.e < 1 else pairs / (np.e * grow)
    off = ROUNDING * far * abs(node.params["freq_scale"]) * (0.5 + 0.6 * steps)
    return float(off * off)


def _as_values(node: Node, values: Values, result: Arrays) -> Arrays:
    """What positions point at, the k largest in order of value; rows that hold NaN are left out."""
    x = values[0]
    assert x is not None
    x = x.astype(np.float32).reshape(node.src[0].ne[::-1])  # type: ignore[union-attr]
    at = np.asarray(result[0], np.int64)
    found = np.take_along_axis(x, np.clip(at, 0, x.shape[-1] - 1), axis=-1)
    found[(at < 0) | (at >= x.shape[-1])] = np.nan
    if node.op.name == "TOP_K":
        found = np.sort(found, axis=-1)
    return [np.where(np.isnan(x).any(axis=-1, keepdims=True), 0.0, found)]


def _rows_named_once(node: Node, values: Values) -> np.ndarray:
    """Mask over dst of the rows that no two ids name."""
    dst, ids = node.src[0], values[2]
    assert dst is not None and ids is not None
    _, n_rows, c1, c2 = dst.ne
    mask = np.ones((c2, c1, n_rows, 1), bool)
    for j, i in np.ndindex(c2, c1):
        named = ids[0, j % ids.shape[1], i % ids.shape[2]].astype(np.int64)
        mask[j, i, :, 0] = np.bincount(named, minlength=n_rows) < 2
    return mask
