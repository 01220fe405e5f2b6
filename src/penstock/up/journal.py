"""The one log of a fleet: the last lines in memory, and whoever wants to hear of new ones."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from penstock.clock import Clock
from penstock.up.lines import Said, Throttle, Veil, shown
from penstock.up.status import FleetEvent, Level, LogLine, PartStatus

__all__ = ["Journal"]

_LOG = logging.getLogger(__name__)
_KEPT: Final = 2000


class Journal:
    """Numbers lines, keeps the last, and tells them and every change of a part to its listeners.

    None of `secrets` is in any of them, whoever printed it.
    """

    def __init__(self, *, clock: Clock, kept: int = _KEPT, secrets: Iterable[str] = ()) -> None:
        self._clock = clock
        self._veil = Veil(secrets)
        self._lines: deque[LogLine] = deque(maxlen=kept)
        self._number = 0
        self._listeners: dict[int, Callable[[FleetEvent], None]] = {}
        self._subscribed = 0
        self._throttles: dict[str, Throttle] = {}

    def subscribe(self, listener: Callable[[FleetEvent], None]) -> Callable[[], None]:
        """See `FleetView.subscribe`."""
        self._subscribed += 1
        number = self._subscribed
        self._listeners[number] = listener

        def end() -> None:
            self._listeners.pop(number, None)

        return end

    def lines(self, after: int = 0, limit: int = 200) -> Sequence[LogLine]:
        """See `FleetView.log`."""
        found = [line for line in self._lines if line.number > after]
        return found[-limit:] if limit > 0 else []

    def say(self, part: str, level: Level, text: str) -> None:
        """A line of the fleet's own, about a part: never left out."""
        self._write(part, level, text)

    def hear(self, part: str, said: Said) -> bool:
        """A line that a part printed; false if it is beyond what a part may print, and was only counted."""
        throttle = self._throttles.setdefault(part, Throttle())
        admitted = throttle.admits(self._clock.monotonic())
        if admitted:
            self._write(part, said.level, said.text)
        return admitted

    def tell_left_out(self) -> None:
        """Say of every part how many lines of it were left out since this was last said."""
        for part, throttle in self._throttles.items():
            if count := throttle.take_left_out():
                self.say(part, Level.WARNING, f"{count} lines were left out: it prints too many of them")

    def shown(self, text: str) -> str:
        """What of a text may be told."""
        return self._veil.over(shown(text))

    def changed(self, status: PartStatus) -> None:
        """A part is in another state, or has told another figure."""
        self._publish(status)

    def _write(self, part: str, level: Level, text: str) -> None:
        self._number += 1
        line = LogLine(
            number=self._number, at_ms=self._clock.now_ms(), level=level, part=part, text=self.shown(text)
        )
        self._lines.append(line)
        self._publish(line)

    def _publish(self, event: FleetEvent) -> None:
        for number, listener in list(self._listeners.items()):
            try:
                listener(event)
            except Exception:  # noqa: BLE001 - whoever listens must not end what it listens to
                self._listeners.pop(number, None)
                _LOG.exception("a listener of the log has failed, and hears nothing any more")
