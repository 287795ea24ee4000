"""What every test may ask for: the checkout, its modules, the extra data beside it."""

from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# First calls compile kernels and machines are shared, so the time of one example says nothing.
settings.register_profile("pyggml", deadline=None)
settings.load_profile("pyggml")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def modules() -> dict[str, Path]:
    """Every module of the package by its import name, each file once whether or not the links pyggml/models and pyggml/tools exist."""
    found = {}
    for package, folder in (("pyggml", "pyggml"), ("pyggml.models", "models"), ("pyggml.tools", "tools")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[0] not in ("models", "tools") or package != "pyggml":
                found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models and golden outputs beside the checkout; tests that need it are skipped where it is absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "models").is_dir():
        pytest.skip("no ../shared with models and goldens")
    return folder


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before a run of the whole suite, compile the kernels of all op cases together: one by one they would take many times longer."""
    if not hasattr(session.config, "workerinput") and session.config.args == session.config.getini("testpaths"):
        from pyggml.testing import compile_cases
        compile_cases()
