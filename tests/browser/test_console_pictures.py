"""The graphs of the console: rates, backward edges, and how often they are drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, Route, StorageState, expect
from tests.browser.browser import console, opened, photograph
from tests.browser.stage import StageProcess

pytestmark = pytest.mark.timeout(180)

EDGE = {
    "part": "collector",
    "label": "",
    "known": True,
    "rate_records_s": None,
    "rate_bytes_s": None,
    "backlog": None,
    "backlog_unit": "records",
    "lag_s": None,
    "last_error": None,
}
NODE = {"kind": "clients", "part": None, "state": "ready"}
DRAWINGS = """async () => {
  const { live } = await import('/console/static/live.js');
  const make = document.createElementNS.bind(document);
  let drawn = 0;
  document.createElementNS = (space, tag) => { drawn += tag === 'svg'; return make(space, tag); };
  for (let number = 0; number < 50; number += 1) live.dispatchEvent(new CustomEvent('part', { detail: {} }));
  const atOnce = drawn;
  for (let frame = 0; frame < 2; frame += 1) await new Promise(requestAnimationFrame);
  return [atOnce, drawn];
}"""


@contextmanager
def answered(
    browser: Browser, stage: StageProcess, signed_in: StorageState, place: str, path: str, answer: object
) -> Iterator[Page]:
    """Open a page of the console over a fixed response, without a stream."""
    with opened(browser, storage_state=signed_in, forgiven=("net::ERR_",)) as watched:

        def fulfill(route: Route) -> None:
            route.fulfill(status=200, content_type="application/json", body=json.dumps(answer))

        watched.page.route("**/api/live*", lambda route: route.abort())
        watched.page.route(f"**/api/{path}", fulfill)
        watched.page.goto(f"{stage.page}#/{place}")
        yield watched.page


def test_bytes_are_shown_where_records_are_not_counted(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    nodes = [{**NODE, "id": name, "label": name} for name in ("otlp", "collector", "idle")]
    nodes[1]["kind"] = "collector"
    edges = [
        {**EDGE, "from": "otlp", "to": "collector", "rate_bytes_s": 2048},
        {**EDGE, "from": "idle", "to": "collector", "rate_bytes_s": 0},
    ]
    told = {"at_ms": 1, "version": "1", "parts": [], "flow": {"nodes": nodes, "edges": edges}, "balance": []}
    with answered(browser, stage, signed_in, "flow", "overview", told) as page:
        expect(page.locator(".picture")).to_contain_text("2.0\u00a0KiB/s")
        expect(page.locator(".edge.moving")).to_have_count(1)
        rows = page.get_by_role("region", name="Edges of the flow").locator("tbody tr")
        expect(rows.nth(0)).to_contain_text("2.0\u00a0KiB/s")
        expect(rows.nth(1)).to_contain_text("0\u00a0B/s")


def test_routers_that_form_a_cycle_all_have_an_arrow(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    ways = [("a", "b"), ("b", "c"), ("c", "a"), ("a", "b"), ("a", "b"), ("a", "c"), ("b", "a")]
    edges = [
        {"id": f"r{place}", "from": one, "to": other, "filter": f"tag t{place}", "copied": 1, "state": None}
        for place, (one, other) in enumerate(ways)
    ]
    told = {"nodes": [{"id": name} for name in "abc"], "edges": edges}
    with answered(browser, stage, signed_in, "topics/routers", "routers", told) as page:
        lines = page.locator(".picture .edge")
        expect(lines).to_have_count(len(ways))
        drawn = [line.get_attribute("d") for line in lines.all()]
        assert len(set(drawn)) == len(ways), "none lies on another"
        assert {line.get_attribute("marker-end") for line in lines.all()} == {"url(#head)"}
        expect(page.locator(".picture .edge.back")).to_have_count(2)
        expect(page.locator(".picture .edge.back title").first).to_contain_text("r2")
        photograph(page, "console-routers")
        for place in range(len(ways)):
            expect(page.locator(".picture")).to_contain_text(f"tag t{place}")
        frame = page.locator(".picture").bounding_box()
        assert frame is not None
        for text in page.locator(".picture text").all():
            box = text.bounding_box()
            assert box is not None
            assert box["y"] >= frame["y"], "nothing is cut off above"
            assert box["y"] + box["height"] <= frame["y"] + frame["height"], "nor below"
        expect(page.get_by_role("region", name="Routers", exact=True)).to_contain_text("not known")


def test_edges_lead_to_the_right_except_those_that_close_a_cycle(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    ranks = """async ([names, ways, most]) => {
      const { ranks } = await import('/console/static/layers.js');
      const edges = ways.map(([from, to]) => ({ from, to }));
      return Object.fromEntries(ranks([...names].map((id) => ({ id })), edges, most));
    }"""
    with console(browser, stage, signed_in) as page:
        chain = ["ab", "bc", "ac", "cd"]
        assert page.evaluate(ranks, ["dcba", chain, 20]) == {"a": 0, "b": 1, "c": 2, "d": 3}
        assert page.evaluate(ranks, ["abcd", chain, 2]) == {"a": 0, "b": 1, "c": 2, "d": 2}
        assert page.evaluate(ranks, ["abc", ["ab", "bc", "ca", "aa"], 20]) == {"a": 0, "b": 1, "c": 2}
        assert page.evaluate(ranks, ["ab", ["ab", "ba"], 20]) == {"a": 0, "b": 1}


def test_the_flow_is_drawn_once_however_many_parts_change(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    with console(browser, stage, signed_in) as page:
        expect(page.locator(".page-flow .picture")).to_be_visible()
        at_once, drawn = page.evaluate(DRAWINGS)
        assert at_once == 0
        assert 1 <= drawn <= 2, "one for all of them, and one if the state changed just then"


def test_a_box_keeps_the_focus_when_an_edge_is_added(
    browser: Browser, stage: StageProcess, signed_in: StorageState
) -> None:
    script = """async () => {
      const { live } = await import('/console/static/live.js');
      const frame = () => new Promise(requestAnimationFrame);
      const show = async (edges) => {
        live.overview = { ...live.overview, flow: { ...live.overview.flow, edges } };
        live.dispatchEvent(new CustomEvent('overview', { detail: live.overview }));
        await frame();
        await frame();
      };
      const all = live.overview.flow.edges;
      await show(all.slice(2));
      const box = document.querySelector('.picture a');
      box.focus();
      await show(all);
      return document.activeElement === box && box.isConnected;
    }"""
    with console(browser, stage, signed_in) as page:
        expect(page.locator(".page-flow .picture")).to_be_visible()
        assert page.evaluate(script)
