"""The queue manifest, edited as bytes: existing entries are never decoded.

    entry*   u32 entry_len | u64 sequence | u16 loc_len | location | u32 meta_count | meta*
    meta     u32 start_index | i64 ingestion_time_ms | u32 payload_len | payload
    footer   u32 entry_count | u64 next_sequence | u64 epoch | u16 version (=1)

`entry_len` counts the bytes that follow it. The tail, the bytes of an entry after its metas, is not part of
the format and survives every edit. `penstock.buffer.transactions` puts its tags there. All functions here are
pure: bytes in, bytes out, and `SerializationError` for bytes that break the format.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.buffer.errors import InvalidInputError, SerializationError
from penstock.limits import LOCATION_BYTES_MAX, METADATA_BYTES_MAX

MANIFEST_VERSION = 1
U64_MAX = 2**64 - 1

_FOOTER = struct.Struct("<IQQH")
_HEAD = struct.Struct("<IQH")
_META = struct.Struct("<IqI")
_U32 = struct.Struct("<I")
_FIXED_AFTER_LEN = 14  # sequence, loc_len and meta_count: the bytes of an entry besides location and metas

FOOTER_BYTES = _FOOTER.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The metadata of one `produce` call, whose records start at `start_index` of the batch."""

    start_index: int
    ingestion_time_ms: int
    payload: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """A stored batch that is not in the queue yet."""

    location: str
    metadata: Sequence[Metadata]
    tail: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One batch in the queue."""

    sequence: int
    location: str
    metadata: tuple[Metadata, ...]
    tail: bytes = b""
    """The bytes after the metas, written by any client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """The last 22 bytes: the number of entries, the next sequence, and the epoch of the consumer."""

    entry_count: int
    next_sequence: int
    epoch: int

    def pack(self) -> bytes:
        return _FOOTER.pack(self.entry_count, self.next_sequence, self.epoch, MANIFEST_VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A fully decoded manifest, for display and for checks."""

    footer: Footer
    entries: tuple[Entry, ...]


EMPTY_MANIFEST = Footer(entry_count=0, next_sequence=0, epoch=0).pack()


def read_footer(raw: bytes) -> Footer:
    """Decode the footer, after checking the version."""
    if len(raw) < FOOTER_BYTES:
        raise SerializationError(
            f"manifest of {len(raw)} bytes is shorter than its {FOOTER_BYTES}-byte footer"
        )
    entry_count, next_sequence, epoch, version = _FOOTER.unpack_from(raw, len(raw) - FOOTER_BYTES)
    if version != MANIFEST_VERSION:
        raise SerializationError(
            f"manifest version {version} is unknown (only version {MANIFEST_VERSION} exists), "
            "or its end was cut off"
        )
    if entry_count * (4 + _FIXED_AFTER_LEN) > len(raw) - FOOTER_BYTES:
        raise SerializationError(f"manifest of {len(raw)} bytes cannot hold {entry_count} entries")
    if entry_count > next_sequence:
        raise SerializationError(
            f"manifest holds {entry_count} entries but has numbered only {next_sequence}"
        )
    return Footer(entry_count=entry_count, next_sequence=next_sequence, epoch=epoch)


def first_sequence(raw: bytes) -> int:
    """Return the oldest sequence in the queue, or the next one if it is empty."""
    footer = read_footer(raw)
    if footer.entry_count == 0:
        return footer.next_sequence
    _, sequence, _ = _HEAD.unpack_from(raw, 0)
    return int(sequence)


def encode_entry(sequence: int, item: NewEntry) -> bytes:
    """Encode an entry. Raise `InvalidInputError` if it exceeds the limits of the format."""
    location = item.location.encode()
    if len(location) > LOCATION_BYTES_MAX:
        raise InvalidInputError(f"location of {len(location)} bytes is longer than {LOCATION_BYTES_MAX}")
    parts = [b"", location, _U32.pack(len(item.metadata))]
    size = _FIXED_AFTER_LEN + len(location)
    for meta in item.metadata:
        if len(meta.payload) > METADATA_BYTES_MAX:
            raise InvalidInputError(
                f"metadata of {len(meta.payload)} bytes is longer than {METADATA_BYTES_MAX}"
            )
        parts.append(_META.pack(meta.start_index, meta.ingestion_time_ms, len(meta.payload)))
        parts.append(meta.payload)
        size += _META.size + len(meta.payload)
    parts.append(item.tail)
    size += len(item.tail)
    if size > 2**32 - 1:
        raise InvalidInputError(f"entry of {size} bytes is longer than its length field allows")
    parts[0] = _HEAD.pack(size, sequence, len(location))
    return b"".join(parts)


def append(raw: bytes, items: Sequence[NewEntry]) -> bytes:
    """Append entries to `raw`. The existing entries are copied without decoding them.

    Raise `SerializationError` if the manifest has no numbers left. No queue can use them all, so its footer
    is damaged.
    """
    footer = read_footer(raw)
    if footer.next_sequence + len(items) > U64_MAX or footer.entry_count + len(items) > 2**32 - 1:
        raise SerializationError(
            f"the manifest says that {footer.next_sequence} is its next sequence: no number is left"
        )
    parts = [memoryview(raw)[: len(raw) - FOOTER_BYTES]]
    parts.extend(
        memoryview(encode_entry(footer.next_sequence + number, item)) for number, item in enumerate(items)
    )
    new = Footer(
        entry_count=footer.entry_count + len(items),
        next_sequence=footer.next_sequence + len(items),
        epoch=footer.epoch,
    )
    parts.append(memoryview(new.pack()))
    return b"".join(parts)


def set_epoch(raw: bytes, epoch: int) -> bytes:
    """Return `raw` with another epoch."""
    footer = read_footer(raw)
    new = Footer(entry_count=footer.entry_count, next_sequence=footer.next_sequence, epoch=epoch)
    return raw[: len(raw) - FOOTER_BYTES] + new.pack()


def dequeue(raw: bytes, through: int) -> bytes:
    """Remove the leading entries up to and including `through`. All other bytes stay.

    Return `raw` itself if nothing is removed. `next_sequence` and the epoch remain when the queue is empty.
    """
    footer = read_footer(raw)
    removed, position = 0, 0
    for start, _end, sequence, _loc in _walk(raw, footer):
        if sequence > through:
            position = start
            break
        removed += 1
        position = _end
    if removed == 0:
        return raw
    new = Footer(
        entry_count=footer.entry_count - removed, next_sequence=footer.next_sequence, epoch=footer.epoch
    )
    return raw[position : len(raw) - FOOTER_BYTES] + new.pack()


def locate(raw: bytes, location: str) -> int | None:
    """Return the sequence of `location` in the queue, or None.

    A byte search usually shows that it is absent. A walk over the entries confirms a hit, because the same
    bytes may be in the metadata of an entry.
    """
    needle = location.encode()
    if raw.find(needle, 0, len(raw) - FOOTER_BYTES) < 0:
        return None
    for _start, _end, sequence, loc in _walk(raw, read_footer(raw)):
        if raw[loc[0] : loc[1]] == needle:
            return sequence
    return None


def _walk(
    raw: bytes, footer: Footer, start: int = 0, skip: int = 0
) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Yield (start, end, sequence, (location start, location end)) for each entry. Check the bounds."""
    body_end = len(raw) - FOOTER_BYTES
    position = start
    for number in range(skip, footer.entry_count):
        if position + _HEAD.size > body_end:
            raise SerializationError(f"manifest entry {number} starts past the end of the entries")
        entry_len, sequence, loc_len = _HEAD.unpack_from(raw, position)
        end = position + 4 + entry_len
        if entry_len < _FIXED_AFTER_LEN + loc_len:
            raise SerializationError(f"manifest entry {number} is too short for its location")
        if end > body_end:
            raise SerializationError(f"manifest entry {number} runs into the footer")
        location = position + _HEAD.size
        yield position, end, sequence, (location, location + loc_len)
        position = end
    if position != body_end:
        raise SerializationError(
            f"manifest has {body_end - position} bytes between its last entry and the footer"
        )


def _read_entry(raw: bytes, start: int, end: int) -> Entry:
    _, sequence, loc_len = _HEAD.unpack_from(raw, start)
    position = start + _HEAD.size + loc_len
    try:
        location = raw[start + _HEAD.size : position].decode()
    except UnicodeDecodeError as error:
        raise SerializationError(f"location of sequence {sequence} is not UTF-8") from error
    (count,) = _U32.unpack_from(raw, position)
    position += 4
    if count * _META.size > end - position:
        raise SerializationError(f"entry of sequence {sequence} cannot hold {count} metadata items")
    metas: list[Metadata] = []
    for _ in range(count):
        if position + _META.size > end:
            raise SerializationError(f"metadata of sequence {sequence} runs past its entry")
        start_index, time_ms, size = _META.unpack_from(raw, position)
        position += _META.size
        if position + size > end:
            raise SerializationError(f"metadata of sequence {sequence} runs past its entry")
        metas.append(
            Metadata(
                start_index=start_index, ingestion_time_ms=time_ms, payload=raw[position : position + size]
            )
        )
        position += size
    return Entry(sequence=sequence, location=location, metadata=tuple(metas), tail=raw[position:end])


def tails(raw: bytes, needle: bytes, through: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (sequence, tail) of the entries up to `through` that contain `needle`, newest first.

    A byte search usually shows that there are none, and only entries with a hit are decoded. A hit may also
    be in the metadata, so the caller has to check the tail.
    """
    if raw.find(needle, 0, len(raw) - FOOTER_BYTES) < 0:
        return
    walk = _walk(raw, read_footer(raw))
    spans = [(start, end) for start, end, sequence, _ in walk if through is None or sequence <= through]
    starts = [start for start, _ in spans]
    limit = spans[-1][1] if spans else 0
    while (hit := raw.rfind(needle, 0, limit)) >= 0:
        start, end = spans[bisect_right(starts, hit) - 1]
        entry = _read_entry(raw, start, end)
        yield entry.sequence, entry.tail
        limit = start


def decode_manifest(raw: bytes) -> Manifest:
    """Decode the manifest, and check bounds, UTF-8 and numbering."""
    entries = index(raw)
    return Manifest(footer=entries.footer, entries=tuple(entries[n] for n in range(len(entries))))


class EntryIndex:
    """The offset of each entry of a manifest. Entries are decoded on demand."""

    __slots__ = ("_decoded", "_ends", "_raw", "_starts", "first", "footer")

    def __init__(self, raw: bytes, footer: Footer, starts: list[int], ends: list[int], first: int) -> None:
        self._raw = raw
        self._starts = starts
        self._ends = ends
        self.footer = footer
        self.first = first
        self._decoded: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Entry:
        return _read_entry(self._raw, self._starts[number], self._ends[number])

    def after(self, sequence: int | None, limit: int) -> list[Entry]:
        """Return up to `limit` entries after `sequence` (None: from the first).

        The entries of the last call stay decoded, because a caller that reads ahead requests most of them
        twice.
        """
        skip = 0 if sequence is None else max(0, sequence + 1 - self.first)
        before = self._decoded
        found = [
            before.get(self.first + number) or self[number]
            for number in range(skip, min(len(self), skip + limit))
        ]
        self._decoded = {entry.sequence: entry for entry in found}
        return found

    def locations(self) -> Iterator[tuple[int, str]]:
        """Yield (sequence, location) of every entry. The metadata is not decoded."""
        for start in self._starts:
            _, sequence, loc_len = _HEAD.unpack_from(self._raw, start)
            begin = start + _HEAD.size
            yield sequence, self._raw[begin : begin + loc_len].decode(errors="replace")

    def grown_into(self, raw: bytes) -> EntryIndex | None:
        """Return the index of `raw` if it is this manifest plus appends and minus dequeues; otherwise None.

        One comparison of bytes replaces the walk over the entries that are already known.
        """
        footer = read_footer(raw)
        first = footer.next_sequence - footer.entry_count
        drop = first - self.first
        if drop < 0 or drop > len(self):
            return None
        cut = self._starts[drop] if drop < len(self) else len(self._raw) - FOOTER_BYTES
        known = self._raw[cut : len(self._raw) - FOOTER_BYTES]
        # `startswith` compares memory; comparing memoryviews unpacks them byte by byte.
        if footer.entry_count < len(self) - drop or not raw.startswith(known):
            return None
        starts = [start - cut for start in self._starts[drop:]]
        ends = [end - cut for end in self._ends[drop:]]
        grown = _index_tail(raw, footer, starts, ends, len(known), first)
        grown._decoded = self._decoded  # the same bytes, so the same entries
        return grown


def index(raw: bytes) -> EntryIndex:
    """Return the index of `raw`. Its sequences must rise by one and end just below `next_sequence`."""
    footer = read_footer(raw)
    return _index_tail(raw, footer, [], [], 0, footer.next_sequence - footer.entry_count)


def _index_tail(
    raw: bytes, footer: Footer, starts: list[int], ends: list[int], position: int, first: int
) -> EntryIndex:
    expected = first + len(starts)
    for start, end, sequence, _loc in _walk(raw, footer, position, len(starts)):
        if sequence != expected:
            raise SerializationError(f"manifest has entry {sequence} where entry {expected} must be")
        starts.append(start)
        ends.append(end)
        expected += 1
    return EntryIndex(raw, footer, starts, ends, first)
