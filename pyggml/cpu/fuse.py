"""One kernel for a chain of pointwise ops, written out as Python source and compiled like any other kernel.

Each node has a scalar expression over its inputs a, b, c and attributes (registry.Pointwise). The generated kernel loads
every outside operand once per element, evaluates the chain in float32 (float64 where an input or the result is f64, whole
numbers where only those come in and go out), rounding each value to its node's type, and stores the last one. A fused
chain therefore gives the bits of its nodes run one by one.

Broadcasts, permutes, strides and ggml's repeats are folded into the index arithmetic: dims that every operand walks in
one stride are merged first, so most chains become one flat loop. In the innermost loop an operand is contiguous, constant or
strided; one that repeats there (b's dim divides a's) splits the loop into spans within which it does not wrap.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pyggml.cpu import mathf, simd
from pyggml.cpu.blocks import prefetch_write
from pyggml.cpu.compile import KernelSpec
from pyggml.cpu.launch import CHUNK_ELEMENTS, Launch, default_chunk
from pyggml.cpu.slices import LINE, PAGE
from pyggml.cpu.vector import LANES
from pyggml.dtypes import F32, F64, I32, DType
from pyggml.errors import UnsupportedOp
from pyggml.graph import Graph
from pyggml.plan import Step, single_steps
from pyggml.tensor import Node, Tensor, shape4

MAX_OPERANDS, MAX_NODES = 8, 32  # of one kernel: with more, LLVM's checks for overlapping operands and its registers run out
ROWS_AHEAD = 8  # of a row that is written, where rows are pages apart: the CPU does not foresee these
_FUNCTIONS: dict[str, dict[str, Any]] = {
    "f32": {"sqrt": simd.sqrt, "abs": simd.fabs, "floor": simd.floor} | {
        n: getattr(mathf, n) for n in ("exp", "expm1", "log", "log1p", "sigmoid", "silu", "tanh", "softplus", "gelu")},
    "f64": {"sqrt": simd.sqrt64, "abs": simd.fabs64},
    "i64": {},
}
_CAST = {"f32": "np.float32", "f64": "np.float64", "i64": "np.int64"}
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
# x OP y ? yes : no. In float32 a select, as LLVM may otherwise branch around a costly arm and give up on vectors.
_CHOICES = {
    ast.Lt: ("{yes} if {x} < {y} else {no}", "if_less({x}, {y}, {yes}, {no})"),
    ast.Gt: ("{yes} if {x} > {y} else {no}", "if_less({y}, {x}, {yes}, {no})"),
    ast.LtE: ("{yes} if {x} <= {y} else {no}", "if_at_most({x}, {y}, {yes}, {no})"),
    ast.GtE: ("{yes} if {x} >= {y} else {no}", "if_at_most({y}, {x}, {yes}, {no})"),
    ast.Eq: ("{yes} if {x} == {y} else {no}", "if_equal({x}, {y}, {yes}, {no})"),
    ast.NotEq: ("{yes} if {x} != {y} else {no}", "if_equal({x}, {y}, {no}, {yes})"),
}


def operands(node: Node) -> list[Tensor]:
    """The tensors that a pointwise node's expression calls a, b, c."""
    ins = [t for t in node.src if t is not None]
    pw = node.op.pointwise
    assert pw is not None
    if pw.select is not None:
        return [*ins, *pw.select(node)[1]]
    if not pw.halves:
        return ins
    x = ins[0]
    n = x.ne[0] // 2
    first, second = (Tensor(x.dtype, (n, *x.ne[1:]), x.nb, name=x.name, root=x.root, offs=x.offs + k * n * x.nb[0]) for k in (0, 1))
    return [second, first] if node.params.get("swapped") else [first, second]


def _kind(dt: DType) -> str:
    return "f64" if dt is F64 else "i64" if dt.is_int else "f32"


def _compute_kind(node: Node) -> str:
    kinds = {_kind(t.dtype) for t in operands(node)}
    if kinds == {"i64"} and node.out.dtype.is_int:
        return "i64"
    return "f64" if "f64" in kinds or node.out.dtype is F64 else "f32"


