"""The rules of the `/v0` contract that the HTTP layer enforces for any engine."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from tests.unit.servers.doubles import Running, http, running, until

from penstock.errors import Corrupt, PermissionDenied, StorageFull, Unavailable
from penstock.topics.config import TopicConfig
from penstock.topics.errors import BatchTooLarge, CommitFailed, Damaged, Throttled, TopicFull

JSON = {"content-type": "application/json"}
CONFIG_FIELDS = set(TopicConfig.__struct_fields__)


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running() as server:
        yield server


@pytest.fixture
async def client(server: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with http(server.url) as client:
        yield client


def code(response: httpx.Response) -> str:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) <= {"code", "message", "detail"}
    assert body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    return str(body["error"]["code"])


async def test_put_creates_once_and_echoes_the_whole_config(client: httpx.AsyncClient) -> None:
    first = await client.put("/v0/topics/x", json={"durable": True, "ttl_ms": 5, "unknown": [1]})
    assert (first.status_code, first.json()["created"]) == (201, True)
    assert set(first.json()["config"]) == CONFIG_FIELDS
    assert first.json()["config"]["durability"] == "fsync"
    again = await client.put("/v0/topics/x")
    assert (again.status_code, again.json()["created"]) == (200, False)
    assert (again.json()["config"]["ttl_ms"], again.json()["config"]["durability"]) == (0, "disk")
    assert again.json()["performance"]["server_total_ms"] >= 0


@pytest.mark.parametrize(
    "body",
    [
        '{"ttl_ms":-1}',
        '{"ttl_ms":1.0}',
        '{"ttl_ms":"1"}',
        '{"ttl_ms":true}',
        '{"ttl_ms":null}',
        '{"ttl_ms":18446744073709551616}',
        '{"priority":2147483648}',
        '{"durable":1}',
        '{"durable":null}',
        '{"type":"stack"}',
        '{"type":null}',
        '{"durability":"maybe"}',
        '{"dead_letter":"no/name"}',
        "[]",
        "null",
        "{",
        "{} {}",
        '{"ttl_ms":01}',
        '{"ttl_ms":NaN}',
        "\ufeff{}",
    ],
)
async def test_an_invalid_config_is_refused(client: httpx.AsyncClient, body: str) -> None:
    response = await client.put("/v0/topics/x", content=body.encode(), headers=JSON)
    assert (response.status_code, code(response)) == (400, "invalid_request")
    assert (await client.get("/v0/topics/x")).status_code == 404


async def test_null_is_accepted_where_the_contract_allows_it(client: httpx.AsyncClient) -> None:
    config = {"priority": None, "durability": None, "dead_letter": None}
    assert (await client.put("/v0/topics/x", json=config)).status_code == 201
    write = {
        "records": [{"data": None, "tag": None, "node": None, "meta": None}],
        "node": None,
        "idempotency_key": None,
        "create": None,
        "config": None,
    }
    assert (await client.post("/v0/topics/x", json=write)).status_code == 200
    assert (await client.post("/v0/topics/x/diff", json={"node": None})).status_code == 200
    delete = await client.post("/v0/topics/x/delete", json={"before_seq": 1, "match": None})
    assert delete.status_code == 200


async def test_a_write_returns_the_sequences_of_its_records(client: httpx.AsyncClient) -> None:
    first = await client.post("/v0/topics/x", json={"records": [{"data": 1}, {"data": 2}]})
    body = first.json()
    performance = body.pop("performance")
    assert first.status_code == 201
    assert body == {
        "topic": "x",
        "first_seq": 1,
        "last_seq": 2,
        "seqs": [1, 2],
        "head_seq": 2,
        "count": 2,
        "created": True,
        "deduped": False,
    }
    assert performance.keys() == {"server_total_ms", "wal_append_ms", "fsync_ms"}
    assert performance["fsync_ms"] == 0
    one = await client.post("/v0/topics/x", json={"records": [{"data": 3}]})
    assert (one.status_code, one.json()["seqs"]) == (200, [3])


@pytest.mark.parametrize(
    ("query", "shown"),
    [("", True), ("?return_seqs=false", False), ("?return_seqs=0", False), ("?return_seqs=no", True)],
)
async def test_seqs_can_be_left_out_by_the_query_alone(
    client: httpx.AsyncClient, query: str, shown: bool
) -> None:
    body = {"records": [{"data": 1}], "return_seqs": False}
    assert ("seqs" in (await client.post(f"/v0/topics/x{query}", json=body)).json()) is shown


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"records":null}',
        b'{"records":{}}',
        b'{"records":[]}',
        b'{"records":[{}]}',
        b'{"records":[{"tag":"t"}]}',
        b'{"records":[{"data":1,"tag":1}]}',
        b'{"records":[{"data":1,"node":false}]}',
        b'{"records":[{"data":1}],"create":1}',
        b'{"records":[{"data":1}],"create":"true"}',
        b'{"records":[{"data":1}],"idempotency_key":7}',
        b'{"records":[{"data":1}],"config":[]}',
        b'{"records":[{"data":1}],"config":{"ttl_ms":-1}}',
        b'{"records":[{"data":1}],"disable_backpressure":null}',
        b'{"records":[{"data":01}]}',
        b'{"records":[{"data":NaN}]}',
        b'{"records":[{"data":"\x01"}]}',
        b'{"records":[{"data":"\xff"}]}',
        b'{"records":[{"data":"\xed\xa0\x80"}]}',
        b'{"records":[{"data":"\\ud800"}]}',
        b'{"records":[{"data":1,"tag":"\xc3"}]}',
        b'{"records":[{"data":1}],}',
        b'{"records":[{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        b"",
        b"\x00",
    ],
)
async def test_an_invalid_write_writes_nothing(
    server: Running, client: httpx.AsyncClient, body: bytes
) -> None:
    response = await client.post("/v0/topics/x", content=body, headers=JSON)
    assert (response.status_code, code(response)) == (400, "invalid_request")
    assert server.engine.topic_count == 0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "the body is empty"),
        (b" \n ", "the body is empty"),
        (rb'{"records":[{"data":"\ud800"}]}', "half of a surrogate pair"),
        (rb'{"records":[{"data":"\\\udbFF"}]}', "half of a surrogate pair"),
        (rb'{"records":[{"data":"\ud800\u0041"}]}', "half of a surrogate pair"),
        (rb'{"records":[{"data":"\ud800 and more text"}]}', "half of a surrogate pair"),
        (rb'{"records":[{"data":"\udc00"}]}', "half of a surrogate pair"),
        (rb'{"records":[{"data":"\ud83d\ude00\udc00"}]}', "half of a surrogate pair"),
        (rb'{"records":[{"data":"\\ud800"}', "Input data was truncated"),
        (rb'{"records":[{"data":"\ud83d\ude00"}', "Input data was truncated"),
        (b'{"records":[', "Input data was truncated"),
        (b'{"records":[],"config":{"type":"x"}}', "expected one of log, queue"),
        (b'{"records":[],"config":{"discard":"x - at `$.type`"}}', "expected one of old, reject"),
        (
            b'{"records":[],"config":{"durability":"x"}}',
            "expected one of ephemeral, memory, disk, fsync",
        ),
    ],
)
async def test_the_error_message_describes_the_mistake_in_a_body(
    client: httpx.AsyncClient, body: bytes, told: str
) -> None:
    response = await client.post("/v0/topics/x", content=body, headers=JSON)
    assert (response.status_code, code(response)) == (400, "invalid_request")
    message = response.json()["error"]["message"]
    assert told in message
    assert ("truncated" in message) is ("truncated" in told)


async def test_a_wrong_choice_in_a_config_is_reported_with_the_valid_ones(client: httpx.AsyncClient) -> None:
    response = await client.put("/v0/topics/x", json={"type": "stream"})
    assert response.json()["error"]["message"].endswith("at `$.type`; expected one of log, queue")


@pytest.mark.parametrize(
    ("path", "body"), [("diff", {}), ("diff", {"wait_ms": 50}), ("delete", {"match": "t"})]
)
async def test_damage_names_its_topic(
    server: Running, client: httpx.AsyncClient, path: str, body: dict[str, object]
) -> None:
    server.engine.error = Damaged("record 4 cannot be read", {"first_seq": 4, "last_seq": 4})
    error = (await client.post(f"/v0/topics/x/{path}", json=body)).json()["error"]
    assert error["message"] == 'topic "x": record 4 cannot be read'
    assert error["detail"] == {"topic": "x", "first_seq": 4, "last_seq": 4}


async def test_a_store_without_credentials_is_one_line_in_the_log(
    server: Running, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.error = PermissionDenied("reading s3://cold/x: no credentials found")
    response = await client.post("/v0/topics/x/diff")
    assert (response.status_code, code(response)) == (503, "not_ready")
    assert "no credentials found" in response.json()["error"]["message"]
    [record] = [record for record in caplog.records if record.name == "penstock.servers.errors"]
    assert (record.levelname, record.exc_info) == ("WARNING", None)


async def test_payloads_go_in_and_out_byte_for_byte(server: Running, client: httpx.AsyncClient) -> None:
    data = '{"z":1e300,"a":[1.10,"\\u00e9é\\n"],"a":null,"big":123456789012345678901234567890}'
    body = '{"records":[{"data":' + data + "}]}"
    assert (await client.post("/v0/topics/x", content=body.encode(), headers=JSON)).status_code == 201
    read = await client.post("/v0/topics/x/diff")
    assert data.encode() in read.content


@pytest.mark.parametrize("value", [None, "text/plain", "text/json", "", "x application/json"])
@pytest.mark.parametrize("path", ["/v0/topics/x", "/v0/topics/x/diff", "/v0/topics/x/delete"])
async def test_a_body_must_be_declared_as_json(
    client: httpx.AsyncClient, path: str, value: str | None
) -> None:
    headers = {} if value is None else {"content-type": value}
    response = await client.post(path, content=b"not json", headers=headers)
    assert (response.status_code, code(response)) == (415, "unsupported_media_type")


@pytest.mark.parametrize("value", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
async def test_a_content_type_may_have_parameters(client: httpx.AsyncClient, value: str) -> None:
    body = b'{"records":[{"data":1}]}'
    response = await client.post("/v0/topics/x", content=body, headers={"content-type": value})
    assert response.status_code == 201


async def test_an_empty_body_needs_no_type_on_put_and_diff_alone(client: httpx.AsyncClient) -> None:
    assert (await client.put("/v0/topics/x")).status_code == 201
    assert (await client.post("/v0/topics/x/diff")).status_code == 200
    assert (await client.post("/v0/topics/x")).status_code == 415
    assert (await client.post("/v0/topics/x/delete")).status_code == 415


async def test_the_idempotency_header_counts_only_without_the_field(
    server: Running, client: httpx.AsyncClient
) -> None:
    header = {"idempotency-key": "from-header"}
    for body in ({}, {"idempotency_key": None}, {"idempotency_key": "from-body"}):
        await client.post("/v0/topics/x", json={"records": [{"data": 1}], **body}, headers=header)
    assert server.engine.keys == ["from-header", "from-header", "from-body"]
    bad = await client.post(
        "/v0/topics/x", json={"records": [{"data": 1}]}, headers={b"idempotency-key": b"\xff"}
    )
    assert bad.status_code == 400


async def test_a_write_may_be_forbidden_to_create(client: httpx.AsyncClient) -> None:
    response = await client.post("/v0/topics/x", json={"records": [{"data": 1}], "create": False})
    assert (response.status_code, code(response)) == (404, "topic_not_found")
    assert response.json()["error"]["detail"] == {"topic": "x"}


async def test_a_diff_has_every_key_and_the_records_as_they_are(client: httpx.AsyncClient) -> None:
    await client.post("/v0/topics/x", json={"records": [{"data": {"a": 1}}, {"data": None}]})
    body = (await client.post("/v0/topics/x/diff", json={"from_seq": 1, "limit": 0})).json()
    performance = body.pop("performance")
    assert body == {
        "topic": "x",
        "records": [{"$seq": 2, "$ts": 1_748_450_000_000, "data": None}],
        "next_from_seq": 2,
        "head_seq": 2,
        "earliest_seq": 1,
        "caught_up": True,
        "tombstone": None,
        "lag": 0,
    }
    assert performance["records_scanned"] == 1
    assert "cold_segments_read" not in performance


async def test_a_large_page_comes_whole(client: httpx.AsyncClient) -> None:
    await client.post("/v0/topics/x", json={"records": [{"data": "x" * 10_000}] * 50})
    assert len((await client.post("/v0/topics/x/diff")).json()["records"]) == 50


@pytest.mark.parametrize(
    "body",
    [
        '{"from_seq":-1}',
        '{"from_seq":18446744073709551616}',
        '{"from_seq":1.0}',
        '{"from_seq":null}',
        '{"limit":4294967296}',
        '{"wait_ms":-1}',
        '{"max_batch_bytes":18446744073709551616}',
        '{"include_tags":1}',
        '{"include_meta":null}',
        '{"node":1}',
        '{"node":[1]}',
        '{"node":"%s"}' % ("é" * 65),
    ],
)
async def test_an_invalid_diff_is_refused(client: httpx.AsyncClient, body: str) -> None:
    await client.put("/v0/topics/x")
    response = await client.post("/v0/topics/x/diff", content=body.encode(), headers=JSON)
    assert (response.status_code, code(response)) == (400, "invalid_request")


async def test_a_long_poll_returns_when_something_is_published(
    server: Running, client: httpx.AsyncClient
) -> None:
    await client.put("/v0/topics/x")
    poll = asyncio.create_task(client.post("/v0/topics/x/diff", json={"wait_ms": 20_000}))
    await until(lambda: server.engine.polls == 1)
    await client.post("/v0/topics/x", json={"records": [{"data": 1}]})
    assert [record["$seq"] for record in (await poll).json()["records"]] == [1]


async def test_a_long_poll_ends_with_the_available_records_when_the_server_drains(
    server: Running, client: httpx.AsyncClient
) -> None:
    await client.put("/v0/topics/x")
    poll = asyncio.create_task(client.post("/v0/topics/x/diff", json={"wait_ms": 20_000}))
    await until(lambda: server.engine.polls == 1)
    server.api.drain()
    assert (await poll).json()["records"] == []
    refused = await client.post("/v0/topics/x", json={"records": [{"data": 1}]})
    assert (refused.status_code, code(refused)) == (503, "shutting_down")
    assert refused.headers["retry-after"] == "1"
    assert (await client.get("/v0/health")).status_code == 200


async def test_a_delete_needs_a_selector_before_it_needs_a_topic(client: httpx.AsyncClient) -> None:
    for body in ({}, {"before_seq": None}, {"match": None, "other": 1}):
        response = await client.post("/v0/topics/none/delete", json=body)
        assert (response.status_code, code(response)) == (400, "invalid_request")
    assert (await client.post("/v0/topics/none/delete", json={"before_seq": 1})).status_code == 404


@pytest.mark.parametrize(
    "match", [1, {}, [], ["tag", "Eq"], ["node", "Eq", "a"], ["tag", "Like", "a"], ["tag", "Glob", "a"], True]
)
async def test_a_bad_predicate_is_refused(client: httpx.AsyncClient, match: object) -> None:
    await client.put("/v0/topics/x")
    response = await client.post("/v0/topics/x/delete", json={"match": match})
    assert (response.status_code, code(response)) == (400, "invalid_request")


async def test_a_delete_returns_the_remaining_counts(client: httpx.AsyncClient) -> None:
    records = [{"data": 1, "tag": tag} for tag in "aabb"]
    await client.post("/v0/topics/x", json={"records": records})
    body = (await client.post("/v0/topics/x/delete", json={"match": ["tag", "Eq", "a"]})).json()
    assert body.pop("performance")["server_total_ms"] >= 0
    assert body == {"topic": "x", "deleted": 2, "earliest_seq": 3, "head_seq": 4, "count": 2, "bytes": 2}


async def test_the_state_of_a_topic_has_every_key(client: httpx.AsyncClient) -> None:
    await client.put("/v0/topics/x")
    body = (await client.get("/v0/topics/x?touch=false")).json()
    assert body.pop("performance").keys() == {"server_total_ms"}
    assert set(body.pop("config")) == CONFIG_FIELDS
    assert body == {
        "topic": "x",
        "type": "log",
        "head_seq": 0,
        "earliest_seq": 1,
        "next_seq": 1,
        "count": 0,
        "bytes": 0,
        "effective_priority": 0,
        "last_write_ts": None,
        "last_read_ts": None,
    }
    assert (await client.get("/v0/topics/x?touch=maybe")).json()["effective_priority"] == 500
    await client.put("/v0/topics/q", json={"type": "queue"})
    queue = (await client.get("/v0/topics/q")).json()["queue"]
    assert queue == {"ready": 0, "in_flight": 0, "dead_lettered": 0}


async def test_topics_are_listed_by_pages(client: httpx.AsyncClient) -> None:
    for name in ("b", "a1", "a2", "a3", "c"):
        await client.put(f"/v0/topics/{name}")
    first = (await client.get("/v0/topics?prefix=a&page_size=2")).json()
    assert [topic["topic"] for topic in first["topics"]] == ["a1", "a2"]
    assert json.loads(base64.b64decode(first["next_cursor"])) == {"after": "a2"}
    params = {"prefix": "a", "page_size": "2", "cursor": first["next_cursor"]}
    last = (await client.get("/v0/topics", params=params)).json()
    assert [topic["topic"] for topic in last["topics"]] == ["a3"]
    assert "next_cursor" not in last
    assert last["topics"][0].keys() == {
        "topic",
        "head_seq",
        "earliest_seq",
        "count",
        "bytes",
        "durable",
        "effective_priority",
    }
    for size in ("0", "x", "-1", "99999999999999999999999", "%EF%BC%91"):
        assert (await client.get(f"/v0/topics?page_size={size}&cursor=")).status_code == 200


@pytest.mark.parametrize("cursor", ["%%%", "bm9qc29u", "e30=", "eyJhZnRlciI6MX0=", "é", "////"])
async def test_a_cursor_from_elsewhere_is_refused(client: httpx.AsyncClient, cursor: str) -> None:
    response = await client.get("/v0/topics", params={"cursor": cursor})
    assert (response.status_code, code(response)) == (400, "invalid_request")


async def test_removing_a_topic_is_idempotent_and_may_require_it_to_be_empty(
    client: httpx.AsyncClient,
) -> None:
    await client.post("/v0/topics/x", json={"records": [{"data": 1}]})
    refused = await client.delete("/v0/topics/x?if_empty=1")
    assert (refused.status_code, code(refused)) == (409, "topic_not_empty")
    assert refused.json()["error"]["detail"] == {"topic": "x", "count": 1}
    for deleted in (True, False):
        body = (await client.delete("/v0/topics/x")).json()
        assert (body["deleted"], body["routers_removed"]) == (deleted, [])
    odd = await client.delete("/v0/topics/%22odd%0A")
    assert (odd.status_code, odd.json()["topic"]) == (200, '"odd\n')


async def test_names_are_decoded_and_checked_where_something_is_created(client: httpx.AsyncClient) -> None:
    assert (await client.put("/v0/topics/team%3Aa")).json()["topic"] == "team:a"
    assert (await client.get("/v0/topics/team:a")).status_code == 200
    for name in ("-a", "a%20b", "%C3%A9", "a" * 256, "a%2Fb", ".hidden"):
        assert (await client.put(f"/v0/topics/{name}")).status_code == 400, name
        assert (await client.get(f"/v0/topics/{name}")).status_code == 404, name


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v0", 404),
        ("GET", "/v0/topics/", 404),
        ("GET", "/v0/topics/x/y", 404),
        ("GET", "/v1/topics", 404),
        ("POST", "/v0/topics/x/claims", 404),
        ("PUT", "/v0/router/r", 404),
        ("PUT", "/v0/topics/x/diff", 405),
        ("GET", "/v0/topics/x/diff", 405),
        ("PATCH", "/v0/topics/x", 405),
        ("POST", "/v0/topics", 405),
        ("OPTIONS", "/v0/topics/x", 405),
        ("OPTIONS", "/", 405),
        ("POST", "/v0/health", 405),
        ("TRACE", "/v0/health", 405),
    ],
)
async def test_routing_misses_have_the_error_body(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path)
    assert (response.status_code, code(response)) == (
        status,
        "not_found" if status == 404 else "method_not_allowed",
    )
    assert ("allow" in response.headers) is (status == 405)


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (BatchTooLarge("m", {"seqs": 2}), 400, "batch_too_large"),
        (TopicFull("m", {"topic": "x"}), 422, "topic_full"),
        (Throttled("m", {"limit": "max_topics", "max": 1}), 429, "throttled"),
        (CommitFailed("m"), 500, "internal"),
        (Damaged("m", {"topic": "x"}), 500, "internal"),
        (StorageFull("the disk is full"), 503, "not_ready"),
        (Unavailable("the store is away"), 503, "not_ready"),
        (PermissionDenied("no credentials found"), 503, "not_ready"),
        (Corrupt("m"), 500, "internal"),
        (ZeroDivisionError("secret detail"), 500, "internal"),
    ],
)
async def test_every_error_has_its_status(
    server: Running, client: httpx.AsyncClient, error: Exception, status: int, expected: str
) -> None:
    server.engine.error = error
    response = await client.post("/v0/topics/x", json={"records": [{"data": 1}]})
    assert (response.status_code, code(response)) == (status, expected)
    assert (response.headers.get("retry-after") == "1") is (status in (429, 503))
    assert response.json()["error"].get("detail") == getattr(error, "detail", None)
    assert "secret" not in response.text
    server.engine.error = None
    assert (await client.put("/v0/topics/x")).status_code == 201


async def test_while_the_log_is_replayed_only_probes_and_metrics_answer() -> None:
    async with running(is_recovered=False) as server, http(server.url) as client:
        server.engine.replay_progress = 0.25
        await _only_probes_and_metrics_answer(client)
        await server.engine.start()
        ready = (await client.get("/readyz")).json()
    assert ready == {"status": "ready", "wal_replay_complete": True, "topics": 0}


async def _only_probes_and_metrics_answer(client: httpx.AsyncClient) -> None:
    for path in ("/v0/ready", "/readyz", "/v0/topics", "/v0/topics/x"):
        response = await client.get(path)
        assert (response.status_code, code(response)) == (503, "not_ready")
        assert response.json()["error"]["detail"] == {"replay_progress": 0.25}
    assert (await client.get("/v0/health")).json()["status"] == "ok"
    assert "topics_ready 0\n" in (await client.get("/v0/metrics")).text
    values = (await client.get("/v0/metrics", headers={"accept": "application/json"})).json()
    assert (values["ready"], values["replay_progress"], values["wal"]["fsyncs"]) == (False, 0.25, 0)
