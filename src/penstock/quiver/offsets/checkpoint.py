"""Checkpoints: summaries of the offset log, so that a start need not read all of it.

    QUIVER\\0C | u16 version | u16 header bytes | u64 generation | u64 last number | u64 next segment
    | u64 next entry | u64 abandoned | u32 subscribers | u32 absent ranges | u32 tombstoned
    | absent ranges … | tombstoned … | subscribers … | u64 xxh3

`checkpoint` is the newest, `checkpoint.1` the one before it. `docs/formats/quiver-acks.md` has the tables.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass, field
from typing import Final

from xxhash import xxh3_64_intdigest

from penstock.errors import Corrupt, NotFound, OutcomeUnknown, PenstockError
from penstock.storage import FileSystem, stage

CHECKPOINT: Final = "checkpoint"
COUNTERS: Final = 5
"""The number of bundle counters: one per outcome, in the order of the outcome numbers."""

_MAGIC: Final = b"QUIVER\0C"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sHHQQQQQIII")
_ENTRY: Final = struct.Struct("<HBBQq5QII")
_LOGGED: Final = struct.Struct("<QQ")
"""An optional part after the header that counts towards its length. Present if a durable end is recorded."""
_RANGE: Final = struct.Struct("<QQ")
_GAP: Final = struct.Struct("<QI")
_SEQ: Final = struct.Struct("<Q")
_CHECKSUM: Final = struct.Struct("<Q")
_BYTES_MAX: Final = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One subscriber. `gaps` are bitmaps by segment, least significant bit first."""

    index: int
    name: str
    state: int
    hwm: int
    orphaned_ns: int = 0
    counters: tuple[int, ...] = (0,) * COUNTERS
    gaps: dict[int, bytes] = field(default_factory=dict)
    complete: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """The state after the record `last_number` of the log."""

    generation: int
    last_number: int
    next_segment_seq: int
    next_wal_seq: int
    logged_end: int = 0
    logged_seq: int = 0
    """The position and bundle number up to which the write-ahead log was durable, or 0 if not recorded."""
    abandoned_through: int = 0
    """The last segment that existed when the last subscriber left. Up to here all segments are finished."""
    absent: tuple[tuple[int, int], ...] = ()
    """The numbers above the lowest mark whose segments are gone or never existed."""
    tombstoned: tuple[int, ...] = ()
    """The segments that every subscriber has resolved and whose files may still exist."""
    subscribers: tuple[CheckpointEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """The newest readable checkpoint, if there is one, and the problems of newer ones."""

    state: CheckpointState | None
    is_newest: bool
    damage: tuple[str, ...] = ()


def encode_checkpoint(state: CheckpointState) -> bytes:
    """Encode a checkpoint, with its checksum at the end."""
    logged = _LOGGED.pack(state.logged_end, state.logged_seq) if state.logged_end else b""
    parts = [
        _HEAD.pack(
            _MAGIC,
            _VERSION,
            _HEAD.size + len(logged),
            state.generation,
            state.last_number,
            state.next_segment_seq,
            state.next_wal_seq,
            state.abandoned_through,
            len(state.subscribers),
            len(state.absent),
            len(state.tombstoned),
        ),
        logged,
    ]
    parts += [_RANGE.pack(*span) for span in state.absent]
    parts += [_SEQ.pack(seq) for seq in state.tombstoned]
    for entry in state.subscribers:
        parts += _encode_entry(entry)
    body = b"".join(parts)
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def _encode_entry(entry: CheckpointEntry) -> list[bytes]:
    name = entry.name.encode("ascii")
    parts = [
        _ENTRY.pack(
            entry.index,
            entry.state,
            len(name),
            entry.hwm,
            entry.orphaned_ns,
            *entry.counters,
            len(entry.gaps),
            len(entry.complete),
        ),
        name,
    ]
    for seq, bits in sorted(entry.gaps.items()):
        parts += [_GAP.pack(seq, len(bits)), bits]
    return parts + [_RANGE.pack(*span) for span in entry.complete]


def decode_checkpoint(data: bytes) -> CheckpointState:
    """Decode a checkpoint. Raise `Corrupt` unless the bytes are a complete checkpoint of this version."""
    if len(data) < _HEAD.size + _CHECKSUM.size or data[: len(_MAGIC)] != _MAGIC:
        raise Corrupt("not a checkpoint: the magic bytes are missing")
    body = data[: -_CHECKSUM.size]
    if _CHECKSUM.unpack_from(data, len(body))[0] != xxh3_64_intdigest(body):
        raise Corrupt("the checksum of the checkpoint does not match its bytes")
    head = _HEAD.unpack_from(body)
    if head[1] != _VERSION:
        raise Corrupt(f"the checkpoint has version {head[1]}, and this program reads {_VERSION}")
    try:
        return _Reader(body, head[2]).state(head)
    except (struct.error, UnicodeDecodeError) as error:
        raise Corrupt(f"the checkpoint ends too early: {error}") from error


class _Reader:
    """Reads the bytes after the header. Reading past their end raises `struct.error`."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._at = start
        has_logged = start >= _HEAD.size + _LOGGED.size
        self._logged = _LOGGED.unpack_from(data, _HEAD.size) if has_logged else (0, 0)

    def state(self, head: tuple[int, ...]) -> CheckpointState:
        (
            _,
            _,
            _,
            generation,
            last_number,
            next_segment_seq,
            next_wal_seq,
            abandoned,
            subs,
            spans,
            tombstoned,
        ) = head
        return CheckpointState(
            generation=generation,
            last_number=last_number,
            next_segment_seq=next_segment_seq,
            next_wal_seq=next_wal_seq,
            logged_end=self._logged[0],
            logged_seq=self._logged[1],
            abandoned_through=abandoned,
            absent=self._spans(spans),
            tombstoned=tuple(self._take(_SEQ)[0] for _ in range(tombstoned)),
            subscribers=tuple(self._entry() for _ in range(subs)),
        )

    def _take(self, form: struct.Struct) -> tuple[int, ...]:
        values = form.unpack_from(self._data, self._at)
        self._at += form.size
        return values

    def _bytes(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise struct.error("bytes are missing")
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def _spans(self, count: int) -> tuple[tuple[int, int], ...]:
        taken = (self._take(_RANGE) for _ in range(count))
        return tuple((span[0], span[1]) for span in taken)

    def _entry(self) -> CheckpointEntry:
        index, state, name_bytes, hwm, orphaned_ns, *rest = self._take(_ENTRY)
        name = self._bytes(name_bytes).decode("ascii")
        gaps: dict[int, bytes] = {}
        for _ in range(rest[COUNTERS]):
            seq, count = self._take(_GAP)
            gaps[seq] = self._bytes(count)
        return CheckpointEntry(
            index=index,
            name=name,
            state=state,
            hwm=hwm,
            orphaned_ns=orphaned_ns,
            counters=tuple(rest[:COUNTERS]),
            gaps=gaps,
            complete=self._spans(rest[COUNTERS + 1]),
        )


def load_checkpoint(fs: FileSystem, directory: str) -> LoadedCheckpoint:
    """Load the newest readable checkpoint. Raise only if the disk cannot be read at all."""
    damage: list[str] = []
    for name in (CHECKPOINT, f"{CHECKPOINT}.1"):
        path = os.path.join(directory, name)
        try:
            if fs.stat(path).size > _BYTES_MAX:
                raise Corrupt(f"it is larger than {_BYTES_MAX} bytes")
            state = decode_checkpoint(fs.read(path))
        except NotFound:
            continue
        except Corrupt as error:
            damage.append(f"{path}: {error}")
            continue
        return LoadedCheckpoint(state=state, is_newest=name == CHECKPOINT, damage=tuple(damage))
    return LoadedCheckpoint(state=None, is_newest=False, damage=tuple(damage))


def store_checkpoint(fs: FileSystem, directory: str, state: CheckpointState, *, keep_newest: bool) -> None:
    """Write a checkpoint durably. Until it is complete, the previous one can be read.

    With `keep_newest` the current checkpoint becomes `checkpoint.1`. Without, which is for an unreadable one,
    it is replaced. Raise errors of the disk, or `OutcomeUnknown` if the new one may be in place.
    """
    newest = os.path.join(directory, CHECKPOINT)
    staged = f"{newest}.tmp"
    with contextlib.suppress(NotFound):
        fs.unlink(staged)
    stage(fs, staged, [encode_checkpoint(state)])
    if keep_newest:
        with contextlib.suppress(NotFound):
            fs.rename(newest, f"{newest}.1")
        # Sync the older name first: with one sync for both, the newer name could survive without the older.
        fs.sync_dir(directory)
    try:
        fs.rename(staged, newest)
        fs.sync_dir(directory)
    except PenstockError as error:
        raise OutcomeUnknown(f"cannot tell whether {newest} was replaced: {error}") from error
