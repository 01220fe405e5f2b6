"""The OTLP exporters, over real gRPC and real HTTP, against scripted servers."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from email.utils import formatdate

import grpc
import grpc.aio
import pytest
from tests.collector_doubles import Answer, GrpcBackend

from penstock import otlp
from penstock.collector.otlp_exporters import OtlpGrpcExporter, OtlpHttpExporter
from penstock.collector.outcome import AuthErrors, Outcome, Verdict
from penstock.collector.payload import ArrowPayload, RawPayload
from penstock.collector.settings import Compression, OtlpExporterSettings
from penstock.collector.status import DETAILS_TRAILER, RETRY_TRAILER, retry_trailers, status_bytes
from penstock.http import Fault, Listener, Request, Response
from penstock.otlp.schema import Signal
from penstock.testing.otlp_kit import telemetry

DATA = telemetry(Signal.TRACES, items=40)
BATCH = otlp.decode(DATA, Signal.TRACES).batch


def settings(**changes: object) -> OtlpExporterSettings:
    return OtlpExporterSettings(**{"timeout": "2s", **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def to_grpc(
    answer: Answer | None = None, **changes: object
) -> AsyncIterator[tuple[GrpcBackend, OtlpGrpcExporter]]:
    async with GrpcBackend(answer) as backend:
        exporter = OtlpGrpcExporter(settings(grpc_endpoint=f"http://127.0.0.1:{backend.port}", **changes))
        await exporter.start()
        yield backend, exporter
        await exporter.close()


def aborting(code: str, message: str = "", trailers: tuple[tuple[str, bytes], ...] = ()) -> Answer:
    async def answer(data: bytes, signal: Signal, context: grpc.aio.ServicerContext) -> bytes:
        await context.abort(grpc.StatusCode[code], message, trailers)
        raise AssertionError

    return answer


@pytest.mark.parametrize("compression", Compression)
async def test_grpc_sends_the_bytes_it_was_given(compression: Compression) -> None:
    async with to_grpc(compression_method=compression, headers={}) as (backend, exporter):
        assert (await exporter.send(RawPayload(DATA, Signal.TRACES))).verdict is Verdict.ACK
        assert backend.requests == [(Signal.TRACES, DATA)]


async def test_columns_are_sent_as_the_original_request() -> None:
    async with to_grpc() as (backend, exporter):
        assert (await exporter.send(ArrowPayload(BATCH, Signal.TRACES))).verdict is Verdict.ACK
        assert otlp.count_items(backend.requests[0][1], Signal.TRACES) == 40


async def test_a_partial_success_is_accepted_and_reported() -> None:
    async def answer(data: bytes, signal: Signal, context: grpc.aio.ServicerContext) -> bytes:
        return otlp.response(signal, 3, "too old")

    async with to_grpc(answer) as (_, exporter):
        outcome = await exporter.send(RawPayload(DATA, Signal.TRACES))
        assert (outcome.verdict, outcome.rejected_items, outcome.reason) == (Verdict.ACK, 3, "too old")


@pytest.mark.parametrize("place", [DETAILS_TRAILER, RETRY_TRAILER])
async def test_a_retry_delay_is_read_from_either_place(place: str) -> None:
    trailers = tuple(pair for pair in retry_trailers("RESOURCE_EXHAUSTED", "slow", 3) if pair[0] == place)
    async with to_grpc(aborting("RESOURCE_EXHAUSTED", "slow", trailers)) as (_, exporter):
        outcome = await exporter.send(RawPayload(DATA, Signal.TRACES))
        assert (outcome.verdict, outcome.retry_after_s) == (Verdict.RETRY, 3)


async def test_a_failed_connection_is_retried() -> None:
    exporter = OtlpGrpcExporter(settings(grpc_endpoint="http://127.0.0.1:1"))
    await exporter.start()
    outcome = await exporter.send(RawPayload(DATA, Signal.TRACES))
    assert (outcome.verdict, outcome.is_down) == (Verdict.RETRY, True)
    await exporter.close()


async def test_a_destination_that_never_answers_runs_into_the_timeout() -> None:
    async def answer(data: bytes, signal: Signal, context: grpc.aio.ServicerContext) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async with to_grpc(answer, timeout="100ms") as (_, exporter):
        outcome = await exporter.send(RawPayload(DATA, Signal.TRACES))
        assert outcome.verdict is Verdict.RETRY
        assert "DEADLINE_EXCEEDED" in outcome.reason


async def test_a_bundle_above_the_limit_is_sent_in_pieces_without_loss() -> None:
    async with to_grpc(max_request_bytes=4096) as (backend, exporter):
        for payload in (RawPayload(DATA, Signal.TRACES), ArrowPayload(BATCH, Signal.TRACES)):
            backend.requests.clear()
            assert (await exporter.send(payload)).verdict is Verdict.ACK
            assert len(backend.requests) > 3
            assert all(len(data) <= 4096 for _, data in backend.requests)
            assert sum(otlp.count_items(data, Signal.TRACES) for _, data in backend.requests) == 40


async def test_a_piece_that_must_be_retried_repeats_the_whole_bundle() -> None:
    calls = 0

    async def answer(data: bytes, signal: Signal, context: grpc.aio.ServicerContext) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "")
        return b""

    async with to_grpc(answer, max_request_bytes=4096) as (_, exporter):
        assert (await exporter.send(RawPayload(DATA, Signal.TRACES))).verdict is Verdict.RETRY
        assert calls == 2


async def test_headers_are_sent_with_every_call() -> None:
    from penstock.config import Secret

    async with to_grpc(headers={"X-Key": Secret("s")}) as (backend, exporter):
        await exporter.send(RawPayload(DATA, Signal.TRACES))
        assert ("x-key", "s") in backend.metadata[0]


class _App:
    def __init__(self, answer: Callable[[Request], Response]) -> None:
        self._answer = answer
        self.requests: list[Request] = []

    def begin(
        self, request: Request, deliver: Callable[[Response], None]
    ) -> Coroutine[object, None, Response] | None:
        self.requests.append(request)
        deliver(self._answer(request))
        return None

    def screen(self, request: Request) -> Response | None:
        return None

    def fault(self, fault: Fault, message: str, head: Request | None = None) -> Response:
        return Response(400)


@asynccontextmanager
async def to_http(
    answer: Callable[[Request], Response], **changes: object
) -> AsyncIterator[tuple[_App, OtlpHttpExporter]]:
    app = _App(answer)
    listener = Listener(app)
    host, port = await listener.bind("127.0.0.1", 0)
    exporter = OtlpHttpExporter(settings(http_endpoint=f"http://{host}:{port}/base", **changes))
    await exporter.start()
    yield app, exporter
    await exporter.close()
    await listener.drain(timeout_s=1)


@pytest.mark.parametrize("compression", Compression)
async def test_http_sends_protobuf_to_the_path_of_the_signal(compression: Compression) -> None:
    async with to_http(lambda _: Response(200), compression_method=compression) as (app, exporter):
        assert (await exporter.send(RawPayload(DATA, Signal.TRACES))).verdict is Verdict.ACK
        [request] = app.requests
        assert request.path == b"/base/v1/traces"
        assert request.headers[b"content-type"] == b"application/x-protobuf"
        assert (gzip.decompress(request.body) if compression == "gzip" else request.body) == DATA


async def test_http_reports_a_partial_success() -> None:
    body = otlp.response(Signal.TRACES, 2, "late")
    async with to_http(lambda _: Response(200, body)) as (_, exporter):
        outcome = await exporter.send(RawPayload(DATA, Signal.TRACES))
        assert (outcome.verdict, outcome.rejected_items) == (Verdict.ACK, 2)


async def sent(
    status: int, headers: dict[str, str] | None = None, body: bytes = b"", **changes: object
) -> Outcome:
    pairs = [(key.encode(), value.encode()) for key, value in (headers or {}).items()]
    async with to_http(lambda _: Response(status, body, headers=pairs), **changes) as (_, exporter):
        return await exporter.send(RawPayload(DATA, Signal.TRACES))


async def test_http_statuses_decide_the_outcome() -> None:
    assert (
        await sent(400, body=status_bytes("INVALID_ARGUMENT", "no such field"))
    ).reason == "HTTP 400: no such field"
    assert (await sent(401)).verdict is Verdict.RETRY
    assert (await sent(401, auth_errors=AuthErrors.REJECT)).verdict is Verdict.REJECT
    assert (await sent(307, {"location": "http://elsewhere/"})).verdict is Verdict.REJECT


async def test_retry_after_is_honoured_as_seconds_and_as_a_date() -> None:
    assert (await sent(429, {"retry-after": "3"})).retry_after_s == 3
    import time

    dated = await sent(503, {"retry-after": formatdate(time.time() + 20, usegmt=True)})
    assert dated.retry_after_s is not None
    assert 15 < dated.retry_after_s <= 20


async def test_a_response_above_the_limit_is_not_read() -> None:
    outcome = await sent(200, body=bytes(100_000), max_response_bytes=2048)
    assert (outcome.verdict, outcome.rejected_items) == (Verdict.ACK, 0)


async def test_http_without_a_connection_is_down() -> None:
    exporter = OtlpHttpExporter(settings(http_endpoint="http://127.0.0.1:1"))
    await exporter.start()
    outcome = await exporter.send(RawPayload(DATA, Signal.TRACES))
    assert (outcome.verdict, outcome.is_down) == (Verdict.RETRY, True)
    await exporter.close()
