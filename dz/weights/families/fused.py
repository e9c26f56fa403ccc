"""Fused weights cut into the projections and experts they hold, their scales with them. Inputs are never changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dz.errors import Refused
from dz.weights.families.base import Form

if TYPE_CHECKING:
    import torch


def cut(
    values: torch.Tensor, scale: torch.Tensor, form: Form, *, axis: int, parts: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`values` [..., N, K] cut into `parts` equal pieces along `axis` (-1 or -2), each a copy with its own scales.

    A scale that covers the whole axis goes to every piece; block scales are cut at the same place. Raises Refused when
    the axis does not divide or a block reaches over a cut."""
    size, extent = values.shape[axis], _extent(form, axis)
    piece = size // parts
    if size % parts or (extent and piece % extent):
        raise Refused(
            f"a weight of {list(values.shape)} cannot be cut into {parts} along axis {axis}",
            f"{piece} is no multiple of the {extent} values that share a scale"
            if size % parts == 0
            else "it does not divide",
            "use a checkpoint whose projections are stored apart",
            code="uncut",
        )
    out = []
    for n in range(parts):
        own = values.narrow(axis, n * piece, piece).clone()
        along = scale.narrow(axis, n * piece // extent, piece // extent) if extent else scale
        out.append((own, along.clone()))
    return out


def _extent(form: Form, axis: int) -> int:
    """Values that share a scale along an axis; 0 when one covers it all."""
    return form.group[axis] if len(form.group) >= -axis else 0


def scale_of(scale: torch.Tensor, *, experts: int, projections: int, expert: int, projection: int) -> torch.Tensor:
    """The 0-d scale of one projection of one expert, from a scale for all [] or [1], for each expert [E] or [E, 1], or
    for each projection of each expert [E, P]; a copy.

    Raises Refused for a shape that fits none: a scale on the wrong expert makes fluent garbage."""
    shape = tuple(scale.shape)
    if shape == (experts, projections):
        return scale[expert, projection].clone()
    if shape in ((experts,), (experts, 1)) and experts > 1:
        return scale[expert].reshape(()).clone()
    if scale.numel() == 1:
        return scale.reshape(()).clone()
    raise Refused(
        f"a scale of {list(shape)} for {experts} experts of {projections} projections",
        "it is neither one for all, nor one an expert, nor one a projection of each expert",
        "check the files: `dz fetch MODEL --verify`",
        code="format_conflict",
    )
