"""The two corrections of YaRN in a built model, against what its configuration says.

`m(s, c) = 0.1 * c * ln(s) + 1` for a factor s > 1 (arXiv:2309.00071). Cosines and sines are multiplied by
`attention_factor` where that is given, by `m(s, mscale) / m(s, mscale_all_dim)` where both are, else by `m(s, 1)`; the
softmax scale is multiplied by `m(s, mscale_all_dim)^2` where that is given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dz.upstream.build import Built

_CLOSE = 1e-4


@dataclass(frozen=True, slots=True)
class Factors:
    """`angles` multiplies cosines and sines, `softmax` the softmax scale."""

    angles: float
    softmax: float


def correction(factor: float, weight: float = 1.0) -> float:
    """`m(factor, weight)`; 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def factors(parameters: Mapping[str, Any]) -> Factors | None:
    """The factors that a rope configuration asks for; None when it is not YaRN."""
    if parameters.get("rope_type", parameters.get("type")) != "yarn" or not parameters.get("factor"):
        return None
    factor = float(parameters["factor"])
    one, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    given = parameters.get("attention_factor")
    both = correction(factor, one) / correction(factor, all_dims) if one and all_dims else correction(factor)
    return Factors(
        angles=float(given) if given is not None else both,
        softmax=correction(factor, all_dims) ** 2 if all_dims else 1.0,
    )


def notes(built: Built) -> tuple[str, ...]:
    """What a YaRN configuration asks for and, after the word "but", each place of the model that does otherwise."""
    asked = factors(_parameters(built.text_config))
    if asked is None:
        return ()
    words = f"yarn: cosines and sines times {asked.angles:.6g}, softmax scale times {asked.softmax:.6g}"
    wrong = [*_tables(built, asked), *_scales(built, asked)]
    return (words + (f", but {'; '.join(wrong)}" if wrong else ""),)


def _parameters(config: Any) -> Mapping[str, Any]:
    held = getattr(config, "rope_parameters", None) or {}
    inner = [v for v in held.values() if isinstance(v, Mapping)]
    return next((v for v in inner if v.get("rope_type") == "yarn"), held) if inner else held


def _tables(built: Built, asked: Factors) -> Iterator[str]:
    for name, module in built.decoder.named_modules():
        found = getattr(module, "attention_scaling", None)
        typed = getattr(module, "rope_type", "yarn")
        if (
            isinstance(found, (int, float))
            and typed == "yarn"
            and not math.isclose(found, asked.angles, rel_tol=_CLOSE)
        ):
            yield f"{name} multiplies them by {found:.6g}"


def _scales(built: Built, asked: Factors) -> Iterator[str]:
    """The first attention whose softmax scale is neither its head's own times the factor, nor a scale of its own."""
    for name, module in built.decoder.named_modules():
        scale, width = getattr(module, "scaling", None), _width(module)
        if not isinstance(scale, float) or width is None:
            continue
        found = scale * math.sqrt(width)
        if not math.isclose(found, asked.softmax, rel_tol=_CLOSE):
            yield f"{name} multiplies it by {found:.6g}"
            return


def _width(module: nn.Module) -> int | None:
    """Channels of a query head."""
    for name in ("qk_head_dim", "head_dim"):
        if isinstance(value := getattr(module, name, None), int):
            return value
    return None
