"""Mixers that keep a state per sequence: delta rules, state spaces, short convolutions."""

from __future__ import annotations

from dz.inspect.outline.keys import Keys
from dz.inspect.outline.layer import Keep, Mixer

STATE = 4  # bytes: recurrent states are kept in float32


def delta_rule(k: Keys) -> Mixer:
    """A gated delta rule: a key-by-value matrix a head, and the last inputs of a short convolution on q, k and v. With
    one head count and one head size for all three (KDA) the decay is a low-rank projection to every channel."""
    hidden = k.number("hidden_size")
    each = k.number("linear_num_value_heads", "linear_attn_config.num_heads", "linear_num_heads", default=0)
    heads = each or k.number("num_attention_heads")
    kq = k.number("linear_num_key_heads", default=heads)
    size = k.number("linear_attn_config.head_dim", "linear_head_dim", "linear_key_head_dim", "head_dim", default=128)
    value = k.number("linear_value_head_dim", default=size)
    taps = k.number("linear_conv_kernel_dim", "linear_attn_config.short_conv_kernel_size", "short_conv_kernel_size")
    channels = 2 * kq * size + heads * value
    matrices = hidden * channels + heads * value * hidden + taps * channels + hidden * heads
    if k.get("linear_num_value_heads") is not None:
        matrices += hidden * (heads * value + heads)  # output gate and the scalar decay
    else:
        full = k.flag("linear_attn_config.use_full_rank_gate")
        matrices += hidden * size + size * heads * size  # decay
        matrices += hidden * heads * value if full else hidden * value + value * heads * value
    op = "delta rule by channel" if k.get("linear_num_value_heads") is None else "delta rule by head"
    return Mixer(op=op, keeps=_kept(heads, size * value, channels, taps), parameters=matrices, heads=heads)


def state_space(k: Keys) -> Mixer:
    """A selective state space: with heads (mamba2) or by channel (mamba 1)."""
    hidden = k.number("hidden_size", "d_model")
    state = k.number("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim", default=16)
    taps = k.number("mamba_d_conv", "conv_kernel", "d_conv", default=4)
    inner = k.number(
        "mamba_d_ssm", "intermediate_size_ssm", default=hidden * k.number("mamba_expand", "expand", default=2)
    )
    heads = k.number("mamba_n_heads", "mamba_num_heads", default=_only_mamba2_heads(k))
    if not heads:
        rank = k.number("time_step_rank", "mamba_dt_rank", default=-(-hidden // 16))
        matrices = (
            hidden * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner * (state + taps) + inner * hidden
        )
        return Mixer(op="mamba", keeps=_kept(inner, state, inner, taps), parameters=matrices, heads=inner)
    size = k.number("mamba_d_head", "mamba_head_dim", default=k.number("head_dim", default=inner // heads))
    inner = heads * size
    groups = k.number("mamba_n_groups", "n_groups", default=1)
    channels = inner + 2 * groups * state
    matrices = hidden * (inner + channels + heads) + taps * channels + inner * hidden
    return Mixer(op="mamba2", keeps=_kept(heads, size * state, channels, taps), parameters=matrices, heads=heads)


def _only_mamba2_heads(k: Keys) -> int:
    """`num_heads` belongs to the state space only where there is no attention to claim it."""
    return 0 if k.get("num_attention_heads") is not None else k.number("num_heads")


def short_convolution(k: Keys) -> Mixer:
    """A gated short convolution as the whole mixer."""
    hidden, taps = k.number("hidden_size"), k.number("conv_L_cache", "conv_kernel", default=3)
    keep = Keep(kind="convolution", window=hidden, tokens=taps, heads=hidden, formula=f"{taps} x {hidden}")
    return Mixer(op="causal_conv", keeps=(keep,), parameters=4 * hidden * hidden + taps * hidden, heads=hidden)


def _kept(heads: int, each: int, channels: int, taps: int) -> tuple[Keep, ...]:
    state = Keep(
        kind="recurrent state", fixed_bytes=heads * each * STATE, heads=heads, formula=f"{heads} x {each} in float32"
    )
    if taps < 2:
        return (state,)
    words = f"{taps - 1} inputs of {channels} channels"
    return state, Keep(kind="convolution", window=channels, tokens=taps - 1, heads=heads, formula=words)
