"""OTLP to another place over gRPC."""

from __future__ import annotations

import grpc
import grpc.aio

from penstock.collector.outcome import Outcome, after_grpc, outcome_of_response
from penstock.collector.payload import Payload, send_in_pieces
from penstock.collector.receiver_grpc import METHODS
from penstock.collector.settings import Compression, OtlpExporterSettings
from penstock.collector.status import hint_of_trailers
from penstock.errors import ConfigError
from penstock.otlp import Signal

__all__ = ["OtlpGrpcExporter"]


class OtlpGrpcExporter:
    """Sends bytes; no message is built. One channel, which connects again by itself."""

    def __init__(self, settings: OtlpExporterSettings) -> None:
        self._settings = settings
        self._timeout_s = settings.timeout_s
        self._request_bytes_max = settings.request_bytes_max
        self._metadata = tuple((key.lower(), value.reveal()) for key, value in settings.headers.items())
        self._channel: grpc.aio.Channel | None = None
        self._calls: dict[Signal, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    async def start(self) -> None:
        settings = self._settings
        packed = settings.compression_method is Compression.GZIP
        compression = grpc.Compression.Gzip if packed else grpc.Compression.NoCompression
        options = _options(settings)
        target = settings.endpoint.target
        if settings.endpoint.is_secure:
            self._channel = grpc.aio.secure_channel(target, _credentials(settings), options, compression)
        else:
            self._channel = grpc.aio.insecure_channel(target, options, compression)
        self._calls = {signal: self._channel.unary_unary(method) for method, signal in METHODS.items()}

    async def send(self, payload: Payload) -> Outcome:
        async def one(data: bytes) -> Outcome:
            return await self._send(data, payload.signal)

        return await send_in_pieces(payload, self._request_bytes_max, one)

    async def _send(self, data: bytes, signal: Signal) -> Outcome:
        try:
            answer = await self._calls[signal](data, timeout=self._timeout_s, metadata=self._metadata or None)
        except grpc.aio.AioRpcError as error:
            return after_grpc(
                error.code().name,
                (error.details() or "")[:500],
                hint_of_trailers(error.trailing_metadata() or ()),
                self._settings.auth_errors,
            )
        return outcome_of_response(answer, signal)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


def _options(settings: OtlpExporterSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", settings.response_bytes_max),
        # The library would repeat calls by itself and hide the answers that decide here.
        ("grpc.enable_retries", 0),
        # A probe must not fail because the library is still waiting before it connects again.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.keepalive_time_ms", 60_000),
    ]


def _credentials(settings: OtlpExporterSettings) -> grpc.ChannelCredentials:
    ca_file = settings.tls.ca_file if settings.tls is not None else None
    if ca_file is None:
        return grpc.ssl_channel_credentials()
    try:
        with open(ca_file, "rb") as file:
            return grpc.ssl_channel_credentials(file.read())
    except OSError as error:
        raise ConfigError(f"tls: {ca_file} cannot be read: {error.strerror}") from error
