"""Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1: blocks of 32 weights with one float16 scale d, and in the _1 types one float16 offset m after it.

Q8_0, 34 bytes: d, 32 x int8; w = d q.  Q4_0, 18 bytes: d, 16 bytes; w = d (q - 8), low nibbles are weights 0 to 15, high nibbles 16 to 31.
Q4_1, 20: d, m, 16 bytes; w = d q + m.  Q5_0, 22, and Q5_1, 24, have 4 bytes before the nibbles, bit i of which is the fifth bit of weight i:
w = d (q - 16), or d q + m.
"""

from __future__ import annotations

import numpy as np

Q8_LEAST = 2.0 ** -100  # blocks without a larger value are zero: their scale would be in float16


def scales(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at:at + 2]).view("<f2").astype(np.float32)


def dequantize_q8_0(blocks: np.ndarray) -> np.ndarray:
    """[n, 34] bytes -> [n, 32] float32."""
    return scales(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def quantize_q8_0(values: np.ndarray) -> np.ndarray:
    """[n, 32] float32 -> [n, 34] bytes: d = largest / 127, q the nearest whole number to w / d, of two the even one. A block with a value that is
    not finite gets the scale NaN. Source: ggml's quantize_row_q8_0."""
    top = np.abs(values).max(axis=-1, keepdims=True)
    usable = np.isfinite(top) & (top > np.float32(Q8_LEAST))
    d = np.where(usable, top / np.float32(127), np.where(np.isfinite(top), np.float32(0), np.float32(np.nan)))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        q = np.where(usable, np.rint(values * (np.float32(1) / d)), np.float32(0)).astype(np.int8)
        return np.concatenate([d.astype("<f2").view(np.uint8), q.view(np.uint8)], axis=-1)


def _nibbles(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.concatenate([blocks[:, at:] & 15, blocks[:, at:] >> 4], axis=1)


def _five_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    return _nibbles(blocks, at + 4) | (np.unpackbits(blocks[:, at:at + 4], axis=1, bitorder="little") << 4)


def dequantize_q4_0(blocks: np.ndarray) -> np.ndarray:
    """[n, 18] bytes -> [n, 32] float32."""
    return scales(blocks, 0) * (_nibbles(blocks, 2).astype(np.int8) - np.int8(8))


def dequantize_q4_1(blocks: np.ndarray) -> np.ndarray:
    """[n, 20] bytes -> [n, 32] float32."""
    return scales(blocks, 0) * _nibbles(blocks, 4) + scales(blocks, 2)


def dequantize_q5_0(blocks: np.ndarray) -> np.ndarray:
    """[n, 22] bytes -> [n, 32] float32."""
    return scales(blocks, 0) * (_five_bits(blocks, 2).astype(np.int8) - np.int8(16))


def dequantize_q5_1(blocks: np.ndarray) -> np.ndarray:
    """[n, 24] bytes -> [n, 32] float32."""
    return scales(blocks, 0) * _five_bits(blocks, 4) + scales(blocks, 2)
