"""R11: nothing of a repository runs unless it is trusted and pinned. Repositories in which every file that upstream
could run writes a canary, put through every command that takes a model."""

import json
import shutil
from pathlib import Path

import pytest

from dz.cli import common, output
from dz.cli.main import main
from dz.errors import Refused

PARTS = ("configuration", "subconfig", "modeling", "tokenization", "processing", "image_processing")
TEMPLATE = """{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}
{{% set reach = cycler.__init__.__globals__ %}}{{{{ reach.os.system('touch {canary}') }}}}
{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}
{{{{ raise_exception.__globals__['os'].system('touch {canary}') }}}}"""


def code(part: str, canary: Path) -> str:
    """A module that leaves its canary when it is imported, and holds what a load would look for."""
    return (
        f"open({str(canary / part)!r}, 'a').write(__name__)\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class Config(LlamaConfig):\n    model_type = 'songbird'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
        "class Tokenizer(PreTrainedTokenizerFast):\n    pass\n"
        "class Processor:\n    pass\n"
    )


def tokenizer() -> str:
    words = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *"abcdefghij"])}
    special = [
        {"id": i, "content": w, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for w, i in list(words.items())[:3]
    ]  # fmt: skip
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    })  # fmt: skip


def write(tiny, folder: Path, canary: Path, kind: str, elsewhere: str = "") -> Path:
    """A repository of `kind` ("songbird": unknown to upstream; else a type that it knows), with weights."""
    tiny.build("llama", folder)
    canary.mkdir(exist_ok=True)
    far = f"{elsewhere}--" if elsewhere else ""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": f"{far}configuration.Config",
        "AutoModel": "modeling.Model",
        "AutoModelForCausalLM": "modeling.Model",
        "AutoTokenizer": ["tokenization.Tokenizer", None],
        "AutoProcessor": "processing.Processor",
    }
    config |= {"model_type": kind, "architectures": ["Model"]}
    config["encoder_config"] = {"model_type": "songbird", "auto_map": {"AutoConfig": "subconfig.Config"}}
    files = {
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "auto_map": {"AutoTokenizer": ["tokenization.Tokenizer", None]},
            "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>",
        },
        "processor_config.json": {
            "processor_class": "Processor", "auto_map": {"AutoProcessor": "processing.Processor"},
        },
        "preprocessor_config.json": {
            "image_processor_type": "Processor", "auto_map": {"AutoImageProcessor": "image_processing.Processor"},
        },
    }  # fmt: skip
    for name, data in files.items():
        (folder / name).write_text(json.dumps(data))
    (folder / "tokenizer.json").write_text(tokenizer())
    (folder / "chat_template.jinja").write_text(TEMPLATE.format(canary=canary / "template"))
    for part in PARTS:
        (folder / f"{part}.py").write_text(code(part, canary))
    for extra in ("__init__.py", "setup.py", "conftest.py", "sitecustomize.py", "custom_generate/generate.py"):
        (folder / extra).parent.mkdir(exist_ok=True)
        (folder / extra).write_text(code(extra.replace("/", "_"), canary))
    return folder


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """made[kind]: the repository of each kind, with the canaries beside it."""
    base = tmp_path_factory.mktemp("canaries")
    out = {kind: write(tiny, base / kind, base / f"{kind}-ran", kind) for kind in ("songbird", "llama")}
    return out | {"elsewhere": write(tiny, base / "elsewhere", base / "elsewhere-ran", "songbird", "someone/else")}


