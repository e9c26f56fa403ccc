"""Runs a scheduled step through upstream's model and gives back the logits that are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dz.engine.mixers.gather import Gather, Share
from dz.engine.mixers.isolate import Isolate, Segment
from dz.engine.mixers.taps import Taps
from dz.engine.mixers.tiers import Tier
from dz.engine.sequence import Batch, Sequence, Work
from dz.upstream.build import Built
from dz.upstream.decoder import Decoder, Head
from dz.upstream.rope import following
from dz.upstream.vision import Prompt, Wrapper


@dataclass(slots=True)
class Memo:
    """What the runner keeps of a sequence: upstream's `cache` (tier isolate), the processor's tensors, the captured
    `image` arguments until the prompt is in the cache, and the `shift` of its positions afterwards."""

    media: dict[str, Any] = field(default_factory=dict)
    cache: Any = None
    image: Prompt | None = None
    shift: torch.Tensor | None = None


class Runner:
    """One device. `phase[0]` is what the swapped kernels of the plan ask for while a step runs. `following` says which
    tokens must come together, where the rope asks for it; `stepwise`, that outputs must come one at a time."""

    def __init__(
        self, built: Built, decoder: Decoder, taps: Taps, head: Head, wrapper: Wrapper, tier: Tier, phase: list[str]
    ) -> None:
        self.built, self.decoder, self.taps, self.head = built, decoder, taps, head
        self.wrapper, self.tier = wrapper, tier
        self.device = next(built.model.parameters()).device
        self.phase = phase
        self.following = following(built.model)
        self.stepwise = tier.whole or (self.following is not None and not self.following.restarts)

    def whole(self, prompt: int) -> bool:
        """Whether a prompt of so many tokens must be computed in one piece."""
        return self.tier.whole or (self.following is not None and prompt > self.following.length)

    def prepare(self, seq: Sequence) -> None:
        """Ask upstream what it makes of a prompt with images. Raises Refused when they do not fit."""
        memo: Memo = seq.memo
        if memo.media and memo.image is None:
            ids = torch.tensor([seq.tokens[: seq.whole]], dtype=torch.long, device=self.device)
            media = {k: _to(v, self.device) for k, v in memo.media.items()}
            memo.image = self.wrapper.prompt(ids, media)
            memo.shift = memo.image.shift

    def forget(self, seq: Sequence) -> None:
        """Drop what was computed for a sequence: it was preempted or has ended."""
        seq.memo.cache = None
        seq.memo.image = None

    @torch.inference_mode()
    def execute(self, batch: Batch, wanted: list[list[int]]) -> torch.Tensor:
        """Float32 logits [N, V] after the offsets (within each work item) that `wanted` lists, item by item."""
        self.phase[0] = batch.phase
        hidden: dict[int, torch.Tensor] = {}
        together: list[int] = []
        for i, w in enumerate(batch.work):
            if w.seq.memo.media and w.start == 0:
                hidden[i] = self._image(w)
            else:
                together.append(i)
        if together:
            packed = self._run([batch.work[i] for i in together])[0]
            parts = packed.split([batch.work[i].count for i in together])
            hidden.update(zip(together, parts, strict=True))
        rows = torch.cat([hidden[i][offsets] for i, offsets in enumerate(wanted)])
        return self.head(rows) if len(rows) else rows

    def _run(self, work: list[Work]) -> torch.Tensor:
        at = self._positions(work)
        if isinstance(self.tier.run, Gather):
            shares = [Share(w.seq.blocks, w.start, self._ids(w), p) for w, p in zip(work, at, strict=True)]
            return self.tier.run.run(shares)
        segments = [Segment(self._cache(w.seq), self._ids(w), p) for w, p in zip(work, at, strict=True)]
        if isinstance(self.tier.run, Isolate):
            return self.tier.run.run(segments)
        outs = []
        for s in segments:
            with self.taps.using(None):
                outs.append(self.decoder(cache=s.cache, positions=s.positions, ids=s.ids))
        return torch.cat(outs, 1)

    def _image(self, w: Work) -> torch.Tensor:
        self.prepare(w.seq)
        memo: Memo = w.seq.memo
        image = memo.image
        if image is None:
            raise RuntimeError("an image prompt without captured arguments")
        positions = image.positions if image.positions is not None else torch.arange(w.count, device=self.device)[None]
        if isinstance(self.tier.run, Gather):
            out = self.tier.run.alone(Share(w.seq.blocks, 0, self._ids(w), positions), image.given)
        else:
            with self.taps.using(None):
                out = self.decoder(cache=self._cache(w.seq), positions=positions, given=image.given)
        memo.image = None
        return out[0]

    def _cache(self, seq: Sequence) -> Any:
        if seq.memo.cache is None:
            seq.memo.cache = self.decoder.new_cache()
        return seq.memo.cache

    def _ids(self, w: Work) -> torch.Tensor:
        return torch.tensor([w.seq.tokens[w.start : w.start + w.count]], dtype=torch.long, device=self.device)

    def _positions(self, work: list[Work]) -> list[torch.Tensor]:
        """[1, n] each, or [R, 1, n] each as soon as one of them has rows (upstream's multi-axis rope)."""
        lines = [torch.arange(w.start, w.start + w.count, device=self.device)[None] for w in work]
        shifts = [w.seq.memo.shift for w in work]
        rows = max((s.shape[0] for s in shifts if s is not None), default=self.wrapper.rows)
        if rows is None:
            return lines
        return [line.expand(rows, 1, -1) if s is None else line + s for line, s in zip(lines, shifts, strict=True)]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return [_to(v, device) for v in value]
    return value
