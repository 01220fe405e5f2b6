"""The writers of streaming responses, over HTTP/1.1, HTTP/2 and upgraded connections.

A stream of records has no fixed end. Its response has a `StreamingBody`, which the connection attaches to a
`StreamWriter`. From then on the body writes directly into the connection, without a task or a future per
piece. The body is notified when the client falls behind, catches up, or leaves.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from penstock.http.connection import Host
from penstock.http.h1_heads import response_head
from penstock.http.h2_stream import H2Stream
from penstock.http.message import Response, StreamingBody, Upgrade, reason


class H1StreamWriter(asyncio.Protocol):
    """The writer of a live response over HTTP/1.1, in chunks if the client supports them.

    It owns the connection. The response is the last one: further input is discarded, and a client that stops
    sending is treated as gone. Unread bytes count in the budget of all connections.
    """

    def __init__(
        self,
        host: Host,
        transport: asyncio.Transport,
        live: StreamingBody,
        *,
        is_chunked: bool,
        is_writable: bool,
    ) -> None:
        self._host = host
        self._transport = transport
        self._live: StreamingBody | None = live
        self._is_chunked = is_chunked
        self._can_write = is_writable
        self.is_writable = is_writable
        self._held_bytes = 0
        self._full_ticks = 0
        if not is_writable:
            self._hold()

    # --- StreamWriter --------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._live is not None and not self._transport.is_closing():
            self._transport.write(self._host.chunk(data) if self._is_chunked else data)

    def end(self) -> None:
        if self._live is not None:
            self._live, self.is_writable = None, False
            if not self._transport.is_closing():
                if self._is_chunked:
                    self._transport.write(b"0\r\n\r\n")
                self._transport.close()

    def cut(self) -> None:
        self._transport.abort()

    # --- the transport -------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Discard the input: a live response is the last one of its connection."""

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._host.connections.discard(self)
        self._give_back()
        live, self._live = self._live, None
        self.is_writable = False
        if live is not None:
            live.closed()

    def pause_writing(self) -> None:
        self._can_write = self.is_writable = False
        self._hold()

    def resume_writing(self) -> None:
        self._can_write = True
        self._full_ticks = 0
        self._give_back()
        if self._live is not None:
            self.is_writable = True
            self._live.writable()

    def _hold(self) -> None:
        self._held_bytes = self._transport.get_write_buffer_size()
        self._host.budget.take(self._held_bytes)

    def _give_back(self) -> None:
        self._host.budget.give(self._held_bytes)
        self._held_bytes = 0

    # --- timeouts ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        if self._can_write:
            return
        self._full_ticks += 1
        if self._full_ticks >= self._host.limits.write_timeout_s:
            self.abort()

    def drain(self) -> None:
        """Do nothing: the body ends the response when the server shuts down."""

    def abort(self) -> None:
        self._transport.abort()


class H1UpgradeWriter(H1StreamWriter):
    """The writer of an upgraded connection; all input goes to the body."""

    def __init__(
        self, host: Host, transport: asyncio.Transport, upgrade: Upgrade, *, is_writable: bool
    ) -> None:
        super().__init__(host, transport, upgrade, is_chunked=False, is_writable=is_writable)
        self._upgrade = upgrade
        self._is_paused = False
        self._input_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._live is not None:
            self._upgrade.received(data)

    def pause(self) -> None:
        self._is_paused = True
        self._read_or_not()

    def resume(self) -> None:
        self._is_paused = False
        self._read_or_not()

    def hold(self, size: int) -> bool:
        budget = self._host.budget
        if size > self._input_bytes and not budget.fits(size - self._input_bytes):
            return False
        budget.take(size - self._input_bytes)
        self._input_bytes = size
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.hold(0)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # More input may produce more output, while the client has not read the earlier output.
        self._read_or_not()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_or_not()

    def _read_or_not(self) -> None:
        if self._transport.is_closing():
            return
        if self._is_paused or not self._can_write:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


def hand_over(
    host: Host, transport: asyncio.Transport, response: Response, *, is_chunked: bool, is_writable: bool
) -> None:
    """Send the head of a live response and transfer the connection to it."""
    if response.upgrade is not None:
        upgrade = H1UpgradeWriter(host, transport, response.upgrade, is_writable=is_writable)
        _take_over(host, transport, upgrade, _switching_head(response))
        response.upgrade.connect(upgrade)
    elif response.live is not None:
        writer = H1StreamWriter(
            host, transport, response.live, is_chunked=is_chunked, is_writable=is_writable
        )
        head = response_head(response, None, host.date, keep_alive=False, is_chunked=is_chunked)
        _take_over(host, transport, writer, head)
        response.live.attach(writer)


def _take_over(host: Host, transport: asyncio.Transport, protocol: H1StreamWriter, head: bytes) -> None:
    host.connections.add(protocol)
    transport.set_protocol(protocol)
    if not transport.is_closing():
        transport.resume_reading()
        transport.write(head)


def _switching_head(response: Response) -> bytes:
    lines = [b"HTTP/1.1 %d %b\r\n" % (response.status, reason(response.status))]
    lines += [b"%b: %b\r\n" % header for header in response.headers]
    return b"".join([*lines, b"\r\n"])


class StreamCarrier(Protocol):
    """The part of an HTTP/2 connection that a stream's writer needs."""

    def send_live(self, stream: H2Stream, data: bytes) -> bool:
        """Send as much as the windows allow. Return whether everything was sent and more can be written."""
        ...

    def end_live(self, stream: H2Stream) -> None: ...

    def cut_live(self, stream: H2Stream) -> None: ...


class H2StreamWriter:
    """The writer of one stream. It is writable while no output waits for the client's windows."""

    __slots__ = ("_carrier", "_is_open", "_live", "_stream", "is_writable")

    def __init__(self, carrier: StreamCarrier, stream: H2Stream, live: StreamingBody) -> None:
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
        """Resume the body: all its output has been sent."""
        if self._is_open and not self.is_writable:
            self.is_writable = True
            self._live.writable()

    def dropped(self) -> None:
        """Notify the body that the client has cancelled the request or left."""
        if self._is_open:
            self._is_open = self.is_writable = False
            self._live.closed()
