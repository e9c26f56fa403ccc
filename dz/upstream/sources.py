"""Where the installed upstream keeps its modelling code, found without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import blake3

from dz.errors import EnvironmentFailure

PACKAGE = "transformers"
_PATTERNS = ("models/*/modeling_*.py", "integrations/*.py")


@dataclass(frozen=True, slots=True)
class Sources:
    """`files` by module name (`package.models.x.modeling_x`), in order; `version` as installed."""

    root: Path
    version: str
    files: dict[str, Path]

    def digest(self) -> str:
        """16 hex digits over every file's name and content."""
        hasher = blake3.blake3()
        for name, path in self.files.items():
            hasher.update(name.encode())
            hasher.update(path.read_bytes())
        return hasher.hexdigest()[:16]


def installed_sources() -> Sources:
    """The modelling files of the installed upstream. Raises EnvironmentFailure when its sources are not there."""
    spec = util.find_spec(PACKAGE)
    root = Path(spec.origin).parent if spec is not None and spec.origin else None
    found = [p for pattern in _PATTERNS for p in sorted(root.glob(pattern))] if root is not None else []
    if root is None or not found:
        raise EnvironmentFailure(
            f"no modelling sources of {PACKAGE} are installed",
            "neighbours are looked for in its Python files",
            f"pip install {PACKAGE}",
            code="no_sources",
        )
    files = {".".join((PACKAGE, *p.relative_to(root).with_suffix("").parts)): p for p in found}
    return Sources(root, metadata.version(PACKAGE), files)
