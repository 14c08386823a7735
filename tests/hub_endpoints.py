"""What the Hub on loopback stores, and its answer to each request. `hub_server.py` starts it."""

import base64
import hashlib
import json
import re
import socket
import struct
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

USER = "tester"
LFS_SUFFIXES = (".safetensors", ".parquet", ".bin", ".png")
LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "cc-by-nc-4.0", "other", "unknown"}


@dataclass(frozen=True)
class Blob:
    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_oid(self) -> str:
        """The id git gives the stored object: the pointer file's for LFS, the content's otherwise."""
        content = self.content
        if self.lfs:
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(content)}\n"
            content = pointer.encode()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_oid


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    files: dict[str, Blob]


@dataclass
class Repo:
    kind: str  # "models", "datasets" or "spaces"
    id: str
    private: bool
    commits: list[Commit] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    def add_commit(self, title: str, files: dict[str, Blob]) -> Commit:
        seed = f"{self.kind}/{self.id}/{len(self.commits)}/{title}" + "".join(f"{p}{b.etag}" for p, b in files.items())
        self.commits.append(Commit(hashlib.sha1(seed.encode()).hexdigest(), title, dict(sorted(files.items()))))
        return self.commits[-1]

    def at(self, revision: str) -> Commit | None:
        if revision in ("main", "HEAD", "refs/heads/main"):
            return self.commits[-1]
        oid = self.tags.get(revision.removeprefix("refs/tags/"), revision)
        return next((commit for commit in self.commits if commit.oid == oid), None)


