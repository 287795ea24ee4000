"""Writing a GGUF file: everything is checked when it is added, and the file has its name only when it is complete.

Bytes go to a hidden file `.pyggml-*.part` in the target's folder, which is renamed at the end. An error removes it; a
process that is killed leaves it behind, and never a file under the final name.
"""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import stat
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pyggml import dtypes
from pyggml.dtypes import DType
from pyggml.errors import DTypeError, FormatError
from pyggml.gguf.format import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    VERSIONS,
    GGUFValueType,
    KeyType,
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
from pyggml.gguf.values import pack_string, pack_value

TensorData: TypeAlias = NDArray[Any] | tuple[NDArray[Any], DType | str, Sequence[int] | None]
"""An array, or (array, dtype, ne) as `GGUFWriter.add_tensor` takes them."""

_MAX_BYTES = 1 << 60  # of tensor data; keeps every dim and offset inside the format's 64 bits


@dataclass(slots=True)
class _Pending:
    """A tensor of the file to be: `data` is None when its bytes are to come through write_data."""

    name: str
    dims: tuple[int, ...]
    dtype: DType
    nbytes: int
    data: NDArray[Any] | None


class GGUFWriter:
    """Writes one GGUF file; a context manager that completes the file, or removes it when an exception passes.

    `arch` becomes `general.architecture`, the first key; None leaves it to the caller. An `alignment` other than 32 is
    written as `general.alignment`; adding that key sets it as well. All faults are FormatError with one line.

    >>> import tempfile
    >>> from pyggml.gguf import read_gguf
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with GGUFWriter(f"{folder}/tiny.gguf", "mamba2") as w:
    ...         w.add("mamba2.block_count", 24)
    ...         w.add_tensor("output_norm.weight", np.ones(64, np.float32))
    ...     read_gguf(f"{folder}/tiny.gguf").tensors["output_norm.weight"].dims
    (64,)
    """

    def __init__(self, path: str | os.PathLike[str], arch: str | None, *, alignment: int = DEFAULT_ALIGNMENT, version: int = 3) -> None:
        self.path = os.fsdecode(path)
        if version not in VERSIONS:
            raise fault(self.path, f"version {version}", " and ".join(map(str, VERSIONS)))
        self.version = version
        self.alignment = DEFAULT_ALIGNMENT
        self._target = _target(self.path)
        self._part = ""
        self._file: BinaryIO | None = None
        self._closed = False
        self._keys: dict[str, bytes] = {}
        self._tensors: dict[str, _Pending] = {}
        self._nbytes = 0  # of all tensors
        self._queue: deque[_Pending] = deque()  # once writing has begun: the tensors not yet complete
        self._written = 0  # bytes of the first of them
        if arch is not None:
            self.add("general.architecture", arch, GGUFValueType.STR)
        if alignment != DEFAULT_ALIGNMENT:
            self.add(ALIGNMENT_KEY, alignment, GGUFValueType.U32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def add(self, key: str, value: object, type: KeyType | GGUFValueType | str | None = None) -> None:
        """Adds a key. `type` is a KeyType or text such as "u64" or "arr[i32]"; left out, it is inferred from the value.

        Inferred: bool; an int as the first of u32 i32 u64 i64 that holds it; a float as f32; text and bytes as str; NumPy
        scalars and arrays as their dtype says. A list takes one type for all its elements: str, bool, the first of
        i32 u32 i64 u64 for ints, f32 for floats or ints among floats; an empty list is arr[str].
        """
        where = f"{self.path}: key {quote(key)}"
        self._must_be_open(where, header=True)
        check_key(where, pack_string(where, key)[8:])
        if key in self._keys:
            raise fault(where, "the key twice", "once")
        key_type, packed = pack_value(where, value, None if type is None else KeyType.of(type, where))
        if key == ALIGNMENT_KEY:
            self.alignment = check_alignment(where, key_type, int.from_bytes(packed, "little"))
        self._keys[key] = struct.pack("<I", key_type.value) + packed

    def add_tensor(self, name: str, data: NDArray[Any], dtype: DType | str | None = None, ne: Sequence[int] | None = None) -> None:
        """Adds a tensor with its data, which is kept by reference until it is written and must not change before.

        A plain array gives type and dims by itself (`ne` is its shape reversed); BF16 is uint16 bits with `dtype="bf16"`.
        Otherwise `data` is uint8, a tensor's bytes in file order, with `dtype` and `ne`; for block types `ne` may be left
        out when the last dim of `data` counts a row's bytes. Nothing is converted.
        """
        where = f"{self.path}: tensor {quote(name)}"
        kind = _tensor_type(where, data, dtype)
        tensor = self._check_tensor(name, kind, _dims_of(where, data, kind) if ne is None else ne)
        if data.nbytes != tensor.nbytes:
            raise fault(where, f"{data.nbytes} bytes of data", f"{tensor.nbytes} for type {kind} and dims {list(tensor.dims)}")
        tensor.data = data
        self._tensors[name] = tensor
        self._nbytes += tensor.nbytes

    def add_tensor_info(self, name: str, dtype: DType | str, ne: Sequence[int]) -> None:
        """Announces a tensor whose bytes come through `write_data`; `ne` has one to four dims, innermost first."""
        tensor = self._check_tensor(name, _named_type(f"{self.path}: tensor {quote(name)}", dtype), ne)
        self._tensors[name] = tensor
        self._nbytes += tensor.nbytes

    def write_data(self, name: str, data: bytes | NDArray[Any]) -> None:
        """Writes bytes of an announced tensor, in one piece or several; tensors follow each other as they were announced.

        The first call writes the header: no key and no tensor can be added after it.
        """
        where = f"{self.path}: tensor {quote(name)}"
        file = self._begin(where)
        self._write_held(file)
        if not self._queue or self._queue[0].name != name:
            raise fault(where, "data for it", f"data for {quote(self._queue[0].name)}" if self._queue else "no more data: all tensors are complete")
        tensor = self._queue[0]
        if isinstance(data, bytes):
            chunk = memoryview(data)
        else:
            _tensor_type(where, data, tensor.dtype)
            chunk = _bytes_of(data)
        if self._written + len(chunk) > tensor.nbytes:
            raise fault(where, f"{self._written + len(chunk)} bytes of data", f"{tensor.nbytes}")
        with self._disk():
            file.write(chunk)
        self._written += len(chunk)
        if self._written == tensor.nbytes:
            self._end_tensor(file)

    def close(self) -> None:
        """Completes the file and gives it its name; refuses, and removes it, when data of a tensor is missing."""
        if self._closed:
            return
        try:
            file = self._begin(self.path)
            self._write_held(file)
            if self._queue:
                tensor = self._queue[0]
                raise fault(f"{self.path}: tensor {quote(tensor.name)}", f"{self._written} bytes of data", str(tensor.nbytes))
            self._finish(file)
        finally:
            self.abort()

    def abort(self) -> None:
        """Gives up: removes what has been written. Does nothing after `close`."""
        self._closed = True
        if self._file is not None:
            with contextlib.suppress(OSError):  # what it could not flush is thrown away anyway
                self._file.close()
            self._file = None
        if self._part:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._part)
            self._part = ""

    def _must_be_open(self, where: str, *, header: bool = False) -> None:
        if self._closed:
            raise fault(where, "a call after the file was closed", "calls before it")
        if header and self._file is not None:
            raise fault(where, "an addition after the first write_data", "additions before it, as it writes the header")

    def _check_tensor(self, name: str, kind: DType, ne: Sequence[int]) -> _Pending:
        where = f"{self.path}: tensor {quote(name)}"
        self._must_be_open(where, header=True)
        check_tensor_name(where, pack_string(where, name)[8:])
        if name in self._tensors:
            raise fault(where, "the name twice", "once")
        dims = tuple(map(operator.index, ne))
        check_n_dims(where, len(dims))
        nbytes = tensor_nbytes(where, dims, kind)
        if self._nbytes + nbytes > _MAX_BYTES:
            raise fault(where, f"tensors of {self._nbytes + nbytes} bytes in all", f"{_MAX_BYTES}")
        return _Pending(name, dims, kind, nbytes, None)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as err:
            raise FormatError(f"{self.path}: cannot be written: {os_reason(err)}") from None

    def _begin(self, where: str) -> BinaryIO:
        """The open part file; the first call makes it and writes the header."""
        self._must_be_open(where)
        if self._file is None:
            header = self._header()
            part = os.path.join(os.path.dirname(self._target), f".pyggml-{secrets.token_hex(8)}.part")
            with self._disk():
                self._file = open(part, "xb")
                self._part = part
                self._file.write(header)
            self._pad(self._file, len(header))
            self._queue.extend(self._tensors.values())
        return self._file

    def _header(self) -> bytes:
        parts = [MAGIC, struct.pack("<IQQ", self.version, len(self._tensors), len(self._keys))]
        for key, value in self._keys.items():
            parts += pack_string(self.path, key), value
        offset = 0
        for t in self._tensors.values():
            n = len(t.dims)
            parts += pack_string(self.path, t.name), struct.pack(f"<I{n}QIQ", n, *t.dims, t.dtype.gguf_id, offset)
            offset += pad_to(t.nbytes, self.alignment)
        return b"".join(parts)

    def _write_held(self, file: BinaryIO) -> None:
        """Writes the tensors that brought their data, up to the next one that did not."""
        while self._queue and (data := self._queue[0].data) is not None:
            with self._disk():
                file.write(_bytes_of(data))
            self._end_tensor(file)

    def _end_tensor(self, file: BinaryIO) -> None:
        self._pad(file, self._queue.popleft().nbytes)
        self._written = 0

    def _pad(self, file: BinaryIO, nbytes: int) -> None:
        """Moves on to the next multiple of the alignment after `nbytes` that began at one; the gap reads as zeros."""
        with self._disk():
            file.seek(pad_to(nbytes, self.alignment) - nbytes, os.SEEK_CUR)

    def _finish(self, file: BinaryIO) -> None:
        with self._disk():
            file.truncate()  # at this place: padding at the very end has only been sought past
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(self._part, self._target)
        self._part = ""


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, object],
    tensors: Mapping[str, TensorData],
    *,
    types: Mapping[str, KeyType | GGUFValueType | str] | None = None,
    alignment: int = DEFAULT_ALIGNMENT,
    version: int = 3,
) -> None:
    """Writes a file from keys and tensors; `types` names the types of keys that are not to be inferred.

    A copy of a file; it has the same bytes when the file has neither gaps nor stray bytes (`check_gguf` says so):

    >>> import tempfile
    >>> from pyggml.gguf import read_gguf
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_gguf(f"{folder}/a.gguf", {"general.architecture": "mamba2"}, {"x": np.arange(3, dtype=np.int32)})
    ...     with read_gguf(f"{folder}/a.gguf") as f:
    ...         tensors = {t.name: (f.raw(t.name), t.dtype, t.dims) for t in f.tensors.values()}
    ...         write_gguf(f"{folder}/b.gguf", f.metadata, tensors, types=f.types, version=f.version)
    ...     read_gguf(f"{folder}/b.gguf").array("x")
    array([0, 1, 2], dtype=int32)
    """
    with GGUFWriter(path, None, alignment=alignment, version=version) as writer:
        for key, value in metadata.items():
            writer.add(key, value, (types or {}).get(key))
        for name, data in tensors.items():
            if isinstance(data, tuple):
                writer.add_tensor(name, *data)
            else:
                writer.add_tensor(name, data)


