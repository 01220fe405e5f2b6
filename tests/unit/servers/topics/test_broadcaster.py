"""From a publish to every client: nothing lost, nothing repeated, and no client waits for another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from tests.unit.servers.topics.live_doubles import FakeSink, Watching
from tests.unit.topics.engine_doubles import World, recs, settle

from penstock.http.errors import UnknownPath
from penstock.servers.limits import StreamLimits
from penstock.servers.topics import broadcaster
from penstock.servers.topics.sse import read_id, write_id
from penstock.topics import TopicConfig
from penstock.topics.errors import Damaged, Throttled
from penstock.topics.model import Page
from penstock.topics.read.page import DiffRequest, Reader
from penstock.topics.topic.topic import Topic


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World(max_topics=0)
    await made.open()
    yield made
    await made.engine.close()


@pytest.fixture
def watching(world: World) -> Watching:
    return Watching(world)


# ---- wake-ups ---------------------------------------------------------------------------------------------


async def test_a_record_published_between_opening_and_the_first_visit_is_not_lost(
    world: World, watching: Watching
) -> None:
    await world.engine.put_topic("x", TopicConfig())
    live = (await watching.respond(await watching.create(topics={"x": {}}))).live
    assert live is not None
    writer = FakeSink()
    live.attach(writer)  # nothing has been looked at yet
    await world.engine.write("x", recs(1))
    await settle()
    assert writer.seqs() == [1]


async def test_many_publishes_in_one_turn_are_one_frame(world: World, watching: Watching) -> None:
    await world.engine.put_topic("x", TopicConfig())
    _, writer = await watching.follow("x")
    world.committers.hold()
    writes = [asyncio.ensure_future(world.engine.write("x", recs(number))) for number in range(20)]
    await settle()
    assert writer.names() == ["caught-up"]
    world.committers.release()
    await asyncio.gather(*writes)
    await settle()
    assert writer.names() == ["caught-up", "record", "caught-up"]
    assert writer.seqs() == list(range(1, 21))


async def test_nothing_is_written_to_a_connection_that_is_full_and_everything_when_it_is_not(
    world: World, watching: Watching
) -> None:
    await world.engine.put_topic("x", TopicConfig())
    live, writer = await watching.follow("x")
    writer.is_writable = False
    written = len(writer.pieces)
    for number in range(5):
        await world.engine.write("x", recs(number))
        await settle()
    assert len(writer.pieces) == written
    writer.is_writable = True
    live.writable()
    await settle()
    assert writer.seqs() == [1, 2, 3, 4, 5]


async def test_a_full_connection_gets_one_page_at_a_time(world: World, watching: Watching) -> None:
    await world.engine.write("x", recs(*range(10)))

    class OnePiece(FakeSink):
        def write(self, data: bytes) -> None:
            super().write(data)
            self.is_writable = False

    live = (await watching.respond(await watching.create(topics={"x": {}}, limit=3))).live
    assert live is not None
    writer = OnePiece()
    live.attach(writer)
    for expected in ([], [1, 2, 3], [1, 2, 3, 4, 5, 6]):
        await settle()
        assert writer.seqs() == expected
        writer.is_writable = True
        live.writable()


async def test_a_client_that_left_is_removed(world: World, watching: Watching) -> None:
    await world.engine.put_topic("x", TopicConfig())
    live, writer = await watching.follow("x")
    assert watching.api.connections == 1
    live.closed()
    assert watching.api.connections == 0
    await world.engine.write("x", recs(1))
    await settle()
    assert writer.seqs() == []
    assert not watching.api.broadcaster._channels
    assert not world.engine._catalog.get("x").subscribers._listening


async def test_a_page_is_read_and_rendered_once_for_all_subscriptions_at_a_position(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.engine.put_topic("x", TopicConfig())
    writers = [(await watching.follow("x"))[1] for _ in range(50)]
    reads: list[int] = []
    read = Reader.page_at_hand

    def counted(self: Reader, topic: Topic, request: DiffRequest) -> Page | None:
        reads.append(request.from_seq)
        return read(self, topic, request)

    monkeypatch.setattr(Reader, "page_at_hand", counted)
    await world.engine.write("x", recs(1))
    await settle()
    assert reads == [0]
    assert all(writer.seqs() == [1] for writer in writers)
    assert len({id(writer.pieces[-1]) for writer in writers}) == 1


async def test_a_record_deleted_before_it_was_sent_is_not_sent(world: World, watching: Watching) -> None:
    await world.engine.put_topic("x", TopicConfig())
    live, writer = await watching.follow("x")
    writer.is_writable = False
    await world.engine.write("x", recs(1, 2, 3))
    await world.engine.delete("x", before_seq=3)
    writer.is_writable = True
    live.writable()
    await settle()
    assert writer.seqs() == [3]


async def test_a_record_deleted_after_delivery_to_others_is_not_sent_from_memory(
    world: World, watching: Watching
) -> None:
    await world.engine.put_topic("x", TopicConfig())
    _, quick = await watching.follow("x")
    live, slow = await watching.follow("x")
    slow.is_writable = False
    await world.engine.write("x", recs(1, 2))
    await settle()
    assert quick.seqs() == [1, 2]
    await world.engine.delete("x", before_seq=2)
    slow.is_writable = True
    live.writable()
    await settle()
    assert slow.seqs() == [2]


async def test_requests_get_their_turn_among_many_watchers(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "VISITS_PER_TURN", 2)
    await world.engine.put_topic("x", TopicConfig())
    writers = [(await watching.follow("x"))[1] for _ in range(7)]
    await world.engine.write("x", recs(1))
    turns = 0
    while not all(writer.seqs() == [1] for writer in writers):
        await asyncio.sleep(0)
        turns += 1
        assert turns < 20
    assert turns >= 3


async def test_a_watcher_that_reads_a_long_log_does_not_delay_the_others(
    world: World, watching: Watching
) -> None:
    await world.engine.write("long", recs(*range(2000)))
    await world.engine.put_topic("x", TopicConfig())
    _, quick = await watching.follow("x")
    live = (await watching.respond(await watching.create(topics={"long": {}}, limit=1))).live
    assert live is not None
    slow = FakeSink()
    live.attach(slow)
    await world.engine.write("x", recs(1))
    await settle()
    assert quick.seqs() == [1]
    assert len(slow.seqs()) < 200


async def test_a_failed_delivery_disconnects_only_its_client(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await world.engine.put_topic("x", TopicConfig())
    writers = [(await watching.follow("x"))[1] for _ in range(3)]

    def broken(data: bytes) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(writers[1], "write", broken)
    await world.engine.write("x", recs(1))
    await settle()
    assert [writer.seqs() for writer in writers] == [[1], [], [1]]
    assert writers[1].is_cut
    assert "a delivery failed" in caplog.text
    assert watching.api.connections == 2


async def test_a_turn_ends_at_its_byte_limit(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "BYTES_PER_TURN", 100)
    await world.engine.write("x", recs(*["y" * 90] * 20))
    writers = []
    for first in range(6):
        wid = await watching.create(topics={"x": {"from_seq": first}}, limit=4)
        writers.append((await watching.open(wid))[1])
    for _ in range(40):
        await asyncio.sleep(0)
    assert [writer.seqs() for writer in writers] == [list(range(first + 1, 21)) for first in range(6)]


# ---- records that must be fetched -------------------------------------------------------------------------


async def test_fetched_records_do_not_delay_other_clients(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.engine.write("x", recs(1, 2))
    await world.engine.write("y", recs(1))
    gate = asyncio.Event()
    at_hand, read = Reader.page_at_hand, Reader.read

    def cold(self: Reader, topic: Topic, request: DiffRequest) -> Page | None:
        is_cold = topic.name == "x" and request.from_seq < 2
        return None if is_cold else at_hand(self, topic, request)

    async def slow(self: Reader, topic: Topic, request: DiffRequest, *, wait_ms: int) -> Page:
        await gate.wait()
        return await read(self, topic, request, wait_ms=wait_ms)

    monkeypatch.setattr(Reader, "page_at_hand", cold)
    monkeypatch.setattr(Reader, "read", slow)
    _, writer = await watching.open(await watching.create(topics={"x": {}, "y": {}}))
    assert [data["topic"] for name, data in writer.events() if name == "record"] == ["y"]
    await world.engine.write("x", recs(3))
    await settle()
    gate.set()
    await settle()
    of_x = [data["records"] for name, data in writer.events() if name == "record" and data["topic"] == "x"]
    assert [record["$seq"] for records in of_x for record in records] == [1, 2, 3]
    assert writer.names()[-1] == "caught-up"


async def test_a_client_that_leaves_during_a_fetch_leaves_no_task(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.engine.write("x", recs(1))
    monkeypatch.setattr(Reader, "page_at_hand", lambda *_: None)
    monkeypatch.setattr(Reader, "read", lambda *_, wait_ms: asyncio.Event().wait())
    live, writer = await watching.follow("x")
    task = live._fetching
    assert task is not None
    live.closed()
    await settle()
    assert task.cancelled()
    assert writer.seqs() == []


async def test_a_record_that_cannot_be_read_ends_the_stream_with_the_reason(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.engine.write("x", recs(1))

    def damaged(*_: object) -> Page | None:
        raise Damaged("stored record 1 cannot be read back", {"first_seq": 1, "last_seq": 1})

    monkeypatch.setattr(Reader, "page_at_hand", damaged)
    _, writer = await watching.follow("x")
    ((name, data),) = writer.events()
    assert name == "error"
    assert (data["code"], data["topic"]) == (500, "x")
    assert 'topic "x"' in data["error"]
    assert writer.is_ended
    assert watching.api.connections == 0


# ---- any order of events ----------------------------------------------------------------------------------


class Unsteady:
    """A watcher with every possible disturbance, in an order chosen by a seed."""

    def __init__(self, rng: random.Random, watching: Watching, wid: str) -> None:
        self._rng = rng
        self._watching = watching
        self._wid = wid
        self.writers: list[FakeSink] = []

    async def come(self) -> None:
        self._live, self._writer = await self._watching.open(self._wid)
        self.writers.append(self._writer)

    async def step(self) -> None:
        action = self._rng.randrange(8)
        if action < 4:
            await self._watching.engine.write("x", recs(*range(self._rng.randrange(1, 4))))
        elif action == 4:
            self._writer.is_writable = False
        elif action == 5:
            self.catch_up()
        elif action == 6 and self._rng.random() < 0.3:
            self._live.closed()  # what was written before counts as read
            await self.come()
        else:
            await asyncio.sleep(0)

    def catch_up(self) -> None:
        self._writer.is_writable = True
        self._live.writable()

    def seen(self) -> list[int]:
        """Return every sequence that was sent or reported as gone; check where gaps start."""
        seen: list[int] = []
        for name, data in (event for writer in self.writers for event in writer.events()):
            if name == "record":
                seen += [record["$seq"] for record in data["records"]]
            elif name == "tombstone":
                assert data["gap_from"] == len(seen) + 1
                seen += range(data["gap_from"], data["gap_to"] + 1)
        return seen


def make_unsteady(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make some pages need a fetch, which takes some turns."""
    at_hand = Reader.page_at_hand

    def sometimes_cold(self: Reader, topic: Topic, request: DiffRequest) -> Page | None:
        return None if rng.random() < 0.2 else at_hand(self, topic, request)

    async def late(self: Reader, topic: Topic, request: DiffRequest, *, wait_ms: int) -> Page:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        return await self._page(topic, request)

    monkeypatch.setattr(Reader, "page_at_hand", sometimes_cold)
    monkeypatch.setattr(Reader, "read", late)


