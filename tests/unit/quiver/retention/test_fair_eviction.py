"""Several cores under one cap: the oldest data of all is dropped first, whichever core needs space."""

from __future__ import annotations

import pytest
from tests.unit.quiver.ack_doubles import CORE, START_NS, Core
from tests.unit.quiver.retention.test_reaper import Files

from penstock.quiver.metrics import RetentionMetrics
from penstock.quiver.quota import Quota
from penstock.quiver.retention.reaper import Reaper, Retention
from penstock.quiver.retention.shared_quota import SharedQuota
from penstock.testing.clock import ManualClock
from penstock.testing.disk import FakeDisk

pytestmark = pytest.mark.unit


class Sharer:
    """One of two cores that share a cap of twenty segments."""

    def __init__(self, number: int, disk: FakeDisk, clock: ManualClock) -> None:
        self.core = Core(clock=clock).open()
        self.core.subscribe("a")
        self.shared = SharedQuota(
            disk, "/data", core_id=number, cores=2, cap_bytes=20_000, target_bytes=1000, clock=clock
        )
        self.quota = Quota(
            self.core.disk, CORE, hard_bytes=10_000, target_bytes=1000, clock=clock, limit=self.shared.limit
        )
        self.reaper = Reaper(
            self.core.offsets,
            self.core.deliveries,
            Files(self.core),
            self.quota,
            Retention(policy="drop_oldest"),
            clock=clock,
            shared=self.shared,
            metrics=RetentionMetrics(self.core.registry),
        )

    def add(self, count: int, ingest_ns: int) -> None:
        for seq in range(1, count + 1):
            self.quota.charge("segments", 1000)
            self.core.add(seq, bundles=1, ingest_ns=ingest_ns)
        self.reaper.reap()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pair(clock: ManualClock) -> tuple[Sharer, Sharer]:
    """Return a core with little new data and one with much old data."""
    disk = FakeDisk(clock=clock)
    disk.make_dirs("/data")
    young, old = Sharer(0, disk, clock), Sharer(1, disk, clock)
    old.add(13, START_NS - 10**12)
    young.add(4, START_NS)
    return young, old


def test_a_core_that_needs_space_waits_for_the_core_with_the_oldest_data(
    pair: tuple[Sharer, Sharer],
) -> None:
    young, old = pair
    assert not young.reaper.reclaim(1000)
    assert sorted(young.core.infos) == [1, 2, 3, 4]
    assert old.reaper.reap().dropped == (1,)
    assert young.reaper.reclaim(1000)
    assert sorted(young.core.infos) == [1, 2, 3, 4]
    assert old.reaper.reap().dropped == ()


async def test_a_core_that_waits_in_vain_drops_its_own_data(
    pair: tuple[Sharer, Sharer], clock: ManualClock
) -> None:
    young, _ = pair
    assert not young.reaper.reclaim(1000)
    await clock.advance(2)
    assert young.reaper.reclaim(1000)
    assert sorted(young.core.infos) == [2, 3, 4]


async def test_unneeded_segments_do_not_make_another_core_drop_data(
    pair: tuple[Sharer, Sharer], clock: ManualClock
) -> None:
    young, old = pair
    assert not young.reaper.reclaim(1000)
    await clock.advance(5)
    young.reaper.reap()
    assert old.reaper.reap().dropped == ()


def test_a_core_with_the_oldest_data_drops_it_without_waiting(pair: tuple[Sharer, Sharer]) -> None:
    _, old = pair
    old.quota.charge("segments", 1000)
    old.core.add(14, bundles=1, ingest_ns=START_NS - 10**12)
    assert old.reaper.reclaim(1000)
    assert 1 not in old.core.infos
