"""Tensors that a module computes when it is made and no checkpoint holds, kept over a load.

4.x made models with real tensors. Today's `from_pretrained` makes them on the meta device and fills such buffers with
whatever the memory holds, unless the class computes them a second time: code of 4.x does not, and nothing is raised."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

_KEPT = "_dz_computed"
_inside = False


def computed(cls: Any) -> bool:
    """Keep, on every module of the class that is made on meta, the values that its own buffers would have."""
    if not issubclass(cls, nn.Module) or "__init__" not in cls.__dict__:
        return False
    init = cls.__init__

    @functools.wraps(init)
    def keeping(self: Any, *args: Any, **given: Any) -> None:
        init(self, *args, **given)
        lost = [n for n in self._non_persistent_buffers_set if _on_meta(self._buffers.get(n))]
        if type(self) is cls and lost and not _inside:
            vars(self)[_KEPT] = _values(cls, init, lost, args, given)

    cls.__init__ = keeping
    return True


def restored(cls: Any) -> bool:
    """Put the values back after `from_pretrained`."""
    from transformers import PreTrainedModel

    if not issubclass(cls, PreTrainedModel) or "from_pretrained" in cls.__dict__:
        return False
    load = cls.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(kind: Any, *args: Any, **given: Any) -> Any:
        """As upstream's."""
        out = load(kind, *args, **given)
        _restore(out[0] if isinstance(out, tuple) else out)
        return out

    setattr(cls, "from_pretrained", classmethod(from_pretrained))  # noqa: B010  its own signature stays
    return True


def _restore(model: nn.Module) -> None:
    for module in model.modules():
        for name, value in vars(module).get(_KEPT, {}).items():
            now = module._buffers[name]
            module._buffers[name] = value.to(now.device) if now is not None else value


def _values(cls: Any, init: Any, names: list[str], args: Any, given: Any) -> dict[str, torch.Tensor]:
    """The buffers of a second object that is made with real tensors, parameters left out."""
    from dz.upstream.build import parameters_on_meta

    global _inside
    twin = cls.__new__(cls)
    _inside = True
    try:
        with torch.device("cpu"), parameters_on_meta():
            init(twin, *args, **given)
    finally:
        _inside = False
    return {n: b for n in names if (b := twin._buffers.get(n)) is not None and not _on_meta(b)}


def _on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"
