"""Names of places: the live object of a site, its place in the sources, and a name for an op that would take it."""

from __future__ import annotations

import re
import sys
from typing import Any

from dz.core.inventory import Site
from dz.upstream.build import Built

_NOISE = ("torch", "fn", "func", "forward", "naive", "eager")
_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")


def target(built: Built, site: Site) -> Any:
    """The live module of a site's first member, or its function."""
    if site.kind == "function":
        home, _, name = site.id.partition(":")
        return vars(sys.modules[home])[name]
    return built.model.get_submodule(site.members[0])


def place(target: Any) -> str:
    """`package.module:Name` of a module's class or of a function."""
    held = target if hasattr(target, "__name__") and hasattr(target, "__code__") else type(target)
    return f"{held.__module__}:{held.__qualname__}"


def op_name(site: Site, built: Built) -> str:
    """A name for an op that would take this site: its class or function without the model's own name."""
    words = [w.lower() for w in _WORDS.findall(site.cls)]
    for prefix in _prefixes(site, built):
        if words[: len(prefix)] == prefix and len(words) > len(prefix):
            words = words[len(prefix) :]
            break
    else:
        model = {w for p in _prefixes(site, built) for w in p}
        kept = [w for w in words if w not in model]
        words = kept or words
    words = [w for w in words if w not in _NOISE] or words
    return "_".join(words).lstrip("0123456789_") or "new_op"


def _prefixes(site: Site, built: Built) -> list[list[str]]:
    """What the classes of the model, and those of the site's own file, begin with; longest first."""
    module = site.where.partition(":")[0]
    names = [n for n in vars(sys.modules.get(module, sys)) if n.endswith("PreTrainedModel") and n != "PreTrainedModel"]
    found = [_WORDS.findall(n.removesuffix("PreTrainedModel")) for n in names]
    found.append(_WORDS.findall(re.split(r"For[A-Z]|LMHead|Model$", built.cls)[0]))
    found.append(_WORDS.findall(module.rpartition(".")[2].removeprefix("modeling_").replace("_", " ").title()))
    lowered = [[w.lower() for w in words] for words in found if words]
    return sorted(lowered, key=len, reverse=True)
