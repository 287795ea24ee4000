"""`pyggml test-ops`: case strings, guards that catch every kind of bad kernel, formats, random cases, harvest, coverage, support tables."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml import tools
from pyggml.backends import open_backend
from pyggml.cases import Case, ErrorCase, Leaf, all_cases, bound, case, cases_of, error, f32
from pyggml.casetext import from_json, parse_case, split_list, to_json
from pyggml.cpu.simd import at, ld_f32, st_f32
from pyggml.dtypes import F32
from pyggml.errors import DTypeError, ParamError, ShapeError
from pyggml.guards import GUARD, Verdict, check_case, guarded_backends
from pyggml.models import demo_path
from pyggml.registry import KernelDef, OpDef, Spec, all_ops, find_op, like, require
from pyggml.tensor import Tensor
from pyggml.testing import fabricate
from pyggml.tools.opcoverage import checks_in, coverage, refusal
from pyggml.tools.opdocs import doc_files
from pyggml.tools.opperf import perf_backends, perf_rows, time_runner
from pyggml.tools.probe import Ceiling, ceiling
from pyggml.tools.records import FORMATS, Column, write_rows
from pyggml.tools.testops import DOC_BACKENDS, graph_cases, random_cases

# Case strings


def test_case_strings_are_unique_and_read_back() -> None:
    seen = Counter(str(c) for c in all_cases())
    assert [s for s, n in seen.items() if n > 1] == []
    for c in all_cases():
        found = parse_case(str(c))
        assert str(found) == str(c) and found.op is c.op and found.limit == c.limit


UPSTREAM = {  # strings as llama.cpp's test-backend-ops prints them -> ne of the inputs
    "CUMSUM(type=f32,ne=[128,5,4,3])": [(128, 5, 4, 3)],
    "SSM_SCAN(type=f32,d_state=128,head_dim=64,n_head=16,n_group=2,n_seq_tokens=32,n_seqs=4)":
        [(128, 64, 16, 4), (64, 16, 32, 4), (16, 32, 4, 1), (1, 16, 1, 1), (128, 2, 32, 4), (128, 2, 32, 4), (4, 1, 1, 1)],
    "MUL_MAT(type_a=q4_0,type_b=f32,m=16,n=1,k=256,bs=[3,2],nr=[2,2],per=[0,1,2,3],k_v=0,o=1)": [(256, 16, 3, 2), (256, 1, 6, 4)],
    "MUL_MAT(type_a=f16,type_b=f32,m=16,n=8,k=256,bs=[2,3],nr=[1,1],per=[0,3,2,1],k_v=0,o=1)": [(256, 16, 2, 3), (256, 8, 2, 3)],
    "SSM_CONV(type=f32,ne_a=[4,1536,1,1],ne_b=[4,1536,1,1])": [(4, 1536, 1, 1), (4, 1536, 1, 1)],
    "SOFT_MAX(type=f32,ne=[16,16,1,3],mask=1,sinks=0,m_prec=f16,nr23=[3,1],scale=0.100000,max_bias=0.000000,inplace=0)": [(16, 16, 3, 3), (16, 16, 1, 3)],
    "ROPE(type=f32,ne_a=[128,32,2,1],n_dims=128,mode=0,n_ctx=512,fs=1.424500,ef=0.000000,af=1.000000,ff=0,v=1,inplace=0)": [(128, 32, 2, 1), (2, 1, 1, 1)],
    "ADD(type=f16,ne=[10,5,4,3],nr=[2,1,1,1],nf=1,perm1=0,src_overlap=0)": [(20, 5, 4, 3), (10, 5, 4, 3)],
    "GET_ROWS(type=q4_K,n=256,m=5,r=4,be1=7,be2=1,v=1)": [(256, 5, 7, 1), (2, 7, 1, 1)],
    "SET_ROWS(type=f16,type_idx=i64,ne=[31,3,7,1],nr23=[2,3],r=2,v=0)": [(31, 3, 14, 3), (31, 2, 14, 3), (2, 7, 1, 1)],
    "CPY(type_src=f32,type_dst=f16,ne_src=[256,2,3,4],permute_src=[0,2,1,3],permute_dst=[0,0,0,0],_src_transpose=0)": [(256, 3, 2, 4), (256, 3, 2, 4)],
    "CONT(type=f32,ne=[2,3,5,7],use_view_slice=1)": [(2, 1, 5, 7)],
    "CONCAT(type=f32,ne_a=[11,12,13,14],ne_b_d=7,dim=2,v=3)": [(11, 12, 13, 14), (11, 12, 7, 14)],
    "REPEAT(type=i16,ne=[10,5,4,3],nr=[1,1,1,2])": [(10, 5, 4, 3)],
    "PAD(type=f32,ne_a=[512,512,1,1],pad_0=1,pad_1=1,circular=0)": [(512, 512, 1, 1)],
    "SILU(type=f16,ne_a=[5,7,11,13],v=1)": [(5, 7, 11, 13)],
    "SWIGLU(type=f32,ne_a=[128,2,2,2],v=0,swapped=1)": [(128, 2, 2, 2)],
    "RMS_NORM(type=f32,ne=[64,5,4,3],v=1,eps=0.000001,inplace=0)": [(32, 2, 2, 1)],
    "NORM(type=f32,ne=[64,5,4,3],v=0,eps=0.100000,noncontig_rows=1)": [(64, 5, 4, 3)],
    "ARGSORT(type=f32,ne=[16,10,10,10],order=1)": [(16, 10, 10, 10)],
    "TOP_K(type=f32,ne=[1023,2,1,3],k=7,ties=0)": [(1023, 2, 1, 3)],
    "SUM_ROWS(type=f32,ne=[11,5,6,3],permute=1,slice=1)": [(11, 2, 5, 3)],
    "TRI(type=f32,ne=[10,10,4,3],tri_type=2)": [(10, 10, 4, 3)],
    "SCALE(type=f32,ne=[10,10,10,10],scale=2.000000,bias=1.000000,inplace=0)": [(10, 10, 10, 10)],
    "CLAMP(type=f32,ne=[10,5,4,3],min=-0.500000,max=0.500000)": [(10, 5, 4, 3)],
    "ARANGE(type=f32,start=0.000000,stop=1048576.000000,step=1.000000)": [],
    "FILL(type=f32,ne=[303,207,11,3],c=2.000000)": [(303, 207, 11, 3)],
}


@pytest.mark.parametrize("text", UPSTREAM, ids=lambda t: t.partition("(")[0])
def test_a_string_of_upstream_s_names_a_listed_case(text: str) -> None:
    c = parse_case(text)
    assert [x.ne for x in c.inputs if x is not None] == UPSTREAM[text]
    assert str(c) in {re.sub(r",note=.*\)", ")", str(x)) for x in cases_of(c.op)}
    c.node()


@pytest.mark.parametrize(("text", "match"), [
    ("CUMSUM", r"case 'CUMSUM'; legal: OP\(field=value,...\)"),
    ("NOPE(type=f32)", "unknown op 'NOPE'"),
    ("CUMSUM(type=f32,ne=[8],axis=1)", "CUMSUM: a case has no field 'axis'; legal: type, ne, nb, dim, exclusive, type"),
    ("CUMSUM(type=f32)", r"CUMSUM: a case needs ne of x, as \[n0,n1,n2,n3\]"),
    ("CUMSUM(type=f32,ne=[8],nb=[4,3])", r"nb of x is \(4, 3\); legal: 4 multiples of 4"),
    ("CUMSUM(type=f99,ne=[8])", "unknown type 'f99'"),
    ("CUMSUM(type=f32,ne)", "field 'ne' of a case; legal: name=value"),
    ("SOFT_MAX(type=f32,ne=[8,1,1,1],mask=1,sinks=1)", "SOFT_MAX: a case with another sinks than 0; pyggml has that one only"),
    ("ROPE(type=f32,ne_a=[8,1,1,1],n_dims=8,mode=8)", r"ROPE: mode 8; legal: 0 \(norm\), 2 \(neox\)"),
])
def test_a_wrong_string_is_refused_in_one_line(text: str, match: str) -> None:
    with pytest.raises((ParamError, DTypeError), match=match):
        parse_case(text)


def test_lists_keep_brackets_together() -> None:
    assert split_list("ADD,TRI(type=f32,ne=[3,3]),MUL") == ["ADD", "TRI(type=f32,ne=[3,3])", "MUL"]


def test_values_keep_their_kind_and_all_their_digits() -> None:
    c = parse_case("TRI(type=f32,ne=[3,3],kind=upper,dims=[1,0],fill=-inf)")
    assert c.attrs == {"kind": "upper", "dims": (1, 0), "fill": float("-inf")}
    c = parse_case("CUMSUM(type=f32,ne=[8],exclusive=1,type_out=f64,note=a, b (c))")
    assert c.attrs == {"exclusive": True, "type": "f64"} and c.note == "a, b (c)"
    assert str(case(f32(2), op=find_op("RMS_NORM"), eps=9.999999747378752e-06)).endswith("eps=9.999999747378752e-06)")
    assert "stop=1048576" in str(parse_case("ARANGE(type=f32,start=0,stop=1048576,step=1)"))


def test_data_depends_on_the_string_and_the_seed_alone() -> None:
    c = parse_case("MUL_MAT(type_a=q8_0,type_b=f32,m=16,n=2,k=256)")
    twin = parse_case(str(c))
    for seed in (0, 7):
        a, b = c.data(seed)[1], twin.data(seed)[1]
        assert a is not None and b is not None and np.array_equal(a, b)
        assert np.array_equal(c.build(seed)[0][0].data, twin.build(seed)[0][0].data)  # type: ignore[union-attr, arg-type]
    assert not np.array_equal(c.data(0)[1], c.data(7)[1])  # type: ignore[arg-type]
    assert not np.array_equal(c.build(0)[0][0].data, c.build(7)[0][0].data)  # type: ignore[union-attr, arg-type]


def test_fault_102_many_seeds_stay_within_the_limit() -> None:
    c = parse_case("MUL_MAT(type_a=q4_0,type_b=f32,m=16,n=1,k=256)")
    verdicts = [check_case(c, guarded_backends("cpu", (2,)), seed) for seed in range(200)]
    assert not any(v.faults for v in verdicts) and len({v.nmse for v in verdicts}) > 100


# Guards


def _copy(out: Any, x: Any, i0: Any, i1: Any) -> None:
    for r in range(i0, i1):
        for i in range(out.ne0):
            st_f32(at(out.p, r * out.nb1), i, ld_f32(at(x.p, r * x.nb1), i))


def _past_the_end(out: Any, x: Any, i0: Any, i1: Any) -> None:
    for r in range(i0, i1):
        for i in range(out.ne0 + (1 if r == out.ne1 - 1 else 0)):
            st_f32(at(out.p, r * out.nb1), i, ld_f32(at(x.p, r * x.nb1), i if i < x.ne0 else 0))


def _before_the_start(out: Any, x: Any, i0: Any, i1: Any) -> None:
    for r in range(i0, i1):
        for i in range(out.ne0):
            st_f32(at(out.p, r * out.nb1), i, ld_f32(at(x.p, r * x.nb1), i))
        st_f32(out.p, -1, ld_f32(x.p, 0))


def _last_left_out(out: Any, x: Any, i0: Any, i1: Any) -> None:
    for r in range(i0, i1):
        for i in range(out.ne0 - 1):
            st_f32(at(out.p, r * out.nb1), i, ld_f32(at(x.p, r * x.nb1), i))


def _writes_its_input(out: Any, x: Any, i0: Any, i1: Any) -> None:
    for r in range(i0, i1):
        for i in range(out.ne0):
            v = ld_f32(at(x.p, r * x.nb1), i)
            st_f32(at(out.p, r * out.nb1), i, v)
            st_f32(at(x.p, r * x.nb1), i, v + v)


def _reads_the_gap(out: Any, x: Any, i0: Any, i1: Any) -> None:
    for r in range(i0, i1):
        for i in range(out.ne0):
            v = ld_f32(at(x.p, r * x.nb1), i)
            st_f32(at(out.p, r * out.nb1), i, v + (ld_f32(at(x.p, r * x.nb1), x.ne0) - ld_f32(at(x.p, r * x.nb1), x.ne0)))


def _slightly_wrong(out: Any, x: Any, i0: Any, i1: Any) -> None:
    for r in range(i0, i1):
        for i in range(out.ne0):
            v = ld_f32(at(x.p, r * x.nb1), i)
            st_f32(at(out.p, r * out.nb1), i, v + v * ld_f32(x.p, 0) * ld_f32(x.p, 0) if i == 2 else v)


def _beyond_its_scratch(out: Any, x: Any, scratch: Any, i0: Any, i1: Any) -> None:
    for r in range(i0, i1):
        for i in range(out.ne0):
            st_f32(scratch, i, ld_f32(at(x.p, r * x.nb1), i))
            st_f32(at(out.p, r * out.nb1), i, ld_f32(scratch, i))


def _sum_over_items(out: Any, x: Any, scratch: Any, i0: Any, i1: Any) -> None:
    """Leaves in its thread's scratch what the next item adds: right on one thread, by chance on more."""
    for r in range(i0, i1):
        before = ld_f32(scratch, 0) if r > 0 else ld_f32(x.p, 0) - ld_f32(x.p, 0)
        st_f32(scratch, 0, before + ld_f32(at(x.p, r * x.nb1), 0))
        st_f32(at(out.p, r * out.nb1), 0, ld_f32(scratch, 0))


