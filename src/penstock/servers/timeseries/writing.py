"""Ingest of remote write and OTLP requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple

from penstock import otlp
from penstock.coordinator import Durability, WriteHandle
from penstock.errors import Unavailable
from penstock.http import JSON, Response, UnsupportedMediaType
from penstock.metrics import Registry
from penstock.servers.database import DecodedBytes, Held
from penstock.servers.timeseries.app import (
    PROTOBUF,
    Call,
    claimed_size,
    is_json,
    is_packed,
    otlp_series,
    unpacked,
)
from penstock.servers.timeseries.settings import TimeSeriesSettings
from penstock.timeseries import Metadata, RemoteWrite, Series, TimeSeries, decode_remote_write, unpacked_size

_INLINE_BYTES: Final = 16 * 1024
"""Below this size, decoding a body directly is cheaper than using a thread."""
_NO_FAMILIES: Final[Mapping[str, Metadata]] = {}


class _AppliedWrite(NamedTuple):
    """A write that is applied, and the deadline for its acknowledgement."""

    handle: WriteHandle
    deadline: float


class WriteApi:
    """The handlers of writers. A body is held, and counted, until its write is applied."""

    def __init__(
        self, database: Callable[[], TimeSeries], settings: TimeSeriesSettings, registry: Registry
    ) -> None:
        """`database` returns the open database, or raises `Unavailable`."""
        self._database = database
        self._settings = settings
        self._decoded = DecodedBytes(
            settings.decoded_bytes_max,
            registry.gauge("timeseries.decoded_bytes", "Decoded bodies of writes that are not applied yet."),
        )
        self._skipped = registry.counter(
            "timeseries.histograms_skipped", "Native histograms of remote writes, which are not stored."
        )
        self._rejected = registry.counter(
            "timeseries.points_rejected", "Points of OTLP records for which there is no series."
        )

    async def remote_write(self, call: Call) -> Response:
        if b"io.prometheus.write.v2" in call.request.headers.get(b"content-type", b""):
            raise UnsupportedMediaType("remote write 2.0 is not supported: send 1.0, prometheus.WriteRequest")
        body, cap = call.request.body, self._settings.body_bytes_max
        with self._decoded.holding(unpacked_size(body, bytes_max=cap)):
            request = await self._decode_remote(body, cap)
            skipped = request.histograms_skipped
            taken = await self._applied(request.series, request.metadata)
            del request  # the delta owns the decoded series now
        await self._acknowledged(taken)
        self._skipped.inc(skipped)
        return Response(204)

    async def _decode_remote(self, body: bytes, cap: int) -> RemoteWrite:
        if len(body) < _INLINE_BYTES:
            return decode_remote_write(body, bytes_max=cap)
        return await asyncio.to_thread(decode_remote_write, body, bytes_max=cap)

    async def otlp(self, call: Call) -> Response:
        json = is_json(call.request)
        packed = is_packed(call.request)
        with self._decoded.holding(len(call.request.body)) as held:
            body = await self._unpack(call.request.body, held) if packed else call.request.body
            found = await asyncio.to_thread(otlp_series, body, json=json)
            rejected, reasons = found.rejected_points, found.reasons
            taken = await self._applied(found.series, _NO_FAMILIES)
            del body, found
        await self._acknowledged(taken)
        self._rejected.inc(rejected)
        body = otlp.response(otlp.Signal.METRICS, rejected, "; ".join(reasons), json=json)
        return Response(200, body, content_type=JSON if json else PROTOBUF)

    async def _unpack(self, packed: bytes, held: Held) -> bytes:
        cap = self._settings.body_bytes_max
        held.grow_to(claimed_size(packed, cap))
        body = await asyncio.to_thread(unpacked, packed, cap)
        held.grow_to(len(body))
        return body

    async def flush(self, call: Call) -> Response:
        handle = await self._database().flush(durable=True)
        await self._in_time(handle.wait(Durability.DURABLE), self._deadline())
        return Response(204)

    async def _applied(self, series: Sequence[Series], families: Mapping[str, Metadata]) -> _AppliedWrite:
        handle = await self._database().write(
            series, families=families, timeout=self._settings.write_timeout_s
        )
        taken = _AppliedWrite(handle, self._deadline())
        await self._in_time(handle.epoch(), taken.deadline)
        return taken

    async def _acknowledged(self, taken: _AppliedWrite) -> None:
        await self._in_time(taken.handle.wait(self._settings.acknowledge.level), taken.deadline)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._settings.acknowledge_timeout_s

    async def _in_time(self, waiting: Awaitable[object], deadline: float) -> None:
        """Wait until `deadline`, then raise `Unavailable`: the outcome is unknown; a retry is harmless."""
        try:
            async with asyncio.timeout_at(deadline):
                await waiting
        except TimeoutError:
            seconds = self._settings.acknowledge_timeout_s
            raise Unavailable(
                f"the storage has not confirmed the write within {seconds:g} s, so its outcome is unknown: "
                "send it again, which changes nothing if it was stored"
            ) from None
