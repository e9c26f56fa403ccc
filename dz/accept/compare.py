"""How near is near enough: the tie margin and the KL threshold at the precision that the server computes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dz.accept import prompts
from dz.errors import DzError
from dz.upstream.reference import Answer, Case
from dz.verify import kl
from dz.verify.divergence import Divergence, compare, first_difference
from dz.verify.ties import NEAR, tie_margin

if TYPE_CHECKING:
    from dz.accept.client import Reply
    from dz.accept.context import Context

FEW = 4  # prompts that show a dtype's rounding


class Wants(Protocol):
    """The parameters that this needs; see the text check."""

    @property
    def reference_dtype(self) -> str:
        """The dtype of upstream's run."""
        ...

    @property
    def noise(self) -> float:
        """How many times upstream's own noise is allowed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """Wants against float32."""

    reference_dtype: str = "float32"
    noise: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """`tie` is the top-1 margin under which a step is a near tie, `max_kl` the mean KL allowed. Where the server's
    dtype is lower than the reference's, `own` is how far upstream in the server's dtype is from the reference, and
    `shift` how far its margins move."""

    dtype: str
    tie: float
    max_kl: float
    own: kl.Gaps | None = None
    shift: float = 0.0


def precision(ctx: Context, answers: Sequence[Answer], params: Wants, *, max_kl: float) -> Precision:
    """The limits for a comparison with `answers`. In the reference's own dtype: the usual ones. Otherwise upstream runs
    along its own answers in the server's dtype, and what that changes is noise which no engine can avoid: a step is a
    tie when its margin is below `noise` times the largest shift of a margin, and the mean KL may be `noise` times
    upstream's where that is more than `max_kl`."""
    if ctx.dtype == params.reference_dtype:
        return Precision(dtype=ctx.dtype, tie=NEAR, max_kl=max_kl)
    cases = [
        Case(id=a.id, kind="score", tokens=a.prompt + a.tokens, start=len(a.prompt) - 1) for a in answers if a.margins
    ]
    low = ctx.golden.ask(cases, ctx.dtype)
    gaps: list[kl.Gap] = []
    margins: list[float] = []
    shift = 0.0
    for exact, rough in zip((a for a in answers if a.margins), low, strict=True):
        if rough.error:
            raise ValueError(f"upstream in {ctx.dtype} fails on {rough.id}: {rough.error}")
        for step, margin in enumerate(exact.margins):
            gaps.append(kl.gap(dict(exact.top[step]), dict(rough.top[step])))
            margins.append(margin)
            shift = max(shift, abs(margin - rough.margins[step]))
    own = kl.summarise(gaps, margins, tie=NEAR)
    return Precision(
        dtype=ctx.dtype,
        tie=max(NEAR, params.noise * shift),
        max_kl=max(max_kl, params.noise * own.kl_mean),
        own=own,
        shift=shift,
    )


def against(answer: Answer, reply: Reply, *, tie: float) -> Divergence:
    """The server's tokens against upstream's. Where a stop token ended the text, servers may show it or not."""
    got = reply.tokens
    if reply.finish == "stop" and answer.stop_token is not None and got[-1:] == [answer.stop_token]:
        got = got[:-1]
    return compare(answer.tokens, got, margins=answer.margins, tie=tie)


def tie(ctx: Context, cases: Sequence[Case], answers: Sequence[Answer], params: Wants) -> float:
    """The tie margin for cases whose answers cannot be forced (pictures are in their prompts): upstream generates in
    the server's dtype too, and the shift of its margins is taken while its tokens are still the reference's."""
    if ctx.dtype == params.reference_dtype:
        return NEAR
    shift = 0.0
    for exact, rough in zip(answers, ctx.golden.ask(cases, ctx.dtype), strict=True):
        at = first_difference(exact.tokens, rough.tokens)
        steps = len(exact.tokens) if at is None else at + 1
        for a, b in zip(exact.margins[:steps], rough.margins[:steps], strict=False):
            shift = max(shift, abs(a - b))
    return max(NEAR, params.noise * shift)


def rounding(ctx: Context, *, noise: float = 2.0) -> tuple[float, str]:
    """(tie margin, where it comes from) for two answers of one server whose steps were shared with other requests. In
    float32 the usual margin; in a lower precision `noise` times the shift that upstream's own margins show in that
    dtype on a few prompts, or, where upstream cannot be asked, what one rounding of a logit moves."""
    if ctx.dtype == "float32":
        return NEAR, "float32"
    try:
        cases = prompts.cases(FEW, 32, ctx.golden.facts())
        answers = ctx.golden.ask(cases)
        found = precision(ctx, [a for a in answers if not a.error], Usual(noise=noise), max_kl=0.0)
    except DzError as e:
        return tie_margin(ctx.dtype), f"one rounding in {ctx.dtype}; upstream could not be asked: {e.what}"
    return found.tie, f"upstream's own margins move by {found.shift:.2g} in {ctx.dtype}"
