"""The options for reading `penstock-buffer`, parsed and checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from penstock.buffer import ConsumerConfig
from penstock.errors import ConfigError, InvalidInput
from penstock.objects import StoreAddress, StoreConfig, normalise_key
from penstock.spark.sources.columns import COLUMNS, GAP_COLUMNS, parse_columns
from penstock.spark.sources.offsets import Position, parse_position
from penstock.spark.sources.options import (
    backend_options,
    choice_option,
    cores,
    count_option,
    flag_option,
    named_options,
    size_option,
)

Mode = Literal["consume", "read"]
OnGap = Literal["fail", "record"]

FORMAT: Final = "penstock-buffer"
_MODES: Final[tuple[Mode, ...]] = ("consume", "read")
BATCHES_PER_TRIGGER: Final = 1000
"""A bound on the driver's memory for a micro-batch over a long backlog, and on the cost of a retry."""

_NAMES: Final = (
    "columns",
    "data_path_prefix",
    "endingOffsets",
    "gc_grace_period",
    "gc_interval",
    "manifest_path",
    "maxBatchesPerTrigger",
    "maxBytesPerTrigger",
    "mode",
    "onGap",
    "partitions",
    "path",
    "sharded",
    "startingOffsets",
    "store",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferOptions:
    """The values of `.option(...)`. Spark ignores the case of names; `_` in them is optional."""

    store: StoreConfig
    """`store` (or `load(path)`) and the backend options `store.*`, which `repr` masks."""
    manifest_path: str = "ingest/manifest"
    data_path_prefix: str = "ingest"
    columns: tuple[str, ...] = tuple(COLUMNS)
    starting: Position = "earliest"
    ending: Position = "latest"
    """Batch queries only: the first sequence that is not read."""
    batches_per_trigger: int = BATCHES_PER_TRIGGER
    bytes_per_trigger: int | None = None
    """The most bytes in a micro-batch. This costs one request per batch object, to find its size."""
    mode: Mode | None = None
    """None: streams consume and batch queries read."""
    on_gap: OnGap = "fail"
    """The handling of an unreadable batch: an error, or a row that describes the gap."""
    sharded: bool | None = None
    """None: detect it from the layout of the store when the query starts."""
    partitions: int | None = None
    """The most tasks of a read. None: two per core of the driver; on a cluster, set it by its cores."""
    gc_interval: str = "5m"
    gc_grace_period: str = "10m"

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> BufferOptions:
        """Parse the options.

        Raise a `ConfigError` that names the option, and suggests one if it is unknown.
        """
        backend = backend_options(given)
        plain = named_options(given, _NAMES, FORMAT, with_store=True)
        if ("store" in plain) == ("path" in plain):
            raise ConfigError(f"{FORMAT}: give the store once, as option 'store' or as the path of load()")
        options = cls(
            store=_store(plain.get("store") or plain.get("path") or "", backend),
            manifest_path=_key("manifest_path", plain.get("manifest_path", "ingest/manifest")),
            data_path_prefix=_key("data_path_prefix", plain.get("data_path_prefix", "ingest")),
            columns=parse_columns(plain["columns"]) if "columns" in plain else tuple(COLUMNS),
            starting=parse_position(plain.get("startingOffsets", "earliest"), "startingOffsets"),
            ending=parse_position(plain.get("endingOffsets", "latest"), "endingOffsets"),
            batches_per_trigger=count_option(plain, "maxBatchesPerTrigger") or BATCHES_PER_TRIGGER,
            bytes_per_trigger=size_option(plain, "maxBytesPerTrigger"),
            mode=choice_option(plain, "mode", _MODES, "read") if "mode" in plain else None,
            on_gap=choice_option(plain, "onGap", ("fail", "record"), "fail"),
            sharded=flag_option(plain, "sharded"),
            partitions=count_option(plain, "partitions"),
            gc_interval=plain.get("gc_interval", "5m"),
            gc_grace_period=plain.get("gc_grace_period", "10m"),
        )
        _ = options.consumer  # checks the durations
        missing = [name for name in GAP_COLUMNS if name not in options.columns]
        if options.records_gaps and missing:
            raise ConfigError(
                f"columns: onGap=record describes gaps in {', '.join(GAP_COLUMNS)}; add {', '.join(missing)}"
            )
        return options

    @property
    def consumer(self) -> ConsumerConfig:
        """The configuration of the queue's consumer, from which each shard's is derived."""
        return ConsumerConfig(
            store=self.store,
            manifest_path=self.manifest_path,
            data_path_prefix=self.data_path_prefix,
            gc_interval=self.gc_interval,
            gc_grace_period=self.gc_grace_period,
            prefetch=0,
        )

    @property
    def records_gaps(self) -> bool:
        return self.on_gap == "record"

    @property
    def tasks(self) -> int:
        """The most tasks of a read."""
        return self.partitions or 2 * cores()


def _store(url: str, backend: Mapping[str, str]) -> StoreConfig:
    address = StoreAddress.parse(url)
    if address.scheme == "memory":
        raise ConfigError(
            "store: memory:// lives in one process and Spark runs in several; use file:// or s3://"
        )
    if address.scheme == "file":
        # Executors have other working directories.
        url = os.path.abspath(os.path.expanduser(address.path))
    return StoreConfig(url=url, options=dict(backend))


def _key(name: str, value: str) -> str:
    try:
        return normalise_key(value)
    except InvalidInput as error:
        raise ConfigError(f"{name}: {error}") from error
