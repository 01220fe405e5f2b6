"""A store whose disk fails a write says so for a while."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.collector.pipeline import QuiverStore
from penstock.errors import InvalidInput, PenstockError, Unavailable
from penstock.quiver import AtCapacity
from penstock.testing.clock import ManualClock


class Quiver:
    """Takes every request, or fails with `error`."""

    error: Exception | None = None

    async def ingest_raw(self, data: bytes, signal: str) -> None:
        if self.error is not None:
            raise self.error

    async def ingest(self, batch: Any, *, signal: str) -> None:
        await self.ingest_raw(b"", signal)


NO_BATCH: Any = None


async def write(store: QuiverStore, *, raw: bool) -> None:
    await (store.ingest_raw(b"x", "logs") if raw else store.ingest(NO_BATCH, signal="logs"))


@pytest.mark.parametrize("raw", [False, True])
async def test_after_a_failed_write_it_takes_none_until_one_succeeds_or_time_has_passed(raw: bool) -> None:
    quiver, clock = Quiver(), ManualClock()
    store = QuiverStore(quiver, clock)  # type: ignore[arg-type]
    assert store.takes_writes
    quiver.error = Unavailable("the disk is full")
    with pytest.raises(Unavailable):
        await write(store, raw=raw)
    assert not store.takes_writes
    await clock.advance(29)
    assert not store.takes_writes
    await clock.advance(1)
    assert store.takes_writes, "nobody sends a write to a collector that is not ready"
    with pytest.raises(Unavailable):
        await write(store, raw=raw)
    assert not store.takes_writes
    quiver.error = None
    await write(store, raw=raw)
    assert store.takes_writes


@pytest.mark.parametrize("error", [AtCapacity("full"), InvalidInput("no request")])
async def test_a_write_that_is_refused_says_nothing_of_the_disk(error: PenstockError) -> None:
    quiver = Quiver()
    store = QuiverStore(quiver, ManualClock())  # type: ignore[arg-type]
    quiver.error = error
    with pytest.raises(PenstockError):
        await write(store, raw=True)
    assert store.takes_writes
