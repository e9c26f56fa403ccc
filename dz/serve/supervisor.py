"""Keeps an engine worker running, hands requests to it and its outputs back, and says at once when it is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from dz.core.messages import Abort, Fatal, Output, Ready, Stats, Stop, Submit
from dz.errors import DzError, EnvironmentFailure, Refused, UsageError
from dz.serve.errors import ApiError, unavailable
from dz.serve.totals import Totals
from dz.serve.worker import Launch, Worker

log = logging.getLogger("dz.serve")
State = Literal["loading", "ready", "dead", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """When an engine with open requests counts as frozen: `silence` seconds without any message (a step may take long),
    `stall` seconds without a token or a step, `stopped` seconds in the state that SIGSTOP causes. `tick` is how often
    this is looked at."""

    silence: float = 300.0
    stall: float = 600.0
    stopped: float = 5.0
    tick: float = 0.25


@dataclass(slots=True)
class Sink:
    """Where the outputs of one request's sequences go; an ApiError in the queue ends them all."""

    queue: asyncio.Queue[Output | ApiError] = field(default_factory=asyncio.Queue)


class Supervisor:
    """`start` once, then `submit` and `abort`; `stop` at the end. `state` and `reason` are what /health tells."""

    def __init__(
        self,
        launch: Launch,
        *,
        max_restarts: int = 1,
        watch: Watch | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self._launch, self._max_restarts, self._watch, self._say = launch, max_restarts, watch or Watch(), say
        self.state: State = "loading"
        self.reason = "the engine is loading"
        self.ready: Ready | None = None
        self.totals = Totals()
        self.restarts = 0
        self.pid: int | None = None
        self._open: dict[str, Sink] = {}
        self._worker: Worker | None = None
        self._first: asyncio.Future[Ready] | None = None
        self._task: asyncio.Task[None] | None = None
        self._progress = time.monotonic()

    async def start(self) -> Ready:
        """Start the worker and wait until it has loaded. Raises the DzError with which the engine refused, or an
        EnvironmentFailure when it died."""
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise())
        return await self._first

    @property
    def open(self) -> int:
        """How many sequences are submitted and not finished."""
        return len(self._open)

    @property
    def levels(self) -> Stats:
        """The engine's latest word about itself."""
        return self.totals.latest

    def check(self) -> None:
        """Raise ApiError 503 unless requests can be served."""
        if self.state != "ready":
            raise unavailable(self.reason)
        worker = self._worker
        if worker is not None and (worker.stopped or (self._open and self._silent(worker) > self._watch.silence)):
            raise unavailable("the engine process is stopped" if worker.stopped else "the engine does not answer")

    async def submit(self, message: Submit, sink: Sink) -> None:
        """Hand a sequence to the engine; its outputs come to `sink`. Raises ApiError 503."""
        self.check()
        worker = self._worker
        if not self._open:  # silence and stalls count from the first open request
            self._progress = time.monotonic()
            if worker is not None:
                worker.last_message = self._progress
        self._open[message.id] = sink
        if worker is None or not await worker.send(message):
            self._open.pop(message.id, None)
            raise unavailable("the engine does not take requests")

    async def abort(self, ids: Iterable[str]) -> None:
        """Forget sequences, here and in the engine."""
        known = [i for i in ids if self._open.pop(i, None) is not None]
        if known and self._worker is not None and self.state == "ready":
            await self._worker.send(Abort(known), timeout=0.5)

    async def stop(self, *, grace: float = 5.0) -> None:
        """End the worker; whatever is still open gets an error. A worker that has loaded may take `grace` seconds."""
        polite = self.state == "ready" and grace > 0
        self.state, self.reason = "stopped", "the server is shutting down"
        self._fail_all()
        if self._first is not None and not self._first.done():
            self._first.set_exception(
                EnvironmentFailure("the engine was stopped", self.reason, "dz serve", code="stopped")
            )
        if self._worker is not None and not (polite and await self._worker.send(Stop(), timeout=0.2)):
            self._worker.kill()
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=max(grace, 1.0))
            if not done:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------- the loop
    async def _supervise(self) -> None:
        while True:
            end = await self._run_once()
            if self.state == "stopped":
                return
            if self._first is not None and not self._first.done():
                self.state, self.reason = "dead", end.what
                self._first.set_exception(end)
                return
            if self.restarts >= self._max_restarts:
                self.state = "dead"
                self.reason = f"{end.what}; it was restarted {self.restarts} of {self._max_restarts} times"
                self._say(f"error: {self.reason}; answering 503 from now on")
                return
            self.restarts += 1
            self.state, self.reason = "loading", f"{end.what}; the engine is loading again"
            self._say(f"warning: {end.what}; starting it again ({self.restarts} of {self._max_restarts})")

    async def _run_once(self) -> DzError:
        """Run one worker to its end. Returns why it ended."""
        try:
            worker = self._worker = await Worker.start(self._launch)
        except OSError as e:
            return EnvironmentFailure("the engine process cannot be started", str(e), "dz doctor", code="engine_start")
        self.pid = worker.process.pid
        fatal: list[Fatal] = []
        jobs = [
            asyncio.create_task(self._listen(worker, fatal)),
            asyncio.create_task(self._guard(worker)),
            asyncio.create_task(worker.process.wait()),
        ]
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            loading, frozen = self.state == "loading", jobs[1].result() if jobs[1] in done else None
            self._ending(_how(worker.process.returncode, frozen))
            for job in jobs[:2]:
                job.cancel()
            await asyncio.gather(*jobs[:2], return_exceptions=True)
            if jobs[2] in done:
                fatal += [m for m in await worker.leftovers() if isinstance(m, Fatal)]
            if not fatal and jobs[0] in done and (broken := jobs[0].exception()) is not None:
                return _protocol(broken)
        finally:
            self._worker = self.pid = None
            for job in jobs:
                job.cancel()
            await worker.close(grace=2.0 if fatal or self.state == "stopped" else 0.0)
        if fatal:
            return _fatal(fatal[0])
        return _ended(worker.process.returncode, frozen, loading=loading)

    async def _listen(self, worker: Worker, fatal: list[Fatal]) -> None:
        """Take messages until a Fatal comes."""
        while True:
            match await worker.receive():
                case Output() as output:
                    self._progress = time.monotonic()
                    sink = self._open.get(output.id)
                    if sink is not None:
                        if output.finish is not None:
                            del self._open[output.id]
                        sink.queue.put_nowait(output)
                case Stats() as stats:
                    if self.totals.update(stats):
                        self._progress = time.monotonic()
                case Ready() as ready:
                    self._become_ready(ready)
                case Fatal() as end:
                    fatal.append(end)
                    return

    def _become_ready(self, ready: Ready) -> None:
        if self.state == "stopped":
            return
        self.ready, self.state, self.reason = ready, "ready", ""
        self.totals.restart()
        if self._first is not None and not self._first.done():
            self._first.set_result(ready)
        else:
            self._say("the engine has loaded again")

    async def _guard(self, worker: Worker) -> str:
        """Returns, with the reason, when the worker is frozen."""
        running = time.monotonic()
        while True:
            await asyncio.sleep(self._watch.tick)
            if not worker.stopped:
                running = time.monotonic()
            if not self._open or self.state != "ready":
                continue
            if self._silent(worker) > self._watch.silence:
                return f"it gave no sign of life for {self._watch.silence:g} s"
            if time.monotonic() - running > self._watch.stopped:
                return "a signal had stopped it"
            if time.monotonic() - self._progress > self._watch.stall:
                return f"it made no step for {self._watch.stall:g} s while requests were open"

    @staticmethod
    def _silent(worker: Worker) -> float:
        return time.monotonic() - worker.last_message

    def _ending(self, how: str) -> None:
        """The worker is gone or about to be: requests end now, not when its remains are cleared away."""
        if self.state != "stopped":
            self.state, self.reason = "loading", how
        self._fail_all()

    def _fail_all(self) -> None:
        """End every open sequence with an error."""
        sinks = {id(s): s for s in self._open.values()}
        self._open.clear()
        for sink in sinks.values():
            sink.queue.put_nowait(unavailable(self.reason))


def _how(code: int | None, frozen: str | None) -> str:
    if frozen:
        return "the engine process froze and was killed"
    if code is None:
        return "the engine has failed"
    return (
        f"the engine process was killed by signal {-code}" if code < 0 else f"the engine process ended with code {code}"
    )


def _ended(code: int | None, frozen: str | None, *, loading: bool) -> DzError:
    return EnvironmentFailure(
        _how(code, frozen),
        frozen or ("while it was loading" if loading else "while it was serving"),
        "read the lines above; the engine writes its traceback there",
        code="engine_died",
    )


def _protocol(error: BaseException) -> DzError:
    return EnvironmentFailure(
        "the engine said something that the server does not understand",
        f"{type(error).__name__}: {error}",
        "server and engine must be of one version of dz",
        code="engine_protocol",
    )


def _fatal(message: Fatal) -> DzError:
    cls = {1: Refused, 3: EnvironmentFailure}.get(message.exit_code, UsageError)
    return cls(message.what, message.why, message.next, code=message.code)
