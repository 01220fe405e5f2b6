"""Periodic work of an engine: take due checkpoints, log floors, and remove dead files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Final

from penstock.clock import Clock
from penstock.errors import NotFound, OutcomeUnknown, PenstockError
from penstock.storage import FileSystem, LogPosition
from penstock.topics.checkpoints.checkpoint import Cut, TopicCut, capture, store
from penstock.topics.checkpoints.cold_tier import Relocation, RunCold
from penstock.topics.checkpoints.layout import META
from penstock.topics.checkpoints.recovery import Recovered
from penstock.topics.checkpoints.snapshot import TopicEntry, snapshot_name
from penstock.topics.config import EngineConfig
from penstock.topics.errors import Throttled
from penstock.topics.log.wal import Wal
from penstock.topics.routers.routing import Routing
from penstock.topics.segments.format import SegmentEntry
from penstock.topics.segments.growth import SegmentProcess
from penstock.topics.segments.store import Stored
from penstock.topics.segments.tiering import Tidied, Tiers
from penstock.topics.topic.catalog import Catalog
from penstock.topics.topic.changes import PendingCommit, sync_ms
from penstock.topics.topic.topic import Topic
from penstock.topics.workers import Workers

_LOGGER = logging.getLogger(__name__)
_TICK_S: Final = 0.25
_FLOORS_EVERY_S: Final = 1.0
_MOVING_FIRST_S: Final = 2.0
"""How long a start waits for segments that should already be cold."""
_LEAVING_S: Final = 0.5
"""How long a stop waits for the cold tier."""


class Maintenance:
    """The background work of one engine. Checkpoints run one at a time, on the maintenance thread."""

    def __init__(
        self,
        *,
        fs: FileSystem,
        data_dir: str,
        config: EngineConfig,
        clock: Clock,
        workers: Workers,
        run_cold: RunCold,
        tiers: Tiers,
        wal: Wal,
        folders: Sequence[str],
        found: Recovered,
        catalog: Catalog,
        routing: Routing,
    ) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._meta_dir = os.path.join(data_dir, META)
        self._config = config
        self._clock = clock
        self._workers = workers
        self._tiers = tiers
        self._wal = wal
        self._folders = folders
        self._catalog = catalog
        self._routing = routing
        self._referred = found.referred
        self._stored = found.stored
        self._strangers = found.strangers
        """Segments of deleted topics that are needed until the next snapshot."""
        self._leaving: list[Topic] = []
        """Topics deleted since the start whose segments are needed until the next snapshot."""
        self._number = found.snapshot_number
        self._known: dict[int, tuple[int, TopicEntry]] = {}
        """The state that the last checkpoint stored for every topic. See `capture`."""
        self._good_number = found.loaded_number
        """The number of the last snapshot that is known to be good."""
        self._doubtful: str | None = None
        """A snapshot that may or may not be in place."""
        self._moved = found.moved
        self._needed: Mapping[str, LogPosition] = found.wal
        """Where the last snapshot starts reading the logs."""
        self._foreign = [path for path in found.folders if path not in folders]
        """Log directories of a start with another number of shards. Obsolete after a checkpoint."""
        self._process = SegmentProcess(data_dir) if config.segment_process else None
        self._busy = asyncio.Lock()
        self._cold: Relocation | None = None
        if tiers.has_cold:
            self._cold = Relocation(tiers=tiers, config=config, clock=clock, run=run_cold)
        self._background: set[asyncio.Task[None]] = set()
        """Tasks that run beside checkpoints and may wait for the cold tier."""
        self._ticking: asyncio.Task[None] | None = None
        self._checkpointed_s = clock.monotonic()
        self._checkpointed_bytes = 0
        self._floors_s = clock.monotonic()

    async def start(self) -> None:
        """Remove files that nothing refers to, and start the timer."""
        known = {topic.id: list(topic.log.segments) for topic in self._catalog.all()} | self._referred
        stored, self._stored = self._stored, Stored()
        for topic_id in self._strangers:
            del stored.topics[topic_id]
        tidied = await self._workers.tidy(lambda: self._tidy(known, stored))
        for error in tidied.failed:
            _LOGGER.warning("left for the next start to remove: %s", error)
        if self._moved:
            await self._checkpoint()
        await self._move_pending()
        self._ticking = asyncio.create_task(self._tick())

    async def _move_pending(self) -> None:
        """Move the segments that the last stop left hot.

        If this takes long, it continues in the background.
        """
        if self._cold is None:
            return
        moving = self._start_background(self._tend(self._cold, record=True))
        await self._wait_background([moving], _MOVING_FIRST_S)
        if moving.done():
            with contextlib.suppress(PenstockError):
                moving.result()

    def _tidy(self, known: Mapping[int, Sequence[SegmentEntry]], stored: Stored) -> Tidied:
        if self._good_number:
            # The loaded snapshot may not be durable yet. Until it is, the earlier one is needed too.
            self._fs.sync_dir(self._meta_dir)
        return self._tiers.tidy(known, stored)

    async def close(self) -> None:
        """Take a last checkpoint, so that the next start has nothing to replay."""
        async with self._busy:  # a running checkpoint finishes first
            if self._ticking is not None:
                self._ticking.cancel()
        if self._ticking is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        is_idle = await self._stop_background()
        await self._quiesce()
        try:
            await self._checkpoint(last=True)
        except PenstockError as error:
            _LOGGER.warning("no snapshot at the end, the next start replays the log: %s", error)
        await self._workers.tidy(lambda: self._end(is_idle))

    async def _stop_background(self) -> bool:
        """Wait briefly for the cold tier, then cancel its work. Return whether it is idle."""
        if self._cold is not None:
            self._cold.close()
        await self._wait_background(self._background, _LEAVING_S)
        left = list(self._background)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return not left

    def _end(self, is_idle: bool) -> None:
        if self._process is not None:
            self._process.close()
        if is_idle:
            self._tiers.close()

    async def _quiesce(self) -> None:
        """Wait until every earlier submission is decided."""
        barriers = []
        for shard in self._wal.shards:
            barrier = PendingCommit(sync_ms)
            shard.submit([], frames=0, sync=True, waiting=barrier)
            barriers.append(barrier.outcome)
        await asyncio.gather(*barriers, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(_TICK_S)
            try:
                self._log_floors()
                if self._is_due():
                    await self._checkpoint()
                    if self._cold is not None and self._cold.is_free:
                        self._start_background(self._tend(self._cold))
            except PenstockError as error:
                self._checkpointed_s = self._clock.monotonic()
                _LOGGER.warning("a checkpoint failed and will be tried again: %s", error)
            except Exception:
                self._checkpointed_s = self._clock.monotonic()
                _LOGGER.exception("a checkpoint failed and will be tried again")

    def _is_due(self) -> bool:
        waited_ms = (self._clock.monotonic() - self._checkpointed_s) * 1000
        grown = self._written() - self._checkpointed_bytes
        if grown >= self._config.checkpoint_bytes:
            return True
        return waited_ms >= self._config.checkpoint_interval_ms and (
            grown > 0 or self._ages() or (self._cold is not None and self._cold.is_behind)
        )

    def _written(self) -> int:
        return sum(shard.submitted_bytes for shard in self._wal.shards)

    def _ages(self) -> bool:
        """Return whether some segment is old enough to be sealed although nothing was written."""
        age_ms, now_ms = self._config.segment_max_age_ms, self._clock.now_ms()
        return bool(age_ms) and any(
            topic.log.segments
            and not topic.log.segments[-1].sealed
            and now_ms - topic.log.segments[-1].created_ms >= age_ms
            for topic in self._catalog.all()
        )

    def _log_floors(self) -> None:
        """Log expirations and evictions since the last write of each topic, at intervals."""
        if self._clock.monotonic() - self._floors_s < _FLOORS_EVERY_S:
            return
        self._floors_s = self._clock.monotonic()
        for topic in self._catalog.all():
            try:
                topic.shard.check_room()
            except Throttled:
                continue  # the next write carries the floors
            frames = topic.log.moved_floors()
            if frames:
                change = PendingCommit(sync_ms)
                change.outcome.add_done_callback(_ignore)
                topic.shard.submit(frames, frames=len(frames), sync=False, waiting=change)

    # ---- checkpoints ---------------------------------------------------------------------------------

    async def checkpoint(self) -> None:
        """Take a durable snapshot and remove files that are no longer needed. Raise the disk's errors.

        Also move segments to the cold tier, or find that they cannot be moved.
        """
        await self._checkpoint()
        if self._cold is not None:
            await self._tend(self._cold, record=True)

    async def _tend(self, cold: Relocation, *, record: bool = False) -> None:
        """Move segments.

        With `record`, take a snapshot of the moves immediately instead of at the next checkpoint.
        """
        await cold.tend(self._catalog.all())
        if record and cold.copied:
            await self._checkpoint()
            await cold.drop_unneeded()

    async def _checkpoint(self, *, last: bool = False) -> None:
        async with self._busy:
            checkpoint = asyncio.ensure_future(self._make(last))
            try:
                await asyncio.shield(checkpoint)
            except asyncio.CancelledError:
                # The thread continues. Its result must be recorded before anything else is stored.
                while not checkpoint.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([checkpoint])
                if not checkpoint.cancelled():
                    checkpoint.exception()
                raise

    async def _make(self, last: bool) -> None:
        async with self._routing.still():
            cut = self._capture(last)
        leaving, self._leaving = self._leaving, []
        written = self._written()
        number, self._number = self._number, self._number + 1
        try:
            copied = {} if self._cold is None else self._cold.copied
            await self._workers.tidy(lambda: self._store(cut, number, copied))
        except BaseException:
            self._known = {}
            self._leaving += leaving
            raise
        self._good_number = number
        self._known = {one.topic.id: (one.version, one.entry) for one in cut.topics}
        self._apply(cut)
        self._checkpointed_s = self._clock.monotonic()
        self._checkpointed_bytes = written
        needed, self._needed = self._needed, cut.wal
        await self._workers.tidy(lambda: self._drop_unneeded(cut, needed))
        if not last:
            # At the end, the next start removes them.
            for topic in leaving:
                self._start_background(self._remove_segments(topic))

    def _capture(self, last: bool) -> Cut:
        now_ms = self._clock.now_ms()
        topics = self._catalog.all()
        for topic in topics:
            self._catalog.retain(topic)
            if last:
                # Nothing is in flight any more, so the reserved sequence numbers are not needed.
                topic.log.reserved_seq = 0
        if last:
            self._known = {}
        wal = {
            folder: shard.committed_offset
            for folder, shard in zip(self._folders, self._wal.shards, strict=True)
        }
        cut = capture(topics, wal, self._catalog.next_topic_id, now_ms, self._routing.entries(), self._known)
        cut.lost_seq = self._catalog.lost_seq
        cut.synced = {
            folder: shard.synced
            for folder, shard in zip(self._folders, self._wal.shards, strict=True)
            if shard.synced.file
        }
        return cut

    def _store(self, cut: Cut, number: int, copied: Mapping[tuple[int, int], SegmentEntry]) -> None:
        self._retract()
        try:
            store(
                cut,
                fs=self._fs,
                meta_dir=self._meta_dir,
                number=number,
                previous=self._good_number,
                tiers=self._tiers,
                config=self._config,
                copied=copied,
                process=self._process,
            )
        except OutcomeUnknown:
            self._doubtful = os.path.join(self._meta_dir, snapshot_name(number))
            raise

    def _retract(self) -> None:
        """Remove a snapshot that may be in place, durably, before the files that it names change."""
        if self._doubtful is not None:
            with contextlib.suppress(NotFound):
                self._fs.unlink(self._doubtful)
            self._fs.sync_dir(self._meta_dir)
            self._doubtful = None

    def _apply(self, cut: Cut) -> None:
        for topic_cut in cut.topics:
            if not topic_cut.topic.deleted:
                topic_cut.topic.log.promote(topic_cut.grown, topic_cut.segments)
        if self._cold is not None:
            self._cold.recorded(cut.topics)

    def _drop_unneeded(self, cut: Cut, needed: Mapping[str, LogPosition]) -> None:
        """Remove log files that neither this nor the previous snapshot needs, and segments that none names.

        With a cold tier, it removes the segments itself.
        """
        for folder, shard in zip(self._folders, self._wal.shards, strict=True):
            start = needed.get(folder)
            if start is not None:
                shard.log.drop_before(start.file)
        if self._foreign and not any(folder in needed for folder in self._foreign):
            for folder in self._foreign:
                self._drop_log(folder)
            self._foreign = []
        if self._cold is None:
            for topic_cut in cut.topics:
                self._drop_segments(topic_cut)

    def _drop_segments(self, cut: TopicCut) -> None:
        tier = self._tiers.topic(cut.entry.id)
        try:
            for first_seq in cut.dead:
                tier.delete(first_seq)
        except PenstockError as error:
            _LOGGER.warning('topic "%s": left for the next start to remove: %s', cut.entry.name, error)

    def _drop_log(self, folder: str) -> None:
        """Remove a log from a start with another number of shards. Its records are in segments now."""
        directory = os.path.join(self._data_dir, folder)
        for name, _ in self._fs.list_files(directory):
            if "/" not in name:
                with contextlib.suppress(NotFound):
                    self._fs.unlink(os.path.join(directory, name))
        self._fs.sync_dir(directory)

    # ---- deleted topics ------------------------------------------------------------------------------

    def remove_files(self, topic: Topic) -> None:
        """Remove the segments of a durably deleted topic, after the current checkpoint.

        If copies in memory may have to be made again from it, its segments stay until the next checkpoint.
        """

        if topic.is_referred:
            self._leaving.append(topic)
        else:
            self._start_background(self._remove_segments(topic))

    async def _remove_segments(self, topic: Topic) -> None:
        try:
            if self._cold is not None:
                await self._cold.remove_topic(topic)
            await self._workers.tidy(lambda: self._tiers.remove_hot(topic.id))
        except PenstockError as error:
            _LOGGER.warning('topic "%s": left for the next start to remove: %s', topic.name, error)

    # ---- background work -----------------------------------------------------------------------------

    def _start_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _LOGGER.warning("old segments could not be moved and will be tried again: %s", error)

    async def _wait_background(self, tasks: Iterable[asyncio.Task[None]], at_most_s: float) -> None:
        """Wait until these tasks are done, or until the timeout."""
        waiting = set(tasks)
        if not waiting:
            return
        timer = asyncio.ensure_future(self._clock.sleep(at_most_s))
        try:
            while not timer.done() and any(not task.done() for task in waiting):
                undone = [task for task in waiting if not task.done()]
                await asyncio.wait([timer, *undone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()


def _ignore(outcome: asyncio.Future[float]) -> None:
    outcome.exception()
