"""The ceiling of Python sources of Spark: memory-mapped Arrow files, passed on unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from penstock.spark.worker import freeze_modules

__all__ = ["ArrowFiles"]


class ArrowFiles(DataSource):
    """A stream with one offset of the files in option `files`, one per line, over `partitions` tasks."""

    @classmethod
    def name(cls) -> str:
        return "bench-arrow"

    def schema(self) -> str:
        return "value binary"

    def streamReader(self, schema: StructType) -> ArrowFilesReader:
        return ArrowFilesReader(self.options["files"].split("\n"), int(self.options["partitions"]))


class _Files(InputPartition):
    def __init__(self, files: Sequence[str]) -> None:
        super().__init__(None)
        self.files = tuple(files)


class ArrowFilesReader(DataSourceStreamReader):
    def __init__(self, files: Sequence[str], partitions: int) -> None:
        self._files = files
        self._partitions = partitions

    def initialOffset(self) -> dict[str, int]:
        return {"done": 0}

    def latestOffset(self) -> dict[str, int]:
        return {"done": 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        count, parts = len(self._files), self._partitions
        return [_Files(self._files[count * n // parts : count * (n + 1) // parts]) for n in range(parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Files)
        for path in partition.files:
            with pa.memory_map(path) as source:
                yield from _batches(source)
        freeze_modules()


def _batches(source: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_file(source)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)
