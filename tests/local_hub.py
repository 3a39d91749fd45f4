"""A Hub on this machine: a server with the few routes that a download takes, and its faults.

`LocalHub.add` takes the files of a repository; each call is a new commit. Large files are said to
be in Git LFS, with their SHA-256, as on the Hub. `faults` spoils the answers.
"""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LFS_SUFFIXES = (".safetensors", ".gguf", ".parquet", ".bin")


NO_ENDPOINT = "http://127.0.0.1:1"


def set_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let huggingface_hub, which has read HF_ENDPOINT when it was imported, use another."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class LocalHub:
    """Repositories, and what is wrong with their answers.

    statuses: HTTP status, and the error code of the Hub, of requests whose path has this part.
    cuts: for a file, the number of bytes after which the connection breaks, once for each.
    spoiled: files that arrive with other bytes.
    """

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], dict[str, dict[str, bytes]]] = {}
        self.revisions: dict[tuple[str, str, str], str] = {}
        self.statuses: dict[str, tuple[int, str]] = {}
        self.cuts: dict[str, list[int]] = {}
        self.spoiled: set[str] = set()
        self.requests: list[str] = []  # "GET /path bytes=7-"
        self.tokens: set[str] = set()
        hub = self

        class Answer(_Answer):
            server_hub = hub

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.http.server_port}"
        self._thread = threading.Thread(target=self.http.serve_forever, args=[0.01], daemon=True)
        self._thread.start()

    def add(
        self, name: str, files: dict[str, bytes], kind: str = "model", revision: str = "main"
    ) -> str:
        """Add a commit to a repository; return its name."""
        commits = self.repositories.setdefault((kind, name), {})
        digest = hashlib.sha1(f"{name}{len(commits)}{sorted(files)}".encode())
        commit = digest.hexdigest()
        commits[commit] = files
        self.revisions[kind, name, revision] = commit
        self.revisions[kind, name, commit] = commit
        return commit

    def downloads(self, name: str) -> list[str]:
        """The requests for the content of a file."""
        return [line for line in self.requests if line.startswith("GET") and name in line]

    def close(self) -> None:
        self.http.shutdown()
        self._thread.join()
        self.http.server_close()


class _Answer(BaseHTTPRequestHandler):
    server_hub: LocalHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server_hub
        path = unquote(urlsplit(self.path).path)
        wanted = self.headers.get("Range", "")
        hub.requests.append(f"{self.command} {path} {wanted}".strip())
        hub.tokens.add(self.headers.get("Authorization", "none"))
        for part, (status, code) in hub.statuses.items():
            if part in path:
                self._send(status, b"", {"X-Error-Code": code} if code else {})
                return
        api = re.fullmatch(r"/api/(model|dataset)s/(.+)/(revision|tree)/(.+)", path)
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if api:
            self._answer_api(*api.groups())
        elif file:
            self._answer_file("dataset" if file[1] else "model", *file.groups()[1:])
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _answer_api(self, kind: str, name: str, route: str, revision: str) -> None:
        hub = self.server_hub
        if (kind, name) not in hub.repositories:
            # As the Hub does for somebody without a token: it may be a private one.
            headers = {"X-Error-Message": "Invalid username or password."}
            self._send(401, b'{"error":"Invalid username or password."}', headers)
            return
        commit = hub.revisions.get((kind, name, revision))
        if commit is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        answer: Any = {"id": name, "sha": commit, "siblings": [], "tags": [], "private": False}
        if route == "tree":
            files = hub.repositories[kind, name][commit]
            answer = [_describe(path, content) for path, content in files.items()]
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _answer_file(self, kind: str, name: str, revision: str, path: str) -> None:
        hub = self.server_hub
        commit = hub.revisions.get((kind, name, revision), "")
        content = hub.repositories.get((kind, name), {}).get(commit, {}).get(path)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        is_large = path.endswith(LFS_SUFFIXES)
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{git_id(content)}"',
            "Accept-Ranges": "bytes",
        }
        if is_large:
            headers["X-Linked-Etag"] = f'"{hashlib.sha256(content).hexdigest()}"'
            headers["X-Linked-Size"] = str(len(content))
        if path in hub.spoiled:
            content = content[::-1]
        status = 200
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start:
            status = 206
            headers["Content-Range"] = f"bytes {start[1]}-{len(content) - 1}/{len(content)}"
            content = content[int(start[1]) :]
        self._send(status, content, headers, path)

    def _send(self, status: int, content: bytes, headers: dict[str, str], path: str = "") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.server_hub.cuts.get(path)
        if cuts:
            self.wfile.write(content[: cuts.pop(0)])
            self.close_connection = True
        else:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def _describe(path: str, content: bytes) -> dict[str, Any]:
    if not path.endswith(LFS_SUFFIXES):
        return {"type": "file", "path": path, "size": len(content), "oid": git_id(content)}
    sha256 = hashlib.sha256(content).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\n"
    pointer += f"size {len(content)}\n"
    return {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": git_id(pointer.encode()),
        "lfs": {"oid": sha256, "size": len(content), "pointerSize": len(pointer)},
    }
