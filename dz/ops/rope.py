"""Rotary position embedding from given cosines and sines: half-split or interleaved pairs, whole or partial heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from dz.core.inventory import Match, SiteView
from dz.core.op import Case, Op
from dz.errors import UsageError
from dz.ops import _probe
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide

Layout = Literal["half", "interleaved", "interleaved_to_half"]
LAYOUTS = ("half", "interleaved", "interleaved_to_half")


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, layout: str = "half", trailing: bool = False
) -> torch.Tensor:
    """Rotate the pairs of the first (or `trailing`: last) 2P channels of x [..., D] by the angles whose cos and sin
    [..., P] broadcast against x; the other channels pass unchanged. fp32 inside, x's dtype outside.

    Pair p is channels (p, p+P) for "half" and (2p, 2p+1) for "interleaved". "interleaved_to_half" reads interleaved
    pairs and writes them half-split: the same dot products, another order of channels."""
    if layout not in LAYOUTS:
        raise UsageError(
            f"no rope layout is called '{layout}'",
            f"the known ones are {', '.join(LAYOUTS)}",
            "dz ops show rope",
            code="unknown_layout",
        )
    width = 2 * cos.shape[-1]
    if width > x.shape[-1]:
        raise UsageError(
            f"rope over {width} channels", f"the heads have {x.shape[-1]}", "check the rope dimension", code="bad_shape"
        )
    start = x.shape[-1] - width if trailing else 0
    before, part, after = x.split([start, width, x.shape[-1] - start - width], -1)
    part = wide(part)
    first, second = part.chunk(2, -1) if layout == "half" else (part[..., 0::2], part[..., 1::2])
    cos, sin = cos.to(part.dtype), sin.to(part.dtype)
    a, b = first * cos - second * sin, second * cos + first * sin
    out = torch.stack((a, b), -1).flatten(-2) if layout == "interleaved" else torch.cat((a, b), -1)
    return torch.cat((before, out.to(x.dtype), after), -1)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    layout: str = "half",
    trailing: bool = False,
    tiled: bool = True,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated (q, k): q [B, H, S, D], k [B, G, S, D], cos and sin [B|1, S, R]. `unsqueeze_dim` is where the head axis
    of q and k lies (2 for [B, S, H, D]).

    `tiled`: cos and sin hold each angle twice as [angles, angles], R = 2P, of which the first half is read (the usual
    form); otherwise each angle once, R = P. `layout` and `trailing` as in `rotate`; R below D rotates partially."""
    if tiled:
        cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (
        rotate(q, cos, sin, layout=layout, trailing=trailing),
        rotate(k, cos, sin, layout=layout, trailing=trailing),
    )


def angles(positions: torch.Tensor, pairs: int, base: float = 10000.0) -> torch.Tensor:
    """Angles [..., pairs] of the default frequencies `base^(-p/pairs)` (RoFormer, arXiv:2104.09864), fp32."""
    return positions[..., None].float() * base ** (-torch.arange(pairs, device=positions.device) / pairs)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: each layout, partial, trailing, far and ragged positions, one token, none, untiled, heads last but one."""
    m = Maker(dtype, device, seed)

    def tables(positions: list[list[int]], pairs: int, tile: bool = True) -> dict[str, torch.Tensor]:
        a = angles(m.tensor(positions), pairs)
        a = torch.cat((a, a), -1) if tile else a
        return {"cos": a.cos().to(getattr(torch, dtype)), "sin": a.sin().to(getattr(torch, dtype))}

    q, k = m.normal(2, 3, 5, 16), m.normal(2, 1, 5, 16)
    ragged = [[0, 1, 2, 3, 4], [70, 71, 72, 5000, 5001]]
    for layout in LAYOUTS:
        yield Case(f"{layout}_gqa_ragged", {"q": q, "k": k, **tables(ragged, 8), "layout": layout})
        yield Case(f"{layout}_partial", {"q": q, "k": k, **tables(ragged, 3), "layout": layout})
    trailing = {"q": q, "k": k, **tables(ragged, 4, tile=False), "layout": "interleaved", "tiled": False}
    yield Case("interleaved_trailing_untiled", {**trailing, "trailing": True})
    yield Case("one_token", {"q": m.normal(1, 4, 1, 6), "k": m.normal(1, 2, 1, 6), **tables([[100000]], 3)})
    yield Case("empty", {"q": m.normal(1, 4, 0, 6), "k": m.normal(1, 2, 0, 6), **tables([[]], 3)})
    swapped = {"q": m.normal(1, 7, 3, 10), "k": m.normal(1, 7, 2, 20)[..., ::2], **tables([list(range(7))], 5)}
    yield Case("heads_at_2_strided", {**swapped, "unsqueeze_dim": 2})


def recognise(site: SiteView) -> Match | None:
    """A function that rotates, or a module that makes its cosines and sines."""
    return _probe.rope(site, reference) or _probe.rope_table(site)


OP = Op(
    name="rope",
    summary="rotary position embedding",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    kind="function",
    source="Su et al. 2021, arXiv:2104.09864",
)
