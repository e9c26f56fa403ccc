"""`dz bench tune`: try the launch configurations that a kernel lists, and keep the fastest that is right, as data."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dz.backends import detect
from dz.bench.measure import measure
from dz.bench.ops import checked, shapes
from dz.bench.workload import workloads
from dz.core import jsonio
from dz.core.protocols import Progress, Silent
from dz.core.registry import Registry
from dz.errors import UsageError
from dz.shipped import folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration on one shape; `median_us` is 0 when it failed or was wrong, and `reason` says so."""

    kernel: str
    bucket: str
    shape: str
    config: dict[str, int]
    median_us: float = 0.0
    reason: str = ""


def tune(key: str, *, device: str = "auto", only: str = "", progress: Progress | None = None) -> list[Trial]:
    """Every configuration of the kernel's space on every shape of its op whose name contains `only`."""
    kernel, here = Registry.discover().kernel(key), detect(device)
    tunable = getattr(importlib.import_module(kernel.run.__module__), "TUNE", None)
    work, op = workloads().get(kernel.op), Registry.discover().op(kernel.op)
    if tunable is None or work is None:
        lacks = "no TUNE" if tunable is None else "no workload"
        raise UsageError(f"the kernel '{key}' cannot be tuned", f"it has {lacks}", "dz bench ops", code="not_tunable")
    progress, target = progress or Silent(), torch.device("cuda" if here.kind == "rocm" else here.kind)
    given = [s for _, s in shapes(kernel.op) if only in s.get("name", "")] if here.kind != "cpu" else [dict(work.tiny)]
    trials = []
    for shape in given:
        args = work.build(shape, target, torch.Generator(target).manual_seed(0))
        name = str(shape.get("name", "tiny"))
        progress.start(f"{key} {name}")
        seen: dict[str, Trial] = {}
        for bucket, space in tunable.space.items():
            for config in space:
                base = {"kernel": key, "bucket": bucket, "shape": name, "config": dict(config)}
                known = seen.get(str(config))
                with tunable.override(config):
                    trial = replace(known, bucket=bucket) if known else _trial(base, op, work, kernel, args, target)
                seen[str(config)] = trial
                trials.append(trial)
        progress.finish()
    return trials


def _trial(base: dict[str, Any], op: Any, work: Any, kernel: Any, args: dict[str, Any], target: torch.device) -> Trial:
    try:
        error = checked(op, work, args, kernel.run(**args))
        if not error.ok:
            return Trial(**base, reason=f"wrong: relative error {error.rel:.3g}")
        return Trial(**base, median_us=measure(lambda: kernel.run(**args), target, budget=0.06).median)
    except Exception as e:  # noqa: BLE001  a configuration that the device refuses is a row
        return Trial(**base, reason=f"{type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ''}")


def keep(trials: list[Trial], device_name: str, choose: dict[str, str]) -> Path:
    """Write, for each bucket, the fastest configuration on the shape that `choose` names for it into the op's
    tuned.json; other devices and buckets stay as they are."""
    named = {(t.bucket, t.shape) for t in trials}
    if not trials:
        raise UsageError("nothing to keep", "no shape was tried", "dz bench ops", code="usage")
    for pair in choose.items():
        if pair not in named:
            known = ", ".join(sorted(f"{b}={s}" for b, s in named)) or "none: no shape was tried"
            what, then = f"nothing to keep as {'='.join(pair)}", "dz bench tune KERNEL --keep BUCKET=SHAPE"
            raise UsageError(what, f"tried were {known}", then, code="usage")
    op, _, technique = trials[0].kernel.partition("/")
    path = folder("kernels") / op / "tuned.json"
    table = jsonio.read(path) if path.is_file() else {}
    mine = table.setdefault(device_name, {}).setdefault(technique, {})
    for bucket, shape in choose.items():
        good = [t for t in trials if t.bucket == bucket and t.shape == shape and t.median_us]
        if good:
            mine[bucket] = min(good, key=lambda t: t.median_us).config
    jsonio.write(path, table)
    return path
