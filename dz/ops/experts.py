"""Routed experts: for each token its experts' feed-forward, weighted and summed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dz.core.op import Case, Op
from dz.ops import gated_activation
from dz.ops._routing import experts as recognise
from dz.ops.activations import activation as activation_of
from dz.ops.cases import Maker
from dz.ops.precision import REDUCTION, wide


def reference(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    gated: bool = True,
    interleaved: bool = False,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    shift: float = 0.0,
) -> torch.Tensor:
    """x [T, D], index [T, K] (expert ids), weight [T, K] -> [T, D] in x's dtype; products and the sum over experts in
    fp32, the routing weight after the second projection.

    gate_up [E, 2I, D] and down [E, D, I], or [E, D, 2I] and [E, I, D] if `transposed`; biases [E, 2I] and [E, D]. An id
    outside [0, E) is an expert of another rank and adds nothing. Not `gated`: gate_up is [E, I, D] and the activation
    alone follows. `interleaved`, `activation`, `alpha`, `limit`, `shift` as in gated_activation."""
    out = torch.zeros(x.shape, dtype=wide(x[:0]).dtype, device=x.device)
    for e in range(gate_up.shape[0]):
        token, slot = torch.where(index == e)
        if token.numel() == 0:
            continue
        up = wide(gate_up[e]) if transposed else wide(gate_up[e]).T
        back = wide(down[e]) if transposed else wide(down[e]).T
        h = wide(x[token]) @ up
        if gate_up_bias is not None:
            h = h + wide(gate_up_bias[e])
        if gated:
            h = gated_activation.reference(
                h, activation=activation, interleaved=interleaved, alpha=alpha, limit=limit, shift=shift
            )
        else:
            h = activation_of(activation)(h)
        y = h @ back
        if down_bias is not None:
            y = y + wide(down_bias[e])
        out.index_add_(0, token, y * wide(weight[token, slot])[:, None])
    return out.to(x.dtype)


def inputs(dtype: str, device: str, seed: int) -> Iterator[Case]:
    """Cases: both weight layouts, biases, clamped interleaved gates, experts without tokens, one expert with all, ids
    of other ranks, repeated ids, not gated, strided, one token, none."""
    m = Maker(dtype, device, seed)

    def base(t: int, e: int, k: int, *, d: int = 20, i: int = 12, transposed: bool = False, gated: bool = True) -> dict:
        rows = 2 * i if gated else i
        up, down = m.normal(e, rows, d, scale=d**-0.5), m.normal(e, d, i, scale=i**-0.5)
        return {
            "x": m.normal(t, d),
            "index": m.ints(0, e, t, k),
            "weight": m.normal(t, k, scale=0.2, shift=0.5, dtype="float32"),
            "gate_up": up.transpose(1, 2).contiguous() if transposed else up,
            "down": down.transpose(1, 2).contiguous() if transposed else down,
            "transposed": transposed,
        }

    yield Case("t7_e5_k2", base(7, 5, 2))
    clamped = {"interleaved": True, "alpha": 1.702, "limit": 7.0, "shift": 1.0}
    biased = {
        **base(9, 4, 2, transposed=True),
        "gate_up_bias": m.normal(4, 24, scale=4.0),
        "down_bias": m.normal(4, 20),
    }
    yield Case("transposed_biased_clamped_interleaved", {**biased, **clamped})
    yield Case("limit_only", {**base(6, 3, 2), "limit": 0.5})
    yield Case("all_tokens_one_expert", {**base(33, 6, 1), "index": m.ints(4, 5, 33, 1)})
    yield Case("ids_of_other_ranks", {**base(8, 4, 3), "index": m.ints(-1, 6, 8, 3)})
    yield Case("nowhere_here", {**base(3, 4, 2), "index": m.ints(4, 5, 3, 2)})
    yield Case("repeated_id", {**base(2, 4, 3), "index": m.tensor([[1, 1, 1], [3, 0, 3]])})
    yield Case("relu2_not_gated", {**base(5, 3, 2, gated=False), "gated": False, "activation": "relu2"})
    yield Case("one_token_many_experts", base(1, 17, 8))
    yield Case("no_tokens", base(0, 4, 2))
    strided = base(6, 4, 2, transposed=True)
    strided["x"] = m.normal(6, 40)[:, 1::2]
    strided["gate_up"] = m.normal(4, 24, 20, scale=0.2).transpose(1, 2)
    yield Case("strided_transposed_gelu", {**strided, "activation": "gelu_tanh"})


OP = Op(
    name="experts",
    summary="routed feed-forward experts",
    reference=reference,
    tolerance=REDUCTION,
    inputs=inputs,
    recognise=recognise,
    kind="interface",
    source="Shazeer et al. 2017, arXiv:1701.06538",
)
