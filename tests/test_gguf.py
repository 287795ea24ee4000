"""GGUF files, held against bytes built by hand, the gguf package and ggml's own C reader. `f62` is row 62 of the list of known faults."""

import ctypes
import os
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyggml import dtypes
from pyggml.errors import FormatError
from pyggml.gguf import GGUFValueType, GGUFWriter, KeyType, StringArray, TensorInfo, check_gguf, read_gguf, write_gguf

U8, U32, I32, F32, BOOL, STR, ARR = 0, 4, 5, 6, 7, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # value type id: struct letter


def text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def kv(key: bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def u32(key: bytes, value: int) -> bytes:
    return kv(key, U32, struct.pack("<I", value))


def arr(key: bytes, item: int, count: int, payload: bytes) -> bytes:
    return kv(key, ARR, struct.pack("<IQ", item, count) + payload)


def info(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(kvs: list[bytes] = (), infos: list[bytes] = (), data: bytes | None = b"", *, version: int = 3, align: int = 32) -> bytes:
    """A file; `data=None` leaves out the padding after the header too."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(kvs)) + b"".join(kvs) + b"".join(infos)
    return head if data is None else head + bytes(-len(head) % align) + data


@pytest.fixture
def put(tmp_path):
    """Writes bytes to a file and returns its path."""

    def write(raw: bytes, name: str = "m.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(raw)
        return path

    return write


def refusal(path: Path) -> str:
    """The one line with which a file is refused, less the path it must begin with."""
    with pytest.raises(FormatError) as caught:
        read_gguf(path)
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and line.isprintable()
    assert line.startswith(f"{path}: ")
    assert check_gguf(path) == [line]
    return line.removeprefix(f"{path}: ")


ALIGN = b"general.alignment"
F32_DATA = bytes(32)

# id, file, what the line must say
BAD = [
    ("f62-zero-alignment", build([u32(ALIGN, 0)], data=None), "key 'general.alignment': found 0, legal a power of two"),
    ("f62-alignment-3", build([u32(ALIGN, 3)]), "key 'general.alignment': found 3,"),
    ("f62-alignment-2^31+1", build([u32(ALIGN, 2**31 + 1)]), "key 'general.alignment': found 2147483649,"),
    ("f62-negative-alignment", build([kv(ALIGN, I32, struct.pack("<i", -32))]), "key 'general.alignment': found type i32, legal u32"),
    ("f63-alignment-i32", build([kv(ALIGN, I32, struct.pack("<i", 32))]), "key 'general.alignment': found type i32, legal u32"),
    ("f63-alignment-u64", build([kv(ALIGN, 10, struct.pack("<Q", 32))]), "key 'general.alignment': found type u64, legal u32"),
    ("f63-alignment-array", build([arr(ALIGN, U32, 1, struct.pack("<I", 32))]), "key 'general.alignment': found type arr[u32], legal u32"),
    ("f63-alignment-string", build([kv(ALIGN, STR, text(b"32"))]), "key 'general.alignment': found type str, legal u32"),
    ("f64-empty-key", build([kv(b"", U8, b"\0")], data=None), "key 1 of 1: found an empty key, legal 1 to 65535 bytes"),
    ("f65-dim-0", build((), [info(b"a", [0])], F32_DATA), "tensor 'a': found dims [0], legal dims of at least 1"),
    ("f65-dims-4-0", build((), [info(b"a", [4, 0])], F32_DATA), "tensor 'a': found dims [4, 0], legal dims of at least 1"),
    ("f65-no-dims", build((), [info(b"a", [])], F32_DATA), "tensor 'a': found 0 dims, legal 1 to 4"),
    ("f65-five-dims", build((), [info(b"a", [1, 1, 1, 1, 1])], F32_DATA), "tensor 'a': found 5 dims, legal 1 to 4"),
    ("f65-dims-count-2^32-1", build((), [text(b"a") + b"\xff" * 40], F32_DATA), "tensor 'a': found 4294967295 dims, legal 1 to 4"),
    ("f66-size-wraps", build((), [info(b"a", [1152, 2**42 + 1], 8)], bytes(1024)), f"found {36 * 34 * (2**42 + 1)} bytes (q8_0, dims [1152, 439804651"),
    ("f66-size-beyond-2^128", build((), [info(b"a", [2**63, 2**63, 2**63])], bytes(64)), "tensor 'a': found 3138550867693340381917894711603833208051177722232"),
    ("f67-n-tensors", b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "found 1152921504606846976 tensors and 0 keys"),
    ("f67-n-keys", b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "found 0 tensors and 1152921504606846976 keys"),
    ("f67-key-length", build([struct.pack("<Q", 2**63) + bytes(16)]), "key 1 of 1: found a key of 9223372036854775808 bytes, legal 1 to 65535"),
    ("f67-string-length", build([kv(b"k", STR, struct.pack("<Q", 2**63))]), "key 'k': found a string of 9223372036854775808 bytes at byte 45, legal the 19 "),
    ("f67-array-of-u64", build([arr(b"k", 10, 2**61, b"")]), "key 'k': found an array of 2305843009213693952 u64 of 18446744073709551616 bytes"),
    ("f67-array-of-str", build([arr(b"k", STR, 2**61, bytes(64))]), "key 'k': found 2305843009213693952 strings at byte 49 that run past the end"),
    ("f67-string-in-array", build([arr(b"k", STR, 2, text(b"ab") + struct.pack("<Q", 2**64 - 1))]), "key 'k': found 2 strings at byte 49 that run past"),
    ("f67-last-string-in-array", build([arr(b"k", STR, 1, struct.pack("<Q", 99))]), "key 'k': found 1 strings at byte 49 that run past the end"),
    ("f67-name-length", build((), [struct.pack("<Q", 2**63) + bytes(16)]), "tensor 1 of 1: found a name of 9223372036854775808 bytes, legal 1 to 63"),
    ("f69-more-data-than-file", build((), [info(b"a", [262144])], bytes(16)), "tensor 'a': found 1048576 bytes (f32, dims [262144]) at byte 64, ending at"),
    ("f69-offset-2^62", build((), [info(b"a", [4], 0, 2**62)], bytes(16)), "tensor 'a': found 16 bytes (f32, dims [4]) at byte 4611686018427387968"),
    ("f69-offset-2^64-32", build((), [info(b"a", [4], 0, 2**64 - 32)], bytes(16)), "tensor 'a': found 16 bytes (f32, dims [4]) at byte 184467440737095516"),
    ("f70-ends-after-infos", build((), [info(b"a", [4])], None), "tensor 'a': found 16 bytes (f32, dims [4]) at byte 64, ending at 80, legal an end within the file's 57"),
    ("f70-offset-unaligned", build((), [info(b"a", [4], 0, 8)], bytes(64)), "tensor 'a': found offset 8, legal a multiple of the alignment 32"),
    ("f70-overlap", build((), [info(b"a", [9]), info(b"b", [4], 0, 32)], bytes(96)), "tensor 'b': found data from byte 128 inside that of 'a', legal byte 132"),
    ("f70-same-data-twice", build((), [info(b"b", [4]), info(b"a", [4])], bytes(96)), "tensor 'a': found data from byte 96 inside that of 'b'"),
    ("f71-element-type-13", build([arr(b"k", 13, 1, bytes(8))]), "key 'k': found element type 13, legal 0 u8, 1 i8"),
    ("f71-value-type-13", build([kv(b"k", 13, bytes(8))]), "key 'k': found value type 13, legal 0 u8, 1 i8"),
    ("f71-nested-array", build([arr(b"k", ARR, 1, bytes(16))]), "key 'k': found an array of arrays, legal arrays of numbers, bools and strings"),
    ("f71-tensor-type-99", build((), [info(b"a", [32], 99)], F32_DATA), "tensor 'a': found type id 99, which is unknown, legal the ids 0 1 2 3 6 7"),
    ("f71-tensor-type-removed", build((), [info(b"a", [32], 31)], F32_DATA), "tensor 'a': found type id 31, which is unknown"),
    ("f72-name-of-64", build((), [info(b"a" * 64, [4])], F32_DATA), "tensor 1 of 1: found a name of 64 bytes, legal 1 to 63 bytes"),
    ("f72-name-empty", build((), [info(b"", [4])], F32_DATA), "tensor 1 of 1: found an empty name, legal 1 to 63 bytes"),
    ("f72-name-not-utf-8", build((), [info(b"\xff\xfe", [4])], F32_DATA), r"tensor 1 of 1: found the name b'\xff\xfe', legal UTF-8 (byte 0 is not)"),
    ("f72-key-not-utf-8", build([u32(b"a\xc3", 1)]), r"key 1 of 1: found the name b'a\xc3', legal UTF-8 (byte 1 is not)"),
    ("f73-key-twice", build([u32(b"general.name", 1), u32(b"general.name", 1)]), "key 'general.name': found the key twice, legal once"),
    ("f73-tensor-twice", build((), [info(b"a", [4]), info(b"a", [4], 0, 32)], bytes(64)), "tensor 'a': found the name twice, legal once"),
    ("f78-big-endian", b"GGUF\0\0\0\3" + bytes(16), "found a big-endian file (version bytes 00000003), legal little-endian files of versions 2 and 3"),
    ("f80-lone-shard", build([kv(b"split.no", 2, b"\0\0"), kv(b"split.count", 2, b"\3\0")]), "key 'split.count': found 3: one file of a model split into 3"),
    ("f80-split-count-text", build([kv(b"split.count", STR, text(b"3"))]), "key 'split.count': found type str, legal an integer type"),
    ("version-1", build(version=1), "found version 1, an old layout: convert the model anew, legal versions 2 and 3"),
    ("version-0", build(version=0), "found version 0, legal versions 2 and 3"),
    ("version-4", build(version=4), "found version 4, legal versions 2 and 3"),
    ("empty-file", b"", "cannot be read: the file is empty"),
    ("magic-cut", b"GGU", "found the magic bytes of 4 bytes at byte 0, legal the 3 bytes left in the file"),
    ("magic-of-another-format", b"PK\x03\x04" + bytes(60), r"found the first bytes b'PK\x03\x04', legal b'GGUF'"),
    ("lfs-pointer", b"version https://git-lfs.github.com/spec/v1\n", "found the first bytes b'vers': a Git LFS pointer, fetch the file itself"),
    ("bool-of-2", build([kv(b"k", BOOL, b"\2")]), "key 'k': found a bool of 2, legal 0 and 1"),
    ("bool-of-2-in-array", build([arr(b"k", BOOL, 3, b"\0\1\2")]), "key 'k': found a bool of 2, legal 0 and 1"),
    ("key-of-65536", build([u32(b"k" * 65536, 1)]), "key 1 of 1: found a key of 65536 bytes, legal 1 to 65535 bytes"),
    ("row-no-multiple-of-block", build((), [info(b"a", [896], 12)], bytes(2048)), "tensor 'a': found type q4_K with rows of 896 elements, legal a multiple"),
    ("control-letters-in-key", build([u32(b"a\n\x1b[31m\x07", 1)] * 2), r"key 'a\n\x1b[31m\x07': found the key twice"),
    ("long-key-is-cut", build([u32(b"k" * 65535, 1)] * 2), f"key '{'k' * 77}'...: found the key twice"),
]


@pytest.mark.parametrize(("raw", "says"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_file_ends_in_one_line(put, raw, says):
    assert says in refusal(put(raw))


def test_size_of_the_files_that_reports_name():
    sizes = {name: len(raw) for name, raw, _ in BAD}
    assert (sizes["f62-zero-alignment"], sizes["f64-empty-key"], sizes["f67-n-tensors"]) == (57, 37, 24)


def test_path_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "found a device, pipe or socket, legal a regular file" in refusal(tmp_path / "pipe")
    assert "found a folder, legal a regular file" in refusal(tmp_path)
    assert refusal(tmp_path / "absent") == "cannot be read: No such file or directory"
    with pytest.raises(FormatError, match="cannot be read: embedded null"):
        read_gguf("a\0b")


def test_every_kind_of_value(put):
    """All scalar types and arrays of them, strings that are empty or not UTF-8: values, exact types, order."""
    values = {0: 255, 1: -128, 2: 65535, 3: -32768, 4: 2**32 - 1, 5: -(2**31), 6: 1.5, 7: True, 10: 2**64 - 1, 11: -(2**63), 12: 0.1}
    kvs = [kv(f"s{t}".encode(), t, struct.pack(f"<{SCALARS[t]}", v)) for t, v in values.items()]
    kvs += [arr(f"a{t}".encode(), t, 2, struct.pack(f"<2{SCALARS[t]}", v, 0)) for t, v in values.items()]
    kvs += [arr(f"e{t}".encode(), t, 0, b"") for t in (*values, STR)]
    kvs += [kv(b"empty", STR, text(b"")), kv(b"bytes", STR, text(b"a\xff\xed\xa0\x80")), kv("schlüssel".encode(), STR, text("ü\0".encode()))]
    kvs += [arr(b"strings", STR, 4, b"".join(map(text, [b"a", b"", b"\xff", "中".encode()])))]
    raw = build(kvs)
    with read_gguf(put(raw)) as f:
        assert (f.version, f.alignment, f.size, f.data_offset, f.tensors) == (3, 32, len(raw), len(raw), {})
        for t, v in values.items():
            name = str(GGUFValueType(t))
            assert f.metadata[f"s{t}"] == v and type(f.metadata[f"s{t}"]) is type(v)
            array = f.metadata[f"a{t}"]
            assert array.tolist() == [v, 0] and array.dtype == np.dtype(SCALARS[t]) and not array.flags.writeable
            assert (str(f.types[f"s{t}"]), str(f.types[f"a{t}"]), len(f.metadata[f"e{t}"])) == (name, f"arr[{name}]", 0)
        assert f.metadata["empty"] == "" and f.metadata["schlüssel"] == "ü\0"
        assert f.metadata["bytes"].encode("utf-8", "surrogateescape") == b"a\xff\xed\xa0\x80"
        strings = f.metadata["strings"]
        assert isinstance(strings, StringArray) and strings == ["a", "", "\udcff", "中"]
        assert (strings[-1], strings[1:3], list(reversed(strings))[0], strings.index("\udcff")) == ("中", ["", "\udcff"], "中", 2)
        assert strings != ["a", "", "\udcff"] and strings != ["a", "", "x", "中"] and strings != "a" and f.metadata["e8"] == []
        assert list(f.metadata) == list(f.types) and list(f.metadata)[:2] == ["s0", "s1"]
    assert check_gguf(f.path) == ["key 'bytes': 1 of 1 strings not UTF-8", "key 'strings': 1 of 4 strings not UTF-8"]


def test_tensors_are_views_of_the_file(put):
    data = np.arange(24, dtype=np.float32)
    f = read_gguf(put(build((), [info(b"x", [4, 3, 2], 0, 32), info(b"one", [1, 1], 26)], struct.pack("<i", -7) + bytes(28) + data.tobytes())))
    x = f.tensors["x"]
    assert x == TensorInfo("x", (4, 3, 2, 1), 3, dtypes.F32, f.data_offset + 32, 96) and x.dims == (4, 3, 2) and x.shape == (2, 3, 4)
    assert np.array_equal(f.array("x"), data.reshape(2, 3, 4)) and f.array("one").tolist() == [[-7]]
    assert f.raw("x").tobytes() == data.tobytes() and np.shares_memory(f.raw("x"), f.array("x"))
    assert not f.raw("x").flags.writeable and not f.array("x").flags.writeable
    with pytest.raises(FormatError, match=r"tensor 'y': not one of the file's 2 tensors"):
        f.raw("y")
    kept = f.array("x")
    f.close()
    with pytest.raises(ValueError, match="closed"):
        f.raw("x")
    assert kept[1, 2, 3] == 23


def test_empty_string_value_and_other_legal_oddities(put):
    name = "n" * 63
    raw = build([u32(ALIGN, 1), kv(b"v", STR, text(b""))], [info(name.encode(), [3], 24)], b"\1\2\xff", version=2, align=1)
    f = read_gguf(put(raw))
    assert (f.version, f.alignment, f.metadata["v"], f.array(name).tolist()) == (2, 1, "", [1, 2, -1])
    assert check_gguf(f.path) == []
    big = read_gguf(put(build([u32(ALIGN, 2**31)], data=None)))
    assert (big.alignment, big.data_offset) == (2**31, 2**31)  # no tensor, so nothing has to be there


def test_fault_68_a_large_vocabulary_is_read_in_under_a_second(tmp_path):
    tokens, merges = [f"token{i}" for i in range(131072)], [f"left{i} right{i}" for i in range(250000)]
    write_gguf(tmp_path / "v.gguf", {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}, {})
    took = []
    for _ in range(3):
        start = time.perf_counter()
        f = read_gguf(tmp_path / "v.gguf")
        took.append(time.perf_counter() - start)
    assert min(took) < 1.0
    assert f.metadata["tokenizer.ggml.tokens"] == tokens and f.metadata["tokenizer.ggml.merges"] == merges


@pytest.mark.parametrize("item", [0, 1, 2, 3, 4, 5, 10, 11])
def test_fault_74_integer_arrays_of_any_width(put, item):
    """The reader gives the numbers and names the type; whether they make sense is the vocabulary's to say."""
    f = read_gguf(put(build([arr(b"tokenizer.ggml.token_type", item, 3, struct.pack(f"<3{SCALARS[item]}", 1, 3, 6))])))
    assert f.metadata["tokenizer.ggml.token_type"].tolist() == [1, 3, 6]
    assert f.types["tokenizer.ggml.token_type"].item == item


@pytest.mark.parametrize("strings", [["<unk>", "a"], [b"<unk>", b"a"], [], [""], ["a", b"\xff"]], ids=repr)
def test_fault_75_lists_of_str_and_bytes_round_trip(tmp_path, strings):
    write_gguf(tmp_path / "m.gguf", {"tokens": strings}, {})
    back = read_gguf(tmp_path / "m.gguf")
    assert [s.encode("utf-8", "surrogateescape") for s in back.metadata["tokens"]] == [s if isinstance(s, bytes) else s.encode() for s in strings]
    assert str(back.types["tokens"]) == "arr[str]"


@pytest.mark.parametrize(("kind", "ne", "nbytes"), [("q8_0", (64, 3), 204), ("q4_K", (256, 5), 720), ("iq4_nl", (32, 2), 36)])
def test_fault_76_quantized_tensors_keep_shape_and_bytes(tmp_path, kind, ne, nbytes):
    raw = np.random.default_rng(76).integers(0, 256, nbytes, np.uint8)
    write_gguf(tmp_path / "a.gguf", {}, {"w": (raw, kind, ne)})
    a = read_gguf(tmp_path / "a.gguf")
    assert (a.tensors["w"].dims, a.tensors["w"].nbytes, a.raw("w").tobytes()) == (ne, nbytes, raw.tobytes())
    assert a.array("w").shape == (ne[1], nbytes // ne[1])
    write_gguf(tmp_path / "b.gguf", {}, {"w": (a.array("w"), kind, None)})  # the byte shape alone is enough
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    (seen,) = gguf.GGUFReader(tmp_path / "a.gguf").tensors
    assert (seen.shape.tolist(), seen.tensor_type.name.lower(), seen.data.tobytes()) == (list(ne), kind.lower(), raw.tobytes())


def test_fault_77_bf16_is_decoded_with_the_element_shape(put):
    f = read_gguf(put(build((), [info(b"a", [3], 30)], bytes.fromhex("803f00c0003f"))))
    assert f.array("a").dtype == np.float32 and f.array("a").tolist() == [1.0, -2.0, 0.5]
    assert f.raw("a").tobytes() == bytes.fromhex("803f00c0003f")


@pytest.mark.parametrize("kind", [2, 8, 1])
def test_fault_78_a_big_endian_file_is_refused_whatever_it_holds(put, kind):
    head = b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + struct.pack(">Q", 1) + b"a" + struct.pack(">IQIQ", 1, 32, kind, 0)
    assert "big-endian file (version bytes 00000003)" in refusal(put(head + bytes(-len(head) % 32) + bytes(64)))


def test_fault_80_one_of_one_is_a_normal_file(put):
    for count in (0, 1):
        f = read_gguf(put(build([kv(b"split.no", 2, b"\0\0"), kv(b"split.count", 2, bytes([count, 0]))], [info(b"a", [4])], bytes(32)), "m-00001-of-00001.gguf"))
        assert f.metadata["split.count"] == count and f.array("a").tolist() == [0, 0, 0, 0]


def test_fault_88_a_k_quant_row_that_does_not_fit_is_refused_before_a_byte_is_written(tmp_path):
    with pytest.raises(FormatError, match=r"tensor 'w': found type q4_K with rows of 896 elements, legal a multiple of its block of 256"):
        with GGUFWriter(tmp_path / "m.gguf", "mamba2") as w:
            w.add_tensor("v", np.ones(4, np.float32))
            w.add_tensor_info("w", "q4_K", (896, 2))
    assert list(tmp_path.iterdir()) == []


def test_fault_88_a_killed_writer_leaves_no_final_file(tmp_path, root):
    target = tmp_path / "m.gguf"
    target.write_bytes(b"the old file")
    code = (
        "import os, sys, signal, numpy as np\nfrom pyggml.gguf import GGUFWriter\n"
        "w = GGUFWriter(sys.argv[1], 'mamba2')\nw.add_tensor_info('a', 'f32', [65536])\nw.add_tensor_info('b', 'f32', [65536])\n"
        "w.write_data('a', np.ones(65536, np.float32))\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(target)], cwd=root, timeout=60).returncode == -signal.SIGKILL
    assert target.read_bytes() == b"the old file"
    (left,) = (p.name for p in tmp_path.iterdir() if p != target)
    assert left.startswith(".pyggml-") and left.endswith(".part")


def test_fault_88_an_error_or_missing_data_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), GGUFWriter(tmp_path / "m.gguf", "mamba2") as w:
        w.add_tensor_info("a", "f32", [4])
        w.write_data("a", bytes(8))
        raise KeyboardInterrupt
    w = GGUFWriter(tmp_path / "m.gguf", "mamba2")
    w.add_tensor_info("a", "f32", [4])
    w.write_data("a", bytes(8))
    with pytest.raises(FormatError, match=r"tensor 'a': found 8 bytes of data, legal 16"):
        w.close()
    with pytest.raises(FormatError, match="after the file was closed"):
        w.add("k", 1)
    assert list(tmp_path.iterdir()) == []


def test_fault_88_a_full_disk_is_one_line(tmp_path, root):
    code = (
        "import resource, signal, sys, numpy as np\nfrom pyggml.errors import FormatError\nfrom pyggml.gguf import write_gguf\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    write_gguf(sys.argv[1], {}, {'a': np.ones(65536, np.float32)})\nexcept FormatError as err:\n    sys.stdout.write(str(err))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.gguf")], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{tmp_path / 'm.gguf'}: cannot be written: File too large", done.stderr
    assert list(tmp_path.iterdir()) == []


def small_file() -> bytes:
    """A valid file with each kind of value and two tensors, its data starting at a multiple of 32."""
    kvs = [kv(b"general.architecture", STR, text(b"mamba2")), u32(ALIGN, 32), kv(b"f", F32, struct.pack("<f", 1.5)), kv(b"b", BOOL, b"\1")]
    kvs += [arr(b"ints", I32, 3, struct.pack("<3i", 1, -2, 3)), arr(b"strs", STR, 2, text(b"ab") + text(b"")), arr(b"bools", BOOL, 2, b"\0\1")]
    infos = [info(b"w", [32, 2], 8), info(b"v", [5], 0, 96)]
    return build(kvs, infos, bytes(68 + 28) + struct.pack("<5f", 1, 2, 3, 4, 5) + bytes(12))


def touch(path: Path) -> bool:
    """Reads all of a file; False when it is refused."""
    try:
        f = read_gguf(path)
    except FormatError as err:
        assert len(str(err).splitlines()) == 1
        return False
    for value in f.metadata.values():
        if not isinstance(value, (str, int, float)):
            len(list(value))
    for name, tensor in f.tensors.items():
        assert f.raw(name).nbytes == tensor.nbytes
        f.array(name).sum(dtype=np.float64)
    check_gguf(path)
    return True


def test_a_file_cut_at_any_byte_is_refused(put):
    raw = small_file()
    assert touch(put(raw))
    assert [n for n in range(len(raw)) if touch(put(raw[:n]))] == list(range(len(raw) - 12, len(raw)))  # only the last padding may be missing


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_file_with_any_header_byte_changed_is_read_or_refused(put):
    raw = small_file()
    tracemalloc.start()
    for at in range(len(raw) - 128):
        for value in {raw[at] ^ 1, raw[at] ^ 0x80, raw[at] ^ 0xFF, 0, 0x7F, 0xFF}:
            touch(put(raw[:at] + bytes([value]) + raw[at + 1 :]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(small_file()) - 8), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
@pytest.mark.filterwarnings("ignore")
def test_a_file_with_runs_of_bytes_changed_is_read_or_refused(tmp_path, changes):
    raw = bytearray(small_file())
    for at, run in changes:
        raw[at : at + len(run)] = run
    (tmp_path / "m.gguf").write_bytes(raw)
    touch(tmp_path / "m.gguf")


def test_written_bytes_are_those_built_by_hand(tmp_path):
    metadata = {"general.architecture": "mamba2", "general.alignment": 32, "f": 1.5, "b": True, "ints": [1, -2, 3], "strs": ["ab", ""], "bools": [False, True]}
    tensors = {"w": (np.zeros(68, np.uint8), "q8_0", (32, 2)), "v": np.arange(1, 6, dtype=np.float32)}
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    assert (tmp_path / "m.gguf").read_bytes() == small_file()


def test_written_in_pieces(tmp_path):
    """Streamed and held tensors in one file; the same bytes as written at once."""
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 7)).astype(np.float32), rng.integers(0, 256, 36, np.uint8), np.arange(4, dtype=np.int64)
    write_gguf(tmp_path / "at-once.gguf", {"general.architecture": "x", "general.alignment": 64}, {"a": a, "b": (b, "iq4_nl", (64,)), "c": c})
    with GGUFWriter(tmp_path / "pieces.gguf", "x", alignment=64) as w:
        w.add_tensor_info("a", "f32", (7, 3))
        w.add_tensor("b", b, "iq4_nl", (64,))
        w.add_tensor_info("c", dtypes.I64, (4,))
        w.write_data("a", a[:2])
        w.write_data("a", a[2].tobytes())
        w.write_data("c", c)
    assert (tmp_path / "pieces.gguf").read_bytes() == (tmp_path / "at-once.gguf").read_bytes()
    assert check_gguf(tmp_path / "pieces.gguf") == []


def test_a_large_tensor_never_sits_in_memory(tmp_path):
    chunk = np.ones(1 << 18, np.float32)
    tracemalloc.start()
    with GGUFWriter(tmp_path / "m.gguf", "x") as w:
        w.add_tensor_info("a", "f32", (1 << 18, 32))
        for _ in range(32):
            w.write_data("a", chunk)
    with read_gguf(tmp_path / "m.gguf") as f:
        assert f.array("a")[31, -1] == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f.size > 1 << 25 and peak < 1 << 20


def test_a_file_can_be_rewritten_onto_itself(put):
    path = put(small_file())
    with read_gguf(path) as f:
        write_gguf(path, f.metadata, {t.name: (f.raw(t.name), t.dtype, t.dims) for t in f.tensors.values()}, types=f.types)
    assert path.read_bytes() == small_file()


def test_arrays_in_any_memory_order(tmp_path):
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_gguf(tmp_path / "m.gguf", {"k": np.array([1, 2], ">u2")}, {"t": a.T, "strided": a[:, ::2], "big": a.astype(">f4")})
    f = read_gguf(tmp_path / "m.gguf")
    assert np.array_equal(f.array("t"), a.T) and np.array_equal(f.array("strided"), a[:, ::2]) and np.array_equal(f.array("big"), a)
    assert f.metadata["k"].tolist() == [1, 2] and str(f.types["k"]) == "arr[u16]"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (0, "u32"), (2**32 - 1, "u32"), (-1, "i32"), (-(2**31), "i32"), (2**32, "u64"), (2**64 - 1, "u64"), (-(2**31) - 1, "i64"),
        (True, "bool"), (1.5, "f32"), (float("-inf"), "f32"), ("x", "str"), (b"x", "str"), (np.float64(0.1), "f64"), (np.int8(-3), "i8"), (np.bool_(False), "bool"),
        ([1, 2**31 - 1], "arr[i32]"), ([0, 2**31], "arr[u32]"), ([-1, 2**31], "arr[i64]"), ([0, 2**63], "arr[u64]"), ((1.5, 2), "arr[f32]"), ([np.int64(1)], "arr[i32]"),
        ([True, False], "arr[bool]"), (np.array([1, 2], np.uint16), "arr[u16]"), (np.array([0.1]), "arr[f64]"), (np.array([True]), "arr[bool]"),
    ],
    ids=repr,
)  # fmt: skip
def test_inferred_type(tmp_path, value, kind):
    write_gguf(tmp_path / "m.gguf", {"k": value}, {})
    f = read_gguf(tmp_path / "m.gguf")
    back = f.metadata["k"]
    assert str(f.types["k"]) == kind
    assert (list(back) == list(value)) if kind.startswith("arr") else back == (value.decode() if isinstance(value, bytes) else value)


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (300, "u8", "found 300, legal 0 to 255 for type u8"),
        (-1, "u64", "found -1, legal 0 to 18446744073709551615 for type u64"),
        (1.0, "u32", "found 1.0 (float), legal what type u32 holds"),
        (True, "u32", "found True (bool), legal what type u32 holds"),
        (1, "bool", "found 1 (int), legal what type bool holds"),
        (1, "str", "found 1 (int), legal str or bytes for type str"),
        ("x", "f32", "found 'x', legal what type f32 holds"),
        (1e39, "f32", "found 1e+39, legal magnitudes up to 3.4028234"),
        (10**400, "f64", "found an integer beyond the range of f64"),
        (2**64, None, "found integers from 18446744073709551616 to 18446744073709551616, legal what one of u64 and i64 holds"),
        ([-1, 2**63], None, "found integers from -1 to 9223372036854775808, legal"),
        ([1, "a"], None, "found a list of int, str, legal a list of str or bytes, of bool, or of int and float"),
        ([[1]], None, "found a list of list, legal"),
        ([1, -1], "arr[u16]", "found integers from -1 to 1, legal 0 to 65535 for type u16"),
        ([1], "u32", "found an array of 1, legal one value for type u32"),
        (1, "arr[u32]", "found one value, 1 (int), legal a list or NumPy array for type arr[u32]"),
        (np.zeros((2, 2)), None, "found an array of 2 dims, legal one dim"),
        (np.zeros(2, np.float16), None, "found NumPy type float16, legal bool, f32, f64 and the integer types"),
        (np.zeros(2), "arr[i32]", "found array([0., 0.]) (ndarray), legal what type i32 holds"),
        ({"a": 1}, None, "found {'a': 1} (dict), legal a bool, int, float, str, bytes, a list"),
        (None, None, "found None (NoneType), legal"),
        ("\ud800", None, r"found the lone surrogate '\ud800' in a string, legal text"),
        (1, "u33", "found value type 'u33', legal u8 i8"),
        (1, "arr", "found value type 'arr', legal u8 i8"),
        (1, "arr[arr]", "legal elements are numbers, bools and strings"),
    ],
    ids=repr,
)
def test_value_that_does_not_fit_is_refused(tmp_path, value, kind, says):
    with pytest.raises(FormatError) as caught:
        GGUFWriter(tmp_path / "m.gguf", None).add("k", value, kind)
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1


