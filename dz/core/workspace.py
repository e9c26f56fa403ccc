"""The workspace: where fetch, adapt and accept leave their documents."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dz.core import jsonio
from dz.core.envelope import envelope
from dz.core.source import Source


def root() -> Path:
    """`$DZ_WORKSPACE`, else `./reports`."""
    return Path(os.environ.get("DZ_WORKSPACE") or "reports").absolute()


@dataclass(frozen=True, slots=True)
class Workspace:
    """One model at one revision: `<root>/<org>--<name>@<rev8>/`."""

    folder: Path

    @classmethod
    def of(cls, source: Source, base: Path | None = None) -> Workspace:
        """The workspace of a source under `base` (default: `root()`)."""
        return cls((base or root()) / source.workspace_name)

    @property
    def fetch(self) -> Path:
        """The lock: what was fetched, pinned."""
        return self.folder / "fetch.json"

    @property
    def headers(self) -> Path:
        """The folder of the headers that `dz fetch --metadata` keeps of weight files."""
        return self.folder / "headers"

    @property
    def inventory(self) -> Path:
        """The inventory document."""
        return self.folder / "inventory.json"

    @property
    def plan(self) -> Path:
        """The plan document."""
        return self.folder / "plan.json"

    def report(self, checklist: str) -> Path:
        """The report of a checklist."""
        return self.folder / checklist / "report.json"

    def evidence(self, checklist: str) -> Path:
        """The folder for a checklist's logs and raw numbers."""
        return self.folder / checklist / "evidence"

    def write(self, path: Path, kind: str, data: Any, **kwargs: Any) -> dict[str, Any]:
        """Write `data` in its envelope, atomically; returns the document. `kwargs` go to `envelope`."""
        document = envelope(kind, data, **kwargs)
        jsonio.write(path, document)
        return document
