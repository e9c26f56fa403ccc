"""Every tensor of a checkpoint into weights: plain ones, and quantised ones with their parts joined and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dz.core import jsonio
from dz.core.headers import TensorInfo
from dz.weights.families import awq, fp8, gptq, integers, mxfp4, mxfp8, nvfp4
from dz.weights.families.base import Declared, Family, Form, Stored, conflict

# Asked in this order: the more particular shapes first.
FAMILIES: dict[str, Family] = {
    f.name: f for f in (mxfp4.FAMILY, nvfp4.FAMILY, mxfp8.FAMILY, fp8.FAMILY, gptq.FAMILY, awq.FAMILY, integers.FAMILY)
}
# The last part of a tensor's name that makes it a part of a quantised weight.
LEAVES = frozenset(
    {
        *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
        *("weight_shape", "weight_zero_point", "weight_g_idx", "input_scale", "input_global_scale", "scale", "scales"),
        *("qweight", "qzeros", "g_idx", "biases", "activation_scale"),
    }
)
SUFFIXES = ("_weight_scale_2", "_weight_scale", "_input_scale", "_scale_inv", "_blocks", "_scales", "_scale")
SIDE = frozenset({"input_scale", "input_global_scale", "activation_scale", "_input_scale"})  # of activations
_VALUES = frozenset({"weight", "weight_packed", "qweight", "_blocks", ""})
_QUANTISED = frozenset({"U8", "I8", "I32", "U32", *fp8.VALUES, "F4"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognised:
    """`stored` are quantised weights by logical name, `plain` the names of all other tensors; `declared` is what the
    configuration says; `notes` are what a reader should know."""

    stored: dict[str, Stored]
    plain: tuple[str, ...]
    declared: tuple[Declared, ...]
    notes: tuple[str, ...] = ()


def quantization(config: Mapping[str, Any], folder: Path | None = None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(the quantisation's description, the configuration that holds it). It stands in `quantization_config` at the top
    or inside the language model's, in `quantization`, or in a file hf_quant_config.json of the repository."""
    inner = [v for v in config.values() if isinstance(v, Mapping)]
    for owner in (config, *inner):
        for key in ("quantization_config", "compression_config"):
            if isinstance(found := owner.get(key), Mapping):
                return found, owner
    if isinstance(found := config.get("quantization"), Mapping):
        return found, config
    if folder is not None and (folder / "hf_quant_config.json").is_file():
        data = jsonio.read(folder / "hf_quant_config.json")
        if isinstance(data, Mapping) and isinstance(data.get("quantization"), Mapping):
            return {"quant_method": "modelopt", **data["quantization"]}, config
    return {}, config


def recognise(headers: Mapping[str, TensorInfo], config: Mapping[str, Any], folder: Path | None = None) -> Recognised:
    """The weights of a checkpoint. Raises Refused when headers and configuration disagree: a quantised weight of a
    family, a layout or a group that is not declared, a declared family of which there is none, a weight cut from its
    scales. Nothing is read but headers."""
    quant, owner = quantization(config, folder)
    said = tuple(d for f in FAMILIES.values() if (d := f.declared(quant, owner)) is not None)
    stored: dict[str, Stored] = {}
    plain: list[str] = []
    seen: dict[Any, tuple[str, Form] | None] = {}
    for stem, parts in joined(headers).items():
        found = _form(parts, seen) if len(parts) > 1 else None
        if found is None:
            _refuse_torn(stem, parts, said)
            plain += [i.name for i in parts.values()]
            continue
        name, form = found
        form = _settled(stem, name, form, parts, said)
        logical = stem if "_blocks" in parts or "" in parts else f"{stem}.weight"
        size = sum(i.bytes for i in parts.values())
        stored[logical] = Stored(
            name=logical, family=name, form=form, parts={r: i.name for r, i in parts.items()}, bytes=size
        )
    return Recognised(stored=stored, plain=tuple(plain), declared=said, notes=_absent(headers, stored, said, quant))


