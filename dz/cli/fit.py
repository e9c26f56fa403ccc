"""How `dz adapt --dry-run --device NAME` shows a fit: weights, cache, splits, ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dz.cli import output
from dz.cli.progress import size
from dz.core.envelope import envelope

if TYPE_CHECKING:
    from dz.adapt.fit import Fit, OpRow, SplitRow

WEIGHTS = ("OP", "FORMAT", "SPLIT", "TENSORS", "PARAMETERS", "BYTES")
FORMATS = ("FORMAT", "PARAMETERS", "BITS", "BYTES", "NATIVE", "LOADS")
CACHE = ("CACHE", "LAYERS", "A TOKEN", "A SEQUENCE", "OF EACH LAYER")
SPLITS = (
    "SPLIT",
    "EXPERTS",
    "DENSE",
    "LEFT",
    "WORKSPACE",
    "ACTIVATIONS",
    "CACHE ROOM",
    "LONGEST",
    "SEQUENCES",
    "VERDICT",
)
OPS = ("OP", "N", "PREFILL/DECODE")
SHOWN = 8192  # tokens of the sequences that the table counts; --json has more


def show(model: str, fit: Fit) -> int:
    """Print a fit in the form that was asked for. The exit code is 0 when some split fits, else 1."""
    out = output.get()
    best = max((s for s in fit.splits if s.fits), key=lambda s: (s.longest, s.room), default=None)
    status = "fits" if best else "does not fit"
    inputs = {"model": fit.model, "device": f"{fit.device.name} x{fit.device.count}"}
    out.document(envelope("fit", fit, inputs=inputs, status=status, reasons=_notes(fit)))
    out.table(WEIGHTS, [(r.op, r.format, r.split, r.tensors or None, f"{r.values:,}", size(r.bytes)) for r in fit.rows])
    out.line("")
    out.table(
        FORMATS,
        [(f.name, f"{f.values:,}", round(f.bits, 2), size(f.bytes), f.native, f.loads or "yes") for f in fit.formats],
    )
    out.line("")
    out.table(CACHE, [(c.kind, c.layers, size(c.per_token), size(c.per_sequence), c.formula) for c in fit.cache])
    out.line("")
    out.table(SPLITS, [_split(s) for s in fit.splits])
    out.line("")
    out.table(OPS, [_op(o) for o in fit.ops])
    for note in _notes(fit):
        out.note(note)
    weights = f"{size(fit.bytes)} of weights, {size(fit.per_token)} a token, {size(fit.per_sequence)} a sequence"
    where = f"{fit.device.name} x{fit.device.count}"
    word = f"fits ({best.name}): up to {best.longest:,} tokens" if best else "does not fit"
    out.result(status, f"{weights}. On {where} it {word} (dry run: nothing written)")
    out.hint(f"dz adapt {model}")
    return 0 if best else 1


def _notes(fit: Fit) -> list[str]:
    known = {"headers": "from headers and configuration", "headers and class": "from headers and the model's class"}
    text = known.get(fit.known_from, f"an estimate: weights within {100 * fit.band:.0f} % ({fit.band_reason})")
    out = [text, *fit.notes]
    whole = max((s.whole_matrices for s in fit.splits), default=0)
    if whole:
        out.append(f"matrices are counted as cut evenly; routers kept whole on each device add up to {size(whole)}")
    return out


def _split(s: SplitRow) -> tuple[str, str, str, str, str, str, str, str, int | None, str]:
    found = next((c.sequences for c in s.contexts if c.tokens == SHOWN), None)
    longest = f"{s.longest:,}" if s.fits else "-"
    figures = (s.experts, s.dense, s.left, s.workspace, s.activations, s.room)
    a, b, c, d, e, f = (size(x) for x in figures)
    return s.name, a, b, c, d, e, f, longest, found if s.fits else None, s.verdict


def _op(o: OpRow) -> tuple[str, int | None, str]:
    return o.op, o.count or None, o.prefill if o.prefill == o.decode else f"{o.prefill} / {o.decode}"
