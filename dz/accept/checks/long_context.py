"""long_context: a ladder of lengths up to the limit; the first length that fails is reported, not a mean."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dz.accept import compare, prompts
from dz.accept.check import Check, failed, passed, skipped
from dz.accept.client import AnswerError
from dz.core.check import Result
from dz.errors import EnvironmentFailure
from dz.upstream.reference import Case
from dz.verify import divergence

if TYPE_CHECKING:
    from dz.accept.context import Context
    from dz.upstream.reference import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """The ladder goes from `first` in steps of `factor` to the server's max_model_len, or to `up_to` tokens where that
    is not 0. `tokens` are generated at each length. Lengths up to `reference_up_to` are compared with upstream, which
    may take `reference_seconds` for all of them; longer ones must give finite logprobs and no error. No rung is begun
    when it would probably pass `seconds` for the whole ladder."""

    first: int = 128
    factor: int = 4
    up_to: int = 0
    tokens: int = 8
    reference_up_to: int = 4096
    reference_seconds: float = 600.0
    reference_dtype: str = "float32"
    noise: float = 2.0
    seconds: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One length: what is wrong ("" if nothing), how it was checked ("upstream" or "finite"), and the seconds."""

    length: int
    fault: str
    how: str
    seconds: float
    divergence: divergence.Divergence | None = None


def run(ctx: Context, params: Params) -> Result:
    """See the module."""
    client = ctx.client()
    if not client.max_model_len:
        return skipped("the server's /v1/models does not say max_model_len")
    limit = client.max_model_len
    goal = min(params.up_to or limit, limit) - params.tokens
    lengths = ladder(params.first, params.factor, goal)
    words = _words(ctx, lengths[-1])
    golden, unchecked = _golden(ctx, params, words, lengths)
    tie = compare.tie(ctx, [c for c, _ in golden.values()], [a for _, a in golden.values()], params) if golden else 0.0
    rungs: list[Rung] = []
    begun = time.monotonic()
    for length in lengths:
        if time.monotonic() - begun + _guess(rungs, length) > params.seconds:
            break
        answer = golden[length][1] if length in golden else None
        rungs.append(_rung(ctx, words[:length], params.tokens, answer, tie))
        ctx.progress.note(f"long_context: {length} tokens, {rungs[-1].seconds:.1f} s, {rungs[-1].fault or 'fine'}")
        if rungs[-1].fault:
            break
    edge = _edge(ctx, words, limit) if not any(r.fault for r in rungs) and goal == limit - params.tokens else ""
    return _verdict(ctx, params, rungs, lengths, edge, unchecked)


def ladder(first: int, factor: int, goal: int) -> list[int]:
    """first, first * factor, ... below `goal`, then `goal` itself."""
    out, length = [], first
    while length < goal:
        out.append(length)
        length *= max(factor, 2)
    return [*out, max(goal, 1)]


