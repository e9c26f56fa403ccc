"""The static audit: imports, interfaces and calls by file and line; nothing runs, nothing is imported."""

import ast
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dz.core.source import FileEntry, Source
from dz.hub import lock as locks
from dz.hub.lock import Lock
from dz.hub.stamp import code_digest, code_hash
from dz.inspect.audit import audit
from dz.inspect.audit_calls import calls
from dz.upstream.installed import Installed, here

MAP = {"AutoConfig": "m.Config", "AutoModelForCausalLM": "m.Model"}


def source(folder, **files):
    """A source of these files (`__` in a name is a slash), config.json with an auto_map unless one is given."""
    folder.mkdir(exist_ok=True)
    files = {"config.json": json.dumps({"model_type": "new_kind", "auto_map": MAP}), **files}
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path = path if path.suffix else path.with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    paths = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    entries = tuple(FileEntry(path=p, size=(folder / p).stat().st_size, sha256=code_digest(folder / p)) for p in paths)
    pin = code_hash(folder, paths)
    return Source(
        name=str(folder), folder=str(folder), commit="", rev8=pin[:8] or "0" * 8, code_hash=pin, files=entries
    )


def lines(found, weight):
    return [(f.file, f.line) for f in found.findings if f.weight == weight]


def test_no_code_no_audit(tmp_path):
    assert audit(source(tmp_path / "m", **{"config.json": "{}"})) is None


def test_r09_imports_are_resolved_before_anything_runs(tmp_path):
    text = (
        "import torch\n"  # 1
        "from torch import nn\n"
        "from transformers import PreTrainedModel, no_such_thing\n"  # 3
        "from transformers.tokenization_utils import PreTrainedTokenizer\n"  # an alias that upstream serves
        "from transformers.nowhere import anything\n"  # 5
        "import a_package_that_is_not_there\n"
        "try:\n    import another_absent_one\nexcept ImportError:\n    another_absent_one = None\n"
        "from typing import TYPE_CHECKING\n"  # 11
        "if TYPE_CHECKING:\n    from nowhere import Thing\n"
        "from .side import here\n"  # 14
        "from .lost import gone\n"
        "def late():\n    import absent_and_late\n"  # 17
        "raise SystemExit('was run')\n"
    )
    before = set(sys.modules)
    found = audit(source(tmp_path / "m", m=text, side="here = 1\n", tool="import an_absent_tool\n"))
    assert lines(found, "refuses") == [("m.py", 3), ("m.py", 5), ("m.py", 6), ("m.py", 15)]
    texts = {f.line: f.text for f in found.findings if f.weight == "refuses"}
    assert texts[3] == "imports transformers.no_such_thing: transformers has no no_such_thing"
    assert texts[6].endswith("no package a_package_that_is_not_there is installed")
    assert lines(found, "may fail") == [("m.py", 17), ("tool.py", 1)]
    assert found.loaded == ("m.py", "side.py") and len(found.files) == 3
    assert not {m for m in set(sys.modules) - before if "absent" in m}


def test_r10_interfaces_that_are_gone_name_their_releases_and_shim(tmp_path):
    text = (
        "def step(past_key_values, layer):\n"
        "    n = past_key_values.get_max_length()\n"
        "    seen = past_key_values.seen_tokens\n"
        "    positions = layer.cache_position[0]\n"
        "    past_key_values.value_cache[0] = seen\n"
        "    return n\n"
    )
    found = audit(source(tmp_path / "m", m=text))
    assert lines(found, "stands in")[:2] == [("m.py", 2), ("m.py", 3)]
    assert lines(found, "refuses") == [("m.py", 5)]
    said = next(f.text for f in found.findings if f.line == 3)
    assert "4.36 to" in said and "shim cache-seen-tokens" in said
    assert not [f for f in found.findings if f.line == 4]


def test_r12_a_repository_with_vendor_code_alone_is_said_to_be_one(tmp_path):
    config = json.dumps({"model_type": "vendors_own", "architectures": ["Own"]})
    made = source(tmp_path / "m", **{"config.json": config}, inference__model="import torch\n")
    found = audit(made, model_type="vendors_own")
    assert "inference/model.py" in found.vendor and "'vendors_own'" in found.vendor
    assert "--diff" in found.vendor and "--device" in found.vendor
    assert found.loaded == ()
    assert audit(made, model_type="llama").vendor == ""
    assert audit(source(tmp_path / "n", m=""), model_type="vendors_own").vendor == ""