# Which nodes become one kernel

def group(graph: Graph) -> list[Step]:
    """Steps with chains of pointwise nodes merged: a value of which every reader is in the chain, and reads it whole, is
    computed there and never stored. Graph outputs are kept, and so is the order of a read and an in-place write after it."""
    steps = single_steps(graph)
    readers: dict[int, set[int]] = {}
    for n in graph.nodes:
        for t in n.src:
            if t is not None:
                readers.setdefault(id(t), set()).add(n.seq)
    kept = {id(t) for t in graph.outputs}
    made_by: dict[int, int] = {}  # id of a pointwise result -> index of the step that ends with it
    writes: list[tuple[int, Tensor]] = []  # in-place writes so far: index of the step, root of the memory

    def absorbable(t: Tensor | None, s: Step) -> bool:
        if t is None or id(t) not in made_by or id(t) in kept or t.ne != s.nodes[-1].out.ne or t.dtype not in (F32, F64):
            return False
        at = made_by[id(t)]
        chain = [*steps[at].nodes, *s.nodes]
        return (readers[id(t)] <= {n.seq for n in s.nodes} and len(chain) <= MAX_NODES and len(_outside(chain)) <= MAX_OPERANDS
                and not any(w > at and same_memory(root, x.root) for w, root in writes for x in steps[at].ins if x is not None))

    for i, s in enumerate(steps):
        node = s.nodes[-1]
        if node.op.inplace is not None:
            writes.append((i, node.out.root))
        if node.op.pointwise is None:
            continue
        while (t := next((x for x in s.ins if absorbable(x, s)), None)) is not None:
            p = steps[made_by.pop(id(t))]
            s.nodes = sorted([*p.nodes, *s.nodes], key=lambda n: n.seq)
            s.ins = [*p.ins, *(x for x in s.ins if x is not t)]
            p.nodes = []
        made_by[id(node.out)] = i
    return [s for s in steps if s.nodes]


def join(graph: Graph, steps: list[Step], takes: Callable[[Node], bool]) -> list[Step]:
    """Steps with a chain moved into the kernel that makes its input, where that kernel takes one (`takes(node)`): the chain is then applied to
    each run of elements while it is in the cache, in place. The input must be read by the chain alone, and float32 as the result is."""
    made_by = {id(s.outs[0]): i for i, s in enumerate(steps) if len(s.outs) == len(s.nodes) == 1 and s.nodes[0].op.pointwise is None}
    kept = {id(t.root) for t in graph.outputs}  # views of them have no step
    readers: dict[int, set[int]] = {}
    for i, s in enumerate(steps):
        for t in s.ins:
            if t is not None:
                readers.setdefault(id(t.root), set()).add(i)
    writes = [(i, s.nodes[-1].out.root) for i, s in enumerate(steps) if s.nodes[-1].op.inplace is not None]
    gone: set[int] = set()

    def joins(t: Tensor | None, i: int) -> bool:
        if t is None or id(t) not in made_by or id(t) in kept or readers.get(id(t)) != {i}:
            return False
        at, out = made_by[id(t)], steps[i].nodes[-1].out
        ins = [x.root for x in steps[at].ins if x is not None]
        return (t.dtype is out.dtype is F32 and t.ne == out.ne and _runs_along(steps[i].nodes, t) and takes(steps[at].nodes[0])
                and not any(at < w < i and same_memory(root, x) for w, root in writes for x in ins))

    for i, s in enumerate(steps):
        t = next((x for x in s.ins if joins(x, i)), None) if s.nodes[0].op.pointwise is not None else None
        if t is not None:
            p = steps[made_by[id(t)]]
            s.nodes, s.ins = [*p.nodes, *s.nodes], [*p.ins, *(x for x in s.ins if x is not t)]
            gone.add(made_by[id(t)])
    return [s for i, s in enumerate(steps) if i not in gone]


