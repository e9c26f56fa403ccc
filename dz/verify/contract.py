"""What every kernel owes its op, checked on one Case: right numbers, nothing else touched, refusals with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dz.core.kernel import Kernel
from dz.core.op import Case, Op, Tolerance
from dz.verify.errors import ErrorReport, compare

GUARD = 128  # poisoned elements before and after every tensor: a multiple keeps the alignment of what lies between
_ALLOCATIONS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One kernel on one case. `refused` is the reason of a refusal, `faults` are breaches of the contract in words;
    `report` compares with the truth (None after a refusal)."""

    kernel: str
    case: str
    dtype: str
    refused: str = ""
    faults: tuple[str, ...] = ()
    report: ErrorReport | None = None

    @property
    def ok(self) -> bool:
        """True for a right result and for a refusal with a reason."""
        return not self.faults


def truth(op: Op, args: Mapping[str, Any], tol: Tolerance) -> Any:
    """The reference in float64, or on the arguments as they are for an op that must be met bit by bit."""
    if tol.atol == 0 and tol.rtol == 0:
        return op.reference(**args)
    return op.reference(**{k: v.double() if _widens(v) else v for k, v in args.items()})


def _widens(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)


def check_case(op: Op, kernel: Kernel, case: Case, dtype: str, *, tol: Tolerance | None = None) -> Outcome:
    """Ask `supports`, then run the kernel on guarded copies of the arguments and compare with the truth within `tol`
    (default: the op's for this dtype name). Faults: a refusal without a reason, a result out of tolerance or of another
    dtype, an argument changed, a write outside a result, two runs that differ although the kernel is deterministic."""
    answer = kernel.supports(case.args)
    if not answer.ok:
        silent = () if answer.reason else ("refuses without a reason",)
        return Outcome(kernel=kernel.key, case=case.id, dtype=dtype, refused=answer.reason, faults=silent)
    tol = op.tolerance[dtype] if tol is None else tol
    got, faults = _run(kernel.run, case.args)
    report = compare(got, truth(op, case.args, tol), tol)
    if not report.ok:
        faults.append(report.reason)
    faults += _dtype_faults(got, op.reference(**case.args))
    if kernel.deterministic:
        again, _ = _run(kernel.run, case.args)
        faults += [] if _same_bits(got, again) else ["two runs differ"]
    return Outcome(kernel=kernel.key, case=case.id, dtype=dtype, faults=tuple(faults), report=report)


def _run(run: Callable[..., Any], args: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The result on guarded arguments, and what else was touched."""
    housed = {k: Guarded(v) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with guarded_allocations() as made:
        got = run(**{k: v.view if isinstance(v, Guarded) else v for k, v in housed.items()})
    faults = [f"{k} was changed" for k, v in housed.items() if isinstance(v, Guarded) and v.touched()]
    faults += ["wrote outside a tensor it allocated"] if any(g.guards_broken() for g in made) else []
    return got, faults


class Guarded:
    """A copy of a tensor (`view`, same shape, strides and alignment) inside a poisoned buffer: NaN for floats, 0x5A
    bytes for whole numbers, in the gaps of strided views too."""

    __slots__ = ("_before", "_buffer", "_inside", "view")

    def __init__(self, like: torch.Tensor, *, fill: bool = True) -> None:
        span = (
            sum((int(n) - 1) * int(s) for n, s in zip(like.shape, like.stride(), strict=True)) + 1
            if like.numel()
            else 0
        )
        start = GUARD + (int(like.storage_offset()) % GUARD if fill else 0)
        size = (start + span + GUARD) * like.element_size()
        poison = 0xFF if like.dtype.is_floating_point else 0x5A
        self._buffer = torch.full((size,), poison, dtype=torch.uint8, device=like.device)
        self._inside = slice(start * like.element_size(), (start + span) * like.element_size())
        flat = self._buffer[: size // like.element_size() * like.element_size()]
        typed = flat.view(torch.uint8 if like.dtype == torch.bool else like.dtype)
        typed = typed.view(torch.bool) if like.dtype == torch.bool else typed
        self.view = typed.as_strided(like.shape, like.stride(), start)
        if fill and like.numel():
            once = [i for i, (n, s) in enumerate(zip(like.shape, like.stride(), strict=True)) if s == 0 and n > 1]
            target, source = self.view, like
            for axis in once:
                target, source = target.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
            target.copy_(source)
        self._before = self._buffer.clone()

    def touched(self) -> bool:
        """Whether any byte of the buffer changed since it was made."""
        return not torch.equal(self._buffer, self._before)

    def guards_broken(self) -> bool:
        """Whether a byte before or after the tensor's span changed."""
        ends = (slice(0, self._inside.start), slice(self._inside.stop, None))
        return any(not torch.equal(self._buffer[e], self._before[e]) for e in ends)


class _Poisoning(TorchDispatchMode):
    """Makes every uninitialised allocation a poisoned one between guards."""

    def __init__(self, made: list[Guarded]) -> None:
        super().__init__()
        self.made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket.__name__ in _ALLOCATIONS
            and isinstance(out, torch.Tensor)
            and out.layout == torch.strided
        ):
            self.made.append(Guarded(out, fill=False))
            return self.made[-1].view
        return out


@contextmanager
def guarded_allocations() -> Iterator[list[Guarded]]:
    """Within it, torch.empty and its kin return poisoned tensors between guards; yields the list of them."""
    made: list[Guarded] = []
    with _Poisoning(made):
        yield made


def _dtype_faults(got: Any, want: Any, path: str = "") -> list[str]:
    if isinstance(want, tuple | list) and isinstance(got, tuple | list):
        return [f for i, (g, w) in enumerate(zip(got, want, strict=False)) for f in _dtype_faults(g, w, f"{path}[{i}]")]
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor) and got.dtype != want.dtype:
        return [f"result{path} is {got.dtype}, the reference gives {want.dtype}"]
    return []


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(_same_bits(x, y) for x, y in zip(a, b, strict=True))
    if not isinstance(a, torch.Tensor):
        return a == b
    return a.shape == b.shape and torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))
