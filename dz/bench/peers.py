"""Other people's implementations, measured beside ours where they can be imported. None is ever required."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

Args = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """`make(args)` prepares and returns the call to time; `needs` is the package that must be importable; `note` says
    what it does more or less than the op."""

    op: str
    name: str
    make: Callable[[Args], Callable[[], Any]]
    needs: str = "torch"
    note: str = ""

    def missing(self) -> str:
        """Why it cannot be measured here, or ""."""
        return "" if find_spec(self.needs) else f"the package {self.needs} is not installed"


def _topk(args: Args) -> Callable[[], Any]:
    return lambda: torch.topk(args["scores"], min(args["k"], args["scores"].shape[1]), sorted=False)


def _rms_norm(args: Args) -> Callable[[], Any]:
    x, r, w, eps = args["x"], args.get("residual"), args["weight"], args["eps"]
    if r is None:
        return lambda: F.rms_norm(x, w.shape, w, eps)

    def call() -> tuple[Any, Any]:
        h = x + r
        return F.rms_norm(h, w.shape, w, eps), h

    return call


def _gated(args: Args) -> Callable[[], Any]:
    gate, up = args["gate"].chunk(2, -1) if args.get("up") is None else (args["gate"], args["up"])
    return lambda: F.silu(gate) * up


def _attnres(args: Args) -> Callable[[], Any]:
    from fla.ops.attnres import fused_attnres

    blocks, prefix, delta = list(args["blocks"]), args["prefix"], args["delta"]

    def call() -> Any:
        return fused_attnres(
            query=args["query"],
            residuals=[*blocks, prefix + delta],
            rms_weight=args["norm_weight"],
            output_rms_weight=args.get("out_weight"),
            rms_eps=args["eps"],
        )

    return call


def _kda(args: Args) -> Callable[[], Any]:
    os.environ.setdefault("FLA_FLASH_KDA", "0")  # its own Triton, not another library that it would prefer
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    given = [args[x] for x in ("q", "k", "v", "g", "beta")]
    flags = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    flags |= {"output_final_state": True, "state_v_first": False, "lower_bound": args["lower_bound"]}
    data = {"initial_state": args["state"], "A_log": args["a_log"], "dt_bias": args["dt_bias"]}
    cu = args.get("cu_seqlens")
    data["cu_seqlens"] = None if cu is None else cu.long()
    if args["q"].shape[1] == 1:
        return lambda: fused_recurrent_kda(*given, **flags, **data)
    return lambda: chunk_kda(*given, safe_gate=True, **flags, **data)


def _scaled_grouped(args: Args, *, fast: bool) -> Callable[[], Any]:
    given = (args["x"], args["weight"].transpose(1, 2), args["x_scale"], args["weight_scale"])
    ends = args["offsets"][1:].clone()
    flags = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
    return lambda: torch._scaled_grouped_mm(*given, offs=ends, **flags)  # pyright: ignore[reportPrivateImportUsage]


def _humming(args: Args) -> Callable[[], Any]:
    from humming.layer import HummingLayer

    experts, n, groups = args["scales"].shape
    sizes = {"shape_n": n, "shape_k": groups * 32, "num_experts": experts}
    layer = HummingLayer(**sizes, weight_config={"quant_method": "mxfp4"}, torch_dtype=torch.bfloat16).cuda()
    layer.load_from_tensors({"weight": args["packed"].flatten(2), "weight_scale": args["scales"]})
    layer.transform()
    layout = {"expert_layout": args["offsets"].long(), "compute_config": {"gemm_type": "grouped_contiguous"}}
    return lambda: layer(args["x"], **layout)


def _sort(args: Args) -> Callable[[], Any]:
    flat, experts = args["index"].flatten(), args["experts"]

    def call() -> tuple[Any, Any]:
        return torch.sort(flat, stable=True), torch.bincount(flat.clamp(max=experts), minlength=experts + 1).cumsum(0)

    return call


def _route(args: Args) -> Callable[[], Any]:
    x, correction, k = args["x"], args["correction"], args["top_k"]

    def call() -> tuple[Any, Any]:
        scores = torch.sigmoid(x)
        chosen = torch.topk(scores + correction, k, sorted=False).indices
        picked = scores.gather(1, chosen)
        return picked / (picked.sum(1, keepdim=True) + 1e-20), chosen

    return call


def _combine(args: Args) -> Callable[[], Any]:
    y, places, weight = args["y"], args["places"].clamp(min=0), args["weight"].to(args["y"].dtype)[:, None]
    return lambda: torch.bmm(weight, y[places]).squeeze(1)


def _gated_delta_rule(args: Args) -> Callable[[], Any]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    f = fused_recurrent_gated_delta_rule if args["q"].shape[1] == 1 else chunk_gated_delta_rule
    data = {x: args[x] for x in ("q", "k", "v", "g", "beta")}
    flags = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "initial_state": args["state"]}
    return lambda: f(**data, **flags)


PEERS = (
    Peer(op="index_topk", name="torch.topk", make=_topk, note="unordered, ties in no fixed order"),
    Peer(op="rms_norm", name="torch", make=_rms_norm, note="an addition and F.rms_norm"),
    Peer(op="gated_activation", name="torch", make=_gated, note="F.silu and a product, no clamps"),
    Peer(op="residual_mix", name="fla", needs="fla", make=_attnres, note="after an addition by torch"),
    Peer(op="kda", name="fla", needs="fla", make=_kda),
    Peer(op="gated_delta_rule", name="fla", needs="fla", make=_gated_delta_rule),
    Peer(
        op="grouped_gemm_fp8",
        name="torch._scaled_grouped_mm",
        make=lambda args: _scaled_grouped(args, fast=False),
        note="sums promoted to fp32",
    ),
    Peer(
        op="grouped_gemm_fp8",
        name="torch._scaled_grouped_mm fast",
        make=lambda args: _scaled_grouped(args, fast=True),
        note="sums as the tensor cores keep them",
    ),
    Peer(op="grouped_gemm_mxfp4", name="humming", needs="humming", make=_humming, note="weights repacked before"),
    Peer(op="router", name="torch", make=_route, note="sigmoid, top-k in no order, no groups"),
    Peer(op="expert_permute", name="torch", make=_sort, note="a stable sort, counts; no places"),
    Peer(op="expert_combine", name="torch", make=_combine, note="gathered, then a batched product; all experts here"),
)
