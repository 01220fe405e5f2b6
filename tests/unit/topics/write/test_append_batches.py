"""Writes of one turn of the event loop: one commit, but separate sequences, responses and outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
from tests.unit.topics.engine_doubles import (
    DATA,
    FSYNC,
    World,
    gather_outcomes,
    read_all,
    rec,
    recs,
    settle,
    values,
)

from penstock.errors import PenstockError
from penstock.storage.log_layout import header_bytes
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, Survival
from penstock.topics import (
    CommitFailed,
    Engine,
    NewRecord,
    Predicate,
    TopicConfig,
    TopicNotEmpty,
    WriteResult,
)
from penstock.topics.log.frame import FrameType
from penstock.topics.log.frame_scan import WalFormat, read_frames
from penstock.topics.topic.topic import Topic
from penstock.topics.write import append as append_module

WAL = WalFormat()


@pytest.fixture
def world() -> World:
    return World()


class Answers:
    """The outcomes of writes, in the order in which they are reported."""

    def __init__(self) -> None:
        self.all: list[WriteResult | PenstockError] = []

    def places(self) -> list[tuple[int, int]]:
        return [(one.first_seq, one.last_seq) for one in self.all if isinstance(one, WriteResult)]


def begin(engine: Engine, writes: Sequence[list[NewRecord]], topic: str = "t") -> Answers:
    """Start all writes in one turn of the loop."""
    answers = Answers()
    for records in writes:
        assert engine.begin_write(topic, records, answers.all.append)
    return answers


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
async def test_writes_of_one_turn_are_committed_together_and_answered_individually(
    world: World, durability: Any
) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(durability=durability))
    before = engine.stats().wal.batches
    answers = begin(engine, [recs("a"), recs("b", "c"), recs("d")])
    assert answers.all == []
    await settle()
    assert answers.places() == [(1, 1), (2, 3), (4, 4)]
    assert engine.stats().wal.batches == before + 1
    assert values(await engine.diff("t")) == ["a", "b", "c", "d"]
    engine = await world.restart()
    assert list((await read_all(engine, "t")).values()) == ["a", "b", "c", "d"]


async def test_records_with_more_than_data_keep_their_place_among_the_others(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    answers = begin(engine, [recs(1), [rec(2, tag="x")], recs(3, 4), [rec(5, node="n")], recs(6)])
    await settle()
    assert answers.places() == [(1, 1), (2, 2), (3, 4), (5, 5), (6, 6)]
    engine = await world.kill()
    assert list((await read_all(engine, "t")).values()) == [1, 2, 3, 4, 5, 6]
    assert values(await engine.diff("t", match=Predicate(value="x"))) == [2]


async def test_writes_of_many_kinds_and_sizes_in_one_turn_read_back_unchanged(world: World) -> None:
    engine = await world.open(wal_file_bytes=1 << 20)
    await engine.put_topic("t", FSYNC)
    sizes = [1, 30, 2, 1, 90, 7, 25, 1]
    bounds = [0, *accumulate(sizes)]
    answers = begin(engine, [recs(*range(start, end)) for start, end in pairwise(bounds)])
    await settle()
    assert answers.places() == [(start + 1, end) for start, end in pairwise(bounds)]
    engine = await world.kill()
    assert list((await read_all(engine, "t")).values()) == list(range(bounds[-1]))


async def test_the_size_of_a_batch_of_large_writes_is_limited(world: World) -> None:
    engine = await world.open(wal_file_bytes=1 << 20)
    await engine.put_topic("t", FSYNC)
    before = engine.stats().wal.batches
    answers = begin(engine, [recs("x" * 100_000) for _ in range(7)])
    await settle()
    assert engine.stats().wal.batches == before + 3
    assert answers.places() == [(seq, seq) for seq in range(1, 8)]
    assert len(await read_all(await world.kill(), "t")) == 7


@pytest.mark.parametrize("records", [3, 60])
async def test_a_torn_commit_keeps_whole_writes_only(world: World, records: int) -> None:
    engine = await world.open(wal_file_bytes=1 << 20)
    await engine.put_topic("t", FSYNC)
    begin(engine, [recs(*range(records))])
    await settle()
    name = next(name for name, _ in world.disk.list_files(f"{DATA}/wal") if name.endswith(".log"))
    first_bytes = engine._wal.shards[0].log.end.offset  # type: ignore[union-attr]
    begin(engine, [recs(*range(records)) for _ in range(3)])
    await settle()
    end = engine._wal.shards[0].log.end.offset  # type: ignore[union-attr]
    frame_bytes = (end - first_bytes) // (3 * records)
    world.unplug(Survival.EVERYTHING)
    whole = world.disk
    for cut in range(first_bytes, end + frame_bytes, frame_bytes * max(1, records // 12)):
        world.disk = whole.crash(Survival.EVERYTHING, None)
        _cut_off(world.disk, f"{DATA}/wal/{name.rpartition('/')[2]}", cut)
        engine = await world.open()
        count = len(await read_all(engine, "t"))
        assert count % records == 0, f"{count} records of writes of {records}, cut at {cut}"
        await engine.close()


def _cut_off(disk: FakeDisk, path: str, at: int) -> None:
    """Drop everything after this position of the file, as if it had never reached the disk."""
    size = next(stat.size for name, stat in disk.list_files(f"{DATA}/wal") if path.endswith(name))
    if at < size:
        file = disk.open_log(path)
        file.write_durably_at(at, [bytes(size - at)])
        file.close()


async def test_writes_that_are_gathered_when_a_commit_fails_fail_with_it(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    world.committers.hold()
    first = begin(engine, [recs("lost")])
    await settle()
    world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ONCE)
    shard = engine._wal.shards[0]  # type: ignore[union-attr]
    decide, second = shard._decide, Answers()

    def write_and_decide(entries: list[Any]) -> None:
        # In the same turn, before the failure is reported.
        shard._decide = decide  # type: ignore[method-assign]
        assert engine.begin_write("t", recs("lost too"), second.all.append)
        decide(entries)

    shard._decide = write_and_decide  # type: ignore[method-assign]
    world.committers.release()
    await settle()
    assert [type(one) for one in first.all + second.all] == [CommitFailed, CommitFailed]
    world.disk.plan = None
    assert (await engine.write("t", recs("x"))).first_seq == 1
    engine = await world.kill()
    assert await read_all(engine, "t") == {1: "x"}


async def test_a_change_in_the_same_turn_follows_the_writes_in_the_log(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    answers = begin(engine, [recs("a"), recs("b")])
    await engine.remove_topic("t")
    assert answers.places() == [(1, 1), (2, 2)]
    assert not engine.exists("t")
    shard, start = engine._wal.shards[0], header_bytes(WAL)  # type: ignore[union-attr]
    view = shard.view(shard.committed_offset.file)[:]
    ends, _ = WAL.frame_ends(view, start, len(view))
    marks = (FrameType.APPEND, FrameType.TOPIC_DELETE)
    kinds = [kind for kind in read_frames(view, start, ends).heads["type"].tolist() if kind in marks]
    assert kinds == [FrameType.APPEND, FrameType.APPEND, FrameType.TOPIC_DELETE]
    engine = await world.kill()
    assert not engine.exists("t")
    assert engine.problems == []


async def test_a_closing_engine_commits_gathered_writes(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    answers = begin(engine, [recs("a"), recs("b")])
    await engine.close()
    assert answers.places() == [(1, 1), (2, 2)]
    assert list((await read_all(await world.open(), "t")).values()) == ["a", "b"]


async def test_gathered_writes_count_as_waiting(world: World) -> None:
    engine = await world.open(wal_queue_max=3)
    await engine.put_topic("t", FSYNC)
    begin(engine, [recs(1), recs(2), recs(3)])
    with pytest.raises(PenstockError, match="3 writes wait"):
        engine.begin_write("t", recs(4), lambda _: None)
    await settle()
    assert (await engine.write("t", recs(4))).first_seq == 4


async def test_writes_that_cannot_be_encoded_leave_no_gap(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await world.open(wal_queue_max=2)
    await engine.put_topic("t", FSYNC)

    def broken(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(append_module, "encode", broken)
        answers = begin(engine, [recs(1), recs(2)])
        await settle()
    assert [type(one) for one in answers.all] == [CommitFailed, CommitFailed]
    assert "could not be encoded" in caplog.text
    outcomes = await gather_outcomes([asyncio.ensure_future(engine.write("t", recs(n))) for n in (3, 4)])
    assert [one.first_seq for one in outcomes if isinstance(one, WriteResult)] == [1, 2]
    assert values(await engine.diff("t")) == [3, 4]


async def test_a_failing_callback_does_not_prevent_the_other_responses(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)

    def broken(_: object) -> None:
        raise RuntimeError("nobody there")

    engine.begin_write("t", recs(1), broken)
    answers = begin(engine, [recs(2)])
    await settle()
    assert answers.places() == [(2, 2)]
    assert "outcome of a write could not be reported" in caplog.text


@pytest.mark.parametrize("second", [recs(2), [rec(2, tag="x")]])
async def test_a_callback_of_a_write_that_could_not_be_encoded_may_write_again(
    world: World, monkeypatch: pytest.MonkeyPatch, second: list[NewRecord]
) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    encode, broken, again = append_module.encode, [True], Answers()

    def fails_once(*arguments: Any, **options: Any) -> Any:
        if broken:
            broken.clear()
            raise MemoryError
        return encode(*arguments, **options)

    def write_again(_: object) -> None:
        assert engine.begin_write("t", recs("again"), again.all.append)

    monkeypatch.setattr(append_module, "encode", fails_once)
    assert engine.begin_write("t", recs(1), write_again)
    other = begin(engine, [second])
    await settle()
    answered = [one for one in other.all + again.all if isinstance(one, WriteResult)]
    # Without a tag both are encoded together. With a tag the second is encoded separately.
    assert sorted(one.first_seq for one in answered) == list(range(1, len(answered) + 1))
    assert len(other.all) == len(again.all) == 1
    assert (await engine.write("t", recs("later"))).first_seq == len(answered) + 1


async def test_no_write_is_accepted_after_a_record_that_could_not_be_published(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)

    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Topic, "publish", broken)
        with pytest.raises(CommitFailed, match="in the log, but not published"):
            await engine.write("t", recs("unseen"))
    with pytest.raises(CommitFailed, match="restart the server"):
        await engine.write("t", recs("behind it"))
    assert "could not be published" in caplog.text
    assert await read_all(await world.kill(), "t") == {1: "unseen"}


@pytest.mark.parametrize("is_quick", [False, True])
async def test_a_write_with_a_key_precedes_a_later_deletion(is_quick: bool) -> None:
    engine = await World(is_quick=is_quick).open()
    await engine.put_topic("t", FSYNC)
    await settle()
    written, removed = await gather_outcomes(
        [
            asyncio.ensure_future(engine.write("t", recs("a"), idempotency_key="k")),
            asyncio.ensure_future(engine.remove_topic("t", if_empty=True)),
        ]
    )
    assert isinstance(written, WriteResult)
    assert isinstance(removed, TopicNotEmpty)
    assert await read_all(engine, "t") == {1: "a"}
    again = await engine.write("t", recs("a"), idempotency_key="k")
    assert (again.deduped, again.first_seq) == (True, 1)
