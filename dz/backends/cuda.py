"""Devices of torch.cuda in a CUDA build of torch."""

from __future__ import annotations

from typing import Any

from dz.backends.base import Accelerator, Backend


def _active() -> bool:
    import torch

    return torch.version.cuda is not None


def _arch(module: Any) -> int:
    """The compute capability of device 0 as an integer: (9, 0) -> 90."""
    major, minor = module.get_device_capability(0)
    return 10 * major + minor


def _formats(arch: int | None) -> tuple[str, ...]:
    """Formats with tensor-core arithmetic, by compute capability (CUDA C++ programming guide, arithmetic table)."""
    out = ["float32", "float16", "int8"]
    level = arch or 0
    if level >= 80:
        out.append("bfloat16")
    if level >= 89:
        out += ["float8_e4m3fn", "float8_e5m2"]
    if level >= 100:
        out.append("float4_e2m1fn_x2")
    return tuple(out)


BACKEND: Backend = Accelerator(
    kind="cuda",
    module="cuda",
    wants="a CUDA build of torch",
    graph="CUDAGraph",
    formats=_formats,
    active=_active,
    arch=_arch,
)
