"""Foreign exceptions in our words, and what must never be printed."""

import errno

import pytest

from dz.errors import EnvironmentFailure
from dz.hub.client import Hub, client_log
from dz.hub.faults import blot, passing, retry_after, status, translate


class Response:
    def __init__(self, code, headers=None):
        self.status_code, self.headers = code, headers or {}


def http(code, name="HfHubHTTPError", headers=None):
    error = type(name, (OSError,), {})("the hub said no\nwith a second line")
    error.response = Response(code, headers)
    return error


def test_blot():
    text = "Bearer abcdef and hf_ABCdef1234 at https://cdn/x?Signature=zzz&b=1 'own-secret'"
    out = blot(text, "own-secret")
    for secret in ("abcdef ", "hf_ABC", "zzz", "own-secret"):
        assert secret not in out
    assert "https://cdn/x" in out


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_busy_is_passing(code):
    assert passing(http(code)) and status(http(code)) == code


@pytest.mark.parametrize("code", [400, 401, 403, 404, 416])
def test_no_is_not_passing(code):
    assert not passing(http(code))


def test_causes_count():
    error = type("LocalEntryNotFoundError", (FileNotFoundError,), {})("cannot find the file")
    error.__cause__ = http(503, headers={"Retry-After": "7"})
    assert passing(error) and retry_after(error) == 7
    told = translate(error, model="org/name@abc", endpoint="http://hub")
    assert told.code == "hub" and "503" in told.why


def test_retry_after_that_is_a_date_counts_as_none():
    assert retry_after(http(429, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})) == 0


def test_disk_full():
    told = translate(OSError(errno.ENOSPC, "No space left on device"), model="org/name", endpoint="http://hub")
    assert told.code == "disk_full" and told.exit_code == 3 and "org/name" in told.what


def test_a_defect_is_not_dressed_up():
    with pytest.raises(ZeroDivisionError):
        translate(ZeroDivisionError("x"), model="org/name", endpoint="http://hub")


def test_offline_never_asks(monkeypatch):
    hub = Hub("http://127.0.0.1:9", offline=True)
    with pytest.raises(EnvironmentFailure) as e:
        hub.commit("org/name", "main")
    assert e.value.code == "offline" and "org/name" in e.value.what


def test_the_clients_own_warnings_become_notes(recorder):
    import logging

    logger = logging.getLogger("huggingface_hub.file_download")
    before = logging.getLogger("huggingface_hub").handlers[:]
    with client_log(recorder, "own-secret"):
        logger.warning("Error while downloading from %s (%s)", "https://cdn/x?sig=own-secret", "cut")
    assert recorder.notes == ["Error while downloading from https://cdn/x (cut)"]
    assert logging.getLogger("huggingface_hub").handlers == before
