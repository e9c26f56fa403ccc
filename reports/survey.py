"""Every causal and image-text type of the installed transformers, at its default sizes, on the meta device.

usage: python reports/survey.py [TYPE ...] [--out reports/survey.json] [--limit 40] [--fingerprints] [--keep]

One process surveys type after type and prints a line of JSON for each; one that works for more than --limit seconds is
ended, recorded, and the rest goes on in a fresh process. --fingerprints also writes the structures of all known sites
to dz/inspect/fingerprints.json, which `dz adapt --diff` compares variants with. --keep replaces the rows of the named
types in the report that is there and adds to its fingerprints."""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
START = 30.0  # seconds more for the first type of a process: its imports


def survey_type(kind: str, registry: Any) -> dict[str, Any]:
    """What dz finds in one type: sites by status, the share of parameters in known sites, or why it was not built."""
    from dz.core.source import FileEntry, Source
    from dz.inspect import naming
    from dz.inspect.survey import survey
    from dz.inspect.syntax import live
    from dz.upstream.build import build_meta
    from dz.upstream.kinds import write_default

    with tempfile.TemporaryDirectory() as folder:
        write_default(kind, Path(folder))
        file = FileEntry(path="config.json", size=(Path(folder) / "config.json").stat().st_size)
        source = Source(name=folder, folder=folder, commit="", rev8="00000000", code_hash="", files=(file,))
        built = build_meta(source, trust=False)
        found = survey(built, source, {}, registry=registry)
    known = sum(s.parameters for s in found.sites if s.status == "known")
    digests: dict[str, set[int]] = {}
    for s in found.sites:
        piece = live(naming.target(built, s)) if s.status == "known" else None
        if piece is not None:
            digests.setdefault(str(s.op), set()).add(piece.form(texts=False).digest)
    return {
        "cls": found.cls,
        "parameters": found.parameters,
        "known_share": round(known / found.parameters, 6) if found.parameters else 1.0,
        "sites": {w: found.count(w) for w in ("known", "variant", "unknown")},
        "variants": sorted({f"{s.op}: {s.cls}: {'; '.join(s.differs)}" for s in found.sites if s.status == "variant"}),
        "unknown": sorted({f"{s.cls}: {s.reason}" for s in found.sites if s.status == "unknown"}),
        "mixers": sorted({f"{s.mixer.kind} ({', '.join(s.mixer.tiers)})" for s in found.sites if s.mixer is not None}),
        "digests": {op: sorted(d) for op, d in digests.items()},
    }


