"""The console over a real `penstock up` with a Spark pipeline: balance, dead letters and a trace."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
import yaml
from playwright.sync_api import Browser, Page, expect
from tests.browser.browser import go, opened
from tests.process.cli_runner import penstock
from tests.process.test_up import port
from tests.process.up_process import UpProcess, ports_for, up

SLOW_MS = 120_000
START_S = 240.0


def settings_of(directory: Path) -> dict[str, object]:
    """Return the settings of `penstock init`, without the parts that other tests cover."""
    penstock("init", directory)
    written = yaml.safe_load((directory / "penstock.yaml").read_text())
    wanted = {key: written[key] for key in ("relays", "pipelines")} | {"topics": {}, "console": {}}
    return ports_for(wanted, "console.port", "topics.port")


def write(settings: dict[str, object], count: int) -> None:
    url = f"http://127.0.0.1:{port(settings, 'topics')}/v0/topics/events"
    records = [{"data": {"n": number}} for number in range(count)]
    assert httpx.post(url, json={"records": records}).status_code == 200


def spoil(directory: Path) -> None:
    """Append a record that no pipeline can decode."""
    place = ("--manifest", "events/manifest", "--prefix", "events")
    penstock("buffer", "produce", directory / "penstock-data" / "queues", *place, given=b"no json\n")


@pytest.mark.timeout(600)
def test_a_running_pipeline_is_shown_traced_and_redriven(browser: Browser, tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with opened(browser, forgiven=("401", "503", "net::ERR_")) as watched:
        page = watched.page
        with up(tmp_path, settings) as fleet:
            fleet.until_ready(START_S)
            page.goto(fleet.consoles()[-1])
            expect(page.locator("#link")).to_have_text("live", timeout=SLOW_MS)
            _pipeline_moves(page, settings, tmp_path)
            _record_is_traced(page)
            _letter_is_redriven(page)
            os.kill(fleet.process.pid, signal.SIGKILL)
            fleet.process.wait()
        with up(tmp_path, settings) as fleet:
            _page_comes_back(page, fleet)
            assert fleet.stop() == 0


def _pipeline_moves(page: Page, settings: dict[str, object], directory: Path) -> None:
    go(page, "buffer/events")
    write(settings, 40)
    spoil(directory)
    go(page, "pipelines/events")
    expect(page.get_by_role("region", name="Micro-batches")).to_contain_text("40", timeout=SLOW_MS)
    expect(page.get_by_role("region", name="Dead letters")).to_contain_text("no json", timeout=SLOW_MS)
    expect(page.locator("#main")).to_contain_text("balances", timeout=SLOW_MS)
    go(page, "flow")
    expect(page.locator("#main")).to_contain_text("pipeline-events")


def _record_is_traced(page: Page) -> None:
    go(page, "trace?topic=events&seq=7")
    steps = page.locator(".steps")
    expect(steps).to_contain_text("record 7 is in the topic events", timeout=SLOW_MS)
    expect(steps).to_contain_text("Relay")


def _letter_is_redriven(page: Page) -> None:
    go(page, "pipelines/events")
    page.get_by_role("button", name="Redrive all").click()
    page.get_by_role("dialog").get_by_role("button", name="Put 1 back").click()
    report = page.locator(".card", has=page.locator("h3", has_text="Redrive ")).last
    expect(report).to_contain_text("done", timeout=SLOW_MS)
    letters = page.get_by_role("region", name="Dead letters").locator("tbody tr")
    expect(letters.filter(has_text="redriven")).to_have_count(1, timeout=SLOW_MS)


def _page_comes_back(page: Page, fleet: UpProcess) -> None:
    """Check that the session recovers automatically after the fleet was killed."""
    fleet.until_ready(START_S)
    expect(page.locator("#link")).to_have_text("live", timeout=SLOW_MS)
    go(page, "flow")
    card = page.get_by_role("heading", name="pipeline-events ready")
    expect(card).to_be_visible(timeout=SLOW_MS)
