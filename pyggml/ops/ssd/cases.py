"""Cases of SSD_SCAN: sizes on and off the vectors' width, options, packed sequences, views, decays from weak to sudden."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyggml.cases import Case, Draw, ErrorCase, Fill, Leaf, case, distinct, draw_dim, error, f32, form, i32, leaf, uniform
from pyggml.dtypes import F32, I32
from pyggml.errors import DTypeError, KernelError, ParamError, ShapeError
from pyggml.ops.ssd.defs import ssd_scan
from pyggml.tensor import shape4

Ne = tuple[int, ...]
DECAYS: dict[str, Fill] = {"weak": uniform(-0.02, -0.005), "usual": uniform(-1.0, -0.5), "sudden": uniform(-40.0, -20.0)}  # weak: a lost state shows
STEPS: dict[str, Fill] = {"usual": uniform(-4.0, 2.0), "wide": uniform(-100.0, 120.0)}  # before softplus
FEW = 3e-5  # NMSE of bf16 where a result has few terms, whose roundings then do not average out
CANCELLED = 1e-9  # NMSE of f32 for few results, which may all be small differences of large terms


@ssd_scan.fills
def _fills(s: Leaf, ids: Leaf, **_: Leaf) -> dict[str, Fill]:
    return {"dt": STEPS["usual"], "A": DECAYS["usual"], "ids": distinct(s.ne[3]), "z": uniform(-6.0, 6.0)}


def _fixed(values: list[int]) -> Fill:
    return lambda rng, shape: np.array(values).reshape(shape)


@form(ssd_scan)
def _ssd(type: str, d_state: int, head_dim: int, n_head: int, n_group: int, n_tok: int, n_seqs: int, *, precision: str = "f32", chunk: int = 0,
         decay: str = "usual", steps: str = "usual", options: str = "bdz", packed: Ne = (), row: int = 0, perm: bool = False, n_rows: int = 0) -> Case:
    """options: which of dt_bias, D and z are given; packed: lengths of packed sequences (n_tok and n_seqs are then their sum and number); row: x, B,
    C, dt and z are views of rows of that many floats; perm: their dims 0 and 2 are exchanged in memory; n_rows: rows of s (0: n_seqs)."""
    tokens, rect = (n_tok, n_seqs) if not packed else (sum(packed), 1)

    def view(*ne: int, fill: Fill | None = None) -> Leaf:
        if perm:
            return leaf(type, (ne[2], ne[1], ne[0], *ne[3:]), fill, perm=(2, 1, 0))
        if not row:
            return leaf(type, ne, fill)
        per_token, per_seq = 4 * row, 4 * row * tokens
        nb = (4, 4 * ne[0], per_token, per_seq) if len(ne) == 4 else (4, per_token, per_seq, per_seq * rect)
        return Leaf(F32, shape4(ne), nb, fill)

    bc = view(d_state, n_group, tokens, rect)
    return case(leaf(type, (d_state, head_dim, n_head, n_rows or n_seqs)), view(head_dim, n_head, tokens, rect),
                view(n_head, tokens, rect, fill=STEPS[steps]), leaf(type, (1, n_head), DECAYS[decay]), bc, bc, leaf(I32, (n_seqs,)),
                f32(n_head) if "b" in options else None, f32(1, n_head) if "d" in options else None,
                view(head_dim, n_head, tokens, rect) if "z" in options else None,
                leaf(I32, (n_seqs + 1,), _fixed([sum(packed[:i]) for i in range(n_seqs + 1)])) if packed else None,
                chunk=chunk or None, precision=precision)


@ssd_scan.cases
def _cases() -> Iterator[Case]:
    for precision in ("f32", "bf16"):
        for d_state, head_dim, n_head, n_group in ((16, 32, 8, 2), (64, 64, 4, 1), (96, 80, 4, 4), (128, 64, 6, 1), (256, 128, 2, 1)):
            for decay in DECAYS:
                yield _ssd("f32", d_state, head_dim, n_head, n_group, 70, 1, precision=precision, decay=decay)
        for n_tok in (1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 257):
            yield _ssd("f32", 32, 16, 4, 2, n_tok, 2, precision=precision, decay="weak", limit=FEW if precision == "bf16" else None, note="f8")
        for options in ("", "b", "d", "z"):
            yield _ssd("f32", 32, 16, 4, 1, 50, 2, precision=precision, decay="weak", options=options, n_rows=4)
        for d_state, head_dim in ((1, 1), (5, 3), (17, 16), (32, 33), (100, 20), (40, 48)):
            yield _ssd("f32", d_state, head_dim, 4, 2, 37, 2, precision=precision, decay="weak", n_rows=5, limit=FEW if precision == "bf16" else None,
                       note="odd sizes")
        yield _ssd("f32", 32, 16, 15, 3, 70, 1, precision=precision, decay="weak", note="f2")
        for packed in ((1, 70, 0, 64, 3), (33,), (0, 0, 5), (128, 128)):
            yield _ssd("f32", 32, 16, 4, 2, sum(packed), len(packed), precision=precision, decay="weak", packed=packed, n_rows=len(packed) + 2,
                       limit=FEW if precision == "bf16" else None, note="packed")
        yield _ssd("f32", 48, 24, 4, 2, 70, 2, precision=precision, decay="weak", row=4 * 24 + 2 * 2 * 48 + 7, note="f48")
        yield _ssd("f32", 48, 24, 4, 2, 70, 2, precision=precision, decay="weak", perm=True, note="strided in each dim")
        yield _ssd("f32", 32, 32, 4, 1, 100, 1, precision=precision, steps="wide", decay="weak", note="f12")
        yield _ssd("f32", 32, 32, 4, 1, 100, 1, precision=precision, steps="wide", note="f9")
    for chunk in (1, 7, 16, 17, 32, 48, 100, 256, 1000):
        yield _ssd("f32", 32, 16, 4, 2, 300, 1, chunk=chunk, decay="weak")
    yield _ssd("f32", 16, 2, 2, 1, 8193, 2, decay="weak", note="f8")
    yield _ssd("f32", 16, 1, 1024, 1, 32, 4, note="f20")
    for precision in ("f32", "bf16"):
        for n_tok in (64, 512):
            yield _ssd("f32", 128, 32, 48, 1, n_tok, 1, precision=precision, perf=True, note="granite-4.0-h-350m")
            yield _ssd("f32", 128, 64, 48, 1, n_tok, 1, precision=precision, perf=True, note="granite-4.0-h-1b")
            yield _ssd("f32", 128, 64, 128, 8, n_tok, 1, precision=precision, perf=True, note="nemotron-h-8b")
        yield _ssd("f32", 128, 80, 128, 8, 512, 1, precision=precision, perf=True, note="nemotron-nano-9b-v2")
        yield _ssd("f32", 128, 80, 128, 1, 512, 1, precision=precision, perf=True, note="one group")


@ssd_scan.errors
def _errors() -> Iterator[ErrorCase]:
    rect = dict(zip(ssd_scan.inputs, _ssd("f32", 32, 16, 20, 5, 7, 3, n_rows=9).inputs, strict=True))
    packed = dict(zip(ssd_scan.inputs, _ssd("f32", 32, 16, 20, 5, 7, 3, n_rows=9, packed=(2, 0, 5)).inputs, strict=True))

    def wrong(kind: type[Exception], match: str, good: dict[str, Leaf | None], **changed: Leaf) -> ErrorCase:
        return error(kind, match, *{**good, **changed}.values())

    for arg, x in rect.items():
        if x is not None and arg != "ids":
            yield wrong(DTypeError, f"SSD_SCAN: {arg} is f16; legal: f32", rect, **{arg: leaf("f16", x.ne)})
    yield wrong(DTypeError, "SSD_SCAN: ids is f32; legal: i32", rect, ids=f32(3))
    yield wrong(DTypeError, "SSD_SCAN: cu_seqlens is f32; legal: i32", packed, cu_seqlens=f32(4))
    yield error(ParamError, "SSD_SCAN: precision 'f16'; legal: f32, bf16", *rect.values(), precision="f16")
    for bad in (0, -1, 2.5, True, "64"):
        yield error(ParamError, f"SSD_SCAN: chunk {bad!r}; legal: None or a whole number >= 1", *rect.values(), chunk=bad)
    yield wrong(ShapeError, "x has ne [32, 20, 7, 3]; s has head_dim 16, n_head 20: x must be [16, 20, n_tok, n_seqs]", rect, x=f32(32, 20, 7, 3))
    yield wrong(ShapeError, "dt has ne [20, 3, 7, 1]; it must be [20, 7, 3]: n_head, n_tok, n_seqs", rect, dt=f32(20, 3, 7))
    yield wrong(ShapeError, "A has ne [32, 20, 1, 1]; it must be [1, 20], one decay per head", rect, A=f32(32, 20))
    yield wrong(ShapeError, "B has ne [32, 8, 7, 3]: n_group 8 must divide n_head 20", rect, B=f32(32, 8, 7, 3))
    yield wrong(ShapeError, "B has ne [32, 5, 7, 1]; it must be [32, 5, 7, 3]", rect, B=f32(32, 5, 7, 1))
    yield wrong(ShapeError, "C has ne [16, 5, 7, 3]; it must be [32, 5, 7, 3]", rect, C=f32(16, 5, 7, 3))
    yield wrong(ShapeError, "ids has ne [9, 1, 1, 1]; it must be [3], one row of s per sequence", rect, ids=i32(9))
    yield wrong(ShapeError, "ids has ne [3, 2, 1, 1]; it must have one dim", rect, ids=i32(3, 2))
    yield wrong(ShapeError, "dt_bias has ne [1, 20, 1, 1]; it must be [20], one per head", rect, dt_bias=f32(1, 20))
    yield wrong(ShapeError, "D has ne [20, 1, 1, 1]; it must be [1, 20], one per head", rect, D=f32(20))
    yield wrong(ShapeError, "z has ne [16, 20, 7, 1]; it must have x's, [16, 20, 7, 3]", rect, z=f32(16, 20, 7))
    yield wrong(ShapeError, "cu_seqlens has ne [3, 1, 1, 1]; it must be [4], one more than ids", packed, cu_seqlens=i32(3))
    yield wrong(ShapeError, "x has ne [16, 20, 7, 3]; with cu_seqlens the tokens of all sequences follow each other", rect, cu_seqlens=i32(4))
    yield wrong(KernelError, "SSD_SCAN", rect, ids=i32(3, lo=9, hi=10))
    yield wrong(KernelError, "SSD_SCAN", rect, ids=i32(3, lo=-1, hi=0))
    for lengths in ((1, 2, 2, 7), (0, 3, 2, 7), (0, 2, 4, 6), (0, 2, 9, 7), (0, -1, 5, 7), (0, 2, 4, 8)):
        yield wrong(KernelError, "SSD_SCAN", packed, cu_seqlens=leaf(I32, (4,), _fixed([*lengths])))


@ssd_scan.random
def _random(draw: Draw) -> Case:
    d_state, n_group = draw.choice((1, 5, 16, 17, 32, 100, 128)), draw.integer(1, 3)
    n_head, n_seqs = n_group * draw.integer(1, 4), draw.integer(1, 3)
    head_dim, n_tok = draw_dim(draw, 50), draw_dim(draw, 140)
    packed = tuple(draw.integer(0, 70) for _ in range(n_seqs)) if draw.choice((True, False)) else ()
    if packed and not sum(packed):
        packed = (*packed[:-1], 1)
    layout = draw.choice(("plain", "row", "perm"))
    n_results = n_head * head_dim * (sum(packed) or n_tok)
    precision = draw.choice(("f32", "bf16")) if n_results >= 1000 and d_state * head_dim >= 256 else "f32"
    limit = 2 * FEW if precision == "bf16" else CANCELLED if n_results < 100 else None
    return _ssd("f32", d_state, head_dim, n_head, n_group, sum(packed) or n_tok, n_seqs, precision=precision, chunk=draw.choice((0, 0, 1, 5, 16, 64, 200)),
                decay=draw.choice(("weak", "usual", "sudden")), options="".join(o for o in "bdz" if draw.choice((True, False))), packed=packed,
                row=max(n_head * head_dim, n_group * d_state) + draw.integer(0, 5) if layout == "row" else 0, perm=layout == "perm",
                n_rows=n_seqs + draw.integer(0, 2), limit=limit)
