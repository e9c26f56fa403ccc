"""The entry of a multi-token prediction head: the next token's embedding joined with the hidden state before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from dz.core.inventory import Match, SiteView
from dz.core.op import Case, Op
from dz.ops import rms_norm
from dz.ops._live import Unreadable
from dz.ops._reader import read
from dz.ops._tree import Node, keyword, walk
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def reference(
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    embedding_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    hidden_first: bool = False,
) -> torch.Tensor:
    """[..., D] in hidden's dtype: `W [rms(embedding) * e ; rms(hidden) * h]`, fp32 inside. embedding and hidden
    [..., D], both norms' weights [D], W [D, 2 D]. `hidden_first` joins them the other way round. A decoder layer and
    the model's own head follow it. Source: arXiv:2412.19437, section 2.2."""
    e, h = (
        wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps) * wide(w)
        for x, w in ((embedding, embedding_norm), (hidden, hidden_norm))
    )
    pair = (h, e) if hidden_first else (e, h)
    return F.linear(torch.cat(pair, -1), wide(weight)).to(hidden.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: both orders, odd widths, one token, none, strided."""
    m = Maker(dtype, device, seed)

    def base(*lead: int, d: int) -> dict[str, Any]:
        return {
            "embedding": m.normal(*lead, d),
            "hidden": m.normal(*lead, d, scale=3.0),
            "embedding_norm": m.normal(d, scale=0.2, shift=1.0),
            "hidden_norm": m.normal(d, scale=0.2, shift=1.0),
            "weight": m.normal(d, 2 * d, scale=(2 * d) ** -0.5),
        }

    yield Case("t7_d33", base(7, d=33))
    yield Case("b2_t5", base(2, 5, d=24))
    yield Case("hidden_first", {**base(4, d=16), "hidden_first": True, "eps": 1e-3})
    yield Case("one", base(1, d=8))
    yield Case("none", base(0, d=8))
    yield Case("strided", {**base(6, d=16), "hidden": m.normal(6, 32)[:, ::2]})


def recognise(site: SiteView) -> Match | None:
    """A module that projects two normalised arguments joined on their last axis; a variant where more follows."""
    if site.kind != "module":
        return None
    try:
        root = read(site.target).root
    except Unreadable:
        return None
    joins = [n for n in walk(root) if n[0] == "callmod" and len(n) == 3 and _joined(site.target, n[2])]
    if not joins:
        return None
    sides = [c[1] for c in joins[0][2][1][1:]]
    traits = {"norms": sides, "projection": joins[0][1]}
    reason = f"{joins[0][1]} of {sides[0]} and {sides[1]}"
    if root is joins[0] or root == joins[0]:
        return Match(op="mtp_join", status="known", reason=reason, traits=traits)
    return Match(op="mtp_join", status="variant", reason=reason, differs=("more follows in the module",), traits=traits)


def _joined(module: Any, node: Node) -> bool:
    """Whether a node is `cat((norm(a), norm(b)), -1)` of two arguments."""
    if node[0] != "cat" or keyword(node, "dim") not in (("const", -1), ("const", 2)) or node[1][0] != "tuple":
        return False
    calls = node[1][1:]
    return len(calls) == 2 and all(
        c[0] == "callmod" and len(c) == 3 and c[2][0] == "arg" and _is_norm(module, c[1]) for c in calls
    )


def _is_norm(module: Any, path: str) -> bool:
    """A child with one vector as its parameter that the norm's own recognition takes."""
    child = module.get_submodule(path)
    found = rms_norm.recognise(SiteView(kind="module", fqn=path, target=child, source="", config=None))
    return found is not None and found.status == "known"


OP = Op(
    name="mtp_join",
    summary="entry of a multi-token prediction head",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    source="arXiv:2412.19437, section 2.2",
)
