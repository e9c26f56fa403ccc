"""Which modules a checkpoint keeps quantised, by its configuration and by its files, and that both agree."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from dz.core.headers import TensorInfo
from dz.errors import Refused
from dz.inspect.groups import glob_of
from dz.upstream.settled import quantisations
from dz.weights.families.recognise import recognise

_LISTS = ("ignore", "modules_to_not_convert", "exclude_modules", "exclude", "ignored_layers")
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Flag:
    """One module: whether its weight is stored quantised, and the pattern that leaves it as it is ("" for none)."""

    module: str
    quantised: bool
    pattern: str


def patterns(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The patterns of modules that a quantisation leaves as they are, in order."""
    out: list[str] = []
    for quant in quantisations(raw).values():
        for key in _LISTS:
            out += [p for p in quant.get(key) or () if isinstance(p, str)]
    return tuple(dict.fromkeys(out))


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern means a module: `re:` and a regular expression from its beginning, a glob, or a part of its
    dotted name (whole words in a row: "mlp.gate" means "model.layers.3.mlp.gate" and what is inside it)."""
    return _compiled(pattern).match(name) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern as a regular expression. Raises Refused for one that is none."""
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:])
        except re.error as e:
            raise Refused(
                f"{pattern!r} in the ignore list is no regular expression",
                str(e),
                "mend config.json",
                code="bad_pattern",
            ) from e
    if any(c in pattern for c in "*?["):
        return re.compile(f"{fnmatch.translate(pattern)}|{fnmatch.translate(pattern + '.*')}")
    return re.compile(rf"(?:.*\.)?{re.escape(pattern.strip('.'))}(?:\..*)?$")


def _first(found: Sequence[str]) -> Callable[[Sequence[str]], str]:
    """A function that gives the first pattern that means one of some names, "" for none. Half a million names meet a
    handful of patterns: one joined expression sorts out those that none means."""
    try:
        either = re.compile("|".join(f"(?:{_compiled(p).pattern})" for p in found))
    except re.error:  # flags inside an expression cannot be joined
        either = re.compile("")

    def first(names: Sequence[str]) -> str:
        if not found or not any(either.match(n) for n in names):
            return ""
        return next((p for p in found if any(matches(p, n) for n in names)), "")

    return first


def flags(
    raw: Mapping[str, Any], headers: Mapping[str, TensorInfo], renamed: Mapping[str, str], modules: Iterable[str] = ()
) -> tuple[Flag, ...]:
    """The flag of every module with a matrix in the files, in the files' order. `renamed` maps tensor names to the
    model's: a pattern may mean either name; `modules` are further names that a pattern may mean (weights that are
    tied, or not in the files).

    Raises Refused for a pattern that means nothing, and where a pattern and the stored dtype disagree."""
    found = patterns(raw)
    if not headers or not quantisations(raw):
        return ()
    names = _names(raw, headers, renamed)
    first = _first(found)
    out = [Flag(module, stored, first(own)) for module, own, stored in names]
    _refuse_idle(found, [*(n for _, own, _ in names for n in own), *modules])
    wrong = [f for f in out if f.pattern and f.quantised]
    if wrong:
        shown = ", ".join(f"{f.module} ({f.pattern})" for f in wrong[:_SHOWN])
        raise Refused(
            f"{len(wrong)} modules are stored quantised that the configuration leaves as they are",
            shown,
            "compare the ignore list with the files: one of them is of another release",
            code="ignored_but_quantised",
        )
    _refuse_plain(out)
    return tuple(out)


def _names(
    raw: Mapping[str, Any], headers: Mapping[str, TensorInfo], renamed: Mapping[str, str]
) -> list[tuple[str, tuple[str, ...], bool]]:
    """(module, its names, whether it is stored quantised) of each weight with at least two axes."""
    stored = recognise(headers, raw)
    out: dict[str, tuple[tuple[str, ...], bool]] = {}
    for weight in stored.stored.values():
        tensor = next(iter(weight.parts.values()))
        out[_module(weight.name)] = ((_module(weight.name), _module(renamed.get(tensor, weight.name))), True)
    for name in stored.plain:
        if len(headers[name].shape) >= 2 and name.endswith(".weight"):
            out[_module(name)] = ((_module(name), _module(renamed.get(name, name))), False)
    return [(module, own, quantised) for module, (own, quantised) in out.items()]


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _refuse_idle(found: Sequence[str], names: Sequence[str]) -> None:
    idle = [p for p in found if not any(matches(p, n) for n in names)]
    if idle:
        raise Refused(
            f"the ignore list means nothing with {', '.join(map(repr, idle[:_SHOWN]))}",
            f"no module is called so; the first are {', '.join(names[:_SHOWN])}",
            "compare its names with the files: a prefix may be missing",
            code="idle_pattern",
        )


def _refuse_plain(out: Sequence[Flag]) -> None:
    """Refuse modules of one kind of which only some are stored quantised and no pattern says why."""
    kinds: dict[str, list[Flag]] = {}
    for f in out:
        kinds.setdefault(glob_of(f.module), []).append(f)
    for glob, members in kinds.items():
        plain = [f for f in members if not f.quantised and not f.pattern]
        if plain and len(plain) < len(members) and any(f.quantised for f in members):
            raise Refused(
                f"{len(plain)} of {len(members)} modules {glob} are not stored quantised",
                f"no pattern of the ignore list means {', '.join(f.module for f in plain[:_SHOWN])}",
                "compare the ignore list with the files: one of them is of another release",
                code="plain_but_not_ignored",
            )


def by_glob(found: Iterable[Flag]) -> dict[str, str]:
    """The flags in short: a glob over modules of one kind -> "quantised", "as it is (pattern)" or "as it is"."""
    out: dict[str, str] = {}
    for f in found:
        words = "quantised" if f.quantised else f"as it is ({f.pattern})" if f.pattern else "as it is"
        key = glob_of(f.module)
        out[key] = words if out.get(key, words) == words else f"{out[key]}; {words}"
    return out
