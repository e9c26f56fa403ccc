"""Progress on stderr: a live bar where a person watches, plain lines where a log is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

BYTES = ("B", "bytes")  # the units of a step that is counted in bytes
EVERY = 30.0  # seconds between two plain lines of one step


def size(n: float) -> str:
    """Bytes in the unit people read: 512 B, 1.5 MB, 120 GB (powers of 1000, as disks and hubs count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def amount(n: int, unit: str) -> str:
    """`n` of a unit: bytes as a size, anything else as a number."""
    if unit in BYTES:
        return size(n)
    return f"{n:,} {unit}".rstrip()


def span(seconds: float) -> str:
    """A time in the unit people read: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def pace(done: int, total: int | None, seconds: float) -> str:
    """The rate of bytes since a step began and, if the total is known, the time that is left at this rate."""
    if done <= 0 or seconds <= 0:
        return ""
    rate = done / seconds
    left = f", {span((total - done) / rate)} left" if total and total > done else ""
    return f", {size(rate)}/s{left}"


class Plain:
    """One line when a step starts, one when it ends with its seconds, and one every 30 s while it advances, for bytes
    with rate and time left. Steps may be advanced from several threads."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock, self._lock = say, clock, threading.Lock()
        self._name, self._total, self._unit, self._done = "", None, "", 0
        self._begun = self._said = 0.0

    def start(self, name: str, total: int | None = None, unit: str = "") -> None:
        """A step begins."""
        with self._lock:
            self._name, self._total, self._unit, self._done = name, total, unit, 0
            self._begun = self._said = self._clock()
            self._say(f"{name} ({amount(total, unit)})" if total else name)

    def advance(self, n: int = 1) -> None:
        """`n` more units are done."""
        with self._lock:
            self._done += n
            now = self._clock()
            if now - self._said >= EVERY:
                self._said = now
                of = f" of {amount(self._total, self._unit)}" if self._total else ""
                seconds = now - self._begun
                rate = pace(self._done, self._total, seconds) if self._unit in BYTES else ""
                self._say(f"{self._name}: {amount(self._done, self._unit)}{of}, {seconds:.0f} s{rate}")

    def finish(self, note: str = "") -> None:
        """The step is done."""
        with self._lock:
            seconds = self._clock() - self._begun
            self._say(f"{self._name}: done in {seconds:.1f} s{f' ({note})' if note else ''}")

    def note(self, text: str) -> None:
        """A line between the steps' own."""
        with self._lock:
            self._say(text)


class Live:
    """A bar that redraws itself while a step runs, for bytes with rate and time left, and leaves one line behind."""

    def __init__(self, stream: TextIO, *, color: bool) -> None:
        from rich.console import Console

        self._console = Console(file=stream, no_color=not color, highlight=False, markup=False)
        self._bar: Any = None
        self._name, self._begun = "", 0.0

    def start(self, name: str, total: int | None = None, unit: str = "") -> None:
        """A step begins; one that was still open is closed."""
        from rich import progress as rich

        self._stop()
        self._name, self._begun = name, time.monotonic()
        columns = [rich.TextColumn("{task.description}", markup=False), rich.BarColumn()]
        if unit in BYTES:
            columns += [rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn()]
        else:
            columns += [rich.MofNCompleteColumn(), rich.TimeElapsedColumn()]
        self._bar = rich.Progress(*columns, console=self._console, transient=True)
        self._bar.add_task(name, total=total)
        self._bar.start()

    def advance(self, n: int = 1) -> None:
        """`n` more units are done."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], n)

    def finish(self, note: str = "") -> None:
        """The step is done."""
        self._stop()
        seconds = time.monotonic() - self._begun
        self._console.print(f"{self._name}: done in {seconds:.1f} s{f' ({note})' if note else ''}", soft_wrap=True)

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, soft_wrap=True)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
