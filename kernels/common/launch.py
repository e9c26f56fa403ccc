"""What every Triton kernel of this tree does around its launch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor


def on(x: Tensor) -> AbstractContextManager:
    """The context in which x's device is the current one: Triton launches on the current device, not on x's."""
    if x.device.type == "cpu":
        return nullcontext()
    return torch.get_device_module(x.device).device(x.device)


def rows(x: Tensor) -> Tensor:
    """`x` [..., D] as [R, D] with any strides: a view where the leading axes allow one, else a copy."""
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])


def power_of_two(n: int, low: int = 1) -> int:
    """The smallest power of two that is at least n and `low`."""
    return max(low, triton.next_power_of_2(max(n, 1)))


def warps_for(elements: int) -> int:
    """Warps of a program that holds so many elements in registers: about 16 for each of a warp's 32 threads."""
    return min(16, max(1, power_of_two(elements // 512)))
