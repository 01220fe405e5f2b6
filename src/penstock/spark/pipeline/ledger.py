"""The ledger of a pipeline: one line per micro-batch, durable before Spark forgets the batch.

A line is written after every sink has committed and before Spark commits the micro-batch. Every batch that
Spark has committed therefore has a line, and a repeated batch writes its line again. The lines of one query
are in `{app}/{first batch of a thousand}.jsonl`, in order. Objects are replaced conditionally, so an old
driver that still runs cannot undo the lines of its successor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from penstock.blocking import loop_thread
from penstock.buffer import storage_error
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import Conflict, Corrupt, Fenced, NotFound, OutcomeUnknown, PenstockError, Unavailable
from penstock.ids import SYSTEM_RNG
from penstock.objects import ObjectStore, StoreConfig, Version, open_store
from penstock.retry import RetryPolicy, retry

LINES_PER_OBJECT: Final = 1000
_POLICY: Final = RetryPolicy(deadline_s=30.0)

T = TypeVar("T")


class BatchLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one micro-batch. Offsets are the first unread sequence of each shard."""

    batch: int
    start: dict[int, int]
    end: dict[int, int]
    read: int
    """The number of records from the source."""
    dead: int = 0
    """The number of records written to the dead-letter table."""
    skipped: int = 0
    """The number of bad records dropped by `on_error: skip`."""
    gaps: int = 0
    """The number of gaps in the queue. Each is a row of the dead-letter table, but not a record."""
    rows: dict[str, int]
    """The number of rows written to each sink."""
    one_to_one: dict[str, bool] = {}
    """Whether each row of a sink is one record, so that the transform dropped the records without a row."""
    left_out: dict[str, int] = {}
    """The number of transformed rows that each sink drops because of its settings."""
    at_ms: int
    took_ms: int = 0
    """The time from the start until every sink had committed, or 0 if unknown."""

    def dropped(self, sink: str) -> int | None:
        """Return the number of records that the sink's transform dropped, or None if it is not one to one."""
        if not self.one_to_one.get(sink, False):
            return None
        return self.read - self.dead - self.skipped - self.rows[sink]


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The range and decoding of a micro-batch, stored before it is written to any sink."""

    batch: int
    start: dict[int, int]
    end: dict[int, int]
    decoding: str
    """A digest of the decode section and the schema."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(BatchLine)


def encode_lines(lines: Iterable[BatchLine]) -> bytes:
    return _encoder.encode_lines(lines)


def decode_lines(raw: bytes, where: str) -> list[BatchLine]:
    """Decode the lines of an object. Raise `Corrupt`, naming the object, if it is damaged."""
    try:
        return list(_decoder.decode_lines(raw))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"{where} does not decode: {error}. Restore it from a backup") from error


def merge_lines(known: Iterable[BatchLine], line: BatchLine) -> list[BatchLine]:
    """Return `known` with `line` in order. It replaces an earlier line of the same batch."""
    lines = {other.batch: other for other in known} | {line.batch: line}
    return [lines[batch] for batch in sorted(lines)]


def _chunk_key(app: str, batch: int) -> str:
    """Return the key of the object that has the line of a micro-batch."""
    return f"{app}/{batch // LINES_PER_OBJECT * LINES_PER_OBJECT:012}.jsonl"


