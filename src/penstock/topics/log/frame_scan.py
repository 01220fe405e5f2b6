"""A scanner for the frames in a log file, and the records in its frames.

A frame is valid only if its lengths fit together, its type exists and its checksum is right. Only the walk
from length to length and the checksums are done per frame; the rest is done for many frames at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from penstock.storage import FileView, FrameEnds, exact
from penstock.topics.log.frame import (
    CHECKSUM,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    ROW_FLAGS,
    FrameType,
    encode_control,
)
from penstock.topics.log.payload import DATA_WRAP_BYTES, ESCAPED, META_WRAP_BYTES, escape_savings
from penstock.topics.segments.columns import gather
from penstock.topics.segments.format import HAS_META, HAS_TAG, IDX_DTYPE, checksums

_CHUNK_BYTES: Final = 4 * 1024**2
_READ_BYTES: Final = 4 * 1024**2
_TAGS_AT_ONCE: Final = 1024
_MARK_BODY = struct.Struct("<Q")
_MARK_BYTES: Final = FRAME_BYTES_MIN + _MARK_BODY.size
_TYPE_MAX: Final = max(FrameType)
_LENGTH = struct.Struct("<I")

FRAME_FIELDS: Final = np.dtype(
    [
        ("frame_len", "<u4"),
        ("type", "u1"),
        ("flags", "u1"),
        ("topic_id", "<u8"),
        ("seq", "<u8"),
        ("ts", "<u8"),
        ("node_bytes", "<u2"),
        ("tag_bytes", "<u2"),
        ("data_bytes", "<u4"),
    ]
)
"""The head of a frame as it is stored."""

Heads: TypeAlias = npt.NDArray[np.void]


class WalFormat:
    """The topics log as `penstock.storage` sees it. Its marks are checkpoint marks of topic 0."""

    def frame_end(self, view: memoryview, offset: int, limit: int) -> int | None:
        """Return the end of the valid frame at `offset`, or None if there is none."""
        if limit - offset < FRAME_BYTES_MIN:
            return None
        (size,) = _LENGTH.unpack_from(view, offset)
        end: int = offset + 4 + size
        if size < FRAME_BYTES_MIN - 4 or end > limit:
            return None
        frame = bytes(view[offset:end])
        heads = np.frombuffer(frame, FRAME_FIELDS, 1)
        if not _plausible(heads)[0]:
            return None
        return (
            end if CHECKSUM.unpack_from(frame, len(frame) - 8)[0] == xxh3_64_intdigest(frame[4:-8]) else None
        )

    def frame_ends(self, view: memoryview, start: int, limit: int) -> tuple[FrameEnds, int]:
        """Return the ends of all consecutive valid frames from `start`, and where they stop."""
        found: list[FrameEnds] = []
        while True:
            ends, whole = _ends_in_chunk(view, start, limit)
            if len(ends):
                found.append(ends + start)
                start += int(ends[-1])
            if not whole or not len(ends):
                break
        return (np.concatenate(found) if found else np.zeros(0, np.int64)), start

    def mark(self, value: int) -> bytes:
        """Encode a checkpoint mark with a number."""
        return encode_control(FrameType.CHECKPOINT_MARK, 0, _MARK_BODY.pack(value))

    def read_mark(self, frame: memoryview) -> int | None:
        """Return the number of a mark, or None if the frame is not a mark."""
        if len(frame) != _MARK_BYTES or frame[4] != FrameType.CHECKPOINT_MARK or any(frame[6:14]):
            return None
        value: int = _MARK_BODY.unpack_from(frame, HEADER_BYTES)[0]
        return value


def _ends_in_chunk(view: memoryview, start: int, limit: int) -> tuple[FrameEnds, bool]:
    """Return the frame ends in the next few megabytes, relative to `start`, and whether more may follow."""
    room = limit - start
    size = min(room, _CHUNK_BYTES)
    if size >= FRAME_BYTES_MIN:
        # One frame may be larger than a chunk.
        size = min(room, max(size, 4 + _LENGTH.unpack_from(view, start)[0]))
    chunk = view[start : start + size].tobytes()
    ends = _walk_lengths(chunk)
    if not len(ends):
        return ends, False
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    sound = _plausible(_heads(chunk, starts))
    spans = zip((starts + 4).tolist(), (ends - 8).tolist(), strict=True)
    sound &= (
        checksums([chunk[begin:end] for begin, end in spans])
        == np.ndarray(len(chunk) - 7, "<u8", chunk, 0, 1)[ends - 8]
    )
    if sound.all():
        return ends, True
    return ends[: int(sound.argmin())], False


def _walk_lengths(chunk: bytes) -> FrameEnds:
    ends: list[int] = []
    at, last = 0, len(chunk) - FRAME_BYTES_MIN
    unpack = _LENGTH.unpack_from
    while at <= last:
        (size,) = unpack(chunk, at)
        end = at + 4 + size
        if size < FRAME_BYTES_MIN - 4 or end > len(chunk):
            break
        ends.append(end)
        at = end
    return np.array(ends, np.int64)


def _heads(chunk: bytes, starts: npt.NDArray[np.int64]) -> Heads:
    windows = np.ndarray((len(chunk) - HEADER_BYTES + 1,), f"V{HEADER_BYTES}", chunk, 0, 1)
    return windows[starts].view(FRAME_FIELDS)


def _plausible(heads: Heads) -> npt.NDArray[np.bool_]:
    body = heads["data_bytes"].astype(np.int64) + heads["node_bytes"] + heads["tag_bytes"]
    plausible: npt.NDArray[np.bool_] = heads["frame_len"] == body + (FRAME_BYTES_MIN - 4)
    return plausible & (heads["type"] >= 1) & (heads["type"] <= _TYPE_MAX)


@dataclass(frozen=True, slots=True)
class FrameTable:
    """Valid frames of one file, one array item per frame."""

    view: memoryview | FileView
    starts: npt.NDArray[np.int64]
    heads: Heads

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> FrameTable:
        """Return some of the frames."""
        return FrameTable(self.view, self.starts[chosen], self.heads[chosen])

    def body(self, place: int) -> memoryview:
        """Return the data of one frame."""
        head = self.heads[place]
        at = int(self.starts[place]) + HEADER_BYTES + int(head["node_bytes"]) + int(head["tag_bytes"])
        return exact(self.view, at, at + int(head["data_bytes"]))

    def tags(self) -> Iterator[tuple[int, bytes]]:
        """Yield the position and tag of each tagged frame."""
        tagged = np.flatnonzero(self.heads["flags"] & np.uint8(HAS_TAG))
        for low in range(0, len(tagged), _TAGS_AT_ONCE):
            part = tagged[low : low + _TAGS_AT_ONCE]
            heads = self.heads[part]
            starts = self.starts[part] + HEADER_BYTES + heads["node_bytes"]
            lengths = heads["tag_bytes"].astype(np.int64)
            block, begins = gather(self.view, starts, lengths)
            spans = zip(begins.tolist(), (begins + lengths).tolist(), strict=True)
            for place, (begin, end) in zip(part.tolist(), spans, strict=True):
                yield place, block[begin:end]

    def index_rows(self) -> bytes:
        """Return index rows, identical to those made when the records were written."""
        flags = self.heads["flags"]
        wrap = DATA_WRAP_BYTES + np.where(flags & np.uint8(HAS_META), META_WRAP_BYTES, 0)
        accounted = np.maximum(self.heads["data_bytes"].astype(np.int64) - wrap, 0)
        for place in np.flatnonzero(flags & np.uint8(ESCAPED)).tolist():
            accounted[place] -= int(escape_savings(bytes(self.body(place)))[1].sum())
        rows = np.empty(len(self), IDX_DTYPE)
        rows["offset"] = self.starts
        rows["length"] = lengths = self.heads["frame_len"].astype(np.int64) + 4
        rows["ts"] = self.heads["ts"]
        rows["packed"] = (lengths - accounted) << 8 | (flags & np.uint8(ROW_FLAGS))
        return rows.tobytes()


def read_frames(view: memoryview | FileView, start: int, ends: FrameEnds) -> FrameTable:
    """Read the frames that `frame_ends` found from `start` on. Raise `MediaError` if they are unreadable."""
    starts = np.concatenate((np.array([start], np.int64), ends[:-1])) if len(ends) else np.zeros(0, np.int64)
    heads = np.empty(len(starts), FRAME_FIELDS)
    at = 0
    while at < len(starts):
        low = int(starts[at])
        stop = max(int(np.searchsorted(starts, low + _READ_BYTES)), at + 1)
        part, high = starts[at:stop], int(starts[stop - 1]) + HEADER_BYTES
        block = exact(view, low, high)
        windows = np.ndarray((high - low - HEADER_BYTES + 1,), f"V{HEADER_BYTES}", block, 0, 1)
        heads[at:stop] = windows[part - low].view(FRAME_FIELDS)
        at = stop
    return FrameTable(view, starts, heads)
