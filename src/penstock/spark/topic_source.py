"""The format `penstock-topic`: the records of topics as rows, to read and to write."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, Unsupported
from penstock.spark.topic_columns import TOPIC_COLUMNS, topic_schema
from penstock.spark.topic_options import TOPIC_FORMAT, TopicOptions
from penstock.spark.topic_reader import TopicReader
from penstock.spark.topic_rows import check_topic_columns
from penstock.spark.topic_sink import TopicStreamWriter, TopicWriter
from penstock.spark.topic_sink_options import TopicSinkOptions
from penstock.spark.topic_stream import TopicStreamReader

__all__ = ["TopicSource"]


class TopicSource(DataSource):
    """Records of topics. `TopicOptions` describes the options of reading, `TopicSinkOptions` of writing.

    | column | type | |
    |---|---|---|
    | topic | string | |
    | seq | bigint | the record's number in its topic |
    | ts | timestamp | when the server took it |
    | node | string | who wrote it, if that was said |
    | tag | string | |
    | data | string | JSON text; null only in a row that tells of a gap |
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
        self._check(schema)
        return TopicReader(self._parsed)

    def streamReader(self, schema: StructType) -> TopicStreamReader:
        self._check(schema)
        return TopicStreamReader(self._parsed)

    def writer(self, schema: StructType, overwrite: bool) -> TopicWriter:
        return TopicWriter(self._sink(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> TopicStreamWriter:
        return TopicStreamWriter(self._sink(schema, overwrite))

    def _sink(self, schema: StructType, overwrite: bool) -> TopicSinkOptions:
        if overwrite:
            raise Unsupported(
                f"{TOPIC_FORMAT} only appends: a topic is a log. Use mode('append') or outputMode('append'), "
                "and for a result that changes a table"
            )
        check_topic_columns(schema)
        return TopicSinkOptions.parse(self.options)

    def _check(self, schema: StructType) -> None:
        given = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        if given != [(name, TOPIC_COLUMNS[name][0]) for name in self._parsed.columns]:
            raise ConfigError(
                f"{TOPIC_FORMAT} has the schema {self.schema()!r}; choose columns with the option 'columns' "
                "and take `data` apart in the query, instead of giving another schema"
            )
