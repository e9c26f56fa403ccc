"""The engine dies, freezes, refuses to load; the server drains, ends, is killed: nobody hangs, nothing stays behind."""

import asyncio
import concurrent.futures
import os
import signal
import socket
import threading
import time

import httpx
import psutil
import pytest

from dz.core.source import Source
from dz.serve.config import ServeConfig
from dz.serve.launch import _bind

FOX = "the quick brown fox"


def engine(served):
    """The worker process of a server."""

    def workers():
        return [c for c in psutil.Process(served.process.pid).children() if "fake_engine" in " ".join(c.cmdline())]

    served.wait(workers)
    (found,) = workers()
    return found


def health(served):
    answer = served.http.get("/health")
    return answer.status_code, answer.json()["error"]["message"] if answer.status_code != 200 else ""


def collect(served, **body):
    """Start a stream in a thread; returns (first event seen, list of lines, thread)."""
    seen, lines = threading.Event(), []

    def read():
        body.setdefault("max_tokens", 400)
        with httpx.stream(
            "POST", served.url + "/v1/completions", json={"prompt": FOX, "stream": True, **body}, timeout=20
        ) as a:
            for line in a.iter_lines():
                if line:
                    lines.append(line)
                    seen.set()
        seen.set()

    thread = threading.Thread(target=read)
    thread.start()
    return seen, lines, thread


# ------------------------------------------------------------------------------------------------------------- loading
def test_loading_is_told_and_nothing_is_served(start):
    served = start(until="listening", settings={"load": 1.5})
    status, why = health(served)
    assert status == 503 and "loading" in why
    answer = served.post("/v1/completions", prompt="a")
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"
    assert int(answer.headers["retry-after"]) > 0
    assert served.http.get("/version").status_code == 200
    served.wait(lambda: health(served)[0] == 200)
    assert "ready: http://127.0.0.1:" in served.text


@pytest.mark.parametrize("code", [1, 2, 3])
def test_a_refusal_ends_the_start_with_its_three_lines(start, code):
    fatal = ["the checkpoint lacks a tensor", "model.norm.weight is missing", "dz fetch again", "missing", code]
    served = start(until=None, settings={"fatal": fatal})
    served.process.join(20)
    assert served.process.exitcode == code
    assert served.text.endswith(
        "error: the checkpoint lacks a tensor\n  why: model.norm.weight is missing\n  next: dz fetch again\n"
    )
    assert "ready:" not in served.text


def test_a_death_while_loading_is_an_environment_failure(start):
    served = start(until=None, settings={"die_loading": 7})
    served.process.join(20)
    assert served.process.exitcode == 3
    assert "error: the engine process ended with code 7\n  why: while it was loading" in served.text


def test_a_missing_worker_and_a_taken_address(start, model):
    served = start(until=None, config={"command": ["/no/such/worker"]})
    served.process.join(20)
    assert served.process.exitcode == 3 and "cannot be started" in served.text
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        served = start(until=None, config={"port": taken.getsockname()[1]})
        served.process.join(20)
    assert served.process.exitcode == 3 and "cannot listen on 127.0.0.1:" in served.text


def test_load_only(start):
    served = start(until=None, config={"load_only": True})
    served.process.join(20)
    assert served.process.exitcode == 0
    assert "loaded: [['attention', 2, 'gather']]" in served.text.replace("(", "[").replace(")", "]")
    assert "listening" not in served.text and "ready" not in served.text
    refused = start(until=None, config={"load_only": True}, settings={"fatal": ["a", "b", "c", "d", 1]})
    refused.process.join(20)
    assert refused.process.exitcode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_ends_at_once(start, number):
    served = start(until="listening", settings={"load": 60})
    child = engine(served)
    begun = time.monotonic()
    os.kill(served.process.pid, number)
    served.process.join(10)
    assert time.monotonic() - begun < 5
    assert served.process.exitcode == 130
    assert not child.is_running()


