"""The write-ahead log of all topics, in shards that commit independently.

A topic belongs to one shard, so its submissions commit in order. All code here runs on the event loop's
thread, except for the commits. When a commit fails, every later submission on that shard fails as well,
because it depends on the failed one. Then `on_failure` releases the assigned sequence numbers, and the shard
continues with the next submission.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeAlias

from xxhash import xxh3_64_intdigest

from penstock.errors import PenstockError
from penstock.storage import AppendLog, Buffer, CommitStats, Entry, FileView, GroupCommitter, LogPosition
from penstock.topics.errors import CommitFailed, ShuttingDown, Throttled

_LOGGER = logging.getLogger(__name__)
_WAITING_BYTES_MAX: Final = 256 * 1024**2
"""The bytes that may wait for one shard's commit. The limit bounds memory when the disk is slow."""


class Committed(Protocol):
    """The receiver of a submission's outcome, on the event loop's thread and in order of submission."""

    def committed(self, entry: Entry, position: LogPosition) -> None: ...

    def failed(self, error: PenstockError) -> None: ...


MakeCommitter: TypeAlias = Callable[[AppendLog, Callable[[list[Entry]], None], int], GroupCommitter]
"""A factory for a log's committer, which takes the delivery callback and the shard number."""


def shard_folders(root: str, count: int) -> list[str]:
    """Return the folders of the shards. A single shard uses `root` itself."""
    return [root] if count == 1 else [os.path.join(root, f"shard-{number:02d}") for number in range(count)]


def shard_number(topic_id: int, count: int) -> int:
    """Return which of `count` shards a topic belongs to."""
    return xxh3_64_intdigest(topic_id.to_bytes(8, "little")) % count


