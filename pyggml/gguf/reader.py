"""Reading a GGUF file: the whole header is checked, then tensors are views of the mapped file.

A file is untrusted input. Each count, length, type, dimension and offset is a Python integer and is held against the
bytes that are left before anything is read or allocated with it; a fault ends in a FormatError of one line.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pyggml.dtypes import BF16, BY_GGUF_ID, DType, bf16_to_f32
from pyggml.errors import FormatError
from pyggml.gguf.format import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMS,
    MAX_KEY,
    MAX_NAME,
    NUMPY_TYPES,
    VERSIONS,
    GGUFValueType,
    KeyType,
    TensorInfo,
    check_alignment,
    check_key,
    check_n_dims,
    check_tensor_name,
    fault,
    os_reason,
    pad_to,
    quote,
    tensor_nbytes,
)
from pyggml.gguf.values import U64, StringArray, Value

_U32 = struct.Struct("<I")
_SCALARS = {
    GGUFValueType.U8: struct.Struct("<B"),
    GGUFValueType.I8: struct.Struct("<b"),
    GGUFValueType.U16: struct.Struct("<H"),
    GGUFValueType.I16: struct.Struct("<h"),
    GGUFValueType.U32: _U32,
    GGUFValueType.I32: struct.Struct("<i"),
    GGUFValueType.F32: struct.Struct("<f"),
    GGUFValueType.U64: U64,
    GGUFValueType.I64: struct.Struct("<q"),
    GGUFValueType.F64: struct.Struct("<d"),
}
_MIN_KEY_BYTES = 8 + 4 + 1  # length, type, a value of one byte; no letter, so that the empty key gets its own words
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # length, n_dims, type, offset
_VALUE_TYPES = frozenset(map(int, GGUFValueType))
_SPLIT_KEY = "split.count"


class GGUFFile:
    """An open GGUF file; made by `read_gguf`, and a context manager.

    `path`, `version` (2 or 3); in bytes, `alignment`, `header_size`, `data_offset` (where tensor data starts) and `size`.
    `metadata` maps keys to values in the file's order: str, int, float and bool; arrays of numbers and bools are read-only
    NumPy arrays of exactly the file's type, arrays of strings are StringArray (decoded when first looked into; bytes that
    are not UTF-8 are kept as surrogate escapes). `types` has each key's KeyType: `str(f.types[key])` is `u32`, `arr[str]`.
    `tensors` maps names to TensorInfo in the file's order, types without a kernel included. The file is mapped, so it must
    not be shortened while it is open.
    """

    def __init__(
        self,
        path: str,
        data: NDArray[np.uint8],
        version: int,
        alignment: int,
        header_size: int,
        data_offset: int,
        metadata: dict[str, Value],
        types: dict[str, KeyType],
        tensors: dict[str, TensorInfo],
    ) -> None:
        self.path = path
        self.version = version
        self.alignment = alignment
        self.header_size = header_size
        self.data_offset = data_offset
        self.size = data.size
        self.metadata: Mapping[str, Value] = MappingProxyType(metadata)
        self.types: Mapping[str, KeyType] = MappingProxyType(types)
        self.tensors = tensors
        self._data: NDArray[np.uint8] | None = data

    def __repr__(self) -> str:
        return f"<GGUF v{self.version} {self.path}: {len(self.metadata)} keys, {len(self.tensors)} tensors>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gives up the mapping; arrays already handed out stay valid, and the last of them unmaps the file."""
        self._data = None

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor: a read-only view of the mapped file, of exactly `nbytes`."""
        info = self.tensors.get(name)
        if info is None:
            raise FormatError(f"{self.path}: tensor {quote(name)}: not one of the file's {len(self.tensors)} tensors")
        return self.bytes_at(info.offset, info.nbytes)

    def bytes_at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """`nbytes` of the file from byte `offset`, fewer at its end: a read-only view. ValueError after `close`."""
        if self._data is None:
            raise ValueError(f"{self.path}: the file is closed")
        return self._data[offset : offset + nbytes]

    def array(self, name: str) -> NDArray[Any]:
        """A tensor as a NumPy array whose shape is the file's dims reversed.

        Plain types are read-only views of the mapped file, BF16 is widened (exactly) to a float32 copy. Block types are
        their bytes: uint8 with the row's bytes as last dim. A view is aligned as the file is, 32 bytes by default.
        """
        raw = self.raw(name)
        info = self.tensors[name]
        if info.dtype.np is None:
            return raw.reshape(*info.shape[:-1], info.dtype.row_bytes(info.ne[0]))
        plain: NDArray[Any] = raw.view(info.dtype.np).reshape(info.shape)
        return bf16_to_f32(plain) if info.dtype is BF16 else plain


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Maps a GGUF file and reads its header.

    Versions 2 and 3, little-endian. Refused by name, in a FormatError of one line: version 1, big-endian files, one file
    of a split model, arrays of arrays, and whatever does not hold within the file.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".gguf") as empty:
    ...     _ = empty.write(b"GGUF" + (3).to_bytes(4, "little") + bytes(16)), empty.flush()
    ...     read_gguf(empty.name).alignment
    32
    """
    name = os.fsdecode(path)
    try:
        mode = os.stat(name).st_mode
    except (OSError, ValueError) as err:  # ValueError: a zero byte in the path
        raise FormatError(f"{name}: cannot be read: {os_reason(err)}") from None
    if not stat.S_ISREG(mode):  # asked before opening it: a pipe would block there
        raise fault(name, "a folder" if stat.S_ISDIR(mode) else "a device, pipe or socket", "a regular file")
    try:
        with open(name, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise EOFError("the file is empty")  # mmap's own words would be about a length
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a wish: pages of 2 MB where the system has them, as weights are read once per token
                    mapped.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError, EOFError) as err:
        raise FormatError(f"{name}: cannot be read: {os_reason(err)}") from None
    return _read_header(name, mapped)


