"""A headless browser, and checks of every page in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, StorageState, expect, sync_playwright
from tests.browser.stage import StageProcess

__all__ = ["DESKTOP", "PHONE", "PLACES", "Watched", "console", "go", "launched", "opened", "photograph"]

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
PATIENCE_MS = 30_000

PLACES = {
    "flow": ["services, jobs", "balances", "relay-events", "127.0.0.1"],
    "buffer": ["events", "relay-events", "pipeline-events"],
    "buffer/events": ["Batches in the queue", "relay:events", "Epochs, fencing", "may be deleted now"],
    "topics": ["events", "gappy", "capped", "jobs"],
    "topics/topic/gappy": ["21 to 24: deleted", "25 to 30: live", "1 to 3: deleted"],
    "topics/topic/capped": [
        "1 to 7: evicted by the topic's cap",
        "8 to 12: live",
        "the oldest records are removed",
    ],
    "topics/topic/jobs": ["Job queue", "leased", "Newest dead letters", "jobs-dead"],
    "topics/routers": ["copy-odd", "odd-events", "not known"],
    "quiver": ["telemetry"],
    "quiver/telemetry": ["archive", "lake", "high-water mark", "mark 2", "gap: later ones are resolved"],
    "pipelines": ["events", "ready"],
    "pipelines/events": ["Checkpoint", "lake", "balances", "expected a number", "Redrive all"],
    "databases": ["timeseries", "vector", "durable", "PromQL on timeseries", "Nearest vectors"],
    "trace": ["live tail"],
    "log": ["From level"],
}
"""The pages of the console, and texts that they must show."""


@dataclass
class Watched:
    """A page, and the errors in it so far."""

    page: Page
    faults: list[str] = field(default_factory=list)
    forgiven: tuple[str, ...] = ()
    """Parts of messages that the test expects, such as a refusal that it provokes."""

    def on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def on_dialog(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def check(self) -> None:
        """Fail after an error, a refusal of the content policy, or a dialog of a script."""
        left = [text for text in self.faults if not any(part in text for part in self.forgiven)]
        assert not left, left


@contextmanager
def launched() -> Iterator[Browser]:
    """Launch the browser that PENSTOCK_CHROMIUM names."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["PENSTOCK_CHROMIUM"],
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, *, forgiven: tuple[str, ...] = (), **options: object) -> Iterator[Watched]:
    """Open a page with its own profile. Errors in it fail the test at the end."""
    context = browser.new_context(**{"viewport": DESKTOP, **options})  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    watched = Watched(page, forgiven=forgiven)
    page.on("console", watched.on_console)
    page.on("pageerror", lambda error: watched.faults.append(str(error)))
    page.on("dialog", watched.on_dialog)
    try:
        yield watched
        watched.check()
    finally:
        context.close()


def photograph(page: Page, name: str) -> None:
    """Save a screenshot if PENSTOCK_SCREENSHOTS names a folder."""
    if folder := os.environ.get("PENSTOCK_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", animations="disabled")


@contextmanager
def console(
    browser: Browser, stage: StageProcess, signed_in: StorageState, place: str = "flow", **options: object
) -> Iterator[Page]:
    """Open a live page of the console in a session. It must have no errors until the end."""
    with opened(browser, storage_state=signed_in, **options) as watched:
        watched.page.goto(f"{stage.page}#/{place}")
        expect(watched.page.locator("#link")).to_have_text("live")
        yield watched.page


def go(page: Page, place: str) -> None:
    """Go to another page of the console without loading it."""
    page.evaluate("place => { location.hash = '#/' + place; }", place)
