"""`dz ops new NAME`: the skeleton of an op with its test."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dz.cli import output
from dz.core import skeleton
from dz.core.envelope import envelope

NewName = Annotated[str, typer.Argument(metavar="NAME", help="The op's name: small letters, digits, underscores.")]
Arguments = Annotated[
    str, typer.Option("--args", metavar="A,B", help="Its tensors, as `dz adapt MODEL --diff` lists them.")
]
Kind = Annotated[str, typer.Option("--kind", help="What it takes: module, function or interface.")]
Into = Annotated[
    Path | None,
    typer.Option("--into", metavar="DIR", help="A folder to be named in DZ_PATH; default: the checkout."),
]


def new_op(name: NewName, args: Arguments = "x", kind: Kind = "module", into: Into = None) -> None:
    """Begin an op: write its file and a test that fails until reference, cases and recognition are written.

    Examples:
      dz ops new gated_scan --args hidden_states,decay
      dz ops new gated_scan --into ./mine"""
    from dz.core.registry import Registry

    arguments = [a.strip() for a in args.split(",") if a.strip()]
    files = skeleton.write(name, arguments=arguments, kind=kind, into=into, known=list(Registry.discover().ops))
    out = output.get()
    data = {"op": name, "kind": kind, "arguments": arguments, "files": [str(f) for f in files]}
    out.document(envelope("new_op", data))
    for file in files:
        out.result(file)
    before = f"DZ_PATH={files[0].parent.parent} " if into is not None else ""
    out.hint(f"{before}python -m pytest {files[1]}")
