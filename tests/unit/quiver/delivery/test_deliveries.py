"""Delivering bundles: order, claims and leases, retries, waiting, and the effects of a drop."""

from __future__ import annotations

import asyncio
import gc
import threading

import pyarrow as pa
import pytest
from tests.unit.quiver.ack_doubles import Core

from penstock.errors import ConfigError, Rejected
from penstock.quiver.delivery.leases import Bundle, LeaseTable
from penstock.quiver.delivery.subscription import Deliveries, DeliverySettings
from penstock.quiver.errors import StaleClaim, UnknownSubscriber
from penstock.quiver.model import BundleRef
from penstock.quiver.offsets.records import Outcome

BATCH = pa.record_batch({"n": [1]})


def opened(**settings: object) -> Core:
    core = Core(delivery=DeliverySettings(**settings)).open()  # type: ignore[arg-type]
    core.subscribe("a")
    return core


@pytest.fixture
def core() -> Core:
    return opened()


async def test_bundles_come_oldest_first_and_each_once(core: Core) -> None:
    core.add(1, bundles=2)
    core.add(2, bundles=1)
    assert core.refs("a") == [(1, 0), (1, 1), (2, 0)]
    assert core.deliveries.next("a") is None


async def test_newest_first_is_by_segment_and_in_order_within_one() -> None:
    core = opened(newest_first=True)
    core.add(1, bundles=2)
    core.add(2, bundles=2)
    first = core.take("a")
    assert (first.ref.segment_seq, first.ref.bundle) == (2, 0)
    core.add(3, bundles=1)
    core.deliveries.defer(first, 0)
    assert core.refs("a") == [(2, 0), (3, 0), (2, 1), (1, 0), (1, 1)]


async def test_each_of_two_subscribers_gets_all_data(core: Core) -> None:
    core.subscribe("b")
    core.add(1, bundles=2)
    assert core.refs("a") == core.refs("b") == [(1, 0), (1, 1)]


async def test_consumers_of_one_subscriber_share_the_work(core: Core) -> None:
    core.add(1, bundles=4)
    taken: list[BundleRef] = []

    def work() -> None:
        while (claim := core.deliveries.next("a")) is not None:
            taken.append(claim.ref)
            core.deliveries.ack(claim)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [BundleRef(1, bundle) for bundle in range(4)]
    assert core.offsets.subscriber("a").hwm == 1


async def test_an_unknown_subscriber_gets_an_error(core: Core) -> None:
    with pytest.raises(UnknownSubscriber):
        core.deliveries.next("b")


async def test_a_subscriber_that_was_not_activated_gets_an_error(core: Core) -> None:
    core.offsets.register("b")
    with pytest.raises(Rejected, match="activate it first"):
        core.deliveries.next("b")
    core.offsets.deactivate("a")
    core.add(1)
    assert core.deliveries.next("a") is None


async def test_no_more_are_handed_out_than_may_be_in_flight() -> None:
    core = opened(max_in_flight=2)
    core.add(1, bundles=3)
    first, _ = core.take("a"), core.take("a")
    assert core.deliveries.next("a") is None
    core.deliveries.ack(first)
    assert core.take("a").ref == BundleRef(1, 2)


# ---- resolving


async def test_a_nacked_bundle_is_delivered_again_after_its_backoff_and_not_before(core: Core) -> None:
    core.add(1, bundles=1)
    assert core.deliveries.nack(core.take("a"), "busy")
    assert core.deliveries.next("a") is None
    await core.clock.advance(0.49)
    assert core.deliveries.next("a") is None
    await core.clock.advance(0.51)
    again = core.take("a")
    assert (again.ref, again.attempt, again.again) == (BundleRef(1, 0), 2, True)
    assert core.registry.value("quiver.subscriber.nacks_total", subscriber="a") == 1
    assert core.registry.value("quiver.subscriber.redelivered_total", subscriber="a") == 1


async def test_the_wait_doubles_up_to_its_maximum(core: Core) -> None:
    core.add(1, bundles=1)
    for longest in (1, 2, 4, 8, 16, 30, 30, 30):
        core.deliveries.nack(core.take("a"))
        await core.clock.advance(longest / 2 - 0.01)
        assert core.deliveries.next("a") is None
        await core.clock.advance(longest / 2 + 0.02)


