"""A fleet without processes, whose places and parts are set by a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.up import FleetEvent, FleetMap, Level, LogLine, PartKind, PartState, PartStatus


class FixedFleet:
    """See `FleetView`."""

    def __init__(self, places: FleetMap | None = None, parts: Sequence[PartStatus] = ()) -> None:
        self.map = places or nothing()
        self.running = list(parts)
        self.lines: list[LogLine] = []
        self.listeners: list[Callable[[FleetEvent], None]] = []

    def parts(self) -> Sequence[PartStatus]:
        return self.running

    def log(self, after: int = 0, limit: int = 200) -> Sequence[LogLine]:
        return self.lines[-limit:]

    def subscribe(self, listener: Callable[[FleetEvent], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def say(self, text: str) -> None:
        line = LogLine(number=len(self.lines) + 1, at_ms=1, part="test", level=Level.INFO, text=text)
        self.lines.append(line)
        for listener in self.listeners:
            listener(line)


def nothing() -> FleetMap:
    return FleetMap(data_dir="/nowhere")


def part(
    name: str,
    state: PartState = PartState.READY,
    error: str | None = None,
    *,
    kind: PartKind | None = None,
    address: str | None = None,
) -> PartStatus:
    """Return a part. Its kind follows from its name unless it is given."""
    known = kind or PartKind(name.partition("-")[0])
    return PartStatus(name=name, kind=known, state=state, since_ms=1, last_error=error, address=address)