def _op(name: str, fn: Callable[..., None], reference: Callable[[np.ndarray], np.ndarray] = lambda x: x, **options: Any) -> OpDef:
    """An op outside of the table, x in and as much out, with one kernel."""
    def rule(x: Tensor) -> Spec:
        return like(x)
    d = OpDef(name, rule, ("x",), ("out",), "user", False, None, False, 1e-14)
    d.reference(reference)
    d.kernels["cpu"] = [KernelDef(fn.__name__, fn, None, {"chunk": lambda node: 1, **options})]
    return d


def _verdict(d: OpDef, x: Leaf, threads: tuple[int, ...] = (1, 2)) -> Verdict:
    return check_case(bound(case(x), d), guarded_backends("cpu", threads))


def test_a_good_kernel_passes() -> None:
    v = _verdict(_op("GOOD", _copy), f32(5, 7, gap=3), (1, 2, 3, 7, 65))
    assert v.faults == [] and v.nmse == 0 and v.kernel == "_copy" and v.skipped == ""


@pytest.mark.parametrize(("fn", "match"), [
    (_past_the_end, "4 bytes outside the results were written, the first 0 bytes after the end of node_0 on 1 threads"),
    (_before_the_start, rf"4 bytes outside the results were written, the first {GUARD + 64 - 4 - 5 * 7 * 4 % 64} bytes after the end of x on 1"),
    (_last_left_out, "7 of 35 elements of node_0 were not written on 1 threads"),
    (_writes_its_input, r"140 bytes outside the results were written|bytes outside the results were written, the first in x, at byte"),
    (_reads_the_gap, "NMSE of out is inf; its limit is 1e-14"),
    (_slightly_wrong, "NMSE of out is "),
], ids=lambda v: getattr(v, "__name__", ""))
def test_a_bad_kernel_is_caught(fn: Callable[..., None], match: str) -> None:
    faults = _verdict(_op("BAD", fn), f32(5, 7, gap=3) if fn is _reads_the_gap else f32(5, 7)).faults
    assert any(re.search(match, f) for f in faults), faults


