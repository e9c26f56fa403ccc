"""Tensors by name, lazily, whatever holds them. `open_checkpoint` is the door; one file for each format."""

from __future__ import annotations

from dz.weights.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
