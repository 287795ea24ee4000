"""The SSD graph of llama.cpp's draft (PR 16982), which makes one sub-graph per chunk, from pyggml's ops: how its node count and time grow
with the number of tokens, beside the recurrence and beside pyggml's ssd graph, whose size is constant.

    python examples/pr16982_unrolled.py                        # a table
    python examples/pr16982_unrolled.py -o csv > growth.csv    # for a plot
    pyggml graph --compare ssd,examples/pr16982_unrolled.py:pr16982_layer --chunk 64
    pyggml trace --diff ssd examples/pr16982_unrolled.py:pr16982_layer --chunk 256 -p "Captain Wentworth had"

`pr16982_layer` has the signature of `mamba2_layer`, so it also runs inside a whole model. Node for node it follows the draft's last version
and bears its names (docs/porting.md shows the lines side by side), except that it gives y and the state as two outputs, repeats B and C B^T
by group (the draft tiles them, which is the same for one group only), and does not clamp dt, as llama.cpp's SSM_SCAN does not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import pyggml as pg
from pyggml.backends import open_backend
from pyggml.models.layers import SSM
from pyggml.models.ssd import default_chunk
from pyggml.testing import nmse
from pyggml.tools.common import human_bytes, numbers, whole
from pyggml.tools.records import FORMATS, Column, Row, write_rows

CHUNK = 256  # the draft's first choice; later 512, one whole ubatch
GRANITE_350M: dict[str, Any] = {"n_embd": 768, "ssm_d_conv": 4, "ssm_d_inner": 1536, "ssm_d_state": 128, "ssm_n_group": 1, "ssm_dt_rank": 48,
                                "f_norm_rms_eps": 1e-5}


def pr16982_layer(x: pg.Tensor, weights: Any, conv: pg.Tensor, ssm: pg.Tensor, hparams: Any, *, form: str = "user",
                  chunk: int | str | None = None) -> tuple[pg.Tensor, pg.Tensor, pg.Tensor]:
    """A Mamba2 layer whose state-space product is a loop over chunks, as in the draft. Arguments and results: see `pyggml.mamba2_layer`."""
    il = pg.current_scope().layer or 0
    p, n, s = SSM(hparams), x.ne[1], x.ne[2]
    size = n if chunk == "none" else int(chunk or CHUNK)

    def cb(t: pg.Tensor, name: str) -> pg.Tensor:
        t.name = f"{name}-{il}"
        return t

    with pg.scope("in-proj", il):
        zxbcdt = cb(pg.mul_mat(weights["ssm_in.weight"], x), "ssm_in")                                       # [d_in_proj, n, S]
        row, seq = zxbcdt.nb[1], zxbcdt.nb[2]
        z = pg.view(zxbcdt, [p.d_inner, n, s], [row, seq])
        xbc = pg.view(zxbcdt, [p.conv_dim, n, s], [row, seq], p.d_inner * 4)
        dt = pg.view(zxbcdt, [p.n_head, n, s], [row, seq], (p.d_inner + p.conv_dim) * 4)
    with pg.scope("conv", il):
        window = cb(pg.concat(conv, pg.transpose(xbc)), "conv_input")                                        # [d_conv-1 + n, conv_dim, S]
        new_conv = pg.cont(pg.view(window, [p.d_conv - 1, p.conv_dim, s], [window.nb[1], window.nb[2]], n * 4))
        act = cb(pg.silu(pg.add(pg.ssm_conv(window, weights["ssm_conv1d.weight"]), weights["ssm_conv1d.bias"])), "conv_output_silu")
    with pg.scope("scan", il):
        row, seq = act.nb[1], act.nb[2]
        xs = pg.view(act, [p.head_dim, p.n_head, n, s], [p.head_dim * 4, row, seq])
        b = pg.view(act, [p.d_state, p.n_group, n, s], [p.d_state * 4, row, seq], p.d_inner * 4)
        c = pg.view(act, [p.d_state, p.n_group, n, s], [p.d_state * 4, row, seq], (p.d_inner + p.n_group * p.d_state) * 4)
        dt = cb(pg.softplus(pg.add(pg.cont(dt), weights["ssm_dt.bias"])), "dt_softplus")                     # [H, n, S]
        dta = cb(pg.mul(dt, pg.reshape(weights["ssm_a"], [p.n_head])), "dtA")
        dtx = cb(pg.mul(xs, pg.reshape(dt, [1, p.n_head, n, s])), "dtX")                                     # [P, H, n, S]
        y, state = None, ssm
        for i in range(0, n, size):
            y_chunk, state = one_chunk(dta, dtx, b, c, state, i, min(size, n - i), p, cb)
            y = y_chunk if y is None else pg.concat(y, y_chunk, 2)
        assert y is not None
        y = cb(pg.add(y, pg.mul(xs, pg.reshape(weights["ssm_d"], [1, p.n_head]))), "mamba2_y_add_d")
    with pg.scope("gated norm", il):
        y = pg.swiglu_split(z, pg.reshape(y, [p.d_inner, n, s]))
        norm = weights.get("ssm_norm.weight")
        if norm is not None:
            width = p.d_inner // p.n_group
            groups = pg.rms_norm(pg.reshape(y, [width, p.n_group, n, s]), eps=p.eps)
            y = pg.reshape(pg.mul(groups, pg.reshape(norm, [width, p.n_group])), [p.d_inner, n, s])
    with pg.scope("out-proj", il):
        return cb(pg.mul_mat(weights["ssm_out.weight"], y), "mamba_out"), new_conv, cb(state, "ssm_state")


def one_chunk(dta: pg.Tensor, dtx: pg.Tensor, b: pg.Tensor, c: pg.Tensor, ssm: pg.Tensor, i: int, q: int, p: SSM,
              cb: Callable[[pg.Tensor, str], pg.Tensor]) -> tuple[pg.Tensor, pg.Tensor]:
    """Steps 3 to 10 of the draft for tokens i to i + q: y [P, H, q, S] and the state after them."""
    h, s, r = p.n_head, dtx.ne[3], p.n_head // p.n_group
    dta = cb(pg.view(dta, [h, q, s], list(dta.nb[1:3]), i * dta.nb[1]), "dtA_chunk")
    dtx = cb(pg.view(dtx, [p.head_dim, h, q, s], list(dtx.nb[1:]), i * dtx.nb[2]), "dtX_chunk")
    b = cb(pg.view(b, [p.d_state, p.n_group, q, s], list(b.nb[1:]), i * b.nb[2]), "B_chunk")
    c = cb(pg.view(c, [p.d_state, p.n_group, q, s], list(c.nb[1:]), i * c.nb[2]), "C_chunk")

    # 3: C B^T, then for every head
    c, b = pg.permute(c, 0, 2, 1, 3), pg.permute(b, 0, 2, 1, 3)                                              # [N, q, G, S]
    c_b = cb(pg.repeat_interleave(pg.mul_mat(b, c), r, dim=2), "CB")                                         # [qj, qi, H, S]
    # 4: decay from j to i
    dta = pg.permute(dta, 2, 1, 3, 0)                                                                        # [1, q, H, S]
    steps = pg.tri(pg.repeat(dta, [q, q, h, s]), "lower")
    decay = cb(pg.exp(cb(pg.cumsum(steps, dim=1), "segsum")), "decay")                                       # [qj, qi, H, S]
    # 5, 6: the product within the chunk
    m = cb(pg.tri(pg.mul(c_b, pg.cont(decay)), "lower_diag"), "surrogate_attention_matrix")
    y = pg.mul_mat(pg.cont(pg.permute(dtx, 1, 2, 0, 3)), m)                                                  # [P, qi, H, S]
    y = cb(pg.cont(pg.permute(y, 0, 2, 1, 3)), "y_chunk")                                                    # [P, H, q, S]
    # 7, 8: the chunk's own state
    last = pg.view(decay, [q, 1, h, s], list(decay.nb[1:]), (q - 1) * decay.nb[1])
    last = cb(pg.cont(pg.permute(last, 2, 0, 1, 3)), "decay_last")                                           # [1, H, q, S]
    b = pg.repeat_interleave(pg.cont(b), r, dim=2)                                                           # [N, q, H, S]
    weighted = cb(pg.cont(pg.permute(pg.mul(dtx, last), 1, 2, 0, 3)), "dtxdecay")                            # [q, P, H, S]
    state = cb(pg.mul_mat(pg.cont(pg.permute(b, 1, 0, 2, 3)), weighted), "next_state")                       # [N, P, H, S]
    # 9, 10: what the state before the chunk adds
    since = cb(pg.exp(pg.cumsum(dta, dim=1)), "exp_dtA_cumsum")                                              # [1, q, H, S]
    whole_chunk = cb(pg.view(since, [1, 1, h, s], list(since.nb[1:]), (q - 1) * since.nb[1]), "exp_dtA_cumsum_last")
    state = cb(pg.add(state, pg.mul(ssm, pg.cont(whole_chunk))), "next_state_updated")
    before = cb(pg.mul_mat(c, ssm), "y_prev")                                                                # [q, P, H, S]
    before = cb(pg.mul(pg.cont(pg.permute(before, 2, 0, 1, 3)), pg.cont(pg.permute(since, 0, 2, 1, 3))), "y_prev_mul")
    return cb(pg.add(y, before), "y_chunk_updated"), state


# The table

COLUMNS = (Column("tokens", int, "tokens"), Column("form", str, "form"), Column("chunk", int, "chunk", lambda x: str(x) if x else "-"),
           Column("nodes", int, "nodes"), Column("moves_share", float, "only move", lambda x: f"{100 * x:.0f} %"),
           Column("plan_bytes", int, "plan memory", human_bytes), Column("build_ms", float, "build ms", lambda x: f"{x:.1f}"),
           Column("run_ms", float, "run ms", lambda x: f"{x:.1f}"), Column("nmse", float, "NMSE to scan", lambda x: f"{x:.0e}"))


def layer_weights(hp: dict[str, Any], rng: np.random.Generator) -> dict[str, pg.Tensor]:
    """Random weights of one layer."""
    p, n_embd = SSM(hp), hp["n_embd"]

    def normal(*shape: int) -> np.ndarray:
        return np.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), np.float32)

    arrays = {"ssm_in.weight": normal(p.d_inner + p.conv_dim + p.n_head, n_embd), "ssm_conv1d.weight": normal(p.conv_dim, p.d_conv),
              "ssm_conv1d.bias": np.zeros(p.conv_dim, np.float32), "ssm_dt.bias": rng.normal(-4, 1, p.n_head).astype(np.float32),
              "ssm_a": -rng.uniform(1, 16, (p.n_head, 1)).astype(np.float32), "ssm_d": np.ones((p.n_head, 1), np.float32),
              "ssm_norm.weight": np.ones(p.d_inner, np.float32), "ssm_out.weight": normal(n_embd, p.d_inner)}
    return {k: pg.tensor(v, name=f"blk.0.{k}") for k, v in arrays.items()}


def measure(tokens: list[int], chunk: int, runs: int, threads: int | None) -> Iterator[Row]:
    """One row per number of tokens and form: the recurrence, pyggml's ssd graph with the draft's chunk and with its own, the draft's graph."""
    hp, rng = GRANITE_350M, np.random.default_rng(0)
    p, weights = SSM(hp), layer_weights(hp, rng)
    backend = open_backend("cpu", threads=threads)
    forms: list[tuple[str, int | None]] = [("scan", None), ("ssd", chunk), ("ssd", None), ("unrolled", chunk)]
    for n in tokens:
        value, want = rng.normal(size=(n, hp["n_embd"])).astype(np.float32), None
        for form, q in forms:
            x, conv, ssm = pg.tensor([hp["n_embd"], n], name="x"), pg.tensor([*p.conv_ne], name="conv"), pg.tensor([*p.ssm_ne], name="ssm")
            for _ in range(2):  # kernels are compiled the first time
                start = time.perf_counter()
                if form == "unrolled":
                    outs = pr16982_layer(x, weights, conv, ssm, hp, chunk=q)
                else:
                    outs = pg.mamba2_layer(x, weights, conv, ssm, hp, form=form, chunk=q)
                graph = pg.Graph(outs)
                runner = backend.compile(graph)
                built = time.perf_counter() - start
            times = []
            for _ in range(runs + 1):  # and the first run touches new memory
                for t, v in ((x, value), (conv, np.zeros(conv.ne[1::-1], np.float32)), (ssm, np.zeros(ssm.ne[2::-1], np.float32))):
                    runner.set(t, v)
                start = time.perf_counter()
                runner.run()
                times.append(time.perf_counter() - start)
            got = runner.get(outs[0])
            want = got if want is None else want
            yield {"tokens": n, "form": form, "chunk": None if form == "scan" else q or default_chunk(n, 1, p.n_head), "nodes": graph.n_nodes,
                   "moves_share": graph.stats().moves_share, "plan_bytes": runner.plan.arena_bytes, "build_ms": 1e3 * built,
                   "run_ms": 1e3 * float(np.median(times[1:])), "nmse": nmse(got, want)}


def main() -> None:
    """Print the table."""
    a = argparse.ArgumentParser(description="Node growth and time of a chunk-by-chunk SSD graph, one layer of granite-4.0-h-350m.")
    a.add_argument("--tokens", type=numbers(1), default=[64, 256, 512, 1024, 2048, 4096], metavar="N,N", help="tokens per graph (64 to 4096)")
    a.add_argument("--chunk", type=whole(1), default=CHUNK, metavar="N", help=f"tokens per chunk ({CHUNK})")
    a.add_argument("-r", "--repetitions", type=whole(1), default=3, metavar="N", help="timed runs, of which the median counts (3)")
    a.add_argument("-t", "--threads", type=whole(1, 256), metavar="N", help="threads (all cores)")
    a.add_argument("-o", "--output", choices=FORMATS, default="console", metavar="FORMAT", help=f"{', '.join(FORMATS)} (console)")
    args = a.parse_args()
    write_rows(measure(args.tokens, args.chunk, args.repetitions, args.threads), COLUMNS, args.output, sys.stdout)


if __name__ == "__main__":
    main()
