"""Building blocks of CPU kernels, usable before numba is imported.

A kernel is a plain Python function over pointers and whole numbers. What it calls is declared here in two forms:
`@intrinsic("f32(ptr, i64)")` writes LLVM IR through an llvmlite builder, `@helper` is a plain function that is compiled
with the kernel. Both are only recipes until pyggml.cpu.compile turns them into machine code, so that modules of
kernels import in no time and a cached kernel runs without numba.

Types in signatures: ptr (byte pointer), i64, i32, f32, f64, void. Addresses in records are i64; `ptr(address)` makes a
pointer of one. `ld_T(p, i)` and `st_T(p, i, v)` read and write element i of type T at p; narrow types widen on load
(f16, bf16 -> float32; i8, i16, i32 -> i64) and round to nearest even on store.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np


class Arg(NamedTuple):
    """One operand of a kernel: pointer to the first element, dims and byte strides. An absent operand has ne0 == 0."""

    p: Any
    ne0: int
    ne1: int
    ne2: int
    ne3: int
    nb0: int
    nb1: int
    nb2: int
    nb3: int


INTRINSICS: dict[tuple[str, str], Intrinsic] = {}
"""By the builder's module and name: how a compiling process finds them."""


class Intrinsic:
    """An operation written as LLVM IR: `build(builder, ir, *args)` returns the value (or None for void)."""

    def __init__(self, sig: str, build: Callable[..., Any]) -> None:
        self.name = build.__name__
        self.sig = sig
        self.build = build
        INTRINSICS[build.__module__, self.name] = self

    def __call__(self, *_args: Any) -> Any:
        raise TypeError(f"{self.name} runs inside compiled kernels only")


class Helper:
    """A plain function compiled together with the kernels that call it. `bind(NAME=...)` makes a copy whose globals of
    these names are replaced (by helpers, intrinsics or numbers): one source, several types."""

    def __init__(self, fn: Callable[..., Any], binds: dict[str, Any] | None = None) -> None:
        assert isinstance(fn, FunctionType)
        self.fn: FunctionType = fn
        self.name = fn.__name__
        self.binds = binds or {}

    def bind(self, **binds: Any) -> Helper:
        """A copy with other globals."""
        return Helper(self.fn, {**self.binds, **binds})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Helper) and self.fn is other.fn and self.binds == other.binds

    def __hash__(self) -> int:
        return hash((self.fn, tuple(sorted((k, v) for k, v in self.binds.items() if isinstance(v, int | float)))))

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.name} runs inside compiled kernels only")


def intrinsic(sig: str) -> Callable[[Callable[..., Any]], Intrinsic]:
    """Declare an operation in LLVM IR with the signature `RESULT(ARG, ...)`."""
    return lambda build: Intrinsic(sig, build)


def helper(fn: Callable[..., Any]) -> Helper:
    """Declare a function that kernels call."""
    return Helper(fn)


F0 = np.float32(0)
F1 = np.float32(1)


# Pointers and memory

@intrinsic("ptr(i64)")
def ptr(b: Any, ir: Any, a: Any) -> Any:
    """Pointer of an address."""
    return b.inttoptr(a, ir.IntType(8).as_pointer())


@intrinsic("i64(ptr)")
def address(b: Any, ir: Any, p: Any) -> Any:
    """Address of a pointer."""
    return b.ptrtoint(p, ir.IntType(64))


@intrinsic("ptr(ptr, i64)")
def at(b: Any, ir: Any, p: Any, n: Any) -> Any:
    """Pointer n bytes further on."""
    return b.gep(p, [n])


def element(b: Any, ir: Any, p: Any, i: Any, ty: Any) -> Any:
    """Pointer to element i of type ty (for builders of intrinsics)."""
    return b.gep(b.bitcast(p, ty.as_pointer()), [i])


def _load(name: str, result: str, make: Callable[[Any], Any], widen: Callable[[Any, Any, Any], Any] | None = None) -> Intrinsic:
    def build(b: Any, ir: Any, p: Any, i: Any) -> Any:
        ty = make(ir)
        v = b.load(element(b, ir, p, i, ty), align=_align(ty))
        return widen(b, ir, v) if widen else v
    build.__name__ = f"ld_{name}"
    return Intrinsic(f"{result}(ptr, i64)", build)


