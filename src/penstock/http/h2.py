"""Cleartext HTTP/2 with prior knowledge: many concurrent requests over one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, cast

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import hpack

from penstock.http.connection import Host
from penstock.http.h2_stream import FrameLengths, H2Stream, MalformedHead, next_turn
from penstock.http.message import Fault, Response
from penstock.http.streaming import H2StreamWriter

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PING: Final = b"penstock"
_WINDOW_AT_FIRST: Final = 65_535
_FLUSH_AT_BYTES: Final = 64 * 1024
_TURN_WORK: Final = 64
"""Frames handled before other connections get their turn."""
_IDLE_PER_ANSWER: Final = 4
_IDLE_BYTES: Final = 1024
"""Each response allows its client `_IDLE_PER_ANSWER` idle frames, and one more per this many bytes. A piece
shorter than this because of a small window counts as an idle frame."""
_STREAMS_PER_FRAME: Final = 64
"""A changed initial window affects all open streams. It counts as one idle frame per this many streams."""
_TABLE_SIZES_MAX: Final = 2
"""Table size updates allowed in one head; RFC 7541, 4.2 needs no more."""
_ENCODER_TABLE_BYTES: Final = 4096
"""The library searches the encoder's table for each header sent, so a long table costs time."""
_SETTINGS: Final = frozenset(int(code) for code in h2.settings.SettingCodes)


