"""Cases of the state-space ops."""

from __future__ import annotations

from collections.abc import Iterator

from pyggml.cases import Case, Draw, ErrorCase, Fill, Leaf, case, distinct, draw_dim, draw_leaf, error, f16, f32, form, i32, leaf, perf, uniform
from pyggml.dtypes import BF16, F16, F32, I32
from pyggml.errors import DTypeError, KernelError, ParamError, ShapeError
from pyggml.ops.ssm.defs import ssm_conv, ssm_scan
from pyggml.tensor import shape4

Ne = tuple[int, ...]

# SSM_CONV


@form(ssm_conv)
def _conv(type: str, ne_a: Ne, ne_b: Ne) -> Case:
    return case(leaf(type, ne_a), leaf(type, ne_b))


@ssm_conv.cases
def _ssm_conv_cases() -> Iterator[Case]:
    for d_conv in (3, 4, 9):
        for d_inner in (1024, 1536, 2048):
            for window, n_seqs in ((d_conv, 1), (2 * d_conv, 1), (d_conv, 4), (d_conv - 1 + 64, 1), (d_conv - 1 + 64, 4)):
                yield _conv("f32", (window, d_inner, n_seqs, 1), (d_conv, d_inner, 1, 1), note="f53" if window <= 2 * d_conv else "")
    for dt in (F16, BF16):
        yield case(f32(35, 100, 2), leaf(dt, (4, 100)))
    for window in (4, 18, 19, 67, 68, 300):
        yield case(f32(window, 77, 3), f32(4, 77), n_t=300)
        yield case(f32(77, window, 3, perm=(1, 0, 2)), f32(4, 77), note="channels innermost")
    for d_conv in (1, 2, 3, 9):
        yield case(f32(300, d_conv + 20, 2, perm=(1, 0, 2)), f32(d_conv, 300), n_t=70, note="channels innermost")
    yield case(f32(40, 50, gap=3), f32(50, 4, perm=(1, 0)), note="strided")
    yield case(f32(3, 50, 40, perm=(2, 1, 0)), f32(4, 50), note="strided in each dim")
    yield case(f32(40, 3), f32(1, 3), note="d_conv 1")
    for n_tok in (1, 64):
        yield case(f32(3 + n_tok, 1792, 2), f32(4, 1792), note="granite-4.0-h-350m")
    for window, d_inner, note in ((515, 3328, "granite-4.0-h-1b, 512 tokens"), (937, 8192, ""), (4, 3328, "granite-4.0-h-1b, decode")):
        yield _conv("f32", (window, d_inner, 1, 1), (4, d_inner, 1, 1), perf=True, note=note)
    yield perf(f32(3328, 515, perm=(1, 0)), f32(4, 3328), note="granite-4.0-h-1b, channels innermost")


@ssm_conv.errors
def _ssm_conv_errors() -> Iterator[ErrorCase]:
    yield error(DTypeError, "SSM_CONV: sx is f16; legal: f32", f16(6, 8), f32(4, 8))
    yield error(DTypeError, "SSM_CONV: c is i32; legal: f32, f16, bf16", f32(6, 8), i32(4, 8))
    yield error(ShapeError, "sx has ne [6, 8, 1, 2]; it must have 3 dims", f32(6, 8, 1, 2), f32(4, 8))
    yield error(ShapeError, "c has ne [4, 9, 1, 1]; it must be [d_conv, 8], sx's channels", f32(6, 8), f32(4, 9))
    yield error(ShapeError, "sx has ne [3, 8, 1, 1]; dim 0 must hold at least one window of d_conv 4", f32(3, 8), f32(4, 8))
    yield error(ParamError, "n_t 2; legal: None or at least the 3 tokens of sx", f32(6, 8), f32(4, 8), n_t=2)


@ssm_conv.random
def _ssm_conv_random(draw: Draw) -> Case:
    d_conv, n_tok, d_inner, n_seqs = draw.choice((1, 2, 3, 4, 4, 4, 9)), draw_dim(draw, 70), draw_dim(draw, 70), draw.integer(1, 3)
    if draw.choice((True, False)):  # as ggml has it
        return _conv("f32", (d_conv - 1 + n_tok, d_inner, n_seqs, 1), (d_conv, d_inner, 1, 1))
    c = draw_leaf(draw, draw.choice((F32, F32, F16, BF16)), (d_conv, d_inner), layouts=("plain", "gap"))
    n_t = n_tok + draw.integer(0, 20) if draw.choice((True, False)) else None
    return case(draw_leaf(draw, F32, (d_conv - 1 + n_tok, d_inner, n_seqs)), c, n_t=n_t)


# SSM_SCAN

WEAK = uniform(-0.02, -0.005)  # slow decay, so that a lost state shows


@ssm_scan.fills
def _ssm_scan_fills(s: Leaf, **_: Leaf) -> dict[str, Fill]:
    return {"dt": uniform(-4.0, 2.0), "A": uniform(-1.0, -0.5), "ids": distinct(s.ne[3])}