@pytest.mark.parametrize("seed", range(60))
async def test_a_watcher_gets_every_record_once_in_order_or_a_gap(
    seed: int, world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    cap = rng.choice([0, 0, 5])
    await world.engine.put_topic("x", TopicConfig(cap_records=cap))
    make_unsteady(rng, monkeypatch)
    wid = await watching.create(topics={"x": {}}, limit=rng.choice([1, 3, 100]))
    watcher = Unsteady(rng, watching, wid)
    await watcher.come()
    for _ in range(120):
        await watcher.step()
    watcher.catch_up()
    for _ in range(50):
        await settle()
    head = world.engine.state("x").head_seq
    assert watcher.seen() == list(range(1, head + 1)), f"seed {seed}"
    assert watcher.writers[-1].events()[-1] == ("caught-up", {"topic": "x", "head_seq": head})
    assert cap or all("tombstone" not in writer.names() for writer in watcher.writers)


# ---- time -------------------------------------------------------------------------------------------------


async def test_a_stream_sends_a_heartbeat_after_each_silent_interval(
    world: World, watching: Watching
) -> None:
    await world.engine.put_topic("x", TopicConfig())
    _, writer = await watching.follow("x", heartbeat_ms=15_000)
    await world.clock.advance(14.5)
    assert writer.beats() == 0
    await world.clock.advance(1)
    assert writer.beats() == 1
    await world.clock.advance(10)
    await world.engine.write("x", recs(1))
    await settle()
    await world.clock.advance(14)
    assert writer.beats() == 1
    await world.clock.advance(1.5)
    assert writer.beats() == 2


async def test_a_full_connection_gets_no_heartbeats(world: World, watching: Watching) -> None:
    await world.engine.put_topic("x", TopicConfig())
    _, writer = await watching.follow("x", heartbeat_ms=1000)
    writer.is_writable = False
    await world.clock.advance(60)
    assert writer.beats() == 0


@pytest.mark.parametrize(("asked_ms", "beats"), [(1, 59), (1000, 59), (30_000, 2), (10**9, 1)])
async def test_the_interval_is_clamped(world: World, watching: Watching, asked_ms: int, beats: int) -> None:
    await world.engine.put_topic("x", TopicConfig())
    _, writer = await watching.follow("x", heartbeat_ms=asked_ms)
    await world.clock.advance(60)
    assert beats <= writer.beats() <= beats + 1


async def test_a_session_is_kept_for_five_minutes_without_a_stream(world: World, watching: Watching) -> None:
    await world.engine.put_topic("x", TopicConfig())
    wid = await watching.create(topics={"x": {}})
    await world.clock.advance(299)
    live, _ = await watching.open(wid)
    await world.clock.advance(1000)
    live.closed()
    await world.clock.advance(299)
    live, _ = await watching.open(wid)
    live.closed()
    await world.clock.advance(301)
    with pytest.raises(UnknownPath):
        await watching.open(wid)
    assert watching.api.sessions == 0


async def test_idle_sessions_make_room_for_new_ones(world: World) -> None:
    watching = Watching(world, StreamLimits(sessions_max=2))
    await world.engine.put_topic("x", TopicConfig())
    for _ in range(2):
        await watching.create(topics={"x": {}})
    with pytest.raises(Throttled):
        await watching.create(topics={"x": {}})
    await world.clock.advance(301)
    await watching.create(topics={"x": {}})
    assert watching.api.sessions == 1


# ---- prefixes ---------------------------------------------------------------------------------------------


async def test_a_session_has_a_topic_limit_and_reports_the_first_topic_above_it(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.servers.topics.watch.WATCH_TOPICS_MAX", 2)
    _, writer = await watching.open(await watching.create(topics={"p*": {}}))
    for name in ("p1", "p2", "p3"):
        await world.engine.put_topic(name, TopicConfig())
        await settle()
    assert [data.get("topic") for name, data in writer.events() if name == "caught-up"] == ["p1", "p2"]
    ((_, data),) = [event for event in writer.events() if event[0] == "error"]
    assert (data["code"], data["topics"]) == (429, ["p3"])
    assert not writer.is_ended


async def test_a_topic_created_without_a_stream_is_followed_from_its_start(
    world: World, watching: Watching
) -> None:
    wid = await watching.create(topics={"p*": {"tail": True}})
    await world.engine.write("p1", recs(1))
    _, writer = await watching.open(wid)
    assert writer.seqs() == [1]


async def test_an_id_only_moves_a_client_back(world: World, watching: Watching) -> None:
    await world.engine.write("x", recs(1, 2, 3))
    wid = await watching.create(topics={"x": {}})
    _, writer = await watching.open(wid, write_id({"x": 2}))
    assert writer.seqs() == [1, 2, 3]
    _, writer = await watching.open(wid, write_id({"x": 1}))
    assert writer.seqs() == [2, 3]
    _, writer = await watching.open(wid, write_id({"x": 99, "y": 0}))
    assert writer.seqs() == []


# ---- ids --------------------------------------------------------------------------------------------------


def test_an_id_decodes_to_its_positions() -> None:
    cursors = {"a": 0, "ünï": 7, "z" * 255: 2**64 - 1}
    ident = write_id(cursors)
    assert b"=" not in ident
    assert read_id(ident) == cursors


@pytest.mark.parametrize(
    "ident", [b"", b"!", b"e30=", b"bnVsbA", b"eyJhIjoxLjV9", b"\xff\xfe", b"eyJhIjotMX0"]
)
def test_any_other_text_is_not_an_id(ident: bytes) -> None:
    assert read_id(ident) == {}
