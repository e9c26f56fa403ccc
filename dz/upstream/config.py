"""Upstream's configuration and class of a repository, with its code only under trust."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from dz.core.source import Source
from dz.errors import Refused, UsageError
from dz.upstream import settled
from dz.upstream.trust import repository_code

AUTO_TEXT = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
AUTO_VISION = ("AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModelForConditionalGeneration", *AUTO_TEXT)


@dataclass(frozen=True, slots=True)
class Architecture:
    """`config` and `cls` are upstream's objects; `runs` says whose modelling code that is; `notes` are what upstream
    filled in or was told twice."""

    config: Any
    cls: Any
    runs: Literal["transformers", "repository"]
    raw: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def text_config(self) -> Any:
        """The configuration of the language model inside."""
        return self.config.get_text_config(decoder=True)

    @property
    def vision(self) -> bool:
        """Whether the model takes images."""
        return getattr(self.config, "vision_config", None) is not None


def raw_config(source: Source) -> dict[str, Any]:
    """config.json as it is. Raises UsageError when it is missing or not JSON."""
    path = source.path / "config.json"
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{source.folder} has no config.json",
            "a model repository needs one",
            f"dz fetch {source.name}",
            code="no_config_json",
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise Refused(f"{path} is not JSON", str(e), f"dz fetch {source.name} --force", code="bad_config_json") from e
    if not isinstance(data, dict):
        raise Refused(
            f"{path} is no JSON object",
            f"its top level is a {type(data).__name__}",
            f"dz fetch {source.name} --force",
            code="bad_config_json",
        )
    return data


def architecture(source: Source, *, trust: bool) -> Architecture:
    """Upstream's configuration and model class. Without `trust` nothing of the repository is executed.

    Raises Refused when the architecture is unknown and its code is not trusted, or lies in another repository, and
    when config.json contradicts itself or the class does not follow it."""
    raw = raw_config(source)
    notes = settled.check(raw)
    auto_map = raw.get("auto_map") or {}
    repository = bool(auto_map) and trust
    with repository_code(source, trust=trust) as active:
        config = _config(source, raw, auto_map, trust=repository)
        if active is not None:
            active.configure(config)
        notes += settled.followed(raw, config)
        cls = _repository_class(source, config, auto_map) if repository else None
    if cls is not None:
        return Architecture(config, cls, "repository", raw, notes)
    return Architecture(config, _installed_class(source, config), "transformers", raw, notes)


def _config(source: Source, raw: dict[str, Any], auto_map: dict[str, Any], *, trust: bool) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = raw.get("model_type")
    if kind is not None and not isinstance(kind, str):
        what, why = f"config.json of {source.name} has no usable model_type", f"it is {kind!r}"[:200]
        raise Refused(what, f"{why}, not a name", "mend config.json", code="bad_config")
    if kind not in CONFIG_MAPPING and not (trust and "AutoConfig" in auto_map):
        has_code = "AutoConfig" in auto_map
        why = (
            "its code lies in the repository and was not trusted"
            if has_code
            else "the installed transformers does not know it and the repository brings no class"
        )
        then = (
            f"add --trust-remote-code after reading the code in {source.folder}"
            if has_code
            else "install a transformers that has it"
        ) + f"; without its class: dz adapt {source.name} --dry-run --device NAME"
        raise Refused(f"unknown architecture {kind!r}", why, then, code="unknown_architecture")
    try:
        return AutoConfig.from_pretrained(source.folder, trust_remote_code=trust)
    except Exception as e:
        raise Refused(
            f"the configuration of {source.name} does not load",
            f"{type(e).__name__}: {_first(e)}",
            f"compare {source.folder}/config.json with its class",
            code="bad_config",
        ) from e


def _repository_class(source: Source, config: Any, auto_map: dict[str, Any]) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for name in AUTO_VISION if getattr(config, "vision_config", None) is not None else AUTO_TEXT + AUTO_VISION:
        if name in auto_map:
            try:
                return get_class_from_dynamic_module(auto_map[name], source.folder)
            except Exception as e:
                raise Refused(
                    f"the code of {source.name} does not import ({auto_map[name]})",
                    f"{type(e).__name__}: {_first(e)}",
                    "install what it imports, or mend it in a local copy",
                    code="remote_import",
                ) from e
    return None


def _installed_class(source: Source, config: Any) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, name, None)
        takes = isinstance(config, getattr(cls, "config_class", None) or type(config))
        if isinstance(cls, type) and takes and getattr(cls, "can_generate", lambda: False)():
            return cls
    tables = [auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING]
    if getattr(config, "vision_config", None) is None:
        tables.reverse()
    for table in tables:
        if type(config) in table:
            return table[type(config)]
    raise Refused(
        f"no language model class for {config.model_type!r}",
        "the installed transformers has a configuration for it, but no causal or image-text class",
        "install a transformers that has it",
        code="no_class",
    )


def _first(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return lines[0] if lines else "no message"
