"""Comparing two traces tensor by tensor: what a side is, which tensors belong together, and by how much they differ."""

from __future__ import annotations

import itertools
import json
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from pyggml import __version__
from pyggml.errors import FormatError, ParamError
from pyggml.registry import load_ops
from pyggml.runtime.trace import Traced
from pyggml.tensor import Shape
from pyggml.testing import nmse
from pyggml.tools.common import read_text as read_file
from pyggml.tools.trace_text import TextTensor, read_text

_UNNAMED = re.compile(r"(node|leaf)_\d+(\..*)?$")
_SOURCE = re.compile(r" \S+ \[[\d, ]*\]$")  # type and ne after a source's name in a saved record
INSIDE = ("scan", "mamba2")  # parts whose tensors are laid out by chunk: there other dims mean another chunk, not another view
TEXT_NAMES = (("inp_embd", "embd"), ("inp_embd_scaled", "embd"), ("inp_embd_scaled", "inp_embd"), ("result_output_scaled", "result_output"),
              ("Qcur_rope-{il}", "Qcur-{il}"), ("Kcur_rope-{il}", "Kcur-{il}"))  # ours, llama.cpp's
MAX_TRANSPOSED = 1 << 22  # elements up to which every transpose is tried


@dataclass(slots=True, eq=False)
class Item:
    """One tensor of a side. `load` gives its value (NumPy order, four dims) or None; a printed one has `text` instead."""

    i: int
    layer: int | None
    part: str
    op: str
    name: str
    dtype: str
    ne: Shape
    src: list[str]
    kernel: str
    load: Callable[[], np.ndarray | None]
    text: TextTensor | None = None

    @property
    def where(self) -> str:
        """`decay-2, layer 2, scan`."""
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"{self.name}{layer}{f', {self.part}' if self.part else ''}"


@dataclass(slots=True)
class Side:
    """One of the two traces: how it was asked for, a line about it, its tensors in order."""

    label: str
    about: str
    items: list[Item]

    @property
    def is_text(self) -> bool:
        """True for what llama.cpp printed."""
        return any(x.text is not None for x in self.items)


def item_of(t: Traced) -> Item:
    """A traced tensor as an item."""
    return Item(t.i, t.layer, t.part, t.op, t.name, t.dtype, t.ne, [s.name for s in t.src if s is not None], t.kernel, lambda: t.value)


# Dumps

class Dump:
    """Writes a trace to a folder: values.npz, an array per tensor, and index.json, which describes them in order."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.about = ""
        self.records: list[dict[str, Any]] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._zip = zipfile.ZipFile(self.folder / "values.npz", "w")
        except OSError as e:
            raise ParamError(f"--save {folder}: {e.strerror}") from None

    def add(self, t: Traced) -> None:
        """Write one tensor."""
        key = f"{t.i:06d}" if t.k == 0 else f"{t.i:06d}.{t.k}"
        if t.value is not None:
            with self._zip.open(f"{key}.npy", "w", force_zip64=True) as f:
                np.lib.format.write_array(f, t.value, allow_pickle=False)
        self.records.append({"key": key if t.value is not None else None, **t.record()})

    def __enter__(self) -> Dump:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._zip.close()
        head = json.dumps({"pyggml": __version__, "about": self.about})[:-1]
        rows = ",\n".join(json.dumps(finite(r), allow_nan=False) for r in self.records)
        (self.folder / "index.json").write_text(f'{head}, "tensors": [\n{rows}\n]}}\n', encoding="utf-8")


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """A record without NaN and infinity, which JSON does not have: None in their place."""
    def plain(x: Any) -> Any:
        if isinstance(x, list):
            return [plain(y) for y in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x
    return {k: plain(v) for k, v in record.items()}


def read_dump(folder: Path, label: str) -> Side:
    """A side from a folder that `Dump` wrote; FormatError when it is none."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        arrays = np.load(folder / "values.npz", allow_pickle=False)
        items = []
        for r in index["tensors"]:
            a, b, c, d = (int(n) for n in r["ne"])
            items.append(Item(r["i"], r["layer"], r["part"], r["op"], r["name"], r["type"], (a, b, c, d), [_SOURCE.sub("", s) for s in r["src"] if s],
                              r["kernel"], _loader(folder, arrays, r["key"], (d, c, b, a))))
        return Side(label, str(index["about"]), items)
    except OSError as e:
        raise FormatError(f"{folder}: no saved trace: {e}") from None
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as e:
        raise FormatError(f"{folder}: a broken trace: {e}") from None


def _loader(folder: Path, arrays: Any, key: str | None, shape: tuple[int, ...]) -> Callable[[], np.ndarray | None]:
    def load() -> np.ndarray | None:
        if key is None:
            return None
        try:
            value: np.ndarray = arrays[key]
        except (KeyError, OSError, ValueError, zipfile.BadZipFile) as e:
            raise FormatError(f"{folder}: values.npz, {key}: {e}") from None
        if value.shape != shape:
            raise FormatError(f"{folder}: values.npz, {key}: found shape {value.shape}; index.json says {shape}")
        return value
    return load


