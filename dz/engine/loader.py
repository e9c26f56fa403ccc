"""From a source to a runner: build, size, load, swap, prove. Every stage is timed, nothing is served half loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from dz.core.inventory import Coverage
from dz.core.plan import MemoryRow, Plan
from dz.core.source import Source
from dz.engine import memory
from dz.engine.config import Limits
from dz.engine.mixers.oracle import check_whole, not_run
from dz.engine.mixers.taps import Taps
from dz.engine.mixers.tiers import Tier, choose
from dz.engine.runner import Runner
from dz.upstream import weights
from dz.upstream.build import Built, build_meta, dtype_of
from dz.upstream.decoder import FAILURES, Decoder, Head
from dz.upstream.footprint import Footprint, footprint, measure
from dz.upstream.rope import follows_from
from dz.upstream.vision import Wrapper
from dz.weights.checkpoint import Checkpoint, open_checkpoint


@dataclass(slots=True)
class Stages:
    """Seconds of each stage of the cold start, in order; `tell` hears of each as it ends."""

    tell: Callable[[str], None]
    rows: list[tuple[str, float]] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)

    def done(self, name: str) -> None:
        """A stage has ended."""
        now = time.monotonic()
        self.rows.append((name, now - self._since))
        self.tell(f"{name}: {now - self._since:.2f} s")
        self._since = now


@dataclass(slots=True)
class Loaded:
    """A model ready to run. `swap` must stay open as long as it runs; `calls` counts its kernels."""

    runner: Runner
    built: Built
    limits: Limits
    memory: tuple[MemoryRow, ...]
    tier: Tier
    coverage: Coverage
    swap: AbstractContextManager[Any]
    calls: Mapping[str, int]
    stages: list[tuple[str, float]]
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asked for, already resolved; 0 and "auto" mean: decide. `budget` is bytes that dz may use."""

    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    device: str
    budget: int
    load_format: str = "auto"
    ignore: tuple[str, ...] = ()


Binder = Callable[[Any, Plan, Callable[[], str]], AbstractContextManager[Any]]


def load(
    source: Source, plan: Plan | None, wishes: Wishes, *, trust: bool, bind: Binder, tell: Callable[[str], None]
) -> Loaded:
    """Load a model. `bind` puts the plan's kernels in; `tell` gets lines for the log.

    Raises Refused when the checkpoint does not fit its class or the model does not fit into memory."""
    stages = Stages(tell)
    checkpoint = open_checkpoint(source, load_format=wishes.load_format)  # type: ignore[arg-type]
    built = build_meta(source, trust=trust, dtype=None if wishes.dtype == "auto" else dtype_of(wishes.dtype))
    decoder = Decoder(built)
    coverage = weights.coverage(built, checkpoint.headers(), list(wishes.ignore))
    weights.refuse_incomplete(coverage)
    stages.done("build")
    found = footprint(built, decoder)
    if isinstance(found, Footprint):
        sized = _plan(built, found, "counted on meta", wishes, coverage, tell)
        _read(built, decoder, checkpoint, wishes)
    else:
        tell(f"memory: the cache is measured after loading, since upstream's decoder does not run on meta ({found})")
        _read(built, decoder, checkpoint, wishes)
        sized = _plan(built, _measured(built, decoder), "measured", wishes, coverage, tell)
    stages.done("weights")
    limits = Limits(
        max_model_len=sized.max_model_len,
        max_num_seqs=wishes.max_num_seqs,
        max_num_batched_tokens=wishes.max_num_batched_tokens,
        block_size=wishes.block_size,
        blocks=sized.blocks,
        slots=sized.slots,
    )
    return _ready(built, decoder, plan, limits, sized.rows, coverage, stages, bind)


def _measured(built: Built, decoder: Decoder) -> Footprint:
    try:
        return measure(built, decoder)
    except FAILURES as e:
        raise not_run(built.cls, e) from e


