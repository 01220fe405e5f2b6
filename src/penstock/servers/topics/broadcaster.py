"""Delivery of published records to every client that follows their topic.

A publish marks its topic once per turn of the event loop. A turn visits the subscriptions of the topics with
the highest priority, and writes directly into the connections of clients that keep up: without a task, future
or queue per delivery. A page that is read and rendered for one subscription is shared by all others with the
same position and the same filter. A subscription is skipped if its connection is full or its records have to
be fetched. It continues from the log when it can, so it delays no other client, and nothing is queued for
it.
"""

from __future__ import annotations

import abc
import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.http import Principal, StreamWriter
from penstock.servers.limits import StreamLimiter
from penstock.servers.topics.scheduler import Delays, DeliveryScheduler, Scheduled
from penstock.servers.topics.subscription import Recipient, RenderedPage, Subscription
from penstock.topics import DurableWatermark, Feed, Scheduler, SubscriptionFilter, TopicNotFound

_LOG = logging.getLogger(__name__)

VISITS_PER_TURN: Final = 256
BYTES_PER_TURN: Final = 4 * 1024**2
"""After this many visits, or bytes read for them, requests are served before further visits."""
_CATCH_UP_EVERY: Final = 4
"""One in this many visits is for a subscription that is catching up, even while others have new records."""
_ASK_AGAIN_S: Final = 1.0
_FILTERS_MAX: Final = 1024
_BEATS_PER_INTERVAL: Final = 4


class _Turn:
    """The pages read in one turn of the loop."""

    __slots__ = ("channels", "size")

    def __init__(self) -> None:
        self.channels: set[Channel] = set()
        self.size = 0

    def end(self) -> None:
        """Drop the pages: records may be published or removed from now on."""
        for channel in self.channels:
            channel.forget()
        self.channels.clear()
        self.size = 0


class Channel(Scheduled):
    """One followed topic, its subscriptions, and the pages read in this turn."""

    __slots__ = (
        "_mark",
        "_pages",
        "_turn",
        "durable",
        "subscriptions",
    )

    def __init__(self, feed: Feed, mark: Callable[[Channel], None], turn: _Turn) -> None:
        super().__init__(feed)
        self.subscriptions: dict[Subscription, Subscriber] = {}
        self.durable: DurableWatermark | None = None
        """The synced position of the topic, if a subscription receives synced records only."""
        self._mark = mark
        self._turn = turn
        self._pages: dict[tuple[int, SubscriptionFilter], RenderedPage] = {}
        feed.listen(self.mark)

    def mark(self) -> None:
        if self.durable is not None:
            self.durable.ask()
        self._mark(self)

    def close(self) -> None:
        self.feed.unlisten(self.mark)
        self.drop_durable()

    def drop_durable(self) -> None:
        """Stop syncing: no subscription requires synced records."""
        if self.durable is not None:
            self.durable.close()
            self.durable = None

    def read(self, from_seq: int, want: SubscriptionFilter) -> RenderedPage | None:
        """Return the page after `from_seq`, shared by all subscriptions; None if it must be fetched."""
        key = (from_seq, want)
        rendered = self._pages.get(key)
        if rendered is None:
            until_seq = self.durable.end_seq if want.strong and self.durable is not None else 0
            page = self.feed.page_at_hand(from_seq, want, until_seq=until_seq)
            if page is None:
                return None
            rendered = self._pages[key] = RenderedPage(page, from_seq)
            self._turn.channels.add(self)
            self._turn.size += rendered.size
        return rendered

    def forget(self) -> None:
        """Drop the pages of this turn."""
        self._pages.clear()


