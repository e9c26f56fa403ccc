"""Make a plan: build on meta, survey, choose and prove for each site and phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dz import backends
from dz.adapt import digests
from dz.adapt.proof import Prover
from dz.adapt.recipes import Chain, apply, chain
from dz.adapt.select import Chooser, Prove
from dz.adapt.wishes import Wish, check_names, check_sites, of_recipe, parse_set
from dz.core.device import Device
from dz.core.headers import TensorInfo
from dz.core.index import is_weight
from dz.core.inventory import Inventory, Site, WeightFile
from dz.core.plan import PHASES, Choice, Plan, SitePlan
from dz.core.protocols import Progress, Silent
from dz.core.registry import Registry
from dz.core.source import Source
from dz.inspect.survey import survey
from dz.settings import Settings
from dz.upstream.build import Built, build_meta, dtype_of
from dz.upstream.config import raw_config
from dz.upstream.targets import targets
from dz.weights.checkpoint import open_checkpoint
from dz.weights.table import read_table


@dataclass(frozen=True, slots=True)
class Basis:
    """What a plan is made from before the model is built, and the inputs that follow from it."""

    source: Source
    headers: dict[str, TensorInfo]
    files: tuple[WeightFile, ...]
    device: Device
    here: bool
    dtype: str
    chain: Chain
    sets: tuple[str, ...]
    registry: Registry
    inputs: dict[str, str]
    broken: tuple[str, ...] = ()


def basis(
    source: Source,
    *,
    trust: bool,
    device: str,
    settings: Settings,
    recipe: str | None = None,
    sets: Sequence[str] = (),
    verify: bool = True,
    registry: Registry | None = None,
) -> Basis:
    """The basis for a source on a device ("auto", "cpu", "cuda:sm90", ...). Raises DzError for what is not there."""
    registry = registry or Registry.discover()
    headers, files = weights_of(source)
    found = backends.detect(device)
    here = backends.here(found)
    raw = raw_config(source)
    recipes = chain(str(raw.get("model_type")), recipe)
    settings, broken = apply(settings, recipes)
    dtype = str(settings.get("dtype"))
    values = digests.inputs(
        source,
        headers,
        trust=trust and bool(raw.get("auto_map")),
        device=found.spec,
        here=here,
        dtype=dtype,
        chain=recipes,
        sets=sets,
        verify=verify,
        registry=registry,
    )
    return Basis(source, headers, files, found, here, dtype, recipes, tuple(sets), registry, values, broken)


def make_plan(
    source: Source,
    *,
    trust: bool,
    device: str,
    settings: Settings,
    recipe: str | None = None,
    sets: Sequence[str] = (),
    verify: bool = True,
    progress: Progress | None = None,
    registry: Registry | None = None,
) -> tuple[Inventory, Plan]:
    """The inventory and the plan of a source; nothing is written. `verify` off: kernels are chosen, not proved; so they
    are for a source of headers alone.

    Raises Refused when a wish cannot be met or dz would have to guess, UsageError for unknown names in wishes."""
    verify = verify and not source.headers
    base = basis(
        source,
        trust=trust,
        device=device,
        settings=settings,
        recipe=recipe,
        sets=sets,
        verify=verify,
        registry=registry,
    )
    return build(base, trust=trust, verify=verify, progress=progress or Silent())


def build(base: Basis, *, trust: bool, verify: bool, progress: Progress) -> tuple[Inventory, Plan]:
    """The inventory and the plan on a basis."""
    wanted = [parse_set(s) for s in base.sets]
    recipes = [w for r in base.chain.recipes for w in of_recipe(r)]
    check_names([*wanted, *recipes], base.registry)
    progress.start("inventory")
    built = build_meta(base.source, trust=trust, dtype=None if base.dtype == "auto" else dtype_of(base.dtype))
    inventory = survey(
        built,
        base.source,
        base.headers,
        registry=base.registry,
        ignore=base.chain.ignore,
        files=base.files,
        raw=raw_config(base.source),
    )
    progress.finish(f"{len(inventory.sites)} sites, {inventory.parameters:,} parameters")
    check_sites(wanted, inventory.sites)
    wishes = _ranked(wanted, recipes)
    can_run = verify and base.here
    progress.start("verification", unit="sites")
    prove = _prover(base, built, progress) if can_run else _unproved
    chooser = Chooser(base.registry, base.device, _dtype(built), wishes, prove)
    sites = _one_tier(tuple(_site(s, chooser) for s in inventory.sites), inventory)
    progress.finish(_proved_words(sites, can_run))
    values = base.inputs | {"inventory": digests.of_inventory(inventory)}
    plan = Plan(
        model=base.source.name,
        rev8=base.source.rev8,
        device=base.device.spec,
        dtype=_dtype(built),
        sites=sites,
        recipe=base.chain.name,
        inputs=values,
        hash=digests.plan_hash(values),
        broken_requirements=(*base.broken, *_broken(wanted, recipes, inventory.sites)),
        ignore_unexpected=base.chain.ignore,
    )
    return inventory, plan


def _one_tier(sites: tuple[SitePlan, ...], inventory: Inventory) -> tuple[SitePlan, ...]:
    """The engine gathers all mixers of a model or none, since a sequence has one cache: where one cannot be gathered
    the others are isolated too, and their reason says because of which."""
    alone = next((s.id for s in inventory.sites if s.mixer is not None and "gather" not in s.mixer.tiers), None)
    if alone is None:
        return sites
    why = f"isolated, as {alone} is: a sequence has one cache"

    def isolated(choice: Choice) -> Choice:
        return replace(choice, tier="isolate", reason=why) if choice.tier == "gather" else choice

    return tuple(replace(s, phases={p: isolated(c) for p, c in s.phases.items()}) for s in sites)


def weights_of(source: Source) -> tuple[dict[str, TensorInfo], tuple[WeightFile, ...]]:
    """The headers and weight files of a source; nothing for a source that has only code and configuration."""
    sizes = {f.path: f.size for f in source.files}
    if not any(is_weight(p) for p in sizes):
        return {}, ()
    table = read_table(source)
    files = tuple(WeightFile(path=p, size=sizes.get(p, 0), tensors=len(names)) for p, names in table.shards())
    return table.headers(), files


def _dtype(built: Built) -> str:
    return str(built.dtype).removeprefix("torch.")


def _ranked(wanted: list[Wish], recipes: list[Wish]) -> list[Wish]:
    """--set, then requirements, then preferences; within each the nearer recipe and the narrower wish first."""
    rank = {"set": 0, "require": 1, "prefer": 2}
    return sorted([*reversed(wanted), *recipes], key=lambda w: (rank[w.strength], not w.site, not w.phase))


def _prover(base: Basis, built: Built, progress: Progress) -> Prove:
    return Prover(
        built,
        base.registry,
        targets(built, base.headers),
        open_checkpoint(base.source) if base.headers else None,
        dtype=_dtype(built),
        device="cuda" if base.device.kind == "rocm" else base.device.kind,
        progress=progress,
    )


def _unproved(site: Site, kernel: object, phase: str) -> None:
    return None


def _site(site: Site, chooser: Chooser) -> SitePlan:
    phases = {phase: chooser.choose(site, phase) for phase in PHASES}
    swapped = any(c.impl != "upstream" for c in phases.values())
    return SitePlan(
        site=site.id,
        op=site.op,
        status=site.status,
        count=len(site.members),
        phases=phases,
        kind=site.kind,
        members=site.members if swapped else (),
        binding=site.binding if swapped else None,
    )


def _proved_words(sites: Sequence[SitePlan], can_run: bool) -> str:
    if not can_run:
        return "nothing was run"
    proofs = [c.verified for s in sites for c in s.phases.values() if c.verified]
    return f"{len(proofs)} choices proved in {sum(v.cases for v in proofs)} cases"


def _broken(wanted: list[Wish], recipes: list[Wish], sites: Sequence[Site]) -> tuple[str, ...]:
    """Requirements that a --set overrides."""
    out = []
    for need in (w for w in recipes if w.strength == "require"):
        for s in sites:
            for phase in PHASES:
                over = next((w for w in wanted if w.fits(s, phase)), None)
                if over is not None and need.fits(s, phase) and over.values[0] not in need.values:
                    out.append(f"{need.origin}: {need.op}={' or '.join(need.values)}, broken by {over.origin}")
    return tuple(dict.fromkeys(out))
