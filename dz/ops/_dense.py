"""Recognise embeddings, linear projections and the head."""

from __future__ import annotations

from typing import Any

import torch

from dz.core.inventory import Arg, Binding, Match, SiteView
from dz.ops._live import Unreadable
from dz.ops._reader import read
from dz.ops._tree import NONE, Node, keyword, match, walk

_WEIGHT, _BIAS, _X = ("param", "weight"), ("param", "bias"), ("?", "x")
# (tree, whether the weight is [in, out])
_SPELLINGS: tuple[tuple[Node, bool], ...] = (
    (("matmul", _X, ("param", "weight.T")), False),
    (("add", ("matmul", _X, ("param", "weight.T")), _BIAS), False),
    (("matmul", _X, _WEIGHT), True),
    (("add", ("matmul", _X, _WEIGHT), _BIAS), True),
    (("reshape", ("addmm", _BIAS, _X, _WEIGHT), ("?", "shape")), True),
)


def resolve(target: Any, node: Node) -> Any:
    """The live value of an attribute or parameter node, or a constant's; None for anything else."""
    if node[0] == "const":
        return node[1]
    if node[0] == "neg":
        inner = resolve(target, node[1])
        return -inner if isinstance(inner, (int, float)) else None
    if node[0] == "cast":
        return resolve(target, node[1])
    if node[0] not in ("attr", "param"):
        return None
    for part in node[1].split("."):
        target = getattr(target, part, None)
    return target


def number(target: Any, node: Node) -> float | None:
    """The number that a node is known to be: a constant, an attribute, or a buffer of one element that is computed."""
    value = resolve(target, node)
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and value.device.type != "meta" else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def tensor(target: Any, node: Node | None) -> torch.Tensor | None:
    """The tensor that a parameter node names, None where it is absent."""
    value = None if node is None else resolve(target, node)
    return value if isinstance(value, torch.Tensor) else None


def argument(node: Node) -> str | None:
    """The name of the forward argument that a node is, shape changes and casts aside."""
    while node[0] in ("reshape", "cast", "flatten", "unsqueeze", "squeeze"):
        node = node[1]
    return node[1] if node[0] == "arg" else None


def is_head(site: SiteView) -> bool:
    """Whether a module is what its model calls its output embeddings."""
    get = getattr(site.parent, "get_output_embeddings", None)
    return get is not None and get() is site.target


def _projection(site: SiteView) -> tuple[Node, Node] | None:
    """(linear node, root) of a module whose forward holds exactly one F.linear of its own weight."""
    if site.kind != "module" or tensor(site.target, ("param", "weight")) is None:
        return None
    try:
        root = read(site.target).root
    except Unreadable:
        return None
    own = [n for n in walk(root) if n[0] == "linear" and keyword(n, "weight") == ("param", "weight")]
    return (own[0], root) if len(own) == 1 else None


def linear(site: SiteView, op: str = "linear") -> Match | None:
    """A module whose forward is `F.linear(x, weight, bias)`."""
    found = _projection(site)
    if is_head(site) != (op == "lm_head"):
        return None
    if found is None:
        return _written_out(site, op)
    node, root = found
    weight = site.target.weight
    bias = tensor(site.target, keyword(node, "bias") or NONE)
    traits = {"in": weight.shape[-1], "out": weight.shape[0], "bias": bias is not None}
    if root is not node and root != node:
        return None if op == "linear" and len(walk(root)) > 12 * len(walk(node)) else _wrapped(op, root, node, traits)
    name = argument(node[1])
    if name is None or weight.dim() != 2 or node[1][0] != "arg":
        return None
    args = [Arg(name="x", source="forward", path=name), Arg(name="weight", source="parameter", path="weight")]
    if bias is not None:
        args.append(Arg(name="bias", source="parameter", path=keyword(node, "bias")[1]))  # type: ignore[index]
    return Match(
        op=op, status="known", reason="forward is x @ weight.T + bias", binding=Binding(args=tuple(args)), traits=traits
    )


def _written_out(site: SiteView, op: str) -> Match | None:
    """A projection spelled as a product: `x @ weight.T + bias`, or `addmm(bias, x, weight)` with weight [in, out]."""
    weight = tensor(site.target, ("param", "weight"))
    if site.kind != "module" or weight is None or weight.dim() != 2 or any(True for _ in site.target.children()):
        return None
    try:
        root = read(site.target).root
    except Unreadable:
        return None
    bias = tensor(site.target, ("param", "bias"))
    transposed = None
    for pattern, swapped in _SPELLINGS:
        found = match(pattern, root)
        if found is not None and argument(found["x"]) is not None:
            transposed = swapped
    if transposed is None:
        return None
    rows, columns = weight.shape[::-1] if transposed else weight.shape
    traits = {"in": columns, "out": rows, "bias": bias is not None, "transposed": transposed}
    reason = "forward is x @ weight + bias, the weight as [in, out]" if transposed else "forward is x @ weight.T + bias"
    return Match(op=op, status="known", reason=reason, traits=traits)


def _wrapped(op: str, root: Node, node: Node, traits: dict[str, Any]) -> Match:
    around = sorted({n[0] for n in walk(root)} - {n[0] for n in walk(node)} - {"kw", "const", "attr", "tuple"})
    return Match(
        op=op,
        status="variant",
        reason="a projection with more around it",
        differs=(f"also {', '.join(around) or 'more operands'}",),
        traits=traits,
    )


def lm_head(site: SiteView) -> Match | None:
    """The linear module that the model calls its output embeddings. Scale and softcap, where the model applies them
    after it, stay upstream's."""
    return linear(site, "lm_head")


def embedding(site: SiteView) -> Match | None:
    """A module whose forward looks rows up in its weight, perhaps times a scale."""
    if site.kind != "module" or tensor(site.target, ("param", "weight")) is None:
        return None
    try:
        root = read(site.target).root
    except Unreadable:
        return None
    inner, scale = root, 1.0
    if root[0] == "mul":
        a, b = root[1:]
        inner, factor = (b, a) if b[0] == "embedding" else (a, b)
        value = number(site.target, factor)
        if value is None:
            return None
        scale = value
    if inner[0] != "embedding" or keyword(inner, "weight") != ("param", "weight"):
        return None
    name, weight = argument(inner[1]), site.target.weight
    traits = {"rows": weight.shape[0], "width": weight.shape[1], "scale": scale}
    unusual = [k for k in ("max_norm",) if resolve(site.target, keyword(inner, k) or NONE) is not None]
    if unusual or name is None:
        return Match(
            op="embedding",
            status="variant",
            reason="a table look-up",
            differs=(f"{', '.join(unusual) or 'indices'} in use",),
            traits=traits,
        )
    args = [Arg(name="ids", source="forward", path=name), Arg(name="weight", source="parameter", path="weight")]
    if scale != 1.0:
        args.append(Arg(name="scale", source="constant", value=scale))
    reason = "forward is weight[ids]" if scale == 1.0 else f"forward is weight[ids] * {scale:g}"
    return Match(op="embedding", status="known", reason=reason, binding=Binding(args=tuple(args)), traits=traits)