def _store(name: str, arg: str, make: Callable[[Any], Any], narrow: Callable[[Any, Any, Any], Any] | None = None) -> Intrinsic:
    def build(b: Any, ir: Any, p: Any, i: Any, v: Any) -> Any:
        ty = make(ir)
        b.store(narrow(b, ir, v) if narrow else v, element(b, ir, p, i, ty), align=_align(ty))
    build.__name__ = f"st_{name}"
    return Intrinsic(f"void(ptr, i64, {arg})", build)


def _align(ty: Any) -> int:
    # GGUF payloads are aligned to 32 bytes but block scales inside them only to 2: never promise more than the type's
    # own alignment, and for 16-bit types none beyond one element.
    return int(getattr(ty, "width", 0)) // 8 or {"float": 4, "double": 8, "half": 2}[str(ty)]


def _f16_to_f32_int(b: Any, ir: Any, h: Any) -> Any:
    # Shift mantissa and exponent into place and rescale by 2^112: exact for normals and subnormals; inf and NaN keep
    # an all-ones exponent. Used where the CPU has no F16C, as LLVM would otherwise call a library routine.
    i32, f32 = ir.IntType(32), ir.FloatType()
    x = b.zext(h, i32)
    body = b.shl(b.and_(x, i32(0x7FFF)), i32(13))
    scaled = b.bitcast(b.fmul(b.bitcast(body, f32), ir.Constant(f32, 2.0 ** 112)), i32)
    special = b.or_(body, i32(0x7F800000))
    bits = b.select(b.icmp_unsigned(">=", body, i32(0x0F800000)), special, scaled)
    return b.bitcast(b.or_(bits, b.shl(b.and_(x, i32(0x8000)), i32(16))), f32)


def _f32_to_f16_int(b: Any, ir: Any, v: Any) -> Any:
    # Round to nearest even in integers; values above the largest half become inf, NaN stays NaN (quiet).
    i32, f32 = ir.IntType(32), ir.FloatType()
    x = b.bitcast(v, i32)
    mag = b.and_(x, i32(0x7FFFFFFF))
    odd = b.and_(b.lshr(mag, i32(13)), i32(1))
    normal = b.lshr(b.add(b.sub(mag, i32(112 << 23)), b.add(i32(0xFFF), odd)), i32(13))
    magic = ir.Constant(f32, 0.5)  # adding 0.5 aligns a subnormal half's last bit with float32's
    sub = b.sub(b.bitcast(b.fadd(b.bitcast(mag, f32), magic), i32), i32(0x3F000000))
    r = b.select(b.icmp_unsigned("<", mag, i32(113 << 23)), sub, normal)
    r = b.select(b.icmp_unsigned(">=", mag, i32(0x47800000)), i32(0x7C00), r)
    r = b.select(b.icmp_unsigned(">", mag, i32(0x7F800000)), i32(0x7E00), r)
    return b.trunc(b.or_(r, b.and_(b.lshr(x, i32(16)), i32(0x8000))), ir.IntType(16))


def _widen_f16(b: Any, ir: Any, v: Any) -> Any:
    if has_f16c():
        return b.fpext(b.bitcast(v, ir.HalfType()), ir.FloatType())
    return _f16_to_f32_int(b, ir, v)


def _narrow_f16(b: Any, ir: Any, v: Any) -> Any:
    if has_f16c():
        return b.bitcast(b.fptrunc(v, ir.HalfType()), ir.IntType(16))
    return _f32_to_f16_int(b, ir, v)


def has_f16c() -> bool:
    """True when the CPU level being compiled for converts halves in hardware."""
    from pyggml.cpu.level import target_features
    return bool({"f16c", "fullfp16", "fp16"} & target_features())


