"""Reading GGUF files, held against bytes built by hand. `f62` is row 62 of the list of faults that users of other engines met."""

import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import ALIGN, ARR, BOOL, I32, SCALARS, STR, U8, U32, arr, build, info, kv, small_file, text, u32
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyggml import dtypes
from pyggml.errors import FormatError
from pyggml.gguf import GGUFValueType, StringArray, TensorInfo, check_gguf, read_gguf, write_gguf


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
    (
        "f66-size-wraps",
        build((), [info(b"a", [1152, 2**42 + 1], 8)], bytes(1024)),
        f"found {36 * 34 * (2**42 + 1)} bytes (q8_0, dims [1152, 439804651",
    ),
    (
        "f66-size-beyond-2^128",
        build((), [info(b"a", [2**63, 2**63, 2**63])], bytes(64)),
        "tensor 'a': found 3138550867693340381917894711603833208051177722232",
    ),
    ("f67-n-tensors", b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "found 1152921504606846976 tensors and 0 keys"),
    ("f67-n-keys", b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "found 0 tensors and 1152921504606846976 keys"),
    ("f67-key-length", build([struct.pack("<Q", 2**63) + bytes(16)]), "key 1 of 1: found a key of 9223372036854775808 bytes, legal 1 to 65535"),
    (
        "f67-string-length",
        build([kv(b"k", STR, struct.pack("<Q", 2**63))]),
        "key 'k': found a string of 9223372036854775808 bytes at byte 45, legal the 19 ",
    ),
    ("f67-array-of-u64", build([arr(b"k", 10, 2**61, b"")]), "key 'k': found an array of 2305843009213693952 u64 of 18446744073709551616 bytes"),
    ("f67-array-of-str", build([arr(b"k", STR, 2**61, bytes(64))]), "key 'k': found 2305843009213693952 strings at byte 49 that run past the end"),
    (
        "f67-string-in-array",
        build([arr(b"k", STR, 2, text(b"ab") + struct.pack("<Q", 2**64 - 1))]),
        "key 'k': found 2 strings at byte 49 that run past",
    ),
    ("f67-last-string-in-array", build([arr(b"k", STR, 1, struct.pack("<Q", 99))]), "key 'k': found 1 strings at byte 49 that run past the end"),
    ("f67-name-length", build((), [struct.pack("<Q", 2**63) + bytes(16)]), "tensor 1 of 1: found a name of 9223372036854775808 bytes, legal 1 to 63"),
    (
        "f69-more-data-than-file",
        build((), [info(b"a", [262144])], bytes(16)),
        "tensor 'a': found 1048576 bytes (f32, dims [262144]) at byte 64, ending at",
    ),
    ("f69-offset-2^62", build((), [info(b"a", [4], 0, 2**62)], bytes(16)), "tensor 'a': found 16 bytes (f32, dims [4]) at byte 4611686018427387968"),
    (
        "f69-offset-2^64-32",
        build((), [info(b"a", [4], 0, 2**64 - 32)], bytes(16)),
        "tensor 'a': found 16 bytes (f32, dims [4]) at byte 184467440737095516",
    ),
    (
        "f70-ends-after-infos",
        build((), [info(b"a", [4])], None),
        "tensor 'a': found 16 bytes (f32, dims [4]) at byte 64, ending at 80, legal an end within the file's 57",
    ),
    ("f70-offset-unaligned", build((), [info(b"a", [4], 0, 8)], bytes(64)), "tensor 'a': found offset 8, legal a multiple of the alignment 32"),
    (
        "f70-overlap",
        build((), [info(b"a", [9]), info(b"b", [4], 0, 32)], bytes(96)),
        "tensor 'b': found data from byte 128 inside that of 'a', legal byte 132",
    ),
    ("f70-same-data-twice", build((), [info(b"b", [4]), info(b"a", [4])], bytes(96)), "tensor 'a': found data from byte 96 inside that of 'b'"),
    ("f71-element-type-13", build([arr(b"k", 13, 1, bytes(8))]), "key 'k': found element type 13, legal 0 u8, 1 i8"),
    ("f71-value-type-13", build([kv(b"k", 13, bytes(8))]), "key 'k': found value type 13, legal 0 u8, 1 i8"),
    ("f71-nested-array", build([arr(b"k", ARR, 1, bytes(16))]), "key 'k': found an array of arrays, legal arrays of numbers, bools and strings"),
    ("f71-tensor-type-99", build((), [info(b"a", [32], 99)], F32_DATA), "tensor 'a': found type id 99, which is unknown, legal the ids 0 1 2 3 6 7"),
    ("f71-tensor-type-removed", build((), [info(b"a", [32], 31)], F32_DATA), "tensor 'a': found type id 31, which is unknown"),
    ("f72-name-of-64", build((), [info(b"a" * 64, [4])], F32_DATA), "tensor 1 of 1: found a name of 64 bytes, legal 1 to 63 bytes"),
    ("f72-name-empty", build((), [info(b"", [4])], F32_DATA), "tensor 1 of 1: found an empty name, legal 1 to 63 bytes"),
    ("f72-name-not-utf-8", build((), [info(b"\xff\xfe", [4])], F32_DATA), r"tensor 1 of 1: found the name b'\xff\xfe', legal UTF-8 (byte 0 is not)"),
    ("f72-key-not-utf-8", build([u32(b"a\xc3", 1)]), r"key 1 of 1: found the key b'a\xc3', legal UTF-8 (byte 1 is not)"),
    ("f73-key-twice", build([u32(b"general.name", 1), u32(b"general.name", 1)]), "key 'general.name': found the key twice, legal once"),
    ("f73-tensor-twice", build((), [info(b"a", [4]), info(b"a", [4], 0, 32)], bytes(64)), "tensor 'a': found the name twice, legal once"),
    (
        "f78-big-endian",
        b"GGUF\0\0\0\3" + bytes(16),
        "found a big-endian file (version bytes 00000003), legal little-endian files of versions 2 and 3",
    ),
    (
        "f80-lone-shard",
        build([kv(b"split.no", 2, b"\0\0"), kv(b"split.count", 2, b"\3\0")]),
        "key 'split.count': found 3: one file of a model split into 3",
    ),
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
    (
        "row-no-multiple-of-block",
        build((), [info(b"a", [896], 12)], bytes(2048)),
        "tensor 'a': found type q4_K with rows of 896 elements, legal a multiple",
    ),
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
        assert [strings[:n] for n in range(6)] == [["a", "", "\udcff", "中"][:n] for n in range(6)]  # decodes no more than these
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
        f = read_gguf(
            put(build([kv(b"split.no", 2, b"\0\0"), kv(b"split.count", 2, bytes([count, 0]))], [info(b"a", [4])], bytes(32)), "m-00001-of-00001.gguf")
        )
        assert f.metadata["split.count"] == count and f.array("a").tolist() == [0, 0, 0, 0]


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
