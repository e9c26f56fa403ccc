"""The upstream run in its own process: against transformers called here, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dz.core import jsonio
from dz.core.source import FileEntry, Source
from dz.errors import EnvironmentFailure, Refused
from dz.hub.stamp import code_hash
from dz.upstream import reference
from dz.upstream.reference import Ask, Case, Order, Run, Session

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(__file__).with_name("canary-" + Path(__file__).parent.name).write_text("ran")
print("noise on stdout")
class NewConfig(LlamaConfig):
    model_type = "day0_new"
class NewForCausalLM(LlamaForCausalLM):
    config_class = NewConfig
"""


def source_of(folder: Path) -> Source:
    paths = sorted(p.name for p in folder.iterdir() if p.is_file())
    files = tuple(FileEntry(path=p, size=(folder / p).stat().st_size) for p in paths)
    return Source(
        name=str(folder),
        folder=str(folder),
        commit="",
        rev8="00000000",
        code_hash=code_hash(folder, paths),
        files=files,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny random language model with a byte-level tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint")
    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=2, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.1 if p.dim() == 1 else 0.35)
    model.generation_config.update(
        repetition_penalty=7.0, do_sample=True, temperature=0.1
    )  # all of which is passed over
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def greedy(model, prompt, n):
    """Greedy tokens without cache, step by step, with every step's logits."""
    tokens, rows = list(prompt), []
    for _ in range(n):
        with torch.inference_mode():
            rows.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1])
        tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(rows)


def inside(folder: Path, *cases: Case) -> Run:
    """What the child does, without the child: seconds less for each test."""
    from dz.upstream.answers import Upstream

    source = folder if isinstance(folder, Source) else source_of(folder)
    order = Order(source=jsonio.to_builtins(source), trust=False, dtype="float32", device="cpu", plugins=[])
    return Upstream(order).answer(Ask(cases=list(cases)), done=lambda _: None)


@pytest.fixture(scope="module")
def session(checkpoint, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "deep" / "reference.log"
    with Session(source_of(checkpoint), trust=False, log=log) as ask:
        yield ask


def test_generate_is_plain_greedy(session, model):
    prompts = [[5], [9, 30, 77, 4, 81, 120, 33]]
    run = session([Case(id=str(i), tokens=p, max_tokens=9, top=6) for i, p in enumerate(prompts)])
    for answer, prompt in zip(run.answers, prompts, strict=True):
        want, rows = greedy(model, prompt, 9)
        assert answer.error == "" and answer.prompt == prompt and answer.tokens == want
        pair = rows.topk(2).values
        assert torch.allclose(torch.tensor(answer.margins), pair[:, 0] - pair[:, 1], atol=1e-4)
        for step, row in zip(answer.top, rows.log_softmax(-1), strict=True):
            assert [t for t, _ in step] == row.topk(6).indices.tolist()
            assert torch.allclose(torch.tensor([v for _, v in step]), row.topk(6).values, atol=1e-4)
    assert run.facts.cls == "LlamaForCausalLM" and run.facts.vocab_size == 264 and run.facts.eos_token_ids == [2]
    assert not run.facts.images and "not for pictures" in run.facts.vision and run.facts.chat == ""


def test_the_end_token_ends_the_text(checkpoint, model, tmp_path):
    """With the third greedy token made an end token, the answer stops before it and has its margin."""
    want, _ = greedy(model, [5, 6, 7], 6)
    for path in checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, want[2]]}))
    run = inside(tmp_path, Case(id="a", tokens=[5, 6, 7], max_tokens=6))
    at = want.index(want[2])
    (answer,) = run.answers
    assert (answer.tokens, answer.stop_token) == (want[:at], want[2])
    assert len(answer.margins) == len(answer.top) == at + 1


def test_scores_sparse_and_dense(session, model, tmp_path):
    tokens = [7, 99, 12, 40, 41]
    run = session(
        [
            Case(id="s", kind="score", tokens=tokens, start=3, top=4),
            Case(id="d", kind="score", tokens=tokens, dense=True),
        ],
        dense=tmp_path / "dense.safetensors",
    )
    with torch.inference_mode():
        rows = model(torch.tensor([tokens])).logits[0]
    sparse, _ = run.answers
    assert [[t for t, _ in row] for row in sparse.top] == rows[3:].topk(4).indices.tolist()
    saved = load_file(run.dense)
    assert set(saved) == {"d"} and torch.allclose(saved["d"], rows, atol=1e-5)