def work(kinds: list[str]) -> None:
    """Survey types in this process, a line of JSON each."""
    from dz.core.registry import Registry
    from dz.errors import DzError

    registry = Registry.discover()
    for kind in kinds:
        started = time.process_time()
        row: dict[str, Any] = {"type": kind, "built": True, "why": ""}
        try:
            row |= survey_type(kind, registry)
        except DzError as e:
            row |= {"built": False, "why": f"{e.what}: {e.why}"}
        except Exception as e:  # noqa: BLE001  a type's default configuration may fail in any way; it is recorded
            row |= {"built": False, "why": f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"}
        row["seconds"] = round(time.process_time() - started, 2)
        print(json.dumps(row), flush=True)


def collect(kinds: list[str], limit: float) -> list[dict[str, Any]]:
    """The rows of all types, in order; types that take too long or end their process are rows too."""
    rows: list[dict[str, Any]] = []
    left = list(kinds)
    while left:
        argv = [sys.executable, "-W", "ignore", __file__, "--work", *left]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
            lines: queue.Queue[str] = queue.Queue()
            threading.Thread(target=_read, args=(process, lines), daemon=True).start()
            first = True
            while left:
                line = _next(lines, process, limit + START * first)
                first = False
                if not line:
                    why = f"longer than {limit:g} s"
                    if line is None:
                        process.kill()
                    else:  # its output has ended, so it ends
                        why = f"its process ended ({process.wait()})"
                    rows.append({"type": left.pop(0), "built": False, "why": why, "seconds": limit})
                    break
                rows.append(json.loads(line))
                left.pop(0)
                print(f"{len(rows)}/{len(kinds)} {rows[-1]['type']} {rows[-1]['seconds']} s", file=sys.stderr)
    return rows


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    for line in process.stdout or ():
        lines.put(line)
    lines.put("")


def _next(lines: queue.Queue[str], process: subprocess.Popen[str], limit: float) -> str | None:
    """The next line of a process, "" when its output ended, None when it worked for `limit` seconds without one.
    Processor time counts, not the clock: the machine may stop the process for a measurement."""
    started = _worked(process)
    while True:
        try:
            return lines.get(timeout=2.0)
        except queue.Empty:
            if _worked(process) - started > limit:
                return None


def _worked(process: subprocess.Popen[str]) -> float:
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return float("inf")
    return times.user + times.system


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures over all types."""
    built = [r for r in rows if r["built"]]
    total = sum(r["parameters"] for r in built)
    known = sum(r["parameters"] * r["known_share"] for r in built)
    shares = sorted(r["known_share"] for r in built)
    return {
        "types": len(rows),
        "built": len(built),
        "all_sites_known": sum(not r["sites"]["variant"] and not r["sites"]["unknown"] for r in built),
        "sites": {w: sum(r["sites"][w] for r in built) for w in ("known", "variant", "unknown")},
        "parameters_in_known_sites": round(known / total, 6) if total else 1.0,
        "median_known_share": shares[len(shares) // 2] if shares else 1.0,
        "seconds": round(sum(r["seconds"] for r in rows), 1),
        "slowest_seconds": max((r["seconds"] for r in rows), default=0.0),
    }


def table(document: dict[str, Any]) -> str:
    """The short table in Markdown."""
    rows, s = document["types"], document["summary"]
    out = [
        f"# Survey: {s['types']} causal and image-text types of transformers {document['transformers']}",
        "",
        "Made by `reports/survey.py`: default configurations, meta device, no weights. "
        f"{s['built']} of {s['types']} built; {s['all_sites_known']} have known sites only; "
        f"{100 * s['parameters_in_known_sites']:.2f} % of all parameters are in known sites "
        f"(median type {100 * s['median_known_share']:.2f} %); {s['seconds']:.0f} s in all on one core, "
        f"the slowest type {s['slowest_seconds']:.0f} s.",
        "",
        "| type | class | known | variant | unknown | parameters | in known sites | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if r["built"]:
            n = r["sites"]
            share = f"{100 * r['known_share']:.2f} %"
            cells = (r["type"], r["cls"], n["known"], n["variant"], n["unknown"], f"{r['parameters']:,}", share)
        else:
            cells = (r["type"], "not built", "", "", "", "", r["why"][:120].replace("|", "/"))
        out.append("| " + " | ".join(map(str, (*cells, r["seconds"]))) + " |")
    for title, key in (("Variants", "variants"), ("Unknown", "unknown")):
        counts = Counter(text.partition(": ")[2 if key == "unknown" else 0] for r in rows for text in r.get(key, ()))
        if key == "variants":
            counts = Counter(f"{t.split(': ')[0]}: {t.split(': ')[-1]}" for r in rows for t in r.get(key, ()))
        out += ["", f"## {title}, the most frequent", "", "| types | what |", "|---|---|"]
        out += [f"| {n} | {text[:160].replace('|', '/')} |" for text, n in counts.most_common(20)]
    return "\n".join(out) + "\n"


def main() -> None:
    """Run the survey and write the report, its table and, on demand, the fingerprints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", type=Path, default=ROOT / "reports/survey.json")
    parser.add_argument("--limit", type=float, default=40.0)
    parser.add_argument("--fingerprints", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if given.work:
        work(given.types)
        return
    from dz.upstream.kinds import language_types

    all_types = language_types()
    rows = collect(given.types or list(all_types), given.limit)
    digests: dict[str, set[int]] = {}
    for r in rows:
        r["kind"] = all_types.get(r["type"], "")
        for op, found in r.pop("digests", {}).items():
            digests.setdefault(op, set()).update(found)
    if given.keep:
        named = {r["type"] for r in rows}
        kept = json.loads(given.out.read_text("utf-8"))["types"]
        rows = sorted([*rows, *(r for r in kept if r["type"] not in named)], key=lambda r: r["type"])
    head = {"transformers": version("transformers"), "torch": version("torch"), "summary": summary(rows)}
    given.out.write_text(json.dumps({**head, "types": rows}, indent=1) + "\n", "utf-8")
    given.out.with_suffix(".md").write_text(table({**head, "types": rows}), "utf-8")
    if given.fingerprints:
        path = ROOT / "dz/inspect/fingerprints.json"
        for op, found in json.loads(path.read_text("utf-8")).items() if given.keep else ():
            digests.setdefault(op, set()).update(found)
        path.write_text(json.dumps({op: sorted(d) for op, d in sorted(digests.items())}, indent=0) + "\n", "utf-8")
    print(json.dumps(head["summary"], indent=1))


if __name__ == "__main__":
    main()