ONES = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda w: w.add("", 1), "found an empty key"),
        (lambda w: w.add("k" * 65536, 1), "found a key of 65536 bytes, legal 1 to 65535"),
        (lambda w: w.add("general.architecture", "y"), "key 'general.architecture': found the key twice"),
        (lambda w: w.add("general.alignment", 24), "key 'general.alignment': found 24, legal a power of two"),
        (lambda w: w.add("general.alignment", 32, "u64"), "key 'general.alignment': found type u64, legal u32"),
        (lambda w: w.add_tensor("a" * 64, ONES), "found a name of 64 bytes"),
        (lambda w: w.add_tensor("\udcff", ONES), "legal UTF-8"),
        (lambda w: (w.add_tensor("a", ONES), w.add_tensor("a", ONES)), "tensor 'a': found the name twice"),
        (lambda w: w.add_tensor("a", [1.0]), "tensor 'a': found data of class list, legal a NumPy array"),
        (lambda w: w.add_tensor("a", np.ones(4, bool)), "tensor 'a': no type for NumPy arrays of bool"),
        (lambda w: w.add_tensor("a", np.ones(4, np.uint8)), "tensor 'a': no type for NumPy arrays of uint8"),
        (lambda w: w.add_tensor("a", np.float32(1)), "tensor 'a': found data of class float32"),
        (lambda w: w.add_tensor("a", np.array(1.0)), "tensor 'a': found 0 dims, legal 1 to 4"),
        (lambda w: w.add_tensor("a", np.ones((1, 1, 1, 1, 1))), "tensor 'a': found 5 dims, legal 1 to 4"),
        (lambda w: w.add_tensor("a", np.ones((2, 0))), "tensor 'a': found dims [0, 2], legal dims of at least 1"),
        (lambda w: w.add_tensor("a", ONES, "q8_0"), "tensor 'a': found a NumPy array of float32, legal uint8 (bytes) for type q8_0"),
        (lambda w: w.add_tensor("a", ONES, "f16"), "tensor 'a': found a NumPy array of float32, legal float16 or uint8 (bytes) for type f16"),
        (lambda w: w.add_tensor("a", ONES, "q9"), "tensor 'a': unknown type 'q9'"),
        (lambda w: w.add_tensor("a", ONES, ne=(5,)), "tensor 'a': found 16 bytes of data, legal 20 for type f32 and dims [5]"),
        (lambda w: w.add_tensor("a", np.ones(33, np.uint8), "q8_0"), "tensor 'a': found bytes of shape (33,) without ne"),
        (lambda w: w.add_tensor("a", np.ones(16, np.uint8), "f32"), "tensor 'a': found bytes of shape (16,) without ne"),
        (lambda w: w.add_tensor_info("a", "f32", (2**40, 2**40)), "tensor 'a': found tensors of 4835703278458516698824704 bytes in all"),
        (lambda w: w.write_data("a", b""), "tensor 'a': found data for it, legal no more data: all tensors are complete"),
        (lambda w: (w.add_tensor_info("b", "f32", [1]), w.write_data("a", b"")), "tensor 'a': found data for it, legal data for 'b'"),
        (lambda w: (w.add_tensor_info("a", "f32", [1]), w.write_data("a", bytes(5))), "tensor 'a': found 5 bytes of data, legal 4"),
        (lambda w: (w.add_tensor_info("a", "f32", [1]), w.write_data("a", np.ones(1))), "tensor 'a': found a NumPy array of float64"),
        (lambda w: (w.add_tensor_info("a", "f32", [2]), w.write_data("a", bytes(4)), w.add("k", 1)), "found an addition after the first write_data"),
    ],
)
def test_writer_refuses_in_one_line_and_leaves_nothing(tmp_path, call, says):
    with pytest.raises(FormatError) as caught, GGUFWriter(tmp_path / "m.gguf", "x") as w:
        call(w)
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_place_that_cannot_be_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, says in [(tmp_path, "not a regular file"), (tmp_path / "pipe", "not a regular file"), (tmp_path / "no" / "m.gguf", "No such file"), ("a\0b", "null")]:
        with pytest.raises(FormatError, match=f"cannot be written: .*{says}"):
            GGUFWriter(path, "x")
    with pytest.raises(FormatError, match="found version 1, legal 2 and 3"):
        GGUFWriter(tmp_path / "m.gguf", "x", version=1)


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "m.gguf").symlink_to(tmp_path / "real" / "m.gguf")
    write_gguf(tmp_path / "m.gguf", {}, {"a": ONES})
    assert (tmp_path / "m.gguf").is_symlink() and [p.name for p in (tmp_path / "real").iterdir()] == ["m.gguf"]


