"""States written into the rows they were read from: the same results as with SET_ROWS apart, and no writing where it would show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.errors import KernelError
from pyggml.graph import Graph
from pyggml.tensor import Tensor

D_STATE, HEAD_DIM, N_HEAD, N_ROWS = 32, 16, 6, 5


def build(rows: list[int], n_tok: int, *, other_ids: bool = False, read_between: bool = False, keep: bool = False,
          d_state: int = D_STATE, n_head: int = N_HEAD) -> tuple[Tensor, list[Tensor], dict[Tensor, Any]]:
    """The pool, the graph's outputs, and values of its inputs: a scan of rows of the pool whose new states go back into them."""
    rng, n = np.random.default_rng(7), len(rows)
    size = d_state * HEAD_DIM * n_head
    pool = pg.tensor(rng.standard_normal((N_ROWS, size)).astype(np.float32), name="pool")
    ids = pg.tensor([n], "i32", name="ids")
    named = {"x": [HEAD_DIM, n_head, n_tok, n], "dt": [n_head, n_tok, n], "b": [d_state, 2, n_tok, n], "c": [d_state, 2, n_tok, n]}
    x, dt, b, c = (pg.tensor(ne, "f32", name=k) for k, ne in named.items())
    a = pg.tensor(np.full((n_head, 1), -0.5, np.float32))
    y, state = pg.ssm_scan(pg.reshape(pool, [d_state, HEAD_DIM, n_head, N_ROWS]), x, dt, a, b, c, ids)
    outs = [y]
    if read_between:
        outs.append(pg.scale(pool, 1.0))
    where = pg.tensor(np.array(rows, np.int32)) if other_ids else ids
    outs.append(pg.set_rows(pool, pg.reshape(state, [size, n]), where))
    if keep:
        outs.append(state)
    values = {t: rng.standard_normal(t.ne[::-1]).astype(np.float32) for t in (x, dt, b, c)}
    return pool, outs, {**values, ids: np.array(rows, np.int32)}


def run(fuse: bool, threads: int, *args: Any, **options: Any) -> tuple[list[bytes], list[str]]:
    """Bytes of the results and of the pool, and the kernels."""
    pool, outs, values = build(*args, **options)
    runner = open_backend("cpu", threads=threads, fuse=fuse).compile(Graph(outs))
    for t, v in values.items():
        runner.set(t, v.reshape(t.ne[::-1]))
    runner.run()
    assert pool.data is not None
    return [*(runner.get(t).tobytes() for t in outs), pool.data.tobytes()], [s.kernel_name for s in runner.plan.steps]


@pytest.mark.parametrize("rows", [[2], [4, 0, 3], [1, 3, 1, 1]], ids=str)
@pytest.mark.parametrize("n_tok", [1, 19])
@pytest.mark.parametrize(("d_state", "n_head"), [(32, 6), (20, 6), (32, 34)])
def test_same_bits_as_with_set_rows(rows: list[int], n_tok: int, d_state: int, n_head: int) -> None:
    """Rows named twice too: each sequence reads the state from before, the last one's new state stays. Of 34 heads a thread takes 4 at a time, at the end 2."""
    want, kernels = run(False, 1, rows, n_tok, d_state=d_state, n_head=n_head)
    assert kernels == ["ssm_scan_heads", "set_rows"]
    for threads in (1, 2, 7):
        got, kernels = run(True, threads, rows, n_tok, d_state=d_state, n_head=n_head)
        assert kernels == ["ssm_scan_heads"] and got == want


@pytest.mark.parametrize("option", ["other_ids", "read_between", "keep"])
def test_not_where_it_would_show(option: str) -> None:
    got, kernels = run(True, 2, [3, 1], 2, **{option: True})
    assert "set_rows" in kernels and got == run(False, 1, [3, 1], 2, **{option: True})[0]


def test_a_bad_row_leaves_the_other_rows_alone() -> None:
    pool, outs, values = build([2, N_ROWS], 2)
    assert pool.data is not None
    before = pool.data.copy()
    with pytest.raises(KernelError, match="SSM_SCAN .*bad index 5; legal: 0 to 4"):
        pg.compute(outs, values, threads=2)
    assert np.array_equal(np.delete(pool.data, 2, 0), np.delete(before, 2, 0)) and not np.array_equal(pool.data[2], before[2])
