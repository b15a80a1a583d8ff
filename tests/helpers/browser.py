"""Headless Chromium over its debugging pipe: open a page, run scripts in it, see its errors, take pictures.

No driver package is needed; a test that asks for the browser is skipped where no Chromium is installed.
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TO_BROWSER, FROM_BROWSER = 3, 4  # file descriptors, fixed by --remote-debugging-pipe


def find_browser() -> str | None:
    """The path of an installed Chromium."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page. errors: messages of the console and uncaught exceptions since the page was opened. loads: how often
    a page has been loaded. Nothing here has a deadline: a slow machine takes longer, and fails no test."""

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
        self.loads, self.downloaded, self._downloads = 0, [], {}
        self.errors: list[str] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A method of the DevTools protocol and its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        """The browser's next message."""
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            if not part:
                raise ConnectionError("the browser is gone")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(line)
        kind, about = event.get("method"), event.get("params", {})
        if kind == "Page.loadEventFired":
            self.loads += 1
        if kind == "Browser.downloadWillBegin":
            self._downloads[about["guid"]] = about["suggestedFilename"]
        if kind == "Browser.downloadProgress" and about["state"] != "inProgress":
            self.downloaded.append(self._downloads[about["guid"]])
        if kind == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        if kind == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        if kind == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.errors.append(str(about["args"]))
        return event

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False, mobile: bool = False) -> None:
        """Load a page of so many CSS pixels and wait until it has been drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if mobile else 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        for place in ("about:blank", url):  # from another address of the same page the browser would load nothing
            before = self.loads
            self.errors.clear()
            self.call("Page.navigate", url=place)
            self.wait_for_load(before)

    def wait_for_load(self, before: int) -> None:
        """Wait until more pages than `before` have been loaded, and for the last one's `settle`."""
        while self.loads <= before:
            self._next()
        self.settle()

    def settle(self) -> None:
        """Wait until the page is drawn and does nothing more, of which `data-busy` would tell."""
        look = "document.body.dataset.busy === undefined ? done() : requestAnimationFrame(look)"
        self.run(f"new Promise((done) => {{ const look = () => {look}; requestAnimationFrame(look); }})")

    def download(self, folder: Path, script: str) -> Path:
        """The file that a script makes the page save."""
        allowed = {"behavior": "allow", "downloadPath": str(folder), "eventsEnabled": True}
        self.call("Browser.setDownloadBehavior", **allowed)
        before = len(self.downloaded)
        self.run(script)
        while len(self.downloaded) == before:
            self._next()
        return folder / self.downloaded[-1]

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path, whole: bool = True) -> Path:
        """A PNG of the page, or of what its window shows."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait()


def _pipe() -> tuple[int, int]:
    """Both ends of a pipe, with numbers of 20 or more."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends)
    for end in ends:
        os.close(end)
    return moved
