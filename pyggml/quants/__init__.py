"""Block types in NumPy: `dequantize(raw, dtype)` for any type that the engine computes with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pyggml.dtypes import BF16, F16, F32, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, DType, bf16_to_f32
from pyggml.errors import DTypeError
from pyggml.quants import k, legacy

DEQUANTIZE: dict[DType, Callable[[np.ndarray], np.ndarray]] = {
    Q8_0: legacy.dequantize_q8_0, Q4_0: legacy.dequantize_q4_0, Q4_1: legacy.dequantize_q4_1, Q5_0: legacy.dequantize_q5_0, Q5_1: legacy.dequantize_q5_1,
    Q2_K: k.dequantize_q2_k, Q3_K: k.dequantize_q3_k, Q4_K: k.dequantize_q4_k, Q5_K: k.dequantize_q5_k, Q6_K: k.dequantize_q6_k,
}
WEIGHT_TYPES: tuple[DType, ...] = (F32, F16, BF16, *DEQUANTIZE)
"""Types that weights may be stored in: what MUL_MAT and GET_ROWS turn into float32."""


QUANTIZE: dict[DType, Callable[[np.ndarray], np.ndarray]] = {Q8_0: legacy.quantize_q8_0}


def quantize(values: np.ndarray, dt: DType) -> np.ndarray:
    """Stored bytes uint8 [..., row bytes] of float32 values [..., elements], rows of whole blocks. DTypeError for types that nothing writes."""
    fn = QUANTIZE.get(dt)
    if fn is None:
        raise DTypeError(f"type {dt.name} is not written; known: {', '.join(t.name for t in QUANTIZE)}")
    return fn(np.ascontiguousarray(values, np.float32).reshape(-1, dt.block)).reshape(*values.shape[:-1], -1)


def dequantize(raw: np.ndarray, dt: DType) -> np.ndarray:
    """float32 values of stored bytes: `raw` is uint8 [..., row bytes], the result [..., elements]. DTypeError for types
    that the engine does not compute with."""
    if dt is BF16:
        return bf16_to_f32(np.ascontiguousarray(raw).view(np.uint16))
    if dt.np is not None:
        return np.ascontiguousarray(raw).view(dt.np).astype(np.float32)
    fn = DEQUANTIZE.get(dt)
    if fn is None:
        raise DTypeError(f"type {dt.name} has no dequantization; known: {', '.join(t.name for t in DEQUANTIZE)}")
    blocks = np.ascontiguousarray(raw).reshape(-1, dt.nbytes)
    with np.errstate(invalid="ignore", over="ignore"):  # a block's scale may be infinite or NaN: so are its weights then
        return fn(blocks).reshape(*raw.shape[:-1], -1)
