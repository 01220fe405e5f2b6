"""The options of writing to `penstock-buffer`, read and checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.buffer import CompressionType, InvalidInputError, ProducerConfig, Transaction
from penstock.config import unknown_key
from penstock.errors import ConfigError
from penstock.limits import BATCH_BYTES_MAX
from penstock.objects import StoreConfig
from penstock.spark.sources.buffer_options import FORMAT, BufferOptions
from penstock.units import parse_size

_STORE_PREFIX: Final = "store."
_SHARED: Final = ("data_path_prefix", "manifest_path", "path", "sharded", "store")
"""Options that mean the same for reading."""
_OWN: Final = ("batch_bytes", "compression", "txnAppId", "txnVersion")
_SPARKS: Final = frozenset({"checkpointlocation"})
"""What Spark keeps for itself and shows to the sink all the same."""
QUEUE_OPTIONS: Final = (*_SHARED, *_OWN)
_FOLDED: Final = {name.replace("_", "").lower(): name for name in QUEUE_OPTIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """What `.option(...)` said. Spark ignores the case of names; `_` in them is optional."""

    store: StoreConfig
    """`store` (or `save(path)`), with `store.*` for the backend's own settings; never shown in clear."""
    manifest_path: str = "ingest/manifest"
    data_path_prefix: str = "ingest"
    sharded: bool | None = None
    """None: as the store's layout says when the write starts."""
    compression: CompressionType = CompressionType.NONE
    batch_bytes: int = 16 << 20
    """The size at which a task starts another batch object: what readers fetch and hold at once."""
    transaction: Transaction | None = None
    """`txnAppId` and `txnVersion`: for batch writes. A stream has its own, from its checkpoint."""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SinkOptions:
        """Raises `ConfigError` naming the option, and the nearest one if it is unknown."""
        backend = {key: value for key, value in given.items() if key.startswith(_STORE_PREFIX)}
        named = {key: value for key, value in given.items() if key.lower() not in _SPARKS | backend.keys()}
        plain = {_known(key): value for key, value in named.items()}
        shared = {key: value for key, value in plain.items() if key in _SHARED}
        queue = BufferOptions.parse(shared | backend)
        return cls(
            store=queue.store,
            manifest_path=queue.manifest_path,
            data_path_prefix=queue.data_path_prefix,
            sharded=queue.sharded,
            compression=_compression(plain.get("compression", "none")),
            batch_bytes=_batch_bytes(plain.get("batch_bytes", "16MiB")),
            transaction=parse_transaction(plain.get("txnAppId"), plain.get("txnVersion")),
        )

    @property
    def producer(self) -> ProducerConfig:
        """The queue; a sharded one derives a config for each shard."""
        return ProducerConfig(
            store=self.store, manifest_path=self.manifest_path, data_path_prefix=self.data_path_prefix
        )


def _known(key: str) -> str:
    name = _FOLDED.get(key.replace("_", "").lower())
    if name is None:
        raise unknown_key(f"{FORMAT}: option {key!r}", key, [*QUEUE_OPTIONS, _STORE_PREFIX + "*"])
    return name


def _compression(value: str) -> CompressionType:
    try:
        return CompressionType[value.strip().upper()]
    except KeyError:
        raise ConfigError(f"compression: expected none or zstd, found {value!r}") from None


def _batch_bytes(value: str) -> int:
    text = value.strip()
    size = parse_size(int(text) if text.isdigit() else text)
    if not 1 <= size <= BATCH_BYTES_MAX // 2:
        raise ConfigError(f"batch_bytes: expected 1 to {BATCH_BYTES_MAX // 2} bytes, found {value!r}")
    return size


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
"""A database is fed from one queue, in its order."""


def split_options(
    given: Mapping[str, str], own: Sequence[str], format_name: str
) -> tuple[dict[str, str], SinkOptions]:
    """The format's own options by their names, and the queue's.

    Raises `ConfigError` naming the option, and the nearest one if it is unknown.
    """
    folded = {name.replace("_", "").lower(): name for name in (*_UNSHARDED, *own)}
    mine: dict[str, str] = {}
    queue: dict[str, str] = {}
    for key, value in given.items():
        if key.startswith(_STORE_PREFIX) or key.lower() in _SPARKS:
            queue[key] = value
            continue
        name = folded.get(key.replace("_", "").lower())
        if name is None:
            raise unknown_key(f"{format_name}: option {key!r}", key, [*folded.values(), _STORE_PREFIX + "*"])
        (mine if name in own else queue)[name] = value
    return mine, SinkOptions.parse(queue)


def listed(text: str | None) -> tuple[str, ...] | None:
    """Names with commas between them; None if nothing was said."""
    if text is None:
        return None
    return tuple(name for part in text.split(",") if (name := part.strip()))


def name_of(option: str, text: str) -> str:
    """A column's name. Raises `ConfigError` if it is empty."""
    if not text.strip():
        raise ConfigError(f"{option}: expected the name of a column, found nothing")
    return text.strip()