def _runs_along(chain: Sequence[Node], t: Tensor) -> bool:
    """Whether every other operand of a chain has one element, or as many as the result, in each dim, and all are float32."""
    out = chain[-1].out
    others = [x for x in _outside(chain).values() if x is not t]
    return (len(others) <= MAX_OPERANDS and all(x.dtype is F32 and all(m in (1, n) for m, n in zip(x.ne, out.ne, strict=True)) for x in others)
            and all(n.out.ne == out.ne and _compute_kind(n) == "f32" for n in chain))


def finish_of(chain: Sequence[Node], t: Tensor) -> tuple[simd.Helper, list[Tensor], list[int | float]]:
    """A chain whose input is t as a helper finish(extra, o, i, n, j1, j2, j3): in place on n elements at o, from element i of row (j1, j2, j3)
    of the result on. `extra` is the address of its other operands and params in the record."""
    out = chain[-1].out
    outside = _outside(chain)
    others = [Tensor(x.dtype, out.ne, tuple(0 if m == 1 else b for m, b in zip(x.ne, x.nb, strict=True)),  # type: ignore[arg-type]
                     name=x.name, root=x.root, offs=x.offs) for x in outside.values() if x is not t]
    order = [k for k, x in outside.items() if x is t] + [k for k, x in outside.items() if x is not t]
    body, params = _body(chain, {k: i for i, k in enumerate(order)})
    lines = []
    for k, x in enumerate(others):
        w = 9 * k  # words of an operand: pointer, ne, nb
        offset = " + ".join(f"{j} * ldw(extra, {w + 5 + d})" for d, j in enumerate(("i", "j1", "j2", "j3")))
        lines.append(f"a{k + 1} = ptr(ldw(extra, {w}) + {offset})")
        if x.nb[0] not in (0, 4):
            lines.append(f"s{k + 1} = ldw(extra, {w + 5})")
    lines += [f"x{k + 1} = ld_f32(a{k + 1}, 0)" for k, x in enumerate(others) if x.nb[0] == 0]
    lines += [f"q{i}_f32 = np.float32(ldw_f64(extra, {9 * len(others) + i}))" for i in range(len(params))]
    each = ["x0 = ld_f32(o, e)", *(f"x{k + 1} = ld_f32(a{k + 1}, e)" if x.nb[0] == 4 else f"x{k + 1} = ld_f32(at(a{k + 1}, e * s{k + 1}), 0)"
                                   for k, x in enumerate(others) if x.nb[0] != 0)]
    lines += ["for e in range(n):", *(f"    {x}" for x in [*each, *body, "st_f32(o, e, v)"])]
    source = "def finish(extra, o, i, n, j1, j2, j3):\n" + "".join(f"    {x}\n" for x in lines)
    binds = {f"{n}_f32": f for n, f in _FUNCTIONS["f32"].items() if f"{n}_f32(" in source}
    return simd.Helper(_function(source, "finish"), binds), others, params


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two roots may share bytes: leaves over one array can."""
    return a is b or (a.data is not None and b.data is not None and np.may_share_memory(a.data, b.data))


def _key(t: Tensor) -> tuple[Any, ...]:
    return id(t.root), t.offs, t.dtype.name, t.ne, t.nb


def _outside(nodes: Sequence[Node]) -> dict[tuple[Any, ...], Tensor]:
    """The distinct operands that come from outside a chain, in order of first use."""
    inner = {id(n.out) for n in nodes}
    return {_key(t): t for n in nodes for t in operands(n) if id(t) not in inner}


# Loops

class _Dim(NamedTuple):
    """One loop: its length, the stride of the result and of each operand (0: the same element all along), and each
    operand's own length, which is shorter where it repeats."""

    n: int
    nb: tuple[int, ...]
    own: tuple[int, ...]

    @property
    def repeats(self) -> bool:
        return any(m != self.n for m in self.own)


