"""Build an upstream model with its parameters on meta and its computed buffers real."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dz.core.source import Source
from dz.errors import Refused, UsageError
from dz.upstream.config import architecture

_EMPTY = {torch.empty, torch.empty_strided, torch.empty_like}
_LARGE = {torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.normal}
_REAL_LIMIT = 1 << 22  # elements; larger constant or random tensors are parameters, never computed buffers


@dataclass(frozen=True, slots=True)
class Built:
    """`decoder` holds the embeddings, the layers and the final norm; `layers` are its decoder layers, in order; `notes`
    are what upstream's configuration filled in."""

    model: Any
    config: Any
    text_config: Any
    decoder: Any
    layers: list[Any]
    cls: str
    runs: Literal["transformers", "repository"]
    dtype: torch.dtype
    vision: bool
    notes: tuple[str, ...] = ()


def dtype_of(name: str) -> torch.dtype:
    """The floating dtype of this name ("float32", "bfloat16", "float16"). Raises UsageError."""
    found = {
        "float32": torch.float32,
        "float": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "half": torch.float16,
    }.get(name)
    if found is None:
        raise UsageError(
            f"unknown dtype '{name}'",
            "it is one of auto, float32, bfloat16, float16",
            "name one of them with --dtype",
            code="bad_dtype",
        )
    return found


def build_meta(source: Source, *, trust: bool, dtype: torch.dtype | None = None) -> Built:
    """Upstream's model of a repository: parameters on meta, non-persistent buffers computed. `dtype` defaults to the
    configuration's, else float32. Raises Refused when upstream's class cannot be built."""
    arch = architecture(source, trust=trust)
    if dtype is None:
        dtype = _stated_dtype(arch.config)
    try:
        with parameters_on_meta():
            model = arch.cls._from_config(arch.config, dtype=dtype)
    except Exception as e:
        raise Refused(
            f"{arch.cls.__name__} cannot be built",
            f"{type(e).__name__}: {e}",
            f"compare {source.folder}/config.json with the class",
            code="not_built",
        ) from e
    model.eval().requires_grad_(False)
    _compute_buffers(model)
    decoder = _decoder(model)
    return Built(
        model,
        arch.config,
        arch.text_config,
        decoder,
        _layers(decoder),
        arch.cls.__name__,
        arch.runs,
        dtype,
        arch.vision,
        arch.notes,
    )


def _stated_dtype(config: Any) -> torch.dtype:
    for c in (config, config.get_text_config(decoder=True)):
        value = getattr(c, "dtype", None) or getattr(c, "torch_dtype", None)
        if isinstance(value, torch.dtype):
            return value
        if isinstance(value, str):
            return dtype_of(value)
    return torch.float32


class _OnMeta(TorchFunctionMode):
    """Sends uninitialised and large tensors to meta; small constants stay real, since buffers are made of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (func in _EMPTY and kwargs.get("device") is None) or (
            func in _LARGE and kwargs.get("device") is None and _elements(args, kwargs) > _REAL_LIMIT
        ):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _elements(args: tuple, kwargs: dict[str, Any]) -> int:
    size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list, torch.Size)) else args)
    n = 1
    for d in size:
        if not isinstance(d, int):
            return 0
        n *= d
    return n


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their parameters on meta and the tensors that they compute for real."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        held = self._parameters.get(name)
        if held is not None and held.device.type != "meta":
            self._parameters[name] = nn.Parameter(held.data.to("meta"), requires_grad=False)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        with _OnMeta():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _compute_buffers(model: nn.Module) -> None:
    """Real values for buffers that are on meta: persistent ones come from the checkpoint, the others from upstream's
    own initialisation."""
    for prefix, module in model.named_modules():
        lost = [n for n, b in module.named_buffers(recurse=False) if b is not None and b.device.type == "meta"]
        computed = [n for n in lost if n in module._non_persistent_buffers_set]
        if not computed:
            continue
        for name in computed:
            module._buffers[name] = torch.zeros_like(module.get_buffer(name), device="cpu")
        owner = getattr(model, "_init_weights", None)
        if owner is None:
            raise Refused(
                f"the buffer {prefix}.{computed[0]} cannot be computed",
                "upstream builds it from uninitialised memory and has no initialisation for it",
                "report it with the model's name",
                code="lost_buffer",
            )
        with torch.no_grad():
            owner(module)


def _decoder(model: Any) -> Any:
    """The innermost module that takes tokens and holds the decoder layers."""
    holder, names = _holder(model), {id(m): name for name, m in model.named_modules()}
    name = names.get(id(holder), "")
    while name and "input_ids" not in inspect.signature(type(model.get_submodule(name)).forward).parameters:
        name = name.rpartition(".")[0]
    return model.get_submodule(name) if name else holder


def _holder(model: Any) -> Any:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else getattr(model, model.base_model_prefix)
    while not _layer_lists(decoder) and hasattr(decoder, "get_decoder") and decoder.get_decoder() is not decoder:
        decoder = decoder.get_decoder()
    if _layer_lists(decoder):
        return decoder
    inner = [m for root in (decoder, model) for m in root.modules() if _layer_lists(m)]
    if not inner:
        raise Refused(
            f"{type(model).__name__} has no list of decoder layers",
            "dz finds the decoder as the module with a ModuleList of layers",
            "report it with the model's name",
            code="no_decoder",
        )
    return max(inner, key=lambda m: len(_layer_lists(m)[0]))


def _layer_lists(module: nn.Module) -> list[nn.ModuleList]:
    lists = [c for c in module.children() if isinstance(c, nn.ModuleList) and len(c)]
    named = getattr(module, "layers", None) or getattr(module, "h", None) or getattr(module, "blocks", None)
    return [named] if isinstance(named, nn.ModuleList) and len(named) else lists


def _layers(decoder: nn.Module) -> list[nn.Module]:
    lists = _layer_lists(decoder) or [x for m in decoder.modules() for x in _layer_lists(m)]
    return list(max(lists, key=len))
