"""POST /v1/completions over a real server; the fake engine continues a prompt with the prompt itself."""

import json

import pytest

FOX = "the quick brown fox"


def tokens(server, text):
    return server.post("/tokenize", prompt=text).json()["tokens"]


def test_a_prompt_in_its_four_forms(server):
    ids = tokens(server, FOX)
    for prompt in (FOX, [FOX], ids, [ids]):
        answer = server.post("/v1/completions", prompt=prompt, max_tokens=4).json()
        assert [c["text"] for c in answer["choices"]] == [FOX]
        assert answer["usage"]["prompt_tokens"] == len(ids) == 4
        assert answer["usage"]["completion_tokens"] == 4
        assert answer["object"] == "text_completion"


def test_several_prompts_come_in_order(server):
    prompts = ["the dog", "over", "the lazy fox jumps", "quick"]
    answer = server.post("/v1/completions", prompt=prompts, max_tokens=2, n=2).json()
    assert [c["index"] for c in answer["choices"]] == list(range(8))
    want = [p for p in ["the dog", "overover", "the lazy", "quickquick"] for _ in range(2)]
    got = [c["text"] for c in answer["choices"]]
    assert got == [*want[:2], *got[2:4], *want[4:6], *got[6:]]
    assert got[2] == got[3] and got[6] == got[7]
    total = sum(len(tokens(server, p)) for p in prompts)
    assert answer["usage"]["prompt_tokens"] == total


def test_default_length_and_finish(server):
    choice = server.complete(FOX)
    assert choice["finish_reason"] == "length"
    assert choice["text"] == FOX * 4  # 16 tokens
    ids = tokens(server, FOX)
    ended = server.complete([*ids, 1], max_tokens=50, return_token_ids=True)
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == (FOX, "stop", None)
    assert ended["token_ids"] == [*ids, 1]
    assert ended["prompt_token_ids"] == [*ids, 1]


def test_ignore_eos_min_tokens_and_stop_token_ids(server):
    ids = [*tokens(server, FOX), 1]
    on = server.complete(ids, max_tokens=8, ignore_eos=True, skip_special_tokens=False)
    assert on["text"] == f"{FOX}<|end|>the quick brown"
    hidden = server.complete(ids, max_tokens=8, ignore_eos=True)
    assert hidden["text"] == f"{FOX}the quick brown"
    later = server.complete(ids, max_tokens=20, min_tokens=6, return_token_ids=True)
    assert later["finish_reason"] == "stop"
    assert len(later["token_ids"]) == 10
    brown = ids[2]
    stopped = server.complete(ids, max_tokens=20, stop_token_ids=[brown])
    assert (stopped["text"], stopped["stop_reason"]) == ("the quick", brown)
    shown = server.complete(ids, max_tokens=20, stop_token_ids=[brown], include_stop_str_in_output=True)
    assert shown["text"] == "the quick brown"


@pytest.mark.parametrize("at", range(len(FOX) - 1))
@pytest.mark.parametrize("length", [1, 2, 7])
def test_stop_strings_at_every_place(server, at, length):
    stop = FOX[at : at + length]
    want = FOX[: (FOX * 2).index(stop)]
    whole = server.complete(FOX, max_tokens=12, stop=stop)
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (want, "stop", stop)
    events = server.stream("/v1/completions", prompt=FOX, max_tokens=12, stop=[stop, "never"])
    assert "".join(c["text"] for e in events for c in e["choices"]) == want
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_stop_strings_can_be_shown(server):
    assert server.complete(FOX, max_tokens=9, stop="k br", include_stop_str_in_output=True)["text"] == "the quick br"


def test_echo_with_logprobs_as_harnesses_read_them(server):
    ids = tokens(server, FOX)
    answer = server.post(
        "/v1/completions", prompt=[ids, ids[:2]], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    ).json()
    first = answer["choices"][0]["logprobs"]
    assert first["tokens"] == ["the", " quick", " brown", " fox", "the"]
    assert first["text_offset"] == [0, 3, 9, 15, 19]
    assert first["token_logprobs"][0] is None and first["top_logprobs"][0] is None
    for own, top in zip(first["token_logprobs"][1:], first["top_logprobs"][1:], strict=True):
        assert top and isinstance(own, float)
    # greedy is exact equality of a token's own number and the best of its alternatives
    greedy = [o == max(t.values()) for o, t in zip(first["token_logprobs"][1:], first["top_logprobs"][1:], strict=True)]
    assert greedy == [True, False, True, True]
    assert answer["choices"][0]["text"] == FOX + "the"
    assert len(answer["choices"][1]["logprobs"]["tokens"]) == 3


def test_echo_alone(server):
    assert server.complete(FOX, echo=True, max_tokens=2)["text"] == FOX + "the quick"
    only = server.post("/v1/completions", prompt=FOX, echo=True, max_tokens=0, logprobs=0).json()
    assert only["choices"][0]["text"] == FOX
    assert only["choices"][0]["logprobs"]["tokens"] == ["the", " quick", " brown", " fox"]
    assert only["usage"]["completion_tokens"] == 0
    events = server.stream("/v1/completions", prompt=FOX, echo=True, max_tokens=2)
    assert "".join(c["text"] for e in events for c in e["choices"]) == FOX + "the quick"


