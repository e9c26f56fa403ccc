"""Keys and values of all sequences in one pool of blocks per layer, gathered for upstream's own attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class StepIndex:
    """One step's view of the pool. `write` [T]: a slot for each new token, in packed order. `read` [B, K] or [K]:
    slots of the context, padded with any valid slot. `rows` is B (one token a row) or 0 (packed). `span` is (first
    slot, length) when the read slots of a lone sequence are contiguous: then nothing is copied."""

    write: torch.Tensor
    read: torch.Tensor
    rows: int
    span: tuple[int, int] | None = None


class PagedStore:
    """The pool behind the cache facade. A layer's tensors are allocated on its first write, with the shape it brings:
    [slots, H, D], slots = blocks * block_size."""

    def __init__(self, *, blocks: int, block_size: int, device: str) -> None:
        self.slots, self.block_size, self.device = blocks * block_size, block_size, device
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.step: StepIndex | None = None

    def slots_of(self, blocks: list[int], start: int, end: int) -> list[int]:
        """The slots of positions [start, end) of a sequence."""
        size = self.block_size
        return [blocks[p // size] * size + p % size for p in range(start, end)]

    def exchange(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write k, v [B, H, S, D] and return keys and values [B, H, K, D] of the step's sequences."""
        step = self.step
        if step is None:
            raise RuntimeError("the cache facade was used outside a step")
        if layer not in self.keys:
            self.keys[layer] = torch.zeros(self.slots, k.shape[1], k.shape[3], dtype=k.dtype, device=k.device)
            self.values[layer] = torch.zeros(self.slots, v.shape[1], v.shape[3], dtype=v.dtype, device=v.device)
        return self._one(self.keys[layer], k, step), self._one(self.values[layer], v, step)

    def _one(self, pool: torch.Tensor, x: torch.Tensor, step: StepIndex) -> torch.Tensor:
        b, h, s, d = x.shape
        pool.index_copy_(0, step.write, x.transpose(1, 2).reshape(b * s, h, d))
        if step.span is not None:
            first, length = step.span
            return pool[first : first + length].transpose(0, 1)[None]
        got = pool.index_select(0, step.read.reshape(-1))
        return got.view(max(step.rows, 1), -1, h, d).transpose(1, 2)

    @property
    def bytes(self) -> int:
        """Bytes allocated so far."""
        return sum(t.numel() * t.element_size() for t in (*self.keys.values(), *self.values.values()))
