"""From a folder to a runner: refused early, told in words, streamed through memory, nothing half loaded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dz
from dz.errors import Refused
from dz.weights.safetensors import SafetensorsCheckpoint


@pytest.fixture
def copy(models, tmp_path):
    """copy(name): a folder of the test's own."""
    return lambda name: shutil.copytree(models(name).folder, tmp_path / name)


@pytest.fixture
def unread(monkeypatch):
    """After `unread()` reading any tensor is a failure."""

    def get(self, name):
        raise AssertionError(f"{name} was read")

    return lambda: monkeypatch.setattr(SafetensorsCheckpoint, "get", get)


def test_a_checkpoint_that_does_not_fit_is_refused_unread(copy, tiny, loading, unread):
    folder = copy("llama")
    tiny.rewrite(folder, {"model.norm.weight": None, "extra.weight": torch.zeros(3)})
    said = []
    unread()
    with pytest.raises(Refused) as e:
        loading(folder, said=said)
    assert "1 missing: model.norm.weight" in e.value.why
    assert "1 unexpected: extra.weight" in e.value.why
    assert not [line for line in said if "weights" in line]


def test_a_model_that_does_not_fit_is_refused_unread(models, loading, unread):
    folder = models("llama").folder
    unread()
    with pytest.raises(Refused) as e:
        loading(folder, budget=100_000)
    assert e.value.code == "no_memory"
    assert "B are missing" in e.value.why


@pytest.mark.parametrize("name", ["llama", "deepseek_v4", "dynamic"])
def test_what_is_said(models, loading, name):
    """Stages with their seconds, the memory plan by rows, the tier with its proof and why no faster one."""
    said = []
    loaded = loading(models(name).folder, said=said)
    assert [stage for stage, _ in loaded.stages] == ["build", "weights", "tiers", "swaps"]
    assert all(seconds >= 0 for _, seconds in loaded.stages)
    memory = [line for line in said if line.startswith("memory: ")]
    assert [r.name for r in loaded.memory] == ["weights", "cache blocks", "state slots", "activations", "left over"]
    assert all(any(r.name in line for line in memory) for r in loaded.memory)
    params = {id(p): p.numel() * 4 for p in loaded.built.model.parameters()}
    assert loaded.memory[0].bytes == sum(params.values())
    assert sum(r.bytes for r in loaded.memory) == 1 << 30
    assert any(f"in tier {loaded.tier.name}, proved to " in line for line in said)
    assert sum("not taken: " in line for line in said) == len(loaded.tier.rejected)
    measured = [line for line in said if "measured after loading" in line]
    assert bool(measured) == (name == "dynamic")  # its rope asks for values, which meta has not


def test_limits_are_those_of_the_plan(models, loading):
    loaded = loading(models("llama").folder, max_model_len=100, max_num_seqs=3, block_size=8, num_blocks=20)
    limits = loaded.limits
    assert (limits.max_model_len, limits.max_num_seqs, limits.slots) == (100, 3, 3)
    assert (limits.block_size, limits.blocks) == (8, 20)
    assert loaded.runner.tier.run.store.slots == 160
    assert loaded.vocab == 97


def test_tensors_left_out_are_told(copy, tiny, loading):
    folder = copy("llama")
    tiny.rewrite(folder, {"mtp.weight": torch.zeros(25)})
    said = []
    loaded = loading(folder, said=said, ignore=("mtp.*",))
    assert loaded.coverage.ignored == {"mtp.weight": 100}
    assert [line for line in said if "not loaded: mtp.weight (100 B; recipe: mtp.*)" in line]


def test_dummy_weights_are_never_read(models, loading, unread, helpers):
    """All the rest as usual: the same names, shapes and tiers."""
    model = models("gpt_oss")
    unread()
    loaded = loading(model.folder, load_format="dummy")
    assert loaded.tier.name == "gather"
    got, ends, _ = helpers.drive(model.engine(runner=loaded.runner), [("a", [3, 4], helpers.greedy(4), {})])
    assert (len(got["a"]), ends["a"]) == (4, "length")