async def test_a_requested_delay_is_a_minimum(core: Core) -> None:
    core.add(1, bundles=1)
    core.deliveries.nack(core.take("a"), retry_after_s=60)
    await core.clock.advance(59.9)
    assert core.deliveries.next("a") is None
    await core.clock.advance(0.2)
    assert core.take("a").ref == BundleRef(1, 0)


async def test_other_bundles_are_delivered_while_one_is_deferred(core: Core) -> None:
    core.add(1, bundles=2)
    core.deliveries.nack(core.take("a"))
    core.deliveries.ack(core.take("a"))
    assert core.offsets.subscriber("a").hwm == 0
    await core.clock.advance(1)
    core.deliveries.ack(core.take("a"))
    assert core.offsets.subscriber("a").hwm == 1


async def test_a_deferred_bundle_is_delivered_again_as_if_it_had_not_been_tried(core: Core) -> None:
    core.add(1, bundles=1)
    core.deliveries.defer(core.take("a"), 5)
    await core.clock.advance(4.9)
    assert core.deliveries.next("a") is None
    await core.clock.advance(0.2)
    assert core.take("a").attempt == 1
    assert core.offsets.subscriber("a").nacked == 0


async def test_a_rejected_bundle_is_not_delivered_again_and_is_counted(core: Core) -> None:
    core.add(1, bundles=1)
    assert core.deliveries.reject(core.take("a"), "malformed", items=10)
    assert core.refs("a") == []
    assert core.offsets.subscriber("a").rejected == 1
    assert core.offsets.finished() == [1]
    assert core.registry.value("quiver.loss.items", reason="rejected", signal="logs") == 10


async def test_the_last_of_a_limited_number_of_attempts_rejects() -> None:
    core = opened(max_attempts=2)
    core.add(1, bundles=1)
    core.deliveries.nack(core.take("a"))
    await core.clock.advance(1)
    core.deliveries.nack(core.take("a"))
    assert core.offsets.subscriber("a").rejected == 1
    assert core.registry.value("quiver.loss.bundles", reason="attempts", signal="logs") == 1


async def test_an_ack_of_a_segment_voids_the_claims_on_it(core: Core) -> None:
    core.add(1, bundles=2)
    claim = core.take("a")
    assert core.deliveries.ack_segment("a", 1)
    assert not core.deliveries.ack(claim)
    assert core.deliveries.claimed_segments() == set()
    assert core.offsets.subscriber("a").acked == 2


async def test_an_ack_through_a_number_covers_every_segment_up_to_it(core: Core) -> None:
    for seq in (1, 2, 3):
        core.add(seq)
    core.deliveries.ack_segment("a", 1)
    assert core.deliveries.ack_through("a", 2) == 1
    assert core.offsets.subscriber("a").hwm == 2


async def test_a_specific_bundle_can_be_claimed(core: Core) -> None:
    core.add(1, bundles=3)
    claim = core.deliveries.claim("a", BundleRef(1, 1))
    with pytest.raises(StaleClaim, match="claimed"):
        core.deliveries.claim("a", BundleRef(1, 1))
    assert core.refs("a") == [(1, 0), (1, 2)]
    assert core.deliveries.ack(claim)
    with pytest.raises(StaleClaim, match="not pending"):
        core.deliveries.claim("a", BundleRef(1, 1))
    with pytest.raises(StaleClaim, match="not pending"):
        core.deliveries.claim("a", BundleRef(9, 0))


async def test_a_deferred_bundle_can_be_claimed_and_is_not_handed_out_twice(core: Core) -> None:
    core.add(1, bundles=1)
    core.deliveries.nack(core.take("a"))
    claim = core.deliveries.claim("a", BundleRef(1, 0))
    assert claim.attempt == 2
    await core.clock.advance(1)
    assert core.deliveries.next("a") is None
    core.deliveries.nack(claim)
    await core.clock.advance(0.9)
    assert core.deliveries.next("a") is None, "the due time of the first nack must no longer count"


# ---- leases


