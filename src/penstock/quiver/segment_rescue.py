"""Damaged segments put together again from the log, while it still has what they held.

The log is cut by whole files, so it often has entries that are committed for a while. A segment holds the
entries of one stream in the order of the log, from its first to its last. The same entries make the same
bundles in the same places: answers that were given for some of them stay true, and the segment gets its
number back.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import Corrupt
from penstock.quiver.ack_book import AckBook
from penstock.quiver.model import Pending, SegmentInfo
from penstock.quiver.open_segment import SealedSegment, StreamKey, Trigger
from penstock.quiver.segment_store import SegmentStore
from penstock.quiver.wal_entry import EntryType, SlotPart, WalEntry, WalFormat, entry_body, entry_type
from penstock.quiver.wal_layout import QuiverLayout
from penstock.quiver.wal_payload import decode_batch
from penstock.storage import FileSystem, LogPosition, scan

__all__ = ["rescue_segment", "rescue_segments"]


def rescue_segments(store: SegmentStore, book: AckBook, fs: FileSystem, wal_dir: str) -> list[int]:
    """Write every segment again that was set aside, that somebody waits for and that the log has whole.

    Returns their numbers. To be called before the book is reconciled with the store; may be repeated after a
    crash. Raises what the disk raises.
    """
    rescued: list[int] = []
    for seq, info in store.set_aside.items():
        is_awaited = info is not None and book.is_awaited(seq, info.bundle_count)
        if info is not None and is_awaited and rescue_segment(store, info, fs, wal_dir):
            rescued.append(seq)
    return rescued


def rescue_segment(store: SegmentStore, info: SegmentInfo, fs: FileSystem, wal_dir: str) -> bool:
    """Write this segment again if the log has all of it. Raises what the disk raises.

    Reads the log from its oldest file on, also while it is written.
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
    store.put_back(sealed, info, "put together again from the log")
    return True


def _parts_of(info: SegmentInfo, fs: FileSystem, wal_dir: str) -> Iterator[Pending]:
    """What the log has of a segment, each entry once, also from before the cursor."""
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
