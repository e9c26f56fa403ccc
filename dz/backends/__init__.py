"""Hardware: one file per kind, found by name; profiles of devices as data.

`detect("auto")` gives the device that dz would use here, `detect("H200x8")` one to plan for that need not be here."""

from __future__ import annotations

import difflib
import importlib
import re
from dataclasses import replace

from dz.backends.base import Backend
from dz.backends.profiles import match, profiles
from dz.core.device import Device
from dz.errors import EnvironmentFailure, UsageError

ORDER = ("cuda", "rocm", "musa", "npu", "xpu", "cpu")  # `auto` takes the first kind that is here

__all__ = ["ORDER", "backend", "detect", "graph_class", "here", "memory", "planned", "profile"]


def backend(kind: str) -> Backend:
    """The backend of a kind. Raises UsageError for a kind that dz does not know, with the nearest."""
    if kind not in ORDER:
        raise _unknown(kind)
    return importlib.import_module(f"dz.backends.{kind}").BACKEND


def detect(spec: str = "auto") -> Device:
    """The device that `spec` means: "auto"; a kind ("cuda", "cpu"), which must be here; a kind with an architecture
    ("cuda:sm90") or a profile ("H200"), to plan for; each with a count at its end ("cuda x2", "H200x8").

    Raises UsageError for an unknown name, EnvironmentFailure when a kind is not here or has too few devices."""
    text = spec.strip()
    if _profile_name(text):
        return profile(text)
    base, count = _split(text)
    kind, _, part = base.lower().partition(":")
    if kind == "auto" and not part:
        kind = next(k for k in ORDER if backend(k).count())
    if kind not in ORDER:
        raise _unknown(spec)
    if part.isdigit():
        env = "ROCR_VISIBLE_DEVICES" if kind == "rocm" else "CUDA_VISIBLE_DEVICES"
        why, fix = "a device is chosen by what the process may see", f"{env}={part} dz ... --device {kind}"
        raise UsageError(f"'{spec}' names one device by number", why, fix, code="bad_device")
    if re.fullmatch(r"sm\d+", part) and kind == "cuda":
        return _planned(kind, int(part[2:]), count)
    if part:
        raise UsageError(f"'{spec}' is not a device", f"'{part}' is no architecture", "dz doctor", code="bad_device")
    return _present(kind, count)


def profile(name: str) -> Device:
    """The profile `name` ("H200", "MI300Xx8", "B200 x4") as a Device. Raises UsageError with the nearest name."""
    known = _profile_name(name.strip())
    if known is None:
        raise _unknown(name)
    count = 1 if known.lower() == name.strip().lower() else _split(name.strip())[1]
    return replace(profiles()[known].device, count=count)


def planned(spec: str) -> bool:
    """Whether `spec` names a shipped profile ("H200x8"): a device to plan for, whatever is here."""
    return _profile_name(spec.strip()) is not None


def here(device: Device) -> bool:
    """Whether work can run on `device` in this process: its kind is here, by that name and in that number."""
    found = backend(device.kind)
    return found.count() >= device.count and found.describe().name == device.name


def memory(device: Device) -> tuple[int, int]:
    """(free, total) bytes of each of the device's members, the smallest if they differ. For a device that is only
    planned for both are its profile's memory."""
    if not here(device):
        return device.memory, device.memory
    rows = [backend(device.kind).memory(i) for i in range(device.count)]
    return min(free for free, _ in rows), min(total for _, total in rows)


def graph_class(device: Device) -> type | None:
    """The class that captures a graph on this device (torch.cuda.CUDAGraph and its like), None where there is none."""
    return backend(device.kind).graph_class()


def _present(kind: str, count: int) -> Device:
    found = backend(kind)
    number = found.count()
    if number < count:
        what = f"no {kind} device is here" if not number else f"{count} {kind} devices wanted, {number} here"
        fix = "dz doctor; to plan for hardware elsewhere name it: --device H200x8"
        raise EnvironmentFailure(what, found.absent() if not number else "fewer are visible", fix, code="no_device")
    device = found.describe()
    known = match(device.name)
    if known is not None and known.device.kind == kind:
        device = replace(device, bandwidth=known.device.bandwidth, flops=known.device.flops)
    return replace(device, count=count)


def _planned(kind: str, arch: int, count: int) -> Device:
    """A device known by its architecture alone: the one here if it fits, else one without memory or rates."""
    found = backend(kind)
    if found.count() >= count and found.describe().arch == arch:
        return _present(kind, count)
    return Device(kind=kind, name=f"{kind}:sm{arch}", arch=arch, count=count, dtypes=found.dtypes(arch))


def _split(text: str) -> tuple[str, int]:
    """A trailing count off a spec: "H200x8" -> ("H200", 8)."""
    found = re.fullmatch(r"(.+?)\s*[xX]([1-9]\d*)", text)
    return (found[1], int(found[2])) if found else (text, 1)


def _profile_name(text: str) -> str | None:
    known = {name.lower(): name for name in profiles()}
    return known.get(text.lower()) or known.get(_split(text)[0].lower())


def _unknown(name: str) -> UsageError:
    names = {n.lower(): n for n in ("auto", *ORDER, *profiles())}
    near = difflib.get_close_matches(_split(name)[0].lower(), list(names), 1)
    why = f"did you mean '{names[near[0]]}'?" if near else f"known are {', '.join(names.values())}"
    return UsageError(f"no device is called '{name}'", why, "dz doctor", code="unknown_device")
