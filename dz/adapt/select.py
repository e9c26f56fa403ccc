"""One site, one phase: which implementation, why, and what was turned down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dz.adapt.wishes import Wish
from dz.core.device import Device
from dz.core.inventory import Site
from dz.core.kernel import Kernel
from dz.core.plan import Choice, Rejected
from dz.core.registry import Registry
from dz.errors import Refused
from dz.verify.sites import Verdict

# (site, kernel or None for the reference, phase) -> verdict; None: cannot be run here
Prove = Callable[[Site, Kernel | None, str], Verdict | None]


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses for the sites of one model on one device. `wishes` come in order of rank."""

    registry: Registry
    device: Device
    dtype: str
    wishes: Sequence[Wish]
    prove: Prove

    def choose(self, site: Site, phase: str) -> Choice:
        """The choice for a site in a phase. Raises Refused when an explicit or required wish cannot be met, and when
        several kernels fit and none is wanted."""
        tier = None if site.mixer is None else "gather" if "gather" in site.mixer.tiers else "isolate"
        mine = [w for w in self.wishes if w.fits(site, phase)]
        why = self._only_upstream(site, phase)
        if not why:
            return replace(_Case(self, site, phase, {}).choose(mine), tier=tier)
        for w in mine:  # a wish for a whole op skips what cannot take it; one that names the site does not
            if w.strength == "set" and w.site and w.values != ("upstream",):
                raise Refused(f"{w.origin} cannot be met at {site.id} in {phase}", why, "leave it out", code="unmet")
        return Choice(impl="upstream", reason=why, tier=tier)

    def _only_upstream(self, site: Site, phase: str) -> str:
        """Why nothing but upstream's code can run, or ""."""
        if site.mixer is not None:
            return site.mixer.reason
        if site.status == "unknown":
            return f"unknown: {site.reason}"
        if site.status == "variant":
            return f"variant: {'; '.join(site.differs)}"
        if phase not in self.registry.op(str(site.op)).phases:
            return f"{site.op} does not run in {phase}"
        return "" if site.binding is not None else f"{site.reason}; nothing can be bound to it"


@dataclass(frozen=True, slots=True)
class _Case:
    """One site in one phase. `rejected` collects candidates with the reason against each."""

    by: Chooser
    site: Site
    phase: str
    rejected: dict[str, str]

    def choose(self, mine: Sequence[Wish]) -> Choice:
        for w in mine:
            for value in w.values:
                choice = self._want(w, value)
                if choice is not None:
                    return replace(choice, rejected=self._listed())
            if w.strength in ("set", "require"):
                tried = "; ".join(f"{k}: {v}" for k, v in self.rejected.items()) or "no such kernel"
                next = f"--set {self.site.op}=upstream" if w.strength == "require" else "leave it out"
                what = f"{w.origin} cannot be met at {self.site.id} in {self.phase}"
                raise Refused(what, tried, next, code="unmet")
        return self._only_eligible()

    def _want(self, w: Wish, value: str) -> Choice | None:
        """The choice that a wished value leads to, or None with the reason in `rejected`."""
        origin = f"required by {w.origin}" if w.strength == "require" else w.origin
        if value == "upstream":
            return Choice(impl="upstream", reason=origin)
        if value == "reference":
            return self._proved(None, origin)
        found = self._rest(value).select(str(self.site.op), self.by.device, self.by.dtype, self.phase, prefer=[value])
        if found.kernel is None:
            self.rejected.update({r.impl: r.reason for r in found.rejected})
            return None
        return self._proved(found.kernel, origin)

    def _only_eligible(self) -> Choice:
        """No wish led anywhere: the only eligible kernel, if it proves itself; else upstream's code."""
        op = str(self.site.op)
        found = self._rest(None).select(op, self.by.device, self.by.dtype, self.phase)
        for r in found.rejected:
            self.rejected.setdefault(r.impl, r.reason)
        choice = None if found.kernel is None else self._proved(found.kernel, found.reason)
        why = "no kernel fits and proved itself" if self.by.registry.of(op) else "no kernel for this op"
        return replace(choice or Choice(impl="upstream", reason=why), rejected=self._listed())

    def _proved(self, kernel: Kernel | None, origin: str) -> Choice | None:
        impl = "reference" if kernel is None else kernel.key
        verdict = self.by.prove(self.site, kernel, self.phase)
        if verdict is None:
            return Choice(impl=impl, reason=f"{origin}; not verified: it was not run")
        if not verdict.ok:
            self.rejected[impl] = verdict.reason
            return None
        return Choice(impl=impl, reason=origin, verified=verdict.verified)

    def _rest(self, keep: str | None) -> Registry:
        """The registry with only the kernels of the op that may still be chosen."""
        op, full = str(self.site.op), self.by.registry
        left = {k: v for k, v in full.kernels.items() if v.op == op and k not in self.rejected}
        lost = {k: v for k, v in full.unavailable.items() if k.startswith(f"{op}/") and k not in self.rejected}
        if keep is not None:
            left = {k: v for k, v in left.items() if keep in (k, v.technique)}
            lost = {k: v for k, v in lost.items() if keep in (k, k.rpartition("/")[2])}
        return Registry(full.ops, left, lost)

    def _listed(self) -> tuple[Rejected, ...]:
        return tuple(Rejected(impl=k, reason=v) for k, v in self.rejected.items())
