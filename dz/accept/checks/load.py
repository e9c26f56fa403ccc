"""load: the server loads every tensor strictly, within its memory plan."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dz.accept.check import Check, failed, passed
from dz.core import jsonio
from dz.core.check import Result
from dz.core.inventory import Coverage
from dz.errors import DzError

if TYPE_CHECKING:
    from dz.accept.context import Context

MEMORY = re.compile(r"^memory: (.+?) {2,}([\d.]+) MiB(?: +(.*))?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """No parameters."""


def run(ctx: Context, params: Params) -> Result:
    """Start the server; a given one has loaded if it says that it is healthy."""
    try:
        client = ctx.client()
    except DzError as e:
        return failed(f"{e.what}: {e.why}", evidence=_log(ctx), details={"next": e.next})
    health = client.health()
    if health != 200:
        return failed(f"/health answers {health}", value=health, threshold=200, n=1, evidence=_log(ctx))
    if not ctx.server.own:
        return passed("the given server is healthy; how it loaded is not known", value=health, threshold=200, n=1)
    covered = _coverage(ctx)
    memory = [{"name": m[0], "mib": float(m[1]), "note": m[2]} for m in MEMORY.findall(ctx.server.log())]
    details: dict[str, Any] = {"memory": memory, "coverage": covered}
    if covered is None:
        return failed("there is no inventory that accounts for the tensors", evidence=_log(ctx), details=details)
    total = covered.matched + len(covered.missing) + len(covered.unexpected) + len(covered.shape_changed)
    faults = [
        f"{len(names)} {word}: {', '.join(names[:3])}"
        for word, names in (
            ("missing", covered.missing),
            ("unexpected", covered.unexpected),
            ("of another shape", covered.shape_changed),
        )
        if names
    ]
    faults += [] if memory else ["the server printed no memory plan"]
    figures = f"{covered.matched} of {total} tensors have their parameter"
    if covered.ignored:
        figures += f", {len(covered.ignored)} ignored by name ({sum(covered.ignored.values()):,} B)"
    figures += "; memory: " + ", ".join(f"{m['name']} {m['mib']:g} MiB" for m in memory)
    make = failed if faults else passed
    return make(
        "; ".join([*faults, figures]),
        value=covered.matched / total if total else 0.0,
        unit="of tensors",
        threshold=1.0,
        n=total,
        evidence=_log(ctx),
        details=details,
    )


def _coverage(ctx: Context) -> Coverage | None:
    path = ctx.inventory
    if not path.is_file():
        return None
    return jsonio.from_builtins(Coverage, jsonio.read(path)["data"]["coverage"], where=str(path))


def _log(ctx: Context) -> tuple[str, ...]:
    return (ctx.relative(ctx.folder / "server.log"),) if ctx.server.own else ()


CHECK = Check(id="load", summary="Strict loading within the memory plan.", params=Params, run=run)
