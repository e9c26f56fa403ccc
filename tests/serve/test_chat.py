"""POST /v1/chat/completions and what goes with it."""

import json

import pytest

FOX = "the quick brown fox"
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgZGIGAAAOAAfXb+R4AAAAAElFTkSuQmCC"
)
USER = [{"role": "user", "content": FOX}]


def chat(server, **body):
    answer = server.post("/v1/chat/completions", **{"messages": USER, "max_tokens": 5, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_shape_of_an_answer(server):
    got = chat(server, return_token_ids=True)
    assert got["object"] == "chat.completion"
    assert got["id"].startswith("chatcmpl-")
    choice = got["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": FOX, "refusal": None}
    assert choice["finish_reason"] == "length"
    assert got["prompt_token_ids"][0] == 2 and got["prompt_token_ids"][-1] == 3  # <|user|> ... <|assistant|>
    assert choice["token_ids"] == got["prompt_token_ids"][:5]
    assert got["usage"] == {
        "prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_names(server, start):
    path = server.http.get("/v1/models").json()["data"][0]["id"]
    assert chat(server)["model"] == path
    assert chat(server, model=path)["model"] == path
    named = start(config={"names": ["first", "second"]})
    assert chat(named)["model"] == "first"
    assert chat(named, model="second")["model"] == "second"
    assert chat(named, model=path)["model"] == path
    assert [m["id"] for m in named.http.get("/v1/models").json()["data"]] == ["first", "second"]
    assert named.http.get("/v1/models/second").json()["id"] == "second"
    assert named.http.get(f"/v1/models/{path}").json()["root"] == path
    for answer in (
        named.post("/v1/chat/completions", messages=USER, model="third"),
        named.http.get("/v1/models/third"),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"
        assert "third" in answer.json()["error"]["message"]


def test_max_completion_tokens_and_all_the_room_there_is(server):
    assert chat(server, max_tokens=None, max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    assert chat(server, max_tokens=4, max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    assert chat(server, max_tokens=None)["usage"]["total_tokens"] == 512


def test_a_stream(server):
    events = server.stream(
        "/v1/chat/completions",
        messages=USER,
        max_tokens=4,
        stream_options={"include_usage": True},
        return_token_ids=True,
    )
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(events[0]["prompt_token_ids"]) == 6
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    assert len({e["id"] for e in events}) == 1
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "the quick brown"
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * 4 + ["length"]
    assert [t for e in events[1:-1] for t in e["choices"][0]["token_ids"]] == events[0]["prompt_token_ids"][:4]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("chunk", [1, 3])
def test_streamed_logprobs_are_those_of_the_whole(server, chunky, chunk):
    served = server if chunk == 1 else chunky
    body = {"messages": USER, "max_tokens": 8, "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = chat(served, **body)
    joined = {0: [], 1: []}
    for e in served.stream("/v1/chat/completions", **body):
        for c in e["choices"]:
            joined[c["index"]] += (c["logprobs"] or {}).get("content", [])
    for c in whole["choices"]:
        assert c["logprobs"]["content"] == joined[c["index"]]
        assert len(joined[c["index"]]) == 8
        assert all(len(t["top_logprobs"]) == 2 for t in joined[c["index"]])


def test_logprobs_show_tokens_and_bytes(server):
    content = chat(server, messages=[{"role": "user", "content": "한"}], max_tokens=4, logprobs=True)
    entries = content["choices"][0]["logprobs"]["content"]
    assert entries[0]["token"] == "<|user|>" and entries[0]["top_logprobs"] == []
    assert bytes(b for e in entries[1:] for b in e["bytes"]).decode() == "한"
    top = chat(server, max_tokens=2, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert top[0]["logprob"] == top[0]["top_logprobs"][0]["logprob"]
    assert top[1]["logprob"] != top[1]["top_logprobs"][0]["logprob"]


def test_content_parts_and_roles(server):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    messages = [{"role": "system", "content": "the dog"}, {"role": "user", "content": parts}]
    got = server.post("/tokenize", messages=messages, return_token_strs=True).json()
    assert "".join(got["token_strs"]) == "<|system|>the dog<|user|>the fox<|assistant|>"


@pytest.mark.parametrize("marker", ["<|end|>", "<|user|>", "<|assistant|>", "<pad>"])
def test_quoted_markers_are_text(server, marker):
    got = chat(server, messages=[{"role": "user", "content": f"a{marker}b"}], max_tokens=40, skip_special_tokens=False)
    assert got["choices"][0]["message"]["content"].startswith(f"<|user|>a{marker}b<|assistant|>")
    ids = server.post("/tokenize", messages=[{"role": "user", "content": f"a{marker}b"}]).json()["tokens"]
    assert sorted(i for i in ids if i < 5) == [2, 3]  # the template's own two


def test_continue_and_variables(server, start, tmp_path):
    prefill = [*USER, {"role": "assistant", "content": "the do"}]
    body = {"add_generation_prompt": False, "continue_final_message": True}
    got = server.post("/tokenize", messages=prefill, return_token_strs=True, **body).json()
    assert "".join(got["token_strs"]).endswith("<|assistant|>the do")
    template = "{{ messages[0]['content'] }}{% if loud %}!{% endif %}{{ reasoning_effort }}"
    loud = start(config={"chat_template": template})
    options = {"chat_template_kwargs": {"loud": True, "unknown": 1}, "max_tokens": None}
    assert chat(loud, **options, stop="!")["choices"][0]["message"]["content"] == FOX
    assert chat(loud, reasoning_effort="low", max_tokens=None, stop="low")["choices"][0]["stop_reason"] == "low"


def test_requests_beside_each_other(start):
    import concurrent.futures

    served = start(settings={"delay": 0.005})
    words = ["fox", "dog", "lazy", "story", "jumps", "over", "quick", "brown"]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        jobs = [
            (w, pool.submit(chat, served, messages=[{"role": "user", "content": w}], max_tokens=20)) for w in words * 4
        ]
        for word, job in jobs:
            assert job.result()["choices"][0]["message"]["content"].startswith(word)
    assert served.metric("dz:step_sequences_total") > 0


def test_images_reach_a_text_model_as_a_400(server):
    part = {"type": "image_url", "image_url": {"url": PIXEL}}
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": [part]}])
    assert answer.status_code == 400
    assert "takes no images" in answer.json()["error"]["message"]
    assert chat(server)["choices"]


def test_tokenize_and_back(server):
    got = server.post("/tokenize", prompt="the 한 fox", return_token_strs=True).json()
    assert got["count"] == len(got["tokens"]) == len(got["token_strs"])
    assert got["max_model_len"] == 512
    assert server.post("/detokenize", tokens=got["tokens"]).json() == {"prompt": "the 한 fox"}
    assert server.post("/detokenize", tokens=[]).json() == {"prompt": ""}
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|end|>" and "messages" in info["chat_template"]


def test_request_ids(server, start):
    answer = server.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.json()["id"] == "cmpl-abc-1"
    assert "x-request-id" not in server.post("/v1/completions", prompt="a").headers
    assert int(answer.headers["openai-processing-ms"]) >= 0
    odd = server.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "a b<script>"})
    assert "x-request-id" not in odd.headers and "script" not in odd.text
    always = start(config={"request_id_headers": True})
    assert len(always.post("/v1/completions", prompt="a").headers["x-request-id"]) == 32


def test_openapi_is_there(server):
    document = server.http.get("/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    text = json.dumps(document)
    assert "HTTPValidationError" not in text
    assert "#/components/schemas/ChatRequest" in text