def test_the_dangerous_calls_of_a_repository_are_listed(tmp_path):
    """The third of the three repositories of old code: it can run, and says what it reaches."""
    text = (
        "import os, subprocess as sp\n"
        "from pickle import loads\n"
        "from transformers import PreTrainedModel\n"
        "run = os.system\n"
        "class Model(PreTrainedModel):\n"
        "    def __init__(self, config):\n"
        "        sp.Popen(['curl', config.url])\n"
        "        run('ls')\n"
        "        open(config.path, 'ab').write(loads(b''))\n"
        "        open(config.path).read()\n"
    )
    found = audit(source(tmp_path / "m", m=text))
    assert [(f.line, f.text.partition(":")[0]) for f in found.findings if f.kind == "call"] == [
        (1, "process"), (2, "pickle"), (7, "process"), (8, "process"), (9, "file write"), (9, "pickle"),
    ]  # fmt: skip
    assert not found.refusals
    assert "6 calls reach outside (file write 1, pickle 2, process 3)" in found.summary()


@pytest.mark.parametrize(
    "text, kind",
    [
        ("import urllib.request\nurllib.request.urlopen('http://x')", "network"),
        ("import requests as r\nr.get('http://x')", "network"),
        ("from huggingface_hub import snapshot_download as s\ns('a/b')", "network"),
        ("__import__('os').system('x')", "process"),
        ("import importlib\nimportlib.import_module('subprocess').run(['x'])", "process"),
        ("from os import popen\npopen('x')", "process"),
        ("from pathlib import Path\nPath('x').write_text('y')", "file write"),
        ("from pathlib import Path\nPath('x').open('w')", "file write"),
        ("import shutil\nshutil.rmtree('/x')", "file write"),
        ("import torch\ntorch.save({}, 'x')", "file write"),
        ("mode = 'w'\nopen('x', mode)", "file write"),
        ("eval('1')", "evaluation"),
        ("e = exec\ne('1')", "evaluation"),
        ("import builtins\ngetattr(builtins, 'ev' + 'al')('1')", "evaluation"),
        ("import os\ngetattr(os, 'sys' + 'tem')('x')", "evaluation"),
        ("__builtins__['ev' + 'al']('1')", "evaluation"),
        ("import torch\ntorch.load('x.bin')", "pickle"),
        ("import numpy as np\nnp.load('x.npy', allow_pickle=True)", "pickle"),
        ("import yaml\nyaml.load('x')", "pickle"),
        ("import ctypes\nctypes.CDLL('x.so')", "native code"),
        ("from torch.utils.cpp_extension import load\nload('x', ['x.cu'])", "native code"),
        ("import base64\nbase64.b64decode('eA==')", "hidden string"),
        ("x = bytes.fromhex('00')", "hidden string"),
        ("x = '" + "4f2a9c01be7d" * 12 + "'", "hidden string"),
        ("x = b'" + "\\x8f\\x01\\xfe\\x13" * 12 + "'", "hidden string"),
        ("import os\ntoken = os.environ['HF_TOKEN']", "environment"),
    ],
)
def test_each_kind_of_call_is_seen(text, kind):
    found = calls("m.py", ast.parse(text))
    assert kind in {c.kind for c in found}
    assert all(c.line >= 1 and c.text for c in found)


@pytest.mark.parametrize(
    "text",
    [
        "open('x').read()",
        "import numpy as np\nnp.load('x.npy')",
        "class A:\n    def f(self):\n        self.rename('x')\n",
        "x = 'a plain sentence of more than one hundred and twenty letters which has spaces between its words ' * 3",
        "x = '" + "=" * 200 + "'",
        "import os\nos.path.join('a', 'b')",
        "import torch\ntorch.compile(f)\nre.compile('x')",
        "model.eval()",
    ],
)
def test_plain_code_has_none(text):
    assert calls("m.py", ast.parse(text)) == ()


@given(st.text(max_size=300))
def test_any_text_is_read_or_said_to_be_no_python(text):
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    calls("m.py", tree)


