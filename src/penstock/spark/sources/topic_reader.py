"""What tasks do with ranges of topics: fetch pages a few ahead, decode them, and hand Arrow to Spark."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final
from urllib.parse import quote

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import ConfigError
from penstock.ids import SYSTEM_RNG
from penstock.retry import RetryPolicy
from penstock.spark.sources.buffer_reader import freeze_modules
from penstock.spark.sources.columns import regroup
from penstock.spark.sources.offsets import Bounds
from penstock.spark.sources.prefetch import load_ahead
from penstock.spark.sources.topic_columns import build_gap, build_records, empty_batch
from penstock.spark.sources.topic_offsets import (
    TopicGap,
    TopicRange,
    check_asked,
    cut,
    ranges_between,
    resolve,
)
from penstock.spark.sources.topic_options import TopicAddress, TopicOptions
from penstock.topics import (
    BATCH_BYTES_MAX,
    DIFF_LIMIT_MAX,
    Call,
    Connection,
    Record,
    Repeat,
    Tombstone,
    UnexpectedAnswer,
    diff_body,
    read_page,
    read_topic_state,
)

_log = logging.getLogger(__name__)

PAGE_SEQS: Final = DIFF_LIMIT_MAX
"""Sequences of one request: never more records than a page may have."""


class RangePartition(InputPartition):
    """The ranges of one task."""

    def __init__(self, ranges: Sequence[TopicRange]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)


class TopicReader(DataSourceReader):
    """A batch query over what the topics hold now, or over the ranges that were asked for."""

    def __init__(self, options: TopicOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        options = self._options
        bounds = bounds_of_topics(options.address, options.topics)
        start = resolve(options.starting, bounds, "startingOffsets")
        end = resolve(options.ending, bounds, "endingOffsets")
        check_asked(start, bounds, "startingOffsets")
        check_asked(end, bounds, "endingOffsets")
        for topic, place in start.items():
            if place > end[topic]:
                raise ConfigError(
                    f"startingOffsets {place} lies behind endingOffsets {end[topic]} in {topic}"
                )
        # For an empty list Spark would make up a partition of its own.
        return list(
            partition_ranges(ranges_between(start, end, bounds), options.tasks) or [RangePartition(())]
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangePartition)
        return read_ranges(self._options, partition.ranges)


def partition_ranges(ranges: Sequence[TopicRange], tasks: int) -> list[RangePartition]:
    """At most `tasks` runs of neighbours of about the same length: the same for the same ranges."""
    pages = cut(ranges, PAGE_SEQS)
    count = min(tasks, len(pages))
    edges = [len(pages) * number // count for number in range(count + 1)] if count else []
    return [RangePartition(pages[a:b]) for a, b in itertools.pairwise(edges)]


def read_ranges(options: TopicOptions, ranges: Sequence[TopicRange]) -> Iterator[pa.RecordBatch]:
    """Every record of the ranges, in order, in record batches of the declared schema.

    Raises `TopicGap` where records are gone, unless `onGap` says otherwise, and what the client raises.
    """
    yield from regroup(load_ahead(partial(_load, options, _Holes()), cut(ranges, PAGE_SEQS)))
    freeze_modules()


class _Holes:
    """What is known to hold no record: a long deleted stretch is not asked for page by page.

    Without this each of its pages would be answered with the records behind it. Sequences up to the head that
    hold no record never will, so what one request tells stays true for the next ones.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}

    def cover(self, wanted: TopicRange) -> bool:
        first, last = self._known.get(wanted.topic, (0, -1))
        return first <= wanted.first and wanted.last <= last

    def learn(self, wanted: TopicRange, page: RecordPage) -> None:
        """Take note of what a page of `wanted` tells of the sequences behind it."""
        if page.tombstone is not None:
            return  # what is gone is told piece by piece
        behind = next((record.seq for record in page.records if record.seq > wanted.last), None)
        last = page.next_from_seq if behind is None else behind - 1
        if last > wanted.last:
            self._known[wanted.topic] = (wanted.last + 1, last)


def _load(options: TopicOptions, holes: _Holes, wanted: TopicRange) -> pa.RecordBatch:
    """All of a range, in as many requests as its bytes need."""
    if holes.cover(wanted):
        return empty_batch(options.columns)
    batches: list[pa.RecordBatch] = []
    reached = wanted.first - 1
    while reached < wanted.last:
        limit = 1 if wanted.gone else min(wanted.last - reached, DIFF_LIMIT_MAX)
        page = fetch_page(options.address, wanted.topic, reached, limit, with_meta="meta" in options.columns)
        batches += _gaps(options, wanted, reached, page)
        holes.learn(wanted, page)
        records = page.records
        while records and records[-1].seq > wanted.last:  # deleted ones made room for those behind
            records.pop()
        if records:
            batches.append(build_records(wanted.topic, records, options.columns))
        if page.next_from_seq <= reached:
            raise TopicGap(f"{wanted.topic} ends at {page.head_seq}, before {wanted.last}: it was set back")
        reached = page.next_from_seq
    return pa.concat_batches(batches) if batches else empty_batch(options.columns)