def text_side(path: Path, label: str) -> Side:
    """A side from text that llama.cpp's eval-callback printed."""
    found = read_text(path)
    return Side(label, f"{path}: {len(found)} tensors as printed by llama.cpp's eval-callback",
                [Item(t.i, _layer(t.name), "", t.op, t.name, t.dtype, t.ne, [n for n, _ in t.src], "", lambda: None, t) for t in found])


def _layer(name: str) -> int | None:
    m = re.search(r"-(\d+)$", name)
    return int(m[1]) if m else None


# Which tensors belong together

class Pair(NamedTuple):
    """Two tensors that should be the same."""

    a: Item
    b: Item


def pair(a: Side, b: Side, names: Sequence[tuple[str, str]] = ()) -> tuple[list[Pair], str]:
    """The pairs in b's order, and in words how they were found.

    Graphs of the same ops and names are paired node by node. Others by the names that their builders gave, the k-th bearer of a name with
    the k-th, or the last with the last where they differ in number. `names` (A's, B's; `{il}` stands for any layer) come before both.
    """
    if [(x.op, x.name) for x in a.items] == [(x.op, x.name) for x in b.items]:
        partner = {id(y): x for x, y in zip(a.items, b.items, strict=True)}
        how = "node by node: the graphs have the same nodes"
    else:
        partner = {}
        known = _by_name(a.items)
        for name, ys in _by_name(b.items).items():
            xs = known.get(name, [])
            same = list(zip(xs, ys, strict=True)) if len(xs) == len(ys) else [(xs[-1], ys[-1])] if xs else []
            partner.update({id(y): x for x, y in same})
        how = "by the names that both graphs give"
    partner.update(_listed(a, b, [(y, x) for x, y in TEXT_NAMES] if a.is_text else TEXT_NAMES) if a.is_text != b.is_text else {})
    listed = _listed(a, b, names)
    if names and not listed:
        raise ParamError(f"--pairs: none of its {len(names)} pairs is there; A has {_some(a)}, B has {_some(b)}")
    partner.update(listed)
    pairs = [Pair(partner[id(y)], y) for y in b.items if id(y) in partner]
    views = {name for name, op in load_ops().items() if op.view}  # one without a name of its own only repeats its source
    return [p for p in pairs if p.b.op not in views or _given(p.b.name)], how + (f", {len(listed)} by the list" if listed else "")


def _given(name: str) -> bool:
    """True for a name that a builder gave: no numbered node, no name made from another's such as `x (view)`."""
    return bool(name) and not _UNNAMED.match(name) and not name.endswith(")")