def test_prompts_in_words(session):
    chat = [{"role": "user", "content": "hi"}]
    run = session(
        [
            Case(id="t", kind="tokenize", text="abc"),
            Case(id="long", kind="tokenize", text="abc", length=7),
            Case(id="c", kind="tokenize", messages=chat),
        ]
    )
    abc, long, said = (a.prompt for a in run.answers)
    assert len(abc) == 3 and long == abc + abc + abc[:1] and len(said) == len("<user>hi<a>")


def test_a_failing_case_does_not_end_the_run(session):
    run = session([Case(id="bad", tokens=[5, 10_000], max_tokens=2), Case(id="good", tokens=[5], max_tokens=2)])
    bad, good = run.answers
    assert "IndexError" in bad.error and bad.tokens == []
    assert good.error == "" and len(good.tokens) == 2


def test_words_alone_load_no_weights(checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).symlink_to(path)
    (answer,) = inside(tmp_path, Case(id="t", kind="tokenize", text="x")).answers
    assert len(answer.prompt) == 1


@pytest.mark.parametrize("fault", ["renamed", "reshaped"])
def test_weights_that_upstream_makes_up_are_refused(checkpoint, tmp_path, fault):
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).symlink_to(path)
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    if fault == "renamed":
        tensors["model.layers.1.mlp.dawn_proj.weight"] = tensors.pop(name)
    else:
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refused) as e:
        inside(tmp_path, Case(id="a", tokens=[5], max_tokens=1))
    assert "down_proj" in e.value.why


@pytest.fixture
def remote(checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "day0_new", "architectures": ["NewForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "code.NewConfig", "AutoModelForCausalLM": "code.NewForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(CODE)
    return tmp_path


def test_code_of_the_repository_runs_only_with_trust(remote, model, tmp_path_factory, monkeypatch):
    modules = tmp_path_factory.mktemp("modules")
    monkeypatch.setenv("HF_MODULES_CACHE", str(modules))
    case = Case(id="a", tokens=[5], max_tokens=5)
    with pytest.raises(Refused, match="unknown architecture"):
        inside(remote, case)
    assert not list(remote.rglob("canary*"))
    run = reference.run(source_of(remote), [case], trust=True)
    assert run.facts.runs == "repository" and run.answers[0].tokens == greedy(model, [5], 5)[0]
    assert list(modules.rglob("canary*"))


def test_code_that_changed_since_the_lock_is_refused(remote):
    pinned = source_of(remote)
    (remote / "code.py").write_text(CODE + "\n")
    with pytest.raises(Refused, match="not the pinned one"):
        inside(pinned, Case(id="a", tokens=[5], max_tokens=1))


def test_what_does_not_fit_is_said_before_anything_starts(checkpoint, monkeypatch):
    from dz import backends

    source = source_of(checkpoint)
    assert reference.need(source, "float32") > 4 * 264 * 32 * 2
    assert reference.need(source, "bfloat16") == pytest.approx(reference.need(source, "float32") / 2, abs=1)
    monkeypatch.setattr(backends, "memory", lambda device: (1000, 1000))
    monkeypatch.setattr(reference.subprocess, "Popen", lambda *a, **k: pytest.fail("a child was started"))
    with pytest.raises(EnvironmentFailure, match="does not fit") as e:
        reference.run(source, [Case(id="a", tokens=[5], max_tokens=1)], trust=False)
    assert e.value.code == "no_memory" and "1,000 B free" in e.value.why


def test_a_run_that_takes_too_long_is_ended(checkpoint):
    with pytest.raises(EnvironmentFailure) as e, Session(source_of(checkpoint), trust=False) as ask:
        ask([Case(id="a", tokens=[5], max_tokens=1)], limit=0.2)
    assert e.value.code == "late"


def test_a_child_that_dies_is_told_with_its_last_words(checkpoint):
    broken = replace(source_of(checkpoint), folder="/nonexistent/folder")
    with pytest.raises(Refused) as e:
        reference.run(broken, [Case(id="t", kind="tokenize", text="x")], trust=False)
    assert "/nonexistent/folder" in e.value.why


def test_packed_formats_count_unpacked(tmp_path):
    save_file(
        {"a": torch.zeros(3, 4, dtype=torch.uint8), "b": torch.zeros(5, dtype=torch.int32), "c": torch.zeros(7)},
        tmp_path / "model.safetensors",
    )
    assert reference.need(source_of(tmp_path), "float32") == int((24 + 40 + 7) * 4 * reference.SPARE)
