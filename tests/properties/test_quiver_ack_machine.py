"""Subscribers, acks and deletion against a plain model, with power failures as one of the rules (I9).

The model is the set of resolved (subscriber, segment, bundle) triples. The store must always agree with it.
After a power failure it holds all synced acks and none that were never made.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.quiver.ack_doubles import Core

from penstock.quiver.delivery.leases import Lease
from penstock.quiver.model import BundleRef
from penstock.quiver.offsets.log import OffsetLogSettings
from penstock.quiver.offsets.records import Outcome
from penstock.testing.disk import Survival

pytestmark = pytest.mark.timeout(120)

NAMES = st.sampled_from(["a", "b", "c"])
BUNDLES = st.integers(min_value=1, max_value=10)


class AckMachine(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.core = Core(settings=OffsetLogSettings(flush_interval_s=0)).open()
        self.said: set[tuple[str, int, int]] = set()
        self.kept: set[tuple[str, int, int]] = set()
        self.known: set[str] = set()
        self.first: dict[str, int] = {}
        self.removed: set[int] = set()
        self.highest = 0
        self.claims: list[Lease] = []
        self.marks: dict[str, int] = {}

    def pending(self) -> list[tuple[str, int, int]]:
        return [
            (name, info.seq, bundle)
            for name in sorted(self.known)
            for info in self.core.offsets.infos()
            if info.seq >= self.first[name]
            for bundle in range(info.bundle_count)
            if (name, info.seq, bundle) not in self.said
        ]

    @rule(bundles=BUNDLES, skip=st.sampled_from([1, 1, 1, 3]))
    def add(self, bundles: int, skip: int) -> None:
        self.highest = max(self.highest, self.core.offsets.state.next_segment_seq - 1) + skip
        self.core.add(self.highest, bundles)
        if skip > 1:
            self.sync()

    @rule(name=NAMES, start=st.sampled_from(["earliest", "latest"]))
    def register(self, name: str, start: str) -> None:
        if name not in self.known:
            self.said = {said for said in self.said if said[0] != name}
            self.kept = {kept for kept in self.kept if kept[0] != name}
            self.marks.pop(name, None)
            hwm = self.core.offsets.register(name, start).hwm
            seqs = [info.seq for info in self.core.offsets.infos()]
            self.first[name] = hwm + 1 if start == "latest" else min(seqs, default=hwm + 1)
            self.known.add(name)
        self.core.offsets.activate(name)
        self.sync()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.core.deliveries.unregister(name)
        self.known.discard(name)
        self.claims = [claim for claim in self.claims if claim.subscriber != name]

    @rule(data=st.data(), outcome=st.sampled_from(list(Outcome)))
    def resolve(self, data: st.DataObject, outcome: Outcome) -> None:
        pending = self.pending()
        if pending:
            name, seq, bundle = data.draw(st.sampled_from(pending))
            assert self.core.offsets.resolve(name, BundleRef(seq, bundle), outcome)
            if outcome.resolves:
                self.said.add((name, seq, bundle))

    @rule(data=st.data())
    def ack_segment(self, data: st.DataObject) -> None:
        pending = self.pending()
        if pending:
            name, seq, _ = data.draw(st.sampled_from(pending))
            assert self.core.deliveries.ack_segment(name, seq)
            self.say_all(name, seq)

    def say_all(self, name: str, seq: int) -> None:
        self.said |= {(name, seq, bundle) for bundle in range(self.core.infos[seq].bundle_count)}

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        claim = self.core.deliveries.next(name)
        held = {(old.subscriber, old.ref.segment_seq, old.ref.bundle) for old in self.claims}
        expected = [ref for ref in self.pending() if ref[0] == name and ref not in held]
        if claim is None:
            assert expected == []
        else:
            assert (name, claim.ref.segment_seq, claim.ref.bundle) in expected
            self.claims.append(claim)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), answer=st.sampled_from(["ack", "defer", "reject"]))
    def answer(self, data: st.DataObject, answer: str) -> None:
        claim = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        key = (claim.subscriber, claim.ref.segment_seq, claim.ref.bundle)
        if answer == "defer":
            self.core.deliveries.defer(claim, 0)
        elif getattr(self.core.deliveries, answer)(claim):
            assert claim.subscriber in self.known
            self.said.add(key)
        else:
            assert key in self.said, "only a segment that was resolved as a whole takes a claim away"

    @rule(data=st.data(), outcome=st.sampled_from([Outcome.DROPPED, Outcome.EXPIRED]))
    def drop(self, data: st.DataObject, outcome: Outcome) -> None:
        infos = self.core.offsets.infos()
        if not infos:
            return
        seq = data.draw(st.sampled_from([info.seq for info in infos]))
        live = seq in self.core.deliveries.claimed_segments()
        dropped = self.core.deliveries.drop(seq, outcome, reason="size")
        assert (dropped is None) == live
        if dropped is not None:
            for name in [name for name in self.known if seq >= self.first[name]]:
                self.say_all(name, seq)

    @rule()
    def sync(self) -> None:
        self.core.offsets.sync()
        self.kept = set(self.said)
        self.marks = {name: self.core.offsets.subscriber(name).hwm for name in self.known}

    @rule()
    def checkpoint(self) -> None:
        self.core.offsets.checkpoint()
        self.kept = set(self.said)
        self.marks = {name: self.core.offsets.subscriber(name).hwm for name in self.known}

    @rule()
    def remove(self) -> None:
        gone = self.core.remove()
        self.removed |= set(gone)
        self.kept = set(self.said)

    @rule(survival=st.sampled_from(list(Survival)), seed=st.integers(0, 1000))
    def crash(self, survival: Survival, seed: int) -> None:
        self.core = self.core.crashed(self.core.disk.crash(survival, random.Random(seed)))
        self.claims = []
        offsets = self.core.offsets
        assert self.core.found.missing == ()
        assert offsets.damage == ()
        assert set(offsets.names()) == self.known
        assert offsets.state.next_segment_seq > max(self.removed, default=0)
        actual = set()
        for name in self.known:
            assert offsets.subscriber(name).hwm >= self.marks.get(name, 0)
            for info in self.core.infos.values():
                for bundle in range(info.bundle_count):
                    if (
                        offsets.state.entry(name).progress.is_resolved(BundleRef(info.seq, bundle))
                        and info.seq >= self.first[name]
                    ):
                        actual.add((name, info.seq, bundle))
            self.core.offsets.activate(name)
        alive = {said for said in self.kept if said[0] in self.known and said[1] in self.core.infos}
        assert alive <= actual <= self.said
        self.said = actual | {said for said in self.said if said[1] not in self.core.infos}
        self.kept = set(self.said)

    @invariant()
    def marks_and_outstanding_agree_with_the_model(self) -> None:
        offsets = self.core.offsets
        waiting = self.pending()
        for name in self.known:
            open_segments = [seq for who, seq, _ in waiting if who == name]
            expected = min(open_segments) - 1 if open_segments else None
            hwm = offsets.subscriber(name).hwm
            assert (
                hwm == expected
                if expected is not None
                else hwm >= max((info.seq for info in offsets.infos()), default=0)
            )
        for info in offsets.infos():
            assert offsets.state.outstanding(info.seq) == len(
                {who for who, seq, _ in waiting if seq == info.seq}
            )

    @invariant()
    def nothing_is_deletable_that_somebody_needs(self) -> None:
        needed = {seq for _, seq, _ in self.pending()}
        assert not needed & set(self.core.offsets.finished())
        assert not needed & set(self.core.offsets.removable())


AckMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAckMachine = AckMachine.TestCase
