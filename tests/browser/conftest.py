"""One browser and one stage for all tests of the console. Each test has a page with its own profile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, StorageState
from tests.browser.browser import launched, opened
from tests.browser.stage import StageProcess, staged


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageProcess]:
    folder = tmp_path_factory.mktemp("stage")
    with tempfile.TemporaryDirectory(prefix="penstock-") as short:
        is_photographed = "PENSTOCK_SCREENSHOTS" in os.environ  # paths are in the pictures
        with staged(Path(short) if is_photographed else folder) as stage:
            yield stage


@pytest.fixture(scope="session")
def signed_in(browser: Browser, stage: StageProcess) -> StorageState:
    """Return the cookie of a session that the first token opened."""
    with opened(browser) as watched:
        watched.page.goto(stage.first_url)
        watched.page.wait_for_selector(".page-flow")
        return watched.page.context.storage_state()
