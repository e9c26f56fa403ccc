"""Upstream's answers, asked once: kept in the workspace under a hash of everything that they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import blake3
import msgspec

from dz.core import jsonio
from dz.core.protocols import Progress
from dz.errors import EnvironmentFailure, Refused
from dz.hub.lock import Lock
from dz.upstream import reference
from dz.upstream.reference import Answer, Case, Facts, Session

if TYPE_CHECKING:
    import torch


class Oracle(Protocol):
    """What the checks ask of upstream."""

    def facts(self) -> Facts:
        """What upstream says about the model, without its weights."""
        ...

    def ask(self, cases: Sequence[Case], dtype: str = "float32", *, limit: float | None = None) -> list[Answer]:
        """The answers in the order of the cases. Raises EnvironmentFailure when they cannot be had here."""
        ...

    def scores(self, tokens: Sequence[int], dtype: str = "float32") -> torch.Tensor:
        """Upstream's logits [T, V] of one forward over the tokens."""
        ...


class Golden:
    """Upstream's answers for one locked model, from `folder` or from an upstream run of each dtype that is asked for.
    The runs stay loaded until `close()`; when a second does not fit beside the first, the first ends."""

    def __init__(
        self, lock: Lock, folder: Path, *, trust: bool, plugins: Sequence[str], log: Path, progress: Progress
    ) -> None:
        self._lock, self._folder, self._trust, self._plugins = lock, folder, trust, plugins
        self._log, self._progress = log, progress
        self._base = stamp(lock, trust, plugins)
        self._sessions: dict[str, Session] = {}
        self._facts: Facts | None = None

    def facts(self) -> Facts:
        """See Oracle."""
        if self._facts is None:
            path = self._folder / f"facts-{self._base[:16]}.json"
            if path.is_file():
                self._facts = msgspec.json.decode(path.read_bytes(), type=Facts)
            else:
                self._facts = self._session("float32")([]).facts
                jsonio.write_text(path, msgspec.json.encode(self._facts).decode())
        return self._facts

    def ask(self, cases: Sequence[Case], dtype: str = "float32", *, limit: float | None = None) -> list[Answer]:
        """See Oracle."""
        keys = [self._key(case, dtype) for case in cases]
        found: dict[str, Answer] = {k: a for k in keys if (a := self._read(k)) is not None}
        new = {k: c for k, c in zip(keys, cases, strict=True) if k not in found}
        if new:
            run = self._run(list(new.values()), dtype, None, limit)
            for key, answer in zip(new, run, strict=True):
                found[key] = answer
                if not answer.error:
                    jsonio.write_text(self._path(key), msgspec.json.encode(answer).decode())
        return [msgspec.structs.replace(found[k], id=c.id) for k, c in zip(keys, cases, strict=True)]

    def scores(self, tokens: Sequence[int], dtype: str = "float32") -> torch.Tensor:
        """See Oracle. Raises Refused when upstream fails on them."""
        from safetensors.torch import load_file

        case = Case(id="scores", kind="score", tokens=list(tokens), dense=True)
        path = self._path(self._key(case, dtype)).with_suffix(".safetensors")
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            (answer,) = self._run([case], dtype, new, None)
            if answer.error:
                what = "upstream's own forward without a cache fails"
                raise Refused(what, answer.error, "see reference.log", code="golden")
            new.rename(path)
        return load_file(path)["scores"]

    def close(self) -> None:
        """End the upstream runs."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def _run(self, cases: list[Case], dtype: str, dense: Path | None, limit: float | None) -> list[Answer]:
        try:
            return self._session(dtype)(cases, dense=dense, limit=limit).answers
        except EnvironmentFailure as e:
            others = [d for d in self._sessions if d != dtype]
            if e.code != "no_memory" or not others:
                raise
            for other in others:
                self._sessions.pop(other).close()
            return self._session(dtype)(cases, dense=dense, limit=limit).answers

    def _session(self, dtype: str) -> Session:
        if dtype not in self._sessions:
            self._sessions[dtype] = Session(
                self._lock.source,
                trust=self._trust,
                dtype=dtype,
                plugins=self._plugins,
                log=self._log.with_name(f"{self._log.stem}-{dtype}{self._log.suffix}"),
                progress=self._progress,
            )
        return self._sessions[dtype]

    def _key(self, case: Case, dtype: str) -> str:
        asked: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(case, id=""))
        pictures = [_digest(Path(p).read_bytes()) for p in _pictures(case)]
        return _digest(msgspec.json.encode([self._base, dtype, asked, pictures], order="sorted"))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key[:32]}.json"

    def _read(self, key: str) -> Answer | None:
        path = self._path(key)
        return msgspec.json.decode(path.read_bytes(), type=Answer) if path.is_file() else None


def stamp(lock: Lock, trust: bool, plugins: Sequence[str]) -> str:
    """A digest of everything that upstream's answers depend on beside the question: the files, the versions of what
    runs them, and the code that asks."""
    versions = {name: _version(name) for name in ("torch", "transformers", "tokenizers", "pillow")}
    source = lock.source
    here = Path(reference.__file__).parent
    code = [_digest(p.read_bytes()) for p in sorted(here.rglob("*.py"))]
    files = [source.rev8, source.code_hash, source.commit, lock.stamps]
    return _digest(msgspec.json.encode([*files, versions, trust, code, sorted(plugins)], order="sorted"))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _digest(data: bytes) -> str:
    return blake3.blake3(data).hexdigest()


def _pictures(case: Case) -> list[str]:
    parts = [p for m in case.messages if isinstance(m["content"], list) for p in m["content"]]
    return [p["path"] for p in parts if p.get("type") == "image"]
