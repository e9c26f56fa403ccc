"""What a variant's difference and an unknown site's description say."""

from __future__ import annotations

import json

import pytest

from dz.core.difference import Difference
from dz.core.registry import Registry
from dz.inspect import index
from dz.inspect.difference import difference
from dz.inspect.survey import survey
from dz.upstream.build import build_meta
from dz.upstream.config import raw_config
from dz.upstream.sources import Sources, installed_sources

CODE = '''
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm


class OddConfig(LlamaConfig):
    model_type = "odd"


class OddGate(nn.Linear):
    def __init__(self, config):
        super().__init__(config.hidden_size, config.odd_rank, bias=False)


class OddNorm(nn.Module):
    """An RMS norm that a gate multiplies."""
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.variance_epsilon = config.odd_eps
        self.gate_proj = OddGate(config)

    def forward(self, hidden_states, gate=None):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = hidden_states * torch.sigmoid(hidden_states)
        return self.weight * hidden_states.to(input_dtype)


class OddScan(nn.Module):
    """Something no op knows, with a state that it keeps itself."""
    def __init__(self, config):
        super().__init__()
        self.decay = nn.Parameter(torch.zeros(config.hidden_size))
        self.inner = nn.Linear(config.hidden_size, config.odd_width)

    def forward(self, hidden_states):
        h = torch.cumsum(torch.exp(self.decay) * hidden_states, 1)
        self.last = h[:, -1]
        return h + self.inner(hidden_states).mean(-1, keepdim=True)


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.input_layernorm = OddNorm(config)
            layer.post_attention_layernorm = nn.Sequential(LlamaRMSNorm(config.hidden_size), OddScan(config))
        self.post_init()
'''


@pytest.fixture(scope="module")
def small() -> index.Index:
    """An index of a few of upstream's files: enough for neighbours, quick to build."""
    found = installed_sources()
    names = ("llama", "qwen3_next", "deepseek_v3", "mamba2", "clip")
    files = {k: v for k, v in found.files.items() if k.split(".")[2] in names}
    sources = Sources(found.root, found.version, files)
    return index.Index(sources, index.build(sources))


@pytest.fixture(scope="module")
def odd(tiny, tmp_path_factory, small) -> Difference:
    folder = tmp_path_factory.mktemp("odd")
    auto = {"AutoConfig": "modeling_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
    more = {"model_type": "odd", "auto_map": auto, "architectures": ["OddForCausalLM"]}
    config = {**tiny.LLAMA, **more, "odd_eps": 1e-3, "odd_width": 7, "odd_rank": 3, "odd_window": 12}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_odd.py").write_text(CODE)
    source = tiny.source(folder)
    built = build_meta(source, trust=True)
    found = survey(built, source, {}, registry=Registry.discover())
    return difference(built, found, small, raw=raw_config(source))


def site(found: Difference, cls: str):
    return next(s for s in found.sites if s.cls == cls)


def test_known_sites_carry_no_difference(odd):
    known = odd.of("known")
    assert known
    assert not any(s.added or s.absent or s.neighbours or s.form or s.write for s in known)
    assert 0 < odd.known_share < 1


def test_a_variant_says_which_lines_keys_and_tensors_differ(odd):
    norm = site(odd, "OddNorm")
    assert (norm.status, norm.op, norm.count) == ("variant", "rms_norm", 3)
    assert norm.differs
    assert norm.form.name.endswith("RMSNorm")
    assert norm.form.likeness > 0.5
    line = next(n for n, text in enumerate(CODE.splitlines(), 1) if "* torch.sigmoid(hidden_states)" in text)
    text = "hidden_states = hidden_states * torch.sigmoid(hidden_states)"
    assert [(x.line, x.text) for x in norm.added] == [(line, text)]
    assert norm.added[0].file.endswith("modeling_odd")
    assert norm.absent == ()
    assert norm.config == {"hidden_size": 40, "odd_eps": 1e-3, "odd_rank": 3}  # what its new child reads is there too
    assert norm.shapes == {"gate_proj.weight": (3, 40)}


def test_an_unknown_site_says_all_that_an_op_needs(odd):
    scan = site(odd, "OddScan")
    assert (scan.status, scan.op) == ("unknown", None)
    assert scan.io.traced
    assert scan.io.inputs == ("hidden_states [1, 24, 40] float32",)
    assert scan.io.outputs == ("[1, 24, 40] float32",)
    assert scan.shapes == {"decay": (40,), "inner.weight": (7, 40), "inner.bias": (7,)}
    assert scan.state == "sets self.last in each call"
    assert scan.config == {"hidden_size": 40, "odd_width": 7}
    assert (scan.write, scan.begin) == ("dz/ops/scan.py", "dz ops new scan --args hidden_states")
    assert 1 <= len(scan.neighbours) <= 3
    assert all(n.name.startswith("transformers.") and 0 < n.likeness < 1 for n in scan.neighbours)


def test_a_key_that_nothing_reads_is_named(odd):
    assert odd.unread == ("odd_window",)


def test_a_recurrent_mixer_says_its_state(tiny, tmp_path, small):
    source = tiny.source(tiny.write(tmp_path / "m", tiny.HYBRID, weights=False))
    built = build_meta(source, trust=False)
    found = difference(built, survey(built, source, {}, registry=Registry.discover()), small, raw=raw_config(source))
    conv = next(s for s in found.sites if s.count == 2 and s.state.startswith("recurrent"))
    assert "conv_state" in conv.state
    functions = [s for s in found.of("unknown") if ":" in s.site]
    assert all(not s.io.traced and s.io.outputs for s in functions)
    assert found.unread == ()
