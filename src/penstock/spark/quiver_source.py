"""The format `penstock-quiver`: the segments of a telemetry buffer as rows."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, NotFound
from penstock.quiver import known_schema
from penstock.spark.quiver_columns import spark_struct
from penstock.spark.quiver_options import QUIVER_FORMAT, QuiverOptions
from penstock.spark.quiver_reader import QuiverReader, list_segments
from penstock.spark.quiver_stream import QuiverStreamReader

__all__ = ["QuiverSource"]


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
