"""What the server is started with, beside the engine's own settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dz.core.source import Source
from dz.serve.supervisor import Watch
from dz.serve.worker import COMMAND


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Per image: `bytes` as sent (decoded from base64) and `pixels`; `count` of them in one request."""

    bytes: int = 32 * 1024**2
    pixels: int = 64 * 1024**2
    count: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`queued`: how many requests may wait for a place in a step (0: any number); `body`: bytes of a request."""

    queued: int = 0
    body: int = 256 * 1024**2
    images: ImageLimits = field(default_factory=ImageLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """`settings` are the resolved dz.settings by name; they go to the engine as they are. `generation_config` is "auto"
    (the model's), "none", or a folder. `names` are the names clients may use, the first is the one that is shown.
    `command` and `env` start the engine worker."""

    source: Source
    settings: dict[str, Any]
    plan: dict[str, Any] | None = None
    trust: bool = False
    plugins: tuple[str, ...] = ()
    load_format: str = "auto"
    load_only: bool = False
    names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    metrics_public: bool = False
    allowed_origins: tuple[str, ...] = ()
    request_id_headers: bool = False
    log_requests: bool = False
    generation_config: str = "auto"
    chat_template: str | None = None
    drain_timeout: float = 30.0
    max_restarts: int = 1
    watch: Watch = field(default_factory=Watch)
    limits: Limits = field(default_factory=Limits)
    command: tuple[str, ...] = COMMAND
    env: dict[str, str] = field(default_factory=dict)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Every name that a request may give: those chosen, else the model's own; its path always."""
        own = self.names or (self.source.name,)
        return tuple(dict.fromkeys([*own, self.source.name, self.source.folder]))
