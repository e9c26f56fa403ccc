"""The arguments and options that several commands share, each declared once with the name that people know.

Options that are settings default to None ("not given") and go to `common.resolve_settings({...})`, which fills them
from DZ_* variables, settings files and defaults; their help names the variable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dz.settings import SPECS


def _setting(name: str, *flags: str, metavar: str | None = None) -> Any:
    """An option whose help and variable come from its entry in SPECS."""
    spec = SPECS[name]
    default = f", default: {spec.default}" if spec.default not in ("", 0) else ""
    names = flags or ("--" + name.replace("_", "-"),)
    return typer.Option(*names, metavar=metavar, help=f"{spec.help} (DZ_{name.upper()}{default})", show_default=False)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="org/name, org/name@revision, or a folder.")]

# what a model is and whether its code may run
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit; the same as MODEL@REVISION.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the repository's own Python code, at the pinned commit.")
]
Recipe = Annotated[
    str | None, typer.Option("--recipe", metavar="NAME|FILE", help="Recipe to use; see `dz recipes ls`.")
]
ChecklistOption = Annotated[
    str, typer.Option("--checklist", metavar="NAME|FILE", help="Checklist to run; see `dz checklists ls`.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="[SITE:]OP[/PHASE]=KERNEL", help="Choose a kernel, `reference` or `upstream`; repeatable."
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="MODULE:FUNCTION", help="Run once in each dz process before it works."),
]

# what a run may do
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen; write nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Do it again even if nothing changed.")]
Frozen = Annotated[bool, typer.Option("--frozen", help="Fail rather than make or remake a plan.")]

# hardware and sizes: settings
Device = Annotated[str | None, _setting("device", metavar="DEVICE")]
Dtype = Annotated[str | None, _setting("dtype", metavar="DTYPE")]
Workspace = Annotated[str | None, _setting("workspace", metavar="DIR")]
MaxModelLen = Annotated[str | None, _setting("max_model_len", metavar="TOKENS")]
MaxNumSeqs = Annotated[int | None, _setting("max_num_seqs")]
MaxNumBatchedTokens = Annotated[int | None, _setting("max_num_batched_tokens")]
BlockSize = Annotated[int | None, _setting("block_size")]
NumBlocks = Annotated[int | None, _setting("num_blocks")]
GpuMemoryUtilization = Annotated[float | None, _setting("gpu_memory_utilization")]
CpuMemoryUtilization = Annotated[float | None, _setting("cpu_memory_utilization")]

# the server: settings
Host = Annotated[str | None, _setting("host")]
Port = Annotated[int | None, _setting("port")]
MaxRestarts = Annotated[int | None, _setting("max_restarts")]

# files that a command writes beside its answer
JunitXml = Annotated[Path | None, typer.Option("--junit-xml", metavar="FILE", help="Also write the results there.")]
