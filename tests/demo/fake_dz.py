"""Stands for `python -m dz` in tests of the chain: does what FAKE says, in the shapes of the real documents."""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

FAKE = json.loads(os.environ.get("FAKE", "{}"))
HERE = Path(os.environ["DZ_WORKSPACE"]) / "acorn-2m@00000000"


def write(name, data):
    path = HERE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"data": data}))


def fetch():
    source = {"files": [1, 2, 3], "rev8": "00000000"}
    write("fetch.json", {"source": source, "weights": {"tensors": 167, "shards": ["a", "b"], "bytes": 9}})


def fit():
    split = {"longest": 2048, "fits": True, "verdict": "fits"}
    data = {
        "splits": [{**split, "longest": 64}, split], "formats": [{"name": "F32"}, {"name": "mxfp4"}],
        "bytes": 4_000_000, "unaccounted": 0, "device": {"name": "H200"},
    }  # fmt: skip
    print(json.dumps({"data": data, "audit": {"files": ["a.py", "b.py"], "findings": []}}))


def diff():
    near = [{"name": "package.module:Far", "likeness": 0.1}, {"name": "package.module:Near", "likeness": 0.5}]
    sites = [
        {"site": "a.known", "status": "known", "neighbours": [{"name": "x:Y", "likeness": 0.9}]},
        {"site": "a.mixer", "status": "unknown", "neighbours": near},
    ]
    counts = {"known": 1, "variant": 0, "unknown": 1}
    print(json.dumps({"data": {"sites": sites, "counts": counts, "index": "5: 9 places"}}))


def adapt():
    site = {"id": "s", "kind": "module", "cls": "C", "where": "", "members": [], "status": "known"}
    inventory = {
        "model": "m", "rev8": "0", "cls": "C", "runs": "repository", "code_hash": "", "model_type": "acorn",
        "dtype": "float32", "config": {}, "layers": 6, "modalities": [], "max_positions": 1, "files": [],
        "parameters": 1, "bytes": 1, "sites": [site, {**site, "status": "unknown"}],
        "coverage": {"matched": 167, "missing": ["x"]},
    }  # fmt: skip
    write("inventory.json", inventory)
    proof = {"level": "op", "max_err": 0.0, "tol": "exact", "cases": 3}
    phases = {
        "prefill": {"impl": "op/fast", "reason": "", "verified": proof},
        "decode": {"impl": "op/fast", "reason": "", "verified": None},
    }
    sites = [{"site": "s", "op": "op", "status": "known", "count": 1, "phases": phases}]
    write("plan.json", {"model": "m", "rev8": "0", "device": "cpu", "dtype": "float32", "sites": sites})


def accept():
    results = [{"id": "load", "status": "pass", "reason": ""}, {"id": "image", "status": "fail", "reason": "no"}]
    write("default/report.json", {"results": results[: 1 if FAKE.get("accept", 0) == 0 else 2]})


class Handler(BaseHTTPRequestHandler):
    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        calls = FAKE.get("calls", 7)
        self.answer({
            "/health": "{}",
            "/v1/models": json.dumps({"data": [{"id": "acorn"}]}),
            "/metrics": f'# HELP x y\ndz:kernel_calls_total{{site="s",kernel="op/fast",phase="decode"}} {calls}\n'
            'dz:kernel_calls_total{site="t",kernel="upstream",phase="decode"} 99\ndz:steps_total{kind="mixed"} 4.0\n',
        }[self.path])  # fmt: skip

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = body["messages"][0]["content"]
        images = [p["image_url"]["url"] for p in content if isinstance(p, dict) and p["type"] == "image_url"]
        text = str(hash(images[0])) if images and not FAKE.get("blind") else "hello"
        usage = {"prompt_tokens": 9 + 8 * len(images), "completion_tokens": FAKE.get("tokens", body["max_tokens"])}
        choice = {"message": {"content": text}, "finish_reason": "length"}
        self.answer(json.dumps({"choices": [choice], "usage": usage}))

    def log_message(self, format, *args):
        pass


def serve():
    Path("server.pid").write_text(str(os.getpid()))
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()


command = "fit" if "--dry-run" in sys.argv else "diff" if "--diff" in sys.argv else sys.argv[1]
print(f"this is {command}", file=sys.stderr, flush=True)
if FAKE.get("sleep") == command:
    time.sleep(60)
if not FAKE.get(f"no_{command}") and not (command == "serve" and FAKE.get("serve")):
    globals()[command]()
if FAKE.get(command):
    print(f"error: {command} said no\n  why: the test\n  next: nothing", file=sys.stderr)
sys.exit(FAKE.get(command, 0))
