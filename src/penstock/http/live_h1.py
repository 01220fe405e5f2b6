"""An HTTP/1.1 connection whose last response is live, or that speaks another protocol from here on."""

from __future__ import annotations

import asyncio

from penstock.http.head_h1 import response_head
from penstock.http.host import Host
from penstock.http.live import Live, Tunnel
from penstock.http.message import Response, reason

__all__ = ["H1Live", "H1Tunnel", "hand_over"]


class H1Live(asyncio.Protocol):
    """Takes a connection over and is the sink of its live response, in chunks where the client knows them.

    It is the last response of the connection: what the client still sends is thrown away, and a client that
    stops sending has left. Bytes that it does not read count in the budget of all connections.
    """

    def __init__(
        self, host: Host, transport: asyncio.Transport, live: Live, *, is_chunked: bool, is_writable: bool
    ) -> None:
        self._host = host
        self._transport = transport
        self._live: Live | None = live
        self._is_chunked = is_chunked
        self._can_write = is_writable
        self.is_writable = is_writable
        self._held_bytes = 0
        self._full_ticks = 0
        if not is_writable:
            self._hold()

    # --- the sink ------------------------------------------------------------------------------------------

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
        """A client of a live response has nothing more to say."""

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

    # --- patience ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        if self._can_write:
            return
        self._full_ticks += 1
        if self._full_ticks >= self._host.limits.write_timeout_s:
            self.abort()

    def drain(self) -> None:
        """The live part ends it, when it is told to."""

    def abort(self) -> None:
        self._transport.abort()


class H1Tunnel(H1Live):
    """A connection that speaks another protocol; every byte of the client is for the live part."""

    def __init__(
        self, host: Host, transport: asyncio.Transport, tunnel: Tunnel, *, is_writable: bool
    ) -> None:
        super().__init__(host, transport, tunnel, is_chunked=False, is_writable=is_writable)
        self._tunnel = tunnel
        self._is_paused = False
        self._input_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._live is not None:
            self._tunnel.received(data)

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
        # What the client sends may ask for more; it has not read what it has.
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
    """Send the head of a live response and give it the connection."""
    if response.tunnel is not None:
        tunnel = H1Tunnel(host, transport, response.tunnel, is_writable=is_writable)
        _take_over(host, transport, tunnel, _switching_head(response))
        response.tunnel.connect(tunnel)
    elif response.live is not None:
        sink = H1Live(host, transport, response.live, is_chunked=is_chunked, is_writable=is_writable)
        head = response_head(response, None, host.date, keep_alive=False, is_chunked=is_chunked)
        _take_over(host, transport, sink, head)
        response.live.attach(sink)


def _take_over(host: Host, transport: asyncio.Transport, protocol: H1Live, head: bytes) -> None:
    host.connections.add(protocol)
    transport.set_protocol(protocol)
    if not transport.is_closing():
        transport.resume_reading()
        transport.write(head)


def _switching_head(response: Response) -> bytes:
    lines = [b"HTTP/1.1 %d %b\r\n" % (response.status, reason(response.status))]
    lines += [b"%b: %b\r\n" % header for header in response.headers]
    return b"".join([*lines, b"\r\n"])
