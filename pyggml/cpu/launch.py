"""Launch: a kernel made ready for one step, and how registered kernels become launches.

Options of `@kernel(op, "cpu", ...)`, each a function of the node:
  items    how many items the work has (default: rows of the first output)
  chunk    items a thread takes at a time (default: about 4096 output elements); what an item is never depends on the number of threads
  shares   how often a thread takes a chunk at most (default: any number): chunks then grow with the work; for kernels that stream memory
  params   int and float arguments after the operands (default: none)
  bind     globals of the kernel to replace: helpers, intrinsics, numbers (one source for several types)
  scratch  bytes of scratch per thread (the kernel then takes a pointer `scratch` before i0)
  operands tensors to pass instead of outputs + inputs
  status   True: the kernel takes the address of the node's status words after the params, for simd.bad_index
  epilogue True: the kernel takes `extra` after the params (and status) and calls finish(extra, o, i, n, j1, j2, j3) on each run of n elements
           of its output that is done, at pointer o, from element i of row (j1, j2, j3) on; each element once. A chain of pointwise nodes
           is then bound to `finish`, a helper of the kernel's module that otherwise does nothing
  needs    a set of LLVM's names of CPU features, without which the kernel is not chosen
  rounds   True: the kernel rounds its inputs to less than their type; not chosen where the backend's prec is f32
  pool     numbers of an output, an input and the input with its rows' ids: the kernel can write that output into those rows (see inplace)
  before   what is to be made of an input first (registry.Prepared, whose options are these too); the kernel takes it as its last operand
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyggml.cpu.compile import KernelSpec
from pyggml.registry import KernelDef, Prepared
from pyggml.tensor import Node, Tensor

CHUNK_ELEMENTS = 4096


@dataclass(slots=True)
class Launch:
    """A kernel with its operands, params and grid."""

    spec: KernelSpec
    name: str
    operands: list[Tensor | None]
    params: list[int | float]
    items: int
    chunk: int
    scratch: int = 0
    shares: int = 0
    extra: list[Tensor] = field(default_factory=list)
    extra_params: list[int | float] = field(default_factory=list)

    def chunk_for(self, n_threads: int) -> int:
        """Items that one of n_threads takes at a time. Which thread works on an item changes nothing in its result."""
        return max(self.chunk, -(-self.items // (self.shares * n_threads))) if self.shares else self.chunk


def default_chunk(t: Tensor) -> int:
    """Rows that hold about CHUNK_ELEMENTS elements."""
    return max(1, CHUNK_ELEMENTS // t.ne[0])


def launch(kernel: KernelDef, node: Node, prepared: Tensor | None = None) -> Launch:
    """The launch of a registered kernel for a node; `prepared` is what its option `before` asks for."""
    o = kernel.options
    operands: list[Tensor | None] = o["operands"](node) if "operands" in o else [*node.outputs, *node.src]
    if prepared is not None:
        operands = [*operands, prepared]
    values: dict[str, Any] = {n: o[n](node) for n in ("params", "bind", "scratch", "items", "chunk", "shares") if n in o}
    return _launch(kernel.fn, kernel.name, operands, node.out, {**values, "status": bool(o.get("status")), "extra": bool(o.get("epilogue"))})


def launch_prepared(p: Prepared) -> Launch:
    """The launch that prepares an input."""
    return _launch(p.fn, p.fn.__name__, [p.out, p.source, *p.more], p.out, p.options)


def _launch(fn: Callable[..., Any], name: str, operands: list[Tensor | None], out: Tensor, o: dict[str, Any]) -> Launch:
    params = list(o.get("params", ()))
    kinds = "".join("f" if isinstance(p, float) else "i" for p in params)
    spec = KernelSpec(fn, o.get("bind", {}), len(operands), kinds, "scratch" in o, o.get("status", False), extra=o.get("extra", False))
    items = int(o["items"]) if "items" in o else out.n_rows
    chunk = int(o["chunk"]) if "chunk" in o else default_chunk(out)
    return Launch(spec, name, operands, params, items, max(1, chunk), int(o.get("scratch", 0)), int(o.get("shares", 0)))