def _dims(out: Tensor, ins: Sequence[Tensor]) -> list[_Dim]:
    """The loops over the result, innermost first: dims of one element dropped, dims that all walk in one stride merged."""
    dims: list[_Dim] = []
    for d in range(4):
        n = out.ne[d]
        if n == 1:
            continue
        dim = _Dim(n, (out.nb[d], *(0 if t.ne[d] == 1 else t.nb[d] for t in ins)), (n, *(n if t.ne[d] == 1 else t.ne[d] for t in ins)))
        last = dims[-1] if dims else None
        if last and not last.repeats and not dim.repeats and all(b == a * last.n for a, b in zip(last.nb, dim.nb, strict=True)):
            dims[-1] = _Dim(last.n * n, last.nb, tuple(m * n for m in last.own))
        else:
            dims.append(dim)
    if not dims or dims[0].nb[0] != out.dtype.nbytes:  # a slice of a result need not have neighbours: it is stored one by one
        dims.insert(0, _Dim(1, (out.dtype.nbytes, *(0 for _ in ins)), (1,) * (1 + len(ins))))
    return dims


def _as_loops(t: Tensor, dims: Sequence[_Dim], k: int) -> Tensor:
    """Operand k (0: the result) with the dims of the loops."""
    nb = ([d.nb[k] for d in dims] + [0, 0, 0])[:4]
    return Tensor(t.dtype, shape4([d.own[k] for d in dims]), (nb[0], nb[1], nb[2], nb[3]), name=t.name, root=t.root, offs=t.offs)


def launch_of(step: Step) -> Launch:
    """The launch of a chain of pointwise nodes (one or more), the last of which gives the result."""
    out = step.nodes[-1].out
    outside = _outside(step.nodes)
    dims = _dims(out, list(outside.values()))
    result = _as_loops(out, dims, 0)
    ins = [_as_loops(t, dims, k) for k, t in enumerate(outside.values(), 1)]
    body, params = _body(step.nodes, {k: i for i, k in enumerate(outside)})
    flat = len(dims) == 1 and not dims[0].repeats
    spans = [m for m in dims[0].own if m != dims[0].n]
    if spans:
        params.append(math.gcd(*spans))
    prefix = None if flat or spans else _kept_prefix(step.nodes, [*outside], ins, body)
    lines = _flat_loop(ins, body) if flat else _row_loops(ins, body, dims, len(params) - 1, prefix)
    args = ", ".join(["out", *(f"t{i}" for i in range(len(ins))), *(f"p{i}" for i in range(len(params))), "i0", "i1"])
    head = [f"q{i}_{k} = {_CAST[k]}(p{i})" for i in range(len(params)) for k in _CAST if any(f"q{i}_{k}" in b for b in body)]
    source = f"def pointwise({args}):\n" + "".join(f"    {x}\n" for x in [*head, *lines])
    binds: dict[str, Any] = {f"load{i}": simd.LOAD[t.dtype.name] for i, t in enumerate(ins)}
    binds["store"] = simd.STORE[out.dtype.name]
    for k in sorted({_compute_kind(n) for n in step.nodes}):
        binds.update({f"{n}_{k}": f for n, f in _FUNCTIONS[k].items() if f"{n}_{k}(" in source})
    spec = KernelSpec(_function(source), binds, 1 + len(ins), "".join("f" if isinstance(p, float) else "i" for p in params))
    name = "+".join(n.op.name.lower() for n in step.nodes) + ("[flat]" if flat else "[rows]")
    items, chunk = (result.ne[0], CHUNK_ELEMENTS) if flat else (result.n_rows, default_chunk(result))
    return Launch(spec, name, [result, *ins], params, items, chunk)


def _flat_loop(ins: Sequence[Tensor], body: Sequence[str]) -> list[str]:
    once, each = _loads(ins, [f"t{i}.p" for i in range(len(ins))], set())
    return [*once, "for i in range(i0, i1):", *(f"    {x}" for x in [*each, *body, "store(out.p, i, v)"])]


class _Prefix(NamedTuple):
    """Of a row of which a lower triangle keeps the first elements: how many, as source, and what sets v of the others."""

    kept: str
    rest: list[str]


