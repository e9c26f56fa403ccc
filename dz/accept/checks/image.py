"""image: chats with pictures against upstream's processor and generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dz.accept import compare, pictures
from dz.accept.check import Check, failed, passed, skipped
from dz.core.check import Result
from dz.errors import Refused
from dz.upstream.reference import Case
from dz.verify import divergence

if TYPE_CHECKING:
    from dz.accept.client import Reply
    from dz.accept.context import Context
    from dz.upstream.reference import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """`tokens` greedy tokens for each picture case; the rest as in the text check. The cases are sent one by one and
    then all at once, because pictures that are mixed up show only when several are under way."""

    tokens: int = 24
    reference_dtype: str = "float32"
    match: float = 1.0
    noise: float = 2.0


def run(ctx: Context, params: Params) -> Result:
    """See the module."""
    facts = ctx.golden.facts()
    if facts.vision:
        return skipped(facts.vision, applies=facts.images)
    chats = pictures.conversations(pictures.draw(ctx.folder / "pictures"))
    cases = [Case(id=name, messages=messages, max_tokens=params.tokens) for name, messages in chats.items()]
    pairs = list(zip(cases, ctx.golden.ask(cases, params.reference_dtype), strict=True))
    refused = {a.id: a.error for _, a in pairs if a.error}
    pairs = [(c, a) for c, a in pairs if not a.error]
    if not pairs:
        why = next(iter(refused.values()))
        raise Refused("upstream's own code takes none of the picture cases", why, "see reference.log", code="golden")
    tie = compare.tie(ctx, [c for c, _ in pairs], [a for _, a in pairs], params)
    client = ctx.client()
    asks = [lambda c=c: client.chat(pictures.as_urls(c.messages), c.max_tokens) for c, _ in pairs]
    rounds = {"alone": [ask() for ask in asks], "together": ctx.at_once(asks)}
    answers = [a for _, a in pairs]
    rows = [row for way, replies in rounds.items() for row in _rows(way, answers, replies, tie)]
    found = divergence.summarise(d for _, _, d in rows)
    faults = [f"{name}: {fault}" for name, fault, _ in rows if fault]
    if found.share < params.match:
        faults += [f"{name}: {d.text()}" for name, _, d in rows if d.verdict == "differs"]
    note = f"; upstream itself refuses {', '.join(refused)}" if refused else ""
    blind = "" if _sees(answers) else "; upstream's answers do not depend on the picture"
    figures = f"{found.exact} of {found.n} answers exact, {found.ties} part at near ties, {found.differs} differ"
    text = figures + note + blind
    evidence = ctx.save("image", {"answers": answers, "rounds": rounds, "faults": faults})
    make = failed if faults else passed
    return make(
        "; ".join([*faults[:4], text]),
        value=found.share,
        unit="tokens equal",
        threshold=params.match,
        n=found.compared,
        evidence=(evidence,),
        details={"tokens": found, "tie": tie, "refused_upstream": refused, "faults": faults},
    )


Row = tuple[str, str, divergence.Divergence]  # name, what is wrong with the prompt, the comparison


def _rows(way: str, answers: Sequence[Answer], replies: Sequence[Reply], tie: float) -> list[Row]:
    out = []
    for answer, reply in zip(answers, replies, strict=True):
        fault = ""
        if reply.prompt_tokens is not None and reply.prompt_tokens != answer.prompt:
            difference = divergence.compare(answer.prompt, reply.prompt_tokens).text()
            fault = f"{len(reply.prompt_tokens)} prompt tokens, upstream has {len(answer.prompt)}; {difference}"
        same = compare.against(answer, reply, tie=tie)
        out.append((f"{answer.id} {way}", fault, same))
    return out


def _sees(answers: Sequence[Answer]) -> bool:
    """Whether two pictures in one question brought upstream to two answers; True when it cannot be told."""
    by_id = {a.id: a.tokens for a in answers}
    return not {"one", "another"} <= by_id.keys() or by_id["one"] != by_id["another"]


CHECK = Check(
    id="image",
    summary="Chats with pictures against upstream's processor and generate.",
    params=Params,
    needs=("server", "reference"),
    run=run,
)
