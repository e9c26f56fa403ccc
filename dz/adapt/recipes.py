"""Which recipes count for a model: the named one or those that match its type, then `default`."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace

from dz.core import library
from dz.core.recipe import Recipe, load_recipe
from dz.settings import Settings

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Chain:
    """Recipes in order of precedence; `default` is the last. `named` is the one that was asked for, as it was given."""

    recipes: tuple[Recipe, ...]
    named: str = ""

    @property
    def name(self) -> str:
        """The names, for the plan."""
        return " + ".join(r.name for r in self.recipes)

    @property
    def ignore(self) -> tuple[str, ...]:
        """Globs of tensors that may stay unloaded."""
        wants = [w for r in self.recipes for w in (r.require, r.prefer)]
        return tuple(dict.fromkeys(g for w in wants for g in w.ignore_unexpected))


def chain(model_type: str, name: str | None = None) -> Chain:
    """The recipes for a model type. `name` is a recipe's name or path. Raises UsageError for one that is not there."""
    if name is not None:
        own = [load_recipe(library.find("recipes", name))]
    else:
        loaded = [load_recipe(p) for n, p in library.entries("recipes").items() if n != DEFAULT]
        own = [r for r in loaded if any(fnmatch.fnmatchcase(model_type, g) for g in r.matches)]
    base = library.entries("recipes").get(DEFAULT)
    tail = [load_recipe(base)] if base is not None and all(r.name != DEFAULT for r in own) else []
    return Chain((*own, *tail), name or "")


def apply(settings: Settings, recipes: Chain) -> tuple[Settings, tuple[str, ...]]:
    """(settings with the recipes' own, requirements that a flag breaks): preferences replace defaults, requirements all
    but flags."""
    broken = []
    for recipe in recipes.recipes:
        for name, wanted in recipe.require.settings.items():
            held = {v.name: v for v in settings.values()}
            freed = replace(held[name], origin="default") if name in held else None
            forced = Settings(held | ({name: freed} if freed else {})).with_recipe(recipe.name, {name: wanted})
            if name in held and held[name].origin == "flag":
                if held[name].value != forced.get(name):
                    broken.append(f"recipe {recipe.name}: {name}={wanted}, broken by a flag ({held[name].value})")
                continue
            settings = forced
        settings = settings.with_recipe(recipe.name, recipe.prefer.settings)
    return settings, tuple(broken)
