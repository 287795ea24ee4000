"""The ggml backend: the same graph in real ggml on the CPU, to compare values and times with. It needs the wheel libggml-python
(`pip install 'pyggml[ggml]'`) and runs on an ABI that the wheel's headers give, through ctypes.

Tensors have our ne and nb, leaves lie where we have them, and ggml's own allocator and thread pool do the rest, as in llama.cpp. What ggml has no
op or kernel for is refused with the reason (pyggml.backends.ggml_ops): ggml itself would end the process. MUL_MAT operands that are strided in
dim 0 are copied by ggml_cont first, and the step's kernel name says so.

Where real ggml (0.20.2) and the definitions of the ops differ by more than float32 rounding; pyggml.backends.ggml_compare knows the first part:

    CUMSUM            running sums are kept in float32: NMSE up to about 1e-15 per element of the row
    NORM              the mean is rounded to float32 first: rows whose mean is far above their spread
    ROPE              each pair's angle is the last one's times a float32: off by about 1e-7 of the position, 2e-3 (NMSE) at a million
    GELU              looked up in a float16 table at x rounded to float16: NMSE 7e-8; 0 up to -10
    MUL_MAT           b is rounded to a's kind: float16 (3e-8), bfloat16 (2e-6, no rounding with b of a's type), 8 bits for blocks (2e-5)
    SOFT_MAX          a row that is -inf throughout is NaN, not 0; x of NaN or inf under a mask of -inf makes its row NaN
    ARGSORT, TOP_K    equal values come in any order, the k largest too (the first two are exchanged); rows that hold NaN in any
    SET_ROWS          of equal ids any row may win, by the threads
    RELU, REGLU       0 for NaN (ours: NaN)
    CLAMP             hi for NaN (ours: NaN)
    SILU, SWIGLU      NaN at -inf (ours: 0); so is GELU of float16
    EXPM1, SOFTPLUS   exp(x) - 1 and log(1 + exp(x)) in float32: 0 for EXPM1 of 1e-8, for SOFTPLUS from -17 down; SSM_SCAN's softplus as well
    CAST to i32       -2^31 for NaN and for all beyond the range (ours: 0, and the nearest that is in range)
    RMS_NORM, NORM    squares are float32: 0 for rows beyond about 1e19, inf for rows below 1e-23 with eps 0
    MEAN, CUMSUM      overflow where a sum is beyond float32, though the mean or a later sum is not

>>> import numpy as np, pyggml as pg
>>> pg.compute(pg.cumsum(pg.tensor(np.ones((2, 3), np.float32))), backend="ggml", threads=1)
array([[1., 2., 3.],
       [1., 2., 3.]], dtype=float32)
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import numpy as np

from pyggml.backends.base import check_array, decode, require_input, require_inputs_set, typed_view
from pyggml.backends.ggml_lib import MAX_THREADS, OUTPUT_FLAG, GgmlTensor, InitParams, Library, ThreadpoolParams, load
from pyggml.backends.ggml_ops import Call, Copied, Refused, call_of
from pyggml.cpu.level import n_cores
from pyggml.errors import GraphError, KernelError, ParamError, UnsupportedOp
from pyggml.graph import Graph
from pyggml.plan import Plan, Step, single_steps
from pyggml.tensor import Node, Tensor

TENSORS_PER_NODE = 6  # the result, a view per output, views that a mapping makes of arguments
ALIGN = 64
POISON = 0xFF  # NaN in every float type


class GgmlBackend:
    """Options: `threads` (default: all cores), `poll` (0 to 100: how long ggml's idle threads spin after a run, as llama-bench's --poll),
    `reuse` (off: every tensor keeps its memory and can be read after a run, and ggml fuses nothing), `poison` (results are NaN at first)."""

    name = "ggml"

    def __init__(self, *, threads: int | None = None, poll: int = 50, reuse: bool = True, poison: bool = False, lib: str | None = None) -> None:
        self.lib = load(lib)
        self.threads = n_cores() if threads is None else threads
        if not isinstance(self.threads, int) or isinstance(self.threads, bool) or not 1 <= self.threads <= MAX_THREADS:
            raise ParamError(f"threads: {threads!r}; legal: 1 to {MAX_THREADS}")
        if not isinstance(poll, int) or not 0 <= poll <= 100:
            raise ParamError(f"poll: {poll!r}; legal: 0 to 100")
        self.reuse = reuse
        self.poison = poison
        self.lock = threading.Lock()  # a thread pool runs one graph at a time
        params = ThreadpoolParams()
        self.lib.call("ggml_threadpool_params_init", params, self.threads)
        params.poll = poll
        self._pool: int = self.lib.call("ggml_threadpool_new", params)
        self.handle = self.lib.call("ggml_backend_cpu_init")
        self.lib.call("ggml_backend_cpu_set_n_threads", self.handle, self.threads)
        self.lib.call("ggml_backend_cpu_set_threadpool", self.handle, self._pool)
        weakref.finalize(self, _close_backend, self.lib, self.handle, self._pool)

    def pause(self) -> None:
        """Put the idle threads to sleep at once, so that they take no time from what is measured next. The next run wakes them."""
        with self.lock:
            self.lib.call("ggml_threadpool_pause", self._pool)

    def refuses(self, node: Node) -> str | None:
        """None when ggml takes the node, else the reason."""
        if node.op.view:
            return None
        try:
            self._call(node)
        except Refused as e:
            return str(e)
        return None

    def _call(self, node: Node) -> Call:
        call = call_of(node)
        if not self.lib.has(call.function):
            raise Refused(f"libggml {self.lib.version} has no ggml_{call.function}")
        return call

    def compile(self, graph: Graph) -> GgmlRunner:
        """Build ggml's graph, let ggml place its tensors and plan it."""
        plan = Plan(graph, single_steps(graph))
        refused = []
        for step in plan.steps:
            node = step.nodes[0]
            try:
                step.kernel = self._call(node)
                step.kernel_name = step.kernel.name
            except Refused as e:
                refused.append(f"{node.op.name} ({node.name}): {e}")
        refused += _written_ids(plan.steps)
        if refused:
            raise UnsupportedOp("; ".join(refused))
        return GgmlRunner(self, plan)


