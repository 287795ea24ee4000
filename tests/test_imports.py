"""Who may import whom, what `import pyggml` loads, and other rules that hold for every module of the package."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

# From the bottom up. A module imports from its own layer and from those above it in this list, nothing further down.
# Patterns are module names inside pyggml; the longest one that matches a module decides its layer.
LAYERS = {
    "base": ["errors", "dtypes"],
    "tensor": ["tensor"],
    "registry": ["registry", "cases", "casetext"],
    "ops": ["ops", "ops.*", "quants", "quants.*"],  # declarations, rules, NumPy references
    "graph": ["graph"],
    "plan": ["plan"],
    "simd": ["cpu", "cpu.level", "cpu.simd", "cpu.mathf", "cpu.vector", "cpu.rows", "cpu.tiles", "cpu.blocks"],  # instruction sets and intrinsics
    "kernels": ["ops.*.cpu", "ops.*.cuda", "ops.matmul.gemv", "ops.matmul.lanes", "ops.matmul.panels", "ops.matmul.planes", "ops.matmul.small",
                "ops.matmul.words", "ops.attention.flash", "ops.ssd.operands", "quants.cpu", "quants.*_cpu"],
    "backends": ["backends", "backends.*", "cpu", "cpu.*"],
    "gguf": ["gguf", "gguf.*"],
    "runtime": ["runtime", "runtime.*"],
    "models": ["models", "models.*"],
    "testing": ["testing"],
    "guards": ["guards"],
    "pyggml": [""],  # pyggml/__init__.py: the public names
    "tools": ["tools", "tools.*"],
    "program": ["__main__"],
}

# Layers that see less than their place gives them.
NARROW = {
    "simd": {"base"},
    "kernels": {"base", "tensor", "registry", "ops", "simd"},
    "gguf": {"base"},  # the file format knows nothing of the engine
}

# Layers that see this much when they are imported, and all that is below them inside functions only.
AT_IMPORT = {"testing": {"base"}}

# Packages with a home: nobody else imports them, so a graph is built and checked without a compiler or a GPU library.
HOMES = {
    "numba": ["cpu.*"],
    "llvmlite": ["cpu.*"],
    "cupy": ["ops.*.cuda", "backends.cuda"],
    "models": [],  # reached as pyggml.models and pyggml.tools alone
    "tools": [],
}

# `import pyggml` loads NumPy and nothing heavier.
HEAVY = ["numba", "llvmlite", "gguf", "tokenizers", "rich", "jinja2", "cupy", "huggingface_hub", "requests"]

MAX_LINES = 600
LONG_TABLES: dict[str, str] = {}  # module -> why it is one long table

# No environment variable changes results. These are read, for the reason given.
ENVIRONMENT = {
    "XDG_CACHE_HOME": "where the user's cache folder is, on Unix",
    "LOCALAPPDATA": "where the user's cache folder is, on Windows",
}


def layer_of(module: str) -> str:
    name = module.removeprefix("pyggml").removeprefix(".")
    matches = [(len(p), layer) for layer, patterns in LAYERS.items() for p in patterns if fnmatchcase(name, p)]
    assert matches, f"{module} has no layer: give it a row in LAYERS"
    return max(matches)[1]


def imports(source: str, modules: dict[str, Path]) -> Iterator[tuple[str, int, bool]]:
    """(imported module, line, inside a function) for each import that can run; `if TYPE_CHECKING:` cannot."""

    def targets(node: ast.AST) -> list[str]:
        match node:
            case ast.Import(names=names):
                return [a.name for a in names]
            case ast.ImportFrom(module=package, names=names, level=0):
                full = [f"{package}.{a.name}" for a in names]
                return [f if f in modules else str(package) for f in full]
            case ast.ImportFrom():
                return ["a relative import"]
            case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                return [name]
        return []

    def walk(node: ast.AST, in_function: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            children: list[ast.AST] = [*node.orelse]
        else:
            yield from ((target, getattr(node, "lineno", 0), in_function) for target in targets(node))
            children = [*ast.iter_child_nodes(node)]
        in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in children:
            yield from walk(child, in_function)

    yield from walk(ast.parse(source), False)


def wrong_imports(module: str, source: str, modules: dict[str, Path]) -> list[str]:
    own = layer_of(module)
    order = list(LAYERS)
    below = set(order[: order.index(own)])
    found = []
    for target, line, in_function in imports(source, modules):
        top = target.partition(".")[0]
        allowed = NARROW.get(own, below) | {own}
        if not in_function:
            allowed = AT_IMPORT.get(own, allowed) | {own}
        if top == "pyggml":
            if layer_of(target) not in allowed:
                found.append(f"{module}:{line}: {own} imports {target} ({layer_of(target)}); legal: {' '.join(n for n in order if n in allowed)}")
        elif top in HOMES or " " in target:
            name = module.removeprefix("pyggml.")
            if not any(fnmatchcase(name, home) for home in HOMES.get(top, [])):
                found.append(f"{module}:{line}: {target} is imported in {' '.join(HOMES.get(top, [])) or 'no module'}")
    return found


def environment_reads(source: str) -> Iterator[tuple[str, int]]:
    """(variable, line) for each use of the process environment; `?` where it is not a plain read of one literal name."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="environ" | "environb" | "getenv" | "getenvb" | "putenv" | "unsetenv"):
                use = parents[node]
                if isinstance(use, ast.Attribute):  # os.environ.get
                    use = parents[use]
                match use:
                    case ast.Call(args=[ast.Constant(value=str(name)), *_]) | ast.Subscript(slice=ast.Constant(value=str(name)), ctx=ast.Load()):
                        yield name, node.lineno
                    case ast.Compare(left=ast.Constant(value=str(name)), ops=[ast.In() | ast.NotIn()]):
                        yield name, node.lineno
                    case _:
                        yield "?", node.lineno
            case ast.ImportFrom(module="os", names=names) if any("env" in a.name for a in names):
                yield "?", node.lineno


