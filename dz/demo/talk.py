"""Talking to a server: an OpenAI-shaped chat, pictures, and the counters that tell what ran."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from dz.errors import Refused

SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one chat request brought: `tokens` are generated ones, `seconds` from sending to the last byte."""

    text: str
    finish: str
    prompt_tokens: int
    tokens: int
    seconds: float


def free_port() -> int:
    """A port of the loopback address that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_ready(url: str, process: subprocess.Popen[bytes], timeout: float) -> float:
    """Seconds until `/health` answers 200. Raises Refused when the process ends first or the time is up."""
    begun = time.monotonic()
    while time.monotonic() - begun < timeout:
        if process.poll() is not None:
            raise _no_server(f"the server ended with exit code {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return time.monotonic() - begun
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise _no_server(f"{url}/health did not answer 200 within {timeout:.0f} s")


def _no_server(why: str) -> Refused:
    return Refused("the server did not come up", why, "read its log", code="not_ready")


def model_name(url: str) -> str:
    """The first model that the server names."""
    return json.loads(_get(f"{url}/v1/models"))["data"][0]["id"]


def chat(url: str, model: str, content: str | list[dict[str, Any]], *, max_tokens: int) -> Answer:
    """One greedy chat request. Raises Refused with the server's words when it answers with an error."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
    begun = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            got = json.loads(response.read())
    except urllib.error.HTTPError as e:
        what = e.read().decode("utf-8", "replace")[:500]
        raise Refused(f"the server answered {e.code}", what, "read its log", code="bad_answer") from e
    seconds = time.monotonic() - begun
    choice, usage = got["choices"][0], got["usage"]
    return Answer(
        text=choice["message"]["content"] or "",
        finish=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        tokens=usage["completion_tokens"],
        seconds=seconds,
    )


def picture(red: int, green: int) -> dict[str, Any]:
    """A content part with a small picture as a data URL: a blue ramp over one colour (0..255 each)."""
    from PIL import Image

    image = Image.new("RGB", (72, 48), (red, green, 0))
    image.putdata([(red, green, x * 255 // 71) for _ in range(48) for x in range(72)])
    held = io.BytesIO()
    image.save(held, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()},
    }


def metrics(url: str) -> list[tuple[str, dict[str, str], float]]:
    """Every sample of `/metrics`: name, labels, value."""
    return parse_metrics(_get(f"{url}/metrics"))


def parse_metrics(text: str) -> list[tuple[str, dict[str, str], float]]:
    """The samples of a Prometheus text: name, labels, value."""
    found = (SAMPLE.match(line) for line in text.splitlines())
    return [(m["name"], dict(LABEL.findall(m["labels"] or "")), float(m["value"])) for m in found if m]


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.read().decode()