class H2Connection(asyncio.Protocol):
    """One HTTP/2 client.

    Responses wait here for the client's windows, up to a limit; above it, no further request is started. The
    connection is closed if the client cancels hundreds of requests, floods with frames that carry nothing, or
    reads nothing for long. All bytes held for the client count in the shared budget.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._h2 = _new_state_machine(host)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._streams: dict[int, H2Stream] = {}
        self._waiting: dict[int, H2Stream] = {}
        self._sendable: dict[int, H2Stream] = {}
        """Streams with output that does not wait for their own window."""
        self._unread = b""
        """Incomplete frames, and frames left for the next turn; counted in the budget."""
        self._is_behind = False
        """Whether some unread frames are complete."""
        self._idle_frames = 0
        self._outbox_bytes = 0
        self._can_write = True
        self._held_answer_bytes = 0
        self._is_closed = False
        self._is_flush_due = False
        self._unflushed_bytes = 0
        self._resets = 0
        self._received = 0
        self._received_mark = -1
        self._lengths = FrameLengths(
            length_max=self._h2.max_inbound_frame_size,
            head_length_max=host.limits.head_bytes_max,
            skip=0,
        )
        self._silent_ticks = 0
        self._pieces_sent = 0
        self._pieces_mark = -1
        self._stalled_ticks = 0

    # --- the transport -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._host.connections.add(self)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(self._host.limits.connection_window_bytes - _WINDOW_AT_FIRST)
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        if not self._received:
            self._h2.receive_data(PREFACE)
            data = data[len(PREFACE) :]
        self._received += 1
        if not self._lengths.allow(data):
            self._close(h2.errors.ErrorCodes.FRAME_SIZE_ERROR)
        elif self._is_behind:
            self._keep(self._unread + data)
        else:
            self._read(self._unread + data if self._unread else data)

    def _read(self, data: bytes) -> None:
        """Handle the frames of one turn; leave the rest for the next one."""
        turn = next_turn(data, _TURN_WORK)
        self._idle_frames += turn.idle
        if turn.is_flood or self._idle_frames > self._host.limits.idle_frames_per_tick_max:
            self._close(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
            return
        self._keep(data[turn.size :])
        if turn.size:
            self._handle(data[: turn.size])
        if self._is_closed:
            return
        was_behind, self._is_behind = self._is_behind, next_turn(self._unread, 1).size > 0
        if self._is_behind:
            self._transport.pause_reading()
            self._host.loop.call_soon(self._read_on)
        elif self._unread and self._host.budget.is_spent:
            self._close(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
        elif was_behind and self._can_write:
            self._transport.resume_reading()

    def _read_on(self) -> None:
        """Continue with the frames left by the last turn."""
        if self._is_behind and self._can_write and not self._is_closed:
            self._read(self._unread)

    def _keep(self, unread: bytes) -> None:
        self._host.budget.give(len(self._unread))
        self._host.budget.take(len(unread))
        self._unread = unread

    def _handle(self, frames: bytes) -> None:
        try:
            events = self._h2.receive_data(frames)
        except h2.exceptions.ProtocolError:
            # The GOAWAY frame that is waiting to be sent states the error.
            self._close()
            return
        for event in events:
            self._take(event)
            if self._is_closed:
                return
        self._send_waiting()
        self._start_waiting()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._host.connections.discard(self)
        self._give_back_answer()
        self._keep(b"")
        for stream in list(self._streams.values()):
            self._drop(stream)

    def pause_writing(self) -> None:
        self._can_write = False
        self._held_answer_bytes = self._transport.get_write_buffer_size()
        self._host.budget.take(self._held_answer_bytes)
        # More requests would produce more responses, while the client has not read the earlier ones.
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._can_write = True
        self._give_back_answer()
        if not self._is_closed and not self._transport.is_closing():
            if self._is_behind:
                self._host.loop.call_soon(self._read_on)
            else:
                self._transport.resume_reading()
            self._send_waiting()
            self._notify_live()
            self._start_waiting()
            self._flush()

    def _give_back_answer(self) -> None:
        self._host.budget.give(self._held_answer_bytes)
        self._held_answer_bytes = 0

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def _close(self, error: h2.errors.ErrorCodes | None = None) -> None:
        self._is_closed = True
        if error is not None:
            self._h2.close_connection(error)
        self._flush()
        self._keep(b"")
        self._transport.close()

    # --- input ---------------------------------------------------------------------------------------------

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            self._open(event)
        elif isinstance(event, h2.events.DataReceived):
            self._take_body(event)
        elif isinstance(event, h2.events.StreamEnded):
            stream = self._streams.get(event.stream_id)
            if stream is not None and not stream.is_answered:
                stream.is_complete = True
                self._waiting[stream.id] = stream
        elif isinstance(event, h2.events.WindowUpdated):
            self._make_sendable(event.stream_id)
        elif isinstance(event, h2.events.RemoteSettingsChanged):
            self._take_settings(event)
        elif isinstance(event, h2.events.StreamReset):
            self._reset_stream(event.stream_id)
        elif isinstance(event, h2.events.ConnectionTerminated):
            self._close()

    def _open(self, event: h2.events.RequestReceived) -> None:
        try:
            stream = H2Stream(event.stream_id, event.headers, self._host.limits.head_fields_max)
        except MalformedHead:
            self._close(h2.errors.ErrorCodes.PROTOCOL_ERROR)
            return
        stream.is_complete = event.stream_ended is not None
        self._streams[stream.id] = stream
        refusal = self._overloaded(stream) if self._host.budget.is_spent else self._screen(stream)
        self._hold(stream, stream.head_bytes)
        if refusal is not None:
            self._answer(stream, refusal)

    def _screen(self, stream: H2Stream) -> Response | None:
        """Refuse a request by its head before its body is kept: a client without a key uploads nothing."""
        limits, app = self._host.limits, self._host.app
        length = stream.declared_bytes
        if stream.is_complete:
            return None
        if length is not None and length > limits.body_bytes_max:
            return self._too_large(stream)
        refusal = app.screen(stream.head())
        if refusal is None and not self._host.budget.fits(length or 0):
            refusal = self._overloaded(stream)
        return refusal

    def _take_body(self, event: h2.events.DataReceived) -> None:
        size = event.flow_controlled_length or 0
        if size:
            self._h2.acknowledge_received_data(size, event.stream_id)
        stream = self._streams.get(event.stream_id)
        if stream is None or stream.is_answered:
            return
        stream.is_complete = event.stream_ended is not None
        held_bytes = stream.add_body(event.data or b"")
        if stream.body_bytes > self._host.limits.body_bytes_max:
            self._answer(stream, self._too_large(stream))
        elif held_bytes and self._host.budget.is_spent:
            self._answer(stream, self._overloaded(stream))
        else:
            self._hold(stream, held_bytes)

    def _make_sendable(self, stream_id: int | None) -> None:
        stream = self._streams.get(stream_id or 0)
        if stream is not None and stream.outbox:
            self._sendable[stream.id] = stream

    def _take_settings(self, event: h2.events.RemoteSettingsChanged) -> None:
        """Apply new settings: a changed initial window also changes the windows of open streams."""
        if h2.settings.SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
            self._idle_frames += len(self._streams) // _STREAMS_PER_FRAME
            self._sendable = {number: stream for number, stream in self._streams.items() if stream.outbox}

    def _hold(self, stream: H2Stream, size: int) -> None:
        self._host.budget.take(size)
        stream.held_bytes += size

    def _reset_stream(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._drop(stream)
        self._resets += 1
        if self._resets > self._host.limits.resets_per_tick_max:
            self._close(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)

    def _too_large(self, stream: H2Stream) -> Response:
        most = self._host.limits.body_bytes_max
        words = f"the request's body is larger than {most} bytes"
        return self._host.app.fault(Fault.TOO_LARGE, words, stream.head())

    def _overloaded(self, stream: H2Stream) -> Response:
        words = "the server holds as many bytes for clients as it may"
        return self._host.app.fault(Fault.OVERLOADED, words, stream.head())

    # --- responses -----------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        while self._waiting and self._can_write and self._outbox_bytes <= self._host.limits.outbox_bytes_max:
            stream = self._waiting.pop(next(iter(self._waiting)))
            stream.start(self._host.app, self._deliver)

    def _deliver(self, stream: H2Stream, response: Response) -> None:
        if stream.id in self._streams and not self._is_closed:
            self._answer(stream, response)
            self._flush()

    def _answer(self, stream: H2Stream, response: Response) -> None:
        stream.is_answered = True
        self._waiting.pop(stream.id, None)
        self._give_back(stream, max(stream.held_bytes - stream.head_bytes, 0))
        stream.body = []
        head = stream.response_headers(response, self._host.date)
        is_open = response.stream is not None or response.live is not None
        is_bare = stream.is_head_request or (not is_open and not response.body)
        try:
            self._h2.send_headers(stream.id, head, end_stream=is_bare)
        except h2.exceptions.ProtocolError:
            self._drop(stream)  # the client has already cancelled the request
            return
        if is_bare:
            self._end(stream)
        elif response.stream is not None:
            stream.sender = self._host.loop.create_task(self._send_stream(stream, response))
        elif response.live is not None:
            writer = stream.live = H2StreamWriter(self, stream, response.live)
            response.live.attach(writer)
        else:
            body = response.body
            self._put(stream, [body] if isinstance(body, bytes) else body)
            stream.has_all = True
            self._send(stream)

    def _put(self, stream: H2Stream, pieces: Iterable[bytes]) -> None:
        if not stream.outbox:
            self._sendable[stream.id] = stream
        size = stream.put(pieces)
        self._outbox_bytes += size
        self._host.budget.take(size)

    def _taken_out(self, size: int) -> None:
        self._outbox_bytes -= size
        self._host.budget.give(size)

    def _send_waiting(self) -> None:
        """Send on sendable streams only: one window update must not cause a visit to a thousand streams."""
        while self._sendable and self._can_write and self._h2.outbound_flow_control_window > 0:
            stream = self._sendable.pop(next(iter(self._sendable)))
            if stream.outbox:
                self._send(stream)

    def _send(self, stream: H2Stream) -> None:
        """Send as much as the windows allow."""
        try:
            while stream.outbox and self._can_write:
                window = self._h2.local_flow_control_window(stream.id)
                if window <= 0:
                    break
                piece = stream.next_piece(min(window, self._h2.max_outbound_frame_size))
                self._taken_out(len(piece))
                self._pieces_sent += 1
                is_cut = len(piece) == window < _IDLE_BYTES and bool(stream.outbox)
                self._idle_frames += is_cut - len(piece) // _IDLE_BYTES
                self._h2.send_data(stream.id, piece)
            if stream.outbox and (not self._can_write or self._h2.outbound_flow_control_window <= 0):
                self._sendable[stream.id] = stream
            else:
                self._sendable.pop(stream.id, None)
            if not stream.outbox:
                stream.wake()
                if stream.has_all:
                    self._h2.end_stream(stream.id)
                    self._end(stream)
        except h2.exceptions.ProtocolError:
            self._drop(stream)  # the client has already cancelled the request

    async def _send_stream(self, stream: H2Stream, response: Response) -> None:
        pieces = response.stream
        assert pieces is not None
        try:
            async for piece in pieces:
                if not piece:
                    continue
                self._put(stream, [piece])
                self._send(stream)
                self._flush()
                await stream.emptied()
            if stream.id in self._streams:
                stream.has_all = True
                self._send(stream)
                self._flush()
        finally:
            stream.sender = None
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    # --- live responses ------------------------------------------------------------------------------------

    def send_live(self, stream: H2Stream, data: bytes) -> bool:
        if stream.id not in self._streams or self._is_closed:
            return False
        self._put(stream, [data])
        self._send(stream)
        self._unflushed_bytes += len(data)
        if self._unflushed_bytes > _FLUSH_AT_BYTES:
            self._unflushed_bytes = 0
            self._flush()  # this updates `_can_write`
        else:
            self._flush_soon()
        return not stream.outbox and self._can_write

    def end_live(self, stream: H2Stream) -> None:
        if stream.id in self._streams and not self._is_closed:
            stream.has_all = True
            self._send(stream)
            self._flush_soon()

    def cut_live(self, stream: H2Stream) -> None:
        if stream.id in self._streams and not self._is_closed:
            self._drop(stream)
            self._h2.reset_stream(stream.id, h2.errors.ErrorCodes.CANCEL)
            self._flush_soon()

    def _notify_live(self) -> None:
        """Notify live responses: the socket is writable again, even for streams with an empty outbox."""
        for stream in list(self._streams.values()):
            if stream.live is not None and not stream.outbox:
                stream.live.emptied()

    def _flush_soon(self) -> None:
        """Flush at the end of this turn, so that the frames of many streams are sent together."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._host.loop.call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_flush_due = False
        self._unflushed_bytes = 0
        self._flush()

    def _end(self, stream: H2Stream) -> None:
        """Finish a stream whose response is complete. Reset it if the client is still sending."""
        self._streams.pop(stream.id, None)
        self._sendable.pop(stream.id, None)
        self._give_back(stream, stream.held_bytes)
        stream.forget()
        self._idle_frames -= _IDLE_PER_ANSWER
        if not stream.is_complete:
            self._h2.reset_stream(stream.id, h2.errors.ErrorCodes.NO_ERROR)
        if self._host.draining and not self._streams:
            self._host.loop.call_soon(self.drain)

    def _drop(self, stream: H2Stream) -> None:
        self._streams.pop(stream.id, None)
        self._sendable.pop(stream.id, None)
        self._waiting.pop(stream.id, None)
        self._give_back(stream, stream.held_bytes)
        self._taken_out(stream.outbox_bytes)
        stream.body = []
        stream.abandon()

    def _give_back(self, stream: H2Stream, size: int) -> None:
        self._host.budget.give(size)
        stream.held_bytes -= size

    # --- timeouts ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        self._resets = self._idle_frames = 0
        if not self._is_closed:
            self._watch_bodies()
            self._watch_outbox()
        self._watch_client()

    def _watch_client(self) -> None:
        """Ping a silent client, and disconnect it if it does not reply."""
        limits = self._host.limits
        if self._received != self._received_mark:
            self._received_mark, self._silent_ticks = self._received, 0
            return
        self._silent_ticks += 1
        if self._silent_ticks >= limits.ping_interval_s + limits.ping_timeout_s:
            self.abort()
        elif self._silent_ticks == limits.ping_interval_s and self._can_write and not self._is_closed:
            self._h2.ping(_PING)
            self._flush()

    def _watch_outbox(self) -> None:
        if not self._outbox_bytes or self._pieces_sent != self._pieces_mark:
            self._pieces_mark, self._stalled_ticks = self._pieces_sent, 0
            return
        self._stalled_ticks += 1
        if self._stalled_ticks >= self._host.limits.write_timeout_s:
            self._close(h2.errors.ErrorCodes.FLOW_CONTROL_ERROR)

    def _watch_bodies(self) -> None:
        for stream in list(self._streams.values()):
            if stream.is_stalled(self._host.limits.body_timeout_s):
                self._drop(stream)
                self._h2.reset_stream(stream.id, h2.errors.ErrorCodes.CANCEL)
        self._flush()

    def drain(self) -> None:
        if self._is_closed:
            return
        if not self._streams:
            self._close(h2.errors.ErrorCodes.NO_ERROR)

    def abort(self) -> None:
        self._is_closed = True
        self._transport.abort()


