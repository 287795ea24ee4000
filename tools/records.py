"""Records of tools and the one way to print them: a tool yields rows and says what its columns are.

console and md show the columns that have a heading; csv, json, jsonl and sql hold all of them. What is finished is there when a long run
is stopped: csv, jsonl and sql are written row by row, the others end with the rows there are.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

from pyggml.errors import PyggmlError

FORMATS = ("console", "md", "csv", "json", "jsonl", "sql")
Row = dict[str, Any]


def shown(value: Any) -> str:
    """A value as tables show it: four digits of a float, nothing for None."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
    return str(value)


def number(spec: str, absent: str = "") -> Callable[[Any], str]:
    """How to show numbers: a format, and what stands for None."""
    return lambda value: absent if value is None else format(value, spec)


class Column(NamedTuple):
    """One field: its name, the Python type of its values, the heading that tables give it ("": not shown) and how they show a value."""

    name: str
    kind: type = str
    head: str = ""
    text: Callable[[Any], str] = shown


def write_rows(rows: Iterable[Row], columns: Sequence[Column], output: str, out: TextIO, table: str = "results") -> None:
    """Print rows in one of FORMATS; `table` is the name that sql creates. A row may lack columns. An error or a Ctrl-C while a row is made
    goes on once the rows before it are printed."""
    lines = {"console": _console, "md": _md, "csv": _csv, "json": _json, "jsonl": _jsonl, "sql": _sql}[output]
    finished = _Finished(rows)
    for line in lines(finished, columns, table):
        if finished.n or finished.error is None:
            print(line, file=out, flush=True)
    if finished.error is not None:
        raise finished.error


class _Finished:
    """Rows up to the one whose making failed; `error` says why."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = rows
        self.n = 0
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[Row]:
        try:
            for row in self._rows:
                self.n += 1
                yield row
        except (KeyboardInterrupt, PyggmlError, MemoryError, OSError) as e:
            self.error = e


def _cells(rows: Iterable[Row], columns: Sequence[Column]) -> tuple[list[Column], list[list[str]]]:
    heads = [c for c in columns if c.head]
    return heads, [[c.head for c in heads], *([c.text(r.get(c.name)) for c in heads] for r in rows)]


def _is_number(c: Column) -> bool:
    return c.kind in (int, float)


def _console(rows: Iterable[Row], columns: Sequence[Column], table: str) -> Iterator[str]:
    heads, cells = _cells(rows, columns)
    widths = [max(len(line[k]) for line in cells) for k in range(len(heads))]
    for line in cells:
        yield "  ".join(x.rjust(w) if _is_number(c) else x.ljust(w) for x, w, c in zip(line, widths, heads, strict=True)).rstrip()


def _md(rows: Iterable[Row], columns: Sequence[Column], table: str) -> Iterator[str]:
    heads, cells = _cells(rows, columns)
    escaped = [[x.replace("|", "\\|") for x in line] for line in cells]
    widths = [max(3, *(len(line[k]) for line in escaped)) for k in range(len(heads))]
    for i, line in enumerate(escaped):
        yield "| " + " | ".join(x.rjust(w) if _is_number(c) else x.ljust(w) for x, w, c in zip(line, widths, heads, strict=True)) + " |"
        if i == 0:
            yield "| " + " | ".join("-" * (w - 1) + ":" if _is_number(c) else "-" * w for w, c in zip(widths, heads, strict=True)) + " |"


class _Line:
    """A file that keeps the last line written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text = text


def _csv(rows: Iterable[Row], columns: Sequence[Column], table: str) -> Iterator[str]:
    line = _Line()
    writer = csv.writer(line, lineterminator="")
    writer.writerow([c.name for c in columns])
    yield line.text
    for r in rows:
        writer.writerow([int(v) if isinstance(v, bool) else v for v in (r.get(c.name) for c in columns)])
        yield line.text


def _json(rows: Iterable[Row], columns: Sequence[Column], table: str) -> Iterator[str]:
    before = ""
    for text in _jsonl(rows, columns, table):
        if before:
            yield before + ","
        before = ("[" if not before else " ") + text
    yield (before or "[") + "]"


def _jsonl(rows: Iterable[Row], columns: Sequence[Column], table: str) -> Iterator[str]:
    for r in rows:
        yield json.dumps({c.name: _finite(r.get(c.name)) for c in columns})


def _finite(v: Any) -> Any:
    """JSON has no inf and no NaN: null."""
    return None if isinstance(v, float) and not math.isfinite(v) else v


_SQL_TYPES, _TEXT = {int: "INTEGER", float: "REAL", bool: "INTEGER"}, "TEXT"


def _sql(rows: Iterable[Row], columns: Sequence[Column], table: str) -> Iterator[str]:
    yield f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(f'{_quoted(c)} {_SQL_TYPES.get(c.kind, _TEXT)}' for c in columns)});"
    names = ", ".join(map(_quoted, columns))
    for r in rows:
        yield f"INSERT INTO {table} ({names}) VALUES ({', '.join(_sql_value(r.get(c.name)) for c in columns)});"


def _quoted(c: Column) -> str:
    """A column's name in quotes: case and limit are words of SQL."""
    return f'"{c.name}"'


def _sql_value(v: Any) -> str:
    match v:
        case None:
            return "NULL"
        case bool():
            return str(int(v))
        case float():
            return repr(v) if math.isfinite(v) else "NULL"
        case int():
            return str(v)
    return "'" + str(v).replace("'", "''") + "'"
