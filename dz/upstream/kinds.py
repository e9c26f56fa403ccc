"""Every language model type of the installed upstream, and its configuration as upstream fills it in."""

from __future__ import annotations

from pathlib import Path


def language_types() -> dict[str, str]:
    """Model type -> "causal" or "image-text", for each type that has such a class; a type with both is "image-text"."""
    from transformers.models.auto import modeling_auto as auto

    causal = dict.fromkeys(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "causal")
    return dict(sorted((causal | dict.fromkeys(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "image-text")).items()))


def write_default(kind: str, folder: Path) -> None:
    """Write config.json of a type with every value at upstream's default. Raises what its class raises."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder.mkdir(parents=True, exist_ok=True)
    CONFIG_MAPPING[kind]().save_pretrained(folder)
