"""The activation between the two projections of a feed-forward without a gate."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.inventory import Arg, Binding, Match, SiteView
from dz.core.op import Case, Op
from dz.errors import UsageError
from dz.ops._gates import activation_of
from dz.ops._live import Unreadable
from dz.ops._reader import read
from dz.ops.activations import activation as function_of
from dz.ops.cases import Maker
from dz.ops.precision import ELEMENTWISE, wide


def reference(x: torch.Tensor, *, activation: str, alpha: float = 1.0) -> torch.Tensor:
    """act(x), of x's shape and dtype, fp32 inside. `activation` is one of `dz.ops.activations`; with `alpha` silu is
    `x * sigmoid(alpha * x)` (1.702: an approximation of gelu). Raises UsageError for an alpha of another activation."""
    if alpha == 1.0:
        return function_of(activation)(wide(x)).to(x.dtype)
    if activation != "silu":
        what = f"alpha {alpha:g} of the activation {activation}"
        raise UsageError(what, "only silu has an alpha", "leave it out", code="bad_argument")
    return (wide(x) * torch.sigmoid(alpha * wide(x))).to(x.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: each activation, ragged widths, large values, one, none, strided."""
    m = Maker(dtype, device, seed)
    for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        yield Case(f"{name}_t7_d33", {"x": m.normal(7, 33), "activation": name})
    yield Case("silu_alpha", {"x": m.normal(5, 40), "activation": "silu", "alpha": 1.702})
    yield Case("gelu_large", {"x": m.normal(3, 65, scale=30.0), "activation": "gelu"})
    yield Case("batched", {"x": m.normal(2, 5, 96), "activation": "gelu_tanh"})
    yield Case("strided", {"x": m.normal(6, 64)[:, ::2], "activation": "silu"})
    yield Case("one", {"x": m.normal(1, 1), "activation": "relu2"})
    yield Case("none", {"x": m.normal(0, 12), "activation": "gelu"})


def recognise(site: SiteView) -> Match | None:
    """A module `down(act(up(x)))` whose projections are children; a variant where more stands between."""
    if site.kind != "module":
        return None
    try:
        root = read(site.target).root
    except Unreadable:
        return None
    if root[0] != "callmod" or len(root) != 3:
        return None
    act = activation_of(site.target, root[2])
    if act is None or act[1][0] != "callmod":
        return None
    name, up, alpha = act
    differs = []
    if len(up) != 3 or up[2][0] != "arg":
        differs.append(f"what goes into {up[1]} is not the argument itself")
    if name not in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        differs.append(f"the activation {name}")
    reason, traits = f"{name} between two projections", {"activation": name, "alpha": alpha}
    if differs:
        return Match(op="feed_forward", status="variant", reason=reason, differs=tuple(differs), traits=traits)
    x = Arg(name="x", source="child", path=up[1], value=up[2][1])
    values = {"activation": name} | ({"alpha": alpha} if alpha != 1.0 else {})
    constants = (Arg(name=k, source="constant", value=v) for k, v in values.items())
    binding = Binding(args=(x, *constants), then=root[1])
    return Match(op="feed_forward", status="known", reason=reason, binding=binding, traits=traits)


OP = Op(
    name="feed_forward",
    summary="activation of a feed-forward without a gate",
    reference=reference,
    tolerance=ELEMENTWISE,
    inputs=inputs,
    recognise=recognise,
)
