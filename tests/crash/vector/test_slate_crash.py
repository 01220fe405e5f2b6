"""A collection over SlateDB in a directory, whose process dies at any storage operation.

The writes come from a numbered list, as from a queue: write n sets the position to n, and is acknowledged
when it is durable. The next process that opens the directory finds exactly the collection of the stored
position. It continues after it and ends with all writes. A stored id is never assigned to anything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.crash.slate_crash import WRITES, Journal, Life, Lives, Moment, Sweep, feed
from tests.crash.vector import numbered_writes
from tests.crash.vector.numbered_writes import SMALL, SOURCE, TIGHT
from tests.unit.vector.doubles import check_sound

from penstock.coordinator import Durability, SyncMode, WriteHandle
from penstock.vector import VectorConfig, VectorStore

QUEUE = "file:///queue/ingest/manifest"
LIMITS = TIGHT | {"penstock.vector.index.BLOCK_SIZE": 8}
"""Size of an id block. One or two writes use it up."""
EVERY = 13
"""The usual run tests one of this many points."""


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LIMITS.items():
        monkeypatch.setattr(name, value)


def config(place: Path, sync_mode: SyncMode = SyncMode.EVERY_FLUSH) -> VectorConfig:
    """Return a configuration with explicit flushes."""
    return dataclasses.replace(SMALL, store=place.as_uri(), flush_interval="1h", sync_mode=sync_mode)


def ids(store: VectorStore) -> dict[int, str]:
    """Return the content of each id, as of the last flush."""
    index = store._snapshot.index
    return {
        int(index.ids[slot]): index.names[slot] for slot in index.alive[: index.count].nonzero()[0].tolist()
    }


class Fed:
    """See `tests.crash.slate_crash.Fed`."""

    def __init__(self, store: VectorStore) -> None:
        self._store = store
        self.position = store.position

    async def write(self, number: int) -> WriteHandle:
        return await self._store.write(dataclasses.replace(SOURCE[number], source=QUEUE))

    def ids(self, number: int) -> list[list[Any]]:
        """Return the ids of the whole collection, because the ids of other vectors must not change either."""
        return [[given, name] for given, name in ids(self._store).items()]

    async def flush(self, level: Durability) -> None:
        await self._store.flush(durable=level is Durability.DURABLE)

    async def close(self) -> None:
        await self._store.close()


async def life(place: Path, journal: Journal) -> None:
    """Run the work of a process that will be killed."""

    async def opened(sync_mode: SyncMode) -> Fed:
        return Fed(await VectorStore.open(config(place, sync_mode)))

    with pytest.MonkeyPatch.context() as patched:
        for name, value in LIMITS.items():
            patched.setattr(name, value)
        await feed(opened, journal)


async def check(dead: Life) -> None:
    """Check the state that the process left, continue the feed after it, and check that every write is
    stored once."""
    async with await VectorStore.open(config(dead.place)) as store:
        check_sound(store)
        position = -1 if store.position is None else store.position
        assert dead.last_durable <= position <= dead.last_sent
        assert store.source == ("" if position < 0 else QUEUE)
        await numbered_writes.check(store)
        there = ids(store)
        if position == dead.last_durable >= 0:
            assert there == dict(dead.durable[position])
        used = there.keys() | {given for told in dead.durable.values() for given, _ in told}
        for write in SOURCE[position + 1 :]:
            await store.write(dataclasses.replace(write, source=QUEUE))
            await store.flush(durable=False)
            now = ids(store)
            assert not (now.keys() - there.keys()) & used
            used, there = used | now.keys(), now
        await store.flush()
        assert store.position == WRITES - 1
        await numbered_writes.check(store)
    async with await VectorStore.open(config(dead.place)) as store:
        check_sound(store)
        assert store.position == WRITES - 1
        await numbered_writes.check(store)


@pytest.fixture(scope="module")
def sweep() -> Iterator[Sweep]:
    with Lives("tests.crash.vector.test_slate_crash") as lives:
        yield Sweep(lives, check)


def test_a_process_that_dies_at_an_operation_loses_and_doubles_nothing(sweep: Sweep, tmp_path: Path) -> None:
    """Test every kind of kill at some of the operations, in one test, because they share the forked
    process."""
    sweep.check_the_end(tmp_path)
    assert sum(sweep.run(moment, tmp_path, every=EVERY) for moment in Moment) >= 20
    assert sum(sweep.run_again(moment, tmp_path, every=EVERY) for moment in (Moment.TORN, Moment.STORED)) >= 2


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", Moment)
def test_a_process_that_dies_at_any_operation_loses_and_doubles_nothing(
    sweep: Sweep, tmp_path: Path, moment: Moment
) -> None:
    assert sweep.run(moment, tmp_path) >= 30


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", [Moment.TORN, Moment.STORED, Moment.AFTER])
def test_a_process_that_dies_at_any_operation_of_a_take_over_loses_and_doubles_nothing(
    sweep: Sweep, tmp_path: Path, moment: Moment
) -> None:
    assert sweep.run_again(moment, tmp_path) >= 10
