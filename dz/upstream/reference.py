"""The upstream run: from_pretrained and upstream's own generate, one request at a time, in a process of its own.

Nothing of dz's engine, weight loader or kernels is in that process, and no binding of this one, so it is what dz is
compared with. `python -m dz.upstream.reference` reads an order and then asks from stdin, one JSON document a line, and
answers each ask with a line for every case that is done and one with the run; dense logits go to a safetensors file."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from dz.core import jsonio
from dz.core.headers import read_header
from dz.core.plugins import run_plugins
from dz.core.protocols import Progress, Silent
from dz.core.source import Source
from dz.errors import DzError, EnvironmentFailure, Refused

TOP = 64  # alternatives kept at each step
SPARE = 1.15  # activations and the loader's own copies, on top of the weights
VALUES = {"U8": 2, "I8": 1, "I32": 8, "F4": 1}  # most values that one stored element unpacks to; others: one
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to ask upstream. The prompt is `tokens`, else `text` through the tokenizer, else `messages` through the
    chat template (image parts are `{"type": "image", "path": "/abs.png"}`); `length` repeats its tokens to that many.

    tokenize: the prompt's ids alone, no weights. generate: `max_tokens` greedy tokens with the `top` alternatives of
    each step. score: one forward over the prompt without a cache; `top` and margins of its rows from `start` on (row i
    is what follows token i), and with `dense` all its logits [T, V] too."""

    id: str
    kind: Literal["generate", "score", "tokenize"] = "generate"
    tokens: list[int] = []
    text: str = ""
    messages: list[dict[str, Any]] = []
    length: int = 0
    max_tokens: int = 0
    top: int = TOP
    start: int = 0
    dense: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Upstream's answer. `tokens` end before the token that ended the text, which is `stop_token` (None: the length
    did); `margins` and `top` (token, natural-log probability; best first) have an entry for that step too. `error` is
    upstream's own message when the case failed."""

    id: str
    prompt: list[int] = []
    tokens: list[int] = []
    stop_token: int | None = None
    margins: list[float] = []
    top: list[list[tuple[int, float]]] = []
    seconds: float = 0.0
    error: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What upstream says about the model: `images` whether the repository is for pictures; `vision`, `chat` and
    `tokenizer` are empty or say why there is none here; `notes` are what its loader reported."""

    cls: str
    runs: str
    dtype: str
    vocab_size: int
    max_positions: int
    eos_token_ids: list[int]
    images: bool
    vision: str
    chat: str
    tokenizer: str
    versions: dict[str, str]
    notes: list[str] = []
    load_seconds: float = 0.0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Facts, and the answers in the order of the cases. `dense` is the file of the dense logits ("" if none):
    one float32 tensor [T, V] by case id."""

    facts: Facts
    answers: list[Answer]
    dense: str = ""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the child process is told first. `plugins` are the test seam's."""

    source: dict[str, Any]
    trust: bool
    dtype: str
    device: str
    plugins: list[str]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Some cases for the child; `dense` is where the dense logits go."""

    cases: list[Case]
    dense: str = ""


def run(
    source: Source,
    cases: Sequence[Case],
    *,
    trust: bool,
    dtype: str = "float32",
    device: str = "cpu",
    plugins: Sequence[str] = (),
    dense: Path | None = None,
    log: Path | None = None,
    limit: float | None = None,
    progress: Progress | None = None,
) -> Run:
    """Ask upstream once; see `Session`."""
    with Session(source, trust=trust, dtype=dtype, device=device, plugins=plugins, log=log, progress=progress) as ask:
        return ask(cases, dense=dense, limit=limit)


class Session:
    """An upstream run that answers several times and loads the model once, when the first case needs it. The child
    starts with the first ask and ends with `close()`, which leaving the context calls."""

    def __init__(
        self,
        source: Source,
        *,
        trust: bool,
        dtype: str = "float32",
        device: str = "cpu",
        plugins: Sequence[str] = (),
        log: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._source, self._log, self._say = source, log, progress or Silent()
        self._order = Order(
            source=jsonio.to_builtins(source), trust=trust, dtype=dtype, device=device, plugins=list(plugins)
        )
        self._child: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._loaded = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, cases: Sequence[Case], *, dense: Path | None = None, limit: float | None = None) -> Run:
        """Answer cases. `dense` is the file for dense logits, `limit` the most seconds to wait.

        Raises EnvironmentFailure when the model does not fit into the host's memory or the limit passes, and Refused
        with upstream's own words when it cannot be loaded or the process dies."""
        if any(c.kind != "tokenize" for c in cases) and not self._loaded:
            if self._order.device == "cpu":
                _refuse_too_large(self._source, self._order.dtype)
            self._loaded = True
        child = self._started()
        self._say.start(f"upstream run in {self._order.dtype}", len(cases), "cases")
        found = self._exchange(child, Ask(cases=list(cases), dense=str(dense or "")), limit)
        self._say.finish(found.facts.cls)
        return found

    def close(self) -> None:
        """End the child; asking again starts another."""
        child, self._child, self._loaded = self._child, None, False
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout, self._stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
            self._stderr = self._log.open("w+b") if self._log else tempfile.TemporaryFile()  # noqa: SIM115  close() does
            self._child = subprocess.Popen(
                [sys.executable, "-m", "dz.upstream.reference"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
            )
            self._send(self._child, self._order)
        return self._child

    @staticmethod
    def _send(child: subprocess.Popen[bytes], message: msgspec.Struct) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended: reading tells, its exit code and stderr say why
            child.stdin.write(msgspec.json.encode(message) + b"\n")  # type: ignore[union-attr]
            child.stdin.flush()  # type: ignore[union-attr]

    def _exchange(self, child: subprocess.Popen[bytes], ask: Ask, limit: float | None) -> Run:
        """Send an ask and read lines until the run comes: one for each case that is done, then the run."""
        late = threading.Event()
        timer = threading.Timer(limit or 0, lambda: (late.set(), child.kill()))
        try:
            if limit is not None:
                timer.start()
            self._send(child, ask)
            for line in child.stdout or ():
                if line.startswith(b"{"):
                    return msgspec.json.decode(line, type=Run)
                self._say.advance()
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
        if late.is_set():
            self.close()
            why = f"it took longer than {limit:.0f} s"
            raise EnvironmentFailure("the upstream run was ended", why, "raise the limit, or ask less", code="late")
        code = child.wait()
        said = self._told()
        self.close()
        raise _failure(self._source, code, said)

    def _told(self) -> str:
        if self._stderr is None:
            return ""
        self._stderr.seek(0)
        return self._stderr.read().decode("utf-8", "replace")


def _failure(source: Source, code: int, said: str) -> DzError:
    """The error of a child that wrote no run. It ends with a line of its own where it knew why."""
    lines = said.strip().splitlines()
    told = next((line.removeprefix("reference: ") for line in reversed(lines) if line.startswith("reference: ")), "")
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return Refused(
        f"upstream's own run of {source.name} failed",
        told or f"{how}: {lines[-1] if lines else 'it said nothing'}"[:600],
        "run the model with transformers alone; what dz serves can only be compared with that",
        code="reference_failed",
    )


def need(source: Source, dtype: str) -> int:
    """The bytes that upstream needs to hold the model's weights in `dtype`, from the headers; an upper bound where
    packed formats are unpacked."""
    values = 0
    for file in source.files:
        if file.path.endswith(".safetensors") and "/" not in file.path:
            tensors = read_header(source.path / file.path).tensors.values()
            values += sum(t.elements * VALUES.get(t.dtype, 1) for t in tensors)
    return int(values * ITEM[dtype] * SPARE)


def _refuse_too_large(source: Source, dtype: str) -> None:
    from dz import backends

    wanted = need(source, dtype)
    free, _ = backends.memory(backends.detect("cpu"))
    if wanted > free:
        raise EnvironmentFailure(
            f"the upstream run of {source.name} does not fit",
            f"its weights need about {wanted:,} B in {dtype}, the host has {free:,} B free",
            "run it on a larger host",
            code="no_memory",
        )


def main() -> int:
    """The child process: read the order, then answer asks until there are no more. Only answers go to stdout: what
    upstream's code prints there is sent to stderr."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        try:
            _serve(answers)
        except DzError as e:
            print(f"reference: {e.what}: {e.why}", file=sys.stderr)
            return e.exit_code
    return 0


def _serve(answers: IO[bytes]) -> None:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    run_plugins(order.plugins, "reference")
    from dz.upstream.answers import Upstream

    upstream = Upstream(order)

    def say(line: bytes) -> None:
        answers.write(line + b"\n")
        answers.flush()

    for line in sys.stdin.buffer:
        say(msgspec.json.encode(upstream.answer(msgspec.json.decode(line, type=Ask), done=lambda _: say(b"done"))))


if __name__ == "__main__":
    sys.exit(main())
