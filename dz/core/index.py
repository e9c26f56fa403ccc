"""Which files hold the weights: the index, its shards, and what lies beside them. Standard library alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import PurePosixPath
from typing import Any

from dz.core.headers import Header, unique
from dz.errors import Refused

INDEX = "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"
SINGLE = "model.safetensors"
# Files by which other libraries store weights; beside a safetensors checkpoint they are never read.
OTHER_FORMATS = (
    ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".gguf", ".ggml", ".onnx", ".onnx_data", ".h5", ".msgpack",
    ".ot", ".tflite", ".npz", ".nemo", ".engine", ".mlmodel",
)  # fmt: skip
_SHOWN = 3  # names given in full in a message; the rest is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing wrong with a repository's files: the file, a short code, and the finding with its numbers."""

    file: str
    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`index` is the path of the index (empty: one file without one); `shards` are the weight files in reading order;
    `weight_map` is tensor name to shard (empty without an index); `total_size` is what the index claims, in bytes;
    `ignored` maps weight files and indexes that are not read to the reason."""

    index: str = ""
    shards: tuple[str, ...] = ()
    weight_map: dict[str, str] = field(default_factory=dict)
    total_size: int | None = None
    ignored: dict[str, str] = field(default_factory=dict)

    def by_shard(self) -> dict[str, set[str]]:
        """The tensors that the index places in each shard; empty without an index."""
        out: dict[str, set[str]] = {shard: set() for shard in self.shards} if self.index else {}
        for name, shard in self.weight_map.items():
            out[shard].add(name)
        return out


class BrokenCheckpoint(Refused):
    """A refusal that carries every fault that was found, so that a document can list them all."""

    def __init__(
        self, what: str, why: str, next: str, *, code: str = "broken_files", faults: Sequence[Fault] = ()
    ) -> None:
        super().__init__(what, why, next, code=code)
        self.faults = tuple(faults)

    def data(self) -> dict[str, Any]:
        """The `dz.error/1` document with a `faults` list."""
        rows = [{"file": f.file, "code": f.code, "text": f.text} for f in self.faults]
        return {**super().data(), "faults": rows}


def is_weight(path: str) -> bool:
    """Whether a file stores weights in any format, by its ending."""
    return path.endswith((".safetensors", *OTHER_FORMATS))


def safe_path(path: str) -> bool:
    """Whether a path named by a repository stays inside it: relative, no `..`, no backslash, no empty part, and text
    that a file system can hold (no half of a surrogate pair)."""
    if any("\ud800" <= c <= "\udfff" for c in path):
        return False
    return bool(path) and "\\" not in path and "\0" not in path and not path.startswith("/") and ".." not in (
        PurePosixPath(path).parts
    )  # fmt: skip


def choose(paths: Iterable[str], read: Callable[[str], bytes]) -> Layout:
    """The weights among a repository's files. `read(path)` gives the bytes of an index; nothing else is read.

    An index at the top wins over every other weight file; without one, `model.safetensors`, or the only safetensors
    file at the top. Raises Refused when several candidates are equal, and for a broken index."""
    paths = sorted(paths)
    index = _index(paths)
    if index:
        weight_map, total = parse_index(read(index), index)
        shards = tuple(sorted(set(weight_map.values())))
    else:
        weight_map, total, shards = {}, None, _single(paths)
    ignored = {p: _why(p, index, shards) for p in paths if p not in shards and p != index and _weighty(p)}
    return Layout(index=index, shards=shards, weight_map=weight_map, total_size=total, ignored=ignored)


def _weighty(path: str) -> bool:
    return is_weight(path) or path.endswith(INDEX_SUFFIX)


def _index(paths: Sequence[str]) -> str:
    top = [p for p in paths if p.endswith(INDEX_SUFFIX) and "/" not in p]
    if INDEX in top or len(top) < 2:
        return INDEX if INDEX in top else "".join(top)
    raise Refused(
        f"{len(top)} indexes and none is {INDEX}",
        f"{', '.join(top)}: dz does not guess which one is the model",
        f"leave the others out: dz fetch MODEL {' '.join(f'--exclude {p}' for p in sorted(top)[1:])}",
        code="ambiguous_index",
    )


def _single(paths: Sequence[str]) -> tuple[str, ...]:
    top = [p for p in paths if p.endswith(".safetensors") and "/" not in p]
    if SINGLE in top or len(top) < 2:
        return (SINGLE,) if SINGLE in top else tuple(top)
    raise Refused(
        f"{len(top)} weight files and no index",
        f"{_some(top)}: without {INDEX} nobody can tell whether they are one model",
        f"fetch {INDEX} as well, or keep only the file that is the model",
        code="no_index",
    )


def _why(path: str, index: str, shards: Sequence[str]) -> str:
    if path.endswith(INDEX_SUFFIX):
        return f"a second index; {index} is read" if index else "an index in a sub-folder"
    if not path.endswith(".safetensors"):
        return f"a {PurePosixPath(path).suffix} file; dz reads safetensors"
    if index:
        return f"{index} does not name it"
    return f"beside {shards[0]}" if shards else "in a sub-folder, and no index names it"


def parse_index(raw: bytes, name: str) -> tuple[dict[str, str], int | None]:
    """`weight_map` and `metadata.total_size` of an index. Raises Refused naming the index and what is wrong with it."""

    def bad(why: str) -> Refused:
        return Refused(f"{name} is a broken index", why, "`dz fetch MODEL` fetches it again", code="bad_index")

    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=unique(bad))
    except (ValueError, RecursionError) as e:  # bad UTF-8, bad JSON, and numbers too long to convert
        raise bad(f"it is not JSON: {e}") from e
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad("it has no weight_map")
    good: set[str] = set()
    for tensor, shard in weight_map.items():
        if isinstance(shard, str) and shard in good:
            continue
        if not isinstance(shard, str) or not safe_path(shard) or not shard.endswith(".safetensors"):
            raise bad(f"it places {tensor!r} in {shard!r}, which is no safetensors file inside the repository")
        good.add(shard)
    metadata = data.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and not isfinite(total):
        raise bad(f"its total_size is {total}")
    return weight_map, int(total) if isinstance(total, int | float) else None


def shard_faults(shard: str, header: Header, layout: Layout, indexed: Mapping[str, set[str]]) -> list[Fault]:
    """Index against header, both ways, for one shard. `indexed` is `layout.by_shard()`."""
    if not layout.index:
        return []
    wanted, there = indexed.get(shard, set()), header.tensors.keys()
    faults = []
    missing = sorted(wanted - there)
    if missing:
        text = f"{len(missing)} of the {len(wanted)} tensors that {layout.index} places here are not in it: "
        faults.append(Fault(file=shard, code="missing_tensor", text=text + _some(missing)))
    extra = sorted(n for n in there - wanted if n not in layout.weight_map)
    if extra:
        text = f"{len(extra)} of its {len(there)} tensors are not named by {layout.index}: "
        faults.append(Fault(file=shard, code="extra_tensor", text=text + _some(extra)))
    twice = sorted(n for n in there - wanted if n in layout.weight_map)
    if twice:
        text = f"{layout.index} places {len(twice)} of its {len(there)} tensors in other shards: "
        faults.append(Fault(file=shard, code="duplicate_tensor", text=text + _some(twice)))
    return faults


def broken(where: str, faults: Sequence[Fault], next: str, *, shards: int = 0) -> BrokenCheckpoint:
    """The one refusal for a list of faults; a missing weight file makes it "incomplete download"."""
    gone = [f for f in faults if f.code == "missing_file"]
    why = "; ".join(f"{f.file}: {f.text}" for f in faults[:10])
    if len(faults) > 10:
        why += f"; and {len(faults) - 10} more"
    if gone:
        weights = [f for f in gone if is_weight(f.file)]
        n = f"{len(weights)} of {max(shards, len(weights))} weight files" if weights else f"{len(gone)} files"
        what = f"incomplete download: {n} of {where} are missing"
        return BrokenCheckpoint(what, why, next, code="incomplete", faults=faults)
    files = len({f.file for f in faults})
    what = f"{where} has {len(faults)} fault{'s' * (len(faults) > 1)} in {files} file{'s' * (files > 1)}"
    code = faults[0].code if len({f.code for f in faults}) == 1 else "broken_files"
    return BrokenCheckpoint(what, why, next, code=code, faults=faults)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
