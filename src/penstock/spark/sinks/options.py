"""The options for writing to `penstock-buffer`, parsed and checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.buffer import CompressionType, InvalidInputError, ProducerConfig, Transaction
from penstock.errors import ConfigError
from penstock.limits import BATCH_BYTES_MAX
from penstock.objects import StoreConfig
from penstock.spark.sources.buffer_options import FORMAT, BufferOptions
from penstock.spark.sources.options import STORE_PREFIX, named_options, size_option

_SHARED: Final = ("data_path_prefix", "manifest_path", "path", "sharded", "store")
"""Options that mean the same for reading."""
_OWN: Final = ("batch_bytes", "compression", "txnAppId", "txnVersion")
QUEUE_OPTIONS: Final = (*_SHARED, *_OWN)
_BATCH_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The values of `.option(...)`. Spark ignores the case of names; `_` in them is optional."""

    store: StoreConfig
    """`store` (or `save(path)`) and the backend options `store.*`, which `repr` masks."""
    manifest_path: str = "ingest/manifest"
    data_path_prefix: str = "ingest"
    sharded: bool | None = None
    """None: detect it from the layout of the store when the write starts."""
    compression: CompressionType = CompressionType.NONE
    batch_bytes: int = _BATCH_BYTES
    """The size at which a task starts a new batch object. Readers fetch and hold a whole object."""
    transaction: Transaction | None = None
    """`txnAppId` and `txnVersion`, for batch writes. A stream derives them from its checkpoint."""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SinkOptions:
        """Parse the options.

        Raise a `ConfigError` that names the option, and suggests one if it is unknown.
        """
        backend = {key: value for key, value in given.items() if key.startswith(STORE_PREFIX)}
        plain = named_options(given, QUEUE_OPTIONS, FORMAT, with_store=True)
        shared = {key: value for key, value in plain.items() if key in _SHARED}
        queue = BufferOptions.parse(shared | backend)
        return cls(
            store=queue.store,
            manifest_path=queue.manifest_path,
            data_path_prefix=queue.data_path_prefix,
            sharded=queue.sharded,
            compression=_compression(plain.get("compression", "none")),
            batch_bytes=size_option(plain, "batch_bytes", BATCH_BYTES_MAX // 2) or _BATCH_BYTES,
            transaction=parse_transaction(plain.get("txnAppId"), plain.get("txnVersion")),
        )

    @property
    def producer(self) -> ProducerConfig:
        """The configuration of the queue's producer. For a shard, derive it with `shard_config`."""
        return ProducerConfig(
            store=self.store, manifest_path=self.manifest_path, data_path_prefix=self.data_path_prefix
        )


def _compression(value: str) -> CompressionType:
    try:
        return CompressionType[value.strip().upper()]
    except KeyError:
        raise ConfigError(f"compression: expected none or zstd, found {value!r}") from None


def parse_transaction(app: str | None, version: str | None) -> Transaction | None:
    if app is None and version is None:
        return None
    if app is None or version is None:
        missing = "txnAppId" if app is None else "txnVersion"
        raise ConfigError(f"{missing}: give txnAppId and txnVersion together, or neither")
    try:
        return Transaction(app=app, version=int(version))
    except InvalidInputError as error:
        raise ConfigError(f"txnAppId, txnVersion: {error}") from error
    except ValueError:
        raise ConfigError(f"txnVersion: expected a whole number, found {version!r}") from None


_UNSHARDED = tuple(name for name in QUEUE_OPTIONS if name != "sharded")
"""The options for the queue of a database, which has no shards, to keep the order of its records."""


def split_options(
    given: Mapping[str, str], own: Sequence[str], format_name: str
) -> tuple[dict[str, str], SinkOptions]:
    """Return the options of the format itself by their canonical names, and the options of the queue.

    Raise a `ConfigError` that names the option, and suggests one if it is unknown.
    """
    plain = named_options(given, (*_UNSHARDED, *own), format_name, with_store=True)
    queue = {key: value for key, value in given.items() if key.startswith(STORE_PREFIX)}
    queue |= {name: value for name, value in plain.items() if name not in own}
    return {name: value for name, value in plain.items() if name in own}, SinkOptions.parse(queue)


def listed(text: str | None) -> tuple[str, ...] | None:
    """Return the comma-separated names in `text`, or None for None."""
    if text is None:
        return None
    return tuple(name for part in text.split(",") if (name := part.strip()))


def name_of(option: str, text: str) -> str:
    """Return the column name in `text`. Raise `ConfigError` if it is empty."""
    if not text.strip():
        raise ConfigError(f"{option}: expected the name of a column, found nothing")
    return text.strip()
