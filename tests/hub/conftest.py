"""Fixtures: the hub server, the client kept away from the real hub and from the user's token, and made-up models."""

import importlib.util
import json
import struct
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest

from dz.core.headers import BITS
from dz.hub import client
from dz.hub.acquire import Request


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


hub_server = sys.modules.get("hub_server") or _load("hub_server")


def safetensors(tensors: dict[str, tuple[str, tuple[int, ...]]], seed: int = 0) -> bytes:
    """A safetensors file with made-up data, written by hand."""
    header, data, at = {}, b"", 0
    for n, (name, (dtype, shape)) in enumerate(tensors.items()):
        size = prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        data += bytes((i * 31 + n * 7 + seed) % 251 for i in range(size))
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + data


def model_files(shards: int = 3, *, seed: int = 0, code: bool = False) -> dict[str, bytes]:
    """The files of a sharded model: ragged shapes, an index, configuration, tokenizer, a README."""
    files: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    for s in range(shards):
        name = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        tensors = {f"layers.{s}.a.weight": ("F32", (7, 5 + s)), f"layers.{s}.b.bias": ("BF16", (11,))}
        files[name] = safetensors(tensors, seed)
        weight_map |= dict.fromkeys(tensors, name)
    total = sum(prod(sh) * BITS[d] // 8 for s in range(shards) for d, sh in (("F32", (7, 5 + s)), ("BF16", (11,))))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["config.json"] = json.dumps({"model_type": "made_up", "seed": seed}).encode()
    files["tokenizer.json"] = json.dumps({"vocab": {str(i): i for i in range(200)}}).encode()
    files["README.md"] = b"# made up\n"
    if code:
        files["modeling_made_up.py"] = b"class Model: ...\n"
    return files


def lay(folder: Path, files: dict[str, bytes]) -> Path:
    """Write files into a folder."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


LFS_STUB = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 123456789\n"


class Recorder:
    """A Progress that keeps what it was told."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int | None]] = []
        self.notes: list[str] = []
        self.advanced: dict[str, int] = {}

    def start(self, name: str, total: int | None = None, unit: str = "") -> None:
        self.steps.append((name, total))
        self.advanced[name] = 0

    def advance(self, n: int = 1) -> None:
        self.advanced[self.steps[-1][0]] += n

    def finish(self, note: str = "") -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path):
    """No real hub, no user's token, no waiting between tries."""
    import huggingface_hub.constants as constants
    import huggingface_hub.utils._detect_agent as agents

    for var in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "DZ_WORKSPACE"):
        monkeypatch.delenv(var, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # dz.upstream puts the client offline in its process
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(agents, "_registry", {"standardEnvVars": [], "harnesses": {}})
    monkeypatch.setattr(client, "WAITS", (0.0, 0.0))


@pytest.fixture
def hub():
    with hub_server.HubServer() as server:
        yield server


@pytest.fixture
def base(tmp_path) -> Path:
    """The workspace."""
    return tmp_path / "reports"


@pytest.fixture
def ask(hub, tmp_path) -> Callable[..., Request]:
    """A Request to the loopback hub with a cache of its own."""

    def make(model: str = "org/name", **more) -> Request:
        return Request(**{"model": model, "endpoint": hub.url, "cache": tmp_path / "cache", **more})

    return make


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def made():
    """The helpers that make files: tests take them from here, since test folders are no packages."""

    class Made:
        model = staticmethod(model_files)
        safetensors = staticmethod(safetensors)
        lay = staticmethod(lay)
        stub = LFS_STUB
        server = hub_server

    return Made
