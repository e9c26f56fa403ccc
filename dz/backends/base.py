"""What every hardware file provides, and the part that torch gives all accelerators in one form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dz.core.device import Device


class Backend(Protocol):
    """One kind of hardware, as seen by this process."""

    @property
    def kind(self) -> str:
        """The name in plans and on the command line."""
        ...

    def count(self) -> int:
        """How many devices this process sees; 0: none."""
        ...

    def absent(self) -> str:
        """Why there is none, in words."""
        ...

    def describe(self) -> Device:
        """The first device; call it only when `count()` is not 0."""
        ...

    def memory(self, index: int) -> tuple[int, int]:
        """(free, total) bytes of one device."""
        ...

    def dtypes(self, arch: int | None) -> tuple[str, ...]:
        """The formats with native arithmetic on an architecture."""
        ...

    def graph_class(self) -> type | None:
        """The class that captures a device graph, None without graphs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A backend on torch's own device module (torch.cuda, torch.xpu, torch.npu, ...), which all speak alike.

    `module` is its name in torch; `active` says whether this build of torch drives this kind through it (two kinds
    share torch.cuda); `arch` reads the architecture of device 0; `formats` are the native dtypes of an architecture;
    `graph` names the capture class in the module; `wants` says what is needed for the kind to appear."""

    kind: str
    module: str
    wants: str
    graph: str
    formats: Callable[[int | None], tuple[str, ...]]
    active: Callable[[], bool] = lambda: True
    arch: Callable[[Any], int | None] = lambda module: None

    def count(self) -> int:
        """How many devices torch sees; 0 when its module for them is not in this build."""
        module = self._module()
        return module.device_count() if module is not None and self.active() and module.is_available() else 0

    def absent(self) -> str:
        """Why there is none."""
        if self._module() is None or not self.active():
            return f"this build of torch has no {self.kind}; it needs {self.wants}"
        return "torch sees no such device: no driver, or none is visible to this process"

    def describe(self) -> Device:
        """Name, architecture and memory of device 0."""
        module: Any = self._module()
        arch = self.arch(module)
        return Device(
            kind=self.kind,
            name=module.get_device_name(0),
            arch=arch,
            memory=self.memory(0)[1],
            dtypes=self.formats(arch),
        )

    def memory(self, index: int) -> tuple[int, int]:
        """(free, total) bytes as the driver reports them."""
        module: Any = self._module()
        free, total = module.mem_get_info(index)
        return int(free), int(total)

    def dtypes(self, arch: int | None) -> tuple[str, ...]:
        """The native formats of an architecture."""
        return self.formats(arch)

    def graph_class(self) -> type | None:
        """The module's capture class, None if this build has none."""
        return getattr(self._module(), self.graph, None)

    def _module(self) -> Any:
        import torch

        return getattr(torch, self.module, None)
