"""A stand-in for Hugging Face's hub on this machine: the few addresses that downloads use."""

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
    """

    files: dict[tuple[str, str], dict[str, Path]] = field(default_factory=dict)
    sent: list[tuple[str, str]] = field(default_factory=list)
    address: str = ""

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
