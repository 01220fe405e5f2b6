"""The offset log and its checkpoints: appending outcomes, replaying them, and tracking what is durable.

Replaying writes nothing to the log, so repeating it, or crashing during it, changes nothing. Damaged files
are copied to `quarantine/` before anything may overwrite or remove them.

After a start it is unknown whether replayed records are on the disk or only in the page cache, and a sync of
files that another process wrote proves nothing. No replayed record is therefore relied on until a checkpoint
of this process contains it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from penstock.clock import Clock
from penstock.errors import Conflict, PenstockError, StorageFull
from penstock.quiver.errors import Closed
from penstock.quiver.model import SegmentInfo
from penstock.quiver.offsets.checkpoint import CHECKPOINT, CheckpointState, load_checkpoint, store_checkpoint
from penstock.quiver.offsets.log_files import LogFileInfo, OffsetLogWriter, list_logs, read_log
from penstock.quiver.offsets.progress import Ranges
from penstock.quiver.offsets.records import WHOLE_SEGMENT, Outcome, RecordKind, name_parts
from penstock.quiver.offsets.state import Gone, OffsetState, SubscriberEntry
from penstock.quiver.wal.log import read_logged
from penstock.storage import FileSystem, stage

_LOGGER = logging.getLogger(__name__)
_NS_PER_MS: Final = 1_000_000
_AGAIN_S: Final = 1.0
_MISSING_RECORDS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The replayed state and the files that it was read from."""

    state: OffsetState
    files: list[LogFileInfo]
    last_number: int
    checkpoint_number: int
    generation: int
    records: int
    """The number of records after the checkpoint."""
    is_newest: bool
    """Whether the checkpoint that was read is the newest one."""
    damage: tuple[str, ...]


@dataclass(slots=True)
class _Pass:
    """The progress of one pass over the log."""

    state: OffsetState
    last_number: int
    records: int = 0
    lost: int = 0


def replay(fs: FileSystem, core_dir: str, *, keep_evidence: bool = True) -> Replayed:
    """Read the checkpoint and the log. Raise only if the disk cannot be read at all.

    Without `keep_evidence` nothing is written; read-only callers use this.
    """
    ack_dir, meta_dir = os.path.join(core_dir, "ack"), os.path.join(core_dir, "meta")
    loaded = load_checkpoint(fs, meta_dir)
    damage = list(loaded.damage)
    if loaded.damage and keep_evidence:
        _keep_evidence(fs, core_dir, meta_dir, [CHECKPOINT, f"{CHECKPOINT}.1"])
    start = loaded.state.last_number if loaded.state is not None else 0
    progress = _Pass(OffsetState.restore(loaded.state) if loaded.state is not None else OffsetState(), start)
    files: list[LogFileInfo] = []
    for file in list_logs(fs, ack_dir):
        problems = _replay_file(fs, os.path.join(ack_dir, file.name), progress)
        if problems:
            damage += problems
            if keep_evidence:
                _keep_evidence(fs, core_dir, ack_dir, [file.name])
        files.append(replace(file, last_number=progress.last_number))
    progress.state.note_logged(*read_logged(fs, meta_dir))
    if progress.state.unknown_subscribers:
        damage.append(
            f"{progress.state.unknown_subscribers} outcomes belong to subscribers whose definition was lost"
        )
    for text in damage if keep_evidence else ():
        _LOGGER.error("acknowledgements: %s", text)
    return Replayed(
        state=progress.state,
        files=files,
        last_number=progress.last_number,
        checkpoint_number=start,
        generation=loaded.state.generation if loaded.state is not None else 0,
        records=progress.records,
        is_newest=loaded.is_newest,
        damage=tuple(damage),
    )


