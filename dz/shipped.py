"""Where the folders that ship beside the package lie: kernels, recipes, checklists."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(kind: str) -> Path:
    """The folder of `kind` ("kernels", "recipes", "checklists"): in the checkout if this is one, else in the wheel."""
    root = _PACKAGE.parent
    return root / kind if (root / "pyproject.toml").is_file() else _PACKAGE / kind


def folders(kind: str) -> list[Path]:
    """`folder(kind)`, then the folders of the same shape under each entry of `$DZ_PATH`."""
    extra = [Path(p) / kind for p in os.environ.get("DZ_PATH", "").split(os.pathsep) if p]
    return [folder(kind), *(p for p in extra if p.is_dir())]
