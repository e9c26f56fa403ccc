"""A kernel: one technique for one op, with what it needs and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dz.core.device import Device


@dataclass(frozen=True, slots=True)
class Support:
    """The answer of `supports`: ok, or the reason for the refusal in words."""

    ok: bool
    reason: str = ""


YES = Support(True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requires:
    """Static needs. Empty tuples and None mean "any". `arch` is an inclusive window of compute capability."""

    device: tuple[str, ...] = ()
    arch: tuple[int | None, int | None] = (None, None)
    dtypes: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("prefill", "decode")

    def check(self, device: Device, dtype: str, phase: str) -> Support:
        """Whether a device, dtype name and phase meet these needs."""
        if self.device and device.kind not in self.device:
            return Support(False, f"needs {' or '.join(self.device)}, the device is {device.spec}")
        low, high = self.arch
        if device.arch is not None and ((low and device.arch < low) or (high and device.arch > high)):
            return Support(False, f"needs sm{low or 'any'} to sm{high or 'any'}, the device is sm{device.arch}")
        if self.dtypes and dtype not in self.dtypes:
            return Support(False, f"takes {', '.join(self.dtypes)}, not {dtype}")
        if phase not in self.phases:
            return Support(False, f"is for {' and '.join(self.phases)}, not {phase}")
        return YES


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """`run` has the op's signature. `supports(args)` must refuse every argument that `run` would ignore or get wrong.
    `interpreter` says why Triton's interpreter cannot run it; empty when it can."""

    op: str
    technique: str
    summary: str
    run: Callable[..., Any]
    requires: Requires
    supports: Callable[[Mapping[str, Any]], Support] = lambda args: YES
    deterministic: bool = True
    interpreter: str = ""
    source: str = ""

    @property
    def key(self) -> str:
        """`<op>/<technique>`, the name in plans."""
        return f"{self.op}/{self.technique}"
