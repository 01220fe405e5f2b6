"""HTTP/1.1: keep-alive, pipelining, chunked bodies, `Expect: 100-continue`, all with limits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple, NoReturn, cast

import httptools

from penstock.http.connection import Host, RequestTask
from penstock.http.h1_heads import response_head
from penstock.http.message import Fault, Request, Response
from penstock.http.streaming import hand_over

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_LENGTH: Final = b"0"
_STEP_BYTES: Final = 4096
"""Bytes that the parser reads at once outside a body. Even these may contain hundreds of requests."""
_TURN_BYTES: Final = 4 * _STEP_BYTES
"""Bytes parsed before other connections get their turn."""
_PIECE_BYTES: Final = 64
"""The overhead of one piece of a body."""
_FIELD_BYTES: Final = 128
"""The overhead of one header."""
_QUEUED_BYTES: Final = 1024
"""The overhead of one queued request."""


class _Refused(Exception):
    """Stops the parser. Its response is the last one of the connection."""

    def __init__(self, response: Response) -> None:
        self.response = response


class _Arrival(NamedTuple):
    """A complete request, and the state that its response depends on."""

    request: Request
    held_bytes: int
    """Bytes counted in the budget until the response is sent."""
    stays: bool
    """Whether the connection stays open after the response."""
    knows_chunks: bool
    """Whether the client supports chunked responses (HTTP/1.1)."""


def _size(headers: Mapping[bytes, bytes]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers.items())


class H1Connection(asyncio.Protocol):
    """One HTTP/1.1 client. Requests are answered one at a time, in order of arrival.

    The parser's callbacks build one request at a time. For a malformed or refused request, the error becomes
    the last response, sent after the pending ones. Further input is then discarded for a short time, so that
    the client can read that response.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        # The request being read.
        self._is_between = True
        """Whether the parser has seen no byte of the next request."""
        self._latest: tuple[Request, bytes] | None = None
        """While the parser runs: the last request and its target, if another request may reuse the head."""
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._body_length = 0
        """The declared length of the body; 0 if it is chunked."""
        self._body_held_bytes = 0
        """Bytes of this request's head and body counted in the budget."""
        self._head_held_bytes = 0
        """Bytes of an unfinished head counted in the budget."""
        self._fields = 0
        self._unread = b""
        """Input left for the next turn; counted in the budget."""
        self._in_body = False
        self._quiet_bytes = 0
        """Bytes parsed since the last complete head, piece of a body, or end of a request."""
        self._replayed_head = b""
        self._upgrade_headers: dict[bytes, bytes] = {}
        """Upgrade headers of a head, while it is parsed again without them."""
        self._continue_due = False
        # The requests being answered.
        self._waiting: deque[_Arrival] = deque()
        self._task: RequestTask | None = None
        self._task_held_bytes = 0
        self._keep_alive = True
        self._knows_chunks = True
        self._is_head_request = False
        self._sender: asyncio.Task[None] | None = None
        self._last: Response | None = None
        self._ignores_input = False
        """Whether further input is discarded."""
        self._has_left = False
        # The client's pace.
        self._can_write: asyncio.Future[None] | None = None
        self._held_answer_bytes = 0
        self._answered = 0
        self._mark: tuple[int, int, bool, bool] = (0, 0, False, False)
        self._ticks = 0

    # --- the transport -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._host.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        if self._unread:
            self._read_later(data)
            return
        # After a stray line break, the parser and the budget have seen bytes before the next head.
        is_between, budget = self._is_between and not self._quiet_bytes, self._host.budget
        if is_between and not budget.is_spent and (request := self._host.heads.request(data)) is not None:
            held_bytes = len(request.body)
            budget.take(held_bytes)
            self._arrived(_Arrival(request, held_bytes, True, True))
            return
        self._read(data)
        if is_between and self._is_between and self._latest is not None and not self._unread:
            self._host.heads.learn(data, *self._latest)
        self._latest = None

    def _read(self, data: bytes) -> None:
        """Parse in steps. Leave the rest for later after one turn's share, or when the queue is full."""
        at = taken = 0
        while at < len(data) and not self._ignores_input:
            if taken >= _TURN_BYTES or len(self._waiting) >= self._host.limits.pipelined_max:
                self._read_later(data[at:])
                break
            # The rest of a body is one callback, regardless of its length.
            body_left = self._body_length - self._body_bytes if self._in_body else 0
            step = data[at : at + max(_STEP_BYTES, body_left)]
            taken += min(len(step), _STEP_BYTES)
            at += self._feed(step)
        if not self._ignores_input:
            self._hold_head()
        elif at < len(data) and self._transport.get_protocol() is not self:
            # Another protocol owns the connection now, and the input after the upgrade request.
            cast(asyncio.Protocol, self._transport.get_protocol()).data_received(data[at:])

    def _feed(self, data: bytes) -> int:
        """Run the parser; return how many bytes it consumed."""
        self._quiet_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_on_without_upgrade()
            return int(upgrade.args[0])
        except httptools.HttpParserError as error:
            self._refuse(error)
        else:
            if self._quiet_bytes > self._host.limits.head_bytes_max:
                self._end_with(self._head_too_large())
        return len(data)

    def _read_later(self, data: bytes) -> None:
        self._host.budget.take(len(data))
        self._unread += data
        self._transport.pause_reading()
        self._host.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        """Continue with the input left by the last turn."""
        if not self._unread or self._ignores_input or self._transport.is_closing():
            return
        if len(self._waiting) >= self._host.limits.pipelined_max:
            return  # `_next` will call this again
        data, self._unread = self._unread, b""
        self._host.budget.give(len(data))
        self._read(data)
        self._latest = None
        if (
            not self._unread
            and not self._ignores_input
            and len(self._waiting) < self._host.limits.pipelined_max
        ):
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        """Close when a client stops sending, unless a short response is due."""
        self._has_left = True
        is_short = self._task is not None and not self._task.is_patient and self._sender is None
        return is_short or bool(self._task is None and self._waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        self._host.connections.discard(self)
        self._ignores_input = True
        self._drop_requests()
        if self._task is not None:
            self._task.abandon()
        if self._sender is not None:
            self._sender.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._can_write = self._host.loop.create_future()
        self._held_answer_bytes = self._transport.get_write_buffer_size()
        self._host.budget.take(self._held_answer_bytes)

    def resume_writing(self) -> None:
        self._give_back_answer()
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)
        self._can_write = None

    def _drop_requests(self) -> None:
        """Drop requests that were read but not started, and release their bytes."""
        waiting_bytes = sum(arrival.held_bytes for arrival in self._waiting)
        self._host.budget.give(waiting_bytes + self._task_held_bytes)
        self._task_held_bytes = 0
        self._waiting.clear()
        self._drop_unread()

    def _drop_unread(self) -> None:
        """Drop input that has not become a request."""
        self._host.budget.give(self._body_held_bytes + self._head_held_bytes + len(self._unread))
        self._body_held_bytes = self._head_held_bytes = 0
        self._unread, self._body = b"", []

    def _give_back_answer(self) -> None:
        self._host.budget.give(self._held_answer_bytes)
        self._held_answer_bytes = 0

    # --- the parser ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_between = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer: ignored, because no trailer is supported
        name = name.lower()
        self._fields += 1
        if self._fields > self._host.limits.head_fields_max:
            raise _Refused(self._malformed(f"the request has more than {self._fields - 1} headers"))
        if name in self._headers:
            if name == b"host":
                raise _Refused(self._malformed("the request has more than one Host header"))
            value = self._headers[name] + b", " + value
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        headers, limits = self._headers, self._host.limits
        if self._quiet_bytes > limits.head_bytes_max and self._head_size() > limits.head_bytes_max:
            raise _Refused(self._head_too_large())
        head_bytes, self._quiet_bytes, self._fields = self._quiet_bytes, 0, 0
        if self._parser.should_upgrade() and not self._replayed_head:
            self._replayed_head = self._head_without_upgrade()
            return
        self._in_body = True
        if head_bytes > _STEP_BYTES:
            self._hold(self._head_size())
        length = self._body_length = int(headers.get(b"content-length", _NO_LENGTH))
        if length > limits.body_screened_bytes or b"transfer-encoding" in headers or b"expect" in headers:
            self._screen(length)

    def on_body(self, body: bytes) -> None:
        if self._ignores_input:
            return
        self._quiet_bytes = 0
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > self._host.limits.body_bytes_max:
            raise _Refused(self._body_too_large())
        self._hold(len(body) + _PIECE_BYTES)

    def on_message_complete(self) -> None:
        self._quiet_bytes = 0
        if not self._in_body:
            return  # the head of an upgrade request; it is parsed again without the upgrade
        if self._ignores_input:
            self._drop_unread()  # it follows the last request that gets a response
            return
        body = self._body
        whole = body[0] if len(body) == 1 else b"".join(body)
        if self._upgrade_headers:
            self._headers |= self._upgrade_headers
        request = Request(self._parser.get_method(), self._url, self._headers, whole)
        held_bytes, stays = self._body_held_bytes, self._stays()
        knows_chunks = self._parser.get_http_version() != "1.0"
        self._latest = (request, self._url) if self._is_ordinary(stays) else None
        self._url, self._headers, self._body = b"", {}, []
        self._body_bytes = self._body_held_bytes = self._body_length = 0
        self._in_body = self._continue_due = False
        self._is_between = stays
        self._arrived(_Arrival(request, held_bytes, stays, knows_chunks))

    def _is_ordinary(self, stays: bool) -> bool:
        """Return whether another request with the same head can skip the parser."""
        if self._body_bytes > self._host.limits.body_screened_bytes or not stays or self._upgrade_headers:
            return False
        if self._parser.get_http_version() != "1.1":
            return False
        return b"transfer-encoding" not in self._headers and b"expect" not in self._headers

    def _arrived(self, arrival: _Arrival) -> None:
        if self._task is None and not self._waiting:
            self._start(arrival)
            return
        request = arrival.request
        held_bytes = _QUEUED_BYTES + len(request.path) + len(request.query_text) + _size(request.headers)
        self._host.budget.take(held_bytes)
        self._waiting.append(arrival._replace(held_bytes=arrival.held_bytes + held_bytes))
        if len(self._waiting) >= self._host.limits.pipelined_max:
            self._transport.pause_reading()

    def _stays(self) -> bool:
        """Return whether the connection stays open; one of an HTTP/1.0 client never does."""
        if not self._parser.should_keep_alive():
            return False
        return b"connection" not in self._headers or self._parser.get_http_version() != "1.0"

    # --- refusals ------------------------------------------------------------------------------------------

    def _screen(self, length: int) -> None:
        """Refuse a large, chunked or announced body before it is read."""
        limits, app = self._host.limits, self._host.app
        if length > limits.body_bytes_max:
            raise _Refused(self._body_too_large())
        head = self._head()
        refusal = app.screen(head)
        if refusal is None and not self._host.budget.fits(length):
            refusal = self._overloaded(head)
        if refusal is not None:
            raise _Refused(refusal)
        if self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._continue_due = True
            self._send_continue()

    def _send_continue(self) -> None:
        if self._continue_due and self._task is None and not self._waiting:
            self._continue_due = False
            self._transport.write(_CONTINUE)

    def _hold(self, size: int) -> None:
        """Count a part of the request in the budget. Refuse the request if the budget is spent."""
        if self._host.budget.is_spent:
            raise _Refused(self._overloaded(self._head()))
        self._host.budget.take(size)
        self._body_held_bytes += size

    def _hold_head(self) -> None:
        """Count the bytes of an incomplete head that the parser keeps."""
        size = self._quiet_bytes + self._fields * _FIELD_BYTES
        more = size - self._head_held_bytes
        if more > 0 and self._host.budget.is_spent:
            self._end_with(self._overloaded())
            return
        self._host.budget.take(more)
        self._head_held_bytes = size

    def _head_size(self) -> int:
        return len(self._url) + _size(self._headers)

    def _malformed(self, words: str) -> Response:
        return self._host.app.fault(Fault.MALFORMED, words)

    def _head_too_large(self) -> Response:
        most = self._host.limits.head_bytes_max
        return self._malformed(f"the request's head is larger than {most} bytes")

    def _body_too_large(self) -> Response:
        most = self._host.limits.body_bytes_max
        words = f"the request's body is larger than {most} bytes"
        return self._host.app.fault(Fault.TOO_LARGE, words, self._head())

    def _overloaded(self, head: Request | None = None) -> Response:
        words = "the server holds as many bytes for clients as it may"
        return self._host.app.fault(Fault.OVERLOADED, words, head)

    def _head(self) -> Request:
        return Request(self._parser.get_method(), self._url, self._headers)

    def _head_without_upgrade(self) -> bytes:
        """Return the head without its upgrade headers; only the application can grant an upgrade.

        After an upgrade request, the parser treats all input as another protocol, although clients may send a
        body. The parsed request still has the upgrade headers.
        """
        names = (b"connection", b"upgrade", b"http2-settings")
        version = self._parser.get_http_version().encode()
        # An HTTP/1.0 client cannot change the protocol (RFC 9110, 7.8): ignore its request to upgrade.
        upgrade_headers = {name: value for name, value in self._headers.items() if name in names}
        self._upgrade_headers = upgrade_headers if version != b"1.0" else {}
        kept = [b"%b: %b\r\n" % (name, value) for name, value in self._headers.items() if name not in names]
        # Keep the other connection options, in particular `close`.
        options = [option.strip() for option in self._headers.get(b"connection", b"").split(b",")]
        options = [option for option in options if option.lower() not in (b"", b"upgrade", b"http2-settings")]
        if options:
            kept.append(b"connection: %b\r\n" % b", ".join(options))
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self._parser.get_method(), self._url, version, b"".join(kept))

    def _read_on_without_upgrade(self) -> None:
        head, self._url, self._headers = self._replayed_head, b"", {}
        if head.startswith(b"CONNECT "):
            self._end_with(self._malformed("this server is not a proxy"))
            return
        self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(head)
        except httptools.HttpParserError as error:
            self._refuse(error)
            return
        self._replayed_head, self._upgrade_headers = b"", {}

    def _refuse(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__
        if isinstance(cause, _Refused):
            self._end_with(cause.response)
        elif isinstance(error, httptools.HttpParserCallbackError) and cause is not None:
            self._crash(cause)
        else:
            self._end_with(self._malformed(f"not an HTTP request: {error}"))

    def _crash(self, cause: BaseException) -> NoReturn:
        self.abort()
        raise cause

    def _end_with(self, response: Response) -> None:
        self._ignores_input = True
        self._last = response
        self._drop_unread()
        if self._task is None and not self._waiting:
            self._send_last(response)

    def _send_last(self, response: Response) -> None:
        self._last = None
        if self._transport.is_closing():
            return
        self._keep_alive = False
        self._write(response)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        self._ticks = 0

    # --- responses -----------------------------------------------------------------------------------------

    def _start(self, arrival: _Arrival) -> None:
        request, held_bytes, stays, self._knows_chunks = arrival
        self._task_held_bytes = held_bytes
        self._keep_alive = stays and not self._host.draining
        self._is_head_request = request.method == b"HEAD"
        if self._host.budget.is_spent and not held_bytes:
            self._deliver(self._overloaded(request))
            return
        self._task = task = RequestTask(self._deliver)
        task.start(self._host.app, request)

    def _deliver(self, response: Response) -> None:
        if response.stream is not None:
            self._sender = self._host.loop.create_task(self._send_stream(response))
            return
        if response.live is not None or response.upgrade is not None:
            self._hand_over(response)
            return
        self._write(response)
        self._finish()

    def _finish(self) -> None:
        """Continue with the next request: the transport has the response."""
        self._task = None
        self._answered += 1
        if self._task_held_bytes:
            self._host.budget.give(self._task_held_bytes)
            self._task_held_bytes = 0
        if not self._keep_alive:
            self._close()
        elif self._waiting:
            # Not directly: many queued requests with immediate responses would recurse as deep.
            self._host.loop.call_soon(self._next)
        elif self._last is not None:
            self._send_last(self._last)
        elif self._has_left:
            self._close()
        elif self._continue_due:
            self._send_continue()

    def _close(self) -> None:
        self._ignores_input = True
        self._drop_requests()
        self._transport.close()

    def _next(self) -> None:
        if self._task is not None or not self._waiting or self._transport.is_closing():
            return
        arrival = self._waiting.popleft()
        if len(self._waiting) == self._host.limits.pipelined_max - 1 and not self._ignores_input:
            if self._unread:
                self._host.loop.call_soon(self._read_on)
            else:
                self._transport.resume_reading()
        self._start(arrival)

    def _write(self, response: Response) -> None:
        if self._transport.is_closing():
            return  # lost, but `connection_lost` was not called yet: writing may raise
        body = response.body
        size = len(body) if isinstance(body, bytes) else sum(map(len, body))
        head = response_head(response, size, self._host.date, keep_alive=self._keep_alive)
        if self._is_head_request:
            self._transport.write(head)
        elif isinstance(body, bytes):
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, *body])

    def _hand_over(self, response: Response) -> None:
        """Give the connection to a streaming response, the last one. Drop any further input."""
        self._task, self._ignores_input = None, True
        self._drop_requests()
        self._give_back_answer()
        self._host.connections.discard(self)
        hand_over(
            self._host,
            self._transport,
            response,
            is_chunked=self._knows_chunks,
            is_writable=self._can_write is None,
        )

    async def _send_stream(self, response: Response) -> None:
        """Send the pieces as chunks, or until the connection closes for a client without chunk support."""
        stream = response.stream
        assert stream is not None
        is_chunked = self._knows_chunks
        self._keep_alive = self._keep_alive and is_chunked
        head = response_head(
            response, None, self._host.date, keep_alive=self._keep_alive, is_chunked=is_chunked
        )
        try:
            if not self._transport.is_closing():
                self._transport.write(head)
            if not self._is_head_request:
                async for piece in stream:
                    if self._transport.is_closing():
                        return
                    if piece:
                        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
                    if self._can_write is not None:
                        await self._can_write
                if is_chunked and not self._transport.is_closing():
                    self._transport.write(b"0\r\n\r\n")
        finally:
            self._sender = None
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        self._finish()

    # --- timeouts ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        limits = self._host.limits
        mark = (self._answered, self._body_bytes, self._quiet_bytes > 0, self._can_write is not None)
        if mark != self._mark:
            self._mark, self._ticks = mark, 0
            return
        self._ticks += 1
        if self._can_write is not None:
            patience = limits.write_timeout_s
        elif self._task is not None:
            return
        elif self._ignores_input:
            patience = limits.linger_s
        elif self._in_body:
            patience = limits.body_timeout_s
        else:
            patience = limits.head_timeout_s if self._quiet_bytes else limits.idle_timeout_s
        if self._ticks >= patience:
            self.abort()

    def drain(self) -> None:
        self._keep_alive = False
        if self._task is None and not self._waiting and not self._in_body:
            self._close()

    def abort(self) -> None:
        self._ignores_input = True
        self._transport.abort()
