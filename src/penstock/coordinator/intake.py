"""The way in: named channels with a place in the queue for each write, merged fairly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from penstock.clock import Clock
from penstock.coordinator.errors import Backpressure, WriteTimeout
from penstock.coordinator.handle import WriteHandle
from penstock.coordinator.instruments import Instruments
from penstock.coordinator.watermarks import Failure, Watermarks
from penstock.errors import ConfigError

__all__ = ["Channel", "Intake"]

W = TypeVar("W")


class Channel(Generic[W]):
    """One queue of writes, first in, first out, with its own capacity.

    `WriteCoordinator.channel` makes them.
    """

    def __init__(self, name: str, capacity: int, intake: Intake[W]) -> None:
        self.name = name
        self.capacity = capacity
        self.paused = False
        self.taken = 0
        """Writes handed to the delta so far."""
        self._intake = intake
        self._queue: deque[tuple[W, WriteHandle]] = deque()
        self._granted = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        instruments = intake.instruments
        self._depth = instruments.queue_depth.labels(channel=name)
        self._sent = instruments.send_duration.labels(command="write", status="ok")

    @property
    def depth(self) -> int:
        """Writes that wait to be applied."""
        return len(self._queue)

    @property
    def entered(self) -> int:
        """Writes taken into the queue so far."""
        return self.taken + len(self._queue)

    def try_write(self, write: W) -> WriteHandle:
        """Queue `write` now.

        Raises `Backpressure` with the write if there is no room, `Shutdown`, `FlushError`.
        """
        began = self._intake.clock.monotonic()
        self._intake.check("write", began)
        if (reason := self._no_room()) is not None:
            self._intake.refused("backpressure", reason, began)
            raise Backpressure(f"channel {self.name!r} takes no write now: {_REASONS[reason]}", write)
        return self._enter(write, began)

    async def write(self, write: W, *, timeout: float | None = None) -> WriteHandle:
        """Queue `write`, when there is room. A call that is cancelled, or raises, has queued nothing.

        Raises `WriteTimeout` with the write after `timeout` seconds without room, `Shutdown`, `FlushError`.
        """
        began = self._intake.clock.monotonic()
        self._intake.check("write", began)
        if (reason := self._no_room()) is not None:
            self._intake.instruments.backpressure.inc(command="write", reason=reason)
            await self._wait_for_room(write, timeout, began)
        return self._enter(write, began)

    def pause(self) -> None:
        """Apply no more of this channel's writes.

        They stay queued, and producers feel it when the queue is full.
        """
        self.paused = True
        self._intake.changed()

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        self.paused = False
        self._intake.changed()

    def take(self, limit: int) -> list[tuple[W, WriteHandle]]:
        """Up to `limit` writes from the front."""
        queue = self._queue
        batch = [queue.popleft() for _ in range(min(limit, len(queue)))]
        self.taken += len(batch)
        self._depth.set(len(queue))
        return batch

    def admit(self) -> None:
        """Give the room there is to those who wait for it, in their order."""
        while self._waiters and self._has_room():
            waiter = self._waiters.popleft()
            if not waiter.done():
                # The place is theirs from now on, although they run only later: nobody may slip in before.
                self._granted += 1
                waiter.set_result(None)

    def turn_away(self) -> None:
        """Wake everybody who waits for room: they find out why there will be none."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._granted += 1
                waiter.set_result(None)

    def drop(self, failure: Failure) -> None:
        """Forget the queue and tell its writers."""
        while self._queue:
            self._queue.popleft()[1].fail(failure)
        self._depth.set(0)

    def _has_room(self) -> bool:
        return not self._intake.pressured and len(self._queue) + self._granted < self.capacity

    def _no_room(self) -> str | None:
        if self._intake.pressured:
            return "pending_size"
        full = len(self._queue) + self._granted >= self.capacity or self._waiters
        return "queue_full" if full else None

    def _enter(self, write: W, began: float) -> WriteHandle:
        handle = WriteHandle(self._intake.marks)
        self._queue.append((write, handle))
        self._sent.observe(self._intake.clock.monotonic() - began)
        self._intake.changed()
        return handle

    async def _wait_for_room(self, write: W, timeout: float | None, began: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            granted = await self._until_granted(waiter, timeout)
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise
        if not granted:
            self._give_up(waiter)
            self._intake.refused("timeout", None, began)
            raise WriteTimeout(f"channel {self.name!r} had no room for {timeout} s", write)
        self._granted -= 1
        self._intake.check("write", began)

    async def _until_granted(self, waiter: asyncio.Future[None], timeout: float | None) -> bool:
        if timeout is None:
            await waiter
            return True
        alarm = asyncio.ensure_future(self._intake.clock.sleep(timeout))
        try:
            await asyncio.wait((waiter, alarm), return_when=asyncio.FIRST_COMPLETED)
        finally:
            alarm.cancel()
        return waiter.done()

    def _give_up(self, waiter: asyncio.Future[None]) -> None:
        """Leave the line, or hand the place that was just granted to the next."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif waiter.done() and not waiter.cancelled():
            self._granted -= 1
            self.admit()


_REASONS: Mapping[str, str] = {
    "pending_size": "what is not flushed yet has reached its limit",
    "queue_full": "its queue is full",
}


class Intake(Generic[W]):
    """All channels, and what they have in common."""

    def __init__(
        self, *, marks: Watermarks, clock: Clock, instruments: Instruments, changed: Callable[[], None]
    ) -> None:
        self.marks = marks
        self.clock = clock
        self.instruments = instruments
        self.changed = changed
        self.pressured = False
        self._refusal: Failure | None = None
        self._channels: dict[str, Channel[W]] = {}
        self._turn = 0

    def __getitem__(self, name: str) -> Channel[W]:
        try:
            return self._channels[name]
        except KeyError:
            raise ConfigError(f"no channel is named {name!r}: there are {sorted(self._channels)}") from None

    def channel(self, name: str, capacity: int | None, *, otherwise: int = 1) -> Channel[W]:
        """The channel `name`, made on first use with this capacity, or `otherwise`. Raises `ConfigError`."""
        there = self._channels.get(name)
        if there is not None and capacity in (None, there.capacity):
            return there
        capacity = otherwise if capacity is None else capacity
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(f"the capacity of channel {name!r} must be at least 1, not {capacity!r}")
        if there is not None:
            raise ConfigError(f"channel {name!r} has the capacity {there.capacity}, not {capacity}")
        self._channels[name] = Channel(name, capacity, self)
        return self._channels[name]

    def take(self, limit: int, *, paused_too: bool = False) -> list[tuple[W, WriteHandle]]:
        """Up to `limit` writes: equal shares of the channels that have any, each channel in its order."""
        ready = [c for c in self._channels.values() if c.depth and (paused_too or not c.paused)]
        if len(ready) <= 1:
            return ready[0].take(limit) if ready else []
        # Whose turn is first moves on, so that a limit smaller than the number of channels is fair, too.
        self._turn = (self._turn + 1) % len(ready)
        share = max(1, limit // len(ready))
        batch: list[tuple[W, WriteHandle]] = []
        for channel in ready[self._turn :] + ready[: self._turn]:
            batch += channel.take(min(share, limit - len(batch)))
        return batch

    def ticket(self) -> dict[str, int]:
        """How far every channel must be drained to cover all that is queued now."""
        return {channel.name: channel.entered for channel in self._channels.values() if channel.depth}

    def reached(self, ticket: Mapping[str, int]) -> bool:
        """Whether everything under the ticket was taken, but for channels that are paused."""
        return all(
            self._channels[name].taken >= entered or self._channels[name].paused
            for name, entered in ticket.items()
        )

    @property
    def empty(self) -> bool:
        return not any(channel.depth for channel in self._channels.values())

    def admit(self) -> None:
        """Let waiting writers in, as far as there is room."""
        for channel in self._channels.values():
            channel.admit()

    def close(self, refusal: Failure) -> None:
        """Take no more writes. What is queued stays."""
        self._refusal = refusal
        for channel in self._channels.values():
            channel.turn_away()

    def drop(self, failure: Failure) -> None:
        """Take no more writes and forget what is queued."""
        self.close(failure)
        for channel in self._channels.values():
            channel.drop(failure)

    def check(self, command: str, began: float) -> None:
        """Raise if nothing is taken any more."""
        if self._refusal is not None:
            self.instruments.send_duration.observe(
                self.clock.monotonic() - began, command=command, status="closed"
            )
            raise self._refusal()

    def refused(self, status: str, reason: str | None, began: float) -> None:
        """Count a write that did not get in."""
        self.instruments.send_duration.observe(self.clock.monotonic() - began, command="write", status=status)
        if reason is not None:
            self.instruments.backpressure.inc(command="write", reason=reason)
