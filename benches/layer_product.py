"""One layer's state-space product for benches: its inputs, its forms as graphs, runs that take turns, the float64 recurrence, where it ran."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

import pyggml as pg
from pyggml.backends import Backend, Runner, open_backend
from pyggml.backends.cpu import CpuRunner
from pyggml.cpu.level import describe
from pyggml.errors import ParamError
from pyggml.graph import Graph
from pyggml.models.layers import SSM
from pyggml.models.ssd import split_xbc, ssd_graph
from pyggml.registry import find_op
from pyggml.tensor import Tensor
from pyggml.tools.benchpeer import SETTLE_SECONDS
from pyggml.tools.common import load_function, note

ROOT = Path(__file__).resolve().parents[1]
Data = Mapping[str, np.ndarray]


class Shape(NamedTuple):
    """Sizes of a Mamba2 layer's product."""

    d_state: int
    head_dim: int
    n_head: int
    n_group: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The shape that d_state,head_dim,n_head,n_group says; an argparse type."""
        return cls(*map(int, text.split(",")))

    def __str__(self) -> str:
        return ",".join(map(str, self))


@dataclass(frozen=True, slots=True)
class Operands:
    """Inputs of a product, by the names that SSM_SCAN has for them. x, B and C are views of `rows`, one row per token, as in a model; the step
    sizes dt are before softplus."""

    rows: Tensor
    s: Tensor
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    ids: Tensor
    D: Tensor

    @property
    def scan(self) -> tuple[Tensor, ...]:
        """What SSM_SCAN and SSD_SCAN take first."""
        return self.s, self.x, self.dt, self.A, self.B, self.C, self.ids


Form = Callable[[Operands], tuple[Tensor, Tensor]]
"""Makes y [head_dim, n_head, n_tok, 1] and the state after the last token."""


def inputs(shape: Shape, n_tok: int) -> dict[str, np.ndarray]:
    """Random inputs in NumPy order: rows x, B and C of a token; steps from 0.02 to 2, decays from -0.01 to -1."""
    rng = np.random.default_rng(0)

    def uniform(*ne: int, lo: float = -1.0, hi: float = 1.0) -> np.ndarray:
        return rng.uniform(lo, hi, ne).astype(np.float32)

    return {"rows": uniform(n_tok, shape.n_head * shape.head_dim + 2 * shape.n_group * shape.d_state), "dt": uniform(1, n_tok, shape.n_head, lo=-4, hi=2),
            "s": uniform(1, shape.n_head, shape.head_dim, shape.d_state), "A": uniform(shape.n_head, 1, lo=-1, hi=-0.01), "D": uniform(shape.n_head, 1)}


def first(data: Data, n_tok: int) -> dict[str, np.ndarray]:
    """The inputs of the first n_tok tokens."""
    return {**data, "rows": data["rows"][:n_tok], "dt": data["dt"][:, :n_tok]}


def operands(shape: Shape, data: Data) -> Operands:
    """Tensors for these inputs; rows and dt are to be set, the rest holds its values."""
    rows = pg.tensor(list(data["rows"].shape[::-1]), name="rows")
    x, b, c = split_xbc(rows, shape.head_dim, shape.n_head, shape.d_state, shape.n_group, rows.ne[1], 1)
    dt = pg.tensor([shape.n_head, rows.ne[1], 1], name="dt")
    return Operands(rows, pg.tensor(data["s"]), x, dt, pg.tensor(data["A"]), b, c, pg.tensor(np.zeros(1, np.int32)), pg.tensor(data["D"]))


# Forms of the whole product, with softplus and the skip D x

def scan(o: Operands) -> tuple[Tensor, Tensor]:
    """The recurrence as one op."""
    y, state = pg.ssm_scan(*o.scan)
    return pg.add(y, pg.mul(o.x, o.D)), state


def ssd(chunk: int, precision: str = "f32") -> Form:
    """pyggml's graph of primitive ops, batched over chunks."""
    def form(o: Operands) -> tuple[Tensor, Tensor]:
        n = o.x.ne[2]
        more = -n % chunk
        act, delta = o.rows, pg.softplus(o.dt)
        if more:  # a padded step has dt 0: it decays by 1 and adds nothing
            act, delta = pg.pad(act, 0, more), pg.pad(delta, 0, more)
        y, state = ssd_graph(act, delta, o.A, o.D, o.s, o.B.ne[1], chunk, precision=precision)
        return pg.view(y, list(o.x.ne), list(y.nb[1:])), state
    return form


def ssd_fused(chunk: int | None, precision: str = "f32") -> Form:
    """SSD_SCAN."""
    return lambda o: pg.ssd_scan(*o.scan, None, o.D, chunk=chunk, precision=precision)


