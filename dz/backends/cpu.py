"""The host: its memory and processors, within the limits of the control group that this process runs in."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dz.backends.base import Backend
from dz.core.device import Device

UNLIMITED = 1 << 60  # bytes; version 1 control groups write "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True)
class Host:
    """The CPU as a backend. `root` is where /proc and /sys are looked for."""

    root: Path = Path("/")
    kind: str = "cpu"

    def count(self) -> int:
        """One: the host is one device whatever its number of processors."""
        return 1

    def absent(self) -> str:
        """It is never absent."""
        return ""

    def describe(self) -> Device:
        """The host with its processor's name and the memory this process may use."""
        return Device(kind="cpu", name=self._name(), memory=self.memory(0)[1], dtypes=self.dtypes(None))

    def memory(self, index: int) -> tuple[int, int]:
        """(free, total) bytes: the machine's, or the control group's where that is tighter. File cache that the
        kernel drops on demand counts as free."""
        free, total = self._machine()
        for limit, used in self._groups():
            total, free = min(total, limit), min(free, limit - used)
        return max(free, 0), total

    def processors(self) -> int:
        """How many processors this process may use at once, at least 1."""
        if hasattr(os, "sched_getaffinity"):
            number = len(os.sched_getaffinity(0))
        else:
            number = os.cpu_count() or 1
        for folder in self._folders("cpu"):
            quota = _words(folder / "cpu.max")
            if len(quota) == 2 and quota[0].isdigit():
                number = min(number, -(-int(quota[0]) // int(quota[1])))
        return max(number, 1)

    def dtypes(self, arch: int | None) -> tuple[str, ...]:
        """What torch computes in on any CPU."""
        return ("float32", "bfloat16", "float16")

    def graph_class(self) -> type | None:
        """A CPU has no graphs."""
        return None

    def _name(self) -> str:
        for line in _lines(self.root / "proc/cpuinfo"):
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
        return platform.processor() or platform.machine()

    def _machine(self) -> tuple[int, int]:
        rows = (line.split() for line in _lines(self.root / "proc/meminfo"))
        info = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2}
        if "MemTotal" in info:
            return info.get("MemAvailable", info["MemTotal"]), info["MemTotal"]
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux: what is free is not told
        return total, total

    def _groups(self) -> Iterator[tuple[int, int]]:
        """(limit, used) in bytes of every control group with a limit, from this process's own up to the root."""
        for folder in self._folders("memory"):
            for limit_file, used_file, key in (
                ("memory.max", "memory.current", "inactive_file"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            ):
                limit, used = _words(folder / limit_file), _words(folder / used_file)
                if limit and limit[0].isdigit() and int(limit[0]) < UNLIMITED and used:
                    stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat") if " " in line)
                    yield int(limit[0]), int(used[0]) - int(stat.get(key, 0))

    def _folders(self, controller: str) -> Iterator[Path]:
        """The folders of this process's control group for a controller and of the groups round it. Inside a container
        the path may not exist under the mount; then the mount's top is the group."""
        for line in _lines(self.root / "proc/self/cgroup"):
            number, controllers, path = line.split(":", 2)
            if number != "0" and controller not in controllers.split(","):
                continue
            top = self.root / "sys/fs/cgroup" / ("" if number == "0" else controller)
            folder = top / path.lstrip("/")
            while folder != top and top in folder.parents:
                yield folder
                folder = folder.parent
            yield top


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):  # not there, or not for this process to read: no information
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


BACKEND: Backend = Host()
