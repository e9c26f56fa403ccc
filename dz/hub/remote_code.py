"""Code that a repository takes from another one: `auto_map` entries of the form `org/name--module.Class`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def foreign_code(folder: Path, paths: Iterable[str]) -> tuple[str, ...]:
    """The other repositories that an `auto_map` of any JSON file at the top names, sorted."""
    found: set[str] = set()
    for path in paths:
        if "/" in path or not path.endswith("config.json") or not (folder / path).is_file():
            continue
        try:
            data = json.loads((folder / path).read_text("utf-8"))
        except (ValueError, RecursionError):
            continue  # the check of the folder reports it with its place
        found.update(text.partition("--")[0] for text in _auto_maps(data) if "--" in text)
    return tuple(sorted(found))


def _auto_maps(value: Any) -> Iterator[str]:
    """Every string under any `auto_map` key, at any depth: sub-configs have their own."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(item) if key == "auto_map" else _auto_maps(item)
    elif isinstance(value, list):
        for item in value:
            yield from _auto_maps(item)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
