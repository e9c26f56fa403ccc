"""Tokenizer, chat template and images, against upstream's own functions on tiny folders built here."""

import json

import pytest
import torch
from PIL import Image

from dz.core.source import FileEntry, Source
from dz.errors import EnvironmentFailure, Refused, UsageError
from dz.hub.stamp import code_hash
from dz.upstream.processing import ChatOptions, Processor

IMAGE = "<image>"
LISTS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRINGS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BOTH = LISTS.replace("{% for c in", "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in").replace(
    "{% endfor %}<|end|>", "{% endfor %}{% endif %}<|end|>"
)
SPECIAL = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", IMAGE]


def build(folder, template, *, config=None, generation=None, special=SPECIAL, added=()):
    """Save a byte-level tokenizer and a configuration."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(
        ["look at the picture and say what it shows"] * 9,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
        ),
    )
    tok.add_tokens(list(added))
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|end|>", pad_token="<pad>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7, **(config or {})}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return fast


def source(folder):
    code = tuple(FileEntry(path=p.name, size=p.stat().st_size) for p in folder.glob("*.py"))
    pin = code_hash(folder, (f.path for f in code))
    return Source(name=str(folder), folder=str(folder), commit="", rev8="0" * 8, code_hash=pin, files=code)


def load(folder, **options):
    return Processor.load(source(folder), trust=False, **options)


def user(content):
    return [{"role": "user", "content": content}]


@pytest.fixture
def vision(tmp_path):
    """A repository with upstream's llava processor on PIL: 2 x 2 patches for each image."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    tokenizer = build(
        tmp_path, BOTH, config={"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    )
    image = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        image_processor=image, tokenizer=tokenizer, patch_size=14, vision_feature_select_strategy="full",
        chat_template=BOTH, image_token=IMAGE,
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path


def picture(seed, size=(40, 30)):
    data = torch.randint(
        0, 255, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    return Image.fromarray(data.numpy())


# ------------------------------------------------------------------------------------------------------------- text
@pytest.mark.parametrize("template", [LISTS, STRINGS, BOTH])
def test_strings_and_lists_stand_for_each_other(tmp_path, template):
    build(tmp_path, template)
    p = load(tmp_path)
    assert p.render(user("look")) == "<|user|>look<|end|><|assistant|>"
    assert p.render(user([{"type": "text", "text": "look"}])) == "<|user|>look<|end|><|assistant|>"
    joined = p.render(user([{"type": "text", "text": "look"}, {"type": "text", "text": "at"}]))
    assert joined == (
        "<|user|>look\nat<|end|><|assistant|>" if template is STRINGS else "<|user|>lookat<|end|><|assistant|>"
    )


def test_tokens_are_upstreams(tmp_path):
    tokenizer = build(tmp_path, BOTH)
    chat = [{"role": "system", "content": "say what"}, *user("it shows naïve 한")]
    want = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=True)
    got = load(tmp_path).prepare_chat(chat)
    assert got.tokens == want["input_ids"]
    assert got.media == {}


def test_options_reach_the_template(tmp_path):
    build(tmp_path, BOTH.replace("<|assistant|>", "<|assistant|>{% if mood %}{{ mood }}{% endif %}"))
    p = load(tmp_path)
    assert p.render(user("a"), ChatOptions(add_generation_prompt=False)).endswith("a<|end|>")
    assert p.render(user("a"), ChatOptions(variables={"mood": "calm", "unknown": 1})).endswith("<|assistant|>calm")
    with pytest.raises(UsageError, match="tokenize"):
        p.render(user("a"), ChatOptions(variables={"tokenize": False}))
    prefill = [*user("a"), {"role": "assistant", "content": "it sh"}]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert p.render(prefill, options).endswith("<|assistant|>it sh")


def test_another_template_replaces_the_repositorys(tmp_path):
    build(tmp_path, BOTH)
    p = load(tmp_path, chat_template="{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert p.render(user("a")) == "[a]"


def test_no_template_is_said_when_a_chat_comes(tmp_path):
    build(tmp_path, None)
    p = load(tmp_path)
    assert "no chat template" in p.chat.problem
    assert p.encode("look")
    with pytest.raises(UsageError, match="no chat template") as e:
        p.prepare_chat(user("a"))
    assert "/v1/completions" in e.value.next


def test_a_template_that_fails_on_a_plain_chat(tmp_path):
    build(tmp_path, "{{ raise_exception('needs a moon') }}")
    assert "needs a moon" in load(tmp_path).chat.problem


def test_a_template_may_refuse_a_chat(tmp_path):
    build(
        tmp_path, "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}{{ messages[0]['content'] }}"
    )
    p = load(tmp_path)
    assert p.chat.problem == ""
    with pytest.raises(UsageError) as e:
        p.prepare_chat(user("a") * 2)
    assert "one only" in e.value.why


# ---------------------------------------------------------------------------------------------------- quoted markers
@pytest.mark.parametrize("marker", SPECIAL)
@pytest.mark.parametrize("shape", ["string", "list", "system", "tool"])
def test_quoted_markers_stay_text(tmp_path, marker, shape):
    tokenizer = build(tmp_path, BOTH)
    text = f"say {marker}look"
    chat = {
        "string": user(text),
        "list": user([{"type": "text", "text": text}]),
        "system": [{"role": "system", "content": text}, *user("at")],
        "tool": [*user("at"), {"role": "tool", "content": text}],
    }[shape]
    p = load(tmp_path)
    tokens = p.prepare_chat(chat).tokens
    plain = p.prepare_chat(json.loads(json.dumps(chat).replace(marker, ""))).tokens
    own = tokenizer.convert_tokens_to_ids(marker)
    assert tokens.count(own) == plain.count(own)  # only what the template itself writes
    assert p.decode(tokens) == p.render(chat)


def test_quoted_markers_that_are_not_special_tokens(tmp_path):
    tokenizer = build(tmp_path, BOTH, special=SPECIAL[:-1], added=[IMAGE])
    assert not tokenizer.added_tokens_decoder[tokenizer.convert_tokens_to_ids(IMAGE)].special
    p = load(tmp_path)
    p.chat.quotes.__init__([IMAGE])  # as if a processor called it its placeholder
    tokens = p.prepare_chat(user(f"say {IMAGE}look")).tokens
    assert tokenizer.convert_tokens_to_ids(IMAGE) not in tokens
    assert f"say {IMAGE}look" in p.decode(tokens)


def test_without_quotes_nothing_changes(tmp_path):
    tokenizer = build(tmp_path, BOTH)
    chat = user("say < | image >look")
    want = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=True)
    assert load(tmp_path).prepare_chat(chat).tokens == want["input_ids"]


# ------------------------------------------------------------------------------------------------------------ images
def upstream(folder, chat):
    from transformers import AutoProcessor

    p = AutoProcessor.from_pretrained(folder)
    return p.apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt")


@pytest.mark.parametrize("order", ["ti", "it", "i", "ii", "tiit"])
def test_images_are_upstreams_in_their_order(vision, order):
    parts = [
        {"type": "text", "text": f"look{i} "} if c == "t" else {"type": "image", "image": picture(i, (31, 27 + i))}
        for i, c in enumerate(order)
    ]
    want = upstream(vision, user(parts))
    got = load(vision).prepare_chat(user(parts))
    assert got.tokens == want["input_ids"][0].tolist()
    assert set(got.media) == set(want) - {"input_ids", "attention_mask"}
    assert torch.equal(got.media["pixel_values"], want["pixel_values"])
    swapped = load(vision).prepare_chat(user(parts[::-1]))
    assert order == order[::-1] or swapped.tokens != got.tokens


def test_text_only_chats_of_a_vision_model(vision):
    got = load(vision).prepare_chat(user("look at"))
    assert got.media == {}
    assert got.tokens == upstream(vision, user("look at"))["input_ids"][0].tolist()
    quoted = load(vision).prepare_chat(user(f"look {IMAGE} at"))
    assert load(vision).tokenizer.convert_tokens_to_ids(IMAGE) not in quoted.tokens


def test_a_quoted_placeholder_beside_an_image(vision):
    chat = user([{"type": "text", "text": f"say {IMAGE} "}, {"type": "image", "image": picture(1)}])
    p = load(vision)
    plain = p.prepare_chat(user([{"type": "text", "text": "say  "}, {"type": "image", "image": picture(1)}]))
    own = p.tokenizer.convert_tokens_to_ids(IMAGE)
    try:
        got = p.prepare_chat(chat)
    except UsageError as e:  # an upstream that cannot keep them apart: refused, never miscounted
        assert "refuses" in e.what
    else:
        assert got.tokens.count(own) == plain.tokens.count(own)


def test_a_text_model_takes_no_images(tmp_path):
    build(tmp_path, BOTH)
    with pytest.raises(UsageError, match="takes no images"):
        load(tmp_path).prepare_chat(user([{"type": "image", "image": picture(1)}]))


def test_a_missing_image_processor_matters_when_an_image_comes(tmp_path):
    config = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    build(tmp_path, BOTH, config=config)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "NoSuchImageProcessor"}))
    p = load(tmp_path)
    assert p.image_problem is not None
    assert p.prepare_chat(user("look")).tokens
    with pytest.raises((EnvironmentFailure, Refused)) as e:
        p.prepare_chat(user([{"type": "image", "image": picture(1)}]))
    assert e.value is p.image_problem


