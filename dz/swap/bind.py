"""Put a plan's kernels into a live upstream model, and take every one of them out again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dz.core.kernel import Support
from dz.core.plan import Choice, Plan, SitePlan
from dz.core.registry import Registry
from dz.errors import Refused
from dz.swap.places import Place, places
from dz.verify.bound import Bound

UPSTREAM, REFERENCE = "upstream", "reference"


@dataclass(frozen=True, slots=True)
class _Runs:
    """What a phase runs: `key` counts its calls; `supports` is asked once for each kind of arguments."""

    key: str
    run: Callable[..., Any]
    supports: Callable[[dict[str, Any]], Support] | None


class Applied(AbstractContextManager["Applied"]):
    """A plan in force, within the context only. `calls` counts `site|op/technique|phase`; calls that the binding or the
    kernel does not cover run upstream's code and count as `site|upstream|phase`, with the reason in `declined`."""

    def __init__(
        self, model: nn.Module, plan: Plan, registry: Registry, phase: Callable[[], str], tell: Callable[[str], None]
    ) -> None:
        self._tell, self._told = tell, set[tuple[str, str]]()
        self.calls: dict[str, int] = {}
        self.declined: dict[str, str] = {}
        self._model, self._plan, self._registry, self._phase = model, plan, registry, phase
        self._places: list[Place] = []

    def __enter__(self) -> Applied:
        try:
            for site in self._plan.swaps():
                self._swap(site)
        except BaseException:
            self._undo()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo()

    def _undo(self) -> None:
        """Undo in reverse order, then look at every place again."""
        done, self._places = self._places, []
        for place in reversed(done):
            place.undo()
        left = [str(p) for p in done if not p.is_original()]
        if left:
            raise RuntimeError(f"{len(left)} places are still swapped: {', '.join(left[:5])}")

    def _swap(self, site: SitePlan) -> None:
        if site.binding is None:
            raise Refused(
                f"{site.site} has no binding",
                "the plan chooses a kernel for it nevertheless",
                "dz adapt MODEL",
                code="no_binding",
            )
        table = {phase: runs for phase, c in site.phases.items() if (runs := self._runs(site, phase, c)) is not None}
        for place in places(self._model, site.site, site.kind, site.members):
            bound = Bound(place.target, site.binding)
            place.put(self._forward(site.site, place.original, bound, table))
            self._places.append(place)

    def _runs(self, site: SitePlan, phase: str, choice: Choice) -> _Runs | None:
        if choice.impl == UPSTREAM:
            return None
        op = self._registry.op(str(site.op))
        key = f"{site.site}|{choice.impl if choice.impl != REFERENCE else f'{op.name}/reference'}|{phase}"
        self.calls.setdefault(key, 0)
        if choice.impl == REFERENCE:
            return _Runs(key, op.reference, None)
        kernel = self._registry.kernel(choice.impl)
        return _Runs(key, kernel.run, kernel.supports)

    def _forward(
        self, site: str, original: Callable[..., Any], bound: Bound, table: dict[str, _Runs]
    ) -> Callable[..., Any]:
        phase, calls, answers = self._phase, self.calls, {}

        def forward(*args: Any, **kwargs: Any) -> Any:
            now = phase()
            runs = table.get(now)
            if runs is None:
                return original(*args, **kwargs)
            given = bound.arguments(args, kwargs)
            if given is None:
                return self._decline(
                    f"{site}|{UPSTREAM}|{now}", "an argument that is not bound", original, args, kwargs
                )
            if runs.supports is not None:
                kind = (now, *(_kind(v) for v in given.values()))
                answer = answers.get(kind)
                if answer is None:
                    answer = answers[kind] = runs.supports(given)
                if not answer.ok:
                    return self._decline(f"{site}|{UPSTREAM}|{now}", answer.reason, original, args, kwargs)
            calls[runs.key] += 1
            return bound.finish(runs.run(**given))

        return forward

    def _decline(self, key: str, why: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.calls[key] = self.calls.get(key, 0) + 1
        if (key, why) not in self._told:
            self._told.add((key, why))
            site, _, phase = key.split("|")
            self._tell(f"{site} runs upstream's code in {phase}: {why}")
        self.declined[key] = why
        return original(*args, **kwargs)


def _kind(value: Any) -> Any:
    """What of an argument `supports` may look at: of a tensor, all but the numbers of its leading axes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.shape[-1:], value.device, value.is_contiguous(), value.numel() == 0
    return value


def bind(
    model: nn.Module,
    plan: Plan,
    registry: Registry,
    phase: Callable[[], str],
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> Applied:
    """A context in which the model's sites run what the plan chose for `phase()` ("prefill" or "decode"). `tell` hears,
    once each, of calls that upstream's code took over, and why.

    Functions are rebound in the modelling file's globals, which every model of that file in this process shares."""
    return Applied(model, plan, registry, phase, tell)
