"""Which files of a repository are fetched, which are not, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dz.core.index import Fault, Layout, choose, is_weight
from dz.core.source import FileEntry
from dz.errors import Refused, UsageError
from dz.hub.lock import Ignored
from dz.hub.verify import unread_formats


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """`wanted` is fetched; `ignored` are weight files that nothing reads, `left_out` files that the user's globs leave
    out; `faults` are what is wrong with the repository by its listing alone."""

    wanted: tuple[FileEntry, ...]
    ignored: tuple[Ignored, ...]
    left_out: frozenset[str]
    layout: Layout
    faults: tuple[Fault, ...] = ()


def select(
    files: Sequence[FileEntry],
    read: Callable[[str], bytes],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    keep: Collection[str] = (),
) -> Selection:
    """Choose among a listing. `read(path)` gives an index; `keep` are files that an earlier fetch already chose.

    Everything is wanted but weights that nothing reads: with an index only what it names, and no other formats. A glob
    never brings such a file back; `--include` with its exact path does. With several indexes of one rank the globs say
    which one is meant."""
    sizes = {f.path: f.size for f in files}
    layout = _layout([p for p in sizes if _chosen(p, include, exclude)], sizes, read)
    ignored = {p: why for p, why in layout.ignored.items() if p not in include and p not in keep}
    wanted, left_out = [], set()
    for f in files:
        if f.path in ignored:
            continue
        if _chosen(f.path, include, exclude) or f.path in keep:
            wanted.append(f)
        else:
            left_out.add(f.path)
    if not wanted:
        globs = ", ".join([*(f"--include {g}" for g in include), *(f"--exclude {g}" for g in exclude)])
        raise UsageError(
            "nothing to fetch",
            f"of {len(files)} files {globs} leaves none" if globs else "the repository is empty",
            "dz fetch MODEL --dry-run",
            code="nothing",
        )
    return Selection(
        wanted=tuple(wanted),
        ignored=tuple(Ignored(path=p, size=sizes[p], why=why) for p, why in ignored.items()),
        left_out=frozenset(left_out),
        layout=layout,
        faults=tuple(_faults(sizes, layout, bool(include))),
    )


def _layout(picked: Sequence[str], sizes: Mapping[str, int], read: Callable[[str], bytes]) -> Layout:
    """The weights among all files; where the repository alone leaves that open, among those that the globs pick."""
    try:
        return choose(sizes, read)
    except Refused:
        if len(picked) == len(sizes):
            raise
    return choose(picked, read)


def _chosen(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    return (not include or _matches(path, include)) and not _matches(path, exclude)


def _matches(path: str, globs: Sequence[str]) -> bool:
    """As `hf download` does: shell globs over the whole path, `*` crosses `/`, a trailing `/` means the folder."""
    return any(fnmatchcase(path, g + "*" if g.endswith("/") else g) for g in globs)


def _faults(sizes: dict[str, int], layout: Layout, picked: bool) -> list[Fault]:
    indexed = layout.by_shard()
    faults = []
    for shard in layout.shards:
        if shard not in sizes:
            text = f"not among the repository's files, but {layout.index} places {len(indexed[shard])} tensors in it"
            faults.append(Fault(file=shard, code="missing_file", text=text))
    others = {p: why for p, why in layout.ignored.items() if is_weight(p)}
    if not layout.shards and not picked:
        if others:
            faults.append(unread_formats(others, sum(sizes[p] for p in others)))
        else:
            faults.append(Fault(file=".", code="no_weights", text="the repository has no weight files"))
    return faults
