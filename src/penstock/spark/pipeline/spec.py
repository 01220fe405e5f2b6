"""The specification of a pipeline, read from a YAML file and fully checked.

    name: clicks
    source: {buffer: {store: s3://ingest, manifest_path: clicks/manifest}}
    decode: {format: json, schema: "user string, url string, at timestamp"}
    transform: SELECT user, url, at, date(at) AS day FROM input WHERE user IS NOT NULL
    on_error: dead_letter
    on_gap: fail
    sink: {delta: {path: s3://lake/clicks, partition_by: [day]}}
    trigger: {interval: 5s, max_batches: 200}

`${NAME}` anywhere in a value is replaced by an environment variable, which keeps secrets out of the file.
`${NAME:-text}` falls back to the text if the variable is not set. Relative paths are relative to the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from penstock.config import Setting, build, load_mapping
from penstock.errors import ConfigError
from penstock.objects import StoreAddress, StoreConfig
from penstock.spark.pipeline.sink_spec import (
    BufferSinkSpec,
    IcebergSinkSpec,
    SinkSpec,
)
from penstock.units import DurationLike, SizeLike, parse_duration, parse_size

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_SAMPLE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSourceSpec:
    """A queue in object storage."""

    store: str
    manifest_path: str = "ingest/manifest"
    data_path_prefix: str = "ingest"
    store_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The backend's options, such as `endpoint` and `region`."""
    starting: str = "earliest"
    """`earliest`, `latest` or a sequence. It is used only while there is no checkpoint."""
    mode: Literal["consume", "read"] = "consume"
    """`read`, for replay and backfill, neither takes over the queue nor acknowledges."""
    partitions: int | None = None
    gc_interval: str = "5m"
    gc_grace_period: str = "10m"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """The source of the records."""

    buffer: BufferSourceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpec:
    """The decoding of a record's bytes into columns."""

    format: Literal["raw", "json", "csv", "arrow", "otlp"] = "raw"
    schema: str | None = None
    """The columns in SQL's DDL notation. A record without a `NOT NULL` column is a bad record.

    By default, they are inferred from a sample at the first start of the pipeline."""
    signal: Literal["traces", "metrics", "logs"] | None = None
    """The signal of an otlp pipeline."""
    sample: int = _SAMPLE
    options: Mapping[str, str] = field(default_factory=dict)
    """Spark's options for the format, such as `delimiter` or `timestampFormat`."""

    def __post_init__(self) -> None:
        if self.format == "raw" and (self.schema is not None or self.options):
            raise ConfigError("raw records have no schema and no options; choose json, csv or arrow for that")
        if self.format == "arrow" and self.options:
            raise ConfigError("arrow takes no options")
        if self.format == "otlp" and (self.schema is not None or self.options):
            raise ConfigError("otlp takes no options and no schema; its columns follow from the signal")
        if (self.format == "otlp") != (self.signal is not None):
            raise ConfigError("signal: expected traces, metrics or logs, and only with format otlp")
        if self.sample < 1:
            raise ConfigError(f"sample: expected at least 1 record, found {self.sample}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerSpec:
    """The interval and the size limits of micro-batches."""

    interval: DurationLike = "1s"
    max_batches: int | None = None
    max_bytes: SizeLike | None = None

    def __post_init__(self) -> None:
        if parse_duration(self.interval) < 0.01:
            raise ConfigError(
                f"interval: expected at least 10ms, found {self.interval!r}: every poll costs a request"
            )
        if self.max_batches is not None and self.max_batches < 1:
            raise ConfigError(f"max_batches: expected at least 1, found {self.max_batches}")
        if self.max_bytes is not None:
            parse_size(self.max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """The whole pipeline."""

    name: str
    source: SourceSpec
    decode: DecodeSpec = DecodeSpec()
    transform: str | None = None
    on_error: Literal["dead_letter", "fail", "skip"] = "dead_letter"
    on_gap: Literal["fail", "record"] = "fail"
    sink: SinkSpec | None = None
    sinks: Mapping[str, SinkSpec] = field(default_factory=dict)
    dead_letter: SinkSpec | None = None
    """The table for bad records. By default, a table of the same kind next to the first sink."""
    trigger: TriggerSpec = TriggerSpec()
    checkpoint: str | None = None
    """A folder that outlives the driver. By default, `.penstock/NAME/checkpoint` next to the file."""
    ledger: str | None = None
    """The store of the ledger. By default, a folder next to the checkpoint."""
    ledger_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The backend's options for that store."""
    spark: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The configuration of the Spark session."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"name: expected letters, digits, '_', '-' and '.', at most 100, found {self.name!r}"
            )
        if (self.sink is None) == (not self.sinks):
            raise ConfigError("give either `sink` (one) or `sinks` (several, by name)")
        for name in self.sinks:
            if not _NAME.fullmatch(name) or name == DEAD_LETTERS:
                raise ConfigError(f"sinks: {name!r} cannot be the name of a sink")
        letters = self.dead_letter
        if letters is not None:
            if self.on_error != "dead_letter" and self.on_gap != "record":
                raise ConfigError("dead_letter: this on_error does not use it; leave it out")
            if letters.is_queue or letters.transform is not None or letters.merge is not None:
                raise ConfigError("dead_letter: expected a plain delta, parquet or iceberg table")
        elif self.keeps_letters and (first := next(iter(self.outputs.values()))).is_queue:
            raise ConfigError(
                f"dead_letter: required when the first sink is a {first.kind}; give a table for bad records"
            )
        written = [*self.outputs.values(), *([self.letters] if self.letters is not None else [])]
        _refuse_same_place(self.source.buffer, written)

    @property
    def keeps_letters(self) -> bool:
        """Whether records may go to the dead-letter table."""
        return self.on_error == "dead_letter" or self.on_gap == "record"

    @property
    def outputs(self) -> dict[str, SinkSpec]:
        """Every sink by name. A single sink is named after its kind."""
        return {self.sink.kind: self.sink} if self.sink is not None else dict(self.sinks)

    @property
    def letters(self) -> SinkSpec | None:
        """The dead-letter table, or None if the pipeline does not use one."""
        if not self.keeps_letters:
            return None
        return self.dead_letter or _default_letters(next(iter(self.outputs.values())))

    @property
    def checkpoint_path(self) -> str:
        assert self.checkpoint is not None
        return self.checkpoint

    @property
    def ledger_store(self) -> str:
        """The URL of the ledger's store. Raises `ConfigError` if it cannot be derived from the checkpoint."""
        if self.ledger is not None:
            return self.ledger
        if "://" in self.checkpoint_path and not self.checkpoint_path.startswith("file://"):
            raise ConfigError(
                f"ledger: required, as the checkpoint {self.checkpoint_path} is not a local folder; "
                "give a store, such as s3://bucket/folder"
            )
        return f"{self.checkpoint_path.rstrip('/')}.ledger"

    @property
    def ledger_config(self) -> StoreConfig:
        """The configuration of the ledger's store. Raises as `ledger_store`."""
        return StoreConfig(url=self.ledger_store, options=self.ledger_options)


DEAD_LETTERS: Final = "dead_letters"


def _refuse_same_place(source: BufferSourceSpec, sinks: Sequence[SinkSpec]) -> None:
    """Raise `ConfigError` if a sink writes to the source's queue or two sinks write to the same target.

    The rows of the second sink would count as a repeated micro-batch.
    """
    read_from = ("buffer", _address(source.store), source.manifest_path)
    seen: set[tuple[str, ...]] = set()
    for sink in sinks:
        target = sink.target
        if isinstance(target, IcebergSinkSpec):
            catalog = target.catalog.get("uri") or target.catalog.get("name", "")
            place: tuple[str, ...] = ("iceberg", target.table, catalog)
        elif isinstance(target, BufferSinkSpec):
            place = ("buffer", _address(target.store), target.manifest_path)
        else:
            place = ("table", _address(target.path))
        if place == read_from:
            raise ConfigError(f"a sink writes to the pipeline's own source, {sink.place}: it would never end")
        if place in seen:
            raise ConfigError(
                f"two outputs write to {sink.place}; give each its own target, or combine them in one "
                "transform with UNION ALL"
            )
        seen.add(place)


def _address(place: str) -> str:
    """Return the normalised form of a path or URL."""
    address = StoreAddress.parse(place)
    return os.path.abspath(os.path.expanduser(address.path)) if address.scheme == "file" else address.url


def _default_letters(sink: SinkSpec) -> SinkSpec:
    """Return the default table for bad records: next to `sink`, of the same kind."""
    if sink.delta is not None:
        target = replace(sink.delta, path=_suffixed(sink.delta.path), partition_by=(), merge=None)
        return SinkSpec(delta=target)
    if sink.parquet is not None:
        return SinkSpec(parquet=replace(sink.parquet, path=_suffixed(sink.parquet.path), partition_by=()))
    assert sink.iceberg is not None
    return SinkSpec(iceberg=replace(sink.iceberg, table=_suffixed(sink.iceberg.table), partition_by=()))


def _suffixed(place: str) -> str:
    return f"{place.rstrip('/')}_{DEAD_LETTERS}"


def load_spec(path: str | Path, environ: Mapping[str, str] = os.environ) -> PipelineSpec:
    """Read a pipeline from a YAML file. Raise `ConfigError`, naming the key and the closest known one."""
    file = Path(path)
    return read_spec(load_mapping(file), where=str(file), base=file.absolute().parent, environ=environ)


def read_spec(
    mapping: Mapping[str, Setting],
    *,
    where: str = "pipeline",
    base: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> PipelineSpec:
    """Read a pipeline from a mapping. Relative paths are relative to `base`, or to the working directory."""
    expanded = _expand(mapping, where, environ)
    assert isinstance(expanded, dict)
    spec = build(PipelineSpec, _as_text(expanded, where), where=where)
    return _anchored(spec, base or Path.cwd())


def _expand(value: Setting, where: str, environ: Mapping[str, str]) -> Setting:
    """Replace `${NAME}` and `${NAME:-text}` with environment variables."""
    if isinstance(value, Mapping):
        return {key: _expand(item, f"{where}: {key}", environ) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, where, environ) for item in value]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        found = environ.get(match[1], match[2])
        if found is None:
            raise ConfigError(f"{where}: the environment variable {match[1]} is not set")
        return found

    return _VARIABLE.sub(variable, value)


_TEXT_MAPPINGS: Final = ("catalog", "ledger_options", "options", "spark", "store_options")


def _as_text(mapping: dict[str, Setting], where: str) -> dict[str, Setting]:
    """Convert settings that are passed on as text: the file may have numbers and booleans for them.

    Error messages never contain their values.
    """
    result: dict[str, Setting] = {}
    for key, value in mapping.items():
        if key in _TEXT_MAPPINGS:
            result[key] = _text_mapping(value, f"{where}: {key}")
        elif isinstance(value, dict):
            result[key] = _as_text(value, f"{where}: {key}")
        elif key == "starting" and isinstance(value, int):
            result[key] = str(value)
        else:
            result[key] = value
    return result


def _text_mapping(value: Setting, where: str) -> dict[str, Setting]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a mapping of settings")
    for name, item in value.items():
        if item is None or isinstance(item, Mapping | list):
            raise ConfigError(f"{where}.{name}: expected text (put it in quotes)")
    return {str(name): _plain(item) for name, item in value.items()}


def _plain(value: Setting) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _anchored(spec: PipelineSpec, base: Path) -> PipelineSpec:
    def place(path: str) -> str:
        return path if "://" in path else os.path.normpath(base / Path(path).expanduser())

    def sink(one: SinkSpec | None) -> SinkSpec | None:
        if one is None:
            return None
        if one.delta is not None:
            return replace(one, delta=replace(one.delta, path=place(one.delta.path)))
        if one.parquet is not None:
            return replace(one, parquet=replace(one.parquet, path=place(one.parquet.path)))
        if one.buffer is not None:
            return replace(one, buffer=replace(one.buffer, store=place(one.buffer.store)))
        if one.timeseries is not None:
            return replace(one, timeseries=replace(one.timeseries, store=place(one.timeseries.store)))
        if one.vector is not None:
            return replace(one, vector=replace(one.vector, store=place(one.vector.store)))
        return one

    buffer = spec.source.buffer
    return replace(
        spec,
        source=replace(spec.source, buffer=replace(buffer, store=place(buffer.store))),
        sink=sink(spec.sink),
        sinks={name: done for name, one in spec.sinks.items() if (done := sink(one)) is not None},
        dead_letter=sink(spec.dead_letter),
        checkpoint=place(spec.checkpoint or f".penstock/{spec.name}/checkpoint"),
        ledger=None if spec.ledger is None else place(spec.ledger),
    )
