"""The shipped YAML libraries, recipes and checklists: what there is, and which file a name or a path means."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

from dz.errors import UsageError
from dz.shipped import folders

Kind = Literal["recipes", "checklists"]


def entries(kind: Kind) -> dict[str, Path]:
    """Every file of a library by its name (the file's stem), sorted; of two with one name the shipped one counts, then
    the order of `$DZ_PATH`."""
    found: dict[str, Path] = {}
    for folder in folders(kind):
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def find(kind: Kind, name: str) -> Path:
    """The file that `name` means: a path where it looks like one (a separator, or .yaml at its end), else an entry.

    Raises UsageError with the nearest name."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if path.is_file():
            return path
        raise UsageError(f"no file at {name}", "it is written as a path", f"dz {kind} ls", code=f"unknown_{kind[:-1]}")
    known = entries(kind)
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, list(known), 1)
    why = f"did you mean '{near[0]}'?" if near else f"there are {len(known)}: {', '.join(known) or 'none'}"
    raise UsageError(f"no {kind[:-1]} is called '{name}'", why, f"dz {kind} ls", code=f"unknown_{kind[:-1]}")
