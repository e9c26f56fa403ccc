"""`dz serve`: flags to configuration, and what it says. The server itself is tested in tests/serve."""

import json

import pytest

from dz.core import envelope
from dz.core.messages import Ready
from dz.core.plan import Plan
from dz.core.source import Source

READY = Ready(
    max_model_len=64, vocab_size=10, eos_token_ids=[1], dtype="float32", device="cpu", max_num_seqs=4, blocks=8,
    block_size=16, slots=4, stages=[("weights", 1.25)], memory=[("weights", 3_000_000, "as stored")],
    mixers=[("attention", 2, "gather")], swaps=[("layers.*.norm", "decode", "rms_norm/torch")],
    ignored={"extra.weight": 4096},
)  # fmt: skip


FLAGS = """--host 0.0.0.0 --port 0 --api-key a --api-key b --served-model-name x --served-model-name y
    --max-model-len 4k --max-num-seqs 3 --block-size 8 --num-blocks 9 --trust-remote-code --load-format dummy
    --plugin builtins:repr --max-restarts 0 --generation-config none --drain-timeout 2.5 --uds /tmp/s
    --enable-request-id-headers --enable-log-requests --max-num-queued-reqs 5 --max-body-bytes 10
    --max-image-bytes 11 --max-image-pixels 12 --limit-mm-per-prompt image=2 --metrics-public
    --allowed-origins http://a --engine-timeout 7 --frozen --set rms_norm=upstream --recipe default
    --revision abc --dtype float32 --device cpu"""


@pytest.fixture
def served(dz, monkeypatch, tmp_path):
    """Run `dz serve /m ...`; returns (code, stdout, stderr, configuration, how the plan was asked for)."""
    seen = {}
    (tmp_path / "config.json").write_text('{"model_type": "made_up"}')
    source = Source(name="/m", folder=str(tmp_path), commit="", rev8="12345678", code_hash="", files=())

    def plan(given, **options):
        seen["plan"] = options
        return Plan(model=given.name, rev8=given.rev8, device="cpu", dtype="float32", sites=())

    def serve(config, listener):
        seen["config"] = config
        listener.loaded(READY)
        listener.note("ready: http://127.0.0.1:1")
        return 0

    def resolve(name, workspace, trust):
        seen["name"] = name
        return source

    monkeypatch.setattr(dz_module("hub"), "resolve", resolve)
    monkeypatch.setattr(dz_module("adapt"), "current_plan", plan, raising=False)
    monkeypatch.setattr(dz_module("serve.launch"), "serve", serve)
    monkeypatch.delenv("DZ_API_KEY", raising=False)

    def run(*argv):
        seen.clear()
        return (*dz("serve", "/m", *argv), seen)

    return run


def dz_module(name):
    """A module of dz, under a name that the fixture `dz` does not hide."""
    import importlib

    return importlib.import_module(f"dz.{name}")


def test_what_is_said(served):
    code, out, err, seen = served()
    assert (code, out) == (0, "")
    for text in ("attention       2  gather", "rms_norm/torch", "not loaded: extra.weight (4.1 kB)", "64 tokens"):
        assert text in err
    assert err.rstrip().endswith("ready: http://127.0.0.1:1")
    config = seen["config"]
    assert (config.host, config.port, config.trust, config.load_format) == ("127.0.0.1", 8000, False, "auto")
    assert config.settings["max_num_seqs"] == 16
    assert config.plan["model"] == "/m"
    assert seen["plan"]["frozen"] is False and seen["plan"]["device"] == "auto" and seen["plan"]["sets"] is None


def test_flags_reach_the_configuration(served):
    code, _, err, seen = served(*FLAGS.split())
    assert code == 0, err
    c = seen["config"]
    assert seen["name"] == "/m@abc"
    assert (c.host, c.port, c.api_keys, c.names, c.uds) == ("0.0.0.0", 0, ("a", "b"), ("x", "y"), "/tmp/s")
    wanted = {
        "max_model_len": 4000,
        "max_num_seqs": 3,
        "block_size": 8,
        "num_blocks": 9,
        "dtype": "float32",
        "device": "cpu",
    }
    assert {k: c.settings[k] for k in wanted} == wanted
    assert (c.trust, c.load_format, c.plugins, c.max_restarts) == (True, "dummy", ("builtins:repr",), 0)
    assert (c.generation_config, c.drain_timeout, c.request_id_headers, c.log_requests) == ("none", 2.5, True, True)
    assert (c.limits.queued, c.limits.body, c.metrics_public, c.allowed_origins) == (5, 10, True, ("http://a",))
    assert (c.limits.images.bytes, c.limits.images.pixels, c.limits.images.count) == (11, 12, 2)
    assert c.watch.silence == 7
    plan = seen["plan"]
    assert (plan["frozen"], plan["sets"], plan["recipe"], plan["trust"]) == (
        True,
        ["rms_norm=upstream"],
        "default",
        True,
    )


def test_keys_from_the_environment(served, monkeypatch):
    monkeypatch.setenv("DZ_API_KEY", "secret")
    _, out, err, seen = served()
    assert seen["config"].api_keys == ("secret",)
    assert "secret" not in out + err
    assert served("--api-key", "other")[3]["config"].api_keys == ("other",)
    assert served("--api-key", "")[0] == 2


def test_names_of_other_servers_come_with_a_hint(served):
    _, _, err, seen = served("--context-length", "2K", "--max-running-requests", "5", "--mem-fraction-static", "0.5")
    assert "note: --context-length is --max-model-len here" in err
    settings = seen["config"].settings
    assert (settings["max_model_len"], settings["max_num_seqs"], settings["gpu_memory_utilization"]) == (2048, 5, 0.5)
    code, _, err, _ = served("--context-length", "2K", "--max-model-len", "1K")
    assert code == 2 and "they mean the same" in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("-tp", "2"), "one device"),
        (("--load-format", "gguf"), "auto, dummy"),
        (("--limit-mm-per-prompt", "video=3"), "image=4"),
        (("--limit-mm-per-prompt", '{"image": "x"}'), "image=4"),
        (("--max-modle-len", "5"), "--max-model-len"),
        (("--port", "70000"), "port"),
    ],
)
def test_bad_flags(served, argv, said):
    code, _, err, _ = served(*argv)
    assert code == 2
    assert said in err


def test_limits_as_json_and_no_plan(served):
    _, _, _, seen = served("--limit-mm-per-prompt", '{"image": 3}', "--no-plan", "-tp", "1")
    assert seen["config"].limits.images.count == 3
    assert seen["config"].plan is None and "plan" not in seen


def test_load_only_answers_on_stdout(served):
    code, out, _, _ = served("--load-only")
    assert (code, out) == (0, "/m loads: float32 on cpu\n")
    _, out, _, _ = served("--load-only", "--json")
    document = json.loads(out)
    envelope.validate(document)
    assert document["data"]["memory"] == [["weights", 3_000_000, "as stored"]]


def test_a_recipe_gives_settings_that_nothing_nearer_does(served, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("prefer: {settings: {block_size: 32, max_num_seqs: 3}}\n")
    _, _, _, seen = served("--recipe", str(recipe), "--max-num-seqs", "5")
    config = seen["config"]
    assert (config.settings["block_size"], config.settings["max_num_seqs"]) == (32, 5)