def test_files_that_are_no_python_and_entries_that_are_not_there(tmp_path):
    auto = {**MAP, "AutoTokenizer": ["absent.Tokenizer", None], "AutoProcessor": "other/repo--p.P"}
    config = json.dumps({"model_type": "new_kind", "auto_map": auto})
    found = audit(source(tmp_path / "m", **{"config.json": config}, m="import torch\n\nprint 'x'\n", side="def ("))
    assert lines(found, "refuses") == [("config.json", 1), ("config.json", 1), ("m.py", 3)]
    assert {f.kind for f in found.findings if f.weight == "refuses"} == {"missing_file", "import", "syntax"}


def test_code_that_changed_since_the_last_fetch_is_said_file_by_file(tmp_path):
    base, folder = tmp_path / "ws", tmp_path / "m"
    old = source(folder, m="x = 1\n", gone="y = 1\n", same="z = 1\n")
    locks.write(Lock(source=old, pinned=True), base, inputs={"model": str(folder)})
    assert audit(old, workspace=base).compared == ""
    (folder / "gone.py").unlink()
    new = source(folder, m="x = 2\n", fresh="")
    found = audit(new, workspace=base)
    assert [(f.file, f.text.split()[0]) for f in found.findings if f.kind == "changed"] == [
        ("m.py", "changed"), ("fresh.py", "new"), ("gone.py", "gone"),
    ]  # fmt: skip
    assert "3 files changed since m@" in found.summary()


def test_the_audit_as_data_is_plain_and_whole(tmp_path):
    found = audit(source(tmp_path / "m", m="import nowhere_at_all\nfrom transformers.onnx import OnnxConfig\n"))
    data = json.loads(json.dumps(found.data()))
    assert data["files"] == ["m.py"] and data["classes"][0]["class"] == "m.Config"
    assert data["findings"][0] == {
        "file": "m.py", "line": 1, "kind": "import", "weight": "refuses", "loaded": True,
        "text": "imports nowhere_at_all: no package nowhere_at_all is installed",
    }  # fmt: skip
    for shim in data["shims"]:
        assert shim["places"] and shim["safe"] and shim["stands_for"]


@pytest.mark.parametrize(
    "module, name, state",
    [
        ("transformers", "PreTrainedModel", "there"),
        ("transformers", "LlamaForCausalLM", "there"),  # by way of lazily imported packages
        ("transformers.models.llama", "LlamaConfig", "there"),
        ("transformers.models", "llama", "there"),
        ("transformers.utils", "logging", "there"),
        ("transformers", "NoSuchName", "missing"),
        ("transformers.cache_utils", "NoSuchCache", "missing"),
        ("torch", "float16", "unchecked"),
        ("torch.nn", "Linear", "there"),
        ("torch.nn", "functional", "there"),
        ("os.path", "join", "there"),
        ("os", "no_such", "missing"),
        ("not_installed_at_all", "x", "missing"),
    ],
)
def test_symbols_are_looked_up_without_importing(module, name, state):
    assert here().symbol(module, name).state == state


def test_what_is_installed_agrees_with_what_imports(tmp_path):
    """Forms in which a package binds names: stars with and without __all__, branches, a module's __getattr__."""
    package = tmp_path / "madeup"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from .a import *\nfrom .b import *\nfrom . import a as other\n"
        "try:\n    import json as j\nexcept ImportError:\n    j = None\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import only_typed\n"
        "for k in range(2):\n    pass\nx, (y, *z) = 1, (2, 3)\n"
    )
    (package / "a.py").write_text("__all__ = ['shown']\n__all__ += ['more']\nshown = more = hidden = only_typed = 1\n")
    (package / "b.py").write_text("visible = 1\n_private = 2\n")
    (package / "open.py").write_text("def __getattr__(name):\n    return name\n")
    (package / "sub" / "mod.py").write_text("v = 1\n")
    found = Installed([str(tmp_path)])
    there = ("shown", "more", "visible", "other", "j", "k", "x", "y", "z", "a", "sub")
    assert {n: found.symbol("madeup", n).state for n in there} == dict.fromkeys(there, "there")
    for name in ("hidden", "only_typed", "nothing"):
        assert found.symbol("madeup", name).state == "missing", name
    assert found.symbol("madeup.open", "anything").state == "unchecked"
    assert found.symbol("madeup.sub.mod", "v").state == "there"
    assert found.module("madeup.sub.none").why == "madeup.sub has no module none"
