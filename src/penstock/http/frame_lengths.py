"""HTTP/2 frames before anything is unpacked: how long they may be, and how many make one turn."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["FrameLengths", "Turn", "next_turn"]

_HEAD_BYTES: Final = 9
_DATA: Final = 0
_HEADERS: Final = 1
_CONTINUATION: Final = 9
_END_STREAM: Final = 1
_END_HEADERS: Final = 4
_HEADERS_WORK: Final = 4
"""A head costs about as much as that many other frames."""
_CONTINUATIONS_MAX: Final = 32


class FrameLengths:
    """Follows the frames of one connection, whose first `skip` bytes are none.

    The state machine looks at a frame's length only when all of the frame is there, and a length may say
    16 MiB; and it unpacks the headers of a request before it counts them. Without this a client could have
    as much kept and unpacked for it as it likes to announce.
    """

    __slots__ = ("_head_length", "_head_length_max", "_length_max", "_part", "_skip")

    def __init__(self, *, length_max: int, head_length_max: int, skip: int) -> None:
        self._length_max = length_max
        self._head_length_max = head_length_max
        self._head_length = 0
        self._skip = skip
        self._part = b""

    def allow(self, data: bytes) -> bool:
        """Whether every frame that begins in `data`, the next bytes of the stream, is short enough."""
        if self._part:
            data = self._part + data
        at, size = self._skip, len(data)
        while at + _HEAD_BYTES <= size:
            length, kind = int.from_bytes(data[at : at + 3], "big"), data[at + 3]
            if kind == _CONTINUATION:
                self._head_length += length
            elif kind == _HEADERS:
                self._head_length = length
            if length > self._length_max or self._head_length > self._head_length_max:
                return False
            at += _HEAD_BYTES + length
        self._skip = max(at - size, 0)
        self._part = data[at:]
        return True


class Turn(NamedTuple):
    """The frames that are handled in one turn of the loop."""

    size: int
    """How many bytes they have; 0 if no frame is complete."""
    idle: int
    """How many of them ask for nothing and bring nothing: settings, pings, windows, priorities, resets."""
    is_flood: bool
    """Whether one head comes in more frames than any client needs."""


def next_turn(data: bytes, work_max: int) -> Turn:
    """Return the whole frames at the start of `data` that are at most `work_max` of work, or one more.

    The frames of one head stay together, so that what waits for the rest of it waits here, where it counts.
    """
    at = size = idle = work = parts = 0
    while at + _HEAD_BYTES <= len(data) and (work < work_max or size != at):
        length, kind, flags = int.from_bytes(data[at : at + 3], "big"), data[at + 3], data[at + 4]
        at += _HEAD_BYTES + length
        is_head = kind in (_HEADERS, _CONTINUATION)
        parts = parts + 1 if kind == _CONTINUATION else 0
        if at > len(data) or parts > _CONTINUATIONS_MAX:
            break
        work += _HEADERS_WORK if kind == _HEADERS else 1
        is_idle = not is_head and (kind != _DATA or (length == 0 and not flags & _END_STREAM))
        idle += is_idle
        if not is_head or flags & _END_HEADERS:
            size = at
    return Turn(size, idle, parts > _CONTINUATIONS_MAX)
