"""The responses of receivers, over real gRPC and real HTTP, with an in-memory store."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import h2.connection
import h2.settings
import httpx
import pytest
import zstandard
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from tests.collector_doubles import MemoryStore

from penstock import otlp
from penstock.collector.consumers import ArrowConsumer, ConsumerNode, RawConsumer
from penstock.collector.limiter import ReceiverLimiter
from penstock.collector.receiver_grpc import METHODS, GrpcReceiver
from penstock.collector.receiver_http import HttpReceiver
from penstock.collector.settings import Address
from penstock.collector.status import DETAILS_TRAILER, RETRY_TRAILER
from penstock.config import Secret
from penstock.metrics import Registry
from penstock.otlp.messages import messages_of
from penstock.otlp.schema import Signal
from penstock.quiver.errors import AtCapacity
from penstock.testing.otlp_kit import telemetry

LIMIT = 1_000_000
HERE = Address("127.0.0.1", 0)
PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}
PATHS = {signal: method for method, signal in METHODS.items()}


class Rig:
    def __init__(self, intake: ConsumerNode, store: MemoryStore, tokens: tuple[Secret, ...] = ()) -> None:
        self.store = store
        self.registry = Registry()
        self.limiter = ReceiverLimiter("in", intake, tokens=tokens, requests_max=4, registry=self.registry)
        self.grpc = GrpcReceiver(self.limiter, request_bytes_max=LIMIT, calls_max=4)
        self.grpc_at = HERE
        self.http = HttpReceiver(self.limiter, request_bytes_max=LIMIT)
        self.channel: grpc.aio.Channel
        self.client: httpx.AsyncClient

    async def call(
        self, signal: Signal, data: bytes, *, packed: bool = False, metadata: tuple[tuple[str, str], ...] = ()
    ) -> bytes:
        compression = grpc.Compression.Gzip if packed else grpc.Compression.NoCompression
        method = self.channel.unary_unary(PATHS[signal])
        return bytes(await method(data, compression=compression, metadata=metadata))

    async def post(self, signal: Signal, data: bytes, headers: dict[str, str]) -> httpx.Response:
        return await self.client.post(f"/v1/{signal.value}", content=data, headers=headers)


@asynccontextmanager
async def rig(*, raw: bool = True, tokens: tuple[str, ...] = ()) -> AsyncIterator[Rig]:
    store = MemoryStore()
    intake: ConsumerNode = RawConsumer(store) if raw else ArrowConsumer(store)
    made = Rig(intake, store, tuple(Secret(token) for token in tokens))
    made.grpc_at, http_at = await made.grpc.bind(HERE), await made.http.bind(HERE)
    options = [("grpc.max_send_message_length", -1)]
    async with (
        grpc.aio.insecure_channel(str(made.grpc_at), options) as made.channel,
        httpx.AsyncClient(base_url=f"http://{http_at}") as made.client,
    ):
        yield made
    await made.grpc.drain(1)
    await made.http.drain(1)


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("packed", [False, True])
async def test_grpc_accepts_every_signal_unchanged(signal: Signal, packed: bool) -> None:
    data = telemetry(signal, items=20)
    async with rig() as made:
        assert await made.call(signal, data, packed=packed) == b""
        [bundle] = made.store.stored
        assert bundle.signal == signal.value
        assert bundle.batch.column(0)[0].as_py() == data


async def test_one_grpc_connection_has_a_bounded_number_of_calls() -> None:
    """A call uses memory before its message arrives, and no other limit counts it until then."""
    async with rig() as made:
        reader, writer = await asyncio.open_connection(made.grpc_at.host, made.grpc_at.port)
        peer = h2.connection.H2Connection()
        peer.initiate_connection()
        writer.write(peer.data_to_send())
        while h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS not in peer.remote_settings:
            peer.receive_data(await asyncio.wait_for(reader.read(65536), 10))
        assert peer.remote_settings.max_concurrent_streams == 4
        writer.close()


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("encoding", ["", "identity", "gzip", "deflate", "zstd"])
async def test_http_accepts_every_signal_in_every_encoding(signal: Signal, encoding: str) -> None:
    data = telemetry(signal, items=20)
    pack = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.compress}
    body = pack[encoding](data) if encoding in pack else data
    headers = {**PROTOBUF, **({"content-encoding": encoding} if encoding else {})}
    async with rig() as made:
        answer = await made.post(signal, body, headers)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == "application/x-protobuf"
        assert made.store.stored[0].batch.column(0)[0].as_py() == data


@pytest.mark.parametrize("signal", Signal)
async def test_json_becomes_the_same_request(signal: Signal) -> None:
    data = telemetry(signal, items=5)
    async with rig() as made:
        answer = await made.post(signal, otlp.to_json(data, signal), JSON)
        assert (answer.status_code, answer.json()) == (200, {})
        assert answer.headers["content-type"] == "application/json"
        request = messages_of(signal).request
        assert request.FromString(made.store.stored[0].batch.column(0)[0].as_py()) == request.FromString(data)


@pytest.mark.parametrize("raw", [True, False])
async def test_an_empty_request_is_accepted_and_stores_nothing(raw: bool) -> None:
    async with rig(raw=raw) as made:
        assert await made.call(Signal.LOGS, b"") == b""
        assert (await made.post(Signal.LOGS, b"", PROTOBUF)).status_code == 200
        assert (await made.post(Signal.LOGS, b"{}", JSON)).json() == {}
        assert made.store.stored == []


async def test_a_request_is_stored_as_columns_in_arrow_mode() -> None:
    data = telemetry(Signal.TRACES, items=30)
    async with rig(raw=False) as made:
        await made.call(Signal.TRACES, data)
        [bundle] = made.store.stored
        assert bundle.batch.num_rows == 30
        assert otlp.count_items(otlp.encode(bundle.batch, Signal.TRACES), Signal.TRACES) == 30


def bad_ids() -> bytes:
    request = messages_of(Signal.TRACES).request.FromString(telemetry(Signal.TRACES, items=4, resources=1))
    request.resource_spans[0].scope_spans[0].spans[1].trace_id = b"short"
    return bytes(request.SerializeToString())


async def test_items_with_ids_of_wrong_length_are_refused_and_the_rest_is_kept() -> None:
    async with rig(raw=False) as made:
        answer = ExportTraceServiceResponse.FromString(await made.call(Signal.TRACES, bad_ids()))
        assert answer.partial_success.rejected_spans == 1
        assert answer.partial_success.error_message
        response = await made.post(
            Signal.TRACES, otlp.to_json(telemetry(Signal.TRACES, items=1), Signal.TRACES), JSON
        )
        assert response.json() == {}
        over_http = await made.post(Signal.TRACES, bad_ids(), PROTOBUF)
        assert over_http.status_code == 200
        assert ExportTraceServiceResponse.FromString(over_http.content).partial_success.rejected_spans == 1
        assert [bundle.batch.num_rows for bundle in made.store.stored] == [3, 1, 3]
        assert made.registry.value("collector.receiver.refused_items", receiver="in") == 2


@pytest.mark.parametrize("raw", [True, False])
async def test_an_undecodable_request_is_an_invalid_argument(raw: bool) -> None:
    async with rig(raw=raw) as made:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.call(Signal.TRACES, b"hello world")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        answer = await made.post(Signal.TRACES, b"hello world", PROTOBUF)
        assert answer.status_code == 400
        assert status_pb2.Status.FromString(answer.content).code == 3
        wrong = await made.post(Signal.TRACES, b"[", JSON)
        assert (wrong.status_code, wrong.json()["code"]) == (400, 3)
        assert made.store.stored == []


async def test_a_full_store_sends_a_retry_delay_in_both_places() -> None:
    async with rig() as made:
        made.store.fail = AtCapacity("the disk is full", retry_after_s=3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.call(Signal.LOGS, telemetry(Signal.LOGS, items=1))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        trailers = dict(caught.value.trailing_metadata() or ())
        assert error_details_pb2.RetryInfo.FromString(trailers[RETRY_TRAILER]).retry_delay.seconds == 3
        info = error_details_pb2.RetryInfo()
        assert status_pb2.Status.FromString(trailers[DETAILS_TRAILER]).details[0].Unpack(info)
        answer = await made.post(Signal.LOGS, telemetry(Signal.LOGS, items=1), PROTOBUF)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")


async def test_a_request_that_is_too_large_is_refused_without_a_retry_delay() -> None:
    async with rig() as made:
        for packed in (False, True):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await made.call(Signal.LOGS, b"\x0a" + bytes(LIMIT + 100), packed=packed)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            keys = {key for key, _ in caught.value.trailing_metadata() or ()}
            assert not keys & {RETRY_TRAILER, DETAILS_TRAILER}
        answer = await made.post(Signal.LOGS, bytes(LIMIT + 1), PROTOBUF)
        assert answer.status_code == 413
        bomb = gzip.compress(bytes(50 * LIMIT))
        answer = await made.post(Signal.LOGS, bomb, {**PROTOBUF, "content-encoding": "gzip"})
        assert answer.status_code == 413
        assert "retry-after" not in answer.headers
        assert status_pb2.Status.FromString(answer.content).code == 8
        answer = await made.post(Signal.LOGS, bytes(LIMIT + 1), {"content-type": "application/json"})
        assert (answer.status_code, answer.json()["code"]) == (413, 8)
        assert answer.headers["content-type"] == "application/json"


async def test_wrong_type_method_encoding_and_path() -> None:
    async with rig() as made:
        assert (await made.post(Signal.LOGS, b"", {"content-type": "text/plain"})).status_code == 415
        packed = {**PROTOBUF, "content-encoding": "br"}
        assert (await made.post(Signal.LOGS, b"", packed)).status_code == 415
        answer = await made.client.get("/v1/logs")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert (await made.client.post("/v1/what", headers=JSON)).status_code == 404


async def test_damaged_compression_is_a_bad_request() -> None:
    async with rig() as made:
        answer = await made.post(Signal.LOGS, b"no gzip", {**PROTOBUF, "content-encoding": "gzip"})
        assert answer.status_code == 400


async def test_a_bug_is_internal_and_reveals_nothing() -> None:
    async with rig() as made:
        made.store.fail = ZeroDivisionError("a secret")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.call(Signal.LOGS, telemetry(Signal.LOGS, items=1))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        answer = await made.post(Signal.LOGS, telemetry(Signal.LOGS, items=1), PROTOBUF)
        assert answer.status_code == 500
        assert b"secret" not in answer.content


async def test_a_stopping_collector_is_unavailable_with_a_retry_delay() -> None:
    async with rig() as made:
        made.limiter.drain()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.call(Signal.LOGS, b"")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await made.post(Signal.LOGS, b"", PROTOBUF)).status_code == 503


async def test_tokens_are_required_on_both_ports() -> None:
    async with rig(tokens=("one", "two")) as made:
        for wrong in ((), (("authorization", "Bearer three"),), (("authorization", "two"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await made.call(Signal.LOGS, b"", metadata=wrong)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            answer = await made.post(Signal.LOGS, b"", {**PROTOBUF, **dict(wrong)})
            assert answer.status_code == 401
        right = ("authorization", "Bearer two")
        assert await made.call(Signal.LOGS, b"", metadata=(right,)) == b""
        assert (await made.post(Signal.LOGS, b"", {**PROTOBUF, **dict([right])})).status_code == 200


async def test_an_unknown_method_is_unimplemented() -> None:
    async with rig() as made:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.channel.unary_unary("/what/Ever")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_json_ids_are_hex_of_any_case_and_unknown_fields_are_ignored() -> None:
    body = {
        "resourceSpans": [
            {
                "scopeSpans": [
                    {
                        "spans": [
                            {"traceId": "ABcd" * 8, "spanId": "00112233445566aa", "kind": 2, "newField": 1}
                        ]
                    }
                ]
            }
        ]
    }
    async with rig(raw=False) as made:
        answer = await made.post(Signal.TRACES, json.dumps(body).encode(), JSON)
        assert answer.status_code == 200
        assert made.store.stored[0].batch.column("trace_id")[0].as_py() == bytes.fromhex("abcd" * 8)


async def test_grpc_refuses_by_the_headers_before_a_message_is_read() -> None:
    """Otherwise clients without permission could make the server use memory."""

    async def endless() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with rig(tokens=("right",)) as made:
        strange = made.channel.stream_unary(PATHS[Signal.LOGS])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(strange(endless()), 5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        made.limiter.drain()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(strange(endless(), metadata=(("authorization", "Bearer right"),)), 5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        keys = {key for key, _ in caught.value.trailing_metadata() or ()}
        assert {RETRY_TRAILER, DETAILS_TRAILER} <= keys
