"""Server-sent events: one client of one watch session, told everything in frames of text."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.errors import Corrupt, PenstockError
from penstock.servers.errors import told
from penstock.servers.limits import StreamLimiter
from penstock.servers.topics.answers import damaged_in
from penstock.servers.topics.subscriber import RenderedPage, Subscriber, Subscription, quoted
from penstock.topics import RETRY_AFTER_MS, Damaged, Tombstone

if TYPE_CHECKING:
    from penstock.servers.topics.broadcaster import Broadcaster
    from penstock.servers.topics.watch import Session


HEADERS: Final = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
RETRY: Final = b"retry: 2000\n\n"
_ENCODE: Final = msgspec.json.Encoder().encode
_CURSORS: Final = msgspec.json.Decoder(dict[str, int])
_SHUTTING_DOWN: Final = b'{"code":"server_shutting_down","message":"the server is shutting down; reconnect"}'


def event(name: bytes, data: bytes, ident: bytes | None = None) -> bytes:
    """One frame. JSON has no line breaks, so its data is one line."""
    if ident is None:
        return b"event: %b\ndata: %b\n\n" % (name, data)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (ident, name, data)


def write_id(cursors: Mapping[str, int]) -> bytes:
    """Where a client stands in every topic, as the id of an event."""
    text = b"{%b}" % b",".join(b"%b:%d" % (quoted(name), seq) for name, seq in sorted(cursors.items()))
    return base64.urlsafe_b64encode(text).rstrip(b"=")


def read_id(ident: bytes) -> dict[str, int]:
    """What `write_id` wrote; empty for anything else, which is no id of ours."""
    try:
        text = base64.b64decode(ident + b"=" * (-len(ident) % 4), b"-_", validate=True)
        return {name: seq for name, seq in _CURSORS.decode(text).items() if seq >= 0}
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError):
        return {}


class SseStream(Subscriber):
    """The open stream of a session. What it has handed to the connection is what the session has read."""

    def __init__(self, broadcaster: Broadcaster, caps: StreamLimiter, session: Session) -> None:
        super().__init__(broadcaster, caps, session.principal, beat_s=session.heartbeat_ms / 1000)
        self._session = session

    def begin(self) -> None:
        self.send(RETRY)
        self._session.started(self)

    def left(self) -> None:
        self._session.stopped(self)

    # ---- what the client is told ---------------------------------------------------------------------

    def send_page(self, subscription: Subscription, step: RenderedPage, *, caught_up: bool) -> None:
        if step.tombstone is None and self._session.is_single:
            frame = step.frames.get(caught_up)
            if frame is None:
                ident = write_id({subscription.feed.name: step.to_seq})
                frame = step.frames[caught_up] = self._frames(subscription, step, ident, caught_up)
            self.send(frame)
            return
        gap = b"" if step.tombstone is None else self._gap(subscription, step, step.tombstone)
        ident = self._ident(subscription, step.to_seq)
        self.send(gap + self._frames(subscription, step, ident, caught_up))

    def _gap(self, subscription: Subscription, step: RenderedPage, gap: Tombstone) -> bytes:
        reason = gap.reason if subscription.has_read or gap.reason == "recreated" else "from_seq_too_old"
        data = {
            "topic": subscription.feed.name,
            "reason": reason,
            "gap_from": gap.gap_from,
            "gap_to": gap.gap_to,
            "earliest_seq": gap.earliest_seq,
            "head_seq": gap.head_seq,
        }
        return event(b"tombstone", _ENCODE(data), self._ident(subscription, step.from_seq))

    def _frames(self, subscription: Subscription, step: RenderedPage, ident: bytes, caught_up: bool) -> bytes:
        records = event(b"record", b"{" + step.records, ident) if step.has_records else b""
        return records + (_caught_up(subscription.feed.name, step.to_seq, ident) if caught_up else b"")

    def tell_caught_up(self, subscription: Subscription) -> None:
        ident = self._ident(subscription, subscription.cursor)
        self.send(_caught_up(subscription.feed.name, subscription.cursor, ident))

    def topic_deleted(self, subscription: Subscription) -> None:
        """Terminal for the topic; the stream ends when it was the last."""
        self.broadcaster.unfollow(subscription)
        self.tell_deleted(subscription.feed.name)

    def tell_deleted(self, name: str) -> None:
        data = b'{"topic":%b,"head_seq":0,"reason":"deleted"}' % quoted(name)
        self.send(event(b"topic-deleted", data, write_id(self._session.cursors())))
        self._session.lost(name)
        if self._session.is_over:
            self.end()

    def fail(self, subscription: Subscription, error: PenstockError) -> None:
        """The stream ends, so that the client comes back and tries again from where it stands."""
        if isinstance(error, Damaged):
            error = damaged_in(subscription.feed.name, error)
        code = 500 if isinstance(error, Corrupt) else 503
        self.send(
            event(b"error", _ENCODE({"code": code, "error": told(error), "topic": subscription.feed.name}))
        )
        self.end()

    def warn(self, code: int, text: str, topics: list[str]) -> None:
        """Something that the client should know about; the stream goes on."""
        self.send(event(b"error", _ENCODE({"code": code, "error": text, "topics": topics})))

    def tell_put_off(self, topics: list[str]) -> None:
        text = "the server is pressed hard, topics of negative priority are pushed later; poll them meanwhile"
        data = {"code": 429, "error": text, "retry_after_ms": RETRY_AFTER_MS, "topics": topics}
        self.send(event(b"error", _ENCODE(data)))

    def heartbeat(self) -> None:
        if self.is_writable:
            self.send(b": hb %d\n\n" % self._session.now_ms())

    def shut_down(self) -> None:
        self.send(event(b"error", _SHUTTING_DOWN))
        self.end()

    def _ident(self, subscription: Subscription, seq: int) -> bytes:
        return write_id(self._session.cursors() | {subscription.feed.name: seq})


def _caught_up(name: str, head_seq: int, ident: bytes) -> bytes:
    return event(b"caught-up", b'{"topic":%b,"head_seq":%d}' % (quoted(name), head_seq), ident)