def joined(headers: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """The tensors by weight: stem -> role -> tensor. A tensor whose name tells no role is a stem with the role ""."""
    out: dict[str, dict[str, TensorInfo]] = {}
    for name, info in headers.items():
        stem, dot, leaf = name.rpartition(".")
        if dot and leaf in LEAVES:
            out.setdefault(stem, {})[leaf] = info
            continue
        role = next((s for s in SUFFIXES if leaf.endswith(s) and leaf != s), "")
        out.setdefault(name[: len(name) - len(role)] if role else name, {})[role] = info
    return out


def _form(parts: Mapping[str, TensorInfo], seen: dict[Any, tuple[str, Form] | None]) -> tuple[str, Form] | None:
    key = tuple((r, i.dtype, i.shape) for r, i in parts.items())
    if key not in seen:
        seen[key] = next(((f.name, form) for f in FAMILIES.values() if (form := f.match(parts)) is not None), None)
    return seen[key]


def _settled(stem: str, family: str, form: Form, parts: Mapping[str, TensorInfo], said: tuple[Declared, ...]) -> Form:
    """The form as declared. Raises Refused where the declaration contradicts it."""
    mine = next((d for d in said if d.family == family), None)
    if mine is None:
        others = ", ".join(f"{d.family} by {d.producer}" for d in said) or "no quantisation that dz knows"
        raise conflict(f"{stem} is stored as {family} ({form.layout})", f"the configuration declares {others}")
    settled = FAMILIES[family].settle(form, mine)
    if settled is None:
        sizes, wanted = (" x ".join(str(g or "row") for g in group or ()) for group in (form.group, mine.group))
        raise conflict(f"{stem} has one scale for {sizes} values", f"{mine.producer} declares {wanted}")
    if settled.layout not in mine.layouts:
        layouts = " or ".join(mine.layouts)
        raise conflict(f"{stem} is {family} in the layout '{settled.layout}'", f"{mine.producer} writes '{layouts}'")
    if mine.activations == "dynamic" and SIDE & parts.keys():
        raise conflict(f"{stem} has a stored scale for its activations", "the configuration says they are dynamic")
    return settled


def _refuse_torn(stem: str, parts: Mapping[str, TensorInfo], said: tuple[Declared, ...]) -> None:
    """Refuse values and scales that lie side by side and fit no family, and codes of a declared family alone."""
    values = next((parts[r] for r in ("weight_packed", "qweight", "_blocks", "weight", "") if r in parts), None)
    if values is None or values.dtype not in _QUANTISED:
        return
    scales = [r for r in parts if r not in _VALUES and ("scale" in r or r == "qzeros")]
    if scales and set(scales) - SIDE:
        rows = ", ".join(f"{r.lstrip('_')} {i.dtype} {list(i.shape)}" for r, i in parts.items())
        raise conflict(f"{stem} fits no format that dz knows", rows)
    alone = values.dtype in fp8.VALUES or any(r in parts for r in ("weight_packed", "qweight", "_blocks"))
    if said and alone and len(values.shape) > 1:
        names = ", ".join(d.family for d in said)
        raise conflict(f"{stem} is {values.dtype} {list(values.shape)} without its scales", f"declared is {names}")


def _absent(
    headers: Mapping[str, TensorInfo],
    stored: Mapping[str, Stored],
    said: tuple[Declared, ...],
    quant: Mapping[str, Any],
) -> tuple[str, ...]:
    there = {s.family for s in stored.values()}
    if headers:
        for d in said:
            if d.family not in there:
                raise conflict(
                    f"no {d.family} weight, though the configuration declares it ({d.producer})", "headers hold none"
                )
    if quant and not said:
        method = quant.get("quant_method") or quant.get("quant_algo") or "a quantisation without a name"
        return (f"the configuration declares {method}, which dz does not know: bytes are counted as stored",)
    return ()
