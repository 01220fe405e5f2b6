"""Topics joined by routers, with writes, reads, deletions, maintenance, restarts and power failures.

A record that was read at a destination keeps its number, as far as its durability class promises. No record
is duplicated or out of order, and no record that a source still has is missing. A crash is one of the rules.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.unit.topics.engine_doubles import World, settle
from tests.unit.topics.routers.router_notes import ROUTES, SOURCES, Notes

from penstock.testing.disk import Survival


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = World(
            wal_file_bytes=3000,
            wal_shards=2,
            segment_max_events=5,
            segment_max_age_ms=0,
            checkpoint_interval_ms=3000,
        )
        self.notes = Notes()

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(call)

    @initialize()
    def open(self) -> None:
        self.run(self.world.open())
        self.run(self.notes.make(self.world.engine))

    @rule(topic=st.sampled_from([*SOURCES, *SOURCES, *ROUTES]), count=st.integers(1, 3))
    def write(self, topic: str, count: int) -> None:
        self.run(self.notes.write(self.world.engine, topic, count))

    @rule(topics=st.lists(st.sampled_from([*SOURCES, *ROUTES]), min_size=2, max_size=5))
    def write_together(self, topics: list[str]) -> None:
        """Write records and copies in one commit."""

        async def together() -> None:
            self.world.committers.hold()
            writes = [asyncio.ensure_future(self.notes.write(self.world.engine, topic)) for topic in topics]
            await settle()
            self.world.committers.release()
            await asyncio.gather(*writes)

        self.run(together())

    @rule(dest=st.sampled_from(list(ROUTES)))
    def look(self, dest: str) -> None:
        self.run(self.notes.look(self.world.engine, dest))

    @rule(topic=st.sampled_from(["f", "d", "f2f", "f2d", "cap2f"]), back=st.integers(0, 3))
    def delete(self, topic: str, back: int) -> None:
        head = self.world.engine.state(topic).head_seq
        self.run(self.notes.delete(self.world.engine, topic, max(head - back, 1)))

    @rule(seconds=st.sampled_from([0.05, 0.3, 4.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass: the tick copies, floors are written, and a checkpoint may be due."""
        self.run(self.world.clock.advance(seconds))
        self.run(settle())

    @rule()
    def checkpoint(self) -> None:
        self.run(self.world.engine.checkpoint())

    @rule()
    def sync(self) -> None:
        self.world.committers.tend()

    @rule()
    def restart(self) -> None:
        engine = self.run(self.world.restart())
        self.run(self.notes.check(engine, power_cut=False))

    @rule()
    def kill(self) -> None:
        engine = self.run(self.world.kill())
        self.run(self.notes.check(engine, power_cut=False))

    @rule(survival=st.sampled_from([Survival.NOTHING, Survival.RANDOM]), seed=st.integers(0, 2**16))
    def cut_the_power(self, survival: Survival, seed: int) -> None:
        engine = self.run(self.world.crash(survival, rng=random.Random(seed)))
        self.run(self.notes.check(engine, power_cut=True))

    def teardown(self) -> None:
        if hasattr(self.world, "engine"):
            engine = self.run(self.world.kill())
            self.run(self.notes.check(engine, power_cut=False))
            self.run(engine.close())
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.run(settle())
        self.loop.close()


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