def _widen_bf16(b: Any, ir: Any, v: Any) -> Any:
    i32 = ir.IntType(32)
    return b.bitcast(b.shl(b.zext(v, i32), i32(16)), ir.FloatType())


def _narrow_bf16(b: Any, ir: Any, v: Any) -> Any:
    i32 = ir.IntType(32)
    u = b.bitcast(v, i32)
    rounded = b.lshr(b.add(u, b.add(i32(0x7FFF), b.and_(b.lshr(u, i32(16)), i32(1)))), i32(16))
    nan = b.icmp_unsigned(">", b.and_(u, i32(0x7FFFFFFF)), i32(0x7F800000))
    return b.trunc(b.select(nan, b.or_(b.lshr(u, i32(16)), i32(64)), rounded), ir.IntType(16))


def _int(bits: int) -> Callable[[Any], Any]:
    return lambda ir: ir.IntType(bits)


ld_f32 = _load("f32", "f32", lambda ir: ir.FloatType())
ld_f64 = _load("f64", "f64", lambda ir: ir.DoubleType())
ld_f16 = _load("f16", "f32", _int(16), _widen_f16)
ld_bf16 = _load("bf16", "f32", _int(16), _widen_bf16)
ld_i64 = _load("i64", "i64", _int(64))
ld_i32 = _load("i32", "i64", _int(32), lambda b, ir, v: b.sext(v, ir.IntType(64)))
ld_i16 = _load("i16", "i64", _int(16), lambda b, ir, v: b.sext(v, ir.IntType(64)))
ld_i8 = _load("i8", "i64", _int(8), lambda b, ir, v: b.sext(v, ir.IntType(64)))
st_f32 = _store("f32", "f32", lambda ir: ir.FloatType())
st_f64 = _store("f64", "f64", lambda ir: ir.DoubleType())
st_f16 = _store("f16", "f32", _int(16), _narrow_f16)
st_bf16 = _store("bf16", "f32", _int(16), _narrow_bf16)
st_i64 = _store("i64", "i64", _int(64))
st_i32 = _store("i32", "i64", _int(32), lambda b, ir, v: b.trunc(v, ir.IntType(32)))
st_i16 = _store("i16", "i64", _int(16), lambda b, ir, v: b.trunc(v, ir.IntType(16)))
st_i8 = _store("i8", "i64", _int(8), lambda b, ir, v: b.trunc(v, ir.IntType(8)))

LOAD: dict[str, Intrinsic] = {"f32": ld_f32, "f64": ld_f64, "f16": ld_f16, "bf16": ld_bf16, "i8": ld_i8, "i16": ld_i16, "i32": ld_i32, "i64": ld_i64}
STORE: dict[str, Intrinsic] = {"f32": st_f32, "f64": st_f64, "f16": st_f16, "bf16": st_bf16, "i8": st_i8, "i16": st_i16, "i32": st_i32, "i64": st_i64}


def _mem(name: str, fn: str) -> Intrinsic:
    def build(b: Any, ir: Any, dst: Any, src: Any, n: Any) -> None:
        p8, i64, i1 = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(1)
        b.call(b.module.declare_intrinsic(fn, [p8, p8, i64]), [dst, src, n, i1(0)])
    build.__name__ = name
    return Intrinsic("void(ptr, ptr, i64)", build)


copy_bytes = _mem("copy_bytes", "llvm.memmove")


@intrinsic("void(ptr, i64)")
def zero_bytes(b: Any, ir: Any, p: Any, n: Any) -> None:
    """Set n bytes to zero."""
    i8 = ir.IntType(8)
    fn = b.module.declare_intrinsic("llvm.memset", [i8.as_pointer(), ir.IntType(64)])
    b.call(fn, [p, i8(0), n, ir.IntType(1)(0)])


# Scalar arithmetic that numba would widen or call out for

def _llvm1(name: str, fn: str, ty: str) -> Intrinsic:
    def build(b: Any, ir: Any, x: Any) -> Any:
        return b.call(b.module.declare_intrinsic(fn, [x.type]), [x])
    build.__name__ = name
    return Intrinsic(f"{ty}({ty})", build)


