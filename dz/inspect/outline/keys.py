"""Numbers of a configuration, under whichever of their usual names they stand."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from dz.errors import Refused

_SENSES = ("vision", "visual", "image", "audio", "video", "encoder")  # not the language model


class Keys:
    """A configuration to be read: the language model's own keys first, then those of the whole."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.whole = raw
        self.own: Mapping[str, Any] = _language(raw) or raw

    def get(self, *names: str) -> Any:
        """The value of the first of `names` that is there and not null; `a.b` is b inside the object a."""
        for source in (self.own, self.whole):
            for name in names:
                value: Any = source
                for part in name.split("."):
                    value = value.get(part) if isinstance(value, Mapping) else None
                if value is not None:
                    return value
        return None

    def number(self, *names: str, default: int = 0) -> int:
        """A whole number, `default` where there is none; of a list by layer the largest."""
        value = self.get(*names)
        if isinstance(value, list | tuple) and value and all(_whole(v) for v in value):
            value = max(value)
        return int(value) if isinstance(value, int | float) and _whole(value) else default

    def refuse_nonsense(self, *names: str) -> None:
        """Raise Refused for a size that is given and is no positive whole number (lists by layer are left alone)."""
        for name in names:
            value = self.get(name)
            if value is None or isinstance(value, list | tuple) or (_whole(value) and value > 0):
                continue
            what = f"{name} in the configuration is {value!r}"[:200]
            raise Refused(what, "a positive whole number is expected", "mend config.json", code="bad_config")

    def listed(self, *names: str) -> list[Any] | None:
        """A list, None where there is none."""
        value = self.get(*names)
        return list(value) if isinstance(value, list | tuple) else None

    def flag(self, *names: str, default: bool = False) -> bool:
        """A boolean, `default` where there is none."""
        value = self.get(*names)
        return value if isinstance(value, bool) else default


def is_sense(name: str) -> bool:
    """Whether a part of a configuration by this name belongs to what sees or hears, not to the language model."""
    return any(s in name for s in _SENSES)


def _language(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The innermost configuration of a language model: an object with a width and layers that belongs to no sense."""
    for name, value in raw.items():
        if isinstance(value, Mapping) and not is_sense(name):
            found = _language(value)
            if found is None and "hidden_size" in value and ("num_hidden_layers" in value or "vocab_size" in value):
                found = value
            if found is not None:
                return found
    return None


def _whole(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and int(value) == value
