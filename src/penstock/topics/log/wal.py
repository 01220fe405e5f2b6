"""The write-ahead log of all topics, in shards that commit independently.

A topic belongs to one shard, so what is submitted for it is committed in order. Everything here runs on the
event loop's thread, except for the commits. When one fails, whatever was submitted after it on that shard
fails as well, because it was built on it; then `on_failure` takes back what was assigned, and the shard
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
"""What may wait for one shard's commit, in bytes: memory stays bounded when the disk is slow."""


class Committed(Protocol):
    """Receives the outcome of a submission, on the event loop's thread and in the order of submission."""

    def committed(self, entry: Entry, position: LogPosition) -> None: ...

    def failed(self, error: PenstockError) -> None: ...


MakeCommitter: TypeAlias = Callable[[AppendLog, Callable[[list[Entry]], None], int], GroupCommitter]
"""A committer for a log, given where to deliver and the number of the shard."""


def shard_folders(root: str, count: int) -> list[str]:
    """Return the folders of the shards: `root` itself for a single one."""
    return [root] if count == 1 else [os.path.join(root, f"shard-{number:02d}") for number in range(count)]


def shard_number(topic_id: int, count: int) -> int:
    """Which of `count` shards a topic belongs to."""
    return xxh3_64_intdigest(topic_id.to_bytes(8, "little")) % count


class WalShard:
    """One log, its committer, and what was submitted and not yet decided."""

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
        """How many submissions this turn of the loop brought so far, and the last one that brought any."""
        self._deferred: list[Callable[[], None]] = []
        self._waiting = 0
        self._waiting_bytes = 0
        self._queue_max = queue_max
        self.fault: PenstockError | None = None
        """Why the last write failed; None again after one that did not."""
        self.submit_full = 0
        """How often there was no room."""
        self.on_failure: Callable[[WalShard], None] = lambda _: None
        self.committed_offset = log.end
        """Everything before this position was published, and nothing after it."""
        self.synced = LogPosition(0, 0)
        """Everything before this position is durable."""
        self.submitted_bytes = 0
        self._unpublished = ""
        """Why something that is committed is not visible: what is written now would follow a gap."""
        self._committer.start()

    def check_room(self) -> None:
        """Raises `Throttled`, `ShuttingDown` or `CommitFailed` if a submission now would not be taken."""
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
        """Have `send` called before anything else is submitted, at the end of this turn of the loop at the
        latest. It submits what it has gathered until then; if it has nothing any more, it does nothing.
        """
        self._deferred.append(send)
        self._hand_over_soon()

    @property
    def is_quiet(self) -> bool:
        """Whether a submission that needs a sync is best committed now: it would most likely share its
        commit with nobody, as nothing waits and neither this turn of the loop nor the last one that brought
        any has another, and the disk is quick.
        """
        if self._waiting or self._is_deciding or self._will_hand_over or self._last_turn_count > 1:
            return False
        return self._committer.is_quick

    def count_in(self) -> None:
        """Count one more write that is being gathered; its `submit` follows."""
        self._waiting += 1
        self._turn_count += 1

    def count_out(self, count: int) -> None:
        """Uncount writes that are not submitted after all."""
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
        """Queue frames that are committed together or not at all. Call `check_room` before.

        What is urgent may use the log's reserve when the disk is full. `gathered` is how many that were
        counted in this stands for.
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
        """Hand over at the end of this turn of the loop, with everything else that it submits."""
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
        """Hand over what was submitted to a quiet shard; it may be decided before this returns."""
        self._is_committing = True
        try:
            self._committer.flush()
        finally:
            self._is_committing = False

    def flush_pending(self) -> None:
        """Submit everything that is gathered: nothing comes between it and what follows."""
        deferred, self._deferred = self._deferred, []
        for send in deferred:
            send()

    def _deliver(self, entries: list[Entry]) -> None:
        """Called on the commit thread, or on the loop's for an entry that was committed there.

        Behind what the other thread delivered before in either case: there is one queue, unless nothing else
        is to be decided.
        """
        if threading.get_ident() != self._loop_thread:
            self._loop.call_soon_threadsafe(self._decide, entries)
        elif self._is_committing:
            self._decide(entries)
        else:
            self._loop.call_soon(self._decide, entries)

    def _decide(self, entries: list[Entry]) -> None:
        # A callback of one of them may submit more, which must not be decided before the rest of them.
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
                # The waiter gets the entry: a reference back to it would keep the written bytes in memory
                # until the cycle collector runs, which is rare.
                entry.context, entry.buffers = None, ()
                try:
                    waiting.committed(entry, entry.position)
                except Exception as error:
                    # An error in one callback must not keep the others from being decided.
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
            self.fault = None  # an urgent entry proves nothing: it may stand in the reserve of a full disk
        if last is not None and last.position is not None:
            file, offset = last.position
            self.committed_offset = LogPosition(file, offset + last.byte_count)
            if last.sync and last.byte_count:
                self.synced = self.committed_offset
        if failed:
            self._fail(failed)

    def _fail(self, entries: Iterable[Entry]) -> None:
        """The first failure of a generation takes everything back; the later ones are only notified."""
        for entry in entries:
            if entry.generation == self._generation:
                self.flush_pending()  # they built on it as well
                self._generation = self._committer.resume()
                self.on_failure(self)
            assert entry.error is not None
            self.fault = entry.error
            waiting: Committed = entry.context  # type: ignore[assignment]
            try:
                waiting.failed(entry.error)
            except Exception:
                # An error in one callback must not keep the others from being notified.
                _LOGGER.exception("the failure of an entry could not be reported")

    @property
    def fill(self) -> float:
        """The fill level of the commit queue, from 0 to 1."""
        return max(self._waiting / self._queue_max, self._waiting_bytes / _WAITING_BYTES_MAX)

    def widen(self, window_s: float) -> None:
        """From now on let a commit wait this long for more."""
        self._committer.widen(window_s)

    def view(self, file: int) -> memoryview | FileView:
        """The bytes of a log file that rows point into."""
        return self.log.view(file)

    def path(self, file: int) -> str | None:
        """Return the path of a file; None if it is not on disk, or its bytes can no longer be trusted."""
        return self.log.path(file)

    @property
    def is_read_only(self) -> bool:
        """Whether the last commit failed and the log has not been mended since."""
        return self.log.room < 0

    def stats(self) -> CommitStats:
        return self._committer.stats()

    def stop(self) -> None:
        """Accept nothing more; what was submitted goes to the commit thread."""
        self.flush_pending()
        self._closed = True
        self._committer.flush()

    def close(self) -> None:
        """Commit what was submitted and sync it. Call `stop` before, on the event loop. Blocks."""
        self._closed = True
        try:
            self._committer.close()
        finally:
            self.log.close()


class Wal:
    """All shards."""

    def __init__(self, shards: Sequence[WalShard]) -> None:
        self.shards = shards

    def shard_of(self, topic_id: int) -> WalShard:
        """Return the shard of a topic, which is the same as long as the number of shards is."""
        return self.shards[shard_number(topic_id, len(self.shards))]

    def stop(self) -> None:
        """Take nothing more."""
        for shard in self.shards:
            shard.stop()

    def close(self) -> None:
        """Close every shard, then raise what the first one that failed raised."""
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
    """Committers with a thread each."""

    def make(log: AppendLog, deliver: Callable[[list[Entry]], None], number: int) -> GroupCommitter:
        return GroupCommitter(
            log,
            deliver,
            queue_max=sys.maxsize,  # the shard counts what waits
            sync_interval_s=sync_interval_s,
            on_sync=on_sync,
            name=f"topics-commit-{number}",
        )

    return make
