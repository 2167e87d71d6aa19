"""A headless Chromium, controlled by its DevTools protocol over pipes. No package is needed for it."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowDown": 40}


class Tab:
    """A page in a browser of its own. `faults` holds the errors and warnings of its console."""

    def __init__(self, commands_fd: int, replies_fd: int) -> None:
        self._commands_fd, self._replies_fd = commands_fd, replies_fd
        self._numbers, self._unread = itertools.count(1), b""
        self._session = ""
        self.faults: list[str] = []
        target = self._request("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._request("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._request(f"{domain}.enable")

    def _request(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        request = {"id": number, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._commands_fd, json.dumps(request).encode() + b"\0")
        while (reply := self._next()).get("id") != number:
            self._note(reply)
        assert "error" not in reply, reply["error"]
        return reply["result"]

    def _next(self) -> Any:
        while b"\0" not in self._unread:
            read = os.read(self._replies_fd, 1 << 16)
            assert read, "the browser has gone"
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Mapping[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.faults.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.faults.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.faults.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def shape(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the page in CSS pixels, and its colour scheme."""
        self._request(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._request("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to an address and wait until the page is loaded."""
        self._request("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        reply = self._request("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return reply["result"].get("value")

    def until(self, script: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true in the page. Fail after `seconds`."""
        end = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < end, f"{script} is not so; {self.value('document.body.innerText')!r:.500}"
            time.sleep(0.05)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key of `_KEYS`."""
        event = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self._request("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self._request("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        self._request("Input.insertText", text=text)

    def save_screenshot(self, target: Path) -> None:
        """Save a screenshot of the page as a PNG file."""
        target.write_bytes(base64.b64decode(self._request("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start a browser with an empty profile in `folder`. Yield its page."""
    to_it, from_it = os.pipe(), os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (to_it[0], from_it[1])]

    def as_it_expects() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    command = [str(CHROMIUM), *options, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        command,
        preexec_fn=as_it_expects,
        pass_fds=(3, 4),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for fd in (to_it[0], from_it[1], *high):
        os.close(fd)
    try:
        yield Tab(to_it[1], from_it[0])
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        for fd in (to_it[1], from_it[0]):
            os.close(fd)
