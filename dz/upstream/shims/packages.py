"""Shims for packages of kernels that code written for GPUs imports without asking, where they are not installed.

What is declared for a package by its top name is given from whichever of its modules the code names."""

from __future__ import annotations

from dz.upstream.shims.shim import Shim, Symbol


def _symbols(module: str, home: str, *names: str) -> tuple[Symbol, ...]:
    return tuple(Symbol(module=module, name=n, make=f"{home}:make_{n}") for n in names)


_PADDING = ("index_first_axis", "pad_input", "unpad_input")
_DELTA = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
_KDA = ("chunk_kda", "fused_recurrent_kda")
_MODULES = ("FusedRMSNormGated", "RMSNorm", "ShortConvolution")

PACKAGES = (
    Shim(
        name="flash-attn",
        stands_for="flash_attn: attention kernels and the helpers that take padding out and put it back",
        releases="flash-attn 2",
        safe="the same softmax attention in torch, float32 inside; arguments that it would have to ignore raise",
        symbols=(*_symbols("flash_attn", "flash", "flash_attn_func", "flash_attn_varlen_func", *_PADDING),),
    ),
    Shim(
        name="fla",
        stands_for="fla: the gated delta rule (per head and per channel), gated norms and short convolutions",
        releases="flash-linear-attention 0.2 to 0.5",
        safe="the ops' own references of dz, token by token and in float32; arguments that they do not know raise",
        symbols=(
            *_symbols("fla.ops.gated_delta_rule", "linear", *_DELTA),
            *_symbols("fla.ops", "linear", *_DELTA, *_KDA),
            *_symbols("fla.ops.kda", "linear", *_KDA),
            *_symbols("fla.ops.kda.gate", "linear", "fused_kda_gate"),
            *_symbols("fla.modules", "linear", *_MODULES),
            *_symbols("fla.modules.convolution", "linear", "ShortConvolution"),
            *_symbols("fla.modules.fused_norm_gate", "linear", "FusedRMSNormGated"),
            *_symbols("fla.layers.utils", "flash", "get_unpad_data", "index_first_axis", "pad_input"),
        ),
    ),
    Shim(
        name="causal-conv1d",
        stands_for="causal_conv1d: the short causal convolution and its one-token step",
        releases="causal-conv1d 1.2 to 1.5",
        safe="the op's own reference of dz; the step writes its state in place as the kernel does",
        symbols=_symbols("causal_conv1d", "linear", "causal_conv1d_fn", "causal_conv1d_update"),
    ),
)
