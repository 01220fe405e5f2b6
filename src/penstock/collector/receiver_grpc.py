"""The OTLP receiver over gRPC. Requests stay bytes and are not parsed into messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeAlias

import grpc
import grpc.aio

from penstock import otlp
from penstock.collector.batcher import TAKEN
from penstock.collector.limiter import ReceiverLimiter
from penstock.collector.settings import Address, TlsSettings
from penstock.collector.status import DETAILS_TRAILER, retry_trailers, status_bytes
from penstock.errors import ConfigError, PenstockError, Unavailable
from penstock.otlp import Signal

METHODS: Final = {
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": Signal.TRACES,
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": Signal.METRICS,
    "/opentelemetry.proto.collector.logs.v1.LogsService/Export": Signal.LOGS,
}
_EMPTY: Final = b""
"""The response without any field set, which means that everything was accepted."""
_Handler: TypeAlias = Callable[[bytes, "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[bytes]]


_Refuser: TypeAlias = Callable[[object, "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[bytes]]


class _Services(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The three OTLP services, which pass requests on as bytes.

    A call that is not admitted is refused by its headers, before its message is read.
    """

    def __init__(self, limiter: ReceiverLimiter) -> None:
        self._limiter = limiter
        self._handlers = {
            method: grpc.unary_unary_rpc_method_handler(_exporting(limiter, signal))
            for method, signal in METHODS.items()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        handler = self._handlers.get(handler_call_details.method)
        if handler is None:
            return None
        try:
            self._limiter.check_token(_authorization(handler_call_details.invocation_metadata))
            self._limiter.check_open(0)
        except PenstockError as error:
            # With a streaming handler, messages are only read on request, which never happens here.
            return grpc.stream_unary_rpc_method_handler(
                _refusing(self._limiter, error, METHODS[handler_call_details.method])
            )
        return handler


def _refusing(limiter: ReceiverLimiter, error: PenstockError, signal: Signal) -> _Refuser:
    async def refuse(requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await _refuse(limiter, context, error, signal)
        raise AssertionError("abort raises")

    return refuse


def _exporting(limiter: ReceiverLimiter, signal: Signal) -> _Handler:
    async def export(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        try:
            reply = await limiter.take(request, signal)
        except Exception as error:
            await _refuse(limiter, context, error, signal)
            raise AssertionError("abort raises") from error
        return _EMPTY if reply is TAKEN else otlp.response(signal, reply.rejected, reply.message)

    return export


async def _refuse(
    limiter: ReceiverLimiter,
    context: grpc.aio.ServicerContext[bytes, bytes],
    error: Exception,
    signal: Signal,
) -> None:
    refusal = limiter.refusal(error, signal)
    if refusal.retry_after_s is not None:
        trailers: tuple[tuple[str, bytes], ...] = retry_trailers(
            refusal.code, refusal.message, refusal.retry_after_s
        )
    else:
        trailers = ((DETAILS_TRAILER, status_bytes(refusal.code, refusal.message)),)
    await context.abort(grpc.StatusCode[refusal.code], refusal.message, trailers)


def _authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    for key, value in metadata or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


class GrpcReceiver:
    """The receiver on one gRPC port."""

    def __init__(
        self,
        limiter: ReceiverLimiter,
        *,
        request_bytes_max: int,
        calls_max: int = 1024,
        tls: TlsSettings | None = None,
        reuse_port: bool = False,
    ) -> None:
        """Create the server. `calls_max` limits the calls per connection, which take 6 KB each."""
        self._limiter = limiter
        self._tls = tls
        self._server = grpc.aio.server(options=_options(request_bytes_max, calls_max, reuse_port))
        self._server.add_generic_rpc_handlers((_Services(limiter),))

    async def bind(self, address: Address) -> Address:
        """Start listening and return the address with the actual port. Raise `Unavailable`."""
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(str(address))
            else:
                port = self._server.add_secure_port(str(address), _credentials(self._tls))
            await self._server.start()
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {address}: {error}") from error
        return Address(address.host, port)

    async def drain(self, timeout_s: float) -> None:
        """Wait for active calls, and abort those that exceed the timeout."""
        self._limiter.drain()
        await asyncio.shield(self._server.stop(timeout_s))


def _options(request_bytes_max: int, calls_max: int, reuse_port: bool) -> Sequence[tuple[str, int]]:
    return (
        ("grpc.max_receive_message_length", request_bytes_max),
        ("grpc.max_concurrent_streams", calls_max),
        ("grpc.so_reuseport", int(reuse_port)),
        # Detect clients that vanished, and tolerate clients that ping often.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    )


def _credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    try:
        with open(tls.key_file or "", "rb") as key, open(tls.cert_file or "", "rb") as cert:
            return grpc.ssl_server_credentials([(key.read(), cert.read())])
    except OSError as error:
        raise ConfigError(f"tls: cannot read {error.filename}: {error.strerror}") from error
