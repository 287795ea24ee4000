"""Block types: NumPy and CPU dequantization against the gguf package, and blocks worked out by hand."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import gguf
import numpy as np
import pytest

from pyggml.cpu.compile import HEADER_WORDS, KernelSpec, kernels_for
from pyggml.cpu.level import LEVELS, host_level
from pyggml.cpu.simd import at, ptr
from pyggml.dtypes import DType, dtype, f32_to_bf16
from pyggml.errors import DTypeError
from pyggml.quants import DEQUANTIZE, dequantize
from pyggml.quants.cpu import DEQUANT_ROW

GGUF_TYPE = {t.name: t.name[:-2].upper() + t.name[-2:] for t in DEQUANTIZE}
LOWER_LEVELS = [v for v in ("portable", "avx2") if LEVELS.index(v) < LEVELS.index(host_level())]


def rows_kernel(src: Any, dst: Any, n: Any, src_row: Any, dst_row: Any, i0: Any, i1: Any) -> Any:
    """Rows i0 to i1 through the bound helper."""
    for i in range(i0, i1):
        dequant(at(ptr(src), i * src_row), at(ptr(dst), i * dst_row), n)  # type: ignore[name-defined]  # noqa: F821


@functools.cache
def entries(level: str | None) -> dict[str, int]:
    """Entries of all types, compiled together."""
    specs = [KernelSpec(rows_kernel, {"dequant": h}, 0, "iiiii") for h in DEQUANT_ROW.values()]
    return dict(zip(DEQUANT_ROW, kernels_for(level).addresses(specs), strict=True))


def dequantize_rows(raw: np.ndarray, dt: DType, level: str | None = None) -> np.ndarray:
    """Rows [n_rows, row bytes] through the CPU helper of the type, one float past each row's end guarded."""
    n = raw.shape[1] // dt.nbytes * dt.block
    out = np.full((len(raw), n + 1), 7.0, np.float32)
    record = np.zeros(HEADER_WORDS + 5, np.int64)
    record[:2] = len(raw), 1
    record[HEADER_WORDS:] = raw.ctypes.data, out.ctypes.data, n, raw.strides[0], out.strides[0]
    slot = np.zeros(8, np.int64)
    call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(entries(level)[dt.name])
    call(slot.ctypes.data, slot.ctypes.data, record.ctypes.data, 0, 1)
    assert (out[:, n] == 7.0).all()
    return np.ascontiguousarray(out[:, :n])


def random_rows(dt: DType, n_rows: int, n_blocks: int) -> np.ndarray:
    """Any bytes at all: scales come out as NaN, infinite, subnormal and ordinary."""
    return np.random.default_rng(dt.gguf_id).integers(0, 256, (n_rows, n_blocks * dt.nbytes), dtype=np.uint8)


def same_floats(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, but any NaN equals any NaN."""
    return a.dtype == b.dtype and np.array_equal(np.where(np.isnan(a), np.nan, a).view(np.uint32), np.where(np.isnan(b), np.nan, b).view(np.uint32))


@pytest.mark.parametrize("name", [t.name for t in DEQUANTIZE])
def test_dequantize_equals_gguf(name: str) -> None:
    raw = random_rows(dtype(name), 64, 3)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[GGUF_TYPE[name]])
    assert same_floats(dequantize(raw, dtype(name)), want)


@pytest.mark.parametrize("name", list(DEQUANT_ROW))
def test_cpu_rows_equal_numpy(name: str) -> None:
    for n_blocks in (1, 2, 5):
        raw = random_rows(dtype(name), 33, n_blocks)
        assert same_floats(dequantize_rows(raw, dtype(name)), dequantize(raw, dtype(name)))


@pytest.mark.parametrize("level", LOWER_LEVELS)
def test_cpu_rows_equal_numpy_at_level(level: str) -> None:
    for name in DEQUANT_ROW:
        raw = random_rows(dtype(name), 9, 2)
        assert same_floats(dequantize_rows(raw, dtype(name), level), dequantize(raw, dtype(name)))


def test_blocks_by_hand() -> None:
    half = np.array([0.5], "<f2").view(np.uint8)
    q8 = np.concatenate([half, np.arange(-16, 16, dtype=np.int8).view(np.uint8)])
    assert np.array_equal(dequantize(q8, dtype("q8_0")), np.arange(-16, 16) * 0.5)
    q4 = np.concatenate([half, np.full(16, 0xF0, np.uint8)])
    assert np.array_equal(dequantize(q4, dtype("q4_0")), [-4.0] * 16 + [3.5] * 16)
    # Sub-block 5 of a Q4_K block: scale 0b100001, min 0b010010, their low four bits in byte 9 and their top two in bytes 1 and 5.
    packed = np.zeros(12, np.uint8)
    packed[9], packed[1], packed[5] = 0x21, 0b10 << 6, 0b01 << 6
    q4k = np.concatenate([half, half, packed, np.full(128, 0x30, np.uint8)])
    want = np.zeros(256)
    want[160:192] = 0.5 * 0b100001 * 3 - 0.5 * 0b010010
    assert np.array_equal(dequantize(q4k, dtype("q4_K")), want)


def test_every_type_has_a_helper() -> None:
    assert {t.name for t in DEQUANTIZE} | {"f32", "f16", "bf16"} == set(DEQUANT_ROW)


def test_plain_rows() -> None:
    x = np.array([[1.0, -2.5, 3.140625, np.inf, 0.0, -0.0, 1e-40, np.nan] * 4], np.float32)
    assert same_floats(dequantize(f32_to_bf16(x).view(np.uint8), dtype("bf16")), dequantize_rows(f32_to_bf16(x).view(np.uint8), dtype("bf16")))
    assert same_floats(dequantize_rows(x.view(np.uint8), dtype("f32")), x)


def test_unknown_type_is_refused() -> None:
    with pytest.raises(DTypeError, match="type iq2_s has no dequantization; known: q8_0"):
        dequantize(np.zeros(82, np.uint8), dtype("iq2_s"))


def test_fault_96_only_dim_0_must_be_whole_blocks() -> None:
    assert dtype("q8_0").row_bytes(2688) == 84 * 34
    with pytest.raises(DTypeError, match="q4_K: a row of 2688 elements is not a multiple of its block of 256"):
        dtype("q4_K").row_bytes(2688)