def _target(path: str) -> str:
    """Where the file will be: links are followed, and what stands there must be a file that may be replaced."""
    try:
        target = os.path.realpath(path)
        if not stat.S_ISDIR(os.stat(os.path.dirname(target)).st_mode):
            raise NotADirectoryError(f"{os.path.dirname(target)} is no folder")
        if os.path.lexists(target) and not stat.S_ISREG(os.stat(target).st_mode):
            raise FileExistsError("what stands there is not a regular file")
    except (OSError, ValueError) as err:  # ValueError: a zero byte in the path
        raise FormatError(f"{path}: cannot be written: {os_reason(err)}") from None
    return target


def _named_type(where: str, name: DType | str) -> DType:
    try:
        return dtypes.dtype(name)
    except DTypeError as err:
        raise FormatError(f"{where}: {err}") from None


def _tensor_type(where: str, data: NDArray[Any], wanted: DType | str | None) -> DType:
    """The type `wanted`, or else the array's own; the array must hold it or be its bytes."""
    if not isinstance(data, np.ndarray):
        raise fault(where, f"data of class {type(data).__name__}", "a NumPy array")
    stored = data.dtype.newbyteorder("<")
    if wanted is None:
        try:
            return dtypes.from_numpy(stored)
        except DTypeError as err:
            raise FormatError(f"{where}: {err}") from None
    kind = _named_type(where, wanted)
    if stored != np.uint8 and (kind.np is None or stored != kind.np):  # NumPy takes None for float64
        raise fault(where, f"a NumPy array of {data.dtype}", f"{'' if kind.np is None else f'{kind.np} or '}uint8 (bytes) for type {kind}")
    return kind


def _dims_of(where: str, data: NDArray[Any], kind: DType) -> tuple[int, ...]:
    """The dims (ne order) that the array's shape stands for."""
    dims = data.shape[::-1]
    if data.dtype != np.uint8 or not dims:
        return dims
    if kind.np is not None or dims[0] % kind.nbytes:
        raise fault(where, f"bytes of shape {data.shape} without ne", f"ne given, or a last dim of whole blocks ({kind.nbytes} bytes each)")
    return dims[0] // kind.nbytes * kind.block, *dims[1:]


def _bytes_of(data: NDArray[Any]) -> memoryview:
    """The array's elements in C order, little-endian; a copy only where they are not."""
    flat = np.ascontiguousarray(data, dtype=data.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data
