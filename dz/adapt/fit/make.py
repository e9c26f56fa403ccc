"""Make a fit: read headers and configuration, lay the weights over the devices, look up what would run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dz import backends
from dz.adapt.fit.estimate import estimate
from dz.adapt.fit.model import CachePart, Fit, Format
from dz.adapt.fit.ops import of_sites, of_structure
from dz.adapt.fit.splits import Budget, converted_bytes, splits
from dz.core.collector import paused
from dz.core.device import Device
from dz.core.headers import TensorInfo
from dz.core.index import is_weight
from dz.core.registry import Registry
from dz.core.source import Source
from dz.errors import Refused
from dz.inspect import reduced
from dz.inspect.ledger import Ledger, Structure, ledger
from dz.inspect.outline import Outline, outline
from dz.inspect.reduced import Reduced
from dz.settings import Settings
from dz.upstream.config import architecture, raw_config
from dz.weights.families import FAMILIES, recognise
from dz.weights.table import read_table

_NATIVE = {  # the dtype in which a device must compute to use a format as it is stored; the others are unpacked
    "mxfp4": "float4_e2m1fn_x2", "nvfp4": "float4_e2m1fn_x2", "mxfp8": "float8_e4m3fn", "fp8": "float8_e4m3fn",
    "F8_E4M3": "float8_e4m3fn", "BF16": "bfloat16", "F16": "float16", "F32": "float32", "I8": "int8",
}  # fmt: skip
DISAGREE = 0.15  # a configuration and headers that differ by more in parameters are worth a note


@paused()
def make_fit(source: Source, *, trust: bool, device: str, settings: Settings, registry: Registry | None = None) -> Fit:
    """The fit of a source on a device by profile ("H200x8"). Nothing is written and no weight is read; code of the
    repository runs only under `trust`.

    Raises Refused when headers and configuration contradict each other, UsageError for an unknown device."""
    registry = registry or Registry.discover()
    found = backends.profile(device)
    raw = raw_config(source)
    notes: list[str] = []
    complete = _complete(source, raw, trust, notes)
    shape = outline(complete if complete is not None else raw)
    headers = _headers(source)
    if not headers:
        weights, band, reason = estimate(raw, shape)
        return assemble(source, shape, weights, found, settings, registry, "configuration", (band, reason), notes)
    recognised = recognise(headers, raw, source.path)
    structure = Structure(headers, recognised, shape)
    weights, known, read = ledger(headers, structure), "headers", None
    if complete is not None:
        read = _with_class(source, raw, complete, headers, structure, trust, registry, notes)
    if read is not None:
        weights, known = read.ledger, "headers and class"
    notes += [*recognised.notes, *_cross_check(weights, shape)]
    return assemble(
        source, shape, weights, found, settings, registry, known, (0.0, "headers give every byte"), notes, read
    )


def _with_class(
    source: Source,
    raw: Mapping[str, Any],
    complete: Mapping[str, Any],
    headers: Mapping[str, TensorInfo],
    structure: Structure,
    trust: bool,
    registry: Registry,
    notes: list[str],
) -> Reduced | None:
    """The model read through its class; None with a note where that cannot be built."""
    try:
        found = reduced.read(source, raw, complete, headers, structure, trust=trust, registry=registry)
    except Refused as e:
        notes.append(f"read without its class: {e.what}, {e.why}")
        return None
    cut = found.cut
    notes.append(
        f"{cut.kept} of {cut.layers} layers were built"
        + (f", {cut.experts} of {cut.experts_in_all} experts in each" if cut.experts_in_all else "")
        + "; the rest is counted from headers"
    )
    covered = found.inventory.coverage
    for word in ("missing", "unexpected", "shape_changed"):
        if names := getattr(covered, word):
            notes.append(f"{len(names)} tensors of these {word.replace('_', ' ')}: {', '.join(names[:3])}")
    return found


def assemble(
    source: Source,
    shape: Outline,
    weights: Ledger,
    device: Device,
    settings: Settings,
    registry: Registry,
    known: Any,
    band: tuple[float, str],
    notes: list[str],
    read: Reduced | None = None,
) -> Fit:
    """The document from what was read."""
    share = "cpu_memory_utilization" if device.kind == "cpu" else "gpu_memory_utilization"
    budget = Budget(
        share=settings.get(share),
        tokens=settings.get("max_num_batched_tokens"),
        sequences=settings.get("max_num_seqs"),
        itemsize=shape.itemsize,
        converted=converted_bytes(device),
    )
    ops = (
        of_sites(read, registry, device, shape.dtype)
        if read is not None
        else of_structure(weights, shape, registry, device, shape.dtype)
    )
    return Fit(
        model=source.name,
        rev8=source.rev8,
        device=device,
        known_from=known,
        band=band[0],
        band_reason=band[1],
        layers=weights.layers,
        parameters=weights.values(),
        bytes=weights.total,
        unaccounted=weights.unaccounted,
        max_positions=shape.max_positions,
        cache_dtype=shape.dtype,
        rows=weights.rows,
        formats=_formats(weights, device),
        cache=_cache(shape),
        per_token=shape.per_token(shape.itemsize),
        per_sequence=shape.per_sequence(shape.itemsize),
        splits=splits(weights, shape, device, budget),
        ops=ops,
        notes=(*notes, *_windows(shape)),
    )


def _complete(source: Source, raw: Mapping[str, Any], trust: bool, notes: list[str]) -> Mapping[str, Any] | None:
    """The configuration with its class's defaults; None with a note where no class is at hand."""
    try:
        return architecture(source, trust=trust).config.to_dict()
    except Refused as e:
        notes.append(f"read without a class: {e.what}, {e.why}")
        return None


