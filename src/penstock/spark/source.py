"""The format `penstock-buffer`: the records of a queue as rows, to read and to write."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, Unsupported
from penstock.spark.columns import COLUMNS, spark_schema
from penstock.spark.options import FORMAT, BufferOptions
from penstock.spark.reader import BufferReader
from penstock.spark.sink import BufferStreamWriter, BufferWriter
from penstock.spark.sink_options import SinkOptions
from penstock.spark.sink_rows import check_columns
from penstock.spark.stream import BufferStreamReader

__all__ = ["BufferSource"]


class BufferSource(DataSource):
    """The records of a queue. `BufferOptions` describes the options of reading, `SinkOptions` of writing.

    | column | type | |
    |---|---|---|
    | sequence | bigint | the batch's number in its shard |
    | index | int | the record's place in its batch |
    | value | binary | the record |
    | ingestion_time | timestamp | when the producer took it |
    | metadata | binary | what the producer said of it |
    | location | string | the batch object's key |
    | shard | int | 0 in a queue without shards |

    To write, the rows have `value` (binary or string, never null) and perhaps `metadata` (binary).
    """

    @property
    def _parsed(self) -> BufferOptions:
        return BufferOptions.parse(self.options)

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

    def writer(self, schema: StructType, overwrite: bool) -> BufferWriter:
        return BufferWriter(self._sink(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> BufferStreamWriter:
        return BufferStreamWriter(self._sink(schema, overwrite))

    def _sink(self, schema: StructType, overwrite: bool) -> SinkOptions:
        if overwrite:
            raise Unsupported(
                f"{FORMAT} only appends: what is in a queue belongs to its consumer. Use mode('append') or "
                "outputMode('append'), and for a result that changes a table"
            )
        check_columns(schema)
        return SinkOptions.parse(self.options)

    def _check(self, schema: StructType) -> None:
        given = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        if given != [(name, COLUMNS[name][0]) for name in self._parsed.columns]:
            raise ConfigError(
                f"{FORMAT} has the schema {self.schema()!r}; choose columns with the option 'columns' and "
                "decode `value` in the query, instead of giving another schema"
            )
