"""Recognise gated feed-forward modules: `down(act(gate(x)) * up(x))`, clamped and packed forms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dz.core.inventory import Arg, Binding, Match, SiteView
from dz.ops._dense import number, resolve
from dz.ops._live import Unreadable
from dz.ops._reader import read
from dz.ops._tree import Node, keyword, walk

_UNARY = {"silu": "silu", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"}


@dataclass(slots=True)
class Gate:
    """What multiplies what: `activation` by the op's name, the two nodes, and the constants of the clamped form."""

    activation: str
    gate: Node
    up: Node
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0
    differs: list[str] = field(default_factory=list)


def activation_of(module: Any, node: Node) -> tuple[str, Node, float] | None:
    """(name, operand, alpha) of an activation node."""
    if node[0] in _UNARY:
        return _UNARY[node[0]], node[1], 1.0
    if node[0] == "gelu":
        form = keyword(node, "approximate")
        name = {None: "gelu", "none": "gelu", "tanh": "gelu_tanh"}.get(None if form is None else resolve(module, form))
        return None if name is None else (name, node[1], 1.0)
    if node[0] == "square" and node[1][0] == "relu":
        return "relu2", node[1][1], 1.0
    if node[0] == "mul":
        for x, s in ((node[1], node[2]), (node[2], node[1])):
            if s[0] == "sigmoid" and s[1][0] == "mul":
                for y, a in ((s[1][1], s[1][2]), (s[1][2], s[1][1])):
                    alpha = number(module, a)
                    if y == x and alpha is not None:
                        return "silu", x, alpha
    return None


def read_gate(module: Any, node: Node) -> Gate | None:
    """The gate form of a product node, else None."""
    if node[0] != "mul":
        return None
    for acted, up in ((node[1], node[2]), (node[2], node[1])):
        act = activation_of(module, acted)
        if act is None or not _from_child(act[1]):
            continue
        out = Gate(act[0], act[1], up, alpha=act[2])
        if up[0] == "add":
            for u, c in ((up[1], up[2]), (up[2], up[1])):
                shift = number(module, c)
                if shift is not None:
                    out.up, out.shift = u, shift
        _clamps(module, out)
        return out if _from_child(out.up) else None
    return None


def _from_child(node: Node) -> bool:
    return any(n[0] in ("callmod", "linear", "arg") for n in walk(node))


def _clamps(module: Any, g: Gate) -> None:
    bounds = []
    for side in ("gate", "up"):
        node = getattr(g, side)
        if node[0] == "clamp":
            setattr(g, side, node[1])
            low, high = (number(module, k) if (k := keyword(node, name)) else None for name in ("min", "max"))
            bounds.append((side, low, high))
    if not bounds:
        return
    table = {side: (low, high) for side, low, high in bounds}
    limit = table.get("gate", (None, None))[1]
    if limit is not None and table.get("gate") == (None, limit) and table.get("up") == (-limit, limit):
        g.limit = limit
    else:
        g.differs.append(f"clamps {', '.join(f'{s} to [{a}, {b}]' for s, a, b in bounds)}")


def gated_activation(site: SiteView) -> Match | None:
    """A module `down(act(gate(x)) * up(x))` whose projections are children, or a function `act(gate) * up`. Plain
    `down(act(up(x)))` is a variant."""
    if site.kind == "interface":
        return None
    try:
        tree = read(site.target)
    except Unreadable:
        return None
    root, then = tree.root, ""
    if root[0] == "callmod" and len(root) == 3:
        then, root = root[1], root[2]
    alone = activation_of(site.target, root)
    gate = read_gate(site.target, root) if alone is None else None
    if gate is not None:
        return _match(gate, then)
    return _plain(site.target, tree.root) if site.kind == "module" else None


def _plain(module: Any, root: Node) -> Match | None:
    if root[0] == "callmod" and len(root) == 3:
        act = activation_of(module, root[2])
        if act is not None and act[1][0] == "callmod":
            differs = (f"not gated: {act[0]} of one projection",)
            return Match(
                op="gated_activation",
                status="variant",
                reason="a plain feed-forward",
                differs=differs,
                traits={"activation": act[0]},
            )
    products = [n for n in walk(root) if n[0] == "mul"]
    inner = next((g for g in (read_gate(module, n) for n in products) if g is not None), None)
    calls = {n[1] for n in walk(root) if n[0] == "callmod"}
    if inner is None or not 2 <= len(calls) <= 3 or len(products) > 6:
        return None
    extra = sorted({n[1] for n in walk(root) if n[0] == "attr"})
    return Match(
        op="gated_activation",
        status="variant",
        reason="a gated feed-forward with more to it",
        differs=(f"also uses {', '.join(extra) or 'other factors'}",),
        traits={"activation": inner.activation},
    )


def _sources(g: Gate) -> tuple[list[tuple[str, str, str]], bool] | None:
    """([(op argument, child path, forward argument)], interleaved) of the two operands."""
    a, b = g.gate, g.up
    if a[0] == b[0] == "callmod" and len(a) == len(b) == 3 and a[2][0] == "arg" and b[2] == a[2]:
        return [("gate", a[1], a[2][1]), ("up", b[1], b[2][1])], False
    if a[0] == b[0] == "arg" and a != b:
        return [("gate", "", a[1]), ("up", "", b[1])], False
    if (
        a[0] == b[0]
        and a[0] in ("part", "stride")
        and a[1] == b[1]
        and a[1][0] == "callmod"
        and len(a[1]) == 3
        and a[1][2][0] == "arg"
    ):
        if (a[2], b[2]) != (("const", 0), ("const", 1)) or (a[0] == "part" and a[4] != ("const", -1)):
            return None
        return [("gate", a[1][1], a[1][2][1])], a[0] == "stride"
    return None


def _match(g: Gate, then: str) -> Match:
    traits = {"activation": g.activation, "alpha": g.alpha, "limit": g.limit, "shift": g.shift}
    sources = _sources(g)
    differs = list(g.differs)
    if g.activation in ("tanh",):
        differs.append(f"the activation {g.activation}")
    if sources is None:
        differs.append(f"gate is {_short(g.gate)}, up is {_short(g.up)}")
    if differs or sources is None:
        return Match(
            op="gated_activation",
            status="variant",
            reason="a gated feed-forward",
            differs=tuple(differs),
            traits=traits,
        )
    pairs, interleaved = sources
    args = [
        Arg(name=n, source="child", path=p, value=a) if p else Arg(name=n, source="forward", path=a)
        for n, p, a in pairs
    ]
    defaults = {"activation": "silu", "interleaved": False, "alpha": 1.0, "limit": None, "shift": 0.0}
    values = {**traits, "interleaved": interleaved}
    args += [
        Arg(name=k, source="constant", value=values[k])
        for k, d in defaults.items()
        if k == "activation" or values[k] != d
    ]
    reason = f"{g.activation}(gate) * up" + (f", clamped at {g.limit:g}" if g.limit is not None else "")
    return Match(
        op="gated_activation",
        status="known",
        reason=reason,
        binding=Binding(args=tuple(args), then=then),
        traits={**traits, "packed": len(pairs) == 1},
    )


def _short(node: Node) -> str:
    """A node in a few words, for messages."""
    if node[0] in ("arg", "param", "attr"):
        return str(node[1])
    if node[0] == "callmod":
        return f"{node[1]}({', '.join(_short(n) for n in node[2:] if n[0] != 'kw')})"
    if node[0] == "const":
        return str(node[1])
    return f"{node[0]}({', '.join(_short(n) for n in node[1:] if isinstance(n, tuple) and n[:1] != ('kw',))})"[:60]
