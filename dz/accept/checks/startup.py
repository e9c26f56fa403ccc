"""startup: how long until the server is ready, and from a request to its first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dz.accept import prompts
from dz.accept.check import Check, failed, passed
from dz.core.check import Result

if TYPE_CHECKING:
    from dz.accept.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Most seconds from the start of the process to its ready line, and from a request to the first token of its
    stream (the first request after the start, and the best of `repeats` more)."""

    ready_seconds: float = 600.0
    first_token_seconds: float = 30.0
    repeats: int = 3


def run(ctx: Context, params: Params) -> Result:
    """See the module."""
    client = ctx.client()
    ready = ctx.server.ready_seconds
    firsts: list[float] = []
    for _ in range(1 + params.repeats):
        reply = client.stream(prompts.FIRST, 4)
        if reply.first is None:
            return failed("a stream ended without a token", n=len(firsts))
        firsts.append(reply.first)
    faults = []
    if ready is not None and ready > params.ready_seconds:
        faults.append(f"ready after {ready:.1f} s, allowed are {params.ready_seconds:g}")
    if firsts[0] > params.first_token_seconds:
        faults.append(f"the first token took {firsts[0]:.2f} s, allowed are {params.first_token_seconds:g}")
    warm = min(firsts[1:], default=firsts[0])
    start = "start not seen" if ready is None else f"ready in {ready:.1f} s"
    figures = f"{start}; first token in {firsts[0]:.3f} s, then {warm:.3f} s"
    make = failed if faults else passed
    return make(
        "; ".join([*faults, figures]),
        value=firsts[0] if ready is None else ready,
        unit="s",
        threshold=params.first_token_seconds if ready is None else params.ready_seconds,
        n=len(firsts),
        details={"ready_seconds": ready, "first_token_seconds": firsts, "allowed": params},
    )


CHECK = Check(id="startup", summary="Time to ready and to the first token.", params=Params, needs=("server",), run=run)
