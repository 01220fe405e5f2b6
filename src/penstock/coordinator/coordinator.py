"""One task between many writers and one database.

It orders writes, applies them to a delta, and queues deltas for flushing. Each turn of the loop handles (1)
flush commands, (2) one batch of queued writes, (3) the timers. Flushes are recorded as they finish. Nothing
else changes the delta, so no lock is needed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator.config import CoordinatorConfig, SyncMode
from penstock.coordinator.errors import EpochNotAssigned, FlushError, Shutdown, flush_error
from penstock.coordinator.events import (
    Broadcast,
    FlushEvent,
    FlushReason,
    FreezeEvent,
    Frozen,
    Subscription,
    View,
)
from penstock.coordinator.flush import Delta, Flusher, FlushQueue
from penstock.coordinator.queues import BatchSizer, Channel, WriteQueues
from penstock.coordinator.watermarks import (
    Durability,
    EpochRange,
    FlushHandle,
    Instruments,
    Watermarks,
    WriteHandle,
)
from penstock.metrics import Registry

DEFAULT_CHANNEL = "default"
_EARLY_S = 1e-6
"""Tolerance for timers: a timer this close to its deadline is due, because float rounding may wake it
early."""

W = TypeVar("W")
D = TypeVar("D", bound=Delta[Any, Any])  # the delta chooses the types of writes and images
S = TypeVar("S")


@dataclass(slots=True, kw_only=True)
class _Command:
    """A requested flush: due when the ticket is drained, or when the epoch is assigned."""

    handle: FlushHandle
    ticket: dict[str, int]
    epoch: int | None
    durable: bool


class WriteCoordinator(Generic[W, D, S]):
    """Coordinator that assigns each write an epoch, starting at 1, applies it and flushes it.

    It runs between `start` and `close`, which `async with` calls. Use it from one event loop; only `view()`
    and `watermark()` may be called from other threads. A failed flush stops it permanently: see `FlushError`.
    """

    def __init__(
        self,
        delta: Callable[[], D],
        flusher: Flusher[D, S],
        *,
        image: object,
        snapshot: S,
        config: CoordinatorConfig | None = None,
        clock: Clock = SYSTEM_CLOCK,
        registry: Registry | None = None,
        product: str = "",
        size_of: Callable[[W], int] | None = None,
        on_failure: Callable[[FlushError], None] | None = None,
    ) -> None:
        """Create the coordinator for a storage whose current content is `image` and `snapshot`.

        `delta` creates empty deltas. `product` is a prefix for the names of the metrics. `size_of` returns
        the size of a write, in the unit of the threshold; the size counts towards `max_pending_size` from
        acceptance until the delta's own estimate includes it. Without `size_of`, only the number of queued
        writes is bounded. `on_failure` is called once, with the error that stopped the coordinator.
        """
        self._config = config = config or CoordinatorConfig()
        self._clock = clock
        self._make_delta = delta
        self._instruments = Instruments(registry, product)
        self._marks = Watermarks()
        self._wake = asyncio.Event()
        self._queues: WriteQueues[W] = WriteQueues(
            marks=self._marks,
            clock=clock,
            instruments=self._instruments,
            changed=self._wake.set,
            pending_max=config.pending_max,
            size_of=size_of,
        )
        self._default = self._queues.channel(DEFAULT_CHANNEL, config.queue_capacity)
        self._flush_queue: FlushQueue[D, S] = FlushQueue(
            flusher,
            waiting_max=config.max_frozen_deltas,
            clock=clock,
            instruments=self._instruments,
            flushed=self._flushed,
            synced=self._synced,
        )
        self._broadcast: Broadcast[D, S] = Broadcast(
            capacity=config.subscription_capacity, size_max=config.pending_max
        )
        self._batch_sizer = BatchSizer(
            writes_max=config.batch_writes_max, seconds_max=config.batch_time_max_s
        )
        self._flush_interval_s = config.flush_interval_s
        self._sync_interval_s = config.sync_interval_s
        self._eager = config.flush_interval_s == 0
        self._threshold = config.flush_threshold
        self._pending_max = config.pending_max
        self._delta = self._new_delta(image)
        self._delta_size = self._delta.estimate_size()
        self._assigned = 0
        self._frozen_to = 0
        self._view: View[D, S] = View(
            snapshot=snapshot, epoch=0, last_flushed=None, frozen=(), current=self._delta
        )
        self._commands: list[_Command] = []
        self._flush_due_s = self._sync_due_s = math.inf
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._drained = False
        self._stopped = asyncio.Event()
        self._error: Exception | None = None
        self._on_failure = on_failure

    # For writers

    def write(self, write: W, *, timeout: float | None = None) -> Coroutine[None, None, WriteHandle]:
        """Queue `write` in the default channel as soon as there is room. See `Channel.write`."""
        return self._default.write(write, timeout=timeout)

    def try_write(self, write: W) -> WriteHandle:
        """Queue `write` in the default channel without waiting. See `Channel.try_write`."""
        return self._default.try_write(write)

    def channel(self, name: str, *, capacity: int | None = None) -> Channel[W]:
        """Return the channel `name`, which has its own queue. Create it on first use.

        All channels share one order of epochs and the time of the loop.
        """
        return self._queues.channel(name, capacity, default=self._config.queue_capacity)

    def pause(self, name: str) -> None:
        """Stop applying the writes of one channel. Raises `ConfigError` if no channel has that name."""
        self._queues[name].pause()

    def resume(self, name: str) -> None:
        """Resume applying the writes of one channel."""
        self._queues[name].resume()

    async def flush(
        self, epoch: int | None = None, *, durable: bool = False, strict: bool = False
    ) -> FlushHandle:
        """Flush every write whose `write` returned before this call, except in paused channels.

        With `epoch`, flush everything up to it. Do nothing if that is already flushed. If no write has that
        epoch yet, the flush waits for one, or raises `EpochNotAssigned` with `strict`. With `durable`, sync
        the storage afterwards. The call never waits for room; wait on the handle. Raises `Shutdown` and
        `FlushError`.
        """
        began = self._clock.monotonic()
        self._queues.check("flush", began)
        if strict and epoch is not None and epoch > self._assigned:
            raise EpochNotAssigned(f"no write has epoch {epoch} yet: the last one is {self._assigned}")
        handle = FlushHandle(self._marks)
        level = Durability.DURABLE if durable else Durability.FLUSHED
        if epoch is not None and epoch <= self._marks[level]:
            handle.settle(epoch)
        else:
            ticket = self._queues.ticket() if epoch is None else {}
            self._commands.append(_Command(handle=handle, ticket=ticket, epoch=epoch, durable=durable))
            self._wake.set()
        self._instruments.send_duration.observe(self._clock.monotonic() - began, command="flush", status="ok")
        return handle

    def _raise(self, level: Durability, epoch: int) -> None:
        self._marks.raise_to(level, epoch)
        self._instruments.marks[level].set(epoch)

    # For readers

    def view(self) -> View[D, S]:
        """Return the database at this instant. Costs one attribute access."""
        return self._view

    def watermark(self, level: Durability) -> int:
        """Return the last epoch that has reached `level`; 0 before the first."""
        return self._marks[level]

    @property
    def storage_wait_s(self) -> float:
        """How long the flush or sync in progress has taken so far, in seconds; 0 if there is none."""
        return self._flush_queue.wait_s

    def subscribe(self, *, freezes: bool = False) -> Subscription[D, S]:
        """Subscribe to every flush from now on and, with `freezes`, to every freeze.

        The first event follows directly after `subscription.view`.
        """
        return self._broadcast.subscribe(self._view, freezes=freezes)

    # Lifecycle

    def start(self) -> None:
        """Start processing queued writes. Call it once, inside the event loop."""
        if self._tasks:
            return
        self._set_timers()
        for work, name in (
            (self._run, "loop"),
            (self._flush_queue.run, "flushes"),
            (self._flush_queue.run_syncs, "syncs"),
            (self._tick, "timer"),
        ):
            task = asyncio.get_running_loop().create_task(work(), name=f"write-coordinator-{name}")
            task.add_done_callback(self._task_done)
            self._tasks.append(task)

    async def close(self) -> None:
        """Refuse new writes, apply queued ones (including those of paused channels), flush, sync, and stop.

        May be called again. Raises the `FlushError` that stopped the coordinator, if any, or `Shutdown` if it
        was aborted in the meantime.
        """
        in_time = not self._stopped.is_set()
        if not self._closing and self._error is None:
            self._closing = True
            self._queues.close(_shut_down)
            self.start()
            self._wake.set()
        await self._stopped.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if isinstance(self._error, FlushError) or (in_time and not self._drained):
            raise self._new_error()

    async def abort(self) -> None:
        """Stop immediately, as a crash would.

        Nothing more is flushed, and every waiter gets `Shutdown`.
        """
        self._stop(Shutdown("the coordinator was aborted"))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> WriteCoordinator[W, D, S]:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # The loop

    async def _run(self) -> None:
        while not self._finished():
            self._wake.clear()
            if self._turn():
                await asyncio.sleep(0)
            else:
                await self._wake.wait()
        self._drained = True

    def _turn(self) -> bool:
        """Do all the work that is possible now, but apply at most one batch of writes.

        Return True if more work may be possible.
        """
        frozen_to = self._frozen_to
        self._serve_commands()
        applied = self._apply_batch()
        if self._delta_full():
            self._try_freeze(FlushReason.SIZE_THRESHOLD)
        if self._eager and self._flush_queue.idle and self._has_gathered():
            self._try_freeze(FlushReason.INTERVAL)
        self._check_timers()
        if self._closing and self._queues.empty:
            self._wind_up()
        self._admit_writers()
        return applied or self._frozen_to > frozen_to

    def _has_gathered(self) -> bool:
        """Return whether the delta holds all writes of a burst, such as those that follow a sync."""
        return self._queues.drained or self._assigned - self._frozen_to >= self._config.batch_writes_max

    def _apply_batch(self) -> bool:
        if self._over_limit() or self._delta_full():
            return False
        limit = self._batch_sizer.limit(self._threshold - self._delta_size)
        batch = self._queues.take(limit, paused_too=self._closing)
        if not batch:
            return False
        began = self._clock.monotonic()
        first, self._assigned = self._assigned + 1, self._assigned + len(batch)
        results = self._results(batch)
        for epoch, ((_, handle), result) in enumerate(zip(batch, results, strict=True), first):
            if isinstance(result, Exception):
                handle.refuse(epoch, result)
            else:
                handle.accept(epoch, result)
        self._raise(Durability.APPLIED, self._assigned)
        self._note_batch(len(batch), self._clock.monotonic() - began)
        return True

    def _results(self, batch: list[tuple[W, WriteHandle]]) -> Sequence[object]:
        """Apply the batch to the delta.

        An error stops the coordinator, because the delta's state is unknown then.
        """
        try:
            results = self._delta.apply([write for write, _ in batch])
            if len(results) != len(batch):
                raise AssertionError(f"the delta returned {len(results)} results for {len(batch)} writes")
        except Exception as error:
            self._stop(flush_error("applying writes", error))
            for _, handle in batch:
                handle.fail(self._new_error)
            raise
        return results

    def _note_batch(self, writes: int, seconds: float) -> None:
        before, self._delta_size = self._delta_size, self._delta.estimate_size()
        self._batch_sizer.learn(writes, seconds, self._delta_size - before)
        self._instruments.apply_duration.observe(seconds)
        self._instruments.estimated_bytes.set(self._delta_size)

    def _serve_commands(self) -> None:
        # Serve commands in order, because of their syncs. A command that waits for a later epoch does not
        # delay the others. Remove each one as it is served: if a freeze raises, settled commands must not
        # fail.
        place = 0
        while place < len(self._commands):
            if self._serve(self._commands[place]):
                del self._commands[place]
            else:
                place += 1

    def _serve(self, command: _Command) -> bool:
        """Start the command's flush if it is due and another frozen delta fits."""
        if not self._queues.reached(command.ticket) or (command.epoch or 0) > self._assigned:
            return False
        upto = self._assigned if command.epoch is None else command.epoch
        if upto > self._frozen_to and not self._try_freeze(FlushReason.EXPLICIT):
            return False
        if command.durable:
            self._flush_queue.add_sync()
        command.handle.settle(upto)
        return True

    def _try_freeze(self, reason: FlushReason) -> bool:
        """Freeze the delta if it holds any write. Return False if the flush queue is full."""
        if self._assigned == self._frozen_to:
            return True
        if not self._flush_queue.has_room:
            return False
        began = self._clock.monotonic()
        ended, size = self._delta, self._delta_size
        self._delta = self._new_delta(ended.freeze())
        self._delta_size = self._delta.estimate_size()
        covered = EpochRange(self._frozen_to, self._assigned)
        self._frozen_to = self._assigned
        now = self._clock.monotonic()
        self._flush_queue.add(
            Frozen(delta=ended, epoch_range=covered, size=size, reason=reason, frozen_at_s=now)
        )
        if self._config.sync_mode is SyncMode.EVERY_FLUSH:
            self._flush_queue.add_sync()
        if not self._eager:
            self._flush_due_s = now + self._flush_interval_s
        self._show(self._view.snapshot, self._view.epoch, self._view.last_flushed)
        self._broadcast.send(FreezeEvent(view=self._view, epoch_range=covered))
        self._instruments.freeze_duration.observe(now - began)
        self._instruments.flushes.inc(reason=reason.value)
        self._instruments.estimated_bytes.set(self._delta_size)
        return True

    def _new_delta(self, image: object) -> D:
        delta = self._make_delta()
        delta.init(image)
        return delta

    def _show(self, snapshot: S, epoch: int, last_flushed: D | None) -> None:
        self._view = View(
            snapshot=snapshot,
            epoch=epoch,
            last_flushed=last_flushed,
            frozen=tuple(reversed(self._flush_queue.pending)),
            current=self._delta,
        )

    def _check_timers(self) -> None:
        now = self._clock.monotonic() + _EARLY_S
        if now >= self._flush_due_s:
            self._flush_due_s = now + self._flush_interval_s
            self._try_freeze(FlushReason.INTERVAL)
        if now >= self._sync_due_s:
            self._sync_due_s = now + self._sync_interval_s
            if self._frozen_to > self._marks[Durability.DURABLE]:
                self._flush_queue.add_sync()

    def _set_timers(self) -> None:
        """Set the timers. Eager coordinators have no flush timer. Only interval mode has a sync timer."""
        now = self._clock.monotonic()
        by_time = self._config.sync_mode is SyncMode.INTERVAL
        self._flush_due_s = math.inf if self._eager else now + self._flush_interval_s
        self._sync_due_s = now + self._sync_interval_s if by_time else math.inf

    async def _tick(self) -> None:
        """Wake the loop when a timer is due.

        Flushes reset their timer, so the deadline is read again after each wait.
        """
        while (due_s := min(self._flush_due_s, self._sync_due_s)) < math.inf:
            left_s = due_s - self._clock.monotonic()
            if left_s <= _EARLY_S:
                self._wake.set()
            await self._clock.sleep(max(left_s, 0.0))
        await self._stopped.wait()

    # Limits

    # Both limits apply only while a flush would free room. A delta that starts large, because it counts its
    # image, must not stop all writes.

    def _delta_full(self) -> bool:
        return self._delta_size >= self._threshold and self._assigned > self._frozen_to

    def _over_limit(self) -> bool:
        # Queued writes do not count, because applying them shortens the queue.
        return self._pending_size() >= self._pending_max

    def _pending_size(self) -> int:
        if self._assigned == self._marks[Durability.FLUSHED]:
            return 0
        return self._delta_size + sum(frozen.size for frozen in self._flush_queue.pending)

    def _admit_writers(self) -> None:
        """Update the pending size and admit the waiting writers that fit."""
        self._queues.pending_size = self._pending_size()
        self._queues.admit()

    # Callbacks of the flush queue

    def _flushed(self, frozen: Frozen[D], snapshot: S) -> None:
        # The view comes first: a waiter that is woken by the watermark, or reads it, must find the new
        # snapshot.
        upto = frozen.epoch_range.hi
        self._show(snapshot, upto, frozen.delta)
        self._raise(Durability.FLUSHED, upto)
        self._broadcast.send(
            FlushEvent(
                snapshot=snapshot, delta=frozen.delta, epoch_range=frozen.epoch_range, size=frozen.size
            )
        )
        self._admit_writers()
        self._wake.set()

    def _synced(self, upto: int) -> None:
        self._raise(Durability.DURABLE, max(upto, self._marks[Durability.DURABLE]))
        self._wake.set()

    # Shutdown

    def _wind_up(self) -> None:
        """Flush the rest after the queues are empty, then sync."""
        if not self._try_freeze(FlushReason.SHUTDOWN):
            return
        if self._flush_queue.idle and self._marks[Durability.DURABLE] < self._assigned:
            self._flush_queue.add_sync()

    def _finished(self) -> bool:
        return (
            self._closing
            and self._queues.empty
            and self._flush_queue.idle
            and self._marks[Durability.DURABLE] == self._assigned
            and not any(self._can_be_served(command) for command in self._commands)
        )

    def _can_be_served(self, command: _Command) -> bool:
        return command.epoch is None or command.epoch <= self._assigned

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """Stop the coordinator when one of its tasks finishes or fails."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._stop(error if isinstance(error, FlushError) else flush_error("coordinating writes", error))
        else:
            self._stop(Shutdown("the coordinator is closed"))

    def _stop(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        failed = isinstance(error, FlushError)
        self._queues.drop(self._new_error)
        for command in self._commands:
            command.handle.fail(self._new_error)
        self._commands = []
        self._marks.fail(self._new_error)
        self._broadcast.end(self._new_error if failed else None)
        for task in self._tasks:
            task.cancel()
        self._stopped.set()
        if isinstance(error, FlushError) and self._on_failure is not None:
            self._on_failure(error)

    def _new_error(self) -> Exception:
        """Return a copy of the error that stopped the coordinator, with its own traceback."""
        error = self._error
        assert error is not None
        copy = type(error)(*error.args)
        copy.__cause__ = error.__cause__
        return copy


def _shut_down() -> Exception:
    return Shutdown("the coordinator is closed")