async def test_a_claim_that_expires_goes_to_the_next_consumer(core: Core) -> None:
    core.add(1, bundles=1)
    old = core.take("a")
    await core.clock.advance(300)
    new = core.take("a")
    assert (new.ref, new.attempt) == (old.ref, 2)
    assert not core.deliveries.ack(old)
    assert core.offsets.state.outstanding(1) == 1
    assert core.deliveries.ack(new)
    assert core.registry.value("quiver.subscriber.stale_claims_total", subscriber="a") == 1


async def test_a_stale_claim_resolves_nothing_even_before_its_expiry_is_processed(core: Core) -> None:
    core.add(1, bundles=1)
    claim = core.take("a")
    await core.clock.advance(300)
    assert not core.deliveries.ack(claim)
    assert not core.deliveries.nack(claim)
    assert not core.deliveries.defer(claim)
    assert not core.deliveries.reject(claim)
    assert core.take("a").ref == claim.ref


async def test_a_claim_is_resolved_once(core: Core) -> None:
    core.add(1, bundles=1)
    claim = core.take("a")
    assert core.deliveries.ack(claim)
    assert not core.deliveries.nack(claim)
    assert core.refs("a") == []


async def test_claims_do_not_survive_a_restart_and_their_bundles_are_delivered_again(core: Core) -> None:
    core.add(1, bundles=2)
    core.deliveries.ack(core.take("a"))
    core.take("a")
    core.offsets.sync()
    assert core.crashed().refs("a") == [(1, 1)]


async def test_an_unreadable_bundle_is_returned_and_its_segment_is_quarantined_in_the_end(
    core: Core,
) -> None:
    core.add(1, bundles=1)
    verdicts = []
    for _ in range(3):
        verdicts.append(core.deliveries.read_failed(core.take("a")))
        assert core.deliveries.claimed_segments() == set()
        await core.clock.advance(4)
    assert verdicts == [False, False, True]


# ---- drops


async def test_a_segment_with_a_live_claim_is_not_dropped(core: Core) -> None:
    core.add(1, bundles=2)
    claim = core.take("a")
    assert core.deliveries.drop(1, Outcome.DROPPED, reason="size") is None
    core.deliveries.defer(claim, 0)
    dropped = core.deliveries.drop(1, Outcome.DROPPED, reason="size")
    assert dropped is not None
    assert dropped.bundles == 2
    assert core.refs("a") == []
    assert core.registry.value("quiver.segment.dropped_total") == 1
    assert core.registry.value("quiver.subscriber.dropped_segments_total", subscriber="a") == 1
    assert core.registry.value("quiver.loss.items", reason="size", signal="logs") == 20


async def test_an_expired_lease_does_not_delay_a_drop(core: Core) -> None:
    core.add(1)
    core.take("a")
    await core.clock.advance(300)
    assert core.deliveries.drop(1, Outcome.DROPPED, reason="size") is not None


async def test_a_forced_drop_voids_a_claim(core: Core) -> None:
    core.add(1)
    claim = core.take("a")
    assert core.deliveries.drop(1, Outcome.DROPPED, reason="corrupt", force=True) is not None
    assert not core.deliveries.ack(claim)


async def test_a_deferred_bundle_of_a_dropped_segment_is_not_handed_out(core: Core) -> None:
    core.add(1, bundles=1)
    core.add(2, bundles=1)
    core.deliveries.nack(core.take("a"))
    core.deliveries.drop(1, Outcome.DROPPED, reason="size")
    await core.clock.advance(60)
    assert core.refs("a") == [(2, 0)]


