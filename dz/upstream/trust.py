"""The one gate before code of a repository runs: it is trusted, pinned, its own and can run; then its shims go in.

Every load of a configuration, class, tokenizer or processor goes through `repository_code`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dz.core.source import Source
from dz.hub.remote_code import references, refuse_foreign, refuse_unpinned
from dz.upstream.installed import here
from dz.upstream.refusals import refusals, refuse
from dz.upstream.remote_facts import read_code

if TYPE_CHECKING:
    from dz.upstream.shims.apply import Active

_READ: set[tuple[str, str]] = set()  # (folder, digest of the code) that were read and found able to run


@contextmanager
def repository_code(source: Source, *, trust: bool) -> Iterator[Active | None]:
    """A load of something of a source; gives the shims in effect, if its code may run. Without trust nothing of it
    runs, whatever its files ask for.

    Raises Refused for code in another repository, and under trust for code that is not the pinned one or that cannot
    run with what is installed (every place by file and line, before anything runs)."""
    refuse_foreign(source)
    if not trust or not has_code(source):
        yield None
        return
    refuse_unpinned(source)
    key = (source.folder, source.code_hash)
    if key not in _READ:
        refuse(source, refusals(read_code(source), here()))
        _READ.add(key)
    from dz.upstream.shims.apply import loading

    with loading(source) as active:
        yield active


def has_code(source: Source) -> bool:
    """Whether an `auto_map` names a class that is this repository's own."""
    return any(not r.repository for r in references(source.path))
