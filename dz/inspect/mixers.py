"""Token mixers: which children of decoder layers mix tokens, the state they keep, and the engine tiers that hold it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dz.core.inventory import Match, Mixer
from dz.ops._forward import Facts, facts
from dz.upstream.build import Built
from dz.upstream.decoder import mixers as children

RECURRENT = frozenset({"get_recurrent_state", "update_recurrent_state", "recurrent_states"})
CONVOLUTION = frozenset({"get_conv_state", "update_conv_state", "conv_states"})


@dataclass(frozen=True, slots=True)
class Found:
    """A mixer by its full name, with its layer's index; `module` is live."""

    fqn: str
    layer: int
    module: nn.Module


def find(built: Built) -> tuple[list[Found], list[str]]:
    """(mixers of the decoder layers, what mixes tokens but takes no cache and so cannot be served)."""
    names = {id(m): n for n, m in built.model.named_modules()}
    found, missing = [], []
    for i, layer in enumerate(built.layers):
        own = children(layer)
        found += [Found(names[id(m)], i, m) for _, m in own]
        held = {id(m) for _, m in own}
        for name, child in layer.named_children():
            f = facts(child) if id(child) not in held and not isinstance(child, nn.ModuleList) else None
            if f is not None and f.interface and f.cache is None:
                missing.append(f"{names[id(layer)]}.{name} attends but takes no cache argument: it cannot be isolated")
    return found, missing


def describe(module: nn.Module, match: Match | None, layers: tuple[int, ...]) -> Mixer:
    """The kind, state and tiers of a mixer. `isolate` holds whatever has a cache argument; `gather` holds attention
    that only updates keys and values and whose every feature an explicit mask expresses."""
    f = facts(module)
    if f is None:
        return Mixer(kind="other", layers=layers, state="other", tiers=("isolate",), reason="its source is not there")
    touched = f.cache_calls | f.reaches | _children_touch(module, f)
    recurrent, conv = bool(touched & RECURRENT), bool(touched & CONVOLUTION)
    keys = "update" in f.cache_calls
    state = (
        "kv+recurrent"
        if keys and (recurrent or conv)
        else "kv"
        if keys
        else "recurrent"
        if recurrent or conv
        else "other"
    )
    kind = _kind(match, recurrent, conv)
    plain = match is not None and match.op in ("attention", "mla") and match.status == "known"
    if plain and f.cache_calls == {"update"}:
        return Mixer(
            kind=kind,
            layers=layers,
            state="kv",
            tiers=("isolate", "gather"),
            reason="keys and values are kept as latents, appended only"
            if kind == "mla"
            else "plain keys and values behind the attention interface",
        )
    return Mixer(kind=kind, layers=layers, state=state, tiers=("isolate",), reason=_why(match, f, state))


def _children_touch(module: nn.Module, f: Facts) -> set[str]:
    out: set[str] = set()
    for name in f.hands:
        child = getattr(module, name, None)
        inner = facts(child) if isinstance(child, nn.Module) else None
        if inner is not None:
            out |= inner.cache_calls | inner.reaches
    return out


def _kind(match: Match | None, recurrent: bool, conv: bool) -> str:
    if match is not None and match.op in ("attention", "mla"):
        sparse = any("picks" in d for d in match.differs)
        return f"sparse {match.op}" if sparse else match.op
    if recurrent:
        return "recurrent"
    return "convolution" if conv else "other"


def _why(match: Match | None, f: Facts, state: str) -> str:
    if match is not None and match.differs:
        return "; ".join(match.differs)
    if state == "recurrent":
        return "keeps a state per sequence, not keys and values"
    calls = ", ".join(sorted(f.cache_calls)) or "nothing that can be read"
    return f"calls {calls} on its cache"