@form(ssm_scan)
def _scan(type: str, d_state: int, head_dim: int, n_head: int, n_group: int, n_seq_tokens: int, n_seqs: int, *, xbc_overlap: bool = False,
          weak: bool = False, n_rows: int = 0, row: int = 0) -> Case:
    """xbc_overlap: x, B and C with the strides of one tensor's views; weak: slow decay; n_rows: rows of s (0: n_seqs); row: x, dt, B and C
    with the strides of views of rows of that many floats."""

    def view(*ne: int) -> Leaf:
        if xbc_overlap:
            return leaf(type, ne, inside=(d_state, n_head, n_seq_tokens, n_seqs))
        if not row:
            return leaf(type, ne)
        per_token, per_seq = 4 * row, 4 * row * n_seq_tokens
        nb = (4, 4 * ne[0], per_token, per_seq) if len(ne) == 4 else (4, per_token, per_seq, per_seq * n_seqs)
        return Leaf(F32, shape4(ne), nb)

    dt = view(n_head, n_seq_tokens, n_seqs) if not xbc_overlap else leaf(type, (n_head, n_seq_tokens, n_seqs))
    bc = view(d_state, n_group, n_seq_tokens, n_seqs)
    return case(leaf(type, (d_state, head_dim, n_head, n_rows or n_seqs)), view(head_dim, n_head, n_seq_tokens, n_seqs), dt,
                leaf(type, (1, n_head), WEAK if weak else None), bc, bc, leaf(I32, (n_seqs,)))


@ssm_scan.cases
def _ssm_scan_cases() -> Iterator[Case]:
    yield _scan("f32", 16, 1, 1024, 1, 32, 4, note="f20")
    yield _scan("f32", 128, 64, 16, 2, 32, 4)
    yield _scan("f32", 256, 64, 8, 2, 32, 4, note="falcon-h1")
    yield _scan("f32", 128, 128, 4, 4, 16, 2, xbc_overlap=True)
    for weak in (False, True):
        for d_state, head_dim, n_head, n_group in ((128, 80, 128, 8), (96, 64, 16, 8), (256, 64, 8, 2), (128, 128, 4, 4)):
            yield _scan("f32", d_state, head_dim, n_head, n_group, 5, 1, weak=weak, note="f19")
        for n_tok in (1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 257, 300):
            for n_seqs in (1, 2):
                yield _scan("f32", 16, 8, 4, 2, n_tok, n_seqs, weak=weak, note="f8")
        yield _scan("f32", 16, 2, 2, 1, 8193, 2, weak=weak, note="f8")
    yield _scan("f32", 16, 8, 15, 3, 7, 1, note="f2")
    for d_state, head_dim in ((1, 1), (5, 3), (17, 16), (32, 33), (100, 20)):
        yield _scan("f32", d_state, head_dim, 4, 2, 11, 2, n_rows=5, note="odd sizes")
    yield _scan("f32", 64, 32, 8, 2, 1024, 8, row=8 * 32 + 2 * 2 * 64 + 8 + 5, weak=True, note="f48")
    yield _scan("f32", 128, 32, 48, 1, 9, 2, note="granite-4.0-h-350m")
    for n_tok in (1, 512):
        yield _scan("f32", 128, 64, 48, 1, n_tok, 1, perf=True, note="granite-4.0-h-1b")
        yield _scan("f32", 128, 64, 128, 8, n_tok, 1, perf=True, note="nemotron-h-8b")


@ssm_scan.errors
def _ssm_scan_errors() -> Iterator[ErrorCase]:
    good = dict(zip(ssm_scan.inputs, _scan("f32", 128, 64, 20, 5, 7, 3, n_rows=9).inputs, strict=True))

    def wrong(name: str, kind: type[Exception], match: str, x: Leaf) -> ErrorCase:
        return error(kind, match, *{**good, name: x}.values())

    for name in ("s", "x", "dt", "A", "B", "C"):
        x = good[name]
        assert x is not None
        yield wrong(name, DTypeError, f"SSM_SCAN: {name} is f16; legal: f32", leaf(F16, x.ne))
    yield wrong("ids", DTypeError, "SSM_SCAN: ids is f32; legal: i32", f32(3))
    yield wrong("x", ShapeError, "x has ne [32, 20, 7, 3]; s has head_dim 64, n_head 20: x must be [64, 20, n_tok, n_seqs]", f32(32, 20, 7, 3))
    yield wrong("dt", ShapeError, "dt has ne [20, 3, 7, 1]; it must be [20, 7, 3]: n_head, n_tok, n_seqs", f32(20, 3, 7))
    yield wrong("A", ShapeError, "A has ne [128, 20, 1, 1], a decay per state entry (Mamba-1)", f32(128, 20))
    yield wrong("A", ShapeError, "A has ne [1, 4, 1, 1]; it must be [1, 20], one decay per head", f32(1, 4))
    yield wrong("B", ShapeError, "B has ne [128, 8, 7, 3]: n_group 8 must divide n_head 20", f32(128, 8, 7, 3))
    yield wrong("B", ShapeError, "B has ne [128, 5, 7, 1]; it must be [128, 5, 7, 3]", f32(128, 5, 7, 1))
    yield wrong("C", ShapeError, "C has ne [64, 5, 7, 3]; it must be [128, 5, 7, 3]", f32(64, 5, 7, 3))
    yield wrong("ids", ShapeError, "ids has ne [9, 1, 1, 1]; it must be [3], one row of s per sequence", i32(9))
    yield wrong("ids", KernelError, "SSM_SCAN", i32(3, lo=9, hi=10))


@ssm_scan.random
def _ssm_scan_random(draw: Draw) -> Case:
    d_state, n_group = draw.choice((1, 5, 16, 17, 32, 100, 128)), draw.integer(1, 3)
    n_head, n_seqs = n_group * draw.integer(1, 4), draw.integer(1, 3)
    head_dim, n_tok = draw_dim(draw, 33), draw_dim(draw, 80)
    row = n_head * head_dim + 2 * n_group * d_state + n_head + draw.integer(0, 5) if draw.choice((True, False)) else 0
    return _scan("f32", d_state, head_dim, n_head, n_group, n_tok, n_seqs, weak=draw.choice((False, True)), n_rows=n_seqs + draw.integer(0, 2), row=row)
