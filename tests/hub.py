"""A Hugging Face hub on the loopback: what huggingface_hub and datasets ask of HF_ENDPOINT, from folders in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LFS_SUFFIXES = (".safetensors", ".bin", ".onnx", ".gguf", ".pt", ".parquet")
RIGHT_TOKEN = "hf_right"
REFUSED_TOKEN = "hf_refused"
DATE = "2024-01-01T00:00:00.000Z"


@dataclass
class Repository:
    """The commits of one model or data set: files by path, branches and tags by name."""

    kind: str
    name: str
    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit, move `branch` to it and return its sha."""
        digest = hashlib.sha1(f"{self.kind}/{self.name}/{len(self.commits)}".encode())
        for path in sorted(files):
            digest.update(path.encode() + files[path])
        sha = digest.hexdigest()
        self.commits[sha] = dict(files)
        self.refs[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """The sha that a branch, tag or (short) sha stands for."""
        if revision in self.refs:
            return self.refs[revision]
        short = [sha for sha in self.commits if len(revision) >= 7 and sha.startswith(revision)]
        return short[0] if len(short) == 1 else None


class Hub:
    """The server and its repositories; a context manager."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.blobs: dict[str, bytes] = {}
        self.delay = 0.0
        self.broken = False
        self.unavailable: int | None = None
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.lock = threading.RLock()
        self.up()
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Answer (again), at the same address."""
        self.unavailable = None
        if self._server is None:
            handler = type("Handler", (_Handler,), {"hub": self})
            self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
            self._server.daemon_threads = True
            self._port = self._server.server_address[1]
            threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def down(self, status: int | None = None) -> None:
        """Refuse connections, or with `status=503` answer every request with it."""
        if status is not None:
            self.unavailable = status
        elif self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def slow(self, seconds: float) -> None:
        """Wait before each answer."""
        self.delay = seconds

    def break_downloads(self, broken: bool = True) -> None:
        """Close the connection after half of each file."""
        self.broken = broken

    def _add(self, kind: str, name: str, source: Any, branch: str, tag: str | None, **access: bool) -> str:
        if not isinstance(source, dict):
            root = Path(source)
            source = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        with self.lock:
            repository = self.repositories.setdefault((kind, name), Repository(kind, name))
            for key, value in access.items():
                setattr(repository, key, value)
            sha = repository.commit(source, branch)
            if tag is not None:
                repository.refs[tag] = sha
        return sha

    def add_model(
        self, name: str, source: Any, *, branch: str = "main", tag: str | None = None, **access: bool
    ) -> str:
        """Commit a folder (or a dict of bytes) as a model; `gated=True`, `private=True`. Returns the sha."""
        return self._add("models", name, source, branch, tag, **access)

    def add_dataset(
        self, name: str, source: Any, *, branch: str = "main", tag: str | None = None, **access: bool
    ) -> str:
        """Commit a folder (or a dict of bytes) as a data set. Returns the sha."""
        return self._add("datasets", name, source, branch, tag, **access)

    def files(self, name: str, revision: str = "main", kind: str = "models") -> dict[str, bytes]:
        """What a revision holds, to look at after a push."""
        repository = self.repositories[kind, name]
        return repository.commits[repository.resolve(revision) or revision]

    def environment(self, tmp_path: Path, token: str | None = None) -> dict[str, str]:
        """The environment of a subprocess that knows no hub but this one."""
        drop = ("HF_", "HUGGING", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_CACHE")
        names = [k for k in os.environ if not k.startswith(drop) and not k.lower().endswith("_proxy")]
        values = {name: os.environ[name] for name in names}
        values |= {"HF_ENDPOINT": self.url, "HF_HOME": str(tmp_path / "hf_home"), "NO_PROXY": "127.0.0.1"}
        values |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return values | ({"HF_TOKEN": token} if token else {})


class _Handler(BaseHTTPRequestHandler):
    """One request. A path is a repository, a verb and a revision; everything else is a 404."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Silence: `hub.requests` is the log."""

    def handle_one_request(self) -> None:
        """A client that leaves, or a server that has gone, is no error here."""
        try:
            super().handle_one_request()
        except (ConnectionError, ValueError):
            self.close_connection = True

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str = "") -> None:
        body = json.dumps({"error": message or code}).encode()
        headers = {"X-Error-Code": code, "X-Error-Message": message or code}
        self._send(status, body, headers | {"Content-Type": "application/json"})

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if (self.headers.get("Transfer-Encoding") or "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if self.hub._server is None:  # a kept-alive connection must not outlive `down`
            self.close_connection = True
            return
        self.hub.requests.append((self.command, self.path))
        time.sleep(self.hub.delay)
        if self.hub.unavailable:
            self._error(self.hub.unavailable, "Unavailable")
            return
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        with self.hub.lock:
            self._route(url.path, body)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _route(self, path: str, body: bytes) -> None:
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path == "/api/whoami-v2":
            known = self.token == RIGHT_TOKEN
            self._json({"name": "tester", "type": "user", "orgs": []} if known else {}, 200 if known else 401)
        elif path.startswith("/lfs/") and self.command == "PUT":
            self.hub.blobs[path.removeprefix("/lfs/")] = body
            self._send(200)
        elif m := re.fullmatch(r"/(?:(datasets)/)?(.+?)\.git/info/lfs/objects/batch", path):
            if self._repository(m[1] or "models", m[2]):
                self._batch(json.loads(body))
        elif m := re.fullmatch(r"/api/(models|datasets)/((?:[^/]+/)?[^/]+)", path):
            if repository := self._repository(m[1], m[2]):
                self._info(repository, "main")
        elif m := re.fullmatch(
            r"/api/(models|datasets)/(.+?)/(revision|tree|paths-info|preupload|commit|refs|branch|tag)(?:/([^/]+))?(?:/(.*))?",
            path,
        ):
            if repository := self._repository(m[1], m[2]):
                self._api(
                    repository, m[3], unquote(m[4] or "main"), unquote(m[5] or "").strip("/"), body
                )  # a branch may hold %2F
        elif m := re.fullmatch(r"/(?:(datasets)/)?(.+?)/resolve/([^/]+)/(.+)", path):
            if repository := self._repository(m[1] or "models", m[2]):
                self._file(repository, unquote(m[3]), unquote(m[4]))
        else:
            self._error(404, "NotFound")

    def _repository(self, kind: str, name: str) -> Repository | None:
        """The repository, or None after the error that the hub gives. Facts of a gated one are public."""
        repository = self.hub.repositories.get((kind, name))
        if repository is None or (repository.private and self.token != RIGHT_TOKEN):
            self._error(404 if self.token == RIGHT_TOKEN else 401, "RepoNotFound", "Repository not found")
        elif repository.gated and "/resolve/" in self.path and self.token != RIGHT_TOKEN:
            self._error(403 if self.token else 401, "GatedRepo", f"Access to {name} is restricted")
        elif (
            self.command in ("POST", "PUT") and "/paths-info/" not in self.path and self.token != RIGHT_TOKEN
        ):
            self._error(403 if self.token else 401, "Forbidden", "You cannot write here")
        else:
            return repository
        return None

    def _create(self, body: dict[str, Any]) -> None:
        kind = "datasets" if body.get("type") == "dataset" else "models"
        name = f"{body.get('organization') or 'tester'}/{body['name']}"
        if self.token != RIGHT_TOKEN:
            self._error(403 if self.token else 401, "Forbidden", "You cannot write here")
            return
        url = f"{self.hub.url}/{'datasets/' if kind == 'datasets' else ''}{name}"
        exists = (kind, name) in self.hub.repositories
        if not exists:
            private = bool(body.get("private")) or body.get("visibility") == "private"
            self.hub.repositories[kind, name] = Repository(kind, name, private=private)
            self.hub.repositories[kind, name].commit({})
        self._json({"url": url, "name": name, "id": name}, 409 if exists else 200)

    def _info(self, repository: Repository, revision: str) -> None:
        sha = repository.resolve(revision)
        if sha is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        siblings = [{"rfilename": path} for path in sorted(repository.commits[sha])]
        facts = {"id": repository.name, "sha": sha, "siblings": siblings, "tags": [], "lastModified": DATE}
        gated = "manual" if repository.gated else False
        self._json(facts | {"private": repository.private, "gated": gated, "disabled": False, "downloads": 0})

    def _api(self, repository: Repository, verb: str, revision: str, under: str, body: bytes) -> None:
        sha = repository.resolve(revision)
        if verb == "refs":
            self._json({"branches": [], "tags": [], "converts": []})
        elif verb in ("branch", "tag"):
            self._ref(repository, verb, revision, json.loads(body or b"{}"))
        elif sha is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif verb == "revision":
            self._info(repository, revision)
        elif verb == "preupload":
            asked = json.loads(body)["files"]
            modes = {f["path"]: "lfs" if f["path"].endswith(LFS_SUFFIXES) else "regular" for f in asked}
            self._json(
                {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
            )
        elif verb == "commit":
            self._commit(repository, revision, sha, body)
        else:
            entries = _entries(repository.commits[sha])
            if verb == "tree":
                inside = {p: e for p, e in entries.items() if not under or p.startswith(under + "/")}
                if under and not inside:
                    self._error(404, "EntryNotFound", f"{under} does not exist")
                    return
                deep = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
                depth = under.count("/") + 1 if under else 0
                self._json([e for p, e in inside.items() if deep or p.count("/") == depth])
            else:
                is_json = "json" in (self.headers.get("Content-Type") or "")
                paths = (json.loads(body) if is_json else parse_qs(body.decode())).get("paths", [])
                self._json([entries[p] for p in paths if p in entries])

    def _ref(self, repository: Repository, verb: str, name: str, body: dict[str, Any]) -> None:
        """A new branch, named in the path, or a tag of the revision there, named in the body."""
        start = repository.resolve(body.get("startingPoint", "main") if verb == "branch" else name)
        new = name if verb == "branch" else body["tag"]
        if start is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {name}")
        elif new in repository.refs:
            self._error(409, "Conflict", f"Reference {new} already exists")
        else:
            repository.refs[new] = start
            self._json({})

    def _file(self, repository: Repository, revision: str, path: str) -> None:
        sha = repository.resolve(revision)
        if sha is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        data = repository.commits[sha].get(path)
        if data is None:
            headers = {
                "X-Repo-Commit": sha,
                "X-Error-Code": "EntryNotFound",
                "X-Error-Message": "Entry not found",
            }
            self._send(404, b"", headers)
            return
        entry = _entry(path, data)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if "lfs" in entry:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        status = 200
        if m := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, stop = int(m[1]), min(int(m[2] or len(data)) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        if self.hub.broken and self.command == "GET":
            self._send(status, data[: len(data) // 2], headers | {"Content-Length": str(len(data))})
            self.close_connection = True
            return
        self._send(status, data, headers | {"Content-Length": str(len(data))})

    def _batch(self, body: dict[str, Any]) -> None:
        objects = []
        for item in body["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}", "header": {}}}
            known = item["oid"] in self.hub.blobs
            objects.append(
                {"oid": item["oid"], "size": item["size"]} | ({} if known else {"actions": upload})
            )
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repository: Repository, revision: str, sha: str, body: bytes) -> None:
        files = dict(repository.commits[sha])
        for line in body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif key == "deletedFile":
                files.pop(value["path"], None)
            elif key == "deletedFolder":
                files = {p: d for p, d in files.items() if not p.startswith(value["path"].rstrip("/") + "/")}
        new = repository.commit(files, revision)
        kind = "datasets/" if repository.kind == "datasets" else ""
        url = f"{self.hub.url}/{kind}{repository.name}/commit/{new}"
        self._json({"success": True, "commitOid": new, "commitUrl": url, "hookOutput": ""})


def _entry(path: str, data: bytes) -> dict[str, Any]:
    """A file as the tree listing shows it; git's own id for small files, the sha256 for LFS."""
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": oid}
    if path.endswith(LFS_SUFFIXES):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


def _entries(files: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    entries = {path: _entry(path, data) for path, data in files.items()}
    for path in files:
        for parent in list(Path(path).parents)[:-1]:
            name = parent.as_posix()
            oid = hashlib.sha1(name.encode()).hexdigest()
            entries.setdefault(name, {"type": "directory", "path": name, "oid": oid, "size": 0})
    return dict(sorted(entries.items()))


@pytest.fixture
def hub() -> Iterator[Hub]:
    """An empty hub."""
    with Hub() as server:
        yield server


@pytest.fixture
def online(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """This process knows no hub but the one on the loopback, and has an empty cache."""
    for name, value in {
        "ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_TOKEN_PATH": str(tmp_path / "token"), "HF_HUB_DISABLE_XET": True,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    }.items():  # fmt: skip
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return hub
