"""`/v0/ws`: commands and records over one connection."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Final

import msgspec

from penstock.errors import PenstockError
from penstock.http import Call, Principal, RequestTask, Response, Scope, UpgradeWriter
from penstock.servers.errors import response_to
from penstock.servers.limits import StreamLimiter
from penstock.servers.topics import websocket_messages as messages
from penstock.servers.topics.answers import damaged_in
from penstock.servers.topics.bodies import check_starts, prefix_of, want_of
from penstock.servers.topics.broadcaster import Broadcaster, Subscriber
from penstock.servers.topics.subscription import RenderedPage, Subscription
from penstock.servers.topics.websocket_messages import (
    PIECE_BYTES,
    Framing,
    InvalidMessage,
    Ping,
    Publish,
    Subscribe,
    Unsubscribe,
    handshake,
    text_frame,
)
from penstock.topics import (
    WATCH_TOPICS_MAX,
    Damaged,
    Engine,
    InvalidRequest,
    ShuttingDown,
    Throttled,
    TopicNotFound,
    WriteResult,
    names_in,
)

PING_S: Final = 20.0
"""A client that is silent for this long is pinged. After the same time again, it is disconnected."""
PUBLISHING_MAX: Final = 64
PUBLISHING_BYTES_MAX: Final = 8 * 1024**2
"""Publishes that one client may have in progress. Above this, reading pauses until some complete."""
FOLLOWING_MAX: Final = 4096
_ERROR: Final = msgspec.json.Decoder(dict[str, messages.Problem])


class WebSocketApi:
    """Opens WebSockets."""

    def __init__(self, engine: Engine, broadcaster: Broadcaster, caps: StreamLimiter) -> None:
        self._engine = engine
        self._broadcaster = broadcaster
        self._caps = caps

    async def open(self, call: Call) -> Response:
        """`GET /v0/ws`: the handshake, 429, then the connection speaks WebSocket."""
        headers = handshake(call.request)
        self._caps.check(call.principal)
        socket = WebSocket(self._engine, self._broadcaster, self._caps, call.principal)
        return Response(101, headers=headers, upgrade=socket)


class WebSocket(Subscriber):
    """One client. Commands start in order of arrival; publishes run concurrently.

    A publish to a topic that does not exist yet delays the following commands, so that a later publish is
    also later in the topic.
    """

    def __init__(
        self, engine: Engine, broadcaster: Broadcaster, caps: StreamLimiter, principal: Principal
    ) -> None:
        super().__init__(broadcaster, caps, principal, beat_s=PING_S)
        self._engine = engine
        self._framing = Framing()
        self._client: UpgradeWriter | None = None
        self._waiting: deque[bytes] = deque()
        self._publishing = 0
        self._publishing_bytes = 0
        self._barrier: object = None
        """A publish that must get its sequences before any later command starts."""
        self._is_working = False
        self._is_paused = False
        self._is_leaving = False
        self._was_heard = True
        self._waiting_bytes = 0

    # ---- the connection ------------------------------------------------------------------------------

    def connect(self, writer: UpgradeWriter) -> None:
        self._client = writer
        self.attach(writer)

    def begin(self) -> None:
        """Send nothing: the client speaks first."""

    def received(self, data: bytes) -> None:
        self._was_heard = True
        for is_text, message in self._framing.receive(data):
            self._take(is_text, message)
        if not self._count_unread():
            self._framing.overload()
        self._flush()
        self._work()

    def _take(self, is_text: bool, message: bytes) -> None:
        if not is_text:
            self._say(messages.error_message(b"null", "unsupported_message", "send text, not binary frames"))
            return
        try:
            if not message.isascii():
                str(message, "utf-8")
        except UnicodeDecodeError:
            self._framing.reject_text()
            return
        self._waiting.append(message)
        self._waiting_bytes += len(message) + PIECE_BYTES

    def _count_unread(self) -> bool:
        """Count received but unprocessed bytes in the shared budget. Return False if they do not fit."""
        return self._client is None or self._client.hold(self._framing.held_bytes + self._waiting_bytes)

    def _flush(self) -> None:
        if replies := self._framing.replies():
            self.send(replies)
        if self._framing.is_over:
            self.end()

    def left(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0
        self._client = None

    def _say(self, message: bytes) -> None:
        if self._framing.is_open:
            self.send(text_frame(message))

    def heartbeat(self) -> None:
        if not self._was_heard:
            self.cut()
            return
        self._was_heard = False
        self._framing.ping()
        self._flush()

    def shut_down(self) -> None:
        """Complete the publishes in progress, then end the connection."""
        self._is_leaving = True
        self._waiting.clear()
        self._waiting_bytes = 0
        text = "the server is shutting down; reconnect"
        self._say(messages.error_message(b"null", "server_shutting_down", text))
        self._leave_when_done()

    def _leave_when_done(self) -> None:
        if self._is_leaving and not self._publishing:
            self._framing.leave()
            self._flush()
            self.end()

    # ---- commands ------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Start waiting commands, as far as the commands in progress allow."""
        if self._is_working:
            return  # called from a publish that completed immediately: the loop below continues
        self._is_working = True
        while self._waiting and not self._is_full:
            message = self._waiting.popleft()
            self._waiting_bytes -= len(message) + PIECE_BYTES
            self._execute(message)
        self._is_working = False
        self._count_unread()  # fewer bytes than before, so they fit
        if self._client is not None and self._is_paused != bool(self._waiting):
            self._is_paused = bool(self._waiting)
            if self._is_paused:
                self._client.pause()
            else:
                self._client.resume()

    @property
    def _is_full(self) -> bool:
        return (
            self._barrier is not None
            or self._publishing >= PUBLISHING_MAX
            or self._publishing_bytes >= PUBLISHING_BYTES_MAX
        )

    def _execute(self, message: bytes) -> None:
        try:
            command = messages.read_command(message)
        except InvalidMessage as error:
            self._say(messages.error_message(error.request_id, error.code, str(error)))
            return
        try:
            if isinstance(command, Publish):
                self._publish(command, len(message))
            elif isinstance(command, Subscribe):
                self._begin_subscribe(command)
            elif isinstance(command, Unsubscribe):
                self._unsubscribe(command)
            elif isinstance(command, Ping):
                self._say(messages.pong_message(command.request_id))
        except Exception as error:  # noqa: BLE001 - a bug must not break the connection
            self._refuse(command.request_id, error)

    def _refuse(self, request_id: msgspec.Raw, error: Exception) -> None:
        self._say(_error_of(bytes(request_id), error))

    def _require(self, scope: Scope, *names: str) -> None:
        if self._is_leaving:
            raise ShuttingDown("the server is shutting down; nothing was applied")
        self.principal.require(scope)
        self.principal.require_names(names)

    # ---- following -----------------------------------------------------------------------------------

    def _begin_subscribe(self, command: Subscribe) -> None:
        """Subscribe after the routers have copied all records that existed when the command arrived."""
        fed = [name for name in command.starts() if self._engine.is_fed(name)]
        if not fed:
            self._subscribe(command)
            return
        self._require(Scope.READ, *command.starts())
        barrier = self._barrier = object()

        async def drain() -> Response:
            with contextlib.suppress(PenstockError):  # the subscription reports a topic that was deleted
                for name in fed:
                    await self._engine.drain(name)
            return Response(200)

        def drained(_: Response) -> None:
            if self._barrier is not barrier or self._client is None:
                return
            self._barrier = None
            try:
                self._subscribe(command)
            except Exception as error:  # noqa: BLE001 - see `_execute`
                self._refuse(command.request_id, error)
            self._work()

        RequestTask(drained).run(drain())

    def _subscribe(self, command: Subscribe) -> None:
        starts = command.starts()
        if not 1 <= len(starts) <= WATCH_TOPICS_MAX:
            raise InvalidRequest(f"subscribe to 1 to {WATCH_TOPICS_MAX} topics, not {len(starts)}")
        for name in starts:
            if prefix_of(name) is not None:
                raise InvalidRequest(f"a WebSocket follows topics by name; use POST /v0/watch for {name}")
        self._require(Scope.READ, *starts)
        check_starts(starts)
        want = want_of(
            node=command.node,
            limit=command.limit,
            max_batch_bytes=command.max_batch_bytes,
            include_meta=command.include_meta,
            include_data=command.include_data,
            include_tags=command.include_tags,
            match=command.match,
        )
        missing = [name for name in starts if not self._engine.exists(name)]
        if missing and not command.lenient:
            raise TopicNotFound(missing[0])
        if len(self.subscriptions) + len(starts) > FOLLOWING_MAX:
            raise Throttled(f"one connection follows at most {FOLLOWING_MAX} topics")
        subscribed = {}
        for name in sorted(starts.keys() - set(missing)):
            start, feed = starts[name], self._engine.feed(name)
            feed.refresh()
            state = self._engine.state(name, touch=False)
            cursor = state.head_seq if start.tail else start.from_seq
            subscribed[name] = {
                "from_seq": cursor,
                "head_seq": state.head_seq,
                "earliest_seq": state.earliest_seq,
            }
            if name in self.subscriptions:
                self.broadcaster.unfollow(self.subscriptions[name])
            self.broadcaster.follow(self, feed, cursor, want)
        # Subscriptions are visited in the next turn, so this message precedes their first record.
        self._say(messages.subscribed_message(command.request_id, subscribed))

    def _unsubscribe(self, command: Unsubscribe) -> None:
        names = command.names()
        for name in names:
            if name in self.subscriptions:
                self.broadcaster.unfollow(self.subscriptions[name])
        self._say(messages.unsubscribed_message(command.request_id, names))

    # ---- publishing ----------------------------------------------------------------------------------

    def _publish(self, command: Publish, size: int) -> None:
        began_s = time.perf_counter()
        self._require(Scope.WRITE, *names_in(command))
        if command.config is not None:
            self.principal.require(Scope.ADMIN)
        self._publishing += 1
        self._publishing_bytes += size

        def done(outcome: WriteResult | Exception) -> None:
            self._publishing -= 1
            self._publishing_bytes -= size
            if isinstance(outcome, WriteResult):
                total_ms = (time.perf_counter() - began_s) * 1000
                self._say(
                    messages.ack_message(
                        command.request_id, outcome, return_seqs=command.return_seqs, total_ms=total_ms
                    )
                )
            else:
                self._refuse(command.request_id, outcome)

        barrier = object()

        def done_later(outcome: WriteResult | Exception) -> None:
            done(outcome)
            self._leave_when_done()
            if self._barrier is barrier:
                self._barrier = None
            if self._waiting:
                self._work()

        try:
            is_placed = self._engine.append(
                command.topic,
                command.records,
                done_later,
                node=command.node,
                idempotency_key=command.idempotency_key,
                create=command.create,
                config=command.config,
                parsed=True,
                insist=command.disable_backpressure,
            )
        except Exception as error:  # noqa: BLE001 - see `_execute`
            done(error)
            return
        if not is_placed:
            # Later commands on this connection must not overtake it.
            self._barrier = barrier

    # ---- messages to the client ----------------------------------------------------------------------

    def send_page(self, subscription: Subscription, step: RenderedPage, *, caught_up: bool) -> None:
        if not self._framing.is_open:
            return
        key = ("ws", caught_up)
        frames = step.frames.get(key)
        if frames is None:
            frames = step.frames[key] = self._frames(subscription.feed.name, step, caught_up)
        self.send(frames)

    def _frames(self, name: str, step: RenderedPage, caught_up: bool) -> bytes:
        gap = step.tombstone
        parts = [] if gap is None else [messages.tombstone_message(name, gap)]
        if step.has_records:
            parts.append(messages.record_message(step))
        if caught_up:
            parts.append(messages.caught_up_message(name, step.to_seq))
        return b"".join(map(text_frame, parts))

    def send_caught_up(self, subscription: Subscription) -> None:
        self._say(messages.caught_up_message(subscription.feed.name, subscription.cursor))

    def topic_deleted(self, subscription: Subscription) -> None:
        self.broadcaster.unfollow(subscription)
        self._say(messages.deleted_message(subscription.feed.name))

    def fail(self, subscription: Subscription, error: PenstockError) -> None:
        """Stop following the topic; the client may subscribe after the damaged range, or later."""
        self.broadcaster.unfollow(subscription)
        shown = damaged_in(subscription.feed.name, error) if isinstance(error, Damaged) else error
        self._say(_error_of(b"null", shown))


def _error_of(request_id: bytes, error: Exception) -> bytes:
    """Encode an error with the same code and message as over HTTP."""
    body = response_to(error).body
    assert isinstance(body, bytes)
    problem = _ERROR.decode(body)["error"]
    return messages.error_message(request_id, problem.code, problem.message)
