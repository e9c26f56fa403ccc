"""What a model has that dz does not know, without a plan: built on meta, surveyed, compared with the index."""

from __future__ import annotations

from dz.adapt.make import weights_of
from dz.core.difference import Difference
from dz.core.protocols import Progress, Silent
from dz.core.registry import Registry
from dz.core.source import Source
from dz.inspect import index
from dz.inspect.difference import difference
from dz.inspect.survey import survey
from dz.upstream.build import build_meta
from dz.upstream.config import raw_config


def make_difference(
    source: Source, *, trust: bool, progress: Progress | None = None, registry: Registry | None = None
) -> Difference:
    """Each site of a source: known, or how it departs from the nearest known form. No weight is read, nothing is
    written but the cached index. Raises Refused when upstream's class cannot be built."""
    say = progress or Silent()
    headers, files = weights_of(source)
    say.start("inventory")
    built = build_meta(source, trust=trust)
    inventory = survey(
        built, source, headers, registry=registry or Registry.discover(), files=files, raw=raw_config(source)
    )
    say.finish(f"{len(inventory.sites)} sites, {inventory.parameters:,} parameters")
    return difference(built, inventory, index.load(progress=say), raw=raw_config(source))
