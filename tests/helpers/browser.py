"""Headless Chromium over its debugging pipe: open a page, run scripts in it, see its errors, take pictures.

No driver package is needed; a test that asks for the browser is skipped where no Chromium is installed.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TO_BROWSER, FROM_BROWSER = 3, 4  # file descriptors, fixed by --remote-debugging-pipe


def find_browser() -> str | None:
    """The path of an installed Chromium."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page. errors: messages of the console and uncaught exceptions since the page was opened."""

    def __init__(self, program: str, profile: Path):
        # Away from 3 and 4, which they become in the child.
        (read_end, self._write), (self._read, write_end) = _pipe(), _pipe()

        def connect() -> None:
            os.dup2(read_end, TO_BROWSER)
            os.dup2(write_end, FROM_BROWSER)

        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        self._process = subprocess.Popen(
            [program, *options, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=connect,
            pass_fds=(TO_BROWSER, FROM_BROWSER),
        )
        os.close(read_end)
        os.close(write_end)
        self._count, self._buffer, self._session = 0, b"", None
        self.errors: list[str] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, timeout: float = 60, **params: Any) -> dict[str, Any]:
        """A method of the DevTools protocol and its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while True:
            answer = self._next(end)
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise ConnectionError("the browser is gone")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(line)
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
            self.errors.append(event["params"]["entry"]["text"])
        if event.get("method") == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning"):
            self.errors.append(str(event["params"]["args"]))
        return event

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False, mobile: bool = False) -> None:
        """Load a page of so many CSS pixels and wait until it has been drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if mobile else 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.errors.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, timeout: float = 30) -> None:
        """Until an expression is true."""
        end = time.monotonic() + timeout
        while not self.run(condition):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.05)

    def picture(self, path: Path, whole: bool = True) -> Path:
        """A PNG of the page, or of what its window shows."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(20)


def _pipe() -> tuple[int, int]:
    """Both ends of a pipe, with numbers of 20 or more."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends)
    for end in ends:
        os.close(end)
    return moved
