"""What upstream itself computes on the loaded weights: the truth that the tiers are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dz.engine.mixers.isolate import Segment, serial
from dz.engine.mixers.masks import forgets
from dz.engine.mixers.taps import Learn, Taps
from dz.errors import Refused
from dz.upstream.decoder import FAILURES, Decoder, Head
from dz.upstream.generation import generate

# Largest |difference| of final hidden states, relative to their largest value, that rounding explains: 1e3 ulp of the
# dtype for a whole network (batched and single products sum in another order).
ROUNDING = {torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}
PROMPTS = (9, 3, 13)
DECODES = 3


@dataclass(frozen=True, slots=True)
class Walk:
    """Sequences of different lengths, `ids` [1, n] each, of which some prefill while others decode. A step lists
    (sequence, start, count)."""

    ids: list[torch.Tensor]
    steps: list[list[tuple[int, int, int]]]


@dataclass(frozen=True, slots=True)
class Truth:
    """A walk and the hidden states [T, D] of its steps as upstream computes them, one sequence at a time. `whole` says
    that upstream's cache does not continue a prompt that was cut: its prompts are in one piece. `forgets` says that its
    cache drops keys which its mask would show."""

    walk: Walk
    hidden: list[torch.Tensor]
    learn: Learn
    whole: bool
    forgets: bool = False


def find_truth(decoder: Decoder, taps: Taps, rows: int | None, vocab: int) -> Truth:
    """Raises Refused when upstream's decoder does not run."""
    device = str(next(decoder.module.parameters()).device)
    ids = _ids(decoder, vocab, device)
    learn = Learn()
    alone = lambda segments: serial(decoder, taps, segments)  # noqa: E731
    whole = Walk(ids, _whole())
    try:
        with taps.using(learn):
            decoder(cache=decoder.new_cache(), positions=positions(0, 2, rows, device), ids=ids[0][:, :2])
        generated = by_segments(decoder, whole, rows, alone)
        apart = [
            by_segments(decoder, Walk([one], [[(0, 0, n)], *([(0, n + i, 1)] for i in range(DECODES))]), rows, alone)
            for one, n in zip(ids, PROMPTS, strict=True)
        ]
    except FAILURES as e:
        raise not_run(decoder.built.cls, e) from e
    rounding = ROUNDING[decoder.built.dtype]
    if _differ(_in_order(whole, generated), [torch.cat(parts) for parts in apart], rounding):
        raise Refused(
            f"{decoder.built.cls} keeps state outside its cache",
            "its answer to a sequence depends on what ran before it, so requests cannot take turns",
            "serve it with upstream's generate, one request at a time; report it with the model's name",
            code="state_outside",
        )
    if forgets(decoder, taps, learn):
        return Truth(whole, generated, learn, True, True)
    cut = Walk(ids, _cut())
    try:
        hidden = by_segments(decoder, cut, rows, alone)
    except FAILURES:
        return Truth(whole, generated, learn, True)
    if _differ(_in_order(cut, hidden), _in_order(whole, generated), rounding):
        return Truth(whole, generated, learn, True)
    return Truth(cut, hidden, learn, False)


def not_run(cls: str, e: BaseException) -> Refused:
    """The refusal of a model whose decoder raises `e`."""
    return Refused(
        f"{cls} does not run",
        f"its decoder raises {type(e).__name__}: {' '.join(str(e).split())[:300]}",
        "check that upstream's generate() works with a cache; report it with the model's name",
        code="not_run",
    )


def check_whole(decoder: Decoder, head: Head, taps: Taps, rows: int | None, vocab: int) -> str | None:
    """Raises Refused unless decoder and head, called from outside, give the logits of upstream's whole model: of all
    tokens of a prompt, and of those that its `generate` adds. Returns why that could not be asked: some models take no
    text alone."""
    device = str(next(decoder.module.parameters()).device)
    n = PROMPTS[2]
    prompt = _ids(decoder, vocab, device)[2][:, :n]
    try:
        whole = decoder.built.model(input_ids=prompt, use_cache=True).logits[0].float()
        tokens, logits = generate(decoder.built.model, prompt, DECODES + 1)
    except FAILURES as e:
        return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
    ids = torch.cat([prompt, tokens[None, :-1]], 1)
    steps = [[(0, 0, n)], *([(0, n + i, 1)] for i in range(len(tokens) - 1))]
    try:
        hidden = by_segments(decoder, Walk([ids], steps), rows, lambda segments: serial(decoder, taps, segments))
        got = [head(h.to(decoder.built.dtype)) for h in hidden]
    except FAILURES as e:
        raise not_run(decoder.built.cls, e) from e
    made = torch.cat([got[0][-1:], *got[1:]])
    for what, mine, theirs in (("forward", got[0], whole), ("generate", made, logits)):
        if _differ([mine], [theirs], ROUNDING[decoder.built.dtype]):
            raise Refused(
                f"{decoder.built.cls} cannot be run as dz runs models",
                f"its decoder and head alone give other logits than its {what}, "
                f"by {error([mine], [theirs]):.2g} of the largest",
                "report it with the model's name",
                code="not_alike",
            )
    return None


