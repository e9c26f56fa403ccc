"""Chunks of 64 tokens by matrix products, long sequences split over the device: for prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dz.core.kernel import Kernel, Requires, Support
from dz.kernels.common.delta_chunks import CONFIG, chunks, prompt, refusals
from dz.kernels.common.delta_steps import GIVEN
from dz.kernels.common.refuse import support, unknown
from dz.kernels.common.tuned import Tunable

TUNE = Tunable("gated_delta_rule/chunked", CONFIG)
LAUNCHES = (chunks,)


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
    return prompt(
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
    technique="chunked",
    summary="chunks of 64 by matrix products; long sequences are split over the device",
    run=run,
    requires=Requires(device=("cuda",), arch=(90, 103), dtypes=("bfloat16",), phases=("prefill",)),
    supports=supports,
)
