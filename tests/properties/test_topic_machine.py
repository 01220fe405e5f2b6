"""An engine with writes, reads, maintenance, restarts and power failures, against a naive model.

The model is a dictionary per topic. After every step the engine reports exactly what the model does. A stop
changes nothing. A power failure changes nothing in an fsync topic. In a disk topic it loses at most the end
of the writes since the last sync, and no sequence number is ever reused.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.unit.topics.engine_doubles import COLD, World, rec

from penstock.testing.disk import Survival
from penstock.topics import Durability, Predicate, RecordTooLarge, TopicConfig, TopicFull, TopicNotFound

NAMES = ["f", "d", "r"]
TAGS = [None, None, "a", "ab", "b"]
CONFIGS = {
    "f": st.builds(
        TopicConfig,
        durability=st.just(Durability.FSYNC),
        cap_records=st.sampled_from([0, 0, 3, 10]),
        cap_bytes=st.sampled_from([0, 0, 40]),
        ttl_ms=st.sampled_from([0, 0, 2000]),
    ),
    "d": st.builds(TopicConfig, durability=st.just(Durability.DISK), cap_records=st.sampled_from([0, 5])),
    "r": st.builds(
        TopicConfig,
        durability=st.just(Durability.FSYNC),
        discard=st.just("reject"),
        cap_records=st.sampled_from([2, 6, 0]),
    ),
}


@dataclass
class Kept:
    """One record of the model."""

    value: str
    tag: str | None
    ts_ms: int

    @property
    def size(self) -> int:
        return len(json.dumps(self.value))


@dataclass
class Evicted:
    """A record that a cap evicted: the last record written by then, and the previous floor."""

    record: Kept
    head: int
    floor: int


@dataclass
class Model:
    """The naive model of one topic."""

    config: TopicConfig
    head: int = 0
    live: dict[int, Kept] = field(default_factory=dict)
    cap_floor: int = 1
    ttl_floor: int = 1
    evicted: dict[int, Evicted] = field(default_factory=dict)
    """Evicted records whose eviction is not certainly durable yet."""

    @property
    def earliest(self) -> int:
        return min(self.live, default=self.head + 1)

    @property
    def bytes(self) -> int:
        return sum(kept.size for kept in self.live.values())

    def retain(self, now_ms: int) -> None:
        config = self.config
        while config.ttl_ms and self.live and now_ms - self.live[self.earliest].ts_ms > config.ttl_ms:
            self.ttl_floor = self.earliest + 1
            del self.live[self.earliest]
        while config.discard == "old" and (
            (config.cap_records and len(self.live) > config.cap_records)
            or (config.cap_bytes and self.bytes > config.cap_bytes)
        ):
            first = self.earliest
            self.evicted[first] = Evicted(self.live.pop(first), self.head, self.cap_floor)
            self.cap_floor = first + 1

    def lose_end(self, last_seq: int) -> None:
        """Lose the writes after `last_seq` in a power failure, and undo the evictions that each caused."""
        back = {seq: one for seq, one in sorted(self.evicted.items()) if one.head > last_seq}
        for one in list(back.values())[:1]:
            self.cap_floor = one.floor
        live = {seq: kept for seq, kept in self.live.items() if seq <= last_seq}
        self.live = {seq: one.record for seq, one in back.items() if seq <= last_seq} | live
        self.evicted.clear()

    def matching(self, predicate: Predicate | None, before_seq: int | None) -> list[int]:
        return [
            seq
            for seq, kept in self.live.items()
            if (before_seq is None or seq < before_seq)
            and (predicate is None or _matches(predicate, kept.tag))
        ]


def _matches(predicate: Predicate, tag: str | None) -> bool:
    if tag is None:
        return False
    return tag.startswith(predicate.value) if predicate.is_prefix else tag == predicate.value


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = World(
            wal_file_bytes=900,
            segment_max_events=5,
            hot_retain_segments=1,
            cold_dir=COLD,
            segment_max_age_ms=10_000,
            checkpoint_interval_ms=3000,
        )
        self.models: dict[str, Model] = {}
        self.number = 0

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(call)

    @property
    def engine(self) -> Any:
        return self.world.engine

    @property
    def now_ms(self) -> int:
        return self.world.clock.now_ms()

    @initialize(is_quick=st.booleans())
    def open(self, is_quick: bool) -> None:
        self.world.is_quick = is_quick
        self.run(self.world.open())

    def teardown(self) -> None:
        if hasattr(self.world, "engine"):
            self.run(self.world.engine.close())
        self.loop.close()

    # ---- what clients do -----------------------------------------------------------------------------

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def put(self, data: st.DataObject, name: str) -> None:
        config = data.draw(CONFIGS[name]).resolved(name)
        result = self.run(self.engine.put_topic(name, config))
        assert result.created == (name not in self.models)
        self.models.setdefault(name, Model(config)).config = config
        self.models[name].retain(self.now_ms)
        self.models[
            name
        ].evicted.clear()  # a change of the configuration is durable, including everything before it

    @rule(name=st.sampled_from(NAMES), tags=st.lists(st.sampled_from(TAGS), min_size=1, max_size=6))
    def write(self, name: str, tags: list[str | None]) -> None:
        self._write_together([(name, tags)])

    @rule(
        writes=st.lists(
            st.tuples(
                st.sampled_from(NAMES),
                st.lists(st.sampled_from([None, None, None, "a"]), min_size=1, max_size=3),
            ),
            min_size=2,
            max_size=5,
        )
    )
    def write_in_one_turn(self, writes: list[tuple[str, list[str | None]]]) -> None:
        self._write_together(writes)

    def _write_together(self, writes: list[tuple[str, list[str | None]]]) -> None:
        self.number += 1
        named = [
            (name, [(f"{self.number}.{place}.{n}", tag) for n, tag in enumerate(tags)])
            for place, (name, tags) in enumerate(writes)
        ]

        async def all_at_once() -> list[Any]:
            calls = [
                self.engine.write(name, [rec(value, tag=tag) for value, tag in records], create=False)
                for name, records in named
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

        for (name, records), outcome in zip(named, self.run(all_at_once()), strict=True):
            self._wrote(self.models.get(name), records, outcome)

    def _wrote(self, model: Model | None, records: list[tuple[str, str | None]], outcome: Any) -> None:
        """Check that writes of one turn end as if they ran one after the other."""
        if isinstance(outcome, TopicNotFound):
            assert model is None
            return
        assert model is not None
        cap = model.config.cap_records
        if isinstance(outcome, TopicFull):
            model.retain(self.now_ms)
            assert model.config.discard == "reject"
            assert len(model.live) + len(records) > cap
            return
        if isinstance(outcome, RecordTooLarge):
            assert 0 < cap < len(records)
            return
        assert (outcome.first_seq, outcome.count) == (model.head + 1, len(records))
        for value, tag in records:
            model.head += 1
            model.live[model.head] = Kept(value, tag, self.now_ms)
        model.retain(self.now_ms)

    @rule(
        name=st.sampled_from(NAMES),
        back=st.none() | st.integers(-1, 12),
        predicate=st.none()
        | st.builds(Predicate, value=st.sampled_from(["a", "ab", "b", ""]), is_prefix=st.booleans()),
    )
    def delete(self, name: str, back: int | None, predicate: Predicate | None) -> None:
        model = self.models.get(name)
        if model is None or (back is None and predicate is None):
            return
        model.retain(self.now_ms)
        before_seq = None if back is None else max(model.head - back, 0)
        wanted = model.matching(predicate, before_seq)
        result = self.run(self.engine.delete(name, before_seq=before_seq, match=predicate))
        for seq in wanted:
            del model.live[seq]
        model.evicted.clear()  # a deletion is durable, including everything before it
        assert (result.deleted, result.count, result.bytes) == (len(wanted), len(model.live), model.bytes)

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        assert self.run(self.engine.remove_topic(name)).deleted == (self.models.pop(name, None) is not None)

    # ---- what happens by itself ----------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 300, 1500, 4000]))
    def time_passes(self, ms: int) -> None:
        self.run(self.world.clock.advance(ms / 1000))

    @rule()
    def checkpoint(self) -> None:
        self.run(self.engine.checkpoint())

    @rule()
    def everything_becomes_durable(self) -> None:
        self.world.committers.tend()

    @rule(shards=st.sampled_from([1, 1, 2, 3]))
    def restart(self, shards: int) -> None:
        self.run(self.world.restart(wal_shards=shards))
        assert self.engine.problems == []

    @rule(shards=st.sampled_from([1, 1, 2, 3]))
    def the_process_is_killed(self, shards: int) -> None:
        self.run(self.world.kill(wal_shards=shards))
        self._adopt(power_cut=False)

    @rule(seed=st.integers(0, 10**6), survival=st.sampled_from([Survival.NOTHING, Survival.RANDOM]))
    def the_power_goes(self, seed: int, survival: Survival) -> None:
        self.run(self.world.crash(survival, rng=random.Random(seed)))
        self._adopt(power_cut=True)

    def _adopt(self, *, power_cut: bool) -> None:
        """Adopt the engine's state: the disk class skips reserved numbers, and may have lost the last
        writes."""
        assert self.engine.problems == []
        model = self.models.get("d")
        if model is None:
            return
        state = self.engine.state("d")
        assert state.head_seq >= model.head, "the head went back: sequences would be used twice"
        if power_cut:
            there = [record.seq for record in self.run(self.engine.diff("d", limit=1000)).records()]
            if there != list(model.live):
                model.lose_end(max(there, default=0))
            model.evicted.clear()
            assert there == list(model.live), "only an end may be lost, with the evictions it caused"
        model.head = state.head_seq
        model.retain(self.now_ms)

    # ---- what must hold ------------------------------------------------------------------------------

    @invariant()
    def the_engine_tells_what_the_model_does(self) -> None:
        if not hasattr(self.world, "engine"):
            return
        states = {state.topic: state for state in self.engine.topics()[0]}
        assert sorted(states) == sorted(self.models)
        for name, model in self.models.items():
            model.retain(self.now_ms)
            state = states[name]
            assert (state.head_seq, state.earliest_seq) == (model.head, model.earliest), name
            assert (state.count, state.bytes, state.config) == (len(model.live), model.bytes, model.config)

    @invariant()
    def readers_get_every_live_record_and_the_right_tombstone(self) -> None:
        for name, model in self.models.items():
            model.retain(self.now_ms)
            page = self.run(self.engine.diff(name, limit=1000, include_tags=True))
            shown = {one.seq: (json.loads(bytes(one.data)), one.tag) for one in page.records()}
            assert shown == {seq: (kept.value, kept.tag) for seq, kept in model.live.items()}, name
            floor = max(model.cap_floor, model.ttl_floor)
            assert (page.tombstone is None) == (floor == 1), name
            if page.tombstone is not None:
                both = model.cap_floor > 1 and model.ttl_floor > 1
                reason = "mixed" if both else "cap" if model.cap_floor > 1 else "ttl"
                assert (page.tombstone.gap_to, page.tombstone.reason) == (floor - 1, reason), name
            assert (page.next_from_seq, page.caught_up) == (model.head, True)


EngineMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase
