"""The sinks of a pipeline as its YAML file gives them."""

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
    """Keep one row per key: columns in `add` are added up, all others take the newest value."""

    keys: tuple[str, ...]
    add: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.keys or not self.add:
            raise ConfigError("merge needs the columns that tell rows apart (keys) and those to add up (add)")
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
    """What pyiceberg's `load_catalog` takes: `type`, `uri`, `warehouse`, credentials."""
    partition_by: tuple[str, ...] = ()
    compression: str = "snappy"
    target_file_size: SizeLike = "128MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSinkSpec:
    """Another queue. The transform must give a column `value` and may give `metadata`."""

    store: str
    manifest_path: str = "ingest/manifest"
    data_path_prefix: str = "ingest"
    store_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    compression: Literal["none", "zstd"] = "none"
    batch_size: SizeLike = "16MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeriesSinkSpec(BufferSinkSpec):
    """The queue of a time series database: each row is a point of a series."""

    metric: str | None = None
    """The metric's name, if it is one for all rows; else `metric_column`."""
    metric_column: str | None = None
    value: str = "value"
    timestamp: str = "timestamp"
    labels: tuple[str, ...] | None = None
    """Columns that are labels; without it all others are."""
    kind: Literal["gauge", "counter"] = "gauge"
    unit: str = ""
    description: str = ""
    on_null: Literal["fail", "drop"] = "fail"
    """How to treat rows without a value or a time: as an error, or leave them out and count them."""

    def __post_init__(self) -> None:
        _ = self.columns

    @property
    def columns(self) -> SeriesColumns:
        """The role of each column. Raises `ConfigError`."""
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
    """The queue of a collection of vectors: each row is an upsert, or a deletion."""

    id: str = "id"
    vector: str = "vector"
    attributes: tuple[str, ...] | None = None
    """Columns that are attributes; without it all others are."""
    delete: str | None = None
    """A column of flags: where it is true, the id is deleted."""
    dimensions: int | None = None
    order_by: tuple[str, ...] = ()
    """Of rows with one id in one micro-batch, the one that is last by these columns is kept."""

    def __post_init__(self) -> None:
        if taken := set(self.order_by) & {self.id, self.vector}:
            raise ConfigError(f"order_by: {', '.join(sorted(taken))} does not show which row is the last")
        _ = self.columns

    @property
    def columns(self) -> VectorColumns:
        """The role of each column. Raises `ConfigError`."""
        return VectorColumns(
            id=self.id,
            vector=self.vector,
            attributes=self.attributes,
            delete=self.delete,
            dimensions=self.dimensions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSpec:
    """One output: exactly one kind, and perhaps a transform of its own.

    A sink's own transform reads from `transformed` (what the pipeline's transform gives) or from `input`.
    """

    delta: DeltaSinkSpec | None = None
    parquet: ParquetSinkSpec | None = None
    iceberg: IcebergSinkSpec | None = None
    buffer: BufferSinkSpec | None = None
    timeseries: TimeSeriesSinkSpec | None = None
    vector: VectorSinkSpec | None = None
    transform: str | None = None
    per_batch: bool = False
    """Whether rows grouped within one micro-batch, which are partial, are intended."""

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
        """Whether it writes to a queue; a database is fed from one."""
        return isinstance(self.target, BufferSinkSpec)

    @property
    def merge(self) -> MergeSpec | None:
        return self.delta.merge if self.delta else None

    @property
    def place(self) -> str:
        """Its target as text."""
        target = self.target
        if isinstance(target, BufferSinkSpec):
            return f"{target.manifest_path} in {target.store}"
        return target.table if isinstance(target, IcebergSinkSpec) else target.path
