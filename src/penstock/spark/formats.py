"""The formats that Spark finds by name: sources join a reader and a writer, which tables and databases add.

For each query Spark makes an instance from the options, and requests a reader or a writer from it.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, NotFound, Unsupported
from penstock.quiver import known_schema
from penstock.spark.sinks.buffer import BufferStreamWriter, BufferWriter, check_columns
from penstock.spark.sinks.databases import TimeSeriesFormat, VectorFormat
from penstock.spark.sinks.options import SinkOptions
from penstock.spark.sources.base import check_schema
from penstock.spark.sources.buffer import BufferReader, BufferStreamReader
from penstock.spark.sources.buffer_options import FORMAT, BufferOptions
from penstock.spark.sources.columns import COLUMNS, spark_schema
from penstock.spark.sources.quiver import QuiverReader, QuiverStreamReader, list_segments
from penstock.spark.sources.quiver_columns import spark_struct
from penstock.spark.sources.quiver_options import QUIVER_FORMAT, QuiverOptions
from penstock.spark.sources.topic_columns import TOPIC_COLUMNS, topic_schema
from penstock.spark.sources.topic_options import TOPIC_FORMAT, TopicOptions
from penstock.spark.tables.format import DeltaFormat, IcebergFormat, ParquetFormat

if TYPE_CHECKING:
    from penstock.spark.sinks.topic import TopicStreamWriter, TopicWriter
    from penstock.spark.sinks.topic_options import TopicSinkOptions
    from penstock.spark.sources.topic import TopicReader, TopicStreamReader


class BufferSource(DataSource):
    """The records of a queue. `BufferOptions` describes the options of reading, `SinkOptions` of writing.

    | column | type | |
    |---|---|---|
    | sequence | bigint | the batch's number in its shard |
    | index | int | the record's place in its batch |
    | value | binary | the record |
    | ingestion_time | timestamp | when the producer took it |
    | metadata | binary | the bytes that the producer gave with it |
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
        check_schema(schema, self._parsed.columns, COLUMNS, FORMAT, "decode `value`")
        return BufferReader(self._parsed)

    def streamReader(self, schema: StructType) -> BufferStreamReader:
        check_schema(schema, self._parsed.columns, COLUMNS, FORMAT, "decode `value`")
        return BufferStreamReader(self._parsed)

    def writer(self, schema: StructType, overwrite: bool) -> BufferWriter:
        return BufferWriter(self._sink(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> BufferStreamWriter:
        return BufferStreamWriter(self._sink(schema, overwrite))

    def _sink(self, schema: StructType, overwrite: bool) -> SinkOptions:
        if overwrite:
            raise Unsupported(
                f"{FORMAT} only appends: the records in a queue belong to its consumer. Use mode('append') "
                "or outputMode('append'), and for a result that changes a table"
            )
        check_columns(schema)
        return SinkOptions.parse(self.options)


class QuiverSource(DataSource):
    """Rows of one signal. `QuiverOptions` describes the options.

    The columns are those of the segments, all of them together; spans, logs and metrics have theirs even
    before the first segment. Another schema may be given: columns are found by name.
    """

    @property
    def _parsed(self) -> QuiverOptions:
        return QuiverOptions.parse(self.options)

    @classmethod
    def name(cls) -> str:
        return QUIVER_FORMAT

    def schema(self) -> StructType:
        options = self._parsed
        source = options.open()
        schemas = {}
        for info in list_segments(source):
            if info.slot == options.slot and info.schema_hash not in schemas:
                try:
                    schemas[info.schema_hash] = source.reader(info).schema
                except NotFound:
                    continue
        known = known_schema(options.slot)
        return spark_struct([*([known] if known else []), *schemas.values()], options.slot, view=options.view)

    def reader(self, schema: StructType) -> QuiverReader:
        options = self._parsed
        if options.subscriber is not None:
            raise ConfigError(
                "subscriber: a batch query reads what is there and keeps nothing; use readStream"
            )
        return QuiverReader(options, schema)

    def streamReader(self, schema: StructType) -> QuiverStreamReader:
        return QuiverStreamReader(self._parsed, schema)


class TopicSource(DataSource):
    """Records of topics. `TopicOptions` describes the options of reading, `TopicSinkOptions` of writing.

    | column | type | |
    |---|---|---|
    | topic | string | |
    | seq | bigint | the record's number in its topic |
    | ts | timestamp | when the server took it |
    | node | string | the writer, if it gave its name |
    | tag | string | |
    | data | string | JSON text; null only in a row that describes a gap |
    | meta | string | JSON text |

    To write, the rows have `data` (JSON text, never null) and perhaps `tag`, `node` and `meta`.
    """

    @property
    def _parsed(self) -> TopicOptions:
        return TopicOptions.parse(self.options)

    @classmethod
    def name(cls) -> str:
        return TOPIC_FORMAT

    def schema(self) -> str:
        return topic_schema(self._parsed.columns)

    def reader(self, schema: StructType) -> TopicReader:
        from penstock.spark.sources.topic import TopicReader

        check_schema(schema, self._parsed.columns, TOPIC_COLUMNS, TOPIC_FORMAT, "parse `data`")
        return TopicReader(self._parsed)

    def streamReader(self, schema: StructType) -> TopicStreamReader:
        from penstock.spark.sources.topic import TopicStreamReader

        check_schema(schema, self._parsed.columns, TOPIC_COLUMNS, TOPIC_FORMAT, "parse `data`")
        return TopicStreamReader(self._parsed)

    def writer(self, schema: StructType, overwrite: bool) -> TopicWriter:
        from penstock.spark.sinks.topic import TopicWriter

        return TopicWriter(self._sink(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> TopicStreamWriter:
        from penstock.spark.sinks.topic import TopicStreamWriter

        return TopicStreamWriter(self._sink(schema, overwrite))

    def _sink(self, schema: StructType, overwrite: bool) -> TopicSinkOptions:
        from penstock.spark.sinks.topic import check_topic_columns
        from penstock.spark.sinks.topic_options import TopicSinkOptions

        if overwrite:
            raise Unsupported(
                f"{TOPIC_FORMAT} only appends: a topic is a log. Use mode('append') or outputMode('append'), "
                "and for a result that changes a table"
            )
        check_topic_columns(schema)
        return TopicSinkOptions.parse(self.options)


def installed_formats() -> list[type[DataSource]]:
    """Return all formats whose extras are installed."""
    sources: list[type[DataSource]] = [BufferSource, QuiverSource]
    if importlib.util.find_spec("httpx") is not None:
        sources.append(TopicSource)
    return [*sources, DeltaFormat, ParquetFormat, IcebergFormat, TimeSeriesFormat, VectorFormat]
