"""The CPU machine room: compiler and cache, levels, the team under load, interruption."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import pyggml as pg
from pyggml.cpu import level as cpu_level
from pyggml.cpu import workers
from pyggml.cpu.compile import STATS, Kernels, KernelSpec, kernel_key
from pyggml.cpu.simd import helper, ld_bf16, ld_f16, ld_f32, st_bf16, st_f16, st_f32
from pyggml.cpu.team import Team, team
from pyggml.dtypes import bf16_to_f32, f32_to_bf16
from pyggml.errors import DTypeError, GraphError, KernelError, ParamError, ShapeError
from pyggml.registry import OPS

FACTOR = np.float32(3)


@helper
def tripled(x):  # type: ignore[no-untyped-def]
    return x * FACTOR


def triple(out, x, i0, i1):  # type: ignore[no-untyped-def]
    for i in range(i0, i1):
        st_f32(out.p, i, tripled(ld_f32(x.p, i)))


def factors(n: int) -> list[KernelSpec]:
    """n kernels that no other test compiles."""
    return [KernelSpec(triple, {"tripled": tripled.bind(FACTOR=np.float32(100 + k))}, 2) for k in range(n)]


def raises(out, x, i0, i1):  # type: ignore[no-untyped-def]
    if i1 > 1:
        raise ValueError("never")


def imports(out, x, i0, i1):  # type: ignore[no-untyped-def]
    import os  # noqa: F401


def no_such_name(out, x, i0, i1):  # type: ignore[no-untyped-def]
    st_f32(out.p, 0, undefined_helper(i0))  # type: ignore[name-defined] # noqa: F821


def test_key_follows_every_helper_and_constant() -> None:
    level = cpu_level.host_level()
    plain = kernel_key(KernelSpec(triple, {}, 2).recipe(), level)
    other = kernel_key(KernelSpec(triple, {"tripled": tripled.bind(FACTOR=np.float32(4))}, 2).recipe(), level)
    assert plain != other and plain == kernel_key(KernelSpec(triple, {}, 2).recipe(), level)
    assert kernel_key(KernelSpec(triple, {}, 2).recipe(), "portable") != plain


def test_cache_on_disk(tmp_path: Path) -> None:
    spec = KernelSpec(triple, {}, 2)
    before = STATS.n_compiled
    calls: list[tuple[int, int]] = []
    Kernels(folder=tmp_path).addresses([spec], lambda done, total: calls.append((done, total)))
    assert STATS.n_compiled == before + 1 and calls == [(0, 1), (1, 1)]
    (file,) = tmp_path.glob("*.o")
    Kernels(folder=tmp_path).addresses([spec])
    assert STATS.n_compiled == before + 1
    whole = file.read_bytes()
    symbol = whole.index(b"\n", whole.index(b"\n") + 1) + 3
    damages = (whole[:-10], b"", whole[:symbol] + b"Z" + whole[symbol + 1:], whole[:symbol] + b"\xff" + whole[symbol + 1:])
    for k, damaged in enumerate(damages):  # is compiled again
        file.write_bytes(damaged)
        Kernels(folder=tmp_path).addresses([spec])
        assert STATS.n_compiled == before + 2 + k


def test_a_cache_that_is_removed_while_in_use(tmp_path: Path) -> None:
    kernels = Kernels(folder=tmp_path / "cache")
    kernels.addresses([KernelSpec(triple, {}, 2)])
    shutil.rmtree(tmp_path / "cache")
    assert kernels.addresses(factors(1)) and len(list((tmp_path / "cache").iterdir())) == 1


def test_a_cache_with_something_else_in_place_of_a_kernel(tmp_path: Path) -> None:
    spec = KernelSpec(triple, {}, 2)
    (tmp_path / f"{kernel_key(spec.recipe(), cpu_level.host_level())}.o").mkdir()
    with pytest.raises(KernelError, match="Is a directory") as e:
        Kernels(folder=tmp_path).addresses([spec])
    assert "\n" not in str(e.value) and len(list(tmp_path.iterdir())) == 1  # no half-written file stays


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What is cached is read, what is new goes elsewhere."""
    Kernels(folder=tmp_path).addresses(factors(1))
    monkeypatch.setattr("pyggml.cpu.compile.MIN_FREE_BYTES", 1 << 62)
    before = STATS.n_compiled
    kernels = Kernels(folder=tmp_path)
    assert len(set(kernels.addresses(factors(2)))) == 2 and STATS.n_compiled == before + 1
    assert len(list(tmp_path.iterdir())) == 1 and "has no room left: kernels are compiled again at every start" in capfd.readouterr().err


