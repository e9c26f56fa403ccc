"""Recognise selective scans by running functions of (x, dt, A, B, C, ...) on small random inputs."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from dz.core.inventory import Match, SiteView

_STEP = "it moves its state on in place"


def _candidate(site: SiteView) -> dict[str, inspect.Parameter] | None:
    """The parameters of a function that takes the matrices of a scan, else None."""
    f = site.target
    if site.kind != "function" or not isinstance(f, types.FunctionType):
        return None
    found = dict(inspect.signature(f).parameters)
    return found if {"dt", "A", "B", "C"} <= set(found) else None


def _call(f: Callable[..., Any], names: dict[str, Any], *first: Any, **more: Any) -> Any:
    """The result with the keywords that the function takes; None when it does not run so."""
    try:
        with torch.no_grad():
            return f(*first, **{k: v for k, v in more.items() if k in names})
    except Exception:  # noqa: BLE001  a wrong guess at a signature may fail in any way
        return None


def _same(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and a.shape == b.shape and torch.allclose(a, b, atol=1e-4, rtol=1e-4)


def _draw(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(17)
    return [torch.randn(s, generator=generator) for s in shapes]


def _answer(op: str, whole: bool) -> Match:
    if whole:
        return Match(op=op, status="known", reason="scans a whole sequence; a probe agrees")
    return Match(op=op, status="variant", reason="one step of a scan; a probe agrees", differs=(_STEP,))


def mamba2(site: SiteView, reference: Callable[..., Any]) -> Match | None:
    """A scan with one decay per head, in chunks or one step."""
    names = _candidate(site)
    if names is None:
        return None
    f, (b, t, h, p, g, n) = site.target, (2, 7, 4, 3, 2, 5)
    x, dt, a, bb, cc, d, bias, state = _draw(
        (b, t, h, p), (b, t, h), (h,), (b, t, g, n), (b, t, g, n), (h,), (h,), (b, h, p, n)
    )
    a = -a.exp()
    want, last = reference(x, dt, a, bb, cc, D=d, dt_bias=bias, state=state)
    more = {"chunk_size": 4, "D": d, "dt_bias": bias, "initial_states": state, "dt_softplus": True}
    got = _call(f, names, x.clone(), dt, a, bb, cc, return_final_states=True, **more)
    if isinstance(got, tuple) and len(got) == 2 and _same(got[0], want) and _same(got[1], last):
        return _answer("mamba2_scan", True)
    want, last = reference(x[:, :1], dt[:, :1], a, bb[:, :1], cc[:, :1], D=d, dt_bias=bias, state=state)
    wide_a, moved = a[:, None, None].expand(h, p, n), state.clone()
    per_head = {"D": d[:, None].expand(h, p), "dt_bias": bias[:, None].expand(h, p), "dt_softplus": True}
    got = _call(f, names, moved, x[:, 0], dt[:, 0, :, None].expand(b, h, p), wide_a, bb[:, 0], cc[:, 0], **per_head)
    return _answer("mamba2_scan", False) if _same(got, want[:, 0]) and _same(moved, last) else None


def mamba1(site: SiteView, reference: Callable[..., Any]) -> Match | None:
    """A scan with one decay per channel and state, whole or one step."""
    names = _candidate(site)
    if names is None:
        return None
    f, (b, c, t, n) = site.target, (2, 6, 7, 5)
    x, dt, a, bb, cc, d, bias, state = _draw((b, c, t), (b, c, t), (c, n), (b, n, t), (b, n, t), (c,), (c,), (b, c, n))
    a = -a.exp()
    want, last = reference(x, dt, a, bb, cc, D=d, dt_bias=bias)
    more = {"delta_bias": bias, "dt_bias": bias, "delta_softplus": True, "dt_softplus": True}
    got = _call(f, names, x.clone(), dt, a, bb, cc, D=d, return_last_state=True, **more)
    if isinstance(got, tuple) and len(got) == 2 and _same(got[0], want) and _same(got[1], last):
        return _answer("mamba_scan", True)
    one = slice(0, 1)
    want, last = reference(x[..., one], dt[..., one], a, bb[..., one], cc[..., one], D=d, dt_bias=bias, state=state)
    moved = state.clone()
    got = _call(f, names, moved, x[..., 0], dt[..., 0], a, bb[..., 0], cc[..., 0], D=d, **more)
    return _answer("mamba_scan", False) if _same(got, want[..., 0]) and _same(moved, last) else None