def test_writes_beyond_the_scratch_are_caught() -> None:
    faults = _verdict(_op("BAD", _beyond_its_scratch, scratch=lambda node: 16), f32(5, 7)).faults
    assert faults[0] == "bytes beyond the scratch of 16 were written on 1 threads"
    assert _verdict(_op("GOOD", _beyond_its_scratch, scratch=lambda node: 20), f32(5, 7)).faults == []


def test_a_result_that_depends_on_the_threads_is_caught() -> None:
    d = _op("BAD", _sum_over_items, lambda x: np.cumsum(x, axis=-2), scratch=lambda node: 4)
    ones = f32(1, 300_000, lo=1.0, hi=1.0)
    assert _verdict(d, ones, (1,)).faults == []
    found = (f for _ in range(100) for f in _verdict(d, ones, (1, 2, 7)).faults)  # on a busy machine one thread may do it all
    assert any(f.endswith("threads give other bits than 1") for f in found)


def test_a_gap_of_an_output_must_stay_untouched() -> None:
    c = parse_case("SET_ROWS(type=f32,ne=[5,4],nb=[4,32,128,128],type_src=f32,ne_src=[5,2],type_ids=i32,ne_ids=[2])")
    assert check_case(c, guarded_backends("cpu")).faults == []


def test_what_a_backend_refuses_is_skipped_with_the_reason() -> None:
    d = OpDef("BARE", lambda x: like(x), ("x",), ("out",), "user", False, None, False, 0.0)
    assert check_case(bound(case(f32(4)), d), guarded_backends("cpu", (1,))).skipped == "no cpu kernel is registered"


