"""batch_invariance: a prompt gets the same answer alone and among others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dz.accept import prompts
from dz.accept.check import Check, failed, passed
from dz.accept.compare import rounding
from dz.core.check import Result
from dz.verify import divergence
from dz.verify.ties import margin

if TYPE_CHECKING:
    from dz.accept.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """`prompts` different prompts of `tokens` greedy tokens: one by one, then all at once, `rounds` times. A difference
    at a step where the server's own two best tokens are nearer than its dtype's rounding is counted apart."""

    prompts: int = 8
    tokens: int = 32
    rounds: int = 2


def run(ctx: Context, params: Params) -> Result:
    """See the module."""
    client = ctx.client()
    asked = prompts.plain(params.prompts)
    alone = [client.complete(p, params.tokens, logprobs=2) for p in asked]
    tie, source = rounding(ctx)
    rows: list[tuple[str, divergence.Divergence]] = []
    for number in range(params.rounds):
        # another order each round: a sequence meets other neighbours in other places of the batch
        order = list(range(len(asked)))[:: -1 if number % 2 else 1]
        replies = ctx.at_once([lambda i=i: client.complete(asked[i], params.tokens) for i in order])
        for i, reply in zip(order, replies, strict=True):
            margins = [margin(list(step.values())) for step in alone[i].top]
            same = divergence.compare(alone[i].tokens, reply.tokens, margins=margins, tie=tie)
            rows.append((f"prompt {i} in round {number + 1}", same))
    found = divergence.summarise(d for _, d in rows)
    bad = [f"{name}: {d.text()}" for name, d in rows if d.verdict == "differs"]
    figures = (
        f"{found.exact} of {found.n} answers as when alone, {found.ties} part at near ties (under {tie:.2g}: {source})"
    )
    make = failed if bad else passed
    return make(
        "; ".join([*bad[:4], figures]),
        value=found.differs,
        unit="answers differ",
        threshold=0,
        n=found.n,
        details={"tokens": found, "tie": tie, "faults": bad},
    )


CHECK = Check(
    id="batch_invariance",
    summary="The same answers alone and among others.",
    params=Params,
    needs=("server",),
    run=run,
)
