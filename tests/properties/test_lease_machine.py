"""A job queue with work, maintenance, restarts and power failures, against a naive model (I10).

The model has an entry per live job. At all times, a job has at most one holder, only the current token has an
effect, no token is issued twice, and a job is in the queue, acked, or a dead letter. Leases survive a crash
if the queue persists them. Delivery counts survive a clean stop, and a crash as far as the last snapshot
recorded them. A work stream whose leases expired gets no jobs until it sends something. A closed stream holds
no jobs, even if it closes while jobs are assigned.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from tests.unit.topics.engine_doubles import COLD, World, rec, settle

from penstock.testing.disk import Survival
from penstock.topics import ClaimResult, Durability, TopicConfig, WorkStream

NODES = st.sampled_from(["a", "b"])


@dataclass
class Job:
    """One job of the model. It is held while `lease_id` is set, and delayed until `until_ms`."""

    deliveries: int = 0
    lease_id: str = ""
    node: str = ""
    until_ms: int = 0
    stream: Stream | None = None


@dataclass(eq=False)
class Stream:
    """One work stream of the model, and the leases that expired since it last sent something."""

    work: WorkStream
    node: str
    most: int
    lapsed: dict[int, str] = field(default_factory=dict)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = World(segment_max_events=7, wal_file_bytes=2048, hot_retain_segments=1, cold_dir=COLD)
        self.jobs: dict[int, Job] = {}
        self.head = 0
        self.tokens: list[tuple[int, str, str]] = []
        """Every lease ever issued: sequence number, node, token."""
        self.dead = 0
        self.config = TopicConfig()
        self.streams: list[Stream] = []
        self.snapshot: dict[int, int] = {}
        """Delivery counts that are certainly in a snapshot."""

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(call)

    @property
    def engine(self) -> Any:
        return self.world.engine

    @property
    def now_ms(self) -> int:
        return self.world.clock.now_ms()

    @initialize(
        leases_durable=st.booleans(),
        max_deliveries=st.sampled_from([0, 1, 2]),
        letters=st.sampled_from([Durability.DISK, Durability.FSYNC]),
        jitter_ms=st.sampled_from([0, 50]),
    )
    def open(self, leases_durable: bool, max_deliveries: int, letters: Durability, jitter_ms: int) -> None:
        self.run(self.world.open())
        self.config = TopicConfig(
            type="queue",
            durable=True,
            lease_ms=1000,
            leases_durable=leases_durable,
            max_deliveries=max_deliveries,
            dead_letter="dead",
            claim_jitter_ms=jitter_ms,
        )
        self.run(self.engine.put_topic("q", self.config))
        self.run(self.engine.put_topic("dead", TopicConfig(durability=letters)))

    def teardown(self) -> None:
        if hasattr(self.world, "engine"):
            self.run(self.world.engine.close())
        self.loop.close()

    def sweep(self) -> None:
        for seq, job in self.jobs.items():
            over = self.now_ms > job.until_ms if job.lease_id else self.now_ms >= job.until_ms
            if over:
                if job.stream is not None:
                    job.stream.lapsed[seq] = job.lease_id
                self._free(job)

    def _free(self, job: Job, until_ms: int = 0) -> None:
        job.lease_id, job.until_ms, job.stream = "", until_ms, None

    def ready(self) -> list[int]:
        self.sweep()
        return [seq for seq, job in self.jobs.items() if not job.lease_id and not job.until_ms]

    # ---- what clients do -----------------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def write(self, count: int) -> None:
        result = self.run(self.engine.write("q", [rec(n) for n in range(count)]))
        assert result.first_seq == self.head + 1
        for _ in range(count):
            self.head += 1
            self.jobs[self.head] = Job()

    @rule(node=NODES, most=st.integers(1, 4), lease_ms=st.sampled_from([None, 100, 3000]))
    def claim(self, node: str, most: int, lease_ms: int | None) -> None:
        (result,) = self._in_a_window([self.engine.claim("q", node, max=most, lease_ms=lease_ms)])
        assert [job.seq for job in result.jobs()] == self._dealt(most)
        self._handed_out(result, node, lease_ms)
        assert result.ready == len(self.ready())

    @precondition(lambda self: self.config.claim_jitter_ms)
    @rule(
        claimers=st.lists(
            st.tuples(NODES, st.integers(1, 3), st.sampled_from([None, 100, 3000])), min_size=2, max_size=4
        )
    )
    def a_cohort_claims(self, claimers: list[tuple[str, int, int | None]]) -> None:
        results = self._in_a_window(
            [self.engine.claim("q", node, max=most, lease_ms=lease_ms) for node, most, lease_ms in claimers]
        )
        dealt = [seq for result in results for seq in result.seqs]
        assert sorted(dealt) == self._dealt(sum(most for _, most, _ in claimers))
        for result, (node, most, lease_ms) in zip(results, claimers, strict=True):
            assert len(result.seqs) <= most
            self._handed_out(result, node, lease_ms)

    def _in_a_window(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Return the results of the claims after the batching window has passed."""

        async def gathered() -> list[Any]:
            tasks = [asyncio.ensure_future(call) for call in calls]
            await settle()
            if not all(task.done() for task in tasks):
                await self.world.clock.advance(self.config.claim_jitter_ms / 1000)
            return list(await asyncio.gather(*tasks))

        found: list[Any] = self.run(gathered())
        return found

    def _dealt(self, most: int) -> list[int]:
        """Return the jobs that a claim gets now. Jobs after their last delivery become dead letters."""
        expected: list[int] = []
        back = [seq for seq in self.ready() if self.jobs[seq].deliveries]
        fresh = [seq for seq in self.ready() if not self.jobs[seq].deliveries]
        for seq in [*back, *fresh]:
            if len(expected) == most:
                break
            if 0 < self.config.max_deliveries <= self.jobs[seq].deliveries:
                del self.jobs[seq]
                self.dead += 1
            else:
                expected.append(seq)
        return sorted(expected)

    def _handed_out(
        self, result: ClaimResult, node: str, lease_ms: int | None, stream: Stream | None = None
    ) -> None:
        given_out = {token for _, _, token in self.tokens}
        for given in result.jobs():
            job = self.jobs[given.seq]
            job.deliveries += 1
            job.lease_id, job.node, job.until_ms = given.lease_id, node, given.deadline_ms
            assert (given.deliveries, given.deadline_ms) == (job.deliveries, self.now_ms + (lease_ms or 1000))
            assert given.lease_id not in given_out, "a token was given out twice"
            job.stream = stream
            self.tokens.append((given.seq, node, given.lease_id))

    # ---- work streams --------------------------------------------------------------------------------

    @rule(node=NODES, most=st.integers(1, 3))
    def a_stream_opens(self, node: str, most: int) -> None:
        self.streams.append(Stream(self.run(self.engine.work("q", node, max=most)), node, most))

    def _held_by(self, stream: Stream) -> list[int]:
        return [seq for seq, job in self.jobs.items() if job.stream is stream]

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def a_stream_asks(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        self.sweep()
        free = stream.most - len(self._held_by(stream))
        is_asking = free > 0 and not stream.lapsed
        (result,) = self._in_a_window([stream.work.next(0)])
        self.sweep()
        expected = self._dealt(free) if is_asking and not stream.lapsed else []
        assert ([] if result is None else list(result.seqs)) == expected
        if result is not None:
            self._handed_out(result, stream.node, None, stream)
        assert stream.work.held == len(self._held_by(stream))

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), asks=st.booleans(), ms=st.sampled_from([0, 20, 50]))
    def a_stream_drops(self, data: st.DataObject, asks: bool, ms: int) -> None:
        """Close a stream, possibly while its claim waits. Jobs assigned to it are then never seen."""
        stream = data.draw(st.sampled_from(self.streams))
        self.streams.remove(stream)
        if asks and self.config.claim_jitter_ms:
            self.sweep()
            free = stream.most - len(self._held_by(stream))
            is_asking = free > 0 and not stream.lapsed
            waiting = self.loop.create_task(stream.work.next(0))
            self.run(settle())
            self.run(self.world.clock.advance(ms / 1000))
            self.sweep()
            if is_asking and ms >= self.config.claim_jitter_ms and not stream.lapsed:
                result = self.loop.run_until_complete(waiting)
                assert ([] if result is None else list(result.seqs)) == self._dealt(free)
                if result is not None:
                    self._handed_out(result, stream.node, None, stream)
            waiting.cancel()
            self.run(asyncio.wait([waiting]))
        self.run(stream.work.close())
        self.sweep()
        for seq in self._held_by(stream):
            self._free(self.jobs[seq])
        self.run(self.world.clock.advance(self.config.claim_jitter_ms / 1000))
        assert stream.work.held == 0

    def _hear(self, node: str, seqs: list[int], ids: list[str]) -> None:
        """Mark the streams that delivered these jobs as alive."""
        for stream in self.streams:
            for seq, token in zip(seqs, ids, strict=True):
                job = self.jobs.get(seq, Job())
                is_held = bool(job.lease_id) and job.node == node and token in ("", job.lease_id)
                speaks = (
                    job.stream is stream
                    if is_held
                    else seq in stream.lapsed and token in ("", stream.lapsed[seq])
                )
                if stream.node == node and speaks:
                    stream.lapsed.clear()
                    break

    def _chosen(self, data: st.DataObject) -> tuple[str, list[int], list[str]]:
        """Return some issued leases, current or not, for one node, fenced or not."""
        node = data.draw(NODES)
        known = self.tokens[-12:] or [(1, node, "lease_1")]
        chosen = data.draw(st.lists(st.sampled_from(known), max_size=4))
        fenced = data.draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
        ids = [token if fence else "" for (_, _, token), fence in zip(chosen, fenced, strict=True)]
        return node, [seq for seq, _, _ in chosen], ids

    def _held(self, node: str, seqs: list[int], ids: list[str]) -> list[int]:
        self.sweep()
        held: list[int] = []
        for seq, token in zip(seqs, ids, strict=True):
            job = self.jobs.get(seq, Job())
            is_held = bool(job.lease_id) and job.node == node and seq not in held
            if is_held and token in ("", job.lease_id):
                held.append(seq)
        self._hear(node, seqs, ids)
        return held

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        node, seqs, ids = self._chosen(data)
        held = self._held(node, seqs, ids)
        result = self.run(self.engine.ack("q", node, seqs, ids))
        assert (result.acked, len(result.skipped)) == (len(held), len(seqs) - len(held))
        for seq in held:
            del self.jobs[seq]

    @rule(data=st.data(), delay_ms=st.sampled_from([0, 500]))
    def nack(self, data: st.DataObject, delay_ms: int) -> None:
        node, seqs, ids = self._chosen(data)
        held = self._held(node, seqs, ids)
        result = self.run(self.engine.nack("q", node, seqs, ids, delay_ms=delay_ms))
        assert (result.nacked, len(result.skipped)) == (len(held), len(seqs) - len(held))
        for seq in held:
            self._free(self.jobs[seq], self.now_ms + delay_ms if delay_ms else 0)

    @rule(data=st.data(), lease_ms=st.sampled_from([100, 5000]))
    def extend(self, data: st.DataObject, lease_ms: int) -> None:
        node, seqs, ids = self._chosen(data)
        held = self._held(node, seqs, ids)
        result = self.run(self.engine.extend("q", node, seqs, ids, lease_ms=lease_ms))
        assert result.deadlines_ms == dict.fromkeys(held, self.now_ms + lease_ms)
        for seq in held:
            self.jobs[seq].until_ms = self.now_ms + lease_ms

    @rule(back=st.integers(0, 8))
    def delete(self, back: int) -> None:
        before_seq = max(self.head - back, 0)
        self.run(self.engine.delete("q", before_seq=before_seq))
        self.jobs = {seq: job for seq, job in self.jobs.items() if seq >= before_seq}

    @rule()
    def leases_become_durable_or_no_longer_are(self) -> None:
        self.config = replace(self.config, leases_durable=not self.config.leases_durable)
        self.run(self.engine.put_topic("q", self.config))

    # ---- what happens by itself ----------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 101, 499, 1001, 4000]))
    def time_passes(self, ms: int) -> None:
        self.run(self.world.clock.advance(ms / 1000))

    @rule()
    def checkpoint(self) -> None:
        self.run(self.engine.checkpoint())
        self._snapshot_taken()

    def _snapshot_taken(self) -> None:
        self.snapshot = {seq: job.deliveries for seq, job in self.jobs.items()}

    @rule(shards=st.sampled_from([1, 2]))
    def restart(self, shards: int) -> None:
        self._snapshot_taken()
        self.run(self.world.restart(wal_shards=shards))
        self._started()

    @rule(shards=st.sampled_from([1, 2]))
    def the_process_is_killed(self, shards: int) -> None:
        self.run(self.world.kill(wal_shards=shards))
        self._started()

    @rule(seed=st.integers(0, 10**6), survival=st.sampled_from([Survival.NOTHING, Survival.RANDOM]))
    def the_power_goes(self, seed: int, survival: Survival) -> None:
        self.run(self.world.crash(survival, rng=random.Random(seed)))
        self._started()

    def _started(self) -> None:
        assert self.engine.problems == []
        self.streams = []
        for seq, job in self.jobs.items():
            job.stream = None
            if not self.config.leases_durable:
                queue = self.engine._catalog.get("q").queue
                assert queue is not None
                known = queue.leases._jobs.get(seq, Job()).deliveries
                assert self.snapshot.get(seq, 0) <= known <= job.deliveries
                self.jobs[seq] = Job(known)

    # ---- what must hold ------------------------------------------------------------------------------

    @invariant()
    def the_counts_are_exact(self) -> None:
        if not hasattr(self.world, "engine"):
            return
        ready = len(self.ready())
        held = sum(bool(job.lease_id) for job in self.jobs.values())
        state = self.engine.state("q")
        assert state.queue is not None
        assert (state.queue.ready, state.queue.in_flight, state.queue.dead_lettered) == (
            ready,
            held,
            self.dead,
        )
        assert state.count == len(self.jobs)

    @invariant()
    def every_job_is_in_the_queue_or_among_the_dead_letters(self) -> None:
        if not hasattr(self.world, "engine"):
            return
        page = self.run(self.engine.diff("q", limit=1000))
        assert [record.seq for record in page.records()] == list(self.jobs)
        assert self.engine.state("dead").count == self.dead


QueueMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase
