"""Disk space on the mount that will hold the bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

from dz.errors import EnvironmentFailure


def mount_of(path: Path) -> Path:
    """The nearest folder above `path` that exists, links followed: the place whose free space counts."""
    at = path.resolve()
    while not at.exists():
        at = at.parent
    return at


def free(path: Path) -> int:
    """Free bytes where `path` will be written, for this user."""
    return shutil.disk_usage(mount_of(path)).free


def require(path: Path, need: int, model: str) -> None:
    """Raise EnvironmentFailure unless `need` bytes fit where `path` will be written."""
    there = free(path)
    if need > there:
        raise EnvironmentFailure(
            f"{model} needs {need:,} more bytes at {path}",
            f"{there:,} bytes are free on the disk of {mount_of(path)}: {need - there:,} too few",
            "free space, or choose another disk with --local-dir DIR or HF_HUB_CACHE",
            code="disk_full",
        )
