"""A recipe: what people want for a family of models, as data. Partial, read from YAML."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dz.core import jsonio
from dz.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """`ops` maps `[SITE:]OP[/PHASE]` to a kernel key, "reference", "upstream", or a list in order of preference;
    `settings` maps setting names to values; `ignore_unexpected` are globs of tensors that may stay unloaded."""

    ops: dict[str, str | list[str]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    ignore_unexpected: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`require` may be broken only by an explicit flag, and that is reported; `prefer` ranks below the user's config.
    `matches` are globs over model_type; an empty list matches every model."""

    name: str
    summary: str = ""
    matches: list[str] = field(default_factory=list)
    require: Wants = field(default_factory=Wants)
    prefer: Wants = field(default_factory=Wants)
    bench: dict[str, Any] = field(default_factory=dict)
    path: str = ""


def load_recipe(path: Path) -> Recipe:
    """The recipe at `path`. Raises UsageError for bad YAML and for keys that no recipe has, naming the nearest."""
    try:
        data = yaml.safe_load(path.read_text("utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is not valid YAML", " ".join(str(e).split()), "mend the file", code="bad_yaml") from e
    if not isinstance(data, dict):
        raise UsageError(
            f"{path} holds no mapping",
            f"its top level is a {type(data).__name__}",
            "see `dz recipes show`",
            code="bad_recipe",
        )
    _refuse_unknown(path, "", data, Recipe.__dataclass_fields__)
    for part in ("require", "prefer"):
        if isinstance(data.get(part), dict):
            _refuse_unknown(path, f"{part}.", data[part], Wants.__dataclass_fields__)
    return jsonio.from_builtins(Recipe, {"name": path.stem, **data, "path": str(path)}, where=str(path))


def _refuse_unknown(path: Path, prefix: str, data: dict, known: Any) -> None:
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), list(known), 1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"the keys are {', '.join(known)}"
            raise UsageError(f"{path} has the unknown key '{prefix}{key}'", hint, "mend the file", code="bad_recipe")
