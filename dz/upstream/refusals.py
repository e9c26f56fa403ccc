"""Why the code of a repository cannot run here, found by reading it: each reason with its file and line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from dz.core.index import BrokenCheckpoint, Fault
from dz.core.source import Source
from dz.upstream.installed import Installed
from dz.upstream.remote_facts import Code, Use
from dz.upstream.shims.needs import lookups, touches
from dz.upstream.shims.table import SHIMS

_SHOWN = 4  # reasons given in full in a message; the document has all


@dataclass(frozen=True, slots=True)
class Refusal:
    """A place that cannot run: `code` is "import", "syntax", "missing_file" or "interface"."""

    file: str
    line: int
    code: str
    text: str

    @property
    def where(self) -> str:
        """file:line."""
        return f"{self.file}:{self.line}"


def refusals(code: Code, installed: Installed) -> tuple[Refusal, ...]:
    """Everything in the files which a load reaches that fails for certain, in the order of files and lines."""
    found = [*_imports(code, installed), *_files(code), *_writes(code)]
    return tuple(sorted(found, key=lambda r: (r.file, r.line)))


def refuse(source: Source, found: tuple[Refusal, ...]) -> None:
    """Raise a refusal that lists them, if there are any."""
    if not found:
        return
    why = "; ".join(f"{r.where}: {r.text}" for r in found[:_SHOWN])
    if len(found) > _SHOWN:
        why += f"; and {len(found) - _SHOWN} more"
    raise BrokenCheckpoint(
        f"the code of {source.name} cannot run with what is installed: {len(found)} place{'s' * (len(found) > 1)}",
        why,
        "install what it imports, or mend a copy and register it with `dz fetch PATH`",
        code="remote_import" if any(r.code != "interface" for r in found) else "remote_interface",
        faults=[Fault(file=r.where, code=r.code, text=r.text) for r in found],
    )


def _imports(code: Code, installed: Installed) -> Iterator[Refusal]:
    for found in lookups(code, installed):
        entry = found.entry
        if found.blocks and entry.file in code.reached:
            yield Refusal(entry.file, entry.line, "import", f"imports {entry.text}: {found.answer.why}")


def _files(code: Code) -> Iterator[Refusal]:
    for fault in code.faults:
        if fault.file in code.reached:
            yield Refusal(fault.file, fault.line, "syntax", f"is not Python: {fault.text}")
    for file, path in code.missing:
        yield Refusal(file, 1, "missing_file", f"auto_map names {path}, which the repository lacks")
    for entry in code.lost:
        if entry.file in code.reached and not entry.guard and not entry.late:
            text = f"imports {entry.module}, which the repository lacks"
            yield Refusal(entry.file, entry.line, "missing_file", text)


def _writes(code: Code) -> Iterator[Refusal]:
    """Writing into what a shim only lets one read."""
    own = _assigned(code)
    for shim in SHIMS:
        for attribute in shim.attributes:
            if attribute.kind != "property" or attribute.writable or attribute.name in own:
                continue
            for use in touches(code, attribute):
                if use.how == "write":
                    yield _lost(use, shim.releases)


def _lost(use: Use, releases: str) -> Refusal:
    text = f"writes {use.receiver}.{use.name}, which the cache objects of transformers {releases} had: it would be lost"
    return Refusal(use.file, use.line, "interface", text)


def _assigned(code: Code) -> set[str]:
    """Attributes that classes of the repository give themselves."""
    out: set[str] = set()
    for tree in code.trees.values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                out.add(node.attr)
    return out
