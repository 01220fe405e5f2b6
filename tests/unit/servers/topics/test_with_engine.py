"""The HTTP layer over the real engine, on a real disk, over both protocols."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.unit.servers.doubles import http

from penstock.http import Listener
from penstock.http.auth import Keyring
from penstock.servers.topics import TopicsApi, topics_app
from penstock.topics import Engine, EngineConfig


@contextlib.asynccontextmanager
async def served(folder: Path, *, http2: bool) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig(data_dir=str(folder), wal_shards=1, wal_file_bytes=4 * 1024**2)
    async with await Engine.open(config) as engine:
        api = TopicsApi(engine)
        listener = Listener(topics_app(api, Keyring()))
        host, port = await listener.bind("127.0.0.1", 0)
        async with http(f"http://{host}:{port}", http2=http2) as client:
            yield client
        api.drain()
        await listener.drain(timeout_s=5)


@pytest.fixture(params=[False, True], ids=["h1", "h2"])
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with served(tmp_path, http2=bool(request.param)) as client:
        yield client


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
async def test_records_come_back_as_they_were_written(client: httpx.AsyncClient, durability: str) -> None:
    await client.put("/v0/topics/x", json={"durability": durability})
    records = [{"data": {"a": [1, None]}, "tag": "t", "node": "n", "meta": {"k": "é"}}, {"data": None}]
    written = (await client.post("/v0/topics/x", json={"records": records})).json()
    assert written["seqs"] == [1, 2]
    assert (written["performance"]["fsync_ms"] > 0) is (durability == "fsync")
    page = (await client.post("/v0/topics/x/diff", json={"include_tags": True})).json()
    first, second = page["records"]
    first.pop("$ts")
    assert first == {"$seq": 1, "$node": "n", "$tag": "t", "data": {"a": [1, None]}, "meta": {"k": "é"}}
    assert second.keys() == {"$seq", "$ts", "data"}


async def test_concurrent_writes_are_all_kept_in_order(client: httpx.AsyncClient) -> None:
    async def write(number: int) -> int:
        body = {"records": [{"data": number}], "config": {"durable": True}}
        response = await client.post("/v0/topics/x", json=body)
        assert response.status_code in (200, 201)
        return int(response.json()["first_seq"])

    seqs = await asyncio.gather(*(write(number) for number in range(60)))
    assert sorted(seqs) == list(range(1, 61))
    page = (await client.post("/v0/topics/x/diff", json={})).json()
    found = {record["$seq"]: record["data"] for record in page["records"]}
    assert [found[seq] for seq in seqs] == list(range(60))


async def test_concurrent_writes_with_one_key_append_once(client: httpx.AsyncClient) -> None:
    body = {"records": [{"data": 1}], "idempotency_key": "k"}
    answers = await asyncio.gather(*(client.post("/v0/topics/x", json=body) for _ in range(10)))
    assert {answer.json()["first_seq"] for answer in answers} == {1}
    assert [answer.json()["deduped"] for answer in answers].count(False) == 1


async def test_a_long_poll_is_woken_by_a_write(client: httpx.AsyncClient) -> None:
    await client.put("/v0/topics/x")
    poll = asyncio.create_task(client.post("/v0/topics/x/diff", json={"wait_ms": 20_000}))
    await asyncio.sleep(0.05)
    assert not poll.done()
    await client.post("/v0/topics/x", json={"records": [{"data": "now"}]})
    assert [record["data"] for record in (await poll).json()["records"]] == ["now"]
    short = (await client.post("/v0/topics/x/diff", json={"from_seq": 1, "wait_ms": 10})).json()
    assert (short["records"], short["caught_up"]) == ([], True)


async def test_caps_leave_a_tombstone_and_deletes_do_not(client: httpx.AsyncClient) -> None:
    await client.put("/v0/topics/x", json={"cap_records": 3})
    await client.post("/v0/topics/x", json={"records": [{"data": n, "tag": f"t{n}"} for n in range(6)]})
    page = (await client.post("/v0/topics/x/diff", json={})).json()
    assert page["tombstone"]["reason"] == "cap"
    assert page["tombstone"].keys() == {
        *("gap_from", "gap_to", "reason", "missed_estimate", "earliest_seq", "head_seq")
    }
    deleted = (await client.post("/v0/topics/x/delete", json={"match": ["tag", "Glob", "t5*"]})).json()
    assert (deleted["deleted"], deleted["count"]) == (1, 2)


async def test_limits_of_the_engine_have_their_codes(client: httpx.AsyncClient) -> None:
    async def code(body: dict[str, object]) -> str:
        return str((await client.post("/v0/topics/x", json=body)).json()["error"]["code"])

    assert await code({"records": [{"data": 1}] * 10_001}) == "batch_too_large"
    assert await code({"records": [{"data": "x" * 1024**2}]}) == "record_too_large"
    assert await code({"records": [{"data": 1, "tag": "x" * 257}]}) == "invalid_request"
    assert await code({"records": [{"data": 1}], "idempotency_key": "x" * 257}) == "invalid_request"
    await client.put("/v0/topics/x", json={"cap_records": 1, "discard": "reject"})
    assert await code({"records": [{"data": 1}] * 2}) == "record_too_large"
    await client.post("/v0/topics/x", json={"records": [{"data": 1}]})
    assert await code({"records": [{"data": 1}]}) == "topic_full"
    changed = await client.put("/v0/topics/x", json={"type": "queue"})
    assert (changed.status_code, changed.json()["error"]["code"]) == (409, "topic_exists_incompatible")


async def test_metrics_and_probes_read_the_engine(client: httpx.AsyncClient) -> None:
    await client.post("/v0/topics/x", json={"records": [{"data": 12}], "config": {"durable": True}})
    assert (await client.get("/v0/ready")).json()["topics"] == 1
    text = (await client.get("/v0/metrics")).text
    assert 'topics_topic_records_live{topic="x"} 1\n' in text
    assert 'topics_topics_by_class{class="fsync"} 1\n' in text
    values = (await client.get("/v0/metrics", headers={"accept": "application/json"})).json()
    assert values["wal"]["fsyncs"] >= 1
    assert (values["topics_fsync"], values["records_live"], values["bytes_live"]) == (1, 1, 2)