class Subscriber(Recipient):
    """The connection of one client that follows topics. Subclasses implement its protocol.

    It is a `StreamingBody`: the connection calls `attach`, `writable` and `closed`.
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
        """Remove the client, which has left or was disconnected."""
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
        """Send pending data and close."""
        if self._writer is not None:
            self._writer.end()
            self.closed()

    def cut(self) -> None:
        """Close without sending pending data: the client does not respond."""
        if self._writer is not None:
            self._writer.cut()
            self.closed()

    # ---- records that must be fetched ---------------------------------------------------------------

    def fetch(self, subscription: Subscription) -> None:
        """Fetch the next page of this subscription; one at a time per client."""
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

    def continue_later(self, subscription: Subscription) -> None:
        self.broadcaster.put(subscription)

    # ---- implemented by subclasses -------------------------------------------------------------------

    def send_deferred(self, topics: list[str]) -> None:
        """Report that records of these topics are delayed while the server is overloaded."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Start sending: the connection is open."""

    def left(self) -> None:
        """Save state: the connection is closed, but the subscriptions still exist."""

    @abc.abstractmethod
    def heartbeat(self) -> None:
        """Send a heartbeat: nothing was sent for a whole interval."""

    @abc.abstractmethod
    def shut_down(self) -> None:
        """Report that the server is shutting down, and end the stream."""


