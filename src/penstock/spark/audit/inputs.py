"""The inputs of an audit, read only from durable state: without Spark or Java, and without changes.

The pipeline may be running. For each micro-batch it writes, in this order: the plan in the checkpoint, the
tables, the line in the ledger, the commit in the checkpoint. Then the queue drops the batches. The audit
reads them in the opposite order, so everything recorded by a later step must also be in the earlier steps,
which are read after it. Additional entries in an earlier step are work in progress. The end of the queue is
read last.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from typing import Final

from penstock.blocking import loop_thread
from penstock.buffer import BATCH_VERSION, FOOTER_BYTES, EntryIndex, storage_error
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import Corrupt, NotFound, PenstockError, Unsupported
from penstock.ids import SYSTEM_RNG
from penstock.objects import ByteRange, ObjectStore
from penstock.retry import RetryPolicy, retry
from penstock.spark.audit.ledger_reader import Facts, ShardFacts, TableFacts
from penstock.spark.pipeline.checkpoint import Checkpoint
from penstock.spark.pipeline.decode import SOURCE_COLUMNS
from penstock.spark.pipeline.ledger import Ledger
from penstock.spark.pipeline.outputs import Output, source_options
from penstock.spark.pipeline.sink_spec import SinkSpec
from penstock.spark.pipeline.spec import PipelineSpec
from penstock.spark.sources.buffer_options import BufferOptions
from penstock.spark.sources.offsets import Offset, QueueOffsets
from penstock.spark.sources.queues import ReadQueue, bounds_of
from penstock.spark.tables import open_table
from penstock.spark.tables.spec import TableSpec

Tell = Callable[[str], None]
"""A callback that receives progress messages."""

_ORIGIN: Final = "origin.json"
_AT_ONCE: Final = 32
_FOOTER: Final = struct.Struct("<BIH")
_POLICY: Final = RetryPolicy(deadline_s=30.0)


class Evidence:
    """A reader of one pipeline's durable state, which may read it several times.

    It raises `StorageError`, `Corrupt` or `Unsupported`.
    """

    def __init__(self, spec: PipelineSpec, sinks: Mapping[str, SinkSpec], tell: Tell) -> None:
        self._spec = spec
        self._sinks = sinks
        self._tell = tell
        self._counts: dict[str, int] = {}
        """The number of records by location, which is cached because a batch never changes."""
        self.checkpoint = Checkpoint(spec.checkpoint_path)

    def read(self, app: str | None) -> Facts:
        """Read everything in the safe order. `app` is the pipeline's query, or None if it never ran."""
        spec = self._spec
        options = BufferOptions.parse(source_options(spec, SOURCE_COLUMNS))
        ledger = Ledger(spec.ledger_config)
        queue = ReadQueue.open(options, must_exist=False)
        reachable = self.checkpoint.is_local and self.checkpoint.query_id is not None
        try:
            indexes = queue.look()
            origin = _kept_origin(ledger) if app is not None else None
            if origin is None:
                origin = QueueOffsets(options.manifest_path).resolve(
                    options.starting, bounds_of(indexes), "source.buffer.starting"
                )
            shards = {
                shard: self._count(queue, shard, index, origin.get(shard, 0))
                for shard, index in sorted(indexes.items())
            }
            done = frozenset(self.checkpoint.done()) if reachable else None
            self._tell("reading the ledger")
            lines = tuple(ledger.lines(app)) if app is not None else ()
            sinks = {name: self._table(name, sink, app) for name, sink in self._sinks.items()}
            letters = spec.letters
            return Facts(
                origin=origin,
                queue=shards,
                done=done,
                lines=lines,
                sinks=sinks,
                letters=None if letters is None else self._table("dead letters", letters, app),
                planned=self._planned() if reachable else None,
                ends={shard: held.following for shard, held in bounds_of(queue.look()).items()},
            )
        finally:
            ledger.close()
            queue.close()

    def _planned(self) -> dict[int, Offset]:
        found = {batch: self.checkpoint.offset(batch) for batch in self.checkpoint.planned()}
        return {
            batch: {
                int(key): place for key, place in stored.items() if key.isdecimal() and isinstance(place, int)
            }
            for batch, stored in found.items()
            if stored is not None
        }

    def _count(self, queue: ReadQueue, shard: int, index: EntryIndex, start: int) -> ShardFacts:
        """Count the records of every stored batch. Batches that left the queue may have been deleted."""
        queued = {number: location for number, location in index.locations() if number >= start}
        left = {number: location for number, location in queue.dequeued(shard).items() if number >= start}
        found = loop_thread().run(self._record_counts(queue.store, {**left, **queued}))
        return ShardFacts(
            first=index.first,
            following=index.footer.next_sequence,
            counts={number: count for number, count in found.items() if isinstance(count, int)},
            broken={
                number: why for number, why in found.items() if isinstance(why, str) and number in queued
            },
        )

    async def _record_counts(self, store: ObjectStore, places: Mapping[int, str]) -> dict[int, int | str]:
        limit = asyncio.Semaphore(_AT_ONCE)
        counted = 0

        async def one(location: str) -> int | str:
            nonlocal counted
            if location in self._counts:
                return self._counts[location]
            async with limit:
                count = await _record_count(store, location)
            counted += 1
            self._tell(f"counting records: {counted:,} of {len(places):,} batches")
            if isinstance(count, int):
                self._counts[location] = count
            return count

        numbers = list(places)
        found: dict[int, int | str] = {}
        for start in range(0, len(numbers), 100 * _AT_ONCE):  # bounds the number of concurrent tasks
            some = numbers[start : start + 100 * _AT_ONCE]
            found_now = await asyncio.gather(*(one(places[number]) for number in some))
            found |= dict(zip(some, found_now, strict=True))
        return found

    def _table(self, name: str, sink: SinkSpec, app: str | None) -> TableFacts:
        self._tell(f"reading {name}: {sink.place}")
        output = Output.of(sink)
        spec = output.table
        if app is None:
            return TableFacts(place=sink.place, last=None, rows={})
        if spec is None:
            return TableFacts(place=sink.place, last=output.last_version(app), rows=None)
        table = open_table(spec)
        if sink.merge is not None:
            return TableFacts(place=sink.place, last=table.last_version(app), rows=None)
        rows = table.rows_by_version(app)
        return TableFacts(
            place=sink.place,
            last=table.last_version(app),
            rows=rows,
            complete=_is_complete(spec),
            row_count=table.row_count(),
        )


