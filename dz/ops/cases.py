"""Random arguments for the ops' Cases: drawn on the CPU from one seed, so that every device sees the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Maker:
    """Draws tensors of a dtype (by name) for a device from `seed`."""

    dtype: str
    device: str
    seed: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0, dtype: str | None = None) -> torch.Tensor:
        """Normal values, `scale * n + shift`."""
        x = torch.randn(shape, generator=self.generator) * scale + shift
        return x.to(getattr(torch, dtype or self.dtype)).to(self.device)

    def ints(self, low: int, high: int, *shape: int, dtype: str = "int64") -> torch.Tensor:
        """Whole numbers in [low, high)."""
        x = torch.randint(low, high, shape, generator=self.generator)
        return x.to(getattr(torch, dtype)).to(self.device)

    def tensor(self, values: Sequence, dtype: str = "int64") -> torch.Tensor:
        """The given values."""
        return torch.tensor(values, dtype=getattr(torch, dtype), device=self.device)
