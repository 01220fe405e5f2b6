"""The frame of the console in a real browser: colours, keys, connection, weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, StorageState, expect
from tests.browser.browser import PHONE, PLACES, console, go, opened, photograph
from tests.browser.stage import StageProcess
from tests.browser.wire import Wire, wired

pytestmark = pytest.mark.timeout(180)

FIRST_PAINT_BYTES_MAX = 200_000
PAGES = ("flow", "buffer", "topics", "quiver", "pipelines", "databases", "trace", "log")
FOCUS_IS_SEEN = """() => {
  const at = document.activeElement;
  const box = at.querySelector('.box');
  return box ? getComputedStyle(box).strokeWidth === '4px' : getComputedStyle(at).outlineStyle !== 'none';
}"""
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


def ground(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def is_dark(page: Page) -> bool:
    return sum(map(int, ground(page).removeprefix("rgb(").rstrip(")").split(","))) < 200


def test_it_is_light_or_dark_as_the_system_says_or_as_the_switch_says(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with console(browser, stage, signed_in, color_scheme="light") as page:
        assert not is_dark(page)
        expect(page.locator("#main")).to_contain_text("balances")
        photograph(page, "console-flow-light")
        page.emulate_media(color_scheme="dark")
        assert is_dark(page)
        photograph(page, "console-flow-dark")
        switch = page.get_by_role("button", name="Theme")
        expect(switch).to_have_text("Theme: auto")
        switch.click()
        switch.click()
        expect(switch).to_have_text("Theme: light")
        assert not is_dark(page), "the switch is stronger than the system"
        page.reload()
        expect(switch).to_have_text("Theme: light")
        assert not is_dark(page), "and is kept"
        page.keyboard.press("t")
        assert is_dark(page), "as the system says again"
        page.emulate_media(color_scheme="light")
        assert not is_dark(page)


def test_text_has_enough_contrast_in_both_themes(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with console(browser, stage, signed_in) as page:
        for place, texts in PLACES.items():
            go(page, place)
            expect(page.locator("#main")).to_contain_text(texts[-1])
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
                assert page.evaluate(CONTRAST) == [], f"{place}, {scheme}"


def test_every_page_works_with_the_keyboard_alone(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with console(browser, stage, signed_in) as page:
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_be_focused()
        expect(page.locator(".page-flow")).to_be_visible()
        page.keyboard.press("Tab")
        for _ in range(3):
            page.keyboard.press("Tab")
            assert page.evaluate(FOCUS_IS_SEEN), "what has the focus shows it"
        for number, name in enumerate(PAGES, 1):
            page.keyboard.press(str(number))
            expect(page.locator(f".page-{name}")).to_be_visible()
            expect(page.locator(f"#pages a[data-page={name}]")).to_have_attribute("aria-current", "page")
        page.keyboard.press("3")
        expect(page.locator(".page-topics .line")).not_to_have_count(0)
        page.keyboard.press("/")
        expect(page.get_by_label("Filter")).to_be_focused()
        page.keyboard.type("ga2")
        expect(page.locator(".page-topics [role=status]")).to_contain_text("No topic begins with")
        page.keyboard.press("Backspace")
        expect(page.locator(".page-topics .line")).to_have_count(1)
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_contain_text("Sequence line")
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("Keys")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()


def test_everything_that_can_be_used_has_a_name(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    nameless = (
        "[...document.querySelectorAll('input, select, textarea, button, a, [role=region], [role=log]')]"
        ".filter(one => !(one.labels?.length || one.getAttribute('aria-label') || one.textContent.trim()))"
        ".map(one => one.outerHTML)"
    )
    with console(browser, stage, signed_in) as page:
        for place, texts in PLACES.items():
            go(page, place)
            expect(page.locator("#main")).to_contain_text(texts[-1])
            assert page.evaluate(nameless) == [], place
            assert page.locator("h1").count() == 1, place


def test_focus_and_scroll_position_survive_updates(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with console(browser, stage, signed_in, "buffer/events", viewport=PHONE) as page:
        stage.order("write 10")
        table = page.get_by_role("region", name="Batches", exact=True)
        expect(table).to_contain_text("relay:events")
        page.evaluate("one => { one.scrollLeft = 50; one.focus(); }", table.element_handle())
        waiting = page.locator(".figure").first.inner_text()
        stage.order("write 10")
        expect(page.locator(".figure").first).not_to_have_text(waiting)
        expect(table).to_be_focused()
        assert page.evaluate("one => one.scrollLeft", table.element_handle()) == 50


def test_the_first_paint_takes_less_than_200_kilobytes(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with opened(browser, storage_state=signed_in) as watched:
        page = watched.page
        network = page.context.new_cdp_session(page)
        network.send("Network.enable")
        taken: list[float] = []
        network.on("Network.loadingFinished", lambda told: taken.append(told["encodedDataLength"]))
        page.goto(f"{stage.page}#/flow")
        expect(page.locator(".page-flow .picture")).to_be_visible()
        expect(page.locator("#link")).to_have_text("live")
        streamed = page.evaluate(
            "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.transferSize, 0)"
        )
        assert len(taken) >= 8, "every file was counted"
        assert max(sum(taken), streamed) < FIRST_PAINT_BYTES_MAX
        hosts = page.evaluate(
            "[...new Set(performance.getEntriesByType('resource').map(one => new URL(one.name).origin))]"
        )
        assert hosts == [stage.page.removesuffix("/console")], "nothing comes from elsewhere"


@contextmanager
def over_a_wire(
    browser: Browser, stage: StageProcess, signed_in: StorageState, place: str
) -> Iterator[tuple[Page, Wire]]:
    """Open a page of the console whose connection can be cut."""
    with (
        wired(int(stage.page.split(":")[2].partition("/")[0])) as wire,
        opened(browser, storage_state=signed_in, forgiven=("net::ERR_",)) as watched,
    ):
        watched.page.goto(f"http://127.0.0.1:{wire.port}/console#/{place}")
        expect(watched.page.locator("#link")).to_have_text("live")
        yield watched.page, wire


def test_a_lost_connection_is_shown_and_continues_without_a_gap(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with over_a_wire(browser, stage, signed_in, "log") as (page, wire):
        stage.order("log info line 0")
        lines = page.get_by_role("log").locator("div", has_text="line ")
        expect(lines).to_have_count(1)
        wire.cut()
        expect(page.locator("#banner")).to_contain_text("may be out of date")
        expect(page.locator("#link")).to_have_text("reconnecting …")
        stage.order(*(f"log info line {number}" for number in range(1, 6)))
        assert lines.count() == 1
        wire.mend()
        expect(lines).to_have_count(6, timeout=20_000)
        assert [text.rpartition(" ")[2] for text in lines.all_inner_texts()] == list("012345")
        expect(page.locator("#banner")).to_be_hidden()


def test_a_tail_continues_after_the_last_record_it_showed(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with over_a_wire(browser, stage, signed_in, "topics/topic/events") as (page, wire):
        seqs = page.locator(".log .record a")
        expect(seqs).to_have_count(20)
        wire.cut()
        expect(page.locator("#banner")).to_contain_text("may be out of date")
        stage.order("write 15")
        wire.mend()
        expect(seqs).to_have_count(35, timeout=20_000)
        shown = [int(text) for text in seqs.all_inner_texts()]
        assert shown == list(range(shown[0], shown[0] + 35)), "each once, in order, none missing"


def test_lines_evicted_during_a_lost_connection_are_shown_as_a_gap(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with over_a_wire(browser, stage, signed_in, "log") as (page, wire):
        stage.order("log info before the break")
        expect(page.get_by_role("log")).to_contain_text("before the break")
        wire.cut()
        expect(page.locator("#banner")).to_be_visible()
        for start in range(0, 4100, 100):  # more than the console keeps
            stage.order(*(f"log info many {number}" for number in range(start, start + 100)))
        wire.mend()
        expect(page.locator("#banner")).to_contain_text("are missing", timeout=20_000)
        expect(page.get_by_role("log")).to_contain_text("many 4099")


def test_a_tail_without_data_considers_the_connection_lost(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with over_a_wire(browser, stage, signed_in, "log") as (page, wire):
        page.clock.install()
        go(page, "topics/topic/events")
        state = page.locator("form").get_by_role("status")
        expect(state).to_have_text("live")
        wire.hold()
        page.clock.fast_forward(29_000)
        expect(state).to_have_text("live")
        page.clock.fast_forward(2_000)
        expect(state).to_have_text("waiting: no data was received for too long")
        wire.mend()
        expect(state).to_have_text("live", timeout=20_000)


HIDDEN = """isHidden => {
  Object.defineProperty(document, 'hidden', { configurable: true, get: () => isHidden });
  document.dispatchEvent(new Event('visibilitychange'));
}"""


def test_a_hidden_page_has_no_stream_and_continues_when_it_is_shown(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with console(browser, stage, signed_in, "topics/topic/events", forgiven=("net::ERR_ABORTED",)) as page:
        seqs = page.locator(".log .record a")
        expect(seqs).to_have_count(20)
        ended: list[str] = []
        page.on("requestfailed", lambda request: ended.append(request.url))
        page.on("requestfinished", lambda request: ended.append(request.url))
        page.evaluate(HIDDEN, True)
        for stream in ("/api/live", "/tail?"):
            for _ in range(100):
                if any(stream in one for one in ended):
                    break
                page.wait_for_timeout(50)
            assert any(stream in one for one in ended), f"{stream} ends"
        stage.order("log info while nobody looks", "write 10")
        page.wait_for_timeout(500)
        assert seqs.count() == 20
        expect(page.locator("#banner")).to_be_hidden()
        page.evaluate(HIDDEN, False)
        expect(seqs).to_have_count(30)
        shown = [int(text) for text in seqs.all_inner_texts()]
        assert shown == list(range(shown[0], shown[0] + 30)), "each once, in order, none missing"
        go(page, "log")
        expect(page.get_by_role("log").locator("div", has_text="while nobody looks")).to_have_count(1)


def test_an_invalid_address_still_shows_a_page(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with console(browser, stage, signed_in, "topics/%") as page:
        expect(page.locator(".page-topics .line")).not_to_have_count(0)
        go(page, "%")
        expect(page.locator(".page-flow .picture")).to_be_visible()


def test_connections_that_end_immediately_are_retried_less_and_less_often(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    ended = """async () => {
      const { on } = await import('/console/static/live.js');
      window.ended = 0;
      on(['link'], () => { window.ended += 1; });
    }"""

    def end(route: Route) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body="retry: 2000\n\n")

    with opened(browser, storage_state=signed_in) as watched:
        page = watched.page
        page.clock.install()
        page.route("**/api/live*", end)
        page.goto(f"{stage.page}#/flow")
        expect(page.locator("#link")).to_have_text("reconnecting …")
        page.evaluate(ended)
        for count in range(1, 6):
            page.clock.fast_forward(8_000)
            page.wait_for_function("count => window.ended >= count", arg=count)
        before = page.evaluate("window.ended")
        page.clock.fast_forward(2_000)
        page.wait_for_timeout(500)
        assert page.evaluate("window.ended") == before, "an answer alone does not make it hurry"
        page.clock.fast_forward(8_000)
        page.wait_for_function("before => window.ended > before", arg=before)


def test_a_phone_shows_the_whole_page(browser: Browser, stage: StageProcess, signed_in: StorageState) -> None:
    with console(browser, stage, signed_in, viewport=PHONE, has_touch=True, is_mobile=True) as page:
        expect(page.locator("#main")).to_contain_text("balances")
        photograph(page, "console-phone")
        page.get_by_role("link", name="Log").scroll_into_view_if_needed()
        page.get_by_role("link", name="Log").tap()
        expect(page.get_by_role("log")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_a_token_opens_one_session_and_leaves_the_address(browser: Browser, stage: StageProcess) -> None:
    url = stage.url()
    asked: list[str] = []
    with opened(browser) as watched:
        watched.page.on("request", lambda request: asked.append(request.url))
        watched.page.goto(url)
        expect(watched.page.locator(".page-flow")).to_be_visible()
        assert watched.page.url == f"{stage.page}#/flow"
        token = url.partition("token=")[2]
        assert not any(token in one for one in asked), "it was in the address bar alone, and in no request's"
        assert watched.page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]") == [
            "",
            0,
            0,
        ]
        watched.page.reload()
        expect(watched.page.locator("#link")).to_have_text("live")
        watched.forgiven = ("401",)
        watched.page.goto("about:blank")
        watched.page.goto(url)
        expect(watched.page.locator("#link")).to_have_text("live")
        assert not watched.page.get_by_role("dialog").is_visible(), "whoever has a session needs no token"
    with opened(browser, forgiven=("401",)) as watched:
        watched.page.goto(url)
        expect(watched.page.get_by_role("dialog")).to_contain_text("a token opens one session")
        assert watched.page.locator(".page-flow").count() == 0
        watched.page.get_by_label("Key, or the printed address").fill(stage.url())
        watched.page.keyboard.press("Enter")
        expect(watched.page.locator(".page-flow .picture")).to_be_visible()
