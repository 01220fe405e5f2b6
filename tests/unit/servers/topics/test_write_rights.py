"""Which key may configure a topic by writing to it, even while the topic is being deleted."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.topics.engine_doubles import FSYNC, World, settle

from penstock.http.app import App
from penstock.http.auth import Keyring
from penstock.http.message import Request, Response
from penstock.servers.topics.routes import TopicsApi, topics_app

WRITE = b'{"records":[{"data":1}],"config":{"durability":"ephemeral","ttl_ms":7}%b}'


def send(app: App, method: bytes, path: bytes, key: bytes, body: bytes = b"") -> asyncio.Future[Response]:
    answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    headers = {b"content-type": b"application/json", b"authorization": b"Bearer " + key}
    coroutine = app.begin(Request(method, path, headers, body), answer.set_result)
    return answer if coroutine is None else asyncio.ensure_future(coroutine)


async def served(world: World) -> App:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    await settle()
    return topics_app(TopicsApi(engine), Keyring.parse("wk:write,dk:delete"))


async def test_a_topic_being_deleted_is_not_configured_by_a_write_key() -> None:
    world = World()
    app = await served(world)
    world.committers.hold()
    deleting = send(app, b"DELETE", b"/v0/topics/t", b"dk")
    await settle()
    writing = send(app, b"POST", b"/v0/topics/t", b"wk", WRITE % b"")
    await settle()
    world.committers.release()
    assert (await deleting).status == 200
    assert (await writing).status == 403


@pytest.mark.parametrize(("more", "status"), [(b"", 201), (b',"create":false', 404)])
async def test_a_topic_deleted_while_a_write_waits_is_recreated_with_defaults(
    more: bytes, status: int
) -> None:
    world = World()
    app = await served(world)
    world.committers.hold()
    keyed = b'{"records":[{"data":0}],"idempotency_key":"k"}'
    first = send(app, b"POST", b"/v0/topics/t", b"wk", keyed)
    await settle()
    # It waits for the other write with its key, and then finds that the topic is gone.
    second = send(app, b"POST", b"/v0/topics/t", b"wk", WRITE % (b',"idempotency_key":"k"' + more))
    await settle()
    deleting = send(app, b"DELETE", b"/v0/topics/t", b"dk")
    await settle()
    world.committers.release()
    assert (await first).status == 200
    assert (await deleting).status == 200
    assert (await second).status == status
    if status == 201:
        assert world.engine.state("t").config.ttl_ms == 0
