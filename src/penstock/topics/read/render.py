"""Stored frames as the JSON objects that a reader receives.

Every frame from a file is checked on every read. Segment frames are compared with their checksum. Log frames
were compared with it when they were written or replayed. A large read therefore checks only the effects of a
truncation, until a part of the file could not be read; after that it checks checksums again.

The payload of a record is already JSON. It is copied into the response and parsed only if `data` and `meta`
cannot be separated otherwise.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from penstock.storage import FileView
from penstock.topics.errors import Damaged
from penstock.topics.log.frame import HEADER_BYTES
from penstock.topics.log.payload import split_payload
from penstock.topics.model import Predicate
from penstock.topics.segments.columns import DAMAGED, Columns, Lengths, Places, StoredBytes, gather
from penstock.topics.segments.format import HAS_META, HAS_NODE, HAS_TAG, checksums

_SEGMENT_HEADER_BYTES: Final = 29
_CHECKSUM_BYTES: Final = 8
_OPEN_BYTES: Final = len(b'{"d":')
_LENGTHS = struct.Struct("<HHI")
_SEQ = _DIGEST = struct.Struct("<Q")
_LOG_SEQ_AT: Final = HEADER_BYTES - 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The optional members that a reader requested."""

    include_tags: bool = False
    include_meta: bool = True
    include_data: bool = True
    include_node: bool = True


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that belongs in the page but cannot be read."""

    seq: int
    error: Damaged


class Frames:
    """The frames of some rows of a run. `view` has the bytes of their file from offset `base` on.

    `file` is the log file that they were read from, if any.
    """

    __slots__ = ("base", "file", "header_bytes", "run", "view")

    def __init__(
        self, run: Columns, view: StoredBytes, base: int = 0, *, file: FileView | None = None
    ) -> None:
        self.run = run
        self.view = view
        self.base = base
        self.file = view if isinstance(view, FileView) else file
        self.header_bytes = _SEGMENT_HEADER_BYTES if run.segment else HEADER_BYTES

    def accounted(self, places: Places) -> Lengths:
        """Return the accounted bytes of these rows."""
        if not len(places):
            return np.zeros(0, np.uint32)
        first = int(places[0])
        return self.run.accounted(first, int(places[-1]) + 1)[places - first]

    def spans(self, places: Places) -> tuple[Places, Places, npt.NDArray[np.bool_]]:
        """Return where the frames start in `view`, their lengths, and which are complete."""
        starts = self.run.offset[places].astype(np.int64) - self.base
        lengths = self.run.length[places].astype(np.int64)
        whole = (starts >= 0) & (lengths >= self.header_bytes + _CHECKSUM_BYTES)
        return starts, lengths, whole & (starts + lengths <= len(self.view))


def is_log_frame(frame: bytes, seq: int) -> bool:
    """Return whether this is the log frame of a record, as it was written."""
    (found,) = _SEQ.unpack_from(frame, _LOG_SEQ_AT)
    (digest,) = _DIGEST.unpack_from(frame, len(frame) - _CHECKSUM_BYTES)
    return bool(found == seq and digest == xxh3_64_intdigest(frame[4:-_CHECKSUM_BYTES]))


def render_one(frame: bytes, seq: int, ts: int, flags: int, style: Style) -> bytes:
    """Return the fragment of one log frame."""
    if not flags & (HAS_NODE | HAS_META | HAS_TAG) and style.include_data:
        return b'{"$seq":%d,"$ts":%d,"data":%b' % (
            seq,
            ts,
            frame[HEADER_BYTES + _OPEN_BYTES : -_CHECKSUM_BYTES],
        )
    return _with_headers(frame, seq, ts, HEADER_BYTES, len(frame) - _CHECKSUM_BYTES, flags, style, {})


def node_of(frame: bytes) -> bytes:
    """Return the origin in a log frame."""
    node_bytes, _, _ = _LENGTHS.unpack_from(frame, HEADER_BYTES - 8)
    return frame[HEADER_BYTES : HEADER_BYTES + node_bytes]


def tag_of(frame: bytes) -> bytes:
    """Return the tag in a log frame."""
    node_bytes, tag_bytes, _ = _LENGTHS.unpack_from(frame, HEADER_BYTES - 8)
    at = HEADER_BYTES + node_bytes
    return frame[at : at + tag_bytes]


def tagged(frames: Frames, places: Places, match: Predicate) -> npt.NDArray[np.bool_]:
    """Return which of these tagged rows match. The frames must be in memory."""
    starts, _, inside = frames.spans(places)
    view = frames.view
    assert isinstance(view, memoryview)
    # Incomplete frames are kept, so that the reader gets their error.
    matching = ~inside
    for place in np.flatnonzero(inside).tolist():
        begin = int(starts[place]) + frames.header_bytes
        node_bytes, tag_bytes, _ = _LENGTHS.unpack_from(view, begin - 8)
        tag = view[begin + node_bytes : begin + node_bytes + tag_bytes].tobytes()
        matching[place] = is_meant(match, tag)
    return matching


def is_meant(match: Predicate, tag: bytes) -> bool:
    """Apply `predicate.matches` to the stored form of a tag."""
    value = match.value.encode("utf-8", "surrogatepass")
    return tag.startswith(value) if match.is_prefix else tag == value


def foreign(frames: Frames, places: Places, nodes: frozenset[bytes]) -> npt.NDArray[np.bool_]:
    """Return which of these rows, all with an origin, come from none of `nodes`.

    The frames must be in memory.
    """
    starts, lengths, inside = frames.spans(places)
    assert isinstance(frames.view, memoryview)
    own = np.zeros(len(places), np.bool_)
    if not inside.any():
        return ~own
    chars = np.frombuffer(frames.view, np.uint8)
    at = np.where(inside, starts, 0) + frames.header_bytes
    node_bytes = chars[at - 8].astype(np.int64) | chars[at - 7].astype(np.int64) << 8
    for node in nodes:
        same = np.flatnonzero(
            inside & (node_bytes == len(node)) & (lengths >= frames.header_bytes + 8 + len(node))
        )
        for place, wanted in enumerate(node):
            if not len(same):
                break
            same = same[chars[at[same] + place] == wanted]
        own[same] = True
    return ~own


def render(frames: Frames, places: Places, style: Style, out: list[bytes]) -> Unreadable | None:
    """Append one fragment per record to `out`. Stop before the first unreadable record and return it."""
    run = frames.run
    starts, lengths, whole = frames.spans(places)
    flags = run.flags[places]
    sound = whole & ((flags & np.uint8(DAMAGED)) == 0)
    good = len(places) if sound.all() else int(sound.argmin())
    if good:
        chunk, starts = gather(frames.view, starts[:good], lengths[:good])
        if run.segment or frames.file is not None:
            good = _count_sound(chunk, starts, lengths[:good], frames, places[:good])
        if good:
            _fragments(frames, chunk, starts[:good], lengths[:good], flags[:good], places[:good], style, out)
    return None if good == len(places) else unreadable(run.first_seq + int(places[good]))


def unreadable(seq: int) -> Unreadable:
    """Return the error of a record that cannot be read."""
    return Unreadable(
        seq,
        Damaged(
            f"stored record {seq} cannot be read back as it was written; read on with from_seq at or above "
            f"it, or delete everything before the next one (before_seq {seq + 1})",
            {"first_seq": seq, "last_seq": seq},
        ),
    )


def _count_sound(chunk: bytes, starts: Places, lengths: Places, frames: Frames, places: Places) -> int:
    """Return how many of the first frames are as they were written.

    A log frame that was checked before has lost its checksum if the file was truncated.
    """
    run, shift = frames.run, frames.header_bytes - _SEGMENT_HEADER_BYTES
    ends = starts + lengths - _CHECKSUM_BYTES
    u64 = np.ndarray(len(chunk) - 7, "<u8", chunk, 0, 1)
    u32 = np.ndarray(len(chunk) - 3, "<u4", chunk, 0, 1)
    u16 = np.ndarray(len(chunk) - 1, "<u2", chunk, 0, 1)
    if run.segment or frames.file is None or frames.file.bad:
        spans = zip((starts + 4).tolist(), ends.tolist(), strict=True)
        sound = checksums([chunk[start:end] for start, end in spans]) == u64[ends]
    else:
        sound = u64[ends] != 0
    sound &= u32[starts] == lengths - 4
    at = starts + shift
    sound &= (u64[at + 5] == places + run.first_seq) & (u64[at + 13] == run.ts[places])
    sound &= frames.header_bytes + 8 + u32[at + 25].astype(np.int64) + u16[at + 21] + u16[at + 23] == lengths
    return len(starts) if sound.all() else int(sound.argmin())


def _fragments(
    frames: Frames,
    chunk: bytes,
    starts: Places,
    lengths: Places,
    flags: npt.NDArray[np.uint8],
    places: Places,
    style: Style,
    out: list[bytes],
) -> None:
    seqs = (places + frames.run.first_seq).tolist()
    times = frames.run.ts[places].tolist()
    seen = HAS_NODE | HAS_META | (HAS_TAG if style.include_tags else 0)
    begins = starts + frames.header_bytes
    ends = (starts + lengths - _CHECKSUM_BYTES).tolist()
    if not style.include_data or (flags & np.uint8(seen)).any():
        rows = zip(seqs, times, begins.tolist(), ends, flags.tolist(), strict=True)
        names: dict[bytes, bytes] = {}
        out += [_with_headers(chunk, *row, style, names) for row in rows]
        return
    if (flags & np.uint8(HAS_TAG)).any():
        begins = begins + np.ndarray(len(chunk) - 1, "<u2", chunk, 0, 1)[begins - 6]
    # The closing brace of the payload also closes the fragment.
    rows_plain = zip(seqs, times, (begins + _OPEN_BYTES).tolist(), ends, strict=True)
    out += [
        b'{"$seq":%d,"$ts":%d,"data":%b' % (seq, ts, chunk[begin:end]) for seq, ts, begin, end in rows_plain
    ]


def _with_headers(
    chunk: bytes, seq: int, ts: int, begin: int, end: int, flags: int, style: Style, names: dict[bytes, bytes]
) -> bytes:
    node_bytes, tag_bytes, _ = _LENGTHS.unpack_from(chunk, begin - 8)
    tag_at = begin + node_bytes
    data_at = tag_at + tag_bytes
    has_node = flags & HAS_NODE and style.include_node
    node = b',"$node":' + _quoted(chunk[begin:tag_at], names) if has_node else b""
    tag = (
        b',"$tag":' + _quoted(chunk[tag_at:data_at], names) if flags & HAS_TAG and style.include_tags else b""
    )
    if not style.include_data:
        has_meta = flags & HAS_META and style.include_meta
        meta = split_payload(chunk[data_at:end])[1] if has_meta else None
        return b'{"$seq":%d,"$ts":%d%b%b%b}' % (seq, ts, node, tag, b',"meta":' + meta if meta else b"")
    if not flags & HAS_META:
        return b'{"$seq":%d,"$ts":%d%b%b,"data":%b' % (seq, ts, node, tag, chunk[data_at + _OPEN_BYTES : end])
    data, meta = split_payload(chunk[data_at:end])
    shown = b',"meta":' + meta if meta is not None and style.include_meta else b""
    return b'{"$seq":%d,"$ts":%d%b%b,"data":%b%b}' % (seq, ts, node, tag, data, shown)


def _quoted(name: bytes, names: dict[bytes, bytes]) -> bytes:
    """Return a node or a tag as a JSON string."""
    quoted = names.get(name)
    if quoted is None:
        quoted = names[name] = msgspec.json.encode(name.decode("utf-8", "replace"))
    return quoted