def _by_name(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Items by the names that a builder gave."""
    found: dict[str, list[Item]] = {}
    for x in items:
        if _given(x.name):
            found.setdefault(x.name, []).append(x)
    return found


def _listed(a: Side, b: Side, names: Sequence[tuple[str, str]]) -> dict[int, Item]:
    """For each listed pair of names whose both sides are there: id of B's item -> A's item."""
    in_a = {x.name: x for x in a.items}
    in_b = {x.name: x for x in b.items}
    found = {}
    for na, nb in names:
        if "{il}" in na + nb:
            pattern = re.compile(re.escape(nb).replace(re.escape("{il}"), r"(\d+)") + "$")
            hits = [(na.replace("{il}", m[1]), name) for name in in_b if (m := pattern.match(name)) and m.groups()]
        else:
            hits = [(na, nb)]
        found.update({id(in_b[y]): in_a[x] for x, y in hits if x in in_a and y in in_b})
    return found


def read_pairs(path: str) -> list[tuple[str, str]]:
    """Pairs of names from a file: two a line, separated by a comma, or by blanks where there is none; # starts a comment."""
    found = []
    for k, line in enumerate(read_file(path, "--pairs").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text:
            names = [x.strip() for x in (text.split(",") if "," in text else text.split())]
            if len(names) != 2 or not all(names):
                raise ParamError(f"--pairs {path}, line {k}: found {text!r}; legal: A's name, B's name")
            found.append((names[0], names[1]))
    return found


def _some(side: Side) -> str:
    names = list(_by_name(side.items))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more names" if len(names) > 3 else "")


# By how much they differ

@dataclass(slots=True)
class Difference:
    """What comparing a pair gave: NMSE of B against A (NaN when nothing could be compared), the greatest difference and where it is (ne
    order), and in `how` what had to be done to compare."""

    pair: Pair
    nmse: float
    max_abs: float = 0.0
    at: tuple[int, ...] = ()
    value_a: float = 0.0
    value_b: float = 0.0
    how: str = ""

    @property
    def compared(self) -> bool:
        """False when the two have no shape in common."""
        return not math.isnan(self.nmse)


def compare(p: Pair) -> Difference | None:
    """Compare a pair; None when one of them has no value (a fused node, a block of weights, an empty tensor)."""
    a, b = p.a.load(), p.b.load()
    inside = (p.a.part or p.b.part) in INSIDE
    if p.a.text is not None or p.b.text is not None:
        if p.a.text is not None and p.b.text is not None:
            return _compare_texts(p, p.a.text, p.b.text)
        text, value = (p.a.text, b) if p.a.text is not None else (p.b.text, a)
        if text is None or value is None or text.values is None or not text.values.size:
            return None
        return _best(p, [_against_text(p, v, text, how) for v, how in fits(value, text.ne[::-1], inside)])
    if a is None or b is None:
        return None
    tries = [(x, b, how) for x, how in fits(a, b.shape, inside)] + [(a, y, how) for y, how in fits(b, a.shape, inside) if how]
    return _best(p, [_of_arrays(p, x, y, how) for x, y, how in tries])


def _best(p: Pair, tried: Sequence[Difference]) -> Difference:
    return min(tried, key=lambda d: d.nmse, default=Difference(p, math.nan, how=f"{list(p.a.ne)} and {list(p.b.ne)} fit by no transpose or view"))


def fits(x: np.ndarray, shape: tuple[int, ...], inside: bool) -> Iterator[tuple[np.ndarray, str]]:
    """x in another shape, in every way that a change of layout explains, with a word on it: as it is, transposed, cut (the first or the last
    part of a longer dim), reshaped. `inside`: only the first two."""
    if _dims(x.shape) == _dims(shape):
        yield x.reshape(shape), ""
        return
    if x.size == math.prod(shape):
        orders = list(itertools.permutations(range(x.ndim))) if x.size <= MAX_TRANSPOSED else [tuple(range(x.ndim))]
        turned = [x.transpose(p) for p in orders if _moves(x.shape, p)]
        yield from ((t.reshape(shape), "transposed") for t in turned if _dims(t.shape) == _dims(shape))
        if not inside:
            yield x.reshape(shape), "reshaped"
            yield from ((t.reshape(shape), "transposed and reshaped") for t in turned if _dims(t.shape) != _dims(shape))
    elif not inside and all(n >= m for n, m in zip(x.shape, shape, strict=True)):
        cut = ", ".join(f"{m} of {n}" for n, m in zip(x.shape, shape, strict=True) if n != m)
        yield x[tuple(slice(0, m) for m in shape)], f"first {cut}"
        yield x[tuple(slice(n - m, n) for n, m in zip(x.shape, shape, strict=True))], f"last {cut}"


def _dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n > 1)


def _moves(shape: tuple[int, ...], order: tuple[int, ...]) -> bool:
    """True when a transpose changes the order of dims that are longer than 1."""
    kept = [k for k in order if shape[k] > 1]
    return kept != sorted(kept)


def _of_arrays(p: Pair, a: np.ndarray, b: np.ndarray, how: str) -> Difference:
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(x - y)
    gap = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.where(np.isnan(gap), np.inf, gap))
    at = np.unravel_index(int(gap.argmax()), gap.shape)
    return Difference(p, nmse(y, x), float(gap[at]), tuple(int(k) for k in at[::-1]), float(x[at]), float(y[at]), how)


def _against_text(p: Pair, value: np.ndarray, text: TextTensor, how: str) -> Difference:
    """A value against a printed tensor: its elements, less the rounding of the print, and its sum, less what a float32 sum may be off."""
    assert text.values is not None
    x = value.astype(np.float64).reshape(text.ne[::-1])
    shown = x[np.ix_(*text.at[::-1])]
    d = _of_arrays(p, shown, text.values, "")
    near = np.abs(shown - text.values) <= 0.501 * 10.0 ** -text.digits
    elements = nmse(np.where(near, shown, text.values), shown)
    total, size, power = float(x.sum()), float(np.abs(x).sum()), float(np.square(x).sum())
    part = float(text.values.sum())
    of_all = text.values.size == x.size or text.total is None or abs(text.total - part) > 0.5 * 10.0 ** -text.digits * text.values.size + 1e-6
    sums = 0.0
    if text.total is not None and of_all:
        off = abs(text.total - total) if np.isfinite(total) or np.isfinite(text.total) else 0.0
        noise = 2.0 ** -24 * math.sqrt(x.size) * size + 1e-6
        sums = max(off - noise, 0.0) ** 2 / (power or 1.0) if np.isfinite(off) else math.inf
    seen = f"{text.values.size} of {x.size} elements" + (" and the sum" if text.total is not None and of_all else "")
    words = f"{how}, {seen}" if how else seen
    at = tuple(int(text.at[k][i]) for k, i in enumerate(d.at))
    if p.a.text is not None:
        return replace(d, nmse=max(elements, sums), value_a=d.value_b, value_b=d.value_a, at=at, how=words)
    return replace(d, nmse=max(elements, sums), at=at, how=words)


def _compare_texts(p: Pair, a: TextTensor, b: TextTensor) -> Difference | None:
    if a.values is None or b.values is None or not a.values.size:
        return None
    if a.ne != b.ne or a.values.shape != b.values.shape:
        return _best(p, [])
    near = np.abs(a.values - b.values) <= 1.01 * 10.0 ** -min(a.digits, b.digits)
    d = _of_arrays(p, a.values, b.values, f"{a.values.size} printed elements")
    return replace(d, nmse=nmse(np.where(near, a.values, b.values), a.values), at=tuple(int(a.at[k][i]) for k, i in enumerate(d.at)))
