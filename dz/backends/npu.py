"""Devices of torch.npu, which the package torch_npu adds to torch when it is installed (torch loads it by itself)."""

from __future__ import annotations

from dz.backends.base import Accelerator, Backend


def _formats(arch: int | None) -> tuple[str, ...]:
    """The formats that every generation of these devices computes in."""
    return ("float32", "bfloat16", "float16", "int8")


BACKEND: Backend = Accelerator(
    kind="npu", module="npu", wants="the package torch_npu", graph="NPUGraph", formats=_formats
)