def _ids(decoder: Decoder, vocab: int, device: str) -> list[torch.Tensor]:
    """Random tokens, none of which the configuration gives a meaning (padding, images)."""
    config = decoder.built.config
    named = {**config.to_dict(), **decoder.built.text_config.to_dict()}
    special = {v for k, v in named.items() if "token" in k and isinstance(v, int)}
    plain = torch.tensor([t for t in range(vocab) if t not in special])
    random = torch.Generator().manual_seed(20)
    draw = lambda n: plain[torch.randint(0, len(plain), (1, n), generator=random)].to(device)  # noqa: E731
    return [draw(n + DECODES) for n in PROMPTS]


def _cut() -> list[list[tuple[int, int, int]]]:
    a, b, c = PROMPTS
    steps = [[(0, 0, a), (1, 0, 2)], [(0, a, 1), (1, 2, b - 2), (2, 0, 5)], [(0, a + 1, 1), (1, b, 1), (2, 5, c - 5)]]
    steps.append([(0, a + 2, 1), (1, b + 1, 1), (2, c, 1)])
    steps.append([(1, b + 2, 1), (2, c + 1, 1)])
    steps.append([(2, c + 2, 1)])
    return steps


def _whole() -> list[list[tuple[int, int, int]]]:
    a, b, c = PROMPTS
    steps = [[(0, 0, a), (1, 0, b)], [(0, a, 1), (1, b, 1), (2, 0, c)]]
    steps += [[(0, a + i, 1), (1, b + i, 1), (2, c + i - 1, 1)] for i in range(1, DECODES)]
    steps.append([(2, c + DECODES - 1, 1)])
    return steps


def positions(start: int, n: int, rows: int | None, device: str) -> torch.Tensor:
    """[1, n] from `start`, or [rows, 1, n]."""
    line = torch.arange(start, start + n, device=device)[None]
    return line if rows is None else line.expand(rows, 1, n)


def by_segments(
    decoder: Decoder, walk: Walk, rows: int | None, run: Callable[[list[Segment]], torch.Tensor]
) -> list[torch.Tensor]:
    """Hidden states [T, D] of each step of a walk by `run`, each sequence with a cache of upstream's."""
    caches = [decoder.new_cache() for _ in walk.ids]
    out = []
    for step in walk.steps:
        segments = [
            Segment(caches[i], walk.ids[i][:, s : s + n], positions(s, n, rows, str(walk.ids[i].device)))
            for i, s, n in step
        ]
        out.append(run(segments)[0].float())
    return out


def _in_order(walk: Walk, hidden: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same by sequence: [n, D] each."""
    parts: list[list[Any]] = [[] for _ in walk.ids]
    for step, rows in zip(walk.steps, hidden, strict=True):
        for (i, _, _), part in zip(step, rows.split([n for _, _, n in step]), strict=True):
            parts[i].append(part)
    return [torch.cat(p) for p in parts]


def _differ(got: list[torch.Tensor], want: list[torch.Tensor], rounding: float) -> bool:
    """Whether a quarter of all rows differ: a state that was lost changes every row after the cut (nearly half of
    them), while rounding that tips a router's choice of experts changes single ones."""
    if any(g.shape != w.shape for g, w in zip(got, want, strict=True)):
        return True
    rows = [(g - w).abs().amax(-1) / w.abs().max().clamp(min=1e-6) for g, w in zip(got, want, strict=True)]
    return float((~(torch.cat(rows) <= rounding)).float().mean()) >= 0.25


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest difference relative to the largest value; infinite for other shapes and values not finite."""
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        if g.shape != w.shape or not torch.isfinite(g).all():
            return float("inf")
        worst = max(worst, float((g - w).abs().max() / w.abs().max().clamp(min=1e-6)))
    return worst
