"""Which configuration and which class: by upstream's tables, by the repository's code only under trust."""

import json

import pytest
import torch

from dz.errors import Refused, UsageError
from dz.upstream.build import build_meta
from dz.upstream.config import architecture, raw_config

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

Path({canary!r}).write_text(__name__)


class DayZeroConfig(LlamaConfig):
    model_type = {kind!r}


class DayZeroForCausalLM(LlamaForCausalLM):
    config_class = DayZeroConfig
    mark = 7
"""


@pytest.fixture
def repository(tmp_path, tiny):
    """repository(**config): a folder with this configuration; its code would write a canary when it runs."""
    folder, canary = tmp_path / "repo", tmp_path / "canary"
    folder.mkdir()

    def make(kind="llama", code=True, **changes):
        config = {**CONFIG, "model_type": kind, **changes}
        if code:
            config["auto_map"] = {"AutoConfig": "day.DayZeroConfig", "AutoModelForCausalLM": "day.DayZeroForCausalLM"}
            text = CODE.format(canary=str(canary), kind=kind)
            for name in ("day.py", "tokenization_day.py", "processing_day.py", "setup.py", "__init__.py"):
                (folder / name).write_text(text)
        (folder / "config.json").write_text(json.dumps(config))
        return tiny.source(folder)

    make.canary = canary
    make.folder = folder
    return make


def test_a_known_type(repository):
    source = repository(code=False)
    arch = architecture(source, trust=False)
    assert (arch.cls.__name__, arch.runs, arch.vision) == ("LlamaForCausalLM", "transformers", False)
    assert arch.text_config is arch.config
    assert arch.raw["hidden_size"] == 16


def test_code_of_a_known_type_needs_trust(repository):
    """transformers knows the type, so it can be served without the repository's code; with trust that code runs."""
    source = repository()
    built = build_meta(source, trust=False)
    assert (built.runs, built.cls) == ("transformers", "LlamaForCausalLM")
    assert not repository.canary.exists()
    built = build_meta(source, trust=True)
    assert (built.runs, built.cls) == ("repository", "DayZeroForCausalLM")
    assert built.model.mark == 7
    assert repository.canary.exists()


@pytest.mark.parametrize("call", [architecture, build_meta])
def test_code_of_an_unknown_type_is_not_run_without_trust(repository, call):
    source = repository("day_zero")
    with pytest.raises(Refused) as e:
        call(source, trust=False)
    assert e.value.code == "unknown_architecture"
    assert "'day_zero'" in e.value.what
    assert "--trust-remote-code" in e.value.next
    assert str(repository.folder) in e.value.next
    assert not repository.canary.exists()
    assert build_meta(source, trust=True).runs == "repository"


def test_nothing_but_the_classes_runs_with_trust(repository):
    build_meta(repository("day_zero"), trust=True)
    assert repository.canary.read_text().endswith(".day")


@pytest.mark.parametrize("trust", [False, True])
def test_an_unknown_type_without_code(repository, trust):
    with pytest.raises(Refused) as e:
        architecture(repository("day_zero", code=False), trust=trust)
    assert e.value.code == "unknown_architecture"
    assert "trust" not in e.value.next


def test_no_type_at_all(repository):
    source = repository(code=False)
    (repository.folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    with pytest.raises(Refused, match="None"):
        architecture(source, trust=True)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("where", ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"])
def test_code_of_another_repository(repository, trust, where):
    source = repository("day_zero")
    config = json.loads((repository.folder / "config.json").read_text())
    config["auto_map"][where] = "someone/else--day.DayZeroConfig" if where != "AutoTokenizer" else [None, "a/b--t.T"]
    (repository.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused) as e:
        build_meta(source, trust=trust)
    assert e.value.code == "foreign_code"
    assert ("a/b" if where == "AutoTokenizer" else "someone/else") in e.value.what
    assert not repository.canary.exists()


def test_code_that_does_not_import(repository, tiny):
    repository("day_zero")
    (repository.folder / "day.py").write_text("import a_package_that_is_not_there\n")
    source = tiny.source(repository.folder)
    with pytest.raises(Refused) as e:
        architecture(source, trust=True)
    assert e.value.code in ("remote_import", "bad_config")
    assert "a_package_that_is_not_there" in e.value.why


def test_code_that_misses_its_class(repository, tiny):
    repository("day_zero")
    text = (repository.folder / "day.py").read_text()
    (repository.folder / "day.py").write_text(text.replace("DayZeroForCausalLM", "Renamed"))
    source = tiny.source(repository.folder)
    with pytest.raises(Refused) as e:
        architecture(source, trust=True)
    assert e.value.code == "remote_import"
    assert "day.DayZeroForCausalLM" in e.value.what


def test_architectures_of_another_type(repository):
    """The class must take this configuration: a type that names another's class is run by its own, as upstream does."""
    source = repository("mistral", code=False, architectures=["LlamaForCausalLM"], sliding_window=4)
    assert architecture(source, trust=False).cls.__name__ == "MistralForCausalLM"


def test_architectures_that_do_not_exist(repository):
    source = repository(code=False, architectures=["SomethingElse"])
    assert architecture(source, trust=False).cls.__name__ == "LlamaForCausalLM"


def test_a_type_without_language_model(repository):
    with pytest.raises(Refused) as e:
        architecture(repository("vit", code=False, architectures=["ViTModel"], hidden_act="gelu"), trust=False)
    assert e.value.code == "no_class"


def test_values_that_the_class_refuses(repository):
    with pytest.raises(Refused) as e:
        build_meta(repository(code=False, num_attention_heads="two"), trust=False)
    assert e.value.code in ("bad_config", "not_built")
    assert str(repository.folder) in e.value.next


def test_files_that_are_no_configuration(repository, tiny):
    source = repository(code=False)
    path = repository.folder / "config.json"
    for text, code in (("{", "bad_config_json"), ("[]", "bad_config_json"), ("\x00\xff", "bad_config_json")):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(Refused) as e:
            raw_config(source)
        assert e.value.code == code
    path.unlink()
    with pytest.raises(UsageError) as e:
        raw_config(source)
    assert e.value.code == "no_config_json"


@pytest.mark.parametrize(
    "stated, want",
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({}, torch.float32),
    ],
)
def test_the_dtype_is_the_configurations(repository, stated, want):
    built = build_meta(repository(code=False, **stated), trust=False)
    assert built.dtype == want
    assert {p.dtype for p in built.model.parameters()} == {want}
    assert build_meta(repository(code=False, **stated), trust=False, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("kind", [["llama"], 4, {}])
def test_a_type_that_is_no_name(repository, kind):
    source = repository(code=False)
    path = source.path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": kind}))
    with pytest.raises(Refused) as e:
        architecture(source, trust=False)
    assert e.value.code == "bad_config" and "model_type" in e.value.what
