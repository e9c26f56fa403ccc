"""The difference between a model and what dz knows, site by site."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from dz.core.difference import Difference, Line, Neighbour, SiteDifference
from dz.core.inventory import Inventory, Site
from dz.inspect import interface, naming
from dz.inspect.fingerprints import fingerprints
from dz.inspect.form import Form, Statement, assigned, config_reads
from dz.inspect.index import Index
from dz.inspect.reads import unread
from dz.inspect.syntax import Piece, live
from dz.upstream.build import Built
from dz.upstream.trace import trace

_NEIGHBOURS = 3


def difference(built: Built, inventory: Inventory, index: Index, *, raw: Mapping[str, Any]) -> Difference:
    """Where a model departs from the known ops. `raw` is its config.json."""
    looked = [s for s in inventory.sites if s.status != "known"]
    traced = trace(built, [s.members[0] for s in looked if s.kind != "function"])
    reader = _Reader(built, index, traced)
    return Difference(
        model=inventory.model,
        rev8=inventory.rev8,
        cls=inventory.cls,
        runs=inventory.runs,
        parameters=inventory.parameters,
        sites=tuple(reader.site(s) for s in inventory.sites),
        unread=unread(built, raw),
        index=f"{index.sources.version}: {sum(len(e.places) for e in index.entries)} places",
    )


class _Reader:
    """Reads one site after the other. `traced` are the shapes of a run by module name."""

    def __init__(self, built: Built, index: Index, traced: Mapping[str, tuple[tuple[str, ...], ...]]) -> None:
        self.built, self.index, self.traced = built, index, traced

    def site(self, s: Site) -> SiteDifference:
        extra: Callable[[Site], dict[str, Any]] | None = {"variant": self.variant, "unknown": self.unknown}.get(
            s.status
        )
        return SiteDifference(
            site=s.id,
            status=s.status,
            op=s.op,
            cls=s.cls,
            where=s.where,
            count=len(s.members),
            parameters=s.parameters,
            reason=s.reason,
            differs=s.differs,
            **(extra(s) if extra is not None else {}),
        )

    def variant(self, s: Site) -> dict[str, Any]:
        target = naming.target(self.built, s)
        piece, place = live(target), naming.place(target)
        if piece is None:
            return {}
        own = piece.form()
        among = fingerprints().get(str(s.op), frozenset())
        found = self.index.nearest(own, function=s.kind == "function", most=1, apart=place, among=among)
        known = self.index.piece(found[0].name) if found else None
        if known is None:
            return {"neighbours": self._neighbours(own, s, place), "config": self._config(s, target, piece, None)}
        there, shapes = known.form(), _shapes(target, known)
        more = {n.partition(".")[0] for n in shapes}
        return {
            "form": found[0],
            "added": _lines(own, there, place),
            "absent": _lines(there, own, found[0].name),
            "config": self._config(s, target, piece, known, more),
            "shapes": shapes,
        }

    def unknown(self, s: Site) -> dict[str, Any]:
        target = naming.target(self.built, s)
        piece, place = live(target), naming.place(target)
        name = naming.op_name(s, self.built)
        io = interface.tensors(target, piece, self.traced.get(s.members[0]) if s.kind != "function" else None)
        names = ",".join(interface.arguments(target))
        out = {
            "io": io,
            "state": interface.state(target, piece, s),
            "shapes": _shapes(target, None),
            "write": f"dz/ops/{name}.py",
            "begin": f"dz ops new {name}" + (f" --args {names}" if names else ""),
        }
        if piece is None:
            return out
        found = {"neighbours": self._neighbours(piece.form(), s, place)}
        return out | found | {"config": self._config(s, target, piece, None)}

    def _neighbours(self, own: Form, s: Site, place: str) -> tuple[Neighbour, ...]:
        found = self.index.nearest(own, function=s.kind == "function", most=_NEIGHBOURS, apart=place)
        return tuple(found)

    def _config(
        self, s: Site, target: Any, piece: Piece, known: Piece | None, more: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Keys that this class, and its children named in `more`, read and the known one does not, with their values in
        this model."""
        read = [piece, *(p for n in sorted(more) if (p := live(getattr(target, n))) is not None)]
        keys = set().union(*(config_reads(f) for p in read for f in (*p.functions, *p.init)))
        if known is not None:
            keys -= set().union(*map(config_reads, (*known.functions, *known.init)))
        holders = [getattr(target, "config", None), self.built.text_config, self.built.config]
        holders += [getattr(self.built.config, k, None) for k in getattr(self.built.config, "sub_configs", {})]
        out = {}
        for key in sorted(k for k in keys if not k.startswith("_")):
            holder = next((h for h in holders if h is not None and hasattr(h, key)), None)
            value = getattr(holder, key, None)
            if holder is not None and not callable(value) and not hasattr(value, "to_dict"):
                out[key] = value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else str(value)
        return out


def _lines(own: Form, other: Form, place: str) -> tuple[Line, ...]:
    """The statements of `own` that `other` has not, each as often as it is missing there."""
    there: dict[int, int] = {}
    for s in other.statements:
        there[s.digest] = there.get(s.digest, 0) + 1
    left: list[Statement] = []
    for s in own.statements:
        there[s.digest] = there.get(s.digest, 0) - 1
        if there[s.digest] < 0:
            left.append(s)
    return tuple(Line(file=place.partition(":")[0], line=s.line, text=s.text) for s in left)


def _shapes(target: Any, known: Piece | None) -> dict[str, tuple[int, ...]]:
    """A module's tensors by name, its children's included; with `known` only those of attributes that it lacks."""
    if not isinstance(target, nn.Module):
        return {}
    names = set().union(*map(assigned, known.init)) if known is not None else set()
    return {
        n: tuple(p.shape) for n, p in target.named_parameters() if known is None or n.partition(".")[0] not in names
    }