class WalShard:
    """One log, its committer, and the submissions that are not yet decided."""

    def __init__(self, log: AppendLog, number: int, make: MakeCommitter, queue_max: int) -> None:
        self.log = log
        self.number = number
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._committer = make(log, self._deliver, number)
        self._generation = 0
        self._closed = False
        self._will_hand_over = self._is_committing = self._is_deciding = False
        self._turn_count = self._last_turn_count = 0
        """The submissions of this turn of the loop, and of the last earlier turn that had any."""
        self._deferred: list[Callable[[], None]] = []
        self._waiting = 0
        self._waiting_bytes = 0
        self._queue_max = queue_max
        self.fault: PenstockError | None = None
        """The error of the last write, or None after a success."""
        self.submit_full = 0
        """How often there was no room."""
        self.on_failure: Callable[[WalShard], None] = lambda _: None
        self.committed_offset = log.end
        """The end of the published log: everything before it is published, and nothing after it."""
        self.synced = LogPosition(0, 0)
        """The end of the durable log."""
        self.submitted_bytes = 0
        self._unpublished = ""
        """Why a committed entry is not visible. New writes are refused, because they would follow a gap."""
        self._committer.start()

    def check_room(self) -> None:
        """Raise `Throttled`, `ShuttingDown` or `CommitFailed` if a submission would be refused now."""
        if self._closed:
            raise ShuttingDown("the event log is closing; retry when it is back")
        if self._unpublished:
            raise CommitFailed(
                f"an earlier write is in the log and could not be published ({self._unpublished}); "
                "restart the server, which recovers it"
            )
        if self._waiting >= self._queue_max or self._waiting_bytes >= _WAITING_BYTES_MAX:
            self.submit_full += 1
            raise Throttled(f"{self._waiting} writes wait for the disk; retry in a moment")

    def defer_flush(self, send: Callable[[], None]) -> None:
        """Call `send` before the next submission, at the latest at the end of this turn of the loop.

        `send` submits the writes gathered until then. It does nothing if there are none.
        """
        self._deferred.append(send)
        self._hand_over_soon()

    @property
    def is_quiet(self) -> bool:
        """Return whether a submission that needs a sync is best committed now.

        It would most likely share its commit with no other submission: none is waiting, neither this turn of
        the loop nor the last active one has another, and the disk is fast.
        """
        if self._waiting or self._is_deciding or self._will_hand_over or self._last_turn_count > 1:
            return False
        return self._committer.is_quick

    def count_in(self) -> None:
        """Count one more gathered write. Its `submit` follows."""
        self._waiting += 1
        self._turn_count += 1

    def count_out(self, count: int) -> None:
        """Uncount writes that will not be submitted."""
        self._waiting -= count

    def submit(
        self,
        buffers: Sequence[Buffer],
        *,
        frames: int,
        sync: bool,
        waiting: Committed,
        urgent: bool = False,
        gathered: int = 0,
    ) -> None:
        """Queue frames that commit atomically. Call `check_room` first.

        An urgent entry may use the log's reserve when the disk is full. `gathered` is the number of writes in
        this entry that `count_in` has already counted.
        """
        if self._deferred:
            self.flush_pending()
        entry = Entry(
            buffers=buffers,
            byte_count=sum(map(len, buffers)),
            frame_count=frames,
            sync=sync,
            context=waiting,
            urgent=urgent,
            submissions=gathered or 1,
        )
        self._committer.submit(entry, hold=True)
        self._hand_over_soon()
        if not gathered:
            self.count_in()
        self._waiting_bytes += entry.byte_count
        self.submitted_bytes += entry.byte_count

    def _hand_over_soon(self) -> None:
        """Hand over at the end of this turn of the loop, together with its other submissions."""
        if not self._will_hand_over:
            self._will_hand_over = True
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        self._last_turn_count, self._turn_count = self._turn_count, 0
        try:
            while self._deferred:
                self.flush_pending()
        finally:
            self._will_hand_over = False
        self._committer.flush()

    def commit(self) -> None:
        """Hand over the submission to a quiet shard. It may be decided before this returns."""
        self._is_committing = True
        try:
            self._committer.flush()
        finally:
            self._is_committing = False

    def flush_pending(self) -> None:
        """Submit all gathered writes, so that nothing comes between them and the next submission."""
        deferred, self._deferred = self._deferred, []
        for send in deferred:
            send()

    def _deliver(self, entries: list[Entry]) -> None:
        """Deliver decided entries, on the commit thread or on the loop's thread for entries committed there.

        Entries keep their order across both threads: all go through the loop's one queue, unless no other
        entry is undecided.
        """
        if threading.get_ident() != self._loop_thread:
            self._loop.call_soon_threadsafe(self._decide, entries)
        elif self._is_committing:
            self._decide(entries)
        else:
            self._loop.call_soon(self._decide, entries)

    def _decide(self, entries: list[Entry]) -> None:
        # A callback may submit more entries. They must not be decided before the remaining ones.
        self._is_deciding = True
        try:
            self._decide_all(entries)
        finally:
            self._is_deciding = False

    def _decide_all(self, entries: list[Entry]) -> None:
        self._waiting -= sum([entry.submissions for entry in entries])
        self._waiting_bytes -= sum([entry.byte_count for entry in entries])
        failed: list[Entry] = []
        last: Entry | None = None
        is_ordinary = False
        for entry in entries:
            if entry.error is None:
                assert entry.position is not None
                waiting: Committed = entry.context  # type: ignore[assignment]
                # The waiter gets the entry. A reference back to it would keep the written bytes in memory
                # until the cycle collector runs, which is rare.
                entry.context, entry.buffers = None, ()
                try:
                    waiting.committed(entry, entry.position)
                except Exception as error:
                    # An error in one callback must not prevent the other entries from being decided.
                    _LOGGER.exception("a committed entry could not be published")
                    self._unpublished = f"{type(error).__name__}: {error}"
                    self.fault = CommitFailed(
                        f"the write is in the log, but not published: {self._unpublished}"
                    )
                    waiting.failed(self.fault)
                last = entry
                is_ordinary = is_ordinary or not entry.urgent
            else:
                failed.append(entry)
        if is_ordinary and not self._unpublished:
            self.fault = None  # an urgent entry proves nothing, because it may use the reserve of a full disk
        if last is not None and last.position is not None:
            file, offset = last.position
            self.committed_offset = LogPosition(file, offset + last.byte_count)
            if last.sync and last.byte_count:
                self.synced = self.committed_offset
        if failed:
            self._fail(failed)

    def _fail(self, entries: Iterable[Entry]) -> None:
        """Report failed entries. The first failure of a generation also resets the shard."""
        for entry in entries:
            if entry.generation == self._generation:
                self.flush_pending()  # they depend on the failed entry as well
                self._generation = self._committer.resume()
                self.on_failure(self)
            assert entry.error is not None
            self.fault = entry.error
            waiting: Committed = entry.context  # type: ignore[assignment]
            try:
                waiting.failed(entry.error)
            except Exception:
                # An error in one callback must not prevent the other notifications.
                _LOGGER.exception("the failure of an entry could not be reported")

    @property
    def fill(self) -> float:
        """Return the fill level of the commit queue, from 0 to 1."""
        return max(self._waiting / self._queue_max, self._waiting_bytes / _WAITING_BYTES_MAX)

    def widen(self, window_s: float) -> None:
        """Let each commit wait this long for more entries from now on."""
        self._committer.widen(window_s)

    def view(self, file: int) -> memoryview | FileView:
        """Return the bytes of a log file that rows point into."""
        return self.log.view(file)

    def path(self, file: int) -> str | None:
        """Return the path of a file, or None if it is not on disk or its bytes can no longer be trusted."""
        return self.log.path(file)

    @property
    def is_read_only(self) -> bool:
        """Return whether the last commit failed and the log has not been repaired since."""
        return self.log.room < 0

    def stats(self) -> CommitStats:
        return self._committer.stats()

    def stop(self) -> None:
        """Stop accepting submissions, and hand over the pending ones to the commit thread."""
        self.flush_pending()
        self._closed = True
        self._committer.flush()

    def close(self) -> None:
        """Commit and sync all submissions. Call `stop` first, on the event loop. Blocks."""
        self._closed = True
        try:
            self._committer.close()
        finally:
            self.log.close()


class Wal:
    """All shards of the log."""

    def __init__(self, shards: Sequence[WalShard]) -> None:
        self.shards = shards

    def shard_of(self, topic_id: int) -> WalShard:
        """Return the shard of a topic. It stays the same while the number of shards does."""
        return self.shards[shard_number(topic_id, len(self.shards))]

    def stop(self) -> None:
        """Stop accepting submissions."""
        for shard in self.shards:
            shard.stop()

    def close(self) -> None:
        """Close every shard, then raise the first error."""
        failed: PenstockError | None = None
        for shard in self.shards:
            try:
                shard.close()
            except PenstockError as error:
                failed = failed or error
        if failed is not None:
            raise failed


def group_committer(
    *, sync_interval_s: float, on_sync: Callable[[float], None] | None = None
) -> MakeCommitter:
    """Return a factory for committers, each with its own thread."""

    def make(log: AppendLog, deliver: Callable[[list[Entry]], None], number: int) -> GroupCommitter:
        return GroupCommitter(
            log,
            deliver,
            queue_max=sys.maxsize,  # the shard limits its waiting submissions
            sync_interval_s=sync_interval_s,
            on_sync=on_sync,
            name=f"topics-commit-{number}",
        )

    return make
