"""The code of a repository: which files an `auto_map` names, in this repository or another, and the pin of it all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dz.core.source import Source
from dz.errors import Refused
from dz.hub import lock as locks
from dz.hub.lock import Lock
from dz.hub.stamp import code_hash, listing

_CODE = ".py"


@dataclass(frozen=True, slots=True)
class Reference:
    """An entry of an `auto_map`: the JSON file it stands in, the Auto class, the other repository (empty: this one),
    the module (`a.b` is a/b.py) and the class."""

    file: str
    auto: str
    repository: str
    module: str
    cls: str

    @property
    def path(self) -> str:
        """The file of the module, relative to the repository."""
        return self.module.replace(".", "/") + _CODE


def references(folder: Path) -> tuple[Reference, ...]:
    """Every class that an `auto_map` of any JSON file at the top names, at any depth: sub-configs have their own."""
    found: list[Reference] = []
    for path in sorted(folder.glob("*config.json")):
        try:
            data = json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError, OSError):
            continue  # the check of the folder reports it with its place
        found += [r for auto, text in _auto_maps(data) if (r := _reference(path.name, auto, text)) is not None]
    return tuple(dict.fromkeys(found))


def foreign_code(folder: Path, paths: Iterable[str]) -> tuple[str, ...]:
    """The other repositories that an `auto_map` of any JSON file at the top names, sorted; only files among `paths`."""
    there = set(paths)
    return tuple(sorted({r.repository for r in references(folder) if r.repository and r.file in there}))


def code_files(source: Source) -> tuple[str, ...]:
    """The Python files of a source that are on disk, sorted."""
    return tuple(sorted(f.path for f in source.files if f.path.endswith(_CODE) and (source.path / f.path).is_file()))


def refuse_foreign(source: Source) -> None:
    """Raise Refused when an `auto_map` points into another repository: no pin of this one covers it."""
    found = [r for r in references(source.path) if r.repository]
    if not found:
        return
    foreign = sorted({r.repository for r in found})
    where = sorted({f"{r.file} ({r.auto})" for r in found})
    raise Refused(
        f"{source.name} runs code of {', '.join(foreign)}",
        f"auto_map points into another repository, which no pin of this one covers: {', '.join(where)}",
        "fetch that repository, copy its code beside this config.json and register the folder with `dz fetch PATH`",
        code="foreign_code",
    )


def refuse_unpinned(source: Source) -> None:
    """Raise Refused unless every Python file on disk is one that the lock pins, byte for byte.

    Run before any code of the repository is: the digest in the source is the pin, for a commit as for a folder."""
    held = {f.path for f in source.files if f.path.endswith(_CODE)}
    there = {p for p in listing(source.path) if p.endswith(_CODE)}
    extra = sorted(there - held)
    now = code_hash(source.path, sorted(held & there))
    if not extra and now == source.code_hash and source.code_hash:
        return
    if extra:
        why = f"{', '.join(extra[:4])} {'is' if len(extra) == 1 else 'are'} not in the lock"
    elif not source.code_hash:
        why = "the lock names no Python file of it"
    else:
        why = f"its digest is {now[:16] or 'empty'}, pinned is {source.code_hash[:16]}"
    raise Refused(
        f"the code of {source.name} is not the pinned one", why, f"dz fetch {source.name}", code="changed_code"
    )


def changed_code(source: Source, workspace: Path | None = None) -> tuple[tuple[tuple[str, str], ...], str]:
    """((Python file, "changed", "new" or "gone") of each that differs from the last fetch, that lock's name).

    The lock of the same repository or folder that was written last under another revision is compared with."""
    if source.commit:
        known = locks.of_name(source.name, workspace)
    else:
        known = locks.of_folder_name(source.path, workspace)
    before = next((k for k in known if k.source.rev8 != source.rev8 and (k.pinned or k.source.commit)), None)
    if before is None:
        return (), ""
    was, now = (
        {f.path: f.sha256 or f.etag or str(f.size) for f in s.files if f.path.endswith(_CODE)}
        for s in (before.source, source)
    )
    words = {p: "new" if p not in was else "gone" for p in was.keys() ^ now.keys()}
    words |= {p: "changed" for p in was.keys() & now.keys() if was[p] != now[p]}
    return tuple(sorted(words.items())), f"{Path(before.source.name).name}@{before.source.rev8}"


def refuse_no_pin(model: str, lock: Lock, workspace: Path | None = None) -> None:
    """Raise Refused unless a folder's code was registered by `dz fetch` as it is in this lock.

    Only that makes a pin: a look at a folder by another command locks it as well, and is no consent to run it."""
    held = [k for k in locks.of_folder_name(lock.source.path, workspace) if k.pinned]
    code = lock.source.code_hash
    if any(k.source.code_hash == code for k in held):
        return
    why = "its code was never registered"
    if held:
        why = f"its code has changed since it was registered (digest {held[0].source.code_hash[:16]}, now {code[:16]})"
    raise Refused(
        f"--trust-remote-code for {model}, whose code is not pinned",
        f"{why}; what runs must be what was read",
        f"read the code, then `dz fetch {model}`",
        code="not_pinned",
    )


def _reference(file: str, auto: str, text: str) -> Reference | None:
    repository, found, rest = text.rpartition("--")
    module, dot, cls = rest.rpartition(".")
    return Reference(file, auto, repository if found else "", module, cls) if dot else None


def _auto_maps(value: Any) -> Iterator[tuple[str, str]]:
    """(Auto class, reference) for every string under any `auto_map` key."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key != "auto_map":
                yield from _auto_maps(item)
            elif isinstance(item, dict):
                for auto, entry in item.items():
                    yield from ((str(auto), text) for text in _strings(entry))
            else:
                yield from (("AutoTokenizer", text) for text in _strings(item))  # an old form: a bare pair
    elif isinstance(value, list):
        for item in value:
            yield from _auto_maps(item)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
