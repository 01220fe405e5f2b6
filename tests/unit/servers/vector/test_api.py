"""The vector API over HTTP: shapes, types, errors, keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from tests.unit.servers.doubles import until
from tests.unit.vector.doubles import World

from penstock.clock import SYSTEM_CLOCK
from penstock.coordinator import Put
from penstock.errors import ConfigError
from penstock.http.auth import Keyring
from penstock.http.message import Fault, Request, Response
from penstock.metrics import Registry
from penstock.servers.vector.routes import VectorApi, vector_app
from penstock.servers.vector.settings import VectorSettings
from penstock.vector import VectorStore
from penstock.vector.api import decoded_size, parse_delete, parse_write
from penstock.vector.codec import decode_id
from penstock.vector.keys import data_key, dictionary_key

ROOT = "/api/v1/vector"
JSON = "application/json"
PROTOBUF_JSON = "application/protobuf+json"
UPSERT = {
    "upsertVectors": [
        {"id": "a/1", "attributes": {"vector": [1, 0, 0], "lang": "en", "rank": 2}},
        {"id": "b", "attributes": {"vector": [0, 1, 0.5], "lang": "de", "draft": True}},
    ]
}


class Server:
    """Calls the application without a network."""

    def __init__(self, world: World, settings: VectorSettings) -> None:
        self.world = world
        self.registry = Registry()
        self.api = VectorApi(settings, clock=SYSTEM_CLOCK, registry=self.registry)
        self.app = vector_app(self.api, settings)

    async def ask(
        self, method: str, path: str, body: object = None, *, kind: str = JSON, key: str | None = None
    ) -> Response:
        headers = {b"content-type": kind.encode()} if kind else {}
        if key is not None:
            headers[b"authorization"] = b"Bearer " + key.encode()
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given: list[Response] = []
        coroutine = self.app.begin(Request(method.encode(), path.encode(), headers, data), given.append)
        return given[0] if coroutine is None else await coroutine

    async def told(self, method: str, path: str, body: object = None, **more: str) -> tuple[int, dict]:
        response = await self.ask(method, path, body, **more)  # type: ignore[arg-type]
        assert isinstance(response.body, bytes)
        return response.status, json.loads(response.body)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    served = Server(World(), VectorSettings())
    served.api.database = await served.world.open()
    yield served
    if served.api.database.failed is None:
        await served.api.database.close()
    else:
        await served.api.database.abort()


async def test_an_acknowledged_write_is_durable_and_found(server: Server) -> None:
    assert await server.told("POST", f"{ROOT}/write", UPSERT) == (
        200,
        {"status": "success", "vectorsUpserted": 2},
    )
    assert server.world.disk.unflushed == []
    status, answer = await server.told(
        "POST", f"{ROOT}/search", {"vector": [1, 0, 0], "k": 1, "includeFields": ["lang"]}
    )
    assert (status, answer["results"]) == (
        200,
        [{"score": 0.0, "vector": {"id": "a/1", "attributes": {"lang": "en"}}}],
    )
    status, answer = await server.told("GET", f"{ROOT}/vectors/a%2F1")
    assert (status, answer["vector"]) == (
        200,
        {"id": "a/1", "attributes": {"lang": "en", "rank": 2.0, "vector": [1, 0, 0]}},
    )


async def test_deletions_count_the_ids_they_were_given(server: Server) -> None:
    await server.ask("POST", f"{ROOT}/write", UPSERT)
    status, answer = await server.told("POST", f"{ROOT}/delete", {"ids": ["b", "nobody"]})
    assert (status, answer) == (200, {"status": "success", "vectorsDeleted": 2})
    assert (await server.told("GET", f"{ROOT}/vectors/b"))[0] == 404


async def test_filters_and_absent_include_fields(server: Server) -> None:
    await server.ask("POST", f"{ROOT}/write", UPSERT)
    wanted = {"and": [{"eq": {"field": "draft", "value": True}}, {"neq": {"field": "lang", "value": "en"}}]}
    _, answer = await server.told("POST", f"{ROOT}/search", {"vector": [0, 0, 0], "filter": wanted})
    assert [result["vector"] for result in answer["results"]] == [
        {"id": "b", "attributes": {"lang": "de", "draft": True, "vector": [0, 1, 0.5]}}
    ]


async def test_a_damaged_vector_is_a_warning_in_searches_and_an_error_when_read(server: Server) -> None:
    await server.ask("POST", f"{ROOT}/write", UPSERT)
    assert server.world.storage is not None
    stored = await server.world.storage.get(dictionary_key("b"))
    assert stored is not None
    await server.world.storage.apply([Put(data_key(decode_id(stored)), b"junk")])
    await server.ask("POST", f"{ROOT}/write", {"upsertVectors": UPSERT["upsertVectors"][:1]})
    status, answer = await server.told("POST", f"{ROOT}/search", {"vector": [0, 1, 0], "k": 1})
    assert (status, [result["vector"]["id"] for result in answer["results"]]) == (200, ["a/1"])
    assert answer["warnings"] == ["'b' is left out: its record is damaged. Write it again"]
    status, answer = await server.told("GET", f"{ROOT}/vectors/b")
    assert status == 500
    assert "'b' is damaged, write it again" in answer["message"]
    await server.ask("POST", f"{ROOT}/write", UPSERT)
    _, answer = await server.told("POST", f"{ROOT}/search", {"vector": [0, 1, 0], "k": 1})
    assert "warnings" not in answer
    assert answer["results"][0]["vector"]["id"] == "b"
    assert (await server.told("GET", f"{ROOT}/vectors/b"))[0] == 200


@pytest.mark.parametrize("kind", [JSON, PROTOBUF_JSON, "application/json; charset=utf-8"])
async def test_responses_have_the_type_that_was_sent(server: Server, kind: str) -> None:
    response = await server.ask("POST", f"{ROOT}/write", UPSERT, kind=kind)
    assert response.status == 200
    assert response.content_type == kind.partition(";")[0].encode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("write", b"{"),
        ("write", b"\xff"),
        ("write", {}),
        ("write", {"upsertVectors": [], "more": 1}),
        ("write", {"upsertVectors": [{"id": "a"}]}),
        ("write", {"upsertVectors": [{"id": "a", "attributes": {"lang": "en"}}]}),
        ("write", {"upsertVectors": [{"id": "a", "attributes": {"vector": "x"}}]}),
        ("write", {"upsertVectors": [{"id": "a", "attributes": {"vector": [1, 2, "x"]}}]}),
        ("write", {"upsertVectors": [{"id": "a", "attributes": {"vector": [1, 0, 0], "lang": [1]}}]}),
        ("write", {"upsertVectors": [{"id": "a", "attributes": {"vector": [1, 0]}}]}),
        ("write", {"upsertVectors": [{"id": "a", "attributes": {"vector": [1, 0, 1e300]}}]}),
        ("delete", {"ids": [1]}),
        ("delete", {"ids": [""]}),
        ("search", {"k": 3}),
        ("search", {"vector": [1, 0]}),
        ("search", {"vector": [1, 0, 0], "k": 0}),
        ("search", {"vector": [1, 0, 0], "filter": {"eq": {"field": "body", "value": "x"}}}),
        ("search", {"vector": [1, 0, 0], "includeFields": ["nosuch"]}),
        ("search", b"[" * 100_000),
    ],
)
async def test_an_invalid_request_is_400_with_a_message(server: Server, path: str, body: object) -> None:
    status, answer = await server.told("POST", f"{ROOT}/{path}", body)
    assert status == 400
    assert answer["status"] == "error"
    assert answer["message"]


async def test_other_mistakes_have_their_status(server: Server) -> None:
    assert (await server.ask("POST", f"{ROOT}/write", UPSERT, kind="text/plain")).status == 415
    assert (await server.ask("GET", f"{ROOT}/nothing")).status == 404
    response = await server.ask("GET", f"{ROOT}/write")
    assert (response.status, list(response.headers)) == (405, [(b"allow", b"POST")])
    assert (await server.told("GET", f"{ROOT}/vectors/zz"))[0] == 404
    assert server.app.fault(Fault.TOO_LARGE, "large").status == 413
    for kind in (b"application/json", b"application/protobuf+json"):
        head = Request(b"POST", b"/", {b"content-type": kind})
        assert server.app.fault(Fault.OVERLOADED, "busy", head).content_type == kind


async def test_probes_and_metrics(server: Server) -> None:
    assert (await server.ask("GET", "/-/healthy")).status == 200
    assert (await server.ask("GET", "/-/ready")).status == 200
    await server.ask("POST", f"{ROOT}/write", UPSERT)
    metrics = await server.ask("GET", "/metrics")
    assert isinstance(metrics.body, bytes)
    assert b"vector_vectors 2" in metrics.body
    assert b"vector_vectors_upserted" in metrics.body
    assert (await server.ask("POST", "/-/flush")).status == 200


async def test_a_server_that_is_opening_or_stopping_responds_503(server: Server) -> None:
    store, server.api.database = server.api.database, None
    assert (await server.ask("GET", "/-/ready")).status == 503
    assert (await server.ask("GET", "/-/healthy")).status == 200
    response = await server.ask("POST", f"{ROOT}/search", {"vector": [1, 0, 0]})
    assert (response.status, list(response.headers)) == (503, [(b"retry-after", b"1")])
    server.api.database, server.api.draining = store, True
    assert (await server.ask("POST", f"{ROOT}/write", UPSERT)).status == 503


async def test_a_fenced_server_acknowledges_nothing_and_is_not_healthy(server: Server) -> None:
    newer = await server.world.open()
    assert (await server.ask("POST", f"{ROOT}/write", UPSERT)).status == 503
    assert (await server.ask("GET", "/-/healthy")).status == 503
    assert len(newer) == 0
    await newer.close()


@pytest.mark.parametrize("call", ["apply", "flush"])
async def test_a_stalled_storage_makes_the_outcome_unknown_and_a_retry_safe(
    call: str,
) -> None:
    server = Server(World(), VectorSettings(acknowledge_timeout="50ms"))
    server.api.database = await server.world.open()
    assert server.world.storage is not None
    gate = server.world.storage.gate(call)
    for path, body in (("write", UPSERT), ("delete", {"ids": ["b"]})):
        response = await server.ask("POST", f"{ROOT}/{path}", body)
        assert (response.status, list(response.headers)) == (503, [(b"retry-after", b"1")])
        assert isinstance(response.body, bytes)
        assert b"not durable within 0.05 s: the outcome is unknown" in response.body
    assert (await server.ask("POST", "/-/flush")).status == 503
    gate.set()
    await server.api.database.flush()
    patient = Server(server.world, VectorSettings())
    patient.api.database = server.api.database
    assert (await patient.told("POST", f"{ROOT}/write", UPSERT))[0] == 200
    assert len(server.api.database) == 2
    await server.api.database.close()


async def test_searches_above_the_limit_get_503_and_writes_continue(server: Server) -> None:
    assert server.api.database is not None
    with contextlib.ExitStack() as taken:
        for _ in range(64):
            taken.enter_context(server.api.database._readers.place())
        response = await server.ask("POST", f"{ROOT}/search", {"vector": [1, 0, 0]})
        assert (response.status, list(response.headers)) == (503, [(b"retry-after", b"1")])
        assert (await server.ask("GET", f"{ROOT}/recall")).status == 503
        assert (await server.ask("POST", f"{ROOT}/write", UPSERT)).status == 200
    assert (await server.ask("POST", f"{ROOT}/search", {"vector": [1, 0, 0]})).status == 200


async def test_a_search_too_large_for_its_collection_is_413_before_it_is_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(body: bytes) -> object:
        raise AssertionError("it was read")

    many = [{"eq": {"field": "lang", "value": f"{n:080}"}} for n in range(5000)]
    wanted = {"vector": [1, 0, 0], "filter": {"or": many}}
    assert (await server.told("POST", f"{ROOT}/search", wanted))[0] == 200
    monkeypatch.setattr("penstock.servers.vector.routes.parse_search", unread)
    large = b'{"vector": [1,0,' + b" " * (2**20 + 200) + b"0]}"
    status, answer = await server.told("POST", f"{ROOT}/search", large)
    assert status == 413
    assert "at most 1,048,768 bytes" in answer["message"]
    head = Request(b"POST", f"{ROOT}/search".encode(), {b"content-length": b"%d" % len(large)})
    refused = server.app.screen(head)
    assert refused is not None
    assert refused.status == 413
    spaced = json.dumps(UPSERT).encode() + b" " * 2**21
    assert (await server.ask("POST", f"{ROOT}/write", spaced)).status == 200


async def test_the_memory_of_bodies_is_bounded_over_all_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, go = asyncio.Event(), asyncio.Event()
    search = VectorStore.search

    async def slow(self: VectorStore, *args: object, **more: object) -> object:
        began.set()
        await go.wait()
        return await search(self, *args, **more)  # type: ignore[arg-type]

    settings = VectorSettings(max_body_bytes=10_000, max_decoded_bytes=10_000)
    server = Server(World(), settings)
    server.api.database = await server.world.open()
    monkeypatch.setattr(VectorStore, "search", slow)
    body = b'{"vector":[1,0,0]' + b" " * 6000 + b"}"
    first = asyncio.ensure_future(server.ask("POST", f"{ROOT}/search", body))
    await began.wait()
    held = server.registry.value("vector.decoded_bytes")
    assert 6000 < held < 7000
    for path, more in (("search", body), ("write", b" " * 6000), ("delete", b" " * 6000)):
        response = await server.ask("POST", f"{ROOT}/{path}", more)
        assert (response.status, list(response.headers)) == (503, [(b"retry-after", b"1")])
        assert isinstance(response.body, bytes)
        assert b"limit is 10,000" in response.body
    assert server.registry.value("vector.decoded_bytes") == held
    go.set()
    assert (await first).status == 200
    assert server.registry.value("vector.decoded_bytes") == 0
    assert (await server.ask("POST", f"{ROOT}/write", UPSERT)).status == 200
    assert server.registry.value("vector.decoded_bytes") == 0
    await server.api.database.close()


async def test_a_body_that_can_never_fit_is_413_without_a_retry() -> None:
    server = Server(World(), VectorSettings(max_body_bytes=10_000, max_decoded_bytes=10_000))
    server.api.database = await server.world.open()
    zeros = b'{"upsertVectors":[{"id":"a","attributes":{"vector":[' + b"0," * 1000 + b"0]}}]}"
    status, answer = await server.told("POST", f"{ROOT}/write", zeros)
    assert status == 413
    assert "fewer at a time" in answer["message"]
    assert server.registry.value("vector.decoded_bytes") == 0
    await server.api.database.close()


@pytest.mark.parametrize("call", ["apply", "flush"])
async def test_a_write_that_waits_for_the_storage_holds_no_memory(call: str) -> None:
    server = Server(World(), VectorSettings())
    server.api.database = await server.world.open()
    assert server.world.storage is not None
    gate = server.world.storage.gate(call)
    writing = asyncio.ensure_future(server.ask("POST", f"{ROOT}/write", UPSERT))
    await until(lambda: server.api.database is not None and server.api.database.unstored == 1)
    await until(lambda: server.registry.value("vector.decoded_bytes") == 0)
    assert not writing.done()
    gate.set()
    assert (await writing).status == 200
    await server.api.database.close()


@pytest.mark.parametrize("call", ["apply", "flush"])
async def test_it_is_not_ready_while_the_storage_accepts_no_write(call: str) -> None:
    server = Server(World(), VectorSettings())
    server.api.database = await server.world.open()
    assert server.world.storage is not None
    gate = server.world.storage.gate(call)
    writing = asyncio.ensure_future(server.ask("POST", f"{ROOT}/write", UPSERT))
    await until(lambda: server.api.database is not None and server.api.database.unstored == 1)
    assert (await server.ask("GET", "/-/ready")).status == 200
    await server.world.clock.advance(20)
    status, answer = await server.told("GET", "/-/ready")
    assert (status, answer["message"][:18]) == (503, "no write succeeds:")
    assert (await server.ask("GET", "/-/healthy")).status == 200
    assert (await server.ask("GET", f"{ROOT}/vectors/none")).status == 404, "readers are served"
    gate.set()
    assert (await writing).status == 200
    assert (await server.ask("GET", "/-/ready")).status == 200
    await server.api.database.close()


@pytest.mark.parametrize(
    "body",
    [
        b'{"upsertVectors":[{"id":"a","attributes":{"vector":[' + b"0," * 300_000 + b"0]}}]}",
        b'{"upsertVectors":['
        + b",".join(b'{"id":"%d","attributes":{"vector":[1],"a":1}}' % n for n in range(20_000))
        + b"]}",
        b'{"ids":[' + b",".join(b'"%d"' % n for n in range(100_000)) + b"]}",
    ],
    ids=["components", "vectors", "ids"],
)
def test_the_memory_of_a_body_is_estimated_within_a_factor_of_two(body: bytes) -> None:
    parse = parse_delete if body.startswith(b'{"ids') else parse_write
    tracemalloc.start()
    try:
        parse(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert decoded_size(body) / 2 < peak + len(body) < decoded_size(body) * 2


async def test_recall_is_reported(server: Server) -> None:
    await server.ask("POST", f"{ROOT}/write", UPSERT)
    assert await server.told("GET", f"{ROOT}/recall?sample=5&k=3") == (
        200,
        {"status": "success", "recall": 1.0, "k": 3, "sample": 2, "vectors": 2},
    )
    for wrong in ("sample=x", "sample=0", "k=0", "limit=3", "nprobe=0"):
        assert (await server.ask("GET", f"{ROOT}/recall?{wrong}")).status == 400


async def test_keys_limit_access_by_scope() -> None:
    settings = VectorSettings(keys=Keyring.parse("reader:read,writer:rw"))
    server = Server(World(), settings)
    server.api.database = await server.world.open()
    search = {"vector": [1, 0, 0]}
    assert (await server.ask("POST", f"{ROOT}/search", search)).status == 401
    assert (await server.ask("POST", f"{ROOT}/search", search, key="reader")).status == 200
    assert (await server.ask("POST", f"{ROOT}/write", UPSERT, key="reader")).status == 403
    assert (await server.ask("POST", f"{ROOT}/write", UPSERT, key="writer")).status == 200
    assert (await server.ask("POST", f"{ROOT}/delete", {"ids": ["a"]}, key="writer")).status == 403
    assert (await server.ask("GET", "/-/healthy")).status == 200
    assert (await server.ask("GET", "/metrics")).status == 401
    assert (await server.ask("GET", "/metrics", key="reader")).status == 200
    assert (await server.ask("POST", "/-/flush", key="writer")).status == 403
    await server.api.database.close()


def test_a_server_reachable_from_other_machines_needs_keys() -> None:
    with pytest.raises(ConfigError, match="VECTOR_API_KEYS"):
        VectorSettings(host="0.0.0.0")
    VectorSettings(host="0.0.0.0", allow_no_keys=True)
    for wrong in (
        {"port": 70_000},
        {"acknowledge": "maybe"},
        {"acknowledge_timeout": "0s"},
        {"requests_max": 0},
        {"max_body_bytes": 2000, "max_decoded_bytes": 1000},
    ):
        with pytest.raises(ConfigError):
            VectorSettings(**wrong)  # type: ignore[arg-type]
