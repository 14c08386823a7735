"""A Hugging Face Hub on loopback, held in memory: the endpoints that the real clients call, and how they can fail."""

import base64
import contextlib
import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub import constants

TOKEN, USER = "hf_loopbackloopbackloopback", "tester"
LFS_SUFFIXES = (".safetensors", ".parquet", ".bin", ".png")
LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "cc-by-nc-4.0", "other", "unknown"}


@dataclass(frozen=True)
class Commit:
    oid: str
    files: dict[str, bytes]


@dataclass
class Repo:
    kind: str  # "models", "datasets" or "spaces"
    id: str
    private: bool
    commits: list[Commit] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    def add_commit(self, files: dict[str, bytes]) -> Commit:
        oid = hashlib.sha1(f"{self.id}/{len(self.commits)}".encode()).hexdigest()
        self.commits.append(Commit(oid, dict(sorted(files.items()))))
        return self.commits[-1]

    def at(self, revision: str) -> Commit:
        oid = self.tags.get(revision, revision)
        found = [commit for commit in self.commits if commit.oid == oid or revision == "main"]
        if not found:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[-1]


class HubError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, body: dict | None = None):
        super().__init__(message)
        self.status, self.body = status, json.dumps(body or {"error": message}).encode()
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args) -> None:
        pass

    def handle_any(self) -> None:
        failure = self.server.next_failure(self.path)
        body = self.read_body()
        if failure == "silent":
            time.sleep(1)
        try:
            if isinstance(failure, int):
                raise HubError(failure, "the Hub has a bad day")
            if failure in ("cut", "silent"):
                return self.reset()
            status, headers, content = self.answer(unquote(urlsplit(self.path).path), body)
        except HubError as error:
            status, headers, content = error.status, error.headers, error.body
        if failure == "lost":
            return self.reset()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        return self.wfile.write(content) if self.command != "HEAD" else None

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def reset(self) -> None:
        """Drop the connection the hard way (RST), as a broken line does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def user(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            raise HubError(401, "Invalid credentials in Authorization header")
        return USER if token else None

    def find_repo(self, kind: str, repo_id: str, write: bool = False) -> Repo:
        user, repo = self.user(), self.server.repos.get((kind, repo_id))
        if repo is None or (repo.private and user is None):
            raise HubError(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and user is None:
            raise HubError(401, "Invalid username or password.")
        return repo

    def answer(self, path: str, body: bytes) -> tuple[int, dict, bytes]:
        if path == "/api/whoami-v2":
            return reply({"type": "user", "name": self.user(), "orgs": [], "auth": {"type": "access_token"}})
        if path == "/api/validate-yaml":
            return check_metadata(json.loads(body)["content"])
        if path == "/api/repos/create":
            return self.create_repo(json.loads(body))
        if match := re.fullmatch(r"/_lfs/(\w+)", path):
            return self.lfs_object(match[1], body)
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self.find_repo("datasets" if match[1] else "models", match[2], write=True)
            return self.lfs_batch(json.loads(body))
        if match := re.fullmatch(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)/(?:resolve|raw)/([^/]+)/(.+)", path):
            return self.resolve(self.find_repo(match[1] or "models", match[2]).at(match[3]), match[4])
        if match := re.fullmatch(r"/api/(models|datasets|spaces)/([^/]+/[^/]+)(?:/([\w-]+)(?:/([^/]+)(.*))?)?", path):
            kind, repo_id, action, revision, _ = (part or "" for part in match.groups())
            write = self.command != "GET" and action != "paths-info"
            handler = getattr(self, f"{self.command}_{action or 'revision'}".replace("-", "_"), None)
            if handler is not None:
                return handler(self.find_repo(kind, repo_id, write), revision or "main", body)
        raise HubError(404, f"no such endpoint: {self.command} {path}")

    def create_repo(self, wanted: dict) -> tuple:
        if (user := self.user()) is None:
            raise HubError(401, "Invalid username or password.")
        kind, repo_id = wanted.get("type", "model") + "s", f"{wanted.get('organization') or user}/{wanted['name']}"
        url = f"{self.server.endpoint}/{'' if kind == 'models' else f'{kind}/'}{repo_id}"
        if (kind, repo_id) in self.server.repos:
            raise HubError(409, "You already created this repo", body={"url": url, "error": "exists"})
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.server.repos[kind, repo_id] = Repo(kind, repo_id, private)
        self.server.repos[kind, repo_id].add_commit({".gitattributes": b""})
        return reply({"url": url, "name": repo_id, "id": repo_id})

    def GET_revision(self, repo: Repo, revision: str, _body: bytes) -> tuple:
        commit = repo.at(revision)
        card = read_metadata(commit.files.get("README.md", b"").decode())
        entries = {path: yaml.safe_load(text) for path, text in commit.files.items() if ".eval_results/" in path}
        results = [{"filename": path, "data": entry} for path, listed in entries.items() for entry in listed]
        answer = {"id": repo.id, "sha": commit.oid, "private": repo.private, "tags": card.get("tags", [])}
        answer |= {"cardData": card, "lastModified": "2026-01-01T00:00:00.000Z", "evalResults": results}
        answer |= {name: card[name] for name in ("pipeline_tag", "library_name", "model-index") if name in card}
        return reply(answer | {"siblings": [{"rfilename": path} for path in commit.files]})

    def GET_tree(self, repo: Repo, revision: str, _body: bytes) -> tuple:
        folder = urlsplit(self.path).path.partition(f"/tree/{revision}")[2].strip("/")
        files = {path: content for path, content in repo.at(revision).files.items() if path.startswith(folder)}
        if folder and not files:
            raise HubError(404, f"{folder} does not exist", "EntryNotFound")
        folders = {str(parent) for path in files for parent in Path(path).parents} - {".", folder}
        entries = [file_entry(path, content) for path, content in files.items()]
        return reply([*map(folder_entry, sorted(folders)), *entries])

    def POST_paths_info(self, repo: Repo, revision: str, body: bytes) -> tuple:
        is_json = "json" in (self.headers.get("Content-Type") or "")
        paths = json.loads(body)["paths"] if is_json else parse_qs(body.decode()).get("paths", [])
        files = repo.at(revision).files
        folders = [folder_entry(path) for path in paths if any(name.startswith(f"{path}/") for name in files)]
        return reply([file_entry(path, files[path]) for path in paths if path in files] + folders)

    def GET_refs(self, repo: Repo, *_) -> tuple:
        head = {"name": "main", "ref": "refs/heads/main", "targetCommit": repo.commits[-1].oid}
        return reply({"branches": [head], "converts": [], "tags": [], "pullRequests": []})

    def POST_tag(self, repo: Repo, revision: str, body: bytes) -> tuple:
        name = json.loads(body)["tag"]
        if name in repo.tags:
            raise HubError(409, f"Tag {name} already exists")
        repo.tags[name] = repo.at(revision).oid
        return reply({})

    def POST_preupload(self, repo: Repo, revision: str, body: bytes) -> tuple:
        modes = {True: "lfs", False: "regular"}
        paths = [wanted["path"] for wanted in json.loads(body)["files"]]
        answers = [{"path": p, "uploadMode": modes[p.endswith(LFS_SUFFIXES)], "shouldIgnore": False} for p in paths]
        return reply({"files": answers})

    def lfs_batch(self, wanted: dict) -> tuple:
        urls = {item["oid"]: {"href": f"{self.server.endpoint}/_lfs/{item['oid']}"} for item in wanted["objects"]}
        objects = [
            item | {"actions": dict.fromkeys(("upload", "verify"), urls[item["oid"]])} for item in wanted["objects"]
        ]
        return reply({"transfer": "basic", "objects": objects})

    def lfs_object(self, oid: str, body: bytes) -> tuple:
        if self.command == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                raise HubError(400, "the content is not what its name says")
            self.server.lfs[oid] = body
        elif json.loads(body)["size"] != len(self.server.lfs.get(oid, b"")):
            raise HubError(400, "the object is missing or of another size")
        return reply({})

    def POST_commit(self, repo: Repo, revision: str, body: bytes) -> tuple:
        files = dict(repo.at(revision).files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.lfs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = repo.add_commit(files)
        path = repo.id if repo.kind == "models" else f"{repo.kind}/{repo.id}"
        url = f"{self.server.endpoint}/{path}/commit/{commit.oid}"
        return reply({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})

    def resolve(self, commit: Commit, path: str) -> tuple:
        headers = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        if path not in commit.files:
            return 404, headers | {"X-Error-Code": "EntryNotFound"}, b"Entry not found"
        content, status, etag = commit.files[path], 200, file_etag(path, commit.files[path])
        headers["ETag"] = f'"{etag}"'
        if path.endswith(LFS_SUFFIXES):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(match[1]), min(int(match[2] or len(content) - 1), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        return status, headers, content


def reply(value: dict | list) -> tuple[int, dict, bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def file_etag(path: str, content: bytes) -> str:
    if path.endswith(LFS_SUFFIXES):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def file_entry(path: str, content: bytes) -> dict:
    entry = {"type": "file", "path": path, "size": len(content), "oid": file_etag(path, content)}
    lfs = {"oid": entry["oid"], "sha256": entry["oid"], "size": len(content), "pointerSize": 134}
    return entry | ({"lfs": lfs} if path.endswith(LFS_SUFFIXES) else {})


def folder_entry(path: str) -> dict:
    return {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}


def read_metadata(card: str) -> dict:
    match = re.match(r"\s*---\r?\n(.*?)\n---", card, flags=re.DOTALL)
    return yaml.safe_load(match[1]) if match else {}


def check_metadata(card: str) -> tuple:
    metadata, errors = read_metadata(card), []
    if metadata.get("license") not in LICENSES | {None}:
        errors.append(f'"license" must be one of {sorted(LICENSES)}')
    if metadata.get("license") == "other" and not {"license_name", "license_link"} <= set(metadata):
        errors.append('"license" other needs "license_name" and "license_link"')
    for result in (r for model in metadata.get("model-index", []) for r in model["results"]):
        if not {"task", "dataset", "metrics"} <= set(result) or not {"type", "name"} <= set(result["dataset"]):
            errors.append('"model-index" needs task, dataset with type and name, and metrics')
    answer = {"errors": [{"message": error} for error in errors], "warnings": []}
    if errors:
        raise HubError(400, "Invalid metadata", body=answer)
    return reply(answer)


class HubServer(ThreadingHTTPServer):
    """The state of the Hub; `endpoint` is what goes into HF_ENDPOINT."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self._failing: dict[str, tuple[str | int, int]] = {}
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def repo(self, repo_id: str, kind: str = "models") -> Repo:
        return self.repos[kind, repo_id]

    def files(self, repo_id: str, kind: str = "models") -> dict[str, bytes]:
        return self.repo(repo_id, kind).commits[-1].files

    def fail(self, path: str, how: str | int, times: int = 1000) -> None:
        """Let the next `times` requests to a path containing `path` fail.

        `how`: "cut" the connection, "lost" (carried out, but the response does not arrive), "silent", or a status.
        """
        self._failing[path] = how, times

    def recover(self) -> None:
        self._failing.clear()

    def next_failure(self, path: str) -> str | int | None:
        for part, (how, left) in self._failing.items():
            if part in path and left > 0:
                self._failing[part] = how, left - 1
                return how
        return None

    def handle_error(self, request, client_address):
        """Show errors, except of clients that hang up, which are part of the tests."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment of a client process that knows this Hub and none of the machine's caches."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        mine = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
        mine |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "no_proxy": "127.0.0.1"}
        return kept | mine | {"HF_TOKEN": TOKEN}

    def run(self, code: str, home: Path, *arguments: str, **environment: str) -> str:
        """Run Python source in a new process that talks to this Hub, and return what it printed."""
        command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
        env = self.environment(home) | environment
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=home, timeout=300)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout


@contextlib.contextmanager
def hub_server():
    """Start a Hub that this process can reach too, whatever its environment says: on line, and without xet."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        with mock.patch.multiple(constants, HF_HUB_OFFLINE=False, HF_HUB_DISABLE_XET=True):
            yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
