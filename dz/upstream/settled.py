"""What a config.json says twice, leaves out or says against itself, and whether upstream's class follows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dz.errors import Refused

_MTP = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers")
_ROPE = ("rope_parameters", "rope_scaling")
_INTERVALS = ("full_attention_interval", "sliding_window_pattern", "attn_layer_period")


def check(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse a config.json that contradicts itself; returns what a reader should know of it.

    Raises Refused for two quantisations that differ, a list of layers of another length than there are layers, and a
    first layer that shares an index which no layer before it has."""
    notes = _quantised(raw)
    for path, owner in owners(raw):
        _lengths(path, owner)
        _first_shares(path, owner)
        notes += _interval(path, owner)
    return tuple(notes)


def followed(raw: Mapping[str, Any], config: Any) -> tuple[str, ...]:
    """What upstream's configuration made of config.json, where it filled something in. Raises Refused when its layer
    kinds are others than the file's: the list is flattened to a rule, or ignored."""
    notes: list[str] = []
    for path, owner in owners(raw):
        held = getattr(config, path, None) if path else config
        if held is None:
            continue
        for key in ("layer_types", "mlp_layer_types", "indexer_types"):
            said, made = owner.get(key), getattr(held, key, None)
            if not isinstance(said, list) or not isinstance(made, (list, tuple)) or _pattern(said) == _pattern(made):
                continue
            if len(said) != len(made):  # a class may count blocks and layers differently; its own lists then agree
                notes.append(f"{_at(path, key)} lists {len(said)} blocks, which are {len(made)} layers to the class")
            else:
                raise Refused(
                    f"{type(held).__name__} does not follow {_at(path, key)}",
                    f"the file says {_short(said)}, the class makes {_short(made)}",
                    "install a transformers whose class reads this list",
                    code="layers_not_followed",
                )
        notes += _theta(path, owner, held, raw)
    return tuple(notes)


def owners(raw: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(path, configuration) of the top ("") and of each configuration inside it that has layers."""
    yield "", raw
    for key, value in raw.items():
        if isinstance(value, Mapping) and "num_hidden_layers" in value:
            yield key, value


def quantisations(raw: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Every quantization_config by its path: at the top and in any configuration inside."""
    found = {"quantization_config": raw.get("quantization_config")}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            found[f"{key}.quantization_config"] = value.get("quantization_config")
    return {path: value for path, value in found.items() if isinstance(value, Mapping) and value}


def _at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _short(values: Any) -> str:
    shown = [str(v) for v in values]
    return "[" + ", ".join(shown if len(shown) <= 8 else [*shown[:6], "...", shown[-1]]) + "]"


def _pattern(values: Any) -> list[int]:
    """Which entries are equal: 0 for the first kind met, 1 for the next. Upstream renames kinds, their places stay."""
    seen: dict[Any, int] = {}
    return [seen.setdefault(str(v), len(seen)) for v in values]


def _quantised(raw: Mapping[str, Any]) -> list[str]:
    found = quantisations(raw)
    (first, mine), *others = list(found.items()) or [("", {})]
    for path, other in others:
        differs = sorted(k for k in {*mine, *other} if mine.get(k) != other.get(k))
        if differs:
            key = differs[0]
            raise Refused(
                f"{first} and {path} disagree about {', '.join(differs[:4])}",
                f"{key} is {mine.get(key)!r} in the one and {other.get(key)!r} in the other",
                "remove the one that does not describe these files",
                code="two_quantisations",
            )
    method = mine.get("quant_method") or mine.get("quant_algo")
    return [f"quantised by {method}, as {' and '.join(found)} says"] if found else []


def _lengths(path: str, owner: Mapping[str, Any]) -> None:
    layers = owner.get("num_hidden_layers")
    if not isinstance(layers, int):
        return
    extra = next((n for k in _MTP if isinstance(n := owner.get(k), int)), 0)
    for key, value in owner.items():
        listed = key in ("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type")
        listed = listed or key.endswith("_per_layer")
        if listed and isinstance(value, list) and len(value) not in (layers, layers + extra):
            raise Refused(
                f"{_at(path, key)} has {len(value)} entries for {layers} layers",
                f"{_at(path, 'num_hidden_layers')} is {layers}, and each layer needs one entry",
                "compare both with the published config.json",
                code="layers_mismatch",
            )


def _first_shares(path: str, owner: Mapping[str, Any]) -> None:
    kinds = owner.get("indexer_types")
    if isinstance(kinds, list) and kinds and kinds[0] == "shared":
        raise Refused(
            f"{_at(path, 'indexer_types')} begins with 'shared'",
            "a shared layer uses the choice of the last full layer before it, and before the first there is none",
            "compare the list with the published config.json",
            code="shared_first",
        )


def _interval(path: str, owner: Mapping[str, Any]) -> list[str]:
    kinds = owner.get("layer_types")
    out = []
    for key in _INTERVALS:
        every = owner.get(key)
        if isinstance(kinds, list) and isinstance(every, int) and every > 0:
            implied = [(i + 1) % every == 0 for i in range(len(kinds))]
            if implied != [str(k).startswith("full") for k in kinds]:
                out.append(f"{_at(path, 'layer_types')} says otherwise than {key} {every}: the list is followed")
    return out


def _theta(path: str, owner: Mapping[str, Any], held: Any, raw: Mapping[str, Any]) -> list[str]:
    """A line for each base of rotary angles that the file does not give."""
    made = getattr(held, "rope_parameters", None)
    if not isinstance(made, dict) or not made or _says_theta(owner) or (path and _says_theta(raw)):
        return []
    rows = made if all(isinstance(v, dict) for v in made.values()) else {"": made}
    bases = {k: v["rope_theta"] for k, v in rows.items() if isinstance(v, dict) and v.get("rope_theta") is not None}
    words = ", ".join(f"{v:g}" + (f" in {k}" if k else "") for k, v in bases.items())
    return [f"rope_theta defaulted to {words}: {_at(path, 'rope_parameters')} does not give it"] if bases else []


def _says_theta(owner: Mapping[str, Any]) -> bool:
    if any("theta" in k for k in owner) or owner.get("rope_local_base_freq") is not None:
        return True
    held = [v for k in _ROPE if isinstance(v := owner.get(k), Mapping)]
    inner = [v for h in held for v in h.values() if isinstance(v, Mapping)]
    return any("rope_theta" in h for h in (*held, *inner))