def _replay_file(fs: FileSystem, path: str, progress: _Pass) -> list[str]:
    """Apply the new records of one file and return descriptions of its problems."""
    problems: list[str] = []
    unreadable = 0
    view = fs.open_view(path)
    for record in read_log(view):
        if record is None:
            unreadable += 1
            continue
        if unreadable:
            problems.append(f"{path}: {unreadable} records before number {record.number} cannot be read")
            unreadable = 0
        if record.number <= progress.last_number:
            continue
        lost = record.number - progress.last_number - 1
        if lost and progress.last_number:
            problems.append(f"{path}: {lost} records before number {record.number} are missing")
            progress.lost += lost
        progress.state.apply(record)
        progress.last_number = record.number
        progress.records += 1
    # Other bytes at the end of a file are a write that a crash cut off. It was never durable.
    problems += [f"{path}: the device cannot read bytes {start} to {end}" for start, end in view.bad]
    return problems


def _keep_evidence(fs: FileSystem, core_dir: str, directory: str, names: list[str]) -> None:
    """Copy damaged files to the quarantine. A copy that fails is only logged."""
    for name in names:
        try:
            quarantine = os.path.join(core_dir, "quarantine")
            fs.make_dirs(quarantine)
            data = fs.open_view(os.path.join(directory, name))[:]
            stage(fs, os.path.join(quarantine, f"{name}-{len(data)}"), [data])
            fs.sync_dir(quarantine)
        except Conflict:
            continue  # already copied
        except PenstockError as error:
            _LOGGER.warning("cannot copy a damaged file to the quarantine: %s", error)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetLogSettings:
    """When the log is synced and when a checkpoint is written."""

    flush_interval_s: float = 0.1
    checkpoint_bytes: int = 16_000_000
    checkpoint_records: int = 100_000
    checkpoint_interval_s: float = 60.0


