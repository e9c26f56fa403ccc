"""The FastAPI application: routes, strict JSON, and one shape for every error."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import dz
from dz.serve import fields, jsonbody, routes, schemas
from dz.serve.errors import ApiError
from dz.serve.events import Gone
from dz.serve.gate import Gate
from dz.serve.server import Server

log = logging.getLogger("dz.serve")
Handler = Callable[[Request], Awaitable[Response]]


class StrictRequest(Request):
    """A request whose body must be JSON, and said to be."""

    async def json(self) -> Any:
        """The body's value. Raises ApiError."""
        if not hasattr(self, "_value"):
            self._value = await self._read()
        return self._value

    async def _read(self) -> Any:
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, "the body must be JSON: send the header Content-Type: application/json")
        try:
            return jsonbody.load(await self.body())
        except ValueError as e:
            raise ApiError(400, f"the body is not valid JSON: {e}") from None


class StrictRoute(APIRoute):
    """Routes that read bodies strictly and answer errors in one shape."""

    def get_route_handler(self) -> Any:
        """FastAPI's handler with our request and our errors."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            try:
                if self.body_field is not None:
                    await strict.json()
                return await inner(strict)
            except Exception as e:  # noqa: BLE001  every failure gets the one shape; unknown ones are logged
                return _failure(e, strict)

        return handle


def create_app(server: Server) -> ASGIApp:
    """The application for a server."""
    app = FastAPI(
        title="dz",
        version=dz.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        responses=schemas.ERRORS,
    )
    app.router.route_class = StrictRoute
    app.router.redirect_slashes = False
    app.add_exception_handler(HTTPException, _no_route)
    routes.add(app, server)
    config = server.config
    gate = Gate(
        app,
        keys=config.api_keys,
        metrics_public=config.metrics_public,
        max_body=config.limits.body,
        always_id=config.request_id_headers,
    )
    if not config.allowed_origins:
        return gate
    origins, everything = list(config.allowed_origins), ["*"]
    return CORSMiddleware(gate, allow_origins=origins, allow_methods=everything, allow_headers=everything)


async def _no_route(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, as JSON."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    said = {
        404: f"there is no {request.url.path[:200]}",
        405: f"{request.url.path[:200]} does not take {request.method}",
    }
    out = ApiError(status, said.get(status, "the request cannot be handled")).response()
    allowed = (getattr(error, "headers", None) or {}).get("Allow")
    if allowed:
        out.headers["allow"] = allowed
    return out


def _failure(error: Exception, request: Request) -> Response:
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, RequestValidationError):
        return fields.validation(list(error.errors())).response()
    if isinstance(error, Gone):
        return Response(status_code=499)  # nobody reads it
    name = request.state.request_id
    log.error("request %s failed", name, exc_info=error)
    return ApiError(500, f"internal error; the server's log tells more (request {name})").response()
