"""The envelope round every JSON document dz prints or writes, and its validation against dz/schemas."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import dz
from dz.core import jsonio

SCHEMAS = Path(__file__).resolve().parent.parent / "schemas"


def envelope(
    kind: str, data: Any, *, inputs: dict[str, Any] | None = None, status: str = "ok", reasons: list[str] | None = None
) -> dict[str, Any]:
    """`{schema: "dz.<kind>/1", dz, created, inputs, status, reasons, data}` as plain JSON values."""
    return {
        "schema": f"dz.{kind}/1",
        "dz": dz.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "inputs": jsonio.to_builtins(inputs or {}),
        "status": status,
        "reasons": list(reasons or []),
        "data": jsonio.to_builtins(data),
    }


@cache
def schema(name: str) -> dict[str, Any]:
    """The JSON schema of a document kind ("plan", "report", "error", ...)."""
    return jsonio.read(SCHEMAS / f"{name}.json")


def validate(document: dict[str, Any]) -> None:
    """Raise `jsonschema.ValidationError` unless `document` fits the schema that it names."""
    import jsonschema

    name = str(document.get("schema", "")).removeprefix("dz.").partition("/")[0]
    if not name.isidentifier() or not (SCHEMAS / f"{name}.json").is_file():
        raise jsonschema.ValidationError(f"there is no schema for {document.get('schema')!r}")
    jsonschema.validate(document, schema(name))