NUMBERS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(width=32), st.booleans(), st.text(st.characters(exclude_categories=["Cs"])), st.binary())
LISTS = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    st.lists(st.floats(width=32), min_size=1),
    st.lists(st.booleans(), min_size=1),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]))),
    st.lists(st.binary()),
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=15).filter(lambda s: s not in ("general.alignment", "split.count"))
PLAIN = st.sampled_from([np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64])
ARRAYS = st.builds(
    lambda t, shape, seed: np.random.default_rng(seed).integers(-100, 100, shape).astype(t), PLAIN, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 9)
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(NAMES, NUMBERS | LISTS, max_size=6), st.dictionaries(NAMES, ARRAYS, max_size=4), st.sampled_from([1, 2, 8, 32, 64, 4096]), st.sampled_from([2, 3])
)
def test_round_trip(tmp_path, metadata, tensors, alignment, version):
    write_gguf(tmp_path / "a.gguf", metadata, tensors, alignment=alignment, version=version)
    with read_gguf(tmp_path / "a.gguf") as f:
        added = {} if alignment == 32 else {"general.alignment": alignment}
        for (key, wanted), (name, got) in zip((added | metadata).items(), f.metadata.items(), strict=True):
            assert key == name
            wanted, got = (list(v) if isinstance(v, (list, np.ndarray, StringArray)) else [v] for v in (wanted, got))
            wanted = [w.decode("utf-8", "surrogateescape") if isinstance(w, bytes) else w for w in wanted]
            assert all(w == g or (w != w and g != g) for w, g in zip(wanted, got, strict=True))
        assert (f.version, f.alignment, list(f.tensors)) == (version, alignment, list(tensors))
        for name, wanted in tensors.items():
            got = f.array(name)
            assert got.dtype == wanted.dtype and np.array_equal(got, wanted) and f.tensors[name].offset % alignment == 0
        assert all("not UTF-8" in line for line in check_gguf(f.path))
        again = {t.name: (f.raw(t.name), t.dtype, t.dims) for t in f.tensors.values()}
        write_gguf(tmp_path / "b.gguf", f.metadata, again, types=f.types, version=f.version)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def same_as_gguf_package(path: Path) -> None:
    """Every key, type, value and tensor of a file is what the gguf package reads."""
    theirs = gguf.GGUFReader(path)
    with read_gguf(path) as ours:
        fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
        assert list(fields) == list(ours.metadata)
        for key, field in fields.items():
            value, kind = ours.metadata[key], ours.types[key]
            assert kind == KeyType(GGUFValueType(int(field.types[0])), GGUFValueType(int(field.types[-1])) if len(field.types) > 1 else kind.item)
            assert (list(value) if kind.item is not None else value) == (field.contents() if len(field.data) else [])
        assert (ours.alignment, ours.data_offset) == (theirs.alignment, theirs.data_offset)
        assert list(ours.tensors) == [t.name for t in theirs.tensors]
        for t in theirs.tensors:
            mine = ours.tensors[t.name]
            assert (list(mine.dims), mine.dtype.gguf_id, mine.offset, mine.nbytes) == (t.shape.tolist(), int(t.tensor_type), t.data_offset, t.n_bytes)
            assert ours.raw(t.name).tobytes() == t.data.tobytes()
            if t.tensor_type.name == "BF16":
                assert np.array_equal(ours.array(t.name), gguf.dequantize(t.data, t.tensor_type))
            else:
                assert ours.array(t.name).dtype == t.data.dtype and np.array_equal(ours.array(t.name), t.data, equal_nan=t.data.dtype.kind == "f")