# --------------------------------------------------------------------------------------------------------------- death
def test_kill_9_in_mid_request(start):
    served = start(settings={"delay": 0.02, "load": 0.5})
    seen, lines, thread = collect(served)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        whole = pool.submit(served.post, "/v1/completions", prompt=FOX, max_tokens=400)
        assert seen.wait(10)
        served.wait(lambda: served.metric("vllm:num_requests_running") == 2)
        begun = time.monotonic()
        engine(served).kill()
        answer = whole.result(10)
        thread.join(10)
        assert time.monotonic() - begun < 1.0
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the engine process was killed by signal 9"
    assert lines[-1] == "data: [DONE]" and '"error"' in lines[-2] and '"code":503' in lines[-2]
    status, why = health(served)
    assert status == 503 and why
    assert served.post("/v1/completions", prompt="a").status_code == 503
    served.wait(lambda: health(served)[0] == 200)
    assert served.complete(FOX, max_tokens=4)["text"] == FOX
    assert served.metric("dz:engine_restarts_total") == 1


def test_an_engine_that_exits_is_restarted_only_so_often(start, tmp_path):
    pids = tmp_path / "pids"
    served = start(config={"max_restarts": 2}, settings={"pids": str(pids)})
    before = served.metric("dz:steps_total")
    for _ in range(3):
        served.wait(lambda: health(served)[0] == 200)
        answer = served.post("/v1/completions", prompt=FOX, seed=666)
        assert answer.status_code == 503
    served.wait(lambda: "2 of 2 times" in health(served)[1])
    time.sleep(0.5)
    assert len(pids.read_text().split()) == 3
    assert "answering 503 from now on" in served.text
    assert served.process.is_alive()
    assert served.http.get("/v1/models").status_code == 200
    assert served.metric("dz:steps_total") >= before
    assert not any(psutil.pid_exists(int(p)) for p in pids.read_text().split())


def test_a_restart_may_be_refused(start, tmp_path):
    settings = {"pids": str(tmp_path / "pids"), "good_loads": 1, "fatal": ["the disk is gone", "b", "c", "d", 1]}
    served = start(settings=settings)
    served.post("/v1/completions", prompt=FOX, seed=666)
    served.wait(lambda: "the disk is gone" in health(served)[1])
    assert served.process.is_alive()


def test_counters_survive_a_restart(start):
    served = start()
    served.complete(FOX, max_tokens=16)
    served.wait(lambda: served.metric("dz:steps_total") >= 16)
    seen = served.metric("dz:steps_total")
    served.post("/v1/completions", prompt=FOX, seed=666)
    served.wait(lambda: health(served)[0] == 200)
    assert served.metric("dz:steps_total") >= seen
    served.complete(FOX, max_tokens=8)
    served.wait(lambda: served.metric("dz:steps_total") >= seen + 8)


@pytest.mark.parametrize("watch", [{"silence": 1.0}, {"stopped": 1.0}])
def test_a_frozen_engine_is_found_and_replaced(start, watch):
    served = start(config={"watch": {**watch, "tick": 0.05}})
    time.sleep(1.5)  # silence does not matter while nothing is open
    child = engine(served)
    begun = time.monotonic()
    answer = served.post("/v1/completions", prompt=FOX, seed=667)
    assert answer.status_code == 503
    assert 0.9 < time.monotonic() - begun < 4
    served.wait(lambda: health(served)[0] == 200)
    assert not child.is_running()
    assert "the engine process froze and was killed" in served.text
    assert served.complete(FOX, max_tokens=4)["text"] == FOX


def test_a_stopped_engine_shows_in_health_at_once(start):
    served = start()
    os.kill(engine(served).pid, signal.SIGSTOP)
    served.wait(lambda: health(served) == (503, "the engine process is stopped"), 2)
    assert served.post("/v1/completions", prompt="a").status_code == 503
    os.kill(engine(served).pid, signal.SIGCONT)
    served.wait(lambda: health(served)[0] == 200, 2)
    assert served.complete(FOX, max_tokens=4)["text"] == FOX