class Broadcaster:
    """All channels, all subscribers, and the turns that deliver records between them."""

    def __init__(self, clock: Clock, scheduler: Scheduler, *, beat_ms_min: int = 1000) -> None:
        self._clock = clock
        self._tick_s = beat_ms_min / 1000 / _BEATS_PER_INTERVAL
        self._channels: dict[tuple[str, int], Channel] = {}
        self._deliveries = DeliveryScheduler(
            clock, scheduler, wake=self._schedule, on_deferred=self._warn_deferred
        )
        self._unsynced: Delays[Channel] = Delays(clock, Channel.mark)
        """Channels whose sync failed, until the next attempt."""
        self._warned: set[Subscriber] = set()
        self._this_turn = _Turn()
        self._filters: dict[SubscriptionFilter, SubscriptionFilter] = {}
        self._fresh: deque[Subscription] = deque()
        """Subscriptions whose topic has changed, by the topic's priority."""
        self._catching_up: deque[Subscription] = deque()
        """Subscriptions that are catching up: on a long log, or after their connection was full."""
        self._visits = 0
        self._is_due = False
        self._subscribers: dict[Subscriber, None] = {}
        self._beats: list[tuple[float, int, Subscriber]] = []
        self._beat_numbers = itertools.count()
        self._ticking: asyncio.Task[None] | None = None
        self.now_s = clock.monotonic()
        """The time of this turn; subscribers use it as the time of their last output."""

    # ---- subscribers ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._subscribers)

    @property
    def waiting(self) -> int:
        """The number of topics with records to deliver."""
        return len(self._deliveries)

    def enter(self, subscriber: Subscriber) -> None:
        """Add an open subscriber; it sends a heartbeat after every interval without output."""
        self._subscribers[subscriber] = None
        self.now_s = subscriber.sent_s = self._clock.monotonic()
        self._push_beat(subscriber)
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def leave(self, subscriber: Subscriber) -> None:
        """Remove a closed subscriber and its subscriptions."""
        self._subscribers.pop(subscriber, None)
        self._warned.discard(subscriber)
        for subscription in list(subscriber.subscriptions.values()):
            self.unfollow(subscription)
        if not self._subscribers and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
            self._beats.clear()
            self._deliveries.close()
            self._unsynced.close()

    def follow(
        self, subscriber: Subscriber, feed: Feed, cursor: int, want: SubscriptionFilter
    ) -> Subscription:
        """Start sending the topic's records after `cursor` to this subscriber."""
        want = self._same(want)
        key = (feed.name, feed.epoch)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(feed, self._deliveries.mark, self._this_turn)
        durable = self._durable_of(channel) if want.strong else None
        subscription = Subscription(
            subscriber=subscriber, feed=feed, read=channel.read, cursor=cursor, want=want, durable=durable
        )
        channel.subscriptions[subscription] = subscriber
        subscriber.subscriptions[feed.name] = subscription
        feed.refresh()
        self.put(subscription)
        return subscription

    def _durable_of(self, channel: Channel) -> DurableWatermark:
        def tell(is_synced: bool) -> None:
            if is_synced:
                channel.mark()
            else:
                self._unsynced.hold(channel, self._clock.monotonic() + _ASK_AGAIN_S)

        if channel.durable is None:
            channel.durable = channel.feed.fence(tell)
        return channel.durable

    def _same(self, want: SubscriptionFilter) -> SubscriptionFilter:
        """Return one shared object for equal filters: every delivery compares them."""
        if len(self._filters) >= _FILTERS_MAX:
            self._filters.clear()
        return self._filters.setdefault(want, want)

    def unfollow(self, subscription: Subscription) -> None:
        """End a subscription."""
        subscription.is_over = True
        feed, subscriber = subscription.feed, subscription.subscriber
        if subscriber.subscriptions.get(feed.name) is subscription:
            del subscriber.subscriptions[feed.name]
        channel = self._channels.get((feed.name, feed.epoch))
        if channel is not None:
            channel.subscriptions.pop(subscription, None)
            if subscription.want.strong and not any(other.want.strong for other in channel.subscriptions):
                channel.drop_durable()
                self._unsynced.discard(channel)
            if not channel.subscriptions:
                channel.close()
                self._deliveries.discard(channel)
                del self._channels[feed.name, feed.epoch]

    def shut_down(self) -> None:
        """Report the shutdown to every client, and end its stream."""
        for subscriber in list(self._subscribers):
            subscriber.shut_down()

    # ---- the turn ------------------------------------------------------------------------------------

    def put(self, subscription: Subscription) -> None:
        """Visit this subscription in the next turn."""
        if not subscription.is_queued:
            subscription.is_queued = True
            self._catching_up.append(subscription)
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due = False
        self.now_s = self._clock.monotonic()
        self._gather()
        turn, fresh, catching_up = self._this_turn, self._fresh, self._catching_up
        for _ in range(min(len(fresh) + len(catching_up), VISITS_PER_TURN)):
            if turn.size > BYTES_PER_TURN:
                break
            self._visits += 1
            catches_up = catching_up and (not fresh or not self._visits % _CATCH_UP_EVERY)
            subscription = catching_up.popleft() if catches_up else fresh.popleft()
            subscription.is_queued = False
            try:
                subscription.visit()
            except Exception:  # noqa: BLE001 - a bug must not affect other clients
                _LOG.exception("a delivery failed; its client was disconnected, the others are not affected")
                subscription.subscriber.cut()
        turn.end()
        self._deliveries.end()
        if fresh or catching_up or self._deliveries.is_due:
            self._schedule()

    def _gather(self) -> None:
        """Queue the subscriptions of the next topics, about as many as a turn visits.

        The other topics stay in the ready set, so that a topic of higher priority that is marked later
        precedes them.
        """
        self._deliveries.begin()
        while len(self._fresh) < VISITS_PER_TURN and (channel := self._deliveries.take()) is not None:
            channel.feed.refresh()
            for subscription in channel.subscriptions:
                if not subscription.is_queued:
                    subscription.is_queued = True
                    self._fresh.append(subscription)

    def _warn_deferred(self, channels: Sequence[Channel]) -> None:
        """Warn each client once that topics are delayed; warn again only after all were served."""
        if not channels:
            self._warned.clear()
        subscribers = {subscriber for channel in channels for subscriber in channel.subscriptions.values()}
        for subscriber in subscribers - self._warned:
            self._warned.add(subscriber)
            if subscriber.is_writable:
                self._warn(subscriber)

    def _warn(self, subscriber: Subscriber) -> None:
        now_ms = self._clock.now_ms()
        names = [name for name, one in subscriber.subscriptions.items() if one.feed.priority(now_ms) < 0]
        try:
            subscriber.send_deferred(sorted(names))
        except Exception:  # noqa: BLE001 - see `_turn`
            _LOG.exception("a warning failed; its client was disconnected, the others are not affected")
            subscriber.cut()

    # ---- heartbeats ----------------------------------------------------------------------------------

    def _push_beat(self, subscriber: Subscriber) -> None:
        due_s = subscriber.sent_s + subscriber.beat_s
        heapq.heappush(self._beats, (due_s, next(self._beat_numbers), subscriber))

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(self._tick_s)
            self.now_s = self._clock.monotonic()
            while self._beats and self._beats[0][0] <= self.now_s:
                subscriber = heapq.heappop(self._beats)[2]
                if subscriber in self._subscribers:
                    if subscriber.sent_s + subscriber.beat_s <= self.now_s:
                        subscriber.heartbeat()
                        subscriber.sent_s = self.now_s
                    self._push_beat(subscriber)