def _kept_prefix(nodes: Sequence[Node], keys: Sequence[tuple[Any, ...]], ins: Sequence[Tensor], body: Sequence[str]) -> _Prefix | None:
    """The prefix of rows along which a chain's TRI counts columns, if what comes after it in the chain reads no value from before it."""
    choices = (k for k, n in enumerate(nodes) if n.op.name == "TRI" and n.op.pointwise and n.op.pointwise.select)  # else one that costs nothing stands for it
    k = next((k for k in choices if nodes[k].params["kind"] in ("lower", "lower_diag")), None)
    if k is None or _compute_kind(nodes[k]) != "f32":
        return None
    column, row = (keys.index(_key(t)) for t in operands(nodes[k])[1:])
    along = ins[column].nb == (ins[column].dtype.nbytes, 0, 0, 0) and ins[row].nb[0] == 0
    rest, others = body[k + 1:], {f"v{i}" for i in range(k)}  # of before the choice
    if not along or any(name in others for line in rest for name in re.findall(r"\bv\d+\b", line)):
        return None
    chosen, fill = body[k].partition(" = ")[0], re.findall(r"\bq\d+_f32\b", body[k])[-1]
    return _Prefix(f"np.int64(x{row}) + {int(nodes[k].params['kind'] == 'lower_diag')}", [f"{chosen} = {fill}", *rest])


def _row_loops(ins: Sequence[Tensor], body: Sequence[str], dims: Sequence[_Dim], span: int, prefix: _Prefix | None) -> list[str]:
    repeats = [{k - 1 for k, m in enumerate(d.own) if m != d.n} for d in dims]  # per loop the operands that repeat in it
    outer = range(1, len(dims))
    rows = []
    for i in range(-1, len(ins)):
        t = "out" if i < 0 else f"t{i}"
        terms = [f"{f'(j{d} % {t}.ne{d})' if i in repeats[d] else f'j{d}'} * {t}.nb{d}" for d in outer]
        rows.append(f"{'o' if i < 0 else f'a{i}'} = at({t}.p, {' + '.join(terms) or '0'})")
    if len(dims) > 1 and dims[1].nb[0] - dims[0].n * dims[0].nb[0] >= PAGE:
        rows.append(f"prefetch_write(at(o, {ROWS_AHEAD} * out.nb1), (out.ne0 * out.nb0 + {LINE - 1}) // {LINE})")
    once, each = _loads(ins, [f"a{i}" for i in range(len(ins))], repeats[0])
    inner = [*each, *body, "store(o, i, v)"]
    if repeats[0]:
        wrapped = [f"w{i} = at(a{i}, (s % t{i}.ne0 - s) * t{i}.nb0)" for i in sorted(repeats[0])]
        loop = [f"for s in range(0, out.ne0, p{span}):", *(f"    {x}" for x in [*wrapped, f"for i in range(s, s + p{span}):", *(f"    {x}" for x in inner)])]
    elif prefix is not None:  # whole vectors of it
        loop = [f"n = min(({prefix.kept} + {LANES - 1}) // {LANES} * {LANES}, out.ne0)", "for i in range(n):", *(f"    {x}" for x in inner),
                "for i in range(n, out.ne0):", *(f"    {x}" for x in [*each, *prefix.rest, "store(o, i, v)"])]
    else:
        loop = ["for i in range(out.ne0):", *(f"    {x}" for x in inner)]
    step = ["j1 += 1", "if j1 == out.ne1:", "    j1, j2 = 0, j2 + 1", "    if j2 == out.ne2:", "        j2, j3 = 0, j3 + 1"]
    return ["j1 = i0 % out.ne1", "j2 = i0 // out.ne1 % out.ne2", "j3 = i0 // out.ne1 // out.ne2", "for _ in range(i0, i1):",
            *(f"    {x}" for x in [*rows, *once, *loop, *step])]


