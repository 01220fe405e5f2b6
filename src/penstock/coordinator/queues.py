"""Write queues: named channels with bounded queues, merged fairly."""

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
    """Adaptive batch size that keeps turns short and limits how far a delta exceeds the flush threshold."""

    def __init__(self, *, writes_max: int, seconds_max: float) -> None:
        self._writes_max = writes_max
        self._seconds_max = seconds_max
        self._writes = writes_max
        self._mean_size = 0.0

    def limit(self, size_left: int) -> int:
        """Return the number of writes to take when the delta may grow by another `size_left`."""
        if self._mean_size <= 0:
            return self._writes
        return max(1, min(self._writes, int(size_left / self._mean_size) + 1))

    def learn(self, writes: int, seconds: float, growth: int) -> None:
        """Adapt to the duration and growth of the last batch."""
        self._mean_size = max(0, growth) / writes
        if seconds > self._seconds_max:
            self._writes = max(1, min(self._writes, writes) // 2)
        elif writes >= self._writes:
            self._writes = min(self._writes_max, self._writes * 2)


W = TypeVar("W")


class Channel(Generic[W]):
    """A first-in-first-out queue of writes with its own capacity. Created by `WriteCoordinator.channel`."""

    def __init__(self, name: str, capacity: int, intake: WriteQueues[W]) -> None:
        self.name = name
        self.capacity = capacity
        self.paused = False
        self.taken = 0
        """Number of writes taken off the queue so far."""
        self._queues = intake
        self._queue: deque[tuple[W, WriteHandle]] = deque()
        self._granted = 0
        self.size = 0
        """Size of queued and admitted writes, as measured by the coordinator's `size_of`."""
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()
        instruments = intake.instruments
        self._depth = instruments.queue_depth.labels(channel=name)
        self._sent = instruments.send_duration.labels(command="write", status="ok")
        self._unreported = 0
        """Number of writes accepted without waiting that are not in the metrics yet."""

    @property
    def depth(self) -> int:
        """Number of writes that wait to be applied."""
        return len(self._queue)

    @property
    def entered(self) -> int:
        """Number of writes queued so far, including those already taken."""
        return self.taken + len(self._queue)

    def try_write(self, write: W) -> WriteHandle:
        """Queue `write` without waiting.

        Raises `Backpressure` with the write if there is no room, `Shutdown`, `FlushError`.
        """
        reason = self._no_room()
        if self._queues.refusal is not None or reason is not None:
            began = self._queues.clock.monotonic()
            self._queues.check("write", began)
            assert reason is not None
            self._queues.refused("backpressure", reason, began)
            raise Backpressure(f"channel {self.name!r} takes no write now: {_REASONS[reason]}", write)
        return self._enter(write)

    async def write(self, write: W, *, timeout: float | None = None) -> WriteHandle:
        """Queue `write` as soon as there is room. A call that is cancelled or raises queues nothing.

        Raises `WriteTimeout` with the write after `timeout` seconds without room, `Shutdown`, `FlushError`.
        """
        queues, reason = self._queues, self._no_room()
        if reason is None and queues.refusal is None:
            return self._enter(write)
        began = queues.clock.monotonic()
        queues.check("write", began)
        assert reason is not None
        queues.instruments.backpressure.inc(command="write", reason=reason)
        await self._wait_for_room(write, timeout, began)
        self._unreported -= 1
        self._sent.observe(queues.clock.monotonic() - began)
        return self._enter(write)

    def pause(self) -> None:
        """Stop applying this channel's writes. They stay queued, and writers wait once the queue is full."""
        if not self.paused:
            self.paused = True
            self._queues.waiting_size -= self.size
        self._queues.changed()

    def resume(self) -> None:
        """Resume applying the writes that `pause` stopped."""
        if self.paused:
            self.paused = False
            self._queues.waiting_size += self.size
        self._queues.changed()

    def take(self, limit: int) -> list[tuple[W, WriteHandle]]:
        """Remove and return up to `limit` writes from the front."""
        queue = self._queue
        batch = [queue.popleft() for _ in range(min(limit, len(queue)))]
        self.taken += len(batch)
        if self.size:
            self._add_size(-sum(handle.size for _, handle in batch))
        self._report()
        return batch

    def admit(self) -> None:
        """Grant free places to waiting writers, in order."""
        while self._waiters and self._has_room():
            self._grant(*self._waiters.popleft())

    def turn_away(self) -> None:
        """Wake all waiting writers; each raises the refusal."""
        while self._waiters:
            self._grant(*self._waiters.popleft())

    def drop(self, failure: Failure) -> None:
        """Empty the queue and fail its writes."""
        while self._queue:
            handle = self._queue.popleft()[1]
            self._add_size(-handle.size)
            handle.fail(failure)
        self._report()

    def _report(self) -> None:
        """Update the metrics for all writes since the last call. One update per write would be too slow."""
        self._depth.set(len(self._queue))
        if self._unreported:
            self._sent.observe(0.0, self._unreported)
            self._unreported = 0

    def _grant(self, waiter: asyncio.Future[None], size: int) -> None:
        # Reserve the place now, because the writer runs later and no other write may take it.
        if not waiter.done():
            self._granted += 1
            self._add_size(size)
            waiter.set_result(None)

    def _add_size(self, size: int) -> None:
        self.size += size
        if not self.paused:
            self._queues.waiting_size += size

    def _has_room(self) -> bool:
        return not self._queues.over_limit(self) and len(self._queue) + self._granted < self.capacity

    def _no_room(self) -> str | None:
        if self._queues.over_limit(self):
            return "pending_size"
        full = len(self._queue) + self._granted >= self.capacity or self._waiters
        return "queue_full" if full else None

    def _enter(self, write: W) -> WriteHandle:
        handle = WriteHandle(self._queues.marks)
        if self._queues.size_of is not None:
            handle.size = self._queues.size_of(write)
            self._add_size(handle.size)
        self._queue.append((write, handle))
        self._unreported += 1
        self._queues.changed()
        return handle

    async def _wait_for_room(self, write: W, timeout: float | None, began: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        size = 0 if self._queues.size_of is None else self._queues.size_of(write)
        self._waiters.append((waiter, size))
        try:
            granted = await self._until_granted(waiter, timeout)
        except asyncio.CancelledError:
            self._give_up(waiter, size)
            raise
        if not granted:
            self._give_up(waiter, size)
            self._queues.refused("timeout", None, began)
            raise WriteTimeout(f"channel {self.name!r} had no room for {timeout} s", write)
        self._granted -= 1
        self._add_size(-size)
        self._queues.check("write", began)

    async def _until_granted(self, waiter: asyncio.Future[None], timeout: float | None) -> bool:
        if timeout is None:
            await waiter
            return True
        alarm = asyncio.ensure_future(self._queues.clock.sleep(timeout))
        try:
            await asyncio.wait((waiter, alarm), return_when=asyncio.FIRST_COMPLETED)
        finally:
            alarm.cancel()
        return waiter.done()

    def _give_up(self, waiter: asyncio.Future[None], size: int) -> None:
        """Remove the waiter, or pass a place that it was just granted to the next waiter."""
        if (waiter, size) in self._waiters:
            self._waiters.remove((waiter, size))
        elif waiter.done() and not waiter.cancelled():
            self._granted -= 1
            self._add_size(-size)
            self.admit()


_REASONS: Mapping[str, str] = {
    "pending_size": "unflushed data has reached its limit",
    "queue_full": "its queue is full",
}


class WriteQueues(Generic[W]):
    """All channels and their shared limits."""

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
        """Size of the unflushed deltas, set by the coordinator each turn."""
        self.waiting_size = 0
        """Size of the queued writes of all channels that are not paused."""
        self._pending_max = pending_max
        self.refusal: Failure | None = None
        self._channels: dict[str, Channel[W]] = {}
        self._turn = 0

    def __getitem__(self, name: str) -> Channel[W]:
        try:
            return self._channels[name]
        except KeyError:
            raise ConfigError(f"no channel is named {name!r}: there are {sorted(self._channels)}") from None

    def channel(self, name: str, capacity: int | None, *, default: int = 1) -> Channel[W]:
        """Return the channel `name`. Create it on first use with `capacity` or `default`. Raises
        `ConfigError`."""
        there = self._channels.get(name)
        if there is not None and capacity in (None, there.capacity):
            return there
        capacity = default if capacity is None else capacity
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(f"the capacity of channel {name!r} must be at least 1, not {capacity!r}")
        if there is not None:
            raise ConfigError(f"channel {name!r} has the capacity {there.capacity}, not {capacity}")
        self._channels[name] = Channel(name, capacity, self)
        return self._channels[name]

    def take(self, limit: int, *, paused_too: bool = False) -> list[tuple[W, WriteHandle]]:
        """Take up to `limit` writes: an equal share from each channel that has any, in order within each
        channel."""
        ready = [c for c in self._channels.values() if c.depth and (paused_too or not c.paused)]
        if len(ready) <= 1:
            return ready[0].take(limit) if ready else []
        # Rotate the first channel, so that a limit below the number of channels is also fair.
        self._turn = (self._turn + 1) % len(ready)
        share = max(1, limit // len(ready))
        batch: list[tuple[W, WriteHandle]] = []
        for channel in ready[self._turn :] + ready[: self._turn]:
            batch += channel.take(min(share, limit - len(batch)))
        return batch

    def over_limit(self, channel: Channel[W]) -> bool:
        """Return whether the pending size has reached its limit for `channel`.

        The queue of a paused channel counts only for that channel. Otherwise the others would wait until it
        resumes.
        """
        own = channel.size if channel.paused else 0
        return self.pending_size + self.waiting_size + own >= self._pending_max

    def ticket(self) -> dict[str, int]:
        """Return, for each channel, the number of writes to take to cover all writes queued now."""
        return {channel.name: channel.entered for channel in self._channels.values() if channel.depth}

    def reached(self, ticket: Mapping[str, int]) -> bool:
        """Return whether all writes of the ticket have been taken, ignoring paused channels."""
        return all(
            self._channels[name].taken >= entered or self._channels[name].paused
            for name, entered in ticket.items()
        )

    @property
    def drained(self) -> bool:
        """True if no channel has a write that may be taken now."""
        return not any(channel.depth and not channel.paused for channel in self._channels.values())

    @property
    def empty(self) -> bool:
        return not any(channel.depth for channel in self._channels.values())

    def admit(self) -> None:
        """Admit as many waiting writers as there is room for."""
        for channel in self._channels.values():
            channel.admit()

    def close(self, refusal: Failure) -> None:
        """Refuse new writes. Queued ones stay."""
        self.refusal = refusal
        for channel in self._channels.values():
            channel.turn_away()

    def drop(self, failure: Failure) -> None:
        """Refuse new writes and fail the queued ones."""
        self.close(failure)
        for channel in self._channels.values():
            channel.drop(failure)

    def check(self, command: str, began: float) -> None:
        """Raise the refusal if writes are refused."""
        if self.refusal is not None:
            self.instruments.send_duration.observe(
                self.clock.monotonic() - began, command=command, status="closed"
            )
            raise self.refusal()

    def refused(self, status: str, reason: str | None, began: float) -> None:
        """Count a refused write."""
        self.instruments.send_duration.observe(self.clock.monotonic() - began, command="write", status=status)
        if reason is not None:
            self.instruments.backpressure.inc(command="write", reason=reason)
