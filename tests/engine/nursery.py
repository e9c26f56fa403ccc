"""A process that has imported everything and forks engine workers on demand: starting each anew would take seconds.

One JSON document a line on standard input: {"spec": the worker's document, "between": whether a process of its own
stands between, as the server does}. Answers, one a line: {"pid", "parent"} at once, {"pid", "code"} when it has ended
(only where nothing stands between)."""

import json
import os
import select
import signal
import sys


def worker(spec: str) -> None:
    """The rest of this process is an engine worker with `spec` on its standard input."""
    from dz.engine.worker import main

    out, into = os.pipe()
    os.write(into, spec.encode() + b"\n")
    os.close(into)
    os.dup2(out, 0)
    sys.stdin = os.fdopen(0)
    code = main()
    sys.stderr.flush()
    os._exit(code)


def fork(spec: str, between: bool) -> tuple[int, int]:
    """(the worker's pid, its parent's)."""
    if not between:
        pid = os.fork()
        if pid == 0:
            worker(spec)
        return pid, os.getpid()
    told, tell = os.pipe()
    parent = os.fork()
    if parent == 0:
        pid = os.fork()
        if pid == 0:
            worker(spec)
        os.write(tell, str(pid).encode())
        signal.pause()
    return int(os.read(told, 20)), parent


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    import torch
    import transformers.core_model_loading
    import transformers.models.llama.modeling_llama

    import dz.engine.engine
    import dz.engine.loader
    import dz.upstream.media
    import dz.upstream.vocabulary  # noqa: F401

    torch.set_num_threads(1)
    del transformers
    say(ready=True)
    buffer = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            buffer += data
            while b"\n" in buffer:
                line, buffer = buffer.split(b"\n", 1)
                pid, parent = fork(**json.loads(line))
                say(pid=pid, parent=parent)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            say(pid=pid, code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