def run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_imports_go_downwards(modules: dict[str, Path]) -> None:
    found = [line for name, path in modules.items() for line in wrong_imports(name, path.read_text("utf-8"), modules)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "target"),
    [
        ("tensor", "from pyggml.registry import OpDef", "pyggml.registry"),
        ("graph", "import pyggml", "pyggml"),
        ("gguf.reader", "def f():\n    from pyggml import tensor", "pyggml.tensor"),
        ("testing", "import pyggml.tensor", "pyggml.tensor"),
        ("ops.reduce.cpu", "from pyggml.plan import Plan", "pyggml.plan"),
        ("ops.reduce.cpu", "import numba as nb", "numba"),
        ("ops.reduce.defs", "from cupy import cuda", "cupy"),
        ("runtime.vocab", "import_module('pyggml.tools')", "pyggml.tools"),
        ("models.mamba2", "from .layers import mamba2_layer", "a relative import"),
        ("tools.run", "import models", "models"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, target: str, modules: dict[str, Path]) -> None:
    (found,) = wrong_imports(f"pyggml.{module}", source, modules)
    assert target in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tensor", "if TYPE_CHECKING:\n    from pyggml.registry import OpDef"),
        ("testing", "def fabricate(arch):\n    from pyggml.models import find"),
        ("ops.reduce.cpu", "from pyggml.cpu.simd import fma\nfrom pyggml.quants.k_cpu import panel\nimport math"),
        ("cpu.compile", "from numba import cfunc"),
        ("ops.reduce.cuda", "import cupy"),
        ("tools.run", "import pyggml as pg"),
    ],
)
def test_a_right_import_passes(module: str, source: str, modules: dict[str, Path]) -> None:
    assert not wrong_imports(f"pyggml.{module}", source, modules)


def test_import_pyggml_loads_numpy_and_nothing_heavier(root: Path) -> None:
    done = run(f"import json, sys, pyggml; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))", root)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("folder", ["models", "tools"])
def test_top_level_folder_refuses_its_plain_name(folder: str, root: Path) -> None:
    done = run(f"import {folder}", root)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: ")
    assert f"pyggml.{folder}" in done.stderr.splitlines()[-1]


def test_modules_are_short(modules: dict[str, Path]) -> None:
    lines = {name: len(path.read_text("utf-8").splitlines()) for name, path in modules.items()}
    long = {name: n for name, n in lines.items() if n > MAX_LINES}
    assert long.keys() == LONG_TABLES.keys(), f"modules of more than {MAX_LINES} lines: {long}"


def test_environment_is_not_an_interface(modules: dict[str, Path]) -> None:
    found = [
        f"{name}:{line}: {variable}"
        for name, path in modules.items()
        for variable, line in environment_reads(path.read_text("utf-8"))
        if variable not in ENVIRONMENT
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "variable"),
    [
        ("os.environ.get('PYGGML_X', '')", "PYGGML_X"),
        ("os.environ['PYGGML_X']", "PYGGML_X"),
        ("'PYGGML_X' in os.environ", "PYGGML_X"),
        ("os.getenv('PYGGML_X')", "PYGGML_X"),
        ("os.environ['PYGGML_X'] = '1'", "?"),
        ("dict(os.environ)", "?"),
        ("from os import environ", "?"),
        ("import os.path", None),
    ],
)
def test_a_read_of_the_environment_is_found(source: str, variable: str | None) -> None:
    assert [name for name, _ in environment_reads(source)] == ([variable] if variable else [])