def _windows(shape: Outline) -> list[str]:
    """What dz's own cache costs more than a window needs."""
    kept = sum(k.window for x in shape.layers for k in x.mixer.keeps if k.kind == "window") * shape.itemsize
    text = f"windows are counted as dropped; dz's block pool keeps them whole, {kept:,} B a token more"
    return [text] if kept else []


def _headers(source: Source) -> dict[str, TensorInfo]:
    if not any(is_weight(f.path) for f in source.files):
        return {}
    return read_table(source).headers()


def _cross_check(weights: Ledger, shape: Outline) -> list[str]:
    out = []
    if shape.layers and weights.layers != len(shape.layers):
        out.append(f"the configuration says {len(shape.layers)} layers, headers hold {weights.layers} in their list")
    expected, there = shape.parameters, weights.values()
    if there and abs(expected - there) > DISAGREE * there:
        out.append(f"the configuration would give {expected / 1e9:.3g} G parameters, headers hold {there / 1e9:.3g} G")
    out += [f"cache figures rest on a guess: {g}" for g in shape.guesses]
    if weights.unaccounted:
        out.append(f"{weights.unaccounted:,} header bytes belong to no op")
    return out


def _formats(weights: Ledger, device: Device) -> tuple[Format, ...]:
    names = dict.fromkeys(r.format for r in weights.rows)
    out = []
    for name in names:
        rows = [r for r in weights.rows if r.format == name]
        values, size = sum(r.values for r in rows), sum(r.bytes for r in rows)
        out.append(
            Format(
                name=name,
                tensors=sum(r.tensors for r in rows),
                values=values,
                bytes=size,
                bits=8 * size / max(values, 1),
                native=_NATIVE.get(name) in device.dtypes,
                loads=FAMILIES[name].loads if name in FAMILIES else "",
            )
        )
    return tuple(out)


def _cache(shape: Outline) -> tuple[CachePart, ...]:
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for layer in shape.layers:
        for k in layer.mixer.keeps:
            groups.setdefault((k.kind, k.formula, k.split), []).append(k)
    return tuple(
        CachePart(
            kind=kind,
            layers=len(keeps),
            formula=formula,
            per_token=sum(k.of_token(shape.itemsize) for k in keeps),
            per_sequence=sum(k.of_sequence(shape.itemsize) for k in keeps),
            split=split,
        )
        for (kind, formula, split), keeps in groups.items()
    )
