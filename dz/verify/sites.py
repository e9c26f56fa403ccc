"""May this kernel stand in for upstream's code at this site? The op's reference and upstream itself decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dz.core.kernel import Kernel
from dz.core.op import Case, Op, Tolerance
from dz.core.plan import Verified
from dz.verify.bound import Bound
from dz.verify.contract import check_case
from dz.verify.errors import compare
from dz.verify.examples import Example, examples
from dz.verify.subject import Subject

_REFUSED = "it refuses these arguments"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`verified` when every case passed; `reason` says in numbers what did not, or why nothing could be compared."""

    ok: bool
    reason: str
    verified: Verified | None = None


def verify(op: Op, impl: Kernel | None, subject: Subject, *, dtype: str, device: str, phase: str) -> Verdict:
    """Verify a kernel, or with None the op's reference, at a site in one phase.

    Each example is run through the binding. The kernel meets the op's contract on those arguments (fp64 truth, guarded
    memory, same dtype, repeatable), and the site's result meets upstream's in fp32 within the op's tolerance. Where
    upstream's own projections lie round the op, their rounding is measured and allowed for, twice."""
    calls = examples(subject.site, subject.target, dtype=dtype, device=device, phase=phase)
    if calls is None:
        return Verdict(False, f"dz has no verification inputs for {op.name}")
    stored = dtype if dtype in op.tolerance else str(subject.site.traits.get("output", ""))
    tol = op.tolerance.get(stored)
    if tol is None:
        return Verdict(False, f"{op.name} states no tolerance for {dtype}")
    worst = 0.0
    with torch.no_grad():
        bound, wide = subject.bound(), subject.wide()
        for call in calls:
            verdict = _one(op, impl, bound, wide, call, stored, tol)
            if isinstance(verdict, str):
                failed = "" if verdict.startswith(_REFUSED) else f"failed verification, {call.id}: "
                return Verdict(False, failed + verdict)
            worst = max(worst, verdict)
    words = f"{tol.atol:.3g} + {tol.rtol:.3g} * |x|" if tol.atol or tol.rtol else "equal bits"
    return Verdict(True, f"{len(calls)} cases", subject.proof(worst, words, len(calls)))


def _one(
    op: Op, impl: Kernel | None, bound: Bound, wide: Any, call: Example, dtype: str, tol: Tolerance
) -> float | str:
    """The largest error of one example, or in words why it fails."""
    given = bound.arguments(call.args, {})
    if given is None:
        return "the binding does not cover the call"
    nearest = 0.0
    if impl is not None:
        outcome = check_case(op, impl, Case(call.id, dict(given)), dtype)
        if outcome.refused:
            return f"{_REFUSED}: {outcome.refused}"
        if outcome.faults:
            return f"against the reference: {'; '.join(outcome.faults)}"
        nearest = outcome.report.max_abs if outcome.report else 0.0
    result = bound.finish((op.reference if impl is None else impl.run)(**given))
    own = bound.target(*call.args)
    truth = wide(*(a.float() if _floats(a) else a for a in call.args)) if isinstance(wide, nn.Module) else own
    found = _against(result, own, truth, tol, projections=_projects(bound))
    return found if isinstance(found, str) else max(found / _size(truth), nearest / _size(op.reference(**given)))


def _projects(bound: Bound) -> bool:
    return bool(bound.binding.then) or any(a.source == "child" for a in bound.binding.args)


def _size(value: Any) -> float:
    """The largest magnitude of a result, at least 1."""
    first = value[0] if isinstance(value, tuple) else value
    return max(1.0, float(first.abs().max())) if first.numel() else 1.0


def _floats(a: Any) -> bool:
    return isinstance(a, torch.Tensor) and a.is_floating_point()


def _against(result: Any, own: Any, truth: Any, tol: Tolerance, *, projections: bool) -> float | str:
    """Upstream in fp32 is the truth; `own` is upstream in the dtype served, whose error is allowed for projections."""
    got, ours, want = (v[0] if isinstance(v, tuple) else v for v in (result, own, truth))
    if got.dtype != ours.dtype:
        return f"gives {got.dtype}, upstream gives {ours.dtype}"
    if not projections:
        report = compare(got, want, tol)
        return report.max_abs if report.ok else f"against upstream: {report.reason}"
    scale = float(want.abs().max()) if want.numel() else 0.0
    allowed = 2 * compare(ours, want, tol).max_abs + tol.atol + tol.rtol * scale
    report = compare(got, want, Tolerance(allowed, 0.0) if allowed else Tolerance(0.0, 0.0))
    return report.max_abs if report.ok else f"against upstream: {report.reason}"
