"""Deliberate bugs in write coordination; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["COORDINATOR_MUTANTS"]

FLUSHES = "tests/unit/coordinator/test_flushes.py"
FAILURES = "tests/unit/coordinator/test_failures.py"
PRESSURE = "tests/unit/coordinator/test_pressure.py"
READERS = "tests/unit/coordinator/test_readers.py"
SLATE_CRASH = (
    "tests/crash/timeseries/test_slate_crash.py"
    "::test_a_process_that_dies_at_any_operation_loses_and_doubles_nothing[held]"
)


COORDINATOR_MUTANTS = (
    Mutant(
        name="flushed is marked before the snapshot is shown",
        where="coordinator:WriteCoordinator._flushed",
        old="    self._show(snapshot, upto, frozen.delta)\n    self._raise(Durability.FLUSHED, upto)\n",
        new="    self._raise(Durability.FLUSHED, upto)\n    self._show(snapshot, upto, frozen.delta)\n",
        test=f"{FLUSHES}::test_readers_find_the_new_snapshot_before_the_mark_moves_and_the_event_comes",
    ),
    Mutant(
        name="durable is marked before the storage is synced",
        where="coordinator:FlushQueue._sync",
        old="        await self._flusher.sync()\n",
        new="        self._synced(upto)\n        await self._flusher.sync()\n",
        test=f"{FAILURES}::test_a_failed_flush_fails_every_waiter_above_the_mark",
    ),
    Mutant(
        name="a flush is taken to be durable",
        where="coordinator:WriteCoordinator._flushed",
        old="    self._raise(Durability.FLUSHED, upto)\n",
        new="    self._raise(Durability.FLUSHED, upto)\n    self._raise(Durability.DURABLE, upto)\n",
        test=f"{FLUSHES}::test_a_flush_alone_is_not_durable",
    ),
    Mutant(
        name="a sync covers what is flushed while it runs",
        where="coordinator:FlushQueue._sync",
        old="    self._synced(upto)\n",
        new="    self._synced(self._flushed_to)\n",
        test=f"{FLUSHES}::test_a_sync_covers_only_what_was_flushed_before_it_began",
    ),
    Mutant(
        name="a sync that began with its write is not waited for",
        where="coordinator:SlateStorage.flush",
        old="        await asyncio.shield(self._persisting[1])\n",
        new="        pass\n",
        test=SLATE_CRASH,
    ),
    Mutant(
        name="queued writes have no size",
        where="coordinator:Channel._enter",
        old="        self._add_size(handle.size)\n    self._queue",
        new="    self._queue",
        test=f"{PRESSURE}::test_queued_writes_count_by_their_size",
    ),
    Mutant(
        name="a batch is stored behind one that was refused",
        where="coordinator:FedSource.taking",
        old="        self._refused = position.sequence\n",
        new="",
        test="tests/unit/coordinator/test_position.py::test_nothing_is_taken_after_a_refused_batch",
    ),
    Mutant(
        name="another queue is taken for the one that fed the database",
        where="services:Feed._start_after",
        old='    if stored is None or stored.source in ("", self.queue_name):\n',
        new="    if stored is None or stored.sequence >= 0:\n",
        test="tests/unit/services/test_feed.py::test_another_queue_is_refused_before_any_batch_is_dequeued",
    ),
    Mutant(
        name="a failed flush is tried again",
        where="coordinator:FlushQueue._flush",
        old="        snapshot = await self._flusher.flush(frozen.delta)\n",
        new=(
            "        try:\n"
            "            snapshot = await self._flusher.flush(frozen.delta)\n"
            "        except Exception:\n"
            "            snapshot = await self._flusher.flush(frozen.delta)\n"
        ),
        test=f"{FAILURES}::test_a_failed_flush_is_never_tried_again",
    ),
    Mutant(
        name="a flush without a ticket",
        where="coordinator:WriteCoordinator.flush",
        old="ticket = self._queues.ticket() if epoch is None else {}",
        new="ticket: dict[str, int] = {}",
        test=f"{FLUSHES}::test_a_flush_covers_every_write_that_returned_before_it",
    ),
    Mutant(
        name="a frozen delta continues to take writes",
        where="coordinator:WriteCoordinator._try_freeze",
        old="    self._delta = self._new_delta(ended.freeze())\n",
        new="    ended.freeze()\n",
        test=f"{FLUSHES}::test_a_write_during_a_flush_lands_in_the_next_delta",
    ),
    Mutant(
        name="close drops what is queued",
        where="coordinator:WriteCoordinator.close",
        old="        self._queues.close(_shut_down)\n",
        new="        self._queues.drop(_shut_down)\n",
        test=f"{FLUSHES}::test_close_applies_flushes_and_syncs_what_is_queued",
    ),
    Mutant(
        name="a writer slips in before those who wait",
        where="coordinator:Channel._no_room",
        old="full = len(self._queue) + self._granted >= self.capacity or self._waiters",
        new="full = len(self._queue) >= self.capacity",
        test=f"{PRESSURE}::test_no_write_overtakes_waiting_writers",
    ),
    Mutant(
        name="a subscriber that lags is not told",
        where="coordinator:Subscription.offer",
        old="        self._missed += len(self._ring)\n",
        new="",
        test=f"{READERS}::test_a_subscriber_that_lags_gets_an_error_and_then_the_newest_event",
    ),
)