class _Cursor:
    """A place in the header; `where` names the file and the key or tensor being read, for errors."""

    __slots__ = ("buf", "path", "pos", "size", "where")

    def __init__(self, path: str, buf: mmap.mmap) -> None:
        self.path = path
        self.where = path
        self.buf = buf
        self.pos = 0
        self.size = len(buf)

    def at(self, part: str) -> None:
        self.where = f"{self.path}: {part}"

    def claim(self, nbytes: int, what: str) -> int:
        """Moves past `nbytes` that must be there; returns where they start."""
        start = self.pos
        if nbytes > self.size - start:
            raise fault(self.where, f"{what} of {nbytes} bytes at byte {start}", f"the {self.size - start} bytes left in the file")
        self.pos = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buf, self.claim(4, what))[0])

    def u64(self, what: str) -> int:
        return int(U64.unpack_from(self.buf, self.claim(8, what))[0])

    def string(self, what: str, most: int | None = None) -> bytes:
        n = self.u64(f"the length of {what}")
        if most is not None and n > most:
            raise fault(self.where, f"{what} of {n} bytes", f"1 to {most} bytes")
        start = self.claim(n, what)
        return self.buf[start : start + n]

    def strings(self, count: int) -> StringArray:
        """`count` strings: lengths are checked here, the text is decoded by StringArray."""
        # why: the one loop that runs a few 100,000 times for a real vocabulary; all it touches is local.
        buf, length, last, start = self.buf, U64.unpack_from, self.size - 8, self.pos
        pos = start
        for _ in range(count):
            if pos > last:
                break
            pos += 8 + length(buf, pos)[0]
        else:
            if pos <= self.size:
                self.pos = pos
                return StringArray(buf[start:pos], count)
        raise fault(self.where, f"{count} strings at byte {start} that run past the end", f"the {self.size - start} bytes left in the file")


def _read_header(path: str, buf: mmap.mmap) -> GGUFFile:
    c = _Cursor(path, buf)
    version = _read_version(c)
    n_tensors = c.u64("the tensor count")
    n_keys = c.u64("the key count")
    least = n_tensors * _MIN_TENSOR_BYTES + n_keys * _MIN_KEY_BYTES
    if least > c.size - c.pos:
        found = f"{n_tensors} tensors and {n_keys} keys, whose header takes {least} bytes or more"
        raise fault(path, found, f"what fits the {c.size - c.pos} bytes left in the file")
    metadata, types = _read_keys(c, n_keys)
    alignment = DEFAULT_ALIGNMENT
    if ALIGNMENT_KEY in metadata:
        alignment = check_alignment(f"{path}: key {ALIGNMENT_KEY!r}", types[ALIGNMENT_KEY], metadata[ALIGNMENT_KEY])
    _refuse_split(path, metadata, types)
    infos = _read_tensor_infos(c, n_tensors)
    data_offset = pad_to(c.pos, alignment)
    tensors = _place_tensors(c, infos, data_offset, alignment)
    return GGUFFile(path, np.frombuffer(buf, np.uint8), version, alignment, c.pos, data_offset, metadata, types, tensors)


def _read_version(c: _Cursor) -> int:
    magic = c.buf[c.claim(4, "the magic bytes") : c.pos]
    if magic != MAGIC:
        pointer = ": a Git LFS pointer, fetch the file itself" if c.buf[:24] == b"version https://git-lfs." else ""
        raise fault(c.path, f"the first bytes {magic!r}{pointer}", repr(MAGIC))
    version = c.u32("the version")
    if version in VERSIONS:
        return version
    legal = " and ".join(map(str, VERSIONS))
    if version & 0xFFFF == 0 and version:
        raise fault(c.path, f"a big-endian file (version bytes {version.to_bytes(4, 'little').hex()})", f"little-endian files of versions {legal}")
    hint = ", an old layout: convert the model anew" if version == 1 else ""
    raise fault(c.path, f"version {version}{hint}", f"versions {legal}")


def _read_keys(c: _Cursor, count: int) -> tuple[dict[str, Value], dict[str, KeyType]]:
    metadata: dict[str, Value] = {}
    types: dict[str, KeyType] = {}
    for i in range(count):
        c.at(f"key {i + 1} of {count}")
        key = check_key(c.where, c.string("a key", MAX_KEY))
        c.at(f"key {quote(key)}")
        if key in metadata:
            raise fault(c.where, "the key twice", "once")
        types[key], metadata[key] = _read_value(c)
    return metadata, types


