"""Short causal depthwise convolution with its state."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F

from dz.core.inventory import Match, SiteView
from dz.core.op import Case, Op
from dz.errors import UsageError
from dz.ops import _mixing
from dz.ops.activations import activation as activation_of
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def _one(
    x: torch.Tensor, past: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, keep: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of one length: x [B, C, T] after past [B, C, L], L >= W - 1."""
    joined = torch.cat((past.to(x.dtype), x), -1)
    lead = joined.shape[-1] - x.shape[-1] - (weight.shape[-1] - 1)
    if x.shape[-1] == 0:
        return wide(x), joined[..., joined.shape[-1] - keep :]
    y = F.conv1d(
        wide(joined[..., lead:]), wide(weight)[:, None], None if bias is None else wide(bias), groups=x.shape[1]
    )
    return y, joined[..., joined.shape[-1] - keep :]


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    state: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [B, C, T], new state [B, C, L]): x [B, C, T], weight [C, W], bias [C]; fp32 inside, x's dtype outside.

    `y[t] = act(bias + sum_i weight[W - 1 - i] * x[t - i])`. `state` [B, C, L] holds the last L >= W - 1 inputs before x
    (inputs, not outputs), zeros if None, and is not changed; the new one holds the last L (W - 1 if None). `cu_seqlens`
    [N + 1]: B = 1 holds N packed sequences, and the states are [N, C, L]. Raises UsageError for too short a state."""
    width = weight.shape[-1]
    packed = cu_seqlens is not None
    sequences = len(cu_seqlens) - 1 if cu_seqlens is not None else x.shape[0]
    if packed and x.shape[0] != 1:
        raise UsageError(
            f"packed sequences in a batch of {x.shape[0]}",
            "cu_seqlens describes one packed row",
            "pass [1, C, T]",
            code="bad_shape",
        )
    if state is None:
        state = x.new_zeros(sequences, x.shape[1], width - 1)
    if state.shape[0] != sequences or state.shape[-1] < width - 1:
        raise UsageError(
            f"a conv state of shape {list(state.shape)}",
            f"{sequences} sequences of at least {width - 1} inputs are needed",
            "check the state",
            code="bad_shape",
        )
    if cu_seqlens is None:
        y, new = _one(x, state, weight, bias, state.shape[-1])
    else:
        ends = cu_seqlens.tolist()
        parts = [
            _one(x[..., a:b], state[i : i + 1], weight, bias, state.shape[-1])
            for i, (a, b) in enumerate(pairwise(ends))
        ]
        y, new = torch.cat([p[0] for p in parts], -1), torch.cat([p[1] for p in parts])
    if activation is not None:
        y = activation_of(activation)(y)
    return y.to(x.dtype), new.to(x.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: shorter and longer than the width, with and without state, wide state, packed with an empty sequence."""
    m = Maker(dtype, device, seed)
    w, b = m.normal(6, 4, scale=0.5), m.normal(6)
    yield Case("t9_w4", {"x": m.normal(2, 6, 9), "weight": w})
    yield Case("t2_shorter_than_w4_bias_silu", {"x": m.normal(2, 6, 2), "weight": w, "bias": b, "activation": "silu"})
    yield Case("decode_state3", {"x": m.normal(3, 6, 1), "weight": w, "state": m.normal(3, 6, 3), "activation": "silu"})
    yield Case(
        "chunk_state4_wider_than_needed", {"x": m.normal(1, 6, 5), "weight": w, "bias": b, "state": m.normal(1, 6, 4)}
    )
    packed = {"cu_seqlens": m.tensor([0, 1, 1, 8]), "state": m.normal(3, 6, 3), "bias": b, "activation": "silu"}
    yield Case("packed_1_0_7", {"x": m.normal(1, 6, 8), "weight": w, **packed})
    yield Case("w1", {"x": m.normal(1, 6, 3), "weight": m.normal(6, 1)})
    yield Case("t0", {"x": m.normal(1, 6, 0), "weight": w, "state": m.normal(1, 6, 3)})
    yield Case("strided_w3", {"x": m.normal(2, 7, 5).transpose(1, 2), "weight": m.normal(5, 3), "bias": m.normal(5)})
    yield Case("c130_t70", {"x": m.normal(1, 130, 70), "weight": m.normal(130, 4, scale=0.5), "activation": "silu"})


def recognise(site: SiteView) -> Match | None:
    """A depthwise Conv1d, or a function that convolves as the op does, proved on random inputs."""
    return _mixing.causal_conv(site, reference)


OP = Op(
    name="causal_conv",
    summary="short causal depthwise convolution with state",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    kind="function",
)
