"""Linear attention in torch with the calls of the fla and causal-conv1d packages, on the references of dz's own ops.

Layouts: q, k [B, T, H, K], v [B, T, H, V], g [B, T, H] or [B, T, H, K], beta [B, T, H], states [N, H, K, V] float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dz.ops import causal_conv, kda
from dz.ops._delta import delta_rule

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid", None: None}


def delta_per_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o [B, T, H, V] in q's dtype, final state or None) of the gated delta rule with one log decay for each head."""
    out, state = delta_rule(
        q, k, v, g.unsqueeze(-1), beta, normalize=use_qk_l2norm_in_kernel, scale=scale, state=initial_state,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return out.to(q.dtype), state.float() if output_final_state else None


def delta_per_channel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, final state or None) of the gated delta rule with a log decay for each channel of the key (KDA)."""
    rate = None if A_log is None or not use_gate_in_kernel else A_log.flatten()
    out, state = kda.reference(
        q, k, v, g, beta, a_log=rate, dt_bias=dt_bias if use_gate_in_kernel else None, lower_bound=lower_bound,
        normalize=use_qk_l2norm_in_kernel, scale=scale, state=initial_state, cu_seqlens=cu_seqlens,
        return_state=output_final_state,
    )  # fmt: skip
    return out, None if state is None else state.float()


def channel_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    head_k_dim: int | torch.Tensor | None = None,
    g_bias: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """The log decay [B, T, H, K] float32 of a gate's input: [B, T, H * K] with `head_k_dim` K (the older call, whose
    bias is `g_bias`), or [B, T, H, K] (the newer one, whose bias comes third)."""
    if isinstance(head_k_dim, int):
        g = g.unflatten(-1, (-1, head_k_dim))
    elif head_k_dim is not None:
        dt_bias = head_k_dim
    rate = None if A_log is None else A_log.flatten()
    return kda.log_decay(g, rate, dt_bias if dt_bias is not None else g_bias, lower_bound).float()


class Norm(nn.Module):
    """x / rms(x) * weight, float32 inside."""

    def __init__(
        self, hidden_size: int, elementwise_affine: bool = True, bias: bool = False, eps: float = 1e-5,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps = eps
        factory = {"device": device, "dtype": dtype}
        self.register_parameter("weight", _filled(hidden_size, 1.0, elementwise_affine, factory))
        self.register_parameter("bias", _filled(hidden_size, 0.0, elementwise_affine and bias, factory))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] in x's dtype."""
        return self._normed(x).to(x.dtype)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        y = y if weight is None else y * weight.float()
        return y if bias is None else y + bias.float()


class GatedNorm(Norm):
    """The norm of x times an activation of a gate g of the same shape."""

    def __init__(
        self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5, activation: str = "swish",
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, elementwise_affine, eps=eps, device=device, dtype=dtype)
        self.activation = _known(activation) or "silu"

    def forward(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """[..., D] in x's dtype."""
        gate = g.float()
        gate = gate * gate.sigmoid() if self.activation == "silu" else gate.sigmoid()
        return (self._normed(x) * gate).to(x.dtype)


class Convolution(nn.Conv1d):
    """A short causal depthwise convolution over [B, T, C]; its cache [N, C, W] holds the last W inputs."""

    def __init__(
        self, hidden_size: int, kernel_size: int, bias: bool = False, activation: str | None = "silu",
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(
            hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, padding=kernel_size - 1,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.activation = _known(activation)

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(y [B, T, C], the last W inputs [N, C, W] or None). `mask` [B, T] zeroes the inputs of padding."""
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        rows = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        past = x.new_zeros(rows, x.shape[-1], self.kernel_size[0]) if cache is None else cache
        y, new = causal_conv.reference(
            x.transpose(1, 2), self.weight[:, 0], self.bias, state=past, activation=self.activation,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        y = y.transpose(1, 2)
        if cache is not None:
            new = cache.copy_(new)  # as the kernel does: the cache is the caller's own tensor
        return y if residual is None else y + residual, new if output_final_state or cache is not None else None


def conv_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, seq_idx: Any = None,
    initial_states: torch.Tensor | None = None, return_final_states: bool = False, final_states_out: Any = None,
    activation: str | None = None,
) -> Any:  # fmt: skip
    """y [B, C, T], or (y, the last W - 1 inputs), of x [B, C, T] and weight [C, W]."""
    for name, value in (("seq_idx", seq_idx), ("final_states_out", final_states_out)):
        if value is not None:
            raise NotImplementedError(f"the stand-in for the convolution takes no {name}")
    y, new = causal_conv.reference(x, weight, bias, state=initial_states, activation=_known(activation))
    return (y, new) if return_final_states else y


def conv_step(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """y of one token x [B, C] or some [B, C, T]; `conv_state` [B, C, L] takes them in."""
    rows = x.unsqueeze(-1) if x.dim() == 2 else x
    y, new = causal_conv.reference(rows, weight, bias, state=conv_state, activation=_known(activation))
    conv_state.copy_(new)
    return y.squeeze(-1) if x.dim() == 2 else y


def _filled(size: int, value: float, there: bool, factory: dict[str, Any]) -> nn.Parameter | None:
    return nn.Parameter(torch.full((size,), value, **factory)) if there else None


def _known(activation: str | None) -> str | None:
    if activation not in _ACTIVATIONS:
        raise NotImplementedError(f"the stand-in knows no activation {activation!r}")
    return _ACTIVATIONS[activation]


def _maker(stand_in: Any) -> Any:
    def make(real: Any) -> Any:
        """The installed object, else the stand-in."""
        return real or stand_in

    return make


make_chunk_gated_delta_rule = make_fused_recurrent_gated_delta_rule = _maker(delta_per_head)
make_chunk_kda = make_fused_recurrent_kda = _maker(delta_per_channel)
make_fused_kda_gate = _maker(channel_gate)
make_FusedRMSNormGated = _maker(GatedNorm)
make_RMSNorm = _maker(Norm)
make_ShortConvolution = _maker(Convolution)
make_causal_conv1d_fn = _maker(conv_rows)
make_causal_conv1d_update = _maker(conv_step)
