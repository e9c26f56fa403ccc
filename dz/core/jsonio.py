"""Frozen dataclasses in and out of JSON, and atomic writes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dz.errors import UsageError

T = TypeVar("T")


def to_builtins(value: Any) -> Any:
    """Dataclasses, tuples, sets and enums as plain JSON values: what a reader of the written text gets."""
    return _lists(msgspec.to_builtins(value, enc_hook=str))


def _lists(value: Any) -> Any:
    """Lists for the tuples and sets that msgspec leaves as they are."""
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, list | tuple | set | frozenset) else value


def from_builtins(cls: type[T], data: Any, *, where: str = "this document") -> T:
    """`cls` from plain JSON values; unknown keys are allowed (documents only grow). Raises UsageError."""
    try:
        return msgspec.convert(data, type=cls, strict=True)
    except msgspec.ValidationError as e:
        raise UsageError(
            f"{where} is not a valid {cls.__name__}",
            str(e),
            "make it again with the command that wrote it",
            code="bad_document",
        ) from e


def dumps(value: Any) -> str:
    """Readable JSON text with a stable key order as given."""
    return json.dumps(to_builtins(value), indent=2, ensure_ascii=False) + "\n"


def read(path: Path) -> Any:
    """The JSON document at `path`. Raises UsageError when it is not JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UsageError(
            f"{path} is not JSON", str(e), "delete it and run the command that wrote it again", code="bad_json"
        ) from e


def write(path: Path, value: Any) -> None:
    """Write `value` as JSON so that a reader sees the old file or the new one, never a part."""
    write_text(path, dumps(value))


def write_text(path: Path, text: str) -> None:
    """Write text through a temporary file and `os.replace`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(text)
        Path(tmp).replace(path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise
