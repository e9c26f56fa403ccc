"""The function sites of a model."""

from __future__ import annotations

from dataclasses import replace

from dz.core.inventory import Match, Site, SiteView
from dz.core.registry import Registry
from dz.inspect import functions, glue
from dz.inspect.functions import Reached
from dz.inspect.recognise import ask, place_of, source_of, words
from dz.upstream.build import Built


def function_sites(built: Built, registry: Registry) -> list[Site]:
    """The functions that an op recognises, and those of the modelling files that compute and that no op recognises.

    Functions that only upstream's model classes reach (losses, masks) and helpers of a recognised function are none."""
    frame = {n for n, m in built.model.named_modules() if hasattr(m, "get_input_embeddings")}
    found = [f for f in functions.reached(built.model) if not frame.issuperset(f.members)]
    matches = {f.id: m for f in found if (m := _ask(f, built, registry)) is not None}
    inner = _called_by(found, set(matches))
    helpers = _called_by(found, {f.id for f in found})
    eager = {f.id for f in found if "attn_weights" in (text := source_of(f.function)) and "softmax" in text}
    out = []
    for f in found:
        match = matches.get(f.id)
        foreign = f.function.__module__ != f.home.__name__
        if f.id in inner or (match is None and (foreign or f.id in helpers | eager)):
            continue
        computes = glue.work(f.function) if match is None else []
        if match is not None or computes:
            out.append(_site(f, match, computes))
    return out


def _ask(f: Reached, built: Built, registry: Registry) -> Match | None:
    text = source_of(f.function)
    view = SiteView(kind="function", fqn=f.id, target=f.function, source=text, config=built.text_config, parent=f.home)
    return ask(registry.ops.values(), [view])


def _site(f: Reached, match: Match | None, computes: list[str]) -> Site:
    site = Site(
        id=f.id,
        kind="function",
        cls=f.name,
        where=place_of(f.function),
        members=tuple(f.members),
        status="unknown",
        reason=words(computes),
    )
    if match is None:
        return site
    return replace(
        site,
        status=match.status,
        op=match.op,
        reason=match.reason,
        differs=match.differs,
        binding=match.binding,
        traits=match.traits,
    )


def _called_by(found: list[Reached], callers: set[str]) -> set[str]:
    """The functions that those of `callers` name: they are parts of them."""
    by_name = {(f.home.__name__, f.name): f for f in found}
    out: set[str] = set()
    for f in found:
        if f.id in callers:
            for name in functions.names_in(f.function) - {f.name}:
                other = by_name.get((f.function.__module__, name))
                if other is not None:
                    out.add(other.id)
    return out