def _ready(
    built: Built,
    decoder: Decoder,
    plan: Plan | None,
    limits: Limits,
    rows: tuple[MemoryRow, ...],
    coverage: Coverage,
    stages: Stages,
    bind: Binder,
) -> Loaded:
    phase = ["prefill"]
    head, taps = Head(built), Taps(decoder)
    vocab = int(built.text_config.vocab_size)
    with torch.inference_mode():
        wrapper = Wrapper(built, decoder)
        unchecked = check_whole(decoder, head, taps, wrapper.rows, vocab)
        tier = choose(
            decoder,
            taps,
            gather=_may_gather(built, plan),
            rows=wrapper.rows,
            vocab=vocab,
            blocks=limits.blocks,
            block_size=limits.block_size,
        )
    stages.tell(f"mixers: {taps.count} in tier {tier.name}, proved to {tier.error:.1e} of the largest value")
    if unchecked:
        stages.tell(f"  not compared with the whole model, which takes no text alone: {unchecked}")
    for reason in tier.rejected:
        stages.tell(f"  not taken: {reason}")
    stages.done("tiers")
    runner = Runner(built, decoder, taps, head, wrapper, tier, phase)
    swap = bind(built.model, plan, lambda: phase[0]) if plan is not None else _Unswapped()
    applied = swap.__enter__()
    stages.done("swaps")
    return Loaded(runner, built, limits, rows, tier, coverage, swap, getattr(applied, "calls", {}), stages.rows, vocab)


class _Unswapped(AbstractContextManager[None]):
    def __exit__(self, *exc: object) -> None:
        return None


def _may_gather(built: Built, plan: Plan | None) -> bool:
    """Rope that looks at the longest position of a batch would rotate a sequence by its neighbours."""
    if follows_from(built.text_config) is not None:
        return False
    tiers = {c.tier for s in (plan.sites if plan else ()) for c in s.phases.values() if c.tier}
    return not tiers or tiers == {"gather"}


def _read(built: Built, decoder: Decoder, checkpoint: Checkpoint, wishes: Wishes) -> None:
    """Every tensor, once, copied out of the mapped file, so that nothing served depends on a file that may be
    replaced; the way to another device copies anyway."""

    def get(name: str) -> torch.Tensor:
        tensor = checkpoint.get(name)
        return tensor.clone() if wishes.device == "cpu" else tensor

    weights.load(built, checkpoint.headers(), get, wishes.device, list(wishes.ignore))
    checkpoint.close()
    decoder.settle()


def _plan(
    built: Built, found: Footprint, how: str, wishes: Wishes, coverage: Coverage, tell: Callable[[str], None]
) -> memory.MemoryPlan:
    config = built.text_config
    weight_bytes = sum({id(p): p.numel() * p.element_size() for p in built.model.parameters()}.values())
    hidden, vocab = int(config.hidden_size), int(config.vocab_size)
    inner = getattr(config, "intermediate_size", 0) or 0
    wide = max(hidden * 8, int(max(inner) if isinstance(inner, (list, tuple)) else inner) * 3)
    activations = wishes.max_num_batched_tokens * wide * built.dtype.itemsize + wishes.max_num_seqs * vocab * 4
    needs = memory.Needs(
        weights=weight_bytes,
        per_token=found.per_token,
        per_sequence=found.per_sequence,
        activations=activations,
        measured=how,
    )
    sized = memory.make(
        needs,
        budget=wishes.budget,
        asked_len=wishes.max_model_len,
        model_len=int(getattr(config, "max_position_embeddings", 0) or 0),
        max_num_seqs=wishes.max_num_seqs,
        block_size=wishes.block_size,
        asked_blocks=wishes.num_blocks,
    )
    for row in sized.rows:
        tell(f"memory: {row.name:<12} {row.bytes / 2**20:10.1f} MiB  {row.note}")
    for name, size in coverage.ignored.items():
        tell(f"not loaded: {name} ({size:,} B; {coverage.ignored_by[name]})")
    for name, count in coverage.narrowed.items():
        tell(f"narrowed: {name} ({count} values count, the rest must be zero)")
    return sized