def _gaps(options: TopicOptions, wanted: TopicRange, reached: int, page: RecordPage) -> list[pa.RecordBatch]:
    """The row for what is gone from the rest of the range, if there is a row to make of it."""
    gone = page.tombstone
    if gone is None:
        return []
    if gone.reason == "recreated":
        raise TopicGap(
            f"{wanted.topic} ends at {page.head_seq}, before {wanted.last}: it was removed and made anew, or "
            "set back. Start with a new checkpoint"
        )
    first, last = max(gone.gap_from, reached + 1), min(gone.gap_to, wanted.last)
    text = f"records {first} to {last} of {wanted.topic} are gone ({gone.reason})"
    if options.on_gap == "fail":
        raise TopicGap(
            f"{text}. Keep them longer, or read sooner; to go on, set onGap=record and get a row that tells "
            "what is missing, or onGap=skip"
        )
    if options.on_gap == "skip":
        _log.warning("%s", text)
        return []
    return [build_gap(wanted.topic, first, last, gone.reason, options.columns)]


_TIMEOUT_S: Final = 30.0
_POLICY: Final = RetryPolicy(floor_s=0.05, ceiling_s=2.0, deadline_s=30.0)
_CONNECTIONS_MAX: Final = 16
_connections: dict[tuple[int, TopicAddress], Connection] = {}


class RecordPage(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a diff, decoded in one go; `data` and `meta` of its records are slices of the body."""

    records: list[Record]
    next_from_seq: int
    head_seq: int
    tombstone: Tombstone | None


_PAGE: Final = msgspec.json.Decoder(RecordPage)


def topic_connection(address: TopicAddress) -> Connection:
    """This process's connections to a server."""
    key = (os.getpid(), address)
    connection = _connections.get(key)
    if connection is None:
        connection = _connections[key] = Connection(
            address.url,
            key=address.key,
            timeout_s=_TIMEOUT_S,
            policy=_POLICY,
            connections_max=_CONNECTIONS_MAX,
            clock=SYSTEM_CLOCK,
            rng=SYSTEM_RNG,
            transport=None,
        )
    return connection


def fetch_page(
    address: TopicAddress, topic: str, from_seq: int, limit: int = DIFF_LIMIT_MAX, *, with_meta: bool = True
) -> RecordPage:
    """Records behind `from_seq`. Raises what the client raises: `TopicNotFound`, `Unreachable`, …"""
    body = diff_body(
        from_seq,
        limit=limit,
        node=(),
        include_tags=True,
        include_meta=with_meta,
        wait_ms=0,
        max_batch_bytes=BATCH_BYTES_MAX,
    )
    call = Call(method="POST", path=f"{_path(topic)}/diff", repeat=Repeat.ALWAYS, topic=topic, body=body)
    content = loop_thread().run(topic_connection(address).send(call)).content
    try:
        return _read_page(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnexpectedAnswer(
            f"the answer to a diff of {topic} is not one of a topics server: {error}"
        ) from error


def _read_page(content: bytes) -> RecordPage:
    """A page; a record nested deeper than a decoder goes is in it as its text."""
    try:
        return _PAGE.decode(content)
    except RecursionError:
        found = read_page(content)
        return RecordPage(
            records=found.records(),
            next_from_seq=found.next_from_seq,
            head_seq=found.head_seq,
            tombstone=found.tombstone,
        )


def bounds_of_topics(address: TopicAddress, topics: Sequence[str]) -> dict[str, Bounds]:
    """What each topic holds now."""
    return {topic: _bounds(address, topic) for topic in topics}


def _bounds(address: TopicAddress, topic: str) -> Bounds:
    query = {"touch": "false"}
    call = Call(method="GET", path=_path(topic), repeat=Repeat.ALWAYS, topic=topic, query=query)
    state = read_topic_state(loop_thread().run(topic_connection(address).send(call)).content)
    return Bounds(first=state.earliest_seq, following=state.head_seq + 1)


def record_time(address: TopicAddress, topic: str, seq: int) -> int | None:
    """When record `seq` was written; None if it is not there, or no longer."""
    if seq < 1:
        return None
    page = fetch_page(address, topic, seq - 1, limit=1, with_meta=False)
    found = page.records[0] if page.records else None
    return found.ts_ms if found is not None and found.seq == seq else None


def _path(topic: str) -> str:
    return f"/v0/topics/{quote(topic, safe='')}"
