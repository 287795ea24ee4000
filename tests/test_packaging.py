"""The wheel and the sdist: what they hold, and that the wheel works in an environment that has never seen the checkout."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import pyggml

VERSION = pyggml.__version__
DEMO = {".gguf", ".md", ".txt"}  # the bundled model, its card, a prompt in its language

# What a newcomer's first script does; also read by mypy.
USER_FILE = """\
import numpy as np
import pyggml as pg

x = pg.tensor([4, 2], "f32", name="x")
y = pg.cumsum(x, dim=0)
print(pg.Graph([y]).n_nodes, pg.compute(y, {x: np.ones((2, 4), np.float32)}, backend="reference")[0, 3])
"""


def run(command: Sequence[str | Path], cwd: Path, ok: bool = True) -> str:
    """stdout of a command that must end with exit code 0 (or not, if not `ok`), without the interpreter settings of this process."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    assert (done.returncode == 0) == ok, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dists(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the checkout and the wheel made from that sdist, which holds no links."""
    tmp = tmp_path_factory.mktemp("build")
    tree = tmp / "tree"  # a copy, so that no build folder is left in the checkout and none of an earlier build is picked up
    shutil.copytree(root, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__"))
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp / "dist", tree], tmp)
    return tmp / "dist"


@pytest.fixture(scope="module")
def wheel(dists: Path) -> Path:
    return dists / f"pyggml-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh venv with the wheel in it.

    The packages that pyggml depends on are not installed again: a .pth line adds the running environment's site-packages, last
    in the search order. The line adds that folder alone: an editable install works through .pth files of its own, which are not
    read there, so the checkout stays out.
    """
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False)
    interpreter = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], folder)
    (site_packages(interpreter) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return interpreter


def site_packages(python: Path) -> Path:
    return Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], python.parent).strip())


def test_package_list_is_the_tree(root: Path, modules: dict[str, Path]) -> None:
    listed = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    packages = {name for name, path in modules.items() if path.name == "__init__.py"}
    assert set(listed) == packages
    assert {name.rpartition(".")[0] for name in modules if name not in packages} <= packages, "a folder of modules without __init__.py"


def test_wheel_holds_the_package_and_nothing_else(root: Path, modules: dict[str, Path], wheel_names: set[str]) -> None:
    expected = {f"{name.replace('.', '/')}{'/__init__' if path.name == '__init__.py' else ''}.py" for name, path in modules.items()}
    demo = {f"pyggml/models/demo/{path.name}" for path in (root / "models/demo").iterdir()}
    assert DEMO <= {Path(name).suffix for name in demo}
    info = f"pyggml-{VERSION}.dist-info/"
    assert {n for n in wheel_names if not n.startswith(info)} == expected | demo | {"pyggml/py.typed", "pyggml/models/shapes.json"}


def test_sdist_holds_what_a_build_and_a_test_run_need(dists: Path, wheel_names: set[str], root: Path) -> None:
    top = f"pyggml-{VERSION}/"
    with tarfile.open(dists / f"pyggml-{VERSION}.tar.gz") as archive:
        names = {member.name.removeprefix(top) for member in archive if member.isfile()}
    sources = {re.sub(r"^pyggml/(models|tools)/", r"\1/", n) for n in wheel_names if n.startswith("pyggml/")}
    tests = {str(path.relative_to(root)) for path in (root / "tests").glob("*.py")}
    assert sources | tests | {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"} <= names


def test_metadata(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"pyggml-{VERSION}.dist-info"
        meta = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        assert archive.read(f"{info}/entry_points.txt").decode().split("\n")[:2] == ["[console_scripts]", "pyggml = pyggml.tools:main"]
        assert archive.read(f"{info}/licenses/LICENSE") == (root / "LICENSE").read_bytes()
    assert (meta["Name"], meta["Version"], meta["License-Expression"]) == ("pyggml", VERSION, "MIT")
    assert meta["Requires-Python"] == ">=3.11"
    assert meta["Description-Content-Type"] == "text/markdown"
    needs = [need for need in meta.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert {re.split(r"[><=~! ]", need)[0] for need in needs} == {"numpy", "numba", "gguf", "tokenizers", "jinja2", "rich"}
    assert set(meta.get_all("Provides-Extra", [])) == {"cuda", "cuda12", "ggml", "convert", "plot", "test"}


def test_changelog_opens_with_this_version(root: Path) -> None:
    heading = re.search(r"^## (\S+)", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert heading and heading[1] == VERSION


def test_installed_package_is_imported_under_one_name(python: Path, tmp_path: Path) -> None:
    code = """
import importlib.metadata, importlib.util, pyggml, pyggml.models, pyggml.tools
print(importlib.metadata.version("pyggml"), pyggml.__version__)
for m in pyggml, pyggml.models, pyggml.tools: print(m.__file__)
for name in "models", "tools":
    spec = importlib.util.find_spec(name)
    print(spec and spec.origin)
"""
    site = site_packages(python)
    versions, *files, models, tools = run([python, "-c", code], tmp_path).splitlines()
    assert versions == f"{VERSION} {VERSION}"
    assert files == [str(site / "pyggml" / sub / "__init__.py") for sub in ("", "models", "tools")]
    # Another package may own these names; pyggml does not.
    assert not models.startswith(str(site)) and not tools.startswith(str(site))


def test_installed_program_runs(python: Path, tmp_path: Path) -> None:
    out = run([python.with_name("pyggml"), "info"], tmp_path)
    assert "granitehybrid" in out, "info without -m describes the bundled model"
    assert re.search("amx|avx-?512|avx2|portable", out, re.IGNORECASE), "info names the kernel level of this machine"
    out = run([python, "-m", "pyggml", "--help"], tmp_path)
    assert re.search(r"\brun\b", out) and re.search(r"\binfo\b", out)


def test_user_file_is_type_checked_against_the_installed_package_and_runs(python: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER_FILE)
    (tmp_path / "wrong.py").write_text("from pyggml.dtypes import dtype\n\nname: bytes = dtype('q8_0').name\n")
    mypy: list[str | Path] = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--cache-dir", tmp_path / "cache"]
    out = run([*mypy, "user.py", "wrong.py"], tmp_path, ok=False)
    errors = [line for line in out.splitlines() if ": error: " in line]
    assert len(errors) == 1 and errors[0].startswith("wrong.py:3: error: Incompatible types in assignment"), out
    assert run([python, "user.py"], tmp_path) == "1 4.0\n"
