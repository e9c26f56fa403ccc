"""What a check says to a server: the OpenAI API over HTTP, with token ids both ways."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from dz.errors import Refused

T = TypeVar("T")
GREEDY = {"temperature": 0, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0}
_ID = re.compile(r"token_id:(\d+)\Z")
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class AnswerError(Refused):
    """The server answered with an error (`status`), not at all (`status` 0), or with something that is no answer."""

    def __init__(self, what: str, why: str, *, status: int = 0) -> None:
        super().__init__(what, why, "see the server's log among the evidence", code="answer")
        self.status = status

    def __reduce__(self) -> tuple:
        return _again, (self.what, self.why, self.status)


def _again(what: str, why: str, status: int) -> AnswerError:
    return AnswerError(what, why, status=status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer. `prompt_tokens` is None where the server does not tell; `logprobs` and `top` only where asked for;
    `first` is the seconds to the first token, only of a streamed answer."""

    tokens: list[int]
    text: str
    finish: str
    prompt_tokens: list[int] | None = None
    logprobs: tuple[float, ...] = ()
    top: tuple[dict[int, float], ...] = ()
    seconds: float = 0.0
    first: float | None = None


class Client:
    """One server. Threads may share it."""

    def __init__(self, url: str, *, timeout: float = 600.0, transport: httpx.BaseTransport | None = None) -> None:
        key = os.environ.get("DZ_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=64)
        wait = httpx.Timeout(timeout, connect=10.0)
        base = url.rstrip("/").removesuffix("/v1")
        self.url = base
        self._http = httpx.Client(base_url=base, headers=headers, limits=limits, timeout=wait, transport=transport)
        self._card: dict[str, Any] | None = None

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    @property
    def card(self) -> dict[str, Any]:
        """The first model that the server lists. Raises AnswerError."""
        card = self._card
        if card is None:
            card = (self.get("/v1/models").get("data") or [{}])[0]
            if not card.get("id"):
                raise AnswerError("the server lists no model", "GET /v1/models names none")
            self._card = card
        return card

    @property
    def max_model_len(self) -> int:
        """The longest context; 0 where the server does not tell."""
        return int(self.card.get("max_model_len") or 0)

    def get(self, path: str) -> dict[str, Any]:
        """GET a JSON document. Raises AnswerError."""
        return _json(self._send("GET", path, None), path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST a JSON document. Raises AnswerError."""
        return _json(self._send("POST", path, body), path)

    def health(self) -> int:
        """The status of GET /health; 0 when nobody answers."""
        try:
            return self._http.get("/health", timeout=5.0).status_code
        except httpx.HTTPError:
            return 0

    def complete(self, prompt: str | Sequence[int], max_tokens: int, *, logprobs: int | None = None) -> Reply:
        """Greedy completion of a text or of token ids. Raises AnswerError."""
        body = self._completion(prompt, max_tokens)
        if logprobs is not None:
            body |= {"logprobs": logprobs, "return_tokens_as_token_ids": True}
        begun = time.monotonic()
        choice = _choice(self.post("/v1/completions", body))
        logs = choice.get("logprobs") or {}
        return Reply(
            tokens=_tokens(choice),
            text=choice.get("text") or "",
            finish=choice.get("finish_reason") or "",
            prompt_tokens=choice.get("prompt_token_ids"),
            logprobs=tuple(logs.get("token_logprobs") or ()) if logprobs is not None else (),
            top=tuple(_by_id(row) for row in logs.get("top_logprobs") or ()) if logprobs else (),
            seconds=time.monotonic() - begun,
        )

    def chat(self, messages: Sequence[dict[str, Any]], max_tokens: int) -> Reply:
        """Greedy answer to a chat. Raises AnswerError."""
        body = {"model": self.card["id"], "messages": list(messages), "max_tokens": max_tokens, **GREEDY}
        begun = time.monotonic()
        document = self.post("/v1/chat/completions", {**body, "return_token_ids": True})
        choice = _choice(document)
        return Reply(
            tokens=_tokens(choice),
            text=(choice.get("message") or {}).get("content") or "",
            finish=choice.get("finish_reason") or "",
            prompt_tokens=document.get("prompt_token_ids") or choice.get("prompt_token_ids"),
            seconds=time.monotonic() - begun,
        )

    def score(self, tokens: Sequence[int], top: int) -> list[dict[int, float] | None]:
        """Log probabilities by token id, teacher-forced: entry i is about token i given those before it (None for the
        first), and one more entry is about the token after the last. Raises AnswerError."""
        body = {**self._completion(tokens, 1), "echo": True, "logprobs": top, "return_tokens_as_token_ids": True}
        body["ignore_eos"] = True  # else an end token after the last would be left out
        rows = (_choice(self.post("/v1/completions", body)).get("logprobs") or {}).get("top_logprobs") or []
        if len(rows) != len(tokens) + 1:
            why = f"{len(rows)} entries for {len(tokens)} echoed tokens and one more"
            raise AnswerError("the server's echo with logprobs is not whole", why)
        return [None if row is None else _by_id(row) for row in rows]

    def stream(self, prompt: str | Sequence[int], max_tokens: int) -> Reply:
        """Greedy completion as a stream, with the seconds to its first token. Raises AnswerError."""
        body = {**self._completion(prompt, max_tokens), "stream": True}
        begun = time.monotonic()
        first, text, finish, tokens = None, "", "", []
        for event in self._events("/v1/completions", body):
            choice = (event.get("choices") or [{}])[0]
            tokens += choice.get("token_ids") or []
            text += choice.get("text") or ""
            finish = choice.get("finish_reason") or finish
            if first is None and (choice.get("text") or choice.get("token_ids")):
                first = time.monotonic() - begun
        return Reply(tokens=tokens, text=text, finish=finish, first=first, seconds=time.monotonic() - begun)

    def tokens(self, prompt: str | Sequence[int], max_tokens: int) -> Iterator[list[int]]:
        """The token ids of a stream that no end token ends, as they come. Raises AnswerError."""
        for event in self._events(
            "/v1/completions", {**self._completion(prompt, max_tokens), "stream": True, "ignore_eos": True}
        ):
            ids = (event.get("choices") or [{}])[0].get("token_ids")
            if ids:
                yield ids

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """The samples of GET /metrics by name: labels and value. Raises AnswerError."""
        return parse_metrics(self._send("GET", "/metrics", None).text)

    def _completion(self, prompt: str | Sequence[int], max_tokens: int) -> dict[str, Any]:
        given = prompt if isinstance(prompt, str) else list(prompt)
        return {
            "model": self.card["id"], "prompt": given, "max_tokens": max_tokens, "return_token_ids": True, **GREEDY,
        }  # fmt: skip

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as e:
            raise AnswerError(f"no answer to {path}", f"{type(e).__name__}: {e}") from e
        if response.status_code != 200:
            raise _refusal(path, response.status_code, response.text)
        return response

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The documents of an event stream. An error in it, or an end without [DONE], is an AnswerError."""
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise _refusal(path, response.status_code, response.read().decode("utf-8", "replace"))
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data == "[DONE]":
                        return
                    event = json.loads(data) if data else {}
                    if "error" in event:
                        raise _refusal(path, int(event["error"].get("code") or 0), data)
                    yield event
        except (httpx.HTTPError, json.JSONDecodeError) as e:
            raise AnswerError(f"the stream of {path} broke off", f"{type(e).__name__}: {e}") from e
        raise AnswerError(f"the stream of {path} broke off", "it ended without [DONE]")


def at_once(asks: Sequence[Callable[[], T]], *, limit: int = 32) -> list[T]:
    """Call all at the same time (at most `limit` of them) and return their values in order; the first error is raised.
    On Ctrl-C what has not begun is dropped."""
    pool = ThreadPoolExecutor(min(len(asks), limit) or 1)
    try:
        futures = [pool.submit(ask) for ask in asks]
        return [f.result() for f in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def parse_metrics(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples of Prometheus text by name."""
    out: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found:
            labels = dict(_LABEL.findall(found[2] or ""))
            out.setdefault(found[1], []).append((labels, float(found[3])))
    return out


def _refusal(path: str, status: int, text: str) -> AnswerError:
    try:
        error = json.loads(text)["error"]
        said = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        said = text
    return AnswerError(f"{path} answers {status}", " ".join(str(said).split())[:400] or "no reason", status=status)


def _json(response: httpx.Response, path: str) -> dict[str, Any]:
    try:
        document = response.json()
    except ValueError as e:
        raise AnswerError(f"{path} answers no JSON", str(e), status=response.status_code) from e
    if not isinstance(document, dict):
        raise AnswerError(f"{path} answers no JSON object", f"a {type(document).__name__}", status=response.status_code)
    return document


def _choice(document: dict[str, Any]) -> dict[str, Any]:
    choices = document.get("choices")
    if not choices:
        raise AnswerError("an answer without choices", str(document)[:200])
    return choices[0]


def _tokens(choice: dict[str, Any]) -> list[int]:
    ids = choice.get("token_ids", choice.get("output_token_ids"))
    if ids is None:
        raise AnswerError("the server returns no token ids", "`return_token_ids` has no effect there")
    return list(ids)


def _by_id(row: dict[str, float]) -> dict[int, float]:
    out: dict[int, float] = {}
    for name, value in row.items():
        found = _ID.match(name)
        if not found:
            raise AnswerError(
                "the server names tokens by their text", "`return_tokens_as_token_ids` has no effect there"
            )
        out[int(found[1])] = value
    return out