def unrolled(chunk: int) -> Form:
    """The graph of llama.cpp's draft, a sub-graph per chunk."""
    one_chunk = load_function(f"{ROOT}/examples/pr16982_unrolled.py:one_chunk")

    def form(o: Operands) -> tuple[Tensor, Tensor]:
        n_state, head_dim, n_head, _ = o.s.ne
        n, n_group = o.x.ne[2], o.B.ne[1]
        sizes = SSM({"ssm_d_conv": 4, "ssm_d_inner": head_dim * n_head, "ssm_d_state": n_state, "ssm_n_group": n_group, "ssm_dt_rank": n_head,
                     "f_norm_rms_eps": 1e-5})
        dt = pg.softplus(o.dt)
        dta, dtx = pg.mul(dt, pg.reshape(o.A, [n_head])), pg.mul(o.x, pg.reshape(dt, [1, n_head, n, 1]))
        y, state = None, o.s
        for i in range(0, n, chunk):
            y_chunk, state = one_chunk(dta, dtx, o.B, o.C, state, i, min(chunk, n - i), sizes, lambda t, name: t)
            y = y_chunk if y is None else pg.concat(y, y_chunk, 2)
        assert y is not None
        return pg.add(y, pg.mul(o.x, o.D)), state
    return form


# Running

class Lane:
    """A form on a backend; it is compiled when it first runs."""

    def __init__(self, shape: Shape, data: Data, form: Form, backend: Backend) -> None:
        self.data, self.backend = data, backend
        self.settle = SETTLE_SECONDS if backend.name == "ggml" else 0.0  # in which ggml's idle threads stop spinning
        self.operands = operands(shape, data)
        self.graph = Graph(form(self.operands))

    @functools.cached_property
    def runner(self) -> Runner:
        """The graph, compiled."""
        return self.backend.compile(self.graph)

    def fill(self) -> None:
        """Set the inputs, which lanes of one backend take from each other."""
        self.runner.set(self.operands.rows, self.data["rows"])
        self.runner.set(self.operands.dt, self.data["dt"])

    def seconds(self, repeat: int = 1) -> float:
        """Of one run, over `repeat` runs on end. Short ones are preceded by one that wakes the threads."""
        self.fill()
        if repeat > 1:
            self.runner.run()
        start = time.perf_counter()
        if isinstance(self.runner, CpuRunner):
            self.runner.run(repeat=repeat)  # in a model the product is one step of many: no call from Python for each
        else:
            for _ in range(repeat):
                self.runner.run()
        took = (time.perf_counter() - start) / repeat
        time.sleep(self.settle)
        return took

    def outputs(self) -> tuple[np.ndarray, np.ndarray]:
        """y and state of a run."""
        self.fill()
        self.runner.run()
        y, state = (self.runner.get(t) for t in self.graph.outputs)
        return y, state


def medians(lanes: Mapping[str, Lane], runs: int, repeat: int = 1) -> dict[str, float]:
    """Median seconds of a run of each, over samples in turn. Lanes that have run before are compiled and have touched their memory."""
    samples = [{k: lane.seconds(repeat) for k, lane in lanes.items()} for _ in range(runs)]
    return {k: median(s[k] for s in samples) for k in lanes}


def exact(data: Data, shape: Shape, lengths: Sequence[int], skip: bool = True) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each of the rising numbers of tokens with y [1, n_tok, n_head, head_dim] and state of the float64 recurrence up to there; y with the skip D x."""
    scan_fn = find_op("SSM_SCAN").reference_fn
    n_head, head_dim, bc = shape.n_head, shape.head_dim, shape.n_group * shape.d_state
    rows = data["rows"].astype(np.float64)
    x, b, c = np.split(rows, [n_head * head_dim, n_head * head_dim + bc], axis=1)
    x, b, c = x.reshape(1, -1, n_head, head_dim), *(v.reshape(1, -1, shape.n_group, shape.d_state) for v in (b, c))
    dt, a, state = data["dt"].astype(np.float64)[None], data["A"].astype(np.float64)[None, None], data["s"].astype(np.float64)
    ids = np.zeros((1, 1, 1, 1), np.int32)
    y, start = np.empty_like(x), 0
    for n in lengths:
        part = slice(start, n)
        y[:, part], state = scan_fn(state, x[:, part], dt[:, :, part], a, b[:, part], c[:, part], ids)
        if skip:
            y[:, part] += data["D"] * x[:, part]
        start = n
        yield n, y[:, :n], state


def open_ggml(threads: int, folder: str | None) -> Backend | None:
    """ggml's own library: that of a folder, or of the wheel libggml-python; None, with a line on stderr, where there is none."""
    try:
        return open_backend("ggml", threads=threads, **({"lib": folder} if folder else {}))
    except ParamError as e:
        note(f"note: no ggml: {e}")
        return None


def provenance(threads: int) -> str:
    """Machine, version, commit (where git knows it), threads and how busy the machine was before, for the head of a report."""
    machine = describe()
    load = f", load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    try:
        found = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        found = ""
    commit = f", commit {found}" if found else ""
    return f"{machine['cpu']}, {machine['cores']} cores, level {machine['level']}; pyggml {pg.__version__}{commit}; {threads} threads{load}"
