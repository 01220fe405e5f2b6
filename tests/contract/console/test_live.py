"""The live stream: it starts with past log lines, resumes after an id, and reports gaps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from tests.contract.console.conftest import StageProcess

Event = tuple[int | None, str, Any]


def events(client: httpx.Client, path: str, *, headers: dict[str, str] | None = None) -> Iterator[Event]:
    with client.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream"
        fields: dict[str, str] = {}
        for line in answer.iter_lines():
            if not line:
                if "event" in fields:
                    ident = int(fields["id"]) if "id" in fields else None
                    yield ident, fields["event"], json.loads(fields["data"])
                fields = {}
            elif not line.startswith(":"):
                name, _, value = line.partition(": ")
                fields[name] = value


def until(stream: Iterator[Event], done: Callable[[Event], bool], within_s: float = 20) -> list[Event]:
    deadline = time.monotonic() + within_s
    found = []
    for event in stream:
        found.append(event)
        if done(event):
            return found
        assert time.monotonic() < deadline, "it did not come in time"
    raise AssertionError("the stream ended")


def said(text: str) -> Callable[[Event], bool]:
    return lambda event: event[1] == "log" and event[2]["text"] == text


def test_a_stream_begins_with_the_log_and_the_current_state(
    console: httpx.Client, stage: StageProcess
) -> None:
    stage.order("log info before anybody watches")
    found = until(events(console, "live"), lambda event: event[1] == "overview")
    assert any(said("before anybody watches")(event) for event in found)
    assert {part["name"] for part in found[-1][2]["parts"]} >= {"topics", "vector"}
    idents = [ident for ident, _, _ in found]
    assert idents == sorted(idents)


def test_a_client_that_reconnects_misses_nothing(console: httpx.Client, stage: StageProcess) -> None:
    stream = events(console, "live")
    until(stream, lambda event: event[1] == "overview")
    stage.order("log info one")
    last = until(stream, said("one"))[-1][0]
    stream.close()  # type: ignore[attr-defined]
    for word in ("two", "three", "four"):
        stage.order(f"log warning {word}")
    for path, headers in ((f"live?after={last}", {}), ("live", {"Last-Event-ID": str(last)})):
        found = until(events(console, path, headers=headers), said("four"))
        words = [data["text"] for _, name, data in found if name == "log"]
        assert words == ["two", "three", "four"]
        assert not [event for event in found if event[1] == "gap"]


def test_events_evicted_from_the_ring_are_sent_as_a_gap(console: httpx.Client) -> None:
    """Resume after an id of an earlier process: the events in between are unknown."""
    first = next(events(console, "live?after=41"))
    ident, name, data = first
    assert name == "gap"
    assert data["from"] == 42
    assert data["to"] == ident > 42


def test_hostile_log_lines_are_sent_unchanged(console: httpx.Client, stage: StageProcess) -> None:
    stream = events(console, "live")
    until(stream, lambda event: event[1] == "overview")
    text = '<img src=x onerror=alert(1)> "quoted" event: overview'
    stage.order(f"log error {text}")
    assert until(stream, said(text))[-1][2]["level"] == "error"


def test_a_tail_continues_after_a_sequence_and_filters(console: httpx.Client) -> None:
    query = "topics/events/tail?after=100&tag=kind.odd&node=node-1"
    found = until(events(console, query), lambda event: event[1] == "caught_up")
    records = [data for _, name, data in found if name == "record"]
    assert [record["seq"] for record in records][:3] == [104, 110, 116]
    assert {record["tag"] for record in records} == {"kind.odd"}
    assert {record["node"] for record in records} == {"node-1"}


def test_a_tail_reports_missing_records(console: httpx.Client) -> None:
    ident, name, data = next(events(console, "topics/capped/tail?after=0"))
    assert (ident, name) == (7, "gap")
    assert (data["from"], data["to"]) == (1, 7)


def test_a_tail_shows_new_records_as_they_are_written(console: httpx.Client, stage: StageProcess) -> None:
    stream = events(console, "topics/events/tail")
    until(stream, lambda event: event[1] == "caught_up")
    stage.order("write 2")
    found = until(stream, lambda event: event[1] == "record")
    assert found[-1][2]["text"].startswith('{"n":')


def test_a_tail_of_a_missing_topic_is_not_found(console: httpx.Client) -> None:
    assert console.get("topics/nowhere/tail").status_code == 404
