"""WebSockets: the handshake, the framing, and the messages in both directions."""

from __future__ import annotations

import base64
import binascii
import logging
import re
from collections.abc import Iterator
from typing import Annotated, Final, TypeAlias

import msgspec
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import SERVER, Protocol, State
from websockets.utils import accept_key

from penstock.http import HeaderList, Refusal, Request
from penstock.jsontext import json_problem
from penstock.servers.topics.answers import write_performance
from penstock.servers.topics.bodies import Start, WireRecord
from penstock.servers.topics.subscription import RenderedPage, quoted
from penstock.topics import FreeText, Tombstone, TopicConfig, TopicName, WriteResult

MESSAGE_BYTES_MAX: Final = 16 * 1024**2
PIECE_BYTES: Final = 64
"""The overhead of one fragment or message in memory."""
_KEY_BYTES: Final = 16
_SHORT: Final = 126
_LONG: Final = 2**16
_SILENT: Final = logging.getLogger(f"{__name__}.frames")
_SILENT.setLevel(logging.CRITICAL)


def handshake(request: Request) -> HeaderList:
    """Return the response headers that open a WebSocket. Raise `Refusal` for an invalid handshake."""
    headers = request.headers
    wants = headers.get(b"upgrade", b"").lower() == b"websocket"
    options = [option.strip() for option in headers.get(b"connection", b"").lower().split(b",")]
    if not wants or b"upgrade" not in options:
        raise Refusal("this is a WebSocket: request an upgrade over HTTP/1.1")
    if headers.get(b"sec-websocket-version") != b"13":
        raise Refusal("the WebSocket version must be 13", headers=[(b"sec-websocket-version", b"13")])
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
    """Encode one message. Servers do not mask, so the same bytes may be sent to all clients."""
    size = len(payload)
    if size < _SHORT:
        return b"\x81%c%b" % (size, payload)
    if size < _LONG:
        return b"\x81\x7e%b%b" % (size.to_bytes(2, "big"), payload)
    return b"\x81\x7f%b%b" % (size.to_bytes(8, "big"), payload)


class Framing:
    """The frames of one connection: turns bytes into whole messages, and produces protocol replies.

    After each call, send `replies`. If `is_over` is set, send nothing after them.
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
        """The memory taken by a partial message, including its fragments."""
        return len(self._protocol.reader.buffer) + self._pieces_bytes

    def replies(self) -> bytes:
        return b"".join(self._protocol.data_to_send())

    def receive(self, data: bytes) -> Iterator[tuple[bool, bytes]]:
        """Yield each message that `data` completes: whether it is text, and its payload."""
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
        """Close the connection: the server is shutting down."""
        if self.is_open:
            self._protocol.send_close(CloseCode.GOING_AWAY, "the server is shutting down")

    def overload(self) -> None:
        """Close the connection: there is no memory left for the client's input."""
        self._protocol.fail(CloseCode.TRY_AGAIN_LATER, "the server holds as many bytes as it may")

    def reject_text(self) -> None:
        """Close the connection: a text message is not UTF-8."""
        self._protocol.fail(CloseCode.INVALID_DATA, "a text message must be UTF-8")


_U64 = Annotated[int, msgspec.Meta(ge=0)]
_U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_ENCODE: Final = msgspec.json.Encoder().encode
_NULL: Final = msgspec.Raw(b"null")
_BOOL: Final = (b"false", b"true")
_LIMIT_DEFAULT: Final = 1000
_ACK: Final = (
    b'{"op":"ack","request_id":%b,"topic":%b,"first_seq":%d,"last_seq":%d,"seqs":%b,"head_seq":%d,"count":%d,'
    b'"created":%b,"deduped":%b,'
    b'"performance":%b}'
)


class _Op(msgspec.Struct, tag_field="op", kw_only=True):
    request_id: msgspec.Raw = _NULL
    """Any JSON; every response to the message repeats it."""


class Subscribe(_Op, tag="subscribe"):
    """Follow topics. A topic that is already followed starts over at the new position."""

    topic: TopicName | None = None
    topics: dict[TopicName, Start] | None = None
    from_seq: _U64 = 0
    tail: bool = False
    node: FreeText | list[FreeText] | None = None
    limit: _U32 = _LIMIT_DEFAULT
    max_batch_bytes: _U64 = 0
    include_data: bool = True
    include_tags: bool = False
    include_meta: bool = True
    lenient: bool = False
    match: object = None

    def starts(self) -> dict[str, Start]:
        """Return the start in each topic; an entry of the map takes precedence."""
        single = {} if self.topic is None else {self.topic: Start(from_seq=self.from_seq, tail=self.tail)}
        return single | (self.topics or {})


