"""Watermarks that never decrease, and their heap of waiters."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.coordinator.doubles import turns

from penstock.coordinator import Durability, Shutdown
from penstock.coordinator.watermarks import Watermark, Watermarks

APPLIED, FLUSHED, DURABLE = Durability


async def test_a_mark_wakes_those_it_has_reached_and_leaves_the_others_alone() -> None:
    mark = Watermark()
    waits = {epoch: asyncio.create_task(mark.wait(epoch)) for epoch in (5, 1, 3, 2, 4)}
    await turns()
    mark.raise_to(3)
    await turns()
    assert {epoch for epoch, wait in waits.items() if wait.done()} == {1, 2, 3}
    assert mark.waiting == 2
    mark.raise_to(9)
    await asyncio.gather(*waits.values())


async def test_cancelled_waiters_are_removed_although_the_mark_is_unchanged() -> None:
    mark = Watermark()
    patient = asyncio.create_task(mark.wait(1))
    for _ in range(100):
        impatient = asyncio.create_task(mark.wait(1))
        await turns(2)
        impatient.cancel()
        await turns(2)
    assert mark.waiting <= 3
    mark.raise_to(1)
    await patient


async def test_a_mark_never_goes_back() -> None:
    mark = Watermark(3)
    with pytest.raises(AssertionError, match="a watermark at 3 cannot go back to 2"):
        mark.raise_to(2)


async def test_a_failure_is_for_those_above_the_mark_only() -> None:
    mark = Watermark(3)
    wait = asyncio.create_task(mark.wait(4))
    await turns()
    mark.fail(lambda: Shutdown("over"))
    await mark.wait(3)
    for waiting in (wait, mark.wait(4)):
        with pytest.raises(Shutdown):
            await waiting


async def test_no_level_passes_the_one_below_it() -> None:
    marks = Watermarks()
    marks.raise_to(APPLIED, 5)
    with pytest.raises(AssertionError, match="cannot be DURABLE"):
        marks.raise_to(DURABLE, 1)
    marks.raise_to(FLUSHED, 5)
    marks.raise_to(DURABLE, 5)
    assert [marks[level] for level in Durability] == [5, 5, 5]
