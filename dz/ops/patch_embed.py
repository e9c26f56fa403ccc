"""Patch embedding: an image or a clip cut into patches that do not overlap, each times one matrix."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import nn

from dz.core.inventory import Arg, Binding, Match, SiteView
from dz.core.op import Case, Op
from dz.errors import UsageError
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [B, C, S1, ..., Sk], weight [D, C, P1, ..., Pk], bias [D] -> [B, D, S1 // P1, ..., Sk // Pk] in x's dtype, fp32
    inside; k is 2 for images, 3 for clips. What does not fill a patch at the end of an axis is dropped. Raises
    UsageError when the axes or channels of x and weight differ."""
    axes, patch = weight.dim() - 2, tuple(weight.shape[2:])
    if x.dim() != axes + 2 or x.shape[1] != weight.shape[1]:
        what = f"patches of shape {list(weight.shape[1:])} of an input {list(x.shape)}"
        raise UsageError(what, "channels and axes differ", "pass [B, C, ...] as the weight has them", code="bad_shape")
    counts = [s // p for s, p in zip(x.shape[2:], patch, strict=True)]
    for axis, (n, p) in enumerate(zip(counts, patch, strict=True), 2):
        x = x.narrow(axis, 0, n * p)
    split = [size for n, p in zip(counts, patch, strict=True) for size in (n, p)]
    cut = wide(x).reshape(*x.shape[:2], *split)
    order = [0, *(2 + 2 * i for i in range(axes)), 1, *(3 + 2 * i for i in range(axes))]
    rows = cut.permute(order).reshape(x.shape[0], prod(counts), weight[0].numel())
    y = rows @ wide(weight).flatten(1).T
    y = y if bias is None else y + wide(bias)
    return y.transpose(1, 2).reshape(x.shape[0], weight.shape[0], *counts).to(x.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: images and clips, patches that are not square, rests that are dropped, one patch, none, strided."""
    m = Maker(dtype, device, seed)

    def case(x: tuple[int, ...], w: tuple[int, ...], bias: bool = False) -> dict:
        made = {"x": m.normal(*x), "weight": m.normal(*w, scale=prod(w[1:]) ** -0.5)}
        return made | ({"bias": m.normal(w[0])} if bias else {})

    yield Case("image_4x6_patch2", case((2, 3, 8, 12), (10, 3, 2, 2)))
    yield Case("image_patch3x5_bias_rest_dropped", case((1, 3, 11, 17), (7, 3, 3, 5), bias=True))
    yield Case("clip_patch2x4x4", case((2, 3, 6, 8, 12), (9, 3, 2, 4, 4), bias=True))
    yield Case("one_patch_each", case((13, 3, 2, 4, 4), (12, 3, 2, 4, 4)))
    yield Case("one_channel_one_pixel", case((1, 1, 3, 3), (5, 1, 1, 1)))
    yield Case("smaller_than_a_patch", case((1, 3, 2, 9), (4, 3, 3, 3)))
    yield Case("no_images", case((0, 3, 4, 4), (4, 3, 2, 2)))
    strided = case((1, 3, 8, 8), (6, 3, 4, 4))
    yield Case("strided", {**strided, "x": m.normal(1, 3, 8, 16)[..., ::2]})


def recognise(site: SiteView) -> Match | None:
    """A Conv2d or Conv3d whose stride is its kernel. Overlapping or padded ones are variants."""
    m = site.target
    if site.kind != "module" or not isinstance(m, nn.Conv2d | nn.Conv3d):
        return None
    kernel, stride = tuple(m.kernel_size), tuple(m.stride)
    traits = {"channels": m.in_channels, "out": m.out_channels, "patch": list(kernel), "bias": m.bias is not None}
    differs = []
    if stride != kernel:
        differs.append(f"patches {list(kernel)} every {list(stride)}")
    if m.padding not in ("valid", (0,) * len(kernel)):
        differs.append(f"padded by {m.padding}")
    if m.groups != 1 or any(d != 1 for d in m.dilation):
        differs.append(f"{m.groups} groups, dilation {list(m.dilation)}")
    reason = f"patches of {' x '.join(map(str, kernel))}"
    if differs:
        return Match(op="patch_embed", status="variant", reason=reason, differs=tuple(differs), traits=traits)
    args = [Arg(name="x", source="forward", path="input"), Arg(name="weight", source="parameter", path="weight")]
    if m.bias is not None:
        args.append(Arg(name="bias", source="parameter", path="bias"))
    return Match(op="patch_embed", status="known", reason=reason, binding=Binding(args=tuple(args)), traits=traits)


OP = Op(
    name="patch_embed",
    summary="patches of an image or clip times one matrix",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    source="Dosovitskiy et al. 2020, arXiv:2010.11929",
)
