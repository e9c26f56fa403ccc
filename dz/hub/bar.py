"""The progress bar that the hub client is given: it counts bytes, and can end a transfer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Stopped(Exception):
    """The transfer was told to end, by the user or because another file's error makes it useless."""


def bar_class(advance: Callable[[int], None], stop: threading.Event, *, there: int = 0) -> type:
    """A class with the part of tqdm's interface that the hub client uses. It counts each byte of the file once, however
    often a transfer starts over, and ends the transfer when `stop` is set. The first `there` bytes do not count: an
    earlier run fetched them."""
    high = [there]  # the most bytes seen by any of this file's bars

    class Bar:
        def __init__(self, *_: Any, initial: int = 0, total: int | None = None, **__: Any) -> None:
            self.n, self.total = 0, total
            self.update(initial)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise Stopped
            self.n += int(n or 0)
            if self.n > high[0]:
                advance(self.n - high[0])
                high[0] = self.n

        def update_transfer(self, n: float | None = 1) -> None:
            """Network bytes of a deduplicated transfer; `update` counts the file's own."""

        def set_postfix_str(self, *_: Any, **__: Any) -> None:
            """The rate is the progress display's business."""

        set_transfer_postfix_str = set_description = set_description_str = refresh = close = set_postfix_str

    return Bar
