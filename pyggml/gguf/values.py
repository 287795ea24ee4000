"""Metadata values: how arrays of strings are kept after reading, and how Python values become bytes.

Strings of a file are bytes that should be, but need not be, UTF-8: a byte that is not is kept as a lone surrogate
(Python's `surrogateescape`), so that text.encode("utf-8", "surrogateescape") gives the file's bytes back.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from pyggml.gguf.format import NUMPY_TYPES, GGUFValueType, KeyType, fault, quote

T = GGUFValueType
U64 = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")
_BY_NUMPY = {dt: t for t, dt in NUMPY_TYPES.items()}
_NUMPY_SCALARS = (np.number, np.bool_)
_LEGAL = "a bool, int, float, str, bytes, a list of one of these, or a NumPy array of one dim"


class StringArray(Sequence[str]):
    """A file's array of strings: a sequence that decodes itself when it is first looked into.

    A vocabulary has 100,000 strings and more, and most readers of a header never look at them. Equal to any sequence
    that holds the same strings; a slice is a list.

    >>> StringArray(b"\\x02\\0\\0\\0\\0\\0\\0\\0ab\\0\\0\\0\\0\\0\\0\\0\\0", 2)[:]
    ['ab', '']
    """

    __slots__ = ("_count", "_items", "_packed")

    def __init__(self, packed: bytes, count: int) -> None:
        """`packed`: `count` strings as they stand in a file, their lengths already checked."""
        self._packed = packed
        self._count = count
        self._items: list[str] | None = None

    def _walk(self) -> Iterator[str]:
        packed, length, pos = self._packed, U64.unpack_from, 0
        for _ in range(self._count):
            start = pos + 8
            pos = start + length(packed, pos)[0]
            yield packed[start:pos].decode("utf-8", "surrogateescape")

    def _decoded(self) -> list[str]:
        if self._items is None:
            self._items, self._packed = list(self._walk()), b""
        return self._items

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if self._items is None and isinstance(index, slice) and index.start is index.step is None and index.stop is not None and index.stop >= 0:
            return list(islice(self._walk(), index.stop))  # why: a look at the first few, as `pyggml info` takes, decodes no others
        return self._decoded()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) or not isinstance(other, Sequence):
            return NotImplemented
        return len(other) == self._count and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._count} strings>"


Value: TypeAlias = "str | int | float | bool | NDArray[Any] | StringArray"
"""A value as the reader gives it: scalars as Python's own types, arrays of numbers or bools as read-only NumPy arrays of
exactly the file's type, arrays of strings as StringArray."""


def pack_string(where: str, text: str | bytes) -> bytes:
    """The bytes of a string as GGUF stores it, length first."""
    if isinstance(text, str):
        try:
            text = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as err:
            found = f"the lone surrogate {text[err.start]!r} in a string"
            raise fault(where, found, "text, or U+DC80 to U+DCFF for bytes that are not UTF-8") from None
    return U64.pack(len(text)) + text


def pack_value(where: str, value: object, key_type: KeyType | None = None) -> tuple[KeyType, bytes]:
    """The type of `value`, and its bytes as they follow the type in a file.

    Without `key_type` it is inferred, as `GGUFWriter.add` tells.
    """
    if isinstance(value, (list, tuple, StringArray)):
        items: Any = [_plain(v) for v in value]
        key_type = key_type or KeyType(T.ARR, _list_type(where, items))
    elif isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise fault(where, f"an array of {value.ndim} dims", "one dim")
        items = value
        key_type = key_type or KeyType(T.ARR, _numpy_type(where, value.dtype))
    else:
        key_type = key_type or KeyType(_scalar_type(where, value))
        if key_type.item is not None:
            raise fault(where, f"one value, {_show(value)}", f"a list or NumPy array for type {key_type}")
        return key_type, _pack_items(where, [_plain(value)], key_type.value)
    if key_type.item is None:
        raise fault(where, f"an array of {len(items)}", f"one value for type {key_type}")
    return key_type, _ARRAY_HEAD.pack(key_type.item, len(items)) + _pack_items(where, items, key_type.item)


def _plain(value: object) -> object:
    """A NumPy scalar as Python's own; anything else as it is."""
    return value.item() if isinstance(value, _NUMPY_SCALARS) else value


