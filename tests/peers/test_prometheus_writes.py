"""A real Prometheus scrapes, and writes what it scraped to a real server, which has to hold the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.peers.peer import Peer, penstock, prometheus, until
from tests.peers.scraped import METADATA, Target, target
from tests.unit.timeseries.remote_write_wire import request

pytestmark = pytest.mark.prometheus

WRITING = """
global: {{scrape_interval: 300ms, scrape_timeout: 300ms}}
scrape_configs:
  - {{job_name: work, static_configs: [targets: ["{work}"]]}}
  - {{job_name: penstock, static_configs: [targets: ["{penstock}"]]}}
remote_write:
  - url: http://{penstock}/api/v1/write
    queue_config: {{batch_send_deadline: 100ms, max_shards: 1}}
    metadata_config: {{send: true, send_interval: 1s}}
"""
FEDERATING = """
global: {{scrape_interval: 300ms, scrape_timeout: 300ms}}
scrape_configs:
  - job_name: federated
    metrics_path: /federate
    honor_labels: true
    params: {{"match[]": ['{{__name__=~"fed.*"}}']}}
    static_configs: [targets: ["{penstock}"]]
"""
EVERYTHING = '{job!=""}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What Prometheus scraped and wrote, and when."""

    theirs: Peer
    ours: Peer
    began_s: int
    ended_s: int
    metadata: tuple[dict[str, Any], dict[str, Any]]
    """Of both, while the target was there."""

    def both(self, path: str, **asked: str | float) -> tuple[Any, Any]:
        return self.theirs.get(path, **asked).data, self.ours.get(path, **asked).data

    def samples(self, selector: str) -> tuple[Any, Any]:
        """All samples of both, without stale markers, which ranges do not show."""
        query = f"{selector}[{self.ended_s - self.began_s}s]"
        theirs, ours = self.both("query", query=query, time=self.ended_s)
        return theirs["result"], ours["result"]


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    """A target is scraped, loses a series, and goes away."""
    folder: Path = tmp_path_factory.mktemp("scraping")
    numbers, began_s = Target(), int(time.time())
    with ExitStack() as stack:
        ours = stack.enter_context(penstock(folder / "penstock"))
        there = stack.enter_context(ExitStack())
        work = there.enter_context(target(numbers))
        config = WRITING.format(work=work, penstock=ours.url.removeprefix("http://"))
        theirs = stack.enter_context(prometheus(folder / "prometheus", config))
        until(lambda: counted(ours, "work_plain") > 12, "a dozen scrapes")
        until(lambda: METADATA.keys() <= ours.get("metadata").data.keys(), "the metadata")
        metadata = theirs.get("metadata").data, ours.get("metadata").data
        numbers.with_second_lane = False
        until(lambda: not seen(ours, 'work_total{lane!="a"}'), "the end of a series")
        there.close()
        until(lambda: seen(ours, 'up{job="work"} == 0'), "the end of the target")
        ended_s = int(time.time()) + 1
        until(lambda: seen(ours, f"min(timestamp(up)) > {ended_s}"), "all that was scraped")
        yield Past(theirs=theirs, ours=ours, began_s=began_s, ended_s=ended_s, metadata=metadata)


def seen(peer: Peer, query: str) -> bool:
    return bool(peer.get("query", query=query).data["result"])


def counted(peer: Peer, selector: str) -> float:
    found = peer.get("query", query=f"sum(count_over_time({selector}[1m]))").data["result"]
    return float(found[0]["value"][1]) if found else 0.0


def test_every_sample_arrives_with_its_time_and_value(past: Past) -> None:
    theirs, ours = past.samples(EVERYTHING)
    assert ours == theirs
    assert {"work", "penstock"} == {one["metric"]["job"] for one in ours}
    assert len(ours) > 50
    (plain,) = past.samples("work_plain")[1]
    assert len(plain["values"]) > 12
    assert {value for _, value in plain["values"]} == {"1e-300"}


def test_series_and_labels_are_those_that_were_scraped(past: Past) -> None:
    asked = {"match[]": EVERYTHING, "start": past.began_s, "end": past.ended_s}
    for path in ("series", "labels", "label/lane/values", "label/__name__/values"):
        theirs, ours = past.both(path, **asked)
        assert ours == theirs, path
    assert past.both("label/lane/values", **asked)[1] == ["a", 'b\n"ü\\']


def test_metadata_arrive(past: Past) -> None:
    theirs, ours = past.metadata
    assert {name: ours[name] for name in METADATA} == METADATA
    assert {name: ours.get(name) for name in theirs} == theirs


def test_a_series_ends_when_it_is_no_longer_scraped(past: Past) -> None:
    """Every 20 ms a series is there for both or for none: its marker stands where Prometheus has it."""
    asked: dict[str, str | float] = {"start": past.began_s, "end": past.ended_s, "step": 0.02}
    for selector in ('{job="work"}', "timestamp(work_now)", "timestamp(work_total)", "up"):
        theirs, ours = past.both("query_range", query=selector, **asked)
        assert ours == theirs
    now_and_then = past.both("query_range", query='work_now{is="now and then"}', **asked)[1]["result"]
    times = [at_s for at_s, _ in now_and_then[0]["values"]]
    gaps = [(low, high) for low, high in pairwise(times) if high - low > 0.03]
    assert len(gaps) >= 3


def test_all_series_of_a_target_end_with_it(past: Past) -> None:
    ((_, ups),) = [(one["metric"], one["values"]) for one in past.samples('up{job="work"}')[1]]
    gone_s = next(at_s for at_s, value in ups if value == "0")
    asked: dict[str, str | float] = {"start": gone_s - 0.005, "end": gone_s + 0.005, "step": 0.001}
    theirs, ours = past.both("query_range", query='work_total{job="work"}', **asked)
    assert ours == theirs
    (last,) = ours["result"]
    assert [at_s for at_s, _ in last["values"]] == [round(gone_s - ms / 1000, 3) for ms in range(5, 0, -1)]


def test_what_is_federated_is_scraped_as_it_is_held(tmp_path: Path) -> None:
    at_ms = int(time.time() * 1000) - 1500
    held = {
        "a": (at_ms, 1.5),
        "b": (at_ms - 7, float("nan")),
        'c "quoted" \\ and\nbroken': (at_ms, float("-inf")),
        "ü": (at_ms + 1, 1e-300),
    }
    with penstock(tmp_path / "penstock") as ours:
        ours.write(request(*(({"__name__": "fed_now", "lane": lane}, [one]) for lane, one in held.items())))
        config = FEDERATING.format(penstock=ours.url.removeprefix("http://"))
        with prometheus(tmp_path / "prometheus", config) as theirs:
            until(lambda: seen(theirs, "fed_now"), "a scrape")
            result = theirs.get("query", query="fed_now[1m]").data["result"]
    found = {one["metric"]["lane"]: one["values"] for one in result}
    expected = {lane: [[at / 1000, str(value)]] for lane, (at, value) in held.items()}
    assert {
        lane: [[at_s, str(float(value))] for at_s, value in values] for lane, values in found.items()
    } == expected
    assert {tuple(sorted(one["metric"])) for one in result} == {("__name__", "instance", "job", "lane")}
