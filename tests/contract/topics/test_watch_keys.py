"""§8, §10.1, §11: permission to watch, and limits of open streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.event_stream import Watcher
from tests.contract.raw_http import connect, request_bytes
from tests.contract.topics_server import PROTOCOLS, Api, Server, serving

KEYS = "all,reader:r,other:r,scoped:r:a.|b.,writer:w"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("locked") / "data"
    with serving(data, key="all", TOPICS_API_KEYS=KEYS) as running:
        for name in ("a.x", "c.x"):
            running.api(key="all").write(name, 1)
        yield running


def open_status(server: Server, wid: str, protocol: str, key: str | None = None, query: str = "") -> int:
    client = server.api(protocol, key=key).client
    with client.stream("GET", f"/v0/watch/{wid}{query}") as response:
        return response.status_code


def metrics(api: Api) -> dict[str, int]:
    found: dict[str, int] = api.client.get("/v0/metrics", headers={"Accept": "application/json"}).json()
    return found


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_watch_is_opened_with_the_key_that_created_it(locked: Server, protocol: str) -> None:
    created = locked.api(protocol, key="reader").ask("POST", "/v0/watch", {"topics": {"a.x": {}}})
    wid = created["wid"]
    assert open_status(locked, wid, protocol) == 401
    assert open_status(locked, wid, protocol, key="other") == 401
    assert open_status(locked, wid, protocol, key="unknown") == 401
    assert open_status(locked, wid, protocol, key="reader") == 200
    assert open_status(locked, wid, protocol, query="?token=reader") == 200
    assert open_status(locked, wid, protocol, query="?token=reader&token=other") == 200
    assert open_status(locked, wid, protocol, query="?token=other&token=reader") == 401


def test_an_unknown_watch_is_reported_before_the_key_is_checked(locked: Server) -> None:
    assert open_status(locked, "wid_unknown", "h1") == 404
    response = locked.api().client.get("/v0/watch/wid_unknown", headers={"Accept": "text/plain"})
    assert response.status_code == 406


def test_creating_a_watch_requires_read_and_the_names(locked: Server) -> None:
    body = {"topics": {"a.x": {}}}
    assert locked.api().refused("POST", "/v0/watch", body, status=401)["code"] == "unauthorized"
    assert locked.api(key="writer").refused("POST", "/v0/watch", body, status=403)["code"] == "forbidden"
    scoped = locked.api(key="scoped")
    scoped.ask("POST", "/v0/watch", body)
    refused = scoped.refused("POST", "/v0/watch", {"topics": {"a.x": {}, "c.x": {}}}, status=403)
    assert refused["detail"] == {"topic": "c.x"}
    assert locked.api().refused("POST", "/v0/watch?token=reader", body, status=401)["code"] == "unauthorized"


async def test_a_star_shows_a_key_only_the_names_it_covers(locked: Server) -> None:
    watcher = Watcher(locked, "h1", key="scoped")
    created = await watcher.create({"*": {}})
    assert list(created["topics"]) == ["a.x"]
    async with watcher.open(created["wid"]) as stream:
        await stream.until_caught_up()
        writer = Watcher(locked, "h1", key="all")
        await writer.write("c.new", 1)
        await writer.write("b.new", 1)
        event = await stream.next()
        while event.name != "record":
            event = await stream.next()
        assert event.data["topic"] == "b.new"


def test_sessions_are_capped(tmp_path: Path) -> None:
    with serving(tmp_path / "data", TOPICS_MAX_WATCH_SESSIONS="2") as server:
        api = server.api()
        api.write("x", 1)
        for _ in range(2):
            api.ask("POST", "/v0/watch", {"topics": {"x": {}}})
        refused = api.refused("POST", "/v0/watch", {"topics": {"x": {}}}, status=429)
        assert refused["detail"] == {"limit": "max_watch_sessions", "max": 2}
        assert metrics(api)["watch_sessions"] == 2
        missing = api.refused("POST", "/v0/watch", {"topics": {"y": {}}}, status=404)
        assert missing["code"] == "topic_not_found"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_streams_are_capped_and_their_slots_are_released(tmp_path: Path, protocol: str) -> None:
    with serving(tmp_path / "data", TOPICS_MAX_SSE_CONNECTIONS="2") as server:
        api, watcher = server.api(), Watcher(server, protocol)
        api.write("x", 1)
        wids = [(await watcher.create({"x": {}}))["wid"] for _ in range(3)]
        async with watcher.open(wids[0]) as first, watcher.open(wids[1]):
            await first.until_caught_up()
            response = server.api(protocol).client.get(f"/v0/watch/{wids[2]}")
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert "detail" not in response.json()["error"]
            assert metrics(api)["sse_connections"] == 2
            async with watcher.open(wids[0]) as again:  # takes over: one that goes and one that comes
                assert (await again.next()).name == "caught-up"
        await drained(api)
        async with watcher.open(wids[2]) as stream:
            await stream.until_caught_up()


async def test_streams_are_capped_separately_for_each_key(tmp_path: Path) -> None:
    settings = {"TOPICS_API_KEYS": "one,two", "TOPICS_MAX_SSE_CONNECTIONS_PER_KEY": "1"}
    with serving(tmp_path / "data", key="one", **settings) as server:
        server.api(key="one").write("x", 1)
        one, two = (Watcher(server, "h1", key=key) for key in ("one", "two"))
        first, second = [(await one.create({"x": {}}))["wid"] for _ in range(2)]
        other = (await two.create({"x": {}}))["wid"]
        async with one.open(first), two.open(other):
            assert server.api(key="one").client.get(f"/v0/watch/{second}").status_code == 429


async def test_streams_do_not_count_as_requests_in_progress(tmp_path: Path) -> None:
    with serving(tmp_path / "data", TOPICS_MAX_INFLIGHT_PER_KEY="1") as server:
        watcher = Watcher(server, "h1")
        await watcher.write("x", 1)
        async with watcher.watch({"x": {}}) as first, watcher.watch({"x": {}}):
            await first.until_caught_up()
            await watcher.write("x", 2)
            assert (await first.next()).seqs == [2]


async def test_the_slot_of_a_vanished_client_is_released(server: Server) -> None:
    api = server.api()
    watcher = Watcher(server, "h1")
    await watcher.write("vanishing", 1)
    before = metrics(api)["sse_connections"]
    created = await watcher.create({"vanishing": {}})
    with connect(server) as raw:
        raw.send(request_bytes("GET", created["stream_url"]))
        assert raw.status_line() == 200
        assert metrics(api)["sse_connections"] == before + 1
    await drained(api, before)


async def drained(api: Api, count: int = 0) -> None:
    for _ in range(500):
        if metrics(api)["sse_connections"] <= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("streams are still counted")
