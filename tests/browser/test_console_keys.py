"""The console with keys, and with ten thousand topics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.browser.browser import opened
from tests.browser.stage import StageProcess, staged

pytestmark = pytest.mark.timeout(240)

READ, WRITE = "look-only-key", "writing-key"
TOPICS = 10_000
LONGEST_TASK_MS = 400
"""Limit of a freeze: far above the time for a row, even on a busy machine."""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageProcess]:
    keys = f"{READ}:read,{WRITE}:read+write"
    with staged(tmp_path_factory.mktemp("big"), "--fast", "--topics", str(TOPICS), "--keys", keys) as stage:
        yield stage


def enter(page: Page, key: str) -> None:
    page.get_by_label("Key, or the printed address").fill(key)
    page.keyboard.press("Enter")


def test_a_key_is_requested_and_kept_only_in_the_tab(browser: Browser, big: StageProcess) -> None:
    asked: list[str] = []
    with opened(browser, forgiven=("401",)) as watched:
        page = watched.page
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{big.page}#/topics")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Sign in")
        for wrong in ("wrong", "as-long-as-a-token-is-and-wrong"):
            enter(page, wrong)
            expect(dialog.get_by_role("alert")).to_have_text("this key is not known")
        page.keyboard.press("Escape")
        expect(page.locator("#main")).to_contain_text("Not open")
        page.get_by_role("button", name="Enter a key").click()
        enter(page, READ)
        expect(page.locator(".page-topics")).to_be_visible()
        expect(page.locator("#link")).to_have_text("live")
        assert page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
        assert page.evaluate("Object.values({...sessionStorage})") == [READ]
        assert not any(READ in one for one in asked)
        page.reload()
        expect(page.locator("#link")).to_have_text("live")
        other = page.context.new_page()
        other.goto(big.page)
        expect(other.get_by_role("dialog")).to_contain_text("Sign in")


def test_a_read_only_key_cannot_redrive(browser: Browser, big: StageProcess) -> None:
    with opened(browser, forgiven=("401", "403")) as watched:
        page = watched.page
        page.goto(f"{big.page}#/pipelines/events")
        enter(page, READ)
        page.get_by_role("button", name="Redrive all").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("button", name="Put ").click()
        expect(dialog.get_by_role("alert")).to_contain_text("write")


def test_ten_thousand_topics_are_listed_without_freezing(browser: Browser, big: StageProcess) -> None:
    with opened(browser, forgiven=("401",)) as watched:
        page = watched.page
        page.add_init_script(
            "window.longest = 0; new PerformanceObserver(list => { for (const one of list.getEntries())"
            " longest = Math.max(longest, one.duration); }).observe({ type: 'longtask' });"
        )
        page.goto(f"{big.page}#/topics")
        enter(page, READ)
        rows = page.locator(".rows .line")
        expect(rows).not_to_have_count(0)
        page.evaluate("window.longest = 0")
        expect(page.get_by_role("status").filter(has_text="topics")).to_contain_text("10,006")
        last = page.locator(".rows .line", has_text=f"many-{TOPICS - 1:05d}")
        for _ in range(400):
            if last.count():
                break
            page.locator(".rows").evaluate("box => { box.scrollTop = box.scrollHeight; }")
            page.wait_for_timeout(50)
        expect(last).to_be_visible()
        assert rows.count() < 80, "only what can be seen is in the page"
        page.get_by_label("Filter").fill("many-0777")
        expect(page.get_by_role("status").filter(has_text="topics")).to_have_text("10 topics")
        expect(rows).to_have_count(10)
        assert page.evaluate("window.longest") < LONGEST_TASK_MS


def test_a_row_keeps_the_focus_while_the_list_is_updated(browser: Browser, big: StageProcess) -> None:
    with opened(browser, forgiven=("401",)) as watched:
        page = watched.page
        page.goto(f"{big.page}#/topics")
        enter(page, READ)
        row = page.locator(".rows .line", has=page.get_by_role("link", name="events", exact=True))
        link = row.get_by_role("link")
        expect(row).to_contain_text("fsync")
        link.focus()
        before = row.inner_text()
        big.order("write 10")
        expect(row).not_to_have_text(before)
        expect(link).to_be_focused()
        page.locator(".rows").evaluate("box => { box.scrollTop = 34 * 100; }")
        expect(page.locator(".rows .line", has_text="many-00100")).to_be_visible()
        expect(link).to_be_focused()
        page.keyboard.press("Tab")
        focused = page.evaluate("document.activeElement.textContent")
        assert focused.startswith("many-000"), "on to the rows that can be seen"
        page.locator(".rows").evaluate("box => { box.scrollTop = 0; }")
        expect(page.locator(".rows .line", has_text="capped")).to_be_visible()
        names = page.locator(".rows .line a").all_inner_texts()
        assert names == sorted(names), "in the order of the list, for Tab"
