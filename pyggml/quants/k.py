"""Q4_K, Q5_K, Q6_K: super-blocks of 256 weights.

Q4_K, 144 bytes: d, dmin (f16), 12 bytes of eight 6-bit scales and mins, 128 bytes of nibbles. Q5_K, 176: d, dmin, the
same 12 bytes, 32 bytes of fifth bits, 128 of nibbles. In both, weights 64 j to 64 j + 31 are the low nibbles of bytes
32 j to 32 j + 31, the next 32 the high ones; w = d scale q - dmin min, one scale and min per 32 weights.
Q6_K, 210 bytes: 128 low nibbles, 64 of upper bit pairs, 16 int8 scales (one per 16 weights), d (f16); w = d scale (q - 32).
"""

from __future__ import annotations

import numpy as np

from pyggml.quants.legacy import scales


def scale_mins(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and mins from 12 bytes: entries 0-3 are the low six bits of bytes 0-3 (4-7 for mins); entries 4-7
    take their low four bits from bytes 8-11 and their top two from the top bits of bytes 0-3 (4-7)."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    sc = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
    mn = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
    return sc.astype(np.float32), mn.astype(np.float32)


def _affine(blocks: np.ndarray, q: np.ndarray) -> np.ndarray:
    sc, mn = scale_mins(blocks[:, 4:16])
    d, dmin = scales(blocks, 0), scales(blocks, 2)
    w: np.ndarray = (d * sc)[:, :, None] * q.reshape(-1, 8, 32).astype(np.float32) - (dmin * mn)[:, :, None]
    return w.reshape(-1, 256)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    groups = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([groups & 15, groups >> 4], axis=2).reshape(-1, 256)


def dequantize_q4_k(blocks: np.ndarray) -> np.ndarray:
    """[n, 144] bytes -> [n, 256] float32."""
    return _affine(blocks, _nibbles(blocks[:, 16:144]))


def dequantize_q5_k(blocks: np.ndarray) -> np.ndarray:
    """[n, 176] bytes -> [n, 256] float32."""
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    return _affine(blocks, _nibbles(blocks[:, 48:176]) | (high.reshape(-1, 256) << 4))


def dequantize_q6_k(blocks: np.ndarray) -> np.ndarray:
    """[n, 210] bytes -> [n, 256] float32."""
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    parts = [(low[:, :, 32 * (i & 1):32 * (i & 1) + 32] >> (4 * (i >> 1)) & 15) | ((high >> (2 * i) & 3) << 4) for i in range(4)]
    q = np.stack(parts, axis=2).reshape(-1, 16, 16).astype(np.int8) - np.int8(32)
    sc = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return ((scales(blocks, 208) * sc)[:, :, None] * q.astype(np.float32)).reshape(-1, 256)
