"""concurrency: more and more requests at once: all finish, all are right, steps are shared, nothing is left over."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dz.accept import prompts
from dz.accept.check import Check, failed, passed
from dz.accept.client import AnswerError
from dz.accept.compare import rounding
from dz.core.check import Result
from dz.verify import divergence
from dz.verify.ties import margin

if TYPE_CHECKING:
    from dz.accept.client import Client, Reply
    from dz.accept.context import Context

SIZES, POOLS = "dz:step_sequences_total", ("dz:blocks_used", "dz:slots_used")
SETTLE = 5.0  # seconds that the pools may take to report the end of the last request


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """At each of `levels`, that many requests are under way until `requests` (at least the level) have been answered
    with `tokens` greedy tokens each."""

    levels: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    requests: int = 8
    tokens: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level: tokens per second over all requests, and how many steps held two sequences or more (None: the server
    does not tell)."""

    concurrency: int
    requests: int
    tokens: int
    seconds: float
    rate: float
    shared_steps: int | None
    largest_step: int | None


def run(ctx: Context, params: Params) -> Result:
    """See the module."""
    client = ctx.client()
    asked = prompts.plain(max(params.requests, *params.levels))
    right = [client.complete(p, params.tokens, logprobs=2) for p in asked]
    idle = _pools(client)
    found: list[Level] = []
    faults: list[str] = []
    tie, _ = rounding(ctx)
    for level in params.levels:
        step, wrong = _level(ctx, level, asked[: max(params.requests, level)], right, params.tokens, tie)
        found.append(step)
        faults += wrong
        ctx.progress.note(f"concurrency {level}: {step.rate:.1f} tokens/s")
    faults += _leftovers(client, idle)
    rates = ", ".join(f"{lv.concurrency}: {lv.rate:.1f}" for lv in found)
    make = failed if faults else passed
    return make(
        "; ".join([*faults[:4], f"tokens/s by concurrency: {rates}"]),
        value=max(lv.rate for lv in found),
        unit="tokens/s",
        n=sum(lv.requests for lv in found),
        evidence=(ctx.save("concurrency", {"levels": found, "faults": faults, "idle": idle}),),
        details={"levels": found, "tie": tie, "faults": faults},
    )


def _level(
    ctx: Context, level: int, asked: list[str], right: list[Reply], tokens: int, tie: float
) -> tuple[Level, list[str]]:
    client = ctx.client()
    before = _sizes(client)
    begun = time.monotonic()
    replies = ctx.at_once([lambda p=p: _answer(client, p, tokens) for p in asked], limit=level)
    seconds = time.monotonic() - begun
    after = _settled(client, before, level)
    faults = []
    for i, reply in enumerate(replies):
        if isinstance(reply, AnswerError):
            faults.append(f"request {i} at {level}: {reply.what}: {reply.why}")
            continue
        margins = [margin(list(step.values())) for step in right[i].top]
        same = divergence.compare(right[i].tokens, reply.tokens, margins=margins, tie=tie)
        if same.verdict == "differs":
            faults.append(f"request {i} at {level}: {same.text()}")
    made = sum(len(r.tokens) for r in replies if not isinstance(r, AnswerError))
    shared = largest = None
    if after is not None:
        new = {size: n - (before or {}).get(size, 0) for size, n in after.items()}
        shared = int(sum(n for size, n in new.items() if size >= 2))
        largest = max((size for size, n in new.items() if n > 0), default=0)
        if level >= 2 and not shared:
            faults.append(f"{level} requests at once, and no step held two sequences")
    elif ctx.server.own:
        faults.append(f"/metrics has no {SIZES}: whether steps are shared cannot be seen")
    return Level(
        concurrency=level, requests=len(asked), tokens=made, seconds=seconds, rate=made / seconds,
        shared_steps=shared, largest_step=largest,
    ), faults  # fmt: skip


def _answer(client: Client, prompt: str, tokens: int) -> Reply | AnswerError:
    try:
        return client.complete(prompt, tokens)
    except AnswerError as e:
        return e


def _sizes(client: Client) -> dict[int, float] | None:
    """Steps by how many sequences they held; None where the server does not tell."""
    samples = client.metrics()
    known = SIZES in samples or any(name.startswith("dz:") for name in samples)
    return {int(labels["size"]): value for labels, value in samples.get(SIZES, [])} if known else None


def _settled(client: Client, before: dict[int, float] | None, level: int) -> dict[int, float] | None:
    """The step sizes once they show a shared step, or after a while: counters may come a little after the answers."""
    end = time.monotonic() + SETTLE
    while True:
        now = _sizes(client)
        shown = now is None or any(n > (before or {}).get(size, 0) for size, n in now.items() if size >= 2)
        if shown or level < 2 or time.monotonic() > end:
            return now
        time.sleep(0.05)


def _pools(client: Client) -> dict[str, float]:
    samples = client.metrics()
    return {name: sum(v for _, v in samples[name]) for name in POOLS if name in samples}


def _leftovers(client: Client, idle: dict[str, float]) -> list[str]:
    """The pools that do not come back to what they held before."""
    end = time.monotonic() + SETTLE
    while True:
        now: dict[str, Any] = _pools(client)
        left = [f"{name} is {now.get(name)} afterwards, was {n}" for name, n in idle.items() if now.get(name, 0) > n]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


CHECK = Check(
    id="concurrency",
    summary="Requests at once: finished, right, batched, and nothing left over.",
    params=Params,
    needs=("server",),
    run=run,
)