def block_bytes(kind: dtypes.DType, rows: int = 3) -> np.ndarray:
    return np.random.default_rng(kind.gguf_id).integers(0, 256, (rows, kind.nbytes), np.uint8)


def all_types_but(*names: str) -> list[dtypes.DType]:
    return [t for t in dtypes.ALL if t.name not in names and t.np is None]


def test_files_of_the_gguf_package_are_read_equal(tmp_path):
    w = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba2")
    w.add_custom_alignment(64)
    numbers = {"uint8": 255, "int8": -128, "uint16": 65535, "int16": -5, "uint32": 2**32 - 1, "int32": -7, "uint64": 2**64 - 1, "int64": -(2**63), "float32": 1.5, "float64": 0.1}
    for name, number in numbers.items():
        getattr(w, f"add_{name}")(f"k.{name}", number)
    w.add_bool("k.bool", True)
    w.add_string("k.string", "größe")
    for key, values in {"ints": [1, -2], "floats": [0.5, 2.5], "bools": [True, False], "strings": ["a", "", "中"]}.items():
        w.add_array(f"k.{key}", values)
    plain = {t: np.arange(-6, 6).reshape(2, 3, 2).astype(t) for t in ("float32", "float16", "float64", "int8", "int16", "int32", "int64")}
    for name, array in plain.items():
        w.add_tensor(f"t.{name}", array)
    w.add_tensor("t.bf16", np.arange(6, dtype=np.uint16).reshape(2, 3).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    for t in all_types_but("q8_1"):  # that package has another size for it, and no file holds it
        w.add_tensor(f"t.{t.name}", block_bytes(t), raw_dtype=gguf.GGMLQuantizationType(t.gguf_id))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    same_as_gguf_package(tmp_path / "m.gguf")
    with read_gguf(tmp_path / "m.gguf") as f:
        assert {k: f.metadata[f"k.{k}"] for k in numbers} == numbers and f.metadata["k.string"] == "größe"
        assert all(np.array_equal(f.array(f"t.{name}"), array) for name, array in plain.items())


def write_every_type(path: Path) -> None:
    metadata = {"general.architecture": "mamba2", "x.tokens": ["a", "", "中"], "x.ids": [1, 2], "x.u8": 7, "x.eps": 1e-5, "x.flags": [True, False], "x.none": []}
    tensors = {t.name: (block_bytes(t), t, None) for t in all_types_but("q8_1")}
    tensors |= {t: np.arange(12).reshape(3, 4).astype(t) for t in ("float32", "float16", "float64", "int8", "int16", "int32", "int64")}
    tensors["bf16"] = (np.arange(6, dtype=np.uint16).reshape(2, 3), "bf16", None)
    write_gguf(path, metadata, tensors, types={"x.u8": "u8", "x.ids": "arr[u64]"})


def test_written_files_are_read_equal_by_the_gguf_package(tmp_path):
    write_every_type(tmp_path / "m.gguf")
    same_as_gguf_package(tmp_path / "m.gguf")


@pytest.fixture(scope="session")
def ggml():
    """ggml's own C library, from the libggml-python wheel."""
    libggml = pytest.importorskip("libggml")
    lib = ctypes.CDLL(str(next(Path(libggml.__file__).parent.rglob("libggml-base.so"))))
    for name, result, arguments in [
        ("ggml_type_size", ctypes.c_size_t, [ctypes.c_int]),
        ("ggml_blck_size", ctypes.c_int64, [ctypes.c_int]),
        ("ggml_type_name", ctypes.c_char_p, [ctypes.c_int]),
        ("gguf_init_from_file", ctypes.c_void_p, [ctypes.c_char_p, GGUFInitParams]),
        ("gguf_get_n_tensors", ctypes.c_int64, [ctypes.c_void_p]),
        ("gguf_get_n_kv", ctypes.c_int64, [ctypes.c_void_p]),
        ("gguf_get_key", ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64]),
        ("gguf_get_data_offset", ctypes.c_size_t, [ctypes.c_void_p]),
        ("gguf_get_tensor_name", ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64]),
        ("gguf_get_tensor_offset", ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int64]),
        ("gguf_get_tensor_type", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64]),
        ("gguf_get_tensor_size", ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int64]),
        ("gguf_free", None, [ctypes.c_void_p]),
    ]:
        getattr(lib, name).restype, getattr(lib, name).argtypes = result, arguments
    return lib


class GGUFInitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def test_block_sizes_are_those_of_ggml(ggml):
    for t in dtypes.ALL:
        name = ggml.ggml_type_name(t.gguf_id).decode()
        assert (t.name, t.block, t.nbytes) == (name, ggml.ggml_blck_size(t.gguf_id), ggml.ggml_type_size(t.gguf_id))


def test_written_files_are_read_equal_by_ggml(tmp_path, ggml):
    write_every_type(tmp_path / "m.gguf")
    read = ggml.gguf_init_from_file(os.fsencode(tmp_path / "m.gguf"), GGUFInitParams(True, None))
    assert read
    with read_gguf(tmp_path / "m.gguf") as f:
        assert [ggml.gguf_get_key(read, i).decode() for i in range(ggml.gguf_get_n_kv(read))] == list(f.metadata)
        start = ggml.gguf_get_data_offset(read)
        assert [(t.name, t.offset, t.dtype.gguf_id, t.nbytes) for t in f.tensors.values()] == [
            (
                ggml.gguf_get_tensor_name(read, i).decode(),
                start + ggml.gguf_get_tensor_offset(read, i),
                ggml.gguf_get_tensor_type(read, i),
                ggml.gguf_get_tensor_size(read, i),
            )
            for i in range(ggml.gguf_get_n_tensors(read))
        ]
    ggml.gguf_free(read)


