"""The client against the fake server, and what it makes of answers that are none."""

import json
import threading
import time

import httpx
import pytest

from dz.accept.client import AnswerError, Client, at_once, parse_metrics


@pytest.fixture
def client(context):
    return context().client()


def test_text_and_ids_are_one_prompt(client):
    import toy_model as toy

    by_text, by_ids = client.complete("hello", 5), client.complete(toy.encode("hello"), 5)
    assert by_text.tokens == by_ids.tokens == toy.generate(toy.encode("hello"), 5)[0]
    assert by_text.prompt_tokens == toy.encode("hello") and by_text.finish == "length"
    assert client.max_model_len == 600 and client.health() == 200


def test_requests_are_greedy_and_name_the_model():
    seen = []

    def answer(request):
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "served-name"}]})
        seen.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": [{"token_ids": [1], "message": {"content": "x"}}]})

    client = Client("http://x", transport=httpx.MockTransport(answer))
    client.complete("x", 1)
    client.chat([{"role": "user", "content": "x"}], 1)
    for body in seen:
        assert body["model"] == "served-name" and body["temperature"] == 0 and body["repetition_penalty"] == 1.0
        assert body["return_token_ids"] is True and "ignore_eos" not in body
    assert len(seen) == 2


def test_alternatives_by_id(client):
    (row,) = client.complete("x", 1, logprobs=3).top
    assert len(row) == 3 and all(isinstance(t, int) for t in row)


def test_scores_are_by_id_and_whole(client):
    import toy_model as toy

    tokens = toy.encode("some prompt")
    rows = client.score(tokens, 5)
    assert rows[0] is None and len(rows) == len(tokens) + 1
    for i in range(1, len(tokens) + 1):
        right = toy.logprobs(tokens[:i])
        assert all(rows[i][t] == pytest.approx(right[t]) for t, _ in toy.best(right, 5))


def test_a_stream_tells_the_first_token(context):
    reply = context({"slow": 0.1}).client().stream("hello", 4)
    assert len(reply.tokens) == 4 and 0.1 <= reply.first < reply.seconds


def test_errors_have_their_status_and_words(client):
    with pytest.raises(AnswerError, match="answers 400") as e:
        client.complete([5] * 700, 1)
    assert e.value.status == 400 and "maximum context length of 600" in e.value.why


def test_a_server_without_ids_is_told(context):
    with pytest.raises(AnswerError, match="returns no token ids"):
        context({"no_ids": 1}).client().complete("x", 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(500, text="<html>oops"), "answers 500"),
        (httpx.Response(401, json={"error": "no key"}), "answers 401"),
        (httpx.Response(200, text="not json"), "no JSON"),
        (httpx.Response(200, json=[1]), "no JSON object"),
        (httpx.Response(200, json={"choices": []}), "without choices"),
        (
            httpx.Response(200, json={"choices": [{"logprobs": {"top_logprobs": [None, {"word": -1}]}}]}),
            "by their text",
        ),
        (httpx.Response(200, json={"choices": [{"logprobs": {"top_logprobs": [None]}}]}), "not whole"),
    ],
)
def test_what_is_no_answer(answer, words):
    card = {"data": [{"id": "m"}]}
    transport = httpx.MockTransport(lambda r: httpx.Response(200, json=card) if r.url.path == "/v1/models" else answer)
    client = Client("http://x/v1/", transport=transport)
    with pytest.raises(AnswerError) as e:
        client.score([1], 3)
    assert words in f"{e.value.what} {e.value.why}"


def test_nobody_there():
    client = Client("http://127.0.0.1:9", timeout=2)
    assert client.health() == 0
    with pytest.raises(AnswerError, match="no answer to /v1/models"):
        client.complete("x", 1)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('data: {"choices": [{"token_ids": [1], "text": "a"}]}\n\n', "without [DONE]"),
        ('data: {"error": {"message": "dead", "code": 503}}\n\n', "dead"),
        ("data: {broken\n\n", "broke off"),
    ],
)
def test_broken_streams(body, words):
    card = {"data": [{"id": "m"}]}

    def answer(request):
        return httpx.Response(200, json=card) if request.url.path == "/v1/models" else httpx.Response(200, text=body)

    with pytest.raises(AnswerError) as e:
        Client("http://x", transport=httpx.MockTransport(answer)).stream("x", 3)
    assert words in f"{e.value.what} {e.value.why}"


def test_the_key_is_sent(monkeypatch):
    monkeypatch.setenv("DZ_API_KEY", "secret")
    seen = []

    def answer(request):
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    assert Client("http://x", transport=httpx.MockTransport(answer)).card["id"] == "m"
    assert seen == ["Bearer secret"]


def test_at_once_is_at_once_and_in_order():
    gate = threading.Barrier(3)

    def ask(i):
        gate.wait(5)  # passes only when all three are here
        return i

    assert at_once([lambda i=i: ask(i) for i in range(3)]) == [0, 1, 2]
    assert at_once([]) == []


def test_at_once_raises_without_waiting_for_the_rest():
    def fail():
        raise ValueError("no")

    begun = time.monotonic()
    with pytest.raises(ValueError, match="no"):
        at_once([fail, lambda: time.sleep(1.5)])
    assert time.monotonic() - begun < 1


def test_metrics():
    text = '# TYPE a counter\na_total{x="1",y="q\\"uote"} 3.0\na_total{x="2"} 4\nplain 1e3\n\nbad line here x\n'
    found = parse_metrics(text.replace("bad line here x\n", ""))
    assert found["a_total"] == [({"x": "1", "y": 'q\\"uote'}, 3.0), ({"x": "2"}, 4.0)] and found["plain"] == [
        ({}, 1000.0)
    ]
