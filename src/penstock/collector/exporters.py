"""The exporters without a client library, and the choice of an exporter by the settings of a node."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from typing import TYPE_CHECKING, Final

from penstock.clock import SYSTEM_CLOCK
from penstock.collector.config import NodeSettings
from penstock.collector.dead_letters import make_durably
from penstock.collector.outcome import Outcome, Verdict, delivered, refused
from penstock.collector.payload import Exporter, Payload
from penstock.collector.settings import (
    BufferSettings,
    DebugSettings,
    FileFormat,
    FileSettings,
    FlakySettings,
    NoopSettings,
    OtlpExporterSettings,
    ParquetSettings,
)
from penstock.errors import NotFound, PenstockError, Unsupported
from penstock.ids import SYSTEM_RNG, mint_ulid
from penstock.storage import Buffer, FileSystem, OsFileSystem, write_durably

if TYPE_CHECKING:
    import pyarrow as pa

_LOG = logging.getLogger(__name__)
_ROWS_SHOWN: Final = 3
_SUFFIXES: Final = {"parquet": "parquet", "arrow": "arrow", "otlp": "pb", "json": "json"}
_STAGING: Final = ".staging"


def make_exporter(name: str, settings: NodeSettings) -> Exporter:
    """Return the exporter of a node without starting it. Raise `Unsupported` if there is none."""
    if isinstance(settings, OtlpExporterSettings):
        return make_otlp_exporter(settings)
    if isinstance(settings, BufferSettings):
        from penstock.collector.buffer_export import QueueExporter

        return QueueExporter(settings)
    if isinstance(settings, FileSettings | ParquetSettings):
        return _file(settings)
    if isinstance(settings, DebugSettings):
        return DebugExporter(name, settings)
    if isinstance(settings, NoopSettings):
        return NoopExporter()
    if isinstance(settings, FlakySettings):
        return _flaky(settings)
    raise Unsupported(f"{name}: there is no exporter for these settings")


def concurrency_of(settings: NodeSettings) -> int:
    """Return how many bundles may be sent to an exporter at the same time."""
    return getattr(settings, "concurrency", 1)


def make_otlp_exporter(settings: OtlpExporterSettings) -> Exporter:
    """Return an exporter over gRPC or HTTP, depending on the endpoint."""
    if settings.grpc_endpoint is not None:
        from penstock.collector.otlp_exporters import OtlpGrpcExporter

        return OtlpGrpcExporter(settings)
    from penstock.collector.otlp_exporters import OtlpHttpExporter

    return OtlpHttpExporter(settings)


def _file(settings: FileSettings | ParquetSettings) -> Exporter:
    if isinstance(settings, ParquetSettings):
        return FileExporter(settings.path, "parquet", spark=settings.spark)
    return FileExporter(settings.path, settings.format)


def _flaky(settings: FlakySettings) -> Exporter:
    if settings.path is None:
        return FlakyExporter(settings, NoopExporter())
    return FlakyExporter(settings, FileExporter(settings.path, "otlp"))


class NoopExporter:
    """Accepts and discards every bundle."""

    async def start(self) -> None: ...

    async def send(self, payload: Payload) -> Outcome:
        return delivered()

    async def close(self) -> None: ...


class DebugExporter(NoopExporter):
    """Logs a line for each bundle, and its first rows with `detailed`."""

    def __init__(self, name: str, settings: DebugSettings) -> None:
        self._name = name
        self._is_detailed = settings.verbosity == "detailed"

    async def send(self, payload: Payload) -> Outcome:
        place = payload.place or "not stored"
        if not self._is_detailed:
            _LOG.info("%s: %s, %s", self._name, payload.signal.value, place)
            return delivered()
        try:
            batch = payload.batch()
        except PenstockError as error:
            return refused(str(error))
        rows = batch.slice(0, _ROWS_SHOWN).to_pylist()
        _LOG.info("%s: %s, %s, %d rows, first %s", self._name, payload.signal.value, place, len(batch), rows)
        return delivered()


class FlakyExporter:
    """Fails some bundles, chosen by a seed, and passes the others to another exporter. For tests."""

    def __init__(self, settings: FlakySettings, target: Exporter) -> None:
        self._settings = settings
        self._target = target
        self._rng = random.Random(settings.seed)
        self._retry_after_s = settings.retry_after_s

    async def start(self) -> None:
        await self._target.start()

    async def send(self, payload: Payload) -> Outcome:
        draw = self._rng.random()
        if draw < self._settings.reject_rate:
            return refused("flaky: refused on purpose")
        if draw < self._settings.reject_rate + self._settings.failure_rate:
            return Outcome(
                verdict=Verdict.RETRY, reason="flaky: failed on purpose", retry_after_s=self._retry_after_s
            )
        return await self._target.send(payload)

    async def close(self) -> None:
        await self._target.close()


class FileExporter:
    """Writes one file per bundle, `<path>/<signal>/<place>.<suffix>`, durably before acknowledging it.

    The name is derived from the bundle, so a repeated delivery replaces the file.
    """

    def __init__(
        self, path: str, file_format: FileFormat, *, spark: bool = False, fs: FileSystem | None = None
    ) -> None:
        self._path = os.path.abspath(path)
        self._format = file_format
        self._spark = spark
        self._fs = fs or OsFileSystem()
        self._ready: set[str] = set()

    async def start(self) -> None:
        """Create the directories, and remove files that a crash left incomplete."""
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        staging = os.path.join(self._path, _STAGING)
        make_durably(self._fs, staging)
        for name, _ in self._fs.list_files(staging):
            self._fs.unlink(os.path.join(staging, name))

    async def send(self, payload: Payload) -> Outcome:
        try:
            data = await asyncio.to_thread(self._bytes, payload)
        except PenstockError as error:
            return refused(str(error))
        try:
            await asyncio.to_thread(self._write, payload, data)
        except PenstockError as error:
            # Retry even permission errors and full disks: they can be fixed, and the data is valid.
            return Outcome(verdict=Verdict.RETRY, reason=str(error), is_down=True)
        return delivered()

    def _write(self, payload: Payload, data: Buffer) -> None:
        directory = os.path.join(self._path, payload.signal.value)
        for needed in (os.path.join(self._path, _STAGING), directory):
            if needed not in self._ready:
                make_durably(self._fs, needed)
                self._ready.add(needed)
        name = payload.place or mint_ulid(SYSTEM_CLOCK.now_ms(), SYSTEM_RNG)
        path = os.path.join(directory, f"{name}.{_SUFFIXES[self._format]}")
        try:
            write_durably(self._fs, path, [data], staging=os.path.join(self._path, _STAGING))
        except NotFound:
            self._ready.clear()  # the directories were removed; the next attempt creates them again
            raise

    def _bytes(self, payload: Payload) -> Buffer:
        from penstock import otlp

        if self._format == "otlp":
            return payload.otlp()
        if self._format == "json":
            return otlp.to_json(payload.otlp(), payload.signal)
        batch = payload.batch()
        return _arrow(batch) if self._format == "arrow" else _parquet(batch, spark=self._spark)

    async def close(self) -> None: ...


def _arrow(batch: pa.RecordBatch) -> Buffer:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _parquet(batch: pa.RecordBatch, *, spark: bool) -> Buffer:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if spark:
        from penstock.otlp import view

        batch = view(batch)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches([batch]), sink, compression="zstd")
    return memoryview(sink.getvalue())