sqrt = _llvm1("sqrt", "llvm.sqrt", "f32")
floor = _llvm1("floor", "llvm.floor", "f32")
fabs = _llvm1("fabs", "llvm.fabs", "f32")
sqrt64 = _llvm1("sqrt64", "llvm.sqrt", "f64")
fabs64 = _llvm1("fabs64", "llvm.fabs", "f64")
rint64 = _llvm1("rint64", "llvm.rint", "f64")
floor64 = _llvm1("floor64", "llvm.floor", "f64")


@intrinsic("f32(f32, f32, f32)")
def fma(b: Any, ir: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return b.fma(x, y, z)


@intrinsic("f32(f32, f32)")
def fmax(b: Any, ir: Any, x: Any, y: Any) -> Any:
    """The larger; y when x is NaN (so that fmax(NaN, NaN) alone is NaN)."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@intrinsic("f32(f32, f32)")
def fmin(b: Any, ir: Any, x: Any, y: Any) -> Any:
    """The smaller; y when x is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@intrinsic("i32(f32)")
def to_bits(b: Any, ir: Any, v: Any) -> Any:
    """Bits of a float32."""
    return b.bitcast(v, ir.IntType(32))


@intrinsic("f32(f64)")
def narrow(b: Any, ir: Any, v: Any) -> Any:
    """float32 of a float64."""
    return b.fptrunc(v, ir.FloatType())


@intrinsic("f64(f32)")
def wide(b: Any, ir: Any, v: Any) -> Any:
    """float64 of a float32."""
    return b.fpext(v, ir.DoubleType())


@intrinsic("f32(i64)")
def itof(b: Any, ir: Any, v: Any) -> Any:
    """float32 of a whole number."""
    return b.sitofp(v, ir.FloatType())


@helper
def as_f64(x: Any) -> Any:
    """A float64 as it is, where otherwise `narrow` stands."""
    return x


# Threads

def word(b: Any, ir: Any, a: Any, i: Any) -> Any:
    """Pointer to 64-bit word i at address a (for builders of intrinsics)."""
    return b.gep(b.inttoptr(a, ir.IntType(64).as_pointer()), [i])


@intrinsic("i64(i64, i64)")
def ldw(b: Any, ir: Any, a: Any, i: Any) -> Any:
    """Word i of the record at address a."""
    return b.load(word(b, ir, a, i))


@intrinsic("f64(i64, i64)")
def ldw_f64(b: Any, ir: Any, a: Any, i: Any) -> Any:
    """Word i of the record at address a, as the float64 it holds."""
    return b.load(b.bitcast(word(b, ir, a, i), ir.DoubleType().as_pointer()))


@intrinsic("void(i64, i64, i64)")
def stw(b: Any, ir: Any, a: Any, i: Any, v: Any) -> None:
    """Set word i of the record at address a."""
    b.store(v, word(b, ir, a, i))


# What the first status word says; of a bad index the second one holds it and the third how many are legal, of a bad span its ends.
BAD_INDEX, RAISED, BAD_SPAN = 1, 2, 3


@helper
def bad_index(status: Any, index: Any, n: Any) -> None:
    """Report an index that is not in [0, n): the run then ends in KernelError."""
    stw(status, 0, BAD_INDEX)
    stw(status, 1, index)
    stw(status, 2, n)


@helper
def bad_span(status: Any, first: Any, end: Any) -> None:
    """Report a sequence's tokens [first, end) that do not lie where they should: the run then ends in KernelError."""
    stw(status, 0, BAD_SPAN)
    stw(status, 1, first)
    stw(status, 2, end)


@intrinsic("i64(i64, i64)")
def atomic_ldw(b: Any, ir: Any, a: Any, i: Any) -> Any:
    """Word i, with acquire order."""
    return b.load_atomic(word(b, ir, a, i), "acquire", 8)


@intrinsic("void(i64, i64, i64)")
def atomic_stw(b: Any, ir: Any, a: Any, i: Any, v: Any) -> None:
    """Set word i, sequentially consistent."""
    b.store_atomic(v, word(b, ir, a, i), "seq_cst", 8)


@intrinsic("i64(i64, i64, i64)")
def atomic_add(b: Any, ir: Any, a: Any, i: Any, v: Any) -> Any:
    """Add to word i, sequentially consistent; the old value."""
    return b.atomic_rmw("add", word(b, ir, a, i), v, "seq_cst")


@intrinsic("void()")
def pause(b: Any, ir: Any) -> None:
    """Tell the CPU that this is a spin loop."""
    from pyggml.cpu.level import machine
    void = ir.FunctionType(ir.VoidType(), [])
    if machine() == "x86_64":
        b.call(b.module.declare_intrinsic("llvm.x86.sse2.pause", (), void), [])
    elif machine() == "aarch64":
        b.asm(void, "yield", "", [], side_effect=True)


def _external(b: Any, ir: Any, name: str, result: Any, args: list[Any]) -> Any:
    found = b.module.globals.get(name)
    return found if found is not None else ir.Function(b.module, ir.FunctionType(result, args), name)


SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129


@intrinsic("void(i64, i64)")
def wait_word(b: Any, ir: Any, a: Any, expected: Any) -> None:
    """Sleep while the low half of the word at address a equals expected's: a futex on Linux, a yield elsewhere."""
    from pyggml.cpu.level import machine
    i32, i64 = ir.IntType(32), ir.IntType(64)
    if sys.platform == "linux" and machine() in SYS_FUTEX:
        call = _external(b, ir, "syscall", i64, [i64] * 7)
        b.call(call, [i64(SYS_FUTEX[machine()]), a, i64(FUTEX_WAIT_PRIVATE), b.and_(expected, i64(0xFFFFFFFF)), i64(0), i64(0), i64(0)])
    elif sys.platform == "win32":
        b.call(_external(b, ir, "SwitchToThread", i32, []), [])
    else:
        b.call(_external(b, ir, "sched_yield", i32, []), [])


@intrinsic("void(i64)")
def wake_word(b: Any, ir: Any, a: Any) -> None:
    """Wake all that sleep on the word at address a."""
    from pyggml.cpu.level import machine
    i64 = ir.IntType(64)
    if sys.platform == "linux" and machine() in SYS_FUTEX:
        call = _external(b, ir, "syscall", i64, [i64] * 7)
        b.call(call, [i64(SYS_FUTEX[machine()]), a, i64(FUTEX_WAKE_PRIVATE), i64(0x7FFFFFFF), i64(0), i64(0), i64(0)])


@intrinsic("i64()")
def clock_ns(b: Any, ir: Any) -> Any:
    """Nanoseconds of the monotonic clock; 0 where there is none (Windows), which only disables interruption."""
    i32, i64 = ir.IntType(32), ir.IntType(64)
    if sys.platform == "win32":
        return i64(0)
    with b.goto_entry_block():
        ts = b.alloca(ir.ArrayType(i64, 2))
    call = _external(b, ir, "clock_gettime", i32, [i32, ts.type])
    b.call(call, [i32(1 if sys.platform == "linux" else 6), ts])
    sec, nsec = b.load(b.gep(ts, [i32(0), i32(0)])), b.load(b.gep(ts, [i32(0), i32(1)]))
    return b.add(b.mul(sec, i64(1_000_000_000)), nsec)


@intrinsic("i64(i64, i64, i64, i64)")
def call_kernel(b: Any, ir: Any, fn: Any, record: Any, ith: Any, nth: Any) -> Any:
    """Call the compiled kernel at address fn: numba's convention. 0, or not 0 when the kernel raised."""
    i32, i64 = ir.IntType(32), ir.IntType(64)
    p = ir.IntType(8).as_pointer().as_pointer()
    with b.goto_entry_block():
        space = b.alloca(ir.ArrayType(i64, 4))
    slot = b.bitcast(space, p)
    fnty = ir.FunctionType(i32, [p, p, i64, i64, i64])
    return b.sext(b.call(b.inttoptr(fn, fnty.as_pointer()), [slot, slot, record, ith, nth]), i64)
