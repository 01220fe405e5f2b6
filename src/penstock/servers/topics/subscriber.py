"""A client that follows topics, whatever it speaks, and where it stands in each of them."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from penstock.errors import PenstockError
from penstock.http import Principal, StreamWriter
from penstock.servers.limits import StreamLimiter
from penstock.topics import DurableWatermark, Feed, Page, SubscriptionFilter, Tombstone, TopicNotFound

if TYPE_CHECKING:
    from penstock.servers.topics.broadcaster import Broadcaster

_ENCODE = msgspec.json.Encoder().encode


def quoted(name: str) -> bytes:
    """A name as JSON."""
    return _ENCODE(name)


class RenderedPage:
    """From one place in a topic to the next: perhaps a gap, perhaps records, perhaps neither.

    `from_seq` is where the records start, behind the gap if there is one. Frames are made once for all
    subscriptions that take the same step; `frames` keeps them.
    """

    __slots__ = ("_fragments", "_records", "_topic", "frames", "from_seq", "head_seq", "to_seq", "tombstone")

    def __init__(self, page: Page, from_seq: int) -> None:
        self._topic = page.topic
        self._fragments = page.fragments
        self._records = b""
        self.tombstone = page.tombstone
        self.from_seq = from_seq if page.tombstone is None else _behind(page.tombstone)
        self.to_seq = page.next_from_seq
        self.head_seq = page.head_seq
        self.frames: dict[object, bytes] = {}

    @property
    def size(self) -> int:
        """Bytes of the records."""
        return sum(map(len, self._fragments))

    @property
    def has_records(self) -> bool:
        return bool(self._fragments)

    @property
    def is_silent(self) -> bool:
        """Nothing to tell: whatever there was is not for this subscription."""
        return not self._fragments and self.tombstone is None

    @property
    def records(self) -> bytes:
        """The members of a `record` message, up to and with its closing brace."""
        if not self._records:
            self._records = b'"topic":%b,"from_seq":%d,"to_seq":%d,"head_seq":%d,"records":[%b]}' % (
                quoted(self._topic),
                self.from_seq,
                self.to_seq,
                self.head_seq,
                b",".join(self._fragments),
            )
        return self._records


def _behind(gap: Tombstone) -> int:
    """Where reading goes on behind a gap.

    A topic that was recreated is read from its beginning: its `gap_to` is the head, and whoever resumed there
    would miss everything in it.
    """
    return gap.earliest_seq - 1 if gap.reason == "recreated" else gap.gap_to


ReadStep: TypeAlias = Callable[[int, SubscriptionFilter], RenderedPage | None]


class Subscription:
    """One topic of one subscriber. `cursor` is behind the last record that was handed to the connection."""

    __slots__ = (
        "_began_seq",
        "_fence",
        "_read",
        "cursor",
        "feed",
        "has_read",
        "is_live",
        "is_over",
        "is_queued",
        "subscriber",
        "want",
    )

    def __init__(
        self,
        *,
        subscriber: Subscriber,
        feed: Feed,
        read: ReadStep,
        cursor: int,
        want: SubscriptionFilter,
        fence: DurableWatermark | None = None,
    ) -> None:
        self.subscriber = subscriber
        self.feed = feed
        self.cursor = cursor
        self.want = want
        self._read = read
        self.has_read = False
        """Something was read through this subscriber before."""
        self.is_live = False
        """It was told that it has caught up, and has not fallen behind since."""
        self.is_queued = False
        self.is_over = False
        self._fence = fence
        """Holds it back from what is not synced, if it wants that."""
        self._began_seq = feed.head_seq

    @property
    def end_seq(self) -> int:
        """The last record that it may be given now."""
        return self.feed.head_seq if self._fence is None else self._fence.end_seq

    @property
    def until_seq(self) -> int:
        """The same as a bound for reading; 0 for none."""
        return 0 if self._fence is None else self._fence.end_seq

    def visit(self) -> None:
        """Send the next page if there is one and the client takes it; else do nothing."""
        subscriber, feed = self.subscriber, self.feed
        if self.is_over or not subscriber.is_writable:
            return
        if feed.is_gone:
            subscriber.topic_deleted(self)
        elif self.cursor == (end_seq := self.end_seq):
            if not self.is_live and end_seq >= self._began_seq:
                self.is_live = True
                subscriber.tell_caught_up(self)
            self._ask()
        elif self.cursor < end_seq or self._is_astray(end_seq):
            self._read_on()
        else:
            self._ask()

    def _is_astray(self, end_seq: int) -> bool:
        """It stands behind the head, as of another topic, and may be told so: with records, or of none."""
        return self.cursor > self.feed.head_seq and (end_seq > 0 or not self.feed.head_seq)

    def _ask(self) -> None:
        """What comes next is perhaps there and not synced."""
        if self._fence is not None:
            self._fence.ask()

    def _read_on(self) -> None:
        try:
            step = self._read(self.cursor, self.want)
        except PenstockError as error:
            self.subscriber.fail(self, error)
            return
        if step is None:
            self.subscriber.fetch(self)
        else:
            self.take(step)

    def take(self, step: RenderedPage) -> None:
        """Send what was read. Another page comes in another turn, so that nobody waits for the whole log."""
        subscriber, end_seq = self.subscriber, self.end_seq
        reached = step.to_seq == end_seq and end_seq >= self._began_seq
        news = not step.is_silent
        caught_up = reached and (news or not self.is_live)
        if news or caught_up:
            subscriber.send_page(self, step, caught_up=caught_up)
        self.cursor = step.to_seq
        self.has_read = True
        self.is_live = reached
        if step.to_seq != end_seq:
            subscriber.broadcaster.put(self)
        else:
            self._ask()


class Subscriber(abc.ABC):
    """One client. Subclasses word what it is told; everything else about following is here.

    It is the live part of a response: `attach`, `writable` and `closed` come from the connection.
    """

    def __init__(
        self, broadcaster: Broadcaster, caps: StreamLimiter, principal: Principal, *, beat_s: float
    ) -> None:
        self.broadcaster = broadcaster
        self.principal = principal
        self.subscriptions: dict[str, Subscription] = {}
        self.beat_s = beat_s
        self.sent_s = 0.0
        self._caps = caps
        self._writer: StreamWriter | None = None
        self._fetching: asyncio.Task[None] | None = None

    # ---- the connection ------------------------------------------------------------------------------

    def attach(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._caps.enter(self.principal)
        self.broadcaster.enter(self)
        self.begin()

    def writable(self) -> None:
        for subscription in self.subscriptions.values():
            is_behind = not subscription.is_live or subscription.cursor != subscription.end_seq
            if is_behind or subscription.feed.is_gone:
                self.broadcaster.put(subscription)

    def closed(self) -> None:
        """The client has left, or was sent away."""
        if self._writer is None:
            return
        self._writer = None
        if self._fetching is not None:
            self._fetching.cancel()
        self.left()
        self._caps.leave(self.principal)
        self.broadcaster.leave(self)

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    @property
    def is_writable(self) -> bool:
        return self._writer is not None and self._writer.is_writable

    def send(self, data: bytes) -> None:
        if self._writer is not None:
            self.sent_s = self.broadcaster.now_s
            self._writer.write(data)

    def end(self) -> None:
        """Send what was written and close."""
        if self._writer is not None:
            self._writer.end()
            self.closed()

    def cut(self) -> None:
        """Close without a word: nobody is there."""
        if self._writer is not None:
            self._writer.cut()
            self.closed()

    # ---- records that are not at hand ----------------------------------------------------------------

    def fetch(self, subscription: Subscription) -> None:
        """Read the next page of this subscription from wherever it is; one at a time for each client."""
        if self._fetching is None:
            self._fetching = asyncio.get_running_loop().create_task(self._fetch(subscription))

    async def _fetch(self, subscription: Subscription) -> None:
        from_seq = subscription.cursor
        try:
            page = await subscription.feed.page(from_seq, subscription.want, until_seq=subscription.until_seq)
        except TopicNotFound:
            page = None
        except PenstockError as error:
            page = None
            if not subscription.is_over:
                self.fail(subscription, error)
        finally:
            self._fetching = None
        if page is not None and not subscription.is_over and subscription.cursor == from_seq:
            subscription.take(RenderedPage(page, from_seq))
        self.writable()

    # ---- what subclasses say -------------------------------------------------------------------------

    def tell_put_off(self, topics: list[str]) -> None:  # noqa: B027 - there may be no word for it
        """Records of these topics wait until the server is pressed less."""

    @abc.abstractmethod
    def begin(self) -> None:
        """The connection is open."""

    def left(self) -> None:  # noqa: B027 - most have nothing to remember
        """The connection is closed; the subscriptions are still there to be looked at."""

    @abc.abstractmethod
    def send_page(self, subscription: Subscription, step: RenderedPage, *, caught_up: bool) -> None:
        """A gap, records, or both; and that this was all."""

    @abc.abstractmethod
    def tell_caught_up(self, subscription: Subscription) -> None:
        """There is nothing, or nothing more, to read."""

    @abc.abstractmethod
    def topic_deleted(self, subscription: Subscription) -> None:
        """The topic is gone."""

    @abc.abstractmethod
    def fail(self, subscription: Subscription, error: PenstockError) -> None:
        """The next record cannot be read."""

    @abc.abstractmethod
    def heartbeat(self) -> None:
        """Nothing was sent for a whole interval."""

    @abc.abstractmethod
    def shut_down(self) -> None:
        """Say that the server leaves, and end."""
