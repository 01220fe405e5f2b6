"""Damage to a queue or to a database that is fed from it: reported or complete, never silent.

Each durable file is cut, zeroed, removed or replaced by an older copy; then records are produced, few or more
than were lost, and the feed starts again. An error or a warning is a report. Without one, every record
that was acknowledged has to be in the database.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.services.test_feed import gauge
from tests.unit.timeseries.database_doubles import START_MS, contents

from penstock.buffer import ConsumerConfig, Producer, ProducerConfig
from penstock.errors import PenstockError
from penstock.services import Feed, FeedConfig
from penstock.services.timeseries_feed import METRICS_PAYLOAD, FedTimeSeries
from penstock.testing import ManualClock
from penstock.timeseries import TimeSeries, TimeSeriesConfig

WHOLE = ("older", "missing")
ANY = ("truncated", "zeroed", *WHOLE)
TARGETS = {
    "queue": WHOLE,
    "database": WHOLE,
    "queue/ingest/manifest": ANY,
    "queue/ingest/manifest.ledger": ANY,
    "queue/ingest/next.batch": ("truncated", "zeroed", "missing"),
}
CASES = [(target, how, more) for target, kinds in TARGETS.items() for how in kinds for more in (0, 3, 20)]


async def produce(root: Path, records: Sequence[int]) -> None:
    config = ProducerConfig(store=str(root / "queue"), flush_interval="1ms")
    async with Producer(config) as producer:
        for record in records:
            handle = await producer.produce([gauge("a", record, float(record))], METRICS_PAYLOAD)
            await handle.watcher.await_durable()


async def fed(root: Path, *, open_timeout: str = "60s") -> set[int]:
    """Feed until the queue is empty, and return the records in the database."""
    config = TimeSeriesConfig(open_timeout=open_timeout)
    clock = ManualClock(START_MS)
    async with await TimeSeries.open(f"file://{root}/database", config, clock=clock) as database:
        queue = ConsumerConfig(store=str(root / "queue"), gc_enabled=False)
        await Feed(FeedConfig(queue=queue), FedTimeSeries(database)).run(once=True)
        return {int(at) for at in (await contents(database)).get("a{}", {})}


def damage(root: Path, target: str, how: str) -> None:
    path = root / target
    if path.name == "next.batch":
        path = max(path.parent.glob("*.batch"))
    if how in ("older", "missing"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if how == "older":
        older = root / "older" / target
        shutil.copytree(older, path) if older.is_dir() else shutil.copyfile(older, path)
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if how == "zeroed":
        path.write_bytes(bytes(path.stat().st_size))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


async def world(saved: Path) -> Path:
    """Eight records in the database and four more in the queue; a copy of both when there were four.

    Always at the same place, as the database knows its queue by its address.
    """
    made, root = saved / "made", saved / "root"
    if not made.exists():
        await produce(root, range(4))
        assert await fed(root) == set(range(4))
        for part in ("queue", "database"):
            shutil.copytree(root / part, root / "older" / part)
        await produce(root, range(4, 8))
        assert await fed(root) == set(range(8))
        await produce(root, range(8, 12))
        shutil.copytree(root, made)
    shutil.rmtree(root)
    shutil.copytree(made, root)
    return root


async def test_without_damage_the_feed_continues_without_a_word(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = await world(saved)
    caplog.clear()
    await produce(root, range(12, 15))
    assert await fed(root) == set(range(15))
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize(("target", "how", "more"), CASES)
async def test_no_damage_to_queue_or_database_loses_a_record_silently(
    saved: Path, caplog: pytest.LogCaptureFixture, target: str, how: str, more: int
) -> None:
    root = await world(saved)
    damage(root, target, how)
    caplog.clear()
    acked = set(range(12))
    try:
        await produce(root, range(12, 12 + more))
        acked |= set(range(12, 12 + more))
        found = await fed(root)
    except PenstockError:
        return
    reported = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert found >= acked or reported, f"lost without a word: {sorted(acked - found)}"


def test_the_sweep_tries_every_kind_of_damage() -> None:
    assert len(CASES) == 45
    assert {how for _, how, _ in CASES} == set(ANY)
