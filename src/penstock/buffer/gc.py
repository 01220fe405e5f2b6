"""The garbage collector: deletes batch objects that nothing refers to and nothing can refer to again.

By the rules of the format, a candidate is directly in the queue's folder, has the name of a batch, is not
referenced, is older than the oldest entry, and is past the grace period. The floor
(`penstock.buffer.side_objects`) makes its deletion safe regardless of stalled producers and wrong clocks.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass

from penstock import errors
from penstock.buffer import manifest
from penstock.buffer.batch import batch_minted_ms, is_own
from penstock.buffer.config import GarbageCollectorConfig
from penstock.buffer.dequeue import Dequeuer
from penstock.buffer.errors import FencedError, SerializationError, storage_error
from penstock.buffer.instruments import Instruments
from penstock.buffer.manifest import EntryIndex
from penstock.buffer.manifest_file import ManifestFile, Snapshot
from penstock.buffer.side_objects import NO_FLOOR, Floor, read_dequeued_log, read_floor, write_floor
from penstock.clock import SYSTEM_CLOCK, Clock, SteadyClock
from penstock.ids import SYSTEM_RNG
from penstock.metrics import Registry
from penstock.objects import ObjectInfo, ObjectStore, Version, open_store
from penstock.retry import Backoff, RetryPolicy

_log = logging.getLogger(__name__)


def candidates(
    listed: Iterable[ObjectInfo], referenced: Iterable[str], *, prefix: str, now_ms: int, grace_ms: int
) -> list[tuple[str, int]]:
    """Return (key, mint time) of each object that is garbage by the rules of the format.

    A batch is garbage if all of this holds:

    - Its name is `{prefix}/{ULID}.batch`, and it is not referenced.
    - It was minted strictly before every referenced batch with a time in its name.
    - It is past the grace period, both by its name and by the store.

    A listing is recursive. It may include the batches of a queue in a subfolder, which belong to that queue.
    """
    kept = set(referenced)
    minted = [ms for ms in map(batch_minted_ms, kept) if ms is not None]
    oldest_ms = min(minted, default=None)
    found: list[tuple[str, int]] = []
    for info in listed:
        ms = batch_minted_ms(info.key) if is_own(info.key, prefix) else None
        if ms is None or info.key in kept or (oldest_ms is not None and ms >= oldest_ms):
            continue
        if now_ms - ms >= grace_ms and now_ms - info.modified_ms >= grace_ms:
            found.append((info.key, ms))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """The result of a garbage collection cycle."""

    listed: int
    candidates: tuple[str, ...]
    deleted: tuple[str, ...]
    failed: tuple[str, ...]
    withheld: tuple[str, ...]
    """Garbage that only the consumer of the queue may delete, because no floor is sealed above it."""


class GarbageCollector:
    """Collects the garbage of one queue.

    With the consumer's `queue`, each cycle seals a floor and deletes all candidates. Without a `queue`, the
    collector may run next to a live consumer, and deletes only objects below the floor that it sealed.
    """

    def __init__(
        self,
        config: GarbageCollectorConfig,
        *,
        queue: Dequeuer | None = None,
        store: ObjectStore | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        registry: Registry | None = None,
    ) -> None:
        self._config = config
        self._owns_store = store is None and not isinstance(config.store, ObjectStore)
        self._store = store or open_store(config.store)
        self._file = ManifestFile(
            self._store,
            config.manifest_key,
            prefix=config.prefix,
            since_ms=clock.now_ms(),
            checks_dequeued=queue is None,
        )
        self._queue = queue
        self._clock = SteadyClock(clock)
        self._rng = rng
        self._instruments = Instruments(registry)
        self._sealed_ms = NO_FLOOR.sealed_ms
        self._strays: list[str] = []

    async def run(self) -> None:
        """Collect garbage every `gc_interval` until fenced or cancelled. Wait one interval first."""
        while True:
            await self._clock.sleep(self._config.gc_interval_s)
            try:
                await self.collect()
            except FencedError:
                return
            except Exception as error:  # noqa: BLE001  a stopped collector would go unnoticed
                _log.warning("garbage collection of %s failed, will try again: %s", self._file.path, error)

    async def collect(self, *, dry_run: bool = False) -> GcReport:
        """Run one cycle. A dry run returns the candidates and changes nothing."""
        started = self._clock.monotonic()
        try:
            report = await self._collect(dry_run)
        except errors.PenstockError as error:
            raise storage_error(error, f"collecting garbage below {self._config.prefix}") from error
        self._instruments.gc_duration.observe(self._clock.monotonic() - started)
        self._instruments.gc_files_deleted.inc(len(report.deleted))
        self._instruments.gc_files_failed.inc(len(report.failed))
        return report

    async def close(self) -> None:
        """Close the store if this collector opened it."""
        if self._owns_store:
            await self._store.close()

    async def _collect(self, dry_run: bool) -> GcReport:
        # Read the manifest before listing: a batch appended in between is then newer than the candidates.
        snapshot = await self._file.read()
        listed = await self._store.list(self._config.prefix)
        grace_ms = int(self._config.gc_grace_period_s * 1000)
        found = candidates(
            listed,
            (location for _, location in manifest.index(snapshot.raw).locations()),
            prefix=self._config.prefix,
            now_ms=self._clock.cautious_ms(grace_ms),
            grace_ms=grace_ms,
        )
        await self._report_strays(snapshot, listed)
        deletable: list[str] = []
        withheld: list[str] = []
        if found and not dry_run:
            deletable, withheld = await (
                self._below_own_floor(found) if self._queue else self._below_sealed(found)
            )
        failures = await self._store.delete_many(deletable) if deletable else {}
        for key, error in failures.items():
            _log.warning("could not delete %s, will try again: %s", key, error)
        return GcReport(
            listed=len(listed),
            candidates=tuple(key for key, _ in found),
            deleted=tuple(key for key in deletable if key not in failures),
            failed=tuple(failures),
            withheld=tuple(withheld),
        )

    async def _report_strays(self, snapshot: Snapshot, listed: Iterable[ObjectInfo]) -> None:
        """Warn about batches that are not in the queue and are newer than all consumed ones.

        They remain if the manifest was replaced by an older copy, or if a producer ended before it appended a
        stored batch. If another implementation consumes the queue, the dequeued log is incomplete. Then only
        batches newer than the newest entry are reported.
        """
        grace_ms, now_ms = int(self._config.gc_grace_period_s * 1000), self._clock.cautious_ms()
        index = manifest.index(snapshot.raw)
        named = {location for _, location in index.locations()}
        times = [(info.key, batch_minted_ms(info.key), info.modified_ms) for info in listed]
        free = [
            (key, ms)
            for key, ms, modified_ms in times
            if ms is not None and is_own(key, self._config.prefix) and key not in named
            if now_ms - max(ms, modified_ms) >= grace_ms
        ]
        if not free:
            return
        raw, _ = await self._file.read_side(self._file.dequeued_path)
        known: dict[int, str] = {}
        with contextlib.suppress(SerializationError):
            known = {} if raw is None else read_dequeued_log(raw)
        is_complete = bool(known) and max(known) + 1 >= index.first
        consumed = set(known.values())
        times_ms = map(batch_minted_ms, consumed if is_complete else consumed | named)
        newest = max((ms for ms in times_ms if ms is not None), default=None)
        strays = sorted(key for key, ms in free if newest is not None and ms > newest and key not in consumed)
        if strays and strays != self._strays:
            _log.warning(
                "%d batches are not in %s and were never consumed, from %s on. Either their "
                "producer ended before it appended them, or the manifest was replaced by an older copy: in "
                "that case restore it before they are collected",
                len(strays),
                self._config.manifest_key,
                strays[0],
            )
        self._strays = strays

    async def _below_own_floor(self, found: list[tuple[str, int]]) -> tuple[list[str], list[str]]:
        """Publish a floor above all candidates, seal it, and return the candidates still unreferenced."""
        assert self._queue is not None
        floor = await self._raise_floor(max(ms for _, ms in found))
        entries = await self._queue.seal()
        self._sealed_ms = max(self._sealed_ms, floor.floor_ms)
        return _unreferenced((key for key, _ in found), entries), []

    async def _below_sealed(self, found: list[tuple[str, int]]) -> tuple[list[str], list[str]]:
        floor, _ = await self._read_floor()
        entries = manifest.index((await self._file.read()).raw)
        safe = _unreferenced((key for key, ms in found if ms <= floor.sealed_ms), entries)
        return safe, [key for key, ms in found if ms > floor.sealed_ms]

    async def _read_floor(self) -> tuple[Floor, Version | None]:
        raw, version = await self._file.read_side(self._file.floor_path)
        return (NO_FLOOR if raw is None else read_floor(raw)), version

    async def _raise_floor(self, floor_ms: int) -> Floor:
        """Raise the floor. It is never below that of another collector. Safe to repeat after any outcome."""
        backoff = Backoff(RetryPolicy(), clock=self._clock, rng=self._rng)
        while True:
            try:
                known, version = await self._read_floor()
                raised = known.raised(floor_ms, self._sealed_ms)
                if raised == known:
                    return raised
                await self._file.write_side(self._file.floor_path, write_floor(raised), version)
                return raised
            except (errors.Conflict, errors.OutcomeUnknown, errors.Unavailable):
                if not await backoff.pause():
                    raise


def _unreferenced(keys: Iterable[str], entries: EntryIndex) -> list[str]:
    kept = {location for _, location in entries.locations()}
    return [key for key in keys if key not in kept]
