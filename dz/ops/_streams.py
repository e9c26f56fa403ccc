"""Recognise modules over several residual streams: by the shapes of their parameters, then by running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dz.core.inventory import Match, SiteView

_LARGEST = 1 << 24  # elements of the projection; a probe of more would take longer than it is worth
_TOKENS = 3


def hyper_connection(site: SiteView, reference: Callable[..., Any]) -> Match | None:
    """A module whose parameters are fn [(2 + N) N, N D], base [(2 + N) N] and scale [3]."""
    found = _parameters(site, 3, lambda n: (2 + n) * n)
    if found is None:
        return None
    names, streams = found
    rounds = sorted({v for v in vars(site.target).values() if type(v) is int and 1 <= v <= 64} - {streams}) or [1]
    options = ({"iterations": r, "eps": e, "norm_eps": ne} for r in rounds for e, ne in _epsilons(site.target))
    return _proved("hyper_connection", site.target, names, streams, reference, options)


def hyper_collapse(site: SiteView, reference: Callable[..., Any]) -> Match | None:
    """A module whose parameters are fn [N, N D], base [N] and scale [1]."""
    found = _parameters(site, 1, lambda n: n)
    if found is None:
        return None
    options = ({"eps": e, "norm_eps": ne} for e, ne in _epsilons(site.target))
    return _proved("hyper_collapse", site.target, found[0], found[1], reference, options)


def _parameters(site: SiteView, scales: int, rows: Callable[[int], int]) -> tuple[dict[str, str], int] | None:
    """({fn, base, scale} -> the module's names, N) when a module holds exactly these three."""
    m = site.target
    if site.kind != "module" or not isinstance(m, nn.Module):
        return None
    held = {n: tuple(p.shape) for n, p in m.named_parameters(recurse=True)}
    wide = [n for n, s in held.items() if len(s) == 2]
    flat = [n for n, s in held.items() if len(s) == 1]
    if len(held) != 3 or len(wide) != 1 or len(flat) != 2 or held[wide[0]][0] * held[wide[0]][1] > _LARGEST:
        return None
    streams = next((n for n in range(2, 17) if rows(n) == held[wide[0]][0]), 0)
    base, scale = sorted(flat, key=lambda n: -held[n][0])
    fits = streams and held[wide[0]][1] % streams == 0
    if not fits or held[base] != (rows(streams),) or held[scale] != (scales,):
        return None
    return {"fn": wide[0], "base": base, "scale": scale}, streams


def _epsilons(m: nn.Module) -> Iterator[tuple[float, float]]:
    """(eps, norm_eps) from the small numbers that the module and its children hold."""

    def small(owner: nn.Module) -> list[float]:
        return [v for v in vars(owner).values() if isinstance(v, float) and 0 < v < 0.1]

    own = small(m) or [1e-6]
    inner = [v for c in m.children() for v in small(c)] or own
    yield from dict.fromkeys((a, b) for a in own for b in inner)


def _proved(
    op: str,
    m: nn.Module,
    names: dict[str, str],
    streams: int,
    reference: Callable[..., Any],
    options: Iterator[dict[str, Any]],
) -> Match | None:
    generator = torch.Generator().manual_seed(19)
    shapes = {role: tuple(m.get_parameter(name).shape) for role, name in names.items()}
    width = shapes["fn"][1] // streams
    drawn = {role: torch.randn(s, generator=generator) for role, s in shapes.items()}
    drawn["fn"] *= shapes["fn"][1] ** -0.5
    x = torch.randn((1, _TOKENS, streams, width), generator=generator)
    got = _run(m, {names[role]: t for role, t in drawn.items()}, x)
    if got is None:
        return None
    for option in options:
        want = reference(x, **drawn, **option)
        if _agree(got, want if isinstance(want, tuple) else (want,)):
            traits = {"streams": streams, **option}
            return Match(op=op, status="known", reason=f"{streams} streams; a probe agrees", traits=traits)
    differs = ("its parameters have the op's shapes, its numbers are others",)
    return Match(op=op, status="variant", reason=f"{streams} streams", differs=differs, traits={"streams": streams})


def _run(m: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    try:
        with torch.no_grad():
            out = torch.func.functional_call(m, parameters, (x,))
    except Exception:  # noqa: BLE001  a module that only looks alike may fail in any way
        return None
    found = out if isinstance(out, tuple) else (out,)
    return found if all(isinstance(t, torch.Tensor) for t in found) else None


def _agree(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> bool:
    """Whether two results hold the same tensors, in any order."""
    left = list(got)
    for w in want:
        hits = [i for i, t in enumerate(left) if t.shape == w.shape and torch.allclose(t, w, atol=1e-4, rtol=1e-4)]
        if not hits:
            return False
        del left[hits[0]]
    return not left
