"""OTLP exporters over gRPC and HTTP. Requests are sent as bytes and not built as messages."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from typing import Final

import grpc
import grpc.aio
import httpx

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.collector.outcome import (
    Outcome,
    after_grpc,
    after_http,
    delivered,
    outcome_of_response,
    unreachable,
)
from penstock.collector.payload import Payload, send_in_pieces
from penstock.collector.receiver_grpc import METHODS
from penstock.collector.settings import Compression, OtlpExporterSettings
from penstock.collector.status import message_of, retry_after_of_trailers, retry_after_s
from penstock.errors import ConfigError
from penstock.otlp import Signal

_INLINE_BYTES: Final = 16 * 1024
_GZIP_LEVEL: Final = 1
"""The fastest level. Telemetry is so repetitive that higher levels gain little."""


class OtlpGrpcExporter:
    """Sends over one gRPC channel, which reconnects automatically."""

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
            body = await self._calls[signal](data, timeout=self._timeout_s, metadata=self._metadata or None)
        except grpc.aio.AioRpcError as error:
            return after_grpc(
                error.code().name,
                (error.details() or "")[:500],
                retry_after_of_trailers(error.trailing_metadata() or ()),
                self._settings.auth_errors,
            )
        return outcome_of_response(body, signal)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


def _options(settings: OtlpExporterSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", settings.response_bytes_max),
        # The library would retry calls and hide the responses that decide about a bundle.
        ("grpc.enable_retries", 0),
        # A probe must not fail because the library is still waiting to reconnect.
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
        raise ConfigError(f"tls: cannot read {ca_file}: {error.strerror}") from error


class OtlpHttpExporter:
    """Sends protobuf bodies over HTTP. Redirects are not followed: data goes only to the configured host."""

    def __init__(self, settings: OtlpExporterSettings, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings = settings
        self._timeout_s = settings.timeout_s
        self._request_bytes_max = settings.request_bytes_max
        self._response_bytes_max = settings.response_bytes_max
        self._clock = clock
        self._urls = {signal: f"{settings.endpoint}/v1/{signal.value}" for signal in Signal}
        self._packs = settings.compression_method is Compression.GZIP
        self._client: httpx.AsyncClient | None = None

    async def start(self) -> None:
        headers = {"content-type": "application/x-protobuf", "accept-encoding": "identity"}
        headers |= {key: value.reveal() for key, value in self._settings.headers.items()}
        if self._packs:
            headers["content-encoding"] = "gzip"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=self._settings.timeout_s,
            follow_redirects=False,
            verify=_verification(self._settings),
            limits=httpx.Limits(max_connections=self._settings.concurrency),
        )

    async def send(self, payload: Payload) -> Outcome:
        async def one(data: bytes) -> Outcome:
            return await self._send(data, payload.signal)

        return await send_in_pieces(payload, self._request_bytes_max, one)

    async def _send(self, data: bytes, signal: Signal) -> Outcome:
        assert self._client is not None, "not started"
        body = await _packed(data) if self._packs else data
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._client.stream("POST", self._urls[signal], content=body) as response:
                    return await self._outcome(response, signal)
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            return unreachable(f"{self._settings.endpoint}: {str(error) or type(error).__name__}")

    async def _outcome(self, response: httpx.Response, signal: Signal) -> Outcome:
        body = await self._read(response)
        if 200 <= response.status_code < 300:
            # A response above the limit is not read. The request was accepted.
            return delivered() if body is None else outcome_of_response(body, signal)
        wait_s = retry_after_s(response.headers.get("retry-after"), self._clock.now_ms())
        return after_http(response.status_code, message_of(body or b""), wait_s, self._settings.auth_errors)

    async def _read(self, response: httpx.Response) -> bytes | None:
        """Return the body, or None if it is larger than the limit."""
        parts: list[bytes] = []
        size = 0
        async for part in response.aiter_raw():
            size += len(part)
            if size > self._response_bytes_max:
                return None
            parts.append(part)
        return b"".join(parts)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


async def _packed(data: bytes) -> bytes:
    if len(data) <= _INLINE_BYTES:
        return gzip.compress(data, _GZIP_LEVEL, mtime=0)
    return await asyncio.to_thread(gzip.compress, data, _GZIP_LEVEL, mtime=0)


def _verification(settings: OtlpExporterSettings) -> ssl.SSLContext | bool:
    ca_file = settings.tls.ca_file if settings.tls is not None else None
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls: cannot use {ca_file}: {error}") from error
