"""Small helpers that transformers 4.x had and later releases dropped or moved."""

from __future__ import annotations

from functools import cache
from typing import Any, TypedDict


class KeywordArguments(TypedDict, total=False):
    """Stands for typed bags of keyword arguments: they say which there may be, and hold nothing."""

    num_items_in_batch: Any


def make_keywords(real: Any) -> Any:
    """A type for annotations."""
    return real or KeywordArguments


def make_no(real: Any) -> Any:
    """A question that is answered with no."""
    return real or (lambda: False)


def make_yes(real: Any) -> Any:
    """A question that is answered with yes."""
    return real or (lambda: True)


def make_true(real: Any) -> Any:
    """A flag that is set."""
    return True if real is None else real


def make_text(real: Any) -> Any:
    """A text for documentation: nobody reads it at run time."""
    return real or ""


def make_decorator(real: Any) -> Any:
    """A decorator with arguments that only wrote documentation: it gives back what it decorates."""
    return real or _documented


def _documented(*texts: Any, **more: Any) -> Any:
    return lambda decorated: decorated


def make_export_config(real: Any) -> Any:
    """The base of a class for exports, which dz never makes."""
    return real or type("ExportConfig", (), {"__doc__": "Export settings of a repository; nothing reads them."})


@cache
def byte_letters() -> dict[int, str]:
    """Each byte as a printable letter, as byte-level BPE vocabularies write it: printable Latin-1 stands for itself,
    the other bytes in order for the letters from U+0100 on (the published table of byte-level BPE)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + n) for n, b in enumerate(hidden)}


def make_byte_letters(real: Any) -> Any:
    """The function that gives the table."""
    return real or (lambda: dict(byte_letters()))


def make_recorder(real: Any) -> Any:
    """What says which module's outputs are recorded; it has moved."""
    if real is not None:
        return real
    from transformers.utils.output_capturing import OutputRecorder

    return OutputRecorder


def make_video_input(real: Any) -> Any:
    """A type for annotations of videos."""
    return real or Any


def make_heads(real: Any) -> Any:
    """Which heads and rows are kept when heads are pruned."""
    return real or _kept_heads


def _kept_heads(heads: Any, n_heads: int, head_size: int, already_pruned_heads: Any) -> tuple[set[int], Any]:
    """(heads still to prune, index [rows that stay]); head numbers count those that were there at first."""
    import torch

    gone, before = set(heads) - set(already_pruned_heads), sorted(already_pruned_heads)
    now = {h - sum(b < h for b in before) for h in gone}
    rows = [h * head_size + i for h in range(n_heads) if h not in now for i in range(head_size)]
    return gone, torch.tensor(rows, dtype=torch.long)
