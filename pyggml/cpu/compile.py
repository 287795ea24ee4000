"""From a plain kernel function to machine code, cached on disk.

A kernel `f(outs..., ins..., params..., [scratch, ith,] i0, i1)` becomes an entry `void(record, ith, nth)`: it unpacks the
node's record (64-bit words, layout below), takes chunks of items from the record's atomic counter, and calls f on items
[i0, i1). numba compiles it with its error model off, no reference counting and no Python wrappers, so what is left is
plain code in an object file. Running it needs llvmlite alone: a process whose kernels are all cached never imports numba.

Record: 0 items, 1 items per chunk, 2 counter, 3 address of the node's status words, 4 scratch address of thread 0,
5 scratch bytes per thread, then 9 words per operand (pointer, ne, nb; outputs first), then the params (int64 or float64), then
operands and params of a chain that the kernel ends with.

Cache: one file per kernel, named by a hash of the bytecode of the kernel and of all helpers it calls, the constants bound
to them, this package's own compiler files, the versions of Python, numba and llvmlite, and the CPU's features. numba's own cache
would keep stale code when a helper in another file changes.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import marshal
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from pyggml.cpu import level as cpu_level
from pyggml.cpu.simd import Arg, Helper, Intrinsic
from pyggml.cpu.workers import compile_jobs
from pyggml.errors import KernelError

HEADER_WORDS = 6
ARG_WORDS = 9
_MAGIC = b"pyggml kernel 1\n"
MIN_FREE_BYTES = 16 << 20  # of a disk that new kernels are written to
# What a kernel may call outside itself. Anything else (Python's API, numba's allocator) means that it raises or allocates.
_EXTERNAL = frozenset("memcpy memmove memset syscall sched_yield SwitchToThread clock_gettime".split()) | frozenset(
    f"{n}{s}" for n in "exp expm1 exp2 log log1p log2 pow sin cos tan tanh erf sqrt floor ceil fmod round rint trunc fma".split() for s in ("", "f"))


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel to compile: function, bound globals, number of operands, params ("i" int64, "f" float64, one letter
    each), whether it takes scratch (`scratch, ith` pointers before i0), status address and `extra`, the address of what follows the
    params in the record. `raw`: f is the entry itself."""

    fn: Callable[..., Any]
    binds: dict[str, Any] = field(default_factory=dict)
    n_args: int = 0
    params: str = ""
    scratch: bool = False
    status: bool = False
    raw: bool = False
    extra: bool = False

    def recipe(self) -> tuple[Any, ...]:
        """Everything that determines the machine code, as plain data that can be pickled."""
        assert isinstance(self.fn, FunctionType)
        return (_recipe(Helper(self.fn, self.binds)), self.n_args, self.params, self.scratch, self.status, self.raw, self.extra)


# Recipes: code as data

def _recipe(value: Any) -> tuple[Any, ...] | None:
    if isinstance(value, Helper):
        code = value.fn.__code__
        if code.co_freevars:
            raise KernelError(f"{value.name}: a kernel must not be a closure; it uses {', '.join(code.co_freevars)} of an outer function (pass them with bind)")
        scope = {**value.fn.__globals__, **value.binds}
        used = {n: _recipe(scope[n]) for n in code.co_names if n in scope}
        return ("fn", value.name, code, {n: r for n, r in sorted(used.items()) if r is not None})
    if isinstance(value, Intrinsic):
        return ("ir", value.build.__module__, value.name)
    if isinstance(value, bool | int | float | str | np.number | np.bool_) or (isinstance(value, tuple) and all(isinstance(v, int | float) for v in value)):
        return ("const", value)
    if isinstance(value, ModuleType) and value.__name__ in ("numpy", "math"):
        return ("module", value.__name__)
    if isinstance(value, type) and issubclass(value, np.number):
        return ("np", value.__name__)
    if value is Arg:
        return ("arg",)
    return None  # not usable in a kernel; numba says so if the name is really used as a global


def _digest(h: Any, recipe: Any) -> None:
    if isinstance(recipe, tuple) and recipe and recipe[0] == "fn":
        code = recipe[2]
        for part in (recipe[1], code.co_code, code.co_consts, code.co_names, code.co_varnames, code.co_argcount):
            h.update(repr(part).encode())
        for name, sub in recipe[3].items():
            h.update(name.encode())
            _digest(h, sub)
    elif isinstance(recipe, tuple):
        for part in recipe:
            _digest(h, part)
    else:
        h.update(f"{type(recipe).__name__}{recipe!r};".encode())


def _function(recipe: tuple[Any, ...], njit: Callable[[FunctionType], Any]) -> FunctionType:
    scope = {n: _rebuild(r, njit) for n, r in recipe[3].items()}
    scope.update(__builtins__=__builtins__, __name__="pyggml_kernel")
    return FunctionType(recipe[2], scope, recipe[1])


