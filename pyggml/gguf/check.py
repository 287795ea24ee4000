"""Verifying a GGUF file beyond what reading demands: padding, gaps, trailing bytes, text, and numbers that are not finite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from pyggml.errors import FormatError
from pyggml.gguf.format import TensorInfo, pad_to, quote
from pyggml.gguf.reader import GGUFFile, read_gguf
from pyggml.gguf.values import StringArray

_STEP = 1 << 22  # bytes looked at in one go

# The bits of a float type: unsigned type, and the exponent's mask, which is the magnitude of infinity; above it lie the NaNs.
_BITS: dict[str, tuple[np.dtype[np.unsignedinteger[Any]], int]] = {
    "f16": (np.dtype("<u2"), 0x7C00),
    "bf16": (np.dtype("<u2"), 0x7F80),
    "f32": (np.dtype("<u4"), 0x7F80_0000),
    "f64": (np.dtype("<u8"), 0x7FF0_0000_0000_0000),
}

# Where the blocks of a type keep half floats (scales and minima): byte offsets in the block, as in the structs of
# ggml-common.h. Not here: types whose scales are packed into other bits (iq1_m, mxfp4, nvfp4), and those that only hold
# activations and are never stored (q8_1, q8_K).
_SCALES: dict[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_K": (80, 82),
    "q3_K": (108,),
    "q4_K": (0, 2),
    "q5_K": (0, 2),
    "q6_K": (208,),
    "iq1_s": (0,),
    "iq2_xxs": (0,),
    "iq2_xs": (0,),
    "iq2_s": (0,),
    "iq3_xxs": (0,),
    "iq3_s": (0,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "q1_0": (0,),
}


def check_gguf(path: str | os.PathLike[str]) -> list[str]:
    """Reads a whole file and returns one line for each thing that is wrong or odd; an empty list means a clean file.

    A fault of the header ends the check, as nothing after it can be trusted. Else: padding that is not zero, gaps between
    tensors and data in another order than the header's (ggml's reader takes neither), bytes missing or left over at the
    end, text that is not UTF-8, and NaN and infinity in float tensors and in the scales of block types.

    >>> check_gguf("no-such-file.gguf")
    ['no-such-file.gguf: cannot be read: No such file or directory']
    """
    try:
        file = read_gguf(path)
    except FormatError as err:
        return [str(err)]
    with file:
        numbers = [line for tensor in file.tensors.values() for line in _numbers(file, tensor)]
        return [*_text(file), *_layout(file), *numbers]


def _text(file: GGUFFile) -> Iterator[str]:
    for key, value in file.metadata.items():
        if isinstance(value, (str, StringArray)):
            strings = [value] if isinstance(value, str) else value
            bad = sum(any("\udc80" <= letter <= "\udcff" for letter in text) for text in strings if not text.isascii())
            if bad:
                yield f"key {quote(key)}: {bad} of {len(strings)} strings not UTF-8"


def _layout(file: GGUFFile) -> Iterator[str]:
    placed = sorted(file.tensors.values(), key=lambda t: t.offset)
    if [t.name for t in placed] != list(file.tensors):
        yield "tensors: data in another order than the header's, which ggml's reader refuses"
    expected = file.data_offset  # where the next tensor starts when there is no gap
    yield from _padding(file, "header", file.header_size, expected)
    for tensor in placed:
        if tensor.offset > expected:
            yield f"tensor {quote(tensor.name)}: a gap of {tensor.offset - expected} bytes before it, which ggml's reader refuses"
        end = tensor.offset + tensor.nbytes
        expected = pad_to(end, file.alignment)
        yield from _padding(file, f"tensor {quote(tensor.name)}", end, expected)
    if file.size > expected:
        yield f"end of file: {file.size - expected} bytes after the last tensor"
    elif placed and file.size < expected:
        yield f"end of file: {expected - file.size} bytes of padding missing after the last tensor"


def _padding(file: GGUFFile, after: str, start: int, end: int) -> Iterator[str]:
    n = sum(int(np.count_nonzero(file.bytes_at(at, min(_STEP, end - at)))) for at in range(start, end, _STEP))
    if n:
        yield f"{after}: {n} of the {end - start} padding bytes after it not zero"


def _numbers(file: GGUFFile, tensor: TensorInfo) -> Iterator[str]:
    name = tensor.dtype.name
    columns = (0,) if tensor.dtype.is_float else _SCALES.get(name, ())
    bits, infinity = _BITS[name if tensor.dtype.is_float else "f16"]
    raw = file.raw(tensor.name).reshape(-1, tensor.dtype.nbytes)  # [blocks, bytes of a block]
    rows = _STEP // tensor.dtype.nbytes
    nan = infinite = 0
    for column in columns:
        for at in range(0, len(raw), rows):
            stored = raw[at : at + rows, column : column + bits.itemsize].copy().view(bits)
            magnitude = stored & bits.type((1 << 8 * bits.itemsize - 1) - 1)  # all but the sign
            nan += int(np.count_nonzero(magnitude > infinity))
            infinite += int(np.count_nonzero(magnitude == infinity))
    if nan or infinite:
        what = "values" if tensor.dtype.is_float else "scales"
        yield f"tensor {quote(tensor.name)}: {nan} NaN and {infinite} infinite of {len(raw) * len(columns)} {what}"
