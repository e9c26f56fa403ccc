"""The one error type with its four exits, and the one table that explains foreign exceptions.

Exit codes: 1 the honest no (check failed, refused, drift); 2 usage, bad input file, internal; 3 environment
(network, auth, disk, device, missing extra); 130 interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass


class DzError(Exception):
    """What happened (with the user's own value), why, and the next command to run. Printed as three lines."""

    exit_code = 2

    def __init__(self, what: str, why: str, next: str, *, code: str = "error") -> None:
        super().__init__(what)
        self.what, self.why, self.next, self.code = what, why, next, code

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), self.what, self.why, self.next, self.code)

    def lines(self) -> list[str]:
        """The three lines for a terminal."""
        return [f"error: {self.what}", f"  why: {self.why}", f"  next: {self.next}"]

    def data(self) -> dict:
        """The `dz.error/1` document."""
        return {
            "schema": "dz.error/1",
            "code": self.code,
            "what": self.what,
            "why": self.why,
            "next": self.next,
            "exit_code": self.exit_code,
        }


def _rebuild(cls: type[DzError], what: str, why: str, next: str, code: str) -> DzError:
    return cls(what, why, next, code=code)


class Refused(DzError):
    """The honest no: a check failed, an op is blocked, the checkpoint is broken, the plan drifted. Exit 1."""

    exit_code = 1


class UsageError(DzError):
    """A flag, a file or a name the user gave is wrong. Exit 2."""

    exit_code = 2


class EnvironmentFailure(DzError):
    """Network, credentials, disk, device or a missing package. Exit 3."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class _Rule:
    cls: type[DzError]
    why: str
    next: str
    code: str


# Matched by the names in an exception's MRO, so that no foreign library is imported to explain its errors.
_TABLE: dict[str, _Rule] = {
    "GatedRepoError": _Rule(
        EnvironmentFailure,
        "the repository asks for an accepted licence and a token",
        "accept the licence on its page, then `hf auth login`",
        "gated",
    ),
    "RepositoryNotFoundError": _Rule(
        EnvironmentFailure,
        "no such repository, or it is private and no token was sent",
        "check the name, or `hf auth login`",
        "not_found",
    ),
    "RevisionNotFoundError": _Rule(
        UsageError,
        "the repository has no such branch, tag or commit",
        "name an existing revision with --revision",
        "revision_not_found",
    ),
    "LocalEntryNotFoundError": _Rule(
        EnvironmentFailure,
        "the hub cannot be reached and the file is not in the cache",
        "check the network or HF_ENDPOINT, then run the command again",
        "offline",
    ),
    "HfHubHTTPError": _Rule(
        EnvironmentFailure, "the hub answered with an error", "run the command again; it resumes", "hub"
    ),
    "ConnectError": _Rule(
        EnvironmentFailure, "the address does not answer", "check the network, the host and the port", "connection"
    ),
    "ConnectionError": _Rule(
        EnvironmentFailure, "the address does not answer", "check the network, the host and the port", "connection"
    ),
    "TimeoutException": _Rule(
        EnvironmentFailure, "no answer within the time limit", "run the command again", "timeout"
    ),
    "OutOfMemoryError": _Rule(
        EnvironmentFailure,
        "the device has no memory left",
        "lower --max-model-len, --max-num-seqs or --gpu-memory-utilization",
        "out_of_memory",
    ),
    "MemoryError": _Rule(
        EnvironmentFailure, "the host has no memory left", "lower --max-model-len or --max-num-seqs", "out_of_memory"
    ),
    "PermissionError": _Rule(
        EnvironmentFailure, "the operating system refused access", "check the owner and mode of that path", "permission"
    ),
    "ModuleNotFoundError": _Rule(
        EnvironmentFailure,
        "a Python package is missing",
        "install it with pip, then run the command again",
        "missing_package",
    ),
    "OSError": _Rule(EnvironmentFailure, "the operating system refused", "check the path and the disk", "os"),
}


def explain(exc: BaseException) -> DzError | None:
    """The `DzError` for an exception the table knows, by the nearest class in its MRO; None for anything else."""
    if isinstance(exc, DzError):
        return exc
    for cls in type(exc).__mro__:
        rule = _TABLE.get(cls.__name__)
        if rule:
            text = str(exc).strip().splitlines()
            what = text[0] if text else type(exc).__name__
            return rule.cls(what, rule.why, rule.next, code=rule.code)
    return None
