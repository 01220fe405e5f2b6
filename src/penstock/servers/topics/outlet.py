"""A client that follows topics, whatever it speaks, and where it stands in each of them."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from penstock.errors import PenstockError
from penstock.http import Principal, StreamWriter
from penstock.servers.caps import StreamLimiter
from penstock.servers.topics.step import Step
from penstock.topics import Feed, Fence, TopicNotFound, Want

if TYPE_CHECKING:
    from penstock.servers.topics.fanout import Hub

__all__ = ["Follower", "Outlet", "ReadStep"]

ReadStep: TypeAlias = Callable[[int, Want], Step | None]


class Follower:
    """One topic of one outlet. `cursor` is behind the last record that was handed to the connection."""

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
        "outlet",
        "want",
    )

    def __init__(
        self,
        *,
        outlet: Outlet,
        feed: Feed,
        read: ReadStep,
        cursor: int,
        want: Want,
        fence: Fence | None = None,
    ) -> None:
        self.outlet = outlet
        self.feed = feed
        self.cursor = cursor
        self.want = want
        self._read = read
        self.has_read = False
        """Something was read through this outlet before."""
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
        outlet, feed = self.outlet, self.feed
        if self.is_over or not outlet.is_writable:
            return
        if feed.is_gone:
            outlet.over(self)
        elif self.cursor == (end_seq := self.end_seq):
            if not self.is_live and end_seq >= self._began_seq:
                self.is_live = True
                outlet.tell_caught_up(self)
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
            self.outlet.fail(self, error)
            return
        if step is None:
            self.outlet.fetch(self)
        else:
            self.take(step)

    def take(self, step: Step) -> None:
        """Send what was read. Another page comes in another turn, so that nobody waits for the whole log."""
        outlet, end_seq = self.outlet, self.end_seq
        reached = step.to_seq == end_seq and end_seq >= self._began_seq
        news = not step.is_silent
        caught_up = reached and (news or not self.is_live)
        if news or caught_up:
            outlet.tell(self, step, caught_up=caught_up)
        self.cursor = step.to_seq
        self.has_read = True
        self.is_live = reached
        if step.to_seq != end_seq:
            outlet.hub.put(self)
        else:
            self._ask()


class Outlet(abc.ABC):
    """One client. Subclasses word what it is told; everything else about following is here.

    It is the live part of a response: `attach`, `writable` and `closed` come from the connection.
    """

    def __init__(self, hub: Hub, caps: StreamLimiter, principal: Principal, *, beat_s: float) -> None:
        self.hub = hub
        self.principal = principal
        self.followers: dict[str, Follower] = {}
        self.beat_s = beat_s
        self.sent_s = 0.0
        self._caps = caps
        self._writer: StreamWriter | None = None
        self._fetching: asyncio.Task[None] | None = None

    # ---- the connection ------------------------------------------------------------------------------

    def attach(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._caps.enter(self.principal)
        self.hub.enter(self)
        self.begin()

    def writable(self) -> None:
        for follower in self.followers.values():
            if not follower.is_live or follower.cursor != follower.end_seq or follower.feed.is_gone:
                self.hub.put(follower)

    def closed(self) -> None:
        """The client has left, or was sent away."""
        if self._writer is None:
            return
        self._writer = None
        if self._fetching is not None:
            self._fetching.cancel()
        self.left()
        self._caps.leave(self.principal)
        self.hub.leave(self)

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    @property
    def is_writable(self) -> bool:
        return self._writer is not None and self._writer.is_writable

    def send(self, data: bytes) -> None:
        if self._writer is not None:
            self.sent_s = self.hub.now_s
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

    def fetch(self, follower: Follower) -> None:
        """Read the next page of this follower from wherever it is; one at a time for each client."""
        if self._fetching is None:
            self._fetching = asyncio.get_running_loop().create_task(self._fetch(follower))

    async def _fetch(self, follower: Follower) -> None:
        from_seq = follower.cursor
        try:
            page = await follower.feed.page(from_seq, follower.want, until_seq=follower.until_seq)
        except TopicNotFound:
            page = None
        except PenstockError as error:
            page = None
            if not follower.is_over:
                self.fail(follower, error)
        finally:
            self._fetching = None
        if page is not None and not follower.is_over and follower.cursor == from_seq:
            follower.take(Step(page, from_seq))
        self.writable()

    # ---- what subclasses say -------------------------------------------------------------------------

    def tell_put_off(self, topics: list[str]) -> None:  # noqa: B027 - there may be no word for it
        """Records of these topics wait until the server is pressed less."""

    @abc.abstractmethod
    def begin(self) -> None:
        """The connection is open."""

    def left(self) -> None:  # noqa: B027 - most have nothing to remember
        """The connection is closed; the followers are still there to be looked at."""

    @abc.abstractmethod
    def tell(self, follower: Follower, step: Step, *, caught_up: bool) -> None:
        """A gap, records, or both; and that this was all."""

    @abc.abstractmethod
    def tell_caught_up(self, follower: Follower) -> None:
        """There is nothing, or nothing more, to read."""

    @abc.abstractmethod
    def over(self, follower: Follower) -> None:
        """The topic is gone."""

    @abc.abstractmethod
    def fail(self, follower: Follower, error: PenstockError) -> None:
        """The next record cannot be read."""

    @abc.abstractmethod
    def beat(self) -> None:
        """Nothing was sent for a whole interval."""

    @abc.abstractmethod
    def shut_down(self) -> None:
        """Say that the server leaves, and end."""
