"""Watches over records that are old, in the cold tier, copied, or from before a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.contract.event_stream import EventStream, Watcher
from tests.contract.socket_client import opened
from tests.contract.topics_server import PROTOCOLS, Server, fresh_name, serving


async def all_seqs(stream: EventStream, head: int) -> list[int]:
    seqs: list[int] = []
    while not seqs or seqs[-1] < head:
        event = await stream.next()
        assert event.name in ("record", "caught-up"), event
        seqs += event.seqs if event.name == "record" else []
    return seqs


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_watcher_reads_cold_segments_up_to_live_records(tmp_path: Path, protocol: str) -> None:
    settings = {
        "TOPICS_COLD_DIR": str(tmp_path / "cold"),
        "TOPICS_SEGMENT_MAX_EVENTS": "100",
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    }
    with serving(tmp_path / "data", **settings) as server:
        for _ in range(10):
            server.api().write("old", *range(100))
    with serving(tmp_path / "data", **settings) as server:
        assert any((tmp_path / "cold").rglob("*.data"))
        watcher = Watcher(server, protocol)
        async with watcher.watch({"old": {}}, limit=70) as stream:
            assert await all_seqs(stream, 1000) == list(range(1, 1001))
            await watcher.write("old", "new")
            assert await all_seqs(stream, 1001) == [1001]
        async with opened(server) as socket:
            await socket.subscribe(topic="old", limit=300)
            seqs: list[int] = []
            while len(seqs) < 1001:
                message = await socket.next()
                seqs += [record["$seq"] for record in message.get("records", [])]
            assert seqs == list(range(1, 1002))


async def test_sessions_do_not_survive_a_restart_but_positions_can_be_resumed(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        watcher = Watcher(server, "h1")
        await watcher.write("x", 1, 2)
        created = await watcher.create({"x": {}})
        async with watcher.open(created["wid"]) as stream:
            (record, _) = await stream.take(2)
    with serving(tmp_path / "data") as server:
        watcher = Watcher(server, "h1")
        async with watcher.client() as client:
            assert (await client.get(f"/v0/watch/{created['wid']}")).status_code == 404
        await watcher.write("x", 3)
        async with watcher.watch({"x": {"from_seq": record.data["to_seq"]}}) as stream:
            assert (await stream.next()).seqs == [3]


async def test_copies_of_a_router_reach_watchers_of_the_destination(server: Server) -> None:
    watcher = Watcher(server, "h1")
    source, dest = fresh_name("source"), fresh_name("dest")
    async with watcher.client() as client:
        answer = await client.put(f"/v0/routers/{source}-{dest}", json={"source": source, "dest": dest})
        assert answer.status_code == 201, answer.text
    async with watcher.watch({dest: {}}) as stream:
        assert (await stream.next()).name == "caught-up"
        for number in range(20):
            await watcher.write(source, number)
        assert await all_seqs(stream, 20) == list(range(1, 21))
        await asyncio.sleep(0)


async def test_records_that_expired_unread_are_reported(server: Server, topic: str) -> None:
    watcher = Watcher(server, "h1")
    async with watcher.client() as client:
        await client.put(f"/v0/topics/{topic}", json={"ttl_ms": 50})
    await watcher.write(topic, 1, 2)
    await asyncio.sleep(0.2)
    async with watcher.watch({topic: {}}) as stream:
        gap, caught_up = await stream.take(2)
        assert (gap.name, gap.data["gap_from"], gap.data["gap_to"]) == ("tombstone", 1, 2)
        assert caught_up.name == "caught-up"
        await watcher.write(topic, 3)
        assert (await stream.next()).seqs == [3]


async def test_a_watch_counts_as_reading(server: Server, topic: str) -> None:
    watcher = Watcher(server, "h1")
    await watcher.write(topic, 1)
    api = server.api()
    assert api.state(topic, touch="false")["last_read_ts"] is None
    async with watcher.watch({topic: {}}) as stream:
        await stream.next()
    assert api.state(topic, touch="false")["last_read_ts"] is not None
    assert api.state(topic, touch="false")["effective_priority"] > 0