class _PeerSettings(h2.settings.Settings):
    """The client's settings, limited to those that this server uses.

    The library stores every setting by number, of which there are 65,536, and iterates over all of them for
    each settings frame.
    """

    def __setitem__(self, key: h2.settings.SettingCodes | int, value: int) -> None:
        if key not in _SETTINGS:
            return
        if key == h2.settings.SettingCodes.HEADER_TABLE_SIZE:
            value = min(value, _ENCODER_TABLE_BYTES)
        super().__setitem__(key, value)


class _HeadDecoder(hpack.Decoder):
    """A header decoder that limits table size updates.

    The library accepts any number of size updates before the headers of a head. They take one byte each and
    do not count in the header list, whose length is limited.
    """

    _sizes = 0

    def decode(self, data: bytes, raw: bool = False) -> Iterable[hpack.HeaderTuple]:
        self._sizes = 0
        return super().decode(data, raw)

    @property
    def header_table_size(self) -> int:
        return super().header_table_size

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        self._sizes += 1
        if self._sizes > _TABLE_SIZES_MAX:
            raise hpack.HPACKDecodingError(f"a head has more than {_TABLE_SIZES_MAX} table size updates")
        self.header_table.maxsize = value


def _new_state_machine(host: Host) -> h2.connection.H2Connection:
    config = h2.config.H2Configuration(
        client_side=False,
        header_encoding=None,
        # `H2Stream` validates heads: the library checks each character, and with header compression one byte
        # of input can stand for thousands of them.
        validate_inbound_headers=False,
        validate_outbound_headers=False,
        normalize_outbound_headers=False,
    )
    codes, limits = h2.settings.SettingCodes, host.limits
    machine = h2.connection.H2Connection(config)
    machine.decoder = _HeadDecoder()
    machine.decoder.max_header_list_size = limits.head_bytes_max
    machine.remote_settings = _PeerSettings(client=True)
    # Set as initial values, so that they apply from the first frame, before the client acknowledges them.
    machine.local_settings = h2.settings.Settings(
        client=False,
        initial_values={
            codes.ENABLE_PUSH: 0,
            codes.MAX_CONCURRENT_STREAMS: limits.streams_max,
            codes.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            codes.MAX_HEADER_LIST_SIZE: limits.head_bytes_max,
        },
    )
    return machine
