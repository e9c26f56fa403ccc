"""`dz fetch`: the bytes of a model, pinned to a commit and checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dz.cli import output
from dz.cli.common import resolve_settings
from dz.cli.options import DryRun, Force, Model, Revision, Workspace
from dz.cli.progress import size
from dz.errors import EnvironmentFailure, UsageError

if TYPE_CHECKING:
    from dz.hub.acquire import Fetched, Preview, Request

Include = Annotated[list[str] | None, typer.Option("--include", metavar="GLOB", help="Only these files; repeatable.")]
Exclude = Annotated[list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Not these files; repeatable.")]
LocalDir = Annotated[
    Path | None, typer.Option("--local-dir", metavar="DIR", help="Put the files there, not in the Hugging Face cache.")
]
Token = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN", help="Sent to the hub, never stored or shown; better: `hf auth login`."),
]
Offline = Annotated[bool, typer.Option("--offline", help="Never ask the hub (HF_HUB_OFFLINE): locks alone answer.")]
Metadata = Annotated[
    bool, typer.Option("--metadata", help="Of the weight files the headers alone: enough for `dz adapt --dry-run`.")
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Read every byte here again and name the files that are broken; fetch nothing.")
]
_TRUE = ("1", "on", "yes", "true")  # as the hub client reads HF_HUB_OFFLINE


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("fetch")(fetch)


def fetch(
    model: Model,
    revision: Revision = None,
    include: Include = None,
    exclude: Exclude = None,
    local_dir: LocalDir = None,
    metadata: Metadata = False,
    verify: Verify = False,
    token: Token = None,
    dry_run: DryRun = False,
    force: Force = False,
    offline: Offline = False,
    workspace: Workspace = None,
) -> int:
    """Download a model at a pinned commit, or register a folder in place; check every file; lock it.

    Examples:
      dz fetch org/name                      the commit that main is now; a rerun keeps that commit
      dz fetch org/name@main --dry-run       what the newest commit would bring
      dz fetch org/name --metadata           everything but the weights; of these the headers
      dz fetch org/name --verify             read again what was fetched, byte by byte
      dz fetch ./folder                      check and lock a folder where it is

    Prints the folder. With an index only the shards that it names are fetched; other weight files are listed."""
    from dz.hub import acquire

    if verify:
        given = {
            "--include": include, "--exclude": exclude, "--local-dir": local_dir, "--metadata": metadata,
            "--dry-run": dry_run, "--force": force,
        }  # fmt: skip
        return _verify(model, revision, workspace, [flag for flag, value in given.items() if value])
    settings = resolve_settings({"workspace": workspace})
    request = acquire.Request(
        model=model,
        revision=revision,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        local_dir=local_dir.expanduser() if local_dir else None,
        token=token,
        force=force,
        metadata=metadata,
        offline=offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE,
        endpoint=settings.get("hf_endpoint"),
    )
    base = Path(settings.get("workspace")).absolute()
    progress = output.get().progress()
    if dry_run:
        return _show_preview(acquire.preview(request, workspace=base, progress=progress), request)
    return _show(acquire.fetch(request, workspace=base, progress=progress), model)


def _verify(model: str, revision: str | None, workspace: str | None, given: list[str]) -> int:
    from dz import hub

    if given:
        why = "--verify reads what is here and fetches nothing"
        raise UsageError(f"{given[0]} with --verify", why, f"dz fetch {model} --verify", code="verify_alone")
    out = output.get()
    base = Path(resolve_settings({"workspace": workspace}).get("workspace")).absolute()
    found = hub.audit(model, revision, workspace=base, progress=out.progress())
    for text in found.notes:
        out.note(text)
    for fault in found.faults:
        out.line(f"{fault.file}: {fault.text}")
    found.refuse()
    more = f", {found.recorded} hashed for the first time" if found.recorded else ""
    out.note(
        f"verify: {found.files} files are right ({size(found.read)} read, {found.compared} files compared with their "
        f"hash{more}; {found.tensors:,} tensors where index and headers place them)"
    )
    out.document(found.document({"model": model}))
    out.result(found.folder)
    return 0


def _show(done: Fetched, model: str) -> int:
    out = output.get()
    source = done.source
    pinned = f"commit {source.commit}" if source.commit else f"folder {source.rev8}"
    if done.fresh:
        out.note(f"fetch: up to date ({pinned})")
    else:
        for text in done.document["reasons"]:
            out.note(text)
        weights = done.document["data"]["weights"]
        of = "headers of " if source.headers else ""
        held = f"{of}{len(weights['shards'])} weight files, {weights['tensors']:,} tensors, {size(weights['bytes'])}"
        out.note(f"fetch: {len(source.files)} files checked ({pinned}; {held}) -> {done.path}")
    out.document(done.document)
    out.result(source.folder)
    out.hint(f"dz adapt {model}{' --dry-run' if source.headers else ''}")
    return 0


def _show_preview(plan: Preview, request: Request) -> int:
    out = output.get()
    out.document(plan.document(request.inputs))
    out.table(("FILE", "BYTES", "CACHED"), plan.files)
    for row in plan.ignored:
        out.line(f"not fetched: {row.path} ({size(row.size)}; {row.why})")
    if plan.left_out:
        out.line(f"left out on request: {len(plan.left_out)} files")
    out.line(f"commit {plan.commit}: {size(plan.need)} to fetch into {plan.folder}, {size(plan.free)} free")
    if plan.need > plan.free:
        out.warn(f"{plan.need - plan.free:,} bytes too few on that disk; the fetch would be refused")
        return EnvironmentFailure.exit_code
    return 0
