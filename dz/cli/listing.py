"""`dz ops|kernels|recipes|checklists [ls|show NAME]`: what dz knows, has and ships."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dz.cli import output
from dz.cli.new_op import new_op
from dz.core import library
from dz.core.envelope import envelope

if TYPE_CHECKING:
    from dz.core.kernel import Kernel
    from dz.core.op import Op
    from dz.core.registry import Registry

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A name from the list; for recipes and checklists a file too.")
]
UNAVAILABLE = "unavailable"


def register(app: typer.Typer) -> None:
    """Add the four groups."""
    ops = _group(app, "ops", "Ops: what dz recognises in a model, each with its torch reference.", list_ops, show_op)
    ops.command("new")(new_op)
    _group(
        app,
        "kernels",
        "Kernels: the implementations of ops, and those that cannot be used here.",
        list_kernels,
        show_kernel,
    )
    _group(app, "recipes", "Recipes: what people want for a family of models, as data.", list_recipes, show_recipe)
    _group(app, "checklists", "Checklists: the Day-0 checks of `dz accept`.", list_checklists, show_checklist)


def _group(
    app: typer.Typer, name: str, summary: str, ls: Callable[[], None], show: Callable[[str], None]
) -> typer.Typer:
    group = typer.Typer()

    @group.callback(invoke_without_command=True, help=summary)
    def default(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            ls()

    group.command("ls")(ls)
    group.command("show")(show)
    app.add_typer(group, name=name)
    return group


def list_ops() -> None:
    """List every op with its number of kernels."""
    registry = _registry()
    rows = [_op_row(registry, op) for op in sorted(registry.ops.values(), key=lambda o: o.name)]
    out = output.get()
    out.document(envelope("ops", {"ops": rows}))
    out.table(
        ("OP", "KIND", "KERNELS", "SUMMARY"), [(r["name"], r["kind"], len(r["kernels"]), r["summary"]) for r in rows]
    )
    out.hint("dz ops show NAME")


def show_op(name: Name) -> None:
    """Show one op: its signature, meaning, tolerances and kernels.

    Examples:
      dz ops show rms_norm"""
    registry = _registry()
    op = registry.op(name)
    row = _op_row(registry, op)
    row["arguments"] = [_argument(p) for p in op.signature.parameters.values()]
    row["reference"] = inspect.getdoc(op.reference) or ""
    row["tolerance"] = {dtype: {"atol": t.atol, "rtol": t.rtol} for dtype, t in op.tolerance.items()}
    out = output.get()
    out.document(envelope("op", row))
    out.line(f"{op.name}: {op.summary}\n\n{row['reference']}\n")
    out.table(("ARGUMENT", "TYPE", "DEFAULT"), [tuple(a.values()) for a in row["arguments"]])
    out.line("")
    out.table(("DTYPE", "ATOL", "RTOL"), [(dtype, t.atol, t.rtol) for dtype, t in op.tolerance.items()])
    out.line("")
    out.table(("KERNEL", "SUMMARY"), [(k.key, k.summary) for k in registry.of(name)])


def list_kernels() -> None:
    """List every kernel with what it needs; those that could not be loaded are listed with the reason."""
    registry = _registry()
    rows = [_kernel_row(k) for k in sorted(registry.kernels.values(), key=lambda k: k.key)]
    rows += [{"key": key, "status": UNAVAILABLE, "reason": why} for key, why in sorted(registry.unavailable.items())]
    out = output.get()
    out.document(envelope("kernels", {"kernels": rows}))
    out.table(
        ("KERNEL", "DEVICE", "DTYPES", "PHASES", "SUMMARY"),
        [
            (r["key"], UNAVAILABLE, "", "", r["reason"])
            if r["status"] == UNAVAILABLE
            else (r["key"], _needs(r), ",".join(r["dtypes"]) or "any", ",".join(r["phases"]), r["summary"])
            for r in rows
        ],
    )
    out.hint("dz kernels show OP/TECHNIQUE")


def show_kernel(name: Name) -> None:
    """Show one kernel: what it needs, and what its file says.

    Examples:
      dz kernels show rms_norm/triton"""
    kernel = _registry().kernel(name)
    row = _kernel_row(kernel)
    module = inspect.getmodule(kernel.run)
    row["about"] = (inspect.getdoc(module) or "") if module is not None else ""
    row["file"] = (inspect.getsourcefile(module) or "") if module is not None else ""
    out = output.get()
    out.document(envelope("kernel", row))
    fields = ("key", "summary", "devices", "arch", "dtypes", "phases", "deterministic", "source", "file")
    out.table(("FIELD", "VALUE"), [(f, _plain(row[f])) for f in fields])
    out.line("")
    out.line(row["about"])


def list_recipes() -> None:
    """List every recipe with the models it is for."""
    from dz.core.recipe import load_recipe

    recipes = [load_recipe(path) for path in library.entries("recipes").values()]
    out = output.get()
    out.document(envelope("recipes", {"recipes": recipes}))
    out.table(
        ("RECIPE", "FOR", "SUMMARY"), [(r.name, ", ".join(r.matches) or "every model", r.summary) for r in recipes]
    )


def show_recipe(name: Name) -> None:
    """Show one recipe, checked, as it is written.

    Examples:
      dz recipes show NAME
      dz recipes show ./mine.yaml --json"""
    from dz.core.recipe import load_recipe

    path = library.find("recipes", name)
    out = output.get()
    out.document(envelope("recipe", load_recipe(path)))
    out.line(path.read_text("utf-8").rstrip())


def list_checklists() -> None:
    """List every checklist with its number of checks."""
    from dz.core.check import load_checklist

    lists = [load_checklist(path) for path in library.entries("checklists").values()]
    out = output.get()
    out.document(envelope("checklists", {"checklists": lists}))
    out.table(("CHECKLIST", "CHECKS", "SUMMARY"), [(c.name, len(c.checks), c.summary) for c in lists])


def show_checklist(name: Name) -> None:
    """Show one checklist: its checks, whether a skip counts, and their parameters.

    Examples:
      dz checklists show default"""
    from dz.core.check import load_checklist

    checklist = load_checklist(library.find("checklists", name))
    out = output.get()
    out.document(envelope("checklist", checklist))
    rows = [(e.name, e.check, e.required, _plain(e.params)) for e in checklist.checks]
    out.table(("CHECK", "RUNS", "REQUIRED", "PARAMETERS"), rows)


def _registry() -> Registry:
    from dz.core.registry import Registry

    return Registry.discover()


def _op_row(registry: Registry, op: Op) -> dict[str, Any]:
    return {
        "name": op.name,
        "kind": op.kind,
        "summary": op.summary,
        "phases": list(op.phases),
        "source": op.source,
        "kernels": [k.key for k in registry.of(op.name)],
        UNAVAILABLE: {k: why for k, why in registry.unavailable.items() if k.startswith(f"{op.name}/")},
    }


def _argument(p: inspect.Parameter) -> dict[str, str | None]:
    kind = p.annotation if isinstance(p.annotation, str) else getattr(p.annotation, "__name__", str(p.annotation))
    return {"name": p.name, "type": kind, "default": None if p.default is p.empty else str(p.default)}


def _kernel_row(kernel: Kernel) -> dict[str, Any]:
    needs = kernel.requires
    return {
        "key": kernel.key,
        "status": "available",
        "summary": kernel.summary,
        "devices": list(needs.device),
        "arch": list(needs.arch),
        "dtypes": list(needs.dtypes),
        "phases": list(needs.phases),
        "deterministic": kernel.deterministic,
        "source": kernel.source,
    }


def _needs(row: dict[str, Any]) -> str:
    """Devices and architecture window in short: "cuda sm80+", "any"."""
    low, high = row["arch"]
    window = f" sm{low}" + ("+" if high is None else f"-{high}") if low else f" to sm{high}" if high else ""
    return (",".join(row["devices"]) or "any") + window


def _plain(value: Any) -> str:
    """A list or mapping in one readable line; nothing for an empty one."""
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join("any" if v is None else str(v) for v in value) or "any"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