def _show(value: object) -> str:
    if isinstance(value, (str, bytes)):
        return quote(value)
    return f"{' '.join(reprlib.repr(value).split())} ({type(value).__name__})"


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"integers from {low} to {high}"


def _numpy_type(where: str, dt: np.dtype) -> GGUFValueType:
    found = _BY_NUMPY.get(dt.newbyteorder("<"))
    if found is None:
        raise fault(where, f"NumPy type {dt}", "bool, f32, f64 and the integer types")
    return found


def _int_type(where: str, low: int, high: int, order: tuple[GGUFValueType, ...]) -> GGUFValueType:
    for t in order:
        if _bounds(t)[0] <= low and high <= _bounds(t)[1]:
            return t
    raise fault(where, _range(low, high), "what u64 or i64 holds")


def _scalar_type(where: str, value: object) -> GGUFValueType:
    if isinstance(value, _NUMPY_SCALARS):
        return _numpy_type(where, value.dtype)
    if isinstance(value, bool):
        return T.BOOL
    if isinstance(value, int):
        return _int_type(where, value, value, (T.U32, T.I32, T.U64, T.I64))
    if isinstance(value, float):
        return T.F32
    if isinstance(value, (str, bytes)):
        return T.STR
    raise fault(where, _show(value), _LEGAL)


def _list_type(where: str, items: list[Any]) -> GGUFValueType:
    if all(isinstance(v, (str, bytes)) for v in items):
        return T.STR
    kinds = {_kind(v) for v in items}
    if kinds == {"b"}:
        return T.BOOL
    if kinds == {"i"}:
        return _int_type(where, min(items), max(items), (T.I32, T.U32, T.I64, T.U64))
    if kinds <= {"i", "f"}:
        return T.F32
    names = ", ".join(sorted({type(v).__name__ for v in items}))
    raise fault(where, f"a list of {names}", "a list of str or bytes, of bool, or of int and float")


def _bounds(t: GGUFValueType) -> tuple[int, int]:
    info = np.iinfo(NUMPY_TYPES[t])
    return int(info.min), int(info.max)


def _kind(value: object) -> str:
    """The NumPy kind letter of a Python value: b, i or f, and ? for what no number type holds."""
    return "b" if isinstance(value, bool) else "i" if isinstance(value, int) else "f" if isinstance(value, float) else "?"


def _pack_items(where: str, items: Sequence[Any] | NDArray[Any], t: GGUFValueType) -> bytes:
    """Elements of one type, back to back; each must be of its kind and in its range."""
    if t is T.STR:
        wrong = [v for v in items if not isinstance(v, (str, bytes))]
        if wrong:
            raise fault(where, _show(wrong[0]), "str or bytes for type str")
        return b"".join([pack_string(where, v) for v in items])
    target = NUMPY_TYPES[t]
    kinds = {items.dtype.kind.replace("u", "i")} if isinstance(items, np.ndarray) else {_kind(v) for v in items}
    if not kinds <= {"b": {"b"}, "f": {"i", "f"}}.get(target.kind, {"i"}):
        raise fault(where, _show(items[0] if len(items) == 1 else items), f"what type {t} holds")
    if target.kind in "iu" and len(items):
        low, high = (int(items.min()), int(items.max())) if isinstance(items, np.ndarray) else (min(items), max(items))
        if low < _bounds(t)[0] or high > _bounds(t)[1]:
            raise fault(where, _range(low, high), f"{_bounds(t)[0]} to {_bounds(t)[1]} for type {t}")
    if target.kind != "f" or isinstance(items, np.ndarray) and items.dtype == target:
        return np.asarray(items, dtype=target).tobytes()
    try:
        wide = np.asarray(items, dtype=np.float64)
    except OverflowError:
        raise fault(where, "an integer beyond the range of f64", f"what type {t} holds") from None
    with np.errstate(over="ignore"):
        narrow = wide.astype(target)
    lost = np.isinf(narrow) & np.isfinite(wide)
    if lost.any():
        raise fault(where, str(wide[lost][0]), f"magnitudes up to {np.finfo(target).max} for type {t}")
    return narrow.tobytes()
