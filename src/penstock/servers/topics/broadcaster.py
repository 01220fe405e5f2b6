"""From a publish to every client that follows the topic.

A publish marks its topic once per turn of the loop. A turn visits everybody who follows the topics that are
next by their priority, and writes straight into the connections of those that keep up: no task, future or
queue per delivery. What is read and rendered for one subscription is shared by all others that stand at the
same place and want the same. A subscription whose connection is full, or whose records have to be fetched, is
passed over; it reads on from the log by itself when it can, so it costs nobody else anything and nothing
piles up for it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from penstock.clock import Clock
from penstock.servers.topics.scheduler import Delays, DeliveryScheduler
from penstock.servers.topics.subscriber import RenderedPage, Subscriber, Subscription
from penstock.topics import DurableWatermark, Feed, Scheduler, SubscriptionFilter

_LOG = logging.getLogger(__name__)

VISITS_PER_TURN: Final = 256
BYTES_PER_TURN: Final = 4 * 1024**2
"""After so many visits, or so much that had to be read for them, requests get their turn before the rest."""
_BEHIND_EVERY: Final = 4
"""One of so many visits is for somebody who reads on by himself, also while others have something new."""
_ASK_AGAIN_S: Final = 1.0
_WANTS_MAX: Final = 1024
_BEATS_PER_INTERVAL: Final = 4


class _Turn:
    """What was read in one turn of the loop."""

    __slots__ = ("channels", "size")

    def __init__(self) -> None:
        self.channels: set[Channel] = set()
        self.size = 0

    def end(self) -> None:
        """From now on records may be published or go: what was read is no longer what there is."""
        for channel in self.channels:
            channel.forget()
        self.channels.clear()
        self.size = 0


class Channel:
    """One topic that somebody follows, and what was read of it in this turn."""

    __slots__ = (
        "_mark",
        "_steps",
        "_turn",
        "feed",
        "fence",
        "is_waiting",
        "priority",
        "served_s",
        "subscriptions",
    )

    def __init__(self, feed: Feed, mark: Callable[[Channel], None], turn: _Turn) -> None:
        self.feed = feed
        self.subscriptions: dict[Subscription, None] = {}
        self.fence: DurableWatermark | None = None
        """What holds those back who want synced records only, if there are such."""
        self.is_waiting = False
        self.priority = 0
        self.served_s = float("-inf")
        self._mark = mark
        self._turn = turn
        self._steps: dict[tuple[int, SubscriptionFilter], RenderedPage] = {}
        feed.listen(self.mark)

    def mark(self) -> None:
        if self.fence is not None:
            self.fence.ask()
        self._mark(self)

    def close(self) -> None:
        self.feed.unlisten(self.mark)
        self.lift_fence()

    def lift_fence(self) -> None:
        """Nobody wants synced records only."""
        if self.fence is not None:
            self.fence.close()
            self.fence = None

    def read(self, from_seq: int, want: SubscriptionFilter) -> RenderedPage | None:
        """What comes after `from_seq`, as some subscription has read it; None if it must be fetched."""
        key = (from_seq, want)
        step = self._steps.get(key)
        if step is None:
            until_seq = self.fence.end_seq if want.strong and self.fence is not None else 0
            page = self.feed.page_at_hand(from_seq, want, until_seq=until_seq)
            if page is None:
                return None
            step = self._steps[key] = RenderedPage(page, from_seq)
            self._turn.channels.add(self)
            self._turn.size += step.size
        return step

    def forget(self) -> None:
        """The turn is over."""
        self._steps.clear()


class Broadcaster:
    """All channels, all subscribers, and the turn that goes from the ones to the others."""

    def __init__(self, clock: Clock, scheduler: Scheduler, *, beat_ms_min: int = 1000) -> None:
        self._clock = clock
        self._tick_s = beat_ms_min / 1000 / _BEATS_PER_INTERVAL
        self._channels: dict[tuple[str, int], Channel] = {}
        self._dispatch = DeliveryScheduler(clock, scheduler, wake=self._schedule, put_off=self._tell_put_off)
        self._unsynced: Delays[Channel] = Delays(clock, Channel.mark)
        """Channels whose sync failed, until it is asked for again."""
        self._warned: set[Subscriber] = set()
        self._this_turn = _Turn()
        self._wants: dict[SubscriptionFilter, SubscriptionFilter] = {}
        self._fresh: deque[Subscription] = deque()
        """Those whose topic has changed, in the order of its priority."""
        self._behind: deque[Subscription] = deque()
        """Those who read on by themselves: a long log, or a connection that was full."""
        self._visits = 0
        self._is_due = False
        self._subscribers: dict[Subscriber, None] = {}
        self._beats: list[tuple[float, int, Subscriber]] = []
        self._beat_numbers = itertools.count()
        self._ticking: asyncio.Task[None] | None = None
        self.now_s = clock.monotonic()
        """The time of this turn: subscribers note when they last sent something."""

    # ---- who is there --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._subscribers)

    @property
    def waiting(self) -> int:
        """How many topics have something to deliver."""
        return len(self._dispatch)

    def enter(self, subscriber: Subscriber) -> None:
        """An subscriber is open from now on, and is reminded after every interval without output."""
        self._subscribers[subscriber] = None
        self.now_s = subscriber.sent_s = self._clock.monotonic()
        self._push_beat(subscriber)
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def leave(self, subscriber: Subscriber) -> None:
        """It is closed: nothing follows through it any more."""
        self._subscribers.pop(subscriber, None)
        self._warned.discard(subscriber)
        for subscription in list(subscriber.subscriptions.values()):
            self.unfollow(subscription)
        if not self._subscribers and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
            self._beats.clear()
            self._dispatch.close()
            self._unsynced.close()

    def follow(
        self, subscriber: Subscriber, feed: Feed, cursor: int, want: SubscriptionFilter
    ) -> Subscription:
        """Send what the topic has after `cursor`, and whatever comes, to this subscriber."""
        want = self._same(want)
        key = (feed.name, feed.epoch)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(feed, self._dispatch.mark, self._this_turn)
        fence = self._fence(channel) if want.strong else None
        subscription = Subscription(
            subscriber=subscriber, feed=feed, read=channel.read, cursor=cursor, want=want, fence=fence
        )
        channel.subscriptions[subscription] = None
        subscriber.subscriptions[feed.name] = subscription
        feed.refresh()
        self.put(subscription)
        return subscription

    def _fence(self, channel: Channel) -> DurableWatermark:
        def tell(is_synced: bool) -> None:
            if is_synced:
                channel.mark()
            else:
                self._unsynced.hold(channel, self._clock.monotonic() + _ASK_AGAIN_S)

        if channel.fence is None:
            channel.fence = channel.feed.fence(tell)
        return channel.fence

    def _same(self, want: SubscriptionFilter) -> SubscriptionFilter:
        """One object for equal wants: they are compared at every delivery."""
        if len(self._wants) >= _WANTS_MAX:
            self._wants.clear()
        return self._wants.setdefault(want, want)

    def unfollow(self, subscription: Subscription) -> None:
        """Send nothing more of this topic to that subscriber."""
        subscription.is_over = True
        feed, subscriber = subscription.feed, subscription.subscriber
        if subscriber.subscriptions.get(feed.name) is subscription:
            del subscriber.subscriptions[feed.name]
        channel = self._channels.get((feed.name, feed.epoch))
        if channel is not None:
            channel.subscriptions.pop(subscription, None)
            if subscription.want.strong and not any(other.want.strong for other in channel.subscriptions):
                channel.lift_fence()
                self._unsynced.discard(channel)
            if not channel.subscriptions:
                channel.close()
                self._dispatch.discard(channel)
                del self._channels[feed.name, feed.epoch]

    def shut_down(self) -> None:
        """Tell every client that the server leaves, and end its stream."""
        for subscriber in list(self._subscribers):
            subscriber.shut_down()

    # ---- the turn ------------------------------------------------------------------------------------

    def put(self, subscription: Subscription) -> None:
        """Visit this subscription in the next turn."""
        if not subscription.is_queued:
            subscription.is_queued = True
            self._behind.append(subscription)
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due = False
        self.now_s = self._clock.monotonic()
        self._gather()
        turn, fresh, behind = self._this_turn, self._fresh, self._behind
        for _ in range(min(len(fresh) + len(behind), VISITS_PER_TURN)):
            if turn.size > BYTES_PER_TURN:
                break
            self._visits += 1
            reads_on = behind and (not fresh or not self._visits % _BEHIND_EVERY)
            subscription = behind.popleft() if reads_on else fresh.popleft()
            subscription.is_queued = False
            try:
                subscription.visit()
            except Exception:  # noqa: BLE001 - a bug must not take the others with it
                _LOG.exception("a delivery failed; its client is cut off, the others go on")
                subscription.subscriber.cut()
        turn.end()
        self._dispatch.end()
        if fresh or behind or self._dispatch.is_due:
            self._schedule()

    def _gather(self) -> None:
        """Queue those who follow the topics that are next, about as many as a turn visits.

        The others keep their places, so that what is urgent and comes meanwhile goes before them.
        """
        self._dispatch.begin()
        while len(self._fresh) < VISITS_PER_TURN and (channel := self._dispatch.take()) is not None:
            channel.feed.refresh()
            for subscription in channel.subscriptions:
                if not subscription.is_queued:
                    subscription.is_queued = True
                    self._fresh.append(subscription)

    def _tell_put_off(self, channels: Sequence[Channel]) -> None:
        """Say once to each client that some of its topics wait, until that is over for all."""
        if not channels:
            self._warned.clear()
        subscribers = {
            subscription.subscriber for channel in channels for subscription in channel.subscriptions
        }
        for subscriber in subscribers - self._warned:
            self._warned.add(subscriber)
            if subscriber.is_writable:
                self._warn(subscriber)

    def _warn(self, subscriber: Subscriber) -> None:
        now_ms = self._clock.now_ms()
        names = [name for name, one in subscriber.subscriptions.items() if one.feed.priority(now_ms) < 0]
        try:
            subscriber.tell_put_off(sorted(names))
        except Exception:  # noqa: BLE001 - see `_turn`
            _LOG.exception("a warning failed; its client is cut off, the others go on")
            subscriber.cut()

    # ---- silence -------------------------------------------------------------------------------------

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
