"""The format `penstock-buffer`: the records of a queue as rows, for `read` and `readStream`."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from penstock.errors import ConfigError
from penstock.spark.columns import COLUMNS, spark_schema
from penstock.spark.options import FORMAT, BufferOptions
from penstock.spark.reader import BufferReader
from penstock.spark.stream import BufferStreamReader

__all__ = ["BufferSource"]


class BufferSource(DataSource):
    """The records of a queue. `BufferOptions` describes the options.

    | column | type | |
    |---|---|---|
    | sequence | bigint | the batch's number in its shard |
    | index | int | the record's place in its batch |
    | value | binary | the record |
    | ingestion_time | timestamp | when the producer took it |
    | metadata | binary | what the producer said of it |
    | location | string | the batch object's key |
    | shard | int | 0 in a queue without shards |
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._parsed = BufferOptions.parse(self.options)

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return spark_schema(self._parsed.columns)

    def reader(self, schema: StructType) -> BufferReader:
        self._check(schema)
        return BufferReader(self._parsed)

    def streamReader(self, schema: StructType) -> BufferStreamReader:
        self._check(schema)
        return BufferStreamReader(self._parsed)

    def _check(self, schema: StructType) -> None:
        given = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        if given != [(name, COLUMNS[name][0]) for name in self._parsed.columns]:
            raise ConfigError(
                f"{FORMAT} has the schema {self.schema()!r}; choose columns with the option 'columns' and "
                "decode `value` in the query, instead of giving another schema"
            )
