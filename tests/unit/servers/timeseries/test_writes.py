"""Writes when something is wrong: a stalled storage, too much at a time, bad bodies."""

from __future__ import annotations

import asyncio
import gzip
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import cramjam
import httpx
import pytest
from google.protobuf import json_format
from google.rpc import status_pb2
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from tests.unit.servers.doubles import until
from tests.unit.timeseries.database_doubles import disk
from tests.unit.timeseries.remote_write_wire import HEADERS, request

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import ConfigError, Corrupt, Fenced, OutcomeUnknown, PenstockError
from penstock.http.auth import Keyring
from penstock.http.limits import HttpLimits
from penstock.metrics import Registry
from penstock.servers.database import Place, ServedDatabase, Source
from penstock.servers.timeseries import Acknowledge, TimeSeriesSettings
from penstock.servers.timeseries.routes import TimeSeriesApi, timeseries_app
from penstock.testing.memory_storage import MemoryDisk, MemoryStorage
from penstock.timeseries import TimeSeries, TimeSeriesConfig
from penstock.timeseries.model import STALE_BITS
from penstock.timeseries.series_index import BucketSeries

NOW_MS = int(time.time() * 1000)
PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}


@dataclass
class Served:
    """A server, a client of it, and its storage."""

    client: httpx.AsyncClient
    storage: MemoryStorage
    stop: asyncio.Event
    task: asyncio.Task[None]
    registry: Registry

    async def write(self, content: bytes, **headers: str) -> httpx.Response:
        return await self.client.post("/api/v1/write", content=content, headers=HEADERS | headers)

    async def otlp(self, content: bytes, headers: dict[str, str]) -> httpx.Response:
        return await self.client.post("/v1/metrics", content=content, headers=headers)

    async def values(self, query: str) -> list[str]:
        parameters = {"query": query, "time": str(NOW_MS / 1000)}
        found = (await self.client.get("/api/v1/query", params=parameters)).json()
        return [one["value"][1] for one in found["data"]["result"]]


@asynccontextmanager
async def serving(
    there: MemoryDisk | None = None,
    *,
    close_s: float = 5,
    limits: HttpLimits | None = None,
    source: Callable[[TimeSeries], Source] | None = None,
    **settings: object,
) -> AsyncIterator[Served]:
    """Like `serve`, with a storage that a test can hold; the test handles the final error."""
    told = TimeSeriesSettings(port=0, **settings)  # type: ignore[arg-type]
    registry, storage, ready = Registry(), (there or disk()).open(), asyncio.Event()
    api = TimeSeriesApi(told, clock=SYSTEM_CLOCK, registry=registry)
    config = TimeSeriesConfig.from_mapping({"coordinator": {"flush_interval": "5ms"}})

    async def opening() -> TimeSeries:
        return await TimeSeries.open(storage, config, registry=registry)

    def opened(database: TimeSeries) -> None:
        api.database = database
        ready.set()

    bound: list[tuple[str, int]] = []
    server = ServedDatabase(
        timeseries_app(api, told),
        Place(host="127.0.0.1", port=0),
        opening=opening,
        opened=opened,
        draining=lambda: setattr(api, "draining", True),
        limits=limits or HttpLimits.for_bodies(told.body_bytes_max),
        source=source,
        close_s=close_s,
    )
    stop = asyncio.Event()
    task = asyncio.create_task(server.serve(stop, on_bound=lambda *at: bound.append(at)))
    await ready.wait()
    try:
        async with httpx.AsyncClient(base_url=f"http://{bound[0][0]}:{bound[0][1]}", timeout=30) as client:
            yield Served(client, storage, stop, task, registry)
    finally:
        stop.set()
        if not task.done():
            await task


def one(name: str = "up", value: float = 1.0, **labels: str) -> bytes:
    return request(({"__name__": name, **labels}, [(NOW_MS, value)]))


def gauges(*names: str, padding: int = 0) -> ExportMetricsServiceRequest:
    message = ExportMetricsServiceRequest()
    metrics = message.resource_metrics.add().scope_metrics.add().metrics
    for name in names:
        metric = metrics.add(name=name, description="x" * padding)
        metric.gauge.data_points.add(time_unix_nano=NOW_MS * 1_000_000, as_double=1.5)
    return message


