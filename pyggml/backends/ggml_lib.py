"""libggml of the PyPI wheel `libggml-python`, through ctypes: where it lies, its functions' C types, its tensor struct.

Declarations follow the headers that the wheel ships (ggml.h, ggml-alloc.h, ggml-backend.h, ggml-cpu.h), of which only the tensor and two
parameter structs are spelled out here; all else is an opaque pointer. A function that a version of the library lacks makes the ops that need it
unsupported, not the whole backend.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from ctypes import c_bool, c_char, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from pyggml.cpu.level import host_features, machine
from pyggml.errors import ParamError

MAX_DIMS = 4
MAX_THREADS = 512  # GGML_MAX_N_THREADS
OUTPUT_FLAG = 2  # GGML_TENSOR_FLAG_OUTPUT
_OBJECT_BYTES = 32  # what a context keeps beside each tensor


class GgmlTensor(ctypes.Structure):
    """struct ggml_tensor. `src`, `view_src`, `buffer` and `data` are addresses (None: null)."""

    _fields_ = [
        ("type", c_int), ("buffer", c_void_p), ("ne", c_int64 * MAX_DIMS), ("nb", c_size_t * MAX_DIMS),
        ("op", c_int), ("op_params", c_int32 * 16), ("flags", c_int32), ("src", c_void_p * 10), ("view_src", c_void_p), ("view_offs", c_size_t),
        ("data", c_void_p), ("name", c_char * 64), ("extra", c_void_p), ("padding", c_char * 8),
    ]


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class ThreadpoolParams(ctypes.Structure):
    """struct ggml_threadpool_params; `reserve` is room for fields that later versions may add."""

    _fields_ = [("cpumask", c_bool * MAX_THREADS), ("n_threads", c_int), ("prio", c_int), ("poll", c_uint32),
                ("strict_cpu", c_bool), ("paused", c_bool), ("reserve", c_char * 256)]


_P = c_void_p  # an address: of a tensor, a graph, a backend

# Functions that make a tensor: C types of the arguments after the context.
TENSOR_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("abs", "cont", "cumsum", "exp", "expm1", "gelu", "log", "mean", "neg", "reglu", "reglu_swapped", "relu", "sgn", "sigmoid",
                     "silu", "softplus", "sqr", "sqrt", "step", "sum_rows", "swiglu", "swiglu_swapped", "tanh", "transpose"), (_P,)),
    **dict.fromkeys(("add", "cpy", "div", "get_rows", "mul", "mul_mat", "reglu_split", "ssm_conv", "sub", "swiglu_split"), (_P, _P)),
    **dict.fromkeys(("argsort", "cast", "top_k", "tri"), (_P, c_int)),
    **dict.fromkeys(("fill", "norm", "rms_norm"), (_P, c_float)),
    **dict.fromkeys(("clamp", "scale_bias"), (_P, c_float, c_float)),
    "arange": (c_float, c_float, c_float),
    "concat": (_P, _P, c_int),
    "flash_attn_ext": (_P, _P, _P, _P, c_float, c_float, c_float),
    "new_tensor_4d": (c_int, c_int64, c_int64, c_int64, c_int64),
    "pad": (_P, c_int, c_int, c_int, c_int),
    "repeat_4d": (_P, c_int64, c_int64, c_int64, c_int64),
    # pos and freq_factors, n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow
    "rope_ext": (_P, _P, _P, c_int, c_int, c_int, c_float, c_float, c_float, c_float, c_float, c_float),
    "set_rows": (_P, _P, _P),
    "soft_max_ext": (_P, _P, c_float, c_float),
    "ssm_scan": (_P, _P, _P, _P, _P, _P, _P, c_int64),
    "view_4d": (_P, c_int64, c_int64, c_int64, c_int64, c_size_t, c_size_t, c_size_t, c_size_t),
}

# The rest: result and arguments.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_version": (c_char_p, ()),
    "ggml_init": (_P, (InitParams,)),
    "ggml_free": (None, (_P,)),
    "ggml_tensor_overhead": (c_size_t, ()),
    "ggml_graph_overhead_custom": (c_size_t, (c_size_t, c_bool)),
    "ggml_new_graph_custom": (_P, (_P, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_gallocr_new": (_P, (_P,)),
    "ggml_gallocr_alloc_graph": (c_bool, (_P, _P)),
    "ggml_gallocr_get_buffer_size": (c_size_t, (_P, c_int)),
    "ggml_gallocr_free": (None, (_P,)),
    "ggml_threadpool_params_init": (None, (ctypes.POINTER(ThreadpoolParams), c_int)),
    "ggml_threadpool_new": (_P, (ctypes.POINTER(ThreadpoolParams),)),
    "ggml_threadpool_pause": (None, (_P,)),
    "ggml_threadpool_free": (None, (_P,)),
    "ggml_backend_cpu_init": (_P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_P, c_int)),
    "ggml_backend_cpu_set_threadpool": (None, (_P, _P)),
    "ggml_backend_cpu_buffer_type": (_P, ()),
    "ggml_backend_graph_plan_create": (_P, (_P, _P)),
    "ggml_backend_graph_plan_compute": (c_int, (_P, _P)),
    "ggml_backend_graph_plan_free": (None, (_P, _P)),
    "ggml_backend_free": (None, (_P,)),
}


class Library:
    """The loaded library. `call` takes any function of FUNCTIONS, `make` one of TENSOR_FUNCTIONS, whose names are without ggml_."""

    def __init__(self, parts: list[ctypes.CDLL]) -> None:
        self._parts = parts
        self._bound: dict[str, Any] = {}
        missing = [name for name in (*FUNCTIONS, "ggml_new_tensor_4d", "ggml_view_4d") if self._find(name) is None]
        if missing:
            raise ParamError(f"backend 'ggml': this libggml has no {', '.join(missing)}; {_INSTALL}")
        for name, (result, args) in FUNCTIONS.items():
            self._bind(name, result, args)
        for name, args in TENSOR_FUNCTIONS.items():
            self._bind(f"ggml_{name}", c_void_p, (c_void_p, *args))
        self.version = str(self.call("ggml_version").decode())
        got, want = self.call("ggml_tensor_overhead"), _OBJECT_BYTES + ctypes.sizeof(GgmlTensor)
        if got != want:
            raise ParamError(f"backend 'ggml': libggml {self.version} has tensors of {got} bytes, this backend knows those of {want}; {_INSTALL}")
        needs = {llvm for name, llvm in _CPU_FEATURES.items() if self._built_for(name)} if machine() == "x86_64" else set()
        lacking = sorted(needs - host_features())
        if lacking:
            raise ParamError(f"backend 'ggml': libggml {self.version} is built for a CPU with {', '.join(lacking)}, which this one lacks")

    def _built_for(self, feature: str) -> bool:
        fn = self._find(f"ggml_cpu_has_{feature}")
        return fn is not None and bool(fn())

    def _find(self, name: str) -> Any:
        return next((f for f in (getattr(part, name, None) for part in self._parts) if f is not None), None)

    def _bind(self, name: str, result: Any, args: tuple[Any, ...]) -> None:
        fn = self._find(name)
        if fn is not None:
            fn.restype, fn.argtypes = result, args
            self._bound[name] = fn

    def has(self, name: str) -> bool:
        """True when the library has the function that makes such tensors."""
        return f"ggml_{name}" in self._bound

    def call(self, name: str, *args: Any) -> Any:
        """Call a function by its C name."""
        return self._bound[name](*args)

    def make(self, name: str, ctx: int, *args: Any) -> int:
        """Make a tensor; its address."""
        return int(self._bound[f"ggml_{name}"](ctx, *args))


# What the library may be built for, by its name and by LLVM's; it would end the process on a CPU that lacks it.
_CPU_FEATURES = {"avx": "avx", "avx2": "avx2", "avx_vnni": "avxvnni", "avx512": "avx512f", "avx512_vbmi": "avx512vbmi", "avx512_vnni": "avx512vnni",
                 "avx512_bf16": "avx512bf16", "amx_int8": "amx-int8", "bmi2": "bmi2", "f16c": "f16c", "fma": "fma"}
_INSTALL = "install the wheel it was written for: pip install 'libggml-python>=0.20'"


@functools.cache
def load(folder: str | None = None) -> Library:
    """The library of the installed wheel, or of a folder; ParamError in one line when it is absent or of another kind."""
    spec = importlib.util.find_spec("libggml") if folder is None else None
    places = [folder] if folder is not None else list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise ParamError("backend 'ggml' needs the wheel libggml-python, which is not installed: pip install 'pyggml[ggml]'")
    parts = []
    for stem in ("ggml-base", "ggml-cpu"):
        found = _library_file(Path(places[0]), stem)
        if found is None:
            raise ParamError(f"backend 'ggml': no library {stem} in {places[0]}; {_INSTALL}")
        try:
            parts.append(ctypes.CDLL(str(found)))
        except OSError as e:
            raise ParamError(f"backend 'ggml': {found} cannot be loaded on this machine: {e}") from e
    return Library(parts)


def _library_file(wheel: Path, stem: str) -> Path | None:
    names = (f"lib{stem}.so", f"lib{stem}.dylib", f"{stem}.dll")
    return next((p for folder in ("lib64", "lib", "bin", ".") for name in names if (p := wheel / folder / name).is_file()), None)
