"""The text that llama.cpp's eval-callback prints: per tensor a line `name = (type) OP(src0{ne}, src1{ne}}) = {ne}`, then the first and last
elements of each dim in nested brackets, and the sum. (Older versions print the first elements only, or no sum, or the sum of what they print.)"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pyggml.errors import FormatError
from pyggml.tensor import Shape

_HEAD = re.compile(r"(?:^|\s)(?P<name>\S.*?)? = \((?P<type>\w+)\) +(?P<op>\w+)\((?P<src>.*)\) = \{(?P<ne>\d+, \d+, \d+, \d+)\}\s*$")
_SOURCE = re.compile(r"([^{}]*)\{(\d+(?:, \d+){3})\}")
_SUM = re.compile(r"sum = (\S+)\s*$")
_PREFIX = re.compile(r"^.*?(?:ggml_debug|common_debug_cb_eval): *")
ELLIPSIS = "..."


@dataclass(slots=True)
class TextTensor:
    """One printed tensor. `at` holds, per dim (ne order), the indices of the printed elements; `values` are those elements in NumPy order;
    `digits` is how many decimals were printed; `total` the printed sum, None where there is none."""

    i: int
    name: str
    dtype: str
    op: str
    ne: Shape
    src: list[tuple[str, Shape]]
    at: list[np.ndarray] = field(default_factory=list)
    values: np.ndarray | None = None
    digits: int = 4
    total: float | None = None


def read_text(path: Path) -> list[TextTensor]:
    """Every tensor of a text; FormatError when there is none, or when a tensor's elements do not fit its ne."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as e:
        raise FormatError(f"{path}: {e.strerror}") from None
    found: list[TextTensor] = []
    body: list[str] = []
    for line in [*lines, None]:
        head = None if line is None else _HEAD.search(_PREFIX.sub(" ", line))
        if line is None or head is not None:
            if found:
                _fill(path, found[-1], body)
            body = []
        if head is not None:
            src = [(m[1].lstrip(", "), _ne(m[2])) for m in _SOURCE.finditer(head["src"])]
            found.append(TextTensor(len(found), (head["name"] or "").strip(), head["type"], head["op"], _ne(head["ne"]), src))
        elif line is not None:
            body.append(line)
    if not found:
        raise FormatError(f"{path}: no line of the form `name = (type) OP(...) = {{ne}}`, as llama.cpp's eval-callback prints")
    return found


def _ne(text: str) -> Shape:
    a, b, c, d = (int(x) for x in text.split(", "))
    return a, b, c, d


def _fill(path: Path, t: TextTensor, lines: list[str]) -> None:
    """Read the elements and the sum that follow a tensor's line."""
    rows: list[list[str]] = []     # numbers and ELLIPSIS of each printed row
    blocks: list[list[int]] = []   # per printed dim-2 block: indices into rows; -1 for an ellipsis
    planes: list[list[int]] = []   # per printed dim-3 block: indices into blocks; -1 for an ellipsis
    depth = 0
    for raw in lines:
        text = raw.strip()
        if m := _SUM.search(text):
            t.total = float(m[1])
        elif text.startswith("[") and "]" in text:
            if not blocks:
                break
            rows.append([x.strip() for x in text.strip("[], ").split(",") if x.strip()])
            blocks[-1].append(len(rows) - 1)
        elif text == "[":
            depth += 1
            if depth == 1:
                planes.append([])
            else:
                blocks.append([])
                planes[-1].append(len(blocks) - 1)
        elif text.startswith("]"):
            depth -= 1
        elif text.startswith(ELLIPSIS) and planes:
            (blocks[-1] if depth == 2 else planes[-1]).append(-1)
    if not rows:
        return
    numbers = [[x for x in r if x != ELLIPSIS] for r in rows]
    at = [_indices([-1 if x == ELLIPSIS else 0 for x in rows[0]], t.ne[0]), _indices(blocks[0], t.ne[1]), _indices(planes[0], t.ne[2]),
          np.arange(t.ne[3])]
    try:
        flat = [float(x) for r in numbers for x in r]
    except ValueError as e:
        raise FormatError(f"{path}: tensor {t.name!r}: {e}") from None
    want = math.prod(len(x) for x in at)
    if len(flat) != want:
        raise FormatError(f"{path}: tensor {t.name!r} {list(t.ne)}: {len(flat)} elements are printed where {want} belong")
    t.at = at
    t.values = np.array(flat).reshape([len(x) for x in at[::-1]])
    t.digits = max((len(x.partition(".")[2]) for x in numbers[0] if "." in x), default=0)


def _indices(shown: list[int], n: int) -> np.ndarray:
    """Indices of the printed elements of a dim: all of them, or those before and after the ellipsis (-1)."""
    if -1 not in shown:
        return np.arange(n)
    head = shown.index(-1)
    tail = len(shown) - head - 1
    return np.concatenate([np.arange(head), np.arange(n - tail, n)])
