"""Recognise a delta rule by running a function on small random inputs."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from dz.core.inventory import Arg, Binding, Match, SiteView

_FIRST = ("q", "k", "v", "g", "beta")


def delta_rule(site: SiteView, op: str, reference: Callable[..., Any], per_channel: bool) -> Match | None:
    """A function of (queries, keys, values, log decays, beta, ...) with a state, that returns (output, state)."""
    f = site.target
    if site.kind != "function" or not isinstance(f, types.FunctionType) or not _may_be(f, site.source):
        return None
    names = list(inspect.signature(f).parameters)
    options = _options(names[5:])
    if "state" not in options:
        return None
    args, state = _inputs(per_channel)
    kwargs = {options[x]: v for x, v in (("normalize", True), ("return_state", True)) if x in options}
    try:
        with torch.no_grad():
            got = f(*args, **{options["state"]: state.clone()}, **kwargs)
    except Exception:  # noqa: BLE001  a function of another shape may fail in any way
        return None
    for normalize in (True, False) if "normalize" not in options else (True,):
        for scale in (None, 1.0):
            want = reference(*args, state=state, normalize=normalize, scale=scale)
            if _same(got, want):
                return _match(op, names, options, normalize, scale)
    return None


def _may_be(f: types.FunctionType, text: str) -> bool:
    """Whether it is worth a run: it takes five tensors and more, decays something and says `beta`."""
    parameters = list(inspect.signature(f).parameters.values())
    needed = [p for p in parameters[:6] if p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(needed) >= 6 and "exp()" in text and any("beta" in p.name for p in needed[:5])


def _options(names: list[str]) -> dict[str, str]:
    """The op's own names of further parameters, to the function's."""
    found: dict[str, str] = {}
    for name in names:
        if "output" in name or "return" in name:
            found.setdefault("return_state", name)
        elif "state" in name:
            found.setdefault("state", name)
        elif "norm" in name:
            found.setdefault("normalize", name)
    return found


def _inputs(per_channel: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    gen = torch.Generator().manual_seed(17)
    batch, tokens, heads, dim, dim_v = 2, 6, 2, 4, 8
    q, k = torch.randn(2, batch, tokens, heads, dim, generator=gen)
    v = torch.randn(batch, tokens, heads, dim_v, generator=gen)
    g = -torch.rand((batch, tokens, heads, dim)[: 4 if per_channel else 3], generator=gen)
    beta = torch.rand(batch, tokens, heads, generator=gen)
    return [q, k * 0.5, v, g, beta], torch.randn(batch, heads, dim, dim_v, generator=gen)


def _same(got: Any, want: Any) -> bool:
    return (
        isinstance(got, tuple)
        and len(got) == 2
        and all(
            isinstance(a, torch.Tensor) and a.shape == b.shape and torch.allclose(a.float(), b, atol=1e-4, rtol=1e-4)
            for a, b in zip(got, want, strict=True)
        )
    )


def _match(op: str, names: list[str], options: dict[str, str], normalize: bool, scale: float | None) -> Match:
    args = [Arg(name=n, source="forward", path=p) for n, p in zip(_FIRST, names[:5], strict=True)]
    args += [Arg(name=n, source="forward", path=p) for n, p in options.items()]
    if "normalize" not in options:
        args.append(Arg(name="normalize", source="constant", value=normalize))
    args.append(Arg(name="scale", source="constant", value=scale))
    traits = {"normalize": "given" if "normalize" in options else normalize, "scale": scale, "arguments": names}
    return Match(op=op, status="known", reason="delta rule; a probe agrees", binding=Binding(args=tuple(args)),
                 traits=traits)  # fmt: skip
