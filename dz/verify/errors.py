"""How far a result is from the truth: the one comparison that the contract test and the verification share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dz.core.op import Tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """The outcome of a comparison of `n` elements. `max_abs` is the largest |got - want|, `max_rel` the largest
    |got - want| / |want| where want is not 0; both inf when shapes or structures differ or a NaN is there. `worst` is
    the path of the element furthest beyond its tolerance, e.g. "[1][0, 37]"; `reason` says why it is not ok."""

    ok: bool
    max_abs: float
    max_rel: float
    worst: str
    n: int
    reason: str = ""


def compare(got: Any, want: Any, tol: Tolerance, *, path: str = "") -> ErrorReport:
    """Compare tensors, numbers, None and nested tuples or lists of them: |got - want| <= atol + rtol * |want| for every
    element. NaN never passes, not even against NaN; infinities pass when equal. Whole numbers, booleans and a tolerance
    of (0, 0) must be equal, the sign of zero included. Dtypes may differ (the truth is wider), shapes and structure may
    not."""
    if isinstance(want, tuple | list):
        if not isinstance(got, tuple | list) or len(got) != len(want):
            size = len(got) if isinstance(got, tuple | list) else type(got).__name__
            return _broken(path, f"{len(want)} results are wanted, {size} given")
        return _merge([compare(g, w, tol, path=f"{path}[{i}]") for i, (g, w) in enumerate(zip(got, want, strict=True))])
    if want is None or got is None:
        return _broken(path, "one of the two is None") if want is not got else _merge([])
    g, w = torch.as_tensor(got), torch.as_tensor(want)
    if g.shape != w.shape:
        return _broken(path, f"shape {list(g.shape)} instead of {list(w.shape)}")
    if g.is_floating_point() != w.is_floating_point() or g.is_complex() or w.is_complex():
        return _broken(path, f"dtype {g.dtype} instead of {w.dtype}")
    return _elements(g.detach(), w.detach().to(g.device), tol, path)


def _elements(g: torch.Tensor, w: torch.Tensor, tol: Tolerance, path: str) -> ErrorReport:
    if g.numel() == 0:
        return _merge([])
    exact = not g.is_floating_point() or (tol.atol == 0 and tol.rtol == 0)
    atol, rtol = (0.0, 0.0) if exact else (tol.atol, tol.rtol)
    g, w = g.to(torch.float64), w.to(torch.float64)
    nan = g.isnan() | w.isnan()
    diff = torch.where(g == w, 0.0, (g - w).abs()).masked_fill(nan, float("inf"))
    size = w.abs().masked_fill(~w.isfinite(), 0.0)
    excess = diff - (atol + rtol * size)
    if exact:
        excess = torch.where((g == w) & (g.signbit() != w.signbit()), 1.0, excess)
    flat = int(excess.argmax())
    at = torch.unravel_index(torch.tensor(flat), g.shape)
    worst = f"{path}[{', '.join(str(int(i)) for i in at)}]"
    relative = torch.where((diff == 0) | (w == 0), 0.0, diff / w.abs()).masked_fill(diff.isinf(), float("inf"))
    ok = bool(excess.max() <= 0)
    bad = int((excess > 0).sum())
    reason = ""
    if not ok:
        pair = f"{g.flatten()[flat].item():.9g} for {w.flatten()[flat].item():.9g}"
        reason = f"{bad} of {g.numel()} beyond {_words(tol, exact)}, worst {worst}: {pair}"
    if bool(nan.any()):
        reason = f"{int(nan.sum())} NaN; {reason}"
    return ErrorReport(
        ok=ok, max_abs=float(diff.max()), max_rel=float(relative.max()), worst=worst, n=g.numel(), reason=reason
    )


def _words(tol: Tolerance, exact: bool) -> str:
    return "equality" if exact else f"{tol.atol:.3g} + {tol.rtol:.3g} * |want|"


def _broken(path: str, why: str) -> ErrorReport:
    inf = float("inf")
    return ErrorReport(ok=False, max_abs=inf, max_rel=inf, worst=path, n=0, reason=f"{path}: {why}" if path else why)


def _merge(parts: list[ErrorReport]) -> ErrorReport:
    """One report over parts; the worst place is that of the first failing part, else of the largest error."""
    if not parts:
        return ErrorReport(ok=True, max_abs=0.0, max_rel=0.0, worst="", n=0)
    lead = next((p for p in parts if not p.ok), None) or max(parts, key=lambda p: p.max_abs)
    return ErrorReport(
        ok=all(p.ok for p in parts),
        max_abs=max(p.max_abs for p in parts),
        max_rel=max(p.max_rel for p in parts),
        worst=lead.worst,
        n=sum(p.n for p in parts),
        reason="; ".join(p.reason for p in parts if p.reason),
    )
