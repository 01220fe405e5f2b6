"""Lines for whoever reads standard output or error, written by a thread of their own.

A reader that stands still, such as a terminal that was paused, stops whoever writes to it. Here that is this
thread alone: what does not fit into its buffer meanwhile is left out, counted, and told.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TextIO

__all__ = ["Outlet"]

_HELD_BYTES_MAX: Final = 4 << 20
_LAST_WORDS_S: Final = 2.0


class Outlet:
    """Writes lines to a stream. `left_out` words how many lines there was no room for.

    Nobody reading, or no stream at all, is no fault: the lines are gone then.
    """

    def __init__(
        self, stream: TextIO | None, left_out: Callable[[int], bytes], *, held_max: int = _HELD_BYTES_MAX
    ) -> None:
        self._stream = stream
        self._left_out = left_out
        self._held_max = held_max
        self._lines: deque[bytes] = deque()
        self._held = 0
        self._lost = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="penstock-outlet", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """One more line; returns at once."""
        with self._changed:
            if self._held + len(line) > self._held_max:
                self._lost += 1
                return
            self._lines.append(line)
            self._held += len(line)
            self._changed.notify()

    def close(self, timeout_s: float = _LAST_WORDS_S) -> None:
        """Write what is held, and leave it if nobody reads it in time."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (data := self._next()) is not None:
            if self._stream is not None:
                with contextlib.suppress(OSError, ValueError):  # no reader, or a stream that is closed
                    _write(self._stream, data)

    def _next(self) -> bytes | None:
        with self._changed:
            while not self._lines and not self._is_closed:
                self._changed.wait()
            if not self._lines:
                return None
            lost, self._lost = self._lost, 0
            told = [self._left_out(lost)] if lost else []
            data = b"".join([*self._lines, *told])
            self._lines.clear()
            self._held = 0
            return data


def _write(stream: TextIO, data: bytes) -> None:
    """Past the stream's own buffer, whose lock a write that stands still would keep to the end."""
    try:
        number = stream.fileno()
    except OSError:  # it is no file
        stream.write(data.decode("utf-8", "replace"))
        stream.flush()
        return
    left = memoryview(data)
    while left:
        left = left[os.write(number, left) :]
