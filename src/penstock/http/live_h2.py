"""A live response within an HTTP/2 connection, where other requests go on beside it."""

from __future__ import annotations

from typing import Protocol

from penstock.http.live import Live
from penstock.http.stream_h2 import H2Stream

__all__ = ["H2Sink", "LiveCarrier"]


class LiveCarrier(Protocol):
    """The connection, as far as a sink needs it."""

    def send_live(self, stream: H2Stream, data: bytes) -> bool:
        """Send as much as the windows let through; whether that was everything."""
        ...

    def end_live(self, stream: H2Stream) -> None: ...

    def cut_live(self, stream: H2Stream) -> None: ...


class H2Sink:
    """The sink of one stream: writable while nothing of it waits for the client's windows."""

    __slots__ = ("_carrier", "_is_open", "_live", "_stream", "is_writable")

    def __init__(self, carrier: LiveCarrier, stream: H2Stream, live: Live) -> None:
        self._carrier = carrier
        self._stream = stream
        self._live = live
        self._is_open = True
        self.is_writable = True

    def write(self, data: bytes) -> None:
        if self._is_open and data:
            self.is_writable = self._carrier.send_live(self._stream, data) and self._is_open

    def end(self) -> None:
        if self._is_open:
            self._is_open = self.is_writable = False
            self._carrier.end_live(self._stream)

    def cut(self) -> None:
        if self._is_open:
            self._carrier.cut_live(self._stream)

    def emptied(self) -> None:
        """Everything has gone out."""
        if self._is_open and not self.is_writable:
            self.is_writable = True
            self._live.writable()

    def dropped(self) -> None:
        """The client took the request back, or left."""
        if self._is_open:
            self._is_open = self.is_writable = False
            self._live.closed()
