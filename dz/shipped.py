"""Where the folders that ship beside the package lie: kernels, recipes, checklists."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def checkout() -> Path | None:
    """The root of the checkout that dz runs from; None when it is installed from a wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() else None


def folder(kind: str) -> Path:
    """The folder of `kind` ("kernels", "recipes", "checklists"): in the checkout if this is one, else in the wheel."""
    root = checkout()
    return root / kind if root is not None else _PACKAGE / kind


def outside(kind: str) -> list[Path]:
    """The folders of `kind` under the entries of `$DZ_PATH`, in order."""
    extra = [Path(p) / kind for p in os.environ.get("DZ_PATH", "").split(os.pathsep) if p]
    return [p for p in extra if p.is_dir()]


def folders(kind: str) -> list[Path]:
    """`folder(kind)`, then the folders of the same shape under each entry of `$DZ_PATH`."""
    return [folder(kind), *outside(kind)]
