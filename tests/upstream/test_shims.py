"""Code written for transformers 4.x: through declared shims token by token as its twin of today, or refused by place.

R09 and R10 of the field failures are here as tests; what reads the code is tested in tests/inspect/test_audit.py."""

import builtins
import json
import sys
import types

import pytest
import torch

from dz.errors import Refused
from dz.upstream.config import architecture
from dz.upstream.installed import Installed
from dz.upstream.remote_facts import read_code
from dz.upstream.shims import apply, caches, flash, linear, masks, rope
from dz.upstream.shims.needs import needed
from dz.upstream.shims.shim import load
from dz.upstream.shims.table import SHIMS

PROMPTS = ([5], [7, 60, 3, 44, 9, 12], list(range(3, 36)))


@pytest.fixture(autouse=True)
def own_modules():
    """Shims are taken back, and modules of repository code forgotten."""
    yield
    for active in list(apply._ACTIVE.values()):
        active.undo()
    for name in [n for n in sys.modules if n.startswith("transformers_modules")]:
        del sys.modules[name]


def generated(cls, config, folder, new=12):
    """Tokens and logits of upstream's greedy generate for each prompt, with its cache."""
    model = cls.from_pretrained(str(folder), config=config, dtype=torch.float32).eval()
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        got = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0,
            eos_token_id=None, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        out.append((got.sequences[0, len(prompt) :].tolist(), torch.cat(got.logits)))
    return out


def twin(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    data = json.loads((folder / "config.json").read_text())
    others = ("auto_map", "architectures", "model_type", "sliding_window", "use_sliding_window")
    config = LlamaConfig(**{k: v for k, v in data.items() if k not in others})
    return LlamaForCausalLM, config


@pytest.mark.parametrize("tied", [False, True])
def test_r10_code_of_4x_gives_the_tokens_of_its_twin(tiny, old_style, tmp_path, tied):
    folder = old_style.write(tiny, tmp_path / "old", tie_word_embeddings=tied)
    arch = architecture(tiny.source(folder), trust=True)
    assert arch.runs == "repository" and arch.cls.__name__ == "OldForCausalLM"
    mine, theirs = generated(arch.cls, arch.config, folder), generated(*twin(folder), folder)
    for (tokens, logits), (want, truth) in zip(mine, theirs, strict=True):
        assert tokens == want
        torch.testing.assert_close(logits, truth, atol=2e-4, rtol=1e-4)
    assert len({t for tokens, _ in mine for t in tokens}) > 5
    used = {n.shim.name for a in apply._ACTIVE.values() for n in a.needs}
    assert {
        "cache-length", "cache-usable-length", "cache-seen-tokens", "cache-tuples", "rope-settings", "tied-weights",
        "generation", "computed-buffers",
    } <= used  # fmt: skip
    for name, module in (("mask-helpers", "modeling_attn_mask_utils"), ("export", "onnx")):
        assert (name in used) == (Installed().module(f"transformers.{module}").state == "missing")


def test_code_of_4x_with_a_window_of_its_own_keeps_every_key(tiny, old_style, tmp_path):
    """The window stands in config.json, the code masks by itself (here: not at all): nothing is dropped silently."""
    folder = old_style.write(tiny, tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 4, "use_sliding_window": False}))
    arch = architecture(tiny.source(folder), trust=True)
    assert arch.config.layer_types == ["full_attention"] * 3
    mine, theirs = generated(arch.cls, arch.config, folder), generated(*twin(folder), folder)
    assert [t for t, _ in mine] == [t for t, _ in theirs]


def test_code_of_4x_runs_in_the_engine(tiny, old_style, tmp_path, loading):
    """The engine compares its tiers with upstream's own run of the loaded model before it takes one."""
    loaded = loading(old_style.write(tiny, tmp_path / "old"), trust=True)
    assert loaded.built.runs == "repository" and loaded.coverage.complete


def test_what_is_needed_is_said_with_its_places(tiny, old_style, tmp_path):
    folder = old_style.write(tiny, tmp_path / "old")
    lines = (folder / "modeling_old.py").read_text().splitlines()
    found = {n.shim.name: n for n in needed(read_code(tiny.source(folder)), Installed())}
    place = next(i for i, text in enumerate(lines, 1) if "get_usable_length(length, self.layer_idx)" in text)
    assert f"modeling_old.py:{place}: past_key_value.get_usable_length" in found["cache-usable-length"].places
    assert all(n.places for n in found.values())


