"""The events of all viewers: changed parts, every log line, and the current state."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from tests.unit.console.hosts import FixedFleet, part

from penstock.console.live import LiveHub
from penstock.console.sources import Sources
from penstock.testing import ManualClock
from penstock.up import PartState

MANY = 5000
"""More lines than are kept."""


class Told:
    """The events that one client received."""

    def __init__(self, piece: bytes) -> None:
        frames = [dict(_fields(frame)) for frame in piece.decode().split("\n\n") if "data: " in frame]
        self.names = [frame["event"] for frame in frames]
        self.idents = [int(frame["id"]) for frame in frames]
        self.data: list[Any] = [json.loads(frame["data"]) for frame in frames]


def _fields(frame: str) -> list[tuple[str, str]]:
    return [(name, text) for name, _, text in (line.partition(": ") for line in frame.split("\n"))]


@asynccontextmanager
async def hub(host: FixedFleet) -> AsyncIterator[tuple[LiveHub, ManualClock]]:
    clock = ManualClock()
    sources = Sources(host, clock)
    live = LiveHub(sources)
    try:
        yield live, clock
    finally:
        await live.close()
        await sources.close()


async def first_of(live: LiveHub, after: int | None = None) -> Told:
    """Return the events that a client receives until it has the current state."""
    found = b""
    async with aclosing(live.stream(after)) as pieces:
        async for piece in pieces:
            found += piece
            if b"event: overview" in piece:
                break
    return Told(found)


async def test_an_unchanged_part_is_not_sent_again() -> None:
    host = FixedFleet()
    async with hub(host) as (live, _):
        begin = (await first_of(live)).idents[-1]
        for _ in range(3):
            live.told(part("relay"))
        live.told(part("topics"))
        live.told(part("relay", PartState.FAILED, "exit 3"))
        live.told(part("relay"))
        told = await first_of(live, begin)
        assert told.names == ["part", "part", "part", "part", "overview"]
        assert [one["state"] for one in told.data[:-1]] == ["ready", "ready", "failed", "ready"]


async def test_parts_that_change_often_do_not_evict_log_lines() -> None:
    host = FixedFleet()
    async with hub(host) as (live, _):
        host.say("seen")
        begin = (await first_of(live)).idents[-1]
        host.say("missed")
        for number in range(MANY):
            live.told(replace(part("relay"), restarts=number))
        fresh = await first_of(live)
        assert [one["text"] for one in fresh.data[:-1]] == ["seen", "missed"]
        back = await first_of(live, begin)
        assert back.names[:3] == ["gap", "log", "part"]
        assert back.idents == sorted(back.idents)
        again = await first_of(live, back.idents[0])
        assert "log" in again.names, "whoever is cut off behind the gap gets the line all the same"


async def test_the_overview_is_sent_when_it_changes_and_is_not_kept_in_the_ring() -> None:
    host = FixedFleet(parts=[part("relay")])
    async with hub(host) as (live, clock):
        host.say("a line")
        async with aclosing(live.stream(None)) as pieces:
            found = Told(b"".join([await anext(pieces) for _ in range(3)]))
            assert found.names == ["log", "overview"]
            for number in range(3):
                host.running = [replace(part("relay"), restarts=number + 1)]
                await clock.advance(1)
                (one,) = Told(await anext(pieces)).data
                assert one["parts"][0]["restarts"] == number + 1
        back = await first_of(live, found.idents[0])
        assert back.names == ["overview"], "the state of now, once"
        assert back.idents == [found.idents[0]]
