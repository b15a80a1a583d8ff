"""The report while a run goes on: a small server that gives the page and, again and again, its data.

It answers two addresses and nothing else: no file of the disk can be named. A request that names another host in its
`Host` header is refused on a local address, so that no web page can reach the report through a name of its own.
"""

import ipaddress
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mindrlhf.errors import UserError
from mindrlhf.metrics.report.html import render, report_data, to_json
from mindrlhf.metrics.report.run import Run

MOST_AT_ONCE = 8  # requests; more are turned away
REQUEST_S = 10  # a client that sends nothing for so long is dropped
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


class ReportServer(ThreadingHTTPServer):
    """read: the runs as they are now. refresh_s: how often the page asks, and how old what it gets may be."""

    daemon_threads = True

    def __init__(self, host: str, port: int, read: Callable[[], Sequence[Run]], refresh_s: float):
        """Raises UserError where the address cannot be taken."""
        self._read, self._refresh_s = read, refresh_s
        self._lock, self._made = threading.Lock(), {}
        self._places = threading.BoundedSemaphore(MOST_AT_ONCE)
        self.local = host == "localhost" or ipaddress.ip_address(host).is_loopback
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UserError(
                f"--host {host} --port {port}: cannot be served on ({error.strerror}); give another port, 0 is any."
            ) from error

    @property
    def address(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_address[1]}/"

    def process_request(self, request, client_address) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request, client_address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def content(self, name: str) -> bytes:
        """The page or its data, made anew when it is older than half a refresh."""
        with self._lock:
            made, text = self._made.get(name, (float("-inf"), b""))
            if time.monotonic() - made > self._refresh_s / 2:
                runs = self._read()
                whole = render(runs, self._refresh_s) if name == "page" else to_json(report_data(runs))
                text = whole.encode()
                self._made[name] = (time.monotonic(), text)
            return text


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = REQUEST_S
    server_version, sys_version = "mindrlhf", ""
    addresses = {"/": ("page", "text/html"), "/data.json": ("data", "application/json")}

    def do_GET(self) -> None:
        found = self.addresses.get(self.path.partition("?")[0])
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if self.server.local and host not in LOCAL_NAMES:
            self._answer(HTTPStatus.FORBIDDEN, b"this report is served under its local address only\n")
        elif found is None:
            self._answer(HTTPStatus.NOT_FOUND, b"there is only the report at /\n")
        else:
            name, kind = found
            try:
                body = self.server.content(name)
            except UserError as error:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())
            else:
                self._answer(HTTPStatus.OK, body, kind)

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: a line every few seconds would hide what matters."""