# A storage that does not respond, or fails


@pytest.mark.parametrize("error", [Fenced("newer"), OutcomeUnknown("stopped"), Corrupt("damaged")])
async def test_senders_keep_a_write_that_fails_because_of_the_storage(
    error: PenstockError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load(*args: object) -> BucketSeries:
        raise error

    async with serving() as server:
        monkeypatch.setattr("penstock.timeseries.read.load_bucket", load)
        otlp = gauges("up").SerializeToString()
        for answer in (await server.write(one()), await server.otlp(otlp, PROTOBUF)):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert str(error) in answer.text


async def test_an_unconfirmed_write_is_answered_with_a_retry_that_is_harmless() -> None:
    async with serving(acknowledge_timeout="200ms") as server:
        gate = server.storage.gate("flush")
        answer = await server.write(one())
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "outcome is unknown: send it again" in answer.json()["error"]
        assert (await server.client.post("/-/flush")).status_code == 503
        gate.set()
        while (answer := await server.write(one())).status_code == 503:  # as senders do
            assert answer.headers["retry-after"] == "1"
        assert answer.status_code == 204
        assert await server.values("count_over_time(up[5m])") == ["1"]


async def test_writers_waiting_for_the_storage_do_not_block_readers() -> None:
    async with serving(requests_max=3, acknowledge_timeout="30s") as server:
        assert (await server.write(one())).status_code == 204
        gate = server.storage.gate("flush")
        stuck = [asyncio.create_task(server.write(one(n=str(number)))) for number in range(3)]
        await until(lambda: server.registry.value("timeseries.samples_written") == 4)
        refused = await server.write(one())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "3 requests of writers" in refused.json()["error"]
        assert await server.values('up{n=""}') == ["1"]
        gate.set()
        assert {(await task).status_code for task in stuck} == {204}


async def test_a_server_stops_in_time_without_its_storage_and_reports_unstored_writes() -> None:
    async with serving(close_s=0.1, acknowledge=Acknowledge.APPLIED) as server:
        server.storage.gate("apply")
        for number in range(3):
            assert (await server.write(one(n=str(number)))).status_code == 204
        server.stop.set()
        with pytest.raises(OutcomeUnknown, match="may not be stored: 3"):
            async with asyncio.timeout(10):
                await server.task


async def test_a_source_cannot_delay_the_shutdown() -> None:
    class Stuck:
        async def run(self) -> object:
            while True:
                try:
                    return await asyncio.Event().wait()
                except asyncio.CancelledError:
                    await asyncio.Event().wait()

        def stop(self) -> None: ...

    async with serving(close_s=0.1, source=lambda database: Stuck()) as server:
        server.stop.set()
        async with asyncio.timeout(10):
            await server.task


@pytest.mark.parametrize("call", ["apply", "flush"])
async def test_it_is_not_ready_while_the_storage_accepts_no_write(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as server:
        assert (await server.write(one())).status_code == 204
        gate = server.storage.gate(call)
        writing = asyncio.ensure_future(server.write(one(value=2.0)))
        assert (await server.client.get("/-/ready")).status_code == 200
        monkeypatch.setattr("penstock.servers.database._STALLED_S", 0.001)
        await asyncio.sleep(0.1)
        ready = await server.client.get("/-/ready")
        assert ready.status_code == 503
        assert "no write succeeds: the storage has not responded for" in ready.text
        assert (await server.client.get("/-/healthy")).status_code == 200
        assert len(await server.values("up")) == 1, "readers are served"
        gate.set()
        assert (await writing).status_code == 204
        assert (await server.client.get("/-/ready")).status_code == 200


async def test_a_storage_that_only_fails_to_close_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(close_s=0.1) as server:
        assert (await server.write(one())).status_code == 204
        monkeypatch.setattr(server.storage, "close", asyncio.Event().wait)
        server.stop.set()
        async with asyncio.timeout(10):
            await server.task


async def test_an_open_that_completes_after_cancellation_is_closed() -> None:
    closed, begun, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Stubborn:
        failed = None
        unstored = 0
        storage_wait_s = 0.0

        async def failure(self) -> Exception:
            raise AssertionError

        async def check(self) -> None: ...

        async def close(self) -> None:
            closed.set()

    async def opening() -> Stubborn:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return Stubborn()

    settings = TimeSeriesSettings(port=0)
    api = TimeSeriesApi(settings, clock=SYSTEM_CLOCK, registry=Registry())
    server = ServedDatabase(
        timeseries_app(api, settings),
        Place(host="127.0.0.1", port=0),
        opening=opening,
        opened=lambda database: None,
        draining=lambda: None,
    )
    task = asyncio.create_task(server.serve(stop))
    await begun.wait()
    stop.set()
    await task
    assert closed.is_set()


# Too much at a time


async def test_a_body_counts_until_its_write_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    held = asyncio.Event()
    began = asyncio.Event()
    writing = TimeSeries.write

    async def slow(self: TimeSeries, *args: object, **kwargs: object) -> object:
        began.set()
        await held.wait()
        return await writing(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(TimeSeries, "write", slow)
    body = gauges("warm", padding=3000).SerializeToString()
    packed = gzip.compress(body)
    async with serving(max_body_bytes=4000, max_decoded_bytes=4000) as server:
        first = asyncio.create_task(server.otlp(packed, PROTOBUF | {"content-encoding": "gzip"}))
        await began.wait()
        assert server.registry.value("timeseries.decoded_bytes") == len(body)
        for second in (
            await server.otlp(packed, PROTOBUF | {"content-encoding": "gzip"}),
            await server.otlp(body, PROTOBUF),
        ):
            assert (second.status_code, second.headers["retry-after"]) == (503, "1")
            assert "limit is 4,000" in status_pb2.Status.FromString(second.content).message
        many = request(({"__name__": "up"}, [(NOW_MS + at, 1.0) for at in range(100)]))
        third = await server.write(many)
        assert (third.status_code, third.headers["retry-after"]) == (503, "1")
        assert "limit is 4,000" in third.json()["error"]
        held.set()
        assert (await first).status_code == 200
        assert server.registry.value("timeseries.decoded_bytes") == 0


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_decoded_bytes"):
        TimeSeriesSettings(max_body_bytes=2000, max_decoded_bytes=1000)
    with pytest.raises(ConfigError, match="acknowledge_timeout"):
        TimeSeriesSettings(acknowledge_timeout="0s")


# Errors in the client's format


async def test_otlp_in_json_is_accepted_and_answered_in_json() -> None:
    message = gauges("warm")
    message.resource_metrics[0].scope_metrics[0].metrics.add(
        name="odd"
    ).exponential_histogram.data_points.add(time_unix_nano=1)
    body = json_format.MessageToJson(message).encode()
    async with serving() as server:
        for content, headers in ((body, JSON), (gzip.compress(body), JSON | {"content-encoding": "gzip"})):
            answer = await server.otlp(content, headers)
            assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
            assert answer.json()["partialSuccess"]["rejectedDataPoints"] == "1"
        assert await server.values("warm") == ["1.5"]
        answer = await server.otlp(b"{", JSON)
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
        assert answer.json()["code"] == 3
        assert "JSON" in answer.json()["message"]


@pytest.mark.parametrize("speaks_json", [False, True], ids=["protobuf", "json"])
async def test_errors_of_otlp_are_a_status_in_the_clients_format(speaks_json: bool) -> None:
    headers = JSON if speaks_json else PROTOBUF
    keys = Keyring.parse("writer:write,reader:read")

    def told(answer: httpx.Response) -> tuple[int, int]:
        assert answer.headers["content-type"] == headers["content-type"]
        status = status_pb2.Status()
        if speaks_json:
            json_format.Parse(answer.content, status)
        else:
            status.ParseFromString(answer.content)
        assert status.message
        return answer.status_code, status.code

    limits = HttpLimits(body_bytes_max=2000, body_screened_bytes=500)
    async with serving(keys=keys, limits=limits) as server:
        sent = headers | {"authorization": "Bearer writer"}
        assert told(await server.otlp(b"", headers)) == (401, 16)
        assert told(await server.otlp(b"", headers | {"authorization": "Bearer reader"})) == (403, 7)
        assert told(await server.otlp(b"\xff" * 10, sent)) == (400, 3)
        assert told(await server.otlp(b"x" * 2001, sent)) == (413, 8)
        assert told(await server.otlp(b"", sent | {"content-encoding": "br"})) == (415, 3)
        answer = await server.client.get("/v1/metrics", headers=sent)
        assert told(answer) == (405, 12)
        answer = await server.client.post("/api/v1/write", content=b"x" * 2001, headers=sent)
        assert (answer.status_code, answer.json()["errorType"]) == (413, "bad_data")


async def test_an_otlp_request_with_one_bad_series_is_refused_completely() -> None:
    message = gauges("good", "bad")
    bad = message.resource_metrics[0].scope_metrics[0].metrics[1].gauge.data_points[0]
    bad.attributes.add(key="long").value.string_value = "x" * 20_000
    async with serving() as server:
        answer = await server.otlp(message.SerializeToString(), PROTOBUF)
        assert answer.status_code == 400
        told = status_pb2.Status.FromString(answer.content)
        assert (told.code, "series bad{long=" in told.message) == (3, True)
        assert await server.values("good") == []


async def test_an_unsupported_type_is_refused_with_the_two_supported_ones() -> None:
    async with serving() as server:
        answer = await server.otlp(b"", {"content-type": "text/plain"})
        assert answer.status_code == 415
        message = status_pb2.Status.FromString(answer.content).message
        assert "application/x-protobuf or application/json" in message


# Mistakes of senders


def raw(value_bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<Q", value_bits))[0]
    return number


async def test_a_write_with_one_bad_series_is_refused_completely() -> None:
    good = ({"__name__": "good"}, [(NOW_MS, 1.0)])
    wide = {"__name__": "wide", **{f"l{number:02}": "x" * 9000 for number in range(8)}}
    bad_label = b"\x0a\x11\x0a\x02\xff\xff\x12\x0b\x09" + bytes(8) + b"\x10\x01"
    cases: list[tuple[bytes, str]] = [
        (request(good, (wide, [(NOW_MS, 1.0)])), "series wide{l00="),
        (request(good, ({"__name__": "old"}, [(-5, 1.0)])), "series old{}: -5 ms"),
        (request(good, ({"__name__": "late"}, [(2**60, 1.0)])), "series late{}: 1152921504606846976 ms"),
        (request(good, ({"__name__": ""}, [(NOW_MS, 1.0)])), "__name__"),
        (request(good, ({"__name__": "many"}, [(at * 3_600_000, 1.0) for at in range(1000)])), "1,001 hours"),
        (request(good)[:-3], "snappy"),
        (bytes(cramjam.snappy.compress_raw(b"\x0a\xff\xff\xff\xff\x7f")), "remote-write"),
        (bytes(cramjam.snappy.compress_raw(bad_label)), "remote-write"),
    ]
    async with serving() as server:
        for content, word in cases:
            answer = await server.write(content)
            assert (answer.status_code, answer.json()["errorType"]) == (400, "bad_data"), word
            assert word in answer.json()["error"]
            assert "retry-after" not in answer.headers
        assert await server.values("good") == []
        assert (await server.client.get("/api/v1/labels")).json()["data"] == []


async def test_nan_stale_late_and_repeated_samples_are_accepted_unchanged() -> None:
    stale = raw(STALE_BITS)
    async with serving() as server:
        sent = [(NOW_MS, 3.0), (NOW_MS - 2000, 1.0), (NOW_MS - 1000, float("nan")), (NOW_MS, 4.0)]
        assert (await server.write(request(({"__name__": "odd"}, sent)))).status_code == 204
        assert await server.values("odd") == ["4"]
        assert await server.values("count_over_time(odd[5m])") == ["3"]
        assert (await server.write(request(({"__name__": "odd"}, [(NOW_MS, stale)])))).status_code == 204
        assert await server.values("odd") == []
        assert await server.values("last_over_time(odd[5m])") == ["NaN"]
