"""Launch: a kernel made ready for one step, and how registered kernels become launches.

Options of `@kernel(op, "cpu", ...)`, each a function of the node:
  items    how many items the work has (default: rows of the first output)
  chunk    items a thread takes at a time (default: about 4096 output elements); never depends on the number of threads
  params   int and float arguments after the operands (default: none)
  bind     globals of the kernel to replace: helpers, intrinsics, numbers (one source for several types)
  scratch  bytes of scratch per thread (the kernel then takes a pointer `scratch` before i0)
  operands tensors to pass instead of outputs + inputs
  status   True: the kernel takes the address of the node's status words after the params, for simd.bad_index
"""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.cpu.compile import KernelSpec
from pyggml.registry import KernelDef
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


def default_chunk(t: Tensor) -> int:
    """Rows that hold about CHUNK_ELEMENTS elements."""
    return max(1, CHUNK_ELEMENTS // t.ne[0])


def launch(kernel: KernelDef, node: Node) -> Launch:
    """The launch of a registered kernel for a node."""
    o = kernel.options
    operands: list[Tensor | None] = o["operands"](node) if "operands" in o else [*node.outputs, *node.src]
    params = list(o["params"](node)) if "params" in o else []
    binds = o["bind"](node) if "bind" in o else {}
    scratch = int(o["scratch"](node)) if "scratch" in o else 0
    kinds = "".join("f" if isinstance(p, float) else "i" for p in params)
    spec = KernelSpec(kernel.fn, binds, len(operands), kinds, "scratch" in o, bool(o.get("status")))
    items = int(o["items"](node)) if "items" in o else node.out.n_rows
    chunk = int(o["chunk"](node)) if "chunk" in o else default_chunk(node.out)
    return Launch(spec, kernel.name, operands, params, items, max(1, chunk), scratch)
