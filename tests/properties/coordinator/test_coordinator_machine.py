"""Writers, flushes, stalls, failing storage calls and crashes in any order, on a manual clock.

After every step: applied >= flushed >= durable, no mark ever decreases, and a word that was reported DURABLE
survives any crash (I11, I1). The stored words are a prefix of the accepted words, in order (I2, I3). When the
coordinator has stopped, no caller is still waiting (I14).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.coordinator.doubles import SIZE, Follower, Words, World, marks, turns, words_in

from penstock.coordinator import (
    ApplyError,
    Backpressure,
    CoordinatorError,
    Durability,
    FlushError,
    Shutdown,
    SyncMode,
    WriteHandle,
)
from penstock.testing.memory_storage import MemoryStorage, StorageFault

T = TypeVar("T")
APPLIED, FLUSHED, DURABLE = Durability


@dataclass
class Call:
    """One write, and a wait for each level."""

    word: str
    handle: WriteHandle
    waits: dict[Durability, asyncio.Task[None]] = field(default_factory=dict)

    def reached(self, level: Durability) -> bool:
        wait = self.waits[level]
        return wait.done() and wait.exception() is None

    def error(self, level: Durability) -> BaseException | None:
        wait = self.waits[level]
        return wait.exception() if wait.done() else None


class CoordinatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.count = 0
        self.stored: list[str] = []
        """The content of the storage when this coordinator was opened."""
        self.calls: list[Call] = []
        self.marks = (0, 0, 0)

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 10))

    @initialize(
        threshold=st.integers(1, 6),
        frozen=st.integers(0, 2),
        mode=st.sampled_from(["explicit", "every_flush", "interval"]),
    )
    def begin(self, threshold: int, frozen: int, mode: SyncMode) -> None:
        self.config = {
            "flush_size_threshold": threshold * SIZE,
            "max_frozen_deltas": frozen,
            "sync_mode": mode,
            "queue_capacity": 8,
            "batch_writes_max": 3,
            "flush_interval": "10s",
            "subscription_capacity": 2,
        }
        self.world = World()
        self.run(self._open(self.world.storage))

    async def _open(self, storage: MemoryStorage) -> None:
        self.storage = storage
        self.coordinator: Words = await self.world.open(storage, **self.config)
        self.stored = await words_in(storage)
        self.calls, self.marks = [], (0, 0, 0)
        self.follower = await Follower.open(self.coordinator)

    # Actions

    @rule(
        bad=st.lists(st.booleans(), min_size=1, max_size=5),
        channel=st.sampled_from(["default", "default", "other"]),
        then=st.integers(0, 20),
    )
    def write(self, bad: list[bool], channel: str, then: int) -> None:
        async def call() -> None:
            for one in bad:
                self.count += 1
                self._write(f"{'bad' if one else 'w'}{self.count}", channel)
            await turns(then)

        self.run(call())

    def _write(self, word: str, channel: str) -> None:
        try:
            handle = self.coordinator.channel(channel).try_write(word)
        except (Backpressure, FlushError):
            return
        made = Call(word, handle)
        made.waits = {level: self.loop.create_task(handle.wait(level)) for level in Durability}
        self.calls.append(made)

    @rule(count=st.integers(1, 40))
    def let_them_run(self, count: int) -> None:
        self.run(turns(count))

    @rule(durable=st.booleans(), then=st.integers(0, 20))
    def flush(self, durable: bool, then: int) -> None:
        async def call() -> None:
            try:
                await self.coordinator.flush(durable=durable)
            except FlushError:
                pass
            await turns(then)

        self.run(call())

    @rule(seconds=st.sampled_from([1.0, 10.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(self.world.clock.advance(seconds))

    @rule(paused=st.booleans())
    def pause_or_resume(self, paused: bool) -> None:
        channel = self.coordinator.channel("other")
        channel.pause() if paused else channel.resume()

    @rule(call=st.sampled_from(["apply", "apply", "snapshot", "flush"]), held=st.booleans())
    def stall(self, call: str, held: bool) -> None:
        gate = self.storage.gate(call)
        gate.clear() if held else gate.set()

    @precondition(lambda self: self.coordinator._error is None)
    @rule(after=st.integers(1, 12), fault=st.sampled_from(StorageFault))
    def storage_will_fail(self, after: int, fault: StorageFault) -> None:
        self.storage.fail_at(len(self.storage.calls) + after, fault)

    @rule(steps=st.integers(1, 3))
    def a_reader_follows(self, steps: int) -> None:
        async def follow() -> None:
            for _ in range(steps):
                try:
                    await asyncio.wait_for(self.follower.step(), 0.001)
                except (TimeoutError, FlushError):
                    break
            assert self.follower.words == self.stored + self.accepted(upto=self.follower.epoch)

        self.run(follow())

    @rule(kept=st.integers(0, 4))
    def crash(self, kept: int) -> None:
        async def again() -> None:
            await self.coordinator.abort()
            await turns()
            self.check_no_call_waits()
            before = self.stored, self.accepted(), self.acknowledged()
            await self._open(self.world.disk.open(kept=kept))
            self.check_what_is_left(*before)

        self.run(again())

    @rule()
    def close_and_open(self) -> None:
        async def again() -> None:
            for call in ("apply", "snapshot", "flush"):
                self.storage.gate(call).set()
            try:
                await self.coordinator.close()
                closed = True
            except FlushError:
                closed = False
            await turns()
            self.check_no_call_waits()
            before = self.stored, self.accepted(), self.acknowledged()
            if closed:
                assert before[2] == [call.word for call in self.calls if not call.word.startswith("bad")]
            await self._open(self.world.disk.open())
            self.check_what_is_left(*before)
            if closed:
                assert self.stored == before[0] + before[1]

        self.run(again())

    # Invariants

    @invariant()
    def marks_are_ordered_and_never_go_back(self) -> None:
        now = marks(self.coordinator)
        assert now[0] >= now[1] >= now[2]
        assert all(new >= old for new, old in zip(now, self.marks, strict=True))
        self.marks = now

    @invariant()
    def a_level_is_reached_only_after_its_mark(self) -> None:
        for call in self.calls:
            for level in Durability:
                if call.reached(level):
                    assert self.run(call.handle.epoch()) <= self.coordinator.watermark(level)

    @invariant()
    def what_is_durable_would_survive_now(self) -> None:
        disk = {
            entry.value.decode() for key, entry in self.world.disk.persisted.items() if key.startswith(b"w")
        }
        assert set(self.acknowledged()) <= disk

    @invariant()
    def the_view_shows_what_is_flushed(self) -> None:
        view = self.coordinator.view()
        shown = self.run(words_in(view.snapshot))
        assert shown == self.stored + self.accepted(upto=view.epoch)
        flushed = [call.word for call in self.calls if call.reached(FLUSHED)]
        assert set(flushed) <= set(shown)

    def accepted(self, upto: int | None = None) -> list[str]:
        """Return the words that the delta applied, in the order of their epochs, up to one of these."""
        taken = [call for call in self.calls if call.handle.sequenced and call.error(APPLIED) is None]
        epochs = {}
        for call in taken:
            try:
                epochs[self.loop_epoch(call)] = call.word
            except CoordinatorError:
                continue
        return [epochs[epoch] for epoch in sorted(epochs) if upto is None or epoch <= upto]

    def loop_epoch(self, call: Call) -> int:
        failure, epoch = call.handle._failure, call.handle._epoch
        if failure is not None:
            raise failure()
        assert epoch is not None
        return epoch

    def acknowledged(self) -> list[str]:
        return [call.word for call in self.calls if call.reached(DURABLE)]

    def check_no_call_waits(self) -> None:
        for call in self.calls:
            for level in Durability:
                assert call.waits[level].done(), f"{call.word} still waits for {level.name}"
                error = call.error(level)
                expected = ApplyError if call.word.startswith("bad") else (FlushError, Shutdown)
                assert error is None or isinstance(error, (expected, FlushError, Shutdown))

    def check_what_is_left(self, base: list[str], accepted: list[str], acknowledged: list[str]) -> None:
        everything = base + accepted
        assert self.stored == everything[: len(self.stored)], "not a prefix of what was accepted"
        assert set(base) | set(acknowledged) <= set(self.stored), "something durable is gone"

    def teardown(self) -> None:
        if hasattr(self, "coordinator"):
            self.run(self.world.close())
            self.run(turns())
            self.check_no_call_waits()
        self.loop.close()


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
