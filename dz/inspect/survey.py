"""A model built on meta, read into an inventory: its sites, its mixers, every parameter and tensor accounted for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from dz.core.headers import TensorInfo
from dz.core.inventory import Inventory, Match, Mixer, Site, WeightFile
from dz.core.registry import Registry
from dz.core.source import Source
from dz.inspect import glue, mixers, quantised, scaling
from dz.inspect.accounting import Books, books
from dz.inspect.groups import Group, group, ids
from dz.inspect.places import function_sites
from dz.inspect.recognise import ask, place_of, views_of, words
from dz.upstream.build import Built
from dz.upstream.weights import coverage

__all__ = ["survey"]


def survey(
    built: Built,
    source: Source,
    headers: Mapping[str, TensorInfo],
    *,
    registry: Registry,
    ignore: Sequence[str] = (),
    files: Sequence[WeightFile] = (),
    raw: Mapping[str, Any] | None = None,
) -> Inventory:
    """The inventory of a model. `headers` are all tensors of the checkpoint, `ignore` globs of tensors that a recipe
    lets stay unloaded, `files` the weight files, `raw` its config.json. No weight is read."""
    accounts = books(built, headers)
    found, missing = mixers.find(built)
    sites = _module_sites(built, registry, accounts, found)
    sites += function_sites(built, registry)
    covered = coverage(built, dict(headers), list(ignore))
    notes = [*built.notes, *scaling.notes(built), *missing, *_unaccounted(accounts, headers, sites)]
    names = (n for n, _ in built.model.named_modules())
    kept = quantised.by_glob(quantised.flags(raw or {}, headers, accounts.placed, names))
    if not headers:
        notes.append("no weight files are here: parameters are the class's own and unchecked")
    config = built.text_config
    return Inventory(
        model=source.name,
        rev8=source.rev8,
        cls=built.cls,
        runs=built.runs,
        code_hash=source.code_hash if built.runs == "repository" else "",
        model_type=str(built.config.model_type),
        dtype=str(built.dtype).removeprefix("torch."),
        config=built.config.to_diff_dict(),
        layers=len(built.layers),
        modalities=("text", "image") if built.vision else ("text",),
        max_positions=int(getattr(config, "max_position_embeddings", 0) or 0),
        sites=tuple(sites),
        files=tuple(files),
        coverage=covered,
        parameters=accounts.parameters,
        bytes=sum(i.bytes for i in headers.values()),
        formats=_formats(headers),
        notes=tuple(notes),
        quantised=kept,
    )


def _formats(headers: Mapping[str, TensorInfo]) -> dict[str, int]:
    out: dict[str, int] = {}
    for info in headers.values():
        out[info.dtype] = out.get(info.dtype, 0) + info.bytes
    return dict(sorted(out.items()))


def _unaccounted(accounts: Books, headers: Mapping[str, TensorInfo], sites: list[Site]) -> list[str]:
    """What does not add up, in words; nothing when all does."""
    out = []
    held, total = sum(s.bytes for s in sites), sum(i.bytes for i in headers.values())
    loose = sum(accounts.loose.values())
    if held + loose != total:
        out.append(f"{total - held - loose:,} checkpoint bytes belong to no site")
    if sum(s.parameters for s in sites) != accounts.parameters:
        out.append(f"{accounts.parameters - sum(s.parameters for s in sites):,} parameters belong to no site")
    return out


def _module_sites(built: Built, registry: Registry, accounts: Books, found: list[mixers.Found]) -> list[Site]:
    model = built.model
    names = dict(model.named_modules())
    mixing = {f.fqn: f for f in found}
    todo = [(n, m) for n, m in names.items() if not isinstance(m, (nn.ModuleList, nn.ModuleDict))]
    taken: set[str] = set()
    drafts: list[tuple[Group, Site]] = []
    for g in group(todo):
        first = g.members[0]
        parent = names.get(first.rpartition(".")[0]) if first else None
        match = ask(registry.ops.values(), views_of(first, g.sample, parent, built.text_config))
        site = _draft(g, match, accounts, mixing)
        if site is None:
            site = _worker(g, names, taken)
        if site is not None:
            taken.update(g.members)
            drafts.append((g, site))
    return _named(_merge(drafts, mixing))


def _draft(g: Group, match: Match | None, accounts: Books, mixing: Mapping[str, mixers.Found]) -> Site | None:
    """The site of a group that an op recognises, that holds parameters or that mixes tokens; else None."""
    own = [accounts.shares[m] for m in g.members if m in accounts.shares]
    layers = tuple(sorted(mixing[m].layer for m in g.members if m in mixing))
    if match is None and not own and not layers:
        return None
    mixer: Mixer | None = mixers.describe(g.sample, match, layers) if layers else None
    base = Site(
        id=g.glob,
        kind="module",
        cls=type(g.sample).__name__,
        where=place_of(type(g.sample)),
        members=tuple(g.members),
        status="unknown",
        shapes=own[0].shapes if own else {},
        parameters=sum(s.parameters for s in own),
        bytes=sum(s.bytes for s in own),
        mixer=mixer,
    )
    if match is None:
        return replace(base, reason=words(glue.forward_work(g.sample)))
    kind: Any = "interface" if match.op in ("attention", "mla") or _dispatched(match) else "module"
    tied = sorted({t for s in own for t in s.tied})
    traits = match.traits | ({"tied": tied} if tied else {})
    return replace(
        base,
        kind=kind,
        status=match.status,
        op=match.op,
        reason=match.reason,
        differs=match.differs,
        binding=match.binding,
        traits=traits,
    )


def _dispatched(match: Match) -> bool:
    return match.op == "experts" and "gated" in match.traits


def _worker(g: Group, names: Mapping[str, nn.Module], taken: set[str]) -> Site | None:
    """The unknown site of a module that holds nothing but computes. A leaf belongs to the site above it; what
    upstream's model classes do (masks, positions, merging of inputs) is theirs and no site."""
    leaf = next(g.sample.children(), None) is None
    if hasattr(g.sample, "get_input_embeddings") or (leaf and _above(g, taken)):
        return None
    found = glue.forward_work(g.sample)
    if not found:
        return None
    return Site(
        id=g.glob,
        kind="module",
        cls=type(g.sample).__name__,
        where=place_of(type(g.sample)),
        members=tuple(g.members),
        status="unknown",
        reason=words(found),
    )


def _above(g: Group, taken: set[str]) -> bool:
    return all(any(".".join(m.split(".")[:k]) in taken for k in range(m.count(".") + 1)) for m in g.members)


def _merge(drafts: list[tuple[Group, Site]], mixing: Mapping[str, mixers.Found]) -> list[Site]:
    """Groups that differ only in attributes that change nothing become one site again."""
    out: dict[Any, Site] = {}
    for _, site in drafts:
        key = repr(
            (site.id, site.cls, site.shapes, site.status, site.op, site.reason, site.differs, site.binding, site.traits)
        )
        held = out.get(key)
        if held is None:
            out[key] = site
            continue
        members = (*held.members, *site.members)
        layers = tuple(sorted(mixing[m].layer for m in members if m in mixing))
        mixer = replace(held.mixer, layers=layers) if held.mixer else None
        out[key] = replace(
            held,
            members=members,
            parameters=held.parameters + site.parameters,
            bytes=held.bytes + site.bytes,
            mixer=mixer,
        )
    return list(out.values())


def _named(sites: list[Site]) -> list[Site]:
    unique = ids([s.id for s in sites], [list(s.members) for s in sites])
    return [replace(s, id=i) for s, i in zip(sites, unique, strict=True)]