class Ledger:
    """The ledger of one pipeline. Its methods block, because Spark calls them from blocking code."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._opened: ObjectStore | None = None
        self._current: tuple[str, list[BatchLine], Version] | None = None
        self._planned: tuple[str, BatchPlan | None, Version | None] | None = None

    def __reduce__(self) -> tuple[type[Ledger], tuple[StoreConfig]]:
        return Ledger, (self._config,)

    @property
    def url(self) -> str:
        return self._config.url

    @property
    def _store(self) -> ObjectStore:
        if self._opened is None:
            self._opened = open_store(self._config)
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            loop_thread().run(self._opened.close())
            self._opened = None

    def write(self, app: str, line: BatchLine) -> None:
        """Make a line durable. Raise `StorageError` or `Corrupt`."""
        key = _chunk_key(app, line.batch)

        async def attempt() -> None:
            lines, version = await self._chunk(key)
            merged = merge_lines(lines, line)
            self._current = None  # read the object again unless this write is known to have succeeded
            raw = encode_lines(merged)
            if version is None:
                written = await self._store.put_if_absent(key, raw)
            else:
                written = await self._store.put_if_match(key, raw, version)
            self._current = (key, merged, written)

        # Repeating after an unknown outcome is safe: the line replaces itself.
        self._run(attempt, f"writing {key}", on=(Unavailable, Conflict, OutcomeUnknown))

    async def _chunk(self, key: str) -> tuple[list[BatchLine], Version | None]:
        if self._current is not None and self._current[0] == key:
            return self._current[1], self._current[2]
        try:
            blob = await self._store.get(key)
        except NotFound:
            return [], None
        return decode_lines(bytes(blob.data), f"{key} in {self.url}"), blob.version

    def lines(self, app: str, *, after: int = -1) -> list[BatchLine]:
        """Return the lines of a query after a micro-batch, in order. Raise `Corrupt` or `StorageError`."""
        first = _chunk_key(app, after + 1)

        async def read() -> list[BatchLine]:
            found: list[BatchLine] = []
            for info in await self._store.list(app):
                if info.key >= first:
                    blob = await self._store.get(info.key)
                    found += decode_lines(bytes(blob.data), f"{info.key} in {self.url}")
            return [line for line in found if line.batch > after]

        return self._run(read, f"reading the ledger of {app}")

    def last(self, app: str, count: int) -> list[BatchLine]:
        """Return the last `count` lines of a query, in order. Read only recent objects. Raise as `lines`."""

        async def read() -> list[BatchLine]:
            found: list[BatchLine] = []
            for key in reversed(await self._chunks(app)):
                found = [*await self._held(key), *found]
                if len(found) >= count:
                    break
            return found[-count:] if count else []

        return self._run(read, f"reading the ledger of {app}")

    def line(self, app: str, batch: int) -> BatchLine | None:
        """Return the line of one micro-batch, or None. Raise as `lines`."""

        async def read() -> BatchLine | None:
            lines = await self._held(_chunk_key(app, batch))
            return next((line for line in lines if line.batch == batch), None)

        return self._run(read, f"reading the ledger of {app}")

    def without_line(self, app: str, done: Sequence[int]) -> list[int]:
        """Return the finished micro-batches that have no line. Raise as `lines`.

        A line is durable before its micro-batch is done. A missing line was therefore lost later: the ledger
        was truncated, removed or replaced by an older copy.
        """
        if not done:
            return []
        known = {line.batch for line in self.lines(app, after=min(done) - 1)}
        return [batch for batch in done if batch not in known]

    def find(self, app: str, shard: int, sequence: int) -> BatchLine | None:
        """Return the line of the micro-batch that read a sequence, or None. Raise as `lines`.

        Offsets only increase, so a binary search reads only a few objects.
        """

        async def read() -> BatchLine | None:
            keys = await self._chunks(app)
            low, high = 0, len(keys)
            while low < high:
                middle = (low + high) // 2
                lines = await self._held(keys[middle])
                if lines and lines[-1].end.get(shard, 0) <= sequence:
                    low = middle + 1
                else:
                    high = middle
            lines = await self._held(keys[low]) if low < len(keys) else []
            return next((line for line in lines if _covers(line, shard, sequence)), None)

        return self._run(read, f"searching the ledger of {app}")

    async def _chunks(self, app: str) -> list[str]:
        return sorted(info.key for info in await self._store.list(app) if info.key.endswith(".jsonl"))

    async def _held(self, key: str) -> list[BatchLine]:
        try:
            blob = await self._store.get(key)
        except NotFound:
            return []
        return decode_lines(bytes(blob.data), f"{key} in {self.url}")

    def apps(self) -> list[str]:
        """Return the ids of the queries that have lines. Raise `StorageError`."""

        async def names() -> list[str]:
            listed = await self._store.list("")
            return sorted({info.key.partition("/")[0] for info in listed if info.key.endswith(".jsonl")})

        return self._run(names, "listing the queries")

    def plan(self, app: str) -> BatchPlan | None:
        """Return the last plan of a query, or None. Raise `Corrupt` or `StorageError`."""
        if self._planned is None or self._planned[0] != app:
            self._planned = (app, *self._run(lambda: self._read_plan(app), f"reading the plan of {app}"))
        return self._planned[1]

    async def _read_plan(self, app: str) -> tuple[BatchPlan | None, Version | None]:
        key = _plan_key(app)
        try:
            blob = await self._store.get(key)
        except NotFound:
            return None, None
        try:
            return msgspec.json.decode(blob.data, type=BatchPlan), blob.version
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corrupt(f"{key} in {self.url} does not decode: {error}. Restore it") from error

    def write_plan(self, app: str, plan: BatchPlan) -> None:
        """Replace the plan that `plan()` returned. Raise `Fenced` if another driver has replaced it."""
        self.plan(app)
        assert self._planned is not None
        _, _, version = self._planned
        self._planned = None
        raw, key = msgspec.json.encode(plan), _plan_key(app)

        async def attempt() -> Version:
            try:
                if version is None:
                    return await self._store.put_if_absent(key, raw)
                return await self._store.put_if_match(key, raw, version)
            except (Conflict, OutcomeUnknown):
                found, held = await self._read_plan(app)
                if found == plan and held is not None:  # our own write, whose response was lost
                    return held
                raise Fenced(
                    f"{key} in {self.url} was written by another driver: the pipeline runs twice on one "
                    "checkpoint. Stop one of the two"
                ) from None

        self._planned = (app, plan, self._run(attempt, f"writing {key}"))

    def keep(self, name: str, document: Mapping[str, object]) -> None:
        """Store a small document, replacing any document of that name."""
        raw = msgspec.json.encode(document)

        async def write() -> None:
            await self._store.put(name, raw)

        self._run(write, f"writing {name}")

    def kept(self, name: str) -> dict[str, object] | None:
        """Return the document of that name, or None. Raise `Corrupt` or `StorageError`."""

        async def read() -> bytes | None:
            try:
                return bytes((await self._store.get(name)).data)
            except NotFound:
                return None

        raw = self._run(read, f"reading {name}")
        try:
            return None if raw is None else msgspec.json.decode(raw, type=dict[str, object])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corrupt(f"{name} in {self.url} does not decode: {error}. Restore it") from error

    def _run(
        self,
        operation: Callable[[], Awaitable[T]],
        doing: str,
        *,
        on: tuple[type[PenstockError], ...] = (Unavailable,),
    ) -> T:
        async def work() -> T:
            return await retry(operation, _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG, on=on)

        try:
            return loop_thread().run(work())
        except (Corrupt, Fenced):
            raise
        except PenstockError as error:
            raise storage_error(error, f"{doing} in {self.url}") from error


def _covers(line: BatchLine, shard: int, sequence: int) -> bool:
    return line.start.get(shard, 0) <= sequence < line.end.get(shard, 0)


def _plan_key(app: str) -> str:
    return f"plans/{app}.json"
