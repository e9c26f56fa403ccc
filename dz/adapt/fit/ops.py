"""For every op of a model: the kernel that would run on a device, the reference, or why nothing does."""

from __future__ import annotations

from collections.abc import Iterable

from dz.adapt.fit.model import OpRow
from dz.core.device import Device
from dz.core.inventory import Site
from dz.core.registry import Registry
from dz.inspect.ledger import Ledger
from dz.inspect.outline import Outline
from dz.inspect.reduced import Reduced

PHASES = ("prefill", "decode")
REFERENCE = "reference (slow, exact)"
_PARTS = frozenset({"vector", "vision"})  # parameters of other ops, not ops
# ops that a ledger or an outline names in words -> names that an op may have in the registry, the first that is there
NAMES = {
    "norm": ("rms_norm", "layer_norm"),
    "delta rule": ("kda", "gated_delta_rule", "delta_rule"),
    "index keys": ("index_topk",),
    "residual mixing": ("residual_mix",),
    "hyper-connection": ("hyper_connection",),
    "four-bit codes": ("mxfp4_unpack",),
}


def of_structure(weights: Ledger, shape: Outline, registry: Registry, device: Device, dtype: str) -> tuple[OpRow, ...]:
    """The ops that headers and configuration tell of, where no class is known."""
    counts: dict[str, int] = {}
    for r in weights.rows:
        if r.op not in _PARTS:
            counts[r.op] = counts.get(r.op, 0) + r.tensors
    for layer in shape.layers:
        for op in filter(None, layer.mixer.op.split(" and ")):
            counts[op] = counts.get(op, 0) + 1
        if any(k.kind == "index keys" for k in layer.mixer.keeps):
            counts["index keys"] = counts.get("index keys", 0) + 1
    if shape.mixing:
        counts[shape.mixing] = len(shape.layers)
    packed = sum(r.tensors for r in weights.rows if r.format == "mxfp4")
    if packed:
        counts["four-bit codes"] = packed
    return tuple(_row(op, n, registry, device, dtype) for op, n in counts.items())


def of_sites(read: Reduced, registry: Registry, device: Device, dtype: str) -> tuple[OpRow, ...]:
    """The ops of a model whose class was read: known sites by op; each variant or unknown one with its reason."""
    known: dict[str, int] = {}
    rest: dict[tuple[str, str], int] = {}
    for s in read.inventory.sites:
        count = read.counts[s.id]
        if s.status == "known" and s.op is not None:
            known[s.op] = known.get(s.op, 0) + count
        else:
            key = (s.op or s.cls, f"none, because {_why(s)}; upstream's code runs")
            rest[key] = rest.get(key, 0) + count
    rows = [_row(op, n, registry, device, dtype) for op, n in known.items()]
    return (*rows, *(OpRow(op=op, count=n, prefill=why, decode=why) for (op, why), n in rest.items()))


def _why(site: Site) -> str:
    if site.status == "variant":
        return f"it is a variant: {'; '.join(site.differs)}"
    return site.reason or "no op has this structure"


def _row(op: str, count: int, registry: Registry, device: Device, dtype: str) -> OpRow:
    name = next((n for n in NAMES.get(op, (op,)) if n in registry.ops), None)
    if name is None:
        why = f"none, because dz has no op for {op}; upstream's code would have to run"
        return OpRow(op=op, count=count, prefill=why, decode=why)
    told = {phase: _choose(name, phase, registry, device, dtype) for phase in PHASES}
    rejected = dict.fromkeys(r for _, rs in told.values() for r in rs)
    return OpRow(op=name, count=count, prefill=told["prefill"][0], decode=told["decode"][0], rejected=tuple(rejected))


def _choose(op: str, phase: str, registry: Registry, device: Device, dtype: str) -> tuple[str, Iterable[str]]:
    """(what runs, the kernels that were turned down)."""
    if phase not in registry.ops[op].phases:
        return f"none, because {op} is not for {phase}", ()
    fits, lost = [], []
    for kernel in registry.of(op):
        answer = kernel.requires.check(device, dtype, phase)
        if answer.ok:
            fits.append(kernel.key)
        else:
            lost.append(f"{kernel.key}: {answer.reason}")
    lost += [f"{k}: unavailable: {v}" for k, v in registry.unavailable.items() if k.startswith(f"{op}/")]
    return " or ".join(fits) or REFERENCE, lost
