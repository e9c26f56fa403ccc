"""The server under test: started here as `python -m dz serve`, or given by its URL."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import dz
from dz.accept.client import Client
from dz.errors import DzError, EnvironmentFailure, Refused

READY = re.compile(r"^ready: (http\S+)", re.MULTILINE)
WORKER = b"dz.engine.worker"  # in the command line of an engine process
POLL = 0.02  # seconds


class Server(Protocol):
    """What a check may know of the server."""

    own: bool

    @property
    def ready_seconds(self) -> float | None:
        """Seconds from the start to the ready line; None where it was not started here."""
        ...

    def client(self) -> Client:
        """A client, the server being started first where that is needed. Raises DzError when it does not start."""
        ...

    def log(self) -> str:
        """What the server said so far."""
        ...

    def stop(self) -> None:
        """End what was started here."""
        ...


class Given:
    """A server that runs already."""

    own = False
    ready_seconds = None

    def __init__(self, url: str) -> None:
        self._client = Client(url)

    def client(self) -> Client:
        """See Server. Raises EnvironmentFailure when nobody answers there."""
        if not self._client.health():
            what = f"nobody answers at {self._client.url}"
            raise EnvironmentFailure(what, "GET /health brought nothing", "dz serve MODEL", code="no_server")
        return self._client

    def log(self) -> str:
        """Its log is its owner's."""
        return ""

    def stop(self) -> None:
        """Drop the connections."""
        self._client.close()


class Own:
    """A server started here, in a session of its own, so that a Ctrl-C ends the checks before it ends the server."""

    own = True

    def __init__(self, command: Sequence[str], log: Path, *, limit: float = 3600.0) -> None:
        self._command, self._log, self._limit = list(command), log, limit
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._problem: DzError | None = None
        self.ready_seconds: float | None = None

    def client(self) -> Client:
        """See Server. A start that failed is not tried again."""
        if self._problem is not None:
            raise self._problem
        if self._client is None:
            try:
                self._client = self._start()
            except DzError as e:
                self._problem = e
                raise
        return self._client

    @property
    def pid(self) -> int | None:
        """The server's process, None before it was started."""
        return self._process.pid if self._process else None

    def log(self) -> str:
        """See Server."""
        return self._log.read_text("utf-8", "replace") if self._log.is_file() else ""

    def stop(self) -> None:
        """End the server and everything that it started: asked first, then killed."""
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            for sign, wait in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, sign)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(wait)
        self._client = self._process = None

    def _start(self) -> Client:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        env = dict(os.environ)
        package = str(Path(dz.__file__).resolve().parent.parent)
        env["PYTHONPATH"] = os.pathsep.join(p for p in (package, env.get("PYTHONPATH")) if p)
        begun = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        while True:
            found = READY.search(self.log())
            if found:
                self.ready_seconds = time.monotonic() - begun
                return Client(found[1])
            if self._process.poll() is not None:
                raise _not_started(self.log(), self._process.returncode)
            if time.monotonic() - begun > self._limit:
                self.stop()
                why = f"no ready line within {self._limit:.0f} s"
                raise Refused("the server did not start", why, f"read {self._log}", code="not_ready")
            time.sleep(POLL)


def serve_command(model: str, arguments: Sequence[str]) -> list[str]:
    """The command line that starts the server on a free port."""
    fixed = ["--host", "127.0.0.1", "--port", "0", "--drain-timeout", "2"]
    return [sys.executable, "-m", "dz", "serve", model, *fixed, *arguments]


def _not_started(log: str, code: int) -> DzError:
    """The server's own last error, as it printed it."""
    what = why = then = ""
    for line in log.splitlines():
        if line.startswith("error: "):
            what, why, then = line.removeprefix("error: "), "", ""
        elif line.startswith("  why: "):
            why = line.removeprefix("  why: ")
        elif line.startswith("  next: "):
            then = line.removeprefix("  next: ")
    last = (log.strip().splitlines() or ["it said nothing"])[-1]
    cls = EnvironmentFailure if code == EnvironmentFailure.exit_code else Refused
    return cls(what or f"the server ended with code {code}", why or last, then or "read server.log", code="not_started")


def engine_pid(server: int) -> int | None:
    """The engine process below the server's, found in /proc; None when there is none, or no /proc."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server and WORKER in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except (OSError, ValueError, IndexError):
            continue  # it ended while we looked
    return None