def test_an_engine_that_makes_no_step_is_found(start):
    served = start(config={"watch": {"silence": 60, "stall": 1.0, "tick": 0.05}}, settings={"deaf": True})
    assert served.post("/v1/completions", prompt=FOX).status_code == 503
    served.wait(lambda: health(served)[0] == 200)


def test_what_the_server_cannot_understand_is_an_end(start):
    served = start(settings={"gibberish": True})
    answer = served.post("/v1/completions", prompt=FOX)
    assert answer.status_code == 503
    served.wait(lambda: "does not understand" in served.text)


# ----------------------------------------------------------------------------------------------------------------- end
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_running_requests_finish_and_new_ones_are_refused(start, number):
    served = start(settings={"delay": 0.02})
    child = engine(served)
    seen, lines, thread = collect(served, max_tokens=60)
    assert seen.wait(10)
    os.kill(served.process.pid, number)
    served.wait(lambda: health(served)[0] == 503)
    assert "shutting down" in health(served)[1]
    assert served.post("/v1/completions", prompt="a").status_code == 503
    thread.join(10)
    assert lines[-1] == "data: [DONE]" and '"length"' in lines[-2]
    served.process.join(10)
    assert served.process.exitcode == 0
    assert not child.is_running()


def test_an_idle_server_ends_at_once(start):
    served = start()
    served.complete("a", max_tokens=1)
    begun = time.monotonic()
    os.kill(served.process.pid, signal.SIGTERM)
    served.process.join(10)
    assert (served.process.exitcode, time.monotonic() - begun < 2) == (0, True)


def test_the_drain_has_an_end(start):
    served = start(config={"drain_timeout": 0.5}, settings={"delay": 0.05})
    seen, lines, thread = collect(served)
    assert seen.wait(10)
    begun = time.monotonic()
    os.kill(served.process.pid, signal.SIGTERM)
    thread.join(10)
    served.process.join(10)
    assert 0.4 < time.monotonic() - begun < 4
    assert '"error"' in lines[-2] and "shutting down" in lines[-2]
    assert served.process.exitcode == 0


def test_a_second_signal_ends_at_once(start):
    served = start(settings={"delay": 0.05})
    child = engine(served)
    seen, _, thread = collect(served)
    assert seen.wait(10)
    begun = time.monotonic()
    os.kill(served.process.pid, signal.SIGINT)
    time.sleep(0.2)
    os.kill(served.process.pid, signal.SIGINT)
    served.process.join(10)
    assert time.monotonic() - begun < 3
    assert served.process.exitcode == 130
    assert not child.is_running()
    thread.join(5)


def test_no_worker_outlives_a_killed_server(start):
    served = start(settings={"delay": 0.05})
    child = engine(served)
    os.kill(child.pid, signal.SIGSTOP)  # it cannot notice by itself
    os.kill(served.process.pid, signal.SIGKILL)
    gone, _ = psutil.wait_procs([child], timeout=5)
    assert gone


def test_a_unix_socket(start, tmp_path):
    path = str(tmp_path / "s")
    served = start(config={"uds": path})
    assert served.url == f"unix:{path}"
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x") as http:
        assert http.get("/health").status_code == 200
    os.kill(served.process.pid, signal.SIGTERM)
    served.process.join(10)
    assert not os.path.exists(path)


def test_answers_leave_without_delay(tmp_path):
    """Without TCP_NODELAY headers and body wait for each other's acknowledgement: 40 ms an answer."""
    config = ServeConfig(
        source=Source(name="m", folder=str(tmp_path), commit="", rev8="0", code_hash="", files=()), settings={}, port=0
    )

    async def no_delay() -> int:
        accepted = asyncio.get_running_loop().create_future()

        def connected(_, writer):
            at = writer.get_extra_info("socket")
            accepted.set_result(at.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        bound = _bind(config)
        async with await asyncio.start_server(connected, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname()[:2])
            found = await accepted
            writer.close()
            return found

    assert asyncio.run(no_delay())
