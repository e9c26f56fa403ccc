"""Several files at a time: the first hopeless error, or Ctrl-C, ends them all; other errors leave the rest running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from dz.errors import DzError
from dz.hub.bar import Stopped

WORKERS = 8  # files in flight, as the hub client does by default
_HOPELESS = ("auth", "gated", "not_found", "offline", "disk_full", "revision_not_found")


def run_all(tasks: Mapping[str, Callable[[], None]], stop: threading.Event, name: str) -> None:
    """Run a task for each file (by its path) of the repository `name`. `stop` is set when those under way should end.

    Raises one DzError for all files that failed, and what is no DzError as it is."""
    pool = ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="fetch")
    futures: dict[Future[None], str] = {pool.submit(task): path for path, task in tasks.items()}
    try:
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
            if any(_hopeless(f.exception()) for f in finished if not f.cancelled()):
                break
    finally:
        if not all(f.done() for f in futures):  # a hopeless error, or Ctrl-C: end transfers at their next chunk
            stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
    failed = [(path, e) for f, path in futures.items() if not f.cancelled() and (e := f.exception()) is not None]
    _raise(failed, len(tasks), name)


def _hopeless(exc: BaseException | None) -> bool:
    return isinstance(exc, DzError) and exc.code in _HOPELESS


def _raise(failed: list[tuple[str, BaseException]], of: int, name: str) -> None:
    """One error for all files that could not be fetched; what is not a DzError is raised as it is."""
    causes: dict[str, DzError] = {}
    for path, e in failed:
        if isinstance(e, DzError):
            causes[path] = e
        elif not isinstance(e, Stopped):
            raise e
    if not causes:
        return
    first = next((e for e in causes.values() if _hopeless(e)), next(iter(causes.values())))
    more = f" and {len(causes) - 3} more" if len(causes) > 3 else ""
    what = f"{len(causes)} of {of} files of {name} could not be fetched: {', '.join(list(causes)[:3])}{more}"
    raise type(first)(what, first.why, first.next, code=first.code) from first
