"""GGUF files built by hand, for tests: nothing here uses the code under test."""

import struct
from collections.abc import Sequence

ALIGN = b"general.alignment"
U8, U32, I32, F32, BOOL, STR, ARR = 0, 4, 5, 6, 7, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # value type id: struct letter


def text(raw: bytes) -> bytes:
    """A string: its length and its bytes."""
    return struct.pack("<Q", len(raw)) + raw


def kv(key: bytes, kind: int, payload: bytes) -> bytes:
    """A key with a value of type id `kind`."""
    return text(key) + struct.pack("<I", kind) + payload


def u32(key: bytes, value: int) -> bytes:
    return kv(key, U32, struct.pack("<I", value))


def arr(key: bytes, item: int, count: int, payload: bytes) -> bytes:
    return kv(key, ARR, struct.pack("<IQ", item, count) + payload)


def info(name: bytes, dims: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """What the header says of a tensor; `kind` 0 is f32."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(kvs: Sequence[bytes] = (), infos: Sequence[bytes] = (), data: bytes | None = b"", *, version: int = 3, align: int = 32) -> bytes:
    """A file; `data=None` leaves out the padding after the header too."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(kvs)) + b"".join(kvs) + b"".join(infos)
    return head if data is None else head + bytes(-len(head) % align) + data


def small_file() -> bytes:
    """A valid file with each kind of value and two tensors, its data starting at a multiple of 32."""
    kvs = [kv(b"general.architecture", STR, text(b"mamba2")), u32(ALIGN, 32), kv(b"f", F32, struct.pack("<f", 1.5)), kv(b"b", BOOL, b"\1")]
    kvs += [arr(b"ints", I32, 3, struct.pack("<3i", 1, -2, 3)), arr(b"strs", STR, 2, text(b"ab") + text(b"")), arr(b"bools", BOOL, 2, b"\0\1")]
    infos = [info(b"w", [32, 2], 8), info(b"v", [5], 0, 96)]
    return build(kvs, infos, bytes(68 + 28) + struct.pack("<5f", 1, 2, 3, 4, 5) + bytes(12))
