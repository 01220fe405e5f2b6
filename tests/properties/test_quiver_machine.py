"""Quiver under random work, faults, crashes and restarts, compared with a set of numbers."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.unit.quiver.engine_doubles import StepClock, config, open_quiver, rows, take_all, words

from penstock.errors import PenstockError
from penstock.quiver.engine import Quiver
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival

pytestmark = pytest.mark.properties

NAMES = ("lake", "log")
SLOTS = st.lists(st.sampled_from([50, 51, 52]), min_size=1, max_size=3, unique=True)
FAULTS = (DiskFault.FAIL_ONCE, DiskFault.SHORT_WRITE, DiskFault.NO_SPACE)


class QuiverMachine(RuleBasedStateMachine):
    """`accepted` are batches by their first number; `answered` are those that a subscriber acknowledged.

    A crash may lose an acknowledgement and may keep a refused batch. Both are allowed.
    """

    settings_of_quiver = config(wal={"max_size": 30_000}, retention={"size_cap": 80_000})

    @initialize()
    def start(self) -> None:
        self.clock = StepClock()
        self.disk = FakeDisk(clock=self.clock)
        self.accepted: set[int] = set()
        self.attempted: dict[int, list[int]] = {}
        self.answered: dict[str, set[int]] = {name: set() for name in NAMES}
        self.number = 0
        self.quiver = self.open()

    def open(self) -> Quiver:
        quiver = open_quiver(self.disk, self.clock, self.settings_of_quiver)
        for name in NAMES:
            quiver.register(name)
            quiver.activate(name)
        return quiver

    @rule(slots=SLOTS, count=st.integers(1, 30))
    def ingest(self, slots: list[int], count: int) -> None:
        batches: dict[int, pa.RecordBatch] = {}
        for slot in slots:
            self.number += 100
            batches[slot] = (words if slot == 52 else rows)(self.number, count)
            self.attempted[self.number] = batches[slot].column("n").to_pylist()
        try:
            self.quiver.ingest(batches)
        except PenstockError:
            return
        self.accepted.update(batch.column("n")[0].as_py() for batch in batches.values())

    @rule(seconds=st.sampled_from([0.0, 0.2, 6.0, 61.0]))
    def maintain(self, seconds: float) -> None:
        self.clock.step(seconds)
        try:
            self.quiver.maintain()
        except PenstockError:
            return

    @rule()
    def flush(self) -> None:
        try:
            self.quiver.flush()
        except PenstockError:
            return

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 6), taken=st.booleans())
    def take(self, name: str, count: int, taken: bool) -> None:
        for _ in range(count):
            bundle = self.quiver.next_bundle(name)
            if bundle is None:
                return
            first = bundle.batch.column("n")[0].as_py()
            assert bundle.batch.column("n").to_pylist() == self.attempted[first]
            if not taken:
                bundle.defer(0)
                return
            if bundle.ack():
                assert first not in self.answered[name], "what was answered comes again without a crash"
                self.answered[name].add(first)

    @rule(calls=st.integers(0, 25), kind=st.sampled_from(FAULTS))
    def fail(self, calls: int, kind: DiskFault) -> None:
        self.disk.plan = PlannedFault(call=len(self.disk.calls) + calls, kind=kind)

    @precondition(lambda self: self.disk.plan is not None)
    @rule()
    def mend(self) -> None:
        self.disk.plan = None

    @rule(survival=st.sampled_from(list(Survival)), seed=st.integers(0, 99))
    def crash(self, survival: Survival, seed: int) -> None:
        self.disk = self.disk.crash(survival, random.Random(seed))
        self.restart()

    @rule(calls=st.integers(0, 60), seed=st.integers(0, 99))
    def crash_in_a_start(self, calls: int, seed: int) -> None:
        self.disk = self.disk.crash(Survival.RANDOM, random.Random(seed))
        self.disk.plan = PlannedFault(call=len(self.disk.calls) + calls, kind=DiskFault.CRASH_AFTER)
        try:
            self.open()
        except PowerCut:
            pass
        self.disk = self.disk.crash(Survival.RANDOM, random.Random(seed + 1))
        self.restart()

    @rule()
    def close(self) -> None:
        self.disk.plan = None
        self.quiver.close()
        self.quiver = self.open()

    def restart(self) -> None:
        self.quiver = self.open()
        # Acks that were not durable are lost, so redelivered batches may be acknowledged again.
        for name in NAMES:
            given = {values[0] for _, values in take_all(self.quiver, name)}
            self.answered[name] -= given

    def teardown(self) -> None:
        if not hasattr(self, "quiver"):
            return
        self.disk.plan = None
        self.clock.step(100)
        self.quiver.flush()
        for name in NAMES:
            firsts = [values[0] for _, values in take_all(self.quiver, name)]
            assert len(firsts) == len(set(firsts)), f"{name} was given something twice"
            assert not self.accepted - self.answered[name] - set(firsts), f"{name} lost something"
        assert self.quiver.stats().damage == ()


TestQuiver = QuiverMachine.TestCase
TestQuiver.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
