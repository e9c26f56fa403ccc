"""Plain text tables: aligned columns, two spaces apart, the last one wrapped on a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TextIO
from unicodedata import combining, east_asian_width

GAP = "  "
NARROWEST = 24  # characters that the last column keeps however narrow the terminal is
CODES = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}
STATUS = {
    "PASS": "green", "FAIL": "red", "SKIP": "yellow", "ERROR": "red", "ok": "green", "warn": "yellow", "fail": "red",
    "known": "green", "variant": "yellow", "unknown": "red",
}  # fmt: skip


def paint(text: str, color: str) -> str:
    """`text` in a colour of CODES, for a terminal."""
    return f"\x1b[{CODES[color]}m{text}\x1b[0m"


def width(stream: TextIO) -> int | None:
    """The columns of the terminal behind `stream`; None for a file or a pipe, where nothing is wrapped."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def cells(text: str) -> int:
    """How many terminal cells `text` takes."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def render(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, width: int | None, color: bool) -> str:
    """The table as text. None shows as "-", True and False as yes and no; every row must fit `columns`."""
    raw = [tuple(row) for row in rows]
    for row in raw:
        if len(row) != len(columns):
            raise ValueError(f"a row of {len(row)} cells in a table of {len(columns)} columns: {row}")
    right = [bool(raw) and all(_number(row[i]) for row in raw) for i in range(len(columns))]
    lines = [tuple(columns), *(tuple(_text(c) for c in row) for row in raw)]
    sizes = [max(cells(line[i]) for line in lines) for i in range(len(columns))]
    out: list[str] = []
    for n, line in enumerate(lines):
        head = [_pad(cell, sizes[i], right[i], color, header=n == 0) for i, cell in enumerate(line[:-1])]
        indent = sum(sizes[:-1]) + len(GAP) * len(head)
        last = [line[-1]]
        if width is not None and not right[-1]:
            last = textwrap.wrap(line[-1], max(width - indent, NARROWEST), break_on_hyphens=False) or [""]
        first = _pad(last[0], sizes[-1] if right[-1] else 0, right[-1], color, header=n == 0)
        out.append(GAP.join([*head, first]).rstrip())
        out += [" " * indent + more for more in last[1:]]
    return "\n".join(out) + "\n"


def _number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())


def _pad(text: str, size: int, right: bool, color: bool, *, header: bool) -> str:
    blanks = " " * (size - cells(text))
    name = "bold" if header else STATUS.get(text)
    shown = paint(text, name) if color and name and text else text
    return blanks + shown if right else shown + blanks
