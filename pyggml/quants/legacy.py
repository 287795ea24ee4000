"""Q8_0 and Q4_0: blocks of 32 weights with one float16 scale.

Q8_0, 34 bytes: d (f16), 32 x int8; w = d q.  Q4_0, 18 bytes: d (f16), 16 bytes; w = d (q - 8), low nibbles are weights
0 to 15, high nibbles 16 to 31.
"""

from __future__ import annotations

import numpy as np


def scales(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at:at + 2]).view("<f2").astype(np.float32)


def dequantize_q8_0(blocks: np.ndarray) -> np.ndarray:
    """[n, 34] bytes -> [n, 32] float32."""
    return scales(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def dequantize_q4_0(blocks: np.ndarray) -> np.ndarray:
    """[n, 18] bytes -> [n, 32] float32."""
    q = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).astype(np.int8) - np.int8(8)
    return scales(blocks, 0) * q.astype(np.float32)
