"""dz serve against `transformers serve --continuous-batching` and generate(), alternating, on one machine's CPU.

usage: python reports/bench/serve_cpu.py MODEL_FOLDER [--rounds 5] [--out reports/bench/serve_cpu.json]

Rates: the first 8 of 20 chat prompts, 12 greedy float32 tokens each, at concurrency 1 and 8, the same number of threads
for all. Tokens: all 20 prompts, 64 tokens each, dz at concurrency 8 against generate() one by one; differences at a
top-1 margin under 1e-3 are counted as ties."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import httpx

import dz

TOPICS = (
    "a dog", "a cat", "the moon", "a river", "a robot", "the sea", "winter", "a king", "a garden", "music",
    "time", "a train", "bread", "a letter", "the sun", "an island", "a bridge", "mathematics", "rain", "a teacher",
)  # fmt: skip
PROMPTS = [f"Write a short story about {t}." for t in TOPICS]
TOKENS, RATED, SHORT = 64, 8, 12
PEER = ["--continuous-batching", "--dtype", "float32", "--device", "cpu"]


def start(command: list[str], url: str, log: Path) -> subprocess.Popen:
    process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)
    for _ in range(600):
        try:
            if httpx.get(f"{url}/health", timeout=1).status_code == 200:
                return process
        except httpx.HTTPError:
            pass
        if process.poll() is not None:
            sys.exit(f"{command} ended with {process.returncode}: see {log}")
        time.sleep(0.5)
    sys.exit(f"{command} was not ready in 300 s: see {log}")


async def load(
    url: str, model: str, concurrency: int, n: int, most: int, *, ids: bool
) -> tuple[float, int, list[list[int]]]:
    """(seconds, tokens, token ids of each prompt) of all prompts."""
    gate = asyncio.Semaphore(concurrency)
    counted = [0] * n
    tokens: list[list[int]] = [[] for _ in range(n)]

    async def one(client: httpx.AsyncClient, i: int) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": PROMPTS[i]}],
            "temperature": 0.0,
            "max_tokens": most,
        }
        if ids:
            body |= {"ignore_eos": True, "return_token_ids": True}
        async with gate:
            answer = (await client.post(f"{url}/v1/chat/completions", json=body)).raise_for_status().json()
        counted[i] = answer["usage"]["completion_tokens"]
        tokens[i] = answer["choices"][0].get("token_ids") or []

    since = time.perf_counter()
    async with httpx.AsyncClient(timeout=600) as client:
        await asyncio.gather(*(one(client, i) for i in range(n)))
    return time.perf_counter() - since, sum(counted), tokens


class Upstream:
    """generate(), one prompt after the other, in this process."""

    def __init__(self, folder: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True)["input_ids"]
            for p in PROMPTS
        ]

    def run(self, n: int, most: int) -> tuple[float, list[list[int]], list[list[float]]]:
        out, margins = [], []
        since = time.perf_counter()
        for prompt in self.prompts[:n]:
            ids = self.torch.tensor([prompt])
            with self.torch.inference_mode():
                got = self.model.generate(
                    ids, attention_mask=self.torch.ones_like(ids), do_sample=False, max_new_tokens=most,
                    eos_token_id=-1, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
                )  # fmt: skip
            out.append(got.sequences[0, len(prompt) :].tolist())
            pairs = [row[0].topk(2).values for row in got.logits]
            margins.append([float(p[0] - p[1]) for p in pairs])
        return time.perf_counter() - since, out, margins


def compare(got: list[list[int]], want: list[list[int]], margins: list[list[float]]) -> dict[str, int]:
    found = {"exact": 0, "tie": 0, "differs": 0}
    for g, w, m in zip(got, want, margins, strict=True):
        at = next(
            (i for i, (a, b) in enumerate(zip(g, w, strict=False)) if a != b),
            None if len(g) == len(w) else min(len(g), len(w)),
        )
        found["exact" if at is None else ("tie" if at < len(m) and m[at] < 1e-3 else "differs")] += 1
    return found


def compared(upstream: Upstream, url: str, folder: str) -> dict[str, int]:
    _, want, margins = upstream.run(len(PROMPTS), TOKENS)
    _, _, got = asyncio.run(load(url, folder, 8, len(PROMPTS), TOKENS, ids=True))
    tokens = compare(got, want, margins)
    print("tokens", tokens, flush=True)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates-only", action="store_true", help="leave the comparison of tokens out")
    parser.add_argument("--out", type=Path, default=Path("reports/bench/serve_cpu.json"))
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    folder, logs = str(Path(args.folder).resolve()), args.out.parent
    dz_url, peer_url = "http://127.0.0.1:8741", "http://127.0.0.1:8742"
    dz_command = [sys.executable, "-m", "dz", "serve", folder, "--dtype", "float32", "--port", "8741"]
    peer_command = [str(Path(sys.executable).parent / "transformers"), "serve", folder, *PEER, "--port", "8742"]
    os.environ["HF_HUB_OFFLINE"] = "1"
    served = start(dz_command, dz_url, logs / "serve_cpu.dz.log")
    peer = start(peer_command, peer_url, logs / "serve_cpu.peer.log")
    upstream = Upstream(folder, threads)
    rates: dict[str, list[float]] = {}
    try:
        tokens = {} if args.rates_only else compared(upstream, dz_url, folder)
        asyncio.run(load(peer_url, folder, 8, 8, 4, ids=False))
        for _ in range(args.rounds):
            rates.setdefault("generate", []).append(RATED * SHORT / upstream.run(RATED, SHORT)[0])
            for concurrency in (1, 8):
                seconds, n, _ = asyncio.run(load(dz_url, folder, concurrency, RATED, SHORT, ids=True))
                rates.setdefault(f"dz c{concurrency}", []).append(n / seconds)
                seconds, n, _ = asyncio.run(load(peer_url, folder, concurrency, RATED, SHORT, ids=False))
                rates.setdefault(f"transformers serve c{concurrency}", []).append(n / seconds)
            print({k: round(v[-1], 1) for k, v in rates.items()}, flush=True)
    finally:
        served.terminate(), peer.terminate(), served.wait(), peer.wait()
    median = {k: statistics.median(v) for k, v in rates.items()}
    document = {
        "what": f"tokens per second, {RATED} chat prompts x {SHORT} greedy tokens, float32, CPU",
        "machine": {"processor": platform.processor() or platform.machine(), "threads": threads},
        "versions": {"dz": dz.__version__} | {p: version(p) for p in ("torch", "transformers")},
        "flags": {
            "dz": dz_command[3:],
            "transformers serve": peer_command[1:],
            "generate": "one by one, do_sample=False",
        },
        "rounds": rates,
        "median": median,
        "ratio": {
            "c1 over generate": median["dz c1"] / median["generate"],
            "c8 over generate": median["dz c8"] / median["generate"],
            "c1 over transformers serve": median["dz c1"] / median["transformers serve c1"],
            "c8 over transformers serve": median["dz c8"] / median["transformers serve c8"],
        },
        f"{len(PROMPTS)} prompts x {TOKENS} tokens at concurrency 8 against generate": tokens,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({"median": median, "ratio": document["ratio"]}, indent=1))


if __name__ == "__main__":
    main()