def _loads(ins: Sequence[Tensor], base: Sequence[str], repeats: set[int]) -> tuple[list[str], list[str]]:
    """Loads of the operands before and inside the innermost loop over i."""
    once, each = [], []
    for i, (t, p) in enumerate(zip(ins, base, strict=True)):
        if t.nb[0] == 0:
            once.append(f"x{i} = load{i}({p}, 0)")
            continue
        p = f"w{i}" if i in repeats else p
        each.append(f"x{i} = load{i}({p}, i)" if t.nb[0] == t.dtype.nbytes else f"x{i} = load{i}(at({p}, i * t{i}.nb0), 0)")
    return once, each


# Expressions

def _body(nodes: Sequence[Node], outside: dict[tuple[Any, ...], int]) -> tuple[list[str], list[int | float]]:
    """Statements that compute the nodes' values, the last one named v, and the params that they use as q0, q1, ..."""
    inner: dict[int, str] = {}
    params: list[int | float] = []
    lines = []
    for k, node in enumerate(nodes):
        pw = node.op.pointwise
        assert pw is not None
        kind, stored = _compute_kind(node), _kind(node.out.dtype)
        scope = {}
        for letter, t in zip("abc", operands(node), strict=False):
            var = inner.get(id(t)) or f"x{outside[_key(t)]}"
            scope[letter] = var if _kind(t.dtype) == kind else f"{_CAST[kind]}({var})"
        for name in pw.params:
            scope[name] = f"q{len(params)}_{kind}"
            params.append(float(node.params[name]))
        value = _expression(node.op.name, pw.expr if pw.select is None else pw.select(node)[0], scope, kind)
        if stored == "i64" != kind:
            if node.out.dtype is not I32:
                raise UnsupportedOp(f"{node.op.name}: no conversion from {kind} to {node.out.dtype.name}; legal: i32")
            value = f"to_i32_{kind}({value})"
        elif stored != kind:
            value = f"{_CAST[stored]}({value})"
        inner[id(node.out)] = f"v{k}" if node is not nodes[-1] else "v"
        lines.append(f"{inner[id(node.out)]} = {value}")
    return lines, params


def _expression(op_name: str, expr: str, scope: dict[str, str], kind: str) -> str:
    """A pointwise expression as kernel source: numbers typed, names replaced, choices as selects."""
    functions = _FUNCTIONS[kind]

    def emit(e: ast.expr) -> str:
        match e:
            case ast.Constant(value=int() | float() as v):
                return f"{_CAST[kind]}({v!r})"
            case ast.Name(id=name) if name in scope:
                return scope[name]
            case ast.UnaryOp(op=ast.USub(), operand=x):
                return f"(-{emit(x)})"
            case ast.BinOp(left=x, op=o, right=y) if type(o) in _OPERATORS:
                return f"({emit(x)} {_OPERATORS[type(o)]} {emit(y)})"
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in functions:
                return f"{name}_{kind}({', '.join(map(emit, args))})"
            case ast.IfExp(test=ast.Compare(left=x, ops=[o], comparators=[y]), body=yes, orelse=no) if type(o) in _CHOICES:
                return f"({_CHOICES[type(o)][kind == 'f32'].format(x=emit(x), y=emit(y), yes=emit(yes), no=emit(no))})"
        raise UnsupportedOp(f"{op_name}: {ast.unparse(e)!r} in the expression {expr!r}; legal for {kind}: {', '.join(scope)}, numbers, + - * /, "
                            f"x if y < z else w, {', '.join(functions) or 'no functions'}")

    return emit(ast.parse(expr, mode="eval").body)


@functools.cache
def _function(source: str, name: str = "pointwise") -> Callable[..., Any]:
    file = f"<pyggml pointwise {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    memory = {n: getattr(simd, n) for n in ("at", "ptr", "ldw", "ldw_f64", "ld_f32", "st_f32")}
    choices = {n: getattr(mathf, n) for n in ("if_less", "if_at_most", "if_equal", "to_i32_f32", "to_i32_f64")}
    scope: dict[str, Any] = {**memory, **choices, "prefetch_write": prefetch_write, "np": np}
    exec(compile(source, file, "exec"), scope)
    fn: Callable[..., Any] = scope[name]
    return fn
