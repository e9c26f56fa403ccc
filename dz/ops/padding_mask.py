"""Hidden states of padding positions set to zero, as layers that keep a state need it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator

import torch

from dz.core.inventory import Arg, Binding, Match, SiteView
from dz.core.op import Case, Op
from dz.ops.cases import Maker
from dz.ops.precision import EXACT


def reference(x: torch.Tensor, mask: torch.Tensor | None = None, *, always: bool = True) -> torch.Tensor:
    """x [B, T, D] where mask [B, T] is 1, zero where it is 0, in x's dtype; x itself without a mask. Not `always`: one
    row and one token are left as they are, since a single sequence is padded only by who asks for it."""
    alone = not always and (x.shape[0] == 1 or x.shape[1] == 1)
    return x if mask is None or alone else (x * mask[..., None]).to(x.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: left padding, a row of padding alone, none, bool masks, one token, no tokens, strided."""
    m = Maker(dtype, device, seed)
    left = m.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    yield Case("left_padding", {"x": m.normal(3, 5, 7), "mask": left})
    yield Case("bool", {"x": m.normal(3, 5, 7), "mask": left.bool()})
    yield Case("no_mask", {"x": m.normal(2, 3, 4)})
    yield Case("one_token", {"x": m.normal(2, 1, 4), "mask": m.tensor([[1], [0]])})
    yield Case("one_row_left", {"x": m.normal(1, 5, 4), "mask": left[:1], "always": False})
    yield Case("one_token_left", {"x": m.normal(2, 1, 4), "mask": m.tensor([[1], [0]]), "always": False})
    yield Case("no_tokens", {"x": m.normal(2, 0, 4), "mask": left[:2, :0]})
    yield Case("strided", {"x": m.normal(3, 5, 8)[..., ::2], "mask": left})


def recognise(site: SiteView) -> Match | None:
    """A function of (x, mask) that does so, proved on random inputs."""
    f = site.target
    if site.kind != "function" or not isinstance(f, types.FunctionType):
        return None
    names = list(inspect.signature(f).parameters)
    if len(names) != 2:
        return None
    x = torch.randn((3, 5, 7), generator=torch.Generator().manual_seed(23))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    rows = ((x, mask), (x[:1], mask[:1]), (x[:, 1:2], mask[:, 1:2]), (x, None))
    always = next((a for a in (True, False) if all(_gives(f, r, k, reference(r, k, always=a)) for r, k in rows)), None)
    if always is None:
        return None
    args = [Arg(name="x", source="forward", path=names[0]), Arg(name="mask", source="forward", path=names[1])]
    args.append(Arg(name="always", source="constant", value=always))
    reason = "zero at padding positions; a probe agrees"
    binding = Binding(args=tuple(args))
    return Match(op="padding_mask", status="known", reason=reason, binding=binding, traits={"always": always})


def _gives(f: types.FunctionType, x: torch.Tensor, mask: torch.Tensor | None, want: torch.Tensor) -> bool:
    try:
        with torch.no_grad():
            got = f(x.clone(), mask)
    except Exception:  # noqa: BLE001  a function that only looks alike may fail in any way
        return False
    return isinstance(got, torch.Tensor) and torch.equal(got, want)


OP = Op(
    name="padding_mask",
    summary="hidden states of padding positions set to zero",
    reference=reference,
    tolerance=dict.fromkeys(("float32", "float16", "bfloat16"), EXACT),
    inputs=inputs,
    recognise=recognise,
    kind="function",
)
