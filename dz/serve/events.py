"""Server-sent events, and clients that go away: a request ends as soon as nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dz.serve.jsonbody import dump

T = TypeVar("T")
KEEP_ALIVE = 15.0  # seconds of silence after which a comment is sent
DONE = b"data: [DONE]\n\n"


class Gone(Exception):
    """The client closed the connection."""


def event(value: object) -> bytes:
    """One event with a JSON document."""
    return b"data: " + dump(value) + b"\n\n"


async def unless_gone(request: Request, work: Awaitable[T], *, timeout: float | None = None) -> T | None:
    """The result of `work`; None when `timeout` seconds pass first (the work goes on). Raises Gone, and cancels the
    work, when the client closes the connection."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_closed(request.receive))
    try:
        await asyncio.wait({task, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise Gone
        return None
    except BaseException:
        task.cancel()
        raise
    finally:
        gone.cancel()


async def _closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of events. `close` runs once when it ends, however it ends."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        self._events, self._close = events, close
        self.background, self.status_code = None, 200
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the client goes."""
        tasks = {asyncio.create_task(self._pump(send)), asyncio.create_task(_closed(receive))}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close()
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OSError):
                raise error

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        waiting: asyncio.Future[bytes] | None = None
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(anext(self._events))
                done, _ = await asyncio.wait({waiting}, timeout=KEEP_ALIVE)
                if not done:
                    await self._send(send, b": keep-alive\n\n")
                    continue
                try:
                    chunk = waiting.result()
                except StopAsyncIteration:
                    break
                waiting = None
                await self._send(send, chunk)
        finally:
            if waiting is not None:
                waiting.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send(send: Send, chunk: bytes) -> None:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
