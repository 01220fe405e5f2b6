"""Read-only inspection of a queue: it does not fence, acknowledge or change anything.

`QueueReader` reads entries and batches beside a live consumer. `survey` counts the entries of a queue and the
objects in its folder. The computation (`summarise`) is a pure function of the data read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass

from penstock import errors
from penstock.buffer import manifest
from penstock.buffer.batch import batch_minted_ms, is_own
from penstock.buffer.errors import SerializationError, StorageRejected, storage_error
from penstock.buffer.fetch import BatchDescriptor, ConsumedBatch, FetchHandle
from penstock.buffer.gc import candidates
from penstock.buffer.manifest import Entry, EntryIndex
from penstock.buffer.manifest_file import ManifestFile, Snapshot
from penstock.buffer.side_objects import NO_FLOOR, Floor, read_dequeued_log, read_floor
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.ids import SYSTEM_RNG
from penstock.limits import BATCH_BYTES_MAX
from penstock.objects import ObjectInfo, ObjectStore
from penstock.retry import RetryPolicy, retry

__all__ = [
    "Inventory",
    "QueueReader",
    "QueueSurvey",
    "entry_time_ms",
    "sort_objects",
    "summarise",
    "survey",
]

_PROBE = re.compile(r"probe-[0-9a-f]{32}")


class QueueReader:
    """A reader of the current queue that can fetch any of its batches.

    It has no epoch, so an entry that it has read may be consumed and its object deleted at any time. A fetch
    then raises `BatchMissing`.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifest_path: str,
        *,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        retry_deadline_s: float = 30.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.store = store
        self.file = ManifestFile(store, manifest_path)
        self._clock = clock
        self._policy = RetryPolicy(deadline_s=retry_deadline_s)
        self._fetcher = FetchHandle(store, batch_bytes_max=batch_bytes_max, policy=self._policy, clock=clock)
        self._known: Snapshot | None = None
        self._indexed: tuple[Snapshot, EntryIndex] | None = None

    @property
    def known(self) -> Snapshot | None:
        """The manifest that was last read."""
        return self._known

    async def snapshot(self) -> Snapshot:
        """Read the manifest; `version` is None if it is absent. Raises `StorageError`."""
        known = self._known

        async def read() -> Snapshot:
            return await self.file.read() if known is None else await self.file.reread(known)

        try:
            self._known = await retry(read, self._policy, clock=self._clock, rng=SYSTEM_RNG)
        except errors.PenstockError as error:
            raise storage_error(error, f"reading {self.file.path}") from error
        return self._known

    async def index(self) -> EntryIndex:
        """Return all entries. An absent manifest is an empty queue.

        Raise `StorageError`, or `SerializationError` if the manifest does not decode.
        """
        snapshot = await self.snapshot()
        if self._indexed is None or snapshot is not self._indexed[0]:
            grown = None if self._indexed is None else self._indexed[1].grown_into(snapshot.raw)
            self._indexed = (snapshot, grown or manifest.index(snapshot.raw))
        return self._indexed[1]

    async def entries(self, after: int | None = None, limit: int = 1000) -> list[BatchDescriptor]:
        """Return up to `limit` entries after the sequence `after` (None: from the oldest)."""
        return [BatchDescriptor.of(entry) for entry in (await self.index()).after(after, limit)]

    async def dequeued(self) -> dict[int, str]:
        """Return the dequeued log as sequence to location; a damaged log counts as empty."""
        try:
            raw, _ = await retry(
                lambda: self.file.read_side(self.file.dequeued_path),
                self._policy,
                clock=self._clock,
                rng=SYSTEM_RNG,
            )
            return {} if raw is None else read_dequeued_log(raw)
        except SerializationError:
            return {}
        except errors.PenstockError as error:
            raise storage_error(error, f"reading {self.file.dequeued_path}") from error

    async def fetch(self, descriptor: BatchDescriptor) -> ConsumedBatch:
        """Fetch a batch. Raises `BatchMissing`, `SerializationError` or another `StorageError`."""
        return await self._fetcher.fetch(descriptor)

    async def require(self) -> Snapshot:
        """Read the manifest. Raise `StorageRejected` if it does not exist."""
        snapshot = await self.snapshot()
        if snapshot.version is None:
            raise StorageRejected(f"there is no manifest {self.file.path} in {self.store.url}")
        return snapshot


