"""Recovery of a core directory after a clean stop, a crash or damage.

The order follows the dependencies: progress, segments, their comparison, then the log. Repeating the
recovery, even after a crash in the middle, leads to the same state.

A segment holds one stream, but the log also has entries of other streams between the segment's first and last
entry. So neither the cursor nor the range of a segment shows which entries are committed; the entry numbers
stored with the segment's bundles do. An entry with several slots may be partly committed, so each part is
looked up separately.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.clock import Clock
from penstock.errors import Corrupt
from penstock.quiver.config import QuiverConfig
from penstock.quiver.model import Pending, SealedSegment, SegmentInfo, StreamKey, Trigger
from penstock.quiver.offsets.log import OffsetLogSettings, RecoveryReport
from penstock.quiver.offsets.store import SubscriptionStore
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.wal.entry import (
    ENTRY_BYTES_MIN,
    EntryType,
    SlotPart,
    WalEntry,
    WalFormat,
    entry_body,
    entry_type,
)
from penstock.quiver.wal.layout import QuiverLayout
from penstock.quiver.wal.log import Wal, unreadable_notes
from penstock.quiver.wal.payload import decode_batch
from penstock.quiver.wal.replay import FoundEntry, Gap, WalReplay, quarantine_damage, read_wal
from penstock.storage import FileSystem, LogPosition, scan, write_durably

_LOGGER = logging.getLogger(__name__)
_COUNTED = "quiver.wal.counted-"
"""The prefix of a file in quarantine. The file says that bundles lost from this number on are counted."""


@dataclass(slots=True, kw_only=True, eq=False)
class Recovered:
    """A recovered core directory. Its parts are open, and the log is read but not yet replayed."""

    offsets: SubscriptionStore
    store: SegmentStore
    wal: Wal | None
    losses: RecoveryReport
    next_segment_seq: int
    cursor: int
    replay: WalReplay | None
    expired_before_ns: int | None = None
    damage: list[str] = field(default_factory=list)
    next_wal_seq: int = 1
    replayed: int = 0
    """The number of bundle parts that were taken from the log."""
    deduplicated: int = 0
    """The number of bundle parts that a committed segment already has."""
    expired: int = 0
    """The number of bundles in the log that exceed the maximum age."""
    _committed: dict[tuple[int, str], set[int]] = field(default_factory=dict)

    def pending(self) -> Iterator[tuple[list[Pending], int]]:
        """Yield the parts in the log that no segment has, entry by entry, with the end of the entry."""
        if self.replay is None:
            return
        for found in self.replay.entries():
            if self.expired_before_ns is not None and found.entry.ingest_ns < self.expired_before_ns:
                self.expired += 1
                yield [], found.end
            else:
                yield self._parts(found), found.end

    def _parts(self, found: FoundEntry) -> list[Pending]:
        entry, parts = found.entry, []
        for part in entry.parts:
            if entry.wal_seq in self._committed.get((part.slot, part.fingerprint.hex()), ()):
                self.deduplicated += 1
            else:
                pending = self._part(found, entry, part)
                parts += [] if pending is None else [pending]
        self.replayed += len(parts)
        return parts

    def _part(self, found: FoundEntry, entry: WalEntry, part: SlotPart) -> Pending | None:
        try:
            batch = decode_batch(part)
        except Corrupt as error:
            self.report(f"entry {entry.wal_seq} of the log: {error}")
            return None
        return Pending(
            slot=part.slot,
            batch=batch,
            fingerprint=part.fingerprint,
            ingest_ns=entry.ingest_ns,
            wal_seq=entry.wal_seq,
            wal_start=found.start,
            wal_end=found.end,
            byte_count=part.byte_count,
        )

    def report(self, text: str) -> None:
        _LOGGER.error("%s", text)
        self.damage.append(text)


def recover(fs: FileSystem, core_dir: str, config: QuiverConfig, *, core_id: int, clock: Clock) -> Recovered:
    """Open all files of a directory that this process has locked.

    Raise `Unsupported` for files of a later version, and `Corrupt` for a damaged log if the configuration
    requires it. In both cases nothing is changed.
    """
    wal_dir, quarantine = os.path.join(core_dir, "wal"), os.path.join(core_dir, "quarantine")
    replay = read_wal(fs, wal_dir)
    first_seq = _first_seq(replay)
    _refuse_damage(replay, config)
    offsets = SubscriptionStore(fs, core_dir, _ack_settings(config), clock)
    replay.expect(offsets.state.logged[0])
    _refuse_damage(replay, config)
    store = SegmentStore.open(
        fs,
        os.path.join(core_dir, "segments"),
        quarantine,
        core_id=core_id,
        read_mode=config.segment.read_mode,
        verify=config.segment.verify_on_open,
        wal_cursor=replay.cursor,
        rebuild=not config.has_wal,
    )
    committed = {} if first_seq is None else _committed(store, first_seq)
    if rebuild_segments(store, offsets, fs, wal_dir) and first_seq is not None:
        committed = _committed(store, first_seq)
    age_s = config.retention.max_age_s
    expired_before_ns = None if age_s is None else int((clock.now_ms() / 1000 - age_s) * 1e9)
    unlogged = _unlogged(replay, store, offsets.state.logged)
    gaps = _uncounted(fs, quarantine, replay, offsets.state.logged[1])
    unlogged += sum(_missing(gap, store) for gap in gaps)
    losses = offsets.reconcile(
        store.infos(),
        expired_before_ns=expired_before_ns,
        highest_seq=store.highest_seq,
        quarantined=store.quarantined,
        unlogged=unlogged,
    )
    _mark_counted(fs, quarantine, replay, gaps)
    infos = store.infos()
    replay.raise_base(max([info.wal_end for info in infos], default=0))
    found = Recovered(
        offsets=offsets,
        store=store,
        wal=None,
        losses=losses,
        next_segment_seq=max(offsets.state.next_segment_seq, store.highest_seq + 1),
        cursor=replay.cursor,
        replay=replay,
        expired_before_ns=expired_before_ns,
        _committed=committed,
    )
    _report_damage(fs, replay, found, quarantine)
    for subject, text in unreadable_notes(fs, core_dir):
        found.report(f"{subject}: {text}. Nothing is lost by that, but a loss of the log may not be noticed")
    if config.has_wal or replay.found.files:
        found.wal = Wal.open(fs, wal_dir, replay, rotation_bytes=config.wal.rotation_bytes)
    numbers = [replay.highest_seq, *(info.wal_seq_max for info in infos)]
    if not replay.highest_seq:
        # No entry is left. Each took more than a byte, so no number is above the end of the log.
        numbers.append(replay.end)
    found.next_wal_seq = max(offsets.state.next_wal_seq, 1 + max(numbers))
    if replay.is_short:
        # The number of lost bundles is unknown, but they fitted into the log.
        found.next_wal_seq += config.wal.max_bytes // ENTRY_BYTES_MIN
    return found


def _first_seq(replay: WalReplay) -> int | None:
    """Read all entries after the cursor and return the number of the first one."""
    first: int | None = None
    for found in replay.entries():
        first = found.entry.wal_seq if first is None else first
    return first


def _refuse_damage(replay: WalReplay, config: QuiverConfig) -> None:
    if replay.damage and config.wal.on_corruption == "fail":
        raise Corrupt(f"the log is damaged and wal.on_corruption is 'fail': {replay.damage[0]}")


def _report_damage(fs: FileSystem, replay: WalReplay, found: Recovered, quarantine: str) -> None:
    copies = quarantine_damage(fs, replay, quarantine)
    for damage in replay.damage:
        found.report(f"the log is damaged: {damage}")
    if found.losses.unlogged:
        found.report(
            f"{found.losses.unlogged} accepted bundles up to number {found.offsets.state.logged[1]} are "
            "neither in a segment nor in the log: they are recorded as dropped for every subscriber"
        )
    for first, last in found.losses.missing:
        found.damage.append(f"segments {first} to {last} are missing and recorded as dropped")
    for copy in copies:
        _LOGGER.error("the damaged part of the log was copied to %s", copy)
    found.damage += [f"segment {one.seq} is {one.action.value}: {one.reason}" for one in found.store.damage]
    found.damage += found.offsets.damage


def _unlogged(replay: WalReplay, store: SegmentStore, logged: tuple[int, int]) -> int:
    """Count bundles that were durable in the log and are now neither in it nor in a committed segment.

    This is an upper bound: the number of a bundle whose write failed looks the same.
    """
    end, last = logged
    if not replay.is_short or end <= (replay.sidecar or 0):
        return 0
    infos = store.infos()
    cursor = replay.sidecar or 0
    cut = [info.wal_seq_max for info in infos if info.wal_end <= cursor]
    first = 1 + max([replay.highest_seq, *cut])
    committed = set().union(*_committed(store, first).values())
    missing = last + 1 - first - sum(first <= seq <= last for seq in committed)
    return max(0, min(missing, (end - cursor) // ENTRY_BYTES_MIN))


def _uncounted(fs: FileSystem, quarantine: str, replay: WalReplay, last_seq: int) -> list[Gap]:
    """Return the gaps that no earlier start has counted. A damaged file stays until it is not needed."""
    names = {name for name, _ in fs.list_files(quarantine)}
    return [gap for gap in replay.gaps(last_seq) if f"{_COUNTED}{gap.first}" not in names]


def _mark_counted(fs: FileSystem, quarantine: str, replay: WalReplay, gaps: list[Gap]) -> None:
    """Record these gaps, and the lost end of a log, so that the next start does not count them again."""
    for first in [gap.first for gap in gaps] + [replay.highest_seq + 1] * replay.is_short:
        fs.make_dirs(quarantine)
        write_durably(fs, os.path.join(quarantine, f"{_COUNTED}{first}"), [b"counted"], staging=quarantine)


def _missing(gap: Gap, store: SegmentStore) -> int:
    """Return an upper bound on the bundles of a gap in the log that no committed segment has."""
    committed = set().union(*_committed(store, gap.first).values())
    missing = gap.last + 1 - gap.first - sum(gap.first <= seq <= gap.last for seq in committed)
    return max(0, min(missing, gap.byte_count // ENTRY_BYTES_MIN))


def _committed(store: SegmentStore, first_seq: int) -> dict[tuple[int, str], set[int]]:
    """Return the entries from `first_seq` on that the committed segments of each stream have.

    An unreadable segment is quarantined here, while the log may still have its contents.
    """
    numbers: dict[tuple[int, str], set[int]] = defaultdict(set)
    for info in store.infos():
        if info.wal_seq_max < first_seq:
            continue
        try:
            bundles = store.bundle_metadata(info.seq)
        except Corrupt as error:
            store.quarantine(info.seq, str(error))
            continue
        numbers[info.slot, info.schema_hash].update(bundle.wal_seq for bundle in bundles)
    return numbers


def _ack_settings(config: QuiverConfig) -> OffsetLogSettings:
    return OffsetLogSettings(
        flush_interval_s=config.ack.flush_interval_s,
        checkpoint_bytes=config.ack.checkpoint_log_bytes,
        checkpoint_records=config.ack.checkpoint_records,
        checkpoint_interval_s=config.ack.checkpoint_interval_s,
    )


def rebuild_segments(
    store: SegmentStore, offsets: SubscriptionStore, fs: FileSystem, wal_dir: str
) -> list[int]:
    """Rebuild every quarantined segment that a subscriber needs and that the log has completely.

    Return their numbers. Call it before the offsets are reconciled with the store. It may be repeated after a
    crash. Raise errors of the disk.
    """
    rebuilt: list[int] = []
    for seq, info in store.quarantined.items():
        is_awaited = info is not None and offsets.state.is_awaited(seq, info.bundle_count)
        if info is not None and is_awaited and rebuild_segment(store, info, fs, wal_dir):
            rebuilt.append(seq)
    return rebuilt


def rebuild_segment(store: SegmentStore, info: SegmentInfo, fs: FileSystem, wal_dir: str) -> bool:
    """Write this segment again if the log has all of it. Raise errors of the disk.

    The log is read from its oldest file on, even while it is being written.
    """
    parts = list(_parts_of(info, fs, wal_dir))
    rows = sum(part.batch.num_rows for part in parts)
    if (len(parts), rows) != (info.bundle_count, info.item_count):
        return False
    sealed = SealedSegment(
        key=StreamKey(info.slot, bytes.fromhex(info.schema_hash)),
        parts=parts,
        byte_count=sum(part.byte_count for part in parts),
        trigger=Trigger.FLUSH,
    )
    store.put_back(sealed, info, "rebuilt from the log")
    return True


def _parts_of(info: SegmentInfo, fs: FileSystem, wal_dir: str) -> Iterator[Pending]:
    """Yield the parts of a segment that the log has, each entry once, including entries before the cursor."""
    layout = QuiverLayout()
    last = info.wal_seq_min - 1
    for file, start, end in scan(fs, wal_dir, WalFormat(), layout=layout).frames():
        try:
            frame = file.bytes_of(start, end)
            if entry_type(frame, 0) != EntryType.BUNDLE:
                continue
            entry = WalEntry.decode(entry_body(frame, 0, len(frame)))
        except Corrupt:
            continue
        if not last < entry.wal_seq <= info.wal_seq_max:
            continue
        last = entry.wal_seq
        first = layout.position(LogPosition(file.number, start))
        for part in entry.parts:
            if (part.slot, part.fingerprint.hex()) == (info.slot, info.schema_hash):
                pending = _pending(entry, part, first, first + end - start)
                if pending is not None:
                    yield pending


def _pending(entry: WalEntry, part: SlotPart, start: int, end: int) -> Pending | None:
    try:
        batch = decode_batch(part)
    except Corrupt:
        return None
    return Pending(
        slot=part.slot,
        batch=batch,
        fingerprint=part.fingerprint,
        ingest_ns=entry.ingest_ns,
        wal_seq=entry.wal_seq,
        wal_start=start,
        wal_end=end,
        byte_count=part.byte_count,
    )
