"""What every checkpoint offers, whatever format it is in, and the door to open one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from dz.core.headers import TensorInfo
from dz.core.source import Source
from dz.errors import Refused, UsageError
from dz.weights.table import read_table

if TYPE_CHECKING:
    import torch

LoadFormat = Literal["auto", "dummy"]


class Checkpoint(ABC):
    """Tensors by name. `infos` lists them in reading order; nothing is read before it is asked for.

    Tensors may be views of mapped files: copy what is to be kept or changed, and drop them before the next shard is
    opened, then never more than one shard is mapped."""

    def __init__(self, name: str, infos: dict[str, TensorInfo]) -> None:
        self.name = name
        self._infos = infos

    def names(self) -> list[str]:
        """All tensor names in reading order."""
        return list(self._infos)

    def headers(self) -> dict[str, TensorInfo]:
        """All tensors' dtype, shape and bytes, in reading order."""
        return dict(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and bytes of one tensor. Raises UsageError with the nearest name."""
        if name not in self._infos:
            raise _unknown(name, self.name, list(self._infos))
        return self._infos[name]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(i.bytes for i in self._infos.values())

    @abstractmethod
    def get(self, name: str) -> torch.Tensor:
        """One whole tensor, in its stored dtype and shape (`formats.torch_dtype` says how each is held)."""

    def slice(self, name: str, index: Any) -> torch.Tensor:
        """`get(name)[index]`; of a mapped file only the pages that the slice covers are read."""
        return self.get(name)[index]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, in reading order, with one shard open at a time."""
        for name in self._infos:
            yield name, self.get(name)

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    @abstractmethod
    def close(self) -> None:
        """Let go of whatever is open; the checkpoint can be used again afterwards."""


def open_checkpoint(source: Source, *, load_format: LoadFormat = "auto", seed: int = 0) -> Checkpoint:
    """The checkpoint of a source: its weights, or with "dummy" random tensors of the same names, dtypes and shapes.

    Reads every header at once and raises Refused, with all faults, before any tensor is touched."""
    table = read_table(source)
    if load_format == "dummy":
        from dz.weights.dummy import DummyCheckpoint

        return DummyCheckpoint(source.name, table.headers(), seed=seed)
    if load_format != "auto":
        raise UsageError(f"--load-format {load_format}", "it is auto or dummy", "leave it out", code="bad_load_format")
    if source.headers:
        raise Refused(
            f"{source.name} has no weights here",
            f"of its {len(table.layout.shards)} weight files only the headers were fetched",
            f"dz fetch {source.name}",
            code="headers_only",
        )
    from dz.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.name, table)


def _unknown(name: str, where: str, names: list[str]) -> UsageError:
    import difflib

    near = difflib.get_close_matches(name, names, 1)
    why = f"did you mean '{near[0]}'?" if near else f"it has {len(names):,} others"
    return UsageError(f"{where} has no tensor '{name}'", why, "look into its index", code="unknown_tensor")
