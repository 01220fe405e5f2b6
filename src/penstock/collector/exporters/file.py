"""One file per bundle, put in place in one step under the bundle's place: delivered again, it is replaced."""

from __future__ import annotations

import asyncio
import os
from typing import Final

import pyarrow as pa

from penstock.clock import SYSTEM_CLOCK
from penstock.collector.dead_letters import make_durably
from penstock.collector.outcome import Outcome, Verdict, delivered, refused
from penstock.collector.payload import Payload
from penstock.collector.settings import FileFormat
from penstock.errors import NotFound, PenstockError
from penstock.ids import SYSTEM_RNG, mint_ulid
from penstock.storage import Buffer, FileSystem, OsFileSystem, write_durably

__all__ = ["FileExporter"]

_SUFFIXES: Final = {"parquet": "parquet", "arrow": "arrow", "otlp": "pb", "json": "json"}
_STAGING: Final = ".staging"


class FileExporter:
    """`<path>/<signal>/<place>.<suffix>`, durable before the bundle is acknowledged."""

    def __init__(
        self, path: str, file_format: FileFormat, *, spark: bool = False, fs: FileSystem | None = None
    ) -> None:
        self._path = os.path.abspath(path)
        self._format = file_format
        self._spark = spark
        self._fs = fs or OsFileSystem()
        self._ready: set[str] = set()

    async def start(self) -> None:
        """Also removes what a crash left half-written."""
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
            # Also what a disk refuses: rights and full disks are mended, the data stays good.
            return Outcome(verdict=Verdict.RETRY, reason=str(error), is_down=True)
        return delivered()

    def _write(self, payload: Payload, data: Buffer) -> None:
        directory = os.path.join(self._path, payload.signal.value)
        for made in (os.path.join(self._path, _STAGING), directory):
            if made not in self._ready:
                make_durably(self._fs, made)
                self._ready.add(made)
        name = payload.place or mint_ulid(SYSTEM_CLOCK.now_ms(), SYSTEM_RNG)
        path = os.path.join(directory, f"{name}.{_SUFFIXES[self._format]}")
        try:
            write_durably(self._fs, path, [data], staging=os.path.join(self._path, _STAGING))
        except NotFound:
            self._ready.clear()  # somebody tidied up; the next try makes the directories anew
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
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _parquet(batch: pa.RecordBatch, *, spark: bool) -> Buffer:
    import pyarrow.parquet as pq

    if spark:
        from penstock.otlp import view

        batch = view(batch)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches([batch]), sink, compression="zstd")
    return memoryview(sink.getvalue())
