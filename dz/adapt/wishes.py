"""What people want to run where: --set, a recipe's `require` and `prefer`, in one order."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dz.core.inventory import Site
from dz.core.plan import PHASES
from dz.core.recipe import Recipe
from dz.core.registry import Registry
from dz.errors import UsageError

FIXED = ("upstream", "reference")
Strength = Literal["set", "require", "prefer"]


@dataclass(frozen=True, slots=True)
class Wish:
    """`values` in order of preference: "upstream", "reference", a kernel key or a technique. `site` is a glob over site
    ids and module names, empty for every site of the op; `phase` empty for both. `origin` is shown in reasons."""

    op: str
    values: tuple[str, ...]
    site: str
    phase: str
    strength: Strength
    origin: str

    def fits(self, site: Site, phase: str) -> bool:
        """Whether the wish is about this site in this phase."""
        if self.op != site.op or self.phase not in ("", phase):
            return False
        return not self.site or self.site == site.id or any(fnmatch.fnmatchcase(m, self.site) for m in site.members)


def parse_set(text: str) -> Wish:
    """One `--set [SITE:]OP[/PHASE]=VALUE`. A function site's own id holds a colon: the op is after the last one.

    Raises UsageError."""
    left, sign, value = text.partition("=")
    if not sign or not left or not value:
        raise UsageError(f"--set {text}", "it has the form [SITE:]OP[/PHASE]=KERNEL", "dz kernels ls", code="bad_set")
    return _wish(left, value, "set", f"--set {text}")


def of_recipe(recipe: Recipe) -> list[Wish]:
    """A recipe's wishes, requirements first."""
    out = []
    for strength in ("require", "prefer"):
        for key, value in getattr(recipe, strength).ops.items():
            out.append(_wish(key, value, strength, f"recipe {recipe.name}"))  # type: ignore[arg-type]
    return out


def _wish(left: str, value: str | list[str], strength: Strength, origin: str) -> Wish:
    site, _, rest = left.rpartition(":")
    op, _, phase = rest.partition("/")
    if phase and phase not in PHASES:
        near = difflib.get_close_matches(phase, PHASES, 1)
        why = f"did you mean '{near[0]}'?" if near else f"a phase is {' or '.join(PHASES)}"
        raise UsageError(f"unknown phase '{phase}' in {origin}", why, "mend it", code="bad_set")
    values = (value,) if isinstance(value, str) else tuple(value)
    return Wish(op, values, site, phase, strength, origin)


def check_names(wishes: Iterable[Wish], registry: Registry) -> None:
    """Refuse ops and kernels that nothing is called. Raises UsageError with the nearest name."""
    for w in wishes:
        op = registry.op(w.op)
        here = registry.of(op.name)
        techniques = {k.technique for k in here} | {k.key for k in here}
        lost = {key.partition("/")[2] for key in registry.unavailable if key.startswith(f"{op.name}/")}
        for value in w.values:
            if value in FIXED or value in techniques or value.rpartition("/")[2] in lost:
                continue
            near = difflib.get_close_matches(value, [*techniques, *FIXED], 1)
            why = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(sorted(techniques)) or 'none'}"
            what = f"the op {op.name} has no kernel '{value}' ({w.origin})"
            raise UsageError(what, why, "dz kernels ls", code="unknown_kernel")


def check_sites(wishes: Iterable[Wish], sites: Iterable[Site]) -> None:
    """Refuse a --set that no site of the model fits. Raises UsageError with the nearest site."""
    found = list(sites)
    for w in wishes:
        if w.strength == "set":
            _check_site(w, found)


def _check_site(w: Wish, sites: list[Site]) -> None:
    if any(w.fits(s, phase) for s in sites for phase in PHASES):
        return
    ops = sorted({s.op for s in sites if s.op})
    if not w.site:
        what, why = f"the model has no site of op '{w.op}' ({w.origin})", f"its ops are {', '.join(ops)}"
        raise UsageError(what, why, "dz adapt MODEL --dry-run", code="no_site")
    names = [s.id for s in sites if s.op == w.op] or [s.id for s in sites]
    near = difflib.get_close_matches(w.site, names, 1, cutoff=0.4)
    why = f"did you mean '{near[0]}'?" if near else f"sites of {w.op}: {', '.join(names[:4]) or 'none'}"
    raise UsageError(f"no site fits '{w.site}' ({w.origin})", why, "dz adapt MODEL --dry-run", code="no_site")
