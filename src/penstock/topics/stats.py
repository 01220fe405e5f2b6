"""Statistics of an engine, for metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.topics.config import Durability
from penstock.topics.log.wal import WalShard
from penstock.topics.topic.topic import Topic

SYNC_BUCKETS_US: Final = (50, 100, 250, 500, 1000, 5000, 10_000, 50_000, 100_000)
"""Upper bounds of the sync latency histogram. One more bucket is above all of them."""


class SyncTimes:
    """Durations of syncs, reported by the commit threads without a lock. A lost count is acceptable."""

    __slots__ = ("counts", "total_us")

    def __init__(self) -> None:
        self.counts = [0] * (len(SYNC_BUCKETS_US) + 1)
        self.total_us = 0.0

    def observe(self, seconds: float) -> None:
        micros = seconds * 1e6
        self.counts[bisect_left(SYNC_BUCKETS_US, micros)] += 1
        self.total_us += micros

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStats:
    """The statistics of one topic."""

    topic: str
    head_seq: int
    earliest_seq: int
    records_live: int
    bytes_live: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WalStats:
    """The statistics of all shards of the log."""

    frames: int = 0
    batches: int = 0
    fsyncs: int = 0
    bytes_written: int = 0
    rotations: int = 0
    queue_depth: int = 0
    queue_depth_peak: int = 0
    submit_full: int = 0
    read_only: bool = False
    fsync_counts: Sequence[int] = ()
    """By bucket of `SYNC_BUCKETS_US`, not cumulative."""
    fsync_micros_total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The statistics of an engine at one moment."""

    ready: bool
    topics: int
    by_class: dict[Durability, int]
    queue_topics: int
    queue_leases_in_flight: int = 0
    records_live: int
    bytes_live: int
    wal: WalStats
    per_topic: list[TopicStats] = field(default_factory=list)


def collect_stats(
    topics: Iterable[Topic], shards: Sequence[WalShard], times: SyncTimes, *, ready: bool
) -> EngineStats:
    """Collect the statistics of all topics and shards."""
    by_class = dict.fromkeys(Durability, 0)
    per_topic: list[TopicStats] = []
    queues = leased = 0
    for topic in topics:
        if topic.queue is not None:
            queues += 1
            leased += topic.queue.leases.in_flight
        if topic.config.durability is not None:
            by_class[topic.config.durability] += 1
        per_topic.append(
            TopicStats(
                topic=topic.name,
                head_seq=topic.log.index.head_seq,
                earliest_seq=topic.log.index.earliest_seq,
                records_live=topic.log.index.live,
                bytes_live=topic.log.index.live_bytes,
            )
        )
    return EngineStats(
        ready=ready,
        topics=len(per_topic),
        by_class=by_class,
        queue_topics=queues,
        queue_leases_in_flight=leased,
        records_live=sum(topic.records_live for topic in per_topic),
        bytes_live=sum(topic.bytes_live for topic in per_topic),
        wal=_wal_stats(shards, times),
        per_topic=per_topic,
    )


def _wal_stats(shards: Sequence[WalShard], times: SyncTimes) -> WalStats:
    commits = [shard.stats() for shard in shards]
    return WalStats(
        frames=sum(commit.frames for commit in commits),
        batches=sum(commit.batches for commit in commits),
        fsyncs=sum(commit.syncs for commit in commits),
        bytes_written=sum(commit.bytes for commit in commits),
        rotations=sum(commit.rotations for commit in commits),
        queue_depth=sum(commit.queue_depth for commit in commits),
        queue_depth_peak=max((commit.queue_peak for commit in commits), default=0),
        submit_full=sum(shard.submit_full for shard in shards),
        read_only=any(shard.is_read_only for shard in shards),
        fsync_counts=tuple(times.counts),
        fsync_micros_total=times.total_us,
    )
