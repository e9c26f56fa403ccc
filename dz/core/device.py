"""What a plan needs to know of the hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device and how many of it. `arch` is the compute capability as an integer (90 for sm90), None where
    the kind has none; `memory` is usable bytes of each; rates are bytes/s and FLOP/s by dtype, 0 or None: unknown."""

    kind: str
    name: str
    arch: int | None = None
    count: int = 1
    memory: int = 0
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    bandwidth: float = 0.0
    flops: dict[str, float] | None = None

    @property
    def spec(self) -> str:
        """The short form used in plans and messages: `cpu`, `cuda:sm90`, `cuda:sm90 x8`."""
        base = f"{self.kind}:sm{self.arch}" if self.kind == "cuda" and self.arch else self.kind
        return base if self.count == 1 else f"{base} x{self.count}"
