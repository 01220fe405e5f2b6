"""The console over a real `penstock up` that is killed under load and started again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect
from tests.browser.browser import go, opened
from tests.process.test_up import Writer, port, queue_at, queued, temperature
from tests.process.up_process import ports_for, up

from penstock.buffer.append import last_version

Result = TypeVar("Result")
KEY = "look-and-act"
SETTINGS: dict[str, object] = {
    "stop_timeout": "20s",
    "console": {"keys": KEY},
    "collector": {"grpc_port": 0},
    "relays": [{"topic": "events", "queue": "events", "value": "data", "flush_interval": "10ms"}],
    "timeseries": {"queue": "metrics"},
    "vector": {"queue": "vectors", "dimensions": 3},
}
PORTS = (
    *("console.port", "topics.port", "timeseries.port", "vector.port"),
    *("collector.http_port", "collector.admin_port"),
)
PARTS = ("topics", "relay-events", "collector", "timeseries", "vector")
SLOW_MS = 60_000
"""Time limit for a fleet to appear, on a busy machine."""


def awaited(work: Coroutine[object, object, Result]) -> Result:
    """Return the result, from another thread, because the browser's driver has an event loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def all_are_ready(page: Page) -> None:
    cards = page.get_by_role("region", name="Parts").locator(".card")
    for name in PARTS:
        card = cards.filter(has=page.get_by_role("heading", name=f"{name} ready"))
        expect(card).to_be_visible(timeout=SLOW_MS)


@pytest.mark.timeout(300)
def test_the_console_recovers_automatically_and_nothing_acknowledged_is_lost(
    browser: Browser, tmp_path: Path
) -> None:
    settings = ports_for(SETTINGS, *PORTS)
    url = f"http://127.0.0.1:{port(settings, 'topics')}"
    queue = queue_at(tmp_path / "penstock-data")
    with Writer(url) as writer, opened(browser, forgiven=("401", "503", "net::ERR_")) as watched:
        page = watched.page
        moving = page.locator(".edge.moving").first
        with up(tmp_path, settings) as fleet:
            fleet.until_ready()
            page.goto(f"{fleet.url}/console")
            page.get_by_label("Key, or the printed address").fill(KEY)
            page.keyboard.press("Enter")
            all_are_ready(page)
            expect(moving).to_be_attached(timeout=SLOW_MS)
            os.kill(fleet.process.pid, signal.SIGKILL)
            fleet.process.wait()
            expect(page.locator("#banner")).to_contain_text("may be out of date", timeout=SLOW_MS)
        survived = len(writer.acknowledged)
        with up(tmp_path, settings) as fleet:
            fleet.until(lambda: len(writer.acknowledged) > survived + 50, "written to again")
            expect(page.locator("#link")).to_have_text("live", timeout=SLOW_MS)
            all_are_ready(page)
            expect(moving).to_be_attached(timeout=SLOW_MS)
            writer.end()
            _every_page_is_live(page, settings)
            head = httpx.get(f"{url}/v0/topics/events").json()["head_seq"]
            fleet.until(lambda: awaited(last_version(queue, "relay:events")) == head, "relayed")
            assert fleet.stop() == 0
    found = awaited(queued(queue))
    assert found == sorted(set(found)), "a record came twice, or out of order"
    assert set(writer.acknowledged) <= set(found), "every record that was acknowledged went on"


def _every_page_is_live(page: Page, settings: dict[str, object]) -> None:
    sent = httpx.post(
        f"http://127.0.0.1:{port(settings, 'collector', 'http_port')}/v1/metrics",
        content=temperature(21.5),
        headers={"content-type": "application/x-protobuf"},
    )
    assert sent.status_code == 200
    places = {
        "buffer/events": "relay:events",
        "topics/topic/events": "Live tail",
        "quiver": "readable",
        "log": "topics",
        "databases?query=temperature": "durable",
    }
    for place, text in places.items():
        go(page, place)
        expect(page.locator("#main")).to_contain_text(text, timeout=SLOW_MS)
    for _ in range(60):
        page.get_by_role("button", name="Ask").click()
        page.wait_for_timeout(500)
        if page.get_by_role("region", name="Last values").count():
            break
    expect(page.get_by_role("region", name="Last values")).to_contain_text("21.5")
