"""text: the server's answers against upstream's, token by token and distribution by distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dz.accept import prompts
from dz.accept.check import Check, failed, passed
from dz.accept.compare import Precision, against, precision
from dz.core.check import Result
from dz.errors import Refused
from dz.verify import causality, divergence, kl

if TYPE_CHECKING:
    from dz.accept.client import Reply
    from dz.accept.context import Context
    from dz.upstream.reference import Answer, Case

SERVER_TOP = 20  # alternatives that servers give at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """`prompts` of them (or `texts`), `tokens` greedy tokens each. `reference_dtype` is upstream's; where the server
    computes in a lower precision, upstream also runs in that, and its own distance from the truth widens `max_kl`
    (mean, nats) and the tie margin by `noise` times. `match` is the least share of tokens that must agree."""

    prompts: int = 8
    tokens: int = 32
    texts: list[str] = field(default_factory=list)
    reference_dtype: str = "float32"
    match: float = 1.0
    top1: float = 1.0
    max_kl: float = 1e-5
    noise: float = 2.0


def run(ctx: Context, params: Params) -> Result:
    """See the module."""
    facts = ctx.golden.facts()
    cases = prompts.cases(params.prompts, params.tokens, facts, params.texts)
    answers = ctx.golden.ask(cases, params.reference_dtype)
    refuse_failed(answers)
    probe = _probe(ctx, answers, facts.vocab_size, params.reference_dtype)
    if not probe.causal:
        raise Refused(
            "upstream's run cannot be golden", probe.reason, "report it to the model's authors", code="golden"
        )
    limits = precision(ctx, answers, params, max_kl=params.max_kl)
    replies = [_reply(ctx, case, answer) for case, answer in zip(cases, answers, strict=True)]
    rows = [_row(case, a, r, limits) for case, a, r in zip(cases, answers, replies, strict=True)]
    gaps, margins = _distributions(ctx, answers)
    found = divergence.summarise(row.divergence for row in rows)
    spread = kl.summarise(gaps, margins, tie=limits.tie)
    evidence = ctx.save("text", {"rows": [row.data() for row in rows], "gaps": gaps, "margins": margins})
    return _verdict(params, limits, rows, found, spread, probe, evidence)


def refuse_failed(answers: Sequence[Answer]) -> None:
    """Raise Refused when upstream itself fails on a prompt."""
    for answer in answers:
        if answer.error:
            raise Refused(f"upstream's own code fails on {answer.id}", answer.error, "see reference.log", code="golden")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt: what is wrong with the prompt's tokens or the end of the text ("" if nothing), and the comparison."""

    id: str
    prompt_fault: str
    end_fault: str
    divergence: divergence.Divergence
    want: list[int]
    got: list[int]

    def data(self) -> dict[str, Any]:
        """For the evidence."""
        return {"id": self.id, "prompt": self.prompt_fault, "end": self.end_fault, "difference": self.divergence.text(),
                "verdict": self.divergence.verdict, "want": self.want, "got": self.got}  # fmt: skip


def _reply(ctx: Context, case: Case, answer: Answer) -> Reply:
    """The server's answer to the prompt as a client would send it: text, messages, or ids where there is no text."""
    client = ctx.client()
    if case.messages:
        return client.chat(case.messages, case.max_tokens)
    return client.complete(case.text or answer.prompt, case.max_tokens)


def _row(case: Case, answer: Answer, reply: Reply, limits: Precision) -> Row:
    prompt = ""
    if reply.prompt_tokens is not None and reply.prompt_tokens != answer.prompt:
        at = divergence.compare(answer.prompt, reply.prompt_tokens)
        prompt = f"the server's prompt differs from upstream's: {at.text()}"
    same = against(answer, reply, tie=limits.tie)
    want = "length" if answer.stop_token is None else "stop"
    end = "" if reply.finish == want or same.at is not None else f"finish reason {reply.finish!r} instead of {want!r}"
    return Row(id=case.id, prompt_fault=prompt, end_fault=end, divergence=same, want=answer.tokens, got=reply.tokens)


def _distributions(ctx: Context, answers: Sequence[Answer]) -> tuple[list[kl.Gap], list[float]]:
    """Teacher-forced: the server's distributions along upstream's own answers, against upstream's at each step."""
    gaps: list[kl.Gap] = []
    margins: list[float] = []
    for answer in answers:
        if not answer.top:
            continue
        rows = ctx.client().score(answer.prompt + answer.tokens, SERVER_TOP)
        steps = rows[len(answer.prompt) : len(answer.prompt) + len(answer.top)]
        for want, got, margin in zip(answer.top, steps, answer.margins, strict=True):
            gaps.append(kl.gap(dict(want), got or {}))
            margins.append(margin)
    return gaps, margins


def _probe(ctx: Context, answers: Sequence[Answer], vocab: int, dtype: str) -> causality.Causality:
    """The causality of upstream's run on the longest prompt with its answer."""
    longest = max(answers, key=lambda a: len(a.prompt))
    tokens = longest.prompt + longest.tokens
    return causality.probe(lambda t: ctx.golden.scores(t, dtype), tokens, vocab=vocab or max(tokens) + 1)


def _verdict(
    params: Params, limits: Precision, rows: list[Row], found: divergence.Summary, spread: kl.Gaps,
    probe: causality.Causality, evidence: str,
) -> Result:  # fmt: skip
    faults = [f"{r.id}: {t}" for r in rows for t in (r.prompt_fault, r.end_fault) if t]
    if found.share < params.match:
        faults += [f"{r.id}: {r.divergence.text()}" for r in rows if r.divergence.verdict == "differs"]
    if spread.top1 < params.top1:
        faults.append(f"top-1 agreement {spread.top1:.4f} below {params.top1}")
    if not spread.kl_mean <= limits.max_kl:
        faults.append(f"mean KL {spread.kl_mean:.3g} above {limits.max_kl:.3g}")
    figures = (
        f"{found.exact} of {found.n} answers exact, {found.ties} part at near ties, {found.differs} differ"
        f"; top-1 {spread.top1:.4f} ({spread.ties} near ties apart), mean KL {spread.kl_mean:.2g}, max"
        f" {spread.kl_max:.2g} over {spread.n} steps"
    )
    make = failed if faults else passed
    return make(
        "; ".join([*faults[:4], figures]) if faults else figures,
        value=found.share,
        unit="tokens equal",
        threshold=params.match,
        n=found.compared,
        evidence=(evidence,),
        details={
            "tokens": found, "distributions": spread, "limits": limits, "causality": probe, "faults": faults,
        },
    )  # fmt: skip


CHECK = Check(
    id="text",
    summary="Greedy answers and distributions against upstream's own run.",
    params=Params,
    needs=("server", "reference"),
    run=run,
)