def test_fault_124_the_reference_against_itself_is_exact() -> None:
    backend = [open_backend("reference")]
    for c in all_cases():
        if not c.large and c.n_elements < 5000:
            v = check_case(c, backend)
            assert v.nmse == 0 and not v.faults, str(c)


# Records

COLUMNS = (Column("op", head="op"), Column("case", head="case"), Column("limit", float, "limit"), Column("n", int, "n"), Column("passed", bool))
ROWS: list[dict[str, Any]] = [{"op": "ADD", "case": "a|b, 'c'", "limit": 0.5, "n": 3, "passed": True}, {"op": "TRI", "limit": float("inf"), "n": 12}]


def written(output: str, rows: list[dict[str, Any]] = ROWS) -> str:
    out = io.StringIO()
    write_rows(iter(rows), COLUMNS, output, out, "ops")
    return out.getvalue()


@pytest.mark.parametrize("error", (KeyboardInterrupt(), ParamError("no"), MemoryError()), ids=repr)
@pytest.mark.parametrize("output", FORMATS)
def test_rows_that_are_finished_are_printed(output: str, error: BaseException) -> None:
    """When the third row fails the other two are there, whole; when the first one fails, no row, and of tables and JSON nothing."""
    def rows(n: int) -> Iterator[dict[str, Any]]:
        yield from ROWS[:n]
        raise error

    for n in (2, 0):
        out = io.StringIO()
        with pytest.raises(type(error)):
            write_rows(rows(n), COLUMNS, output, out, "ops")
        heads = {"csv": 1, "sql": 1}.get(output, 0)
        assert out.getvalue() == (written(output) if n else "".join(written(output).splitlines(True)[:heads]))


