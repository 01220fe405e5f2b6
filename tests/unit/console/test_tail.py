"""The tail of a topic: the newest records are always shown, and a silent tail sends heartbeats."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from penstock.clock import SYSTEM_CLOCK
from penstock.console.tail import Pace, frames
from penstock.testing import ManualClock
from penstock.topics.client import WatchEvent
from penstock.topics.model import Record, Tombstone


def records(first: int, last: int) -> list[Record]:
    return wrote(first, last).records()


def seqs(found: Sequence[Record]) -> list[int]:
    return [record.seq for record in found]


async def test_records_within_the_limit_of_a_second_pass_immediately() -> None:
    pace = Pace(ManualClock(), 3)
    assert pace.take(records(1, 3)) == (None, records(1, 3))
    assert pace.wait_s is None


async def test_the_newest_of_a_burst_are_shown_after_the_omitted_ones() -> None:
    gone, shown = Pace(ManualClock(), 3).take(records(1, 10))
    assert (gone, seqs(shown)) == ((1, 7), [8, 9, 10])


async def test_records_over_the_limit_of_a_second_are_shown_in_the_next() -> None:
    clock = ManualClock()
    pace = Pace(clock, 3)
    pace.take(records(1, 2))
    gone, shown = pace.take(records(3, 4))
    assert (gone, seqs(shown)) == (None, [3])
    assert pace.take(records(5, 9)) == (None, ())
    assert pace.wait_s == 1.0
    await clock.advance(1)
    assert pace.wait_s == 0.0
    gone, shown = pace.take()
    assert (gone, seqs(shown)) == ((4, 6), [7, 8, 9])
    assert pace.wait_s is None


async def test_every_record_is_shown_or_reported_as_omitted() -> None:
    clock = ManualClock()
    pace = Pace(clock, 5)
    told: list[int] = []
    for start in range(1, 200, 7):
        gone, shown = pace.take(records(start, start + 6))
        told += [] if gone is None else range(gone[0], gone[1] + 1)
        told += seqs(shown)
        await clock.advance(0.3)
    gone, shown = pace.rest()
    told += [] if gone is None else range(gone[0], gone[1] + 1)
    told += seqs(shown)
    assert told == list(range(1, told[-1] + 1))
    assert told[-1] >= 200


def wrote(first: int, last: int) -> WatchEvent:
    texts = [b'{"$seq":%d,"$ts":1,"data":{}}' % seq for seq in range(first, last + 1)]
    return WatchEvent(kind="records", topic="events", from_seq=first - 1, to_seq=last, fragments=texts)


async def watch(*told: WatchEvent, silent_s: float = 0.0) -> AsyncGenerator[WatchEvent, None]:
    for one in told:
        yield one
    await asyncio.sleep(silent_s)


def idents(piece: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"^id: (\d+)$", piece, re.MULTILINE)]


async def test_a_silent_tail_sends_heartbeats() -> None:
    pace = Pace(SYSTEM_CLOCK, 500)
    async with aclosing(frames(watch(silent_s=60), None, pace, beat_s=0.01)) as pieces:
        assert await anext(pieces) == b": still here\n\n"
        assert await anext(pieces) == b": still here\n\n"


async def test_a_tail_whose_records_are_all_filtered_sends_heartbeats() -> None:
    async def endless() -> AsyncGenerator[WatchEvent, None]:
        while True:
            yield wrote(1, 1)
            await asyncio.sleep(0)

    pace = Pace(SYSTEM_CLOCK, 500)
    async with aclosing(frames(endless(), "nobody", pace, beat_s=0.01)) as pieces:
        assert await anext(pieces) == b": still here\n\n"


async def test_ids_never_overtake_waiting_records() -> None:
    caught_up = WatchEvent(kind="caught_up", topic="events", to_seq=9, head_seq=9)
    tombstone = Tombstone(
        gap_from=10, gap_to=12, reason="evicted", missed_estimate=3, earliest_seq=13, head_seq=13
    )
    gap = WatchEvent(kind="gap", topic="events", to_seq=12, tombstone=tombstone)
    pace = Pace(ManualClock(), 3)
    told = watch(wrote(1, 3), wrote(4, 9), caught_up, gap, wrote(13, 13))
    found = [piece async for piece in frames(told, None, pace)]
    assert [idents(piece) for piece in found] == [[1, 2, 3], [], [6, 7, 8, 9, 12], [13]]
    assert b"caught_up" in found[1]
    assert b'"from":4,"to":6,"reason":"too_fast"' in found[2]
