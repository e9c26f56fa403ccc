"""A model's shape read from its configuration alone: what each layer keeps for a sequence, how many parameters it has.

No class, no code, no weights. What a configuration leaves open is guessed by the field's custom and listed."""

from __future__ import annotations

from dz.inspect.outline.read import Outline, outline

__all__ = ["Outline", "outline"]
