"""The garbage collector, out of the way while half a million small objects are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection inside; also a decorator. Reading the headers of a large checkpoint takes half the time so: nothing
    in them refers back, yet every pass of the collector walks all of them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
