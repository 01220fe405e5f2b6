"""Many concurrent clients: every client gets everything, once and in order."""

from __future__ import annotations

import asyncio
import json
import re
import resource
from collections.abc import Iterator

import httpx
import pytest
from tests.contract.raw_http import request_bytes
from tests.contract.socket_client import Socket, opened
from tests.contract.topics_server import Server, fresh_name, serving

WATCHERS = 1000
PARTICIPANTS = 300
_SEQ = re.compile(rb'"\$seq":(\d+),')


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server that accepts over a thousand connections, if this machine allows as many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4096:
        wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
        if wanted < 3000:
            pytest.skip(f"only {hard} files may be open here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    data = tmp_path_factory.mktemp("roomy") / "data"
    with serving(data, TOPICS_MAX_SSE_CONNECTIONS_PER_KEY="2000") as running:
        yield running


class RawWatcher:
    """An open stream whose bytes are only searched, so that a thousand of them leave the server some CPU."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.seqs: list[int] = []
        self._rest = b""

    @classmethod
    async def open(cls, server: Server, url: str) -> RawWatcher:
        reader, writer = await asyncio.open_connection(*server.host_and_port, limit=2**20)
        writer.write(request_bytes("GET", url))
        opened = cls(reader, writer)
        await opened.until(0)
        return opened

    async def until(self, head: int) -> None:
        """Read until the stream reports that it has caught up to `head`."""
        sign = b'"head_seq":%d}' % head
        while sign not in self._rest:
            piece = await self._reader.read(2**18)
            assert piece, "the stream ended"
            self._rest += piece
        self.seqs += map(int, _SEQ.findall(self._rest))
        self._rest = b""


async def test_a_thousand_watchers_get_every_record_once_and_in_order(roomy: Server) -> None:
    topic = fresh_name()
    async with httpx.AsyncClient(base_url=roomy.url, trust_env=False, timeout=60) as client:
        await client.put(f"/v0/topics/{topic}", json={})
        urls = []
        for _ in range(WATCHERS):
            created = await client.post("/v0/watch", json={"topics": {topic: {}}})
            urls.append(created.json()["stream_url"])
        watchers = [await RawWatcher.open(roomy, url) for url in urls]
        try:
            head = 0
            for size in (1, 1, 10, 1, 100):
                body = {"records": [{"data": head + place} for place in range(size)]}
                head = (await client.post(f"/v0/topics/{topic}", json=body)).json()["head_seq"]
                async with asyncio.timeout(15):
                    await asyncio.gather(*(watcher.until(head) for watcher in watchers))
            assert all(watcher.seqs == list(range(1, head + 1)) for watcher in watchers)
            metrics = (await client.get("/v0/metrics", headers={"Accept": "application/json"})).json()
            assert metrics["sse_connections"] == WATCHERS
        finally:
            for watcher in watchers:
                watcher.writer.close()


async def test_three_hundred_participants_exchange_records_without_loss(roomy: Server) -> None:
    topic, said_each = fresh_name(), 2
    async with httpx.AsyncClient(base_url=roomy.url, trust_env=False) as client:
        await client.put(f"/v0/topics/{topic}", json={})
    async with asyncio.timeout(60):
        connections = [opened(roomy, compression=None, ping_interval=None) for _ in range(PARTICIPANTS)]
        sockets = [await connection.__aenter__() for connection in connections]
        try:
            for socket in sockets:
                await socket.subscribe(topic=topic, tail=True)
            heard = await asyncio.gather(
                *(converse(socket, topic, number, said_each) for number, socket in enumerate(sockets))
            )
        finally:
            await asyncio.gather(*(connection.__aexit__(None, None, None) for connection in connections))
    expected = {f"{number}-{turn}" for number in range(PARTICIPANTS) for turn in range(said_each)}
    assert all(len(one) == len(expected) for one in heard)
    assert all(set(one) == expected for one in heard)
    assert all(one == heard[0] for one in heard)


async def converse(socket: Socket, topic: str, number: int, said_each: int) -> list[str]:
    """Publish, and read until all messages have arrived. Return them in order."""
    for turn in range(said_each):
        record = {"data": f"{number}-{turn}"}
        await socket.raw.send(
            json.dumps({"op": "publish", "topic": topic, "records": [record], "request_id": turn})
        )
    heard: list[str] = []
    acks = 0
    while len(heard) < PARTICIPANTS * said_each or acks < said_each:
        message = json.loads(await socket.raw.recv())
        assert message["op"] in ("ack", "record", "caught_up"), message
        acks += message["op"] == "ack"
        heard += [record["data"] for record in message.get("records", [])]
    return heard