def test_code_of_today_needs_no_shim(tiny, tmp_path):
    folder = tiny.build("llama", tmp_path / "new")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "new", "auto_map": {"AutoConfig": "new.NewConfig", "AutoModelForCausalLM": "new.NewModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    text = "from transformers import LlamaConfig, LlamaForCausalLM\n\nclass NewConfig(LlamaConfig):\n    pass\n"
    (folder / "new.py").write_text(text + "\nclass NewModel(LlamaForCausalLM):\n    config_class = NewConfig\n")
    before = builtins.__import__
    assert architecture(tiny.source(folder), trust=True).runs == "repository"
    assert not [n for a in apply._ACTIVE.values() for n in a.needs]
    assert builtins.__import__ is before


def test_only_the_repository_sees_its_shims(tiny, old_style, tmp_path):
    from transformers import DynamicCache
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    folder = old_style.write(tiny, tmp_path / "old")
    architecture(tiny.source(folder), trust=True)
    cache = DynamicCache()
    assert not hasattr(cache, "seen_tokens") and not hasattr(cache, "get_usable_length")
    with pytest.raises(TypeError):
        cache[0]
    assert "default" not in ROPE_INIT_FUNCTIONS and "flash_attn" not in sys.modules
    if Installed().module("transformers.modeling_attn_mask_utils").state == "missing":
        with pytest.raises(ImportError):
            import transformers.modeling_attn_mask_utils  # noqa: F401
    inside = {"__name__": next(iter(apply._ACTIVE)) + ".x.modeling_old", "cache": cache}
    exec("seen = cache.seen_tokens; usable = cache.get_usable_length(3); bound = cache.get_max_length()", inside)
    assert (inside["seen"], inside["usable"], inside["bound"]) == (0, 0, None)
    for active in list(apply._ACTIVE.values()):
        active.undo()
    assert "seen_tokens" not in vars(DynamicCache) and builtins.__import__.__module__ == "builtins"


def test_r10_what_no_shim_can_give_is_refused_by_file_and_line(tiny, old_style, tmp_path):
    """Writing into the tensors of a cache, which today's keeps elsewhere, and a name that is nowhere any more."""
    text = old_style.MODEL.replace(
        "        cos, sin = self.rotary(position_ids)\n",
        "        past_key_value.key_cache[self.layer_idx] = k\n        cos, sin = self.rotary(position_ids)\n",
    ).replace("import torch\n", "import torch\nfrom transformers.modeling_utils import gone_for_good\n", 1)
    folder = old_style.write(tiny, tmp_path / "old", model=text)
    (folder / "canary").unlink(missing_ok=True)
    lines = text.splitlines()
    with pytest.raises(Refused) as e:
        architecture(tiny.source(folder), trust=True)
    for sign in ("gone_for_good", "key_cache"):
        line = next(i for i, t in enumerate(lines, 1) if sign in t)
        assert f"modeling_old.py:{line}: " in e.value.why
    assert "4.36 to" in e.value.why and e.value.code == "remote_import"
    assert [f["file"] for f in e.value.data()["faults"]] == sorted(f["file"] for f in e.value.data()["faults"])
    assert not [n for n in sys.modules if n.startswith("transformers_modules.old")]


def test_r09_a_tokenizer_that_imports_what_has_moved(tiny, tmp_path):
    """By file, line and symbol, before anything runs; no traceback out of exec."""
    from dz.upstream.loading import load_tokenizer

    folder = tiny.build("llama", tmp_path / "m")
    settings = {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')\nfrom transformers.tokenization_utils import NoSuchTokenizer\n"
    (folder / "tokenization_x.py").write_text(code + "\n\nclass X:\n    pass\n")
    with pytest.raises(Refused) as e:
        load_tokenizer(tiny.source(folder), trust=True)
    assert "tokenization_x.py:2: imports transformers.tokenization_utils.NoSuchTokenizer" in e.value.why
    assert not mark.exists()


@pytest.mark.parametrize("shim", SHIMS, ids=lambda s: s.name)
def test_every_shim_is_declared_and_can_be_made(shim):
    assert shim.stands_for and shim.safe and shim.releases
    assert shim.symbols or shim.attributes or shim.mends
    for one in (*shim.symbols, *shim.attributes, *shim.mends):
        assert callable(load(one.make))
    for symbol in shim.symbols:
        assert load(symbol.make)(None) is not None or symbol.changed


def test_names_of_shims_differ():
    assert len({s.name for s in SHIMS}) == len(SHIMS)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("past, queries", [(0, 5), (4, 1), (2, 4)])
def test_masks(past, queries, window):
    total = past + queries
    padding = torch.ones(2, total, dtype=torch.long)
    padding[1, :2] = 0
    embeds = torch.zeros(2, queries, 8)
    got = masks.causal_mask(padding, (2, queries), embeds, past, window)
    assert got.shape == (2, 1, queries, total)
    for b in range(2):
        for q in range(queries):
            for k in range(total):
                seen = k <= q + past and (window is None or k > q + past - window) and bool(padding[b, k])
                assert (got[b, 0, q, k] == 0) == seen
    assert torch.equal(masks.causal_mask(got, (2, queries), embeds, past), got)
    assert torch.equal(masks.causal_mask((got == 0).float(), (2, queries), embeds, past), got)
    fused = masks.causal_mask_for_sdpa(padding, (2, queries), embeds, past, window)
    assert ((fused == 0).any(-1)).all()
    made = masks.MaskConverter(True, window).to_4d(padding, queries, torch.float32, key_value_length=total)
    assert torch.equal(made, got)


def test_masks_of_padding_alone():
    got = masks.padding_mask(torch.tensor([[1, 1, 0]]), torch.float32, tgt_len=2)
    assert (got == 0).tolist() == [[[[True, True, False]] * 2]]


@pytest.mark.parametrize("causal, window", [(False, (-1, -1)), (True, (-1, -1)), (True, (2, 0)), (False, (1, 1))])
def test_flash_attention(causal, window):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 6)
    got = flash.flash_attn_func(q, k, v, causal=causal, window_size=window, softmax_scale=0.3)
    assert got.shape == (2, 3, 4, 6)
    for s in range(3):
        for h in range(4):
            at = s + 5 - 3
            low = 0 if window[0] < 0 else max(0, at - window[0])
            high = at if causal else (4 if window[1] < 0 else min(4, at + window[1]))
            w = torch.softmax(k[1, low : high + 1, h // 2] @ q[1, s, h] * 0.3, 0)
            torch.testing.assert_close(got[1, s, h], w @ v[1, low : high + 1, h // 2])
    cut = torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([0, 5, 10], dtype=torch.int32)
    packed = flash.flash_attn_varlen_func(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        *cut,
        3,
        5,
        causal=causal,
        window_size=window,
        softmax_scale=0.3,
    )
    torch.testing.assert_close(packed, got.flatten(0, 1))
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash.flash_attn_func(q, k, v, dropout_p=0.1)


def test_padding_goes_out_and_comes_back():
    x, mask = torch.randn(3, 4, 2), torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]])
    tokens, indices, cu, longest, lengths = flash.unpad_input(x, mask)
    assert (cu.tolist(), longest, lengths.tolist()) == ([0, 3, 3, 6], 3, [3, 0, 3])
    assert torch.equal(flash.pad_input(tokens, indices, 3, 4), x * mask[..., None])


def test_caches():
    from transformers import DynamicCache

    cache = DynamicCache()
    k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    cache.update(k, v, 0)
    assert (caches.usable_length(cache, 5), caches.seen_tokens(cache), caches.max_length(cache)) == (3, 3, None)
    assert torch.equal(caches.keys(cache)[0], k) and torch.equal(caches.pair(cache, 0)[1], v)
    with pytest.raises(KeyError):
        caches.pair(cache, 1)
    again = caches.from_legacy(DynamicCache, caches.to_legacy(cache))
    assert again is not cache and torch.equal(caches.values(again)[0], v)
    assert caches.from_legacy(DynamicCache, cache) is cache
    bounded = types.SimpleNamespace(get_seq_length=lambda i=0: 6, get_max_length=lambda: 8)
    assert caches.usable_length(bounded, 4) == 4 and caches.max_length(bounded) == 8
    with pytest.raises(NotImplementedError, match="no stand-in"):
        caches.make_named(None)(None, 2, 64)


def test_rope_settings():
    plain = types.SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert rope.scaling(plain) is None and rope.theta(plain) == 5e5
    yarn = types.SimpleNamespace(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    assert rope.scaling(yarn) == {"rope_type": "yarn", "type": "yarn", "factor": 4.0}
    config = types.SimpleNamespace(head_dim=8, rope_theta=100.0, rope_parameters=None)
    inverse, factor = rope.plain(config)
    torch.testing.assert_close(inverse, torch.tensor([1.0, 100**-0.25, 0.1, 100**-0.75]))
    assert factor == 1.0
    with pytest.raises(AttributeError, match="rope_theta"):
        rope.plain(types.SimpleNamespace(head_dim=8, rope_parameters=None))


def test_linear_attention_has_the_calls_of_its_package():
    from dz.ops import kda

    torch.manual_seed(1)
    q, k, g = (torch.randn(2, 7, 3, 8) for _ in range(3))
    v, beta = torch.randn(2, 7, 3, 6), torch.rand(2, 7, 3)
    state = torch.randn(2, 3, 8, 6)
    a_log, bias = torch.randn(3), torch.randn(24)
    decay = linear.channel_gate(g.flatten(-2), a_log.view(1, 1, 3, 1), 8, g_bias=bias)
    torch.testing.assert_close(decay, linear.channel_gate(g, a_log, bias))
    got, new = linear.delta_per_channel(
        q, k, v, decay, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    want, last = kda.reference(q, k, v, g, beta, a_log=a_log, dt_bias=bias, state=state)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(new, last.float())
    one = g[..., 0].abs().neg()
    per_head = linear.delta_per_head(q, k, v, one, beta, use_qk_l2norm_in_kernel=True)[0]
    same = linear.delta_per_channel(q, k, v, one[..., None].expand_as(g), beta, use_qk_l2norm_in_kernel=True)[0]
    torch.testing.assert_close(per_head, same)


def test_convolutions_step_as_they_run():
    torch.manual_seed(2)
    conv = linear.Convolution(5, 4, bias=True)
    x = torch.randn(2, 9, 5)
    with torch.no_grad():
        whole, last = conv(x, output_final_state=True)
        state, parts = torch.zeros(2, 5, 4), []
        for t in range(9):
            parts.append(conv(x[:, t : t + 1], cache=state)[0])
        torch.testing.assert_close(torch.cat(parts, 1), whole)
        torch.testing.assert_close(state, last)
        rows, steps = linear.conv_rows(x.transpose(1, 2), conv.weight[:, 0], conv.bias, activation="silu"), []
        held = torch.zeros(2, 5, 3)
        for t in range(9):
            steps.append(linear.conv_step(x[:, t], held, conv.weight[:, 0], conv.bias, "silu"))
        torch.testing.assert_close(rows, torch.stack(steps, -1))
        torch.testing.assert_close(rows, whole.transpose(1, 2))
        norm = linear.GatedNorm(5, activation="sigmoid")
        gate = torch.randn(2, 9, 5)
        want = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gate.sigmoid()
        torch.testing.assert_close(norm(x, gate), want)


def test_packages_stand_in_for_the_repository_alone(tiny, tmp_path):
    """Code that imports kernels without asking, in every form of the statement."""
    folder = tiny.build("llama", tmp_path / "kernels")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "k", "auto_map": {"AutoConfig": "k.KConfig", "AutoModelForCausalLM": "k.KModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "k.py").write_text(
        "import flash_attn.bert_padding as padding\n"
        "from flash_attn import flash_attn_func\n"
        "from fla.ops.kda import chunk_kda\n"
        "from fla.ops.kda.gate import fused_kda_gate\n"
        "from transformers.utils import logging, LossKwargs\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "given = (flash_attn_func, padding.pad_input, chunk_kda, fused_kda_gate, logging.get_logger, LossKwargs)\n"
        "def late():\n    from causal_conv1d import causal_conv1d_fn\n    return causal_conv1d_fn\n"
        "class KConfig(LlamaConfig):\n    pass\n"
        "class KModel(LlamaForCausalLM):\n    config_class = KConfig\n"
    )
    arch = architecture(tiny.source(folder), trust=True)
    module = sys.modules[arch.cls.__module__]
    assert module.given[0] is flash.flash_attn_func and module.given[2] is linear.delta_per_channel
    assert module.late() is linear.conv_rows
    for name in ("flash_attn", "fla", "causal_conv1d"):
        assert name not in sys.modules
