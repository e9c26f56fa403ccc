"""Indexed safetensors files as a checkpoint: mapped one at a time, handed out without a copy."""

from __future__ import annotations

import math
from typing import Any

import torch

from dz.weights.checkpoint import Checkpoint
from dz.weights.formats import torch_dtype, torch_shape
from dz.weights.table import Table


class SafetensorsCheckpoint(Checkpoint):
    """Tensors are views of a private mapping of their shard: reading costs page cache and no memory of the process's
    own; writing to one would copy its pages, never change the file. Opening another shard lets go of the last one."""

    def __init__(self, name: str, table: Table) -> None:
        super().__init__(name, table.headers())
        self._table = table
        self._shard, self._storage = "", None

    def get(self, name: str) -> torch.Tensor:
        """One tensor; where its offset in the file is not a multiple of its element size, a copy."""
        info = self.info(name)
        dtype, shape = torch_dtype(info), torch_shape(info)
        if info.bytes == 0:
            return torch.empty(shape, dtype=dtype)
        entry = self._table.entries[name]
        storage = self._map(entry.shard)
        if entry.offset % dtype.itemsize:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage, entry.offset, (info.bytes,), (1,))
            return raw.clone().view(dtype).view(shape)
        flat = torch.empty(0, dtype=dtype)
        return flat.set_(storage, entry.offset // dtype.itemsize, (math.prod(shape),), (1,)).view(shape)

    def _map(self, shard: str) -> Any:  # an UntypedStorage; torch's stubs know neither from_file's type nor set_'s
        if self._shard != shard:
            self.close()
            path = self._table.folder / shard
            self._storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
            self._shard = shard
        return self._storage

    def close(self) -> None:
        """Unmap the open shard, as soon as no tensor of it is in use."""
        self._shard, self._storage = "", None
