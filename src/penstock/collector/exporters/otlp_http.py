"""OTLP to another place over HTTP."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from typing import Final

import httpx

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.collector.outcome import Outcome, after_http, delivered, outcome_of_response, unreachable
from penstock.collector.payload import Payload, send_in_pieces
from penstock.collector.settings import Compression, OtlpExporterSettings
from penstock.collector.status import message_of, retry_after_s
from penstock.errors import ConfigError
from penstock.otlp import Signal

__all__ = ["OtlpHttpExporter"]

_INLINE_BYTES: Final = 16 * 1024
_GZIP_LEVEL: Final = 1
"""The quickest: telemetry repeats itself so much that better ones gain little."""


class OtlpHttpExporter:
    """Sends protobuf bodies. No redirect is followed: data goes where the file says, and nowhere else."""

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
        answer = await self._read(response)
        if 200 <= response.status_code < 300:
            # An answer beyond the cap is not looked into; what it was about has been taken.
            return delivered() if answer is None else outcome_of_response(answer, signal)
        hint_s = retry_after_s(response.headers.get("retry-after"), self._clock.now_ms())
        return after_http(response.status_code, message_of(answer or b""), hint_s, self._settings.auth_errors)

    async def _read(self, response: httpx.Response) -> bytes | None:
        """The body, or None when it is larger than it may be."""
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
        raise ConfigError(f"tls: {ca_file} cannot be used: {error}") from error
