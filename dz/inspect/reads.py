"""Which keys of a config.json nothing reads: what a model that only looks supported would lose without a word."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from dz.inspect.syntax import module_text
from dz.upstream.build import Built

# Keys of the file itself, of generation and of training: no modelling code needs them.
_MANNERS = frozenset(
    {
        *("architectures", "auto_map", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "quantization_config", "_name_or_path"),
        *("tie_word_embeddings", "id2label", "label2id", "output_attentions", "return_dict"),
        *("output_hidden_states", "vocab_size", "max_position_embeddings", "problem_type", "attention_dropout"),
    }
)


def unread(built: Built, raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of config.json (dotted for sub-configurations) that the configuration class does not declare and that no
    modelling file of the model mentions, in order."""
    text = "\n".join(module_text(m) for m in sorted(_modules(built)))
    words = _words(text)
    return tuple(sorted(k for k, declared in _keys(raw, built.config, "") if not declared and _last(k) not in words))


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _keys(raw: Mapping[str, Any], config: Any, prefix: str) -> Iterator[tuple[str, bool]]:
    """(key, whether the class declares it)."""
    declared = _declared(config)
    for key, value in raw.items():
        inner = getattr(config, key, None)
        if isinstance(value, dict) and hasattr(inner, "to_dict"):
            yield from _keys(value, inner, f"{prefix}{key}.")
        elif key not in _MANNERS:
            yield prefix + key, key in declared


def _declared(config: Any) -> set[str]:
    """Attributes that a configuration has without being given any."""
    try:
        return set(type(config)().to_dict()) | set(getattr(type(config), "attribute_map", {}))
    except Exception:  # noqa: BLE001  a class that needs arguments may fail in any way; then its code alone decides
        return set()


def _modules(built: Built) -> set[str]:
    """The source modules of a model's classes and of its configurations."""
    found = {type(m).__module__ for m in built.model.modules()} | {type(built.config).__module__}
    found |= {c.__module__ for m in built.model.modules() for c in type(m).__mro__}
    return {m for m in found if not m.startswith(("torch.", "builtins"))}


def _words(text: str) -> set[str]:
    """Names, attributes and strings that a source mentions."""
    out: set[str] = set()
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return set(text.split())
    for n in ast.walk(tree):
        if isinstance(n, ast.Attribute):
            out.add(n.attr)
        elif isinstance(n, ast.Constant) and isinstance(n.value, str):
            out.add(n.value)
        elif isinstance(n, ast.keyword) and n.arg:
            out.add(n.arg)
    return out
