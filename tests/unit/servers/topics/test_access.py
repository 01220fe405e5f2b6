"""Access control through the whole HTTP layer."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.unit.servers.doubles import Running, http, running, until

from penstock.topics.config import TopicConfig

WRITE = {"records": [{"data": 1}]}


def client_of(server: Running, key: str | None) -> httpx.AsyncClient:
    return http(server.url, key=key)


async def test_a_key_comes_before_everything_but_probes() -> None:
    async with running("k") as server, client_of(server, None) as anonymous, client_of(server, "x") as wrong:
        for client in (anonymous, wrong):
            for method, path in (
                ("GET", "/v0/topics/x"),
                ("GET", "/nowhere"),
                ("PATCH", "/v0/topics/x"),
                ("GET", "/v0/metrics"),
                ("OPTIONS", "/"),
            ):
                response = await client.request(method, path)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "unauthorized"
            assert (await client.get("/v0/health")).status_code == 200
            assert (await client.get("/readyz")).status_code == 200


async def test_probes_may_need_a_key_of_any_scope() -> None:
    async with (
        running("k:write", probes_need_key=True) as server,
        client_of(server, None) as anonymous,
        client_of(server, "k") as client,
    ):
        for path in ("/v0/health", "/healthz", "/v0/ready", "/readyz"):
            assert (await anonymous.get(path)).status_code == 401
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/v0/metrics")).status_code == 403


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("PUT", "/v0/topics/x", "admin"),
        ("GET", "/v0/topics/x", "read"),
        ("GET", "/v0/topics", "read"),
        ("DELETE", "/v0/topics/x", "delete"),
        ("POST", "/v0/topics/x", "write"),
        ("POST", "/v0/topics/x/diff", "read"),
        ("POST", "/v0/topics/x/delete", "delete"),
        ("GET", "/v0/metrics", "read"),
    ],
)
async def test_every_endpoint_has_its_scope(method: str, path: str, scope: str) -> None:
    others = "+".join(word for word in ("read", "write", "delete", "admin") if word != scope)
    async with (
        running(f"yes:{scope},no:{others}") as server,
        client_of(server, "yes") as allowed,
        client_of(server, "no") as refused,
    ):
        response = await refused.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
        assert (await allowed.request(method, path)).status_code not in (401, 403)


async def test_prefixes_are_checked_on_the_decoded_name_and_lists_are_filtered() -> None:
    async with running("all,some::team:a|b") as server, client_of(server, "all") as root:
        for name in ("team:a1", "team:b1", "b", "c"):
            assert (await root.put(f"/v0/topics/{name}")).status_code == 201
        async with client_of(server, "some") as client:
            assert (await client.get("/v0/topics/team%3Aa1")).status_code == 200
            for path in ("/v0/topics/team%3Ab1", "/v0/topics/c", "/v0/topics/%63"):
                assert (await client.get(path)).status_code == 403
            listed = (await client.get("/v0/topics?page_size=1")).json()
            assert [topic["topic"] for topic in listed["topics"]] == ["b"]
            more = (await client.get("/v0/topics", params={"cursor": listed["next_cursor"]})).json()
            assert [topic["topic"] for topic in more["topics"]] == ["team:a1"]


async def test_creating_with_a_config_needs_admin_and_writing_with_one_does_not() -> None:
    body = {**WRITE, "config": {"durable": True}}
    async with running("all,w:write") as server, client_of(server, "w") as client:
        assert (await client.post("/v0/topics/x", json=body)).status_code == 403
        assert (await client.post("/v0/topics/x", json={**body, "records": []})).status_code == 403
        assert server.engine.topic_count == 0
        assert (await client.post("/v0/topics/x", json=WRITE)).status_code == 201
        assert (await client.post("/v0/topics/x", json=body)).status_code == 200
        async with client_of(server, "all") as root:
            assert (await root.post("/v0/topics/y", json=body)).status_code == 201


async def test_requests_per_key_are_limited_and_slots_are_released() -> None:
    async with (
        running("a,b", in_flight_per_key_max=2) as server,
        client_of(server, "a") as client,
        client_of(server, "b") as other,
    ):
        await server.engine.put_topic("x", TopicConfig())
        server.engine.committers.hold()
        held = [asyncio.create_task(client.post("/v0/topics/x", json=WRITE)) for _ in range(2)]
        await until(lambda: server.engine.write_count == 2)
        refused = await client.get("/v0/topics/x")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "detail" not in refused.json()["error"]
        assert (await client.get("/v0/metrics")).status_code == 200
        assert (await other.get("/v0/topics/x")).status_code == 200
        server.engine.committers.release()
        assert [(await task).status_code for task in held] == [200, 200]
        for _ in range(5):
            assert (await client.get("/v0/topics/none")).status_code == 404


async def test_slots_are_released_when_clients_leave() -> None:
    async with running(in_flight_per_key_max=1) as server:
        await server.engine.put_topic("x", TopicConfig())
        wire = await server.dial()
        wire.send(
            b"POST /v0/topics/x/diff HTTP/1.1\r\nContent-Type: application/json\r\n"
            b'Content-Length: 17\r\n\r\n{"wait_ms":20000}'
        )
        await until(lambda: server.engine.polls == 1)
        async with client_of(server, None) as client:
            assert (await client.get("/v0/topics/x")).status_code == 429
            await wire.close()
            await until(lambda: server.engine.polls == 0)
            assert (await client.get("/v0/topics/x")).status_code == 200
