"""degenerate: answers that collapse (one token, a short loop, nothing) where upstream's do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dz.accept import prompts
from dz.accept.check import Check, failed, passed
from dz.core.check import Result
from dz.errors import DzError
from dz.upstream.reference import Case
from dz.verify import degenerate

if TYPE_CHECKING:
    from dz.accept.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """`prompts` prompts of `tokens` greedy tokens. Upstream is asked only about the prompts whose answers collapse."""

    prompts: int = 6
    tokens: int = 64
    reference_dtype: str = "float32"


def run(ctx: Context, params: Params) -> Result:
    """See the module."""
    client = ctx.client()
    asked = prompts.plain(params.prompts)
    replies = ctx.at_once([lambda p=p: client.complete(p, params.tokens) for p in asked])
    found = [degenerate.measure(r.tokens) for r in replies]
    fallen = [i for i, f in enumerate(found) if f.degenerate]
    upstream, why = _upstream(ctx, [asked[i] for i in fallen], params)
    bad = [
        f"prompt {i}: {found[i].degenerate}"
        for i, theirs in zip(fallen, upstream, strict=True)
        if theirs is None or not theirs.degenerate
    ]
    alike = len(fallen) - len(bad)
    mean = sum(f.entropy for f in found) / len(found)
    figures = f"{len(found) - len(fallen)} of {len(found)} answers vary, {mean:.2f} bits per token"
    figures += f"; {alike} collapse as upstream's own do" if alike else ""
    figures += f"; upstream could not be asked: {why}" if why and bad else ""
    make = failed if bad else passed
    return make(
        "; ".join([*bad[:4], figures]),
        value=len(bad),
        unit="collapsed",
        threshold=0,
        n=len(found),
        evidence=(ctx.save("degenerate", {"replies": replies, "statistics": found, "upstream": upstream}),),
        details={"statistics": found, "faults": bad},
    )


def _upstream(ctx: Context, texts: list[str], params: Params) -> tuple[list[degenerate.Output | None], str]:
    """The statistics of upstream's answers (None where it has none), and why it could not be asked."""
    if not texts:
        return [], ""
    cases = [Case(id=f"fallen{i}", text=text, max_tokens=params.tokens) for i, text in enumerate(texts)]
    try:
        answers = ctx.golden.ask(cases, params.reference_dtype)
    except DzError as e:
        return [None] * len(texts), f"{e.what}: {e.why}"
    return [None if a.error else degenerate.measure(a.tokens) for a in answers], ""


CHECK = Check(
    id="degenerate",
    summary="No answer collapses where upstream's does not.",
    params=Params,
    needs=("server",),
    run=run,
)
