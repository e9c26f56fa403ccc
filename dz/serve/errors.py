"""Errors as OpenAI clients know them: `{"error": {"message", "type", "param", "code"}}` with the matching status."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from dz.errors import DzError, EnvironmentFailure
from dz.serve.jsonbody import dump

TYPES = {
    400: "BadRequestError",
    401: "authentication_error",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
HOPELESS = frozenset({400, 401, 404, 405, 413, 415, 501})  # sending the same again cannot help; SDKs are told so


class ApiError(Exception):
    """An answer that is an error. `param` names the field at fault."""

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after

    def body(self) -> dict[str, Any]:
        """The JSON document."""
        kind = TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def headers(self) -> dict[str, str]:
        """Headers that tell a client whether and when to come again."""
        out = {"x-should-retry": "false"} if self.status in HOPELESS else {}
        if self.retry_after is not None:
            out["retry-after"] = str(self.retry_after)
        if self.status == 401:
            out["www-authenticate"] = "Bearer"
        return out

    def response(self) -> Response:
        """The HTTP response."""
        return Response(dump(self.body()), self.status, self.headers(), "application/json")


def bad(message: str, param: str | None = None) -> ApiError:
    """A 400: the request is at fault."""
    return ApiError(400, message, param=param)


def unavailable(reason: str) -> ApiError:
    """A 503: the engine cannot answer now."""
    return ApiError(503, reason, retry_after=5)


def from_dz(error: DzError, param: str | None = None) -> ApiError:
    """A DzError about a request: 501 where the server's installation lacks something, else 400."""
    status = 501 if isinstance(error, EnvironmentFailure) else 400
    hint = f" ({error.next})" if status == 501 else ""
    return ApiError(status, f"{error.what}: {error.why}{hint}", param=param)
