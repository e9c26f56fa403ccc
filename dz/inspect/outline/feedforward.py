"""Feed-forward parts from a configuration: dense, experts, shared experts, latent experts."""

from __future__ import annotations

from dz.inspect.outline.keys import Keys
from dz.inspect.outline.layer import FeedForward

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "num_selected_experts", "top_k_experts")


def dense(k: Keys, width: int = 0, *, gated: bool = True) -> FeedForward:
    """A dense part of `width` (default: the configuration's)."""
    hidden = k.number("hidden_size", "n_embd", "d_model")
    inner = width or k.number(
        "dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner"
    )
    inner = inner or 4 * hidden
    if k.flag("block_auto_adjust_ff_dim") and not width:
        step = k.number("block_multiple_of", default=256)
        inner = -(-int(2 * inner / 3 * float(k.get("block_ffn_dim_multiplier") or 1)) // step) * step
    return FeedForward(dense=(3 if gated else 2) * hidden * inner, width=inner * (2 if gated else 1), gated=gated)


def mixture(k: Keys, *, gated: bool = True) -> FeedForward:
    """Routed experts with their router, shared experts beside them, and the projections to a latent that the routed
    ones may work in (`routed_expert_hidden_size`)."""
    hidden, times = k.number("hidden_size"), 3 if gated else 2
    experts, active = k.number(*EXPERTS), k.number(*ACTIVE, default=1)
    inner = k.number("moe_intermediate_size", "expert_ffn_hidden_size", default=k.number("intermediate_size"))
    latent = k.number("routed_expert_hidden_size")
    shared = shared_width(k, inner)
    beside = hidden * experts + times * hidden * shared + (2 * hidden * latent if latent else 0)
    width = (active * inner + shared) * (2 if gated else 1)
    return FeedForward(
        dense=beside,
        experts=experts,
        expert=times * (latent or hidden) * inner,
        active=active,
        width=width,
        gated=gated,
    )


def shared_width(k: Keys, inner: int) -> int:
    """The inner width of all shared experts together."""
    stated = k.number(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"
    )
    count = k.number("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=1 if stated else 0)
    return (stated or inner) * count if count else stated
