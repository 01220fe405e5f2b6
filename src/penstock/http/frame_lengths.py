"""The lengths of HTTP/2 frames, judged as soon as they are announced."""

from __future__ import annotations

from typing import Final

__all__ = ["FrameLengths"]

_HEAD_BYTES: Final = 9
_HEADERS: Final = 1
_CONTINUATION: Final = 9


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