def _value_type(c: _Cursor, what: str) -> GGUFValueType:
    n = c.u32(f"the {what}")
    if n not in _VALUE_TYPES:
        raise fault(c.where, f"{what} {n}", ", ".join(f"{t:d} {t}" for t in GGUFValueType))
    return GGUFValueType(n)


def _read_value(c: _Cursor) -> tuple[KeyType, Value]:
    t = _value_type(c, "value type")
    if t is GGUFValueType.ARR:
        item = _value_type(c, "element type")
        if item is GGUFValueType.ARR:
            raise fault(c.where, "an array of arrays", "arrays of numbers, bools and strings")
        return KeyType(t, item), _read_array(c, item)
    if t is GGUFValueType.STR:
        return KeyType(t), c.string("a string").decode("utf-8", "surrogateescape")
    if t is GGUFValueType.BOOL:
        byte = c.buf[c.claim(1, "a bool")]
        if byte > 1:
            raise fault(c.where, f"a bool of {byte}", "0 and 1")
        return KeyType(t), byte == 1
    form = _SCALARS[t]
    value: int | float = form.unpack_from(c.buf, c.claim(form.size, f"a value of type {t}"))[0]
    return KeyType(t), value


def _read_array(c: _Cursor, item: GGUFValueType) -> Value:
    count = c.u64("the array's length")
    if item is GGUFValueType.STR:
        return c.strings(count)
    dt = NUMPY_TYPES[item]
    start = c.claim(count * dt.itemsize, f"an array of {count} {item}")
    stored = np.frombuffer(c.buf, np.uint8 if item is GGUFValueType.BOOL else dt, count, start)
    if item is GGUFValueType.BOOL and count and stored.max() > 1:
        raise fault(c.where, f"a bool of {stored.max()}", "0 and 1")
    array = stored.astype(dt)  # a copy: aligned, and independent of the mapping
    array.flags.writeable = False
    return array


def _refuse_split(path: str, metadata: dict[str, Value], types: dict[str, KeyType]) -> None:
    count = metadata.get(_SPLIT_KEY, 1)
    where = f"{path}: key {_SPLIT_KEY!r}"
    if isinstance(count, bool) or not isinstance(count, int):
        raise fault(where, f"type {types[_SPLIT_KEY]}", "an integer type")
    if count > 1:
        raise fault(where, f"{count}: one file of a model split into {count}", "1: split files are not read yet, merge them into one first")


def _read_tensor_infos(c: _Cursor, count: int) -> dict[str, tuple[tuple[int, ...], DType, int]]:
    """Dims, type and offset (from the start of the data) of each tensor; what can be checked without the offsets is."""
    infos: dict[str, tuple[tuple[int, ...], DType, int]] = {}
    for i in range(count):
        c.at(f"tensor {i + 1} of {count}")
        name = check_tensor_name(c.where, c.string("a name", MAX_NAME))
        c.at(f"tensor {quote(name)}")
        if name in infos:
            raise fault(c.where, "the name twice", "once")
        n_dims = c.u32("the number of dims")
        check_n_dims(c.where, n_dims)
        dims = tuple(c.u64("a dim") for _ in range(n_dims))
        type_id = c.u32("the type")
        dtype = BY_GGUF_ID.get(type_id)
        if dtype is None:
            raise fault(c.where, f"type id {type_id}, which is unknown", f"the ids {' '.join(map(str, sorted(BY_GGUF_ID)))}")
        infos[name] = dims, dtype, c.u64("the offset")
    return infos


def _place_tensors(c: _Cursor, infos: dict[str, tuple[tuple[int, ...], DType, int]], data_offset: int, alignment: int) -> dict[str, TensorInfo]:
    """Checks sizes and offsets: aligned, inside the file, no byte in two tensors."""
    tensors: dict[str, TensorInfo] = {}
    for name, (dims, dtype, offset) in infos.items():
        c.at(f"tensor {quote(name)}")
        nbytes = tensor_nbytes(c.where, dims, dtype)
        if offset % alignment:
            raise fault(c.where, f"offset {offset}", f"a multiple of the alignment {alignment}")
        start = data_offset + offset
        if start + nbytes > c.size:
            found = f"{nbytes} bytes ({dtype}, dims {list(dims)}) at byte {start}, ending at {start + nbytes}"
            raise fault(c.where, found, f"an end within the file's {c.size} bytes")
        ne = dims + (1,) * (MAX_DIMS - len(dims))
        tensors[name] = TensorInfo(name, (ne[0], ne[1], ne[2], ne[3]), len(dims), dtype, start, nbytes)
    placed = sorted(tensors.values(), key=lambda t: t.offset)
    for a, b in zip(placed, placed[1:], strict=False):
        if a.offset + a.nbytes > b.offset:
            c.at(f"tensor {quote(b.name)}")
            raise fault(c.where, f"data from byte {b.offset} inside that of {quote(a.name)}", f"byte {a.offset + a.nbytes} or later")
    return tensors
