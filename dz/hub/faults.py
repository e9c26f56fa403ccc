"""The hub client's exceptions in our words: by name and status, without importing the client; tokens blotted out."""

from __future__ import annotations

import errno
import re

from dz.errors import DzError, EnvironmentFailure, UsageError, explain

_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{4,}|(?i:bearer)\s+\S+")
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]+")
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_NO_ANSWER = ("ConnectError", "TimeoutException", "NetworkError", "RemoteProtocolError", "ConnectionError")


class TransferBroken(Exception):
    """An answer that does not hold what was asked for; asking again may help."""


def blot(text: str, token: str | None = None) -> str:
    """`text` without tokens and without the query of any address (signed addresses carry credentials there)."""
    if token:
        text = text.replace(token, "***")
    return _QUERY.sub(r"\1", _TOKEN.sub("***", text))


def status(exc: BaseException) -> int | None:
    """The HTTP status behind an exception of the client, or behind what caused it."""
    codes = (getattr(getattr(e, "response", None), "status_code", None) for e in _chain(exc))
    return next((c for c in codes if isinstance(c, int)), None)


def retry_after(exc: BaseException) -> float:
    """Seconds that the hub asked to wait; 0 if it did not."""
    for e in _chain(exc):
        headers = getattr(getattr(e, "response", None), "headers", None) or {}
        if str(headers.get("Retry-After", "")).isdigit():
            return float(headers["Retry-After"])
    return 0.0


def busy(exc: BaseException) -> bool:
    """Whether the hub answered that it cannot answer now."""
    return status(exc) in _BUSY


def passing(exc: BaseException) -> bool:
    """Whether trying again may help: a busy hub, a lost connection, a body that came short."""
    if status(exc) is not None:
        return busy(exc)
    lost = _named(exc, *_NO_ANSWER) and not _named(exc, "OfflineModeIsEnabled")
    return lost or isinstance(exc, TransferBroken) or "Consistency check" in str(exc)


def translate(exc: BaseException, *, model: str, endpoint: str, token: str | None = None) -> DzError:
    """The `DzError` for an exception that the hub client raised over `model` ("org/name" or "org/name@rev").

    Raises the exception itself when it is of no kind that the client or the operating system uses."""
    if isinstance(exc, DzError):
        return exc
    known = _by_name(exc, model, endpoint) or _by_status(status(exc), model, endpoint)
    if known:
        return known
    why, again = blot(_first_line(exc), token), f"dz fetch {model}"
    if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
        next = f"free space, then {again}"
        return EnvironmentFailure(f"the disk is full while fetching {model}", why, next, code="disk_full")
    if isinstance(exc, TransferBroken):
        next = f"{again}: it goes on where it stopped"
        return EnvironmentFailure(f"{model} is not whole yet", why, next, code="hub")
    if _named(exc, *_NO_ANSWER, "LocalEntryNotFoundError"):
        next = f"check network and HF_ENDPOINT, then {again}"
        return EnvironmentFailure(f"no answer from {endpoint}", why, next, code="connection")
    general = explain(exc)
    if general is None:
        raise exc
    return type(general)(f"{model}: {why}", general.why, again, code=general.code)


def _by_name(exc: BaseException, model: str, endpoint: str) -> DzError | None:
    name, _, revision = model.partition("@")
    if _named(exc, "OfflineModeIsEnabled"):
        return offline(model)
    if _named(exc, "GatedRepoError"):
        why = "its owner asks for an accepted licence, and the token sent (if any) has not accepted it"
        next = f"accept it at {endpoint}/{name}, then `hf auth login`"
        return EnvironmentFailure(f"{name} is gated", why, next, code="gated")
    if _named(exc, "RepositoryNotFoundError"):
        why = f"{endpoint} has no such repository, or it is private and no valid token was sent"
        next = f"check the name, or `hf auth login`, then dz fetch {model}"
        return EnvironmentFailure(f"no repository {name}", why, next, code="not_found")
    if _named(exc, "RevisionNotFoundError"):
        why = f"{name} has no such branch, tag or commit"
        next = f"dz fetch {name} --revision REV"
        return UsageError(f"no revision '{revision or 'main'}'", why, next, code="revision_not_found")
    if _named(exc, "EntryNotFoundError") and status(exc) == 404:
        why = f"the hub lists it and does not have it: {blot(_first_line(exc))}"
        next = "try later, or another --revision"
        return EnvironmentFailure(f"a file of {model} is missing on the hub", why, next, code="missing_on_hub")
    return None


def _by_status(code: int | None, model: str, endpoint: str) -> DzError | None:
    if code is None or code < 400:
        return None
    if code in (401, 403):
        why = f"{endpoint} answered {code}: the token is not valid, or may not read it"
        return EnvironmentFailure(f"{model} may not be read", why, "`hf auth login`, or another --token", code="auth")
    if code == 429:
        why = f"{endpoint} answered 429: too many requests from here"
        return EnvironmentFailure(f"{model} is not whole yet", why, f"wait, then dz fetch {model}", code="rate_limit")
    next = f"dz fetch {model}: it goes on where it stopped"
    return EnvironmentFailure(f"{model} is not whole yet", f"{endpoint} answered {code}", next, code="hub")


def offline(model: str) -> EnvironmentFailure:
    """The refusal to ask the hub in offline mode."""
    why = "offline mode is on (--offline or HF_HUB_OFFLINE), and nothing here has what was asked for"
    return EnvironmentFailure(f"{model} needs the network", why, f"dz fetch {model}, online", code="offline")


def _chain(exc: BaseException) -> list[BaseException]:
    out: list[BaseException] = []
    at: BaseException | None = exc
    while at is not None and at not in out:
        out.append(at)
        at = at.__cause__ or at.__context__
    return out


def _named(exc: BaseException, *names: str) -> bool:
    """Whether the exception, or what caused it, is of a class (or subclass) of one of these names."""
    return any(c.__name__ in names for e in _chain(exc) for c in type(e).__mro__)


def _first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0] if lines else type(exc).__name__
