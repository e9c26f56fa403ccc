"""Checkpoint tensors into an upstream model by upstream's own mapping, all accounted for in both directions."""

from __future__ import annotations

import fnmatch
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from dz.core.headers import TensorInfo
from dz.core.inventory import Coverage
from dz.errors import Refused
from dz.upstream import padding
from dz.upstream.build import Built
from dz.upstream.numbering import numbering_faults
from dz.upstream.targets import targets

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
PLAIN = {"F16", "BF16", "F32", "F64"}
WIDE = {"BOOL", "I16", "I32", "I64", "U16", "U32", "U64"}


class _Lazy:
    """A tensor that exists only while upstream's mapping asks for it; remembers that it was asked."""

    def __init__(self, info: TensorInfo, get: Callable[[], torch.Tensor]) -> None:
        self.info, self._get, self.used = info, get, False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.used = True
        return self._get()[index]

    def get_shape(self) -> list[int]:
        return list(self.info.shape)

    def get_dtype(self) -> str:
        return self.info.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.info.shape)

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.info.dtype]


def coverage(built: Built, headers: Mapping[str, TensorInfo], ignore: list[str] | None = None) -> Coverage:
    """What a load would do, worked out on meta tensors: nothing is read and the model is unchanged.

    `headers` maps tensor names to their infos; `ignore` are globs of tensors that a recipe allows to stay unloaded."""
    kept = dict(_named(built.model))
    lazies = {n: _Lazy(i, _meta(i)) for n, i in headers.items()}
    try:
        return _load(built, lazies, "meta", ignore or [])
    finally:
        for name, value in kept.items():
            _put(built.model, name, value)


def load(
    built: Built,
    headers: Mapping[str, TensorInfo],
    get: Callable[[str], torch.Tensor],
    device: str,
    ignore: list[str] | None = None,
) -> Coverage:
    """Load every tensor through upstream's mapping onto `device`; `get(name)` reads one tensor. Tied weights are tied.

    Raises Refused when anything is missing, unexpected or of another shape; the three are listed apart."""
    lazies = {n: _Lazy(i, lambda n=n: get(n)) for n, i in headers.items()}
    found = _load(built, lazies, device, ignore or [])
    refuse_incomplete(found)
    model = built.model
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    left = [n for n, p in _named(model) if p.device.type == "meta"]
    if left:
        raise Refused(
            f"{len(left)} parameters were not loaded",
            _some(left),
            "dz fetch MODEL --force, then report it if it stays",
            code="not_loaded",
        )
    _move_buffers(model, device)
    model.requires_grad_(False)
    return found


def refuse_incomplete(found: Coverage) -> None:
    """Raise Refused with the three lists unless the coverage is complete."""
    if found.complete:
        return
    parts = [
        f"{len(names)} {word}: {_some(names)}"
        for word, names in (
            ("missing", found.missing),
            ("unexpected", found.unexpected),
            ("shape changed", found.shape_changed),
        )
        if names
    ]
    raise Refused(
        "the checkpoint does not fit its model class",
        "; ".join(parts),
        "fetch it again (`dz fetch MODEL --force`), or name tensors to ignore in a recipe",
        code="coverage",
    )


def _some(names: tuple[str, ...] | list[str], most: int = 8) -> str:
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def _load(built: Built, lazies: dict[str, _Lazy], device: str, ignore: list[str]) -> Coverage:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    model = built.model
    before = dict(model.state_dict())
    lazies, narrowed = _narrowed(built, lazies, before)
    mapping = get_model_conversion_mapping(model)
    if device == "meta":
        for rule in mapping:
            if getattr(rule, "force_cpu", False):  # a meta tensor cannot be copied to the host, nor needs to be
                rule.force_cpu = False
    settings = {
        "weight_mapping": mapping,
        "dtype": built.dtype,
        "dtype_plan": _dtype_plan(model, built.dtype),
        "device_map": {"": device},
    }
    known = inspect.signature(LoadStateDictConfig).parameters
    config = LoadStateDictConfig(**{k: v for k, v in settings.items() if k in known})
    with _one_by_one():
        answer = convert_and_load_state_dict_in_model(model, dict(lazies), config, None)
    info = answer[0] if isinstance(answer, tuple) else answer
    found = _account(built, before, lazies, info, ignore, numbering_faults(mapping, lazies))
    return replace(found, narrowed=narrowed)


