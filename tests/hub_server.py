"""A Hugging Face Hub on loopback, for the real clients: repositories, commits, LFS uploads, downloads, tokens.

Everything is held in memory. `cut_uploads` breaks the connection in the middle of a request body, which is what a
network failure looks like to a client, and `fail` has the Hub itself go wrong. Requests are recorded as (method, path)
in `requests`.
"""

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from unittest import mock

from hub_endpoints import USER, Handler, Repo
from huggingface_hub import constants

TOKEN = "hf_loopbackloopbackloopback"


class HubServer(ThreadingHTTPServer):
    """The state of the Hub; `endpoint` is what goes into HF_ENDPOINT."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.tokens = {TOKEN: USER}
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self._failing: dict[str, tuple[str | int, int]] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def repo(self, repo_id: str, kind: str = "models") -> Repo:
        return self.repos[kind, repo_id]

    def files(self, repo_id: str, kind: str = "models", revision: str = "main") -> dict[str, bytes]:
        return {path: blob.content for path, blob in self.repo(repo_id, kind).at(revision).files.items()}

    def cut_uploads(self, path: str, times: int = 1) -> None:
        """Break the connection half-way through the next `times` request bodies sent to a path containing `path`."""
        self.fail(path, "cut", times)

    def fail(self, path: str, how: str | int, times: int = 1000) -> None:
        """Have the next `times` requests to a path containing `path` go wrong.

        `how`: "cut" in the middle of the body, "lost" (it is carried out, but the answer does not arrive), "silent"
        (no answer at all), "page" (HTML where JSON should be, as a hotel's network has it), or a status such as 429.
        """
        self._failing[path] = how, times

    def recover(self) -> None:
        self._failing.clear()

    def failure(self, path: str, *kinds: str | type) -> str | int | None:
        """How a request goes wrong, if it does in one of these ways."""
        with self.lock:
            for part, (how, left) in self._failing.items():
                if part in path and left > 0 and (how in kinds or type(how) in kinds):
                    self._failing[part] = how, left - 1
                    return how
        return None

    def handle_error(self, request, client_address):
        """Clients that hang up are part of the tests; anything else should be seen."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """The environment of a client process that knows this Hub and nothing of the machine's caches."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        mine = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
        mine |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "no_proxy": "127.0.0.1"}
        return kept | mine | ({"HF_TOKEN": token} if token else {})

    def run(self, code: str, home: Path, *arguments: str, token: str | None = TOKEN, **environment: str) -> str:
        """Run Python source in a fresh process that talks to this Hub; returns what it printed."""
        command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
        env = self.environment(home, token) | environment
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=home, timeout=300)
        if done.returncode:
            raise AssertionError(f"client exited with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    """A Hub that this process reaches too, whatever its environment says: on line, and without xet."""
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
