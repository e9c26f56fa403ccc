"""Token by token with the state in registers: for decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.delta_steps import CONFIG, GIVEN, SPACE, refusals, steps, walk
from dz.kernels.common.refuse import FLOATS, support, unknown
from dz.kernels.common.tuned import Tunable

TUNE = Tunable("gated_delta_rule/recurrent", CONFIG, SPACE)
LAUNCHES = (steps,)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    normalize: bool = True,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """See dz.ops.gated_delta_rule.reference. The new state has the strides of the given one."""
    return walk(
        q, k, v, g[..., None].expand(*g.shape, k.shape[-1]), beta,
        a_log=None, dt_bias=None, lower_bound=None, beta_logits=False,
        normalize=normalize, scale=scale, state=state, cu_seqlens=cu_seqlens, return_state=return_state,
        cfg=TUNE.pick(q.device),
    )  # fmt: skip


def supports(args: Mapping[str, Any]) -> Support:
    """Every argument of the op, but for what `refusals` names."""
    return support(unknown(args, GIVEN), *refusals(args))


KERNEL = Kernel(
    op="gated_delta_rule",
    technique="recurrent",
    summary="token by token, state in registers",
    run=run,
    requires=Requires(device=("cuda", "rocm"), arch=(70, None), dtypes=FLOATS, phases=("decode", "prefill")),
    supports=supports,
)
