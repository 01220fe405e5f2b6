"""The body of a work stream: its messages, and the return of its jobs after a failure."""

from __future__ import annotations

import logging

import pytest
from tests.unit.servers.topics.live_doubles import FakeSink
from tests.unit.topics.engine_doubles import World, recs, settle

from penstock.servers.topics.queues import WorkFeed
from penstock.topics import TopicConfig
from penstock.topics.model import ClaimResult
from penstock.topics.queues.api import WorkStream


async def test_a_failed_stream_returns_its_jobs_ends_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    engine = await world.open()
    await engine.put_topic("q", TopicConfig(type="queue"))
    await engine.write("q", recs(1, 2, 3))
    nexts = WorkStream.next

    async def break_when_full(work: WorkStream, wait_s: float) -> ClaimResult | None:
        if work.held == 2:
            raise KeyError("unforeseen")
        return await nexts(work, wait_s)

    monkeypatch.setattr(WorkStream, "next", break_when_full)
    feed = WorkFeed(await engine.work("q", "w", max=2), "q", world.clock)
    closed: list[WorkFeed] = []
    feed.on_closed = closed.append
    writer = FakeSink()
    with caplog.at_level(logging.ERROR):
        feed.attach(writer)
        await settle()
    assert writer.names() == ["job", "job", "error"]
    assert writer.events()[-1][1]["code"] == 500
    assert writer.is_ended
    assert closed == [feed]
    assert 'work stream of "q"' in caplog.text
    counts = engine.state("q").queue
    assert counts is not None
    assert (counts.ready, counts.in_flight) == (3, 0)
    await engine.close()
