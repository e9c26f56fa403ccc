"""Who may import whom: the order of ARCHITECTURE.md, read from the syntax trees of dz/ and kernels/."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = [  # top to bottom; a layer imports any layer below it, never a sibling on its line or one above
    {"__main__"},
    {"cli"},
    {"accept", "bench", "demo"},
    {"serve"},
    {"adapt"},
    {"engine"},
    {"inspect"},
    {"swap"},
    {"verify"},
    {"upstream"},
    {"hub", "weights", "backends"},
    {"ops"},
    {"core"},
    {"settings", "kernels"},
    {"errors", "shipped"},
    {""},
]
RANK = {name: rank for rank, line in enumerate(LAYERS) for name in line}
DISCOVERY = "dz.core.registry"  # the one place that makes a kernel's module name, from what lies in the folders
LIGHT = ("core", "cli")  # layers that load neither of these
HEAVY = {"torch", "transformers"}
FILES = [p for p in sorted((ROOT / "dz").rglob("*.py")) if not p.is_relative_to(ROOT / "dz/demo/repository")]
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))


def name_of(path: Path, root: Path = ROOT) -> str:
    """The dotted name of a file: dz/hub/lock.py -> dz.hub.lock."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str = "", *, package: bool = False) -> Iterator[tuple[str, bool]]:
    """Every module that a source names in an import or in `import_module("...")`, and whether importing the file loads
    it (False inside functions and under TYPE_CHECKING)."""
    yield from _imports(ast.parse(source), module if package else module.rpartition(".")[0], True)


def _imports(node: ast.AST, package: str, loads: bool) -> Iterator[tuple[str, bool]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, loads) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
        base = ".".join(p for p in (base, node.module or "") if p)
        yield from ((f"{base}.{alias.name}", loads) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
        name = node.args[0]
        if isinstance(name, ast.JoinedStr):
            name = name.values[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value, loads
    inner = loads and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for field, value in ast.iter_fields(node):
        under = inner and not (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and field == "body"
        )
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _imports(child, package, under)


def layer(module: str) -> str:
    """The layer of a dotted name in dz: dz.hub.lock -> hub, dz.errors -> errors, dz -> ""."""
    part = module.split(".")[1] if module.startswith("dz.") else ""
    return part if part in RANK else ""


def faults(module: str, found: Iterator[tuple[str, bool]]) -> list[str]:
    """What a file of dz/ may not import."""
    out = []
    own = layer(module)
    for name, loads in found:
        top = name.partition(".")[0]
        if top == "dz":
            other = layer(name)
            if other != own and RANK[other] <= RANK[own]:
                out.append(f"{module} ({own or 'dz'}) imports {name}: {other or 'dz'} is not below it")
            if name.startswith("dz.kernels.") and module != DISCOVERY:
                out.append(f"{module} imports a kernel by name: {name}")
        if top == "kernels":
            out.append(f"{module} imports {name}: that is another distribution's name")
        if top == "transformers" and own != "upstream":
            out.append(f"{module} imports {name}: only dz.upstream may")
        if top in HEAVY and own in LIGHT and loads:
            out.append(f"{module} loads {name} when it is imported")
        if top in ("tests", "conftest"):
            out.append(f"{module} imports {name}")
    return out


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_layers(path):
    module = name_of(path)
    found = imports(path.read_text("utf-8"), module, package=path.name == "__init__.py")
    assert not faults(module, found)


@pytest.mark.parametrize("path", KERNELS, ids=name_of)
def test_kernels(path):
    """A kernel imports ops, core, what is below core, and its own folder or kernels/common, as dz.kernels."""
    own = path.parent.name
    module = f"dz.{name_of(path)}"
    for name, _ in imports(path.read_text("utf-8"), module, package=path.name == "__init__.py"):
        top = name.partition(".")[0]
        assert top not in ("transformers", "kernels"), name
        if top == "dz":
            allowed = ("dz.ops", "dz.core", "dz.errors", "dz.shipped", "dz.kernels.common", f"dz.kernels.{own}")
            assert any(name == a or name.startswith(a + ".") for a in allowed), name


def test_every_folder_has_its_place():
    found = {p.name for p in (ROOT / "dz").iterdir() if (p / "__init__.py").is_file()}
    assert found == set().union(*LAYERS) - {"__main__", "errors", "settings", "shipped", ""}


@pytest.mark.parametrize("layer_name", LIGHT)
def test_light_layers_load_neither_torch_nor_transformers(layer_name):
    """The same as test_layers for what is imported at second hand: every module is imported in a fresh process."""
    modules = [name_of(p) for p in FILES if layer(name_of(p)) == layer_name]
    load = f"for m in {modules!r}: importlib.import_module(m)"
    code = f"import importlib, sys\n{load}\nprint(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("dz.hub.x", "from dz.cli import output", "cli is not below it"),
        ("dz.hub.x", "from dz.weights.formats import F", "weights is not below it"),
        ("dz.hub.x", "def f():\n    import dz.adapt", "adapt is not below it"),
        ("dz.core.x", "from dz import ops", "ops is not below it"),
        ("dz.core.x", "import torch", "loads torch"),
        ("dz.cli.x", "try:\n    from torch import nn\nexcept ImportError:\n    pass", "loads torch.nn"),
        ("dz.engine.x", "def f():\n    from transformers import AutoModel", "only dz.upstream may"),
        ("dz.engine.x", "importlib.import_module('transformers.models')", "only dz.upstream may"),
        ("dz.adapt.x", "from dz.kernels.rms_norm import triton", "a kernel by name"),
        ("dz.adapt.x", "import_module(f'dz.kernels.{op}')", "a kernel by name"),
        ("dz.adapt.x", "import kernels", "another distribution"),
        ("dz.serve.a.b", "from ...cli import output", "cli is not below it"),
        ("dz.errors", "from dz.core import op", "core is not below it"),
    ],
)
def test_the_rules_bite(module, source, words):
    assert any(words in f for f in faults(module, imports(source, module)))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dz.cli.x", "from dz.core import op\nfrom dz import errors\nimport dz\nfrom dz.cli import output"),
        ("dz.cli.x", "def f():\n    import torch"),
        ("dz.cli.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("dz.upstream.x", "from transformers import AutoModel"),
        ("dz.engine.x.y", "from .z import a\nfrom ..memory import b\nimport torch"),
    ],
)
def test_the_rules_allow(module, source):
    assert not faults(module, imports(source, module))
