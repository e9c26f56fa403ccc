"""How `dz adapt --diff` shows a difference: one row a site, then what is to be known about each that is not known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dz.cli import output
from dz.core.envelope import envelope

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dz.core.difference import Difference, Neighbour, SiteDifference

COLUMNS = ("SITE", "STATUS", "OP", "N", "PARAMETERS", "WHAT")
_LINES = 10  # statements shown for each direction; --json has them all
_TENSORS = 8


def show(model: str, found: Difference) -> None:
    """Print a difference in the form that was asked for."""
    out = output.get()
    counts = {word: len(found.of(word)) for word in ("known", "variant", "unknown")}
    new = [s.site for s in found.sites if s.status != "known"]
    reasons = [f"{s.status}: {s.site}: {'; '.join(s.differs) or s.reason}" for s in found.sites if s.site in new]
    data = {"counts": counts, "known_share": round(found.known_share, 6)}
    status = "different" if new else "ok"
    document = envelope("diff", found, inputs={"model": found.model}, status=status, reasons=reasons)
    document["data"] |= data
    out.document(document)
    out.table(COLUMNS, [_row(s) for s in found.sites])
    for s in found.sites:
        for line in _details(s):
            out.line(line)
    for key in found.unread:
        out.note(f"config.json: nothing reads `{key}`")
    share = f"{100 * found.known_share:.1f} % of {found.parameters:,} parameters are in known sites"
    out.result(len(new), ", ".join(f"{n} {word}" for word, n in counts.items()) + f"; {share}")
    out.hint(next((s.begin for s in found.of("unknown")), f"dz adapt {model}"))


def _row(s: SiteDifference) -> tuple[str, str, str, int, str, str]:
    what = "; ".join(s.differs) if s.status == "variant" else s.reason
    return s.site, s.status, s.op or "-", s.count, f"{s.parameters:,}", what


def _details(s: SiteDifference) -> Iterator[str]:
    if s.status == "known":
        return
    yield ""
    yield f"{s.status}: {s.site} ({s.cls}, {s.where})" + (f" is nearly {s.op}" if s.status == "variant" else "")
    for words in s.differs:
        yield f"  differs    {words}"
    if s.form is not None:
        yield f"  known form {_neighbour(s.form)}"
        yield from _statements("+", s)
        yield from _statements("-", s)
        if not s.added and not s.absent:
            yield "             the same statements: it differs in what they work on"
    for n in s.neighbours:
        yield f"  neighbour  {_neighbour(n)}"
    if s.config:
        yield "  config     " + ", ".join(f"{k}={_short(v)}" for k, v in s.config.items())
    if s.shapes:
        shown = [f"{k} {list(v)}" for k, v in list(s.shapes.items())[:_TENSORS]]
        more = f" and {len(s.shapes) - _TENSORS} more" if len(s.shapes) > _TENSORS else ""
        yield "  tensors    " + ", ".join(shown) + more
    if s.status == "unknown":
        origin = "" if s.io.traced else " (as declared)"
        yield f"  inputs     {', '.join(s.io.inputs) or 'none'}{origin}"
        yield f"  outputs    {', '.join(s.io.outputs) or 'none'}{origin}"
        yield f"  state      {s.state}"
        yield f"  write      {s.write}: {s.begin}"


def _statements(sign: str, s: SiteDifference) -> Iterator[str]:
    lines = s.added if sign == "+" else s.absent
    for line in lines[:_LINES]:
        yield f"  {sign} {line.file.rpartition('.')[2]}:{line.line}: {line.text}"
    if len(lines) > _LINES:
        yield f"  {sign} and {len(lines) - _LINES} more statements"


def _neighbour(n: Neighbour) -> str:
    copies = f", as {n.copies} more place{'s' * (n.copies > 1)}" if n.copies else ""
    return f"{n.name}, line {n.line}: {100 * n.likeness:.0f} % alike{copies}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
