"""`dz bench ops`: every kernel of an op on the shapes that recipes name, beside its floor, its peers and its error."""

from __future__ import annotations

import gc
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dz.backends import detect
from dz.bench.ceilings import Ceilings, ceilings, floor
from dz.bench.measure import measure
from dz.bench.peers import PEERS
from dz.bench.workload import Checked, Workload, against, workloads
from dz.core.device import Device
from dz.core.kernel import Kernel
from dz.core.op import Op
from dz.core.protocols import Progress, Silent
from dz.core.recipe import load_recipe
from dz.core.registry import Registry
from dz.errors import UsageError
from dz.shipped import folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One implementation on one shape. `status` is measured, refused, missing or failed, with the `reason`; times in
    microseconds; `of_floor` is floor over median; `error` against fp32 truth; `recorded_us` are figures published or
    taken elsewhere on the same kind of device, by name."""

    op: str
    shape: str
    recipe: str
    impl: str
    status: str
    reason: str = ""
    median_us: float = 0.0
    p20_us: float = 0.0
    p80_us: float = 0.0
    n: int = 0
    method: str = ""
    floor_us: float = 0.0
    bound: str = ""
    of_floor: float = 0.0
    error: Checked | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    recorded_us: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """All rows of a run, the device and the software they were taken on, and its measured ceilings."""

    device: str
    arch: int | None
    software: dict[str, str]
    ceilings: Ceilings
    rows: list[Row]


def shapes(op: str) -> list[tuple[str, dict[str, Any]]]:
    """(recipe, shape) pairs that the recipes' bench sections give for an op."""
    found = []
    for root in folders("recipes"):
        for path in sorted(root.glob("*.yaml")):
            recipe = load_recipe(path)
            found += [(recipe.name, dict(shape)) for shape in recipe.bench.get("ops", {}).get(op, [])]
    return found


def bench_ops(
    names: Sequence[str] = (),
    *,
    device: str = "auto",
    tiny: bool = False,
    only: str = "",
    peers: bool = True,
    progress: Progress | None = None,
) -> Bench:
    """Measure the named ops (default: every op that has a workload). `tiny` takes each workload's smallest shape and
    the references, so that it runs on any machine; `only` keeps the shapes whose name contains it."""
    known, registry, here = workloads(), Registry.discover(), detect(device)
    for name in names:
        registry.op(name)
        if name not in known:
            raise UsageError(f"the op '{name}' has no bench", f"benches: {', '.join(known)}", "dz ops ls")
    named = sorted({s.get("name", "") for n in names or known for _, s in shapes(n)})
    if only and not tiny and not any(only in name for name in named):
        raise UsageError(f"no shape's name contains '{only}'", f"shapes: {', '.join(named)}", "leave --only out")
    progress = progress or Silent()
    target = torch.device("cuda" if here.kind == "rocm" else here.kind)
    best = ceilings(target, small=tiny or here.kind == "cpu")
    rows: list[Row] = []
    for name in names or list(known):
        work = known[name]
        given = [("", {"name": "tiny", **work.tiny})] if tiny else shapes(name)
        for recipe, shape in given:
            if only in shape.get("name", ""):
                progress.start(f"{name} {shape.get('name', '')}")
                rows += _measure(registry, work, recipe, shape, here, target, best, tiny=tiny, peers=peers)
                progress.finish()
    return Bench(device=here.name, arch=here.arch, software=software(), ceilings=best, rows=rows)


def software() -> dict[str, str]:
    """Versions that a time depends on."""
    import triton

    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    return {**found, "cuda": str(torch.version.cuda)} if torch.version.cuda else found


def _measure(
    registry: Registry,
    work: Workload,
    recipe: str,
    shape: dict[str, Any],
    here: Device,
    target: torch.device,
    best: Ceilings,
    *,
    tiny: bool,
    peers: bool,
) -> list[Row]:
    _release(target)  # what the shape before this one held
    op = registry.op(work.op)
    args = work.build(shape, target, torch.Generator(target).manual_seed(0))
    low, bound = floor(work.cost(shape), best)
    sizes = {k: v for k, v in shape.items() if k not in ("name", "recorded_us")}
    base = {"op": op.name, "shape": str(shape.get("name", "")), "recipe": recipe, "floor_us": low, "bound": bound}
    base |= {"sizes": sizes, "recorded_us": shape.get("recorded_us", {})}
    rows = [_kernel_row(base, op, work, kernel, args, here, target) for kernel in registry.of(op.name)]
    if tiny:
        rows.append(_timed(base, "reference", lambda: op.reference(**args), target))
    rows += list(_peer_rows(base, op.name, args, target)) if peers else []
    return rows


def _kernel_row(
    base: dict[str, Any],
    op: Op,
    work: Workload,
    kernel: Kernel,
    args: dict[str, Any],
    here: Device,
    target: torch.device,
) -> Row:
    phase = kernel.requires.phases[0]
    dtype = kernel.requires.dtypes[0] if kernel.requires.dtypes else next(iter(op.tolerance))
    answer = kernel.requires.check(here, dtype, phase)
    if answer.ok:
        answer = kernel.supports(args)
    if not answer.ok:
        return Row(**base, impl=kernel.key, status="refused", reason=answer.reason)
    try:
        error = checked(op, work, args, kernel.run(**args))
        return _timed(base, kernel.key, lambda: kernel.run(**args), target, error)
    except Exception as e:  # noqa: BLE001  one broken kernel must not hide the others; the row says why
        _release(target)
        return Row(**base, impl=kernel.key, status="failed", reason=f"{type(e).__name__}: {str(e)[:300]}")


def checked(op: Op, work: Workload, args: dict[str, Any], result: Any) -> Checked:
    """A result against the reference in fp32 on the part that the workload chooses."""
    some, got = work.part(args, result)
    tol = next((t for name, t in op.tolerance.items() if name == _dtype_of(got)), next(iter(op.tolerance.values())))
    exact = tol.atol == 0 and tol.rtol == 0
    wide = some if exact and work.check is None else {k: _wide(v) for k, v in some.items()}
    want = op.reference(**wide)
    return work.check(got, want) if work.check else against(got, want, tol, "bit-exact" if exact else "tolerance")


def _dtype_of(value: Any) -> str:
    first = value[0] if isinstance(value, tuple | list) else value
    return str(first.dtype).removeprefix("torch.")


def _wide(value: Any) -> Any:
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value


def _peer_rows(base: dict[str, Any], op: str, args: Mapping[str, Any], target: torch.device) -> Iterator[Row]:
    for peer in PEERS:
        if peer.op != op:
            continue
        if why := peer.missing():
            yield Row(**base, impl=f"peer:{peer.name}", status="missing", reason=why)
            continue
        try:
            yield _timed(base, f"peer:{peer.name}", peer.make(args), target, note=peer.note)
        except Exception as e:  # noqa: BLE001  another project's failure is a row, not ours
            yield Row(**base, impl=f"peer:{peer.name}", status="failed", reason=f"{type(e).__name__}: {str(e)[:300]}")


def _timed(
    base: dict[str, Any], impl: str, call: Any, target: torch.device, error: Checked | None = None, note: str = ""
) -> Row:
    t = measure(call, target)
    return Row(
        **base, impl=impl, status="measured", reason=note, median_us=t.median, p20_us=t.p20, p80_us=t.p80, n=t.n,
        method=t.method, of_floor=base["floor_us"] / t.median, error=error,
    )  # fmt: skip


def _release(target: torch.device) -> None:
    gc.collect()
    if target.type == "cuda":
        torch.cuda.empty_cache()
