"""Recognise RMS and layer normalisation: which form, with which eps, weight offset and cast order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dz.core.inventory import Arg, Binding, Match, SiteView
from dz.ops._dense import number, tensor
from dz.ops._live import Unreadable
from dz.ops._reader import read
from dz.ops._tree import LAST, NONE, Node, dtype_of, find, keyword, match, walk

_F32 = ("dtype", "float32")
_MEAN = ("mean", ("square", ("?", "x")), ("kw", (("dim", LAST), ("keepdim", ("const", True)))))
_INVERSE = ("rsqrt", ("add", _MEAN, ("?", "eps")))
_CORE = ("mul", ("?", "x"), _INVERSE)
_MORE = ("linear", "matmul", "einsum", "callmod", "softmax", "conv1d")  # a module that does these is no norm


@dataclass(frozen=True, slots=True)
class _Form:
    """`weight` is the parameter's path; `offset` is added to it; `cast_first` rounds before the product."""

    x: str
    eps: Node
    weight: str | None
    offset: float
    cast_first: bool


def rms_norm(site: SiteView) -> Match | None:
    """A module that computes `x * rsqrt(mean(x^2) + eps)` times its weight, in one of the op's forms."""
    if site.kind != "module":
        return None
    try:
        tree = read(site.target)
    except Unreadable:
        return None
    form = _fused(site.target, tree.root) or _form(tree.root)
    if form is not None:
        return _known(site.target, form)
    return _near(site.target, tree.root, len(list(site.target.children())))


def _form(root: Node) -> _Form | None:
    """The form of a root that is exactly the normalisation, else None."""
    out_dtype = root[2] if root[0] == "cast" else None
    body = root[1] if root[0] == "cast" else root
    if (plain := match(_CORE, body)) is not None:
        return _finish(plain, None, 0.0, False, out_dtype)
    if body[0] != "mul":
        return None
    for weighted, inner in ((body[1], body[2]), (body[2], body[1])):
        factor = _factor(weighted)
        if factor is None:
            continue
        cast_first = inner[0] == "cast" and inner[2] != _F32
        found = match(_CORE, inner[1] if cast_first else inner)
        if found is not None:
            if cast_first and out_dtype is not None:
                return None  # rounded twice: no form of the op
            return _finish(found, factor[0], factor[1], cast_first, inner[2] if cast_first else out_dtype)
    return None


def _factor(node: Node) -> tuple[str, float] | None:
    """(weight path, offset) of `weight`, `weight.float()`, `1 + weight`."""
    if node[0] == "cast" and node[2] == _F32:
        node = node[1]
    if node[0] == "param":
        return node[1], 0.0
    if node[0] == "add":
        for w, c in ((node[1], node[2]), (node[2], node[1])):
            inner = _factor(w)
            if inner is not None and c[0] == "const" and isinstance(c[1], (int, float)):
                return inner[0], float(c[1]) + inner[1]
    return None


def _finish(
    found: dict[str, Node], weight: str | None, offset: float, cast_first: bool, out: Node | None
) -> _Form | None:
    x = found["x"]
    if x[0] != "cast" or x[2] != _F32 or x[1][0] != "arg":
        return None
    if out != dtype_of(x[1]):
        return None
    return _Form(x[1][1], found["eps"], weight, offset, cast_first)


def _fused(module: Any, root: Node) -> _Form | None:
    """`F.rms_norm(x, shape, weight, eps)`: fp32 inside, rounded once."""
    if root[0] != "rms_norm" or root[1][0] != "arg":
        return None
    weight = keyword(root, "weight")
    return _Form(
        root[1][1],
        keyword(root, "eps") or NONE,
        weight[1] if weight and tensor(module, weight) is not None else None,
        0.0,
        False,
    )


def _known(module: Any, form: _Form) -> Match:
    eps = number(module, form.eps)
    weight = tensor(module, ("param", form.weight)) if form.weight else None
    traits: dict[str, Any] = {"eps": eps, "offset": form.offset, "cast_first": form.cast_first}
    traits["weight"] = weight is not None
    differs = []
    if eps is None:
        differs.append("eps is None: the machine epsilon of the input's dtype")
    if weight is not None and weight.dim() != 1:
        differs.append(f"the weight has shape {list(weight.shape)}, the op's has one axis")
    if eps is None or differs:
        return Match(op="rms_norm", status="variant", reason="an RMS norm", differs=tuple(differs), traits=traits)
    if weight is not None:
        traits["width"] = weight.shape[0]
    binding = Binding(args=_arguments(form, eps))
    return Match(op="rms_norm", status="known", reason=_formula(form, eps), binding=binding, traits=traits)