class HubError(Exception):
    def __init__(self, status: int, code: str | None = None, message: str = "", body: dict | None = None):
        super().__init__(message)
        self.status, self.code, self.message, self.body = status, code, message, body or {"error": message}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args) -> None:
        pass

    def handle_any(self) -> None:
        self.url = urlsplit(self.path)
        self.query = parse_qs(self.url.query)
        self.server.requests.append((self.command, self.path))
        body = self.read_body()
        if body is None:
            return
        how = self.server.failure(self.path, "lost", "silent", "page", int)
        if how == "silent":
            time.sleep(1)
        try:
            if isinstance(how, int):
                raise HubError(how, None, "the Hub has a bad day")
            page = 200, {"Content-Type": "text/html"}, b"<html>Please log in</html>"
            status, headers, content = page if how in ("page", "silent") else self.answer(body)
        except HubError as error:
            status, headers, content = error.status, {}, json.dumps(error.body).encode()
            headers |= {"X-Error-Code": error.code} if error.code else {}
            headers |= {"X-Error-Message": error.message} if error.message else {}
        if how in ("lost", "silent"):
            self.reset()
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def read_body(self) -> bytes | None:
        """The request's body, or None after cutting the connection in its middle."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            cut, chunks = self.server.failure(self.path, "cut"), []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
                if cut:
                    return self.reset()
            self.rfile.readline()
            return b"".join(chunks)
        length = int(self.headers.get("Content-Length") or 0)
        if length and self.server.failure(self.path, "cut"):
            self.rfile.read(length // 2)
            return self.reset()
        return self.rfile.read(length)

    def reset(self) -> None:
        """Drop the connection the hard way (RST), as a broken line does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    # Who asks, and for what

    def user(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.server.tokens:
            raise HubError(401, None, "Invalid credentials in Authorization header")
        return self.server.tokens.get(token)

    def find_repo(self, kind: str, repo_id: str, write: bool = False) -> Repo:
        user, repo = self.user(), self.server.repos.get((kind, repo_id))
        if repo is None or (repo.private and user is None):
            raise HubError(404 if user else 401, "RepoNotFound", "Repository not found")
        if write and user is None:
            raise HubError(401, None, "Invalid username or password.")
        return repo

    def find_commit(self, repo: Repo, revision: str) -> Commit:
        commit = repo.at(revision)
        if commit is None:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def answer(self, body: bytes) -> tuple[int, dict, bytes]:
        method, path = self.command, self.url.path
        if path == "/api/whoami-v2":
            if (user := self.user()) is None:
                raise HubError(401, None, "Invalid username or password.")
            return reply({"type": "user", "name": user, "orgs": [], "auth": {"type": "access_token"}})
        if path == "/api/validate-yaml":
            return self.validate_yaml(**json.loads(body))
        if path == "/api/repos/create":
            return self.create_repo(json.loads(body))
        if match := re.fullmatch(r"/_lfs/(\w+)", path):
            return self.lfs_object(match[1], body)
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self.find_repo("datasets" if match[1] else "models", match[2], write=True)
            return self.lfs_batch(json.loads(body))
        if match := re.fullmatch(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)/(?:resolve|raw)/([^/]+)/(.+)", path):
            repo = self.find_repo(match[1] or "models", match[2])
            return self.resolve(repo, unquote(match[3]), unquote(match[4]))
        if match := re.fullmatch(
            r"/api/(models|datasets|spaces)/([^/]+/[^/]+)(?:/([\w-]+)(?:/([^/]+)(?:/(.*))?)?)?", path
        ):
            kind, repo_id, action, revision, rest = (unquote(part or "") for part in match.groups())
            write = method != "GET" and action != "paths-info"
            repo = self.find_repo(kind, repo_id, write=write)
            handler = {
                ("GET", ""): self.info,
                ("GET", "revision"): self.info,
                ("GET", "tree"): self.tree,
                ("GET", "refs"): self.refs,
                ("GET", "commits"): self.commits,
                ("POST", "paths-info"): self.paths_info,
                ("POST", "preupload"): self.preupload,
                ("POST", "commit"): self.commit,
                ("POST", "tag"): self.tag,
            }.get((method, action))
            if handler:
                return handler(repo, revision or "main", rest, body)
        raise HubError(404, None, f"no such endpoint: {method} {path}")

    # Endpoints

    def create_repo(self, wanted: dict) -> tuple:
        if (user := self.user()) is None:
            raise HubError(401, None, "Invalid username or password.")
        kind = wanted.get("type", "model") + "s"
        repo_id = f"{wanted.get('organization') or user}/{wanted['name']}"
        if kind == "spaces" and "sdk" not in wanted:
            raise HubError(400, None, "a Space needs an sdk")
        url = f"{self.server.endpoint}/{'' if kind == 'models' else f'{kind}/'}{repo_id}"
        with self.server.lock:
            if (kind, repo_id) in self.server.repos:
                raise HubError(409, None, "You already created this repo", {"url": url, "error": "exists"})
            private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
            repo = self.server.repos[kind, repo_id] = Repo(kind, repo_id, private)
            attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
            repo.add_commit("initial commit", {".gitattributes": Blob(attributes.encode(), lfs=False)})
        return reply({"url": url, "name": repo_id, "id": repo_id})

    def validate_yaml(self, content: str, repoType: str = "model", **_) -> tuple:
        match = re.match(r"\s*---\r?\n(.*?)\n---", content, flags=re.DOTALL)
        metadata = yaml.safe_load(match[1]) if match else {}
        errors = []
        if metadata.get("license") not in LICENSES | {None}:
            errors.append(f'"license" must be one of {sorted(LICENSES)}')
        if metadata.get("license") == "other" and not {"license_name", "license_link"} <= set(metadata):
            errors.append('"license" other needs "license_name" and "license_link"')
        for name in ("tags", "datasets", "metrics"):
            if not all(isinstance(value, str) and value for value in metadata.get(name, [])):
                errors.append(f'"{name}" must be an array of strings')
        for result in (r for model in metadata.get("model-index", []) for r in model["results"]):
            if not {"task", "dataset", "metrics"} <= set(result) or not {"type", "name"} <= set(result["dataset"]):
                errors.append('"model-index" needs task, dataset with type and name, and metrics')
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        answer = {"errors": [{"message": error} for error in errors], "warnings": warnings}
        if errors:
            raise HubError(400, None, "Invalid metadata", answer)
        return reply(answer)

    def info(self, repo: Repo, revision: str, rest: str, body: bytes) -> tuple:
        commit = self.find_commit(repo, revision)
        readme = commit.files["README.md"].content.decode() if "README.md" in commit.files else ""
        match = re.match(r"---\n(.*?)\n---", readme, flags=re.DOTALL)
        card = yaml.safe_load(match[1]) if match else {}
        results = [
            {"filename": path, "data": entry}
            for path, blob in commit.files.items()
            if re.fullmatch(r"\.eval_results/[^/]+\.yaml", path)
            for entry in yaml.safe_load(blob.content)
        ]
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        answer = {"id": repo.id, "modelId": repo.id, "sha": commit.oid, "private": repo.private, "lastModified": now}
        answer |= {"author": repo.id.split("/")[0], "tags": card.get("tags", []), "cardData": card}
        answer |= {name: card[name] for name in ("pipeline_tag", "library_name", "model-index") if name in card}
        answer |= {"siblings": [{"rfilename": path} for path in commit.files], "evalResults": results}
        return reply(answer)

    def entry(self, path: str, blob: Blob) -> dict:
        entry = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.git_oid}
        if blob.lfs:
            entry["lfs"] = {"oid": blob.sha256, "sha256": blob.sha256, "size": len(blob.content), "pointerSize": 134}
        return entry

    def folder(self, path: str) -> dict:
        return {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}

    def tree(self, repo: Repo, revision: str, rest: str, body: bytes) -> tuple:
        files = self.find_commit(repo, revision).files
        inside = f"{rest.rstrip('/')}/" if rest else ""
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = {}
        for path, blob in files.items():
            if path.startswith(inside):
                parts = path.removeprefix(inside).split("/")
                for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                    folder = inside + "/".join(parts[:depth])
                    entries[folder] = self.folder(folder)
                if recursive or len(parts) == 1:
                    entries[path] = self.entry(path, blob)
        if rest and not entries:
            raise HubError(404, "EntryNotFound", f"{rest} does not exist")
        return reply(list(entries.values()))

    def paths_info(self, repo: Repo, revision: str, rest: str, body: bytes) -> tuple:
        files = self.find_commit(repo, revision).files
        is_json = "json" in (self.headers.get("Content-Type") or "")
        paths = json.loads(body)["paths"] if is_json else parse_qs(body.decode()).get("paths", [])
        found = []
        for path in paths:
            if path in files:
                found.append(self.entry(path, files[path]))
            elif any(name.startswith(f"{path.rstrip('/')}/") for name in files):
                found.append(self.folder(path))
        return reply(found)

    def refs(self, repo: Repo, *_) -> tuple:
        head = {"name": "main", "ref": "refs/heads/main", "targetCommit": repo.commits[-1].oid}
        tags = [{"name": name, "ref": f"refs/tags/{name}", "targetCommit": oid} for name, oid in repo.tags.items()]
        return reply({"branches": [head], "converts": [], "tags": tags, "pullRequests": []})

    def commits(self, repo: Repo, revision: str, *_) -> tuple:
        last = repo.commits.index(self.find_commit(repo, revision))
        date = "2026-01-01T00:00:00.000Z"
        return reply(
            [
                {"id": commit.oid, "title": commit.title, "message": "", "authors": [{"user": USER}], "date": date}
                for commit in repo.commits[last::-1]
            ]
        )

    def tag(self, repo: Repo, revision: str, rest: str, body: bytes) -> tuple:
        name = json.loads(body)["tag"]
        if name in repo.tags:
            raise HubError(409, None, f"Tag {name} already exists")
        repo.tags[name] = self.find_commit(repo, revision).oid
        return reply({})

    def preupload(self, repo: Repo, revision: str, rest: str, body: bytes) -> tuple:
        files = self.find_commit(repo, revision).files
        answers = []
        for wanted in json.loads(body)["files"]:
            mode = "lfs" if wanted["path"].endswith(LFS_SUFFIXES) else "regular"
            answer = {"path": wanted["path"], "uploadMode": mode, "shouldIgnore": False}
            answers.append(answer | ({"oid": files[wanted["path"]].etag} if wanted["path"] in files else {}))
        return reply({"files": answers})

    def lfs_batch(self, wanted: dict) -> tuple:
        objects = []
        for item in wanted["objects"]:
            href = f"{self.server.endpoint}/_lfs/{item['oid']}"
            actions = {"upload": {"href": href}, "verify": {"href": href}}
            objects.append({**item, **({} if item["oid"] in self.server.lfs else {"actions": actions})})
        return reply({"transfer": "basic", "objects": objects})

    def lfs_object(self, oid: str, body: bytes) -> tuple:
        if self.command == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                raise HubError(400, None, "the content is not what its name says")
            self.server.lfs[oid] = body
        elif oid not in self.server.lfs or json.loads(body)["size"] != len(self.server.lfs[oid]):
            raise HubError(400, None, "the object is missing or of another size")
        return reply({})

    def commit(self, repo: Repo, revision: str, rest: str, body: bytes) -> tuple:
        with self.server.lock:
            lines = [json.loads(line) for line in body.splitlines()]
            header = next(line["value"] for line in lines if line["key"] == "header")
            head = self.find_commit(repo, revision)
            if header.get("parentCommit", head.oid) != head.oid:
                raise HubError(412, None, "A commit has happened since. Please refresh and try again.")
            files = dict(head.files)
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
                elif line["key"] == "lfsFile":
                    if value["oid"] not in self.server.lfs:
                        raise HubError(400, None, f"{value['path']} was never uploaded")
                    files[value["path"]] = Blob(self.server.lfs[value["oid"]], lfs=True)
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
                elif line["key"] == "deletedFolder":
                    files = {path: blob for path, blob in files.items() if not path.startswith(value["path"])}
            commit = repo.add_commit(header["summary"], files)
        place = repo.id if repo.kind == "models" else f"{repo.kind}/{repo.id}"
        url = f"{self.server.endpoint}/{place}/commit/{commit.oid}"
        return reply({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})

    def resolve(self, repo: Repo, revision: str, path: str) -> tuple:
        commit = self.find_commit(repo, revision)
        if path not in commit.files:
            error = HubError(404, "EntryNotFound", "Entry not found")
            return error.status, {"X-Error-Code": error.code, "X-Repo-Commit": commit.oid}, b"Entry not found"
        blob = commit.files[path]
        headers = {"ETag": f'"{blob.etag}"', "X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        if blob.lfs:
            headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
        content, status = blob.content, 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(match[1]), min(int(match[2] or len(content) - 1), len(content) - 1)
            if first > last:
                return 416, {"Content-Range": f"bytes */{len(content)}"}, b""
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        return status, headers, content


def reply(value: dict | list) -> tuple[int, dict, bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
