"""Subscriptions: the topics that a client follows, its position in each, and the pages sent to it."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from penstock.errors import PenstockError
from penstock.topics import DurableWatermark, Feed, Page, SubscriptionFilter, Tombstone

_ENCODE = msgspec.json.Encoder().encode


def quoted(name: str) -> bytes:
    """Return a name as JSON."""
    return _ENCODE(name)


class RenderedPage:
    """A page of a topic: a gap, records, both, or neither.

    `from_seq` is where the records start, after the gap if there is one. `frames` caches encoded frames,
    shared by all subscriptions that read the same page.
    """

    __slots__ = (
        "_fragments",
        "_records",
        "_topic",
        "frames",
        "from_seq",
        "has_records",
        "head_seq",
        "is_empty",
        "size",
        "to_seq",
        "tombstone",
    )

    def __init__(self, page: Page, from_seq: int) -> None:
        self._topic = page.topic
        self._fragments = page.fragments
        self._records = b""
        self.tombstone = page.tombstone
        self.from_seq = from_seq if page.tombstone is None else _after(page.tombstone)
        self.to_seq = page.next_from_seq
        self.head_seq = page.head_seq
        self.frames: dict[object, bytes] = {}
        self.has_records = bool(page.fragments)
        self.is_empty = not page.fragments and page.tombstone is None
        """Whether there is nothing to send: the filter of the subscription matched nothing."""
        self.size = sum(map(len, page.fragments))
        """The size of the records in bytes."""

    @property
    def records(self) -> bytes:
        """The members of a `record` message, including its closing brace."""
        if not self._records:
            self._records = b'"topic":%b,"from_seq":%d,"to_seq":%d,"head_seq":%d,"records":[%b]}' % (
                quoted(self._topic),
                self.from_seq,
                self.to_seq,
                self.head_seq,
                b",".join(self._fragments),
            )
        return self._records


def _after(gap: Tombstone) -> int:
    """Return the sequence after which reading continues, given a gap.

    A recreated topic is read from its start. Its `gap_to` is the head, and a client that resumed there would
    miss all its records.
    """
    return gap.earliest_seq - 1 if gap.reason == "recreated" else gap.gap_to


ReadPage: TypeAlias = Callable[[int, SubscriptionFilter], RenderedPage | None]


class Subscription:
    """One topic of one client. `cursor` is the last sequence handed to the connection."""

    __slots__ = (
        "_began_seq",
        "_durable",
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
        subscriber: Recipient,
        feed: Feed,
        read: ReadPage,
        cursor: int,
        want: SubscriptionFilter,
        durable: DurableWatermark | None = None,
    ) -> None:
        self.subscriber = subscriber
        self.feed = feed
        self.cursor = cursor
        self.want = want
        self._read = read
        self.has_read = False
        """Whether a page was already read for this client."""
        self.is_live = False
        """Whether the client was informed that it has caught up, and has not fallen behind since."""
        self.is_queued = False
        self.is_over = False
        self._durable = durable
        """Holds back records that are not synced, if the client requires that."""
        self._began_seq = feed.head_seq

    @property
    def end_seq(self) -> int:
        """The last sequence that may be sent now."""
        return self.feed.head_seq if self._durable is None else self._durable.end_seq

    @property
    def until_seq(self) -> int:
        """`end_seq` as the upper bound of a read; 0 for no bound."""
        return 0 if self._durable is None else self._durable.end_seq

    def visit(self) -> None:
        """Send the next page, if there is one and the connection is writable."""
        subscriber, feed = self.subscriber, self.feed
        if self.is_over or not subscriber.is_writable:
            return
        if feed.is_gone:
            subscriber.topic_deleted(self)
        elif self.cursor == (end_seq := self.end_seq):
            if not self.is_live and end_seq >= self._began_seq:
                self.is_live = True
                subscriber.send_caught_up(self)
            self._ask_for_sync()
        elif self.cursor < end_seq or self._is_past_head(end_seq):
            self._read_next()
        else:
            self._ask_for_sync()

    def _is_past_head(self, end_seq: int) -> bool:
        """Return whether the cursor is past the head, as of a recreated topic; the next page reports that."""
        return self.cursor > self.feed.head_seq and (end_seq > 0 or not self.feed.head_seq)

    def _ask_for_sync(self) -> None:
        """Request a sync of published records, if the client waits for synced records."""
        if self._durable is not None:
            self._durable.ask()

    def _read_next(self) -> None:
        try:
            page = self._read(self.cursor, self.want)
        except PenstockError as error:
            self.subscriber.fail(self, error)
            return
        if page is None:
            self.subscriber.fetch(self)
        else:
            self.take(page)

    def take(self, page: RenderedPage) -> None:
        """Send a page. The next one follows in another turn, so that no client waits for a long log."""
        subscriber, end_seq = self.subscriber, self.end_seq
        reached = page.to_seq == end_seq and end_seq >= self._began_seq
        news = not page.is_empty
        caught_up = reached and (news or not self.is_live)
        if news or caught_up:
            subscriber.send_page(self, page, caught_up=caught_up)
        self.cursor = page.to_seq
        self.has_read = True
        self.is_live = reached
        if page.to_seq != end_seq:
            subscriber.continue_later(self)
        else:
            self._ask_for_sync()


class Recipient(abc.ABC):
    """The receiver of subscriptions in any protocol, informed about records and changes of a topic."""

    subscriptions: dict[str, Subscription]

    @property
    @abc.abstractmethod
    def is_writable(self) -> bool:
        """Whether the connection is open and the client keeps up."""

    @abc.abstractmethod
    def cut(self) -> None:
        """Close the connection without sending pending data."""

    @abc.abstractmethod
    def continue_later(self, subscription: Subscription) -> None:
        """Visit the subscription again in the next turn: it has more to read."""

    @abc.abstractmethod
    def fetch(self, subscription: Subscription) -> None:
        """Fetch the next page of the subscription from storage."""

    @abc.abstractmethod
    def send_page(self, subscription: Subscription, page: RenderedPage, *, caught_up: bool) -> None:
        """Send a gap, records, or both, and report whether the client has caught up."""

    @abc.abstractmethod
    def send_caught_up(self, subscription: Subscription) -> None:
        """Report that the client has caught up."""

    @abc.abstractmethod
    def topic_deleted(self, subscription: Subscription) -> None:
        """Report that the topic was deleted."""

    @abc.abstractmethod
    def fail(self, subscription: Subscription, error: PenstockError) -> None:
        """Report that the next record cannot be read."""
