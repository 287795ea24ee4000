"""One kernel for a chain of pointwise ops, written out as Python source and compiled like any other kernel.

Each node has a scalar expression over its inputs a, b, c and attributes (registry.Pointwise). The generated kernel loads
every outside operand once per element, evaluates the chain in float32 (float64 where an input is f64, whole numbers
where only those come in and go out), and stores the last value. Broadcasts, permutes and strides are folded into the
index arithmetic: in dim 0 an operand is contiguous, constant, strided or repeated (ggml's modulo); rows are addressed
by their three outer indices.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from pyggml.cpu import mathf, simd
from pyggml.cpu.compile import KernelSpec
from pyggml.cpu.launch import CHUNK_ELEMENTS, Launch, default_chunk
from pyggml.dtypes import F32, F64, DType
from pyggml.graph import Graph
from pyggml.plan import Step, single_steps
from pyggml.tensor import Node, Tensor

MAX_OPERANDS = 8
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*)?(?:e-?\d+)?(?![\w.])")
_NAME = re.compile(r"\b[A-Za-z_]\w*\b")
_FUNCTIONS: dict[str, dict[str, Any]] = {
    "f32": {n: getattr(mathf, n) for n in ("exp", "expm1", "log", "log1p", "sigmoid", "silu", "tanh", "softplus", "gelu")},
    "f64": {"sqrt": simd.sqrt64, "abs": simd.fabs64},
    "i64": {},
}
_FUNCTIONS["f32"].update(sqrt=simd.sqrt, abs=simd.fabs, floor=simd.floor)
_CAST = {"f32": "np.float32", "f64": "np.float64", "i64": "np.int64"}


def operands(node: Node) -> list[Tensor]:
    """The tensors that a pointwise node's expression calls a, b, c."""
    ins = [t for t in node.src if t is not None]
    assert node.op.pointwise is not None
    if not node.op.pointwise.halves:
        return ins
    x = ins[0]
    n = x.ne[0] // 2
    first, second = (Tensor(x.dtype, (n, x.ne[1], x.ne[2], x.ne[3]), x.nb, name=x.name, root=x.root, offs=x.offs + k * n * x.nb[0]) for k in (0, 1))
    return [second, first] if node.params.get("swapped") else [first, second]


def _kind(dt: DType) -> str:
    return "f64" if dt is F64 else "i64" if dt.is_int else "f32"


def _compute_kind(node: Node) -> str:
    kinds = {_kind(t.dtype) for t in operands(node)}
    if kinds == {"i64"} and node.out.dtype.is_int:
        return "i64"
    return "f64" if "f64" in kinds or node.out.dtype is F64 else "f32"


def group(graph: Graph) -> list[Step]:
    """Steps with chains of pointwise nodes merged: a value that only one later pointwise node of the same dims reads, and
    reads whole, is computed inside that node. In-place writes between the two to memory that the first reads keep them apart."""
    steps = single_steps(graph)
    readers: dict[int, int] = {}
    for n in graph.nodes:
        for t in n.src:
            if t is not None:
                readers[id(t)] = readers.get(id(t), 0) + 1
    kept = {id(t) for t in graph.outputs}
    made_by: dict[int, Step] = {}
    writes: list[tuple[int, int]] = []  # (step index, root id) of in-place writes
    result: list[Step] = []
    position: dict[int, int] = {}
    for i, s in enumerate(steps):
        node = s.nodes[-1]
        if node.op.pointwise is not None:
            for t in node.src:
                p = made_by.get(id(t)) if t is not None else None
                if p is None or t is None or readers[id(t)] != 1 or id(t) in kept or t.ne != node.out.ne or t.dtype not in (F32, F64):
                    continue
                reads = {id(x.root) for x in p.ins if x is not None}
                ins = [*p.ins, *(x for x in s.ins if x is not t)]
                if len({id(x) for x in ins}) > MAX_OPERANDS or any(at > position[id(p)] and root in reads for at, root in writes):
                    continue
                result.remove(p)
                s.nodes[:0] = p.nodes
                s.ins = ins
                del made_by[id(t)]
            made_by[id(node.out)] = s
        elif node.op.inplace is not None:
            writes.append((i, id(node.out.root)))
        position[id(s)] = i
        result.append(s)
    return result


# -- source ---------------------------------------------------------------------------------------------------------------

class _Outside:
    """An operand from outside the chain: how the loops address it."""

    def __init__(self, t: Tensor, out: Tensor) -> None:
        ne, nb = list(t.ne), list(t.nb)
        self.modulo = [ne[d] not in (1, out.ne[d]) for d in range(4)]
        for d in range(4):
            if ne[d] == 1 and (d > 0 or out.ne[0] > 1):
                nb[d] = 0
        self.dim0 = "m" if self.modulo[0] else "b" if ne[0] == 1 and out.ne[0] > 1 else "c" if t.rows_contiguous else "s"
        self.tensor = Tensor(t.dtype, t.ne, (nb[0], nb[1], nb[2], nb[3]), name=t.name, root=t.root, offs=t.offs)
        self.kind = _kind(t.dtype)
        self.whole = t.ne == out.ne and t.is_contiguous
        self.single = t.n_elements == 1