class Unsubscribe(_Op, tag="unsubscribe"):
    """Stop following topics."""

    topic: TopicName | None = None
    topics: list[TopicName] = []

    def names(self) -> list[str]:
        single = [] if self.topic is None else [self.topic]
        return list(dict.fromkeys([*single, *self.topics]))


class Publish(_Op, tag="publish"):
    """Append records, as a write over HTTP does."""

    topic: TopicName
    records: list[WireRecord]
    node: FreeText | None = None
    idempotency_key: FreeText | None = None
    create: bool | None = None
    config: TopicConfig | None = None
    disable_backpressure: bool = False
    return_seqs: bool = True


class Ping(_Op, tag="ping"):
    """Check the connection."""


Command: TypeAlias = Subscribe | Unsubscribe | Publish | Ping

_COMMAND: Final[msgspec.json.Decoder[Command]] = msgspec.json.Decoder(Command)


class _Known(msgspec.Struct):
    request_id: msgspec.Raw = _NULL


_KNOWN: Final = msgspec.json.Decoder(_Known)
_IS_SHAPE: Final = ("missing required field", "at `$.op`", "malformed", "truncated")
_IS_NO_OBJECT: Final = re.compile(r"Expected `object`, got `\w+`")


class Problem(msgspec.Struct):
    """The error body of HTTP; a WebSocket message has the same code and message."""

    code: str
    message: str


class InvalidMessage(Exception):
    """A message that is not a valid command; `code` and `request_id` are used in the response."""

    def __init__(self, message: str, code: str, request_id: bytes) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id


def read_command(text: bytes) -> Command:
    """Decode a command. Raise `InvalidMessage`, with the request's id if it has one."""
    problem = json_problem(text)
    if problem is not None:
        raise InvalidMessage(f"the message {problem}", "invalid_json", _request_id(text))
    try:
        command = _COMMAND.decode(text)
    except RecursionError:
        raise InvalidMessage("the message is nested too deeply", "invalid_json", b"null") from None
    except msgspec.MsgspecError as error:
        reason = str(error)
        is_shape = any(words in reason for words in _IS_SHAPE) or _IS_NO_OBJECT.fullmatch(reason)
        code = "invalid_json" if is_shape else "invalid_request"
        raise InvalidMessage(f"the message is invalid: {reason}", code, _request_id(text)) from None
    if isinstance(command, Subscribe) and command.topic is None and command.topics is None:
        raise InvalidMessage("subscribe needs topic or topics", "invalid_json", bytes(command.request_id))
    return command


def _request_id(text: bytes) -> bytes:
    try:
        request_id = bytes(_KNOWN.decode(text).request_id)
        return request_id if json_problem(request_id) is None else b"null"
    except (msgspec.MsgspecError, RecursionError):
        return b"null"


# ---- messages to the client ---------------------------------------------------------------------------


def record_message(step: RenderedPage) -> bytes:
    return b'{"op":"record",' + step.records


def caught_up_message(topic: str, head_seq: int) -> bytes:
    return b'{"op":"caught_up","topic":%b,"head_seq":%d}' % (quoted(topic), head_seq)


def tombstone_message(topic: str, gap: Tombstone) -> bytes:
    return _ENCODE(
        {
            "op": "tombstone",
            "topic": topic,
            "reason": gap.reason,
            "gap_from": gap.gap_from,
            "gap_to": gap.gap_to,
            "earliest_seq": gap.earliest_seq,
            "head_seq": gap.head_seq,
        }
    )


def deleted_message(topic: str) -> bytes:
    return b'{"op":"topic_deleted","topic":%b,"head_seq":0,"reason":"deleted"}' % quoted(topic)


def subscribed_message(request_id: msgspec.Raw, topics: dict[str, dict[str, int]]) -> bytes:
    return _ENCODE({"op": "subscribed", "request_id": request_id, "topics": topics})


def unsubscribed_message(request_id: msgspec.Raw, topics: list[str]) -> bytes:
    return _ENCODE({"op": "unsubscribed", "request_id": request_id, "topics": topics})


def pong_message(request_id: msgspec.Raw) -> bytes:
    return _ENCODE({"op": "pong", "request_id": request_id})


def error_message(request_id: bytes, code: str, message: str) -> bytes:
    return b'{"op":"error","request_id":%b,"code":%b,"message":%b}' % (
        request_id,
        _ENCODE(code),
        _ENCODE(message),
    )


def ack_message(request_id: msgspec.Raw, result: WriteResult, *, return_seqs: bool, total_ms: float) -> bytes:
    seqs = _ENCODE(list(range(result.first_seq, result.last_seq + 1))) if return_seqs else b"null"
    return _ACK % (
        bytes(request_id),
        quoted(result.topic),
        result.first_seq,
        result.last_seq,
        seqs,
        result.head_seq,
        result.count,
        _BOOL[result.created],
        _BOOL[result.deduped],
        write_performance(result, total_ms),
    )
