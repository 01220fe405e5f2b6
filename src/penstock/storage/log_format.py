"""The seam between the append log, which moves frames, and the room that gives them meaning."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["FrameEnds", "LogFormat", "chase"]

FrameEnds: TypeAlias = npt.NDArray[np.int64]


class LogFormat(Protocol):
    """How frames begin, end and prove themselves. Every method is pure.

    A run of zero bytes is never a valid frame, and every frame carries a checksum over itself. All marks have
    one length and begin with the same bytes, by which they can be found among damaged frames.
    """

    def frame_end(self, view: memoryview, offset: int, limit: int) -> int | None:
        """The end of the valid frame that starts at `offset` and ends by `limit`, None if there is none."""
        ...

    def frame_ends(self, view: memoryview, start: int, limit: int) -> tuple[FrameEnds, int]:
        """The ends of the valid frames that follow each other from `start`, and where they stop.

        The second value is the last end, or `start` if there is no frame at all. `chase` is a right answer;
        a format that can be faster is.
        """
        ...

    def mark(self, value: int) -> bytes:
        """A frame of the log's own that carries an unsigned number of 64 bits."""
        ...

    def read_mark(self, frame: memoryview) -> int | None:
        """The number of a valid frame that is a mark, None of any other."""
        ...


def chase(fmt: LogFormat, view: memoryview, start: int, limit: int) -> tuple[FrameEnds, int]:
    """`frame_ends` by asking for one frame after the other."""
    ends: list[int] = []
    frame_end = fmt.frame_end
    end = frame_end(view, start, limit)
    while end is not None:
        ends.append(end)
        start = end
        end = frame_end(view, start, limit)
    return np.array(ends, dtype=np.int64), start
