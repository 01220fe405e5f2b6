"""The records of a Parquet folder: what was committed, as bytes and names. Pure.

_penstock/schema.json                            the columns, written once
_penstock/apps/<app>.json                        the last micro-batch of a query: decides, by compare-and-swap
_penstock/commits/<app>/<version>-<rows>.json    every micro-batch that is published
_penstock/staging/<file>.staged                  files before they are published
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from pyspark.sql.types import StructType

from penstock.errors import Corrupt, InvalidInput
from penstock.spark.tables.table import DataFile

__all__ = ["APPS", "COMMITS", "SCHEMA", "Decision", "FolderSchema", "app_key", "check_app", "rows_in"]

SCHEMA: Final = "_penstock/schema.json"
APPS: Final = "_penstock/apps"
COMMITS: Final = "_penstock/commits"
_FORMAT: Final = 1
_APP: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=-]{0,199}")
_RECORD: Final = re.compile(r"(\d{20})-(\d+)\.json")


class _Decided(msgspec.Struct, frozen=True):
    format: int
    app: str
    version: int
    rows: int
    files: tuple[str, ...]


class _Columns(msgspec.Struct, frozen=True):
    format: int
    schema: dict[str, object]
    partition_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One micro-batch and the names its files have once they are published."""

    app: str
    version: int
    rows: int
    files: tuple[str, ...]

    @classmethod
    def of(cls, app: str, version: int, files: Sequence[DataFile]) -> Decision:
        rows = sum(file.rows for file in files)
        return cls(app=app, version=version, rows=rows, files=tuple(file.path for file in files))

    @classmethod
    def decode(cls, data: memoryview, key: str) -> Decision:
        """Raises `Corrupt`."""
        try:
            found = msgspec.json.decode(data, type=_Decided)
        except msgspec.DecodeError as error:
            raise Corrupt(
                f"{key} is not a record of a micro-batch ({error}); restore it before going on"
            ) from None
        _check_format(found.format, key)
        return cls(app=found.app, version=found.version, rows=found.rows, files=found.files)

    def encode(self) -> bytes:
        return msgspec.json.encode(
            _Decided(format=_FORMAT, app=self.app, version=self.version, rows=self.rows, files=self.files)
        )

    @property
    def record_key(self) -> str:
        """The object that says that all files are published."""
        return f"{COMMITS}/{self.app}/{self.version:020}-{self.rows}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSchema:
    """The columns of a Parquet folder, which no file in it could tell while there is none."""

    schema: StructType
    partition_by: tuple[str, ...]

    @classmethod
    def decode(cls, data: memoryview) -> FolderSchema:
        """Raises `Corrupt`."""
        try:
            found = msgspec.json.decode(data, type=_Columns)
            _check_format(found.format, SCHEMA)
            return cls(schema=StructType.fromJson(found.schema), partition_by=found.partition_by)
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{SCHEMA} does not hold a schema ({error}); restore it before going on") from None

    def encode(self) -> bytes:
        return msgspec.json.encode(
            _Columns(format=_FORMAT, schema=self.schema.jsonValue(), partition_by=self.partition_by)
        )


def _check_format(number: int, key: str) -> None:
    if number != _FORMAT:
        raise Corrupt(f"{key} has format {number}, and this version reads {_FORMAT}; upgrade Penstock")


def check_app(app: str) -> str:
    """`app` if it can be part of an object's key, as the ids of queries can. Raises `InvalidInput`."""
    if not _APP.fullmatch(app):
        raise InvalidInput(
            f"txnAppId: {app!r} cannot name a file; use up to 200 letters, digits, '-', '_', '.' and '='"
        )
    return app


def app_key(app: str) -> str:
    return f"{APPS}/{check_app(app)}.json"


def rows_in(record_key: str) -> tuple[int, int] | None:
    """(version, rows) as the name of a record says; None for another object."""
    found = _RECORD.fullmatch(record_key.rsplit("/", 1)[-1])
    return (int(found.group(1)), int(found.group(2))) if found else None
