"""Warnings that would repeat themselves a thousand times, said once in a while with a count."""

from __future__ import annotations

import logging
from typing import Final

from penstock.clock import Clock

__all__ = ["SparseLog"]

_INTERVAL_S: Final = 10.0


class SparseLog:
    """At most one line every ten seconds for each key. Not thread-safe: one loop owns it."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}

    def warning(self, key: str, sentence: str) -> None:
        now_s = self._clock.monotonic()
        last_s, held_back = self._said.get(key, (now_s - _INTERVAL_S, 0))
        if now_s - last_s < _INTERVAL_S:
            self._said[key] = (last_s, held_back + 1)
            return
        self._said[key] = (now_s, 0)
        more = f" (and {held_back} more like it)" if held_back else ""
        self._log.warning("%s: %s%s", key, sentence, more)
