"""A real browser without a window, told what to do over its own debugging protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from websockets.sync.client import ClientConnection, connect

__all__ = ["Tab", "browsing"]

PATIENCE_S = 30.0


class Tab:
    """One page."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def evaluate(self, script: str) -> object:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")  # type: ignore[attr-defined]

    def until(self, script: str, expected: object) -> None:
        """Wait until the expression has this value."""
        give_up_s = time.monotonic() + PATIENCE_S
        while (found := self.evaluate(script)) != expected:
            assert time.monotonic() < give_up_s, f"{script} is {found!r}, not {expected!r}"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        """What a person would see."""
        data = self._call("Page.captureScreenshot")["data"]
        assert isinstance(data, str)
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **parameters: object) -> dict[str, object]:
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(PATIENCE_S))
            if message.get("id") == number:
                assert "error" not in message, message
                result = message["result"]
                assert isinstance(result, dict)
                return result


@contextmanager
def browsing(profile: Path) -> Iterator[Tab]:
    """The browser that PENSTOCK_CHROMIUM names, with an empty profile, for as long as the context lasts."""
    arguments = [
        os.environ["PENSTOCK_CHROMIUM"],
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log)
    try:
        with connect(_debugger_of_first_page(profile, process), max_size=None) as connection:
            yield Tab(connection)
    finally:
        process.terminate()
        process.wait(30)


def _debugger_of_first_page(profile: Path, process: subprocess.Popen[bytes]) -> str:
    chosen = profile / "DevToolsActivePort"
    give_up_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_s:
        assert process.poll() is None, "the browser ended at once"
        if chosen.exists() and (lines := chosen.read_text().split()):
            pages = httpx.get(f"http://127.0.0.1:{lines[0]}/json/list").json()
            for page in pages:
                if page["type"] == "page":
                    return str(page["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("the browser has no page")