class OffsetLog:
    """The log and its checkpoints. Records are appended under the lock of the offsets and written outside it.

    `save` returns the state for a checkpoint, given its generation and a function for the last number. It
    holds the lock, so nothing is appended meanwhile. `repeat` appends the definition of every subscriber.
    """

    def __init__(
        self,
        fs: FileSystem,
        core_dir: str,
        replayed: Replayed,
        settings: OffsetLogSettings,
        clock: Clock,
        *,
        save: Callable[[int, Callable[[], int]], CheckpointState],
        repeat: Callable[[], None],
    ) -> None:
        self._fs = fs
        self._meta_dir = os.path.join(core_dir, "meta")
        self._settings = settings
        self._clock = clock
        self._save = save
        self._repeat = repeat
        self._log = OffsetLogWriter(
            fs, os.path.join(core_dir, "ack"), files=replayed.files, next_number=replayed.last_number + 1
        )
        self._log.trust(replayed.checkpoint_number)
        self._is_trusted = replayed.records == 0
        self._keep_newest = replayed.is_newest
        self._generation = replayed.generation
        self._checkpoint_number = replayed.checkpoint_number
        self._summed_number = replayed.last_number if self._is_trusted else replayed.checkpoint_number
        self._checkpoint_s = self._synced_s = clock.monotonic()
        self._again_s = 0.0
        self._is_closed = False
        self._io = threading.RLock()

    # ---- appending -----------------------------------------------------------------------------------

    def append_outcome(
        self, entry: SubscriberEntry, seq: int, bundle: int, outcome: Outcome, attempt: int
    ) -> int:
        return self._log.append(
            RecordKind.OUTCOME,
            outcome=outcome,
            subscriber=entry.index,
            segment_seq=seq,
            bundle=bundle,
            attempt=attempt,
            ts_ns=self.now_ns(),
        )

    def append_gone(self, first: int, last: int, why: Gone) -> int:
        """Append a range of segment numbers that are gone or never existed. Its length has 64 bits."""
        high, low = divmod(last + 1 - first, 1 << 32)
        return self._log.append(
            RecordKind.DELETED,
            outcome=why,
            segment_seq=first,
            bundle=low,
            attempt=high,
            ts_ns=self.now_ns(),
        )

    def append_logged(self, end: int, seq: int, written_seq: int) -> int:
        """Append the durable end of the write-ahead log and the number of the last written segment."""
        high, low = divmod(seq, 1 << 32)
        return self._log.append(
            RecordKind.LOGGED, segment_seq=end, bundle=low, attempt=high, ts_ns=written_seq
        )

    def append_state(self, entry: SubscriberEntry) -> int:
        return self._log.append(
            RecordKind.STATE, outcome=entry.state, subscriber=entry.index, ts_ns=self.now_ns()
        )

    def append_unregister(self, entry: SubscriberEntry, abandoned_through: int) -> int:
        return self._log.append(
            RecordKind.UNREGISTER,
            subscriber=entry.index,
            segment_seq=abandoned_through,
            ts_ns=self.now_ns(),
        )

    def append_definition(self, entry: SubscriberEntry) -> int:
        """Append a subscriber with its high-water mark, followed directly by its name in pieces."""
        number = self._log.append(
            RecordKind.SUBSCRIBER,
            outcome=entry.state,
            subscriber=entry.index,
            segment_seq=entry.progress.hwm,
            bundle=len(entry.name),
            ts_ns=self.now_ns(),
        )
        for part, text in enumerate(name_parts(entry.name)):
            number = self._log.append_name(entry.index, part, text)
        return number

    def now_ns(self) -> int:
        return self._clock.now_ms() * _NS_PER_MS

    # ---- what is durable -----------------------------------------------------------------------------

    def is_durable(self, number: int) -> bool:
        """Return whether this record and all before it survive a power cut."""
        return self._is_trusted and number <= self._log.synced_number

    def sync(self) -> None:
        """Return when every record so far is durable. Raise errors of the disk; nothing is lost then."""
        with self._io:
            self._log.sync()
            self._synced_s = self._clock.monotonic()

    def checkpoint(self) -> None:
        """Write a checkpoint durably. Remove files that neither it nor the previous checkpoint needs.

        Raise errors of the disk; then the previous checkpoint and the whole log stay valid. Raise `Closed`
        after `close`.
        """
        with self._io:
            if self._is_closed:
                # The directory may belong to another process by now.
                raise Closed("the acknowledgement log is closed")
            self.sync()
            saved = self._save(self._generation + 1, lambda: self._log.last_number)
            self._store(saved)
            self._generation = saved.generation
            self._keep_newest = self._is_trusted = True
            self._log.trust(saved.last_number)
            self._log.rotate()
            # The newest checkpoint may turn out unreadable, so the log after the previous one is kept.
            self._log.drop_through(self._checkpoint_number)
            self._checkpoint_number = saved.last_number
            self._checkpoint_s = self._clock.monotonic()
            self._repeat()
            self._log.keep_reserve()

    def _store(self, saved: CheckpointState) -> None:
        try:
            store_checkpoint(self._fs, self._meta_dir, saved, keep_newest=self._keep_newest)
        except StorageFull:
            if not self._log.spend_reserve():
                raise
            store_checkpoint(self._fs, self._meta_dir, saved, keep_newest=self._keep_newest)

    def keep_reserve(self) -> None:
        """Reserve some disk space for the acks of a full disk, if there is any."""
        self._log.keep_reserve()

    def repeated(self) -> None:
        """Mark everything appended so far as covered by the checkpoint."""
        self._summed_number = self._log.last_number

    @property
    def has_changes(self) -> bool:
        """Whether any record is not covered by a checkpoint of this process."""
        return self._log.last_number > self._summed_number or not self._is_trusted

    def tend(self) -> None:
        """Sync and checkpoint if they are due. Raise as they do, and do nothing for a second after that."""
        now_s = self._clock.monotonic()
        if now_s < self._again_s:
            return
        try:
            if self._log.has_pending and now_s - self._synced_s >= self._settings.flush_interval_s:
                self.sync()
            if self._is_checkpoint_due(now_s):
                self.checkpoint()
        except PenstockError:
            self._again_s = now_s + _AGAIN_S
            raise

    def _is_checkpoint_due(self, now_s: float) -> bool:
        if not self._is_trusted:
            return True
        return self.has_changes and (
            self.since_checkpoint >= self._settings.checkpoint_records
            or self._log.current_bytes >= self._settings.checkpoint_bytes
            or now_s - self._checkpoint_s >= self._settings.checkpoint_interval_s
        )

    # ---- looking -------------------------------------------------------------------------------------

    @property
    def byte_count(self) -> int:
        """The size of the log on disk, in bytes."""
        return self._log.byte_count

    @property
    def since_checkpoint(self) -> int:
        """The number of records after the last checkpoint. A start replays at most twice as many."""
        return self._log.last_number - self._checkpoint_number

    @property
    def records(self) -> int:
        """The number of the last record."""
        return self._log.last_number

    def close(self) -> None:
        """Checkpoint changes and close the file. Raise errors of the disk; the log is closed even then."""
        with self._io:
            if self._is_closed:
                return
            try:
                if self.has_changes:
                    self.checkpoint()
            finally:
                self._is_closed = True
                self._log.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The loss of a segment that not every subscriber had resolved."""

    info: SegmentInfo | None
    """The segment's metadata, or None if only its number is known."""
    subscribers: tuple[str, ...]
    """The subscribers that had not resolved it."""
    bundles: int
    """The highest number of bundles that one of them missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """The segments and bundles that a start found missing or damaged."""

    missing: tuple[tuple[int, int], ...] = ()
    """The missing segments that a subscriber needs: first and last number of each hole."""
    corrupt: tuple[Dropped, ...] = ()
    """The quarantined segments that a subscriber needs."""
    expired: tuple[Dropped, ...] = ()
    unlogged: int = 0
    """The number of accepted bundles that are neither in a segment nor in the log."""


def record_missing(
    state: OffsetState,
    log: OffsetLog,
    holes: Iterable[tuple[int, int]],
    quarantined_infos: Mapping[int, SegmentInfo | None],
) -> RecoveryReport:
    """Record the numbers in `holes` as dropped: corrupt if in `quarantined_infos`, otherwise missing.

    The caller holds the lock of the offsets.
    """
    quarantined = Ranges((seq, seq) for seq in quarantined_infos)
    corrupt: list[Dropped] = []
    missing: list[tuple[int, int]] = []
    for first, last in holes:
        inside = [seq for seq in sorted(quarantined_infos) if first <= seq <= last]
        corrupt += [_record_corrupt(state, log, seq, quarantined_infos[seq]) for seq in inside]
        missing += quarantined.missing(first, last)
    for first, last in missing:
        _record_hole(state, log, first, last)
    return RecoveryReport(missing=tuple(missing), corrupt=tuple(corrupt))


def _record_corrupt(state: OffsetState, log: OffsetLog, seq: int, info: SegmentInfo | None) -> Dropped:
    missed: dict[str, int] = {}
    for entry in state.subscribers.values():
        done = entry.progress.resolved_in(seq)
        if entry.progress.resolve_segment(seq):
            bundles = missed[entry.name] = 0 if info is None else info.bundle_count - done
            entry.counters[Outcome.DROPPED] += bundles
            log.append_outcome(entry, seq, WHOLE_SEGMENT, Outcome.DROPPED, bundles)
    log.append_gone(seq, seq, Gone.CORRUPT)
    state.absent.add(seq)
    return Dropped(info=info, subscribers=tuple(missed), bundles=max(missed.values(), default=0))


def _record_hole(state: OffsetState, log: OffsetLog, first: int, last: int) -> None:
    for entry in state.subscribers.values():
        # A hole of any length is one record. The outcomes are for the audit.
        for seq in range(first, min(last, first + _MISSING_RECORDS_MAX - 1) + 1):
            if entry.progress.resolve_segment(seq):
                log.append_outcome(entry, seq, WHOLE_SEGMENT, Outcome.DROPPED, 0)
    log.append_gone(first, last, Gone.MISSING)
    state.absent.add(first, last)


def record_unlogged(state: OffsetState, log: OffsetLog, bundles: int) -> None:
    """Record bundles that the write-ahead log lost as dropped for every subscriber.

    They never reached a segment, so a new segment number stands for them. The caller holds the lock of the
    offsets.
    """
    seq = state.highest_seq + 1
    state.skip_through(seq)
    for entry in state.subscribers.values():
        if entry.progress.resolve_segment(seq):
            entry.counters[Outcome.DROPPED] += bundles
            log.append_outcome(entry, seq, WHOLE_SEGMENT, Outcome.DROPPED, bundles)
    log.append_gone(seq, seq, Gone.MISSING)
