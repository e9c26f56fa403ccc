"""A folder checked as a whole: index, files and headers against each other, LFS stubs, strays, broken JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from dz.core.collector import paused
from dz.core.headers import Header, lfs_stub, read_header
from dz.core.index import INDEX_SUFFIX, Fault, Layout, broken, choose, is_weight, shard_faults
from dz.core.protocols import Progress, Silent
from dz.errors import Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a check found. `tensors` and `bytes` are counted from the headers of the shards that are right."""

    layout: Layout
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    tensors: int = 0
    bytes: int = 0

    @property
    def whole(self) -> bool:
        """True when there are weights and nothing is wrong with any file."""
        return bool(self.layout.shards) and not self.faults

    def refuse(self, where: str, next: str) -> None:
        """Raise one refusal with all faults, if there are any."""
        if self.faults:
            raise broken(where, self.faults, next, shards=len(self.layout.shards))


@paused()
def examine(
    folder: Path,
    paths: Sequence[str],
    *,
    layout: Layout | None = None,
    left_out: Collection[str] = (),
    header: Callable[[str], Header] | None = None,
    progress: Progress | None = None,
) -> Findings:
    """Check the files `paths` of a folder. `layout` is for who knows it already (from the hub's listing); shards among
    `left_out` were deliberately not fetched and are not missing; `header(shard)` gives a header that is not read from
    the shard itself, or raises FileNotFoundError.

    Collects every fault. Reads headers and JSON, not the data of the weights. Raises Refused only where it is
    ambiguous which files are the weights, or where the index itself cannot be read."""
    progress = progress or Silent()
    stubs = _stubs(folder, [p for p in paths if p.endswith(INDEX_SUFFIX)])
    if stubs:
        return Findings(layout=Layout(), faults=tuple(stubs))
    layout = layout or choose(paths, lambda p: (folder / p).read_bytes())
    stubs = _stubs(folder, [p for p in paths if p not in layout.ignored])  # what is not read may be anything
    stubbed = {f.file for f in stubs}
    faults = [*stubs, *_json_faults(folder, paths, stubbed)]
    skip = {*stubbed, *left_out}
    found, tensors, size = _shards(header or (lambda shard: read_header(folder / shard)), layout, skip, progress)
    faults += found
    faults += _other_formats(folder, paths, layout)
    complete = not faults and not set(layout.shards) & set(left_out)
    notes = _notes(folder, paths, layout, size if complete else None)
    return Findings(layout=layout, faults=tuple(faults), notes=tuple(notes), tensors=tensors, bytes=size)


def _shards(
    read: Callable[[str], Header], layout: Layout, skip: Collection[str], progress: Progress
) -> tuple[list[Fault], int, int]:
    """Every shard's header against its file and the index: (faults, tensors, bytes of tensors)."""
    faults: list[Fault] = []
    tensors = size = 0
    indexed = layout.by_shard()
    progress.start("headers", total=len(layout.shards), unit="files")
    for shard in layout.shards:
        progress.advance()
        if shard in skip:
            continue
        try:
            header = read(shard)
        except (FileNotFoundError, IsADirectoryError):
            faults.append(Fault(file=shard, code="missing_file", text=_missing(layout, len(indexed.get(shard, ())))))
            continue
        except Refused as e:
            faults.append(Fault(file=shard, code=e.code, text=e.why))
            continue
        faults += shard_faults(shard, header, layout, indexed)
        tensors += len(header.tensors)
        size += sum(t.bytes for t in header.tensors.values())
    progress.finish(f"{tensors:,} tensors, {size:,} bytes")
    return faults, tensors, size


# files whose top level upstream takes for a mapping
OBJECTS = frozenset(
    {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"}
)


def is_index(path: str) -> bool:
    """Whether a file is an index of shards, of any format."""
    return path.endswith(".index.json")


def _missing(layout: Layout, tensors: int) -> str:
    return f"missing; {layout.index} places {tensors} tensors in it" if layout.index else "missing"


def _stubs(folder: Path, paths: Sequence[str]) -> list[Fault]:
    out = []
    for path in paths:
        full = folder / path
        if not full.is_file():
            if full.is_symlink():
                out.append(Fault(file=path, code="dangling", text="a link to a file that is gone"))
            continue
        size = lfs_stub(full)
        if size is not None:
            text = f"a git-LFS pointer of {full.stat().st_size} bytes; the file it stands for has {size:,} bytes"
            out.append(Fault(file=path, code="lfs_stub", text=text))
    return out


def _json_faults(folder: Path, paths: Sequence[str], skip: set[str]) -> list[Fault]:
    """Configuration and tokenizer files at the top that are not JSON: cut, or not what their name says."""
    out = []
    for path in paths:
        full = folder / path
        if "/" in path or not path.endswith(".json") or path in skip or is_index(path) or not full.is_file():
            continue
        try:
            if not isinstance(json.loads(full.read_text("utf-8")), dict) and path in OBJECTS:
                out.append(Fault(file=path, code="bad_json", text="no JSON object"))
        except (ValueError, RecursionError) as e:
            text = f"not JSON ({full.stat().st_size:,} bytes): {e}"
            out.append(Fault(file=path, code="bad_json", text=text))
    return out


def _other_formats(folder: Path, paths: Sequence[str], layout: Layout) -> list[Fault]:
    """A repository that has weights, but none that dz reads."""
    others = [p for p in paths if is_weight(p) and (folder / p).is_file()]
    if layout.shards or not others:
        return []
    size = sum((folder / p).stat().st_size for p in others)
    return [unread_formats({p: layout.ignored[p] for p in others}, size)]


def unread_formats(ignored: dict[str, str], size: int) -> Fault:
    """The fault of a repository whose only weights are in formats, or in places, that dz does not read."""
    first = min(ignored)
    pickle = " (pickle runs code when it is opened)" if first.endswith((".bin", ".pt", ".pth", ".ckpt")) else ""
    text = f"{len(ignored)} weight files ({size:,} bytes), none at the top in safetensors: {ignored[first]}{pickle}"
    return Fault(file=first, code="no_safetensors", text=text)


def _notes(folder: Path, paths: Sequence[str], layout: Layout, size: int | None) -> list[str]:
    notes = [ignored_note(layout.ignored)] if layout.ignored else []
    if "config.json" not in paths:
        notes.append("no config.json at the top")
    if not layout.shards and not layout.ignored:
        notes.append("no weight files")
    if layout.total_size is not None and size is not None and layout.total_size != size:
        notes.append(f"{layout.index} claims {layout.total_size:,} bytes, the headers hold {size:,}")
    return notes


def ignored_note(ignored: dict[str, str]) -> str:
    """One line about the weight files that are not read."""
    shown = ", ".join(f"{path} ({why})" for path, why in list(ignored.items())[:3])
    more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
    return f"not read: {shown}{more}"