def test_rows_in_every_format() -> None:
    assert written("console").splitlines() == ["op   case      limit   n", "ADD  a|b, 'c'    0.5   3", "TRI              inf  12"]
    assert written("md").splitlines() == ["| op  | case      | limit |   n |", "| --- | --------- | ----: | --: |", "| ADD | a\\|b, 'c' |   0.5 |   3 |",
                                          "| TRI |           |   inf |  12 |"]
    table = list(csv.reader(io.StringIO(written("csv"))))
    assert table == [["op", "case", "limit", "n", "passed"], ["ADD", "a|b, 'c'", "0.5", "3", "1"], ["TRI", "", "inf", "12", ""]]
    first, second = json.loads(written("json"))
    assert first == ROWS[0] and second == {"op": "TRI", "case": None, "limit": None, "n": 12, "passed": None}
    assert [json.loads(line) for line in written("jsonl").splitlines()] == [first, second]
    with sqlite3.connect(":memory:") as db:
        db.executescript(written("sql"))
        assert db.execute('SELECT op, "case", "limit", n, passed FROM ops').fetchall() == [("ADD", "a|b, 'c'", 0.5, 3, 1), ("TRI", None, None, 12, None)]


@pytest.mark.parametrize("output", FORMATS)
def test_no_rows_are_no_fault(output: str) -> None:
    text = written(output, [])
    assert output != "json" or json.loads(text) == []


# The command


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = tools.main(["test-ops", *args])
    done = capsys.readouterr()
    return code, done.out, done.err


def test_test_mode(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "-o", "tri,CUMSUM(type=f32,ne=[128,5,4,3])", "-p", "ne=.(10|128),", "-b", "cpu,reference", "--threads", "2", "-v")
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("machine  ") and lines[1] == "seed 0; threads 2; 5 cases"
    assert any(re.fullmatch(r"CUMSUM +1 +ok +\d\.\de-\d+ +1e-13 +ok +0\.0e\+00 +1e-13", x) for x in lines)
    assert sum(x.startswith("  ok   ") for x in lines) == 10
    assert lines[-3:-1] == ["cpu: 5 passed, 0 failed, 0 skipped", "reference: 5 passed, 0 failed, 0 skipped"] and lines[-1].startswith("2 ops in ")


def test_rows_hold_what_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "-o", "MUL_MAT(type_a=q8_0,type_b=f32,m=16,n=1,k=256)", "--output", "jsonl", "--seed", "3")
    row = json.loads(out)
    assert code == 0 and row["op"] == "MUL_MAT" and row["backend"] == "cpu" and row["passed"] is True and row["seed"] == 3 and row["kernel"] and row["machine"]
    assert 0 < row["nmse"] < row["limit"] == find_op("MUL_MAT").limit_of(parse_case(row["case"]).node()) and "cpu: 1 passed" in err


def test_a_failing_case_is_named_with_a_way_to_repeat_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    d = find_op("CUMSUM")
    monkeypatch.setattr(d, "_reference", lambda x, dim, exclusive, type: np.cumsum(x, axis=-1 - dim) * (1 + 1e-5))
    code, out, _ = run(capsys, "-o", "CUMSUM(type=f32,ne=[128,5,4,3])")
    assert code == 1
    assert re.search(r"CUMSUM +1 +1 FAILED ", out) and "FAIL CUMSUM(type=f32,ne=[128,5,4,3]) on cpu: NMSE of out is 1e-10; its limit is 1e-13" in out
    assert out.splitlines()[-1] == "repeat one with: pyggml test-ops -o 'CASE'"
    code, _, err = run(capsys, "-o", "CUMSUM(type=f32,ne=[128,5,4,3])", "--output", "csv")
    assert code == 1 and "FAIL CUMSUM" in err


