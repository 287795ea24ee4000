"""Q2_K to Q6_K: super-blocks of 256 weights.

Q4_K, 144 bytes: d, dmin (f16), 12 bytes of eight 6-bit scales and mins, 128 bytes of nibbles. Q5_K, 176: d, dmin, the
same 12 bytes, 32 bytes of fifth bits, 128 of nibbles. In both, weights 64 j to 64 j + 31 are the low nibbles of bytes
32 j to 32 j + 31, the next 32 the high ones; w = d scale q - dmin min, one scale and min per 32 weights.
Q6_K, 210 bytes: 128 low nibbles, 64 of upper bit pairs, 16 int8 scales (one per 16 weights), d (f16); w = d scale (q - 32).
Q2_K, 84 bytes: 16 bytes of a 4-bit scale (low) and min each, one per 16 weights, 64 bytes of bit pairs, d, dmin; w = d scale q - dmin min.
Q3_K, 110 bytes: 32 bytes of third bits, 64 of bit pairs, 12 of sixteen 6-bit scales, d; w = d (scale - 32) (q - 4).
In both, bits 2 i of bytes 32 h to 32 h + 31 are weights 128 h + 32 i and on; third bit 4 h + i of byte j belongs to weight 128 h + 32 i + j.
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


def _pairs(packed: np.ndarray) -> np.ndarray:
    """[n, 64] bytes -> [n, 2, 4, 32] bit pairs."""
    return packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3


def dequantize_q2_k(blocks: np.ndarray) -> np.ndarray:
    """[n, 84] bytes -> [n, 256] float32."""
    q = _pairs(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    d, m = scales(blocks, 80) * (blocks[:, :16] & 15), scales(blocks, 82) * (blocks[:, :16] >> 4)
    w: np.ndarray = d[:, :, None] * q - m[:, :, None]
    return w.reshape(-1, 256)


def dequantize_q3_k(blocks: np.ndarray) -> np.ndarray:
    """[n, 110] bytes -> [n, 256] float32."""
    third = blocks[:, None, None, :32] >> np.arange(8, dtype=np.uint8).reshape(2, 4, 1) & 1
    q = (_pairs(blocks[:, 32:96]) | (third << 2)).astype(np.int8) - np.int8(4)
    low, two = blocks[:, 96:104], blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    sc = (np.concatenate([low & 15, low >> 4], axis=1) | (two.reshape(-1, 16) << 4)).astype(np.int8) - np.int8(32)
    return ((scales(blocks, 108) * sc)[:, :, None] * q.reshape(-1, 16, 16)).reshape(-1, 256)
