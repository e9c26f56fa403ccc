"""Launch configurations as data: a default beside each kernel, overlaid by what was tuned for a device.

`kernels/<op>/tuned.json` holds `{"<device name>": {"<technique>": {"<bucket>": {...}}}}`. It is read once; nothing is
tuned inside a request. A bucket is a name that a kernel gives to a range of shapes ("default" if it needs only one).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

from dz.shipped import folders


@cache
def _table(op: str) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    table: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    for root in folders("kernels"):
        path = root / op / "tuned.json"
        if path.is_file():
            table.update(json.loads(path.read_text("utf-8")))
    return table


@cache
def device_name(device: torch.device) -> str:
    """The name under which tuned values are kept: the marketing name of a CUDA device, else the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 2 elsewhere, so that loops over several programs are exercised."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@dataclass(slots=True)
class Tunable:
    """The launch parameters of one kernel. `space` lists, by bucket, the combinations that `dz bench tune` tries."""

    key: str
    defaults: Mapping[str, int]
    space: Mapping[str, list[dict[str, int]]] = field(default_factory=dict)
    _override: dict[str, int] | None = None

    def pick(self, device: torch.device, bucket: str = "default") -> dict[str, int]:
        """The defaults, overlaid by the tuned values of this device and bucket, overlaid by `override`."""
        if self._override is not None:
            return {**self.defaults, **self._override}
        op, _, technique = self.key.partition("/")
        return {**self.defaults, **_table(op).get(device_name(device), {}).get(technique, {}).get(bucket, {})}

    @contextmanager
    def override(self, values: Mapping[str, int]) -> Iterator[None]:
        """Within this context `pick` returns these values over the defaults, whatever was tuned."""
        before, self._override = self._override, dict(values)
        try:
            yield
        finally:
            self._override = before
