"""Near ties: steps at which rounding, not a mistake, decides which token comes first."""

from __future__ import annotations

from collections.abc import Sequence

NEAR = 1e-3  # natural-log units between the best and the second best token; below it a step is a near tie
# Unit roundoff: half the distance from 1 to the next larger number of the dtype.
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LOGIT = 32.0  # a generous size of a largest logit: one rounding of it moves a margin by LOGIT * roundoff


def tie_margin(dtype: str) -> float:
    """The top-1 margin under which a step counts as a near tie when a model runs in `dtype`.

    1e-3 in float32. A low precision rounds the logits themselves: by up to LOGIT * unit roundoff, which is 0.125 in
    bfloat16 and 0.016 in float16, so nothing closer than that is decided by the model. Raises KeyError for a dtype
    that has no such arithmetic."""
    return max(NEAR, LOGIT * ROUNDOFF[dtype])


def margin(logprobs: Sequence[float]) -> float:
    """The gap between the best and the second best of some (log-)scores, best first or not; 0 with fewer than two."""
    if len(logprobs) < 2:
        return 0.0
    first, second = sorted(logprobs, reverse=True)[:2]
    return first - second
