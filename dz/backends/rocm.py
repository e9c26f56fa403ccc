"""Devices of torch.cuda in a ROCm build of torch (HIP behind the same module)."""

from __future__ import annotations

from dz.backends.base import Accelerator, Backend


def _active() -> bool:
    import torch

    return getattr(torch.version, "hip", None) is not None


def _formats(arch: int | None) -> tuple[str, ...]:
    """Formats of the CDNA matrix cores. FP8 is left to the profile: its encoding (fnuz or OCP) changed between two
    generations, and a guess would be silently wrong by a factor of two."""
    return ("float32", "bfloat16", "float16", "int8")


BACKEND: Backend = Accelerator(
    kind="rocm", module="cuda", wants="a ROCm build of torch", graph="CUDAGraph", formats=_formats, active=_active
)
