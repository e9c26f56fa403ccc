"""`dz adapt`: the architecture against the known ops, and a plan that says what runs where and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dz.cli import output
from dz.cli.audit import show_audit
from dz.cli.common import resolve_settings
from dz.cli.diff import show as show_difference
from dz.cli.fit import show as show_fit
from dz.cli.options import Device, DryRun, Dtype, Model, Recipe, Sets, TrustRemoteCode, Workspace
from dz.core.envelope import envelope
from dz.errors import UsageError

if TYPE_CHECKING:
    from dz.core.inventory import Inventory
    from dz.core.plan import Plan, SitePlan

Check = Annotated[bool, typer.Option("--check", help="Only say whether the plan is current; 1 if something changed.")]
Diff = Annotated[bool, typer.Option("--diff", help="Only show how each site departs from the known ops; no plan.")]
COLUMNS = ("SITE", "OP", "N", "PREFILL/DECODE", "TIER", "WHY")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("adapt")(adapt)


def adapt(
    model: Model,
    trust_remote_code: TrustRemoteCode = False,
    recipe: Recipe = None,
    device: Device = None,
    dtype: Dtype = None,
    sets: Sets = None,
    dry_run: DryRun = False,
    check: Check = False,
    diff: Diff = False,
    workspace: Workspace = None,
) -> int:
    """Read a model's architecture, choose what runs at each site in each phase, and prove it.

    Examples:
      dz adapt org/name
      dz adapt org/name --set rms_norm=reference --dry-run
      dz adapt org/name --device cuda:sm90 --check
      dz adapt org/name --diff
      dz adapt org/name --dry-run --device H200x8

    Prints the plan. Sites that no op knows run on upstream's code, and the table says so."""
    from dz import adapt as adapting
    from dz import backends, hub

    if diff:
        why = "a difference compares the architecture with the known ops; no kernel, device or plan enters it"
        given = {"--check": check, "--set": sets, "--recipe": recipe, "--device": device, "--dtype": dtype}
        _refuse_beside("--diff", given, why)
    settings = resolve_settings({"workspace": workspace, "device": device, "dtype": dtype})
    base = Path(settings.get("workspace")).absolute()
    source = hub.resolve(model, workspace=base, headers=dry_run or diff or check, trust=trust_remote_code)
    show_audit(source, trust=trust_remote_code, workspace=base)
    if diff:
        found = adapting.make_difference(source, trust=trust_remote_code, progress=output.get().progress())
        show_difference(model, found)
        return 0
    if dry_run and backends.planned(settings.get("device")):
        spec = settings.get("device")
        why = "what fits on a device is told for every kernel on the shelf; no plan is made or compared"
        _refuse_beside(f"--dry-run --device {spec}", {"--check": check, "--set": sets, "--recipe": recipe}, why)
        return show_fit(model, adapting.make_fit(source, trust=trust_remote_code, device=spec, settings=settings))
    wanted: dict[str, Any] = {
        "trust": trust_remote_code,
        "device": settings.get("device"),
        "settings": settings,
        "recipe": recipe,
    }
    if check:
        drift = adapting.drift(source, sets=sets, **wanted)
        return _show_drift(model, drift.plan, drift.changed)
    inventory, plan = adapting.make_plan(source, sets=sets or (), progress=output.get().progress(), **wanted)
    path = None if dry_run else adapting.write(source, settings, inventory, plan)
    _show(model, inventory, plan, path)
    return 0


def _refuse_beside(flag: str, given: dict[str, Any], why: str) -> None:
    """Refuse flags that would not be heeded beside `flag`."""
    named = [name for name, value in given.items() if value]
    if named:
        raise UsageError(f"{flag} with {', '.join(named)}", why, "leave one of them out", code="usage")


def _show_drift(model: str, plan: Plan | None, changed: tuple[str, ...]) -> int:
    out = output.get()
    status = "drift" if changed else "ok"
    hash_ = plan.hash if plan else ""
    data = {"model": model, "hash": hash_, "changed": list(changed)}
    out.document(envelope("drift", data, inputs={"model": model}, status=status, reasons=list(changed)))
    if not changed:
        out.result(hash_, f"the plan {hash_[:8]} is current")
        return 0
    for line in changed:
        out.line(f"changed: {line}")
    out.result(hash_ or "none", f"the plan {hash_[:8]} is not current" if plan else "there is no plan")
    out.hint(f"dz adapt {model}")
    return 1


def _show(model: str, inventory: Inventory, plan: Plan, path: Path | None) -> None:
    out = output.get()
    document = envelope(
        "plan",
        plan,
        inputs={"model": plan.model, **plan.inputs},
        status="ok" if path else "dry-run",
        reasons=_notes(inventory, plan),
    )
    out.document(document)
    out.table(COLUMNS, [_row(s) for s in plan.sites])
    for note in _notes(inventory, plan):
        out.note(note)
    counts = ", ".join(
        f"{inventory.count(w)} {'ops ' if w == 'known' else ''}{w}" for w in ("known", "variant", "unknown")
    )
    where = f" -> {path}" if path else " (dry run: nothing written)"
    out.result(plan.hash, f"{counts}. Plan {plan.hash[:8]}{where}")
    out.hint(f"dz accept {model}")


def _notes(inventory: Inventory, plan: Plan) -> list[str]:
    """What a reader should know beside the table."""
    covered = inventory.coverage
    out = (
        [f"this model runs the repository's own code ({inventory.code_hash[:8]})"]
        if inventory.runs == "repository"
        else []
    )
    for word, names in (
        ("missing", covered.missing),
        ("unexpected", covered.unexpected),
        ("of another shape", covered.shape_changed),
    ):
        if names:
            out.append(f"{len(names)} tensors {word}, a load would be refused: {', '.join(names[:4])}")
    if covered.ignored:
        out.append(f"{len(covered.ignored)} tensors are left unloaded ({sum(covered.ignored.values()):,} bytes)")
    out += [
        f"{n}: {count} values count; a load is refused unless the rest is zero" for n, count in covered.narrowed.items()
    ]
    out += [f"broken: {b}" for b in plan.broken_requirements]
    out += [f"{glob}: {words}" for glob, words in inventory.quantised.items()]
    return out + list(inventory.notes)


def _row(s: SitePlan) -> tuple[str, str, int, str, str, str]:
    prefill, decode = s.phases["prefill"], s.phases["decode"]
    same = prefill.impl == decode.impl
    impl = prefill.impl if same else f"{prefill.impl} / {decode.impl}"
    op = s.op or "-"
    return s.site, op if s.status == "known" else f"{op} ({s.status})", s.count, impl, prefill.tier or "-", _why(s)


def _why(s: SitePlan) -> str:
    if s.status == "unknown":
        return "unknown: runs on upstream's code" + (
            f"; {s.phases['prefill'].reason}" if s.phases["prefill"].tier else ""
        )
    texts = []
    for choice in s.phases.values():
        proof = choice.verified
        text = choice.reason
        if proof is not None:
            text += f", verified to {proof.max_err:.1e} in {proof.cases} cases ({proof.data})"
        failed = [r for r in choice.rejected if "failed verification" in r.reason]
        text += "".join(f"; {r.impl}: {r.reason}" for r in failed)
        texts.append(text)
    return texts[0] if texts[0] == texts[-1] else " / ".join(texts)