@pytest.mark.parametrize(("args", "code", "match"), [
    (("-o", "NOPE"), 2, "pyggml test-ops: -o: unknown op 'NOPE'; known: ABS"),
    (("-o", "CUMSUM(type=f32)"), 2, "pyggml test-ops: -o: CUMSUM: a case needs ne of x"),
    (("-p", "no such text"), 1, "pyggml test-ops: no case matches -p no such text"),
    (("-o", "MUL_MAT", "-p", "type_a=f32.*m=4096"), 1, "pyggml test-ops: all 7 cases that match are large; --large tests them"),
    (("--from", str(demo_path())), 1, "is not UTF-8"),
    (("--from", "/no/such/file"), 1, "pyggml test-ops: --from /no/such/file: No such file"),
    (("--from-model", "/no/such/file"), 1, "/no/such/file"),
])
def test_misuse_ends_in_one_line(args: tuple[str, ...], code: int, match: str, capsys: pytest.CaptureFixture[str]) -> None:
    got, out, err = run(capsys, *args)
    assert got == code and out == "" and len(err.strip().splitlines()) == 1 and match in err


@pytest.mark.parametrize(("args", "match"), [
    (("-b", "tpu"), "'tpu'; legal: cpu, reference, ggml"),
    (("-p", "("), r"'\(' is no regular expression"),
    (("--random", "0"), "'0'; legal: a whole number from 1"),
    (("dance",), "invalid choice: 'dance'"),
    (("--random", "5", "--from", "x"), "not allowed with"),
])
def test_wrong_usage_is_2(args: tuple[str, ...], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        tools.main(["test-ops", *args])
    assert stop.value.code == 2 and re.search(match, capsys.readouterr().err)


def test_list_ops(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--list-ops")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == [d.name for d in all_ops()]
    assert all(re.fullmatch(r"[A-Z0-9_]+ +[a-z]+ +[1-9]\d* cases", line) for line in out.splitlines())


def test_a_script_brings_its_own_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "from pyggml.cases import case, f32\nfrom pyggml.registry import like, op\n\n"
        "@op('MY_DOUBLE', inputs='x')\ndef my_double(x):\n    'Twice x.'\n    return like(x)\n\n"
        "@my_double.reference\ndef _(x):\n    return 2 * x\n\n"
        "@my_double.cases\ndef _():\n    yield case(f32(4, 3))\n", encoding="utf-8")
    from pyggml.registry import OPS
    try:
        code, out, _ = run(capsys, "--load", str(tmp_path / "mine.py"), "-o", "MY_DOUBLE", "-b", "cpu,reference", "-v")
        assert code == 0 and "skip          cpu       MY_DOUBLE(type=f32,ne=[4,3,1,1]): no cpu kernel is registered" in out
        assert "cpu: 0 passed, 0 failed, 1 skipped" in out and "reference: 1 passed" in out
    finally:
        del OPS["MY_DOUBLE"]


# Perf


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings and probes of a hundredth of their length."""
    monkeypatch.setattr("pyggml.tools.opperf.CASE_SECONDS", 0.01)
    monkeypatch.setattr("pyggml.tools.opperf.BATCH_SECONDS", 0.001)
    monkeypatch.setattr("pyggml.tools.probe.SECONDS", 0.02)


@pytest.mark.usefixtures("quick")
def test_perf_rows(capsys: pytest.CaptureFixture[str]) -> None:
    cases = "MUL_MAT(type_a=f32,type_b=f32,m=16,n=16,k=256),CUMSUM(type=f32,ne=[128,128,4,4])"
    code, out, _ = run(capsys, "perf", "-o", cases, "--output", "json", "-b", "cpu,reference")
    rows = json.loads(out)
    assert code == 0 and [r["backend"] for r in rows] == ["cpu", "reference"] * 2
    mm = next(r for r in rows if r["op"] == "MUL_MAT")
    assert mm["flops"] == 131072  # faults.md 123: 2 m n k
    for r in rows:
        assert r["us_per_run"] > 0 and r["n_runs"] >= 3 and r["passed"] is True and r["bound"] in ("memory", "compute") and r["share"] > 0
        assert r["gflops"] == pytest.approx(r["flops"] / r["us_per_run"] / 1e3) and r["gbps"] == pytest.approx(r["bytes"] / r["us_per_run"] / 1e3)
    code, out, _ = run(capsys, "perf", "-o", "CUMSUM(type=f32,ne=[128,128,4,4])", "-b", "cpu,reference")
    assert code == 0 and re.search(r"case +us cpu +us reference +reference / cpu +cpu GFLOPS +cpu GB/s +cpu of ceiling +bound by", out)


@pytest.mark.usefixtures("quick")
def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_op("CUMSUM"), "_reference", lambda x, dim, exclusive, type: x)
    (row,) = perf_rows([parse_case("CUMSUM(type=f32,ne=[10,5,4,3])")], perf_backends(["cpu"], 2))
    assert row["passed"] is False and "us_per_run" not in row and "NMSE" in row["reason"]


@pytest.mark.usefixtures("quick")
def test_the_ceiling_is_a_roof() -> None:
    c = ceiling(1 << 20, 1)
    assert 1e9 < c.bytes_per_second < 1e13 and 1e9 < c.flops < 1e13 and ceiling((1 << 20) - 5, 1) == c
    roof = Ceiling(bytes_per_second=100.0, flops=1000.0)
    assert roof.seconds(flops=1000, nbytes=10) == (1.0, "compute") and roof.seconds(flops=10, nbytes=200) == (2.0, "memory")


@pytest.mark.usefixtures("quick")
def test_runs_on_end_do_the_same_work() -> None:
    from pyggml.graph import Graph
    x = Tensor(F32, (8, 1, 1, 1), name="x")
    y = find_op("SQR")(x)
    runner: Any = open_backend("cpu", threads=2).compile(Graph([y]))
    runner.set(x, np.full((1, 1, 1, 8), 3.0, np.float32))
    runner.run(repeat=1000)
    assert np.all(runner.get(y) == 9.0) and time_runner(runner)[1] >= 3


# Random cases, files, models


def test_random_cases_are_the_same_for_the_same_seed() -> None:
    a, b, c = ([str(x) for x in random_cases(all_ops(), 20, seed)] for seed in (5, 5, 6))
    assert a == b != c and len(a) == 20 * len({d.family for d in all_ops()})


def test_case_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = [c for c in all_cases() if c.op.name in ("MUL_MAT", "SSM_SCAN", "TRI")]
    again = list(from_json(to_json(listed), "x"))
    assert [(str(c), c.limit, c.perf) for c in again] == [(str(c), c.limit, c.perf) for c in listed]
    path = tmp_path / "cases.jsonl"
    code, _, err = run(capsys, "-o", "TRI", "-p", "ne=.5,3", "--export", str(path))
    assert code == 0 and err == f"4 cases written to {path}\n"
    code, out, _ = run(capsys, "--from", str(path), "--threads", "1")
    assert code == 0 and "cpu: 4 passed, 0 failed, 0 skipped" in out
    path.write_text(path.read_text() + '\n{"case": "TRI(type=f32)"}\n', encoding="utf-8")
    code, _, err = run(capsys, "--from", str(path))
    assert code == 1 and err == f"pyggml test-ops: {path}:6: TRI: a case needs ne of x, as [n0,n1,n2,n3]\n"
    for line, match in (('{"x": 1}', "no field 'case'"), ("{", "Expecting property name"), ("[1]", "indices must be integers")):
        with pytest.raises(ParamError, match=f"f:1: .*{match}"):
            list(from_json([line], "f"))


@pytest.mark.parametrize("form", ["scan", "ssd"])
def test_cases_of_a_model(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fabricate("granitehybrid", tmp_path / "tiny.gguf")
    code, out, _ = run(capsys, "--from-model", str(tmp_path / "tiny.gguf"), "-ub", "9", "--mamba2", form, "--chunk", "4", "--threads", "2")
    assert code == 0 and re.search(r"cpu: [1-9]\d+ passed, 0 failed, 0 skipped", out)
    assert ("SSM_SCAN " in out) is (form == "scan") and ("TRI " in out) is (form == "ssd")


def test_a_model_s_cases_are_its_nodes() -> None:
    import pyggml as pg
    with_views = pg.load_model(demo_path()).graph(8, mamba2="scan")
    cases = graph_cases(with_views, "demo")
    assert {c.op.name for c in cases} == {n.op.name for n in with_views.nodes if not n.op.view}
    assert len({str(c) for c in cases}) == len(cases) < sum(not n.op.view for n in with_views.nodes)
    conv = next(c for c in cases if c.op.name == "SSM_CONV")
    assert conv.inputs[0] is not None and conv.inputs[0].ne[0] == 11 and conv.note == "demo"


# Coverage and support tables


def test_nothing_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "coverage")
    assert code == 0, out
    lines = out.splitlines()
    assert len(lines) == 3 and re.match(r"ops +\d+: each has", lines[0])
    for line in lines[1:]:
        n, of = re.findall(r"(\d+) of (\d+)", line)[0]
        assert n == of


def _holey(x: Tensor) -> Spec:
    require(x.ne[1] < 9, "HOLEY", "too many rows")
    if x.ne[0] == 77:
        raise ShapeError("HOLEY: 77")
    return like(x)


def test_holes_are_found() -> None:
    d = OpDef("HOLEY", _holey, ("x",), ("out",), "user", False, None, False, 0.0)
    d.kernels["cpu"] = [KernelDef("never", _copy, lambda node: "never"), KernelDef("all", _copy)]

    @d.cases
    def cases() -> Iterator[Case]:
        yield case(f32(4))

    @d.errors
    def errors() -> Iterator[ErrorCase]:
        yield error(ShapeError, "too many rows", f32(4, 9))
        yield error(ShapeError, "too many rows", f32(4, 8))
        yield error(ParamError, "too many rows", f32(4, 9))

    holes = coverage([d]).holes
    found = {(h.kind, h.what) for h in holes if h.kind != "check"}
    assert found == {("op", "has no drawer of random cases"), ("op", "has no reference"), ("kernel", "HOLEY: no case runs it"),
                     ("refusal", "the call was accepted"), ("refusal", "it ended in ShapeError: HOLEY: too many rows")}
    unmet = [h.what for h in holes if h.kind == "check"]
    assert "raise ShapeError('HOLEY: 77')" in unmet and not any("too many rows" in w for w in unmet)


def test_a_kernel_for_better_cpus_hides_none() -> None:
    """Kernels that need features stand before the ones that serve CPUs without them; a case for all three runs all three."""
    d = OpDef("LAYERED", _holey, ("x",), ("out",), "user", False, None, False, 0.0)
    d.kernels["cpu"] = [KernelDef("best", _copy, None, {"needs": {"a", "b"}}), KernelDef("better", _copy, None, {"needs": {"a"}}), KernelDef("plain", _copy),
                        KernelDef("hidden", _copy)]

    @d.cases
    def cases() -> Iterator[Case]:
        yield case(f32(4))

    assert [h.name for h in coverage([d]).holes if h.kind == "kernel"] == ["hidden"]


def test_checks_are_found_in_source(tmp_path: Path) -> None:
    path = tmp_path / "defs.py"
    path.write_text("def f(x):\n    require(x,\n            'a')\n    require_type('A', 'x', x)\n    _require_plain(x)\n    other(x)\n    raise ValueError\n",
                    encoding="utf-8")
    assert [(c.first, c.last) for c in sorted(checks_in(path))] == [(2, 3), (4, 4), (5, 5), (7, 7)]
    e = ErrorCase(find_op("CUMSUM"), ParamError, "dim 9", (f32(4),), {"dim": 9})
    why, lines = refusal(e)
    assert why == "" and any(name.endswith("reduce/defs.py") for name, _ in lines)


def test_support_mode(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "support", "-o", "TRI,CUMSUM", "-b", "cpu,reference")
    assert code == 0 and [line.split()[:4] for line in out.splitlines()[1:]] == [
        [n, b, str(len(find_op(n).all_cases())), str(len(find_op(n).all_cases()))] for n in ("CUMSUM", "TRI") for b in ("cpu", "reference")]
    code, out, _ = run(capsys, "support", "-o", "TRI", "--output", "csv")
    assert code == 0 and all(r["supported"] == "1" and r["reason"] == "" for r in csv.DictReader(io.StringIO(out)))


def test_support_tables_are_current(root: Path) -> None:
    pytest.importorskip("libggml", reason="the wheel libggml-python is not installed")
    files = doc_files(all_ops(), perf_backends(DOC_BACKENDS, 1))
    stale = [name for name, text in files.items() if not (root / "docs" / name).exists() or (root / "docs" / name).read_text(encoding="utf-8") != text]
    assert not stale, f"{', '.join(stale)}: run `make docs`"
    assert {p.name for p in (root / "docs" / "ops").iterdir()} == {Path(n).name for n in files if n.startswith("ops/")}
