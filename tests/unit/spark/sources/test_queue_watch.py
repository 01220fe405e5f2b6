from __future__ import annotations

import time

import pytest
from tests.unit.spark.conftest import Queue

from penstock.spark.sources.queues import Backlog, QueueWatch


def test_a_queue_that_does_not_exist_yet_has_no_backlog(queue: Queue) -> None:
    watch = QueueWatch.open(queue.options())
    assert watch.look({}) == Backlog(batches=0, oldest_ms=None, next={0: 0})
    watch.close()


def test_undelivered_batches_are_counted_with_the_age_of_the_next(queue: Queue) -> None:
    before = time.time_ns() // 1_000_000
    queue.produce(3)
    entries = queue.entries()
    watch = QueueWatch.open(queue.options())
    for done in range(3):
        backlog = watch.look({0: done})
        assert (backlog.batches, backlog.next) == (3 - done, {0: 3})
        assert backlog.oldest_ms == entries[done].metadata[0].ingestion_time_ms >= before
    assert watch.look({0: 3}) == Backlog(batches=0, oldest_ms=None, next={0: 3})
    assert watch.look({0: 9}).batches == 0
    watch.close()


def test_a_watch_follows_the_queue_without_changing_it(queue: Queue) -> None:
    queue.produce(2)
    watch = QueueWatch.open(queue.options())
    footer = queue.entries().footer
    assert watch.look({0: 1}).batches == 1
    assert queue.entries().footer == footer
    queue.produce(2)
    assert watch.look({0: 1}).batches == 3
    queue.acknowledge_through(2)
    assert watch.look({0: 1}) == Backlog(
        batches=1, oldest_ms=queue.entries()[0].metadata[0].ingestion_time_ms, next={0: 4}
    )
    watch.close()


def test_all_shards_are_counted_together(queue: Queue) -> None:
    queue.produce_sharded(4, shards=2)
    watch = QueueWatch.open(queue.options())
    backlog = watch.look({1: 2})
    assert (backlog.batches, backlog.next) == (2, {0: 2, 1: 2})
    assert backlog.oldest_ms is not None
    watch.close()


def test_shards_that_appear_later_are_counted_too(queue: Queue) -> None:
    watch = QueueWatch.open(queue.options())
    assert watch.look({}).next == {0: 0}
    queue.produce_sharded(3, shards=2)
    backlog = watch.look({0: 0})
    assert (backlog.batches, backlog.next) == (3, {0: 2, 1: 1})
    watch.close()


def test_a_repeated_look_reads_nothing_while_nothing_changes(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.produce(1)
    watch = QueueWatch.open(queue.options())
    first = watch.look({})
    monkeypatch.setattr("penstock.buffer.manifest.index", None)  # the decoder of a manifest
    assert watch.look({}) == first
    watch.close()
