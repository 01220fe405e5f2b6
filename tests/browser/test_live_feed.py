"""The feed of the example in a real browser: existing records, new ones, and those of a lost connection."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.browser.browser import opened
from tests.process.topics_server import KEY, serving

FEED = Path(__file__).parents[2] / "examples" / "live_feed" / "feed.py"
TEXTS = "[...document.querySelectorAll('li.record')].map(item => item.lastChild.textContent).reverse()"


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


def until_shown(page: Page, texts: list[str]) -> None:
    page.wait_for_function(f"expected => JSON.stringify({TEXTS}) === JSON.stringify(expected)", arg=texts)


@pytest.mark.timeout(180)
def test_a_browser_shows_existing_and_new_records_and_continues_after_a_break(
    browser: Browser, tmp_path: Path
) -> None:
    with serving(tmp_path / "data") as server, server.client() as client:
        client.write("news", [{"text": "first"}, {"text": "second"}])
        with opened(browser, forgiven=("net::ERR_", "404")) as watched:
            page = watched.page
            with gateway(server.url, "news") as address:
                page.goto(address)
                until_shown(page, ["first", "second"])
                expect(page.locator("#state")).to_have_text("live")
                client.write("news", [{"text": "<b>third</b> ä\u2028ö"}])
                until_shown(page, ["first", "second", "<b>third</b> ä\u2028ö"])
            expect(page.locator("#state")).to_have_text("connecting")
            client.write("news", [{"text": "missed"}])
            with gateway(server.url, "news", port=int(address.rpartition(":")[2])):
                until_shown(page, ["first", "second", "<b>third</b> ä\u2028ö", "missed"])
                assert page.locator("li").count() == 4, "nothing came twice"
