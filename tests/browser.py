"""Headless Chromium for tests of pages, spoken to over a pipe (DevTools protocol), so that nothing but the browser itself is needed.

Debian: apt-get install -y --no-install-recommends chromium-headless-shell
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--hide-scrollbars")


class Browser:
    """One tab.  `with Browser(profile) as tab:`; `tab.said` holds what pages wrote to the console or threw."""

    def __init__(self, profile: Path) -> None:
        assert FOUND, "no browser; ask browser.FOUND first"
        to_read, self.to = os.pipe()
        self.back, back_write = os.pipe()

        def pipes() -> None:  # Chromium reads at 3 and writes at 4
            incoming, outgoing = os.dup(to_read), os.dup(back_write)
            os.dup2(incoming, 3)
            os.dup2(outgoing, 4)

        command = [FOUND, *FLAGS, f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(command, preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(back_write)
        self.rest, self.number, self.session = b"", 0, ""
        self.said: list[str] = []

    def __enter__(self) -> Browser:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.session = ""
        with suppress(OSError, EOFError):
            self.ask("Browser.close")
        self.process.wait(30)
        os.close(self.to)
        os.close(self.back)

    def ask(self, method: str, **parameters: object) -> dict[str, Any]:
        """A command's answer; what the page says meanwhile is noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters} | ({"sessionId": self.session} if self.session else {})
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (told := self.read()).get("id") != self.number:
            self.note(told)
        assert "error" not in told, f"{method}: {told['error']}"
        return told["result"]

    def read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            chunk = os.read(self.back, 1 << 20)
            if not chunk:
                raise EOFError("the browser ended")
            self.rest += chunk
        line, self.rest = self.rest.split(b"\0", 1)
        return json.loads(line)

    def note(self, told: dict[str, Any]) -> None:
        if told.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.said.append(json.dumps(told["params"]))

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """A page in a window of so many pixels, loaded."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', () => done()))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page, however long, as PNG."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def pdf(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.printToPDF", printBackground=False, preferCSSPageSize=True)["data"]))

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=name)