def _arguments(form: _Form, eps: float) -> tuple[Arg, ...]:
    args = [Arg(name="x", source="forward", path=form.x)]
    if form.weight:
        args.append(Arg(name="weight", source="parameter", path=form.weight))
    if form.eps[0] == "attr":
        args.append(Arg(name="eps", source="attribute", path=form.eps[1], value=eps))
    else:
        args.append(Arg(name="eps", source="constant", value=eps))
    args.append(Arg(name="offset", source="constant", value=form.offset))
    args.append(Arg(name="cast_first", source="constant", value=form.cast_first))
    return tuple(args)


def _formula(form: _Form, eps: float) -> str:
    if not form.weight:
        return f"x / rms(x), eps {eps:g}"
    scale = f"({form.offset:g} + w)" if form.offset else "w"
    order = "rounded before the weight" if form.cast_first else "weight in fp32"
    return f"x / rms(x) * {scale}, eps {eps:g}, {order}"


def _near(module: Any, root: Node, children: int) -> Match | None:
    """A variant when the heart of the norm is there, in a small module that does little else."""
    inverse = find(_INVERSE, root)
    if inverse is None or children > 1 or any(n[0] in _MORE for n in walk(root)):
        return None
    core = find(_CORE, root)
    x = (core or inverse)[1]["x"]
    differs: list[str] = []
    if core is None:
        rounded = any(n[0] == "cast" and n[1] == inverse[0] for n in walk(root))
        scaled = any(n[0] == "mul" and any(match(_INVERSE, m) is not None for m in walk(n)) for n in walk(root))
        differs.append(
            "it returns 1 / rms(x) alone"
            if not scaled
            else "1 / rms(x) is rounded before it multiplies"
            if rounded
            else "1 / rms(x) multiplies something else"
        )
    if any(n[0] == "reshape" for n in walk(x)):
        differs.append("it normalises groups of the last axis")
    elif x[0] != "cast":
        differs.append("the statistics are taken in the input's dtype")
    differs += _gates(root)
    eps = number(module, inverse[1]["eps"])
    if core is not None and not differs:
        differs.append("another order of rounding or another factor: " + _factors(root))
    return Match(
        op="rms_norm",
        status="variant",
        reason="an RMS norm with more to it",
        differs=tuple(differs),
        traits={"eps": eps},
    )


def _gates(root: Node) -> list[str]:
    out = []
    for n in walk(root):
        if n[0] in ("silu", "sigmoid", "gelu", "relu"):
            args = [a[1] for a in walk(n) if a[0] == "arg"]
            if args:
                before = any(m[0] == "rsqrt" and n in walk(m) for m in walk(root))
                out.append(f"multiplied by {n[0]}({args[0]}) {'before' if before else 'after'} the norm")
    return sorted(set(out))


def _factors(root: Node) -> str:
    names = sorted({n[1] for n in walk(root) if n[0] in ("param", "attr")})
    return f"reads {', '.join(names)}" if names else "no weight"


def layer_norm(site: SiteView) -> Match | None:
    """A module whose forward is `F.layer_norm` over its last axis."""
    if site.kind != "module":
        return None
    try:
        root = read(site.target).root
    except Unreadable:
        return None
    if root[0] != "layer_norm" or root[1][0] != "arg":
        return None
    target, eps = site.target, number(site.target, keyword(root, "eps") or ("const", 1e-5))
    weight, bias = (tensor(target, keyword(root, k) or NONE) for k in ("weight", "bias"))
    shape = getattr(target, "normalized_shape", None)
    traits = {"eps": eps, "weight": weight is not None, "bias": bias is not None}
    if eps is None or (shape is not None and len(tuple(shape)) != 1):
        return Match(
            op="layer_norm",
            status="variant",
            reason="a layer norm",
            differs=(f"over {shape}, eps {eps}",),
            traits=traits,
        )
    args = [Arg(name="x", source="forward", path=root[1][1])]
    args += [Arg(name=k, source="parameter", path=k) for k, v in (("weight", weight), ("bias", bias)) if v is not None]
    args.append(Arg(name="eps", source="constant", value=eps))
    return Match(
        op="layer_norm",
        status="known",
        reason=f"F.layer_norm, eps {eps:g}",
        binding=Binding(args=tuple(args)),
        traits=traits,
    )
