"""The upstream run: from_pretrained and upstream's own generate, one request at a time, in a process of its own.

Nothing of dz's engine, weight loader or kernels is in that process, and no binding of this one, so it is what dz is
compared with. `python -m dz.upstream.reference` reads one order (JSON) from stdin, prints a line for each case that is
done, and writes its run (JSON) and the dense logits (safetensors) to the paths that the order names."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

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
    each step. score: one forward over the prompt without a cache, its logits [T, V] kept dense."""

    id: str
    kind: Literal["generate", "score", "tokenize"] = "generate"
    tokens: list[int] = []
    text: str = ""
    messages: list[dict[str, Any]] = []
    length: int = 0
    max_tokens: int = 0
    top: int = TOP


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
    """What upstream says about the model: `vision` and `chat` are empty or say why there is none; `notes` are what its
    loader reported."""

    cls: str
    runs: str
    dtype: str
    vocab_size: int
    max_positions: int
    eos_token_ids: list[int]
    vision: str
    chat: str
    tokenizer: str
    versions: dict[str, str]
    notes: list[str] = []
    load_seconds: float = 0.0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Facts, and the answers in the order of the cases. `dense` is the file of the score cases' logits ("" if none):
    one float32 tensor [T, V] by case id."""

    facts: Facts
    answers: list[Answer]
    dense: str = ""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the child process is told. `plugins` are the test seam's."""

    source: dict[str, Any]
    trust: bool
    dtype: str
    device: str
    plugins: list[str]
    cases: list[Case]
    out: str
    dense: str


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
    """Ask upstream. `dense` is where the logits of score cases go, `log` where the child's stderr goes, `limit` the
    most seconds it may take.

    Raises EnvironmentFailure when the model does not fit into the host's memory or the limit passes, and Refused with
    upstream's own words when it cannot be loaded."""
    if any(c.kind != "tokenize" for c in cases) and device == "cpu":
        _refuse_too_large(source, dtype)
    say = progress or Silent()
    with tempfile.TemporaryDirectory(prefix="dz-reference-") as folder:
        out = Path(folder) / "run.json"
        order = Order(
            source=jsonio.to_builtins(source),
            trust=trust,
            dtype=dtype,
            device=device,
            plugins=list(plugins),
            cases=list(cases),
            out=str(out),
            dense=str(dense) if dense else "",
        )
        say.start("upstream run", len(cases), "cases")
        code, said = _child(order, log or Path(folder) / "log", limit, say)
        if code or not out.is_file():
            raise _failure(source, code, said)
        found = msgspec.json.decode(out.read_bytes(), type=Run)
    say.finish(f"{found.facts.cls} in {found.facts.dtype}, loaded in {found.facts.load_seconds:.1f} s")
    return found


def _child(order: Order, log: Path, limit: float | None, say: Progress) -> tuple[int, str]:
    """Run the child to its end: (exit code, what it said on stderr)."""
    log.parent.mkdir(parents=True, exist_ok=True)
    late = threading.Event()
    with log.open("w+", encoding="utf-8", errors="replace") as err:
        child = subprocess.Popen(
            [sys.executable, "-m", "dz.upstream.reference"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            text=False,
        )
        with _killed_after(child, limit, late), child:
            if child.stdin is None or child.stdout is None:
                raise RuntimeError("the child has no pipes")
            try:
                child.stdin.write(msgspec.json.encode(order))
                child.stdin.close()
            except BrokenPipeError:
                pass  # it ended before it read; its exit code and stderr tell why
            for _ in child.stdout:
                say.advance()
        err.seek(0)
        said = err.read()
    if late.is_set():
        why = f"it took longer than {limit:.0f} s"
        raise EnvironmentFailure("the upstream run was ended", why, "raise the limit, or ask less", code="late")
    return child.returncode, said


@contextlib.contextmanager
def _killed_after(child: subprocess.Popen[bytes], limit: float | None, late: threading.Event) -> Iterator[None]:
    def end() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(limit, end) if limit is not None else None
    try:
        if timer is not None:
            timer.start()
        yield
    except BaseException:
        child.kill()
        raise
    finally:
        if timer is not None:
            timer.cancel()


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
    """The child process: read the order, answer every case, write the run."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    try:
        run_plugins(order.plugins, "reference")
        from dz.upstream.answers import answer_all

        found = answer_all(order, done=lambda case: print(case, flush=True))
    except DzError as e:
        print(f"reference: {e.what}: {e.why}", file=sys.stderr)
        return e.exit_code
    Path(order.out).write_bytes(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
