"""For every op of a model: the kernel that would run on a device, the reference, or why nothing does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
# what a ledger or an outline names in words -> the ops of the registry that it is made of
MADE_OF = {
    "norm": ("rms_norm",),
    "attention": ("attention", "paged_attention"),
    "mla": ("mla", "mla_decode"),
    "delta rule by channel": ("kda", "kda_decode"),
    "delta rule by head": ("gated_delta_rule",),
    "mamba": ("mamba_scan",),
    "mamba2": ("mamba2_scan",),
    "index keys": ("index_scores", "index_topk"),
    "index keys of blocks": ("block_select", "block_sparse_attention"),
    "residual mixing": ("residual_mix",),
    "hyper-connection": ("hyper_connection", "hyper_collapse"),
    "mxfp4 experts": ("mxfp4_unpack", "grouped_gemm_mxfp4", "mxfp4_to_fp8"),
    "gated feed-forward": ("gated_activation",),
    "plain feed-forward": ("feed_forward",),
}


def of_structure(weights: Ledger, shape: Outline, registry: Registry, device: Device, dtype: str) -> tuple[OpRow, ...]:
    """The ops that headers and configuration tell of, where no class is known."""
    counts: dict[str, int] = {}

    def add(op: str, count: int) -> None:
        if op:
            counts[op] = counts.get(op, 0) + count

    for r in weights.rows:
        if r.op not in _PARTS:
            add(r.op, r.tensors)
        if (r.op, r.format) == ("experts", "mxfp4"):
            add("mxfp4 experts", r.tensors)
    for layer in shape.layers:
        for op in layer.mixer.op.split(" and "):
            add(op, 1)
        for keep in layer.mixer.keeps:
            add(keep.kind if keep.kind.startswith("index keys") else "", 1)
        if layer.forward.width:
            add("gated feed-forward" if layer.forward.gated else "plain feed-forward", 1)
    add(shape.mixing, len(shape.layers))
    return _rows(counts, registry, device, dtype)


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
    rows = _rows(known, registry, device, dtype)
    return (*rows, *(OpRow(op=op, count=n, prefill=why, decode=why) for (op, why), n in rest.items()))


def _rows(counts: Mapping[str, int], registry: Registry, device: Device, dtype: str) -> tuple[OpRow, ...]:
    """A row for each op of the registry that the counted ones are made of."""
    rows: dict[str, OpRow] = {}
    for op, count in counts.items():
        for name in [n for n in MADE_OF.get(op, ()) if n in registry.ops] or [op]:
            rows.setdefault(name, _row(name, count, registry, device, dtype))
    return tuple(rows.values())


def _why(site: Site) -> str:
    if site.status == "variant":
        return f"it is a variant: {'; '.join(site.differs)}"
    return site.reason or "no op has this structure"


def _row(op: str, count: int, registry: Registry, device: Device, dtype: str) -> OpRow:
    if op not in registry.ops:
        why = f"none, because dz has no op for {op}; upstream's code would have to run"
        return OpRow(op=op, count=count, prefill=why, decode=why)
    own = registry.ops[op].tolerance  # some ops work in a dtype of their own whatever the model's: scores, codes
    dtype = dtype if dtype in own else next(iter(own), dtype)
    told = {phase: _choose(op, phase, registry, device, dtype) for phase in PHASES}
    rejected = dict.fromkeys(r for _, rs in told.values() for r in rs)
    return OpRow(op=op, count=count, prefill=told["prefill"][0], decode=told["decode"][0], rejected=tuple(rejected))


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