def test_logprobs_of_tokens_with_the_same_text(server):
    """Two parts of characters are both shown as U+FFFD: the greedy flag must not suffer."""
    ids = tokens(server, "한국어")
    lps = server.complete(ids, max_tokens=8, logprobs=3)["logprobs"]
    greedy = [o == max(t.values()) for o, t in zip(lps["token_logprobs"], lps["top_logprobs"], strict=True)]
    assert greedy == [True, False] * 4
    by_id = server.complete(ids, max_tokens=2, logprobs=2, return_tokens_as_token_ids=True)["logprobs"]
    assert by_id["tokens"] == [f"token_id:{i}" for i in ids[:2]]
    assert f"token_id:{ids[0]}" in by_id["top_logprobs"][0]


def test_prompt_logprobs_by_id(server):
    ids = tokens(server, FOX)
    got = server.complete(ids, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"]
    assert got[0] is None
    assert got[1][str(ids[1])]["rank"] == 1
    assert got[1][str(ids[1])]["decoded_token"] == " quick"
    assert got[2][str(ids[2])]["rank"] == 2 and len(got[2]) == 2


@pytest.mark.parametrize("text", ["한국어 문장", "👩‍👩‍👧‍👦 and 🇰🇷", "naïve e\u0301", "a\ufffdb"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_characters_are_never_cut(server, chunky, text, chunk):
    served = server if chunk == 1 else chunky
    n = len(tokens(served, text))
    events = served.stream("/v1/completions", prompt=text, max_tokens=n)
    pieces = [c["text"] for e in events for c in e["choices"]]
    assert "".join(pieces) == text == served.complete(text, max_tokens=n)["text"]
    if "\ufffd" not in text:
        assert not any("\ufffd" in p for p in pieces)


@pytest.mark.parametrize("chunk", [1, 3])
def test_streamed_equals_whole(server, chunky, chunk):
    served = server if chunk == 1 else chunky
    body = {"prompt": [FOX, "over the"], "max_tokens": 7, "n": 2, "logprobs": 2, "return_token_ids": True}
    whole = served.post("/v1/completions", **body).json()
    joined = {}
    events = served.stream("/v1/completions", **body, stream_options={"include_usage": True})
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    for e in events[:-1]:
        for c in e["choices"]:
            j = joined.setdefault(c["index"], {"text": "", "token_ids": [], "logprobs": {}})
            j["text"] += c["text"]
            j["token_ids"] += c["token_ids"]
            j["prompt_token_ids"] = c.get("prompt_token_ids") or j["prompt_token_ids"]
            for k, v in (c["logprobs"] or {}).items():
                j["logprobs"].setdefault(k, []).extend(v)
            j["finish_reason"], j["stop_reason"] = c["finish_reason"], c["stop_reason"]
    for c in whole["choices"]:
        assert {k: c[k] for k in joined[c["index"]]} == joined[c["index"]]


def test_usage_in_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream("/v1/completions", prompt=FOX, max_tokens=3, stream_options=options)
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 3]


def test_what_reaches_the_engine(start, tmp_path, model):
    (model / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "repetition_penalty": 1.1})
    )
    try:
        served = start(settings={"record": str(tmp_path / "r")})
        plain = start(settings={"record": str(tmp_path / "p")}, config={"generation_config": "none"})
    finally:
        (model / "generation_config.json").unlink()
    served.complete("a", max_tokens=1)
    served.complete("a", max_tokens=2, n=3, seed=7, temperature=0, top_k=-1, top_p=0.5, min_p=0.1, logit_bias={"5": -3})
    served.complete("a", max_tokens=1, seed=2**63 - 1, n=2, presence_penalty=1, frequency_penalty=-1)
    plain.complete("a", max_tokens=1)
    first, *rest = [json.loads(line)["sampling"] for line in (tmp_path / "r").read_text().splitlines()]
    assert (first["temperature"], first["top_k"], first["top_p"], first["repetition_penalty"]) == (0.6, 20, 0.95, 1.1)
    assert first["seed"] is None
    assert [s["seed"] for s in rest[:3]] == [7, 8, 9]
    assert (rest[0]["temperature"], rest[0]["top_k"], rest[0]["top_p"], rest[0]["min_p"]) == (0, 0, 0.5, 0.1)
    assert rest[0]["logit_bias"] == {"5": -3}
    assert [s["seed"] for s in rest[3:]] == [2**63 - 1, -(2**63)]
    assert (rest[3]["presence_penalty"], rest[3]["frequency_penalty"]) == (1, -1)
    default = json.loads((tmp_path / "p").read_text())["sampling"]
    assert (default["temperature"], default["top_k"], default["top_p"], default["repetition_penalty"]) == (1, 0, 1, 1)


def test_the_tokenizers_own_end_counts(start, tmp_path):
    served = start(settings={"record": str(tmp_path / "r"), "end": [399]})
    ids = [*tokens(served, FOX), 1]  # <|end|> is the tokenizer's, the engine knows only 399
    got = served.complete(ids, max_tokens=20)
    assert (got["text"], got["finish_reason"], got["stop_reason"]) == (FOX, "stop", None)
    served.complete(ids, max_tokens=6, ignore_eos=True)
    sent = [json.loads(line)["sampling"]["stop_token_ids"] for line in (tmp_path / "r").read_text().splitlines()]
    assert sent == [[1], []]
