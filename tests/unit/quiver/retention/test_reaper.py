"""Deleting segments: the order, the caps, age, and files that cannot be removed."""

from __future__ import annotations

import pytest
from tests.unit.quiver.ack_doubles import CORE, START_NS, Core

from penstock.errors import ConfigError, NotFound, PenstockError, Unavailable
from penstock.quiver.metrics import RetentionMetrics
from penstock.quiver.offsets.records import Outcome
from penstock.quiver.quota import Quota
from penstock.quiver.retention.reaper import Candidate, Policy, Reaper, Retention
from penstock.testing.disk import DiskFault, PlannedFault

HOUR_NS = 3600 * 10**9


class Files:
    """A directory of segments that can refuse a removal."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.stuck: set[int] = set()
        self.kept_back: set[int] = set()
        self.tries = 0

    def bytes_of(self, seq: int) -> int:
        if seq not in self.core.infos:
            raise NotFound(f"segment {seq}")
        return self.core.infos[seq].file_size

    def may_remove(self, seq: int) -> bool:
        return seq not in self.kept_back

    def remove(self, seq: int) -> None:
        self.tries += 1
        assert seq in self.core.offsets.removable(), (
            "a file is removed only after its deletion record is durable"
        )
        if seq in self.stuck:
            raise Unavailable("the device is busy")
        del self.core.infos[seq]


class House:
    """A core with a quota of ten segments, of which one is being written."""

    def __init__(self, policy: Policy = "backpressure", **rules: float) -> None:
        self.core = Core().open()
        self.core.subscribe("a")
        self.files = Files(self.core)
        self.quota = Quota(
            self.core.disk,
            CORE,
            hard_bytes=10_000,
            target_bytes=1000,
            min_free_bytes=500,
            clock=self.core.clock,
        )
        self.reaper = Reaper(
            self.core.offsets,
            self.core.deliveries,
            self.files,
            self.quota,
            Retention(policy=policy, **rules),  # type: ignore[arg-type]
            clock=self.core.clock,
            metrics=RetentionMetrics(self.core.registry),
        )

    def add(self, *seqs: int, ingest_ns: int = START_NS) -> None:
        for seq in seqs:
            self.quota.charge("segments", 1000)
            self.core.add(seq, bundles=1, ingest_ns=ingest_ns)

    def ack(self, *seqs: int) -> None:
        for seq in seqs:
            self.core.deliveries.ack_segment("a", seq)

    def metric(self, name: str, **labels: str) -> float:
        return self.core.registry.value(name, **labels)


def test_segments_that_every_subscriber_processed_are_deleted() -> None:
    house = House()
    house.add(1, 2, 3)
    house.ack(1, 3)
    assert house.reaper.reap().removed == (1, 3)
    assert list(house.core.infos) == [2]
    assert house.quota.used == 1000
    assert house.metric("quiver.gc.evictions_total", reason="processed") == 2
    assert house.metric("quiver.core.bytes", core_id="0") == 1000


def test_some_processed_segments_may_stay_as_headroom() -> None:
    house = House(headroom_bytes=2000)
    house.add(1, 2, 3)
    house.ack(1, 2, 3)
    assert house.reaper.reap().removed == (1,)
    assert house.reaper.reclaim(8000)
    assert list(house.core.infos) == [3]


def test_a_sync_that_fails_keeps_every_file() -> None:
    house = House()
    house.add(1)
    house.ack(1)
    disk = house.core.disk
    disk.plan = PlannedFault(call=len(disk.calls), kind=DiskFault.FAIL_ALWAYS)
    with pytest.raises(PenstockError):
        house.reaper.reap()
    assert list(house.core.infos) == [1]
    disk.plan = None
    assert house.reaper.reap().removed == (1,)


async def test_a_file_that_cannot_be_removed_counts_until_it_is_gone_and_is_retried_with_backoff() -> None:
    house = House()
    house.add(1)
    house.ack(1)
    house.files.stuck = {1}
    for expected in (1, 1, 2, 2, 2, 3):
        house.reaper.reap()
        assert house.files.tries == expected
        assert house.quota.used == 1000
        await house.core.clock.advance(0.99)
    house.files.stuck = set()
    await house.core.clock.advance(60)
    assert house.reaper.reap().removed == (1,)
    assert house.quota.used == 0


def test_backpressure_deletes_nothing_unprocessed_and_refuses_the_writer() -> None:
    house = House("backpressure")
    house.add(*range(1, 10))
    assert not house.reaper.reclaim(500)
    assert len(house.core.infos) == 9
    assert house.metric("quiver.ingest.throttle_total") == 1
    house.ack(1)
    assert house.reaper.reclaim(500)


def test_drop_oldest_drops_the_oldest_and_records_it_for_subscribers_that_needed_it() -> None:
    house = House("drop_oldest")
    house.core.subscribe("b")
    house.add(*range(1, 10))
    house.core.deliveries.ack_segment("b", 1)
    assert house.reaper.reclaim(1500)
    assert min(house.core.infos) == 3
    assert house.core.offsets.subscriber("a").dropped == 2
    assert house.core.offsets.subscriber("b").dropped == 1
    assert house.core.offsets.subscriber("b").hwm == 2
    assert house.metric("quiver.segment.dropped_total") == 2
    assert house.metric("quiver.retention.size_emergency_total") == 1
    assert house.metric("quiver.gc.evictions_total", reason="size") == 2
    assert house.metric("quiver.loss.segments", reason="size", signal="logs") == 2


async def test_drops_are_logged_periodically_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = House("drop_oldest")
    house.add(*range(1, 10))
    for seq in range(10, 13):
        assert house.reaper.reclaim(1000)
        house.add(seq)
    assert len(caplog.messages) == 1
    await house.core.clock.advance(10)
    assert house.reaper.reclaim(1000)
    assert caplog.messages[1] == "dropped 3 unprocessed segments to stay under the cap"


def test_drop_oldest_skips_a_segment_with_a_claimed_bundle() -> None:
    house = House("drop_oldest")
    house.add(*range(1, 10))
    claim = house.core.take("a")
    assert house.reaper.reclaim(500)
    assert 1 in house.core.infos
    assert 2 not in house.core.infos
    assert house.core.deliveries.ack(claim)


def test_drop_oldest_across_a_gap_leaves_no_hole() -> None:
    house = House("drop_oldest")
    house.add(*range(1, 10))
    house.ack(2, 3)
    house.files.kept_back = {2, 3}
    assert house.reaper.reclaim(500)
    assert house.core.offsets.subscriber("a").hwm == 3
    after = house.core.crashed()
    assert after.found.missing == ()
    assert after.offsets.subscriber("a").hwm == 3


def test_when_nothing_may_be_dropped_the_writer_waits() -> None:
    house = House("drop_oldest")
    house.add(*range(1, 10))
    house.files.kept_back = set(range(1, 10))
    assert not house.reaper.reclaim(500)


def test_processed_segments_are_deleted_before_any_is_dropped() -> None:
    house = House("drop_oldest")
    house.add(*range(1, 10))
    house.ack(9)
    assert house.reaper.reclaim(500)
    assert 9 not in house.core.infos
    assert 1 in house.core.infos


async def test_old_segments_are_deleted_under_any_policy_and_count_as_expired() -> None:
    house = House("backpressure", max_age_s=3600)
    house.add(1, ingest_ns=START_NS - HOUR_NS + 10**9)
    house.add(2)
    assert house.reaper.reap().expired == ()
    await house.core.clock.advance(2)
    swept = house.reaper.reap()
    assert (swept.expired, swept.removed) == ((1,), (1,))
    assert house.core.offsets.subscriber("a").expired == 1
    assert house.metric("quiver.loss.bundles", reason="age", signal="logs") == 1


async def test_a_clock_set_forward_expires_no_segment_before_its_age() -> None:
    house = House("backpressure", max_age_s=3600)
    house.add(1, ingest_ns=START_NS - HOUR_NS // 2)
    house.core.clock.jump_wall(3_600_000)
    assert house.reaper.reap().expired == ()
    await house.core.clock.advance(1802)
    assert house.reaper.reap().expired == (1,)


async def test_a_segment_stamped_in_the_future_expires_at_its_age_after_the_start() -> None:
    """The clock was a year ahead at ingestion, or has been set back since."""
    house = House("backpressure", max_age_s=3600)
    house.add(1, ingest_ns=START_NS + 365 * 24 * HOUR_NS)
    assert house.reaper.reap().expired == ()
    await house.core.clock.advance(3590)
    assert house.reaper.reap().expired == ()
    await house.core.clock.advance(20)
    assert house.reaper.reap().expired == (1,)


async def test_an_old_segment_with_a_claimed_bundle_waits_for_the_end_of_the_claim() -> None:
    house = House(max_age_s=3600)
    house.add(1, ingest_ns=START_NS - 2 * HOUR_NS)
    claim = house.core.take("a")
    assert house.reaper.reap().expired == ()
    house.core.deliveries.defer(claim, 0)
    await house.core.clock.advance(2)
    assert house.reaper.reap().expired == (1,)


def test_too_little_free_space_counts_as_over_the_cap() -> None:
    house = House("drop_oldest")
    house.add(1, 2)
    house.core.disk.free = 100
    assert not house.reaper.reclaim(100)
    house.core.disk.free = 10_000
    assert house.reaper.reclaim(100)


def test_a_cap_that_cannot_hold_a_log_and_two_segments_names_the_minimum() -> None:
    with pytest.raises(ConfigError, match="need 3"):
        Quota(Core().disk, CORE, hard_bytes=1000, target_bytes=1024, wal_bytes=1024)


def test_age_is_measured_from_ingestion() -> None:
    rules = Retention(max_age_s=1)
    house = House()
    house.add(1, ingest_ns=START_NS - 2 * 10**9)
    house.add(2)
    assert rules.expired(house.core.offsets.infos(), START_NS, set()) == [1]
    assert rules.expired(house.core.offsets.infos(), START_NS, {1}) == []
    assert Retention().expired(house.core.offsets.infos(), START_NS, set()) == []


def test_retention_deletes_no_more_than_it_needs() -> None:
    candidates = [Candidate(1, 10), Candidate(2, 10), Candidate(3, 10)]
    rules = Retention(policy="drop_oldest", headroom_bytes=15)
    assert rules.steady(candidates) == [1, 2]
    assert rules.evict(candidates, 11) == [1, 2]
    assert rules.drop(candidates, 11, lambda seq: seq == 1) == [2, 3]
    assert Retention().drop(candidates, 11, lambda seq: False) == []


def test_a_drop_that_was_synced_is_not_delivered_after_a_crash_before_the_file_is_gone() -> None:
    house = House("drop_oldest")
    house.add(1)
    house.core.deliveries.drop(1, Outcome.DROPPED, reason="size")
    house.core.offsets.sync()
    after = house.core.crashed()
    assert after.refs("a") == []
    assert after.offsets.removable() == [1]
