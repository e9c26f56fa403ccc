"""The ASGI layer round every route: request ids, API keys, body size."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dz.serve.errors import ApiError

OPEN = frozenset({"/health", "/ping", "/version"})  # everything else needs a key, whatever routes are added
_REQUEST_ID = re.compile(r"[\w.:@-]{1,128}\Z", re.ASCII)


class Gate:
    """Lets a request through to `app`. `keys` empty: everybody may come."""

    def __init__(
        self, app: ASGIApp, *, keys: Sequence[str], metrics_public: bool, max_body: int, always_id: bool
    ) -> None:
        self._app, self._max_body, self._always_id = app, max_body, always_id
        self._keys = [hashlib.sha256(k.encode("utf-8", "surrogateescape")).digest() for k in keys]
        self._open = OPEN | ({"/metrics"} if metrics_public else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, started = Headers(scope=scope), time.monotonic()
        given = headers.get("x-request-id", "")
        given = given if _REQUEST_ID.match(given) else ""
        request_id = given or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                if given or self._always_id:
                    out["x-request-id"] = request_id
                out["openai-processing-ms"] = str(round(1000 * (time.monotonic() - started)))
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, self._counted(receive), reply)
        except ApiError as e:
            await e.response()(scope, receive, reply)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if self._keys and scope["path"] not in self._open and scope["method"] != "OPTIONS":
            self._check_key(headers)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._max_body:
            raise self._too_large()

    def _check_key(self, headers: Headers) -> None:
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode("latin-1", "replace")).digest()
        found = [hmac.compare_digest(digest, key) for key in self._keys]  # all of them: the time tells nothing
        if not any(found):
            why = "the API key is not one of this server's" if given else "this server asks for an API key"
            raise ApiError(401, f"{why}; send the header Authorization: Bearer KEY")

    def _counted(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_body:,} bytes")