def test_half_precision(models, loading, helpers):
    """bfloat16 is served in bfloat16 and still proved (to bfloat16's rounding)."""
    loaded = loading(models("llama").folder, dtype="bfloat16")
    assert {p.dtype for p in loaded.built.model.parameters()} == {torch.bfloat16}
    assert loaded.tier.name == "gather"
    assert 0 < loaded.tier.error < 0.1
    got, _, _ = helpers.drive(models("llama").engine(runner=loaded.runner), [("a", [3, 4], helpers.greedy(6), {})])
    assert len(got["a"]) == 6


def test_sharded_checkpoints(tiny, tmp_path, loading, models, helpers):
    model = models("qwen3_moe")
    folder = tiny.build("qwen3_moe", tmp_path / "sharded", shard="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 4
    loaded = loading(folder)
    jobs = [(str(i), c.tokens, helpers.greedy(tiny.NEW), {}) for i, c in enumerate(model.cases)]
    got, _, _ = helpers.drive(model.engine(runner=loaded.runner), jobs)
    assert [got[str(i)] for i in range(4)] == model.want


# --- memory of a load

WATCH = """
import sys, threading, time, json
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
import transformers, transformers.core_model_loading
from dz.core.source import Source, FileEntry
from pathlib import Path
from dz.upstream.build import build_meta
from dz.engine import loader
from dz.engine.loader import Wishes
from dz.upstream.decoder import Decoder
from dz.weights.checkpoint import open_checkpoint

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

def load(folder):
    files = tuple(FileEntry(path=p.name, size=p.stat().st_size) for p in folder.iterdir())
    source = Source(name=str(folder), folder=str(folder), commit="", rev8="0", code_hash="", files=files)
    built = build_meta(source, trust=False, dtype=torch.float32)
    wishes = Wishes(dtype="float32", max_model_len=0, max_num_seqs=1, max_num_batched_tokens=8, block_size=4,
                    num_blocks=0, device="cpu", budget=1 << 34)
    peak, done, base = [0], [], anonymous()

    def watch():
        while not done:
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    loader._read(built, Decoder(built), open_checkpoint(source), wishes)
    done.append(1)
    thread.join()
    model = sum(p.numel() * p.element_size() for p in built.model.parameters())
    return {"peak": peak[0] - base, "after": anonymous() - base, "model": model}

print(json.dumps([load(Path(p)) for p in sys.argv[2:]]))
"""


LARGE = {
    "llama": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "head_dim": 128},
    "qwen3_moe": {
        "hidden_size": 256,
        "num_hidden_layers": 12,
        "num_experts": 12,
        "moe_intermediate_size": 256,
        "head_dim": 64,
    },
}


def test_weights_are_streamed(tiny, tmp_path):
    """Anonymous memory of a load peaks below the model and two shards: nothing is held twice, nothing read ahead.

    malloc maps every tensor here, as it does those of a real checkpoint: its heap would keep small freed pieces."""
    folders = [tiny.build(name, tmp_path / name, shard="12MB", **changes) for name, changes in LARGE.items()]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "MALLOC_MMAP_THRESHOLD_": "65536"}
    root = str(Path(dz.__file__).parent.parent)
    command = [sys.executable, "-c", WATCH, root, *map(str, folders)]
    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    for folder, seen in zip(folders, json.loads(out.stdout.splitlines()[-1]), strict=True):
        shards = [p.stat().st_size for p in folder.glob("*.safetensors")]
        assert len(shards) >= 8
        assert seen["model"] > 90e6
        assert seen["after"] > seen["model"] * 0.9, "the weights are not in memory of their own"
        assert seen["peak"] < seen["model"] + 2 * max(shards), (folder.name, seen)
