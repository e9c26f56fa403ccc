"""A client that leaves ends its request."""

import json
import socket
import time

import pytest


def send(served, body):
    """Send a request over a bare socket; returns the socket."""
    data = json.dumps({"prompt": "the quick brown fox", "max_tokens": 400, **body}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    s = socket.create_connection((host, int(port)))
    s.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
    )
    return s


@pytest.fixture(scope="module")
def slow(model, tmp_path_factory):
    from conftest import run

    folder = tmp_path_factory.mktemp("slow")
    with run(model, folder / "log", settings={"delay": 0.03, "aborts": str(folder / "aborts")}) as served:
        served.aborts = folder / "aborts"
        yield served


def running(served):
    return served.metric("vllm:num_requests_running") + served.metric("vllm:num_requests_waiting")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["before the first byte", "after it"])
def test_the_engine_is_told(slow, stream, when, n):
    slow.wait(lambda: running(slow) == 0)
    before = len(slow.aborts.read_text().split()) if slow.aborts.exists() else 0
    connection = send(slow, {"stream": stream, "n": n})
    if when == "after it" and stream:
        assert connection.recv(10)
    slow.wait(lambda: running(slow) >= n)
    begun = time.monotonic()
    connection.close()
    slow.wait(lambda: slow.aborts.exists() and len(slow.aborts.read_text().split()) == before + n)
    assert time.monotonic() - begun < 1.0
    slow.wait(lambda: running(slow) == 0 and slow.metric("dz:blocks_used") == 0)


def test_others_are_not_disturbed(slow):
    connection = send(slow, {"stream": True})
    connection.recv(10)
    connection.close()
    assert slow.complete("the fox", max_tokens=4)["text"] == "the foxthe fox"


def test_a_stop_string_ends_the_sequence_in_the_engine(slow):
    slow.wait(lambda: running(slow) == 0)
    before = len(slow.aborts.read_text().split()) if slow.aborts.exists() else 0
    assert slow.complete("the quick brown fox", max_tokens=400, stop="fox")["text"] == "the quick brown "
    slow.wait(lambda: len(slow.aborts.read_text().split()) == before + 1)


def test_metrics_tell_of_aborts(slow):
    def aborted():
        rows = [r for r in slow.http.get("/metrics").text.splitlines() if 'finished_reason="abort"' in r]
        return sum(float(r.split()[-1]) for r in rows if "_total" in r)

    before = aborted()
    connection = send(slow, {"stream": True})
    connection.recv(10)
    connection.close()
    slow.wait(lambda: aborted() == before + 1)
