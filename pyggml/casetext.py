"""Case strings read back: `MUL_MAT(type_a=q4_0,type_b=f32,m=16,n=1,k=256,bs=[1,1],nr=[1,1])`, as printed here or by ggml's
test-backend-ops, and files of cases, one JSON object a line.

A string that an op's list prints gives that very case. Any other is made of its fields: either the variables of the op's form,
or types, dims and byte strides of the inputs (`type=`, `ne=`, `nb=` of the first, `type_b=` and so on of the others) and attributes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from pyggml.cases import Case, Leaf, bound, cases_of
from pyggml.dtypes import dtype
from pyggml.errors import ParamError
from pyggml.registry import OpDef, find_op
from pyggml.tensor import contiguous_nb, shape4


def split_list(texts: str) -> list[str]:
    """The items of `A,B(x=[1,2]),C`: commas inside brackets do not separate.

    >>> split_list("ADD,TRI(type=f32,ne=[3,3])")
    ['ADD', 'TRI(type=f32,ne=[3,3])']
    """
    items, depth, start = [], 0, 0
    for i, c in enumerate(texts):
        depth += (c in "([") - (c in ")]")
        if c == "," and depth == 0:
            items.append(texts[start:i])
            start = i + 1
    return [*items, texts[start:]]


def parse_case(string: str) -> Case:
    """The case of a string; ParamError names what is wrong with it.

    >>> str(parse_case("CUMSUM(type=f32,ne=[128,5,4,3],dim=1)"))
    'CUMSUM(type=f32,ne=[128,5,4,3],dim=1)'
    """
    name, opened, rest = string.strip().partition("(")
    if not opened or not rest.endswith(")"):
        raise ParamError(f"case {string!r}; legal: OP(field=value,...)")
    d = find_op(name)
    d.load_cases()
    body, _, note = rest[:-1].partition("note=")
    fields: dict[str, Any] = {}
    for item in split_list(body.rstrip(",")) if body else []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ParamError(f"{d.name}: field {item!r} of a case; legal: name=value")
        fields[key.strip()] = _value(value.strip())
    made = _from_fields(d, fields, note)
    return _listed(d).get(str(made), made)


@functools.cache
def _listed(d: OpDef) -> dict[str, Case]:
    return {str(c): c for c in cases_of(d)}


def _value(word: str) -> Any:
    """A number, a list, or the word itself."""
    if word.startswith("[") and word.endswith("]"):
        return tuple(_value(w) for w in split_list(word[1:-1])) if len(word) > 2 else ()
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return word


def _from_fields(d: OpDef, fields: dict[str, Any], note: str) -> Case:
    form = d.form
    if form is not None and form.required <= fields.keys() <= {*form.params, *form.fixed}:
        for k, v in form.fixed.items():
            if fields.pop(k, v) != v:
                raise ParamError(f"{d.name}: a case with another {k} than {v}; pyggml has that one only")
        typed = {k: _like_default(v, form.params[k].default) for k, v in fields.items()}
        return form(**typed, note=note)
    first = d.inputs[0] if d.inputs else ""
    parts: dict[str, dict[str, Any]] = {}
    attrs: dict[str, Any] = {}
    for key, v in fields.items():
        part, _, arg = key.partition("_")
        if key in ("type", "ne", "nb") and first:
            parts.setdefault(first, {})[key] = v
        elif part in ("type", "ne", "nb") and arg in d.inputs[1:]:
            parts.setdefault(arg, {})[part] = v
        elif key.removesuffix("_out") in d.attrs:
            name = key.removesuffix("_out")
            attrs[name] = _like_default(v, d.attrs[name])
        else:
            also = f", or {', '.join([*form.params, *form.fixed])}" if form is not None else ""
            general = [*(["type", "ne", "nb"] if first else []), *(f"{p}_{n}" for n in d.inputs[1:] for p in ("type", "ne", "nb")), *d.attrs]
            raise ParamError(f"{d.name}: a case has no field {key!r}; legal: {', '.join(general)}{also}")
    return bound(Case(d, tuple(_leaf(d, n, parts[n]) if n in parts else None for n in d.inputs), attrs, note), d)


def _like_default(v: Any, default: Any) -> Any:
    """Numbers as the default's kind, where it has one: case strings print bool as 1 and 0, and whole floats without a point."""
    if isinstance(default, bool) and v in (0, 1):
        return bool(v)
    return float(v) if isinstance(default, float) and isinstance(v, int) else v


def _leaf(d: OpDef, name: str, part: dict[str, Any]) -> Leaf:
    if "ne" not in part or not isinstance(part["ne"], tuple):
        raise ParamError(f"{d.name}: a case needs ne of {name}, as [n0,n1,n2,n3]")
    kind, ne = dtype(part.get("type", "f32")), shape4(part["ne"], f"{d.name}: {name}")
    nb = part.get("nb")
    if nb is not None and (not isinstance(nb, tuple) or len(nb) != 4 or any(not isinstance(b, int) or b < 0 or b % kind.nbytes for b in nb)):
        raise ParamError(f"{d.name}: nb of {name} is {nb}; legal: 4 multiples of {kind.nbytes}")
    return Leaf(kind, ne, None if nb == contiguous_nb(kind, ne) else nb)


def to_json(cases: Iterable[Case]) -> Iterator[str]:
    """Lines of a case file."""
    for c in cases:
        yield json.dumps({"case": str(c), **({"limit": c.limit} if c.limit is not None else {}), **({"perf": True} if c.perf else {})})


def from_json(lines: Iterable[str], path: str) -> Iterator[Case]:
    """The cases of a file's lines; ParamError names file and line."""
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found = parse_case(row["case"])
            yield replace(found, limit=row.get("limit", found.limit), perf=bool(row.get("perf", False)))
        except (ValueError, KeyError, TypeError, RecursionError) as e:  # ParamError and its kin are ValueErrors
            reason = f"no field {e}" if isinstance(e, KeyError) else str(e)
            raise ParamError(f"{path}:{n}: {reason}") from None
