"""Build the demo repository: its code and configuration from this package, its weights from a seed.

The weights are random, not trained: scaled so that greedy output varies and its margins are far above rounding."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dz.demo.layout import Tensor, tensors
from dz.errors import EnvironmentFailure

if TYPE_CHECKING:
    import torch

REPOSITORY = Path(__file__).resolve().parent / "repository"
NAME = "acorn-2m"
SHARDS = 2
SPECIAL_TOKENS = 9
END_TOKEN = 2


def build(folder: Path) -> Path:
    """Write the repository into `folder`, which must be new or empty; returns it. The bytes depend on this package and
    torch's CPU generator only. Raises EnvironmentFailure when `folder` holds something."""
    if folder.exists() and any(folder.iterdir()):
        raise EnvironmentFailure(
            f"{folder} is not empty",
            "the demo repository is built into a folder of its own",
            f"name another folder, or remove it: rm -r {folder}",
            code="not_empty",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(REPOSITORY.iterdir()):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    config = json.loads((REPOSITORY / "config.json").read_text("utf-8"))
    silent = silent_rows(REPOSITORY / "tokenizer.json")
    _write_shards(folder, {t.name: values(t, silent) for t in tensors(config)})
    return folder


def _write_shards(folder: Path, state: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    total = sum(t.nbytes for t in state.values())
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(SHARDS)]
    done = 0
    for name, tensor in state.items():
        parts[min(SHARDS - 1, done * SHARDS // total)][name] = tensor
        done += tensor.nbytes
    where: dict[str, str] = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def silent_rows(tokenizer: Path) -> list[int]:
    """The tokens whose logit is always 0, so that greedy output never holds them: special tokens except the end of a
    turn, and tokens that are not printable ASCII (an untrained model would write broken UTF-8)."""
    vocabulary: dict[str, int] = json.loads(tokenizer.read_text("utf-8"))["model"]["vocab"]
    shown = {chr(c) for c in range(0x21, 0x7F)} | {"Ġ", "Ċ"}  # byte-level BPE writes blank and newline so
    odd = [i for token, i in vocabulary.items() if i >= SPECIAL_TOKENS and not set(token) <= shown]
    return sorted([*odd, *(i for i in range(SPECIAL_TOKENS) if i != END_TOKEN)])


def values(tensor: Tensor, silent: list[int]) -> torch.Tensor:
    """The values of one tensor, from a generator seeded by its name."""
    import torch

    source = torch.Generator("cpu").manual_seed(zlib.crc32(tensor.name.encode()))

    def normal(scale: float, shift: float = 0.0) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=source) * scale + shift

    def whole(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, tensor.shape, generator=source, dtype=torch.uint8)

    if tensor.fill in ("matrix", "head"):
        out = normal(0.6 / _fan_in(tensor.shape) ** 0.5 if tensor.fill == "matrix" else 0.25)
        if tensor.fill == "head":
            out[silent] = 0.0
        return out
    makers: dict[str, Any] = {
        "embedding": lambda: normal(1.0),
        "bias": lambda: normal(0.1),
        "norm": lambda: normal(0.1, 1.0),
        "small": lambda: normal(0.3),
        "decay": lambda: normal(1.0, -3.0),  # most channels forget slowly
        "codes": lambda: whole(0, 256),
        "scales": lambda: whole(127 - 7, 127 - 4),
    }
    return makers[tensor.fill]()


def _fan_in(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape[1:]:
        size *= n
    return size
