"""The ingest path: encoding a bundle, writing it to the log, adding it to open segments, flushing these.

The committer writes entries in the order in which they were submitted and delivers them in that order, on one
thread. Only delivered entries are added to the open segments. Every open bundle is therefore already in the
log, and bundles are added in the order of the log.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import pyarrow as pa

from penstock.clock import Clock
from penstock.errors import InvalidInput, PenstockError, Unavailable
from penstock.metrics import Registry
from penstock.quiver.config import WalConfig
from penstock.quiver.errors import AtCapacity, Closed
from penstock.quiver.model import Pending, Signal, Trigger, flat_slot, slot_name
from penstock.quiver.segments.memtable import Memtable
from penstock.quiver.segments.writer import SegmentWriter
from penstock.quiver.wal.entry import SlotPart, encode_entry, entry_bytes
from penstock.quiver.wal.layout import HEADER_BYTES
from penstock.quiver.wal.log import LoggedFile, Wal
from penstock.quiver.wal.payload import encode_part
from penstock.storage import Entry, GroupCommitter, QueueFull, commit_entries

Batches: TypeAlias = pa.RecordBatch | Mapping[int, pa.RecordBatch]
"""One batch, or a mapping of slots to batches."""

_ENDS: Final = struct.Struct("=ii")
_RAW: Final = pa.schema([pa.field("data", pa.binary(), nullable=False)])
_QUEUE_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """An accepted bundle: its number in the log, its ingestion time, its rows and its size."""

    wal_seq: int
    ingest_ns: int
    items: int
    byte_count: int


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBundle:
    """An encoded bundle: its batches by ascending slot, and their parts of the log entry."""

    batches: Sequence[pa.RecordBatch]
    parts: Sequence[SlotPart]
    byte_count: int

    @classmethod
    def of(cls, batches: Sequence[pa.RecordBatch], parts: Sequence[SlotPart]) -> EncodedBundle:
        """Create a bundle from its parts. Raise `LimitExceeded` if it is too large for an entry."""
        return cls(batches, parts, entry_bytes(parts))

    def pending(self, receipt: Receipt, start: int, end: int) -> list[Pending]:
        return [
            Pending(
                slot=part.slot,
                batch=batch,
                fingerprint=part.fingerprint,
                ingest_ns=receipt.ingest_ns,
                wal_seq=receipt.wal_seq,
                wal_start=start,
                wal_end=end,
                byte_count=part.byte_count,
            )
            for batch, part in zip(self.batches, self.parts, strict=True)
        ]


def encode_bundle(
    data: Batches, *, signal: Signal | str | None = None, slot: int | None = None
) -> EncodedBundle:
    """Encode a bundle. A single batch goes into `slot`, or into the flat slot of its `signal`.

    Raise `InvalidInput` for a value that is not a batch or has no slot, and `LimitExceeded` if it is too
    large for an entry.
    """
    batches = _by_slot(data, signal, slot)
    for number, batch in batches:
        slot_name(number)
        if not isinstance(batch, pa.RecordBatch):
            raise InvalidInput(f"slot {number} takes a pyarrow.RecordBatch, not {type(batch).__name__}")
    return EncodedBundle.of([batch for _, batch in batches], [encode_part(*one) for one in batches])


def raw_batch(data: bytes) -> pa.RecordBatch:
    """Return an unmodified request as a batch of one row that refers to its bytes."""
    ends = pa.py_buffer(_ENDS.pack(0, len(data)))
    column = pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(data)], null_count=0)
    return pa.RecordBatch.from_arrays([column], schema=_RAW)


def _by_slot(
    data: Batches, signal: Signal | str | None, slot: int | None
) -> list[tuple[int, pa.RecordBatch]]:
    if isinstance(data, Mapping):
        if slot is not None or not data:
            raise InvalidInput(
                "a mapping of slots to batches must have at least one batch, and excludes `slot`"
            )
        return sorted(data.items())
    if slot is not None:
        return [(slot, data)]
    return [(flat_slot(_signal(signal)), data)]


def _signal(signal: Signal | str | None) -> Signal:
    if signal is None:
        return Signal.OTHER
    try:
        return Signal(signal)
    except ValueError:
        names = ", ".join(one.value for one in Signal)
        raise InvalidInput(f"signal must be one of {names}, not {signal!r}") from None


Settle: TypeAlias = Callable[[Receipt | None, PenstockError | None], None]
"""A callback for the result of one bundle. It is called once, on any thread, and must not wait or raise."""


@dataclass(frozen=True, slots=True, eq=False)
class _PendingAppend:
    bundle: EncodedBundle
    receipt: Receipt
    settle: Settle


class Appender:
    """Writes bundles to the log and reports when each is durable by the flush policy. Any thread may use it.

    Without a log (`wal` is None) a bundle is accepted as soon as it is in memory. Without threads all work
    happens within the call, so that tests control each step.
    """

    def __init__(
        self,
        wal: Wal | None,
        memtable: Memtable,
        config: WalConfig,
        *,
        next_seq: int,
        clock: Clock,
        registry: Registry,
        threads: bool,
        logged_file: LoggedFile,
    ) -> None:
        self._wal = wal
        self._memtable = memtable
        self._config = config
        self._clock = clock
        self._next_seq = next_seq
        self._lock = threading.Lock()
        self._failed = False
        self._is_closed = False
        self._logged = (0, 0)
        self._logged_file = logged_file
        self._sync_s = registry.histogram("quiver.wal.sync_seconds", "Duration of one sync of the log.")
        self._committer = self._make_committer(wal, config) if wal is not None and threads else None

    def start(self) -> None:
        """Start the committing thread, if there is one."""
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
        """The number of the next bundle."""
        return self._next_seq

    @property
    def logged(self) -> tuple[int, int]:
        """The position and bundle number up to which the log is durable, or (0, 0) if nothing is synced."""
        return self._logged

    def append(self, bundle: EncodedBundle, settle: Settle) -> None:
        """Accept a bundle. `settle` is called when it is durable, or with the error.

        Raise `AtCapacity` if too many bundles wait for the disk, and `Closed`. Then `settle` is not called.
        """
        if self._wal is None:
            self._take_in_memory(bundle, settle)
            return
        with self._lock:
            self._check_open()
            accepted = _PendingAppend(bundle, self._receipt(bundle), settle)
            buffers, byte_count = encode_entry(
                accepted.receipt.ingest_ns, accepted.receipt.wal_seq, bundle.parts
            )
            entry = Entry(buffers, byte_count, 1, self._config.syncs, context=accepted)
            if self._committer is None:
                commit_entries(self._wal.log, [entry])
                self._deliver([entry])
            else:
                self._submit(self._committer, entry)

    def _submit(self, committer: GroupCommitter, entry: Entry) -> None:
        if self._failed:
            # Bundles do not depend on each other, so after a failure the next one starts afresh.
            self._failed = False
            committer.resume()
        self._memtable.expect(entry.byte_count)
        try:
            committer.submit(entry)
        except BaseException as error:
            self._memtable.expect(-entry.byte_count)
            if isinstance(error, QueueFull):
                raise AtCapacity(str(error), retry_after_s=0.1) from error
            raise

    def _take_in_memory(self, bundle: EncodedBundle, settle: Settle) -> None:
        with self._lock:
            self._check_open()
            receipt = self._receipt(bundle)
            end = self._memtable.end
            self._memtable.add(bundle.pending(receipt, end, end), end=end)
        settle(receipt, None)

    def _receipt(self, bundle: EncodedBundle) -> Receipt:
        seq = self._next_seq
        self._next_seq += 1
        return Receipt(
            wal_seq=seq,
            ingest_ns=self._clock.now_ms() * 1_000_000,
            items=max(batch.num_rows for batch in bundle.batches),
            byte_count=bundle.byte_count,
        )

    def _deliver(self, entries: list[Entry]) -> None:
        """Add durable bundles to the open segments, then report to the writers.

        It is called in the order of the log.
        """
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
            pending += _append_of(entry).bundle.pending(_append_of(entry).receipt, start, end)
        self._memtable.add(pending, end=end, arrived=arrived)
        if end and self._config.syncs:
            seqs = [_append_of(one).receipt.wal_seq for one in entries if one.position and one.error is None]
            self._logged = (end, max(seqs))
            self._logged_file.reach(*self._logged)
        for entry in entries:
            accepted = _append_of(entry)
            if entry.position is None or entry.error is not None:
                accepted.settle(None, entry.error or Unavailable("the bundle was not written"))
            else:
                accepted.settle(accepted.receipt, None)

    def has_room(self, byte_count: int) -> bool:
        """Return whether the log may grow by `byte_count` bytes."""
        wal = self._wal
        if wal is None:
            return True
        files = wal.rotated_count
        used = self._memtable.end - wal.oldest + self._memtable.expected_bytes + HEADER_BYTES * (files + 1)
        if used + byte_count > self._config.max_bytes:
            return False
        return files < self._config.max_rotated_files or byte_count <= wal.log.room

    def rotate(self) -> None:
        """Start a new log file, so that the previous one can be removed once it is no longer needed.

        Raise `Closed`, because the directory may belong to another process by then.
        """
        with self._lock:
            self._check_open()
            if self._committer is not None:
                self._committer.rotate(self._skip_marks)
            elif self._wal is not None:
                self._wal.log.rotate()
                self._skip_marks()

    def _skip_marks(self) -> None:
        """Skip marks after the last entry. They are not needed, but prevent files from being removed."""
        assert self._wal is not None
        self._memtable.add((), end=self._wal.active_start)

    def close(self) -> None:
        """Commit and sync the submitted bundles, and accept no more. Raise the error of the last sync."""
        with self._lock:
            self._is_closed = True
            if self._committer is not None:
                self._committer.close()
            elif self._wal is not None:
                self._wal.log.sync()
            self._logged_file.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("this Quiver is closed; open it again")


def _append_of(entry: Entry) -> _PendingAppend:
    assert isinstance(entry.context, _PendingAppend)
    return entry.context


class Flusher:
    """Moves accepted bundles from memory to segments, and truncates the log after them."""

    def __init__(self, memtable: Memtable, writer: SegmentWriter, wal: Wal | None) -> None:
        self._memtable = memtable
        self._writer = writer
        self._wal = wal

    def flush(self, trigger: Trigger = Trigger.FLUSH, timeout_s: float | None = None) -> None:
        """Seal open segments and wait until all sealed ones are on disk. Raise as `SegmentWriter.drain`."""
        self._memtable.seal_all(trigger)
        self._writer.drain(timeout_s)
        self.advance_log()

    def advance_log(self) -> None:
        """Record how far segments cover the log, and remove files that are not needed."""
        if self._wal is not None:
            self._wal.advance(self._memtable.needed())

    def cut_log(self) -> None:
        """Advance the log and remove the file that a rotation has just closed."""
        self.advance_log()
        if self._wal is not None:
            self._wal.tidy()