def launch_of(step: Step) -> Launch:
    """The launch of a chain of pointwise nodes (one or more), the last of which gives the result."""
    out = step.nodes[-1].out
    outside: list[_Outside] = []
    names: dict[int, str] = {}
    body: list[str] = []
    params: list[int | float] = []
    for k, node in enumerate(step.nodes):
        pw = node.op.pointwise
        assert pw is not None
        kind = _compute_kind(node)
        scope = {}
        for letter, t in zip("abc", operands(node), strict=False):
            if id(t) not in names:
                names[id(t)] = f"x{len(outside)}"
                outside.append(_Outside(t, out))
            var = names[id(t)]
            have = outside[int(var[1:])].kind if var[0] == "x" else _kind(t.dtype)
            scope[letter] = var if have == kind else f"{_CAST[kind]}({var})"
        for name in pw.params:
            scope[name] = f"q{len(params)}_{kind}"
            params.append(float(node.params[name]))
        body.append(f"v{k} = {_expression(pw.expr, scope, kind)}")
        names[id(node.out)] = f"v{k}"
    last = step.nodes[-1]
    result, kind, stored = f"v{len(step.nodes) - 1}", _compute_kind(last), _kind(out.dtype)
    value = result if kind == stored else f"{_CAST[stored]}({result})"
    flat = all(o.whole or o.single for o in outside)
    lines = _flat(outside, body, value) if flat else _rows(outside, body, value)
    head = [f"q{i}_{k} = {_CAST[k]}(p{i})" for i in range(len(params)) for k in ("f32", "f64", "i64") if any(f"q{i}_{k}" in b for b in body)]
    args = ", ".join(["out", *(f"t{i}" for i in range(len(outside))), *(f"p{i}" for i in range(len(params))), "i0", "i1"])
    source = f"def pointwise({args}):\n" + "".join(f"    {x}\n" for x in [*head, *lines])
    kinds = tuple(sorted({_compute_kind(n) for n in step.nodes}))
    binds: dict[str, Any] = {f"load{i}": simd.LOAD[o.tensor.dtype.name] for i, o in enumerate(outside)}
    binds["store"] = simd.STORE[out.dtype.name]
    for k in kinds:
        binds.update({f"{n}_{k}": f for n, f in _FUNCTIONS[k].items() if f"{n}_{k}(" in source})
    spec = KernelSpec(_function(source), binds, 1 + len(outside), "f" * len(params))
    name = "+".join(n.op.name.lower() for n in step.nodes) + ("[flat]" if flat else "[rows]")
    items, chunk = (out.n_elements, CHUNK_ELEMENTS) if flat else (out.n_rows, default_chunk(out))
    return Launch(spec, name, [out, *(o.tensor for o in outside)], params, items, chunk)


def _expression(expr: str, scope: dict[str, str], kind: str) -> str:
    text = _NUMBER.sub(lambda m: f"{_CAST[kind]}({m.group()})", expr)
    return _NAME.sub(lambda m: scope.get(m.group(), f"{m.group()}_{kind}" if m.group() in _FUNCTIONS[kind] else m.group()), text)


def _flat(outside: list[_Outside], body: list[str], value: str) -> list[str]:
    singles = [f"x{i} = load{i}(t{i}.p, 0)" for i, o in enumerate(outside) if not o.whole]
    loads = [f"x{i} = load{i}(t{i}.p, i)" for i, o in enumerate(outside) if o.whole]
    return [*singles, "for i in range(i0, i1):", *(f"    {x}" for x in [*loads, *body, f"store(out.p, i, {value})"])]


def _rows(outside: list[_Outside], body: list[str], value: str) -> list[str]:
    lines = ["for r in range(i0, i1):", "    q = r // out.ne1", "    j1 = r - q * out.ne1", "    j3 = q // out.ne2", "    j2 = q - j3 * out.ne2",
             "    o = at(out.p, j1 * out.nb1 + j2 * out.nb2 + j3 * out.nb3)"]
    loads = []
    for i, x in enumerate(outside):
        index = [f"j{d} % t{i}.ne{d}" if x.modulo[d] else f"j{d}" for d in (1, 2, 3)]
        lines.append(f"    a{i} = at(t{i}.p, {' + '.join(f'({j}) * t{i}.nb{d}' for d, j in enumerate(index, 1))})")
        if x.dim0 == "b":
            lines.append(f"    x{i} = load{i}(a{i}, 0)")
        elif x.dim0 == "s":
            loads.append(f"x{i} = load{i}(at(a{i}, i * t{i}.nb0), 0)")
        else:
            loads.append(f"x{i} = load{i}(a{i}, i{f' % t{i}.ne0' if x.dim0 == 'm' else ''})")
    return [*lines, "    for i in range(out.ne0):", *(f"        {x}" for x in [*loads, *body, f"store(o, i, {value})"])]


@functools.cache
def _function(source: str) -> Callable[..., Any]:
    file = f"<pyggml pointwise {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"at": simd.at, "np": np}
    exec(compile(source, file, "exec"), scope)
    fn: Callable[..., Any] = scope["pointwise"]
    return fn
