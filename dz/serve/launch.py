"""Start, run and end the server with its engine: the one function behind `dz serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import uvicorn

from dz.core import jsonio
from dz.core.messages import Ready
from dz.core.plugins import run_plugins
from dz.engine.config import EngineSpec
from dz.errors import EnvironmentFailure
from dz.serve.app import create_app
from dz.serve.config import ServeConfig
from dz.serve.server import Server
from dz.serve.supervisor import Supervisor
from dz.serve.worker import Launch
from dz.upstream.processing import Processor

log = logging.getLogger("dz.serve")
INTERRUPTED = 130


class Listener(Protocol):
    """Who is told what happens; everything of it goes to stderr."""

    def note(self, text: str) -> None:
        """A line worth reading."""
        ...

    def loaded(self, ready: Ready) -> None:
        """The engine has loaded, with these figures."""
        ...


def serve(config: ServeConfig, listener: Listener) -> int:
    """Serve until a signal ends it; with `load_only`, until the model is loaded. Returns the exit code: 0 when it ended
    in order, 130 when a signal came while it loaded or a second one while it drained.

    Raises the DzError with which the engine refused to load, and EnvironmentFailure when the address is taken or the
    engine died before it was ready."""
    return asyncio.run(_Run(config, listener).main())


class _Http(uvicorn.Server):
    """uvicorn without its own signal handling; ours drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


class _Run:
    def __init__(self, config: ServeConfig, listener: Listener) -> None:
        self.config, self.say = config, listener
        launch = Launch(spec=self._spec, command=config.command, env=config.env)
        self.engine = Supervisor(launch, max_restarts=config.max_restarts, watch=config.watch, say=listener.note)
        self.server = Server(config, self.engine)
        self.signals = 0
        self.first_signal, self.second_signal = asyncio.Event(), asyncio.Event()

    def _spec(self, inbox: str, outbox: str) -> bytes:
        c = self.config
        spec = EngineSpec(
            source=jsonio.to_builtins(c.source),
            settings=c.settings,
            inbox=inbox,
            outbox=outbox,
            plan=c.plan,
            trust=c.trust,
            plugins=list(c.plugins),
            load_format=c.load_format,
        )
        return msgspec.json.encode(spec)

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signal)
        web = None if self.config.load_only else await self._listen()
        try:
            if not await self._load():
                return INTERRUPTED
            if web is None:
                return 0
            self.say.note(f"ready: {web.url}")
            await self._until(self.first_signal.wait(), web.task)
            if not self.first_signal.is_set():
                web.check()
            return await self._drain()
        finally:
            await self.engine.stop(grace=0.0 if self.second_signal.is_set() else 5.0)
            if web is not None:
                await web.stop()
            self.server.close()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _signal(self) -> None:
        self.signals += 1
        if self.signals == 1:
            self.first_signal.set()
        else:
            self.say.note("second signal: ending now")
            self.second_signal.set()

    async def _listen(self) -> _Web:
        bound = _bind(self.config)
        web = _Web(bound, create_app(self.server), self.config)
        await web.start()
        self.say.note(f"listening: {web.url} (503 until the model has loaded)")
        return web

    async def _load(self) -> bool:
        """Load engine and tokenizer side by side. False when a signal came first."""
        engine = asyncio.create_task(self.engine.start())
        tokenizer = asyncio.create_task(self._load_tokenizer())
        both = asyncio.gather(engine, tokenizer)
        await self._until(both, self.first_signal.wait())
        if not both.done():
            both.cancel()
            await asyncio.gather(both, return_exceptions=True)
            return False
        ready, processor = both.result()
        self.server.processor = processor
        self.say.loaded(ready)
        for problem in (processor.chat.problem, *(processor.image_problem.lines() if processor.image_problem else ())):
            if problem:
                self.say.note(f"note: {problem}")
        return True

    async def _load_tokenizer(self) -> Processor:
        def load() -> Processor:
            run_plugins(list(self.config.plugins), "server")
            return Processor.load(self.config.source, trust=self.config.trust, chat_template=self.config.chat_template)

        return await asyncio.get_running_loop().run_in_executor(self.server.thread, load)

    async def _drain(self) -> int:
        """Refuse new requests, let the running ones finish. Returns the exit code."""
        self.server.draining = True
        if not self.server.jobs:
            return 0
        limit = self.config.drain_timeout
        self.say.note(
            f"ending: {len(self.server.jobs)} requests may finish within {limit:g} s; a second signal ends now"
        )
        await self._until(self._idle(), self.second_signal.wait(), timeout=limit)
        if self.second_signal.is_set():
            return INTERRUPTED
        if self.server.jobs:
            self.say.note(f"{len(self.server.jobs)} requests are aborted")
        return 0

    async def _idle(self) -> None:
        while self.server.jobs:
            await asyncio.sleep(0.02)

    @staticmethod
    async def _until(*things: Any, timeout: float | None = None) -> None:
        """Wait for the first of several; coroutines among them are cancelled then."""
        tasks = [asyncio.ensure_future(t) for t in things]
        try:
            await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task, thing in zip(tasks, things, strict=True):
                if asyncio.iscoroutine(thing):
                    task.cancel()


class _Web:
    """The HTTP side."""

    def __init__(self, bound: socket.socket, app: Any, config: ServeConfig) -> None:
        self._bound, self._uds = bound, config.uds
        self.url = f"unix:{config.uds}" if config.uds else _url(bound)
        self._http = _Http(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=2,
            )
        )
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer from now on."""
        self.task = asyncio.create_task(self._http.serve(sockets=[self._bound]))
        while not self._http.started and not self.task.done():
            await asyncio.sleep(0.005)

    def check(self) -> None:
        """Raise what ended the HTTP server."""
        if self.task is not None and self.task.done():
            self.task.result()
            raise EnvironmentFailure("the HTTP server ended", "nothing asked it to", "dz serve", code="http_ended")

    async def stop(self) -> None:
        """Close the address and the connections."""
        self._http.should_exit = True
        if self.task is not None:
            await asyncio.gather(self.task, return_exceptions=True)
        self._bound.close()
        if self._uds:
            Path(self._uds).unlink(missing_ok=True)


def _bind(config: ServeConfig) -> socket.socket:
    """A listening socket. Raises EnvironmentFailure when the address cannot be had."""
    where = config.uds or f"{config.host}:{config.port}"
    try:
        if config.uds:
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            bound.bind(config.uds)
            return bound
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        # asyncio turns delays off (TCP_NODELAY) only where the protocol is stated: 40 ms an answer otherwise
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((config.host, config.port))
        return bound
    except (OSError, OverflowError) as e:
        then = "choose another --port (0 takes any free one), or --host" if not config.uds else "choose another --uds"
        raise EnvironmentFailure(f"cannot listen on {where}", str(e), then, code="address") from e


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
