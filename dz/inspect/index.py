"""An index of the installed upstream's modules and functions by structure, cached by the digest of their sources.

It holds digests, names and line numbers, no text. What stands at a place is read from its file when it is shown."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dz.core import jsonio
from dz.core.collector import paused
from dz.core.difference import Neighbour
from dz.core.protocols import Progress, Silent
from dz.inspect.form import Form
from dz.inspect.syntax import File, Piece
from dz.upstream.sources import Sources, installed_sources

_FORMAT = "2"  # of the digests: a change to `form` needs a new one
_FEWEST = 6  # features below which a structure says nothing
_LEAST = 0.05  # likeness below which two structures have nothing in common but the language


class Entry(msgspec.Struct, frozen=True):
    """One structure: its digest, its features in order, and the places (name, line) that have it."""

    digest: int
    features: list[int]
    places: list[tuple[str, int]]
    function: bool


@dataclass(slots=True)
class Index:
    """`weights` are by feature: rare ones tell more."""

    sources: Sources
    entries: list[Entry]
    sets: list[frozenset[int]] = field(default_factory=list)
    weights: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sets = [frozenset(e.features) for e in self.entries]
        counts: dict[int, int] = {}
        for features in self.sets:
            for f in features:
                counts[f] = counts.get(f, 0) + 1
        most = len(self.entries) + 1
        self.weights = {f: math.log(most / n) for f, n in counts.items()}

    def nearest(
        self, form: Form, *, function: bool, most: int = 3, apart: str = "", among: frozenset[int] | None = None
    ) -> list[Neighbour]:
        """The structures most like `form`, at most `most`. `apart` is a place that does not count (the one asked
        about); `among` keeps to structures with these digests."""
        rare = math.log(len(self.entries) + 1)
        own = sum(self.weights.get(f, rare) for f in form.features)
        found = []
        for entry, features in zip(self.entries, self.sets, strict=True):
            if entry.function is not function or (among is not None and entry.digest not in among):
                continue
            places = [p for p in entry.places if p[0] != apart]
            shared = sum(self.weights[f] for f in form.features & features) if places else 0.0
            if shared:
                both = own + sum(self.weights[f] for f in features) - shared
                name, line = places[0]
                found.append(Neighbour(name=name, line=line, likeness=round(shared / both, 3), copies=len(places) - 1))
        found = [n for n in found if n.likeness >= _LEAST]
        return sorted(found, key=lambda n: (-n.likeness, n.name))[:most]

    def piece(self, name: str) -> Piece | None:
        """The syntax trees at a place of the index, read from its file."""
        module, _, inner = name.partition(":")
        return File(self.sources.files[module].read_text("utf-8")).piece(inner)


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/dz`, else `~/.cache/dz`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dz"


def load(*, folder: Path | None = None, progress: Progress | None = None) -> Index:
    """The index of the installed upstream: from the cache, else built (about half a minute) and kept there.

    A cache folder that cannot be written is said and done without. Raises EnvironmentFailure without sources."""
    say = progress or Silent()
    sources = installed_sources()
    path = (folder or cache_folder()) / f"forms-{_FORMAT}-{sources.digest()}.json"
    held = _held(path)
    if held is not None:
        return Index(sources, held)
    say.start("index of the installed modules", total=len(sources.files), unit="files")
    entries = build(sources, say)
    say.finish(f"{sum(len(e.places) for e in entries):,} places, {len(entries):,} structures")
    try:
        jsonio.write_text(path, msgspec.json.encode(entries).decode())
    except OSError as e:
        say.note(f"the index is not kept: {e}")
    return Index(sources, entries)


@paused()  # millions of small syntax nodes, none in a cycle
def build(sources: Sources, progress: Progress | None = None) -> list[Entry]:
    """Every structure of the sources, in order of its first place."""
    say = progress or Silent()
    found: dict[tuple[int, bool], Entry] = {}
    for module, path in sources.files.items():
        for piece in File(path.read_text("utf-8")).pieces():
            form = piece.form(texts=False)
            if len(form.features) >= _FEWEST:
                function = not piece.init and piece.functions[0].name == piece.name
                new = Entry(form.digest, sorted(form.features), [], function)
                held = found.setdefault((form.digest, function), new)
                held.places.append((f"{module}:{piece.name}", piece.line))
        say.advance()
    return list(found.values())


def _held(path: Path) -> list[Entry] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Entry])
    except (OSError, msgspec.DecodeError):
        return None  # none yet, or cut short: it is built anew
