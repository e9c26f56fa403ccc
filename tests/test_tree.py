"""What the tree promises: no model's name in the code, small files, a docstring on every public name."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SKIP = ROOT / "dz/demo/repository"  # the demo's model repository is upstream code, as a publisher would write it
CODE = [p for top in ("dz", "kernels") for p in sorted((ROOT / top).rglob("*.py")) if not p.is_relative_to(SKIP)]
DATA = [
    p for pattern in ("*.json", "*.toml") for p in sorted((ROOT / "dz").rglob(pattern)) if not p.is_relative_to(SKIP)
]
LONGEST = 400  # lines of one file

# Words that are also (the beginning of) a model type in transformers. Each was looked at: plain English, the name of a
# technique, a format or a protocol. A new one belongs here only if it is that too.
GENERIC = {
    *("align", "audio", "beam", "big", "bit", "clip", "conditional", "ctrl", "data", "decision", "decoder", "depth"),
    *(
        "efficient",
        "embedding",
        "encoder",
        "fast",
        "funnel",
        "git",
        "got",
        "grounding",
        "hybrid",
        "led",
        "long",
        "mask",
    ),
    *("mm", "mobile", "opt", "pop", "prompt", "rag", "recurrent", "rf", "seed", "speech", "stable", "step", "switch"),
    *("table", "time", "unlimited", "video", "vision", "visual"),
    *("mamba", "openai", "nemo", "cvt"),  # a technique; the HTTP API; the suffix of a file format; an instruction
}


def spread(text: str) -> str:
    """Text in lower case with words told apart: DeepThing3Config -> deep_thing3_config."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()


def stems(types: Iterator[str]) -> set[str]:
    """What gives a model type away: its first part without a version and the whole: glm4_moe -> glm, glm4_moe."""
    out = set()
    for name in types:
        first = re.split(r"[-_.]", spread(name))[0]
        out |= {re.sub(r"\d.*$", "", first) or first, re.sub(r"[-.]", "_", spread(name)).rstrip("0123456789")}
    return {s for s in out if len(s) > 1} - GENERIC


@cache
def pattern() -> re.Pattern[str]:
    """Matches a model type or family of the installed transformers as a word of spread text."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    longest_first = sorted(stems(iter(CONFIG_MAPPING_NAMES)), key=len, reverse=True)
    words = "|".join(re.escape(s).replace("_", "[-_ ]") for s in longest_first)
    return re.compile(rf"(?<![a-z])(?:{words})(?![a-z])")


def names_in(text: str) -> list[str]:
    """The model names in a text."""
    return pattern().findall(spread(text))


@pytest.mark.parametrize("path", CODE + DATA, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_model_is_named(path):
    found = [
        f"{path.name}:{n}: {names_in(line)} in: {line.strip()}"
        for n, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if names_in(line)
    ]
    assert not found, "\n".join(found)
    assert not names_in(path.stem)


@pytest.mark.parametrize(
    "text",
    [
        'if config.model_type == "qwen3_next":',
        "class DeepseekV3Attention:",
        "is_gpt_oss = True",
        "# the form that GLM-4 uses",
        '"""As in Llama: half split."""',
        "from x import KimiLinear",
        "minimax_m3_norm()",
        "gemma",
    ],
)
def test_a_model_would_be_found(text):
    assert names_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "prompt_tokens = step + 1",
        "kda, mamba2, mxfp4 and gated_delta",
        "an OpenAI-compatible server",
        "git-LFS pointer",
        "compressed-tensors",
        "reforms",
    ],
)
def test_techniques_and_words_are_fine(text):
    assert not names_in(text)


@pytest.mark.parametrize("path", CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_small(path):
    assert len(path.read_text("utf-8").splitlines()) <= LONGEST


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public modules, classes, functions and methods without a docstring."""
    if ast.get_docstring(tree) is None and tree.body:
        yield "the module"
    todo: list[tuple[str, ast.AST]] = [("", tree)]
    while todo:
        prefix, node = todo.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If | ast.Try):
                todo.append((prefix, child))
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or child.name.startswith(
                "_"
            ):
                continue
            if ast.get_docstring(child) is None and "overload" not in map(ast.unparse, child.decorator_list):
                yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                todo.append((f"{prefix}{child.name}.", child))


PUBLIC = [p for p in CODE if p.name.startswith("__") or not p.name.startswith("_")]  # ruff's rules D1 agree


@pytest.mark.parametrize("path", PUBLIC, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_public_name_is_explained(path):
    assert list(undocumented(ast.parse(path.read_text("utf-8")))) == []


def test_what_is_undocumented_is_found():
    methods = "    def f(self): ...\n    def _g(self): ...\n"
    source = f'"""M."""\nclass A:\n    """A."""\n{methods}if 1:\n    def h(): ...\ndef _p():\n    def q(): ...\n'
    assert sorted(undocumented(ast.parse(source))) == ["A.f", "h"]
    assert list(undocumented(ast.parse("x = 1"))) == ["the module"]
    assert list(undocumented(ast.parse(""))) == []


def test_kernels_is_no_package_of_its_own():
    """`import kernels` must mean the distribution of that name, which transformers imports."""
    assert (ROOT / "kernels").is_dir() and not (ROOT / "kernels/__init__.py").exists()
    for data in ("recipes", "checklists"):
        assert not list((ROOT / data).rglob("*.py"))


def test_tests_mirror_the_tree():
    """tests/<layer>/ exists only for a layer of dz/ or for kernels; no test folder is a package."""
    layers = {p.name for p in (ROOT / "dz").iterdir() if p.is_dir()} | {"kernels"}
    folders = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir() and list(p.rglob("test_*.py"))}
    assert folders <= layers
    assert not list((ROOT / "tests").rglob("__init__.py"))