async def _record_count(store: ObjectStore, location: str) -> int | str:
    """Return the number of records from the batch's footer, or the reason why it cannot be read."""
    tail = ByteRange(start=None, length=FOOTER_BYTES)
    try:
        blob = await retry(lambda: store.get(location, tail), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG)
    except NotFound:
        return "is not in the store"
    except PenstockError as error:
        raise storage_error(error, f"counting the records of {location}") from error
    if len(blob.data) != FOOTER_BYTES:
        return "is truncated"
    _, count, version = _FOOTER.unpack(blob.data)
    return int(count) if version == BATCH_VERSION else "has a damaged footer"


def _kept_origin(ledger: Ledger) -> Offset | None:
    kept = ledger.kept(_ORIGIN)
    try:
        return None if kept is None else {int(shard): int(str(place)) for shard, place in kept.items()}
    except ValueError as error:
        raise Corrupt(f"{_ORIGIN} in {ledger.url} is not an offset: {error}. Restore it") from error


def _is_complete(spec: TableSpec) -> bool:
    """Return whether the history of a table reaches back to its beginning."""
    if spec.kind == "delta":
        from penstock.spark.tables.delta import load_delta

        log = load_delta(spec)
        return log is None or min((int(entry["version"]) for entry in log.history()), default=0) == 0
    if spec.kind == "iceberg":
        from penstock.spark.tables.iceberg import load_iceberg

        table = load_iceberg(spec)
        snapshots = [] if table is None else table.snapshots()
        known = {snapshot.snapshot_id for snapshot in snapshots}
        return all(snapshot.parent_snapshot_id in {None, *known} for snapshot in snapshots)
    return True


def apps_in_ledger(spec: PipelineSpec) -> dict[str, int]:
    """Return the queries that have lines, with the time of their last line in milliseconds.

    Raise `StorageError` or `Corrupt`.
    """
    ledger = Ledger(spec.ledger_config)
    try:
        lines = {app: ledger.lines(app) for app in ledger.apps()}
    finally:
        ledger.close()
    return {app: held[-1].at_ms for app, held in lines.items() if held}


def query_of(checkpoint: Checkpoint, apps: Mapping[str, int]) -> str | None:
    """Return the pipeline's query from the checkpoint, or else the query that wrote the last line."""
    try:
        known = checkpoint.query_id
    except Unsupported:
        known = None
    return known or max(apps, key=lambda app: apps[app], default=None)
