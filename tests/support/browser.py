"""A page in a headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 60.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


class Page:
    """The only tab. asked: the addresses that it has asked for, and `errors`: what its scripts have thrown."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.asked, self.errors = list[str](), list[str]()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (message := self._receive()).get("id") != number:
            pass
        assert "error" not in message, message
        return dict(message["result"])

    def _receive(self) -> dict[str, Any]:
        message = dict(json.loads(self._socket.recv(timeout=TIMEOUT_S)))
        if message.get("method") == "Network.requestWillBeSent":
            self.asked.append(message["params"]["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]))
        if message.get("method") == "Log.entryAdded":
            self.errors.append(message["params"]["entry"]["text"])
        self.last = message
        return message

    def open(self, file: Path) -> None:
        """Open a file, and wait until it is drawn."""
        for domain in ("Network", "Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=file.resolve().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass
        self.drawn()

    def value(self, expression: str) -> Any:
        """Return the value of an expression of the page, awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def drawn(self) -> None:
        """Wait for two frames: what was asked for before is on the screen."""
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Dispatch an event of the mouse at these pixels."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self) -> bytes:
        """Return it as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def page(folder: Path, *, width: int = 1280, height: int = 800, more: tuple[str, ...] = ()) -> Iterator[Page]:
    """Start a browser for this block. Skip where there is none. folder: for its profile."""
    connect = pytest.importorskip("websockets.sync.client", reason="no websockets here, which vLLM brings").connect
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium here: apt install chromium")
    words = [chromium, *FLAGS, *more, "--remote-debugging-port=0", f"--window-size={width},{height}"]
    words += [f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        port = next(found[1] for line in process.stderr if (found := re.search(r"127\.0\.0\.1:(\d+)/", line)))
        with connect(f"ws://127.0.0.1:{port}{_tab(port)}", max_size=None) as socket:
            yield Page(socket)
    finally:
        process.kill()
        process.communicate()


def _tab(port: str) -> str:
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=TIMEOUT_S) as reply:
        tabs = [tab for tab in json.load(reply) if tab["type"] == "page"]
    return str(tabs[0]["webSocketDebuggerUrl"]).partition(port)[2]
