"""The way of a bundle into the log and from there into the open segments.

The committer writes entries in the order in which they were submitted and delivers them in that order, on one
thread. Only what it delivers is added to the open segments. So nothing is open that is not in the log before
it, and no two threads can add in another order than the log has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.clock import Clock
from penstock.errors import PenstockError, Unavailable
from penstock.metrics import Registry
from penstock.quiver.config import WalConfig
from penstock.quiver.errors import AtCapacity, Closed
from penstock.quiver.logged_file import LoggedFile
from penstock.quiver.model import Pending
from penstock.quiver.open_buffer import OpenBuffer
from penstock.quiver.preparation import Prepared, Receipt
from penstock.quiver.wal import Wal
from penstock.quiver.wal_entry import encode_entry
from penstock.quiver.wal_layout import HEADER_BYTES
from penstock.storage import Entry, GroupCommitter, QueueFull, commit_entries

__all__ = ["Intake", "Settle"]

_QUEUE_MAX = 4096


Settle: TypeAlias = Callable[[Receipt | None, PenstockError | None], None]
"""Told once, on any thread, what became of a bundle; it must not wait or raise."""


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    bundle: Prepared
    receipt: Receipt
    settle: Settle


class Intake:
    """Takes bundles, from any thread, and answers when they are as safe as the flush policy says.

    Without a log (`wal` is None) a bundle is accepted as soon as it is in memory. Without threads everything
    happens within the call, which is how tests own every moment of it.
    """

    def __init__(
        self,
        wal: Wal | None,
        buffer: OpenBuffer,
        config: WalConfig,
        *,
        next_seq: int,
        clock: Clock,
        registry: Registry,
        threads: bool,
        logged_file: LoggedFile,
    ) -> None:
        self._wal = wal
        self._buffer = buffer
        self._config = config
        self._clock = clock
        self._next_seq = next_seq
        self._door = threading.Lock()
        self._failed = False
        self._is_closed = False
        self._logged = (0, 0)
        self._logged_file = logged_file
        self._sync_s = registry.histogram("quiver.wal.sync_seconds", "Time of one sync of the log.")
        self._committer = self._make_committer(wal, config) if wal is not None and threads else None

    def start(self) -> None:
        """Commit on a thread of its own from here on, unless there are to be none."""
        if self._committer is not None:
            self._committer.start()

    def _make_committer(self, wal: Wal, config: WalConfig) -> GroupCommitter:
        return GroupCommitter(
            wal.log,
            self._deliver,
            queue_max=_QUEUE_MAX,
            sync_interval_s=float("inf") if config.flush == "none" else config.flush_interval_s,
            window_max_s=config.flush_interval_s,
            quick_sync_s=0.0,
            one_by_one=config.flush == "always",
            on_sync=self._sync_s.observe,
            name="quiver-wal",
        )

    @property
    def next_seq(self) -> int:
        """The number that the next bundle gets."""
        return self._next_seq

    @property
    def logged(self) -> tuple[int, int]:
        """How far the log is durable: a position, and its last bundle. (0, 0) where nothing is synced."""
        return self._logged

    def take(self, bundle: Prepared, settle: Settle) -> None:
        """Accept a bundle; `settle` hears of it when it is safe, or that it is not.

        Raises `AtCapacity` when too many wait for the disk, and `Closed`; then `settle` is not called.
        """
        if self._wal is None:
            self._take_in_memory(bundle, settle)
            return
        with self._door:
            self._check_open()
            taken = _Taken(bundle, self._receipt(bundle), settle)
            buffers, byte_count = encode_entry(taken.receipt.ingest_ns, taken.receipt.wal_seq, bundle.parts)
            entry = Entry(buffers, byte_count, 1, self._config.syncs, context=taken)
            if self._committer is None:
                commit_entries(self._wal.log, [entry])
                self._deliver([entry])
            else:
                self._submit(self._committer, entry)

    def _submit(self, committer: GroupCommitter, entry: Entry) -> None:
        if self._failed:
            # Bundles do not build on each other: after a failure the next one starts afresh.
            self._failed = False
            committer.resume()
        self._buffer.expect(entry.byte_count)
        try:
            committer.submit(entry)
        except BaseException as error:
            self._buffer.expect(-entry.byte_count)
            if isinstance(error, QueueFull):
                raise AtCapacity(str(error), retry_after_s=0.1) from error
            raise

    def _take_in_memory(self, bundle: Prepared, settle: Settle) -> None:
        with self._door:
            self._check_open()
            receipt = self._receipt(bundle)
            end = self._buffer.end
            self._buffer.add(bundle.pending(receipt, end, end), end=end)
        settle(receipt, None)

    def _receipt(self, bundle: Prepared) -> Receipt:
        seq = self._next_seq
        self._next_seq += 1
        return Receipt(
            wal_seq=seq,
            ingest_ns=self._clock.now_ms() * 1_000_000,
            items=max(batch.num_rows for batch in bundle.batches),
            byte_count=bundle.byte_count,
        )

    def _deliver(self, entries: list[Entry]) -> None:
        """Called in the order of the log: add what is safe, then tell who waits."""
        assert self._wal is not None
        pending: list[Pending] = []
        end = 0
        arrived = sum(entry.byte_count for entry in entries) if self._committer is not None else 0
        for entry in entries:
            if entry.position is None or entry.error is not None:
                self._failed = True
                continue
            start = self._wal.position(entry.position)
            end = start + entry.byte_count
            pending += _taken(entry).bundle.pending(_taken(entry).receipt, start, end)
        self._buffer.add(pending, end=end, arrived=arrived)
        if end and self._config.syncs:
            seqs = [_taken(one).receipt.wal_seq for one in entries if one.position and one.error is None]
            self._logged = (end, max(seqs))
            self._logged_file.reach(*self._logged)
        for entry in entries:
            taken = _taken(entry)
            if entry.position is None or entry.error is not None:
                taken.settle(None, entry.error or Unavailable("the bundle was not written"))
            else:
                taken.settle(taken.receipt, None)

    def has_room(self, byte_count: int) -> bool:
        """Whether the log may have so many bytes more."""
        wal = self._wal
        if wal is None:
            return True
        files = wal.rotated_count
        used = self._buffer.end - wal.oldest + self._buffer.expected_bytes + HEADER_BYTES * (files + 1)
        if used + byte_count > self._config.max_bytes:
            return False
        return files < self._config.max_rotated_files or byte_count <= wal.log.room

    def rotate(self) -> None:
        """Start a new file of the log, so that the one before it can go once nothing in it is needed.

        Raises `Closed`: the directory may be somebody else's by then.
        """
        with self._door:
            self._check_open()
            if self._committer is not None:
                self._committer.rotate(self._skip_marks)
            elif self._wal is not None:
                self._wal.log.rotate()
                self._skip_marks()

    def _skip_marks(self) -> None:
        """Marks behind the last entry are nobody's, but keep files from being cut."""
        assert self._wal is not None
        self._buffer.add((), end=self._wal.active_start)

    def close(self) -> None:
        """Commit what was submitted, sync it, and take no more. Raises what the last sync raised."""
        with self._door:
            self._is_closed = True
            if self._committer is not None:
                self._committer.close()
            elif self._wal is not None:
                self._wal.log.sync()
            self._logged_file.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("this Quiver is closed; open it again")


def _taken(entry: Entry) -> _Taken:
    assert isinstance(entry.context, _Taken)
    return entry.context
