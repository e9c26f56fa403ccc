"""MODEL as people write it: `org/name`, `org/name@rev`, or a path."""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dz.errors import UsageError

_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?")
_REVISION = re.compile(r"[\w.+/-]+")


@dataclass(frozen=True, slots=True)
class Model:
    """A parsed MODEL. `path` is set for a folder and then `revision` is None; else `name` is `org/name`."""

    name: str
    revision: str | None = None
    path: Path | None = None

    @property
    def text(self) -> str:
        """The model as one writes it on the command line."""
        return f"{self.name}@{self.revision}" if self.revision else self.name


def parse(model: str, revision: str | None = None) -> Model:
    """What MODEL means. An existing folder is a path; so is everything that starts like one.

    Raises UsageError for a folder that is not there, a file, a malformed name, and two different revisions."""
    looks = model.startswith(("/", "./", "../", "~")) or model in (".", "..")
    path = _path(model)
    if looks or _is_folder(path):
        return Model(name=str(_folder(model, path, revision)), path=path.absolute())
    name, _, rev = model.partition("@")
    if revision and rev and revision != rev:
        raise UsageError(
            f"two revisions for {name}: '{rev}' and '{revision}'",
            "MODEL@REV and --revision say the same thing",
            f"dz fetch {name} --revision {revision}",
            code="two_revisions",
        )
    wanted = rev or revision
    if not _REPOSITORY.fullmatch(name) or name.endswith(".git") or ".." in name:
        why = "a model is org/name, org/name@revision, or the path of a folder"
        if _is_file(path):
            why = f"it is a file; {why}"
        raise UsageError(f"'{model}' is no model", why, "dz fetch org/name", code="bad_model")
    if wanted is not None and (not _REVISION.fullmatch(wanted) or ".." in wanted):
        raise UsageError(
            f"'{wanted}' is no revision", "it is a branch, a tag or a commit", f"dz fetch {name}", code="bad_revision"
        )
    return Model(name=name, revision=wanted)


def _path(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except (RuntimeError, ValueError) as e:  # `~someone` who has no home here, or no name at all
        raise UsageError(f"no folder at {model}", str(e), "write the path out", code="no_folder") from e


def _is_folder(path: Path) -> bool:
    return _mode(path, stat.S_ISDIR)


def _is_file(path: Path) -> bool:
    return _mode(path, stat.S_ISREG)


def _mode(path: Path, check: Callable[[int], bool]) -> bool:
    try:
        return check(path.stat().st_mode)
    except (OSError, ValueError):  # not there, or a name that no file system takes
        return False


def _folder(model: str, path: Path, revision: str | None) -> Path:
    if revision:
        raise UsageError(
            f"--revision {revision} with the folder {model}",
            "a folder has no revisions; what is in it is what is used",
            f"dz fetch {model}",
            code="folder_revision",
        )
    if _is_file(path):
        raise UsageError(
            f"{model} is a file", "MODEL is the folder that holds it", f"dz fetch {path.parent}", code="not_a_folder"
        )
    if not _is_folder(path):
        parent = path.absolute().parent
        there = [p.name for p in parent.iterdir() if p.is_dir()] if _is_folder(parent) else []
        why = f"did you mean {parent / close[0]}?" if (close := near(path.name, there)) else f"looked in {parent}"
        raise UsageError(f"no folder at {model}", why, "dz fetch org/name, or mend the path", code="no_folder")
    return path.absolute()


def near(name: str, known: Iterable[str], n: int = 3) -> list[str]:
    """The known names nearest to `name`, best first; upper and lower case count as the same."""
    table = {k.lower(): k for k in known}
    return [table[k] for k in difflib.get_close_matches(name.lower(), list(table), n, 0.6)]
