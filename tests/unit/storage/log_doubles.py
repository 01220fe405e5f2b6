"""A small log format for tests: length, kind, body, checksum."""

from __future__ import annotations

import struct

import xxhash

from penstock.errors import PenstockError
from penstock.storage import AppendLog, FrameEnds, LogScan, chase
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault

_HEAD = struct.Struct("<IB")
_SUM = struct.Struct("<Q")
RECORD, MARK = 1, 2
DIRECTORY = "/data/wal"


def frame(body: bytes, kind: int = RECORD) -> bytes:
    covered = bytes([kind]) + body
    return struct.pack("<I", len(covered) + 8) + covered + _SUM.pack(xxhash.xxh3_64_intdigest(covered))


class TinyFormat:
    """`LogFormat` for tests."""

    def frame_end(self, view: memoryview, offset: int, limit: int) -> int | None:
        if offset + _HEAD.size + 8 > limit:
            return None
        length, kind = _HEAD.unpack_from(view, offset)
        end = offset + 4 + length
        if length < 9 or end > limit or kind not in (RECORD, MARK):
            return None
        digest = xxhash.xxh3_64_intdigest(view[offset + 4 : end - 8])
        return end if digest == _SUM.unpack_from(view, end - 8)[0] else None

    def frame_ends(self, view: memoryview, start: int, limit: int) -> tuple[FrameEnds, int]:
        return chase(self, view, start, limit)

    def mark(self, value: int) -> bytes:
        return frame(_SUM.pack(value), MARK)

    def read_mark(self, frame: memoryview) -> int | None:
        return _SUM.unpack_from(frame, 5)[0] if frame[4] == MARK and len(frame) == 21 else None


TINY = TinyFormat()
MARK_BYTES = len(TINY.mark(0))


def bodies(found: LogScan) -> list[bytes]:
    """Return the body of every record, in order."""
    return [
        bytes(file.bytes_of(start + 5, end - 8))
        for file, start, end in found.frames()
        if file.bytes_of(start, end)[4] == RECORD
    ]


def append(log: AppendLog, body: bytes, *, sync: bool = True) -> bool:
    """Append a record, and return whether it was delivered."""
    data = frame(body)
    try:
        log.append([data], len(data), 1, sync=sync)
    except PenstockError:
        return False
    return True


class FillingDisk(FakeDisk):
    """A disk that gets full: no new name, no new bytes; what is allocated can be written and synced."""

    def _inject(self, plan: PlannedFault, number: int, name: str, path: str) -> None:
        takes_room = name in {"create", "allocate", "write", "mkdir"} or (
            name == "rename" and not self._is_there(path)
        )
        if takes_room or plan.kind is not DiskFault.NO_SPACE:
            super()._inject(plan, number, name, path)

    def _is_there(self, path: str) -> bool:
        try:
            self._node(path)
        except OSError:
            return False
        return True
