"""Devices of torch.xpu."""

from __future__ import annotations

from dz.backends.base import Accelerator, Backend


def _formats(arch: int | None) -> tuple[str, ...]:
    """The formats of the matrix engines."""
    return ("float32", "bfloat16", "float16", "int8")


def _active() -> bool:
    import torch

    return getattr(torch.version, "xpu", None) is not None


BACKEND: Backend = Accelerator(
    kind="xpu", module="xpu", wants="an XPU build of torch", graph="XPUGraph", formats=_formats, active=_active
)
