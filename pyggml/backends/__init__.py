"""Backends: what runs a plan. `open_backend` gives one by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pyggml.backends.base import Backend, Runner
from pyggml.errors import ParamError

NAMES = ("cpu", "reference", "ggml", "null")


def open_backend(name: str, **options: Any) -> Backend:
    """The backend of that name: `cpu` (threads, level, fuse, reuse, poison), `reference`, `ggml` (threads, poll, reuse, poison; needs
    the wheel libggml-python) or `null`. All take `threads`; those that have none ignore it.

    >>> open_backend("cpu", thread=2)
    Traceback (most recent call last):
    pyggml.errors.ParamError: backend cpu has no option 'thread'; legal: threads, level, ...
    """
    if name not in NAMES:
        raise ParamError(f"backend {name!r} is unknown; legal: {', '.join(NAMES)}")
    backend: Callable[..., Backend] = getattr(import_module(f"pyggml.backends.{name}"), f"{name.capitalize()}Backend")
    legal = inspect.signature(backend).parameters
    if "threads" not in legal:
        options.pop("threads", None)
    for option in options:
        if option not in legal:
            raise ParamError(f"backend {name} has no option {option!r}; legal: {', '.join(['threads', *(k for k in legal if k != 'threads')])}")
    return backend(**options)


__all__ = ["Backend", "Runner", "open_backend"]
