"""A stand-in for Hugging Face's hub on this machine: the few addresses that downloads use."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A server of repositories.

    files: (kind, id) -> path in the repository -> file. sent: (id, path) of every file that was asked for.
    token: needed for uploads, if not empty. created: id -> what was asked for. uploaded: (id, revision) -> path ->
    content. messages: of the uploads.
    """

    files: dict[tuple[str, str], dict[str, Path]] = field(default_factory=dict)
    sent: list[tuple[str, str]] = field(default_factory=list)
    address: str = ""
    token: str = ""
    created: dict[str, dict] = field(default_factory=dict)
    uploaded: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def add(self, kind: str, name: str, files: Mapping[str, Path]) -> None:
        """Add a repository; kind: `models` or `datasets`."""
        self.files[kind, name] = dict(files)

    def environment(self, home: Path) -> dict[str, str]:
        """Variables of a process that takes this server for the hub, with its cache in `home`."""
        return {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._reply(body=False)

        def do_GET(self) -> None:
            self._reply(body=True)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"] or 0))
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._send(401, b'{"error": "Invalid credentials"}', {}, True)
            elif parts == ["api", "repos", "create"]:
                given = json.loads(content)
                name = "/".join((given.get("organization") or "me", given["name"]))
                hub.files.setdefault(("models", name), {})
                hub.created[name] = given
                self._answer({"url": f"{hub.address}/{name}"})
            elif parts == ["api", "validate-yaml"]:  # of the card
                self._answer({"errors": [], "warnings": []})
            elif parts[4] == "preupload":
                paths = [file["path"] for file in json.loads(content)["files"]]
                kind = {"uploadMode": "regular", "shouldIgnore": False}
                self._answer({"files": [{"path": path, **kind} for path in paths]})
            elif parts[4] == "commit":
                name, lines = "/".join(parts[2:4]), [json.loads(line) for line in content.splitlines()]
                files = [one["value"] for one in lines if one["key"] == "file"]
                sent = {file["path"]: base64.b64decode(file["content"]) for file in files}
                hub.uploaded[name, parts[5]] = sent
                hub.messages.append(lines[0]["value"]["summary"])
                self._answer({"commitOid": COMMIT, "commitUrl": f"{hub.address}/{name}/commit/{COMMIT}"})
            else:  # a branch
                self._answer({})

        def _answer(self, content: Mapping[str, object]) -> None:
            self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"}, True)

        def log_message(self, *_) -> None:
            pass

        def _reply(self, body: bool) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[0] == "api":
                self._api(parts[1], "/".join(parts[2:4]), parts[4:], body)
            else:
                kind = "datasets" if parts[0] == "datasets" else "models"
                parts = parts[kind == "datasets" :]
                self._file(kind, "/".join(parts[:2]), "/".join(parts[4:]), body)

        def _api(self, kind: str, name: str, rest: list[str], body: bool) -> None:
            files = hub.files.get((kind, name))
            if files is None:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
            elif unquote("/".join(rest[1:])) not in ("", "main", COMMIT):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            else:
                siblings = [{"rfilename": path} for path in files]
                info = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
                self._send(200, json.dumps(info).encode(), {}, body)

        def _file(self, kind: str, name: str, path: str, body: bool) -> None:
            file = hub.files.get((kind, name), {}).get(path)
            if file is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body)
                return
            content = file.read_bytes()
            if body:
                hub.sent.append((name, path))
            digest = hashlib.sha256(content).hexdigest()
            self._send(200, content, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}, body)

        def _send(self, status: int, content: bytes, headers: Mapping[str, str], body: bool) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
