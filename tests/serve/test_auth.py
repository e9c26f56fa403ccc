"""API keys: everything is guarded but a fixed list."""

import json

import httpx
import pytest

OPEN = {"/health", "/ping", "/version"}
KEYS = ["first-key", "second-key"]


@pytest.fixture(scope="module")
def guarded(model, tmp_path_factory):
    from conftest import run

    with run(model, tmp_path_factory.mktemp("guarded") / "log", config={"api_keys": KEYS}) as served:
        yield served


def ask(served, method, path, **headers):
    return served.http.request(method, path, json={"prompt": "a"} if method == "POST" else None, headers=headers)


def routes(served):
    """Every method and path of the application, and some that do not exist."""
    document = ask(served, "GET", "/openapi.json", Authorization=f"Bearer {KEYS[0]}").json()
    found = [(m.upper(), p.replace("{name}", "x")) for p, methods in document["paths"].items() for m in methods]
    assert len(found) > 10
    more = ["GET /openapi.json", "GET /nope", "POST /v2/x", "HEAD /metrics", "GET //health", "GET /health/"]
    return [*found, *(tuple(m.split()) for m in more)]


def test_every_route_needs_a_key_but_a_fixed_list(guarded):
    seen_open = set()
    for method, path in routes(guarded):
        answer = ask(guarded, method, path)
        if path in OPEN:
            assert answer.status_code == 200
            seen_open.add(path)
            continue
        assert answer.status_code == 401, (method, path)
        assert answer.headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            found = answer.json()["error"]
            assert found["type"] == "authentication_error" and found["code"] == 401
    assert seen_open == OPEN


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("form", ["Authorization: Bearer {}", "authorization: bearer {}", "x-api-key: {}"])
def test_each_key_in_each_form(guarded, key, form):
    name, _, value = form.format(key).partition(": ")
    assert ask(guarded, "POST", "/v1/completions", **{name: value}).status_code == 200


WRONG = ["", "Bearer", "Bearer first-ke", "Bearer first-key2", "first-key", "Basic first-key", "Bearer \xe9"]


@pytest.mark.parametrize("value", [*WRONG, "Bearer first-key second-key", "Bearer first-key,second-key"])
def test_wrong_keys(guarded, value):
    answer = httpx.get(guarded.url + "/v1/models", headers={"authorization": value.encode("latin-1")})
    assert answer.status_code == 401
    assert answer.headers["x-should-retry"] == "false"


def test_the_key_is_checked_before_the_body_is_looked_at(guarded):
    answer = guarded.http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 401


def test_no_answer_and_no_line_shows_a_key(guarded):
    head = {"Authorization": f"Bearer {KEYS[0]}"}
    seen = [ask(guarded, m, p, **head).text for m, p in routes(guarded)]
    seen.append(json.dumps([dict(ask(guarded, m, p, **head).headers) for m, p in routes(guarded)]))
    assert not any(k in text for k in KEYS for text in [*seen, guarded.text])


def test_metrics_can_be_public_and_preflights_are_open(start):
    served = start(config={"api_keys": KEYS, "metrics_public": True, "allowed_origins": ["http://x.test"]})
    assert served.http.get("/metrics").status_code == 200
    assert served.http.get("/v1/models").status_code == 401
    ask = {"origin": "http://x.test", "access-control-request-method": "POST"}
    preflight = served.http.options("/v1/completions", headers=ask)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "http://x.test"
    refused = served.http.get("/v1/models", headers={"origin": "http://x.test"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://x.test"  # else a browser hides the reason


def test_without_keys_everybody_may_come(server):
    assert server.http.get("/v1/models").status_code == 200
    assert (
        "access-control-allow-origin" not in server.http.get("/v1/models", headers={"origin": "http://x.test"}).headers
    )
