"""The static audit of a repository's code: what it imports and touches, what it reaches, what stands in, what changed.

Standard library alone: nothing of the repository runs, and nothing it imports is imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dz.core.source import Source
from dz.hub.remote_code import Reference, changed_code
from dz.inspect.audit_calls import calls
from dz.upstream.installed import Installed, here
from dz.upstream.refusals import Refusal, refusals
from dz.upstream.remote_facts import Code, read_code
from dz.upstream.shims.needs import Lookup, lookups, needed
from dz.upstream.shims.shim import Need

Weight = Literal["refuses", "stands in", "may fail", "note"]
_ORDER = {"refuses": 0, "stands in": 1, "may fail": 2, "note": 3}
_TYPES = ("transformers.models.auto.auto_mappings", "transformers.models.auto.configuration_auto")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the audit. `kind` is "import", "syntax", "missing_file", "interface", "call" or "changed"; `weight`
    says what follows; `loaded` whether a load of the model runs the file."""

    file: str
    line: int
    kind: str
    weight: Weight
    text: str
    loaded: bool

    def words(self) -> str:
        """The finding as one line."""
        aside = "" if self.loaded or self.kind == "changed" else " (no load runs this file)"
        return f"{self.file}:{self.line}: {self.weight}: {self.text}{aside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the audit of a source found. `vendor` says, for a repository without a class for upstream, what can still be
    done with it; `compared` is the lock that the code was compared with (empty: none). `unchecked` are imports that
    only running could settle."""

    code_hash: str
    files: tuple[str, ...]
    loaded: tuple[str, ...]
    classes: tuple[Reference, ...]
    findings: tuple[Finding, ...]
    shims: tuple[Need, ...]
    refusals: tuple[Refusal, ...]
    unchecked: tuple[str, ...]
    compared: str
    vendor: str

    def summary(self) -> str:
        """The audit in one line."""
        n = Counter(f.weight for f in self.findings)
        reached = Counter(f.text.partition(":")[0] for f in self.findings if f.kind == "call")
        parts = [f"{len(self.files)} Python files, {len(self.loaded)} run by a load"]
        parts += [f"{n['refuses']} places cannot run"] if n["refuses"] else []
        parts += [f"{len(self.shims)} shims stand in at {n['stands in']} places"] if self.shims else []
        if reached:
            listed = ", ".join(f"{k} {v}" for k, v in sorted(reached.items()))
            parts.append(f"{sum(reached.values())} calls reach outside ({listed})")
        changed = sum(f.kind == "changed" for f in self.findings)
        parts += [f"{changed} files changed since {self.compared}"] if changed else []
        return "code audit: " + "; ".join(parts)

    def data(self) -> dict[str, Any]:
        """The audit as plain JSON values."""
        return {
            "code_hash": self.code_hash,
            "files": list(self.files),
            "loaded": list(self.loaded),
            "classes": [_class(r) for r in self.classes],
            "findings": [
                {"file": f.file, "line": f.line, "kind": f.kind, "weight": f.weight, "text": f.text, "loaded": f.loaded}
                for f in self.findings
            ],
            "shims": [n.data() for n in self.shims],
            "unchecked": list(self.unchecked),
            "compared": self.compared,
            "vendor": self.vendor,
        }


def audit(source: Source, *, model_type: str = "", workspace: Path | None = None) -> Audit | None:
    """The audit of a source's code; None when it has no Python file and names none. `model_type` is config.json's."""
    code = read_code(source)
    if not code.trees and not code.faults and not code.entries:
        return None
    installed = here()
    found, needs, refused = lookups(code, installed), needed(code, installed), refusals(code, installed)
    changed, compared = changed_code(source, workspace)
    findings = [
        *(Finding(r.file, r.line, r.code, "refuses", r.text, True) for r in refused),
        *_imports(code, found, {r.where for r in refused}),
        *_stand_ins(code, needs),
        *(Finding(r.file, 1, "import", "refuses", f"{r.auto} is code of {r.repository}", True) for r in _foreign(code)),
        *_calls(code),
        *(
            Finding(path, 1, "changed", "note", f"{how} since {compared}", path in code.reached)
            for path, how in changed
        ),
    ]
    findings.sort(key=lambda f: (not f.loaded, _ORDER[f.weight], f.file, f.line))
    return Audit(
        code_hash=source.code_hash,
        files=tuple(sorted({*code.trees, *(f.file for f in code.faults)})),
        loaded=tuple(sorted(code.reached)),
        classes=code.entries,
        findings=tuple(dict.fromkeys(findings)),
        shims=needs,
        refusals=refused,
        unchecked=_unchecked(code, found),
        compared=compared,
        vendor=_vendor(code, model_type, installed),
    )


def _foreign(code: Code) -> Iterable[Reference]:
    return [r for r in code.entries if r.repository]


def _imports(code: Code, found: Iterable[Lookup], refused: set[str]) -> Iterable[Finding]:
    """Imports that fail somewhere, but not for certain: under a condition, late, or in files that no load runs."""
    for k in found:
        e = k.entry
        if k.answer.state != "missing" or k.shim or e.where in refused or e.guard in ("try", "typing"):
            continue
        when = "under a condition" if e.guard else "when called" if e.late else "when imported"
        yield Finding(
            e.file, e.line, "import", "may fail", f"imports {e.text} {when}: {k.answer.why}", e.file in code.reached
        )


def _stand_ins(code: Code, needs: Iterable[Need]) -> Iterable[Finding]:
    for need in needs:
        for place in need.places:
            file, line, text = place.split(":", 2)
            said = f"{text.strip()}: {need.shim.stands_for} ({need.shim.releases}); shim {need.shim.name}"
            kind = "import" if need.shim.symbols else "interface"
            yield Finding(file, int(line), kind, "stands in", said, file in code.reached)


def _calls(code: Code) -> Iterable[Finding]:
    for path, tree in code.trees.items():
        for c in calls(path, tree):
            yield Finding(c.file, c.line, "call", "note", f"{c.kind}: {c.text}", path in code.reached)


def _unchecked(code: Code, found: Iterable[Lookup]) -> tuple[str, ...]:
    open_ = [f"{k.entry.where}: {k.entry.text}" for k in found if k.answer.state == "unchecked"]
    return tuple(p for p in dict.fromkeys(open_) if p.partition(":")[0] in code.reached)


def _vendor(code: Code, model_type: str, installed: Installed) -> str:
    """Empty, or what a repository with code and no class for upstream is good for."""
    if any(r.auto.startswith("AutoModel") for r in code.entries) or _known(model_type, installed):
        return ""
    scripts = ", ".join(sorted({*code.trees, *(f.file for f in code.faults)})[:4])
    return (
        f"it brings the vendor's own code ({scripts}) and no class that transformers can load, and the installed "
        f"transformers knows no {model_type!r}: it cannot be served. From headers and config.json alone there are the "
        "inventory (`dz adapt MODEL --diff`), and what it needs on which devices "
        "(`dz adapt MODEL --dry-run --device NAME`)"
    )


def _known(model_type: str, installed: Installed) -> bool:
    return any(installed.mentions(module, model_type) for module in _TYPES) if model_type else False


def _class(r: Reference) -> dict[str, str]:
    return {"file": r.file, "auto": r.auto, "repository": r.repository, "class": f"{r.module}.{r.cls}"}
