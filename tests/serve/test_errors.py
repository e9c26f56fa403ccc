"""Every error has one shape, names what is at fault, and none is a 500 that a client can cause."""

import http.client
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

USER = [{"role": "user", "content": "the fox"}]
TYPES = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowedError", 413: "RequestTooLargeError"}
TYPES |= {415: "UnsupportedMediaTypeError", 429: "RateLimitError", 500: "InternalServerError"}
TYPES |= {503: "ServiceUnavailableError"}
POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]


def error(answer, status=400, param=...):
    """The checked error object of an answer."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    found = body["error"]
    assert (found["code"], found["type"]) == (status, TYPES[status])
    assert found["message"] and "Traceback" not in found["message"] and "/work" not in found["message"]
    if param is not ...:
        assert found["param"] == param
    if status in (400, 404, 405, 413, 415):
        assert answer.headers["x-should-retry"] == "false"
    return found


BAD_CHAT = {
    "messages": [
        [],
        "x",
        None,
        [5],
        [{"content": "a"}],
        [{"role": 5, "content": "a"}],
        [{"role": "user", "content": 5}],
    ],
    "max_tokens": [-1, 0, "5", 1.5, True, 2**70, 600, []],
    "max_completion_tokens": [-1, 0, 600],
    "temperature": [-1, "1", [], 1e300],
    "top_p": [0, 1.5, -1, "x"],
    "top_k": [-2, 1.5, "x"],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [3, -3],
    "frequency_penalty": [3, "x"],
    "repetition_penalty": [0, -1],
    "seed": [1.5, "x", 2**64],
    "n": [0, -1, 129, "2"],
    "stop": ["", [""], [5], 5, {}, ["x"] * 65, "y" * 1001],
    "stop_token_ids": [[-1], ["x"], 5, [2000], [2**40]],
    "logit_bias": [{"x": 1}, {"5": 101}, {"5": "x"}, [5], {"2000": 1}, {"-1": 1}, {"9" * 30: 1}],
    "allowed_token_ids": [[], [2000], 5],
    "min_tokens": [-1, 600],
    "logprobs": [5, "x"],
    "top_logprobs": [-1, 21, 1.5, 5],
    "prompt_logprobs": [-1, 21],
    "stream": [5, "x", 1],
    "stream_options": [5, {"include_usage": True}, {"include_usage": 5}],
    "chat_template_kwargs": [5, []],
    "documents": [5, [5]],
    "model": [5, []],
    "return_token_ids": ["x"],
}
UNSUPPORTED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "response_format": {"type": "json_object"},
    "structured_outputs": {"json": {}},
    "guided_json": {},
    "best_of": 2,
    "suffix": "x",
    "bad_words": ["x"],
    "truncate_prompt_tokens": 5,
    "chat_template": "{{ 1 }}",
    "mm_processor_kwargs": {"a": 1},
    "thinking_token_budget": 5,
    "priority": 5,
    "modalities": ["audio"],
    "store": True,
    "use_beam_search": True,
    "reasoning_effort": "low",
    "logits_processors": ["x"],
}
NOTHING = {
    "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "best_of": 1, "suffix": "", "priority": 0,
    "store": False, "user": "me", "metadata": {"a": "b"}, "unknown_field": [{"a": 1}], "parallel_tool_calls": True,
    "functions": None, "guided_json": None, "modalities": ["text"],
}  # fmt: skip


@pytest.mark.parametrize("field", BAD_CHAT)
def test_bad_fields_are_named(server, field):
    for value in BAD_CHAT[field]:
        answer = server.post("/v1/chat/completions", **{"messages": USER, field: value})
        found = error(answer, param=field)
        assert field in found["message"]


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_cannot_be_honoured_is_refused_by_name(server, field):
    answer = server.post("/v1/chat/completions", messages=USER, max_tokens=1, **{field: UNSUPPORTED[field]})
    assert error(answer, param=field)["message"].startswith(f"{field}: ")


def test_what_asks_for_nothing_is_taken(server):
    assert server.post("/v1/chat/completions", messages=USER, max_tokens=1, **NOTHING).status_code == 200
    assert server.post("/v1/completions", prompt="a", max_tokens=1, **NOTHING).status_code == 200


BAD_PROMPTS = [
    None,
    5,
    [],
    "",
    [[]],
    [[], [5]],
    ["a", 5],
    [5, "a"],
    [1.5],
    [True],
    [-1],
    [2**40],
    {"a": 1},
    [[["a"]]],
    ["a"] * 1025,
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_bad_prompts(server, prompt):
    error(server.post("/v1/completions", prompt=prompt), param="prompt")


def test_ids_that_the_model_does_not_have(server):
    assert "1999" in error(server.post("/v1/completions", prompt=[5, 2000]), param="prompt")["message"]
    error(server.post("/detokenize", tokens=[2000]), param="tokens")


def test_impossible_combinations_of_completions(server):
    error(server.post("/v1/completions", prompt="a", max_tokens=0), param="max_tokens")
    error(server.post("/v1/completions", prompt="a", echo=True, logprobs=1, stream=True), param="echo")
    error(server.post("/v1/completions", prompt=["a"] * 20, n=100), param="n")
    error(server.post("/v1/completions", prompt="a", prompt_logprobs=1, stream=True), param="prompt_logprobs")
    error(
        server.post("/v1/chat/completions", messages=USER, continue_final_message=True), param="continue_final_message"
    )
    error(server.post("/tokenize"), param="prompt")
    error(server.post("/tokenize", prompt="a", messages=USER), param="prompt")


def test_too_long_states_the_maximum(server):
    ids = [5] * 512
    assert "512 tokens" in error(server.post("/v1/completions", prompt=ids), param="prompt")["message"]
    assert (
        "at most 2 fit"
        in error(server.post("/v1/completions", prompt=ids[2:], max_tokens=3), param="max_tokens")["message"]
    )
    assert server.post("/v1/completions", prompt=ids[1:]).json()["usage"]["completion_tokens"] == 1
    long = [{"role": "user", "content": "the fox " * 300}]
    assert "512 tokens" in error(server.post("/v1/chat/completions", messages=long), param="messages")["message"]


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_no_json_objects(server, path):
    head = {"content-type": "application/json"}
    for body in (
        b"",
        b"{",
        b"null",
        b"5",
        b"[]",
        b'"x"',
        b"{}",
        b"[" * 5000,
        b"\xff",
        b'{"prompt": "\\ud800"}',
        b"9" * 9000,
    ):
        error(server.http.post(path, content=body, headers=head))
    error(server.http.post(path, content=b"{}", headers={"content-type": "text/plain"}), 415)
    error(server.http.post(path, content=b"{}"), 415)
    error(server.http.post(path, data={"prompt": "a"}), 415)


def test_other_paths_and_methods(server):
    for path in ("/", "/v1", "/v1/embeddings", "/docs", "/redoc", "/v1/completions/", "/../x", "/%00", "/health/"):
        error(server.http.get(path), 404)
    error(server.post("/v1/embeddings", input="a"), 404)
    assert "POST" in server.http.get("/v1/completions").headers["allow"]
    error(server.http.get("/v1/completions"), 405)
    error(server.http.delete("/health"), 405)


def test_engine_errors(server):
    assert "secret" not in error(server.post("/v1/completions", prompt="a", seed=668), 500)["message"]
    assert error(server.post("/v1/completions", prompt="a", seed=669))["message"] == "the image is bad"
    assert "finite" in error(server.post("/v1/completions", prompt="a", seed=670), 500)["message"]
    # a refusal that comes at once is a status also for a stream
    error(server.post("/v1/completions", prompt="a", seed=669, stream=True), 400)
    assert server.post("/v1/completions", prompt="a").status_code == 200


def test_large_bodies(start):
    served = start(config={"limits": {"body": 2000}})
    assert served.post("/v1/completions", prompt="a" * 100).status_code == 200
    error(served.post("/v1/completions", prompt="a" * 2000), 413)
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    chunks = iter([b'{"prompt": "', *[b"a" * 500] * 20, b'"}'])
    connection.request("POST", "/v1/completions", chunks, {"content-type": "application/json"}, encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["type"] == "RequestTooLargeError"
    assert served.post("/v1/completions", prompt="a").status_code == 200


def test_too_many_waiting(start):
    import concurrent.futures

    served = start(config={"limits": {"queued": 2}}, settings={"delay": 0.02, "max_num_seqs": 2})
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(served.post, "/v1/completions", prompt="a", max_tokens=30) for _ in range(12)]
        answers = [j.result() for j in jobs]
    refused = [a for a in answers if a.status_code != 200]
    assert 4 <= len(refused) <= 8
    for a in refused:
        error(a, 429)
        assert int(a.headers["retry-after"]) >= 1
        assert "x-should-retry" not in a.headers
    assert served.metric("vllm:admission_rejections_total") == len(refused)


# ------------------------------------------------------------------------------------------------------------- odd JSON
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.just(10**400),
    st.just(""),
)
values = st.recursive(
    scalars, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(st.text(max_size=5), v, max_size=3))
)
names = st.sampled_from([*BAD_CHAT, *UNSUPPORTED, "prompt", "echo", "tokens", "add_special_tokens"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(POSTS), body=st.dictionaries(names, values, max_size=4), good=st.booleans())
def test_odd_values_never_cause_a_500(server, path, body, good):
    base = {"messages": USER, "prompt": "the fox", "tokens": [5], "max_tokens": 2} if good else {}
    text = json.dumps({**base, **body} if not good or path != "/tokenize" else {"prompt": "a", **body})
    answer = server.http.post(path, content=text.encode(), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), (text, answer.text)
    if answer.status_code != 200:
        error(answer, answer.status_code)


def test_deep_nesting_everywhere(server):
    deep = "[" * 400 + "]" * 400
    for field in ("messages", "prompt", "stop", "logit_bias", "unknown", "chat_template_kwargs", "documents", "tools"):
        text = f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 1, "{field}": {deep}}}'
        answer = server.http.post("/v1/chat/completions", content=text, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), answer.text
    nested = '{"a":' * 400 + "1" + "}" * 400
    text = f'{{"messages": [{{"role": "user", "content": "a", "x": {nested}}}], "max_tokens": 1}}'
    answer = server.http.post("/v1/chat/completions", content=text, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_text_that_can_never_fit_is_told_before_it_is_tokenized(server, path):
    text = "a" * (8 * 1024**2)
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    begun = time.monotonic()
    assert "8,388,608 characters" in error(server.post(path, **body))["message"]
    assert time.monotonic() - begun < 5
