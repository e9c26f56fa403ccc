"""How much of a large model has to be built to see all of it: which layers, how many experts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dz.inspect.ledger import Kind, Structure
from dz.inspect.outline.feedforward import ACTIVE, EXPERTS
from dz.inspect.outline.keys import Keys, is_sense

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_DROPPED = ("quantization_config", "compression_config")  # the small model is plain: its weights are never loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """`kept` of `layers` layers, `experts` of `experts_in_all`. `signatures` number layers by what they hold: two of
    one number are alike in every tensor."""

    kept: int
    layers: int
    experts: int
    experts_in_all: int
    signatures: tuple[int, ...]

    def keeps(self, k: Kind, at: tuple[int, ...], structure: Structure) -> bool:
        """Whether the small model has this weight."""
        if not structure.inside(k):
            return True
        if at[0] >= self.kept:
            return False
        return not (len(at) > 1 and structure.expert_list(k)) or at[1] < self.experts

    def shape(self, k: Kind, structure: Structure) -> tuple[int, ...]:
        """Its shape in the small model: axes that count experts are shorter."""
        if not self.experts_in_all or not structure.inside(k) or not structure.by_expert(k):
            return k.shape
        return tuple(self.experts if i == 0 and d == self.experts_in_all else d for i, d in enumerate(k.shape))

    def signature(self, k: Kind, at: tuple[int, ...], structure: Structure) -> int:
        """The signature of the layer of a weight, -1 outside the layers."""
        return self.signatures[at[0]] if structure.inside(k) and at[0] < len(self.signatures) else -1

    def times(self, layer: int) -> float:
        """How many layers of the whole model each layer of the small one stands for."""
        own = self.signatures[layer] if layer < len(self.signatures) else -1
        return self.signatures.count(own) / max(self.signatures[: self.kept].count(own), 1)


def plan_cut(structure: Structure, config: Mapping[str, Any]) -> Cut:
    """The cut: layers up to the first of the last new signature, and experts for one more choice than routing makes."""
    signatures = _signatures(structure)
    kept = max((signatures.index(s) + 1 for s in set(signatures)), default=0)
    k = Keys(config)
    count = structure.experts
    groups, active = max(k.number("n_group", "num_expert_group"), 1), k.number(*ACTIVE, default=1)
    wanted = -(-max(active + 1, 2 * groups) // groups) * groups
    return Cut(
        kept=kept,
        layers=len(signatures),
        experts=min(count, wanted) if count else 0,
        experts_in_all=count,
        signatures=tuple(signatures),
    )


def _signatures(structure: Structure) -> list[int]:
    """A number for each layer; equal numbers hold kinds alike, as many of each, and mix tokens alike by the
    configuration (a window and full attention may hold the same tensors)."""
    held: dict[int, dict[int, int]] = {}
    for number, k in enumerate(structure.kinds):
        if structure.inside(k):
            for at in k.at:
                row = held.setdefault(at[0], {})
                row[number] = row.get(number, 0) + 1
    count = max(held, default=-1) + 1
    layers = structure.shape.layers if len(structure.shape.layers) == count else (None,) * count
    known: dict[Any, int] = {}
    keys = [(tuple(held.get(i, {}).items()), layers[i]) for i in range(count)]
    return [known.setdefault(key, len(known)) for key in keys]


def smaller(raw: Mapping[str, Any], complete: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """The configuration of the small model: `raw` with fewer layers and experts. What `raw` leaves to the class's
    defaults (`complete` has them) is written out where it must change."""
    out = copy.deepcopy(dict(raw))
    _shrink(out, complete, cut)
    return out


def _shrink(out: dict[str, Any], complete: Mapping[str, Any], cut: Cut) -> None:
    for name in _DROPPED:
        out.pop(name, None)
    for name, value in complete.items():
        if isinstance(value, Mapping):
            inner = out.get(name)
            if isinstance(inner, dict) and not is_sense(name):
                _shrink(inner, value, cut)
            continue
        held = out.get(name, value)
        if name in _LAYERS and held == cut.layers:
            out[name] = cut.kept
        elif name in EXPERTS and cut.experts_in_all and held == cut.experts_in_all:
            out[name] = cut.experts
        elif isinstance(held, list | tuple) and len(held) == cut.layers > 1 and name in out:
            out[name] = list(held[: cut.kept])
