"""Ways to lay a model over devices, and what each device then holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dz.adapt.fit.model import Bound, Context, SplitRow
from dz.core.device import Device
from dz.inspect.ledger import Ledger
from dz.inspect.outline import Outline

CONTEXTS = (1024, 8192, 32768, 131072)  # tokens; contexts for which sequences are counted, besides the longest
WIDEST = 16  # devices over which one matrix is cut: beyond, exchanges cost more than the cut saves
UNSTATED = 1 << 20  # tokens; the longest context looked at where a configuration names none


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a fit assumes: the share of memory that dz may use, tokens of a step, sequences of a step, bytes of a cache
    element, and bytes of one expert value after conversion (0: experts are computed as they are stored)."""

    share: float
    tokens: int
    sequences: int
    itemsize: float
    converted: int


def splits(weights: Ledger, shape: Outline, device: Device, budget: Budget) -> tuple[SplitRow, ...]:
    """Every sensible split over the device's members, the widest tensor-parallel one first."""
    return tuple(_row(weights, shape, device, budget, tp) for tp in widths(shape, device.count))


def widths(shape: Outline, count: int) -> Iterator[int]:
    """The numbers of devices over which matrices are cut: divisors of the count that divide the query heads. Of many
    devices narrow cuts are left out where a wider one is possible."""
    heads = [x.mixer.heads for x in shape.layers if x.mixer.op]
    possible = [n for n in range(min(count, WIDEST), 0, -1) if count % n == 0 and all(h % n == 0 for h in heads)]
    wide = [n for n in possible if n >= 4]
    yield from wide if wide and count >= 8 else possible


def _row(weights: Ledger, shape: Outline, device: Device, budget: Budget, tp: int) -> SplitRow:
    count, dp = device.count, device.count // tp
    ep = count if weights.experts and weights.experts % count == 0 else 1
    parts = count if weights.experts else 1
    experts = -(-weights.of("experts") // parts)
    dense = -(-weights.of("matrix") // tp) + weights.of("whole")
    workspace = -(-weights.packed_experts // parts) * budget.converted
    activations = _activations(shape, budget, tp)
    held = experts + dense
    room = int(device.memory * budget.share) - held - workspace - activations
    token, fixed, thin = _cache(shape, budget.itemsize, tp)
    longest, bound = _longest(room, token, fixed, shape.max_positions)
    ways = sorted({*(c for c in CONTEXTS if c <= (shape.max_positions or UNSTATED)), longest} - {0})
    fits = room >= 0 and longest > 0
    return SplitRow(
        name=_name(tp, dp, ep, bool(weights.experts)),
        tp=tp,
        dp=dp,
        ep=ep,
        experts=experts,
        dense=dense,
        weights=held,
        left=device.memory - held,
        workspace=workspace,
        activations=activations,
        room=room,
        fits=fits,
        verdict=_verdict(fits, room, device.memory - held),
        per_token=token,
        per_sequence=fixed,
        longest=longest,
        bound=bound,
        spread=_longest(room, thin, fixed, shape.max_positions)[0],
        contexts=tuple(Context(tokens=c, sequences=dp * _sequences(room, token, fixed, c)) for c in ways),
        experts_fp8=-(-weights.values("experts") // parts),
        whole_matrices=_small(weights, tp),
    )


def _name(tp: int, dp: int, ep: int, mixture: bool) -> str:
    base = f"TP{tp}" if dp == 1 else f"TP{tp} x DP{dp}"
    if not mixture:
        return base
    return f"EP{ep} {base}" if ep > 1 else f"{base}, experts cut" if tp * dp > 1 else base


def _verdict(fits: bool, room: int, left: int) -> str:
    if fits:
        return "fits"
    if left < 0:
        return f"no: weights alone lack {-left / 1e9:.1f} GB on each"
    return f"no: lacks {-room / 1e9:.1f} GB on each" if room < 0 else "no: not one sequence fits"


def _small(weights: Ledger, tp: int) -> int:
    """What routers add when they stay whole: a copy on each device instead of a part."""
    router = sum(r.bytes for r in weights.rows if r.op == "router" and r.split == "matrix")
    return router - router // tp


def _activations(shape: Outline, budget: Budget, tp: int) -> int:
    """One full step: a token's residual vectors and three more at the model's width, the widest inner activation of a
    layer cut by `tp`, and float32 logits of one token a sequence."""
    width = max((x.forward.width for x in shape.layers), default=0)
    token = shape.itemsize * (shape.hidden * (shape.residuals + 3) + width / tp)
    return int(budget.tokens * token + budget.sequences * shape.vocab * 4 / tp)


def _cache(shape: Outline, itemsize: float, tp: int) -> tuple[float, float, float]:
    """(bytes a token, bytes a sequence, bytes a token with undivided parts cut by context) on one device."""
    token = fixed = thin = 0.0
    for layer in shape.layers:
        for k in layer.mixer.keeps:
            token += k.of_token(itemsize) * k.share(tp)
            fixed += k.of_sequence(itemsize) * k.share(tp)
            thin += k.of_token(itemsize) / tp
    return token, fixed, thin


def _longest(room: int, token: float, fixed: float, limit: int) -> tuple[int, Bound]:
    """(tokens of the longest sequence, what limits it)."""
    if room < fixed or room < 0:
        return 0, "weights" if room < 0 else "memory"
    most = int((room - fixed) / token) if token else UNSTATED
    limit = limit or UNSTATED
    return (limit, "model") if most >= limit else (most, "memory")


def _sequences(room: int, token: float, fixed: float, tokens: int) -> int:
    each = tokens * token + fixed
    return max(0, int(room / each)) if each else 0


def converted_bytes(device: Device) -> int:
    """Bytes of an expert value that is stored in four bits, once converted for this device: 0 where it computes in
    four bits, 1 where it computes in FP8, else 2."""
    if any(d.startswith("float4") for d in device.dtypes):
        return 0
    return 1 if any(d.startswith("float8_e4m3") for d in device.dtypes) else 2