# ----------------------------------------------------------------------------------------------------- tokens, loading
def test_ends_of_text_are_the_union(tmp_path):
    tokenizer = build(
        tmp_path,
        BOTH,
        config={"eos_token_id": 9, "text_config": {"eos_token_id": [11]}},
        generation={"eos_token_id": [9, 12]},
    )
    assert load(tmp_path).eos_token_ids == [9, 11, 12, tokenizer.eos_token_id]
    build(tmp_path, BOTH, config={"eos_token_id": None}, generation={"eos_token_id": -1})
    assert load(tmp_path).eos_token_ids == [tokenizer.eos_token_id]


def test_token_texts_and_bytes(tmp_path):
    tokenizer = build(tmp_path, BOTH)
    p = load(tmp_path)
    ids = p.encode(" look 한")
    assert "".join(map(p.token_text, ids[:1])).startswith(" ")
    assert b"".join(map(p.token_bytes, ids)) == " look 한".encode()
    assert p.token_bytes(tokenizer.eos_token_id) == b"<|end|>"
    assert p.token_text(ids[-1]) == "\ufffd"


def test_special_tokens_are_shown_or_left_out(tmp_path):
    build(tmp_path, BOTH)
    p = load(tmp_path)
    ids = [*p.encode("look"), p.tokenizer.eos_token_id, *p.encode("at")]
    assert p.decode(ids) == "look<|end|>at"
    assert p.decode(ids, skip_special_tokens=True) == "lookat" == p.tokenizer.decode(ids, skip_special_tokens=True)
    for skip in (True, False):
        d = p.detokenizer(skip_special_tokens=skip)
        assert "".join(d.push([t]) for t in ids) + d.flush() == p.decode(ids, skip_special_tokens=skip)


def test_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(Refused, match="tokenizer"):
        load(tmp_path)


def test_code_is_run_under_trust_alone(tmp_path):
    build(tmp_path, BOTH)
    (tmp_path / "mine.py").write_text("raise SystemError('was run')\n")
    path = tmp_path / "tokenizer_config.json"
    settings = {
        **json.loads(path.read_text()),
        "tokenizer_class": "Mine",
        "auto_map": {"AutoTokenizer": ["mine.Mine", None]},
    }
    path.write_text(json.dumps(settings))
    try:
        load(tmp_path)
    except Refused as e:
        assert "was run" not in e.why
        assert "--trust-remote-code" in e.next
    with pytest.raises(Refused) as e:
        Processor.load(source(tmp_path), trust=True)
    assert "was run" in e.value.why


def test_code_of_another_repository_is_refused(tmp_path):
    build(tmp_path, BOTH)
    path = tmp_path / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "auto_map": {"AutoTokenizer": ["other/repo--mine.Mine", None]}}
    path.write_text(json.dumps(settings))
    with pytest.raises(Refused, match="other/repo"):
        Processor.load(source(tmp_path), trust=True)
