"""The whole chain on the demo repository, each part run as the command that a user would type."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dz.core.protocols import Progress
from dz.demo import build, figures, talk
from dz.demo.steps import Shell, Step, end, typed
from dz.errors import DzError, explain

MODEL = f"./{build.NAME}"
TRUST = "--trust-remote-code"
CHECKLIST = "default"
DEVICE = "H200"
COMMAND_LIMIT = 300.0  # seconds; a whole run takes less than 120
READY_LIMIT = 120.0
CHAT_TOKENS = 64

Reading = Callable[[], tuple[dict[str, Any], str]]  # figures, and the same in words


def run(folder: Path, progress: Progress) -> list[Step]:
    """Every step in order, in a `folder` that is new or empty. A failed fetch or adapt ends the chain; a failed accept
    does not keep the model from being served, and is still a failure."""
    shell = Shell.at(folder)
    workspace = Path(shell.env["DZ_WORKSPACE"])

    def command(*args: str, read: Reading, name: str = "") -> Callable[[], Iterator[Step]]:
        return lambda: _command(shell, name or args[0], list(args), progress, read)

    chain: list[tuple[str, Callable[[], Iterator[Step]]]] = [
        ("build", lambda: _build(folder)),
        ("fetch", command("fetch", MODEL, read=lambda: figures.fetched(workspace))),
        # what can be known before any of the repository's code may run, and then what is new in it
        ("fit", command("adapt", MODEL, "--dry-run", "--device", DEVICE, "--json", name="fit",
                        read=lambda: figures.fitted(shell.answer("fit")))),
        ("diff", command("adapt", MODEL, TRUST, "--diff", "--json", name="diff",
                         read=lambda: figures.differing(shell.answer("diff")))),
        ("adapt", command("adapt", MODEL, TRUST, read=lambda: figures.adapted(workspace))),
        ("accept", command("accept", MODEL, TRUST, read=lambda: figures.accepted(workspace, CHECKLIST))),
        ("serve", lambda: _serve(shell, workspace, progress)),
    ]  # fmt: skip
    steps: list[Step] = []
    for name, part in chain:
        broken = next((s.name for s in steps if s.status == "fail" and s.name != "accept"), None)
        if broken:
            steps.append(Step(name=name, status="not run", reason=f"{broken} failed"))
            continue
        progress.start(name)
        for step in part():
            steps.append(step)
            progress.note(f"{step.name}: {step.status}, {first_line(step)}")
        progress.finish()
    return steps


def first_line(step: Step) -> str:
    """What a step did in one line; of a failed one the error."""
    lines = step.reason.splitlines()
    return next((line for line in lines if line.startswith("error:")), lines[-1]) if lines else step.text


def exit_code(steps: list[Step]) -> int:
    """0 when every step is ok, else that of the first failed step (at least 1)."""
    return next((s.exit_code or 1 for s in steps if s.status != "ok"), 0)


def _build(folder: Path) -> Iterator[Step]:
    begun = time.monotonic()
    made = build.build(folder / build.NAME)
    size = sum(p.stat().st_size for p in made.iterdir())
    count = sum(1 for _ in made.iterdir())
    yield Step(
        name="build",
        status="ok",
        seconds=time.monotonic() - begun,
        text=f"{count} files, {size / 1e6:.1f} MB, random weights",
        figures={"files": count, "bytes": size},
    )


def _command(shell: Shell, name: str, args: list[str], progress: Progress, read: Reading) -> Iterator[Step]:
    progress.note(f"$ {typed(args)}")
    code, seconds, reason = shell.run(name, args, COMMAND_LIMIT)
    step = Step(name=name, status="fail" if code else "ok", command=typed(args), seconds=seconds, exit_code=code)
    yield _with_figures(replace(step, reason=reason), read)


def _with_figures(step: Step, read: Reading) -> Step:
    """The step with the figures its documents hold. A command that ended well without them has failed all the same."""
    try:
        found, text = read()
    except DzError as e:
        return step if step.status == "fail" else replace(step, status="fail", exit_code=1, reason=f"{e.what}: {e.why}")
    return replace(step, figures=found, text=text)


def _serve(shell: Shell, workspace: Path, progress: Progress) -> Iterator[Step]:
    port = talk.free_port()
    args = ["serve", MODEL, TRUST, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    progress.note(f"$ {typed(args)}")
    process = shell.start("serve", args)
    try:
        ready = _ready(shell, process, url, typed(args))
        yield ready
        if ready.status == "ok":
            for name, ask in (("chat", _chat), ("image", _image), ("kernels", _kernels)):
                yield _asked(name, lambda ask=ask: ask(url, workspace))
    finally:
        end(process)


def _ready(shell: Shell, process: subprocess.Popen[bytes], url: str, command: str) -> Step:
    begun = time.monotonic()
    step = Step(name="serve", status="ok", command=command)
    try:
        seconds = talk.wait_ready(url, process, READY_LIMIT)
    except DzError as e:
        reason = f"{e.why}\n{shell.tail('serve')}"
        code = process.returncode or 1
        return replace(step, status="fail", exit_code=code, seconds=time.monotonic() - begun, reason=reason)
    return replace(step, seconds=seconds, text=f"ready at {url}", figures={"ready_seconds": round(seconds, 2)})


def _asked(name: str, ask: Callable[[], tuple[dict[str, Any], str, str]]) -> Step:
    """A step of questions to the server; `ask` gives figures, words, and why it failed or ""."""
    begun = time.monotonic()
    try:
        found, text, reason = ask()
    except Exception as e:  # noqa: BLE001  whatever a server does to its client is this step's failure, not a defect here
        known = explain(e)
        found, text, reason = {}, "", f"{known.what}: {known.why}" if known else f"{type(e).__name__}: {e}"
    return Step(
        name=name,
        status="fail" if reason else "ok",
        seconds=time.monotonic() - begun,
        exit_code=1 if reason else 0,
        text=text,
        reason=reason,
        figures=found,
    )


def _chat(url: str, workspace: Path) -> tuple[dict[str, Any], str, str]:
    answer = talk.chat(url, talk.model_name(url), "Write a line of Python.", max_tokens=CHAT_TOKENS)
    rate = answer.tokens / answer.seconds
    found = {
        "prompt_tokens": answer.prompt_tokens,
        "tokens": answer.tokens,
        "tokens_per_second": round(rate, 1),
        "finish": answer.finish,
        "text": answer.text,
    }
    text = f"{answer.prompt_tokens} prompt tokens, {answer.tokens} generated, {rate:.0f} tokens/s: {answer.text[:32]!r}"
    complete = answer.finish == "stop" or (answer.finish == "length" and answer.tokens == CHAT_TOKENS)
    if not (answer.text and answer.tokens and complete):
        return found, text, f"the answer is not whole: {answer.tokens} tokens, finish reason {answer.finish!r}"
    return found, text, ""


def _image(url: str, workspace: Path) -> tuple[dict[str, Any], str, str]:
    model = talk.model_name(url)
    question = {"type": "text", "text": "What is this?"}
    red, green = (talk.chat(url, model, [question, talk.picture(*c)], max_tokens=24) for c in ((230, 20), (20, 230)))
    bare = talk.chat(url, model, [question], max_tokens=1)
    found = {
        "image_tokens": red.prompt_tokens - bare.prompt_tokens,
        "tokens": red.tokens + green.tokens,
        "depends_on_image": red.text != green.text,
        "texts": [red.text, green.text],
    }
    text = f"{found['image_tokens']} prompt tokens for a picture; another picture, another answer"
    if red.text == green.text:
        return found, text, f"two different pictures brought the same answer: {red.text[:64]!r}"
    if found["image_tokens"] <= 0:
        return found, text, "the picture added no tokens to the prompt"
    return found, text, ""


def _kernels(url: str, workspace: Path) -> tuple[dict[str, Any], str, str]:
    """What the server counted: the plan's kernels must have run, and more than one kind of step."""
    calls: Counter[str] = Counter()
    work: Counter[str] = Counter()
    for name, labels, value in talk.metrics(url):
        if name == "dz:kernel_calls_total" and labels["kernel"] != "upstream":
            calls[labels["kernel"]] += int(value)
        elif name == "dz:steps_total":
            work[labels["kind"]] += int(value)
    planned = figures.adapted(workspace)[0]["kernels"]
    idle = [k for k in planned if not calls[k]]
    found = {"calls": dict(calls), "steps": dict(work), "never_called": idle}
    said = ", ".join(f"{k} {n:,} calls" for k, n in sorted(calls.items())) or "no kernel swapped in"
    text = f"{said}; steps: " + ", ".join(f"{n} {k}" for k, n in sorted(work.items()))
    return found, text, f"chosen by the plan but never called: {', '.join(idle)}" if idle else ""
