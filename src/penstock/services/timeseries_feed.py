"""Feeding a time series database from a queue with one OTLP metrics request per record.

The payload of a record describes it: version 1, the signal, the encoding, and a 0.

    01 01 01 00     metrics as OTLP protobuf
    metrics         the same, as written by the collector's exporter `buffer` with `format: otlp`
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from penstock.coordinator import Position, WriteHandle
from penstock.errors import InvalidInput
from penstock.metrics import Registry
from penstock.services.feed import RefusedRecord, SetAside
from penstock.timeseries import OtlpSeries, Series, TimeSeries, check_series, series_of_metrics

__all__ = ["METRICS_PAYLOAD", "FedTimeSeries"]

METRICS_PAYLOAD: Final = b"\x01\x01\x01\x00"
"""The payload that a producer adds to OTLP metrics."""
_OF_COLLECTOR: Final = b"metrics"

_SIGNALS: Final = {1: "metrics", 2: "logs", 3: "traces"}


class FedTimeSeries:
    """A `FedDatabase` for OTLP metrics. The caller closes the database."""

    def __init__(self, database: TimeSeries, *, registry: Registry | None = None) -> None:
        self._database = database
        self._rejected = (registry or Registry()).counter(
            "timeseries.points_rejected", "Points of OTLP records for which there is no series."
        )

    async def write_batch(
        self, records: Sequence[bytes], metadata: Sequence[bytes], position: Position, set_aside: SetAside
    ) -> WriteHandle:
        """See `FedDatabase.write_batch`."""
        series, refused, rejected = await asyncio.to_thread(_read, records, metadata)
        if refused:
            await set_aside(refused)
        handle = await self._database.write(
            series, sequence=position.sequence, source=position.source, location=position.location
        )
        await handle.epoch()  # so that a refusal is raised for its own batch, not for a later one
        self._rejected.inc(rejected)
        return handle

    async def stored_position(self) -> Position | None:
        """See `FedDatabase.stored_position`."""
        return await self._database.stored_position()

    async def sync(self) -> None:
        """See `FedDatabase.sync`."""
        await self._database.sync()


def _read(
    records: Sequence[bytes], metadata: Sequence[bytes]
) -> tuple[list[Series], list[RefusedRecord], int]:
    """Return the series of all records, the fully or partly refused records, and the lost points."""
    series: list[Series] = []
    refused: list[RefusedRecord] = []
    rejected = 0
    for index, (record, payload) in enumerate(zip(records, metadata, strict=True)):
        try:
            found = _series(record, payload)
        except InvalidInput as error:
            refused.append(RefusedRecord(index, str(error)))
        else:
            series += found.series
            rejected += found.rejected_points
            if found.rejected_points:
                refused.append(RefusedRecord(index, _missing(found), stored_in_part=bool(found.series)))
    return series, refused, rejected


def _missing(found: OtlpSeries) -> str:
    points = "1 point has" if found.rejected_points == 1 else f"{found.rejected_points} points have"
    return f"{points} no series: {'; '.join(found.reasons)}"


def _series(record: bytes, payload: bytes) -> OtlpSeries:
    _check_payload(payload)
    request = ExportMetricsServiceRequest()
    try:
        request.ParseFromString(record)
    except DecodeError as error:
        raise InvalidInput(f"not an OTLP metrics request: {error}") from None
    found = series_of_metrics(request)
    check_series(found.series)
    return found


def _check_payload(payload: bytes) -> None:
    if payload in (METRICS_PAYLOAD, _OF_COLLECTOR):
        return
    if len(payload) != len(METRICS_PAYLOAD):
        raise InvalidInput(f"the metadata has {len(payload)} bytes, expected 4 that describe the record")
    version, signal, encoding, _ = payload
    if version != 1:
        raise InvalidInput(f"the metadata has the unsupported version {version}")
    if signal != 1:
        raise InvalidInput(f"the record has {_SIGNALS.get(signal, f'signal {signal}')}, not metrics")
    raise InvalidInput(f"the record has the unsupported encoding {encoding}; expected 1 (OTLP protobuf)")
