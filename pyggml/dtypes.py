"""Element and block types: one table for the engine and for GGUF.

A block type stores `block` elements in `nbytes` bytes; plain types have block 1. `np` is the NumPy type that holds
one element (or, for BF16, its raw bits); it is None for types with blocks of more than one element, which are
handled as bytes. Ids and block sizes are those of the GGUF format.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml.errors import DTypeError


@dataclass(frozen=True, slots=True)
class DType:
    """One type: `name` as printed in op cases (lower case), `gguf_id`, `block` elements in `nbytes` bytes."""

    name: str
    gguf_id: int
    block: int
    nbytes: int
    np: np.dtype | None

    def __repr__(self) -> str:
        return self.name

    @property
    def is_quantized(self) -> bool:
        """True for block types, whose rows cannot be strided in dim 0."""
        return self.block > 1

    @property
    def is_float(self) -> bool:
        """True for f64, f32, f16 and bf16."""
        return self.name in ("f64", "f32", "f16", "bf16")

    @property
    def is_int(self) -> bool:
        """True for i8, i16, i32 and i64."""
        return self.name in ("i8", "i16", "i32", "i64")

    def row_bytes(self, n: int) -> int:
        """Bytes of a contiguous row of `n` elements; DTypeError when n is no multiple of the block."""
        if n % self.block:
            raise DTypeError(f"{self.name}: a row of {n} elements is not a multiple of its block of {self.block}")
        return n // self.block * self.nbytes


def _plain(name: str, gguf_id: int, np_name: str) -> DType:
    dt = np.dtype(np_name)
    return DType(name, gguf_id, 1, dt.itemsize, dt)


def _blocks(name: str, gguf_id: int, block: int, nbytes: int) -> DType:
    return DType(name, gguf_id, block, nbytes, None)


F32 = _plain("f32", 0, "<f4")
F16 = _plain("f16", 1, "<f2")
I8 = _plain("i8", 24, "<i1")
I16 = _plain("i16", 25, "<i2")
I32 = _plain("i32", 26, "<i4")
I64 = _plain("i64", 27, "<i8")
F64 = _plain("f64", 28, "<f8")
BF16 = _plain("bf16", 30, "<u2")
Q4_0 = _blocks("q4_0", 2, 32, 18)
Q4_1 = _blocks("q4_1", 3, 32, 20)
Q5_0 = _blocks("q5_0", 6, 32, 22)
Q5_1 = _blocks("q5_1", 7, 32, 24)
Q8_0 = _blocks("q8_0", 8, 32, 34)
Q2_K = _blocks("q2_K", 10, 256, 84)
Q3_K = _blocks("q3_K", 11, 256, 110)
Q4_K = _blocks("q4_K", 12, 256, 144)
Q5_K = _blocks("q5_K", 13, 256, 176)
Q6_K = _blocks("q6_K", 14, 256, 210)

ALL: tuple[DType, ...] = (
    F32, F16, BF16, F64, I8, I16, I32, I64, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K,
    _blocks("q8_1", 9, 32, 36), _blocks("q8_K", 15, 256, 292),
    _blocks("iq2_xxs", 16, 256, 66), _blocks("iq2_xs", 17, 256, 74), _blocks("iq3_xxs", 18, 256, 98),
    _blocks("iq1_s", 19, 256, 50), _blocks("iq4_nl", 20, 32, 18), _blocks("iq3_s", 21, 256, 110),
    _blocks("iq2_s", 22, 256, 82), _blocks("iq4_xs", 23, 256, 136), _blocks("iq1_m", 29, 256, 56),
    _blocks("tq1_0", 34, 256, 54), _blocks("tq2_0", 35, 256, 66), _blocks("mxfp4", 39, 32, 17), _blocks("nvfp4", 40, 64, 36),
    _blocks("q1_0", 41, 128, 18),
)

BY_NAME: dict[str, DType] = {t.name.lower(): t for t in ALL}
BY_GGUF_ID: dict[int, DType] = {t.gguf_id: t for t in ALL}


def dtype(name: str | DType) -> DType:
    """The type of that name (case does not matter).

    >>> dtype("Q8_0").row_bytes(64)
    68
    """
    if isinstance(name, DType):
        return name
    found = BY_NAME.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise DTypeError(f"unknown type {name!r}; known: {', '.join(sorted(BY_NAME))}")
    return found


def from_numpy(dt: np.dtype) -> DType:
    """The type that holds NumPy arrays of `dt`; bool and unsigned integers have none."""
    for t in ALL:
        if t.np == dt and t is not BF16:
            return t
    raise DTypeError(f"no type for NumPy arrays of {dt}; known: f64 f32 f16 i8 i16 i32 i64 (bf16 from uint16 bits by name)")


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """float32 values of BF16 bits (uint16); exact."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """BF16 bits (uint16) of float32 values, rounded to nearest even; NaN stays NaN (quiet)."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (u + (np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    nan = (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, (u >> np.uint32(16)) | np.uint32(64), rounded).astype(np.uint16)