def test_shared_models_are_read_as_the_gguf_package_reads_them_and_copied_to_the_byte(shared, tmp_path):
    paths = sorted((shared / "models").glob("*.gguf"))
    assert paths
    for path in paths:
        same_as_gguf_package(path)
        assert check_gguf(path) == []
        with read_gguf(path) as f:
            write_gguf(tmp_path / "copy.gguf", f.metadata, {t.name: (f.raw(t.name), t.dtype, t.dims) for t in f.tensors.values()}, types=f.types, version=f.version)
        assert (tmp_path / "copy.gguf").read_bytes() == path.read_bytes()


def test_check_reports_layout(put):
    infos = [info(b"b", [5], 0, 96), info(b"a", [3])]
    raw = build([u32(b"k", 1)], infos, bytes(12) + b"\1\1" + bytes(18) + bytes(64) + bytes(20))
    assert check_gguf(put(raw)) == [
        "tensors: data in another order than the header's, which ggml's reader refuses",
        "tensor 'a': 2 of the 20 padding bytes after it not zero",
        "tensor 'b': a gap of 64 bytes before it, which ggml's reader refuses",
        "end of file: 12 bytes of padding missing after the last tensor",
    ]
    padded = bytearray(build((), [info(b"a", [8])], bytes(32) + b"xyz"))
    padded[60] = 1
    assert check_gguf(put(bytes(padded))) == ["header: 1 of the 7 padding bytes after it not zero", "end of file: 3 bytes after the last tensor"]