def _words(ctx: Context, length: int) -> list[int]:
    """That many tokens of prose; ids spread over the vocabulary where there is no tokenizer."""
    facts = ctx.golden.facts()
    if facts.tokenizer:
        base = prompts.cases(8, 0, facts)[-1].tokens
        return (base * -(-length // len(base)))[:length]
    (answer,) = ctx.golden.ask([Case(id="long", kind="tokenize", text=prompts.long_text(), length=length)])
    return answer.prompt


def _golden(
    ctx: Context, params: Params, words: Sequence[int], lengths: Sequence[int]
) -> tuple[dict[int, tuple[Case, Answer]], str]:
    """Upstream's answers by length, for what is affordable, and why the others have none."""
    cases = [
        Case(id=f"long{n}", tokens=list(words[:n]), max_tokens=params.tokens)
        for n in lengths
        if n <= params.reference_up_to
    ]
    if not cases:
        return {}, f"upstream is asked up to {params.reference_up_to} tokens"
    try:
        answers = ctx.golden.ask(cases, params.reference_dtype, limit=params.reference_seconds)
    except EnvironmentFailure as e:
        return {}, f"{e.what}: {e.why}"
    bad = next(
        (f"upstream fails at {len(c.tokens)}: {a.error}" for c, a in zip(cases, answers, strict=True) if a.error), ""
    )
    return {len(c.tokens): (c, a) for c, a in zip(cases, answers, strict=True) if not a.error}, bad


def _guess(rungs: Sequence[Rung], length: int) -> float:
    """Seconds that a rung will take: attention grows with the square of the length at worst."""
    return rungs[-1].seconds * (length / rungs[-1].length) ** 2 if rungs else 0.0


def _rung(ctx: Context, tokens: Sequence[int], count: int, answer: Answer | None, tie: float) -> Rung:
    begun = time.monotonic()
    how = "finite" if answer is None else "upstream"
    try:
        reply = ctx.client().complete(list(tokens), count, logprobs=1)
    except AnswerError as e:
        fault = f"{e.what}: {e.why}"
        return Rung(length=len(tokens), fault=fault, how=how, seconds=time.monotonic() - begun)
    seconds = time.monotonic() - begun
    if not reply.tokens and reply.finish != "stop":
        fault = f"nothing was generated (finish reason {reply.finish!r})"
    elif not all(math.isfinite(v) and v > -9000 for v in reply.logprobs):
        fault = "log probabilities are not finite"
    else:
        fault = ""
    same = None
    if answer is not None and not fault:
        same = compare.against(answer, reply, tie=tie)
        fault = same.text() if same.verdict == "differs" else ""
    return Rung(length=len(tokens), fault=fault, how=how, seconds=seconds, divergence=same)


def _edge(ctx: Context, words: Sequence[int], limit: int) -> str:
    """What is wrong with the answer to a prompt that leaves no room: it must be a 400 that states the limit."""
    over = (list(words) * -(-(limit + 1) // len(words)))[: limit + 1]
    try:
        ctx.client().complete(over, 1)
    except AnswerError as e:
        if e.status != 400:
            return f"a prompt of {limit + 1} tokens gets status {e.status} instead of 400"
        return "" if str(limit) in e.why else f"the refusal of {limit + 1} tokens does not state the limit: {e.why}"
    return f"a prompt of {limit + 1} tokens is answered though the limit is {limit}"


def _verdict(ctx: Context, params: Params, rungs: list[Rung], lengths: list[int], edge: str, unchecked: str) -> Result:
    bad = next((r for r in rungs if r.fault), None)
    good = [r for r in rungs if not r.fault]
    best = max((r.length for r in good), default=0)
    against = [r.length for r in good if r.how == "upstream"]
    ties = sum(r.divergence is not None and r.divergence.verdict == "tie" for r in good)
    figures = f"{best} of {lengths[-1]} tokens in {len(good)} lengths"
    figures += f", {len(against)} of them against upstream" + (f" (to {max(against)})" if against else "")
    figures += f", {ties} parted at near ties" if ties else ""
    figures += f"; {unchecked}" if unchecked else ""
    common: dict[str, Any] = {
        "value": best,
        "unit": "tokens",
        "threshold": lengths[-1],
        "n": len(rungs),
        "evidence": (ctx.save("long_context", {"rungs": rungs, "edge": edge}),),
        "details": {"rungs": rungs, "edge": edge},
    }
    if bad is not None:
        return failed(f"the first length that fails is {bad.length}: {bad.fault}; {figures}", **common)
    if edge:
        return failed(f"{edge}; {figures}", **common)
    if best < lengths[-1]:
        return skipped(
            f"{figures}: the next would pass {params.seconds:.0f} s; raise `seconds`, or set `up_to`", **common
        )
    return passed(figures, **common)


CHECK = Check(
    id="long_context",
    summary="Prompts up to the limit: against upstream while affordable, then finite.",
    params=Params,
    needs=("server", "reference"),
    run=run,
)
