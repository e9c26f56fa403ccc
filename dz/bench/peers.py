"""Other people's implementations, measured beside ours where they can be imported. None is ever required."""

from __future__ import annotations

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


PEERS = (
    Peer(op="index_topk", name="torch.topk", make=_topk, note="unordered, ties in no fixed order"),
    Peer(op="rms_norm", name="torch", make=_rms_norm, note="an addition and F.rms_norm"),
    Peer(op="gated_activation", name="torch", make=_gated, note="F.silu and a product, no clamps"),
    Peer(op="residual_mix", name="fla", needs="fla", make=_attnres, note="after an addition by torch"),
)
