"""Which parameter each checkpoint tensor goes into, by upstream's own renaming rules; nothing is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dz.upstream.build import Built


def targets(built: Built, names: Iterable[str]) -> dict[str, str]:
    """Tensor name -> parameter or buffer name of the model. A tensor that fills several parameters is given to the
    first of them; tensors that the model has no place for are left out."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    model = built.model
    held = model.state_dict()
    renamings, converters = _sorted(get_model_conversion_mapping(model) or [])
    out = {}
    for name in names:
        target = _rename(name, renamings, converters, model.base_model_prefix, held)
        if target not in held and name in held:
            target = name
        if target in held:
            out[name] = target
    return out


def _sorted(mapping: list[Any]) -> tuple[list[Any], list[Any]]:
    """(renamings, converters): a converter is what carries operations."""
    converters = [m for m in mapping if hasattr(m, "operations")]
    return [m for m in mapping if not hasattr(m, "operations")], converters


def _rename(name: str, renamings: list[Any], converters: list[Any], prefix: str, held: dict[str, Any]) -> str:
    from transformers import core_model_loading

    return core_model_loading.rename_source_key(name, renamings, converters, prefix, held)[0]
