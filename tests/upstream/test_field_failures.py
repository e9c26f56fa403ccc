"""Failures that were seen in the field, each as a check: what a load must refuse, cut or hold in memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dz.errors import Refused
from dz.upstream.build import build_meta
from dz.upstream.weights import coverage, load, refuse_incomplete
from dz.weights import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
EXPERT = "model.layers.1.mlp.experts.{}.down_proj.weight"


@pytest.fixture
def copy(tiny, tmp_path_factory):
    return lambda name: tiny.build(name, tmp_path_factory.mktemp(name))


def test_r21_renamed_dropped_and_added_experts_are_three_lists(copy, tiny):
    folder = copy("qwen3_moe")
    held = tiny.tensors(folder)
    changes = {
        EXPERT.format(3): None,
        "model.layers.1.mlp.experts.3.downward_proj.weight": held[EXPERT.format(3)],  # renamed
        EXPERT.format(4).replace("layers.1", "layers.2"): None,  # dropped
        "model.layers.2.mlp.experts.5.extra": torch.zeros(3),  # added
        "model.norm.weight": torch.zeros(7),  # of another shape
    }
    source = tiny.rewrite(folder, changes)
    built, checkpoint = build_meta(source, trust=False), open_checkpoint(source)
    found = coverage(built, checkpoint.headers())
    assert {EXPERT.format(3), EXPERT.format(4).replace("layers.1", "layers.2")} <= set(found.missing)
    assert {"model.layers.1.mlp.experts.3.downward_proj.weight", "model.layers.2.mlp.experts.5.extra"} <= set(
        found.unexpected
    )
    assert any(s.startswith("model.norm.weight") for s in found.shape_changed)
    with pytest.raises(Refused) as e:
        load(built, checkpoint.headers(), checkpoint.get, "cpu")
    assert all(word in e.value.why for word in ("missing: ", "unexpected: ", "shape changed: "))


def test_r21_all_tensors_and_all_bytes_are_covered(copy, tiny):
    source = tiny.source(copy("qwen3_moe"))
    built, checkpoint = build_meta(source, trust=False), open_checkpoint(source)
    found = load(built, checkpoint.headers(), checkpoint.get, "cpu")
    assert found.matched == len(checkpoint.headers()) and not found.ignored
    held = sum(p.numel() * p.element_size() for p in built.model.parameters())
    assert held == sum(i.bytes for i in checkpoint.headers().values())


SHORT = "model.layers.0.input_layernorm.weight"


def padded(copy, tiny, tail):
    folder = copy("llama")
    held = tiny.tensors(folder)[SHORT]
    return tiny.rewrite(folder, {SHORT: torch.cat([held, tail])}), held


def test_r24_a_vector_padded_with_zeros_is_narrowed_and_that_is_said(copy, tiny):
    source, held = padded(copy, tiny, torch.zeros(32))
    built, checkpoint = build_meta(source, trust=False), open_checkpoint(source)
    found = coverage(built, checkpoint.headers())
    assert found.complete and found.narrowed == {SHORT: "32 of 64"}
    refuse_incomplete(found)
    load(built, checkpoint.headers(), checkpoint.get, "cpu")
    assert torch.equal(built.model.state_dict()[SHORT], held)  # the first values, not every second one


def test_r24_other_padding_than_zeros_is_an_error(copy, tiny):
    tail = torch.zeros(32)
    tail[17] = 1e-30
    source, _ = padded(copy, tiny, tail)
    built, checkpoint = build_meta(source, trust=False), open_checkpoint(source)
    with pytest.raises(Refused) as e:
        load(built, checkpoint.headers(), checkpoint.get, "cpu")
    assert e.value.code == "padding" and SHORT in e.value.what and "1 of the others" in e.value.why


def test_r24_a_shorter_vector_and_a_longer_matrix_stay_another_shape(copy, tiny):
    folder = copy("llama")
    source = tiny.rewrite(folder, {SHORT: torch.ones(16), "lm_head.weight": torch.zeros(tiny.VOCAB + 3, 32)})
    found = coverage(build_meta(source, trust=False), open_checkpoint(source).headers())
    assert not found.narrowed and len(found.shape_changed) == 2


PROBE = """
import sys
from pathlib import Path
import torch
from dz.core.source import FileEntry, Source
from dz.upstream.build import build_meta
from dz.upstream.weights import load
from dz.weights import open_checkpoint

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

folder = Path(sys.argv[1])
files = tuple(FileEntry(path=p.name, size=p.stat().st_size) for p in sorted(folder.iterdir()))
source = Source(name=str(folder), folder=str(folder), commit="", rev8="0" * 8, code_hash="", files=files)
built, checkpoint = build_meta(source, trust=False), open_checkpoint(source)
most = before = anonymous()

def get(name):
    global most
    tensor = checkpoint.get(name).clone()
    most = max(most, anonymous())
    return tensor

load(built, checkpoint.headers(), get, "cpu")
print(max(most, anonymous()) - before, checkpoint.bytes)
"""


def test_r26_a_load_takes_the_model_and_less_than_two_shards(tmp_path):
    """Forty shards of about 8 MB through upstream's own mapping; the peak is of memory that is the process's own."""
    import transformers
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=2304, num_hidden_layers=39, num_attention_heads=4,
        num_key_value_heads=4, architectures=["LlamaForCausalLM"], dtype="float32",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in transformers.LlamaForCausalLM(config).state_dict().items()}
    shards = {}
    for name, shape in shapes.items():
        number = name.split(".")[2] if ".layers." in name else "rest"
        shards.setdefault(number, {})[name] = torch.full(shape, 0.5)
    weight_map = {}
    for n, tensors in shards.items():
        save_file(tensors, tmp_path / f"model-{n}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{n}.safetensors")
    import json

    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    grown, model = map(int, done.stdout.split())
    shard = max((tmp_path / f).stat().st_size for f in set(weight_map.values()))
    assert len(set(weight_map.values())) == 40 and shard > 7e6
    assert grown < model + 2 * shard
