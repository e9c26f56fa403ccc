"""Run a job and answer: in one document or as events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from dz.serve.assemble import Piece
from dz.serve.errors import ApiError
from dz.serve.events import DONE, EventStream, Gone, event, unless_gone
from dz.serve.job import Choice, Job
from dz.serve.jsonbody import dump
from dz.serve.shapes import Shape, Wanted

log = logging.getLogger("dz.serve")
FIRST = 1.0  # seconds in which a refusal by the engine still becomes a status, not an event
Pieces = AsyncIterator[tuple[Choice, Piece]]


async def answer(
    request: Request, job: Job, shape: Shape, wanted: Wanted, *, stream: bool, over: Callable[[], None]
) -> Response:
    """The response to a request. `over` is called once, when the request has ended in whatever way. Raises ApiError for
    what fails before the first byte, Gone when the client left."""

    async def close() -> None:
        await job.close()
        over()

    first: asyncio.Future[tuple[Choice, Piece]] | None = None
    try:
        await job.start()
        if not stream:
            await unless_gone(request, _drain(job))
            await close()
            return Response(dump(shape.whole(job)), media_type="application/json")
        pieces = job.pieces()
        first = asyncio.ensure_future(anext(pieces))
        await unless_gone(request, asyncio.shield(first), timeout=FIRST)
    except BaseException:
        if first is not None:
            first.cancel()
        await close()
        raise
    return EventStream(_events(job, shape, wanted, first, pieces), close)


async def _drain(job: Job) -> None:
    async for _ in job.pieces():
        pass


async def _events(
    job: Job, shape: Shape, wanted: Wanted, first: Awaitable[tuple[Choice, Piece]], rest: Pieces
) -> AsyncIterator[bytes]:
    try:
        for chunk in shape.opening(job):
            yield event(chunk)
        async for choice, piece in _chain(first, rest):
            chunk = shape.chunk(choice, piece)
            if chunk is not None:
                yield event({**chunk, "usage": job.usage()} if wanted.usage_always else chunk)
        if wanted.usage:
            yield event({**shape.bare(), "usage": job.usage()})
    except ApiError as e:
        yield event(e.body())
    except (asyncio.CancelledError, Gone):
        raise
    except Exception:
        log.exception("request %s failed", job.name)
        yield event(ApiError(500, f"internal error (request {job.name})").body())
    yield DONE


async def _chain(first: Awaitable[tuple[Choice, Piece]], rest: Pieces) -> Pieces:
    yield await first
    async for item in rest:
        yield item


def log_end(job: Job, path: str) -> None:
    """One line about a finished request: sizes and times, never its text."""
    finish = ",".join(c.whole.finish or "abort" for c in job.choices)
    usage, seconds = job.usage(), time.monotonic() - job.arrived
    log.warning(
        "%s %s: %s prompt + %s new tokens, %.2f s, %s",
        path, job.name, usage["prompt_tokens"], usage["completion_tokens"], seconds, finish,
    )  # fmt: skip
