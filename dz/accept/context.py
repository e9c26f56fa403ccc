"""What a check is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dz.accept.client import Client, at_once
from dz.accept.golden import Oracle
from dz.accept.server import Server
from dz.core import jsonio
from dz.core.protocols import Progress
from dz.core.workspace import Workspace
from dz.hub.lock import Lock

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The model under `lock`, the `server`, upstream's answers (`golden`), and where evidence goes. `dtype` is what the
    server computes in; `name` is the checklist's; `inventory` is the document that the server's plan was made from."""

    lock: Lock
    workspace: Workspace
    name: str
    inventory: Path
    dtype: str
    server: Server
    golden: Oracle
    progress: Progress

    @property
    def folder(self) -> Path:
        """The folder for evidence."""
        return self.workspace.evidence(self.name)

    def client(self) -> Client:
        """A client of the server, which is started if need be. Raises DzError when it does not start."""
        return self.server.client()

    def save(self, name: str, data: Any) -> str:
        """Keep raw numbers as evidence `name`.json; returns the path relative to the workspace."""
        path = self.folder / f"{name}.json"
        jsonio.write(path, data)
        return self.relative(path)

    def relative(self, path: Path) -> str:
        """A path as Result.evidence wants it."""
        return path.relative_to(self.workspace.folder).as_posix()

    def at_once(self, asks: Sequence[Callable[[], T]], *, limit: int = 32) -> list[T]:
        """Call all at the same time, at most `limit` of them; see `client.at_once`."""
        return at_once(asks, limit=limit)
