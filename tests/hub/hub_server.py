"""A small hub on loopback: the API routes, resolve with ranges and redirects, and faults on demand.

It speaks what the real huggingface_hub client needs: repository info at a revision, a paginated tree, `resolve` with
ETag, X-Repo-Commit and, for large files, a redirect to another host name with X-Linked-Etag and X-Linked-Size."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LFS_ENDINGS = (".safetensors", ".bin", ".gguf", "tokenizer.json")
PAGE = 4  # entries of one page of a tree
SECRET = "signed-query-secret"


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Repo:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    token: str = ""  # set: private, and only this token may read
    renamed_to: str = ""
    moved_to: str = ""  # set: every route answers with a redirect to the repository of this name

    def commit_of(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Fault:
    """What happens to requests for one file: `status`, `cut` (the connection ends in the middle), `flip` (one bit),
    `short` (the body lacks its last byte and says so), `slow` (nothing comes for `seconds`), `whole` (a range is not
    heeded), `longer` (the file has one byte more than the hub lists), `away` (a redirect to a host where nobody is),
    `stall` (half of the body, then nothing for `seconds`). Applies `times` times."""

    path: str
    kind: str
    times: int = 1
    status: int = 500
    method: str = "GET"
    seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Request:
    method: str
    path: str
    range: str
    auth: str


class HubServer:
    """`with HubServer() as hub: hub.push("org/name", {...}); ... hub.url`."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lists_hashes = True
        self.xet = False  # set: large files are announced as deduplicated ones
        self.cdn_fails = False  # set: the other host refuses every signed address
        self.lock = threading.Lock()

    def __enter__(self) -> HubServer:
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def port(self) -> int:
        return self.server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def push(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Make a commit of exactly these files the head of a branch."""
        repo = self.repos.setdefault(name, Repo())
        text = json.dumps([[p, sha256(c)] for p, c in sorted(files.items())]) + str(len(repo.commits))
        commit = hashlib.sha1(text.encode()).hexdigest()
        repo.commits[commit] = dict(files)
        repo.refs[branch] = commit
        for content in files.values():
            self.blobs[sha256(content)] = content
        return commit

    def fault(self, path: str, kind: str, times: int = 1, **more) -> None:
        self.faults.append(Fault(path, kind, times, **more))

    def take_fault(self, path: str, method: str, kinds: tuple[str, ...] = ()) -> Fault | None:
        with self.lock:
            for f in self.faults:
                if f.path == path and f.times > 0 and f.method == method and (not kinds or f.kind in kinds):
                    f.times -= 1
                    return f
        return None

    def gets(self, path: str) -> list[Request]:
        """The requests for a file's content, in order (redirects to the other host not counted)."""
        return [r for r in self.requests if r.method == "GET" and r.path.endswith(f"/{path}") and "/cdn/" not in r.path]

    def content_gets(self) -> list[Request]:
        return [r for r in self.requests if r.method == "GET" and ("/cdn/" in r.path or "/resolve/" in r.path)]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each small answer waits 40 ms for the client's acknowledgement

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        parts = urlsplit(self.path)
        path, self.query = unquote(parts.path), parse_qs(parts.query)
        with self.hub.lock:
            auth = self.headers.get("Authorization", "")
            self.hub.requests.append(Request(self.command, path, self.headers.get("Range", ""), auth))
        if m := re.match(r"(?:/api/models)?/([^/]+/[^/]+)(/|$)", path):
            repo = self.hub.repos.get(m[1])
            if repo and repo.moved_to:
                return self.send(307, b"", {"Location": self.path.replace(m[1], repo.moved_to, 1)})
        if m := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.info(m[1], m[2] or "main")
        elif m := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path):
            self.tree(m[1], m[2])
        elif m := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.resolve(m[1], m[2], m[3])
        elif self.hub.cdn_fails and path.startswith("/cdn/"):
            self.refuse(403, "", "the signature does not fit")
        elif m := re.fullmatch(r"/cdn/([0-9a-f]{64})/(.+)", path):
            self.content(self.hub.blobs[m[1]], m[2], {"ETag": f'"{m[1]}"'})
        else:
            self.refuse(404, "", "no such route")
        return None

    def reach(self, name: str, revision: str) -> tuple[Repo, str] | None:
        """The repository and commit, or None after the refusal was sent."""
        repo = self.hub.repos.get(name)
        auth = self.headers.get("Authorization", "")
        if repo is None or (repo.token and auth != f"Bearer {repo.token}"):
            self.refuse(401 if repo is None or not auth else 404, "RepoNotFound", "Repository not found")
            return None
        commit = repo.commit_of(revision)
        if commit is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repo, commit

    def info(self, name: str, revision: str) -> None:
        if fault := self.hub.take_fault("info", self.command):
            return self.refuse(fault.status, "", "busy", fault.headers)
        if not (found := self.reach(name, revision)):
            return None
        repo, commit = found
        called = repo.renamed_to or name
        return self.json({"id": called, "modelId": called, "sha": commit, "private": bool(repo.token), "siblings": []})

    def tree(self, name: str, revision: str) -> None:
        if not (found := self.reach(name, revision)):
            return
        files = found[0].commits[found[1]]
        rows: list[dict] = [self.row(p, c) for p, c in sorted(files.items())]
        folders = sorted({p.rpartition("/")[0] for p in files if "/" in p})
        rows += [{"type": "directory", "path": f, "size": 0, "oid": git_blob(f.encode())} for f in folders]
        at = int(self.query.get("cursor", ["0"])[0])
        link = {}
        if at + PAGE < len(rows):
            more = f"{self.hub.url}/api/models/{name}/tree/{revision}?recursive=true&cursor={at + PAGE}"
            link = {"Link": f'<{more}>; rel="next"'}
        self.json(rows[at : at + PAGE], link)

    def row(self, path: str, content: bytes) -> dict:
        out = {"type": "file", "path": path, "size": len(content), "oid": git_blob(content)}
        if not self.hub.lists_hashes:
            return {**out, "oid": "unknown"}
        if path.endswith(LFS_ENDINGS):
            out["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
        return out

    def resolve(self, name: str, revision: str, path: str) -> None:
        kinds = ("status", "away") if path.endswith(LFS_ENDINGS) else ()  # the others happen where the bytes come from
        fault = self.hub.take_fault(path, self.command, kinds)
        if fault and fault.kind == "status":
            return self.refuse(fault.status, "EntryNotFound" if fault.status == 404 else "", "on demand", fault.headers)
        if fault and fault.kind == "away":
            return self.send(302, b"", {"Location": "http://127.0.0.1:9/nobody"})
        if not (found := self.reach(name, revision)):
            return None
        repo, commit = found
        if repo.gated:
            return self.refuse(403, "GatedRepo", "Access to this model is restricted")
        content = repo.commits[commit].get(path)
        if content is None:
            return self.refuse(404, "EntryNotFound", f"{path} does not exist")
        headers = {"X-Repo-Commit": commit}
        if path.endswith(LFS_ENDINGS):
            sha = sha256(content)
            if self.hub.xet:
                headers |= {"X-Xet-Hash": sha, "X-Xet-Refresh-Route": f"{self.hub.url}/api/xet-read-token"}
            headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(content))}
            # another host name, as a CDN has; the query is the credential of a signed address
            headers["Location"] = f"http://localhost:{self.hub.port}/cdn/{sha}/{path}?sig={SECRET}"
            return self.send(302, b"", headers)
        return self.content(content, path, {**headers, "ETag": f'"{git_blob(content)}"'}, fault)

    def content(self, content: bytes, path: str, headers: dict[str, str], fault: Fault | None = None) -> None:
        fault = fault or self.hub.take_fault(path, self.command)
        if fault and fault.kind == "status":
            return self.refuse(fault.status, "", "on demand", fault.headers)
        status = 200
        if fault and fault.kind == "slow":
            time.sleep(fault.seconds)
        if fault and fault.kind == "longer":
            content += b"x"
        whole = fault and fault.kind == "whole"
        if not whole and (m := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            begin, end = int(m[1]), min(int(m[2]) + 1, len(content)) if m[2] else len(content)
            if begin >= len(content):
                return self.refuse(416, "", "no such range")
            headers = {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}
            content, status = content[begin:end], 206
        if fault and fault.kind == "flip":
            at = len(content) // 2
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        if fault and fault.kind == "short":
            content = content[:-1]
        stall = fault.seconds if fault and fault.kind == "stall" else 0.0
        self.send(status, content, headers, cut=bool(fault) and fault.kind == "cut", stall=stall)
        return None

    def json(self, value: object, headers: dict[str, str] | None = None) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def refuse(self, status: int, code: str, text: str, more: dict[str, str] | None = None) -> None:
        headers = {"X-Error-Message": text, **(more or {})} | ({"X-Error-Code": code} if code else {})
        self.send(status, json.dumps({"error": text}).encode(), {"Content-Type": "application/json", **headers})

    def send(self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False, stall: float = 0.0) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(body) // 2 if cut or stall else len(body)
        self.wfile.write(body[:half])
        self.wfile.flush()
        if stall:
            time.sleep(stall)
            with suppress(OSError):  # whoever waited may be gone
                self.wfile.write(body[half:])
        if cut:
            self.close_connection = True
            self.connection.shutdown(2)
