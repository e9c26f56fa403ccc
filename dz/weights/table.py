"""The headers of all weight files of a source, checked against the index, as one table. No torch, no tensor data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dz.core.collector import paused
from dz.core.headers import TensorInfo, source_header
from dz.core.index import Fault, Layout, broken, choose, shard_faults
from dz.core.source import Source
from dz.errors import Refused


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor and the file it lies in: `shard` relative to the folder, `offset` of its first byte in that file."""

    info: TensorInfo
    shard: str
    offset: int


@dataclass(frozen=True, slots=True)
class Table:
    """`entries` by tensor name, in reading order: shard by shard, and within a shard by offset."""

    folder: Path
    layout: Layout
    entries: dict[str, Entry]

    def headers(self) -> dict[str, TensorInfo]:
        """The tensors alone, in reading order."""
        return {name: e.info for name, e in self.entries.items()}

    def shards(self) -> Iterator[tuple[str, list[str]]]:
        """Each weight file with the names of its tensors, in reading order."""
        groups: dict[str, list[str]] = {shard: [] for shard in self.layout.shards}
        for name, entry in self.entries.items():
            groups[entry.shard].append(name)
        yield from groups.items()


@paused()
def read_table(source: Source) -> Table:
    """Read every header of a source. Only the files that the source lists count, so a stray file is never opened. For a
    source of headers alone the table is as good; `open_checkpoint` refuses it.

    Raises Refused with all faults (missing shard, cut file, LFS stub, tensor and index that disagree) or because the
    source has no weights."""
    folder = source.path
    layout = choose((f.path for f in source.files), lambda p: (folder / p).read_bytes())
    if not layout.shards:
        raise Refused(
            f"{source.name} has no weights",
            f"none of its {len(source.files)} files is a safetensors checkpoint",
            f"dz fetch {source.name}",
            code="no_weights",
        )
    entries: dict[str, Entry] = {}
    faults: list[Fault] = []
    indexed = layout.by_shard()
    for shard in layout.shards:
        try:
            header = source_header(source, shard)
        except FileNotFoundError:
            faults.append(Fault(file=shard, code="missing_file", text="missing"))
            continue
        except Refused as e:
            faults.append(Fault(file=shard, code=e.code, text=e.why))
            continue
        faults += shard_faults(shard, header, layout, indexed)
        for info in sorted(header.tensors.values(), key=lambda t: (t.begin, t.name)):
            entries[info.name] = Entry(info, shard, header.data_start + info.begin)
    if faults:
        raise broken(source.name, faults, f"dz fetch {source.name}", shards=len(layout.shards))
    return Table(folder, layout, entries)