def test_two_threads_compile_at_once(tmp_path: Path) -> None:
    """Answers of the compiling processes reach the one who asked; what the other one made is not made again."""
    kernels, before, found = Kernels(folder=tmp_path), STATS.n_compiled, {}
    ready = threading.Barrier(2)

    def ask(k: int) -> None:
        ready.wait()
        found[k] = kernels.addresses(factors(4))

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found[0] == found[1] and len(set(found[0])) == 4 and STATS.n_compiled == before + 4


def test_a_compiling_process_that_is_ending_is_not_asked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has closed its pipes may take a second to be gone: the request waits for its successor."""
    start, started = workers._start, []

    def first_one_ends() -> subprocess.Popen[bytes]:
        started.append(1)
        ending = [sys.executable, "-c", "import os, time; os.close(1); time.sleep(1)"]
        return subprocess.Popen(ending, stdin=subprocess.PIPE, stdout=subprocess.PIPE) if len(started) == 1 else start()

    workers._stop(cpu_level.host_level())
    monkeypatch.setattr(workers, "_start", first_one_ends)
    assert Kernels(folder=tmp_path).addresses([KernelSpec(triple, {}, 2)]) and len(started) == 2


@pytest.mark.parametrize("setting", ("NUMBA_DISABLE_JIT", "NUMBA_DEBUG"))
def test_a_users_settings_of_numba_are_not_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(setting, "1")
    workers._stop(cpu_level.host_level())
    try:
        assert Kernels(folder=tmp_path).addresses([KernelSpec(triple, {}, 2)])
    finally:
        workers._stop(cpu_level.host_level())


def test_a_kernel_with_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="no_such_name: .*undefined_helper") as e:
        Kernels(folder=tmp_path).addresses([KernelSpec(no_such_name, {}, 2)])
    assert "\n" not in str(e.value)


def test_a_kernel_with_python_that_numba_does_not_read(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="^imports: Use of unsupported opcode") as e:
        Kernels(folder=tmp_path).addresses([KernelSpec(imports, {}, 2)])
    assert "\n" not in str(e.value)


def test_a_kernel_that_raises_is_reported() -> None:
    @pg.op("RAISES", inputs="x")
    def raising(x: pg.Tensor) -> pg.Spec:
        return pg.like(x)

    try:
        pg.kernel("RAISES", "cpu")(raises)
        with pytest.raises(KernelError, match="RAISES .*: the kernel raises raised an error; kernels must not"):
            pg.compute(raising(pg.tensor(np.ones((3, 4), np.float32))), threads=2)
    finally:
        del OPS["RAISES"]


def test_a_closure_is_refused() -> None:
    k = np.float32(2)

    def closed(out, x, i0, i1):  # type: ignore[no-untyped-def]
        st_f32(out.p, 0, k)

    with pytest.raises(KernelError, match="must not be a closure; it uses k"):
        KernelSpec(closed, {}, 2).recipe()


def convert(out, x, kind, i0, i1):  # type: ignore[no-untyped-def]
    for i in range(i0, i1):
        if kind == 0:
            st_f32(out.p, i, ld_f16(x.p, i))
        elif kind == 1:
            st_f16(out.p, i, ld_f32(x.p, i))
        elif kind == 2:
            st_f32(out.p, i, ld_bf16(x.p, i))
        else:
            st_bf16(out.p, i, ld_f32(x.p, i))


@pytest.mark.parametrize("level", cpu_level.LEVELS)
def test_half_conversions_are_exact_at_every_level(level: str) -> None:
    if cpu_level.LEVELS.index(level) > cpu_level.LEVELS.index(cpu_level.host_level()):
        pytest.skip(f"this CPU has no {level}")
    halves = np.arange(65536, dtype=np.uint16)
    rng = np.random.default_rng(0)
    singles = np.concatenate([rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32), (np.arange(65536, dtype=np.uint32) << 13) + (112 << 23),
                              np.array([0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x32FFFFFF, 0x387FC000, 0x387FE000, 0x80000000], np.uint32)])
    with np.errstate(over="ignore"):
        narrowed = singles.view(np.float32).astype(np.float16)
    for kind, stored, want in ((0, halves, halves.view(np.float16).astype(np.float32)), (2, halves, bf16_to_f32(halves)),
                               (1, singles, narrowed), (3, singles, f32_to_bf16(singles.view(np.float32)))):
        got = np.zeros(len(stored), want.dtype)
        _run_kernel(level, convert, stored, got, kind)
        nan = np.isnan(want) if want.dtype.kind == "f" else (want & 0x7FFF) > 0x7F80
        assert np.array_equal(got[~nan].view(np.uint8), want[~nan].view(np.uint8))
        assert np.array_equal((np.isnan(got) if got.dtype.kind == "f" else (got & 0x7FFF) > 0x7F80), nan)


def _run_kernel(level: str, fn: object, x: np.ndarray, out: np.ndarray, *params: int) -> None:
    spec = KernelSpec(fn, {}, 2, "i" * len(params))  # type: ignore[arg-type]
    (address,) = Kernels(level).addresses([spec])
    record = np.zeros(64, np.int64)
    n = len(x)
    words = [n, n, 0, 0, 0, 0]
    for a in (out, x):
        words += [a.ctypes.data, n, 1, 1, 1, a.itemsize, 0, 0, 0]
    record[: len(words) + len(params)] = [*words, *params]
    team(1).run(np.array([address, record.ctypes.data, 3], np.int64))


def test_levels_are_named() -> None:
    with pytest.raises(ParamError, match="level 'sse9'; legal on this CPU: portable"):
        pg.open_backend("cpu", level="sse9")


@pytest.mark.parametrize("level", ("portable", "avx2"))
def test_the_bundled_model_at_lower_levels(level: str) -> None:
    if cpu_level.LEVELS.index(level) > cpu_level.LEVELS.index(cpu_level.host_level()):
        pytest.skip(f"this CPU has no {level}")
    model = pg.load_model(pg.models.demo_path())
    ids = [int(i) for i in np.random.default_rng(0).integers(1, 2048, 40)]
    for form in ("scan", "ssd"):
        want = model.context(mamba2=form, prec="f32").decode(ids)
        assert np.abs(model.context(mamba2=form, level=level).decode(ids) - want).max() < 1e-3


def test_importing_and_running_warm_needs_no_numba(root: Path) -> None:
    code = ("import numpy as np, pyggml as pg, sys\n"
            "x = pg.tensor(np.ones((5, 70), np.float32))\n"
            "assert pg.compute(pg.exp(pg.add(x, x)), threads=2).shape == (5, 70)\n"
            "assert 'numba' not in sys.modules\n")
    for _ in range(2):  # the first run may compile, in processes of its own
        subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)


def test_ctrl_c_ends_a_long_run(root: Path) -> None:
    code = ("import numpy as np, pyggml as pg, sys\n"
            "h = pg.tensor(np.full((4096, 1024), 0.5, np.float32))\n"
            "for _ in range(20000): h = pg.tanh(h)\n"
            "r = pg.open_backend('cpu', threads=2, fuse=False).compile(pg.Graph([h]))\n"
            "print('go', flush=True)\n"
            "try:\n    r.run()\nexcept KeyboardInterrupt:\n    print('interrupted', flush=True)\n    sys.exit(7)\n")
    p = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    assert p.stdout is not None and p.stdout.readline() == "go\n"
    time.sleep(0.3)
    p.send_signal(signal.SIGINT)
    out, _ = p.communicate(timeout=60)  # uninterrupted it would take minutes
    assert p.returncode == 7 and out == "interrupted\n"


def test_a_team_lives_through_many_runs_and_callers() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(64, 300)).astype(np.float32)
    x = pg.tensor(a)
    y = pg.cumsum(pg.exp(pg.scale(x, 0.1)))
    want = pg.compute(y, threads=1)
    errors: list[str] = []

    def work() -> None:
        runner = pg.open_backend("cpu", threads=2).compile(pg.Graph([y]))
        for _ in range(200):
            runner.run()
            if not np.array_equal(runner.get(y)[0, 0], want):
                errors.append("different bits")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_a_team_can_be_closed_and_used_again() -> None:
    t = Team(3)
    assert t.n_threads == 3
    record = np.zeros(64, np.int64)
    spec = KernelSpec(triple, {}, 2)
    (address,) = Kernels().addresses([spec])
    x, out = np.ones(10, np.float32), np.zeros(10, np.float32)
    words = [10, 1, 0, 0, 0, 0]
    for a in (out, x):
        words += [a.ctypes.data, 10, 1, 1, 1, 4, 0, 0, 0]
    record[: len(words)] = words
    for _ in range(2):
        out[...] = 0
        t.run(np.array([address, record.ctypes.data, 2], np.int64))
        assert out.tolist() == [3.0] * 10
        t.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_forked_child_runs_on_threads_of_its_own(root: Path) -> None:
    """Also when another thread of the parent is in the middle of a run, and with graphs made before the fork."""
    code = ("import os, sys, threading, time, signal\n"
            "import numpy as np, pyggml as pg\n"
            "h = pg.tensor(np.full((64, 512), 0.5, np.float32))\n"
            "for _ in range(50): h = pg.tanh(h)\n"
            "def runner(): return pg.open_backend('cpu', threads=3, fuse=False).compile(pg.Graph([h]))\n"
            "r, busy = runner(), runner()\n"
            "r.run()\n"
            "want = r.get(h).tobytes()\n"
            "threading.Thread(target=lambda: [busy.run() for _ in range(300)], daemon=True).start()\n"
            "time.sleep(0.05)\n"
            "for mine in (r, busy):\n"
            "    pid = os.fork()\n"
            "    if pid == 0:\n"
            "        signal.alarm(60)\n"
            "        mine.run()\n"
            "        sys.exit(0 if mine.get(h).tobytes() == want else 3)\n"
            "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"], done.stderr


def test_runners_of_one_backend_say_when_their_memory_was_used() -> None:
    backend = pg.open_backend("cpu", threads=1)
    x, big = pg.tensor([4], name="x"), pg.tensor([1000], name="big")
    y, z = pg.scale(x, 2.0), pg.scale(big, 3.0)
    first, second = backend.compile(pg.Graph([y])), backend.compile(pg.Graph([z]))
    with pytest.raises(GraphError, match="node_0 has no value: run the graph first"):
        first.get(y)
    first.set(x, np.ones(4, np.float32))
    for _ in range(2):  # inputs stay as long as no other graph comes between
        first.run()
        assert first.get(y).ravel().tolist() == [2.0] * 4
    second.set(big, np.ones(1000, np.float32))
    with pytest.raises(GraphError, match="node_0 has no value: run the graph first, and again when another graph of its backend was used"):
        first.get(y)
    with pytest.raises(GraphError, match="inputs without data: x"):
        first.run()


@pytest.mark.parametrize("backend", ("cpu", "reference"))
def test_only_inputs_are_given_values(backend: str) -> None:
    x, constant, foreign = pg.tensor([3], name="x"), pg.tensor(np.ones(3, np.float32), name="c"), pg.tensor([3], name="f")
    y = pg.add(pg.scale(x, 2.0), constant)
    ones = np.ones(3, np.float32)
    for t, match in ((constant, "c .a constant. was given a value; it is not an input"), (foreign, "f .a leaf. was given"), (y, r"node_1 .ADD. was given")):
        with pytest.raises(GraphError, match=match):
            pg.compute(y, {x: ones, t: ones * 5}, backend=backend)
    assert constant.data is not None and constant.data.tolist() == [1, 1, 1]
    assert pg.compute(y, {x: [1, 2, 3]}, backend=backend).tolist() == [3, 5, 7]  # anything that NumPy makes an array of
    for value, error, says in ((["a", "b", "c"], DTypeError, "array of <U1 cannot be stored as f32"), (np.ones(3, complex), DTypeError, "complex128"),
                               ([[1], [1, 2]], ShapeError, "x: no array can be made of the list given"), (None, ShapeError, "x: an array of shape")):
        with pytest.raises(error, match=says):
            pg.compute(y, {x: value}, backend=backend)
    ids = pg.tensor([1], "i32", name="ids")
    with pytest.raises(DTypeError, match=f"an array of int64 from {1 << 32} to {1 << 32} cannot be stored as i32"):  # not id 0
        pg.compute(pg.get_rows(constant, ids), {ids: np.array([1 << 32])}, backend=backend)


def test_a_graph_that_memory_cannot_hold() -> None:
    with pytest.raises(GraphError, match="the graph needs 4611686018427387904 bytes for values; this system does not give so many"):
        pg.compute(pg.repeat(pg.tensor(np.ones(1, np.float32)), [1 << 60]))
