"""The feed of the example in a real browser: what is there, what comes, what came while the line was cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.browser.chromium import browsing
from tests.process.topics_server import KEY, serving

FEED = Path(__file__).parents[2] / "examples" / "live_feed" / "feed.py"
TEXTS = "[...document.querySelectorAll('li.record')].map(item => item.lastChild.textContent).reverse()"
STATE = "document.getElementById('state').textContent"


@contextmanager
def gateway(url: str, topic: str, port: int = 0) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, FEED, url, topic, "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TOPICS_API_KEY": KEY},
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


@pytest.mark.timeout(180)
def test_a_browser_shows_what_is_there_and_what_comes_and_goes_on_after_a_break(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, server.client() as client:
        client.write("news", [{"text": "first"}, {"text": "second"}])
        with browsing(tmp_path / "profile") as tab:
            with gateway(server.url, "news") as page:
                tab.open(page)
                tab.until(TEXTS, ["first", "second"])
                tab.until(STATE, "live")
                client.write("news", [{"text": "<b>third</b> ä\u2028ö"}])
                tab.until(TEXTS, ["first", "second", "<b>third</b> ä\u2028ö"])
                if shot := os.environ.get("PENSTOCK_SCREENSHOT"):
                    tab.screenshot(Path(shot))
            tab.until(STATE, "connecting")
            client.write("news", [{"text": "missed"}])
            with gateway(server.url, "news", port=int(page.rpartition(":")[2])):
                tab.until(TEXTS, ["first", "second", "<b>third</b> ä\u2028ö", "missed"])
                assert tab.evaluate("document.querySelectorAll('li').length") == 4, "nothing came twice"