def test_check_counts_what_is_not_finite(tmp_path):
    values = np.array([1, np.nan, np.inf, -np.inf, -np.nan, 3e4], np.float64)
    tensors = {t: values.astype(t) for t in ("float16", "float32", "float64")} | {"bf16": (dtypes.f32_to_bf16(values.astype(np.float32)), "bf16", None)}
    write_gguf(tmp_path / "m.gguf", {}, tensors)
    assert check_gguf(tmp_path / "m.gguf") == [f"tensor '{t}': 2 NaN and 2 infinite of 6 values" for t in tensors]


@pytest.mark.parametrize("kind", [t for t in all_types_but("q8_1", "q8_K", "q1_0", "iq1_m", "mxfp4", "nvfp4")], ids=str)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_check_finds_the_scales_of_block_types(tmp_path, kind):
    """One block for each place that a half float could be: NaN is reported for the blocks that the gguf package decodes to NaN."""
    blocks = np.zeros((kind.nbytes // 2, kind.nbytes), np.uint8)
    for i, block in enumerate(blocks):
        block[2 * i : 2 * i + 2] = np.array([np.nan], np.float16).view(np.uint8)
    decoded = gguf.dequantize(blocks, gguf.GGMLQuantizationType(kind.gguf_id))
    wanted = int(np.isnan(decoded).any(axis=1).sum())
    assert wanted in (1, 2)
    write_gguf(tmp_path / "m.gguf", {}, {"w": (blocks, kind, None)})
    assert check_gguf(tmp_path / "m.gguf") == [f"tensor 'w': {wanted} NaN and 0 infinite of {wanted * len(blocks)} scales"]
