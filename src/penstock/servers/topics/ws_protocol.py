"""The WebSocket protocol below the messages: the handshake, frames, pings and the goodbye."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Iterator
from typing import Final

from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import SERVER, Protocol, State
from websockets.utils import accept_key

from penstock.http import HeaderList, Refusal, Request

__all__ = ["MESSAGE_BYTES_MAX", "PIECE_BYTES", "Framing", "handshake", "text_frame"]

MESSAGE_BYTES_MAX: Final = 16 * 1024**2
PIECE_BYTES: Final = 64
"""What a fragment or a message costs in memory besides its bytes."""
_KEY_BYTES: Final = 16
_SHORT: Final = 126
_LONG: Final = 2**16
_SILENT: Final = logging.getLogger(f"{__name__}.frames")
_SILENT.setLevel(logging.CRITICAL)


def handshake(request: Request) -> HeaderList:
    """The headers of the answer that opens a WebSocket. Raises `Refusal` for what asks for none."""
    headers = request.headers
    wants = headers.get(b"upgrade", b"").lower() == b"websocket"
    options = [option.strip() for option in headers.get(b"connection", b"").lower().split(b",")]
    if not wants or b"upgrade" not in options:
        raise Refusal("this is a WebSocket: ask for an upgrade over HTTP/1.1")
    if headers.get(b"sec-websocket-version") != b"13":
        raise Refusal("the version of WebSocket is 13", headers=[(b"sec-websocket-version", b"13")])
    key = headers.get(b"sec-websocket-key", b"")
    try:
        is_key = len(base64.b64decode(key, validate=True)) == _KEY_BYTES
    except binascii.Error:
        is_key = False
    if not is_key:
        raise Refusal("Sec-WebSocket-Key must be 16 bytes in base64")
    return [
        (b"upgrade", b"websocket"),
        (b"connection", b"Upgrade"),
        (b"sec-websocket-accept", accept_key(key.decode("ascii")).encode()),
    ]


def text_frame(payload: bytes) -> bytes:
    """One message to a client. Servers do not mask, so the same bytes may go to everybody."""
    size = len(payload)
    if size < _SHORT:
        return b"\x81%c%b" % (size, payload)
    if size < _LONG:
        return b"\x81\x7e%b%b" % (size.to_bytes(2, "big"), payload)
    return b"\x81\x7f%b%b" % (size.to_bytes(8, "big"), payload)


class Framing:
    """One connection's frames: bytes in, whole messages out, and what the protocol itself has to answer.

    After each call, `replies` has what must be sent; `is_over` says that nothing may follow it.
    """

    def __init__(self) -> None:
        self._protocol = Protocol(SERVER, state=State.OPEN, max_size=MESSAGE_BYTES_MAX, logger=_SILENT)
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0
        self._opcode = Opcode.TEXT

    @property
    def is_open(self) -> bool:
        """Whether messages may be sent."""
        return self._protocol.state is State.OPEN

    @property
    def is_over(self) -> bool:
        return self._protocol.eof_sent

    @property
    def held_bytes(self) -> int:
        """What the part of a message that is there takes in memory, its fragments included."""
        return len(self._protocol.reader.buffer) + self._pieces_bytes

    def replies(self) -> bytes:
        return b"".join(self._protocol.data_to_send())

    def receive(self, data: bytes) -> Iterator[tuple[bool, bytes]]:
        """The messages that are complete with these bytes: whether each is text, and what it says."""
        self._protocol.receive_data(data)
        for frame in self._protocol.events_received():
            assert isinstance(frame, Frame)
            if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
                self._opcode = frame.opcode
            elif frame.opcode is not Opcode.CONT:
                continue
            self._pieces.append(bytes(frame.data))
            self._pieces_bytes += len(frame.data) + PIECE_BYTES
            if frame.fin:
                message = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
                self._pieces, self._pieces_bytes = [], 0
                yield self._opcode is Opcode.TEXT, message

    def ping(self) -> None:
        if self.is_open:
            self._protocol.send_ping(b"penstock")

    def leave(self) -> None:
        """The server goes away."""
        if self.is_open:
            self._protocol.send_close(CloseCode.GOING_AWAY, "the server is shutting down")

    def overload(self) -> None:
        """There is no room for what the client sends."""
        self._protocol.fail(CloseCode.TRY_AGAIN_LATER, "the server holds as many bytes as it may")

    def reject_text(self) -> None:
        """The client called something text that is none."""
        self._protocol.fail(CloseCode.INVALID_DATA, "a text message must be UTF-8")
