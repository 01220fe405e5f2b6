"""The console in a real browser: every page with live data, and the actions of an operator."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, Page, StorageState, expect
from tests.browser.browser import PHONE, PLACES, console, go, opened, photograph
from tests.browser.stage import StageProcess

pytestmark = pytest.mark.timeout(180)

STAGES = ["Topic", "Relay", "Queue", "Batch", "Micro-batch", "Table"]
HOSTILE = "<script>alert('x')</script>"


def test_every_page_shows_live_data_and_the_phone_scrolls_down_only(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with (
        console(browser, stage, signed_in) as page,
        console(browser, stage, signed_in, viewport=PHONE) as phone,
    ):
        for place, texts in PLACES.items():
            go(page, place)
            go(phone, place)
            for text in texts:
                expect(page.locator("#main")).to_contain_text(text)
                expect(phone.locator("#main")).to_contain_text(text)
            assert phone.evaluate("document.documentElement.scrollWidth") == PHONE["width"], place
            assert page.locator("#main script, #main iframe, #main img").count() == 0, place
            small = phone.evaluate(
                "[...document.querySelectorAll('button, .button, nav a')].filter(one => one.offsetParent"
                " && one.getBoundingClientRect().height < 24).length"
            )
            assert small == 0, "targets of a finger are at least 24 pixels high"
        stage.order("log info all pages were seen")
        expect(page.get_by_role("log")).to_contain_text("all pages were seen")
        expect(page.locator("#banner")).to_be_hidden()


def test_numbers_move_when_records_are_written(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with console(browser, stage, signed_in, "topics/topic/events") as page:
        records = page.locator(".card:has(h3:text-is('Records')) .figure")
        expect(records).to_have_text(re.compile(r"\d"))
        before = int(records.inner_text().replace(",", ""))
        stage.order("write 10")
        expect(records).to_have_text(f"{before + 10:,}")
        go(page, "flow")
        stage.order("write 40")
        expect(page.locator(".edge.moving").first).to_be_attached()
        expect(page.get_by_role("region", name="Edges of the flow")).to_contain_text(
            re.compile(r"[1-9][\d.]*\srecords/s")
        )
        go(page, "buffer/events")
        expect(page.locator("#main")).to_contain_text("relay:events")
        expect(page.locator(".uplot canvas").first).to_be_visible()
        photograph(page, "console-buffer")


def test_the_tail_shows_records_of_one_tag_or_node_as_they_arrive(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with console(browser, stage, signed_in, "topics/topic/events") as page:
        tail = page.get_by_role("log", name="Live tail")
        expect(tail.locator(".record")).to_have_count(20)
        page.get_by_label("From").select_option("now")
        page.get_by_label("Only tag").fill("kind.odd")
        page.get_by_role("button", name="Follow").click()
        expect(tail.locator(".record")).to_have_count(0)
        expect(page.locator("form").get_by_role("status")).to_have_text("live")
        stage.order("write 10")
        expect(tail.locator(".record")).to_have_count(5)
        assert "kind.even" not in tail.inner_text()
        page.get_by_label("Only node").fill("node-0")
        page.get_by_role("button", name="Follow").click()
        expect(tail.locator(".record")).to_have_count(0)
        expect(page.locator("form").get_by_role("status")).to_have_text("live")
        stage.order("write 12")
        expect(tail.locator(".record")).to_have_count(2)
        assert set(re.findall(r"node-\d", tail.inner_text())) == {"node-0"}
        go(page, "topics/topic/gappy")
        expect(page.locator(".legend li")).to_have_count(4)
        expect(tail.locator(".record")).to_have_count(16)
        photograph(page, "console-topics")


def test_hostile_names_and_payloads_are_text(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    stage.order(f"log error {HOSTILE}<img src=x onerror=alert(1)>\u202eabc")
    with console(browser, stage, signed_in, "log", forgiven=("400",)) as page:
        expect(page.get_by_role("log")).to_contain_text(f"{HOSTILE}<img src=x onerror=alert(1)>\\u202eabc")
        go(page, "topics/topic/jobs")
        expect(page.locator("#main")).to_contain_text(HOSTILE)
        go(page, f"topics/topic/{HOSTILE.replace('/', '%2F')}")
        expect(page.locator(".error")).to_be_visible()
        go(page, f"trace?topic={HOSTILE}&seq=1")
        expect(page.locator(".error")).to_be_visible()
        go(page, "pipelines/events")
        row = page.get_by_role("region", name="Dead letters").locator("tbody tr").first
        expect(row).to_contain_text(HOSTILE)
        row.locator("summary").click()
        expect(row.locator("pre")).to_contain_text("3c 73 63 72 69 70 74 3e")
        assert page.locator("#main script, #main img").count() == 0


def test_promql_draws_a_chart_and_vectors_are_found(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with console(browser, stage, signed_in, "databases", forgiven=("400",)) as page:
        query = page.get_by_label("Query (Ctrl+Enter to run)")
        query.fill("stage_load{")
        query.press("Control+Enter")
        expect(page.locator("section .error")).to_be_visible()
        query.fill("stage_load")
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("section .uplot canvas")).to_be_visible()
        expect(page.get_by_role("region", name="Last values")).to_contain_text("29")
        page.get_by_role("heading", name="PromQL on timeseries").scroll_into_view_if_needed()
        page.evaluate("scrollBy(0, 400)")
        photograph(page, "console-databases")
        page.get_by_label("Vector, as JSON").fill("[0.1, 0.2")
        page.get_by_role("button", name="Search").click()
        expect(page.locator("section .error")).to_contain_text("JSON")
        page.get_by_label("Vector, as JSON").fill("[0.1, 0.2, 0.3]")
        page.get_by_label("How many").fill("5")
        page.get_by_role("button", name="Search").click()
        expect(page.get_by_role("region", name="Nearest vectors").locator("tbody tr")).to_have_count(5)


def test_a_record_is_traced_from_its_topic_to_its_table(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    stage.order("write 10")
    with console(browser, stage, signed_in, "topics/topic/events") as page:
        newest = page.locator(".log .record a").last
        expect(page.locator(".log .record")).to_have_count(20)
        seq = newest.inner_text()
        go(page, "buffer/events")  # the console sees the batch while it is in the queue
        expect(page.get_by_role("region", name="Batches", exact=True)).to_contain_text(f'"last":{seq}')
        go(page, "topics/topic/events")
        expect(newest).to_have_text(seq)
        newest.click()
        steps = page.locator(".steps li")
        expect(page.locator(".steps")).to_contain_text(f"record {seq} is in the topic events")
        expect(page.get_by_label("Sequence")).to_have_value(seq)
        assert stage.order("deliver")["micro_batches"]

        def stages() -> list[str]:
            page.get_by_role("button", name="Find").click()
            expect(steps.first).to_be_visible()
            return steps.locator("h3").all_inner_texts()

        told = _until(page, stages, lambda found: any("Table" in one for one in found))
        assert [one.split()[0] for one in told] == [
            "Topic",
            "Relay",
            "Queue",
            "Batch",
            "Micro-batch",
            "Table",
        ]
        expect(page.locator(".steps")).to_contain_text("version")
        photograph(page, "console-trace")


def _until(page: Page, read: Callable[[], list[str]], fits: Callable[[list[str]], bool]) -> list[str]:
    """Reload until the page shows it, for content that is not updated live."""
    for _ in range(60):
        if fits(found := read()):
            return found
        page.wait_for_timeout(500)
    raise AssertionError(found)


def test_a_redrive_asks_for_confirmation_and_then_reports(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with console(browser, stage, signed_in, "pipelines/events") as page:
        dialog = page.get_by_role("dialog")
        expect(page.locator(".uplot canvas").first).to_be_visible()
        photograph(page, "console-pipelines")
        page.get_by_role("button", name="Redrive all").click()
        expect(dialog).to_contain_text("back into the queue?")
        photograph(page, "console-redrive")
        expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        assert page.locator("h3", has_text="Redrive ").count() == 0, "nothing was started"
        rows = page.get_by_role("region", name="Dead letters").locator("tbody tr")
        rows.nth(0).get_by_role("checkbox").check()
        rows.nth(1).get_by_role("checkbox").check()
        page.get_by_role("button", name="Redrive chosen").click()
        dialog.get_by_role("button", name="Put 2 back").click()
        expect(page.locator(".card", has=page.locator("h3", has_text="Redrive ")).last).to_contain_text(
            "done", timeout=60_000
        )
        expect(rows.filter(has_text="redriven")).to_have_count(2)


def test_a_killed_part_is_shown_as_down_and_comes_back(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with opened(browser, storage_state=signed_in, forgiven=("503",)) as watched:
        page = watched.page
        page.goto(f"{stage.page}#/flow")
        card = page.get_by_role("region", name="Parts").locator(".card", has_text="vector")
        box = page.get_by_label(re.compile("^vector, vector, "))
        expect(card).to_contain_text("ready")
        stage.order("kill vector")
        expect(card).to_contain_text("failed")
        expect(card).to_contain_text("ended with -9")
        expect(box).to_have_attribute("aria-label", re.compile("failed"))
        edge = page.get_by_role("region", name="Edges of the flow").locator("tr", has_text="vectors")
        expect(edge).to_contain_text("not known")
        assert "0 records" not in edge.inner_text(), "what is not known is no zero"
        expect(page.locator("#spoken")).to_have_text("vector is failed")
        go(page, "databases")
        down = page.locator(".cards .card", has_text="vectors")
        expect(down).to_contain_text("watermarks are unknown")
        stage.order("start vector")
        expect(down).to_contain_text("durable")
        go(page, "flow")
        expect(card).to_contain_text("ready")
        expect(edge).to_contain_text("records/s")