def entry_time_ms(entry: Entry) -> int | None:
    """Return when the first records of an entry were accepted, or else the mint time of its object."""
    if entry.metadata:
        return min(meta.ingestion_time_ms for meta in entry.metadata)
    return batch_minted_ms(entry.location)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The objects in the folder of a queue, by their role."""

    referenced: tuple[ObjectInfo, ...]
    unreferenced: tuple[ObjectInfo, ...]
    """Batches that are not in the queue: consumed, or never appended."""
    side: tuple[ObjectInfo, ...]
    """The manifest and its side objects: dequeued log, floor, transaction log, dead letters, shards."""
    probes: tuple[ObjectInfo, ...]
    """Objects that an interrupted check of conditional writes left."""
    foreign: tuple[ObjectInfo, ...]
    """Other objects directly in the folder, which the garbage collector never touches."""
    nested: tuple[ObjectInfo, ...] = ()
    """Objects in subfolders, such as those of another queue, which the garbage collector never touches."""


def sort_objects(
    listed: Iterable[ObjectInfo], referenced: Iterable[str], manifest_path: str, prefix: str
) -> Inventory:
    """Classify the objects of a listing."""
    kept = set(referenced)
    groups: dict[str, list[ObjectInfo]] = {
        name: [] for name in ("referenced", "unreferenced", "side", "probes", "foreign", "nested")
    }
    for info in listed:
        if info.key in kept:
            group = "referenced"
        elif info.key == manifest_path or info.key.startswith(f"{manifest_path}."):
            group = "side"
        elif not is_own(info.key, prefix):
            group = "nested"
        elif batch_minted_ms(info.key) is not None:
            group = "unreferenced"
        elif _PROBE.fullmatch(info.key.rpartition("/")[2]):
            group = "probes"
        else:
            group = "foreign"
        groups[group].append(info)
    return Inventory(**{name: tuple(group) for name, group in groups.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSurvey:
    """The statistics of a queue at one moment. An age is None if there is nothing to measure."""

    manifest: str
    exists: bool
    queue_length: int
    first_sequence: int
    next_sequence: int
    epoch: int
    manifest_bytes: int
    oldest_entry_age_ms: int | None
    newest_entry_age_ms: int | None
    ingestion_lag_ms: int | None
    """Age of the oldest record in the queue: the lag of its consumer."""
    data_objects: int
    data_bytes: int
    unreferenced_objects: int
    unreferenced_bytes: int
    collectable_objects: int
    """Unreferenced batches past the grace period: candidates of a garbage collection."""
    foreign_objects: int
    dead_letters: int
    floor_ms: int | None
    sealed_ms: int | None


def summarise(
    snapshot: Snapshot,
    listed: Iterable[ObjectInfo],
    *,
    manifest_path: str,
    prefix: str,
    floor: Floor,
    dead_letters: int,
    now_ms: int,
    grace_ms: int,
) -> QueueSurvey:
    """Compute the statistics. Raise `SerializationError` if the manifest does not decode."""
    index = manifest.index(snapshot.raw)
    locations = [location for _, location in index.locations()]
    listed = list(listed)
    inventory = sort_objects(listed, locations, manifest_path, prefix)
    first = entry_time_ms(index[0]) if len(index) else None
    last = entry_time_ms(index[len(index) - 1]) if len(index) else None
    times = [ms for ms in (entry_time_ms(index[n]) for n in range(len(index))) if ms is not None]
    data = inventory.referenced + inventory.unreferenced
    return QueueSurvey(
        manifest=manifest_path,
        exists=snapshot.version is not None,
        queue_length=len(index),
        first_sequence=index.first,
        next_sequence=index.footer.next_sequence,
        epoch=index.footer.epoch,
        manifest_bytes=len(snapshot.raw) if snapshot.version is not None else 0,
        oldest_entry_age_ms=_age(first, now_ms),
        newest_entry_age_ms=_age(last, now_ms),
        ingestion_lag_ms=_age(min(times, default=None), now_ms),
        data_objects=len(data),
        data_bytes=sum(info.size for info in data),
        unreferenced_objects=len(inventory.unreferenced),
        unreferenced_bytes=sum(info.size for info in inventory.unreferenced),
        collectable_objects=len(
            candidates(listed, locations, prefix=prefix, now_ms=now_ms, grace_ms=grace_ms)
        ),
        foreign_objects=len(inventory.foreign) + len(inventory.probes),
        dead_letters=dead_letters,
        floor_ms=None if floor.floor_ms < 0 else floor.floor_ms,
        sealed_ms=None if floor.sealed_ms < 0 else floor.sealed_ms,
    )


async def survey(reader: QueueReader, prefix: str, *, now_ms: int, grace_ms: int) -> QueueSurvey:
    """Return the statistics of a queue. Raise `StorageError`, or `SerializationError` for damaged data."""
    # The manifest before the listing: a batch appended in between only looks unreferenced.
    snapshot = await reader.snapshot()
    file = reader.file
    try:
        listed = await reader.store.list(prefix)
        raw_floor, _ = await file.read_side(file.floor_path)
        letters = await reader.store.list(f"{file.path}.dead")
    except errors.PenstockError as error:
        raise storage_error(error, f"looking at {prefix} in {reader.store.url}") from error
    # This runs in a thread because a queue without a consumer may have a hundred thousand entries.
    return await asyncio.to_thread(
        summarise,
        snapshot,
        listed,
        manifest_path=file.path,
        prefix=prefix,
        floor=NO_FLOOR if raw_floor is None else read_floor(raw_floor),
        dead_letters=sum(info.key.endswith(".json") for info in letters),
        now_ms=now_ms,
        grace_ms=grace_ms,
    )


def _age(then_ms: int | None, now_ms: int) -> int | None:
    return None if then_ms is None else max(0, now_ms - then_ms)
