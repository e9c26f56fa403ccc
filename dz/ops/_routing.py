"""Recognise routers and expert layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from dz.core.inventory import Match, SiteView
from dz.ops._dense import number, tensor
from dz.ops._gates import activation_of, read_gate
from dz.ops._live import Unreadable
from dz.ops._reader import read
from dz.ops._tree import Node, keyword, walk

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def router(site: SiteView) -> Match | None:
    """A module that scores experts with a weight of its own and picks the best k."""
    if site.kind != "module" or not isinstance(site.target, nn.Module):
        return None
    try:
        root = read(site.target).root
    except Unreadable:
        return None
    nodes = walk(root)
    logits = [n for n in nodes if n[0] == "linear" and tensor(site.target, keyword(n, "weight")) is not None]
    if not logits or root[0] not in ("tuple", "if") or any(n[0] == "callmod" for n in nodes):
        return None
    tops = [n for n in nodes if n[0] == "topk"]
    traits: dict[str, Any] = {"experts": tensor(site.target, keyword(logits[0], "weight")).shape[0]}  # type: ignore[union-attr]
    if not tops:
        held = any(n[0] == "param" and _whole_numbers(site.target, n) for n in nodes)
        return _variant("router", "scores experts", "the experts come from a table", traits) if held else None
    if len({str(n) for n in logits}) > 1:
        return None
    traits |= _choice(site.target, logits[0], tops, nodes)
    reason = f"top {traits['top_k']} of {traits['experts']}, {traits['scoring'] or 'other scoring'}"
    if traits["scoring"] is None:
        return _variant("router", reason, f"scores by {_outer(tops[0], logits[0])}", traits)
    return Match(op="router", status="known", reason=reason, traits=traits)


def _variant(op: str, reason: str, differs: str, traits: dict[str, Any]) -> Match:
    return Match(op=op, status="variant", reason=reason, differs=(differs,), traits=traits)


def _choice(module: nn.Module, logits: Node, tops: list[Node], nodes: list[Node]) -> dict[str, Any]:
    """How experts are chosen and weighed."""
    k, own = keyword(tops[0], "k"), walk(logits)
    return {
        "top_k": number(module, k) if k else None,
        "scoring": _scoring(logits, nodes, tops[0]),
        "grouped": len({str(t) for t in tops}) > 1,
        "correction": any(n[0] in ("param", "arg") and n not in own for n in walk(tops[0][1])),
        "renormalise": any(n[0] == "div" and any(m[0] == "sum" for m in walk(n)) for n in nodes),
    }


def _whole_numbers(module: nn.Module, node: Node) -> bool:
    held = tensor(module, node)
    return held is not None and not held.dtype.is_floating_point and held.dim() > 1


def _scoring(logits: Node, nodes: list[Node], final: Node) -> str | None:
    inside = {n[0] for n in walk(final[1])} - {n[0] for n in walk(logits)}
    for name in ("softmax", "sigmoid"):
        if name in inside:
            return name
    unary = inside & {"softplus", "sqrt", "silu", "relu", "exp", "tanh", "log", "rsqrt"}
    if {"softplus", "sqrt"} <= inside and unary == {"softplus", "sqrt"}:
        return "sqrt_softplus"
    if not unary and any(n[0] == "softmax" and final in walk(n) for n in nodes):
        return "topk_softmax"
    return None


def _outer(final: Node, logits: Node) -> str:
    names = {n[0] for n in walk(final[1])} - {n[0] for n in walk(logits)} - {"kw", "const", "attr", "cast", "dtype"}
    return ", ".join(sorted(names)) or "the raw logits"


def experts(site: SiteView) -> Match | None:
    """An expert layer: stacked weights [E, ., .], behind upstream's experts interface or not."""
    m = site.target
    if not isinstance(m, nn.Module):
        return None
    stacked = {n: tuple(p.shape) for n, p in m.named_parameters(recurse=False) if p.dim() == 3}
    flags = {f: getattr(m, f) for f in _FLAGS if isinstance(getattr(m, f, None), bool)}
    if len(stacked) < 2 or len({s[0] for s in stacked.values()}) != 1:
        return None
    if (site.kind == "interface") != (len(flags) == len(_FLAGS)):
        return None
    traits: dict[str, Any] = {"experts": next(iter(stacked.values()))[0]}
    traits["shapes"] = {n: list(s) for n, s in stacked.items()}
    if not flags:
        return _variant("experts", "stacked experts", "not behind the experts interface", traits)
    traits |= {"gated": flags["has_gate"], "bias": flags["has_bias"], "transposed": flags["is_transposed"]}
    traits["interleaved"] = not flags["is_concatenated"]
    reason = f"{traits['experts']} experts, {'[E, in, out]' if flags['is_transposed'] else '[E, out, in]'}"
    if getattr(m, "has_post_expert_norm", False):
        return _variant("experts", reason, "a norm follows each expert", traits)
    form = _gate(m) if flags["has_gate"] else _plain(m)
    if form is None:
        return _variant("experts", reason, "the gate has a form that the op does not know", traits)
    return Match(op="experts", status="known", reason=reason, traits=traits | form)


def _gate(m: nn.Module) -> dict[str, Any] | None:
    try:
        root = read(m, "_apply_gate").root
    except (Unreadable, AttributeError):
        return None
    gate = read_gate(m, root)
    if gate is None or gate.differs:
        return None
    return {"activation": gate.activation, "alpha": gate.alpha, "limit": gate.limit, "shift": gate.shift}


def _plain(m: nn.Module) -> dict[str, Any] | None:
    act = getattr(m, "act_fn", None)
    if not isinstance(act, nn.Module):
        return None
    try:
        found = activation_of(act, read(act).root)
    except Unreadable:
        return None
    return None if found is None else {"activation": found[0]}
