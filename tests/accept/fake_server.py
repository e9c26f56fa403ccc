"""A server of the toy model that speaks OpenAI's API, with faults on demand; also as a process with a killable engine.

Faults: wrong_token=K (the second best at step K), batched (the second best at step 3 when not alone), loop (one token
for ever after two), slow=S (before the first token), broken_from=N (500 for longer prompts), wild_from=N (logprobs of
longer prompts are not finite), shifted (texts lose their first token), cut_pictures, sorted_pictures (their order is
lost), sharper=F (distributions), wrong_finish, no_limit, vague_limit, leak (blocks), unshared (steps never hold two),
no_metrics, no_ids; of the process: deaf (open requests hang when the engine dies), well (/health stays 200), gone (no
restart), changed (other answers after the restart), no_start. No fault: shows_end (the stop token among the ids)."""

import argparse
import base64
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import toy_model as toy

LIMIT = 600  # tokens of context
STEP = 0.0008  # seconds


class Fake(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, faults=None, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.faults, self.lock = dict(faults or {}), threading.Lock()
        self.running, self.sizes, self.blocks, self.restarts = 0, {}, 0, 0
        self.engine_ok, self.requests = True, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def start(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def count_step(self):
        with self.lock:
            size = 1 if "unshared" in self.faults else self.running
            self.sizes[size] = self.sizes.get(size, 0) + 1


class Broken(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        fake = self.server
        if self.path == "/health":
            return self.reply(200 if fake.engine_ok or "well" in fake.faults else 503, b"")
        if self.path == "/metrics":
            return self.reply(200, self.metrics().encode(), "text/plain")
        if self.path == "/v1/models":
            return self.reply(200, {"data": [{"id": "toy", "max_model_len": LIMIT}]})
        return self.reply(404, {"error": {"message": "no such path"}})

    def metrics(self):
        fake, lines = self.server, ["# HELP x y"]
        if "no_metrics" in fake.faults:
            return ""
        lines += [f'dz:step_sequences_total{{model_name="t\\"y",size="{k}"}} {v}' for k, v in fake.sizes.items()]
        return "\n".join([*lines, f'dz:blocks_used{{engine="0"}} {fake.blocks}', "dz:slots_used 0.0", ""])

    def do_POST(self):
        fake = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        fake.requests.append((self.path, body))
        try:
            if not fake.engine_ok:
                raise Broken(503, "the engine is loading")
            prompt = self.prompt(body)
            with fake.lock:
                fake.running += 1
            try:
                self.answer(body, prompt)
            finally:
                with fake.lock:
                    fake.running -= 1
                    fake.blocks += "leak" in fake.faults
        except Broken as e:
            self.reply(e.status, {"error": {"message": str(e), "code": e.status}})

    def prompt(self, body):
        faults = self.server.faults
        if "messages" in body:
            parts = [p for m in body["messages"] if isinstance(m["content"], list) for p in m["content"]]
            pictures = [self.picture(p) for p in parts if p["type"] == "image_url"]
            pictures = iter(sorted(pictures) if "sorted_pictures" in faults else pictures)
            prompt = toy.encode_chat(body["messages"], lambda part: next(pictures))
        else:
            prompt = (
                toy.encode(body["prompt"])[1 if "shifted" in faults else 0 :]
                if isinstance(body["prompt"], str)
                else body["prompt"]
            )
        if len(prompt) + body["max_tokens"] > LIMIT and "no_limit" not in faults:
            limit = "" if "vague_limit" in faults else f" of {LIMIT}"
            raise Broken(400, f"{len(prompt)} tokens pass the maximum context length{limit}")
        if len(prompt) >= faults.get("broken_from", 1 << 30):
            raise Broken(500, "broke on a long prompt")
        return prompt

    def picture(self, part):
        data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
        return data[:-20] if "cut_pictures" in self.server.faults else data

    def step(self, prompt, tokens, start):
        """(row of logprobs, the next token)"""
        fake, n = self.server, len(tokens)
        time.sleep(STEP + (fake.faults.get("slow", 0) if n == 0 else 0))
        fake.count_step()
        row = toy.logprobs(prompt + tokens, fake.faults.get("sharper", 1.0))
        first, second = (t for t, _ in toy.best(row, 2))
        wrong = fake.faults.get("wrong_token") == n or ("batched" in fake.faults and n == 3 and fake.running > 1)
        if "changed" in fake.faults and fake.restarts and n == 1:
            wrong = True
        token = second if wrong else first
        return row, 7 if "loop" in fake.faults and n >= 2 else token

    def answer(self, body, prompt):
        fake, tokens, rows, finish = self.server, [], [], "length"
        stream = body.get("stream")
        if stream:
            self.begin_stream()
        while len(tokens) < body["max_tokens"]:
            row, token = self.step(prompt, tokens, len(prompt))
            if not fake.engine_ok:
                if "deaf" in fake.faults:
                    time.sleep(30)
                if stream:
                    self.event({"error": {"message": "the engine has ended", "code": 503}})
                    return self.end_stream()
                raise Broken(503, "the engine has ended")
            rows.append(row)
            if token == toy.EOS and not body.get("ignore_eos"):
                finish = "stop"
                if "shows_end" in fake.faults:
                    tokens.append(token)
                break
            tokens.append(token)
            if stream:
                self.event({"choices": [{"text": toy.decode([token]), "token_ids": [token]}]})
        if "wrong_finish" in fake.faults:
            finish = "length"
        if stream:
            self.event({"choices": [{"text": "", "finish_reason": finish}]})
            return self.end_stream()
        choice = {"finish_reason": finish, "token_ids": tokens, "prompt_token_ids": prompt}
        choice["logprobs"] = self.logprobs(body, prompt, tokens, rows)
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": toy.decode(tokens)}
        else:
            choice["text"] = toy.decode(tokens)
        if "no_ids" in fake.faults:
            choice["token_ids"] = choice["prompt_token_ids"] = None
        return self.reply(200, {"choices": [choice], "prompt_token_ids": choice["prompt_token_ids"]})

    def logprobs(self, body, prompt, tokens, rows):
        count = body.get("logprobs")
        if count is None or "messages" in body:
            return None
        shown = list(zip(tokens, rows, strict=False))
        head = []
        if body.get("echo"):
            sharper = self.server.faults.get("sharper", 1.0)
            head = [(t, toy.logprobs(prompt[:i], sharper) if i else None) for i, t in enumerate(prompt)]
        wild = len(prompt) >= self.server.faults.get("wild_from", 1 << 30)
        name = "token_id:{}".format if body.get("return_tokens_as_token_ids") else lambda t: toy.decode([t])
        own = [None if row is None else -9999.0 if wild else row[t] for t, row in head + shown]
        top = [
            None if row is None else {name(i): v for i, v in [*toy.best(row, count), (t, row[t])]}
            for t, row in head + shown
        ]
        return {"token_logprobs": own, "top_logprobs": top}

    def reply(self, status, data, kind="application/json"):
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def begin_stream(self):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True

    def event(self, data):
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def end_stream(self):
        self.wfile.write(b"data: [DONE]\n\n")


def engine():
    """A child whose command line looks like an engine's."""
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", "dz.engine.worker"])


def watch(fake):
    """Start the engine again when it has died, as a server does; once."""
    child = engine()
    try:
        while child.poll() is None:
            time.sleep(0.01)
        fake.engine_ok = False
        if "gone" in fake.faults:
            return
        time.sleep(0.4)
        child = engine()
        fake.restarts += 1
        fake.engine_ok = True
        child.wait()
    finally:
        child.kill()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", default="{}")
    faults = json.loads(parser.parse_known_args()[0].faults)
    if "no_start" in faults:
        sys.exit(
            "error: the weights are incomplete\n  why: 1 tensor is missing: a.weight\n  next: dz fetch toy --force"
        )
    fake = Fake(faults)
    print("memory: weights             0.6 MiB  as the model holds them", file=sys.stderr)
    print("memory: cache blocks       12.0 MiB  1024 blocks", file=sys.stderr)
    fake.start()
    print(f"ready: {fake.url}", file=sys.stderr, flush=True)
    watch(fake)
    threading.Event().wait()


if __name__ == "__main__":
    main()
