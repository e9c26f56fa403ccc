"""recovery: the engine is killed in mid-request; clients hear of it, /health tells, and it comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dz.accept import prompts
from dz.accept.check import Check, failed, passed, skipped
from dz.accept.client import AnswerError
from dz.accept.server import Own, engine_pid
from dz.core.check import Result
from dz.verify.divergence import compare

if TYPE_CHECKING:
    from dz.accept.client import Client
    from dz.accept.context import Context

TICK = 0.02  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Most seconds until the open request ends with an error, until /health is not 200, and until the restarted engine
    answers again."""

    error_seconds: float = 5.0
    health_seconds: float = 5.0
    restart_seconds: float = 600.0
    tokens: int = 16


@dataclass(slots=True)
class _Open:
    """A long request in a thread: the time it ended, its error or None when it was answered."""

    ended: float | None = None
    error: AnswerError | None = None
    tokens: int = 0
    begun: threading.Event = field(default_factory=threading.Event)

    def run(self, client: Client, room: int) -> None:
        """Ask for as much as fits, and stream it to see that it has begun."""
        try:
            for _ in client.tokens(prompts.FIRST, room):
                self.tokens += 1
                self.begun.set()
        except AnswerError as e:
            self.error = e
        self.ended = time.monotonic()
        self.begun.set()


def run(ctx: Context, params: Params) -> Result:
    """See the module."""
    client, server = ctx.client(), ctx.server
    if not isinstance(server, Own) or server.pid is None:
        return skipped("the server was not started here")
    before = client.complete(prompts.FIRST, params.tokens)
    victim = engine_pid(server.pid)
    if victim is None:
        return skipped("the engine's process cannot be found (no /proc, or another server)")
    request = _Open()
    thread = threading.Thread(target=request.run, args=(client, max(client.max_model_len - 64, 64)), daemon=True)
    thread.start()
    if not request.begun.wait(60) or request.ended is not None:
        return failed("a long request ended before the engine could be killed: nothing was shown", n=0)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    sick = _wait(lambda: client.health() != 200, params.health_seconds)
    thread.join(max(params.error_seconds - (time.monotonic() - killed), 0.0))
    heard = None if request.ended is None else request.ended - killed
    well = _wait(lambda: client.health() == 200, params.restart_seconds) if sick is not None else None
    faults = []
    if heard is None or heard > params.error_seconds:
        faults.append(f"the open request had no end after {params.error_seconds:g} s")
    elif request.error is None:
        faults.append("the open request ended without an error")
    if sick is None:
        faults.append(f"/health still said 200 after {params.health_seconds:g} s")
    elif well is None:
        faults.append(f"/health did not come back within {params.restart_seconds:g} s")
    else:
        after = client.complete(prompts.FIRST, params.tokens)
        same = compare(before.tokens, after.tokens)
        faults += [f"after the restart the answer differs: {same.text()}"] if same.at is not None else []
    figures = (
        f"killed after {request.tokens} tokens; error in {_s(heard)}, /health tells in {_s(sick)}, back in {_s(well)}"
    )
    make = failed if faults else passed
    return make(
        "; ".join([*faults, figures]),
        value=heard,
        unit="s",
        threshold=params.error_seconds,
        n=1,
        evidence=(ctx.relative(ctx.folder / "server.log"),),
        details={"error_seconds": heard, "health_seconds": sick, "restart_seconds": well, "faults": faults,
                 "said": "" if request.error is None else f"{request.error.what}: {request.error.why}"},
    )  # fmt: skip


def _wait(there: Callable[[], bool], limit: float) -> float | None:
    """The seconds until `there()` is true; None when `limit` passes first."""
    begun = time.monotonic()
    while True:
        if there():
            return time.monotonic() - begun
        if time.monotonic() - begun > limit:
            return None
        time.sleep(TICK)


def _s(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.2f} s"


CHECK = Check(
    id="recovery",
    summary="The engine killed in mid-request: an error at once, /health tells, a restart that answers.",
    params=Params,
    needs=("own_server",),
    run=run,
)
