"""The GGUF format's constants and the rules that reader and writer share.

Layout of a file (little-endian): magic, version u32, tensor count u64, key count u64; then per key: name, value type
u32, value; then per tensor: name, number of dims u32, dims u64 each, type u32, offset u64; then, at the next multiple of
the alignment, the tensor data. A string is a u64 length and its bytes; an array is an element type u32, a u64 count and
the elements. Versions 2 and 3 are laid out alike (3 adds big-endian files).

Every function here raises FormatError as one line: `where: found ..., legal ...`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import FormatError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
MAX_DIMS = 4
MAX_NAME = 63  # bytes of a tensor name: ggml keeps it in 64, the last of them zero
MAX_KEY = 65535  # bytes of a key


class GGUFValueType(IntEnum):
    """Type of a metadata value, by its id in the file; `str()` gives the short name (`u32`, `str`)."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STR = 8
    ARR = 9
    U64 = 10
    I64 = 11
    F64 = 12

    def __str__(self) -> str:
        return self.name.lower()


NUMPY_TYPES: dict[GGUFValueType, np.dtype] = {
    GGUFValueType.U8: np.dtype("<u1"),
    GGUFValueType.I8: np.dtype("<i1"),
    GGUFValueType.U16: np.dtype("<u2"),
    GGUFValueType.I16: np.dtype("<i2"),
    GGUFValueType.U32: np.dtype("<u4"),
    GGUFValueType.I32: np.dtype("<i4"),
    GGUFValueType.F32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.U64: np.dtype("<u8"),
    GGUFValueType.I64: np.dtype("<i8"),
    GGUFValueType.F64: np.dtype("<f8"),
}
"""The NumPy type that holds one value; strings and arrays have none."""

_SCALARS = {str(t): t for t in GGUFValueType if t is not GGUFValueType.ARR}


@dataclass(frozen=True, slots=True)
class KeyType:
    """Full type of a key's value: `value`, and for arrays the element type `item`.

    >>> str(KeyType(GGUFValueType.U32)), KeyType.of("arr[i32]").item
    ('u32', <GGUFValueType.I32: 5>)
    """

    value: GGUFValueType
    item: GGUFValueType | None = None

    def __post_init__(self) -> None:
        if (self.value is GGUFValueType.ARR) != (self.item is not None) or self.item is GGUFValueType.ARR:
            raise fault("value type", f"{self.value} with element type {self.item}", "arr with a type other than arr, all others with none")

    def __str__(self) -> str:
        return str(self.value) if self.item is None else f"arr[{self.item}]"

    @classmethod
    def of(cls, spec: KeyType | GGUFValueType | str, where: str = "value type") -> KeyType:
        """The type that `spec` names: itself, a scalar's type, or text such as `u32` and `arr[str]`.

        FormatError, which begins with `where`, for any other.
        """
        if isinstance(spec, KeyType):
            return spec
        if isinstance(spec, GGUFValueType):
            return cls(spec)
        is_array = spec.startswith("arr[") and spec.endswith("]")
        found = _SCALARS.get(spec[4:-1] if is_array else spec)
        if found is None:
            raise fault(where, f"value type {spec!r}", f"{' '.join(_SCALARS)} and, for arrays, arr[...] around one of them")
        return cls(GGUFValueType.ARR, found) if is_array else cls(found)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `ne` padded to four dims with ones, `offset` in bytes from the start of the file."""

    name: str
    ne: tuple[int, int, int, int]
    n_dims: int
    dtype: DType
    offset: int
    nbytes: int

    @property
    def dims(self) -> tuple[int, ...]:
        """The `n_dims` dims as they stand in the file, innermost first."""
        return self.ne[: self.n_dims]

    @property
    def shape(self) -> tuple[int, ...]:
        """The same in NumPy's order, counted in elements."""
        return self.dims[::-1]


def quote(name: str | bytes) -> str:
    """A name from a file, safe to print: quoted, on one line, and cut when it is long."""
    return repr(name) if len(name) <= 80 else f"{name[:77]!r}..."


def fault(where: str, found: str, legal: str) -> FormatError:
    """The error for one fault of a file, ready to raise."""
    return FormatError(f"{where}: found {found}, legal {legal}")


def os_reason(err: Exception) -> str:
    """What an OSError (or the ValueError for a path with a zero byte) says, without its number and path."""
    return (isinstance(err, OSError) and err.strerror) or str(err)


def pad_to(n: int, alignment: int) -> int:
    """The least multiple of `alignment` that is >= n."""
    return -(-n // alignment) * alignment


def check_key(where: str, raw: bytes) -> str:
    """The key spelled by `raw`."""
    return _spelled(where, raw, "key", MAX_KEY)


def check_tensor_name(where: str, raw: bytes) -> str:
    """The tensor name spelled by `raw`."""
    return _spelled(where, raw, "name", MAX_NAME)


def check_alignment(where: str, key_type: KeyType, value: object) -> int:
    """The value of `general.alignment`: a u32 and, as ggml demands, a power of two."""
    if key_type != KeyType(GGUFValueType.U32) or not isinstance(value, int):
        raise fault(where, f"type {key_type}", "u32")
    if value <= 0 or value & (value - 1):
        raise fault(where, str(value), "a power of two (1, 2, 4, ... 2147483648)")
    return value


def check_n_dims(where: str, n_dims: int) -> None:
    """Refuses a number of dims outside 1 to 4."""
    if not 1 <= n_dims <= MAX_DIMS:
        raise fault(where, f"{n_dims} dims", f"1 to {MAX_DIMS}")


def tensor_nbytes(where: str, dims: Sequence[int], dtype: DType) -> int:
    """Bytes of a tensor with these dims (ne order), as an exact integer."""
    if min(dims) <= 0:
        raise fault(where, f"dims {list(dims)}", "dims of at least 1")
    if dims[0] % dtype.block:
        raise fault(where, f"type {dtype} with rows of {dims[0]} elements", f"a multiple of its block of {dtype.block}")
    return math.prod(dims) // dtype.block * dtype.nbytes


def _spelled(where: str, raw: bytes, what: str, most: int) -> str:
    if not 1 <= len(raw) <= most:
        raise fault(where, f"a {what} of {len(raw)} bytes" if raw else f"an empty {what}", f"1 to {most} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as err:
        raise fault(where, f"the {what} {quote(raw)}", f"UTF-8 (byte {err.start} is not)") from None
