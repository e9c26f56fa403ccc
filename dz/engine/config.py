"""What an engine worker is started with, and the limits that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON document on the worker's standard input. `source` and `plan` are core documents as plain values;
    `settings` are names of dz.settings with their values; `plugins` are `module:function`; `inbox` and `outbox` are zmq
    addresses; `load_format` is "auto" or "dummy"."""

    source: dict[str, Any]
    settings: dict[str, Any]
    inbox: str
    outbox: str
    plan: dict[str, Any] | None = None
    trust: bool = False
    plugins: list[str] = []
    load_format: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the scheduler must keep to. `max_model_len` counts prompt and output together, in tokens."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    blocks: int
    slots: int