def test_concurrent_threads_never_get_a_bundle_of_a_dropped_segment() -> None:
    core = opened()
    for seq in range(1, 201):
        core.add(seq, bundles=1)
    dropped: set[int] = set()
    taken: list[int] = []

    def ask() -> None:
        while (claim := core.deliveries.next("a")) is not None:
            with core.offsets.lock:
                assert claim.ref.segment_seq not in dropped
            taken.append(claim.ref.segment_seq)
            core.deliveries.ack(claim)

    def drop() -> None:
        for seq in range(200, 0, -2):
            with core.offsets.lock:
                if core.deliveries.drop(seq, Outcome.DROPPED, reason="size") is not None:
                    dropped.add(seq)

    threads = [threading.Thread(target=work) for work in (ask, ask, drop)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert core.offsets.subscriber("a").hwm == 200
    assert core.offsets.subscriber("a").acked + core.offsets.subscriber("a").dropped == 200
    assert len(taken) == core.offsets.subscriber("a").acked


async def test_unregistering_voids_claims(core: Core) -> None:
    core.add(1)
    claim = core.take("a")
    assert core.deliveries.unregister("a").pending_segments == 1
    assert not core.deliveries.ack(claim)
    assert core.deliveries.claimed_segments() == set()


# ---- waiting


def waiting_thread(deliveries: Deliveries, found: list[object]) -> threading.Thread:
    thread = threading.Thread(target=lambda: found.append(deliveries.take("a", 30)))
    thread.start()
    return thread


def test_a_waiting_thread_gets_the_next_bundle() -> None:
    core = opened()
    found: list[object] = []
    thread = waiting_thread(core.deliveries, found)
    core.add(1, bundles=1)
    thread.join(10)
    assert [claim.ref for claim in found] == [BundleRef(1, 0)]  # type: ignore[attr-defined]


def test_a_thread_that_waits_for_in_flight_capacity_gets_it() -> None:
    core = opened(max_in_flight=1)
    core.add(1, bundles=2)
    claim = core.take("a")
    found: list[object] = []
    thread = waiting_thread(core.deliveries, found)
    core.deliveries.ack(claim)
    thread.join(10)
    assert [claim.ref for claim in found] == [BundleRef(1, 1)]  # type: ignore[attr-defined]


def test_closing_wakes_every_waiter() -> None:
    core = opened()
    found: list[object] = []
    thread = waiting_thread(core.deliveries, found)
    core.deliveries.close()
    thread.join(10)
    assert found == [None]


def test_no_wake_up_is_lost_between_many_threads() -> None:
    core = opened()
    taken: list[BundleRef] = []

    def work() -> None:
        while (claim := core.deliveries.take("a", 20)) is not None:
            taken.append(claim.ref)
            core.deliveries.ack(claim)
            if len(taken) == 200:
                core.deliveries.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for seq in range(1, 201):
        core.add(seq, bundles=1)
    for thread in threads:
        thread.join(20)
    assert len(taken) == len(set(taken)) == 200


async def test_a_task_of_an_inactive_subscriber_waits_quietly(core: Core) -> None:
    core.add(1, bundles=1)
    core.deliveries.nack(core.take("a"))
    core.offsets.deactivate("a")
    task = asyncio.create_task(core.deliveries.take_async("a", 60))
    await core.clock.advance(59)
    assert core.clock.sleeping == 1
    await core.clock.advance(2)
    assert await task is None


def test_an_elapsed_timeout_does_not_wait() -> None:
    assert opened().deliveries.take("a", 0) is None


async def test_a_waiting_task_gets_a_bundle_from_another_thread(core: Core) -> None:
    task = asyncio.create_task(core.deliveries.take_async("a"))
    await asyncio.sleep(0)
    thread = threading.Thread(target=lambda: core.add(1, bundles=1))
    thread.start()
    claim = await task
    thread.join()
    assert claim is not None


async def test_a_task_is_woken_when_a_deferred_bundle_is_due(core: Core) -> None:
    core.add(1, bundles=1)
    core.deliveries.nack(core.take("a"))
    task = asyncio.create_task(core.deliveries.take_async("a", 10))
    await core.clock.advance(1.1)
    claim = await task
    assert claim is not None
    assert claim.attempt == 2


async def test_a_waiting_task_returns_at_its_timeout(core: Core) -> None:
    task = asyncio.create_task(core.deliveries.take_async("a", 5))
    await core.clock.advance(5.1)
    assert await task is None


async def test_a_cancelled_wait_leaves_no_trace(core: Core) -> None:
    task = asyncio.create_task(core.deliveries.take_async("a"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not core.deliveries._notifier._listening
    core.add(1, bundles=1)
    assert core.refs("a") == [(1, 0)]


# ---- bundles


def bundle_of(core: Core) -> Bundle:
    return Bundle(core.take("a"), BATCH, items=1, resolver=core.deliveries)


async def test_a_bundle_describes_itself(core: Core) -> None:
    core.add(1)
    bundle = bundle_of(core)
    assert (bundle.ref, bundle.signal, bundle.slot, bundle.items, bundle.attempt, bundle.subscriber) == (
        BundleRef(1, 0),
        "logs",
        51,
        1,
        1,
        "a",
    )
    assert repr(bundle) == "<Bundle 1/0 logs items=1 attempt=1>"
    assert bundle.ack()
    assert bundle.is_resolved


async def test_the_first_resolution_counts(core: Core) -> None:
    core.add(1, bundles=1)
    bundle = bundle_of(core)
    assert bundle.ack()
    assert not bundle.nack("too late")
    assert core.offsets.subscriber("a").hwm == 1


async def test_leaving_a_bundle_unresolved_defers_it(core: Core) -> None:
    core.add(1, bundles=1)
    with pytest.raises(ZeroDivisionError), bundle_of(core):
        raise ZeroDivisionError
    assert core.deliveries.subscriber("a").deferred == 1
    await core.clock.advance(1)
    assert core.take("a").attempt == 1


async def test_a_forgotten_bundle_is_deferred(core: Core) -> None:
    core.add(1, bundles=1)
    bundle = bundle_of(core)
    del bundle
    gc.collect()
    core.deliveries.expire()
    assert core.deliveries.subscriber("a").in_flight == 0
    await core.clock.advance(1)
    assert core.take("a").ref == BundleRef(1, 0)


async def test_an_invalid_delay_is_refused_and_the_bundle_stays_claimed(core: Core) -> None:
    core.add(1, bundles=1)
    bundle = bundle_of(core)
    with pytest.raises(ConfigError):
        bundle.nack(retry_after="soon")
    assert not bundle.is_resolved
    assert bundle.nack(retry_after="2s")


async def test_gauges_follow_the_state(core: Core) -> None:
    core.add(1, bundles=2)
    core.add(2, bundles=1)
    core.deliveries.ack(core.take("a"))
    core.take("a")
    await core.clock.advance(2)
    core.deliveries.measure()
    value = core.registry.value
    assert value("quiver.subscriber.hwm", subscriber="a") == 0
    assert value("quiver.subscriber.lag_segments", subscriber="a") == 2
    assert value("quiver.subscriber.lag_seconds", subscriber="a") == 2
    assert value("quiver.subscriber.gap_segments", subscriber="a") == 1
    assert value("quiver.subscriber.in_flight", subscriber="a") == 1


def test_ten_thousand_pending_segments_cost_one_entry_each(core: Core) -> None:
    for seq in range(1, 10_001):
        core.add(seq, bundles=1000)
    table = core.deliveries._tables.setdefault("a", LeaseTable())
    for _ in range(3000):
        core.deliveries.ack(core.take("a"))
    assert core.offsets.subscriber("a").hwm == 3
    held = (table._held, table._waiting, table._ready, table._deferred, table._positions, table._visited)
    assert all(len(part) <= 1 for part in held)
    assert not core.offsets.state.entry("a").progress.gaps


async def test_an_hour_of_outage_loses_nothing_and_keeps_memory_flat(core: Core) -> None:
    core = opened(max_in_flight=4)
    for seq in range(1, 61):
        core.add(seq, bundles=5)
    end_s = core.clock.monotonic() + 3600
    tries = 0
    while core.clock.monotonic() < end_s:
        while (claim := core.deliveries.next("a")) is not None:
            core.deliveries.nack(claim, "down")
            tries += 1
        await core.clock.advance(30)
    assert tries > 300
    assert core.deliveries.subscriber("a").deferred == 300
    await core.clock.advance(30)
    taken = []
    while (claim := core.deliveries.next("a")) is not None:
        taken.append(claim.ref)
        core.deliveries.ack(claim)
    assert len(taken) == len(set(taken)) == 300
    assert core.offsets.subscriber("a").hwm == 60
    table = core.deliveries._tables["a"]
    assert not table._waiting
    assert not table._ready
    assert not table._deferred
    assert not table._held
