"""The source and the sinks of a pipeline as options for Spark's readers and writers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.blocking import loop_thread
from penstock.buffer import last_version
from penstock.objects import open_store
from penstock.spark.pipeline.decode import SOURCE_COLUMNS
from penstock.spark.pipeline.sink_spec import (
    BufferSinkSpec,
    IcebergSinkSpec,
    SinkSpec,
    TimeSeriesSinkSpec,
    VectorSinkSpec,
)
from penstock.spark.pipeline.spec import BufferSourceSpec, PipelineSpec
from penstock.spark.sinks.options import SinkOptions
from penstock.spark.sources.buffer_options import BufferOptions
from penstock.spark.sources.queues import find_shards
from penstock.spark.tables import open_table
from penstock.spark.tables.spec import TableSpec
from penstock.units import parse_size

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def _prefixed(prefix: str, options: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{name}": value for name, value in options.items()}


def table_of(sink: SinkSpec) -> TableSpec | None:
    """Return the table of a sink, or None for a queue. Raise `ConfigError` for invalid settings."""
    target = sink.target
    if isinstance(target, BufferSinkSpec):
        return None
    options = {
        "compression": target.compression,
        "targetFileBytes": str(parse_size(target.target_file_size)),
        **({"partitionBy": ",".join(target.partition_by)} if target.partition_by else {}),
    }
    if isinstance(target, IcebergSinkSpec):
        options |= {"table": target.table, **_prefixed("catalog", target.catalog)}
        return TableSpec.parse("iceberg", options)
    options |= {"path": target.path, **_prefixed("store", target.store_options)}
    return TableSpec.parse("delta" if sink.delta is not None else "parquet", options)


def _queue_options(target: BufferSinkSpec) -> dict[str, str]:
    return {
        "store": target.store,
        "manifest_path": target.manifest_path,
        "data_path_prefix": target.data_path_prefix,
        "compression": target.compression,
        "batch_bytes": str(parse_size(target.batch_size)),
        **_prefixed("store", target.store_options),
    }


def queue_of(sink: SinkSpec) -> SinkOptions:
    """Return the queue of a sink that is not a table. Raise `ConfigError` for invalid settings."""
    target = sink.target
    assert isinstance(target, BufferSinkSpec)
    return SinkOptions.parse(_queue_options(target))


def check_options(spec: PipelineSpec) -> None:
    """Raise `ConfigError` for values that only the source, a sink or the ledger can check. No I/O."""
    BufferOptions.parse(source_options(spec, SOURCE_COLUMNS))
    for sink in (*spec.outputs.values(), *([spec.letters] if spec.letters is not None else [])):
        if table_of(sink) is None:
            queue_of(sink)
    _ = spec.ledger_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A sink with its options for Spark's writers, built once and written in every micro-batch."""

    sink: SinkSpec
    table: TableSpec | None
    """The table of the sink, or None for a queue."""
    options: Mapping[str, str] = field(repr=False)
    """The options for `df.write`, with secrets in clear text."""

    @classmethod
    def of(cls, sink: SinkSpec) -> Output:
        """Return the output for a sink. Raise `ConfigError` for values that the table or queue rejects."""
        table, target = table_of(sink), sink.target
        if table is not None:
            return cls(sink=sink, table=table, options=table.to_options())
        assert isinstance(target, BufferSinkSpec)
        columns = (
            target.columns.to_options() if isinstance(target, TimeSeriesSinkSpec | VectorSinkSpec) else {}
        )
        return cls(sink=sink, table=None, options=_queue_options(target) | columns)

    @property
    def format(self) -> str:
        return f"penstock-{self.sink.kind}"

    def save(self, frame: DataFrame, app: str, batch: int) -> None:
        """Write the rows as micro-batch `batch` of `app`. Do nothing if the sink has that micro-batch."""
        options = {**self.options, "txnAppId": app, "txnVersion": str(batch)}
        frame.write.format(self.format).mode("append").options(**options).save()

    def last_version(self, app: str) -> int | None:
        """Return the last micro-batch of `app` in the sink, or None. Raise as its table or queue does."""
        if self.table is not None:
            return open_table(self.table).last_version(app)
        return loop_thread().run(_last_in_queue(queue_of(self.sink), app))


async def _last_in_queue(options: SinkOptions, app: str) -> int | None:
    store = open_store(options.store)
    try:
        _, config = (await find_shards(store, options.producer, options.sharded)).of_app(app)
        return await last_version(config, app, store=store)
    finally:
        await store.close()


def source_options(spec: PipelineSpec, columns: tuple[str, ...]) -> dict[str, str]:
    """Return the options for `spark.readStream`."""
    buffer: BufferSourceSpec = spec.source.buffer
    options = {
        "store": buffer.store,
        "manifest_path": buffer.manifest_path,
        "data_path_prefix": buffer.data_path_prefix,
        "columns": ",".join(columns),
        "startingOffsets": buffer.starting,
        "mode": buffer.mode,
        "onGap": spec.on_gap,
        "gc_interval": buffer.gc_interval,
        "gc_grace_period": buffer.gc_grace_period,
        **_prefixed("store", buffer.store_options),
    }
    if buffer.partitions is not None:
        options["partitions"] = str(buffer.partitions)
    if spec.trigger.max_batches is not None:
        options["maxBatchesPerTrigger"] = str(spec.trigger.max_batches)
    if spec.trigger.max_bytes is not None:
        options["maxBytesPerTrigger"] = str(parse_size(spec.trigger.max_bytes))
    return options