def _narrowed(
    built: Built, lazies: dict[str, _Lazy], held: Mapping[str, torch.Tensor]
) -> tuple[dict[str, _Lazy], dict[str, str]]:
    """(the tensors, padded vectors cut to what counts; how many values of each cut one count, in words)."""
    vectors = {n: lazy.info for n, lazy in lazies.items() if len(lazy.info.shape) == 1}
    short = padding.longer(vectors, targets(built, vectors), held)
    out = dict(lazies)
    for name, count in short.items():
        whole = lazies[name]
        info = replace(whole.info, shape=(count,))
        out[name] = _Lazy(info, lambda n=name, w=whole, c=count: padding.cut(n, w[...], c))
    return out, {n: f"{c} of {lazies[n].info.shape[0]}" for n, c in short.items()}


def _account(
    built: Built,
    before: dict[str, torch.Tensor],
    lazies: dict[str, _Lazy],
    info: Any,
    ignore: list[str],
    numbering: tuple[list[str], list[str]],
) -> Coverage:
    model = built.model
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    optional = _patterns(model, "_keys_to_ignore_on_load_missing")
    changed = [_shape_fault(m) for m in getattr(info, "mismatched_keys", ())]
    faulty = {str(m[0]) if isinstance(m, tuple) else str(m) for m in getattr(info, "mismatched_keys", ())}
    changed += [f"{k}: {' '.join(str(v).split())}" for k, v in (getattr(info, "conversion_errors", None) or {}).items()]
    changed += _cast_faults(before, lazies)
    missing = {
        k
        for k in getattr(info, "missing_keys", ())
        if k not in tied and k not in faulty and not any(p.search(k) for p in optional)
    }
    unused = [n for n, lazy in lazies.items() if not lazy.used and n not in tied]
    by_class = _patterns(model, "_keys_to_ignore_on_load_unexpected")
    ignored: dict[str, int] = {}
    ignored_by: dict[str, str] = {}
    for name in list(unused):
        reason = next((f"class: {p.pattern}" for p in by_class if p.search(name)), None) or next(
            (f"recipe: {g}" for g in ignore if fnmatch.fnmatchcase(name, g)), None
        )
        if reason:
            ignored[name], ignored_by[name] = lazies[name].info.bytes, reason
    unexpected = {n for n in unused if n not in ignored}
    return Coverage(
        matched=sum(lazy.used for lazy in lazies.values()),
        missing=tuple(sorted(missing | set(numbering[0]))),
        unexpected=tuple(sorted(unexpected | set(numbering[1]))),
        shape_changed=tuple(sorted(set(changed))),
        ignored=ignored,
        ignored_by=ignored_by,
        tied=tuple(sorted(tied)),
    )


def _shape_fault(entry: Any) -> str:
    if isinstance(entry, tuple) and len(entry) == 3:
        return f"{entry[0]}: checkpoint {list(entry[1])}, model {list(entry[2])}"
    return str(entry)


def _cast_faults(before: dict[str, torch.Tensor], lazies: dict[str, _Lazy]) -> list[str]:
    """Packed or quantised tensors that a float parameter would take as numbers: silent garbage, so a fault."""
    out = []
    for name, lazy in lazies.items():
        target, stored = before.get(name), lazy.info.dtype
        if not lazy.used or stored in PLAIN:
            continue
        # wide integers may be renamed on the way (tables of ids); packed bytes keep their name or are converted
        lost = target.is_floating_point() and target.dtype != lazy.dtype if target is not None else stored not in WIDE
        if lost:
            out.append(f"{name}: stored as {stored}, a packed or quantised form that this class does not take")
    return out


def _patterns(model: Any, attribute: str) -> list[re.Pattern[str]]:
    return [re.compile(p) for p in (getattr(model, attribute, None) or ())]


def _dtype_plan(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    plan = getattr(model, "_get_dtype_plan", None)
    return plan(dtype) if plan is not None else {}


def _named(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        module = model.get_submodule(name.rpartition(".")[0])
        if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
            yield name, buffer


def _put(model: Any, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    table = module._parameters if leaf in module._parameters else module._buffers
    table[leaf] = value


def _move_buffers(model: Any, device: str) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _meta(info: TensorInfo) -> Callable[[], torch.Tensor]:
    return lambda: torch.empty(info.shape, dtype=TORCH_DTYPES.get(info.dtype, torch.uint8), device="meta")


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Upstream reads tensors on threads, ahead of their use; one by one keeps the host's peak near the model."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
