"""The first bytes of a weight file, the header's length and the header, by as few range requests as it takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from dz.core.headers import AGAIN, LFS_MAGIC, header_length
from dz.errors import Refused
from dz.hub.faults import TransferBroken

LEAST = 64 << 10  # bytes asked for at once where nothing tells how long the header is
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
ENTRY = 128  # bytes of a tensor's entry beside its name: dtype, shape, two offsets and the punctuation


def guess(names: Iterable[str]) -> int:
    """Bytes that hold the header of a file with these tensors in all likelihood; `LEAST` at the least."""
    return max(LEAST, sum(len(n.encode()) + ENTRY for n in names) + 1024)


def prefix(get: Callable[[int, int], bytes], size: int, name: str, first: int = LEAST) -> bytes:
    """The 8 bytes of length and the header of a file of `size` bytes. `get(begin, end)` gives bytes [begin, end);
    `first` are asked for at once, and if the header is longer the rest in a second request.

    Raises Refused for a git-LFS pointer, and for what cannot be a safetensors file of that size."""
    raw = get(0, min(size, max(first, 8))) if size else b""
    if raw.startswith(LFS_MAGIC):
        raise Refused(
            f"{name} is a git-LFS pointer, not the file",
            f"a git-LFS pointer of {size:,} bytes; the hub itself has it where the weights should be",
            "look at the repository's other revisions",
            code="lfs_stub",
        )
    end = 8 + header_length(raw[:8], name)
    if end > size:
        raise Refused(
            f"{name} is cut inside its header",
            f"the header needs {end:,} bytes, the file has {size:,}",
            AGAIN,
            code="truncated",
        )
    return raw[:end] if len(raw) >= end else raw + get(len(raw), end)


def sent(status: int, headers: Mapping[str, str]) -> tuple[int, int | None]:
    """(where an answer's bytes start in the file, the file's length if the answer tells it): of the range in a 206,
    of the whole file otherwise. Raises TransferBroken where a 206 does not say its range."""
    if status == 206:
        text = headers.get("Content-Range", "")
        found = _CONTENT_RANGE.fullmatch(text)
        if not found:
            raise TransferBroken(f"an answer to a range request that does not say which range it is: {text!r}")
        return int(found[1]), int(found[2]) if found[2] != "*" else None
    length = headers.get("Content-Length", "")
    return 0, int(length) if length.isdigit() and not headers.get("Content-Encoding") else None


def wrong_length(path: str, listed: int, found: int | None) -> Refused:
    """The refusal of a file whose length is not the listed one."""
    return Refused(
        f"{path} has another length than the hub lists",
        f"it lists {listed:,} bytes, the file that it serves has {found:,}",
        "try later, or another --revision; a mirror may be behind the hub",
        code="wrong_size",
    )
