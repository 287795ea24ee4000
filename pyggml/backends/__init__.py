"""Backends: what runs a plan. `open_backend` gives one by name."""

from __future__ import annotations

from typing import Any

from pyggml.backends.base import Backend, Runner
from pyggml.errors import ParamError

NAMES = ("cpu", "reference", "ggml", "null")


def open_backend(name: str, **options: Any) -> Backend:
    """The backend of that name: `cpu` (threads, level, fuse, reuse, poison), `reference`, `ggml` (threads, poll, reuse, poison; needs
    the wheel libggml-python) or `null`."""
    if name == "cpu":
        from pyggml.backends.cpu import CpuBackend
        return CpuBackend(**options)
    if name == "reference":
        from pyggml.backends.reference import ReferenceBackend
        return ReferenceBackend(**options)
    if name == "ggml":
        from pyggml.backends.ggml import GgmlBackend
        return GgmlBackend(**options)
    if name == "null":
        from pyggml.backends.null import NullBackend
        return NullBackend(**options)
    raise ParamError(f"backend {name!r} is unknown; legal: {', '.join(NAMES)}")


__all__ = ["Backend", "Runner", "open_backend"]
