"""A pipeline's sinks as Spark's writers take them."""

from __future__ import annotations

from collections.abc import Mapping

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

__all__ = [
    "check_options",
    "last_version_of",
    "queue_of",
    "sink_format",
    "sink_options",
    "source_options",
    "table_of",
]


def _prefixed(prefix: str, options: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{name}": value for name, value in options.items()}


def table_of(sink: SinkSpec) -> TableSpec | None:
    """The table behind a sink; None for a queue. Raises `ConfigError` for what cannot be one."""
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


def sink_format(sink: SinkSpec) -> str:
    return f"penstock-{sink.kind}"


def sink_options(sink: SinkSpec) -> dict[str, str]:
    """What `df.write.options(...)` gets; secrets are in clear there."""
    table = table_of(sink)
    if table is not None:
        return table.to_options()
    target = sink.target
    assert isinstance(target, BufferSinkSpec)
    if isinstance(target, TimeSeriesSinkSpec | VectorSinkSpec):
        return _queue_options(target) | target.columns.to_options()
    return _queue_options(target)


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
    """The queue behind a sink that is no table. Raises `ConfigError` for what cannot be one."""
    target = sink.target
    assert isinstance(target, BufferSinkSpec)
    return SinkOptions.parse(_queue_options(target))


def check_options(spec: PipelineSpec) -> None:
    """Raise `ConfigError` for values that only the source, a sink or the ledger can judge. Asks nobody."""
    BufferOptions.parse(source_options(spec, SOURCE_COLUMNS))
    for sink in (*spec.outputs.values(), *([spec.letters] if spec.letters is not None else [])):
        if table_of(sink) is None:
            queue_of(sink)
    _ = spec.ledger_config


def last_version_of(sink: SinkSpec, app: str) -> int | None:
    """The last micro-batch of `app` that the sink has. Raises as its table or queue does."""
    spec = table_of(sink)
    if spec is not None:
        return open_table(spec).last_version(app)

    async def look(options: SinkOptions) -> int | None:
        store = open_store(options.store)
        try:
            _, config = (await find_shards(store, options.producer, options.sharded)).of_app(app)
            return await last_version(config, app, store=store)
        finally:
            await store.close()

    return loop_thread().run(look(queue_of(sink)))


def source_options(spec: PipelineSpec, columns: tuple[str, ...]) -> dict[str, str]:
    """What `spark.readStream.options(...)` gets."""
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
