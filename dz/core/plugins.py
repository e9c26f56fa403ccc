"""The test seam: `--plugin module:function`, run once in the server and once in each engine worker."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dz.errors import UsageError


@dataclass(frozen=True, slots=True)
class PluginContext:
    """What a plugin is told: in which process it runs: "server", "engine" or "reference" (the upstream run)."""

    process: str


def find_plugin(name: str) -> Callable[[PluginContext], Any]:
    """The function that `module:function` names. Raises UsageError when there is none."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as e:
        why = str(e) or "write it as module:function"
        raise UsageError(f"no plugin at '{name}'", why, "put its folder on PYTHONPATH", code="no_plugin") from e
    if not callable(found):
        raise UsageError(
            f"the plugin '{name}' is no function",
            f"it is a {type(found).__name__}",
            "name a function",
            code="no_plugin",
        )
    return found


_ran: set[str] = set()


def run_plugins(names: list[str], process: str) -> None:
    """Run each plugin, in order, unless it has run in this process already."""
    for name in names:
        if name not in _ran:
            _ran.add(name)
            find_plugin(name)(PluginContext(process))
