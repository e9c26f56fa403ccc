"""Weights from a configuration alone, where no header is at hand: an estimate with its error band."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dz.inspect.ledger import Ledger, Row, Split
from dz.inspect.outline import Outline
from dz.inspect.outline.read import MISSING
from dz.weights.families import FAMILIES, quantization

# relative errors: of a language model, of what sees, where a layer is guessed, where not even the sizes are there
TEXT, SENSES, GUESSED, NOTHING = 0.10, 0.50, 0.35, 1.0
_PLAIN = {4: "F32", 2: "BF16"}
_FOUR_BITS = 5  # bits a weight: at most this is a four-bit family


def estimate(raw: Mapping[str, Any], shape: Outline) -> tuple[Ledger, float, str]:
    """(the ledger that a checkpoint of this configuration would have, its relative error, why).

    Routed experts take the fewest bits that are declared; what else is quantised follows from the declared family: FP8
    reaches every matrix of the layers, a four-bit family only the experts where there are some."""
    quant, owner = quantization(raw)
    said = {d.family: FAMILIES[d.family].bits(quant) for f in FAMILIES.values() if (d := f.declared(quant, owner))}
    lowest = min(said, key=lambda f: said[f], default="")
    wide = {f: b for f, b in said.items() if b > _FOUR_BITS}
    inner = min(wide, key=lambda f: wide[f], default="") or ("" if shape.experts else lowest)
    parts: list[tuple[str, Split, int, str]] = [
        ("experts", "experts", shape.experts, lowest),
        ("linear", "matrix", shape.dense - sum(x.vectors for x in shape.layers), inner),
        ("norm", "whole", sum(x.vectors for x in shape.layers), ""),
        ("embedding", "matrix", shape.outside, ""),
        ("vision", "matrix", shape.vision, ""),
    ]
    rows = tuple(_row(*p, shape.itemsize, said) for p in parts if p[2])
    layer = max((x.forward.experts * x.forward.expert for x in shape.layers), default=0)
    book = Ledger(
        rows=rows,
        tensors=0,
        total=sum(r.bytes for r in rows),
        layers=len(shape.layers),
        experts=shape.expert_count,
        layer_experts=layer,
        packed_experts=layer if said.get(lowest, 16) <= _FOUR_BITS else 0,
    )
    return book, *_band(shape)


def _row(op: str, split: Split, values: int, family: str, itemsize: int, said: Mapping[str, float]) -> Row:
    size = int(values * said[family] / 8) if family else values * itemsize
    return Row(op=op, format=family or _PLAIN.get(itemsize, "BF16"), split=split, tensors=0, values=values, bytes=size)


def _band(shape: Outline) -> tuple[float, str]:
    """The band: by parts, since a tower that sees is known far less well than a language model."""
    if any(g.startswith(MISSING) for g in shape.guesses):
        return NOTHING, f"no estimate: {'; '.join(shape.guesses)}"
    if shape.guesses:
        return GUESSED, f"the configuration leaves open: {'; '.join(shape.guesses)}"
    text = shape.parameters - shape.vision
    band = (text * TEXT + shape.vision * SENSES) / max(shape.parameters, 1)
    return band, "from a configuration alone; most types of transformers lie within it at their default sizes"
