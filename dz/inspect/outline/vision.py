"""The part that takes images, from its own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def vision_parameters(raw: Mapping[str, Any], hidden: int) -> int:
    """Parameters of a vision transformer of `vision_config` and of its projector to `hidden`; 0 without one."""
    vision = raw.get("vision_config")
    if not isinstance(vision, Mapping):
        return 0

    def number(*names: str) -> int:
        found = next((vision[n] for n in names if isinstance(vision.get(n), int)), 0)
        return int(found)

    width = number("hidden_size", "embed_dim", "vt_hidden_size", "width")
    depth = number("num_hidden_layers", "depth", "vt_num_hidden_layers", "layers")
    inner = number("intermediate_size", "vt_intermediate_size", "mlp_dim") or 4 * width
    patch, merge = number("patch_size") or 14, number("spatial_merge_size", "merge_size") or 2
    layer = 4 * width * width + 2 * width * inner
    joined = width * merge * merge
    return depth * layer + 3 * patch * patch * width + joined * joined + joined * hidden
