"""Models that bring a cache class with them: it is found, and each sequence gets one."""

import json

import pytest

CODE = """
import functools
import inspect

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LlamaModel

known = inspect.signature(LlamaModel.forward).parameters
NAME = next(n for n in ("cache", "past_key_values") if n in known)


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnCache(DynamicCache):
    def __init__(self, {arguments}):
        super().__init__()
        self.mine = 0


def checked(upstream):
    @functools.wraps(upstream)
    def forward(self, *args, **kwargs):
        given = kwargs.get(NAME)
        if given is not None:
            if not isinstance(given, OwnCache):
                {otherwise}
            kwargs[NAME].mine += 1
        elif kwargs.get("use_cache"):
            kwargs[NAME] = OwnCache({values})
        return upstream(self, *args, **kwargs)

    return forward


class OwnModel(LlamaModel):
    forward = checked(LlamaModel.forward)


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()

    {prepare}
"""
PREPARE = """
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if not isinstance(inputs.get(NAME), OwnCache):
            inputs[NAME] = OwnCache(self.config, 1, self.dtype, self.device)
        return inputs
"""
LONG = "config, batch_size, dtype, device"
REFUSES = "raise AttributeError('a DynamicCache has no attribute mine')"
REPLACES = "kwargs[NAME] = OwnCache({})"


@pytest.mark.parametrize(
    "code",
    [
        {"arguments": LONG, "values": "self.config, 1, None, None", "otherwise": REFUSES, "prepare": PREPARE},
        {"arguments": "", "values": "", "otherwise": REFUSES, "prepare": ""},
        {"arguments": "config", "values": "self.config", "otherwise": REFUSES, "prepare": ""},
        {"arguments": "", "values": "", "otherwise": REPLACES.format(""), "prepare": ""},
    ],
    ids=["prepared", "made without arguments", "made of the configuration", "silently replaced"],
)
def test_a_repositorys_own_cache(tiny, tmp_path, loading, models, helpers, code):
    llama = models("llama")
    folder = tiny.build("llama", tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE.format(**code))
    loaded = loading(folder, trust=True)
    cache = loaded.runner.decoder.new_cache()
    assert type(cache).__name__ == "OwnCache"
    assert loaded.runner.decoder.new_cache() is not cache
    engine = llama.engine(runner=loaded.runner, chunk=9, block=4)
    jobs = [(str(i), c.tokens, helpers.greedy(tiny.NEW), {}) for i, c in enumerate(llama.cases)]
    got, _, _ = helpers.drive(engine, jobs, every=2)
    assert [got[str(i)] for i in range(4)] == llama.want
    helpers.assert_idle(engine)


def test_upstreams_own(models):
    decoder = models("minimax").loaded.runner.decoder
    assert type(decoder.new_cache()).__name__ == "MiniMaxCache"
