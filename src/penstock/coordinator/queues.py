"""The way in: named channels with a place in the queue for each write, merged fairly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from penstock.clock import Clock
from penstock.coordinator.errors import Backpressure, WriteTimeout
from penstock.coordinator.watermarks import Failure, Instruments, Watermarks, WriteHandle
from penstock.errors import ConfigError


class BatchSizer:
    """Learns a batch size that keeps a turn short and does not shoot far over the flush threshold."""

    def __init__(self, *, writes_max: int, seconds_max: float) -> None:
        self._writes_max = writes_max
        self._seconds_max = seconds_max
        self._writes = writes_max
        self._mean_size = 0.0

    def limit(self, size_left: int) -> int:
        """Writes to take when the delta may still grow by `size_left`."""
        if self._mean_size <= 0:
            return self._writes
        return max(1, min(self._writes, int(size_left / self._mean_size) + 1))

    def learn(self, writes: int, seconds: float, growth: int) -> None:
        """Note what the last batch took."""
        self._mean_size = max(0, growth) / writes
        if seconds > self._seconds_max:
            self._writes = max(1, min(self._writes, writes) // 2)
        elif writes >= self._writes:
            self._writes = min(self._writes_max, self._writes * 2)


W = TypeVar("W")


class Channel(Generic[W]):
    """One queue of writes, first in, first out, with its own capacity.

    `WriteCoordinator.channel` makes them.
    """

    def __init__(self, name: str, capacity: int, intake: WriteQueues[W]) -> None:
        self.name = name
        self.capacity = capacity
        self.paused = False
        self.taken = 0
        """Writes handed to the delta so far."""
        self._intake = intake
        self._queue: deque[tuple[W, WriteHandle]] = deque()
        self._granted = 0
        self.size = 0
        """What is queued and what was granted a place, by the coordinator's `size_of`."""
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()
        instruments = intake.instruments
        self._depth = instruments.queue_depth.labels(channel=name)
        self._sent = instruments.send_duration.labels(command="write", status="ok")
        self._prompt = 0
        """Writes that were taken in at once, and are not in the metrics yet."""

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
        reason = self._no_room()
        if self._intake.refusal is not None or reason is not None:
            began = self._intake.clock.monotonic()
            self._intake.check("write", began)
            assert reason is not None
            self._intake.refused("backpressure", reason, began)
            raise Backpressure(f"channel {self.name!r} takes no write now: {_REASONS[reason]}", write)
        return self._enter(write)

    async def write(self, write: W, *, timeout: float | None = None) -> WriteHandle:
        """Queue `write`, when there is room. A call that is cancelled, or raises, has queued nothing.

        Raises `WriteTimeout` with the write after `timeout` seconds without room, `Shutdown`, `FlushError`.
        """
        intake, reason = self._intake, self._no_room()
        if reason is None and intake.refusal is None:
            return self._enter(write)
        began = intake.clock.monotonic()
        intake.check("write", began)
        assert reason is not None
        intake.instruments.backpressure.inc(command="write", reason=reason)
        await self._wait_for_room(write, timeout, began)
        self._prompt -= 1
        self._sent.observe(intake.clock.monotonic() - began)
        return self._enter(write)

    def pause(self) -> None:
        """Apply no more of this channel's writes.

        They stay queued, and producers feel it when the queue is full.
        """
        if not self.paused:
            self.paused = True
            self._intake.waiting_size -= self.size
        self._intake.changed()

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        if self.paused:
            self.paused = False
            self._intake.waiting_size += self.size
        self._intake.changed()

    def take(self, limit: int) -> list[tuple[W, WriteHandle]]:
        """Up to `limit` writes from the front."""
        queue = self._queue
        batch = [queue.popleft() for _ in range(min(limit, len(queue)))]
        self.taken += len(batch)
        if self.size:
            self._hold(-sum(handle.size for _, handle in batch))
        self._tell()
        return batch

    def admit(self) -> None:
        """Give the room there is to those who wait for it, in their order."""
        while self._waiters and self._has_room():
            self._grant(*self._waiters.popleft())

    def turn_away(self) -> None:
        """Wake everybody who waits for room: they find out why there will be none."""
        while self._waiters:
            self._grant(*self._waiters.popleft())

    def drop(self, failure: Failure) -> None:
        """Forget the queue and tell its writers."""
        while self._queue:
            handle = self._queue.popleft()[1]
            self._hold(-handle.size)
            handle.fail(failure)
        self._tell()

    def _tell(self) -> None:
        """To the metrics, for all writes since the last time: one by one it would cost as much as a write."""
        self._depth.set(len(self._queue))
        if self._prompt:
            self._sent.observe(0.0, self._prompt)
            self._prompt = 0

    def _grant(self, waiter: asyncio.Future[None], size: int) -> None:
        # The place is theirs from now on, although they run only later: nobody may slip in before.
        if not waiter.done():
            self._granted += 1
            self._hold(size)
            waiter.set_result(None)

    def _hold(self, size: int) -> None:
        self.size += size
        if not self.paused:
            self._intake.waiting_size += size

    def _has_room(self) -> bool:
        return not self._intake.over_limit(self) and len(self._queue) + self._granted < self.capacity

    def _no_room(self) -> str | None:
        if self._intake.over_limit(self):
            return "pending_size"
        full = len(self._queue) + self._granted >= self.capacity or self._waiters
        return "queue_full" if full else None

    def _enter(self, write: W) -> WriteHandle:
        handle = WriteHandle(self._intake.marks)
        if self._intake.size_of is not None:
            handle.size = self._intake.size_of(write)
            self._hold(handle.size)
        self._queue.append((write, handle))
        self._prompt += 1
        self._intake.changed()
        return handle

    async def _wait_for_room(self, write: W, timeout: float | None, began: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        size = 0 if self._intake.size_of is None else self._intake.size_of(write)
        self._waiters.append((waiter, size))
        try:
            granted = await self._until_granted(waiter, timeout)
        except asyncio.CancelledError:
            self._give_up(waiter, size)
            raise
        if not granted:
            self._give_up(waiter, size)
            self._intake.refused("timeout", None, began)
            raise WriteTimeout(f"channel {self.name!r} had no room for {timeout} s", write)
        self._granted -= 1
        self._hold(-size)
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

    def _give_up(self, waiter: asyncio.Future[None], size: int) -> None:
        """Leave the line, or hand the place that was just granted to the next."""
        if (waiter, size) in self._waiters:
            self._waiters.remove((waiter, size))
        elif waiter.done() and not waiter.cancelled():
            self._granted -= 1
            self._hold(-size)
            self.admit()


_REASONS: Mapping[str, str] = {
    "pending_size": "what is not flushed yet has reached its limit",
    "queue_full": "its queue is full",
}


class WriteQueues(Generic[W]):
    """All channels, and what they have in common."""

    def __init__(
        self,
        *,
        marks: Watermarks,
        clock: Clock,
        instruments: Instruments,
        changed: Callable[[], None],
        pending_max: int,
        size_of: Callable[[W], int] | None = None,
    ) -> None:
        self.marks = marks
        self.clock = clock
        self.instruments = instruments
        self.changed = changed
        self.size_of = size_of
        self.pending_size = 0
        """Deltas that are not flushed, as the coordinator saw them last."""
        self.waiting_size = 0
        """What all channels that are not paused hold before it is applied."""
        self._pending_max = pending_max
        self.refusal: Failure | None = None
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

    def over_limit(self, channel: Channel[W]) -> bool:
        """Whether so much is pending that `channel` takes nothing more.

        What a paused channel holds stops only itself: the others would wait until it is resumed.
        """
        own = channel.size if channel.paused else 0
        return self.pending_size + self.waiting_size + own >= self._pending_max

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
    def drained(self) -> bool:
        """Whether nothing is queued that may be taken now."""
        return not any(channel.depth and not channel.paused for channel in self._channels.values())

    @property
    def empty(self) -> bool:
        return not any(channel.depth for channel in self._channels.values())

    def admit(self) -> None:
        """Let waiting writers in, as far as there is room."""
        for channel in self._channels.values():
            channel.admit()

    def close(self, refusal: Failure) -> None:
        """Take no more writes. What is queued stays."""
        self.refusal = refusal
        for channel in self._channels.values():
            channel.turn_away()

    def drop(self, failure: Failure) -> None:
        """Take no more writes and forget what is queued."""
        self.close(failure)
        for channel in self._channels.values():
            channel.drop(failure)

    def check(self, command: str, began: float) -> None:
        """Raise if nothing is taken any more."""
        if self.refusal is not None:
            self.instruments.send_duration.observe(
                self.clock.monotonic() - began, command=command, status="closed"
            )
            raise self.refusal()

    def refused(self, status: str, reason: str | None, began: float) -> None:
        """Count a write that did not get in."""
        self.instruments.send_duration.observe(self.clock.monotonic() - began, command="write", status=status)
        if reason is not None:
            self.instruments.backpressure.inc(command="write", reason=reason)