@pytest.fixture
def dz(tmp_path, monkeypatch, capsys):
    """Run a command line in this process: (exit code, stdout, stderr); what it starts inherits the surroundings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DZ_WORKSPACE", str(tmp_path / "reports"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)

    def run(*argv: str):
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    yield run
    output.use(output.Out())
    common.begin(())


def ran(folder: Path) -> list[str]:
    """The canaries of a repository."""
    return sorted(p.name for p in folder.with_name(f"{folder.name}-ran").iterdir())


COMMANDS = (
    "fetch MODEL", "fetch MODEL --force", "fetch MODEL --verify", "fetch MODEL --dry-run", "fetch MODEL --metadata",
    "adapt MODEL", "adapt MODEL --dry-run", "adapt MODEL --check", "adapt MODEL --diff",
    "adapt MODEL --dry-run --device H200x8", "accept MODEL --list", "show MODEL", "ls", "doctor", "config show",
)  # fmt: skip


@pytest.mark.parametrize(
    "command, kind",
    [*((c, "songbird") for c in COMMANDS), *((c, "llama") for c in ("adapt MODEL", "adapt MODEL --diff"))],
)
def test_r11_no_command_runs_code_without_trust(made, dz, command, kind):
    code, _, err = dz(*command.replace("MODEL", str(made[kind])).split())
    assert ran(made[kind]) == [], f"{command}: {err}"
    assert code in (0, 1, 2, 3)
    assert "Traceback" not in err


def test_r11_a_server_of_a_known_type_runs_no_code_without_trust(made, dz):
    """Engine, tokenizer, processor and chat template: the one command that goes through all of them."""
    code, _, err = dz("serve", str(made["llama"]), "--load-only", "--device", "cpu", "--max-model-len", "64")
    assert ran(made["llama"]) == []
    assert code == 0, err


@pytest.mark.parametrize("command", ["serve MODEL --load-only", "serve MODEL --load-only --no-plan", "accept MODEL"])
def test_r11_a_server_of_an_unknown_type_is_refused_without_trust(made, dz, command):
    code, _, err = dz(*command.replace("MODEL", str(made["songbird"])).split())
    assert code == 1 and ("--trust-remote-code" in err or command.startswith("accept"))
    assert ran(made["songbird"]) == []


TRUSTING = ("adapt MODEL", "adapt MODEL --diff", "adapt MODEL --check", "serve MODEL --load-only", "accept MODEL")


@pytest.mark.parametrize("command", TRUSTING)
def test_r11_trust_without_a_pin_is_refused(made, dz, command):
    """A look at the folder locks it too, and is no pin; nor is a pin of other code."""
    folder = made["songbird"]
    dz("show", str(folder))
    code, out, err = dz(*command.replace("MODEL", str(folder)).split(), "--trust-remote-code", "--json")
    assert code == 1 and json.loads(out)["code"] == "not_pinned", err
    assert f"dz fetch {folder}" in json.loads(out)["next"]
    assert ran(folder) == []


@pytest.mark.parametrize("command", TRUSTING)
def test_r11_code_elsewhere_is_refused_with_trust_and_pin(made, dz, command):
    folder = made["elsewhere"]
    assert dz("fetch", str(folder))[0] == 0
    code, out, _ = dz(*command.replace("MODEL", str(folder)).split(), "--trust-remote-code", "--json")
    assert code == 1 and json.loads(out)["code"] == "foreign_code"
    assert "someone/else" in json.loads(out)["what"]
    assert ran(folder) == []


def test_the_pin_is_of_the_code_and_of_all_of_it(tiny, made, dz, tmp_path):
    folder = shutil.copytree(made["songbird"], tmp_path / "songbird")
    (tmp_path / "songbird-ran").mkdir()
    assert dz("fetch", str(folder))[0] == 0
    (folder / "modeling.py").write_text(code("modeling", made["songbird"].with_name("songbird-ran")) + "# changed\n")
    status, out, _ = dz("adapt", str(folder), "--trust-remote-code", "--json")
    assert status == 1 and json.loads(out)["code"] == "not_pinned"
    assert "has changed since" in json.loads(out)["why"]
    _, out, _ = dz("adapt", str(folder), "--dry-run", "--json")
    rows = json.loads(out)["audit"]["findings"]
    assert [(r["file"], r["text"].split()[0]) for r in rows if r["kind"] == "changed"] == [("modeling.py", "changed")]
    assert dz("fetch", str(folder))[0] == 0
    (folder / "late.py").write_text("")
    assert json.loads(dz("adapt", str(folder), "--trust-remote-code", "--json")[1])["code"] == "not_pinned"


def test_code_that_came_after_the_lock_is_refused_at_the_load(tiny, made, tmp_path):
    from dz.upstream.config import architecture

    folder = shutil.copytree(made["songbird"], tmp_path / "songbird")
    source = tiny.source(folder)  # as a lock would have it: the files of now
    (folder / "another.py").write_text("")
    with pytest.raises(Refused, match="not the pinned one") as e:
        architecture(source, trust=True)
    assert "custom_generate/generate.py" in e.value.why or "another.py" in e.value.why


def test_the_canaries_sing_with_trust_and_pin(made, dz, tmp_path):
    """Else the other tests would prove nothing."""
    folder = made["songbird"]
    assert dz("fetch", str(folder))[0] == 0
    code, out, err = dz("adapt", str(folder), "--dry-run", "--trust-remote-code", "--json")
    assert code == 0, err
    assert ran(folder) == ["configuration", "modeling"]
    assert json.loads(out)["audit"]["code_hash"]
    for path in folder.with_name("songbird-ran").iterdir():
        path.unlink()
