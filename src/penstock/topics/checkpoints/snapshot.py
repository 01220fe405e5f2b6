"""Snapshots: topics, floors, segments and log positions, so that a start does not read the whole log.

A snapshot is one file. Writing the next one replaces it, but the previous one stays in case the newest cannot
be read.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from dataclasses import dataclass
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from penstock.errors import LimitExceeded, MediaError, NotFound, PenstockError, Unsupported
from penstock.storage import Buffer, FileSystem, write_durably
from penstock.topics.errors import Damaged
from penstock.topics.routers.model import RouterEntry
from penstock.topics.segments.format import SegmentEntry
from penstock.topics.segments.store import DurableDirectory
from penstock.topics.topic.leases import QueueEntry

SNAPSHOT_VERSION: Final = 4
"""The version of the format. Versions below 4 have other bodies under the same header."""

_MAGIC: Final = b"SNP1"
_HEAD = struct.Struct("<4sII")
_CHECKSUM_BYTES: Final = 8
_BODY_AT: Final = _HEAD.size + _CHECKSUM_BYTES
_BODY_BYTES_MAX: Final = 2**32 - 1
_NAME = re.compile(r"snapshot-([0-9]{16,20})\.bin")
_STAGED = re.compile(r"snapshot-[0-9]{16,20}\.bin\.[0-9a-f]+")


class LogStart(msgspec.Struct, frozen=True, array_like=True):
    """The position from which a log directory must be read again."""

    file: int
    offset: int


class TopicEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One topic. A floor is the first sequence number that is not lost."""

    name: str
    id: int
    epoch: int
    config: bytes
    """The resolved config as JSON."""
    head_seq: int
    cap_floor: int
    ttl_floor: int
    trim_floor: int
    delete_below: int
    reserved_head: int
    last_write_ms: int | None
    checkpointed_seq: int
    """Every record up to here is in `segments`, was deleted, or never existed."""
    segments: tuple[SegmentEntry, ...] = ()
    queue: QueueEntry | None = None
    """None for a log."""
    trims: tuple[tuple[int, int], ...] = ()
    """Ranges after live records that no router could copy: first number, and number after the last."""
    lost: tuple[tuple[int, int], ...] = ()
    """Ranges lost with damaged log files, in the same form. These numbers are never reused."""


class Snapshot(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The state of all topics without their records."""

    next_topic_id: int
    created_ms: int
    wal: dict[str, LogStart]
    """By the name of the log's directory."""
    topics: tuple[TopicEntry, ...]
    routers: tuple[RouterEntry, ...] = ()
    synced: dict[str, LogStart] = {}
    """By log: the position up to which it was durable when the snapshot was taken."""
    lost_seq: int = 0
    """The highest number that a topic lost with log files can have used. New topics start above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSnapshot:
    """The newest readable snapshot. `snapshot` is None if there never was one."""

    snapshot: Snapshot | None
    number: int
    """The number of the snapshot that was read, or 0."""
    next_number: int
    """The number for the next snapshot."""
    rejected: tuple[str, ...]
    """Why newer snapshots were rejected, one sentence each."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Snapshot)


def snapshot_name(number: int) -> str:
    return f"snapshot-{number:016d}.bin"


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Encode the file. Raise `LimitExceeded` if the body exceeds its length field."""
    body = _ENCODER.encode(snapshot)
    if len(body) > _BODY_BYTES_MAX:
        raise LimitExceeded(f"a snapshot of {len(body)} bytes cannot be written; have fewer topics")
    head = _HEAD.pack(_MAGIC, SNAPSHOT_VERSION, len(body))
    return head + xxh3_64_intdigest(head + body).to_bytes(_CHECKSUM_BYTES, "little") + body


def decode_snapshot(raw: Buffer) -> Snapshot:
    """Decode a snapshot. Raise `Damaged` unless every bit is as written, `Unsupported` if it is newer."""
    view = memoryview(raw)
    if len(view) < _BODY_AT:
        raise Damaged(f"only {len(view)} bytes are left of it")
    head, body = view[: _HEAD.size], view[_BODY_AT:]
    digest = int.from_bytes(view[_HEAD.size : _BODY_AT], "little")
    if xxh3_64_intdigest(head.tobytes() + body.tobytes()) != digest:
        raise Damaged("its checksum is wrong")
    magic, version, body_len = _HEAD.unpack(head)
    if magic != _MAGIC or body_len != len(body):
        raise Damaged("it is not a snapshot")
    if version != SNAPSHOT_VERSION:
        raise Unsupported(f"its version is {version}, not {SNAPSHOT_VERSION}; use the program that wrote it")
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise Damaged(f"its content cannot be understood: {error}") from error


def write_snapshot(
    fs: FileSystem, directory: str, number: int, snapshot: Snapshot, *, previous: int | None = None
) -> None:
    """Write a snapshot durably, and remove those before the previous one.

    `previous` is the last snapshot that is known to be good, if that is not the newest existing one. Raises
    `OutcomeUnknown` if the new one may be in place without being durable. Files that only older snapshots
    need must stay then. After any other error the older ones are untouched.
    """
    raw = encode_snapshot(snapshot)
    DurableDirectory(fs, directory).ensure()
    write_durably(fs, os.path.join(directory, snapshot_name(number)), [raw], staging=directory)
    # The new snapshot is durable, so a failure to remove an old file is not an error.
    with contextlib.suppress(PenstockError):
        _prune(fs, directory, number, previous)


def _prune(fs: FileSystem, directory: str, newest: int, previous: int | None) -> None:
    """Remove the snapshots before `previous`, and all unfinished ones."""
    names = [name for name, _ in fs.list_files(directory)]
    older = [number for name in names if (number := _number(name)) is not None and number < newest]
    oldest_kept = max(older, default=newest) if previous is None else previous
    gone = [snapshot_name(number) for number in older if number < oldest_kept]
    gone += [name for name in names if _STAGED.fullmatch(name)]
    for name in gone:
        fs.unlink(os.path.join(directory, name))
    if gone:
        fs.sync_dir(directory)


def _number(name: str) -> int | None:
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def load_latest(fs: FileSystem, directory: str) -> LoadedSnapshot:
    """Return the newest readable snapshot. Unreadable ones are reported and kept.

    Raises `Damaged` if there are snapshots but none can be read, and `Unsupported` if another version wrote
    the newest. A start must not begin empty in either case.
    """
    numbers = [number for name, _ in fs.list_files(directory) if (number := _number(name)) is not None]
    rejected: list[str] = []
    for number in sorted(numbers, reverse=True):
        path = os.path.join(directory, snapshot_name(number))
        try:
            snapshot = decode_snapshot(fs.read(path))
        except Unsupported as error:
            raise Unsupported(f"{path} cannot be read: {error}") from error
        except (Damaged, MediaError, NotFound) as error:
            rejected.append(f"{path} cannot be read: {error}")
            continue
        return LoadedSnapshot(
            snapshot=snapshot, number=number, next_number=max(numbers) + 1, rejected=tuple(rejected)
        )
    if rejected:
        raise Damaged("no snapshot can be read; restore one of them: " + "; ".join(rejected))
    return LoadedSnapshot(snapshot=None, number=0, next_number=1, rejected=())
