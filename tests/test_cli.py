"""The `pyggml` program as a user meets it: text on stdout, notes on stderr, one line and an exit code for every fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pyggml import tools
from pyggml.cpu import workers
from pyggml.models import demo_path
from pyggml.testing import fabricate

ROOT = Path(__file__).resolve().parents[1]


def pyggml(*args: str, stdin: str | bytes = "", cwd: Path = ROOT) -> subprocess.CompletedProcess[bytes]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "pyggml", *args], input=data, capture_output=True, cwd=cwd, check=False, env=env)


def fails(code: int, match: str, *args: str, stdin: str | bytes = "") -> None:
    done = pyggml(*args, stdin=stdin)
    err = done.stderr.decode()
    assert done.returncode == code and "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert re.search(match, last), err
    if code == 1:
        assert len([x for x in err.strip().splitlines() if not x.startswith("pyggml: compiling")]) == 1


GREEDY_SHORT = "Mrs. Bennet was not quite so much pleased"


@pytest.mark.parametrize("form", ("auto", "scan", "ssd"))
def test_run_writes_the_golden_words(form: str) -> None:
    done = pyggml("run", "-p", "Mrs. Bennet was", "-n", "6", "--temp", "0", "--mamba2", form, "-ctk", "f32", "-ctv", "f32")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith(GREEDY_SHORT)
    err = done.stderr.decode()
    for part in ("compile  ", "load     ", "prompt   4 tokens, ", "first    ", "eval     5 tokens, ", "memory   weights 6.2 MiB, kv "):
        assert part in err, err


def test_prompt_from_file_stdin_and_seed(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Captain Wentworth had", encoding="utf-8")
    base = ("-n", "8", "--seed", "42")
    text = "Captain Wentworth had"
    outs = [pyggml("run", "-f", str(tmp_path / "p.txt"), *base), pyggml("run", *base, stdin=text + "\n"), pyggml("run", "-p", text, *base)]
    assert len({o.stdout for o in outs}) == 1 and outs[0].stdout.startswith(b"Captain Wentworth had")
    only = pyggml("run", "-p", "Captain Wentworth had", *base, "--no-display-prompt")
    assert outs[0].stdout == b"Captain Wentworth had" + only.stdout


def test_options_change_nothing_that_they_should_not() -> None:
    base = ("run", "-p", "Captain Wentworth had been in the", "-n", "8", "--temp", "0")
    ssd = ("--mamba2", "ssd", "--chunk")
    outs = {pyggml(*base, *extra).stdout for extra in ((), ("-t", "1"), ("-ub", "2"), ("-c", "64"), (*ssd, "3"), (*ssd, "none"))}
    assert len(outs) == 1


def test_run_zero_tokens() -> None:
    done = pyggml("run", "-p", "Emma", "-n", "0")
    assert done.returncode == 0 and done.stdout == b"Emma\n" and b"first " not in done.stderr


def test_a_full_context_is_told() -> None:
    done = pyggml("run", "-p", "Captain Wentworth had", "-c", "8", "--temp", "0")
    assert done.returncode == 0 and b"stopped  the context is full: 8 tokens; -c N for more" in done.stderr


@pytest.mark.parametrize(("code", "match", "args", "stdin"), [
    (1, "run: .*no-such.gguf: .*No such file", ("run", "-m", "no-such.gguf", "-p", "x"), ""),
    (1, "run: .*README.md: ", ("run", "-m", "README.md", "-p", "x"), ""),
    (1, "run: -f no-such.txt: No such file", ("run", "-f", "no-such.txt"), ""),
    (1, "run: stdin: byte 1 is not UTF-8", ("run",), b"a\xff"),
    (1, "run: the prompt is empty", ("run", "-p", ""), ""),
    (1, "run: the context is full: .* n_ctx", ("run", "-p", "one two three four five six seven eight", "-c", "4"), ""),
    (1, "run: .*top_p", ("run", "-p", "x", "--top-p", "1.5"), ""),
    (2, "argument -n/--predict: '-3'; legal: a whole number from 0", ("run", "-n", "-3"), ""),
    (2, "invalid choice: 'fast'", ("run", "--mamba2", "fast"), ""),
    (2, "argument --chunk: '0'; legal", ("run", "--chunk", "0"), ""),
    (2, "argument -t/--threads: '0'", ("run", "-t", "0"), ""),
    (2, "not allowed with", ("run", "-p", "x", "-f", "y"), ""),
    (2, "unrecognized arguments: --frobnicate", ("run", "--frobnicate"), ""),
    (2, "invalid choice: 'fly'", ("fly",), ""),
    (2, "required: COMMAND", (), ""),
    (1, "info: .*no-such.gguf", ("info", "-m", "no-such.gguf"), ""),
    (1, "info: .*No such file", ("info", "-m", ""), ""),  # an unset variable: not the bundled model
    (1, "run: .*No such file", ("run", "-m", "", "-p", "x"), ""),
], ids=lambda v: v if isinstance(v, str) and v.isidentifier() else None)
def test_faults_end_in_one_line(code: int, match: str, args: tuple[str, ...], stdin: str | bytes) -> None:
    fails(code, match, *args, stdin=stdin)


def test_info() -> None:
    done = pyggml("info")
    out = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    for part in ("kernel level", "granitehybrid", "40 q8_0", "45 f32", "bits per weight", "5,999,736", "7 layers (5 mamba, 2 attention)", "(2048)"):
        assert part in out, out


def test_info_check(tmp_path: Path) -> None:
    assert "check       sound" in pyggml("info", "--check").stdout.decode()
    data = bytearray(demo_path().read_bytes())
    data[-2:] = b"\xff\x7f"
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(bytes(data[:-100]))
    fails(1, "info: .*cut.gguf: tensor ", "info", "-m", str(cut), "--check")


def test_info_of_a_file_that_pyggml_cannot_run(tmp_path: Path) -> None:
    fabricate("mamba2", tmp_path / "m.gguf", metadata={"general.architecture": "llama"})
    done = pyggml("info", "-m", str(tmp_path / "m.gguf"))
    assert done.returncode == 1 and "not runnable: key general.architecture: found 'llama'" in done.stdout.decode()


def test_help_and_version() -> None:
    assert b"run" in pyggml("--help").stdout and b"--mamba2" in pyggml("run", "--help").stdout
    assert re.fullmatch(r"pyggml \d+\.\d+\.\d+\n", pyggml("--version").stdout.decode())


def test_demo() -> None:
    done = pyggml("demo")
    out = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    lines = out.splitlines()
    assert 9 <= len(lines) <= 13
    assert "nodes at 2 = 64 = 512 = 4096 tokens" in out and "same 64 tokens" in out and "kernel level" in lines[0]
    delta = float(re.search(r"max \|dlogit\| ([\d.e+-]+)", out).group(1))  # type: ignore[union-attr]
    assert delta <= 1e-3


def test_lack_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def context(*_: object) -> None:
        raise MemoryError("Unable to allocate 23.8 GiB")
    monkeypatch.setattr("pyggml.tools.run.open_context", context)
    assert tools.main(["run", "-p", "x"]) == 1
    assert capsys.readouterr().err == "pyggml run: out of memory: Unable to allocate 23.8 GiB; a smaller -c or -ub takes less\n"


@pytest.mark.skipif(os.name != "posix", reason="sh and /dev/full")
@pytest.mark.parametrize(("command", "code", "says"), [
    ("info >&-", 1, "pyggml info: stdout is closed"),
    ("info >/dev/full", 1, "pyggml info: .*No space left"),
    ("run -n 1 <&-", 0, None),
    ("run -n 1 -m README.md <&-", 1, "pyggml run: "),
    ("info 2>&-", 0, None),
])
def test_closed_and_full_streams(command: str, code: int, says: str | None) -> None:
    done = subprocess.run(["sh", "-c", f"{sys.executable} -m pyggml {command}"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert says is None or re.fullmatch(says + ".*\n", done.stderr)


def test_a_character_that_the_terminal_lacks() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "pyggml", "info"], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0 and "'? t', 'h e'" in done.stdout, done.stderr


def test_names_in_files_reach_no_terminal_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file may spell terminal codes and line ends into keys, values and tensor names."""
    path = tmp_path / "m.gguf"
    fabricate("mamba2", path, metadata={"evil\x1b[2J\nkey": "x\x1b[31m\ny\u202e"}, extra={"bad\n\x1b[2Jname": np.ones(3, np.float32)})
    assert tools.main(["info", "-m", str(path), "--check"]) == tools.main(["run", "-m", str(path), "-p", "x"]) == 1
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (out + err).split("\n"))
    assert "evil\\x1b[2J\\nkey" in out and err.count("\n") == 1 and "unread: bad\\n\\x1b[2Jname" in err


@pytest.mark.skipif(os.name != "posix", reason="process groups")
def test_ctrl_c_reaches_no_compiling_process() -> None:
    worker = workers._start()
    try:
        assert os.getpgid(worker.pid) == worker.pid != os.getpgid(0)
    finally:
        worker.kill()
        workers._close(worker)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "pyggml", "info"], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0 and re.fullmatch("pyggml: .*file/pyggml/kernels cannot be written: kernels are compiled again at every start\n", done.stderr)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]  # the temporary folder is gone


def test_a_closed_pipe_is_no_traceback() -> None:
    p = subprocess.Popen([sys.executable, "-m", "pyggml", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert p.stdout is not None and p.stderr is not None
    p.stdout.close()
    assert b"Traceback" not in p.stderr.read()
    p.stderr.close()
    p.wait()
