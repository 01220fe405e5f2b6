"""The specification of a table: its kind, its location, and how its files are written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from penstock.config import unknown_key
from penstock.errors import ConfigError
from penstock.objects import StoreAddress, StoreConfig
from penstock.units import parse_size

TableKind: TypeAlias = Literal["delta", "iceberg", "parquet"]

KINDS: Final[tuple[TableKind, ...]] = ("delta", "iceberg", "parquet")
COMPRESSIONS: Final = ("gzip", "lz4", "none", "snappy", "zstd")
TARGET_FILE_BYTES: Final = 128 << 20
"""Large enough for fast scans, small enough that a task can hold an open file in memory."""

_STORE: Final = "store."
_CATALOG: Final = "catalog."
_IGNORED: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of a stream that Spark uses itself and also passes on."""
_NAMES: Final = {
    "delta": ("compression", "partitionBy", "path", "targetFileBytes"),
    "iceberg": ("compression", "partitionBy", "table", "targetFileBytes"),
    "parquet": ("compression", "partitionBy", "path", "targetFileBytes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """A table as the options of `df.write` describe it. Raises `ConfigError` for invalid options."""

    kind: TableKind
    path: str = ""
    """Delta and Parquet: the table's folder, as a path or url."""
    table: str = ""
    """Iceberg: `namespace.name` in the catalog."""
    partition_by: tuple[str, ...] = ()
    """Columns whose values partition the files. For an existing table, its own columns or none."""
    options: Mapping[str, str] = field(default_factory=dict)
    """`store.*` and `catalog.*` settings with their prefix; they may hold secrets and are never shown."""
    compression: str = "snappy"
    target_file_bytes: int = TARGET_FILE_BYTES

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind: expected one of {', '.join(KINDS)}, found {self.kind!r}")
        _check_place(self)
        if self.compression not in COMPRESSIONS:
            raise ConfigError(
                f"compression: expected one of {', '.join(COMPRESSIONS)}, found {self.compression!r}"
            )
        if self.target_file_bytes < 1:
            raise ConfigError(f"targetFileBytes: expected at least one byte, found {self.target_file_bytes}")
        if len(set(self.partition_by)) != len(self.partition_by):
            raise ConfigError(f"partitionBy: a column appears twice in {', '.join(self.partition_by)}")

    def __repr__(self) -> str:
        place = f"table={self.table!r}" if self.kind == "iceberg" else f"path={self.path!r}"
        masked = ", ".join(f"{name}=***" for name in sorted(self.options))
        return (
            f"TableSpec(kind={self.kind!r}, {place}, partition_by={self.partition_by!r}, "
            f"options={{{masked}}}, compression={self.compression!r}, "
            f"target_file_bytes={self.target_file_bytes})"
        )

    @classmethod
    def parse(cls, kind: TableKind, given: Mapping[str, str]) -> TableSpec:
        """Parse Spark's options, ignoring the case of names. Raise a `ConfigError` that names the option."""
        plain = {_known(kind, key): value for key, value in given.items() if not _is_passed_on(kind, key)}
        plain.pop("", None)
        return cls(
            kind=kind,
            path=_absolute(plain.get("path", "")),
            table=plain.get("table", ""),
            partition_by=tuple(
                name.strip() for name in plain.get("partitionBy", "").split(",") if name.strip()
            ),
            options={key: value for key, value in given.items() if _is_passed_on(kind, key)},
            compression=plain.get("compression", "snappy").strip().lower(),
            target_file_bytes=_size(plain.get("targetFileBytes")),
        )

    def to_options(self) -> dict[str, str]:
        """Return the options for `df.write`, with secrets in clear text."""
        place = {"table": self.table} if self.kind == "iceberg" else {"path": self.path}
        return {
            **place,
            **({"partitionBy": ",".join(self.partition_by)} if self.partition_by else {}),
            **self.options,
            "compression": self.compression,
            "targetFileBytes": str(self.target_file_bytes),
        }

    @property
    def format(self) -> str:
        """The format name for `df.write.format(...)`."""
        return f"penstock-{self.kind}"

    @property
    def where(self) -> str:
        """The kind and address of the table, for messages."""
        return f"{self.kind} table {self.table or self.path}"

    @property
    def store_options(self) -> dict[str, str]:
        return _without_prefix(_STORE, self.options)

    @property
    def catalog_options(self) -> dict[str, str]:
        return _without_prefix(_CATALOG, self.options)

    @property
    def store(self) -> StoreConfig:
        """The table's folder as an object store."""
        return StoreConfig(url=self.path, options=self.store_options)


def _check_place(spec: TableSpec) -> None:
    if spec.kind == "iceberg":
        if spec.table.count(".") < 1 or not all(spec.table.split(".")):
            raise ConfigError(f"table: expected namespace.name, such as db.events, found {spec.table!r}")
        return
    if not spec.path:
        raise ConfigError("path: give the table's folder, as the path of save() or start()")
    if StoreAddress.parse(spec.path).scheme == "memory":
        raise ConfigError(
            "path: memory:// lives in one process and Spark runs in several; use file:// or s3://"
        )


def _is_passed_on(kind: TableKind, key: str) -> bool:
    return key.startswith((_CATALOG, _STORE) if kind == "iceberg" else _STORE)


def _known(kind: TableKind, key: str) -> str:
    folded = key.replace("_", "").lower()
    if folded in _IGNORED:
        return ""
    for name in _NAMES[kind]:
        if name.lower() == folded:
            return name
    extra = [_STORE + "*"] + ([_CATALOG + "*"] if kind == "iceberg" else []) + ["txnAppId", "txnVersion"]
    raise unknown_key(f"penstock-{kind}: option {key!r}", key, [*_NAMES[kind], *extra])


def _absolute(path: str) -> str:
    """Return a local path as absolute: executors have other working directories."""
    if not path:
        return path
    address = StoreAddress.parse(path)
    return os.path.abspath(os.path.expanduser(address.path)) if address.scheme == "file" else address.url


def _size(text: str | None) -> int:
    if text is None:
        return TARGET_FILE_BYTES
    text = text.strip()
    return parse_size(int(text) if text.isdigit() else text)


def _without_prefix(prefix: str, options: Mapping[str, str]) -> dict[str, str]:
    return {key[len(prefix) :]: value for key, value in options.items() if key.startswith(prefix)}
