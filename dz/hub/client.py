"""The hub, through huggingface_hub: a commit, a listing, a small file, a download. Imported only when it is needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from dz.core.index import safe_path
from dz.core.protocols import Progress
from dz.core.source import FileEntry
from dz.errors import Refused
from dz.hub import cached
from dz.hub.faults import TransferBroken, blot, busy, offline, passing, retry_after, translate
from dz.hub.partial import opened
from dz.hub.ranges import sent, wrong_length

T = TypeVar("T")
WAITS = (1.0, 4.0, 10.0)  # seconds before the second, third and fourth try of a request
TIMEOUT = 60.0  # seconds without a byte after which a small request is given up


class Hub:
    """One endpoint with one token. Every method raises DzError only; `read` and `download` work at a full commit."""

    def __init__(
        self, endpoint: str, *, token: str | None = None, cache: Path | None = None, offline: bool = False
    ) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.offline = offline
        self._token = token
        self._cache = cache

    @property
    def cache(self) -> Path:
        """The client's cache folder (`HF_HUB_CACHE`)."""
        if self._cache is None:
            from huggingface_hub import constants

            self._cache = Path(constants.HF_HUB_CACHE)
        return self._cache

    def commit(self, name: str, revision: str) -> tuple[str, str]:
        """The commit that a branch, tag or commit stands for now, and the repository's present name. Offline it is the
        one that the cache last saw."""
        if self.offline:
            known = cached.commit_of(self._repository(name), revision)
            if known is None:
                raise offline(name)
            return known, name
        # A hub that cannot be reached at all is said at once; only a busy one is asked again.
        asked = name if revision == "main" else f"{name}@{revision}"
        info = self._ask(asked, lambda: self._api().model_info(name, revision=revision), again=busy)
        if not info.sha:
            raise Refused(
                f"{self.endpoint} gives no commit for {name}@{revision}",
                "without a commit nothing can be pinned",
                "use an endpoint that speaks the hub's API (HF_ENDPOINT)",
                code="no_commit",
            )
        return info.sha, info.id or name

    def files(self, name: str, commit: str) -> list[FileEntry]:
        """Every file of the repository at a commit, with sizes and hashes: sha256 for LFS files, git's blob id else.
        Offline these are the files that the cache has of that commit."""
        if self.offline:
            return cached.entries(self.folder(name, commit))
        listed = self._ask(
            f"{name}@{commit}", lambda: list(self._api().list_repo_tree(name, recursive=True, revision=commit))
        )
        out = []
        for item in listed:
            if getattr(item, "blob_id", None) is None:
                continue  # a folder
            if not safe_path(item.path):
                raise Refused(
                    f"{name} lists a file called {item.path!r}",
                    "that name leads out of the folder",
                    "do not use this repository",
                    code="unsafe_path",
                )
            sha = item.lfs.sha256 if item.lfs else ""
            out.append(FileEntry(path=item.path, size=item.size, sha256=sha, etag=sha or item.blob_id))
        return out

    def read(self, name: str, commit: str, path: str) -> bytes:
        """The whole content of a small file, kept in memory only."""
        if self.offline:
            return (self.folder(name, commit) / path).read_bytes()
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(name, path, revision=commit, endpoint=self.endpoint)

        def get() -> bytes:
            response = get_session().get(url, headers=build_hf_headers(token=self._token), timeout=TIMEOUT)
            hf_raise_for_status(response)
            return response.content

        return self._ask(f"{name}@{commit}", get)

    def range(self, name: str, commit: str, path: str, begin: int, end: int, size: int) -> bytes:
        """Bytes [begin, end) of a file that the hub lists with `size` bytes, whatever way the server takes: the range
        that was asked for, a shorter one (the rest is asked for), or the whole file (read up to `end`, then left).

        Raises Refused where the server's file has another length."""
        out = b""
        while len(out) < end - begin:
            at = begin + len(out)
            out += self._ask(f"{name}@{commit}", lambda at=at: self._part(name, commit, path, (at, end), size))
        return out

    def _part(self, name: str, commit: str, path: str, wanted: tuple[int, int], size: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        begin, end = wanted
        url = hf_hub_url(name, path, revision=commit, endpoint=self.endpoint)
        headers = {
            **build_hf_headers(token=self._token),
            "Range": f"bytes={begin}-{end - 1}",  # both ends are included
            "Accept-Encoding": "identity",
        }
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
            hf_raise_for_status(response)
            start, total = sent(response.status_code, response.headers)
            if total not in (None, size):
                raise wrong_length(path, size, total)
            if not start <= begin:
                raise TransferBroken(f"{path}: asked for bytes from {begin:,}, the answer starts at {start:,}")
            out = bytearray()
            for chunk in response.iter_bytes():
                out += chunk
                if start + len(out) > end:  # the whole file comes: leave it. A range is read out: the connection stays
                    break
        got = bytes(out[begin - start : end - start])
        if not got:
            raise TransferBroken(f"{path}: no byte came of the range {begin:,} to {end:,}")
        return got

    def folder(self, name: str, commit: str, local_dir: Path | None = None) -> Path:
        """Where `download` puts the files: the local folder, or the snapshot in the cache (its documented layout)."""
        return local_dir or self._repository(name) / "snapshots" / commit

    def blob(self, name: str, entry: FileEntry) -> Path:
        """Where the cache keeps the content of a file, whatever snapshots link to it."""
        return self._repository(name) / "blobs" / entry.etag

    def _repository(self, name: str) -> Path:
        return self.cache / f"models--{name.replace('/', '--')}"

    def download(
        self, name: str, commit: str, path: str, *, local_dir: Path | None, force: bool, bar: type | None
    ) -> Path:
        """Fetch one file at a commit; a cut transfer goes on where it stopped. `bar` is a tqdm-like class.

        Tries again (WAITS) while the hub is busy or the connection breaks."""
        from huggingface_hub import hf_hub_download

        def get() -> str:
            return hf_hub_download(
                name,
                path,
                revision=commit,
                endpoint=self.endpoint,
                token=self._token,
                cache_dir=self.cache,
                local_dir=local_dir,
                force_download=force,
                tqdm_class=bar,
            )

        return Path(self._ask(f"{name}@{commit}", get))

    def download_part(
        self,
        name: str,
        commit: str,
        entry: FileEntry,
        part: Path,
        *,
        placed: Path | None,
        stop: threading.Event,
        bar: type,
    ) -> bool:
        """Fetch a large file into `part`, from where it ends; False where the client transfers the file better itself.
        Nothing is fetched when another process has put the file to `placed` meanwhile.

        Tries again as `download` does. What arrived stays in the part, whatever happens."""

        def get() -> bool:
            from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
            from huggingface_hub.file_download import http_get
            from huggingface_hub.utils import build_hf_headers

            url = hf_hub_url(name, entry.path, revision=commit, endpoint=self.endpoint)
            about = get_hf_file_metadata(url, token=self._token, endpoint=self.endpoint)
            if about.xet_file_data is not None and _xet():
                return False
            if about.size not in (None, entry.size):
                raise wrong_length(entry.path, entry.size, about.size)
            headers = build_hf_headers(token=self._token)
            with opened(part, entry, stop, placed) as (f, there):
                if there < entry.size:
                    # A size above the limit makes the client refuse what the hub itself refuses, and a mirror need not.
                    size = entry.size if entry.size <= constants.MAX_HTTP_DOWNLOAD_SIZE else None
                    http_get(url, f, resume_size=there, headers=headers, expected_size=size, tqdm_class=bar)
            return True

        return self._ask(f"{name}@{commit}", get)

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=self._token)

    def _ask(self, model: str, call: Callable[[], T], again: Callable[[BaseException], bool] = passing) -> T:
        if self.offline:
            raise offline(model.partition("@")[0])
        waits = list(WAITS)
        while True:
            try:
                return call()
            except Exception as e:  # each one is put into our words, or raised again
                if waits and again(e):
                    time.sleep(max(waits.pop(0), min(retry_after(e), 60.0)))
                    continue
                raise translate(e, model=_short(model), endpoint=self.endpoint, token=self._token) from e


def _xet() -> bool:
    """Whether the client transfers deduplicated files in its own way."""
    from huggingface_hub import constants

    return not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None


def _short(model: str) -> str:
    """`org/name@rev` with a full commit cut to the eight digits that people read."""
    name, _, revision = model.partition("@")
    return f"{name}@{revision[:8]}" if len(revision) == 40 else model


@contextmanager
def client_log(progress: Progress, token: str | None = None) -> Iterator[None]:
    """Send the client's warnings (a transfer resumed, a limit near) to `progress`, without tokens or signed queries."""
    logger = logging.getLogger("huggingface_hub")
    handlers, propagate = logger.handlers[:], logger.propagate

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            progress.note(blot(" ".join(record.getMessage().split()), token))

    logger.handlers[:], logger.propagate = [Notes(logging.WARNING)], False
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
