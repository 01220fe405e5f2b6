"""The time-series server through a real client: requests of Prometheus and Grafana, and the responses."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from tests.unit.timeseries.database_doubles import disk
from tests.unit.timeseries.remote_write_wire import HEADERS, request

from penstock.coordinator import FlushFenced
from penstock.errors import ConfigError, Unavailable
from penstock.http.auth import Keyring
from penstock.metrics import Registry
from penstock.servers.database import Source
from penstock.servers.timeseries import Acknowledge, TimeSeriesSettings, serve
from penstock.testing.memory_storage import MemoryDisk
from penstock.timeseries import TimeSeries, TimeSeriesConfig
from penstock.timeseries.promql import EngineConfig

NOW_MS = int(time.time() * 1000)


@asynccontextmanager
async def served(
    there: MemoryDisk | None = None, config: TimeSeriesConfig | None = None, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    stop, ready = asyncio.Event(), asyncio.Event()
    bound: list[tuple[str, int]] = []
    config = config or TimeSeriesConfig.from_mapping({"coordinator": {"flush_interval": "5ms"}})
    task = asyncio.create_task(
        serve(
            (there or disk()).open(),
            TimeSeriesSettings(port=0, **settings),  # type: ignore[arg-type]
            stop,
            config=config,
            registry=Registry(),
            on_bound=lambda host, port: bound.append((host, port)),
            on_ready=lambda database: ready.set(),
        )
    )
    await asyncio.wait({task, asyncio.ensure_future(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
    try:
        async with httpx.AsyncClient(base_url=f"http://{bound[0][0]}:{bound[0][1]}") as client:
            yield client
    finally:
        stop.set()
        await task


def body(count: int = 3) -> bytes:
    series = [
        ({"__name__": "up", "instance": str(n), "job": "web"}, [(NOW_MS, float(n))]) for n in range(count)
    ]
    return request(*series, help_texts={"up": "whether it answers"})


async def write(client: httpx.AsyncClient, content: bytes) -> httpx.Response:
    return await client.post("/api/v1/write", content=content, headers=HEADERS)


async def test_a_remote_write_is_answered_with_204_and_found_by_a_query() -> None:
    async with served() as client:
        answer = await write(client, body())
        assert (answer.status_code, answer.content) == (204, b"")
        found = (await client.get("/api/v1/query", params={"query": "sum(up)", "time": NOW_MS / 1000})).json()
        assert found["status"] == "success"
        assert found["data"] == {
            "resultType": "vector",
            "result": [{"metric": {}, "value": [NOW_MS / 1000, "3"]}],
        }


async def test_grafana_asks_by_form_post() -> None:
    async with served() as client:
        await write(client, body())
        span = {"start": str(NOW_MS / 1000 - 60), "end": str(NOW_MS / 1000 + 60)}
        answer = await client.post("/api/v1/query_range", data={"query": "up", "step": "15s", **span})
        assert answer.json()["data"]["resultType"] == "matrix"
        assert len(answer.json()["data"]["result"]) == 3
        answer = await client.post("/api/v1/query", data={"query": "1+1"})
        assert answer.json()["data"]["result"][1] == "2"
        answer = await client.post(
            "/api/v1/series", data={"match[]": ['up{instance="1"}', 'up{instance="2"}'], **span}
        )
        assert [one["instance"] for one in answer.json()["data"]] == ["1", "2"]
        answer = await client.post("/api/v1/labels", data=span)
        assert answer.json()["data"] == ["__name__", "instance", "job"]
        answer = await client.get(
            "/api/v1/label/instance/values", params={"match[]": "up", "limit": "2", **span}
        )
        assert answer.json()["data"] == ["0", "1"]
        assert answer.json()["warnings"]
        answer = await client.get("/api/v1/label/__name__/values", params=span)
        assert answer.json()["data"] == ["up"]
        answer = await client.get("/api/v1/metadata")
        assert answer.json()["data"] == {
            "up": [{"type": "counter", "unit": "", "help": "whether it answers"}]
        }
        assert (await client.get("/api/v1/status/buildinfo")).json()["data"]["application"] == "penstock"


async def test_another_prometheus_federates() -> None:
    async with served() as client:
        await write(client, body(1))
        answer = await client.get("/federate", params={"match[]": '{job="web"}'})
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert answer.text == f'# TYPE up untyped\nup{{instance="0",job="web"}} 0 {NOW_MS}\n'


@pytest.mark.parametrize("packed", [False, True])
async def test_otlp_metrics_are_accepted_and_points_without_series_are_reported(packed: bool) -> None:
    message = ExportMetricsServiceRequest()
    scope = message.resource_metrics.add().scope_metrics.add()
    scope.metrics.add(name="warm").gauge.data_points.add(time_unix_nano=NOW_MS * 1_000_000, as_double=3.5)
    scope.metrics.add(name="odd").exponential_histogram.data_points.add(time_unix_nano=NOW_MS * 1_000_000)
    content = message.SerializeToString()
    headers = {"content-type": "application/x-protobuf"}
    if packed:
        content, headers["content-encoding"] = gzip.compress(content), "gzip"
    async with served() as client:
        answer = await client.post("/v1/metrics", content=content, headers=headers)
        assert answer.status_code == 200
        told = ExportMetricsServiceResponse.FromString(answer.content)
        assert told.partial_success.rejected_data_points == 1
        assert "odd" in told.partial_success.error_message
        found = (await client.get("/api/v1/query", params={"query": "warm"})).json()
        assert found["data"]["result"][0]["value"][1] == "3.5"


def otlp_gauge(name: str) -> bytes:
    message = ExportMetricsServiceRequest()
    metric = message.resource_metrics.add().scope_metrics.add().metrics.add(name=name)
    metric.gauge.data_points.add(time_unix_nano=NOW_MS * 1_000_000, as_double=1.0)
    return message.SerializeToString()


async def test_all_members_of_a_gzip_body_are_read() -> None:
    headers = {"content-type": "application/x-protobuf", "content-encoding": "gzip"}
    members = [gzip.compress(otlp_gauge(name)) for name in ("one", "two", "three")]
    async with served(max_body_bytes=4000) as client:
        answer = await client.post("/v1/metrics", content=b"".join(members), headers=headers)
        assert answer.status_code == 200
        query = '{__name__=~"one|two|three"}'
        found = (await client.get("/api/v1/query", params={"query": query})).json()
        assert len(found["data"]["result"]) == 3
        for wrong, told in (
            (members[0] + members[1][:-1], "truncated"),
            (members[0] + b"rest", "not gzip"),
            (gzip.compress(b"") * 101, "more than 100 members"),
            (gzip.compress(b"x" * 2000) + gzip.compress(b"x" * 2001), "more than 4,000 bytes"),
            (gzip.compress(b"x" * 4000) + gzip.compress(b"x"), "more than 4,000 bytes"),
        ):
            answer = await client.post("/v1/metrics", content=wrong, headers=headers)
            assert (answer.status_code, told in answer.text) == (400, True), answer.text


async def test_writes_do_not_wait_if_no_flush_makes_them_durable() -> None:
    config = TimeSeriesConfig.from_mapping({"coordinator": {"sync_mode": "explicit"}})
    stop = asyncio.Event()
    stop.set()
    applied = TimeSeriesSettings(port=0, acknowledge=Acknowledge.APPLIED)

    def ingest(database: TimeSeries, registry: Registry) -> Source:
        raise AssertionError("nothing is fed")

    with pytest.raises(ConfigError, match="sync_mode"):
        await serve(disk().open(), TimeSeriesSettings(port=0), stop, config=config)
    with pytest.raises(ConfigError, match="sync_mode"):
        await serve(disk().open(), applied, stop, config=config, source=ingest)
    await serve(disk().open(), applied, stop, config=config)


@pytest.mark.parametrize(
    ("path", "parameters", "status", "kind"),
    [
        ("/api/v1/query", {"query": "sum("}, 400, "bad_data"),
        ("/api/v1/query", {}, 400, "bad_data"),
        ("/api/v1/query", {"query": "up", "time": "noon"}, 400, "bad_data"),
        ("/api/v1/query_range", {"query": "up", "start": "2", "end": "1", "step": "1"}, 400, "bad_data"),
        ("/api/v1/query_range", {"query": "up", "start": "0", "end": "1e9", "step": "1"}, 400, "bad_data"),
        ("/api/v1/query", {"query": "up[1h:1s]"}, 422, "execution"),
        ("/api/v1/query", {"query": "up + on (job) up"}, 422, "execution"),
        ("/api/v1/query", {"query": "double_exponential_smoothing(up[5m], 0.5, 0.5)"}, 422, "execution"),
        ("/api/v1/series", {}, 400, "bad_data"),
        ("/federate", {}, 400, "bad_data"),
        ("/nothing", {}, 404, "not_found"),
        ("/api/v1/write", {}, 405, "method_not_allowed"),
    ],
)
async def test_errors_have_the_envelope(
    path: str, parameters: dict[str, str], status: int, kind: str
) -> None:
    config = TimeSeriesConfig.from_mapping(
        {"coordinator": {"flush_interval": "5ms"}, "engine": {"samples_max": 1000}}
    )
    async with served(config=config) as client:
        await write(client, body())
        answer = await client.get(path, params=parameters)
        assert (answer.status_code, answer.json()["status"]) == (status, "error"), answer.text
        assert answer.json()["errorType"] == kind
        assert answer.json()["error"]


async def test_a_query_that_takes_too_long_gets_a_timeout_error() -> None:
    config = TimeSeriesConfig(engine=EngineConfig(timeout="1ms"))
    async with served(config=config) as client:
        answer = await client.get(
            "/api/v1/query", params={"query": "vector(1)+" * 60 + "vector(1)", "timeout": "1ms"}
        )
        assert (answer.status_code, answer.json()["errorType"]) == (422, "timeout")


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"not snappy", {}, 400),
        (request(({"job": "no name"}, [(NOW_MS, 1.0)])), {}, 400),
        (request(({"__name__": "old"}, [(-5, 1.0)])), {}, 400),
        (request(({"__name__": "long", "x": "y" * 20_000}, [(NOW_MS, 1.0)])), {}, 400),
        (b"", {"content-type": "application/x-protobuf;proto=io.prometheus.write.v2.Request"}, 415),
    ],
    ids=["not snappy", "no name", "before 1970", "a long label", "version 2"],
)
async def test_a_bad_remote_write_is_refused_permanently(
    content: bytes, headers: dict[str, str], status: int
) -> None:
    async with served() as client:
        answer = await client.post("/api/v1/write", content=content, headers=HEADERS | headers)
        assert answer.status_code == status, answer.text
        assert "retry-after" not in answer.headers


async def test_no_room_is_503_with_retry_after() -> None:
    there = disk()
    config = TimeSeriesConfig.from_mapping(
        {
            "coordinator": {
                "flush_interval": "1ms",
                "flush_size_threshold": "1KiB",
                "max_pending_size": "1KiB",
                "queue_capacity": 1,
            }
        }
    )
    storage = there.open()
    gate = storage.gate("apply")
    there.open = lambda kept=0: storage  # type: ignore[method-assign]
    async with served(there, config, write_timeout="50ms") as client:
        many = request(({"__name__": "up"}, [(NOW_MS + at, 1.0) for at in range(100)]))
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(write(client, many)) for _ in range(6)]
            refused = await first_with(answers, 503)
            gate.set()
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["errorType"] == "unavailable"
        assert {answer.result().status_code for answer in answers} == {204, 503}


async def first_with(answers: list[asyncio.Task[httpx.Response]], status: int) -> httpx.Response:
    for answer in asyncio.as_completed(answers):
        if (found := await answer).status_code == status:
            return found
    raise AssertionError(f"no answer was {status}")


async def test_the_same_write_again_changes_nothing() -> None:
    async with served() as client:
        for _ in range(3):
            assert (await write(client, body())).status_code == 204
        found = (await client.get("/api/v1/query", params={"query": "count_over_time(up[5m])"})).json()
        assert {one["value"][1] for one in found["data"]["result"]} == {"1"}


async def test_operators_can_read_metrics_and_flush() -> None:
    config = TimeSeriesConfig.from_mapping({"coordinator": {"flush_interval": "1h"}})
    async with served(config=config, acknowledge=Acknowledge.APPLIED) as client:
        assert (await client.get("/-/healthy")).status_code == 200
        assert (await client.get("/-/ready")).status_code == 200
        assert (await write(client, body())).status_code == 204
        query = {"query": "count(up)"}
        assert (await client.get("/api/v1/query", params=query)).json()["data"]["result"] == []
        assert (await client.post("/-/flush")).status_code == 204
        assert len((await client.get("/api/v1/query", params=query)).json()["data"]["result"]) == 1
        numbers = (await client.get("/metrics")).text
        assert "timeseries_samples_written 3" in numbers
        assert "write_coordinator" in numbers


async def test_keys_decide_who_may_read_write_and_flush() -> None:
    keys = Keyring.parse("reader:read,writer:write,boss:admin", "TIMESERIES_API_KEYS")
    async with served(keys=keys) as client:

        async def status(method: str, path: str, key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return (await client.request(method, path, headers=headers)).status_code

        assert await status("GET", "/-/ready", None) == 200
        assert await status("GET", "/metrics", None) == 401
        assert await status("GET", "/api/v1/labels", None) == 401
        assert await status("GET", "/api/v1/labels", "reader") == 200
        assert await status("GET", "/api/v1/labels", "writer") == 403
        assert await status("POST", "/api/v1/write", "reader") == 403
        assert await status("POST", "/-/flush", "writer") == 403
        assert await status("POST", "/-/flush", "boss") == 204


def test_a_server_reachable_from_other_machines_needs_keys() -> None:
    with pytest.raises(ConfigError, match="TIMESERIES_API_KEYS"):
        TimeSeriesSettings(host="0.0.0.0")
    TimeSeriesSettings(host="0.0.0.0", allow_no_keys=True)
    TimeSeriesSettings(host="0.0.0.0", keys=Keyring.parse("secret"))


async def test_a_taken_port_does_not_fence_its_server() -> None:
    there = disk()
    async with served(there) as client:
        port = client.base_url.port
        assert port is not None
        owner = there.owner
        with pytest.raises(Unavailable, match="cannot listen"):
            await serve("file:///nowhere", TimeSeriesSettings(port=port), asyncio.Event())
        assert there.owner == owner
        assert (await write(client, body())).status_code == 204


async def test_a_fenced_server_says_so_and_stops() -> None:
    there = disk()

    answers: list[httpx.Response] = []

    async def serve_until_fenced() -> None:
        async with served(there) as client:
            answers.append(await write(client, body()))
            there.open()
            answers.append(await write(client, body()))

    with pytest.raises(FlushFenced):
        await serve_until_fenced()
    assert [answer.status_code for answer in answers] == [204, 503]
    assert answers[1].headers["retry-after"] == "1"


async def test_accepted_writes_are_stored_when_the_server_stops() -> None:
    there = disk()
    config = TimeSeriesConfig.from_mapping({"coordinator": {"flush_interval": "1h"}})
    async with served(there, config, acknowledge=Acknowledge.APPLIED) as client:
        await write(client, body())
    async with served(there) as client:
        found = (await client.get("/api/v1/query", params={"query": "count(up)"})).json()
        assert found["data"]["result"][0]["value"][1] == "3"


async def test_the_port_is_written_to_the_port_file(tmp_path: Path) -> None:
    async with served(port_file=str(tmp_path / "port")) as client:
        text = (tmp_path / "port").read_text()
        assert text == f"127.0.0.1:{client.base_url.port}"