def _rebuild(recipe: tuple[Any, ...], njit: Callable[[FunctionType], Any]) -> Any:
    kind = recipe[0]
    if kind == "fn":
        return njit(_function(recipe, njit))
    if kind == "ir":
        return _numba_intrinsic(recipe[1], recipe[2])
    if kind == "module":
        return import_module(recipe[1])
    if kind == "np":
        return getattr(np, recipe[1])
    return Arg if kind == "arg" else recipe[1]


# Numba

def _njit(fn: FunctionType) -> Any:
    numba: Any = import_module("numba")
    return numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(fn)


@functools.cache
def _numba_intrinsic(module: str, name: str) -> Any:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic
    it: Intrinsic = getattr(import_module(module), name)
    names = {"ptr": types.voidptr, "i64": types.int64, "i32": types.int32, "f32": types.float32, "f64": types.float64, "void": types.none}
    result, args = it.sig.rstrip(")").split("(")
    sig = names[result.strip()](*(names[a.strip()] for a in args.split(",") if a.strip()))

    def codegen(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        v = it.build(builder, ir, *values)
        return context.get_dummy_value() if v is None else v

    params = ", ".join(f"a{i}" for i in range(len(sig.args)))
    scope: dict[str, Any] = {"sig": sig, "codegen": codegen}
    exec(f"def {name}(typing_context{', ' if params else ''}{params}):\n    return sig, codegen\n", scope)  # numba reads the argument list
    return intrinsic(scope[name])


def _entry_source(n_args: int, params: str, scratch: bool, status: bool, extra: bool) -> str:
    lines = ["def entry(rec, ith, nth):", "    n, chunk = ldw(rec, 0), ldw(rec, 1)"]
    w = HEADER_WORDS
    call = []
    for k in range(n_args):
        lines.append(f"    t{k} = Arg(ptr(ldw(rec, {w})), {', '.join(f'ldw(rec, {w + j})' for j in range(1, ARG_WORDS))})")
        call.append(f"t{k}")
        w += ARG_WORDS
    for k, kind in enumerate(params):
        lines.append(f"    p{k} = {'ldw' if kind == 'i' else 'ldw_f64'}(rec, {w})")
        call.append(f"p{k}")
        w += 1
    if status:
        lines.append("    status = ldw(rec, 3)")
        call.append("status")
    if extra:
        lines.append(f"    extra = rec + {8 * w}")
        call.append("extra")
    if scratch:
        lines.append("    scratch = ptr(ldw(rec, 4) + ith * ldw(rec, 5))")
        call.append("scratch")
    lines += ["    while True:", "        i0 = atomic_add(rec, 2, chunk)", "        if i0 >= n:", "            return",
              f"        kernel({', '.join([*call, 'i0', 'min(i0 + chunk, n)'])})"]
    return "\n".join(lines) + "\n"


def compile_object(recipe: tuple[Any, ...]) -> tuple[str, bytes]:
    """Symbol and object code of a recipe. Runs in a process whose level was set before numba was imported."""
    compiler: Any = import_module("numba.core.compiler")
    from numba import types
    from numba.core import registry
    from numba.core.errors import NumbaError, UnsupportedBytecodeError

    body, n_args, params, scratch, status, raw, extra = recipe
    if raw:
        entry = _function(body, _njit)
    else:
        scope: dict[str, Any] = {n: _numba_intrinsic("pyggml.cpu.simd", n) for n in ("ldw", "ldw_f64", "ptr", "atomic_add")}
        scope.update(Arg=Arg, kernel=_rebuild(body, _njit), __name__="pyggml_kernel")
        exec(_entry_source(n_args, params, scratch, status, extra), scope)
        entry = scope["entry"]
    flags = compiler.Flags()
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.nrt = False
    flags.error_model = "numpy"
    target = registry.cpu_target
    try:
        result = compiler.compile_extra(target.typing_context, target.target_context, entry, (types.int64,) * 3, types.none, flags, {})
    except (NumbaError, UnsupportedBytecodeError) as e:
        raise KernelError(f"{body[1]}: {' '.join(str(e).split())[:1500]}") from e
    module = _optimized(result.library)
    alien = sorted(f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.") and f.name not in _EXTERNAL)
    if alien:
        raise KernelError(f"{body[1]}: calls {', '.join(alien)}; a kernel must not raise, allocate or call Python")
    return result.fndesc.llvm_func_name, result.library._codegen._tm.emit_object(module)


def _optimized(library: Any) -> Any:
    """The linked module of a library after LLVM's full pipeline."""
    module = library._final_module
    passes, builder = library._codegen._module_pass_manager()
    passes.run(module, builder)
    return module


def prepare_numba(level: str) -> None:
    """Set the level that this process compiles for; before numba's first use."""
    cpu_level.set_target(level)
    config: Any = import_module("numba.core.config")
    # The user's own settings (no JIT, debug prints, less optimization) are for the user's own functions; the cache is keyed without them.
    config._env_reloader.process_environ({})
    config.CPU_NAME, config.CPU_FEATURES = cpu_level.numba_target(level)
    config.ENABLE_AVX = True
    # This process only writes object files. numba would optimize and emit every helper by itself first and load it; all that
    # is needed is to optimize the kernel with its helpers linked in, once (compile_object).
    codegen: Any = import_module("numba.core.codegen")
    codegen.CPUCodeLibrary._optimize_final_module = lambda self: None
    codegen.JITCodeLibrary._finalize_specific = lambda self: None
    _wide_loops()


@functools.cache
def _wide_loops() -> None:
    """Have LLVM fill registers with the narrowest type of a loop, not the widest: a chain that starts from one float64 subtraction is
    float32 for the rest of its work. LLVM takes an option once per process."""
    import llvmlite.binding as llvm
    llvm.set_option("", "-vectorizer-maximize-bandwidth")


def pack(recipe: Any) -> bytes:
    """Recipes hold code objects, which pickle does not take."""
    def walk(r: Any) -> Any:
        if isinstance(r, tuple) and r and r[0] == "fn":
            return ("fn", r[1], marshal.dumps(r[2]), {n: walk(x) for n, x in r[3].items()})
        return tuple(walk(x) for x in r) if isinstance(r, tuple) else r
    return pickle.dumps(walk(recipe))


def unpack(data: bytes) -> Any:
    """The recipe of `pack`'s bytes."""
    def walk(r: Any) -> Any:
        if isinstance(r, tuple) and r and r[0] == "fn":
            return ("fn", r[1], marshal.loads(r[2]), {n: walk(x) for n, x in r[3].items()})
        return tuple(walk(x) for x in r) if isinstance(r, tuple) else r
    return walk(pickle.loads(data))


# The cache

def cache_folder() -> Path:
    """Where compiled kernels live: the user's cache folder, or a private temporary one when that cannot be written."""
    if sys.platform == "darwin":
        base = "~/Library/Caches"
    elif sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base) / "pyggml" / "kernels"
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass  # a read-only home, or none, is no fault: the kernels then last as long as this process
    return _temporary_folder(folder, "cannot be written")


@functools.cache
def _temporary_folder(wanted: Path, why: str) -> Path:
    """A folder for this process alone: what others may write to must not be run."""
    if sys.stderr:
        print(f"pyggml: {wanted} {why}: kernels are compiled again at every start", file=sys.stderr, flush=True)
    path = Path(tempfile.mkdtemp(prefix="pyggml-kernels-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def _environment_hash(level: str) -> bytes:
    h = hashlib.sha256()
    here = Path(__file__).parent
    for name in ("simd.py", "vector.py", "compile.py", "level.py"):
        h.update((here / name).read_bytes())
    h.update(repr((sys.version_info[:3], metadata.version("numba"), metadata.version("llvmlite"), level, cpu_level.machine(), sys.platform,
                   cpu_level.numba_target(level))).encode())
    return h.digest()


def kernel_key(recipe: tuple[Any, ...], level: str) -> str:
    """Name of a kernel's file in the cache."""
    h = hashlib.sha256(_environment_hash(level))
    for module in sorted(_builders({r[1] for r in _intrinsics(recipe[0])})):
        source = getattr(import_module(module), "__file__", None)
        h.update(Path(source).read_bytes() if source else module.encode())
    _digest(h, recipe)
    return h.hexdigest()[:32]


def _builders(modules: set[str]) -> set[str]:
    """Modules of intrinsics, and those of types and vectors whose builders they import."""
    todo, found = list(modules), set[str]()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            used = {str(getattr(v, "__module__", "")) for v in vars(import_module(name)).values()}
            todo += [m for m in used if m.startswith(("pyggml.cpu.", "pyggml.quants."))]
    return found


def _intrinsics(recipe: Any) -> Iterable[tuple[Any, ...]]:
    if recipe[0] == "ir":
        yield recipe
    elif recipe[0] == "fn":
        for r in recipe[3].values():
            yield from _intrinsics(r)


def write_object(path: Path, symbol: str, code: bytes) -> None:
    """Put a compiled kernel into the cache, whole or not at all."""
    body = symbol.encode() + b"\n" + code
    path.parent.mkdir(parents=True, exist_ok=True)  # the cache may have been removed while this process runs
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(_MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        os.replace(tmp, path)
    except OSError:
        os.unlink(tmp)
        raise


def _read(path: Path) -> tuple[str, bytes] | None:
    """Symbol and code of a cached kernel; None when it is absent, unreadable or damaged (it is then compiled again)."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    head, _, rest = data.partition(_MAGIC)
    digest, _, body = rest.partition(b"\n")
    if head or hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    symbol, _, code = body.partition(b"\n")
    return symbol.decode(), code


@dataclass
class CompileStats:
    """What compiling has cost this process so far."""

    n_compiled: int = 0
    n_loaded: int = 0
    seconds: float = 0.0


STATS = CompileStats()
_ENGINES: list[Any] = []  # machine code stays for the life of the process: tapes hold addresses into it
Progress = Callable[[int, int], None]


class Kernels:
    """Compiled kernels of one CPU level: memory, then disk, then numba in worker processes, for one thread of the process at a time."""

    lock = threading.Lock()

    def __init__(self, level: str | None = None, folder: Path | None = None) -> None:
        self.level = cpu_level.check_level(level)
        self.folder = folder or cache_folder()
        self._spare: Path | None = None  # where new kernels go when the folder's disk is full
        self._loaded: dict[str, int] = {}  # key -> address
        self._keys: dict[Callable[..., Any], list[tuple[KernelSpec, str]]] = {}

    def addresses(self, specs: Sequence[KernelSpec], progress: Progress | None = None) -> list[int]:
        """Entry addresses of these kernels; those that are nowhere yet are compiled together."""
        with Kernels.lock:
            keys = [self._key(s) for s in specs]
            missing = {k: s.recipe() for k, s in zip(keys, specs, strict=True) if k not in self._loaded and not self._load(k)}
            if missing:
                self._compile(missing, progress or stderr_progress)
                for k in missing:
                    if not self._load(k):
                        raise KernelError(f"kernel {missing[k][0][1]}: its file in {self._spare or self.folder} vanished or is damaged")
            return [self._loaded[k] for k in keys]

    def _key(self, spec: KernelSpec) -> str:
        known = self._keys.get(spec.fn, [])
        for other, key in known:
            if other == spec:
                return key
        key = kernel_key(spec.recipe(), self.level)
        self._keys.setdefault(spec.fn, []).append((spec, key))
        return key

    def _load(self, key: str) -> bool:
        found = _read(self.folder / f"{key}.o") or (_read(self._spare / f"{key}.o") if self._spare else None)
        if found is None:
            return False
        import llvmlite.binding as llvm
        _initialize_llvm()
        # An engine each: helpers of the same name in two kernels (bound to other constants) must not be merged.
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine(jit=True, codemodel="jitdefault"))
        engine.add_object_file(llvm.ObjectFileRef.from_data(found[1]))
        engine.finalize_object()
        _ENGINES.append(engine)
        self._loaded[key] = engine.get_function_address(found[0])
        STATS.n_loaded += 1
        return True

    def _compile(self, missing: dict[str, tuple[Any, ...]], progress: Progress) -> None:
        start = time.perf_counter()
        jobs = [(k, pack(r)) for k, r in missing.items()]
        if _is_full(self.folder):
            self._spare = _temporary_folder(self.folder, "has no room left")
        progress(0, len(jobs))
        errors = compile_jobs(self.level, self._spare or self.folder, jobs, lambda done: progress(done, len(jobs)))
        if errors:
            raise KernelError("; ".join(errors))
        STATS.n_compiled += len(jobs)
        STATS.seconds += time.perf_counter() - start


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < MIN_FREE_BYTES
    except OSError:
        return False  # it is made again when a kernel is written


def _new_lock() -> None:
    Kernels.lock = threading.Lock()  # in a forked child: a thread of the parent may hold the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


@functools.cache
def _initialize_llvm() -> None:
    import llvmlite.binding as llvm
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def kernels_for(level: str | None = None) -> Kernels:
    """The process's kernels of a level (None: the host's)."""
    return _kernels(cpu_level.check_level(level))


@functools.cache
def _kernels(level: str) -> Kernels:
    return Kernels(level)


def stderr_progress(done: int, total: int) -> None:
    """One line on stderr, rewritten in place on a terminal."""
    if not sys.stderr:
        return
    tty = sys.stderr.isatty()
    if done == 0 and not tty:
        print(f"pyggml: compiling {total} kernel{'' if total == 1 else 's'} (once per machine)", file=sys.stderr, flush=True)
    elif tty:
        end = "\n" if done == total else ""
        print(f"\rpyggml: compiling kernels (once per machine) {done}/{total}", end=end, file=sys.stderr, flush=True)
