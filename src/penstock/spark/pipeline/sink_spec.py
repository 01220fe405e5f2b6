"""The sinks of a pipeline as its YAML file describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from penstock.errors import ConfigError
from penstock.spark.sinks.series import SeriesColumns
from penstock.spark.sinks.vectors import VectorColumns
from penstock.units import SizeLike

KINDS: Final = ("delta", "parquet", "iceberg", "buffer", "timeseries", "vector")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSpec:
    """A merge that keeps one row per key. Columns in `add` are summed; others take the newest value."""

    keys: tuple[str, ...]
    add: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.keys or not self.add:
            raise ConfigError("merge needs the columns that identify rows (keys) and those to add up (add)")
        if both := set(self.keys) & set(self.add):
            raise ConfigError(f"merge: {', '.join(sorted(both))} cannot be both a key and added up")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSinkSpec:
    path: str
    partition_by: tuple[str, ...] = ()
    compression: str = "snappy"
    target_file_size: SizeLike = "128MiB"
    store_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    merge: MergeSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSinkSpec:
    path: str
    partition_by: tuple[str, ...] = ()
    compression: str = "snappy"
    target_file_size: SizeLike = "128MiB"
    store_options: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergSinkSpec:
    table: str
    catalog: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The properties for pyiceberg's `load_catalog`: `type`, `uri`, `warehouse`, credentials."""
    partition_by: tuple[str, ...] = ()
    compression: str = "snappy"
    target_file_size: SizeLike = "128MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSinkSpec:
    """Another queue. The transform must return a column `value` and may return `metadata`."""

    store: str
    manifest_path: str = "ingest/manifest"
    data_path_prefix: str = "ingest"
    store_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    compression: Literal["none", "zstd"] = "none"
    batch_size: SizeLike = "16MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeriesSinkSpec(BufferSinkSpec):
    """The queue of a time series database. Each row is a point of a series."""

    metric: str | None = None
    """The name of the metric if all rows have the same one; otherwise set `metric_column`."""
    metric_column: str | None = None
    value: str = "value"
    timestamp: str = "timestamp"
    labels: tuple[str, ...] | None = None
    """The label columns. By default, all other columns are labels."""
    kind: Literal["gauge", "counter"] = "gauge"
    unit: str = ""
    description: str = ""
    on_null: Literal["fail", "drop"] = "fail"
    """The handling of rows without a value or a time: raise an error, or drop and count them."""

    def __post_init__(self) -> None:
        _ = self.columns

    @property
    def columns(self) -> SeriesColumns:
        """The role of each column. Raises `ConfigError` for roles that no row can satisfy."""
        return SeriesColumns(
            metric=self.metric,
            metric_column=self.metric_column,
            value=self.value,
            timestamp=self.timestamp,
            labels=self.labels,
            kind=self.kind,
            unit=self.unit,
            description=self.description,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSinkSpec(BufferSinkSpec):
    """The queue of a collection of vectors. Each row is an upsert or a deletion."""

    id: str = "id"
    vector: str = "vector"
    attributes: tuple[str, ...] | None = None
    """The attribute columns. By default, all other columns are attributes."""
    delete: str | None = None
    """A boolean column. If it is true, the id is deleted."""
    dimensions: int | None = None
    order_by: tuple[str, ...] = ()
    """The columns that order rows with the same id in a micro-batch. Only the last row is kept."""

    def __post_init__(self) -> None:
        if taken := set(self.order_by) & {self.id, self.vector}:
            raise ConfigError(f"order_by: {', '.join(sorted(taken))} cannot decide which row is the last")
        _ = self.columns

    @property
    def columns(self) -> VectorColumns:
        """The role of each column. Raises `ConfigError` for roles that no row can satisfy."""
        return VectorColumns(
            id=self.id,
            vector=self.vector,
            attributes=self.attributes,
            delete=self.delete,
            dimensions=self.dimensions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSpec:
    """One output of exactly one kind, optionally with its own transform.

    That transform reads from `transformed` (the result of the pipeline's transform) or from `input`.
    """

    delta: DeltaSinkSpec | None = None
    parquet: ParquetSinkSpec | None = None
    iceberg: IcebergSinkSpec | None = None
    buffer: BufferSinkSpec | None = None
    timeseries: TimeSeriesSinkSpec | None = None
    vector: VectorSinkSpec | None = None
    transform: str | None = None
    per_batch: bool = False
    """Whether the user accepts groups within single micro-batches, which are partial results."""

    def __post_init__(self) -> None:
        if sum(getattr(self, kind) is not None for kind in KINDS) != 1:
            raise ConfigError(f"a sink is exactly one of {', '.join(KINDS)}")

    @property
    def target(self) -> DeltaSinkSpec | ParquetSinkSpec | IcebergSinkSpec | BufferSinkSpec:
        tables = self.delta or self.parquet or self.iceberg
        target = tables or self.buffer or self.timeseries or self.vector
        assert target is not None
        return target

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def is_queue(self) -> bool:
        """Whether the sink writes to a queue, as database sinks also do."""
        return isinstance(self.target, BufferSinkSpec)

    @property
    def merge(self) -> MergeSpec | None:
        return self.delta.merge if self.delta else None

    @property
    def place(self) -> str:
        """The target as text, for messages."""
        target = self.target
        if isinstance(target, BufferSinkSpec):
            return f"{target.manifest_path} in {target.store}"
        return target.table if isinstance(target, IcebergSinkSpec) else target.path
