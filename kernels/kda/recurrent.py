"""Token by token with the state in registers: for decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.delta_steps import CONFIG, GATE, GIVEN, SPACE, refusals, steps, walk
from dz.kernels.common.refuse import FLOATS, support, unknown
from dz.kernels.common.tuned import Tunable

TUNE = Tunable("kda/recurrent", CONFIG, SPACE)
LAUNCHES = (steps,)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_logits: bool = False,
    normalize: bool = True,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """See dz.ops.kda.reference. The new state has the strides of the given one."""
    return walk(
        q, k, v, g, beta, a_log=a_log, dt_bias=dt_bias, lower_bound=lower_bound, beta_logits=beta_logits,
        normalize=normalize, scale=scale, state=state, cu_seqlens=cu_seqlens, return_state=return_state,
        cfg=TUNE.pick(q.device),
    )  # fmt: skip


def supports(args: Mapping[str, Any]) -> Support:
    """Every argument of the op, but for what `refusals` names."""
    return support(unknown(args, (*GIVEN, *GATE)), *refusals(args))


KERNEL = Kernel(
    op="kda",
    technique="recurrent",
    summary="token by token, state in registers",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(70, None), dtypes=FLOATS, phases=("decode", "prefill")),
    supports=supports,
)
