"""A large model read through its class at a fraction of its size: each kind of layer built, few experts, the rest
counted from headers.

The class is built from the repository's own code and a smaller configuration: as many layers as it takes to see each
distinct one (distinct by the names, shapes and formats of its tensors), and as many experts as routing needs. What each
tensor belongs to is read off that model and carried over to all tensors alike."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from dz.core.headers import TensorInfo
from dz.core.inventory import Inventory, Site
from dz.core.registry import Registry
from dz.core.source import Source
from dz.inspect.cut import Cut, plan_cut, smaller
from dz.inspect.ledger import Kind, Ledger, Split, Structure, total
from dz.inspect.survey import survey
from dz.upstream.build import Built, build_meta
from dz.upstream.targets import targets

OUTSIDE = "not held by the class"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """`inventory` is that of the small model, its sites' members counted as in the whole one by `counts` (site id ->
    members); `ledger` holds every tensor of the checkpoint under the op of its site. `built` layers of `layers` and
    `experts` of each were made."""

    inventory: Inventory
    counts: dict[str, int]
    ledger: Ledger
    cut: Cut


def read(
    source: Source,
    raw: Mapping[str, Any],
    complete: Mapping[str, Any],
    headers: Mapping[str, TensorInfo],
    structure: Structure,
    *,
    trust: bool,
    registry: Registry,
) -> Reduced:
    """The reduced reading of a source. Raises Refused when its class cannot be built."""
    cut = plan_cut(structure, complete)
    with _small(source, smaller(raw, complete, cut)) as small:
        built = build_meta(small, trust=trust)
        infos, kind_of = _kept(structure, cut)
        inventory = survey(built, small, infos, registry=registry)
        sites = {m: s for s in inventory.sites if s.kind != "function" for m in s.members}
        placed = {name: sites.get(target.rpartition(".")[0]) for name, target in targets(built, infos).items()}
    named = _named(structure, cut, kind_of, placed)
    book = total(named, headers, layers=cut.layers)
    inventory = replace(inventory, model=source.name, rev8=source.rev8, code_hash=source.code_hash)
    return Reduced(inventory=inventory, counts=_counts(built, inventory, cut), ledger=book, cut=cut)


@contextmanager
def _small(source: Source, config: Mapping[str, Any]) -> Iterator[Source]:
    """The source's code beside another configuration, in a folder that goes away again."""
    with tempfile.TemporaryDirectory(prefix="dz-reduced-") as folder:
        for f in source.files:
            if f.path.endswith(".py"):
                target = Path(folder) / f.path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.path / f.path, target)
        (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
        yield replace(source, folder=folder)


def _kept(structure: Structure, cut: Cut) -> tuple[dict[str, TensorInfo], dict[str, tuple[Kind, int]]]:
    """(tensors of the small model under logical names, the kind and layer signature of each)."""
    infos: dict[str, TensorInfo] = {}
    kind_of: dict[str, tuple[Kind, int]] = {}
    for k in structure.kinds:
        shape = cut.shape(k, structure)
        for at in k.at:
            if not cut.keeps(k, at, structure):
                continue
            name = k.name(at)
            size = prod(shape)
            infos[name] = TensorInfo(name, k.format if k.plain else "BF16", shape, 0, size * 2)
            kind_of[name] = (k, cut.signature(k, at, structure))
    return infos, kind_of


def _named(
    structure: Structure, cut: Cut, kind_of: Mapping[str, tuple[Kind, int]], placed: Mapping[str, Site | None]
) -> list[tuple[Kind, str, Split]]:
    """Every kind with the op of its site; a kind whose layers differ in it is divided."""
    ops: dict[tuple[int, int], str] = {}
    for name, (k, signature) in kind_of.items():
        ops.setdefault((id(k), signature), _op(placed.get(name)))
    out: list[tuple[Kind, str, Split]] = []
    for k in structure.kinds:
        split = structure.split(k)
        groups: dict[str, list[tuple[int, ...]]] = {}
        for at in k.at:
            groups.setdefault(ops.get((id(k), cut.signature(k, at, structure)), OUTSIDE), []).append(at)
        routed = split == "experts"  # one expert of a list is made of linear sites; together they are the experts
        for part, op in k.divided(groups):
            out.append((part, "experts" if routed and op == "linear" else op, split))
    return out


def _op(site: Site | None) -> str:
    if site is None:
        return OUTSIDE
    return site.op if site.status == "known" and site.op else f"{site.status}: {site.cls}"


def _counts(built: Built, inventory: Inventory, cut: Cut) -> dict[str, int]:
    """How many members each site has in the whole model."""
    names = {id(m): n for n, m in built.model.named_modules()}
    layers = {names[id(layer)]: cut.times(i) for i, layer in enumerate(built.layers)}
    lists = {n: len(m) for n, m in built.model.named_modules() if type(m).__name__ == "ModuleList"}
    out = {}
    for s in inventory.sites:
        out[s.id] = round(sum(_times(m, layers, lists, cut) for m in s.members))
    return out


def _times(member: str, layers: Mapping[str, float], lists: Mapping[str, int], cut: Cut) -> float:
    parts = member.split(".")
    times = 1.0
    for i in range(1, len(parts) + 1):
        prefix = ".".join(parts[:i])
        times *= layers.get(prefix, 1.0)
        inside = prefix.rpartition(".")[0]
        if parts[i - 1].isdigit() and prefix not in layers and lists.get(inside) == cut.experts and cut.experts_in_all:
            times *= cut.experts_in_all / cut.experts
    return times