def _written_ids(steps: list[Step]) -> list[str]:
    """Ids that are inputs, yet written by the graph, are not known before a run."""
    written = {id(s.nodes[0].out.root) for s in steps if s.nodes[0].op.inplace is not None}
    return [f"{s.nodes[0].op.name} ({s.nodes[0].name}): ids are written in the graph; ggml takes no id that is out of range"
            for s in steps if s.kernel is not None and s.kernel.ids is not None and id(s.kernel.ids.root) in written]


class GgmlRunner:
    """A ggml graph bound to memory: leaves in NumPy arrays (constants where they are), all else in one buffer that ggml's allocator lays out.
    `view(t)` gives the live memory of a tensor."""

    def __init__(self, backend: GgmlBackend, plan: Plan) -> None:
        self.plan = plan
        self._backend = backend
        self._lib: Library = backend.lib
        self._storage: dict[int, np.ndarray] = {}  # id(leaf) -> its bytes
        self._tensors: dict[int, int] = {}  # id(tensor) -> address of ggml's struct
        self._inputs = {id(t) for t in plan.graph.inputs}
        self._given: set[int] = set()
        self._unchecked = True
        graph = plan.graph
        size = max(TENSORS_PER_NODE * graph.n_nodes + len(graph.leaves), 1)
        lib = self._lib
        room = (size + 1) * lib.call("ggml_tensor_overhead") + lib.call("ggml_graph_overhead_custom", size, False)
        self._ctx: int = lib.call("ggml_init", InitParams(room, None, True))
        self._galloc: int = lib.call("ggml_gallocr_new", lib.call("ggml_backend_cpu_buffer_type"))
        close = weakref.finalize(self, _close_runner, backend, self._ctx, self._galloc, plans := [])
        cgraph = lib.call("ggml_new_graph_custom", self._ctx, size, False)
        for t in graph.leaves:
            self._tensors[id(t)] = self._leaf(t)
        calls = {id(s.nodes[0]): s.kernel for s in plan.steps}
        for node in graph.nodes:  # each is added in its turn, so that writes in place keep their place in the order
            lib.call("ggml_build_forward_expand", cgraph, self._node(node, calls.get(id(node))))
        for t in graph.outputs if backend.reuse else (*graph.outputs, *(o for n in graph.nodes for o in n.outputs)):
            self._keep(t)
            lib.call("ggml_build_forward_expand", cgraph, self._tensors[id(t)])
        if not lib.call("ggml_gallocr_alloc_graph", self._galloc, cgraph):
            close()
            raise GraphError(f"ggml could not get memory for the {graph.n_nodes} nodes of the graph")
        plan.arena_bytes = lib.call("ggml_gallocr_get_buffer_size", self._galloc, 0)
        if backend.poison:
            for t in (o for n in graph.nodes for o in n.outputs):
                if t.root.node is not None and self.address(t):
                    ctypes.memset(self.address(t), POISON, t.nbytes)
        self._plan: int = lib.call("ggml_backend_graph_plan_create", backend.handle, cgraph)
        plans.append(self._plan)
        self._ids = [(s.nodes[0], s.kernel) for s in plan.steps if s.kernel.ids is not None and s.kernel.ids.root.node is None]
        self._constant_ids = any(call.ids.root.data is not None for _, call in self._ids)

    def _struct(self, t: Tensor) -> GgmlTensor:
        return GgmlTensor.from_address(self._tensors[id(t)])

    def _leaf(self, t: Tensor) -> int:
        raw = t.data.reshape(-1).view(np.uint8) if t.data is not None else _aligned(t.nbytes)
        self._storage[id(t)] = raw
        made = self._lib.make("new_tensor_4d", self._ctx, t.dtype.gguf_id, *t.ne)
        struct = GgmlTensor.from_address(made)
        struct.nb[:] = t.nb
        struct.data = raw.ctypes.data
        return made

    def _view_of(self, base: int, t: Tensor, offset: int) -> int:
        """A ggml view of `base` from a byte offset, with t's ne and nb. ggml_view_4d would measure a view whose rows overlap as if they did not,
        so it is asked for one block and given its dims afterwards."""
        made = self._lib.make("view_4d", self._ctx, base, t.dtype.block, 1, 1, 1, t.dtype.nbytes, t.dtype.nbytes, t.dtype.nbytes, offset)
        struct = GgmlTensor.from_address(made)
        struct.type, struct.ne[:], struct.nb[:] = t.dtype.gguf_id, t.ne, t.nb
        return made

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Copied):
            return self._lib.make("cont", self._ctx, self._argument(value.x))
        if not isinstance(value, Tensor):
            return int(value) if isinstance(value, np.integer) else value
        if id(value) in self._tensors:
            return self._tensors[id(value)]
        return self._view_of(self._tensors[id(value.root)], value, value.offs)  # a mapping's own view

    def _node(self, node: Node, call: Call | None) -> int:
        if call is None:
            source = node.src[0]
            assert source is not None
            made = self._view_of(self._tensors[id(source)], node.out, node.out.offs - source.offs)
            self._tensors[id(node.out)] = made
            return made
        made = self._lib.make(call.function, self._ctx, *(self._argument(a) for a in call.args))
        if call.turned:
            made = self._lib.make("cont", self._ctx, self._lib.make("transpose", self._ctx, made))
        struct = GgmlTensor.from_address(made)
        if struct.view_src is not None and node.op.inplace is None:  # ggml_clamp writes into its input; here the result has memory of its own
            struct.view_src, struct.data, struct.nb[:] = None, None, node.out.nb
        if len(node.outputs) == 1 and tuple(struct.ne) == node.out.ne:
            self._tensors[id(node.out)] = made
            return made
        offset = 0
        for t in node.outputs:
            self._tensors[id(t)] = self._view_of(made, t, offset)
            offset += t.nbytes
        return made

    def _keep(self, t: Tensor) -> None:
        """Ask the allocator to leave a tensor's memory alone, whichever tensor owns it."""
        struct = self._struct(t)
        struct.flags |= OUTPUT_FLAG
        if struct.view_src is not None:
            GgmlTensor.from_address(struct.view_src).flags |= OUTPUT_FLAG

    def address(self, t: Tensor) -> int:
        """Address of a tensor's first element; 0 for an output that nothing in the graph asks for."""
        if id(t) not in self._tensors:
            raise GraphError(f"{t.name or 'tensor'} is not part of this graph")
        return int(self._struct(t).data or 0)

    def view(self, t: Tensor) -> np.ndarray:
        """The live memory of a tensor, in NumPy order (see typed_view), to be read alone: `set` writes, and ids are checked after it.
        With `reuse` on, results other than the graph's outputs are overwritten in a run and are refused."""
        address = self.address(t)
        kept = t.root.node is None or not self._backend.reuse or any(t.root is o.root for o in self.plan.graph.outputs)
        if not kept:
            raise GraphError(f"{t.name} is no output of this graph and its memory is used again; legal: outputs, inputs, and all with reuse=False")
        raw = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (t.nbytes,))
        view = typed_view(t, raw, 0)
        view.flags.writeable = False
        return view

    def set(self, t: Tensor, value: np.ndarray) -> None:
        """Fill an input; GraphError for any other tensor."""
        require_input(t, self._inputs)
        typed_view(t, self._storage[id(t)])[...] = check_array(t, value)
        self._given.add(id(t))
        self._unchecked = True

    def get(self, t: Tensor) -> np.ndarray:
        """A copy of a tensor's value; BF16 and block types come as float32."""
        return decode(t, self.view(t))

    def run(self) -> None:
        """Compute all nodes; KernelError for an id out of range, before ggml sees it."""
        require_inputs_set(self.plan.graph, self._given)
        if self._unchecked or self._constant_ids:
            self._check_ids()
        with self._backend.lock:
            status = self._lib.call("ggml_backend_graph_plan_compute", self._backend.handle, self._plan)
        if status != 0:
            raise KernelError(f"ggml could not compute the graph: status {status}")

    def _check_ids(self) -> None:
        for node, call in self._ids:
            ids = self.view(call.ids)
            bad = ids[(ids < 0) | (ids >= call.n_rows)]
            if bad.size:
                raise KernelError(f"{node.op.name} ({node.name}): bad index {int(bad.flat[0])}; legal: 0 to {call.n_rows - 1}")
        self._unchecked = False


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start:start + nbytes]


def _close_backend(lib: Library, handle: int, pool: int) -> None:
    lib.call("ggml_backend_free", handle)
    lib.call("ggml_threadpool_free", pool)


def _close_runner(backend: GgmlBackend, ctx: int, galloc: int, plans: list[int]) -> None:
    for p in plans:
        backend.lib.call("ggml_backend_graph_plan_free", backend.handle, p)
    backend.lib.call("ggml_gallocr_free", galloc)
    backend.lib.call("ggml_free", ctx)
