"""Writing and checking GGUF files, held against bytes built by hand, the gguf package and ggml's own C reader."""

import ctypes
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import build, info, small_file, u32
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyggml import dtypes
from pyggml.errors import FormatError
from pyggml.gguf import GGUFValueType, GGUFWriter, KeyType, StringArray, check_gguf, read_gguf, write_gguf


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


def test_written_bytes_are_those_built_by_hand(tmp_path):
    metadata = {
        "general.architecture": "mamba2",
        "general.alignment": 32,
        "f": 1.5,
        "b": True,
        "ints": [1, -2, 3],
        "strs": ["ab", ""],
        "bools": [False, True],
    }
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


def test_a_file_can_be_rewritten_onto_itself(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(small_file())
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
        (0, "u32"), (2**32 - 1, "u32"), (-1, "i32"), (-(2**31), "i32"),
        (2**32, "u64"), (2**64 - 1, "u64"), (-(2**31) - 1, "i64"),
        (True, "bool"), (1.5, "f32"), (float("-inf"), "f32"), ("x", "str"), (b"x", "str"),
        (np.float64(0.1), "f64"), (np.int8(-3), "i8"), (np.bool_(False), "bool"),
        ([1, 2**31 - 1], "arr[i32]"), ([0, 2**31], "arr[u32]"), ([-1, 2**31], "arr[i64]"), ([0, 2**63], "arr[u64]"),
        ((1.5, 2), "arr[f32]"), ([np.int64(1)], "arr[i32]"), ([True, False], "arr[bool]"),
        (np.array([1, 2], np.uint16), "arr[u16]"), (np.array([0.1]), "arr[f64]"), (np.array([True]), "arr[bool]"),
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
        (2**64, None, "found 18446744073709551616, legal what u64 or i64 holds"),
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
        (1, "arr[arr]", "found value type 'arr[arr]', legal u8 i8"),
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
        (lambda w: w.add_tensor("a", np.ones(34), "q8_0"), "tensor 'a': found a NumPy array of float64, legal uint8 (bytes) for type q8_0"),
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
    (tmp_path / "file").touch()
    for path, says in [
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "no" / "m.gguf", "No such file"),
        (tmp_path / "file" / "m.gguf", "is no folder"),
        ("a\0b", "null"),
    ]:
        with pytest.raises(FormatError, match=f"cannot be written: .*{says}"):
            GGUFWriter(path, "x")
    with pytest.raises(FormatError, match="found version 1, legal 2 and 3"):
        GGUFWriter(tmp_path / "m.gguf", "x", version=1)


def test_closing_twice_and_alignment_as_a_key(tmp_path):
    with GGUFWriter(tmp_path / "m.gguf", "x") as w:
        w.add("general.alignment", np.uint32(128))
        w.add_tensor("a", ONES)
        w.close()
    f = read_gguf(tmp_path / "m.gguf")
    assert (f.alignment, f.tensors["a"].offset % 128, f.size % 128) == (128, 0, 0)
    assert repr(f) == f"<GGUF v3 {tmp_path / 'm.gguf'}: 2 keys, 1 tensors>"


@pytest.mark.parametrize("parts", [(GGUFValueType.ARR,), (GGUFValueType.U8, GGUFValueType.U8), (GGUFValueType.ARR, GGUFValueType.ARR)], ids=str)
def test_key_type_that_cannot_be(parts):
    with pytest.raises(FormatError, match="value type: found .* legal arr with a type other than arr, all others with none"):
        KeyType(*parts)


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "m.gguf").symlink_to(tmp_path / "real" / "m.gguf")
    write_gguf(tmp_path / "m.gguf", {}, {"a": ONES})
    assert (tmp_path / "m.gguf").is_symlink() and [p.name for p in (tmp_path / "real").iterdir()] == ["m.gguf"]


NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.floats(width=32), st.booleans(), st.text(st.characters(exclude_categories=["Cs"])), st.binary()
)
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
    lambda t, shape, seed: np.random.default_rng(seed).integers(-100, 100, shape).astype(t),
    PLAIN,
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 9),
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(NAMES, NUMBERS | LISTS, max_size=6),
    st.dictionaries(NAMES, ARRAYS, max_size=4),
    st.sampled_from([1, 2, 8, 32, 64, 4096]),
    st.sampled_from([2, 3]),
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
    numbers = {
        "uint8": 255,
        "int8": -128,
        "uint16": 65535,
        "int16": -5,
        "uint32": 2**32 - 1,
        "int32": -7,
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float32": 1.5,
        "float64": 0.1,
    }
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
    metadata = {
        "general.architecture": "mamba2",
        "x.tokens": ["a", "", "中"],
        "x.ids": [1, 2],
        "x.u8": 7,
        "x.eps": 1e-5,
        "x.flags": [True, False],
        "x.none": [],
    }
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
            write_gguf(
                tmp_path / "copy.gguf",
                f.metadata,
                {t.name: (f.raw(t.name), t.dtype, t.dims) for t in f.tensors.values()},
                types=f.types,
                version=f.version,
            )
        assert (tmp_path / "copy.gguf").read_bytes() == path.read_bytes()


def test_check_reports_layout(tmp_path):
    path = tmp_path / "m.gguf"
    infos = [info(b"b", [5], 0, 96), info(b"a", [3])]
    path.write_bytes(build([u32(b"k", 1)], infos, bytes(12) + b"\1\1" + bytes(18) + bytes(64) + bytes(20)))
    assert check_gguf(path) == [
        "tensors: data in another order than the header's, which ggml's reader refuses",
        "tensor 'a': 2 of the 20 padding bytes after it not zero",
        "tensor 'b': a gap of 64 bytes before it, which ggml's reader refuses",
        "end of file: 12 bytes of padding missing after the last tensor",
    ]
    padded = bytearray(build((), [info(b"a", [8])], bytes(32) + b"xyz"))
    padded[60] = 1
    path.write_bytes(padded)
    assert check_gguf(path) == ["header: 1 of the 7 padding bytes after it not zero", "end of file: 3 bytes after the last tensor"]


def test_check_counts_what_is_not_finite(tmp_path):
    values = np.array([1, np.nan, np.inf, -np.inf, -np.nan, 3e4], np.float64)
    tensors = {t: values.astype(t) for t in ("float16", "float32", "float64")} | {
        "bf16": (dtypes.f32_to_bf16(values.astype(np.float32)), "bf16", None)
    }
    write_gguf(tmp_path / "m.gguf", {}, tensors)
    assert check_gguf(tmp_path / "m.gguf") == [f"tensor '{t}': 2 NaN and 2 infinite of 6 values" for t in tensors]


@pytest.mark.parametrize("kind", all_types_but("q8_1", "q8_K", "q1_0", "iq1_m", "mxfp4", "nvfp4"), ids=str)
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
