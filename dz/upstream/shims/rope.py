"""Rotary settings as code written for transformers 4.x reads them: `rope_scaling` without the base in it, and the plain
rope among the functions by type."""

from __future__ import annotations

from typing import Any

import torch

_BASE = ("rope_theta", "partial_rotary_factor")  # what has moved into the dictionary since


def scaling(config: Any) -> dict[str, Any] | None:
    """`rope_scaling` of a configuration as config.json writes it for 4.x: None for a plain rope, else the scaling with
    both names of its type. What is kept by layer type is given as it is."""
    held = config.rope_parameters if hasattr(config, "rope_parameters") else None
    if not isinstance(held, dict) or any(isinstance(v, dict) for v in held.values()):
        return held
    kind = held.get("rope_type", held.get("type", "default"))
    rest = {k: v for k, v in held.items() if k not in _BASE and k not in ("rope_type", "type")}
    if kind == "default" and not rest:
        return None
    return {**rest, "rope_type": kind, "type": kind}


def theta(config: Any) -> float:
    """`rope_theta` of a configuration: its own, else the one that has moved into the rotary parameters.

    Raises AttributeError where there is none: it is not guessed."""
    own = vars(config).get("rope_theta")
    held = vars(config).get("rope_parameters")
    if own is None and isinstance(held, dict):
        own = held.get("rope_theta")
    if own is None:
        raise AttributeError(f"{type(config).__name__!r} object has no attribute 'rope_theta'")
    return own


def plain(
    config: Any = None, device: Any = None, seq_len: int | None = None, layer_type: str | None = None, **old: Any
) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [R/2] float32, 1.0) of the unscaled rope: theta^(-2i/R) over the R rotated places of a head
    (Su et al., RoFormer, 2021). `old` are the arguments of the releases that passed no configuration: dim and base."""
    if unknown := sorted(set(old) - {"dim", "base"}):
        raise TypeError(f"the plain rope takes no {', '.join(unknown)}")
    if old:
        size, base = int(old["dim"]), float(old["base"])
    else:
        held = vars(config).get("rope_parameters") or {}
        held = held.get(layer_type, held) if layer_type else held
        part = held.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size, base = int(head * part), theta(config) if "rope_theta" not in held else float(held["rope_theta"])
    steps = torch.arange(0, size, 2, dtype=torch.int64).to(device=device, dtype=torch.float32)
    return 1.0 / (base ** (steps / size)), 1.0


def make_functions(real: Any) -> dict[str, Any]:
    """The functions by rope type, with the plain one under "default"."""
    return {"default": plain, **(real or {})}
