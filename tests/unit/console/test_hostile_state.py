"""A place of the plan that is damaged, hangs or returns invalid data does not affect others."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from tests.unit.console.hosts import FixedFleet, part
from tests.unit.console.test_console import bearer, serving

from penstock.buffer import Producer, ProducerConfig
from penstock.buffer.sharded import ShardedProducer
from penstock.clock import SYSTEM_CLOCK
from penstock.console.live import STREAMS_MAX, Event, LiveHub, in_pieces
from penstock.console.sources import Sources
from penstock.up import DatabasePlace, FleetMap, PartKind, QueuePlace

MANIFEST = "ingest/manifest"


def queue(name: str, url: str, **options: str) -> QueuePlace:
    return QueuePlace(
        name=name, store=url, store_options=options, manifest_path=MANIFEST, data_path_prefix="ingest"
    )


def fleet(*queues: QueuePlace) -> FixedFleet:
    return FixedFleet(FleetMap(data_dir="", queues=queues))


async def produce(folder: Path) -> None:
    async with Producer(ProducerConfig(store=str(folder))) as producer:
        await producer.produce([b"a", b"b", b"c"], b"")
        await producer.flush()


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        os.path.join(at, name): (os.stat(os.path.join(at, name)).st_mtime_ns, 0)
        for at, folders, names in os.walk(folder)
        for name in [*folders, *names]
    }


def forgotten(folder: Path) -> Path:
    """Create a batch of a sharded queue whose manifests are missing."""
    for manifest in folder.glob("**/manifest.shards/*"):
        if manifest.suffix != ".json":
            manifest.unlink()
    return next(folder.glob("**/*.batch"))


@asynccontextmanager
async def silence() -> AsyncIterator[str]:
    """Run a server that accepts connections and never responds."""
    held: list[asyncio.StreamWriter] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        await reader.read(1 << 20)
        await reader.read()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for writer in held:
            writer.close()
        server.close()


async def test_a_store_with_settings_that_do_not_fit_is_the_error_of_its_queue_alone(tmp_path: Path) -> None:
    await produce(tmp_path / "good")
    host = fleet(queue("bad", "az://box/x"), queue("good", str(tmp_path / "good")))
    async with serving(host, "k") as (_, client):
        rows = {row["name"]: row for row in (await client.get("api/buffers", headers=bearer("k"))).json()}
        assert "az://box/x" in rows["bad"]["error"]
        assert (rows["good"]["depth_batches"], rows["good"]["error"]) == (1, None)


async def test_a_damaged_manifest_is_an_error_at_every_look_and_nothing_is_written(tmp_path: Path) -> None:
    await produce(tmp_path / "good")
    await produce(tmp_path / "bad")
    (tmp_path / "bad" / MANIFEST).write_bytes(b"\xff" * 300)
    before = files(tmp_path)
    host = fleet(*(queue(name, str(tmp_path / name)) for name in ("bad", "good", "absent")))
    async with serving(host, "k") as (_, client):
        for name in ("bad", "good", "absent"):
            assert (await client.get(f"api/buffers/{name}", headers=bearer("k"))).status_code == 200
        for _ in range(2):
            shown = (await client.get("api/buffers/bad", headers=bearer("k"))).json()
            assert (shown["depth_batches"], bool(shown["error"])) == (None, True)
        good = (await client.get("api/buffers/good", headers=bearer("k"))).json()
        ident = good["entries"][0]["location"]
        traced = (await client.get("api/trace", params={"id": ident}, headers=bearer("k"))).json()
        assert traced["found"] is True
        unknown = await client.get("api/trace?id=01ARZ3NDEKTSV4RRFFQ69G5FAV", headers=bearer("k"))
        assert unknown.json()["found"] is False
        assert "bad cannot be read" in unknown.text
    assert files(tmp_path) == before


async def test_a_store_that_hangs_delays_no_other_queue(tmp_path: Path) -> None:
    await produce(tmp_path)
    keys = {"access_key_id": "AKIDNOTTOLD", "secret_access_key": "SECRETNOTTOLD", "region": "x"}
    async with silence() as url:
        hangs = queue("hangs", "s3://box/x", endpoint=url, allow_http="true", **keys)
        host = fleet(hangs, queue("good", str(tmp_path)))
        async with serving(host, "k") as (_, client):
            asked = [client.get("api/buffers/hangs", headers=bearer("k")) for _ in range(20)]
            stuck = [asyncio.ensure_future(call) for call in asked]
            async with asyncio.timeout(2.5):
                good = await client.get("api/buffers/good", headers=bearer("k"))
                assert good.json()["depth_batches"] == 1
                seen = await client.get("api/overview", headers=bearer("k"))
                assert seen.status_code == 200
            for answer in await asyncio.gather(*stuck):
                assert answer.json()["depth_batches"] is None
                assert "NOTTOLD" not in answer.text


async def test_numbers_that_are_none_do_not_end_the_live_stream() -> None:
    async def metrics(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b"feed_sequence NaN\ntimeseries_write_coordinator_flush_total +Inf\n"
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    server = await asyncio.start_server(metrics, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    place = DatabasePlace(name="db", kind=PartKind.TIMESERIES, part="db", store="", queue="q")
    places = FleetMap(data_dir="", queues=(queue("q", "memory://numbers"),), databases=(place,))
    host = FixedFleet(places, [part("db", kind=PartKind.TIMESERIES, address=address)])
    async with server, serving(host, "k") as (_, client):
        rows = await client.get("api/databases", headers=bearer("k"))
        assert rows.status_code == 200
        assert rows.json()[0]["feed"]["sequence"] is None
        assert (await client.get("api/overview", headers=bearer("k"))).status_code == 200


async def test_log_lines_that_are_not_text_are_still_sent() -> None:
    host = FixedFleet()
    async with (
        serving(host, "k") as (_, client),
        client.stream("GET", "api/live", headers=bearer("k")) as got,
    ):
        host.say("bad \udcff byte")
        async for line in got.aiter_lines():
            if line.startswith("data:") and "bad" in line:
                assert json.loads(line[5:])["text"] == "bad ? byte"
                return


async def test_cookies_of_other_programs_do_not_hide_the_session() -> None:
    async with serving(FixedFleet()) as (console, client):
        token = console.url.partition("#token=")[2]
        opened = await client.post("api/session", json={"token": token})
        name, _, secret = opened.headers["set-cookie"].partition(";")[0].partition("=")
        for cookies in (
            f'prefs={{"a": [1, 2]}}; {name}={secret}',
            f"{name}={secret}; {name}=other",
            f"{name}=other; ;=; a:b; {name}={secret}",
        ):
            headers = {"Cookie": cookies}
            async with httpx.AsyncClient(base_url=client.base_url, trust_env=False) as other:
                assert (await other.get("api/overview", headers=headers)).status_code == 200
                headers = {"Cookie": cookies.replace(secret, "guess")}
                assert (await other.get("api/overview", headers=headers)).status_code == 401


async def test_a_record_that_its_batch_does_not_have_is_not_found(tmp_path: Path) -> None:
    await produce(tmp_path)
    async with serving(fleet(queue("q", str(tmp_path))), "k") as (_, client):
        ask = "api/trace?buffer=q&sequence=0&index="
        assert (await client.get(f"{ask}2", headers=bearer("k"))).json()["found"] is True
        missing = (await client.get(f"{ask}3", headers=bearer("k"))).json()
        assert (missing["found"], "3 records" in missing["text"]) == (False, True)
        assert (await client.get(f"{ask}{2**63}", headers=bearer("k"))).status_code == 400


async def test_a_batch_that_no_shard_refers_to_is_found_in_the_folder_of_its_shard(tmp_path: Path) -> None:
    async with await ShardedProducer.open(ProducerConfig(store=str(tmp_path)), shards=2) as producer:
        await producer.produce([b"x"], b"", key=b"k")
        await producer.flush()
    stored = forgotten(tmp_path)
    async with serving(fleet(queue("q", str(tmp_path))), "k") as (_, client):
        traced = (await client.get(f"api/trace?id={stored.stem}", headers=bearer("k"))).json()
        assert traced["found"] is True
        assert "no queue refers to it" in traced["text"]


async def test_streams_opened_together_do_not_exceed_the_cap() -> None:
    hub = LiveHub(Sources(FixedFleet(), SYSTEM_CLOCK))
    for _ in range(STREAMS_MAX + 6):
        hub.check_room()
    streams = [hub.stream(None) for _ in range(STREAMS_MAX + 6)]
    try:
        first = [await anext(stream) for stream in streams]
        assert sum(piece.startswith(b"event: error") for piece in first) == 6
    finally:
        for stream in streams:
            await stream.aclose()
        await hub.close()


async def test_a_new_client_gets_the_state_and_others_do_not_get_it_again() -> None:
    hub = LiveHub(Sources(FixedFleet(), SYSTEM_CLOCK))
    streams = [hub.stream(None) for _ in range(20)]
    try:
        for stream in streams:
            await anext(stream)
            assert (await anext(stream)).count(b"event: overview") == 1
        assert hub._ring.newest("overview", 100) == []
    finally:
        for stream in streams:
            await stream.aclose()
        await hub.close()


def test_what_a_slow_client_missed_is_made_for_it_bit_by_bit() -> None:
    pieces = list(in_pieces(Event(number, "log", b"x" * 100_000) for number in range(20)))
    assert max(map(len, pieces)) < 400_000
    assert b"".join(pieces).count(b"id: ") == 20


async def test_events_during_a_write_to_a_client_follow_immediately() -> None:
    hub = LiveHub(Sources(FixedFleet(), SYSTEM_CLOCK))
    stream = hub.stream(None)
    try:
        await anext(stream)
        assert b"event: overview" in await anext(stream)
        hub.push("log", {"text": "meanwhile"})
        async with asyncio.timeout(0.5):
            assert b"meanwhile" in await anext(stream)
    finally:
        await stream.aclose()
        await hub.close()
